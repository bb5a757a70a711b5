"""Candidates one step away from the fastest: one choice of one kernel, or another number of splits.

The space of schedules samples these choices only coarsely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf import errors
from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.gpus import Device
from mirage_hf.graph import symbolic
from mirage_hf.graph.block import Role
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune.candidate_schedules import LONGEST_TRIP, packed_axes
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.cost import estimate
from mirage_hf.tune.cuda_schedules import estimate_cuda
from mirage_hf.tune.ranking import Schedules
from mirage_hf.tune.refit import refit
from mirage_hf.tune.schedule_cost import estimated_us
from mirage_hf.tune.space import REGISTER_BUDGET

#: The most splits of an axis.
MOST_SPLITS = 128

#: The most warps of a block.
_MOST_WARPS = 16


def neighbours(
    starts: Sequence[ScheduledCandidate],
    tried: Sequence[ScheduledCandidate],
    gpu: Device,
    schedules: Schedules,
    resplit: bool = True,
) -> list[ScheduledCandidate]:
    """Return untried candidates one step away from `starts`.

    Args:
        starts: The candidates to improve.
        tried: The candidates that were tried before.
        gpu: The GPU to estimate for.
        schedules: The schedules of an op whose kinds of product are allowed.
        resplit: Also try other numbers of splits.
    """
    others = _with_other_splits(starts, tried, gpu) if resplit else []
    return others + _with_other_schedules(starts, tried, gpu, schedules)


def _with_other_splits(
    starts: Sequence[ScheduledCandidate], tried: Sequence[ScheduledCandidate], gpu: Device
) -> list[ScheduledCandidate]:
    """Return candidates with half or twice as many splits, whose kernels were not tried."""
    known = {str(c.ugraph.kernels) for c in tried if c.ugraph.is_fused}
    found = []
    for start in starts:
        early = start.next_may_launch_early
        for ugraph, schedules in _other_splits(start):
            text = str(ugraph.kernels)
            if text in known:
                continue
            known.add(text)
            planned = _planned(place_kernels(ugraph, early), schedules, gpu)
            if planned is not None and all(p.fits(gpu) for p in planned):
                us = sum(p.us for p in planned)
                found.append(ScheduledCandidate(ugraph, schedules, us, next_may_launch_early=early))
    return found


def _other_splits(start: ScheduledCandidate) -> Iterator[tuple[UGraph, tuple[Schedule, ...]]]:
    """Yield a µGraph with half or twice as many splits of an axis, and its schedules refitted."""
    num_splits = {
        a.name: a.size
        for op in start.ugraph.block_ops
        if op.block
        for a in op.block.axes
        if op.block.axis_split_by(a.name) is not None
    }
    for axis, size in num_splits.items():
        for number in (size // 2, size * 2):
            if not 2 <= number <= MOST_SPLITS:
                continue
            try:
                other = symbolic.with_num_splits(start.ugraph, axis, number)
            except errors.GraphError:
                continue
            if other.kernels == start.ugraph.kernels:
                continue
            try:
                ops = place_kernels(other, start.next_may_launch_early)
                pairs = zip(start.schedules, start.placed(), ops, strict=True)
                refitted = tuple(refit(s, old, new) for s, old, new in pairs)
            except errors.CodegenError:
                continue
            yield other, refitted


def _with_other_schedules(
    starts: Sequence[ScheduledCandidate],
    tried: Sequence[ScheduledCandidate],
    gpu: Device,
    schedules: Schedules,
) -> list[ScheduledCandidate]:
    """Return untried candidates whose schedules differ in one choice of one kernel."""
    known = {(id(c.ugraph), c.schedules) for c in tried}
    found = []
    for start in starts:
        ops = start.placed()
        own = sum(estimated_us(op, s, gpu) for op, s in zip(ops, start.schedules, strict=True))
        library = start.estimate_us - own
        allowed = [
            {False} if own_schedule.cuda else {s.mma for s in schedules(op, gpu)}
            for op, own_schedule in zip(ops, start.schedules, strict=True)
        ]
        for chosen in _other_schedules(start, ops):
            planned = _planned(ops, chosen, gpu)
            if (
                planned is None
                or not all(p.mma in a for p, a in zip(planned, allowed, strict=True))
                or not all(p.fits(gpu) for p in planned)
                or (id(start.ugraph), chosen) in known
            ):
                continue
            known.add((id(start.ugraph), chosen))
            us = sum(p.us for p in planned) + library
            early = start.next_may_launch_early
            candidate = ScheduledCandidate(start.ugraph, chosen, us, next_may_launch_early=early)
            found.append(candidate)
    return found


def _other_schedules(
    start: ScheduledCandidate, ops: Sequence[PlacedOp]
) -> Iterator[tuple[Schedule, ...]]:
    """Yield a candidate's schedules with one choice of one kernel changed."""
    for n, (schedule, op) in enumerate(zip(start.schedules, ops, strict=True)):
        for change in (*_launch_changes(schedule, op), *_tile_changes(schedule, op)):
            changed = replace(schedule, **change)
            yield (*start.schedules[:n], changed, *start.schedules[n + 1 :])


def _launch_changes(s: Schedule, op: PlacedOp) -> Iterator[dict[str, Any]]:
    """Yield changes of a schedule that keep its tiles."""
    if s.persistent_blocks:
        for stages in (s.num_stages - 1, s.num_stages + 1, s.num_stages + 2):
            if stages >= 1:
                yield {"num_stages": stages}
    elif s.cuda:
        yield {"prefetch_steps": 1 - s.prefetch_steps}
        yield {"num_stages": 3 - s.num_stages}
    for steps in () if s.cuda else (0, s.prefetch_steps // 2, max(1, s.prefetch_steps * 2)):
        if steps != s.prefetch_steps:
            yield {"prefetch_steps": steps}
    is_trip = s.steps_per_trip > 1  # of a loop with one stage
    for stages in (
        () if s.cuda or is_trip else (s.num_stages - 1, s.num_stages + 1, s.num_stages + 2)
    ):
        if stages >= 1:
            yield {"num_stages": stages}
    if is_trip or (s.mma and s.num_stages == 1 and packed_axes(op)):
        for steps in (s.steps_per_trip // 2, s.steps_per_trip * 2):
            if 1 <= steps <= LONGEST_TRIP:
                yield {"steps_per_trip": steps}
    for warps in (s.num_warps // 2, s.num_warps * 2):
        if 1 <= warps <= _MOST_WARPS:
            yield {"num_warps": warps}
    may_cooperate = s.persistent_blocks or not s.cuda
    for blocks in (s.cooperating_blocks // 2, s.cooperating_blocks * 2) if may_cooperate else ():
        if blocks >= 1:
            yield {"cooperating_blocks": blocks}
    if s.mma:
        yield {"weights_first": not s.weights_first}
    assert op.block is not None
    loops = [a.name for a in op.block.named(Role.LOOP)]
    takes_one_trip = all(s.tiles[name] >= op.block.split_size(name) for name in loops)
    if op.caches and takes_one_trip and not s.cuda:
        yield {"load_cached_early": not s.load_cached_early}
    if op.next_may_launch_early:
        yield {"trigger_early": not s.trigger_early}


def _tile_changes(s: Schedule, op: PlacedOp) -> Iterator[dict[str, Any]]:
    """Yield changes that halve or double one tile.

    Half a tile of a loop is also tried with twice the loads in flight, or twice the blocks.
    """
    assert op.block is not None
    for axis in op.block.axes:
        if axis.role in (Role.TILE, Role.CLUSTER) or op.block.axis_split_by(axis.name) is not None:
            continue
        tile = s.tiles[axis.name]
        whole = next_power_of_two(op.block.split_size(axis.name))
        for changed in (tile // 2, tile * 2):
            if 1 <= changed <= whole:
                yield {"tiles": dict(s.tiles) | {axis.name: changed}}
        if axis.role is Role.LOOP and tile > 1 and not s.cuda:
            half = {"tiles": dict(s.tiles) | {axis.name: tile // 2}}
            yield half | {"num_stages": 2 * s.num_stages}
            yield half | {"cooperating_blocks": 2 * s.cooperating_blocks}


@dataclass(frozen=True)
class _Planned:
    """The estimate of a kernel with a schedule.

    Attributes:
        us: Estimated µs.
        registers: Registers of a thread for tiles.
        shared: Bytes of shared memory of a block.
        mma: Whether its products run on tensor cores. None: the schedule asks for that in vain.
        most_registers: How many registers it may have.
    """

    us: float
    registers: int
    shared: int
    mma: bool | None
    most_registers: int

    def fits(self, gpu: Device) -> bool:
        """Return whether all tiles fit. If they do not, a kernel may take minutes to compile."""
        return self.shared <= gpu.shared_bytes and self.registers <= self.most_registers


def _planned(
    ops: Sequence[PlacedOp], schedules: Sequence[Schedule], gpu: Device
) -> list[_Planned] | None:
    """Return the estimate of each kernel, or None if one cannot have its schedule."""
    try:
        return [_plan(op, s, gpu) for op, s in zip(ops, schedules, strict=True)]
    except errors.CodegenError:
        return None


def _plan(op: PlacedOp, schedule: Schedule, gpu: Device) -> _Planned:
    if schedule.cuda:
        found = estimate_cuda(op, schedule, gpu)
        most = gpu.registers // (32 * schedule.num_warps)
        return _Planned(found.us, found.registers, found.shared, False, min(255, most))
    plan = plan_kernel(op, schedule)
    cost = estimate(plan, gpu)
    mma = schedule.mma if plan.layout.dots or not schedule.mma else None
    return _Planned(cost.us, cost.registers, cost.shared, mma, REGISTER_BUDGET)
