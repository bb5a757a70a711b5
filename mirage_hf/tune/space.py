"""List the schedules worth trying for a block graph on a device: few, ranked by the cost model."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from mirage_hf import errors
from mirage_hf.codegen.default_schedule import choose_schedule
from mirage_hf.codegen.plan import KernelPlan, plan_kernel
from mirage_hf.codegen.plan.layout import MMA_COLUMNS, MMA_MIN
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.block import Axis, BlockGraph, Role
from mirage_hf.graph.kernel import DTensor, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune.cost import Footprint, estimate, footprint

#: Registers that a thread may spend on float32 tiles. Beyond it tiles spill.
REGISTER_BUDGET = 160

#: A kernel of last resort that needs more is not compiled. One that needed 9,764 was not done after
#: eight minutes. Where it becomes bearable was not measured.
HOPELESS_REGISTERS = 1024

#: How much worse each further schedule with the same tiles counts when choosing which to try.
REPEAT = 0.05

#: Most rows that multiply-adds are tried for.
FMA_ROWS = 8

#: Loops are shared among blocks as long as there are no more blocks than this for each SM.
MOST_BLOCKS_PER_SM = 4

#: Bytes that the blocks of an SM prefetch together before they wait: about what fills the memory
#: system.
PREFETCH_BYTES = 48 << 10


def schedules(op: KernelOp, device: Device = H200, limit: int = 256) -> list[Schedule]:
    """Return the schedules of a `customized` op, best estimate first.

    Both multiply-adds and tensor cores are kept if both apply.

    Raises:
        CodegenError: The block graph has no kernel at all.
    """
    return list(_ranked(op, device)[:limit])


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
    """Return the cost model's first choice."""
    return schedules(op, device, 1)[0]


def permitted(
    kinds: Iterable[tuple[UGraph, Collection[bool]]],
) -> Callable[[KernelOp, Device], list[Schedule]]:
    """Return a function that lists an op's schedules whose rounding holds, best estimate first.

    Args:
        kinds: Each µGraph with the kinds of product (`Schedule.mma`) whose rounding was found to
            hold in it. An op may use a kind that any µGraph with such a block graph may use,
            whatever the sizes of its axes.
    """
    known: dict[object, set[bool]] = {}
    for ugraph, may in kinds:
        for op in ugraph.block_ops:
            known.setdefault(_form(op), set()).update(may)
    return lambda op, device: [s for s in schedules(op, device) if s.mma in known[_form(op)]]


def _form(op: KernelOp) -> object:
    """Return a block graph without the sizes of its axes."""
    assert op.block is not None
    return op.block.inputs, op.block.stages, op.block.outputs


def chosen(op: KernelOp, may: Collection[bool]) -> Schedule | None:
    """Return the cost model's first choice among the permitted kinds of product, or None.

    The schedule of last resort comes at the end.

    Raises:
        CodegenError: The block graph has no kernel at all.
    """
    return next((s for s in (*schedules(op), smallest(op)) if s.mma in may), None)


@lru_cache(maxsize=256)
def _ranked(op: KernelOp, device: Device) -> tuple[Schedule, ...]:
    """Return all schedules of an op in the order to try them."""
    costs, reason = _costs(op, device)
    return _order(costs) if costs else (_last_resort(op, device, reason),)


def _costs(
    op: KernelOp, device: Device
) -> tuple[dict[Schedule, float], errors.CodegenError | None]:
    """Return the estimated µs of every schedule that fits, and why the last other one does not."""
    assert op.block is not None
    costs: dict[Schedule, float] = {}
    reason: errors.CodegenError | None = None
    known: dict[tuple[object, ...], tuple[KernelPlan, Footprint]] = {}
    for whole in _candidates(op.block, op):
        kind = whole.tiles, whole.mma, whole.weights_first, whole.reduce_after_loop
        try:
            alone = known[kind][0].with_schedule(whole) if kind in known else plan_kernel(op, whole)
            if kind not in known:
                known[kind] = alone, footprint(alone)
            tiles = known[kind][1]
            if (whole.mma and not alone.layout.dots) or not _busy(alone):
                continue
            for schedule in _shared(alone, device):
                # Early prefetches have no part in the estimate.
                cost = estimate(
                    alone.with_schedule(schedule) if schedule.cooperating_blocks > 1 else alone,
                    device,
                    tiles,
                )
                if cost.registers <= REGISTER_BUDGET and cost.shared <= device.shared_bytes:
                    costs[schedule] = cost.us
        except errors.CodegenError as e:
            reason = e
    return costs, reason


def _last_resort(op: KernelOp, device: Device, reason: errors.CodegenError | None) -> Schedule:
    """Return the schedule to use if no other fits.

    Raises:
        CodegenError: It has no kernel, or needs a hopeless number of registers.
    """
    fallback = smallest(op)
    try:
        needed = estimate(plan_kernel(op, fallback), device).registers
    except errors.CodegenError as e:
        raise reason or e from None
    if needed > HOPELESS_REGISTERS:
        raise errors.CodegenError(
            f"the tiles of {' '.join(f'{a}:{t}' for a, t in fallback.tiles.items())} need {needed} "
            "registers a thread, "
            f"and no schedule needs fewer; more than {HOPELESS_REGISTERS} are not compiled"
        )
    return fallback


def _order(costs: Mapping[Schedule, float]) -> tuple[Schedule, ...]:
    """Return schedules in the order to try them."""
    # Try the best of each set of tiles before the second best of any, because what the model cannot
    # see differs most between tiles.
    effective: dict[Schedule, float] = {}
    seen: Counter[tuple[bool, Mapping[str, int]]] = Counter()
    for s in sorted(costs, key=lambda s: (costs[s], tie_break(s))):
        effective[s] = costs[s] * (1 + REPEAT * seen[s.mma, s.tiles])
        seen[s.mma, s.tiles] += 1
    ranked = sorted(effective, key=effective.__getitem__)
    kinds = [[s for s in ranked if s.mma == mma] for mma in (False, True)]
    kinds.sort(key=lambda kind: effective[kind[0]] if kind else math.inf)
    # Two schedules of the likelier kind for each of the other, so a wrong estimate costs only time.
    first, second = kinds
    mixed: list[Schedule] = []
    while first or second:
        mixed += first[:2] + second[:1]
        first, second = first[2:], second[1:]
    return tuple(mixed)


def tie_break(s: Schedule) -> str:
    """Return a text that orders schedules with equal estimates, so the order is always the same."""
    words = [f"{axis}:{tile}" for axis, tile in s.tiles.items()]
    words.append("mma" if s.mma else "fma")
    if s.mma and s.weights_first:
        words.append("weights-first")
    if s.reduce_after_loop:
        words.append("lazy")
    words += [f"warps:{s.num_warps}", f"stages:{s.num_stages}"]
    if s.cooperating_blocks > 1:
        words.append(f"split:{s.cooperating_blocks}")
    if s.prefetch_steps:
        words.append(f"preload:{s.prefetch_steps}")
    if s.trigger_early:
        words.append("hasten")
    return " ".join(words)


def _shared(p: KernelPlan, device: Device) -> Iterator[Schedule]:
    """Yield a plan's schedule, and those with cooperating blocks and with early prefetches."""
    read = [
        i
        for i in p.tiling.block.inputs
        if p.tiling.loop
        and p.tiling.loop in i.axes
        and p.tiling.prefetchable(i)
        and (p.tiling.is_looped or not p.tiling.is_constant(i))
    ]
    step = sum(
        p.tiling.numel(p.tiling.block.carried[i.name]) * p.tiling.dtype(i).itemsize for i in read
    )
    loops = sum(s.loop is not None for s in p.tiling.block.stages)
    # A trimmed loop is shared by blocks anew for each length.
    ragged = any(p.loop_bounds.trimming(s) for s in p.tiling.block.stages)
    for blocks in (1, 2, 4, 8, 16, 32) if ragged else (1, 2, 4, 8):
        if blocks > 1 and (
            loops != 1
            or not p.tiling.is_looped
            or p.tiling.trips(str(p.tiling.loop)) % blocks
            or p.tiling.num_tiles * blocks > MOST_BLOCKS_PER_SM * device.sms
        ):
            break
        steps = (
            PREFETCH_BYTES // (step * math.ceil(p.tiling.num_tiles * blocks / device.sms))
            if step
            else 0
        )
        prefetch_steps = (
            min(
                1 << max(0, steps.bit_length() - 1),
                next_power_of_two(p.tiling.trips(str(p.tiling.loop)) // blocks),
            )
            if step
            else 0
        )
        yield replace(p.schedule, cooperating_blocks=blocks, prefetch_steps=prefetch_steps)


def _busy(p: KernelPlan) -> bool:
    """Whether every thread has something to load in an iteration."""
    biggest = max(
        (p.tiling.numel(p.tiling.block.carried[i.name]) for i in p.tiling.block.inputs), default=1
    )
    return biggest >= min(32 * p.schedule.num_warps, 128)


def smallest(op: KernelOp) -> Schedule:
    """Return the schedule with the smallest tiles."""
    assert op.block is not None
    tiles = {
        a.name: 1 if a.role is Role.GRID else whole if a.role is Role.TILE else min(32, whole)
        for a in op.block.axes
        for whole in (next_power_of_two(op.block.split_size(a.name)),)
    }
    return Schedule(tiles, reduce_after_loop=False)


#: Loop steps in flight for a tensor-core loop that is walked now and was held whole when it was
#: tuned.
PIPELINED = 3


def recut(schedule: Schedule, old: KernelOp, op: KernelOp, device: Device = H200) -> Schedule:
    """Return a schedule for axes of other sizes, from one that was tuned for the same block graph.

    Tiles are refitted. A longer loop is shared by more blocks if the cost model says so. If the
    result is no schedule, or needs far too many registers or too much shared memory, the cost model
    chooses one of the same kind.

    Args:
        schedule: The schedule that was tuned.
        old: The op that it was tuned for.
        op: The op with other sizes.
        device: The GPU.

    Raises:
        CodegenError: There is no schedule of this kind.
    """
    assert op.block is not None
    try:
        cut = _lengthened(fitted(schedule, op.block), op, plan_kernel(old, schedule), device)
        planned = plan_kernel(op, cut)
        needed = estimate(planned, device)
        if needed.registers > HOPELESS_REGISTERS or (
            planned.layout.dots and needed.shared > device.shared_bytes
        ):
            raise errors.CodegenError(
                f"a kernel for these sizes would need {needed.registers} registers a thread and "
                f"{needed.shared} "
                "bytes of shared memory"
            )
        return cut
    except errors.CodegenError:
        alike = [s for s in schedules(op, device) if s.mma == schedule.mma]
        if not alike:
            raise
        return alike[0]


def _lengthened(schedule: Schedule, op: KernelOp, before: KernelPlan, device: Device) -> Schedule:
    """Adapt a schedule to a longer loop.

    A loop that was held whole and is now walked needs loads ahead, and tiles that fit in shared
    memory.
    """
    now = plan_kernel(op, schedule)
    if (
        not now.tiling.is_looped
        or now.cooperation.steps_per_block <= before.cooperation.steps_per_block
    ):
        return schedule
    loop = str(now.tiling.loop)
    if not before.tiling.is_looped and now.layout.dots:
        schedule = replace(schedule, num_stages=max(PIPELINED, schedule.num_stages))
    while estimate(plan_kernel(op, schedule), device).shared > device.shared_bytes:
        stages, tile = schedule.num_stages, schedule.tiles[loop]
        if tile > 2 * MMA_MIN and stages <= PIPELINED:
            schedule = replace(schedule, tiles=dict(schedule.tiles) | {loop: tile // 2})
        elif stages > 1:
            schedule = replace(schedule, num_stages=stages - 1)
        else:
            break
    costs: dict[int, float] = {}
    for blocks in (n * schedule.cooperating_blocks for n in (1, 2, 4)):
        try:
            planned = plan_kernel(op, replace(schedule, cooperating_blocks=blocks))
        except errors.CodegenError:
            continue
        if blocks == schedule.cooperating_blocks or planned.grid <= MOST_BLOCKS_PER_SM * device.sms:
            costs[blocks] = estimate(planned, device).us
    return (
        replace(schedule, cooperating_blocks=min(costs, key=costs.__getitem__))
        if costs
        else schedule
    )


def fitted(schedule: Schedule, block: BlockGraph) -> Schedule:
    """Return a schedule without tiles longer than their axis and blocks without a loop step.

    An axis that must be held whole is held whole.
    """
    least = MMA_MIN if schedule.mma else 1
    tiles = {}
    for a in block.axes:
        whole = next_power_of_two(block.split_size(a.name))
        tile = schedule.tiles[a.name]
        tiles[a.name] = tile if tile <= whole else max(whole, min(least, tile))
        if a.role is Role.TILE and tiles[a.name] < whole:
            tiles[a.name] = whole
    blocks = schedule.cooperating_blocks
    for loop in {s.loop for s in block.stages if s.loop}:
        steps = -(-block.split_size(loop) // tiles[loop])
        while blocks > 1 and (blocks - 1) * -(-steps // blocks) >= steps:
            blocks //= 2
    return replace(schedule, tiles=tiles, cooperating_blocks=blocks)


def _candidates(block: BlockGraph, op: KernelOp) -> Iterator[Schedule]:
    """Yield every schedule to estimate."""
    operands = tuple(t for t in op.inputs if isinstance(t, DTensor))
    big = max(block.inputs, key=lambda i: sum(math.prod(operands[s].dims) for s in i.sources))
    products = [
        (set(block.carried[c.a]) - {c.over}, set(block.carried[c.b]) - {c.over})
        for c in block.contractions.values()
    ]
    for mma in (False, True) if products else (False,):
        choices = [(_tiles(block, a, big.axes, products, mma)) for a in block.axes]
        if any(not c for c in choices):
            continue
        names = [a.name for a in block.axes]
        for tiles in itertools.product(*choices):
            named = dict(zip(names, tiles, strict=True))
            walks = any(
                t < block.split_size(a.name)
                for a, t in zip(block.axes, tiles, strict=True)
                if a.role is Role.LOOP
            )
            if mma:
                if not all(
                    _fits_side(block, side, big.axes, named)
                    for x, y in products
                    for side in (x - y, y - x)
                ):
                    continue
                for warps, stages in itertools.product((4, 8), (2, 3, 4, 6) if walks else (1,)):
                    yield Schedule(named, mma=True, num_warps=warps, num_stages=stages)
                if max(tiles) >= 64:
                    for warps, stages in ((4, 3), (4, 4), (8, 3)) if walks else ((4, 1), (8, 1)):
                        yield Schedule(
                            named, mma=True, weights_first=False, num_warps=warps, num_stages=stages
                        )
            else:
                for warps, stages, lazy in itertools.product(
                    (1, 2, 4, 8), (1, 3) if walks else (1,), (True, False) if walks else (True,)
                ):
                    yield Schedule(
                        named, reduce_after_loop=lazy, num_warps=warps, num_stages=stages
                    )


def _tiles(
    block: BlockGraph,
    a: Axis,
    big: tuple[str | None, ...],
    products: list[tuple[set[str], set[str]]],
    mma: bool,
) -> tuple[int, ...]:
    """Return the tiles to try for one axis; empty if this kind of kernel does not suit it."""
    whole = next_power_of_two(block.split_size(a.name))
    multiplied = any(a.name in x ^ y for x, y in products)
    summed = any(c.over == a.name for c in block.contractions.values())
    if a.role is Role.TILE:
        return (
            (max(whole, MMA_MIN if summed else _least(block, a, big, products)),)
            if mma and a.size > 1
            else (whole,)
        )
    if a.role is Role.LOOP:
        tiles = (32, 64, 128, 256) if mma else (32, 64, 128, 256, 512, 1024, 2048, 4096)
        return tuple(t for t in tiles if t <= whole) or (max(whole, MMA_MIN) if mma else whole,)
    if block.axis_split_by(a.name) is not None:
        return (1,)
    if products and not multiplied:  # a batch axis: on both sides of every product, or on none
        return (1,)
    if mma and any(
        set(_side(block, side)) - {a}
        for x, y in products
        for side in (x - y, y - x)
        if a.name in side
    ):
        least = _least(block, a, big, products)
        return tuple(t for t in (1, 2, 4, 8, 16, 32, 64, 128) if least <= t <= max(whole, least))
    if a.name not in big:  # rows: one tile of the largest input serves all of them
        if mma:
            return tuple(
                t
                for t in (8, 16, 32, 64, 128)
                if (t >= MMA_MIN or whole < MMA_MIN) and t <= max(whole, MMA_MIN)
            )
        return (whole,) if whole <= FMA_ROWS else ()
    if mma:
        return tuple(t for t in (16, 32, 64, 128) if t <= max(whole, MMA_MIN))
    return tuple(t for t in (1, 2, 4, 8, 16, 32, 64, 128) if t <= whole)


#: Most elements of a side of a tensor-core product that several axes share.
LONGEST_SIDE = 128


def _side(block: BlockGraph, side: set[str]) -> list[Axis]:
    """Return the axes of one side of a product that have tiles of their own."""
    return [
        x
        for x in block.axes
        if x.name in side
        and x.size > 1
        and x.role is not Role.LOOP
        and block.axis_split_by(x.name) is None
    ]


def _least(
    block: BlockGraph,
    a: Axis,
    big: tuple[str | None, ...],
    products: list[tuple[set[str], set[str]]],
) -> int:
    """Return the smallest tile with which all products of an axis suit tensor cores.

    If all axes of a side are too short, one is padded: the last that is held whole, otherwise the
    last.
    """
    least = 1
    for side in (side for x, y in products for side in (x - y, y - x) if a.name in side):
        axes = sorted(
            {x.name: x for x in (*_side(block, side), a)}.values(),
            key=lambda x: (x.role is Role.TILE, block.axes.index(x)),
        )
        if axes[-1] is a:
            rest = math.prod(next_power_of_two(x.size) for x in axes[:-1])
            enough = _shortest(block, side, big)
            least = max(least, enough // min(enough, rest))
    return least


def _shortest(block: BlockGraph, side: set[str], big: tuple[str | None, ...]) -> int:
    """Return the fewest elements that a side of a tensor-core product may have.

    Fewer are allowed if the largest input has its rows on the other side.
    """
    short = math.prod(next_power_of_two(x.size) for x in _side(block, side)) <= MMA_COLUMNS
    return MMA_COLUMNS if short and not side & set(big) else MMA_MIN


def _fits_side(
    block: BlockGraph, side: set[str], big: tuple[str | None, ...], tiles: dict[str, int]
) -> bool:
    """Return whether a side of several axes is long enough for tensor cores, and not too long."""
    axes = _side(block, side)
    held = math.prod(tiles[x.name] for x in axes if x.role is Role.TILE)
    return len(axes) < 2 or _shortest(block, side, big) <= math.prod(
        tiles[x.name] for x in axes
    ) <= max(LONGEST_SIDE, held)
