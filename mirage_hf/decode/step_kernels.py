"""Find the kernels of step plans, and schedule them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from mirage_hf.decode import decoded_products
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.errors import CodegenError, SearchError, VerificationError
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.layers.cache_kernels import CacheKernels
from mirage_hf.layers.run_attention import run_attention
from mirage_hf.patterns.attention import ATTENTION, for_long_caches, for_several_tokens
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline.layer_choice import chosen_for_layer
from mirage_hf.pipeline.resolver import NO_KERNEL, KernelFinder, Resolved, why_none
from mirage_hf.swap.swap_report import TRACED
from mirage_hf.trace.cached_attention import CachedAttention
from mirage_hf.trace.experts.op import EXPERTS, MOST_TOKENS
from mirage_hf.trace.groups import Group
from mirage_hf.trace.record import TraceError
from mirage_hf.trace.regions import Region
from mirage_hf.trace.step_ops import RegionRun, Run
from mirage_hf.trace.step_plan import StepPlan, weight_bytes

#: A program, and the options with which it is resolved.
_Wanted = tuple[KernelGraph, dict[str, Any]]

#: A key of `StepKernels.found` or of `StepKernels.attention`.
_Key = str | tuple[PatternBlock, int]


class StepKernels:
    """Finds the kernels of one model's step plans. Equal programs are resolved once.

    Args:
        model: The model.
        masks: Its masks.
        finder: Finds the kernels of programs.
        progress: Called with a stage and its detail, as in `optimize`.

    Attributes:
        found: By the text of a program: its kernel, or why it has none.
        attention: Likewise for the attention of layers, whose kernels are for short and for long
            caches. The keys are from `attention_block`.
    """

    def __init__(
        self,
        model: Any,
        masks: MaskPlan,
        finder: KernelFinder,
        progress: Callable[..., Any] | None,
    ):
        self.model, self.masks, self.finder, self.progress = model, masks, finder, progress
        self.found: dict[str, Resolved | str] = {}
        self.attention: dict[tuple[PatternBlock, int], list[Resolved | str]] = {}
        self.over_cache = CacheKernels(model.device)
        self._decoded = decoded_products.DecodedProducts(finder.gpu if finder.measures else None)
        #: The keys of kernels that were chosen for a layer.
        self._chosen_in_layers: set[_Key] = set()

    def find(self, plan: StepPlan, whole: bool) -> None:
        """Find the kernels of a step plan, and schedule them.

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
            self._check_whole(plan, attention, regions)
        plan.schedule(kernels, attention, regions)
        if self._choose_together(plan):
            regions = {region: self._region_run(region) for region in regions}
            plan.schedule(self._find_kernels(plan), self._find_attention(plan), regions)

    def _choose_together(self, plan: StepPlan) -> bool:
        """Choose the kernels that were just tuned by the time of the layers that they run in.

        Returns:
            True if a kernel was replaced, so that the plan must be scheduled again.
        """
        has_changed = False
        for keys in layers_of(self._keys_in_order(plan)):
            if self._chosen_in_layers.issuperset(keys):
                continue
            # the kernels that an earlier layer chose stay
            layer = [
                replace(self._kernel_of(key), outcome=None)
                if key in self._chosen_in_layers
                else self._kernel_of(key)
                for key in keys
            ]
            chosen = chosen_for_layer(layer, device=self.finder.device, zoo=self.finder.zoo)
            for key, before, kernel in zip(keys, layer, chosen, strict=True):
                if kernel is not before:
                    has_changed = True
                    self._replace(key, kernel)
            self._chosen_in_layers.update(keys)
        return has_changed

    def _keys_in_order(self, plan: StepPlan) -> list[_Key]:
        """Return the keys of a plan's kernels in the order in which they run."""
        keys: list[_Key] = []
        for step_op in plan.step_ops:
            if step_op.attention is not None:
                keys.append(self.attention_block(step_op.attention, plan))
            elif step_op.region is not None:
                keys.append(str(step_op.region.graph))
            elif step_op.program is not None:
                keys.append(str(step_op.program.graph))
        return keys

    def _kernel_of(self, key: _Key) -> Resolved:
        """Return the kernel that runs. Of attention, the one for short caches if there is one."""
        if isinstance(key, str):
            kernel = self.found[key]
            assert not isinstance(kernel, str)
            return kernel
        return next(_that_run(self.attention[key]))

    def _replace(self, key: _Key, kernel: Resolved) -> None:
        if isinstance(key, str):
            self.found[key] = kernel
        else:
            before = self._kernel_of(key)
            self.attention[key] = [kernel if x is before else x for x in self.attention[key]]

    def _searching(self, wanted: Iterable[_Wanted]) -> AbstractContextManager[None]:
        """Search for kernels that are not known, each program in a process of its own."""
        new = {str(program): (program, options) for program, options in wanted}
        return self.finder.searching([new[text] for text in new if text not in self.found])

    def count(self, plans: Iterable[StepPlan]) -> int:
        """Return how many different kernels run programs of step plans."""
        graphs = {str(program.graph) for p in plans for program in p.programs.values()}
        graphs |= {str(region.graph) for p in plans for region in p.regions}
        known = (self.found[text] for text in graphs & self.found.keys())
        return sum(not isinstance(kernel, str) and kernel.runs_kernel for kernel in known)

    def _find_kernels(self, plan: StepPlan) -> dict[Group, Run]:
        """Return what runs each group that has a kernel."""
        kernels: dict[Group, Run] = {}
        for group, program in plan.programs.items():
            kernel = self._found(program.graph, plan)
            if isinstance(kernel, str) or not kernel.runs_kernel:
                continue
            if self._decoded.are_faster(group, kernel, plan.rows):
                self.found[str(program.graph)] = f"{NO_KERNEL}{decoded_products.WHY}"
            else:
                kernels[group] = kernel.run
        return kernels

    def _find_regions(self, plan: StepPlan) -> dict[Region, RegionRun]:
        """Return what runs each region that has a kernel, and that would run as torch ops."""
        kernels: dict[Region, RegionRun] = {}
        for region in plan.regions_to_run():
            kernel = self._found(region.graph, plan)
            if not isinstance(kernel, str) and kernel.runs_kernel:
                kernels[region] = self._region_run(region)
        return kernels

    def _region_run(self, region: Region) -> RegionRun:
        """Return what runs a region that has a kernel."""
        kernel = self._kernel_of(str(region.graph))
        return RegionRun(kernel.run, (0, 0) in kernel.in_place, kernel.runs_generated)

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
            key = self.attention_block(one, plan)
            if key not in self.attention:
                self.attention[key] = self._attention(*key)
            if tuned := [*_that_run(self.attention[key])]:
                found[one] = partial(self._running, tuned, *key)
        return found

    def _running(
        self, tuned: Sequence[Resolved], block: PatternBlock, rows: int, slots: int
    ) -> Callable[..., Tensor]:
        """Return what runs a kernel of attention over caches of so many slots."""
        kernel = self.over_cache.at(tuned, block, rows, slots)
        windowed = bool(dict(block.sizes).get("window"))
        return partial(run_attention, kernel, windowed=windowed)

    def attention_block(self, one: CachedAttention, plan: StepPlan) -> tuple[PatternBlock, int]:
        """Return the block that attention is, and the rows of its program."""
        block = ATTENTION.block(**one.sizes)
        if one.tokens == 1:
            return block, plan.rows
        window = dict(self.masks.windows)[one.mask.removeprefix("mask.")]
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
        blocks = dict.fromkeys(self.attention_block(one, plan) for one in plan.attentions)
        new = [key for key in blocks if key not in self.attention]
        return [x for key in new for x in self._programs_of_attention(*key)]

    def _programs_of_attention(self, block: PatternBlock, rows: int) -> Iterator[_Wanted]:
        """Yield the programs for short and for long caches, with the options to resolve them."""
        blocks = [block]
        if self.model.device.type == "cuda":
            blocks.append(for_long_caches(block))
        for each in blocks:
            yield each.program(rows), {"pattern": ATTENTION.name, "like": each.searched(rows)}

    def _check_whole(
        self, plan: StepPlan, attention: Collection[CachedAttention], regions: Collection[Region]
    ) -> None:
        """Check that all attention and experts of a plan have kernels, and not programs alone.

        Raises:
            TraceError: Some have none.
        """
        for one in plan.attentions:
            if one not in attention:
                found = self.attention[self.attention_block(one, plan)]
                raise TraceError(f"no kernel was found for its attention{why_none(found)}")
        for region in plan.regions:
            if region.reads and region not in regions:
                text = str(region.graph)
                found = [self.found[text]] if text in self.found else []
                raise TraceError(f"no kernel was found for its experts{why_none(found)}")

    def _kernel(self, program: KernelGraph, **options: Any) -> Resolved | str:
        options = {"pattern": TRACED, **options}
        try:
            return self.finder.resolve(program, self.progress, **options)
        except (SearchError, VerificationError, CodegenError) as error:
            return f"{NO_KERNEL}{error}"


def _that_run(kernels: Iterable[Resolved | str]) -> Iterator[Resolved]:
    return (kernel for kernel in kernels if not isinstance(kernel, str) and kernel.runs_kernel)


def layers_of(keys: Iterable[_Key]) -> list[tuple[_Key, ...]]:
    """Return the different stretches of a step that run each kernel at most once, in order.

    A stretch ends where one of its kernels would run again. So most of them are layers.
    """
    layers: list[tuple[_Key, ...]] = []
    layer: list[_Key] = []
    for key in keys:
        if key in layer:
            layers.append(tuple(layer))
            layer = []
        layer.append(key)
    return list(dict.fromkeys([*layers, tuple(layer)]))


def _traced(programs: Iterable[KernelGraph]) -> list[_Wanted]:
    return [(program, {"pattern": TRACED}) for program in programs]


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


def bytes_read(plan: StepPlan) -> tuple[int, int]:
    """Return the bytes of products' weights that kernels read in a step, and of all products."""
    run = {id(step_op.program) for step_op in plan.step_ops if step_op.program is not None}
    by_kernels = [g for g in plan.groups if id(plan.programs.get(g)) in run]
    read = sum(weight_bytes(p) for g in by_kernels for p in g.products)
    return read, sum(weight_bytes(p) for g in plan.groups for p in g.products)
