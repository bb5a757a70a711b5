"""Estimate what a kernel takes on a GPU, in µs: from bytes, instructions, launches and occupancy.

Estimates rank candidates. They promise nothing; the tuner measures.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.graph.effects import APPEND, parts_of
from mirage_hf.graph.kernel import DTensor, KernelOp
from mirage_hf.ops.dtypes import CODES_PER_WORD
from mirage_hf.tune import correction, multiply_adds
from mirage_hf.tune.footprint import (
    BESIDE_SCALED,
    SCALED_STEP,
    Footprint,
    adds_in_runs,
    footprint,
)
from mirage_hf.tune.occupancy import (
    blocks_per_sm,
    exchanges,
    registers_of,
    shared_bytes,
)


class Cost(NamedTuple):
    """An estimate for one launch, and what it was made of.

    Attributes:
        us: Estimated microseconds.
        bytes: Bytes that must move between device memory and the chip.
        l2_bytes: Bytes that all blocks together load.
        instructions: Instructions of all lanes.
        mma_flops: Operations on tensor cores.
        registers: Registers that a thread needs for tiles.
        shared: Bytes of shared memory of a block.
        blocks_per_sm: Blocks that fit on one SM at a time.
    """

    us: float
    bytes: int
    l2_bytes: int
    instructions: float
    mma_flops: float
    registers: int
    shared: int
    blocks_per_sm: int


#: Least µs of a loop step with a running maximum. Such a step has two products that depend on each
#: other, and maxima and sums that warps exchange. Measured 1.0 to 1.2 on an H200 with 1 to 4 warps
#: and tiles of 32 to 128. Blocks on one SM do it side by side.
RESCALED_US = 1.1

#: µs of a step of another tensor-core loop, if its only sums are those of tensor cores. STEP_US
#: counts for each product, and ELEMENT_US for each other element (scaled factors, squares that are
#: added up). Blocks on one SM take turns. AHEAD_US is the least if something is loaded only one
#: step ahead. Fitted to 415 kernels of linears of 16 and 32 rows after a norm, measured on an H200:
#: steps took 0.2 to 1.5 µs. The rank correlation of estimates and times rose from -0.6..-0.3 to
#: 0.6..0.9.
STEP_US, ELEMENT_US, AHEAD_US = 0.15, 4.5e-5, 0.5

#: Reads and arithmetic on codes overlap. This share of the shorter one is not hidden.
EXPOSED = 0.4

#: Instructions of a thread that multiplies packed codes, beside those of codes: in each step, and
#: before and after all steps. The codes of a word are decoded by one thread, so a thread without a
#: word of its own decodes another one's again. Counted in machine code for sm_90, in 215 kernels of
#: one row (docs/decisions/010-tuning.md).
PACKED_STEP, PACKED_BLOCK = 85, 200

#: Instructions of an element that a thread gets from another one and adds.
EXCHANGED = 2

#: Instructions that a code of a byte takes as a factor on tensor cores, its load and its product
#: among them. Counted in machine code for sm_90.
BYTE_FACTOR = 4.0

#: Warps that keep an SM busy with them. This is a guess.
BUSY_WARPS = 12

#: Instructions that a thread takes in each step for each input beside words of bytes: it converts
#: 16 elements of its own, or gets them from other threads. Counted in machine code for sm_90.
BESIDE_WORDS, EXCHANGED_WORDS = 22, 8

#: The speed-up of reads, by the number of loop steps whose loads are issued together. These loads
#: lie side by side. Measured on an H200 with 64 bytes a step: 18.8 µs alone, 17.2 with two steps,
#: 15.0 with eight. The value for four is interpolated.
TOGETHER = {1: 1.0, 2: 1.09, 4: 1.17, 8: 1.25}

#: The share of the steps of a trip whose loads are in flight, on average. Each half is loaded again
#: as soon as it is used, so it is between one half and all of them.
IN_FLIGHT = 0.75

#: The least µs that an SM takes for each block, whatever it does. Measured on an H200: kernels that
#: decode 1,024 codes in each of 57,344 blocks took 70.5 µs with one warp and with two. With half as
#: many blocks they took 46.
BLOCK_US = 0.16

#: Beside the registers of tiles, those of a thread that decodes scaled codes for tensor cores.
#: Counted in machine code for sm_90.
BESIDE_TILES = 56

#: Such a kernel waits for its decoding, its products and its copies in turn, and only other warps
#: of the SM work meanwhile. Kernels for the experts of gpt-oss took 1.5 to 1.7 times the estimate
#: without this factor if an SM held 16 of their warps, 1.8 to 1.9 with 12, and 2.4 to 2.7 with 8
#: (H200). This number multiplies instructions by 1.75, 2 and 2.5.
HIDING_WARPS = 12

#: How many times as long it takes if the codes are the second factor: the median of 140 pairs of
#: schedules.
SECOND = 1.25

#: The share of the bandwidth that library kernels reach.
_LIBRARY_BANDWIDTH = 0.85


def estimate(
    plan: KernelPlan,
    device: Device = H200,
    tiles: Footprint | None = None,
    trigger_early: bool | None = None,
) -> Cost:
    """Estimate one launch of a planned block graph.

    Args:
        plan: The block graph with its schedule.
        device: The GPU.
        tiles: The footprint of the plan, if it is known.
        trigger_early: Another value of `Schedule.trigger_early` than that of the schedule.
    """
    cost, known = uncorrected(plan, device, tiles, trigger_early)
    return cost if known is None else cost._replace(us=correction.corrected(cost.us, known))


def uncorrected(
    plan: KernelPlan,
    device: Device = H200,
    tiles: Footprint | None = None,
    trigger_early: bool | None = None,
) -> tuple[Cost, dict[str, float] | None]:
    """Return an estimate without its correction, and the features that decide the correction.

    They are None if the kernel has no correction. The arguments are those of `estimate`.
    """
    if tiles is None:
        tiles = footprint(plan)
    if trigger_early is None:
        trigger_early = plan.schedule.trigger_early
    cooperation, grid = plan.cooperation, plan.grid
    trips = cooperation.steps_per_block if plan.tiling.loop else 1
    loop_bytes = tiles.longest_step_bytes
    if plan.tiling.is_looped:
        loop_bytes = tiles.step_bytes * trips
    l2 = (loop_bytes + tiles.once) * grid + 8 * cooperation.scratch
    instructions = float(trips * tiles.step_work + tiles.once_work) * grid * tiles.element_work
    if tiles.beside_words:
        instructions += float(trips * _beside_words(plan, tiles) * grid)
    if tiles.packed:
        instructions += _beside_packed(plan, tiles, trips) * grid
    if tiles.scaled:
        instructions += float(trips) * _beside_scaled(plan, tiles) * grid
    flops = (trips * tiles.step_flops + tiles.once_flops) * grid

    registers, shared = registers_of(plan, tiles), shared_bytes(plan, tiles)
    per_sm = blocks_per_sm(plan, registers + BESIDE_TILES * bool(tiles.scaled), shared, device)
    busy = min(1.0, grid / device.sms)
    if tiles.packed:  # their arithmetic lasts until the SM with the most blocks is done
        busy = grid / device.sms / math.ceil(grid / device.sms)  # instead of `tail`
    # An early trigger hides the launch of the next kernel.
    hides_launch = trigger_early and plan.op.next_may_launch_early
    launch_us = 0.0 if hides_launch else device.launch_us
    meeting_us = device.meeting_us if cooperation.scratch else 0.0
    arithmetic = instructions / (device.lane_rate * busy)
    if multiply_adds.apply_to(plan, tiles):
        seconds = max(l2 / device.l2_bandwidth, arithmetic)
        step = multiply_adds.step_of(plan, tiles, device)
        body_us = multiply_adds.body_us(plan, tiles, step, 1e6 * seconds, registers, shared, device)
        us = launch_us + body_us + meeting_us
        known = None
        if tiles.reads_weights:  # and has one row, as in the fit
            known = correction.features(
                plan,
                tiles,
                device,
                us=us,
                blocks_us=multiply_adds.blocks_us(plan, step, per_sm, device),
                arithmetic_us=1e6 * instructions / device.lane_rate,
                l2_bytes=l2,
                registers=registers,
                per_sm=per_sm,
                trigger_early=trigger_early,
            )
        return Cost(us, tiles.moved, l2, instructions, flops, registers, shared, per_sm), known
    waves = grid / (device.sms * per_sm)
    tail = 1.0
    if waves > 1 and not tiles.packed:
        tail += 0.3 * (math.ceil(waves) / waves - 1.0)
    rate = _read_rate(plan, tiles, trips, per_sm, device)
    hidden = _hidden_bytes(plan, tiles, waves)
    reads = max((tiles.moved - hidden) / rate, (l2 - hidden) / device.l2_bandwidth)
    if tiles.scaled:
        resident = plan.schedule.num_warps * min(per_sm, max(1.0, grid / device.sms))
        arithmetic *= 1 + HIDING_WARPS / resident
        if any(d.right in plan.layout.scaled_factors for d in plan.layout.dots.values()):
            arithmetic *= SECOND
    seconds = max(reads, arithmetic, flops / (device.mma_rate * busy))
    if not plan.tiling.block.contractions:
        seconds = max(seconds, 1e-6 * BLOCK_US * grid / device.sms)
    holds_ahead = plan.pipelining.holds_words_ahead
    is_staged = bool(plan.layout.code_factors) and not holds_ahead
    if holds_ahead and not plan.layout.mma:
        # Loads of later steps hide the arithmetic, unless both are about as long.
        seconds = multiply_adds.joined((seconds, arithmetic))
        if exchanges(plan, tiles):
            turns = grid / (device.sms * per_sm)
            seconds += 1e-6 * multiply_adds.EXCHANGE_US * trips * turns
    elif adds_in_runs(plan) or is_staged:
        # The longer one hides the shorter one only in part.
        seconds += EXPOSED * min(reads, arithmetic)
    if tiles.byte_factors:
        converted = BYTE_FACTOR * trips * tiles.byte_factors * grid / (device.lane_rate * busy)
        warps = plan.schedule.num_warps * min(per_sm, max(1.0, grid / device.sms))
        seconds += EXPOSED * converted / min(1.0, warps / BUSY_WARPS)
    again_us = 0.0
    if tiles.rescales:
        seconds = max(seconds, 1e-6 * RESCALED_US * trips * math.ceil(waves))
    elif tiles.accumulating:
        work = tiles.step_work - tiles.scaled / tiles.element_work
        step_us = STEP_US * tiles.accumulating + ELEMENT_US * work * _copies(plan)
        turns = max(1.0, grid / device.sms)
        ahead_us = AHEAD_US if plan.pipelining.loaded_twice or plan.pipelining.loaded_ahead else 0.0
        seconds = max(seconds, 1e-6 * trips * max(ahead_us, step_us * turns))
        # Blocks of a later wave begin their loads anew.
        again_us = device.latency_us * (math.ceil(waves) - 1) / per_sm
    body_us = tail * seconds * 1e6 * _detours(plan)
    us = launch_us + device.latency_us + again_us + body_us + meeting_us
    return Cost(us, tiles.moved, l2, instructions, flops, registers, shared, per_sm), None


def _hidden_bytes(plan: KernelPlan, tiles: Footprint, waves: float) -> float:
    """Return half of the bytes that blocks of the first wave load before their grid wait.

    The previous kernel hides about half of the time of these loads.
    """
    loaded = plan.grid * sum(plan.tiling.input_bytes[i.name] for i in plan.cached_before_wait)
    return min(loaded / max(1.0, waves), tiles.moved) / 2


def _read_rate(
    plan: KernelPlan, tiles: Footprint, trips: int, per_sm: int, device: Device
) -> float:
    """Return the bytes per second that the blocks in flight read from device memory."""
    ahead = 1.0
    if plan.tiling.is_looped and plan.schedule.num_stages > 1:
        ahead = plan.schedule.num_stages - 1.0
        if plan.layout.dots:
            # A tile that tensor cores read must be done before the next copy begins. Measured:
            # 36 µs with three tiles ahead, 58 with one.
            ahead -= 0.5
    together = 1.0
    if plan.schedule.steps_per_trip > 1:
        ahead = IN_FLIGHT * plan.schedule.steps_per_trip
        half = len(plan.pipelining.loaded_together[0])
        together = max(gain for steps, gain in TOGETHER.items() if steps <= half)
    concurrent = min(plan.grid, device.sms * per_sm)
    in_flight = concurrent * max(tiles.streamed, 256) * min(ahead, trips)
    fill = min(1.0, in_flight / (device.sms * device.flight_bytes))
    of_memory = device.bandwidth * max(fill, 0.02)
    of_sms = device.sm_bandwidth * min(plan.grid, device.sms)
    return min(of_memory, of_sms) * min(1.0, tiles.contiguity * together)


def _beside_words(plan: KernelPlan, tiles: Footprint) -> int:
    """Return the instructions of a block's step for inputs beside words of bytes."""
    each = EXCHANGED_WORDS if exchanges(plan, tiles) else BESIDE_WORDS
    return 32 * plan.schedule.num_warps * each * tiles.beside_words


def _beside_packed(plan: KernelPlan, tiles: Footprint, trips: int) -> float:
    """Return the instructions of a block that multiplies packed codes, beside those of codes.

    Several threads may decode the same code. One of them counts elsewhere, and the others here.
    """
    threads = 32 * plan.schedule.num_warps
    again = sum(max(0, CODES_PER_WORD * threads - codes) for codes in tiles.packed)
    elements = 3 * again  # decoded, multiplied and added
    step = PACKED_STEP * threads + elements * tiles.element_work + EXCHANGED * tiles.reduced
    return trips * step + PACKED_BLOCK * threads


def _beside_scaled(plan: KernelPlan, tiles: Footprint) -> float:
    """Return the instructions of a block's step beside those that decode each code once.

    They are for the other factor, and for codes that several warps decode because there are more
    warps than 16 rows of them.
    """
    layout, warps = plan.layout, plan.schedule.num_warps
    total = float(32 * warps * SCALED_STEP)
    for dot in layout.dots.values():
        codes = [x for x in (dot.left, dot.right) if x in layout.scaled_factors]
        if not codes:
            continue
        other = dot.right if dot.left in codes else dot.left
        is_second = dot.right in codes
        if not is_second:
            again = warps / -(-layout.rows(dot) // 16) - 1
            total += max(0.0, again) * tiles.scaled / len(layout.dots)
        each = BESIDE_SCALED[0 if is_second else 1]
        copies = max(1.0, warps / -(-layout.rows(dot) // 16)) if is_second else 1.0
        total += each * copies * plan.tiling.elements[other]
    return total


def _copies(plan: KernelPlan) -> float:
    """Return how many warps handle one element of a computed factor.

    Such a factor lies in the registers of warps that take 16 rows, or 8 columns, each. An
    asynchronous product takes what it multiplies with scaled codes from shared memory.
    """
    warps = plan.schedule.num_warps
    layout, inputs = plan.layout, plan.tiling.inputs
    is_asynchronous = plan.pipelining.is_asynchronous
    held = [
        d
        for d in layout.dots.values()
        if d.left not in layout.scaled_factors or not is_asynchronous(d)
    ]
    most = [-(-layout.rows(d) // 16) for d in held if d.left not in inputs]
    most += [-(-layout.columns(d) // 8) for d in held if d.right not in inputs]
    return max([1.0, *(warps / n for n in most)])


def _detours(plan: KernelPlan) -> float:
    """Return a factor of small preferences among estimates that bandwidth makes equal."""
    schedule, on_tensor_cores = plan.schedule, bool(plan.layout.dots)
    if on_tensor_cores:
        return 1.02
    # Multiply-adds gain nothing from staging.
    is_staged = schedule.num_stages > 1 and not plan.pipelining.holds_words_ahead
    through_shared = 1.02 if is_staged else 1.0
    reduces_each_step = plan.tiling.is_looped and not schedule.reduce_after_loop
    return through_shared * (1.01 if reduces_each_step else 1.0)


def library_us(op: KernelOp, device: Device = H200) -> float:
    """Estimate a library call: its operands and results once through memory, and a launch."""
    if op.name in ("reshape", "permute", "slice"):
        return 0.0
    tensors = [t for t in (*op.inputs, *op.outputs) if isinstance(t, DTensor)]
    if op.name == APPEND:
        tensors = [parts_of(op)[1]] * 2  # only the new rows move
    if op.name == "take":
        tensors = [*op.outputs] * 2  # only the chosen elements move
    flops = 0.0
    if op.name == "matmul":
        flops = 2.0 * math.prod(op.outputs[0].dims) * tensors[0].dims[-1]
    memory_seconds = sum(map(stored_bytes, tensors)) / (_LIBRARY_BANDWIDTH * device.bandwidth)
    seconds = max(memory_seconds, flops / device.mma_rate)
    return device.launch_us + device.latency_us + 1e6 * seconds
