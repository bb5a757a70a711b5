"""Estimate the registers and the shared memory of a block, and how many blocks an SM holds."""

from __future__ import annotations

import math

from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.gpus import Device
from mirage_hf.ops.dtypes import CODE_DTYPES
from mirage_hf.tune.footprint import Footprint, tile_bytes


def beside_words(plan: KernelPlan) -> list[str]:
    """Return the inputs of a loop along words of bytes that are no codes, such as x."""
    axes = {*plan.layout.byte_words.values()}
    return [
        i.name
        for i in plan.tiling.block.inputs
        if plan.tiling.dtype(i) not in CODE_DTYPES and axes.intersection(i.axes)
    ]


def exchanges(plan: KernelPlan) -> bool:
    """Return True if warps give each other what they multiply words of bytes by, in each step.

    Triton 3.6 loads an input again in each warp only if it has fewer elements than threads.
    """
    threads, words = 32 * plan.schedule.num_warps, {*plan.layout.byte_words.values()}
    beside = beside_words(plan)
    longest = max((plan.tiling.numel(plan.tiling.block.carried[i]) for i in beside), default=0)
    return bool(words) and plan.schedule.num_warps > 1 and longest >= threads


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
    if plan.layout.byte_words and plan.tiling.is_looped:
        return _registers_of_words(plan, tiles, partial)
    in_loop = max((sum(loads.values()) for loads in tiles.loads), default=0)
    held = tiles.held + (plan.schedule.steps_per_trip - 1) * in_loop / 4
    return math.ceil(max(held, partial) / (32 * plan.schedule.num_warps))


#: Registers of a thread that adds up words of bytes: addresses, sums and decoded codes. It takes
#: OF_AN_INPUT for 16 elements of an input beside them, or EXCHANGING to get these from other
#: threads. Counted in machine code for sm_90.
_OF_WORDS, _OF_AN_INPUT, _EXCHANGING = 28, 8, 28


def _registers_of_words(plan: KernelPlan, tiles: Footprint, partial: float) -> int:
    """Return the registers of a thread that adds up words of bytes in a loop."""
    threads = 32 * plan.schedule.num_warps
    words = sum(
        size / 4
        for loads in tiles.loads
        for i, size in loads.items()
        if i in plan.layout.byte_words
    )
    copies, steps = 1, plan.schedule.steps_per_trip
    if plan.pipelining.holds_words_ahead:
        copies = max(3 if exchanges(plan) else 2, steps)
    beside = _OF_AN_INPUT * steps * len(beside_words(plan))
    beside = _EXCHANGING if exchanges(plan) else beside
    return math.ceil(max(_OF_WORDS + beside + copies * words / threads, partial / threads))


def shared_bytes(plan: KernelPlan, tiles: Footprint) -> int:
    """Return the shared memory of a block.

    It holds the loads of all steps in flight, other factors of tensor-core products, and values
    that warps exchange. The step at work counts too if a product still reads it while the next one
    is copied.
    """
    per_iteration = max(
        (sum(_copies(plan, name) * size for name, size in loads.items()) for loads in tiles.loads),
        default=0,
    )
    stages, itemsize = plan.schedule.num_stages, plan.tiling.mma_dtype.itemsize
    if plan.pipelining.holds_words_ahead and not plan.layout.mma:
        return tiles.exchanged * plan.schedule.num_warps * 4
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


def _copies(plan: KernelPlan, name: str) -> int:
    """Return how often a tile is loaded: from each of the tensors that it may lie in, or once."""
    i = plan.tiling.inputs[name]
    return 1 if plan.tiling.selects_source(i) else len(i.sources)


def blocks_per_sm(plan: KernelPlan, registers: float, shared: int, device: Device) -> int:
    """Return how many blocks fit on one SM at a time."""
    threads = 32 * plan.schedule.num_warps
    by_threads = 2048 // threads
    by_registers = int(device.registers // (threads * min(255, max(32, registers))))
    by_shared = device.shared_bytes // (shared + 1024)
    return max(1, min(32, by_threads, by_registers, by_shared))
