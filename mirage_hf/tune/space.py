"""List the schedules worth trying for a block graph on a device: few, ranked by the cost model."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter

from mirage_hf import errors
from mirage_hf.codegen import cuda_text
from mirage_hf.codegen.default_schedule import choose_schedule
from mirage_hf.codegen.placement import PlacedOp, placed
from mirage_hf.codegen.plan import KernelPlan, Planner, check_roles, plan_kernel
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import DTensor, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.dtypes import element_bytes
from mirage_hf.tune.candidate_schedules import candidate_schedules, packed_axes
from mirage_hf.tune.cost import estimate
from mirage_hf.tune.cuda_schedules import cuda_schedules
from mirage_hf.tune.footprint import Footprint, footprint, with_same_layout
from mirage_hf.tune.stream_schedules import stream_schedules
from mirage_hf.tune.traffic import traffic

#: Registers that a thread may spend on float32 tiles. Beyond it tiles spill.
REGISTER_BUDGET = 160

#: A kernel of last resort that needs more registers is not compiled. One that needed 9,764 was not
#: done after eight minutes. From where on compiling becomes bearable was not measured.
HOPELESS_REGISTERS = 1024

#: Each further schedule with the same tiles counts as this much slower in the order to try them.
REPEAT = 0.05

#: Blocks share a loop only if there are at most this many blocks for each SM.
MOST_BLOCKS_PER_SM = 4

#: The same for blocks that hold words of codes one step ahead. They have few warps and no shared
#: memory.
MOST_BLOCKS_OF_WORDS = 32

#: The same for multiply-adds that hold words of codes for later steps.
MOST_BLOCKS_OF_ADDED_WORDS = 8

#: The most steps of a loop that blocks which share it may take beyond its end, as a share of all.
MOST_IDLE = 1 / 8

#: Bytes that the blocks of an SM prefetch together before they wait: about what fills the memory
#: system.
PREFETCH_BYTES = 48 << 10


def schedules(op: KernelOp, device: Device = H200, limit: int = 256) -> list[Schedule]:
    """Return the schedules of Triton kernels for a `customized` op, best estimate first.

    Both multiply-adds and tensor cores are kept if both apply.

    Raises:
        CodegenError: The block graph has no kernel at all.
    """
    return list(_ranked(op, device)[:limit])


def with_streams(op: KernelOp, device: Device = H200) -> list[Schedule]:
    """Return the schedules of both generators for an op, in turns.

    Those of CUDA kernels stream codes. Those of the lower estimate come first, but the estimates of
    the two generators cannot be compared well.

    Raises:
        CodegenError: The block graph has no kernel at all.
    """
    in_triton = schedules(op, device)
    streams = stream_schedules(op, device)
    if not streams:
        return in_triton
    in_cuda = [s for s, _ in streams]
    best_us = estimate(plan_kernel(op, in_triton[0]), device).us
    first, second = (in_cuda, in_triton) if streams[0][1] < best_us else (in_triton, in_cuda)
    turns = itertools.zip_longest(first, second)
    return [s for turn in turns for s in turn if s is not None]


def obstacle(ops: Iterable[KernelOp], device: Device = H200) -> str:
    """Return why one of these `customized` ops has no kernel at all; empty if each has one."""
    for op in ops:
        try:
            schedules(op, device, 1)
        except errors.CodegenError as e:
            return str(e)
    return ""


@choose_schedule.register
def default_schedule(op: KernelOp, device: Device = H200) -> Schedule:
    """Return the cost model's first choice: of Triton kernels, or of CUDA kernels for clusters."""
    if op.block is not None and op.block.cluster is not None:
        found = cuda_schedules(op, device, 1)
        if found:
            return found[0]
        if why := cuda_text.obstacle(placed(op)):
            raise errors.CodegenError(
                f"{why}; neither generator writes that, so run it with backend='cpu'"
            )
    return schedules(op, device, 1)[0]


def permitted(
    kinds: Iterable[tuple[UGraph, Collection[bool]]], streams: bool = False
) -> Callable[[KernelOp, Device], list[Schedule]]:
    """Return a function that lists an op's schedules whose rounding holds, best estimate first.

    Args:
        kinds: Each µGraph with the kinds of product (`Schedule.mma`) whose rounding was found to
            hold in it. They count for every op with the same block graph, whatever the sizes of its
            axes.
        streams: Also list CUDA kernels that stream codes, where multiply-adds are allowed. They
            keep 22 bits of what codes are multiplied with. Beside float8, and with several rows,
            they keep 11. bfloat16 has 8.
    """
    known: dict[object, set[bool]] = {}
    for ugraph, allowed in kinds:
        for op in ugraph.block_ops:
            known.setdefault(_form(op), set()).update(allowed)
    listed = with_streams if streams else schedules
    return lambda op, device: [s for s in listed(op, device) if s.mma in known[_form(op)]]


def permitted_in_cuda(
    kinds: Iterable[tuple[UGraph, Collection[bool]]],
) -> Callable[[KernelOp, Device], list[Schedule]]:
    """Return what `permitted` does for CUDA kernels, whose products are multiply-adds."""
    known = {_form(op) for ugraph, allowed in kinds if False in allowed for op in ugraph.block_ops}
    return lambda op, device: cuda_schedules(op, device) if _form(op) in known else []


def _form(op: KernelOp) -> object:
    """Return a block graph without the sizes of its axes."""
    assert op.block is not None
    return op.block.inputs, op.block.stages, op.block.outputs


def chosen(op: KernelOp, kinds: Collection[bool]) -> Schedule | None:
    """Return the cost model's first choice among these kinds of product, or None.

    The schedule with the smallest tiles is the last that is considered.

    Raises:
        CodegenError: The block graph has no kernel at all.
    """
    return next((s for s in (*schedules(op), smallest(op)) if s.mma in kinds), None)


#: The schedules of ops in the order to try them, of the ops that were ranked last.
_known: dict[tuple[KernelOp, Device], tuple[Schedule, ...]] = {}

#: Most ops that are known. A model has some tens of kernels, and each of them some candidates.
_MOST_KNOWN = 512


def _ranked(op: KernelOp, device: Device) -> tuple[Schedule, ...]:
    """Return all schedules of an op in the order to try them."""
    op = _numbered(op)
    assert op.block is not None
    known = _known.get((op, device))
    if known is not None:
        return known
    check_roles(op.block)
    costs, reason = _costs(op, device)
    order = _order(costs) if costs else (_last_resort(op, device, reason),)
    remember_ranked({(op, device): order})
    return order


def _numbered(op: KernelOp) -> KernelOp:
    """Return an op whose tensors are numbered from 0, so that equal kernels are ranked once.

    Their numbers and names in a graph decide nothing. Whether two operands are the same tensor may.
    """
    places: dict[int, int] = {}

    def numbered(t: DTensor) -> DTensor:
        place = places.setdefault(t.index, len(places))
        return replace(t, index=place, name=f"t{place}")

    inputs = tuple(numbered(x) if isinstance(x, DTensor) else x for x in op.inputs)
    return replace(op, inputs=inputs, outputs=tuple(map(numbered, op.outputs)))


def rankings_of(
    ops: Iterable[KernelOp], device: Device = H200
) -> dict[tuple[KernelOp, Device], tuple[Schedule, ...]]:
    """Return the schedules of ops that have a kernel, for another process."""
    found = {}
    for op in ops:
        with contextlib.suppress(errors.CodegenError):
            found[_numbered(op), device] = _ranked(op, device)
    return found


def remember_ranked(found: Mapping[tuple[KernelOp, Device], tuple[Schedule, ...]]) -> None:
    """Take over what another process has ranked."""
    for key, order in found.items():
        if len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(_known), key), None)
        _known[key] = order


def _costs(
    op: KernelOp, device: Device
) -> tuple[dict[Schedule, float], errors.CodegenError | None]:
    """Return the estimated µs of every schedule that fits, and why the last other one does not."""
    costs: dict[Schedule, float] = {}
    reason: errors.CodegenError | None = None
    op = placed(op)
    tilings = _Tilings(op)
    for candidate in candidate_schedules(op):
        try:
            tiles = tilings.of(candidate)
            if not tiles.suit(candidate):
                continue
            # The threads of a block share the registers of an SM.
            most = min(REGISTER_BUDGET, device.registers // (32 * candidate.num_warps))
            for schedule in _variants(tiles, candidate, device):
                plan = tiles.plan.with_schedule(schedule)
                cost = estimate(plan, device, tiles.footprint, op.next_may_launch_early)
                if cost.registers <= most and cost.shared <= device.shared_bytes:
                    costs[schedule] = cost.us
        except errors.CodegenError as e:
            reason = e
    return costs, reason


def _last_resort(op: KernelOp, device: Device, reason: errors.CodegenError | None) -> Schedule:
    """Return the schedule to use if no other fits.

    Raises:
        CodegenError: The op has no kernel, or its kernel needs too many registers to compile.
    """
    fallback = smallest(op)
    try:
        needed = estimate(plan_kernel(op, fallback), device).registers
    except errors.CodegenError as e:
        raise reason or e from None
    if needed > HOPELESS_REGISTERS:
        tiles = " ".join(f"{axis}:{tile}" for axis, tile in fallback.tiles.items())
        raise errors.CodegenError(
            f"the tiles of {tiles} need {needed} registers a thread, and no schedule needs fewer; "
            f"more than {HOPELESS_REGISTERS} are not compiled"
        )
    return fallback


def _order(costs: Mapping[Schedule, float]) -> tuple[Schedule, ...]:
    """Return schedules in the order to try them.

    The best of each set of tiles comes before the second best of any, because what the model cannot
    see differs most between tiles. Two schedules of the likelier kind of product come for each of
    the other, so a wrong estimate costs only time.
    """
    effective: list[tuple[float, Schedule]] = []
    seen: Counter[tuple[bool, Mapping[str, int]]] = Counter()
    for s, cost in _by_cost(costs):
        alike = s.mma, s.tiles
        effective.append((cost * (1 + REPEAT * seen[alike]), s))
        seen[alike] += 1
    effective.sort(key=itemgetter(0))
    kinds = [[x for x in effective if x[1].mma == mma] for mma in (False, True)]
    kinds.sort(key=lambda kind: kind[0][0] if kind else math.inf)
    likelier, other = ([s for _, s in kind] for kind in kinds)
    turns = itertools.zip_longest(likelier[::2], likelier[1::2], other)
    return tuple(s for turn in turns for s in turn if s is not None)


def _by_cost(costs: Mapping[Schedule, float]) -> list[tuple[Schedule, float]]:
    """Return schedules with their costs, the lowest first."""
    found: list[tuple[Schedule, float]] = []
    ascending = sorted(costs.items(), key=itemgetter(1))
    for _, group in itertools.groupby(ascending, key=itemgetter(1)):
        equal = list(group)
        if len(equal) > 1:
            equal.sort(key=lambda item: (_may_pad_rows(item[0]), tie_break(item[0])))
        found += equal
    return found


def _may_pad_rows(s: Schedule) -> bool:
    """Return whether queries may be padded to the rows of a product. It multiplies padding, too."""
    return s.mma and not s.weights_first and s.num_stages == 1


def tie_break(s: Schedule) -> str:
    """Return a text that orders schedules with equal estimates, so the order is always the same."""
    words = [f"{axis}:{tile}" for axis, tile in s.tiles.items()]
    words.append("mma" if s.mma else "fma")
    if s.mma and s.weights_first:
        words.append("weights-first")
    if s.reduce_after_loop:
        words.append("reduce-after-loop")
    words += [f"warps:{s.num_warps}", f"stages:{s.num_stages}"]
    if s.steps_per_trip > 1:
        words.append(f"steps-per-trip:{s.steps_per_trip}")
    if s.cooperating_blocks > 1:
        words.append(f"split:{s.cooperating_blocks}")
    if s.prefetch_steps:
        words.append(f"prefetch:{s.prefetch_steps}")
    if s.load_cached_early:
        words.append("early-rows")
    if s.trigger_early:
        words.append("early-trigger")
    return " ".join(words)


@dataclass(frozen=True)
class _Tiles:
    """What schedules of the same tiles and kind of product have in common.

    Attributes:
        plan: The plan of one of them.
        footprint: What their tiles load, hold and compute.
        step_bytes: The bytes of a loop step that may be prefetched before the grid wait.
    """

    plan: KernelPlan
    footprint: Footprint
    step_bytes: int

    @property
    def may_load_cached_early(self) -> bool:
        """Whether a schedule may load rows of caches before the grid dependency wait."""
        return bool(self.plan.op.caches) and not self.plan.tiling.is_looped

    def suit(self, s: Schedule) -> bool:
        """Return whether a schedule uses its threads, and its tiles fit into registers."""
        threads = 32 * s.num_warps
        is_on_tensor_cores = not s.mma or bool(self.plan.layout.dots)
        is_busy = self.footprint.largest >= min(threads, 128)
        return is_on_tensor_cores and is_busy and self.footprint.held <= REGISTER_BUDGET * threads


class _Tilings:
    """What schedules of an op with the same tiles have in common, computed once."""

    def __init__(self, op: PlacedOp) -> None:
        self._planner = Planner(op)
        self._traffic = traffic(op)
        self._of_layouts: dict[tuple[object, ...], _Tiles] = {}
        self._known: dict[tuple[object, ...], _Tiles] = {}

    def of(self, s: Schedule) -> _Tiles:
        """Return what a schedule has in common with others.

        Raises:
            CodegenError: No kernel can be made of the op and the schedule.
        """
        layout = s.tiles, s.mma, s.weights_first
        kind = layout, s.reduce_after_loop
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = self._of(s, self._of_layouts.get(layout))
            self._of_layouts.setdefault(layout, known)
        return known

    def _of(self, s: Schedule, other: _Tiles | None) -> _Tiles:
        """Return the same, given that of a schedule with the same layout if there is one."""
        if other is None:
            plan = self._planner.plan(s)
            return _Tiles(plan, footprint(plan, self._traffic), _prefetchable_bytes(plan))
        plan = other.plan.with_schedule(s)
        tiles = with_same_layout(plan, other.footprint, self._traffic)
        return _Tiles(plan, tiles, other.step_bytes)


def _variants(tiles: _Tiles, schedule: Schedule, device: Device) -> Iterator[Schedule]:
    """Yield a schedule with more and more cooperating blocks and early prefetches."""
    # Blocks share a trimmed loop anew for each length, so up to 32 are tried.
    for blocks in (1, 2, 4, 8, 16, 32) if tiles.plan.loop_bounds.trims_any else (1, 2, 4, 8):
        if blocks > 1 and not _may_share(tiles, schedule, blocks, device):
            break
        steps = _prefetch_steps(tiles, schedule, blocks, device)
        if blocks > 1 or steps:
            schedule = schedule.changed(cooperating_blocks=blocks, prefetch_steps=steps)
        yield schedule
        if tiles.may_load_cached_early:
            early = schedule.changed(load_cached_early=True)
            if tiles.plan.with_schedule(early).cached_before_wait:
                yield early


def _may_share(tiles: _Tiles, schedule: Schedule, blocks: int, device: Device) -> bool:
    """Return whether this many blocks can share the loop of each tile, about evenly."""
    plan, tiling = tiles.plan, tiles.plan.tiling
    if len(tiling.block.loops) != 1 or not tiling.is_looped:
        return False
    steps = tiling.trips(str(tiling.loop))
    idle = -steps % (blocks * schedule.steps_per_trip)
    if blocks > 1 and (blocks - 1) * -(-steps // blocks) >= steps:  # one would have none
        return False
    most = MOST_BLOCKS_PER_SM
    if plan.with_schedule(schedule).pipelining.holds_words_ahead:
        most = MOST_BLOCKS_OF_WORDS if schedule.mma else MOST_BLOCKS_OF_ADDED_WORDS
        if idle:
            return False
    return idle <= MOST_IDLE * steps and tiling.num_tiles * blocks <= most * device.sms


def _prefetchable_bytes(p: KernelPlan) -> int:
    """Return the bytes of one loop step that may be prefetched before the grid wait."""
    tiling = p.tiling
    if tiling.loop is None:
        return 0
    return sum(
        math.ceil(tiling.numel(tiling.block.carried[i.name]) * element_bytes(tiling.dtype(i)))
        for i in tiling.block.inputs
        if tiling.loop in i.axes
        and tiling.prefetchable(i)
        and (tiling.is_looped or not tiling.is_constant(i))
    )


def _prefetch_steps(tiles: _Tiles, schedule: Schedule, blocks: int, device: Device) -> int:
    """Return the loop steps that a block prefetches, a power of two.

    They are 0 if a trip holds several steps, which are loaded before the wait.
    """
    if not tiles.step_bytes or schedule.steps_per_trip > 1:
        return 0
    tiling = tiles.plan.tiling
    blocks_per_sm = math.ceil(tiling.num_tiles * blocks / device.sms)
    steps = PREFETCH_BYTES // (tiles.step_bytes * blocks_per_sm)
    own_steps = -(-tiling.trips(str(tiling.loop)) // blocks)
    return min(1 << max(0, steps.bit_length() - 1), next_power_of_two(own_steps))


def smallest(op: KernelOp) -> Schedule:
    """Return the schedule with the smallest tiles."""
    assert op.block is not None
    tiles = {}
    packed = packed_axes(op)
    for a in op.block.axes:
        whole = next_power_of_two(op.block.split_size(a.name))
        least = {Role.GRID: packed.get(a.name, 1), Role.LOOP: min(32, whole), Role.TILE: whole}
        tiles[a.name] = least[a.role]
    return Schedule(tiles, reduce_after_loop=False)
