"""Drafts by an assistant model: its own steps, one token after another, on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.call_plan import CallInputs, CallPlan, plan_call
from mirage_hf.decode.choosing import NOTHING, Chooser
from mirage_hf.decode.control import Control, TokenHistory
from mirage_hf.decode.draft_sources import DraftSource, drafts_of
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.not_covered import NotCoveredError
from mirage_hf.decode.rings import bucket
from mirage_hf.decode.routing import cache_name
from mirage_hf.decode.sources import follows_encoder, new_cache
from mirage_hf.decode.step_plans import TracedSteps
from mirage_hf.decode.step_program import StepProgram
from mirage_hf.decode.traced_step import TracedStep
from mirage_hf.errors import described
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.layers.part import StepShape

#: What an assistant takes of the kwargs of the model that it drafts for.
_KWARGS = (
    "attention_mask",
    "position_ids",
    "decoder_attention_mask",
    "decoder_position_ids",
    "logits_to_keep",
    "use_cache",
)

#: An assistant's step.
_Step = StepProgram | TracedStep

#: Fills a block with the keys, values and logits of an assistant's prompt.
Prefill = Callable[[Any, CallInputs, CallPlan, CacheBlock], None]


@dataclass(frozen=True, eq=False)
class Assistant:
    """An assistant model in one call.

    Attributes:
        runner: What the assistant keeps between calls. Its steps run by kernels, or are traced.
        inputs: What stock's decoding method of the assistant would get for the same prompt.
        plan: Plan of such a call.
        most: The most tokens that it drafts at once.
    """

    runner: Any
    inputs: CallInputs
    plan: CallPlan
    most: int

    @property
    def steps(self) -> ModelKernels | TracedSteps:
        """The assistant's steps."""
        return self.runner.model_kernels or self.runner.traced  # type: ignore[no-any-return]

    @property
    def pair(self) -> StepShape | None:
        """The shape of the assistant's step of two tokens, None without one.

        It is None with recurrent states, too, which would take the first token twice.
        """
        batch = len(self.inputs.input_ids)
        of_two = (shape for shape in self.steps.shapes if (shape.batch, shape.tokens) == (batch, 2))
        return None if self.plan.masks.states else next(of_two, None)

    def feeds(self, drafts: int) -> int:
        """Return how many steps the assistant takes for so many drafts."""
        return drafts if self.pair is not None else drafts + 1

    @classmethod
    def of(cls, model: Any, target: CallInputs) -> Assistant:
        """Return the assistant for a call of another model.

        Raises:
            NotCoveredError: The assistant cannot draft by steps of its own.
        """
        runner = getattr(model.__dict__.get("generate"), "runner", None)
        if runner is None or (steps := runner.model_kernels or runner.traced) is None:
            raise NotCoveredError("assisted decoding: the assistant has no steps by kernels")
        batch = StepShape(len(target.input_ids))
        if isinstance(steps, TracedSteps) and steps.drafting_plan(batch) is None:
            raise NotCoveredError(
                f"assisted decoding: the assistant's steps of {batch} take texts of one length; "
                "optimize(draft_tokens=…) makes others"
            )
        vocabularies = [m.config.get_text_config().vocab_size for m in (model, target.model)]
        if model is target.model or len(set(vocabularies)) > 1:
            raise NotCoveredError("assisted decoding: an assistant with another vocabulary")
        most = model.generation_config.num_assistant_tokens
        most = 20 if most is None else int(most)  # stock's own default
        if most < 1:
            raise NotCoveredError("assisted decoding without drafts")
        kwargs = _kwargs_for(model, target)
        inputs = CallInputs(model, target.input_ids, [], target.criteria, target.config, kwargs)
        options = {} if runner.traced is None else runner.traced.call_options
        plan = plan_call(
            inputs,
            cache_is_users=False,
            max_cache_len=runner.max_cache_len,
            **{**options, "uses_rings": False},
        )
        return cls(runner, inputs, plan, most)

    def source_on(self, block: CacheBlock, tokens: int, prefill: Prefill) -> AssistantDrafts:
        """Return the source of drafts for a call on a block that holds the prompt.

        The assistant's memory belongs to that block, as the graphs that use it do.

        Args:
            block: Memory of the call that gets the drafts.
            tokens: Tokens of a row in its steps.
            prefill: Fills memory with the assistant's prompt.

        Raises:
            NotCoveredError: The assistant cannot draft by steps of its own.
        """
        runner, plan = self.runner, self.plan
        graph_key = runner.graph_key_of(plan)
        used = plan.most_slots + tokens  # its last step writes that far
        own: CacheBlock | None = block.assistant
        wanted = graph_key, plan.windows, plan.source_slots
        known = own and (block.assistant_key, own.windows, own.source_slots)
        if own is None or own.capacity < used or known != wanted:
            block.drop_graphs()
            axes = 0 if plan.prompt.offsets is None else len(plan.prompt.offsets)
            own = CacheBlock(
                block.batch, bucket(used), plan.windows, block.device, axes, plan.source_slots
            )
            block.assistant, block.assistant_key = own, graph_key
            block.assistant_steps = ()
        prefill(runner, self.inputs, plan, own)
        own.dirty = used
        steps = [self._step_on(own, graph_key, StepShape(block.batch))]
        if self.pair is not None:
            with contextlib.suppress(NotCoveredError):  # then it takes one step more
                steps.append(self._step_on(own, graph_key, self.pair))
        if list(map(_identity, block.assistant_steps)) == list(map(_identity, steps)):
            steps = [*block.assistant_steps]
        else:
            block.drop_graphs()
            block.assistant_steps = tuple(steps)
        step = steps[0]
        if isinstance(step, TracedStep) and own.states:
            if step.allocate_kept(tokens + 1):
                block.drop_graphs()
            step.keep(1)  # as if the prompt were the one token that the target took
        # the choice of the target's first token moves its own state on likewise
        own.control.length.add_(1)
        own.control.position.add_(1)
        return AssistantDrafts(self.most, *steps)

    def _step_on(self, block: CacheBlock, graph_key: Any, shape: StepShape) -> _Step:
        """Return the assistant's step of a shape over its own block.

        Raises:
            NotCoveredError: It has none.
        """
        drafts = drafts_of(block, shape.tokens)
        step = self.runner.step_by_kernels(self.plan, block, graph_key, shape, drafts)
        if isinstance(step, str):
            raise NotCoveredError(f"assisted decoding: {step}")
        return step  # type: ignore[no-any-return]


def _identity(step: _Step) -> tuple[Any, ...]:
    """Return a key. A graph of one step is right for another step with the same key."""
    return type(step), id(step.drafts)


def _kwargs_for(model: Any, target: CallInputs) -> dict[str, Any]:
    """Return the kwargs of an assistant for a call of another model, as stock makes them.

    An assistant with an encoder runs it on what the other model's encoder was given. A decoder
    alone reads what the other model's encoder gave.

    Raises:
        NotCoveredError: Stock rejects the assistant.
    """
    kwargs = {name: target.kwargs[name] for name in _KWARGS if name in target.kwargs}
    if not model._supports_logits_to_keep():
        kwargs.pop("logits_to_keep", None)
    kwargs[cache_name(model)] = new_cache(model)
    encoder_outputs = target.kwargs.get("encoder_outputs")
    if model.config.is_encoder_decoder:
        kwargs["encoder_outputs"] = _encoded(model, target)
    elif encoder_outputs is not None or follows_encoder(model):
        names = ("encoder_attention_heads", "encoder_ffn_dim", "encoder_layers")
        own, others = (
            [getattr(m.config, name, None) for name in names] for m in (model, target.model)
        )
        if encoder_outputs is None or not follows_encoder(model) or own != others:
            raise NotCoveredError(
                "assisted decoding: an assistant for another encoder, or for none"
            )
        kwargs.pop("decoder_position_ids", None)
        mask = kwargs.pop("decoder_attention_mask", None)
        kwargs["attention_mask"] = torch.ones_like(target.input_ids) if mask is None else mask
        kwargs["encoder_outputs"] = encoder_outputs
    return kwargs


def _encoded(model: Any, target: CallInputs) -> Any:
    """Return what an assistant's own encoder gives for a call of another model.

    Raises:
        NotCoveredError: The encoder cannot run on the other model's input.
    """
    left_out = ("encoder_outputs", "past_key_values", "logits_to_keep")
    kwargs = {name: x for name, x in target.kwargs.items() if name not in left_out}
    given, config = target.inputs_tensor, model.generation_config
    if given is None or not target.model.config.is_encoder_decoder:
        raise NotCoveredError("assisted decoding: an assistant with an encoder, for another kind")
    try:
        given, name, kwargs = model._prepare_model_inputs(given, config.bos_token_id, kwargs)
        made = model._prepare_encoder_decoder_kwargs_for_generation(given, kwargs, name, config)
    except Exception as error:  # stock's encoder may raise anything
        why = f"the assistant's encoder raised {described(error)}"
        raise NotCoveredError(f"assisted decoding: {why}") from None
    return made["encoder_outputs"]


@dataclass(frozen=True, eq=False)
class AssistantDrafts(DraftSource):
    """Drafts what an assistant would choose in place of the model.

    It chooses by the same processors, and samples by the random numbers that the model takes at
    these places. If both have the same probabilities, they choose the same tokens.

    Its cache follows the accepted text, because each step writes from the row's own length on. If
    all drafts are taken, it lacks the keys of the last one. With a step of two tokens, the first
    step is fed the last two tokens of the text. Without such a step, one more feeds the last draft.
    Recurrent states are kept after each step, and those after the accepted tokens are put back.

    Attributes:
        most: The most tokens that are drafted.
        step: A step of the assistant, for one token of each row.
        pair: A step of two tokens, if it has one.
    """

    most: int
    step: _Step
    pair: _Step | None = None

    @property
    def cursor(self) -> Drafts:
        """What the step is fed, and how far each row has got."""
        assert self.step.drafts is not None
        return self.step.drafts

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies the source."""
        return "assistant", self.most, self.pair is not None

    @property
    def resumes(self) -> bool:
        """Whether it can draft again: its cache lacks tokens of steps that it did not see."""
        return False

    @property
    def captures_first_drafts(self) -> bool:
        """Whether first drafts get a graph. In a warm-up, recurrent states would move on."""
        return not (isinstance(self.step, TracedStep) and self.step.keeps_states)

    def draft(
        self, control: Control, drafts: Drafts, history: TokenHistory, chooser: Chooser
    ) -> None:
        """Draft for every row."""
        cursor = self.cursor
        cursor.tokens.copy_(drafts.tokens[:, :1])
        cursor.ahead.copy_(drafts.ahead)
        most = min(self.most, drafts.tokens.shape[1] - 1)
        if isinstance(self.step, TracedStep):
            # of what it was fed, the target took so many tokens; a row that has ended goes back
            self.step.settle(drafts.report[:, -2] + 1)
            self.step.keep(0)
        for number in range(1, most + 1):
            if number == 1 and self.pair is not None:
                self._feed_pair(self.pair, drafts, history)
            else:
                self._feed(number)
            token = chooser.pick(control, cursor, history, cursor.logits).token[:, None]
            token = token.masked_fill(token == NOTHING, 0)
            history.ids.scatter_(1, cursor.text_length(history), token)
            cursor.tokens.copy_(token)
            cursor.ahead.add_(1)
            drafts.tokens[:, number : number + 1].copy_(token)
        if self.pair is None:
            self._feed(most + 1)
        drafts.count.fill_(most)

    def _feed(self, number: int) -> None:
        """Feed the cursor's token, the `number`th since the target's step, and keep the states."""
        self.step.feed()
        if isinstance(self.step, TracedStep):
            self.step.keep(number)

    def _feed_pair(self, step: _Step, drafts: Drafts, history: TokenHistory) -> None:
        """Feed the last two tokens of the text, and leave the logits after the second one."""
        given = step.drafts
        assert given is not None
        before = history.ids.gather(1, drafts.text_length(history) - 2)
        given.tokens.copy_(torch.cat([before, drafts.tokens[:, :1]], dim=1))
        given.ahead.copy_(drafts.ahead - 1)
        step.feed()
        self.cursor.logits.copy_(given.logits.unflatten(0, (-1, 2))[:, 1])
