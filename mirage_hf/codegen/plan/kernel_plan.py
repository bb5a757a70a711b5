"""The plan of one kernel: a placed op, a schedule, and all decisions that follow from them."""

from __future__ import annotations

from functools import cached_property

from mirage_hf import errors
from mirage_hf.codegen.placement import PlacedOp, placed
from mirage_hf.codegen.plan import stages
from mirage_hf.codegen.plan.code_words import check_words
from mirage_hf.codegen.plan.cooperation import Cooperation
from mirage_hf.codegen.plan.layout import TensorLayout
from mirage_hf.codegen.plan.loop_bounds import LoopBounds
from mirage_hf.codegen.plan.masks import Masks
from mirage_hf.codegen.plan.pipelining import LoopLoads, Pipelining
from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.block import Accumulator, BlockGraph, BlockInput, Role, Stage
from mirage_hf.graph.kernel import KernelOp

#: Elements of the largest tile that Triton takes.
MAX_ELEMENTS = 1 << 20

#: Registers of a thread for rows of caches that are loaded before the grid dependency wait.
CACHED_REGISTERS = 128

_WARP = 32


def plan_kernel(op: KernelOp, schedule: Schedule) -> KernelPlan:
    """Return the plan of a `customized` op.

    Raises:
        CodegenError: If no kernel can be made of the op and the schedule.
    """
    return Planner(op).plan(schedule)


class Planner:
    """Makes plans of one `customized` op, which it checks only once."""

    def __init__(self, op: KernelOp) -> None:
        self._op = placed(op)
        self._is_checked = False

    def plan(self, schedule: Schedule) -> KernelPlan:
        """Return the plan of a schedule.

        Raises:
            CodegenError: If no kernel can be made of the op and the schedule.
        """
        assert self._op.block is not None
        if not self._is_checked:
            check_roles(self._op.block)
        schedule.check(self._op.block)
        tiling = Tiling(self._op, schedule.tiles)
        if not self._is_checked:
            _check_block(tiling)
            self._is_checked = True
        layout = TensorLayout(tiling, schedule.mma, schedule.weights_first)
        _check_sizes(layout)
        return KernelPlan(LayoutPlan(layout), schedule)


class LayoutPlan:
    """What the plans of all schedules with one layout share.

    Attributes:
        layout: The layout.
        loop_bounds: Loops that only visit what is within their bounds.
    """

    def __init__(self, layout: TensorLayout) -> None:
        self.layout = layout
        self.loop_bounds = LoopBounds(layout.tiling)
        self._loads = LoopLoads(layout)
        self._known: dict[tuple[int, ...], tuple[Cooperation, Pipelining]] = {}

    def parts(self, s: Schedule) -> tuple[Cooperation, Pipelining]:
        """Return the parts of a schedule's plan that its warps, stages and blocks decide.

        Raises:
            CodegenError: If no kernel can be made of the layout and the schedule.
        """
        key = s.cooperating_blocks, s.num_warps, s.num_stages, s.steps_per_trip
        known = self._known.get(key)
        if known is None:
            cooperation = Cooperation(self.layout, s.cooperating_blocks, s.num_warps)
            pipelining = Pipelining(
                self._loads, cooperation, s.num_stages, s.num_warps, s.steps_per_trip
            )
            self._check(cooperation, pipelining)
            known = self._known[key] = cooperation, pipelining
        return known

    def _check(self, cooperation: Cooperation, pipelining: Pipelining) -> None:
        pipelining.check()
        cooperation.check()
        check_words(self.layout, Masks(self.layout.tiling, self.loop_bounds, cooperation))
        if pipelining.walks_trips and self.loop_bounds.trims_any:
            raise errors.CodegenError(
                "schedule: a loop that only visits what is within its bounds takes one step in "
                f"each trip; steps_per_trip is {pipelining.steps_per_trip}, give 1 and another "
                "num_stages"
            )


class KernelPlan:
    """The plan of one kernel.

    Attributes:
        schedule: The schedule.
        op: The op that the kernel is for.
        tiling: How tiles cut the axes.
        layout: The dims of tensors inside the kernel.
        loop_bounds: Loops that only visit what is within their bounds.
        cooperation: Blocks that share the loop of one tile.
        pipelining: Loads that are copied asynchronously.
        grid: The number of thread blocks.

    Raises:
        CodegenError: If no kernel can be made of the layout and the schedule.
    """

    def __init__(self, shared: LayoutPlan, schedule: Schedule) -> None:
        self._shared = shared
        self.schedule = schedule
        self.layout = shared.layout
        self.tiling: Tiling = shared.layout.tiling
        self.op: PlacedOp = self.tiling.op
        self.loop_bounds = shared.loop_bounds
        self.cooperation, self.pipelining = shared.parts(schedule)
        self.grid = self.tiling.num_tiles * schedule.cooperating_blocks

    def with_schedule(self, schedule: Schedule) -> KernelPlan:
        """Return the plan of a schedule with the same tiles and kind of product.

        It shares this plan's layout, which is the costly part.

        Raises:
            CodegenError: If no kernel can be made of the schedule.
        """
        layout = self.layout
        same = layout.tiling.tiles, layout.mma, layout.weights_first
        assert (schedule.tiles, schedule.mma, schedule.weights_first) == same
        return KernelPlan(self._shared, schedule)

    @cached_property
    def masks(self) -> Masks:
        """Where tiles reach past the end of an axis."""
        return Masks(self.tiling, self.loop_bounds, self.cooperation)

    @property
    def triggers_early(self) -> bool:
        """True if the next kernel may launch before this one's grid dependency wait."""
        return self.schedule.trigger_early and self.op.next_may_launch_early

    def effective_bounds(self, i: BlockInput) -> BlockInput | None:
        """Return the bounds that limit the read of an input if the loop axis is held whole.

        Elements outside these bounds change no result, so they are not read.
        """
        tiling, block, loop = self.tiling, self.tiling.block, self.tiling.loop
        is_read_plainly = i.bounds is None and not tiling.is_constant(i)
        if tiling.is_looped or loop is None or loop not in i.read_axes or not is_read_plainly:
            return None
        readers = [s for s in block.stages if i.name in s.reads]
        effective = {self.loop_bounds.effective(s) for s in readers}
        bounds = effective.pop() if len(effective) == 1 else None
        if bounds is None or not {a for a in bounds.axes if a} <= {*block.input_axes(i)}:
            return None
        unrolled = self.layout.unrolled
        return bounds if unrolled is None or unrolled not in bounds.axes else None

    def early_bounds(self, i: BlockInput) -> BlockInput | None:
        """Return the effective bounds if they are scalars that are read before the grid wait."""
        bounds = self.effective_bounds(i)
        if bounds is None:
            return None
        have_dims = self.layout.dims([a for a in bounds.axes if a])
        were_read = self.op.readable_before_wait.issuperset(bounds.sources)
        return None if have_dims or not were_read else bounds

    @cached_property
    def cached_before_wait(self) -> tuple[BlockInput, ...]:
        """The rows of caches that are loaded before the wait.

        They are within bounds. The loop has one trip, and registers hold them.
        """
        tiling = self.tiling
        if not self.schedule.load_cached_early or tiling.is_looped or tiling.loop is None:
            return ()
        cached = [
            i
            for i in tiling.block.inputs
            if tiling.loop in i.axes and tiling.prefetchable(i) and self.early_bounds(i) is not None
        ]
        threads = _WARP * self.schedule.num_warps
        # tiles that are not kept as they are stored become float32 as they are loaded
        held = sum(
            tiling.input_bytes[i.name]
            if i.name in self.layout.kept_as_stored
            else 4 * tiling.elements[i.name]
            for i in cached
        )
        return tuple(cached) if held / 4 / threads <= CACHED_REGISTERS else ()

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """The stages and their numbers in the order in which the kernel runs them."""
        return stages.execution_order(self.tiling)

    def is_reduced_after_loop(self, acc: Accumulator) -> bool:
        """Return True if an accumulator stays spread over the loop tile inside the loop."""
        return self.schedule.reduce_after_loop and acc.out in self.layout.spreadable


def check_roles(block: BlockGraph) -> None:
    """Check that Triton has every role of a block graph's axes.

    Raises:
        CodegenError: If blocks form clusters.
    """
    if block.cluster is not None:
        raise errors.CodegenError(
            f"axis {block.cluster.name} is cut among the blocks of a cluster, which Triton cannot "
            "express; give the kernel a schedule with cuda=True"
        )


def _check_block(tiling: Tiling) -> None:
    """Check that a block graph can have a kernel, whatever the schedule.

    Raises:
        CodegenError: If it cannot.
    """
    _check_sources(tiling)
    _check_outputs(tiling)
    _check_loop(tiling)


def _check_sizes(layout: TensorLayout) -> None:
    tiling = layout.tiling
    for value, elements in tiling.elements.items():
        if elements > MAX_ELEMENTS and value not in layout.unformed_products:
            raise errors.CodegenError(
                f"{value} has {elements} elements in a tile, Triton takes {MAX_ELEMENTS}; "
                "give smaller tiles, or make a tile axis the loop"
            )


def _check_sources(tiling: Tiling) -> None:
    for i in tiling.block.inputs:
        if len({tiling.operands[s].dtype for s in i.sources}) > 1:
            raise errors.CodegenError(
                f"block input {i.name}: its joined sources have different dtypes; cast them to one"
            )


def _check_outputs(tiling: Tiling) -> None:
    for axis in tiling.block.named(Role.GRID):
        for o in tiling.block.outputs:
            if not tiling.differs_along(axis.name, o.axes) and o.value not in tiling.inputs:
                raise errors.CodegenError(
                    f"output {o.value} does not carry the grid axis {axis.name}, so its blocks "
                    "would write the same elements; make the axis a loop or tile axis, or a dim "
                    "of the output"
                )


def _check_loop(tiling: Tiling) -> None:
    block, loop = tiling.block, tiling.loop
    if not loop:
        return
    computed_in_loop = {op.out for s in block.stages if s.loop for op in s.body}
    for o in block.outputs:
        if loop in o.axes and o.value not in computed_in_loop:
            raise errors.CodegenError(
                f"output {o.value} carries the loop axis {loop} but no stage that loops computes it"
            )
    for stage in block.stages:
        for op in stage.body:
            if stage.loop is None and loop in block.carried[op.out]:
                raise errors.CodegenError(
                    f"{op.out} carries the loop axis {loop} in a stage without a loop; "
                    "give the stage the loop"
                )
