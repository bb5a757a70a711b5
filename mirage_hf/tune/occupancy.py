"""Estimate the registers and the shared memory of a block, and how many blocks an SM holds."""

from __future__ import annotations

import math
from collections import Counter

from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.gpus import Device
from mirage_hf.tune.footprint import Footprint


def exchanges(plan: KernelPlan, tiles: Footprint) -> bool:
    """Return True if warps give each other what they multiply words of bytes by, in each step.

    Triton 3.6 loads an input again in each warp only if it has fewer elements than threads.
    """
    warps = plan.schedule.num_warps
    return warps > 1 and bool(plan.layout.byte_words) and tiles.longest_beside >= 32 * warps


def registers_of(plan: KernelPlan, tiles: Footprint) -> int:
    """Return the registers that a thread spends on tiles.

    Reading the partial results of several blocks may need more.
    """
    partial = plan.cooperation.most_gathered
    if plan.layout.byte_words and plan.tiling.is_looped:
        return _registers_of_words(plan, tiles, partial)
    held = tiles.held + (plan.schedule.steps_per_trip - 1) * tiles.longest_step_bytes / 4
    if plan.tiling.is_looped:  # otherwise all factors are counted already
        held += _factors_beside_a_shared_one(plan)
    return math.ceil(max(held, partial) / (32 * plan.schedule.num_warps))


def _factors_beside_a_shared_one(plan: KernelPlan) -> float:
    """Return the registers of all threads for right factors beside a shared left one.

    If two products of a stage have one computed left factor, kernels of Triton 3.6 have registers
    for both stored right factors. Other factors are loaded piece by piece. An asynchronous product
    reads a stored factor from shared memory.
    """
    layout, stored = plan.layout, plan.tiling.inputs
    held, warps = 0.0, plan.schedule.num_warps
    for stage in plan.tiling.block.stages:
        computed = {op.out for op in stage.body}
        dots = [
            d
            for d in layout.dots.values()
            if d.contraction.product in computed and not plan.pipelining.is_asynchronous(d)
        ]
        readers = Counter(d.left for d in dots if d.left not in stored)
        for dot in dots:
            if readers[dot.left] > 1 and dot.right in stored:
                copies = _warps_along_rows(layout.rows(dot), layout.columns(dot), warps)
                held += copies * plan.tiling.elements[dot.right] * dot.dtype.itemsize / 4
    return held


def _warps_along_rows(rows: int, columns: int, warps: int) -> int:
    """Return among how many warps Triton 3.6 divides the rows of a product's result.

    The others divide its columns. A warp takes at least 16 rows. Each warp along the rows holds the
    right factor of its columns.
    """
    by_rows = by_columns = 1
    while by_rows * by_columns < warps:
        if rows * by_columns >= columns * by_rows and 16 * by_rows < rows:
            by_rows *= 2
        else:
            by_columns *= 2
    return by_rows


#: Registers of a thread that adds up words of bytes: addresses, sums and decoded codes. It takes
#: OF_AN_INPUT for 16 elements of an input beside them, or EXCHANGING to get these from other
#: threads. Counted in machine code for sm_90.
_OF_WORDS, _OF_AN_INPUT, _EXCHANGING = 28, 8, 28


def _registers_of_words(plan: KernelPlan, tiles: Footprint, partial: float) -> int:
    """Return the registers of a thread that adds up words of bytes in a loop."""
    threads = 32 * plan.schedule.num_warps
    exchanging, steps = exchanges(plan, tiles), plan.schedule.steps_per_trip
    copies = 1
    if plan.pipelining.holds_words_ahead:
        copies = max(3 if exchanging else 2, steps)
    beside = _EXCHANGING if exchanging else _OF_AN_INPUT * steps * tiles.beside_words
    words = copies * (tiles.words / 4) / threads
    return math.ceil(max(_OF_WORDS + beside + words, partial / threads))


def shared_bytes(plan: KernelPlan, tiles: Footprint) -> int:
    """Return the shared memory of a block.

    It holds the loads of all steps in flight, other factors of tensor-core products, and values
    that warps exchange. The step at work counts too if a product still reads it while the next one
    is copied.
    """
    per_iteration, stages = tiles.longest_step_copied, plan.schedule.num_stages
    itemsize = plan.tiling.mma_dtype.itemsize
    pipelining = plan.pipelining
    if pipelining.holds_words_ahead and not plan.layout.mma:
        return tiles.exchanged * plan.schedule.num_warps * 4
    if plan.tiling.is_looped and stages > 1:
        exchanged = tiles.exchanged * plan.schedule.num_warps * 4
        # Inputs read twice move from registers into the layout of the product.
        again = sum(plan.tiling.input_bytes[i] for i in pipelining.loaded_twice)
        # Factors in code order are moved, so no product reads what was copied.
        is_read_later = pipelining.has_asynchronous
        if tiles.scaled and not pipelining.read_asynchronously:
            is_read_later = False
        return (
            per_iteration * (stages if is_read_later else stages - 1)
            + again
            + (tiles.unstaged - _scaled_in_registers(plan)) * itemsize
            + exchanged
        )
    # A product held whole is fed through shared memory.
    return max(per_iteration, tiles.factors * itemsize)


def _scaled_in_registers(plan: KernelPlan) -> int:
    """Return the elements of scaled codes that tensor cores take from registers.

    An asynchronous product takes only its left factor from there.
    """
    dots, scaled = plan.layout.dots.values(), plan.layout.scaled_factors
    elements, is_asynchronous = plan.tiling.elements, plan.pipelining.is_asynchronous
    in_registers = {d.left for d in dots} | {d.right for d in dots if not is_asynchronous(d)}
    return sum(elements[x] for x in in_registers & scaled)


def blocks_per_sm(plan: KernelPlan, registers: float, shared: int, device: Device) -> int:
    """Return how many blocks fit on one SM at a time."""
    threads = 32 * plan.schedule.num_warps
    by_registers = int(device.registers // (threads * min(255, max(32, registers))))
    by_shared = device.shared_bytes // (shared + 1024)
    return max(1, min(32, 2048 // threads, by_registers, by_shared))
