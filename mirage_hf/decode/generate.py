"""One covered call of `generate`: the path of a token, from top to bottom.

1. `generate` plans the call, or leaves it to stock, and tries it until an attempt succeeds.
2. `attempt` leases memory, and runs the rest on it.
3. `prefill` fills the memory with the prompt's keys, values and logits.
4. `decode_ahead` lets the device choose tokens, and reads them while later steps run. If the call
   drafts, a step verifies several tokens of a row (draft_sources.py). `decode_with_host` lets HF's
   own objects choose, one token at a time.
5. `finish` makes the output.

The other files of this folder are helpers of these functions:

- session.py: one call's memory and step;
- runner.py: what the model keeps between calls;
- step.py and step_program.py: the step that a CUDA graph replays.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
import transformers.generation.utils as stock_generation
from torch import Tensor
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_exchange import (
    held_tokens,
    put_back_unless_covered,
    read_cache,
    reserve,
)
from mirage_hf.decode.cache_layers import UpdatedTwiceError, prefill_cache
from mirage_hf.decode.call_plan import CallInputs, CallPlan, plan_call
from mirage_hf.decode.choosing import NOTHING
from mirage_hf.decode.draft_planning import DraftRequest, plan_drafts
from mirage_hf.decode.draft_sources import DraftPlan, DraftSource
from mirage_hf.decode.model_fingerprint import ModelFingerprint
from mirage_hf.decode.not_covered import NotCoveredError, covered
from mirage_hf.decode.rings import bucket
from mirage_hf.decode.routing import cache_name
from mirage_hf.decode.runner import DecodeRunner
from mirage_hf.decode.sampler import sampler_of
from mirage_hf.decode.selection import Selection
from mirage_hf.decode.session import CallRecord, OutdatedPlanError, Session
from mirage_hf.decode.step_inputs import first_step_position
from mirage_hf.decode.token_reader import RowsOfTokens, TokenReader
from mirage_hf.decode.uniform_numbers import UniformNumbers, draw_seed
from mirage_hf.errors import DistributionError, SamplingError

#: Attempts at a call for which the device's memory may not suffice.
MEMORY_ATTEMPTS = 2
#: Whether this version of transformers streams a token before it asks the stopping criteria.
STREAMS_FIRST = not hasattr(stock_generation, "StopCheck")


@dataclass(frozen=True)
class Finished:
    """The result of a successful attempt.

    Attributes:
        sequences: All tokens, prompt included.
        record: The scores and logits that the call keeps.
    """

    sequences: Tensor
    record: CallRecord


def generate(
    runner: DecodeRunner,
    inputs: CallInputs,
    *,
    streamer: Any,
    cache_is_users: bool,
    drafts: DraftRequest | None = None,
) -> Any:
    """Do what stock's decoding method would do, from prefill to output.

    Args:
        runner: What the model keeps between calls.
        inputs: What stock's decoding method would get.
        streamer: Gets every token, if there is one. Stock's generate has given it the prompt.
        cache_is_users: Whether the user passed the cache.
        drafts: What the call says about drafts, besides its config.

    Returns:
        Sequences, or the output object that the config asks for.

    Raises:
        NotCoveredError: Stock must serve the call. The caller has seen nothing of it yet.
    """
    plan_for = partial(
        _plan_for,
        runner,
        inputs,
        cache_is_users,
        plan_drafts(runner, inputs, drafts or DraftRequest()),
    )
    plan = plan_for(runner.expected_fingerprint(inputs.model))
    runner.forget_replaced_kernels(inputs.model, plan.fingerprint)
    random_state = torch.get_rng_state()
    attempts_left = MEMORY_ATTEMPTS
    while True:
        with runner.counters.attempt() as undo_counts:
            outcome = attempt(runner, inputs, plan, streamer)
        if isinstance(outcome, Finished):
            break
        undo_counts()
        torch.set_rng_state(random_state)  # a call takes one seed, however often it is tried
        if isinstance(outcome, ModelFingerprint):
            runner.last_fingerprint = None
            runner.forget_replaced_kernels(inputs.model, outcome)
            plan = replace(plan_for(outcome), expected=False)
        else:
            runner.pool.drop_idle()
            attempts_left -= 1
            if not attempts_left:
                raise NotCoveredError("out of memory")
    runner.last_fingerprint = plan.fingerprint
    return finish(outcome, plan, inputs, streamer)


def _plan_for(
    runner: DecodeRunner,
    inputs: CallInputs,
    cache_is_users: bool,
    drafts: DraftPlan | None,
    fingerprint: ModelFingerprint | None,
) -> CallPlan:
    """Plan a call: over traced steps if they serve it, otherwise without them.

    Args:
        runner: What the model keeps between calls.
        inputs: What stock's decoding method would get.
        cache_is_users: Whether the user passed the cache.
        drafts: How the call drafts.
        fingerprint: The fingerprint that the model probably has. None takes it.

    Raises:
        NotCoveredError: Stock must serve the call.
    """
    plan_with = partial(
        plan_call,
        inputs,
        cache_is_users=cache_is_users,
        max_cache_len=runner.max_cache_len,
        expected=fingerprint,
    )
    traced = runner.traced
    if traced is None:
        return plan_with(drafts=drafts)
    plan = plan_with(drafts=drafts, **traced.call_options)
    if why := runner.why_not_traced(plan, len(inputs.input_ids)):
        covered(why if plan.only_traced or drafts is not None else None)
        plan = plan_with()
    return plan


def attempt(
    runner: DecodeRunner, inputs: CallInputs, plan: CallPlan, streamer: Any
) -> Finished | ModelFingerprint | None:
    """Prefill and decode on leased memory.

    Returns:
        The result. Or the model's fingerprint, if it is not the plan's. Or None, if the device's
        memory did not suffice. In the last two cases the caller has seen nothing of the call. They
        are not raised, because a traceback would keep the memory of the attempt.
    """
    session = None
    try:
        batch, device = inputs.input_ids.shape[0], inputs.input_ids.device
        axes = 0 if plan.prompt.offsets is None else len(plan.prompt.offsets)
        block = runner.pool.lease(
            batch, bucket(_first_slots(plan)), plan.windows, device, axes, plan.source_slots
        )
        session = Session(runner, inputs, plan, block)
        prefill(session)
        sequences = decode(session, streamer)
        session.write_cache()
        return Finished(sequences, session.record)
    except OutdatedPlanError as error:
        return error.fingerprint
    except NotCoveredError:
        raise
    except BaseException as error:
        is_seen = session is not None and session.is_seen
        if isinstance(error, torch.OutOfMemoryError) and not is_seen:
            return None
        if session is not None:
            session.write_cache_after_error()
        raise
    finally:
        if session is not None:
            session.end()


# -- the prompt ------------------------------------------------------------------------------------


def prefill(session: Session) -> None:
    """Fill the block with the prompt's keys, values and logits, and set the state after it.

    A captured prefill may run before the fingerprint of the model is taken. prefill.py says in
    which order the ways to prefill are tried.
    """
    plan, block, config = session.plan, session.block, session.inputs.config
    block.begin(plan.prompt.lowest)
    position = plan.prompt.position
    if _prefill_by_graph(session) or _prefill_by_kernels(session):
        session.slot = session.cached = session.inputs.input_ids.shape[1]
        block.clear_from(session.slot)
    else:
        position = _prefill_by_forward(session)
    is_replaced = position is not plan.prompt.position
    block.positions_within_slots = not (is_replaced or plan.prompt.has_unusual_positions)
    block.control.start(
        length=session.slot,
        position=position,
        offsets=plan.prompt.offsets,
        lowest=plan.prompt.lowest,
        budget=plan.budget,
        eos=plan.eos,
        pad=config._pad_token_tensor,
    )
    session.is_prefilled = True


def _prefill_by_graph(session: Session) -> bool:
    """Replay a captured prefill, if there is one or one is captured now."""
    runner, block, inputs = session.runner, session.block, session.inputs
    arguments = inputs, session.plan, block, session.graph_key
    graph = runner.captured_prefill(*arguments, unseen_model=not session.is_confirmed)
    if graph is None and not session.is_confirmed:
        session.confirm_model()
        graph = runner.captured_prefill(*arguments)
    if graph is None:
        return False
    block.dirty = max(block.dirty, graph.prompts.ids.shape[1])
    graph.run(inputs.input_ids, block)
    return True


def _prefill_by_kernels(session: Session) -> bool:
    """Call the kernels of prompts, if they serve this one."""
    return session.runner.run_prefill_kernels(
        session.inputs, session.plan, session.block, session.graph_key
    )


def _prefill_by_forward(session: Session) -> Tensor:
    """Run HF's forward into the block, or into the user's cache if it holds something.

    Returns:
        The positions (batch or 1, 1) of the last tokens of the prompt, as steps count on from them.
    """
    plan, block, inputs = session.plan, session.block, session.inputs
    position = plan.prompt.position
    if plan.prompt.past:
        reserve(block, plan.cache)
        session.is_seen = True
    is_stocks = bool(plan.prompt.past) or plan.stock_prefill
    session.is_seen |= plan.stock_prefill and plan.cache_is_users
    cache = plan.cache if is_stocks else prefill_cache(block)
    kwargs = {**inputs.kwargs, cache_name(inputs.model): cache}
    products: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if plan.stock_prefill:
        tokens = inputs.input_ids.numel()
        products = session.runner.prompts.summing_products(session.graph_key, tokens)
    with put_back_unless_covered(cache):
        try:
            with products:
                outputs = inputs.model._prefill(inputs.input_ids, inputs.config, kwargs)
        except UpdatedTwiceError:  # raised by our layers, so no cache of the user's was written yet
            raise NotCoveredError("a forward that runs a layer twice") from None
        if is_stocks and 0 < _known_tokens(cache) < plan.prompt.length:
            raise NotCoveredError("a model that keeps only the last token of a prompt")
        if plan.stock_prefill:
            traced = session.runner.traced
            assert traced is not None
            session.runner.unread.begin(session.graph_key)
            first = first_step_position(
                inputs,
                plan.prompt,
                outputs,
                kwargs,
                gives_positions=traced.gives_positions,
                unread=session.runner.unread,
            )
            if first is None:
                session.runner.prompts.note_usual(session.graph_key)
            else:
                position = first - 1
        if plan.source is not None:
            plan.source.store(block, cache)
    length = plan.prompt.length
    if is_stocks:
        read_cache(block, cache, length)
    session.slot = session.cached = length
    # padded rows fill all of a ring
    block.clear_from(length, rings_full=plan.prompt.lowest is not None)
    block.set_logits(outputs.logits[:, -1])
    return position


def _known_tokens(cache: Any) -> int:
    """Return how many tokens one of stock's caches holds, 0 if that is unknown, as with states."""
    held = held_tokens(cache)
    return held if isinstance(held, int) else 0


# -- the tokens ------------------------------------------------------------------------------------


def decode(session: Session, streamer: Any) -> Tensor:
    """Choose tokens until every row has ended, and return the sequences."""
    runner, selection = session.runner, session.plan.selection
    if session.inputs.config.do_sample:
        session.seed = draw_seed()
    if isinstance(selection, str):
        session.confirm_model()
        runner.count(f"by the host: {selection}", runner.selections)
        return decode_with_host(session, streamer)
    if not selection.is_plain:
        runner.count("on the device", runner.selections)
    return decode_ahead(session, streamer, selection)


def decode_ahead(session: Session, streamer: Any, selection: Selection) -> Tensor:
    """Let the device choose tokens, and read them while later steps run.

    A step gives each row a token, or several if it verifies drafts. How many drafts a step verifies
    depends on how many were taken so far (draft_schedule.py).

    Steps that were enqueued after the last token are dropped. They find no row alive and write
    nothing, unless a clock of the host ended the call.
    """
    plan, input_ids = session.plan, session.inputs.input_ids
    session.draft_from(draft_source(session))
    session.choose_on_device(selection)
    session.make_steps()
    if not selection.is_plain or plan.drafts is not None:
        session.block.own_history().start(input_ids, plan.budget)
    reader, prompt_cached = TokenReader(session.depth(selection)), session.cached
    tokens = RowsOfTokens(len(input_ids), session.inputs.config._pad_token_tensor)

    session.choose()
    reader.post(session.report, 1)
    goes_on = True
    while goes_on:
        # enqueue a step only if the steps under way cannot give all missing tokens
        missing = plan.budget - tokens.complete
        while len(reader.waiting) <= reader.depth and sum(reader.tokens) < missing:
            session.enqueue_step()
            reader.post(session.report, session.tokens)
        session.confirm_model()  # while the GPU works on them
        new, rows_go_on = session.read(reader.take())
        known = tokens.complete
        session.cached = prompt_cached + known
        if any(NOTHING in row for row in new):
            row = next(n for n, each in enumerate(new) if NOTHING in each)
            raise _no_token(row, known + new[row].index(NOTHING), selection.makes_distribution)
        tokens.add(new, rows_go_on)
        session.cached = prompt_cached + tokens.complete - 1
        session.slot = prompt_cached + tokens.longest - 1 + len(reader.waiting) * plan.tokens
        if streamer is not None and tokens.complete > known:
            session.is_seen = True
            burst = tokens.columns(known)
            streamer.put(burst if plan.drafts is not None else burst[:, 0])
        goes_on = 1 in rows_go_on and not _has_run_out(selection)

    sequences = torch.cat([input_ids, tokens.columns().to(input_ids.device)], dim=-1)
    _warn_of_length(session.inputs.criteria, sequences)
    return sequences


def draft_source(session: Session) -> DraftSource | None:
    """Return where the drafts of a call come from. An assistant's prompt is filled in here."""
    plan = session.plan.drafts
    if plan is None or plan.assistant is None:
        return None if plan is None else plan.source
    return plan.assistant.source_on(session.block, plan.shape.tokens, _prefill_assistant)


def _prefill_assistant(
    runner: DecodeRunner, inputs: CallInputs, plan: CallPlan, block: CacheBlock
) -> None:
    prefill(Session(runner, inputs, plan, block))


def decode_with_host(session: Session, streamer: Any) -> Tensor:
    """Let HF's own objects choose on the host, one token at a time.

    The order of calls is that of stock's `GenerationMixin._sample`.
    """
    inputs, record, block = session.inputs, session.record, session.block
    input_ids, criteria = inputs.input_ids, inputs.criteria
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    pad = inputs.config._pad_token_tensor
    pad = pad.to(input_ids.device) if pad is not None else None
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
    numbers = None
    if session.seed is not None:
        numbers = UniformNumbers(session.seed, input_ids.shape[0], input_ids.device)
    session.make_steps()
    session.is_seen = True
    # nothing on the device chooses from the prompt, so nothing has moved the state on
    block.control.length.add_(1)
    block.control.position.add_(1)
    for step in count():
        logits = session.block.logits.to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = inputs.processors(input_ids, logits)
        if record.scores is not None:
            record.scores.append(scores)
        if record.logits is not None:
            record.logits.append(logits)
        if numbers is None:
            tokens = torch.argmax(scores, dim=-1)
        else:
            tokens = _sample(session, scores, numbers.at(step), step)
        if has_eos and pad is not None:  # generate sets a pad token if there is a stop token
            tokens = tokens * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        if streamer is not None and STREAMS_FIRST:
            streamer.put(tokens.cpu())
        kept_scores = tuple(record.scores) if record.scores is not None else None
        unfinished = unfinished & ~criteria(input_ids, kept_scores)
        if streamer is not None and not STREAMS_FIRST:
            streamer.put(tokens.cpu())
        if unfinished.max() == 0:
            return input_ids
        session.block.control.ids.copy_(tokens[:, None])
        session.enqueue_step()
        session.cached += 1
    raise AssertionError("the loop ends when every row has ended")


def finish(result: Finished, plan: CallPlan, inputs: CallInputs, streamer: Any) -> Any:
    """Tell the streamer that the call is over, and make the output that the config asks for."""
    if streamer is not None:
        streamer.end()
    if not inputs.config.return_dict_in_generate:
        return result.sequences
    scores, logits = result.record.scores, result.record.logits
    is_decoder_only = plan.source is None
    output = GenerateDecoderOnlyOutput if is_decoder_only else GenerateEncoderDecoderOutput
    return output(
        sequences=result.sequences,
        scores=None if scores is None else tuple(scores),
        logits=None if logits is None else tuple(logits),
        past_key_values=plan.cache,
    )


# -- helpers ---------------------------------------------------------------------------------------


def _sample(session: Session, scores: Tensor, numbers: Tensor, step: int) -> Tensor:
    """Draw tokens (batch,) from scores (batch, vocab) on the device, and check them."""
    sampler = sampler_of(session.block)
    tokens = sampler.sample(scores.float().contiguous(), numbers).clone()
    rows_without = (tokens == NOTHING).nonzero()
    if len(rows_without):
        raise _no_token(int(rows_without[0]), step, makes_distribution=False)
    return tokens


def _first_slots(plan: CallPlan) -> int:
    """Return the cache slots to lease at first, with room for the drafts of a step."""
    return min(plan.slots + plan.tokens - 1, plan.room)


def _no_token(row: int, step: int, makes_distribution: bool) -> Exception:
    """Return the error for a row whose scores allow no token. Its type is that of stock's error."""
    error = DistributionError if makes_distribution else SamplingError
    return error(
        f"generate: no token can be drawn for row {row} at new token {step}: "
        "its scores hold a NaN, or none is above -inf; look for overflow in the model's dtype "
        "(load it in bfloat16 or float32) and for processors that leave no token, "
        "or pass remove_invalid_values=True"
    )


def _has_run_out(selection: Selection) -> bool:
    """Return whether a clock of the host says that the call's time is over."""
    if not selection.clocks:
        return False
    # clocks do not read the text, and with a text on a GPU the host would wait for their answer
    no_text = torch.zeros(1, 1, dtype=torch.long, device="cpu")
    return any(bool(clock(no_text, None)) for clock in selection.clocks)


def _warn_of_length(criteria: Any, sequences: Tensor) -> None:
    """Let HF's criterion warn about sequences that are longer than the model was made for."""
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            limit = criterion.max_position_embeddings
            if limit is not None and sequences.shape[1] - 1 > limit:
                criterion(sequences[:, :-1], None)
