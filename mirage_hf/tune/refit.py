"""Refit a tuned schedule to a block graph whose axes have other sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mirage_hf import errors
from mirage_hf.codegen.placement import placed
from mirage_hf.codegen.plan import KernelPlan, plan_kernel
from mirage_hf.codegen.plan.layout import MMA_MIN
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.codegen.streams.finding import streamed_products
from mirage_hf.codegen.streams.layout import other_rows, tiled_rows, tiles_of_rows
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.block import BlockGraph, Role
from mirage_hf.graph.kernel import KernelOp
from mirage_hf.tune.cost import estimate
from mirage_hf.tune.cuda_schedules import estimate_cuda
from mirage_hf.tune.space import HOPELESS_REGISTERS, MOST_BLOCKS_PER_SM, schedules

#: Loop steps in flight for a tensor-core loop that is walked now and was held whole when it was
#: tuned.
PIPELINED = 3


def refit(
    schedule: Schedule,
    old: KernelOp,
    op: KernelOp,
    device: Device = H200,
    names: Mapping[str, str] | None = None,
) -> Schedule:
    """Return a schedule for axes of other sizes, from one that was tuned for the same block graph.

    Tiles are refitted. A longer loop is shared by more blocks if the cost model says so. If the
    result is no schedule, the cost model chooses one of the same kind. It also chooses if the
    result needs far too many registers or too much shared memory. For CUDA kernels it never
    chooses.

    Args:
        schedule: The schedule that was tuned.
        old: The op that it was tuned for.
        op: The op with other sizes.
        device: The GPU.
        names: The names of the axes of `op`, by those of `old`. By default they are the same.

    Raises:
        CodegenError: There is no schedule of this kind.
    """
    assert op.block is not None
    if schedule.cuda:
        return _refit_in_cuda(schedule, op, device, names)
    try:
        tiles = {names[a] if names else a: tile for a, tile in schedule.tiles.items()}
        clipped = clip(replace(schedule, tiles=tiles), op.block)
        refitted = _for_longer_loop(clipped, op, plan_kernel(old, schedule), device)
        _check_resources(plan_kernel(op, refitted), device)
        return refitted
    except errors.CodegenError:
        alike = [s for s in schedules(op, device) if s.mma == schedule.mma]
        if not alike:
            raise
        return alike[0]


def _refit_in_cuda(
    schedule: Schedule, op: KernelOp, device: Device, names: Mapping[str, str] | None
) -> Schedule:
    """Return the schedule of a CUDA kernel with tiles that fit.

    Raises:
        CodegenError: The op has no CUDA kernel with such a schedule.
    """
    assert op.block is not None
    tiles = {names[a] if names else a: tile for a, tile in schedule.tiles.items()}
    if schedule.persistent_blocks:
        products = streamed_products(placed(op))
        rows = math.prod(tiles[a] for a in products.rows)
        tiles |= tiles_of_rows(products)
        if rows in other_rows(products):
            tiles |= tiled_rows(products, rows)
    clipped = clip(replace(schedule, tiles=tiles), op.block)
    estimate_cuda(placed(op), clipped, device)  # raises if it fits on no SM
    return clipped


def clip(schedule: Schedule, block: BlockGraph) -> Schedule:
    """Return a schedule without tiles longer than their axis and blocks without a loop step.

    A trip takes fewer steps if the steps of a block are no multiple of them.
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
    blocks, trip = schedule.cooperating_blocks, schedule.steps_per_trip
    # blocks that stream codes share columns, and none may be left out
    for loop in {s.loop for s in block.stages if s.loop and not schedule.persistent_blocks}:
        steps = -(-block.split_size(loop) // tiles[loop])
        while blocks > 1 and (blocks - 1) * -(-steps // blocks) >= steps:
            blocks //= 2
        own = -(-steps // blocks)
        trip = next(n for n in range(trip, 0, -1) if own % n == 0)
    return replace(schedule, tiles=tiles, cooperating_blocks=blocks, steps_per_trip=trip)


def _check_resources(planned: KernelPlan, device: Device) -> None:
    """Raise CodegenError if a kernel needs hopelessly many registers or too much shared memory."""
    needed = estimate(planned, device)
    too_many_registers = needed.registers > HOPELESS_REGISTERS
    too_much_shared = planned.layout.dots and needed.shared > device.shared_bytes
    if too_many_registers or too_much_shared:
        raise errors.CodegenError(
            f"a kernel for these sizes would need {needed.registers} registers a thread and "
            f"{needed.shared} bytes of shared memory"
        )


def _for_longer_loop(
    schedule: Schedule, op: KernelOp, before: KernelPlan, device: Device
) -> Schedule:
    """Adapt a schedule if each block walks more loop steps than it did before.

    A loop that was held whole and is now walked needs loads ahead, and tiles that fit in shared
    memory.
    """
    now = plan_kernel(op, schedule)
    if not now.tiling.is_looped:
        return schedule
    if now.cooperation.steps_per_block <= before.cooperation.steps_per_block:
        return schedule
    if not before.tiling.is_looped and now.layout.dots:
        schedule = replace(schedule, num_stages=max(PIPELINED, schedule.num_stages))
    schedule = _in_shared_memory(schedule, op, str(now.tiling.loop), device)
    return _with_best_cooperation(schedule, op, device)


def _in_shared_memory(schedule: Schedule, op: KernelOp, loop: str, device: Device) -> Schedule:
    """Shorten the loop's tile and the pipeline until shared memory suffices, as far as possible."""
    while estimate(plan_kernel(op, schedule), device).shared > device.shared_bytes:
        stages, tile = schedule.num_stages, schedule.tiles[loop]
        if tile > 2 * MMA_MIN and stages <= PIPELINED:
            schedule = replace(schedule, tiles=dict(schedule.tiles) | {loop: tile // 2})
        elif stages > 1:
            schedule = replace(schedule, num_stages=stages - 1)
        else:
            break
    return schedule


def _with_best_cooperation(schedule: Schedule, op: KernelOp, device: Device) -> Schedule:
    """Let one, two or four times as many blocks share the loop, whichever the model prefers."""
    assert op.block is not None
    most_blocks = MOST_BLOCKS_PER_SM * device.sms
    costs: dict[Schedule, float] = {}
    for blocks in (n * schedule.cooperating_blocks for n in (1, 2, 4)):
        try:
            shared = clip(replace(schedule, cooperating_blocks=blocks), op.block)
            planned = plan_kernel(op, shared)
        except errors.CodegenError:
            continue
        if blocks == schedule.cooperating_blocks or planned.grid <= most_blocks:
            costs[shared] = estimate(planned, device).us
    return min(costs, key=costs.__getitem__, default=schedule)
