"""Trace the steps of a model that has no step program, find their kernels, and check them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mirage_hf.decode.kernels.router
import mirage_hf.decode.kernels.short_convolution  # noqa: F401 (they give ops their kernels)
from mirage_hf.decode.cache_exchange import windows_of
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.rings import GRAIN
from mirage_hf.decode.routing import rejected_masks, rejected_model, takes_cache
from mirage_hf.decode.sources import decoder_config, is_source, new_cache
from mirage_hf.decode.step_inputs import gives_positions
from mirage_hf.decode.trace_check import TraceCheck, UnfitFormError
from mirage_hf.decode.traced_step import (
    FORMS,
    Form,
    Rings,
    TracedSteps,
    record_step,
    rings_variants,
    state_names,
)
from mirage_hf.errors import CodegenError, Rejected, SearchError, VerificationError
from mirage_hf.formats.containers import bytes_of
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.layers.cache_kernels import CacheKernels
from mirage_hf.layers.part import StepShape
from mirage_hf.layers.run_attention import run_attention
from mirage_hf.match.matches import CausalMatch, Match
from mirage_hf.patterns.attention import ATTENTION, for_long_caches, for_several_tokens
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline.resolver import KernelFinder, Resolved
from mirage_hf.swap.swap_report import STOCK, TRACED, ReportRow, resolved_row
from mirage_hf.trace.cached_attention import ATTENTION_OP, CachedAttention
from mirage_hf.trace.coded_linear import coded_linears
from mirage_hf.trace.experts import EXPERTS, MOST_TOKENS, ExpertsForm, form_of
from mirage_hf.trace.groups import Group
from mirage_hf.trace.plan import RegionRun, Run, StepPlan, weight_bytes
from mirage_hf.trace.record import Recording, TraceError
from mirage_hf.trace.regions import Region
from mirage_hf.trace.successive import with_states_in_turn
from mirage_hf.trace.weight_names import common_module, weight_path

_CROSS_ATTENTION = "torch's op runs it: keys that the encoder gave are not appended to"
_OTHER_ATTENTION = (
    "torch's op runs it: it is not of the form that kernels compute, or something else reads its "
    "keys first, such as another layer"
)

_NO_CACHE = "its forward takes no cache of keys and values, as transformers' generate makes one"

#: A program, and the options with which it is resolved.
_Wanted = tuple[KernelGraph, dict[str, Any]]

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
    tracer = _Tracer(model, finder, progress)
    try:
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


def wants_trace(model: Any, causal: CausalMatch | Rejected) -> bool:
    """Return whether steps of a model need a trace, to run by kernels or not by stock."""
    return isinstance(causal, Rejected) or rejected_model(model) is not None


def wants_experts(model: nn.Module, layers: Iterable[Match]) -> bool:
    """Return whether a whole trace would run a known model's experts by kernels.

    Attention over latents and adapters have kernels of their own, which a trace does not use.
    """
    for layer in layers:
        if layer.adapters or (layer.layout is not None and layer.layout.latent is not None):
            return False
    return any(isinstance(form_of(module), ExpertsForm) for module in model.modules())


class _Tracer:
    """Traces one model's steps. Equal programs are resolved once."""

    def __init__(
        self,
        model: Any,
        finder: KernelFinder,
        progress: Callable[..., Any] | None,
    ):
        self.model, self.finder, self.progress = model, finder, progress
        self.config = decoder_config(model)
        self.found: dict[str, Resolved | str] = {}
        self.attention: dict[tuple[PatternBlock, int], list[Resolved | str]] = {}
        self.over_cache = CacheKernels(model.device)
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
        model, config = self.model, self.config
        masks = _or_raise(MaskPlan.of(config))
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
                try:
                    recording = _recorded(model, batch, own_windows, sizes, check=check, form=form)
                    plan = StepPlan(recording, batch)
                    if form != FORMS[0]:  # most forms do not fit, so they are tried without kernels
                        plan.schedule({})
                        check.run(plan, batch, own_windows, sizes[0])
                    self._find_all(plan, whole)
                    check.run(plan, batch, own_windows, sizes[0])
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
        read, total = _bytes_read(plan)
        total += sum(bytes_of(p) for path in unread for p in model.get_submodule(path).parameters())
        if not uses_rings:
            plans = {key: plan for key, plan in plans.items() if not any(key[1])}
        return TracedSteps(
            plans,
            self._count_kernels(plans.values()),
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
        self._find_all(plan, whole)
        self.check.run_drafts(plan, shape, sizes[0])
        if tokens > 1:
            self._report(plan, shape)
        return plan

    def _find_all(self, plan: StepPlan, whole: bool) -> None:
        """Find the kernels of a plan, and schedule them.

        Raises:
            TraceError: There are none. Or all should be there, and some are missing.
        """
        if whole and (why := _why_not_whole(plan)):
            raise TraceError(why)
        # updates of states take longest, so their searches begin first
        updates = [region.graph for region in plan.regions if region.state is not None]
        products = [program.graph for program in plan.programs.values()]
        first = [*_traced(updates), *self._attention_programs(plan), *_traced(products)]
        with self._searching(first):
            kernels = self._find_kernels(plan)
            if not kernels:
                raise TraceError("no product of its step has a kernel")
            attention = self._find_attention(plan)
            plan.schedule(kernels, attention)
            with self._searching(_traced(region.graph for region in plan.regions_to_run())):
                regions = self._find_regions(plan)
        if whole:
            _check_whole(plan, attention, regions)
        plan.schedule(kernels, attention, regions)

    def _searching(self, wanted: Iterable[_Wanted]) -> AbstractContextManager[None]:
        """Search for kernels that are not known, each program in a process of its own."""
        new = {str(program): (program, options) for program, options in wanted}
        return self.finder.searching([new[text] for text in new if text not in self.found])

    def _count_kernels(self, plans: Iterable[StepPlan]) -> int:
        """Return how many different kernels run programs of plans."""
        graphs = {str(program.graph) for p in plans for program in p.programs.values()}
        graphs |= {str(region.graph) for p in plans for region in p.regions}
        known = (self.found[text] for text in graphs & self.found.keys())
        return sum(not isinstance(kernel, str) and kernel.runs_kernel for kernel in known)

    def _find_kernels(self, plan: StepPlan) -> dict[Group, Run]:
        """Return what runs each group that has a kernel."""
        kernels: dict[Group, Run] = {}
        for group, program in plan.programs.items():
            kernel = self._found(program.graph, plan)
            if not isinstance(kernel, str) and kernel.runs_kernel:
                kernels[group] = kernel.run
        return kernels

    def _find_regions(self, plan: StepPlan) -> dict[Region, RegionRun]:
        """Return what runs each region that has a kernel, and that would run as torch ops."""
        kernels: dict[Region, RegionRun] = {}
        for region in plan.regions_to_run():
            kernel = self._found(region.graph, plan)
            if not isinstance(kernel, str) and kernel.runs_kernel:
                kernels[region] = RegionRun(
                    kernel.run, (0, 0) in kernel.in_place, kernel.runs_generated
                )
        return kernels

    def _found(self, program: KernelGraph, plan: StepPlan) -> Resolved | str:
        """Return the kernel of a program of a plan. Equal programs are resolved once."""
        text = str(program)
        if text not in self.found:
            if self.progress is not None:
                graphs = [x.graph for x in plan.programs.values()]
                graphs += [x.graph for x in plan.regions]
                total = len({str(graph) for graph in graphs} | self.found.keys())
                self.progress("kernel", (len(self.found) + 1, total, TRACED))
            self.found[text] = self._kernel(program)
        return self.found[text]

    def _find_attention(
        self, plan: StepPlan
    ) -> dict[CachedAttention, Callable[[int], Callable[..., Tensor]]]:
        """Return what runs the attention of each layer that has a kernel, by slots."""
        found: dict[CachedAttention, Callable[[int], Callable[..., Tensor]]] = {}
        for one in plan.attentions:
            key = self._block_of(one, plan)
            if key not in self.attention:
                self.attention[key] = self._attention(*key)
            tuned = [k for k in self.attention[key] if not isinstance(k, str) and k.runs_kernel]
            if tuned:
                found[one] = partial(self._running, tuned, *key)
        return found

    def _running(
        self, tuned: Sequence[Resolved], block: PatternBlock, rows: int, slots: int
    ) -> Callable[..., Tensor]:
        """Return what runs a kernel of attention over caches of so many slots."""
        kernel = self.over_cache.at(tuned, block, rows, slots)
        windowed = bool(dict(block.sizes).get("window"))
        return partial(run_attention, kernel, windowed=windowed)

    def _block_of(self, one: CachedAttention, plan: StepPlan) -> tuple[PatternBlock, int]:
        """Return the block that attention is, and the rows of its program."""
        block = ATTENTION.block(**one.sizes)
        if one.tokens == 1:
            return block, plan.rows
        window = dict(self.check.masks.windows)[one.mask.removeprefix("mask.")]
        block = for_several_tokens(block, one.tokens, window=window is not None)
        return block, plan.rows // one.tokens

    def _attention(self, block: PatternBlock, rows: int) -> list[Resolved | str]:
        """Return the kernels of attention for short and for long caches, or why there are none."""
        return [
            self._kernel(program, **options)
            for program, options in self._programs_of_attention(block, rows)
        ]

    def _attention_programs(self, plan: StepPlan) -> list[_Wanted]:
        """Return the programs of a plan's attention that are not resolved yet, with options."""
        blocks = dict.fromkeys(self._block_of(one, plan) for one in plan.attentions)
        new = [key for key in blocks if key not in self.attention]
        return [x for key in new for x in self._programs_of_attention(*key)]

    def _programs_of_attention(self, block: PatternBlock, rows: int) -> Iterator[_Wanted]:
        """Yield the programs for short and for long caches, with the options to resolve them."""
        blocks = [block]
        if self.model.device.type == "cuda":
            blocks.append(for_long_caches(block))
        for each in blocks:
            yield each.program(rows), {"pattern": ATTENTION.name, "like": each.searched(rows)}

    def _kernel(self, program: KernelGraph, **options: Any) -> Resolved | str:
        options = {"pattern": TRACED, **options}
        try:
            return self.finder.resolve(program, self.progress, **options)
        except (SearchError, VerificationError, CodegenError) as error:
            return f"no kernel: {error}"

    def _report(self, plan: StepPlan, shape: StepShape) -> None:
        """Add a row for each group of a plan, and for the attention of each layer."""
        rows, tokens = shape.batch, shape.tokens
        known = {one.node: one for one in plan.attentions}
        for number, node in enumerate(plan.recording.nodes):
            if node.name != ATTENTION_OP:
                continue
            one = known.get(number)
            layer = "attention" if one is None else f"layers.{one.layer}"
            row = ReportRow(layer, ATTENTION.name, STOCK, rows=rows, tokens=tokens)
            if one is None:
                reads_source = any(is_source(x) for x in node.operands)
                reason = _CROSS_ATTENTION if reads_source else _OTHER_ATTENTION
                self.report_rows.append(replace(row, reason=reason))
                continue
            kernel = self.attention[self._block_of(one, plan)][0]
            self.report_rows.append(resolved_row(row, kernel))
        for region in plan.regions:
            is_later = region.state is not None and region.state.name in plan.recording.moves
            if str(region.graph) not in self.found or is_later:
                continue  # what moves a state on for the first token does so for the others
            where = plan.recording.nodes[region.nodes[0]].where
            if region.state is not None:
                where = f"layers.{region.state.name.rpartition('.')[2]}"
            row = ReportRow(where, TRACED, STOCK, part=region.kind, rows=rows, tokens=tokens)
            self.report_rows.append(resolved_row(row, self.found[str(region.graph)]))
        for group in plan.groups:
            names = [
                weight_path(plan, product.operands[1], self.paths) for product in group.products
            ]
            module, parts = common_module(names)
            row = ReportRow(module, TRACED, STOCK, part=parts, rows=rows, tokens=tokens)
            program = plan.programs.get(group)
            if program is None:
                self.report_rows.append(replace(row, reason=plan.reasons[group]))
                continue
            self.report_rows.append(resolved_row(row, self.found[str(program.graph)]))


def _traced(programs: Iterable[KernelGraph]) -> list[_Wanted]:
    return [(program, {"pattern": TRACED}) for program in programs]


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


def _why_not_whole(plan: StepPlan) -> str:
    """Return which attention or experts of a plan have no program, or ""."""
    layers = sum(name.startswith("keys.") for name in plan.recording.inputs)
    if len(plan.attentions) < layers:
        return f"the attention of {layers - len(plan.attentions)} layers is of another form"
    programs = sum(bool(region.reads) for region in plan.regions)
    experts = sum(node.name == EXPERTS for node in plan.recording.nodes)
    if programs == 2 * experts > 0:
        return ""
    return f"experts of another form, or more than {MOST_TOKENS} rows"


def _check_whole(
    plan: StepPlan, attention: Collection[CachedAttention], regions: Collection[Region]
) -> None:
    """Check that all attention and experts of a plan have kernels, and not programs alone.

    Raises:
        TraceError: Some have none.
    """
    if len(attention) < len(plan.attentions):
        raise TraceError("no kernel was found for its attention")
    if any(region.reads and region not in regions for region in plan.regions):
        raise TraceError("no kernel was found for its experts")


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


def axes_of_positions(model: Any) -> int:
    """Return how many axes the positions have that stock's generate makes, 0 if none."""
    make = getattr(model, "_prepare_position_ids_for_generation", None)
    if make is None:
        return 0
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    positions = make(ids, {})
    return len(positions) if positions is not None and positions.ndim == 3 else 0


# -- for the report --------------------------------------------------------------------------------


def _bytes_read(plan: StepPlan) -> tuple[int, int]:
    """Return the bytes of products' weights that kernels read in a step, and of all products."""
    run = {id(unit.program) for unit in plan.units if unit.program is not None}
    by_kernels = [g for g in plan.groups if id(plan.programs.get(g)) in run]
    read = sum(weight_bytes(p) for g in by_kernels for p in g.products)
    return read, sum(weight_bytes(p) for g in plan.groups for p in g.products)
