"""The session that runs one covered call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from mirage_hf.decode import loop
from mirage_hf.decode.cache import CacheBlock, UpdatedTwice, bucket, rings_of
from mirage_hf.decode.call_plan import CallPlan, NotCovered
from mirage_hf.decode.kernels.sampling import Greedy, sampler_of
from mirage_hf.decode.model_fingerprint import ModelFingerprint, take_fingerprint
from mirage_hf.decode.program import NOTHING, Chooser
from mirage_hf.decode.selection import Composed, Selection, UniformNumbers, draw_seed, uniforms
from mirage_hf.errors import SamplingError

if TYPE_CHECKING:
    from mirage_hf.decode.generate import DecodeRunner

DEPTH = 2
"""Steps a GPU may be ahead of the host. One hides the host wherever it needs less than a step's time; the second is for
streamers. A call that ends at a stop token pays for as many dead forwards, so no more than that."""


class Outdated(Exception):
    """Raised before the caller has seen anything of the call: the model is no longer what its plan expects."""

    def __init__(self, found: ModelFingerprint):
        super().__init__()
        self.found = found


def no_token(row: int, step: int) -> SamplingError:
    return SamplingError(
        f"generate: no token can be drawn for row {row} at new token {step}: its scores hold a NaN, or none is above "
        "-inf; look for overflow in the model's dtype (load it in bfloat16 or float32) and for processors that leave "
        "no token, or pass remove_invalid_values=True"
    )


class Session:
    """One call: its block, which may grow, its step, and how far it has got."""

    def __init__(
        self,
        runner: DecodeRunner,
        model: Any,
        plan: CallPlan,
        block: CacheBlock,
        returns_cache: bool,
    ):
        self.runner, self.model, self.plan, self.block = runner, model, plan, block
        self.outgrown: list[CacheBlock] = []
        self.record = loop.Record()
        self.slot = block.capacity
        """The slot the next step writes, if every step so far was alive. Before the prefill's end: any may have been written."""
        self.cached = 0
        """Tokens stock's cache would hold now."""
        self.returns_cache = returns_cache
        self.shown = False
        """Whether the caller has seen anything of the call, so that it cannot begin again."""
        self.seed: int | None = None
        """Of the numbers that the call's choices take, where it samples."""
        self._chooser: Chooser | None = None
        self._advance: Callable[[], None]
        self._prepared_for: CacheBlock | None = None
        self._failed = False
        """Whether a capture has failed."""
        self._confirmed = not plan.expected
        self._announce: Callable[[], None] | None = None

    def confirm(self) -> None:
        """See that the model is what the plan expects. Before, nothing has been done but to replay graphs of kernels, for nobody to see.
        Errors: Outdated."""
        if not self._confirmed and (found := take_fingerprint(self.model)) != self.plan.fingerprint:
            raise Outdated(found)
        self._confirmed = True

    def _begin(self) -> None:
        """Confirm, and let the streamer have the prompt, if it has not had it."""
        self.confirm()
        announce, self._announce = self._announce, None
        if announce is not None:
            self.shown = True
            announce()

    def prefill(
        self, streamer: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]
    ) -> None:
        """Run a prefill by kernels or a captured one, or HF's own, into the block or, where the user's cache holds something, into that one
        and then here; the streamer gets the prompt behind it. A captured one may begin before the host has looked at the model. In which
        order ways are tried is said in prefill.py. Errors: Outdated."""
        model, plan, block = self.model, self.plan, self.block
        text = (
            None if streamer is None else input_ids.cpu()
        )  # here it waits for nothing of the call
        self.graph_key = self.runner.graph_key_of(plan)
        block.begin(plan.prompt.lowest)
        graph = self.runner.prefill_graph(
            model, plan, block, input_ids, self.graph_key, at_once=not self._confirmed
        )
        if graph is None and not self._confirmed:
            self.confirm()
            graph = self.runner.prefill_graph(model, plan, block, input_ids, self.graph_key)
        if graph is not None:
            block.dirty = max(block.dirty, graph.prompt.ids.shape[1])
            graph.run(input_ids, block)
        if graph is not None or self.runner.prefill_by_kernels(
            model, plan, block, input_ids, self.graph_key
        ):
            self.slot = self.cached = input_ids.shape[1]
            block.clear_from(self.slot)
        else:
            into = plan.cache if plan.prompt.past else block.prefill_cache()
            if plan.prompt.past:
                block.reserve(plan.cache)
                self.shown = True
            try:
                outputs = model._prefill(input_ids, config, {**kwargs, "past_key_values": into})
            except (
                UpdatedTwice
            ):  # by layers of ours, so that nothing is in a cache of the user's yet
                raise NotCovered("a forward that runs a layer twice") from None
            self.slot = self.cached = (
                block.take(into) if plan.prompt.past else into.get_seq_length()
            )
            block.clear_from(
                self.slot, rings_full=plan.prompt.lowest is not None
            )  # as `hold` leaves padded rows
            block.set_logits(outputs.logits[:, -1])
            del outputs
        block.control.start(
            length=self.slot,
            position=plan.prompt.position,
            lowest=plan.prompt.lowest,
            budget=plan.budget,
            eos=plan.eos,
            pad=config._pad_token_tensor,
        )
        if text is not None:
            self._announce = partial(streamer.put, text)
        if self._confirmed:
            self._begin()

    def decode(
        self,
        streamer: Any,
        input_ids: Tensor,
        processors: Any,
        criteria: StoppingCriteriaList,
        config: Any,
    ) -> Tensor:
        """Choose tokens until every row has ended; return the sequences."""
        record = self.record
        if config.return_dict_in_generate:
            record.scores = [] if config.output_scores else None
            record.logits = [] if config.output_logits else None
        # as stock does: mixtures of experts have a form for few tokens
        with self.model._optimize_model_for_decode():
            selection = self.plan.selection
            if config.do_sample:
                self.seed = draw_seed()
            if isinstance(selection, str):
                self._begin()
                self.runner.count(f"by the host: {selection}", self.runner.selections)
                return self._with_host(streamer, input_ids, processors, criteria, config)
            if not selection.plain:
                self.runner.count("on the device", self.runner.selections)
            return self._ahead(streamer, input_ids, criteria, selection)

    def _ahead(
        self, streamer: Any, input_ids: Tensor, criteria: StoppingCriteriaList, selection: Selection
    ) -> Tensor:
        depth = self.runner.depth
        if depth is None:
            depth = DEPTH if input_ids.device.type == "cuda" else 0
        if (
            selection.clocks
            and self.returns_cache
            and any(rings_of(self.plan.windows, bucket(self.plan.most_slots)))
        ):
            depth = 0  # where the host says when to stop, steps ahead are alive, and a ring drops keys that the cache would still hold
        rows: list[list[int]] = []
        record = self.record
        chooser = self._choose_by(selection)
        self._set_out()
        if self.plan.fingerprint.rope is not None and not self.step.by_kernels:
            depth = 0  # its module remembers the longest text, which a step that finds no row alive would make longer
        if not selection.plain:
            self.block.own_history().start(input_ids, self.plan.budget)
        no_text = torch.zeros(
            1, 1, dtype=torch.long, device="cpu"
        )  # on the CPU, or the answer would have to be waited for

        def on_tokens(tokens: list[int]) -> bool:
            if NOTHING in tokens:
                raise no_token(tokens.index(NOTHING), len(rows))
            rows.append(tokens)
            if streamer is not None:
                streamer.put(torch.tensor(tokens, device="cpu"))
            return any(bool(c(no_text, None)) for c in selection.clocks)

        def keep() -> None:
            if record.scores is None and record.logits is None:
                return
            raw, scores = (
                self._raw_logits(),
                self._chooser.scores if self._chooser is not None else None,
            )
            if record.logits is not None:
                record.logits.append(raw)
            if (
                record.scores is not None
            ):  # without processors stock's scores and logits are one tensor
                record.scores.append(raw if scores is None else scores.clone())

        def advance() -> Tensor:
            self._enqueue()
            keep()
            return self.block.control.report

        chooser.choose(self.block.control, self.block.logits)
        keep()
        loop.run_ahead(
            advance, self.block.control.report, self.plan.budget - 1, depth, on_tokens, self._begin
        )
        self.cached += len(rows) - 1
        for kept in (record.scores, record.logits):
            if kept is not None:
                del kept[len(rows) :]
        sequences = torch.cat([input_ids, torch.tensor(rows, device=input_ids.device).T], dim=-1)
        for c in criteria:  # for its warning about sequences longer than the model was made for
            if (
                type(c) is MaxLengthCriteria
                and c.max_position_embeddings is not None
                and sequences.shape[1] - 1 > c.max_position_embeddings
            ):
                c(sequences[:, :-1], None)
        return sequences

    def _with_host(
        self,
        streamer: Any,
        input_ids: Tensor,
        processors: Any,
        criteria: StoppingCriteriaList,
        config: Any,
    ) -> Tensor:
        def advance(tokens: Tensor) -> Tensor:
            self.block.control.ids.copy_(tokens[:, None])
            self._enqueue()
            self.cached += 1
            return self.block.logits

        numbers = (
            None
            if self.seed is None
            else UniformNumbers(self.seed, input_ids.shape[0], input_ids.device)
        )
        sampler = sampler_of(self.block)
        self._set_out()

        def choose(scores: Tensor, step: int) -> Tensor:
            if numbers is None:
                return torch.argmax(scores, dim=-1)
            tokens = sampler.sample(scores.float().contiguous(), numbers.at(step)).clone()
            if len(nowhere := (tokens == NOTHING).nonzero()):
                raise no_token(int(nowhere[0]), step)
            return tokens

        self.shown = True
        control = self.block.control
        control.length.add_(1)
        control.position.add_(1)
        return loop.run_with_host(
            advance,
            self.block.logits,
            input_ids,
            processors=processors,
            criteria=criteria,
            pad=config._pad_token_tensor,
            choose=choose,
            streamer=streamer,
            record=self.record,
        )

    def _raw_logits(self) -> Tensor:
        return self.block.logits.to(torch.float32, copy=True)

    def _choose_by(self, selection: Selection) -> Chooser:
        """What chooses on the block of now."""
        if selection.plain:
            self._chooser = Greedy(sampler_of(self.block))
            return self._chooser
        self._chooser = chooser = selection.on(self.block)
        if self.seed is not None:
            steps = min(self.plan.budget, chooser.history.numbers.shape[1])
            chooser.history.set_numbers(uniforms(self.seed, self.block.batch, steps))
        return chooser

    def _set_out(self, again: bool = False) -> None:
        """Take the step that serves the block of now and its chooser."""
        self.step = self.runner.step(
            self.model, self.plan, self.block, self.graph_key, self._chooser, again
        )

    def _enqueue(self) -> None:
        if self.slot >= self.block.capacity:
            self._grow()
        if self._prepared_for is not self.block:
            self._advance = self._prepare()
        self._advance()
        self.slot += 1

    def _prepare(self) -> Callable[[], None]:
        self._prepared_for = self.block
        if not (self.step.by_kernels and self.step.is_captured(self._chooser)):
            self.confirm()  # modules are about to run, and what is captured is kept for the model that the plan expects
        try:
            return self.step.prepare(self._chooser)
        except RuntimeError as error:
            if not self.step.graphs:
                raise
            failed = error.with_traceback(None)  # which keeps the memory of what was tried
        if isinstance(failed, torch.OutOfMemoryError):
            self.block.make_room()
            try:
                return self.step.prepare(self._chooser)
            except RuntimeError as error:
                failed = error.with_traceback(None)
        self.runner.capture_failed(self.step, self._chooser, failed, again=self._failed)
        self._failed, self.step.graphs = True, False
        return self.step.prepare(self._chooser)

    def _grow(self) -> None:
        """Go on in a block of about twice the room. The old one is given back at the end: its report may still be read."""
        old = self.block
        reach = bucket(min(2 * old.capacity, self.plan.most_slots))
        self.block = self.runner.pool.lease(old.batch, reach, old.windows, old.device)
        self.outgrown.append(old)
        self.block.continue_from(old, old.capacity)
        before, selection = self._chooser, self.plan.selection
        if isinstance(selection, Selection):
            self._choose_by(selection)
        if isinstance(before, Composed):
            self.block.own_history().continue_from(before.history)
        self._set_out(again=True)

    def end(self) -> None:
        """Give the memory back; what is still enqueued on it is ordered before its next use."""
        for block in self.outgrown:
            self.runner.pool.give_back(block, block.capacity)
        self.runner.pool.give_back(self.block, min(self.slot + 1, self.block.capacity))
