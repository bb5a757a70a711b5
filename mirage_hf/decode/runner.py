"""What one model's `generate` keeps between calls, and the decisions that depend on it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_pool import CachePool
from mirage_hf.decode.call_plan import CallInputs, CallPlan
from mirage_hf.decode.choosing import Chooser
from mirage_hf.decode.counters import AttemptCounters
from mirage_hf.decode.draft_schedule import Acceptance
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.graphs import why_no_capture
from mirage_hf.decode.model_fingerprint import ModelFingerprint, is_expected_to_hold
from mirage_hf.decode.not_covered import NotCoveredError
from mirage_hf.decode.prefill import PrefillGraph, PrefillRequest, Prefills
from mirage_hf.decode.prompts import PromptShape
from mirage_hf.decode.rings import bucket
from mirage_hf.decode.step import CapturedForward, Step
from mirage_hf.decode.step_inputs import UnreadInputs
from mirage_hf.decode.step_plans import TracedSteps, why_no_traced_step
from mirage_hf.decode.step_program import CHANGED, StepProgram, why_no_step_program
from mirage_hf.decode.traced_step import TracedStep
from mirage_hf.errors import described
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.layers.part import StepShape
from mirage_hf.pipeline.background import BackgroundTuning
from mirage_hf.swap.swap_report import TRACED

#: What captured graphs depend on: `ModelFingerprint.graph_facts` and the masks.
GraphKey = tuple[Any, Any]


class DecodeRunner:
    """What one model's `generate` keeps between calls: cache memory, graphs, and counts.

    Args:
        mode: "graph" replays captured steps where the device can, "eager" calls them.
        max_cache_len: The most cache slots that a call may use, None for no limit.
        depth: Steps that may be ahead of the host, None for the device's usual number.
        model_kernels: Kernels for whole steps of the model.
        made_for: `ModelFingerprint.facts` of the model that the kernels were made for.
        traced: Traced steps of the model, if it has no kernels for whole steps.
        traced_for: `ModelFingerprint.graph_facts` of the model that was traced.

    Attributes:
        counts: Where calls went: "captured" (replayed steps), "called: <why>" (the same loop
            without a graph) and "stock: <why>". If there are kernels for whole steps, also "step:
            all by kernels" or "step: <why the model's own forward runs>". If it was traced, also
            "step: traced" or the reason.
        prefills: Prefills that were replayed ("captured", "captured, by kernels"), or run by
            kernels without a graph ("called, by kernels"). Also the reasons against kernels. All
            other prefills ran HF's forward.
        drafts: What became of drafts: the steps of a row that had some, and how many drafts were
            made and taken. Also how many steps took how many tokens.
        acceptance: What calls that this model drafted for have seen, if its schedule keeps it.
        selections: Where tokens were chosen, for calls that want more than the greatest logit: "on
            the device" or "by the host: <why>".
    """

    def __init__(
        self,
        *,
        mode: str = "graph",
        max_cache_len: int | None = None,
        depth: int | None = None,
        model_kernels: ModelKernels | None = None,
        made_for: object = None,
        traced: TracedSteps | None = None,
        traced_for: object = None,
    ):
        self.model_kernels, self.made_for = model_kernels, made_for
        self.traced, self.traced_for = traced, traced_for
        #: Why there are no kernels any more.
        self.no_kernels = ""
        self.mode, self.max_cache_len, self.depth = mode, max_cache_len, depth
        #: What tunes kernels between calls, or None.
        self.tuning: BackgroundTuning | None = None
        self.pool = CachePool()
        self.counts: Counter[str] = Counter()
        self.prefills: Counter[str] = Counter()
        self.selections: Counter[str] = Counter()
        self.drafts: Counter[str] = Counter()
        self.acceptance = Acceptance()
        self.counters = AttemptCounters()
        self.prompts = Prefills(partial(self.counters.count, self.prefills))
        self.unread = UnreadInputs()
        #: The fingerprint of the last call.
        self.last_fingerprint: ModelFingerprint | None = None
        self._graph_key: GraphKey = (None, None)
        #: Facts of the model whose weights were last compared with the kernels'.
        self._compared_facts: object = None
        #: By chooser: the state of the model in which no step could be captured, and why.
        self._uncapturable: dict[object, tuple[object, str]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of device memory in the cache pool."""
        return self.pool.bytes

    def release(self) -> None:
        """Free the pool and its graphs. Calls under way keep theirs until they end."""
        self.pool.release()

    def use_kernels(self, model_kernels: ModelKernels) -> None:
        """Run other kernels for the same steps. No call is under way.

        Graphs of the present kernels are freed, and later calls capture their own.
        """
        if self.model_kernels is not None:  # else its weights were replaced meanwhile
            self.model_kernels = model_kernels
            self.pool.release()

    def count(self, what: str, where: Counter[str] | None = None, by: int = 1) -> None:
        """Add to `counts`, or to another counter of this object."""
        self.counters.count(self.counts if where is None else where, what, by)

    # -- the model

    def expected_fingerprint(self, model: Any) -> ModelFingerprint | None:
        """Return the last call's fingerprint if a captured prompt may run before a new walk.

        A walk over a model takes milliseconds.
        """
        last = self.last_fingerprint
        if last is None or self.mode == "eager" or why_no_capture(model.device):
            return None
        # the traced steps would not serve a model that the last call found changed
        if self.traced is not None and last.graph_facts != self.traced_for:
            return None
        return last if is_expected_to_hold(last, model) else None

    def forget_replaced_kernels(self, model: Any, fingerprint: ModelFingerprint) -> None:
        """Forget the kernels of a model that has replaced some of their weights.

        The kernels would keep the old weights alive, and could not run any more.
        """
        kernels: ModelKernels | TracedSteps | None = self.model_kernels or self.traced
        facts = fingerprint.facts
        if kernels is None or facts in (self.made_for, self._compared_facts):
            return
        self._compared_facts = facts
        present = set(map(id, model.parameters()))
        replaced = not all(id(weight) in present for weight in kernels.weights)
        if replaced or (isinstance(kernels, TracedSteps) and kernels.reads_replaced_codes()):
            self.model_kernels, self.made_for, self.no_kernels = None, None, CHANGED
            self.traced = self.traced_for = None
            self.pool.drop_idle()

    def graph_key_of(self, plan: CallPlan) -> GraphKey:
        """Return what graphs captured for a call depend on.

        While the key stays equal it is one object, so that comparing it costs nothing.
        """
        key, last = (plan.fingerprint.graph_facts, plan.masks), self._graph_key
        if key == last:
            return last
        self._graph_key = key
        # not the attribute: another thread, which expects another model, may have set it
        return key

    def why_not_traced(self, plan: CallPlan, batch: int) -> str:
        """Return why a call with `batch` rows cannot run the traced steps of the model, or ""."""
        traced = self.traced
        if traced is None:
            return "its steps were not traced"
        if not any(rows == batch for rows, _ in traced.plans):
            return f"no kernels for a batch of {batch}; optimize(batch_sizes=…) makes them"
        if plan.fingerprint.rope is not None:
            return plan.fingerprint.rope.reason
        if plan.room > traced.reach + 1:  # the last step begins with a slot less
            return f"a text longer than {traced.reach + 1:.0f} tokens, which runs other ops"
        if bucket(plan.room) > traced.most_slots:
            return f"a text longer than {traced.most_slots:.0f} tokens, beyond a table of the model"
        return CHANGED if plan.fingerprint.graph_facts != self.traced_for else ""

    def _usable_kernels(self, plan: CallPlan, block: CacheBlock) -> ModelKernels | None:
        """Return the model's kernels if they serve a call."""
        why_not = why_no_step_program(self.model_kernels, plan, block, self.made_for)
        return None if why_not else self.model_kernels

    # -- prefills

    def captured_prefill(
        self,
        inputs: CallInputs,
        plan: CallPlan,
        block: CacheBlock,
        key: GraphKey,
        *,
        unseen_model: bool = False,
    ) -> PrefillGraph | None:
        """Return the captured prefill for a prompt. The second prompt of a bucket captures it.

        Args:
            inputs: What stock's decoding method would get.
            plan: Plan of the call.
            block: Memory of the call.
            key: What graphs depend on.
            unseen_model: Return only one that may be replayed before the fingerprint of the model
                is taken.

        Returns:
            The graph, None if HF's forward or called kernels must run.
        """
        if self.mode == "eager" or why_no_capture(block.device) or plan.fingerprint.no_graph:
            return None
        request = self._prefill_request(inputs, plan, block, key)
        if request is None or not request.shape.is_short:
            return None
        # HF's forward may have a table of positions. A look-up beyond it, for a token that only
        # pads the bucket, would end the process.
        text_config = inputs.model.config.get_text_config(decoder=True)
        positions = getattr(text_config, "max_position_embeddings", None)
        is_within = positions is None or request.shape.tokens <= positions
        return self.prompts.captured(
            request,
            unseen_model=unseen_model,
            may_capture_forward=plan.fingerprint.rope is None and is_within,
        )

    def run_prefill_kernels(
        self, inputs: CallInputs, plan: CallPlan, block: CacheBlock, key: GraphKey
    ) -> bool:
        """Prefill by kernels without a graph. Returns False if HF's forward must run."""
        model_kernels = self.model_kernels
        if model_kernels is None or model_kernels.no_prefill or not kernels_pay(block.device):
            return False
        request = self._prefill_request(inputs, plan, block, key)
        if request is None or block.batch not in model_kernels.rows:
            return False
        # a model that changed may want memory of another shape than its kernels
        if not block.keys and plan.fingerprint.facts != self.made_for:
            return False
        return self.prompts.run_kernels(request, inputs.input_ids)

    def _prefill_request(
        self, inputs: CallInputs, plan: CallPlan, block: CacheBlock, key: GraphKey
    ) -> PrefillRequest | None:
        """Return a request for a prefill, None if no graph and no kernels can run the prompt."""
        tokens, rope = inputs.input_ids.shape[1], plan.fingerprint.rope
        # a cache that the caller will hold is stock's own, with all that it keeps
        shape: PromptShape | None
        if plan.repeats_stock_prefill and not inputs.config.return_dict_in_generate:
            shape = PromptShape.exactly(tokens, block)
        elif plan.prompt_is_whole:
            shape = PromptShape.of(tokens, block, plan.masks)
            kernels = self.model_kernels
            if shape is not None and (kernels is None or kernels.no_prefill):
                shape = shape.for_forward(tokens)
        else:
            return None
        if shape is None or (rope is not None and shape.tokens > rope.reach):
            return None
        usable_kernels = partial(self._usable_kernels, plan, block)
        return PrefillRequest(
            inputs, plan.cache, block, shape, key, self.model_kernels, usable_kernels
        )

    # -- steps

    def make_step(
        self,
        model: Any,
        plan: CallPlan,
        block: CacheBlock,
        key: GraphKey,
        chooser: Chooser | None,
        shape: StepShape,
        drafts: Drafts | None = None,
        *,
        is_counted: bool = False,
    ) -> Step:
        """Return the step of a shape, with graphs if model, device and chooser allow it.

        Args:
            model: The model.
            plan: Plan of the call.
            block: Memory of the call.
            key: What graphs depend on.
            chooser: What chooses on the device, if anything does.
            shape: The shape of the step.
            drafts: State of the drafts, if the call drafts.
            is_counted: Whether the call is in `counts` already.
        """
        found = self.step_by_kernels(plan, block, key, shape, drafts)
        why_forward = found if isinstance(found, str) else ""
        if why_forward and plan.drafts is not None:
            raise NotCoveredError(f"drafts, and steps without kernels: {why_forward}")
        if why_forward and plan.only_traced:
            raise NotCoveredError(why_forward)
        why_called = self._why_called(plan, block, key, chooser, runs_forward=bool(why_forward))
        if not is_counted:
            self.count("captured" if why_called is None else f"called: {why_called}")
            if self.model_kernels is not None or self.traced is not None or self.no_kernels:
                is_traced = isinstance(found, TracedStep)
                self.count(f"step: {why_forward or (TRACED if is_traced else 'all by kernels')}")
        step: Step
        if not isinstance(found, str):
            step = found
        else:
            step = CapturedForward(
                model,
                block,
                plan.masks,
                logits_to_keep=plan.logits_to_keep,
                graphs=False,
                graph_key=key,
            )
        step.graphs = why_called is None
        return step

    def step_by_kernels(
        self,
        plan: CallPlan,
        block: CacheBlock,
        key: GraphKey,
        shape: StepShape,
        drafts: Drafts | None = None,
    ) -> StepProgram | TracedStep | str:
        """Return the step of a shape that kernels run, without graphs, or why there is none.

        Args:
            plan: Plan of the call.
            block: Memory of the call.
            key: What graphs depend on.
            shape: The shape of the step.
            drafts: State of the drafts, if the call drafts.
        """
        model_kernels, traced = self.model_kernels, self.traced
        why_not = self.no_kernels or why_no_step_program(
            model_kernels, plan, block, self.made_for, shape
        )
        if model_kernels is not None and not why_not:
            return StepProgram(
                model_kernels, block, plan.masks, shape, drafts, graphs=False, graph_key=key
            )
        if traced is None:
            return why_not
        why_not = self.why_not_traced(plan, block.batch)
        if why_not := why_not or why_no_traced_step(traced, block, shape, drafts):
            return why_not
        step_plan = traced.plan_for(block, shape, drafts)
        assert step_plan is not None
        return TracedStep(step_plan, block, plan.masks, drafts, graphs=False, graph_key=key)

    def _why_called(
        self,
        plan: CallPlan,
        block: CacheBlock,
        key: GraphKey,
        chooser: Chooser | None,
        *,
        runs_forward: bool,
    ) -> str | None:
        """Return why steps are called and not replayed, or None."""
        if self.mode == "eager":
            return "mode is eager"
        why = why_no_capture(block.device) or plan.fingerprint.no_graph
        if why is None and runs_forward and plan.fingerprint.rope is not None:
            why = plan.fingerprint.rope.reason
        if why is None:
            state, why_failed = self._uncapturable.get(_key_of(chooser), (None, None))
            why = why_failed if state == key else None
        return why

    def note_failed_capture(
        self, step: Step, chooser: Chooser | None, error: Exception, *, is_counted: bool
    ) -> None:
        """Remember that a step cannot be captured, and count the call as one of called steps.

        Args:
            step: The step.
            chooser: What it ends with.
            error: What was raised.
            is_counted: Whether the call is counted so already.
        """
        why = f"capture failed ({described(error)})"
        if not isinstance(error, torch.OutOfMemoryError):  # another time there may be more
            self._uncapturable[_key_of(chooser)] = step.graph_key, why
        if not is_counted:
            self.count(f"called: {why}")
            self.count("captured", by=-1)


def kernels_pay(device: torch.device) -> bool:
    """Return whether the kernels of prompts are worth calling one by one."""
    return device.type == "cuda"


def _key_of(chooser: Chooser | None) -> object:
    return None if chooser is None else chooser.keys
