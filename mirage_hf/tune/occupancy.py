"""Estimate the registers and the shared memory of a block, and how many blocks an SM holds."""

from __future__ import annotations

import math

from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.gpus import Device
from mirage_hf.tune.footprint import Footprint, tile_bytes


def registers_of(plan: KernelPlan, tiles: Footprint) -> int:
    """Return the registers that a thread spends on tiles.

    Reading the partial results of several blocks may need more.
    """
    partial = max(
        (
            plan.cooperation.gathered(a)
            * math.prod(plan.cooperation.counted(x) for x in plan.layout.value_dims(a.out))
            for a in plan.cooperation.shared_accumulators
        ),
        default=0,
    )
    in_loop = max((sum(loads.values()) for loads in tiles.loads), default=0)
    held = tiles.held + (plan.schedule.steps_per_trip - 1) * in_loop / 4
    return math.ceil(max(held, partial) / (32 * plan.schedule.num_warps))


def shared_bytes(plan: KernelPlan, tiles: Footprint) -> int:
    """Return the shared memory of a block.

    It holds the loads of all steps in flight, other factors of tensor-core products, and values
    that warps exchange. The step at work counts too if a product still reads it while the next one
    is copied.
    """
    per_iteration = max((sum(loads.values()) for loads in tiles.loads), default=0)
    stages, itemsize = plan.schedule.num_stages, plan.tiling.mma_dtype.itemsize
    if plan.tiling.is_looped and stages > 1:
        exchanged = tiles.exchanged * plan.schedule.num_warps * 4
        # Inputs read twice move from registers into the layout of the product.
        again = sum(tile_bytes(plan, i) for i in plan.pipelining.loaded_twice)
        late = any(plan.pipelining.is_asynchronous(d) for d in plan.layout.dots.values())
        return (
            per_iteration * (stages if late else stages - 1)
            + again
            + tiles.unstaged * itemsize
            + exchanged
        )
    # A product held whole is fed through shared memory.
    return max(per_iteration, tiles.factors * itemsize)


def blocks_per_sm(plan: KernelPlan, registers: float, shared: int, device: Device) -> int:
    """Return how many blocks fit on one SM at a time."""
    threads = 32 * plan.schedule.num_warps
    by_threads = 2048 // threads
    by_registers = int(device.registers // (threads * min(255, max(32, registers))))
    by_shared = device.shared_bytes // (shared + 1024)
    return max(1, min(32, by_threads, by_registers, by_shared))
