"""Estimate how long the blocks of a multiply-add kernel take if they wait for their own loads.

Such a kernel reads weights once and computes little. So it is as fast as memory only if an SM has
enough loads in flight at all times. A block has none in flight while it starts, while it computes
and while it reduces its sums. Several small blocks on an SM fill these gaps, one large block does
not. Kernels with codes have estimates of their own (cost.py), because they are bound by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.gpus import Device
from mirage_hf.tune.footprint import Footprint
from mirage_hf.tune.occupancy import blocks_per_sm

#: µs from a load to its use, while all SMs read.
LOAD_US = 0.6

#: µs of a block beside its steps: its start, its last sums and its stores. WIDE_US is added for
#: each doubling of its warps.
BLOCK_US, WIDE_US = 0.4, 0.05

#: µs that several warps take in each step to exchange a vector, and to reduce their sums.
EXCHANGE_US, REDUCE_US = 0.1, 0.4

#: µs of each step that copies its tiles through shared memory.
STAGED_US = 0.1

#: µs before the first block starts and after the last one ends, without the launch.
START_US = 0.35

#: Bytes/s that one SM can load from the L2: 64 in each cycle.
FILL = 64 * 1.7e9

#: Instructions of an element that is loaded, multiplied or added. Counted for sm_90: 3.4 for each
#: weight.
INSTRUCTIONS = 1.2

#: ptxas unrolls the loop of a single warp this often if a thread has few elements in each step.
#: Then the loads of all these steps are in flight. Seen in machine code for sm_90.
UNROLLED, UNROLLED_ELEMENTS = 4, 16

#: Registers of a thread beside its tiles: addresses and indices.
ADDRESS_REGISTERS = 24

#: The share of the registers of its tiles that a thread needs if a loop is held whole. ptxas then
#: adds up each load as it arrives.
HELD_SHARE = 0.3

#: Of 433 kernels compiled for sm_90, half need at most the registers that the numbers above give, a
#: quarter more than 1.15 times as many, and a tenth more than SPREAD times as many. Which ones is
#: up to ptxas. So both cases are estimated, and the second counts a third.
SPREAD = 1.3

#: How sharply the longest of several times decides. Times that are nearly equal add up.
SHARPNESS = 10


def apply_to(plan: KernelPlan, tiles: Footprint) -> bool:
    """Return whether a kernel adds up products of its inputs without tensor cores and codes."""
    has_products = bool(plan.tiling.block.contractions)
    return has_products and not plan.layout.dots and not tiles.reads_codes


def body_us(
    plan: KernelPlan,
    tiles: Footprint,
    step: Step,
    shared_us: float,
    registers: int,
    shared: int,
    device: Device,
) -> float:
    """Return µs from the start of the first block to the end of the last.

    Args:
        plan: The kernel.
        tiles: Its footprint.
        step: A step of one of its blocks.
        shared_us: µs that the arithmetic and the L2, which all SMs share, take at least.
        registers: Registers that a thread needs for tiles.
        shared: Bytes of shared memory of a block.
        device: The GPU.
    """
    memory_us = 1e6 * tiles.moved / (device.bandwidth * tiles.contiguity)
    fullest = math.ceil(plan.grid / device.sms) / plan.grid
    of_one_sm_us = 1e6 * fullest * tiles.moved / device.sm_bandwidth
    held = registers if plan.tiling.is_looped else HELD_SHARE * registers
    likely = ADDRESS_REGISTERS + held
    us: dict[int, float] = {}

    def of_blocks(needed: float) -> float:
        """Return µs if a thread needs so many registers."""
        per_sm = blocks_per_sm(plan, needed, shared, device)
        if per_sm not in us:
            in_turns = blocks_us(plan, step, per_sm, device)
            us[per_sm] = joined((memory_us, of_one_sm_us, shared_us, in_turns))
        return us[per_sm]

    return START_US + (2 * of_blocks(likely) + of_blocks(SPREAD * likely)) / 3


def joined(us: Sequence[float]) -> float:
    """Return about the longest of several times, more if others are nearly as long."""
    longest = max(us)
    return longest * math.fsum([(x / longest) ** SHARPNESS for x in us]) ** (1 / SHARPNESS)


class Step(NamedTuple):
    """A step of a block: its µs of arithmetic, and all its µs if the block is alone on its SM."""

    work_us: float
    alone_us: float


def step_of(plan: KernelPlan, tiles: Footprint, device: Device) -> Step:
    """Return a step of a block."""
    work_us = 1e6 * INSTRUCTIONS * _step_work(plan, tiles) * device.sms / device.lane_rate
    return Step(work_us, _alone_us(plan, tiles, work_us))


def blocks_us(plan: KernelPlan, step: Step, per_sm: int, device: Device) -> float:
    """Return µs until all blocks are done if an SM holds `per_sm` of them."""
    steps = plan.cooperation.steps_per_block if plan.tiling.is_looped else 1
    resident = max(1.0, min(per_sm, plan.grid / device.sms))
    step_us = max(step.alone_us, resident * step.work_us)
    waves = plan.grid / (device.sms * per_sm)
    rounds = waves + 0.3 * (math.ceil(waves) - waves) if waves > 1 else 1.0
    block_us = BLOCK_US + WIDE_US * math.log2(plan.schedule.num_warps)
    return rounds * (block_us + steps * step_us)


def _step_work(plan: KernelPlan, tiles: Footprint) -> float:
    """Return the elements that a block computes in a step, or at all if it walks no loop."""
    return tiles.step_work if plan.tiling.is_looped else tiles.step_work + tiles.once_work


def _alone_us(plan: KernelPlan, tiles: Footprint, work_us: float) -> float:
    """Return µs of one step of a block that is alone on its SM."""
    schedule, is_looped = plan.schedule, plan.tiling.is_looped
    load_us = LOAD_US + 1e6 * _step_bytes(plan, tiles) / FILL
    after_us = work_us
    if is_looped and schedule.num_warps > 1:
        after_us += EXCHANGE_US
    if is_looped and not schedule.reduce_after_loop:
        after_us += REDUCE_US
    if is_looped and schedule.num_stages > 1:
        return max(after_us + STAGED_US, load_us / (schedule.num_stages - 1))
    if is_looped and schedule.num_warps == 1 and tiles.largest <= 32 * UNROLLED_ELEMENTS:
        return load_us / UNROLLED + after_us
    return load_us + after_us


def _step_bytes(plan: KernelPlan, tiles: Footprint) -> float:
    """Return the bytes that a block loads in a step, without those beyond the ends of axes."""
    if plan.tiling.is_looped:
        return tiles.step_bytes * tiles.within
    return (tiles.longest_step_bytes + tiles.once) * tiles.within
