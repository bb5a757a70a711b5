"""Trace the steps of a model that has no step program: record, find kernels, check, report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from torch import nn

import mirage_hf.decode.kernels.router
import mirage_hf.decode.kernels.short_convolution  # noqa: F401 (they give ops their kernels)
from mirage_hf.decode.cache_exchange import windows_of
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.recorded_inputs import state_names
from mirage_hf.decode.rings import GRAIN, Rings, rings_variants
from mirage_hf.decode.routing import rejected_masks, rejected_model, takes_cache
from mirage_hf.decode.sources import decoder_config, new_cache
from mirage_hf.decode.step_forms import FORMS, Form
from mirage_hf.decode.step_inputs import axes_of_positions, gives_positions
from mirage_hf.decode.step_kernels import StepKernels, bytes_read
from mirage_hf.decode.step_plans import TracedSteps
from mirage_hf.decode.step_recording import record_step
from mirage_hf.decode.trace_check import TraceCheck, UnfitFormError
from mirage_hf.decode.trace_report import report_rows
from mirage_hf.errors import Rejected
from mirage_hf.formats.containers import bytes_of
from mirage_hf.formats.experts import CodedExperts, coded_experts
from mirage_hf.layers.part import StepShape
from mirage_hf.match.matches import CausalMatch, Match, Matches
from mirage_hf.pipeline.resolver import KernelFinder
from mirage_hf.swap.swap_report import STOCK, TRACED, ReportRow
from mirage_hf.trace.coded_linear import coded_linears
from mirage_hf.trace.experts.form import ExpertsForm, form_of
from mirage_hf.trace.record import Recording, TraceError
from mirage_hf.trace.step_plan import StepPlan
from mirage_hf.trace.successive import with_states_in_turn

_NO_CACHE = "its forward takes no cache of keys and values, as transformers' generate makes one"

#: The note of a dry run.
WOULD_BE_TRACED = (
    "steps of generate would be traced: mirage-hf explain says which of their ops become kernels"
)


def trace_steps(
    model: Any,
    rows: Sequence[int],
    finder: KernelFinder,
    progress: Callable[..., Any] | None = None,
    *,
    whole: bool = False,
    draft_tokens: Sequence[int] = (),
) -> tuple[TracedSteps | None, list[ReportRow], str]:
    """Trace a model's steps, and find and check their kernels.

    Args:
        model: The model, whose modules are stock's.
        rows: The numbers of rows.
        finder: Finds the kernels of programs.
        progress: Called with a stage and its detail, as in `optimize`.
        whole: Whether steps are of use only if kernels run all attention and all experts.
        draft_tokens: The numbers of drafts that steps verify.

    Returns:
        The steps, the rows of the report, and its note. If there are no steps, the note says why.
    """
    try:
        tracer = _Tracer(model, finder, progress)
        with _state_put_back(model):
            steps = tracer.trace(rows, whole)
            no_drafts = tracer.trace_drafts(steps, rows, draft_tokens, whole)
    except TraceError as error:
        why = str(error) if takes_cache(model) else _NO_CACHE
        return None, [], f"steps of generate cannot be traced: {why}"
    read, total = steps.bytes_read
    note = (
        "steps of generate run as traced: searched kernels read "
        f"{read / max(total, 1):.0%} of the bytes of their weights; what has no kernel runs as "
        "torch ops, in the same CUDA graph if there is one"
    )
    note = "; ".join([note, *no_drafts])
    return steps, tracer.report_rows, note


class Traces(Enum):
    """Which steps are traced."""

    NONE = auto()
    #: Steps of a model without a step program.
    STEPS = auto()
    #: Steps of a known model, because kernels may then run all of its experts. If they cannot, each
    #: mixture is traced by itself. A whole trace also joins experts with the sums that follow.
    EXPERTS = auto()


def wanted_traces(inner: Any, matches: Matches) -> Traces:
    """Return which steps to trace of the model that generates, if there is one."""
    if inner is None:
        return Traces.NONE
    if _wants_trace(inner, matches.causal):
        return Traces.STEPS
    has_experts = _wants_experts(inner, matches.modules)
    return Traces.EXPERTS if has_experts else Traces.NONE


def _wants_trace(model: Any, causal: CausalMatch | Rejected) -> bool:
    """Return whether steps of a model need a trace, to run by kernels or not by stock."""
    return isinstance(causal, Rejected) or rejected_model(model) is not None


def _wants_experts(model: nn.Module, layers: Iterable[Match]) -> bool:
    """Return whether a whole trace would run a known model's experts by kernels.

    Attention over latents and adapters have kernels of their own, which a trace does not use.
    """
    for layer in layers:
        if layer.adapters or (layer.layout is not None and layer.layout.latent is not None):
            return False
    return any(
        isinstance(form_of(module), ExpertsForm) or isinstance(coded_experts(module), CodedExperts)
        for module in model.modules()
    )


class _Tracer:
    """Traces one model's steps.

    Raises:
        TraceError: Its masks are not known.
    """

    def __init__(
        self,
        model: Any,
        finder: KernelFinder,
        progress: Callable[..., Any] | None,
    ):
        self.model, self.config = model, decoder_config(model)
        self.masks: MaskPlan = _or_raise(MaskPlan.of(self.config))
        self.kernels = StepKernels(model, self.masks, finder, progress)
        self.report_rows: list[ReportRow] = []
        self.paths = {id(p): name for name, p in model.named_parameters()}

    def trace(self, rows: Sequence[int], whole: bool) -> TracedSteps:
        """Trace the steps of these numbers of rows, in the first form that fits the model.

        Raises:
            TraceError: The model cannot be traced, or a traced step differs from stock's. Or it
                should be whole, and some attention or experts have no kernel.
        """
        why = ""  # an error itself would keep the caches of its stack alive
        for form in FORMS:
            self.report_rows.clear()
            try:
                return self._trace_in(form, rows, whole)
            except UnfitFormError as error:
                why = why or str(error)
        raise TraceError(why)

    def _trace_in(self, form: Form, rows: Sequence[int], whole: bool) -> TracedSteps:
        """Trace the steps of these numbers of rows in a form.

        Raises:
            UnfitFormError: It cannot be recorded in this form, or differs from stock's.
            TraceError: As in `trace`.
        """
        model, config, masks = self.model, self.config, self.masks
        windows = _or_raise(windows_of(new_cache(model), config))
        _or_raise(masks.mismatch(windows))
        _or_raise(rejected_masks(model, masks, windows))
        if form.plain_mask and any(window is not None for _, window in masks.windows):
            # the texts of the check are shorter than windows, which the model would have to hide
            raise UnfitFormError("it makes the masks of its windows itself")
        axes, with_positions = axes_of_positions(model), gives_positions(model)
        check = TraceCheck(model, masks, axes, gives_positions=with_positions)
        self.check = check
        plans: dict[tuple[int, Rings], StepPlan] = {}
        uses_rings = True
        for batch in rows:
            for rings, own_windows, sizes in rings_variants(windows):
                if any(rings) and not uses_rings:
                    continue
                # texts of the check are short, and a recording is right for any number of slots
                capacity = sizes[0] if any(rings) else GRAIN
                try:
                    recording = _recorded(model, batch, own_windows, sizes, check=check, form=form)
                    plan = StepPlan(recording, batch)
                    if form != FORMS[0]:  # most forms do not fit, so they are tried without kernels
                        plan.schedule({})
                        check.run(plan, batch, own_windows, capacity)
                    self.kernels.find(plan, whole)
                    check.run(plan, batch, own_windows, capacity)
                except UnfitFormError:
                    if not any(rings):
                        raise
                    # such as a model that takes the order of keys for their order in the text
                    uses_rings = False
                    continue
                plans[batch, rings] = plan
            self._report(plans[batch, (None,) * len(windows)], StepShape(batch))
        unread = coded_linears(model)[1]
        self.report_rows += [
            ReportRow(path, TRACED, STOCK, reason=f"its library's code runs: {reason}")
            for path, reason in unread.items()
        ]
        read, total = bytes_read(plan)
        total += sum(bytes_of(p) for path in unread for p in model.get_submodule(path).parameters())
        if not uses_rings:
            plans = {key: plan for key, plan in plans.items() if not any(key[1])}
        return TracedSteps(
            plans,
            self.kernels.count(plans.values()),
            (read, total),
            axes,
            check.mask_use,
            with_positions,
            uses_rings,
            form,
        )

    def trace_drafts(
        self, steps: TracedSteps, batch_sizes: Sequence[int], drafts: Sequence[int], whole: bool
    ) -> list[str]:
        """Trace the steps that verify so many drafts, in the form of the other steps.

        A call that drafts also has steps of one token, in which its rows are of several lengths.

        Returns:
            For each batch size that lacks steps: which ones, and why.
        """
        missing = []
        for batch in batch_sizes if drafts else ():
            made: dict[StepShape, StepPlan] = {}
            why, most = "", 0
            for number in (0, *sorted(drafts)):
                shape = StepShape(batch, 1 + number)
                try:
                    made[shape] = self._drafting_plan(steps, shape, whole, made)
                except TraceError as error:
                    why = str(error)
                    break  # a larger shape would fail, too
                most = number
            if most:
                steps.drafting.update(made)
            if why:
                outcome = f"verify at most {most} drafts" if most else "run stock if they draft"
                missing.append(f"calls with a batch of {batch} {outcome}: {why}")
        return missing

    def _drafting_plan(
        self,
        steps: TracedSteps,
        shape: StepShape,
        whole: bool,
        made: Mapping[StepShape, StepPlan],
    ) -> StepPlan:
        """Return the checked plan of a shape, if that of one token is made.

        Raises:
            TraceError: It cannot be recorded, or differs from stock's. Or it should be whole, and
                some attention or experts have no kernel.
        """
        batch, tokens = shape.batch, shape.tokens
        layers = len(next(iter(steps.plans))[1])
        windows, sizes = (None,) * layers, (2 * GRAIN, 3 * GRAIN)
        if shape.rows == 1:
            return steps.plans[batch, windows]
        recording = _recorded(
            self.model, batch, windows, sizes, check=self.check, form=steps.form, tokens=tokens
        )
        if tokens > 1 and (states := state_names(recording)):
            one = made[StepShape(batch)].recording
            recording = with_states_in_turn(recording, one, batch, states)
        plan = StepPlan(recording, shape.rows)
        self.kernels.find(plan, whole)
        self.check.run_drafts(plan, shape, GRAIN)
        if tokens > 1:
            self._report(plan, shape)
        return plan

    def _report(self, plan: StepPlan, shape: StepShape) -> None:
        self.report_rows += report_rows(plan, shape, self.kernels, self.paths)


def _recorded(
    model: Any,
    batch: int,
    windows: Sequence[int | None],
    sizes: tuple[int, int],
    *,
    check: TraceCheck,
    form: Form,
    tokens: int | None = None,
) -> Recording:
    """Record a step in a form, with the arguments that the check of the step gives to stock's.

    Raises:
        UnfitFormError: It cannot be recorded.
    """
    try:
        return record_step(
            model,
            check.masks,
            batch,
            windows,
            sizes,
            check.axes,
            gives_positions=check.gives_positions,
            mask_in_output=check.mask_use == "output",
            forms=(form,),
            tokens=tokens,
        )
    except TraceError as error:
        raise UnfitFormError(str(error)) from None


def _or_raise(x: Any) -> Any:
    if isinstance(x, str):
        raise TraceError(x)
    return x


@contextmanager
def _state_put_back(model: nn.Module) -> Iterator[None]:
    """Put back the attributes that forwards set on modules, such as states of recurrences."""
    before = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
