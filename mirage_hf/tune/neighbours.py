"""Candidates one step away from the fastest: one choice of one kernel, or another number of splits.

The space of schedules samples these choices only coarsely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mirage_hf import errors
from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.plan import KernelPlan, plan_kernel
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.gpus import Device
from mirage_hf.graph import symbolic
from mirage_hf.graph.block import Role
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.cost import Cost, estimate
from mirage_hf.tune.ranking import Schedules
from mirage_hf.tune.refit import refit
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
            if planned is not None and _all_fit(planned, gpu):
                us = sum(cost.us for _, cost in planned)
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
        own = sum(
            estimate(plan_kernel(op, s), gpu).us for op, s in zip(ops, start.schedules, strict=True)
        )
        library = start.estimate_us - own
        allowed = [{s.mma for s in schedules(op, gpu)} for op in ops]
        for chosen in _other_schedules(start, ops):
            planned = _planned(ops, chosen, gpu)
            if (
                planned is None
                or not all(_allows(a, p) for (p, _), a in zip(planned, allowed, strict=True))
                or not _all_fit(planned, gpu)
                or (id(start.ugraph), chosen) in known
            ):
                continue
            known.add((id(start.ugraph), chosen))
            us = sum(cost.us for _, cost in planned) + library
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
    for steps in (0, s.prefetch_steps // 2, max(1, s.prefetch_steps * 2)):
        if steps != s.prefetch_steps:
            yield {"prefetch_steps": steps}
    for stages in (s.num_stages - 1, s.num_stages + 1, s.num_stages + 2):
        if stages >= 1:
            yield {"num_stages": stages}
    for warps in (s.num_warps // 2, s.num_warps * 2):
        if 1 <= warps <= _MOST_WARPS:
            yield {"num_warps": warps}
    for blocks in (s.cooperating_blocks // 2, s.cooperating_blocks * 2):
        if blocks >= 1:
            yield {"cooperating_blocks": blocks}
    if s.mma:
        yield {"weights_first": not s.weights_first}
    if op.next_may_launch_early:
        yield {"trigger_early": not s.trigger_early}


def _tile_changes(s: Schedule, op: PlacedOp) -> Iterator[dict[str, Any]]:
    """Yield changes that halve or double one tile.

    Half a tile of a loop is also tried with twice the loads in flight, or twice the blocks.
    """
    assert op.block is not None
    for axis in op.block.axes:
        if axis.role is Role.TILE or op.block.axis_split_by(axis.name) is not None:
            continue
        tile = s.tiles[axis.name]
        whole = next_power_of_two(op.block.split_size(axis.name))
        for changed in (tile // 2, tile * 2):
            if 1 <= changed <= whole:
                yield {"tiles": dict(s.tiles) | {axis.name: changed}}
        if axis.role is Role.LOOP and tile > 1:
            half = {"tiles": dict(s.tiles) | {axis.name: tile // 2}}
            yield half | {"num_stages": 2 * s.num_stages}
            yield half | {"cooperating_blocks": 2 * s.cooperating_blocks}


def _planned(
    ops: Sequence[PlacedOp], schedules: Sequence[Schedule], gpu: Device
) -> list[tuple[KernelPlan, Cost]] | None:
    """Return the plan and the cost of each kernel, or None if one cannot have its schedule."""
    try:
        plans = [plan_kernel(op, s) for op, s in zip(ops, schedules, strict=True)]
        return [(plan, estimate(plan, gpu)) for plan in plans]
    except errors.CodegenError:
        return None


def _all_fit(planned: Sequence[tuple[KernelPlan, Cost]], gpu: Device) -> bool:
    """Return whether all tiles fit. Kernels whose tiles do not fit may take minutes to compile."""
    return all(
        cost.shared <= gpu.shared_bytes and cost.registers <= REGISTER_BUDGET for _, cost in planned
    )


def _allows(kinds: set[bool], plan: KernelPlan) -> bool:
    """Return whether a plan's kind of product is allowed, and is what its tiles give."""
    mma = plan.schedule.mma
    return mma in kinds and (bool(plan.layout.dots) or not mma)
