"""The session of one covered call: its memory, its step, and how far it has got."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_exchange import write_cache
from mirage_hf.decode.call_plan import CallInputs, CallPlan
from mirage_hf.decode.choosing import Chooser
from mirage_hf.decode.draft_schedule import DraftSchedule
from mirage_hf.decode.draft_sources import DraftSource, NoDrafts, Verifier, drafts_of, outcome
from mirage_hf.decode.model_fingerprint import ModelFingerprint, take_fingerprint
from mirage_hf.decode.rings import bucket, rings_of
from mirage_hf.decode.runner import DecodeRunner
from mirage_hf.decode.sampler import Greedy, sampler_of
from mirage_hf.decode.selection import ProcessedChooser, Selection
from mirage_hf.decode.step import Step
from mirage_hf.decode.uniform_numbers import uniforms
from mirage_hf.experts_interface import experts_by_kernels, parts_with_default_experts
from mirage_hf.layers.part import StepShape

#: Steps that a GPU may be ahead of the host. One step hides the host's work if that takes less time
#: than a step. The second is for streamers. A call that ends at a stop token has run as many steps
#: in vain.
DEPTH = 2


class OutdatedPlanError(Exception):
    """The model is not what the plan expects. The caller has seen nothing of the call yet.

    Attributes:
        fingerprint: The model's fingerprint.
    """

    def __init__(self, fingerprint: ModelFingerprint):
        super().__init__()
        self.fingerprint = fingerprint


@dataclass
class CallRecord:
    """The scores and logits that a call keeps besides its tokens, in the order of the tokens.

    Attributes:
        scores: Scores after all processors, None if they are not kept.
        logits: The model's logits, None if they are not kept.
    """

    scores: list[Tensor] | None = None
    logits: list[Tensor] | None = None
    #: Scores and logits of steps whose tokens the host has not read yet. Scores are None if
    #: nothing processed the logits.
    unread: deque[tuple[Tensor | None, Tensor]] = field(default_factory=deque)

    @property
    def is_kept(self) -> bool:
        """Whether anything is kept."""
        return self.scores is not None or self.logits is not None

    def take(self, batch: int, count: int) -> None:
        """Keep the outputs of the first `count` tokens of the oldest step that was not read."""
        if not self.is_kept:
            return
        scores, logits = self.unread.popleft()
        by_token = logits.split(batch)[:count]
        if self.logits is not None:
            self.logits.extend(by_token)
        if self.scores is not None:
            # without processors stock's scores and logits are one tensor
            self.scores.extend(by_token if scores is None else scores.split(batch)[:count])


@dataclass(eq=False)
class SizedStep:
    """A step of a call, for so many tokens of a row.

    Attributes:
        step: The step.
        chooser: What it ends with, None if the host chooses.
        run: Runs it, by a graph if it is captured. None before its first use.
    """

    step: Step
    chooser: Chooser | None
    run: Callable[[], None] | None = None


class Session:
    """One call: its block, which may grow, its step, and how far it has got.

    Attributes:
        runner: What the model keeps between calls.
        inputs: What stock's decoding method would get.
        plan: Plan of the call.
        block: Memory of the call.
        graph_key: What graphs depend on.
        returns_cache: Whether the caller will hold the cache.
        source: Where drafts come from, if the call drafts.
        schedule: What chooses how many tokens a step takes, if the call drafts.
        tokens: The tokens of a row in the present step.
        draft_counts: What the report counts of drafts.
        slot: The slot that the next step writes if every step so far found a row alive, and took
            all drafts. Before the end of the prefill any slot may have been written.
        cached: Tokens that stock's cache would hold now.
        is_prefilled: Whether the block holds the prompt.
        is_seen: Whether the caller has seen anything of the call, so that it cannot begin again.
        seed: Seed of the call's random numbers, if it samples.
        record: What the call keeps besides its tokens.
    """

    def __init__(self, runner: DecodeRunner, inputs: CallInputs, plan: CallPlan, block: CacheBlock):
        self.runner, self.inputs, self.plan, self.block = runner, inputs, plan, block
        self.graph_key = runner.graph_key_of(plan)
        config = inputs.config
        self.returns_cache = bool(config.return_dict_in_generate) or plan.cache_is_users
        self.slot, self.cached = block.capacity, 0
        self.is_prefilled = self.is_seen = False
        self.seed: int | None = None
        self.record = CallRecord()
        if config.return_dict_in_generate:
            self.record.scores = [] if config.output_scores else None
            self.record.logits = [] if config.output_logits else None
        self.source: DraftSource | None = None
        self.schedule: DraftSchedule | None = None
        self.tokens = plan.tokens
        self.draft_counts: Counter[str] = Counter()
        #: By the tokens of a row. A call without drafts has one of each.
        self._choosers: dict[int, Chooser] = {}
        self._steps: dict[int, SizedStep] = {}
        self._has_read_first = False
        self._outgrown: list[CacheBlock] = []
        self._has_failed_capture = False
        #: Gives the model's experts the form that they had before the call.
        self._undo_forms = contextlib.ExitStack()
        self._has_form_for_steps = False
        self.is_confirmed = not plan.expected

    def confirm_model(self) -> None:
        """Check, once, that the model is what the plan expects.

        Before that only graphs were replayed, and the caller has not seen their results.

        Raises:
            OutdatedPlanError: The model is not what the plan expects.
        """
        if not self.is_confirmed:
            fingerprint = take_fingerprint(self.inputs.model)
            if fingerprint != self.plan.fingerprint:
                raise OutdatedPlanError(fingerprint)
        self.is_confirmed = True

    # -- choosing

    def choose_on_device(self, selection: Selection) -> None:
        """Set up what chooses, for the present block."""
        block, plan = self.block, self.plan
        chooser: Chooser = Greedy(sampler_of(block))
        if not selection.is_plain:
            chooser = selection.chooser_on(block)
        if self.seed is not None:
            numbers = block.own_history().numbers
            steps = min(plan.budget, numbers.shape[1])
            block.own_history().set_numbers(uniforms(self.seed, block.batch, steps))
        self._choosers = {plan.tokens: chooser}
        for shape in () if plan.drafts is None else plan.drafts.shapes:
            assert self.source is not None
            source = self.source if shape.tokens > 1 else NoDrafts()
            drafts = drafts_of(block, shape.tokens)
            verifier = Verifier(chooser, source, drafts, block.own_history())
            self._choosers[shape.tokens] = verifier

    def draft_from(self, source: DraftSource | None) -> None:
        """Set where drafts come from, if the call drafts."""
        self.source = source
        if self.plan.drafts is not None and source is not None:
            self.schedule = self.plan.drafts.schedule(source)

    def choose(self) -> None:
        """Enqueue the choice from the prompt's logits, and the first drafts."""
        chooser = self._chooser
        chooser.begin(self.block.control, self.block.logits)
        self._keep_outputs(self.block.logits)
        if isinstance(chooser, Verifier):
            self._first_drafts(chooser)()

    def _first_drafts(self, verifier: Verifier) -> Callable[[], None]:
        """Return what makes the first drafts: a replay if source and steps allow it, or a call."""
        draft = partial(verifier.draft, self.block.control)
        if not verifier.source.captures_first_drafts:
            return draft
        name = "first drafts", *verifier.keys
        if not self.step.has_graph(name):
            self.confirm_model()  # later calls of the expected model replay what is captured here
        try:
            return self.step.replay_of(name, draft)
        except RuntimeError:  # the step drafts the same way, so its own capture fails and counts
            return draft

    @property
    def step(self) -> Step:
        """The present step."""
        return self._steps[self.tokens].step

    @property
    def _chooser(self) -> Chooser:
        """What ends the present step."""
        return self._choosers[self.tokens]

    @property
    def report(self) -> Tensor:
        """What the host reads of the step enqueued last, or of the choice from the prompt."""
        return self._chooser.report(self.block.control)

    def read(self, report: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Return the new tokens of each row in a report, and 1 for each row that goes on."""
        tokens, rows_go_on = self._chooser.read(report)
        self.record.take(self.block.batch, len(tokens[0]))
        # the first report is that of the choice from the prompt
        if self.schedule is not None and self._has_read_first:
            self._note_drafts(self.schedule, *outcome(report))
        self._has_read_first = True
        return tokens, rows_go_on

    def _note_drafts(
        self, schedule: DraftSchedule, tokens: int, rows: list[tuple[int, int]]
    ) -> None:
        """Count a step's drafts, and let later steps depend on them."""
        schedule.observe(tokens, rows)
        self.draft_counts["steps of a row"] += sum(verified > 0 for verified, _ in rows)
        self.draft_counts["drafted"] += sum(verified for verified, _ in rows)
        self.draft_counts["taken"] += sum(taken for _, taken in rows)
        self.draft_counts[f"tokens of a step: {tokens}"] += bool(rows)

    def _keep_outputs(self, of_step: Tensor) -> None:
        """Keep the logits and scores of the choice enqueued last, if the call wants them."""
        if not self.record.is_kept:
            return
        logits = of_step.to(torch.float32, copy=True)
        scores = self._chooser.scores_of(len(logits))
        self.record.unread.append((None if scores is None else scores.clone(), logits))

    # -- steps

    def make_steps(self, *, is_counted: bool = False) -> None:
        """Set up the steps, for the present block and its choosers."""
        plan, block = self.plan, self.block
        shapes = (StepShape(block.batch),) if plan.drafts is None else plan.drafts.shapes
        for shape in reversed(shapes):  # a call counts as one of the steps with most tokens
            chooser = self._choosers.get(shape.tokens)
            drafts = chooser.drafts if isinstance(chooser, Verifier) else None
            step = self.runner.make_step(
                self.inputs.model,
                plan,
                block,
                self.graph_key,
                chooser,
                shape,
                drafts,
                is_counted=is_counted,
            )
            self._steps[shape.tokens] = SizedStep(step, chooser)
            is_counted = True
        if any(each.step.runs_modules for each in self._steps.values()):
            self._prepare_experts()

    def _prepare_experts(self) -> None:
        """Give a model's experts their form for few tokens until the end of the call.

        Stock does the same. It takes milliseconds, so steps that run no modules skip it.
        """
        model, rows = self.inputs.model, self.block.batch * self.plan.tokens
        # transformers 5.4 does not tell which form they have
        may_change = not hasattr(model, "get_experts_implementation")
        if not self._has_form_for_steps and (may_change or parts_with_default_experts(model)):
            self.confirm_model()  # while they still have the form that the plan expects
            self._undo_forms.enter_context(model._optimize_model_for_decode())
            self._undo_forms.enter_context(experts_by_kernels(model, rows))
        self._has_form_for_steps = True

    def depth(self, selection: Selection) -> int:
        """Return how many steps may be ahead of the host."""
        rings = rings_of(self.plan.windows, bucket(self.plan.most_slots))
        # If the host decides when to stop, steps that ran ahead found rows alive. Then a ring drops
        # keys that the cache would still hold.
        if selection.clocks and self.returns_cache and any(rings):
            return 0
        # Steps that ran ahead have moved states on, which the caller will hold.
        if self.returns_cache and self.block.states:
            return 0
        # This RoPE remembers the longest text. A step that finds no row alive makes it longer.
        if self.plan.fingerprint.rope is not None and not self.step.by_kernels:
            return 0
        if self.runner.depth is not None:
            return self.runner.depth
        return DEPTH if self.block.device.type == "cuda" else 0

    def enqueue_step(self) -> None:
        """Enqueue a step, in a larger block if this one is full."""
        is_largest = self.block.capacity >= self.plan.room
        if self.slot + self.plan.tokens > self.block.capacity and not is_largest:
            self._grow()
        if self.schedule is not None:
            self._take_tokens(self.schedule.next())
        present = self._steps[self.tokens]
        if present.run is None:
            present.run = self._prepare_step(present)
        present.run()
        self.slot += self.plan.tokens
        if self.record.is_kept and present.chooser is not None:
            self._keep_outputs(present.step.logits)

    def _take_tokens(self, tokens: int) -> None:
        """Let the next steps take so many tokens of a row."""
        if tokens == self.tokens:
            return
        before = self._chooser
        self.tokens = tokens
        assert isinstance(before, Verifier) and isinstance(self._chooser, Verifier)
        self._chooser.continue_from(before, self.block.control)

    def _prepare_step(self, present: SizedStep) -> Callable[[], None]:
        """Return what runs a step, captured if possible, otherwise called."""
        step, chooser = present.step, present.chooser
        if not (step.by_kernels and step.is_captured(chooser)):
            # modules are about to run, and what is captured is kept for the model the plan expects
            self.confirm_model()
        try:
            return step.prepare(chooser)
        except RuntimeError as error:
            if not step.graphs:
                raise
            failed = error.with_traceback(None)  # a traceback keeps the memory of what was tried
        if isinstance(failed, torch.OutOfMemoryError):
            self.block.make_room()
            try:
                return step.prepare(chooser)
            except RuntimeError as error:
                failed = error.with_traceback(None)
        self.runner.note_failed_capture(step, chooser, failed, is_counted=self._has_failed_capture)
        self._has_failed_capture, step.graphs = True, False
        return step.prepare(chooser)

    def _grow(self) -> None:
        """Continue in a block with about twice the room.

        The old block is given back at the end: its report may still be read.
        """
        old, before = self.block, self._choosers.get(self.tokens)
        # an assistant's memory has room for the whole call, and stays with the call
        capacity = bucket(min(2 * old.capacity, self.plan.room))
        self.block = self.runner.pool.lease(
            old.batch, capacity, old.windows, old.device, old.axes, old.source_slots
        )
        self._outgrown.append(old)
        self.block.take_assistant(old)
        self.block.continue_from(old, old.capacity)
        if isinstance(self.plan.selection, Selection):
            self.choose_on_device(self.plan.selection)
        if isinstance(before, ProcessedChooser | Verifier):
            self.block.own_history().continue_from(before.history)
        if isinstance(before, Verifier):
            drafts_of(self.block, self.tokens).continue_from(before.drafts)
        self.make_steps(is_counted=True)

    # -- the end

    def write_cache(self) -> None:
        """Make the caller's cache what stock would leave there, if the caller will hold it."""
        if self.returns_cache:
            self.is_seen |= self.plan.cache_is_users
            write_cache(self.block, self.plan.cache, self.cached)

    def write_cache_after_error(self) -> None:
        """Make the user's cache what stock would have left there when it raised.

        The cache stays as it was if steps that ran ahead have overwritten keys of a ring. Stock's
        cache would still hold these.
        """
        if not (self.plan.cache_is_users and self.is_prefilled):
            return
        is_ahead = self.slot > self.cached
        if is_ahead and self.block.states:
            return
        if is_ahead and any(ring and self.slot > ring.length for ring in self.block.rings):
            return
        with contextlib.suppress(Exception):  # the caller must see the first error
            write_cache(self.block, self.plan.cache, self.cached)

    def end(self) -> None:
        """Give the memory back. What is enqueued on it runs before its next use."""
        try:
            self._undo_forms.close()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Count the drafts, and give all blocks back."""
        for what, count in self.draft_counts.items():
            self.runner.count(what, self.runner.drafts, by=count)
        for block in self._outgrown:
            self.runner.pool.give_back(block, block.capacity)
        used = min(self.slot + self.plan.tokens, self.block.capacity)
        self.runner.pool.give_back(self.block, used)
