"""Estimate what a kernel takes on a GPU, in µs: from bytes, instructions, launches and occupancy.

Estimates rank candidates. They promise nothing; the tuner measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.block import Stage
from mirage_hf.graph.effects import APPEND, parts_of
from mirage_hf.graph.kernel import DTensor, KernelOp


@dataclass(frozen=True)
class Cost:
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


#: Least µs of a loop step with a running maximum: two products, the second of what the first gives,
#: and maxima and sums that warps exchange. Measured 1.0 to 1.2 on an H200 with 1 to 4 warps and
#: tiles of 32 to 128. Blocks on one SM do it side by side.
RESCALED_US = 1.1


#: µs of a step of another tensor-core loop without sums of its own: per product, and per other
#: element (scaled factors, squares that are added up). Blocks on one SM take turns. AHEAD_US is the
#: least if something is loaded only one step ahead. Fitted to 415 kernels of linears of 16 and 32
#: rows after a norm, measured on an H200: steps took 0.2 to 1.5 µs. The rank correlation of
#: estimates and times rose from -0.6..-0.3 to 0.6..0.9.
STEP_US, ELEMENT_US, AHEAD_US = 0.15, 4.5e-5, 0.5


#: Instructions that an element takes in a kernel whose products are multiply-adds: per product and
#: sum, and if threads share sums in each step, as scores of attention of several rows. Fitted to
#: 560 kernels measured on an H200, which took 2.8 to 8 times, and 13 to 26 times, what one
#: instruction each would take.
MULTIPLY_ADD, REDUCED_EACH_STEP = 3.0, 12.0


def tensor_bytes(t: DTensor) -> int:
    """Return the bytes of the distinct elements of a tensor."""
    return math.prod(d for d, s in zip(t.dims, t.strides, strict=True) if s) * t.dtype.itemsize


def _loads(plan: KernelPlan, stage: Stage) -> list[str]:
    """Return the inputs that a stage reads in its loop."""
    read = {a for op in stage.body for a in op.args} | {a.arg for a in stage.accumulators}
    return [i.name for i in plan.tiling.block.inputs if i.name in read and stage.loop in i.axes]


def _tile_bytes(plan: KernelPlan, name: str) -> int:
    """Return the bytes of an input's tile."""
    i = plan.tiling.inputs[name]
    return plan.tiling.numel(plan.tiling.block.carried[name]) * plan.tiling.dtype(i).itemsize


def _running(plan: KernelPlan, stage: Stage) -> int:
    """Return the elements of a stage's accumulators inside its loop."""
    return sum(
        plan.tiling.numel(
            plan.tiling.block.carried[a.arg if plan.is_reduced_after_loop(stage, a) else a.out]
        )
        for a in stage.accumulators
    )


@dataclass(frozen=True)
class Footprint:
    """What the tiles of a plan decide alone, whatever its warps, stages and cooperating blocks.

    Attributes:
        moved: Bytes between device memory and the chip.
        loads: For each loop, the bytes that one step loads of each input.
        once: Bytes that a block loads once.
        streamed: Bytes of a step that no other block reads. All bytes of a loop if blocks share
            everything.
        step_work: Elements computed in one step of the loops.
        once_work: Elements computed once.
        step_flops: Tensor-core operations of one step.
        once_flops: Tensor-core operations done once.
        held: 32-bit registers that all threads together need for the tiles of the largest stage.
        factors: Elements of all factors of tensor-core products.
        unstaged: Elements of those factors that no loop loads.
        exchanged: Elements of the largest sum or maximum in a loop that several warps share.
        rescales: Whether tensor-core sums shift with a running maximum.
        accumulating: Tensor-core sums in loops that have no other sums.
        element_work: Instructions that one element takes, in the loops if there are any.
        contiguity: How well the largest input's tile uses memory, from 0 to 1.
    """

    moved: int
    loads: tuple[Mapping[str, int], ...]
    once: int
    streamed: int
    step_work: int
    once_work: int
    step_flops: float
    once_flops: float
    held: float
    factors: int
    unstaged: int
    exchanged: int
    rescales: bool
    accumulating: int
    element_work: float
    contiguity: float


def footprint(plan: KernelPlan) -> Footprint:
    """Count what a plan's tiles load, hold and compute."""
    block, looped = plan.tiling.block, [s for s in plan.tiling.block.stages if s.loop]
    loads = tuple({i: _tile_bytes(plan, i) for i in _loads(plan, s)} for s in looped)
    walked = [i for i in block.inputs if plan.tiling.loop is None or plan.tiling.loop in i.axes]
    streamed = sum(_tile_bytes(plan, i.name) for i in walked if plan.tiling.is_streamed(i)) or max(
        (sum(x.values()) for x in loads), default=0
    )
    work, flops, held = {True: 0, False: 0}, {True: 0.0, False: 0.0}, 0.0
    for stage in block.stages:
        computed = sum(
            plan.tiling.numel(block.carried[str(op.args[0])] if op.over else op.axes)
            for op in stage.body
            if op.out not in plan.layout.unformed_products and op.out not in plan.layout.dots
        )
        computed += sum(
            plan.tiling.numel(block.carried[a.arg])
            for a in stage.accumulators
            if a.out not in plan.layout.dots
        )
        computed += sum(
            plan.tiling.numel(a.axes)
            for a in stage.accumulators
            if a.shift is not None and plan.tiling.is_looped
        )
        work[stage.loop is not None] += computed + sum(
            plan.tiling.numel(block.carried[i])
            for i in _loads(plan, stage)
            if i not in plan.layout.kept_as_stored
        )
        held = max(held, _held(plan, stage))
    for out, dot in plan.layout.dots.items():
        flops[any(a.out == out for s in block.stages for a in s.accumulators)] += (
            2.0 * plan.tiling.numel(block.carried[dot.contraction.product])
        )
    factors = {x for d in plan.layout.dots.values() for x in (d.left, d.right)}
    unstaged = factors - {i for each in loads for i in each}
    accumulating = sum(a.out in plan.layout.dots for s in looped for a in s.accumulators)
    exchanged = [
        op.axes
        for s in looped
        for op in s.body
        if op.over is not None and op.out not in plan.layout.dots
    ]
    exchanged += [
        a.axes
        for s in looped
        for a in s.accumulators
        if a.out not in plan.layout.dots and not plan.is_reduced_after_loop(s, a)
    ]
    return Footprint(
        sum(
            tensor_bytes(plan.tiling.operands[n])
            for n in {n for i in block.inputs for n in i.sources}
        )
        + sum(map(tensor_bytes, plan.tiling.outputs)),
        loads,
        sum(
            _tile_bytes(plan, i.name)
            for i in block.inputs
            if not (plan.tiling.loop and plan.tiling.loop in i.axes)
        ),
        streamed,
        work[True],
        work[False],
        flops[True],
        flops[False],
        held,
        sum(plan.tiling.numel(block.carried[x]) for x in factors),
        sum(plan.tiling.numel(block.carried[x]) for x in unstaged),
        max(map(plan.tiling.numel, exchanged), default=0),
        bool(plan.layout.dots)
        and plan.tiling.is_looped
        and any(a.shift is not None for s in block.stages for a in s.accumulators),
        accumulating
        if plan.tiling.is_looped and all(op.over is None for s in looped for op in s.body)
        else 0,
        _element_work(plan),
        _contiguity(plan),
    )


def _element_work(plan: KernelPlan) -> float:
    """Return the instructions that one element takes."""
    by_hand = {c.out for c in plan.tiling.block.contractions.values()} - set(plan.layout.dots)
    # Scores of one row are products of two axes; one thread mostly holds them alone.
    several = any(
        sum(plan.tiling.tile(a) > 1 for a in plan.tiling.block.carried[c.product]) > 2
        for c in plan.tiling.block.contractions.values()
        if c.out in by_hand
    )
    looped = [s for s in plan.tiling.block.stages if s.loop]
    within = {op.out for s in looped or plan.tiling.block.stages for op in s.body}
    if not by_hand.isdisjoint(within) and looped and plan.tiling.is_looped and several:
        return REDUCED_EACH_STEP
    return (
        1.0
        if by_hand.isdisjoint(within | {a.out for s in looped for a in s.accumulators})
        else MULTIPLY_ADD
    )


def _held(plan: KernelPlan, stage: Stage) -> float:
    """Return the registers for accumulators, one step's loads, and the largest other value."""
    walked = stage.loop if plan.tiling.is_looped else None
    summed = {a.arg for a in stage.accumulators if walked and plan.is_reduced_after_loop(stage, a)}
    formed = [
        plan.tiling.numel(op.axes) * (1.0 if op.over is None else 0.0)
        for op in stage.body
        if op.out not in plan.layout.unformed_products and op.out not in summed
    ]
    loaded = _loads(plan, stage) if walked else list(plan.tiling.inputs)
    # Walked loops copy into shared memory; loops held whole load through registers.
    copied = plan.layout.kept_as_stored if plan.tiling.is_looped else ()
    elements = sum(_tile_bytes(plan, i) / 4 for i in loaded if i not in copied) + max(
        formed, default=0.0
    )
    return elements + (_running(plan, stage) if walked else 0)


def _registers(plan: KernelPlan, tiles: Footprint) -> int:
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
    return math.ceil(max(tiles.held, partial) / (32 * plan.schedule.num_warps))


def _shared_bytes(plan: KernelPlan, tiles: Footprint) -> int:
    """Return the shared memory of a block.

    It holds the loads of all steps in flight, other factors of tensor-core products, and what warps
    exchange in sums and maxima. The step at work counts too if a product still reads it while the
    next one is copied.
    """
    per_iteration = max((sum(loads.values()) for loads in tiles.loads), default=0)
    stages, itemsize = plan.schedule.num_stages, plan.tiling.mma_dtype.itemsize
    if plan.tiling.is_looped and stages > 1:
        exchanged = tiles.exchanged * plan.schedule.num_warps * 4
        # Inputs read twice move from registers into the layout of the product.
        again = sum(_tile_bytes(plan, i) for i in plan.pipelining.loaded_twice)
        late = any(plan.pipelining.is_asynchronous(d) for d in plan.layout.dots.values())
        return (
            per_iteration * (stages if late else stages - 1)
            + again
            + tiles.unstaged * itemsize
            + exchanged
        )
    # A product held whole is fed through shared memory.
    return max(per_iteration, tiles.factors * itemsize)


def estimate(plan: KernelPlan, device: Device = H200, tiles: Footprint | None = None) -> Cost:
    """Estimate one launch of a planned block graph.

    Args:
        plan: The block graph with its schedule.
        device: The GPU.
        tiles: The footprint of the plan, if it is known.
    """
    schedule, tiles = plan.schedule, tiles or footprint(plan)
    trips = plan.cooperation.steps_per_block if plan.tiling.loop else 1
    in_loop = [sum(loads.values()) for loads in tiles.loads]
    block_bytes = (
        sum(in_loop) * trips if plan.tiling.is_looped else max(in_loop, default=0)
    ) + tiles.once
    l2 = block_bytes * plan.grid + 8 * plan.cooperation.scratch
    instructions = float(trips * tiles.step_work + tiles.once_work) * plan.grid * tiles.element_work
    flops = (trips * tiles.step_flops + tiles.once_flops) * plan.grid

    threads = 32 * schedule.num_warps
    regs, shared = _registers(plan, tiles), _shared_bytes(plan, tiles)
    per_sm = max(
        1,
        min(
            32,
            2048 // threads,
            device.registers // (threads * min(255, max(32, regs))),
            device.shared_bytes // (shared + 1024),
        ),
    )
    ahead = schedule.num_stages - 1.0 if plan.tiling.is_looped and schedule.num_stages > 1 else 1.0
    if plan.layout.dots and plan.tiling.is_looped and schedule.num_stages > 1:
        # A tile that tensor cores read must be done before the next copy begins. Measured: 36 µs
        # with three tiles ahead, 58 with one.
        ahead -= 0.5
    concurrent = min(plan.grid, device.sms * per_sm)
    fill = min(
        1.0,
        concurrent
        * max(tiles.streamed, 256)
        * min(ahead, trips)
        / (device.sms * device.flight_bytes),
    )
    rate = (
        min(device.bandwidth * max(fill, 0.02), device.sm_bandwidth * min(plan.grid, device.sms))
        * tiles.contiguity
    )
    busy = min(1.0, plan.grid / device.sms)
    waves = plan.grid / (device.sms * per_sm)
    tail = 1.0 + 0.3 * (math.ceil(waves) / waves - 1.0) if waves > 1 else 1.0
    again_us = 0.0
    body = max(
        tiles.moved / rate,
        l2 / device.l2_bandwidth,
        instructions / (device.lane_rate * busy),
        flops / (device.mma_rate * busy),
    )
    if tiles.rescales:
        body = max(body, 1e-6 * RESCALED_US * trips * math.ceil(waves))
    elif tiles.accumulating:
        step_us = STEP_US * tiles.accumulating + ELEMENT_US * tiles.step_work * _copies(plan)
        ahead_us = AHEAD_US if plan.pipelining.loaded_twice or plan.pipelining.loaded_ahead else 0.0
        body = max(body, 1e-6 * trips * max(ahead_us, step_us * max(1.0, plan.grid / device.sms)))
        # Blocks of a later wave begin their loads anew.
        again_us = device.latency_us * (math.ceil(waves) - 1) / per_sm
    # The launch of the next kernel, which an early trigger hides.
    launch = 0.0 if plan.triggers_early else device.launch_us
    us = (
        launch
        + device.latency_us
        + again_us
        + tail * body * 1e6 * _detours(plan)
        + (device.meeting_us if plan.cooperation.scratch else 0.0)
    )
    return Cost(us, tiles.moved, l2, instructions, flops, regs, shared, per_sm)


def _copies(plan: KernelPlan) -> float:
    """Return how many warps handle one element of a computed factor.

    Such a factor lies in the registers of warps that take 16 rows, or 8 columns, each.
    """
    warps = plan.schedule.num_warps
    most = [
        plan.layout.rows(d) // 16
        for d in plan.layout.dots.values()
        if d.left not in plan.tiling.inputs
    ]
    most += [
        plan.layout.columns(d) // 8
        for d in plan.layout.dots.values()
        if d.right not in plan.tiling.inputs
    ]
    return max([1.0, *(warps / n for n in most)])


def _contiguity(plan: KernelPlan) -> float:
    """Return how well the largest input's tile uses memory.

    It is 1 for runs of 1 KB or more, and less for parts of a 128-byte line. A run shorter than a
    32-byte sector moves the whole sector. Measured: 230 µs where 18 were expected, one column of a
    (4096, 4096) matrix at a time.
    """
    big = max(
        plan.tiling.block.inputs,
        key=lambda i: sum(tensor_bytes(plan.tiling.operands[s]) for s in i.sources),
    )
    strides = plan.tiling.operands[big.sources[0]].strides
    run = (
        max(
            (plan.tiling.tile(a) for a, s in zip(big.axes, strides, strict=True) if a and s == 1),
            default=1,
        )
        * plan.tiling.dtype(big).itemsize
    )
    return (max(0.25, min(1.0, run / 128)) if run >= 32 else run / 128) * (
        0.95 + 0.05 * min(1.0, run / 1024)
    )


def _detours(plan: KernelPlan) -> float:
    """Return a factor of small preferences among estimates that bandwidth makes equal."""
    schedule = plan.schedule
    # Multiply-adds gain nothing from staging.
    through_shared = 1.02 if schedule.num_stages > 1 and not plan.layout.dots else 1.0
    reduced_each_step = (
        1.01
        if plan.tiling.is_looped and not schedule.reduce_after_loop and not plan.layout.dots
        else 1.0
    )
    return through_shared * reduced_each_step * (1.02 if plan.layout.dots else 1.0)


def library_us(op: KernelOp, device: Device = H200) -> float:
    """Estimate a library call: its operands and results once through memory, and a launch."""
    tensors = [t for t in (*op.inputs, *op.outputs) if isinstance(t, DTensor)]
    if op.name in ("reshape", "permute", "slice"):
        return 0.0
    if op.name == APPEND:
        tensors = [parts_of(op)[1]] * 2  # only the new rows move
    flops = (
        2.0 * math.prod(op.outputs[0].dims) * tensors[0].dims[-1] if op.name == "matmul" else 0.0
    )
    seconds = max(
        sum(map(tensor_bytes, tensors)) / (0.85 * device.bandwidth), flops / device.mma_rate
    )
    return device.launch_us + device.latency_us + 1e6 * seconds
