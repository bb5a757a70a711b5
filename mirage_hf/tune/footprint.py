"""Count what the tiles of a kernel load, hold and compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.graph.block import BlockInput, BlockOp, Role, Stage
from mirage_hf.graph.coded import is_packed, stored_bytes
from mirage_hf.graph.kernel import DTensor
from mirage_hf.ops.dtypes import CODE_DTYPES, element_bytes

#: Instructions that an element takes in a kernel whose products are multiply-adds. The second
#: number holds if threads share sums in each step, as in scores of attention of several rows.
#: Fitted to 560 kernels measured on an H200. They took 2.8 to 8 times, and 13 to 26 times, what one
#: instruction each would take.
MULTIPLY_ADD, REDUCED_EACH_STEP = 3.0, 12.0

#: The same for sums over codes that each thread begins on its own (codegen/plan/code_runs.py).
#: Counted in machine code for sm_90: a code takes 4.2 to 5.3 instructions from its word to the sum.
#: It is three elements: one decoded, one product and one addition.
CODED = 1.5

#: The same if a thread decodes words of four bytes: 3.4 instructions a code.
CODED_IN_WORDS = 1.15

#: Elements of a decoded tile for each that a thread holds at a time if it decodes words of bytes.
DECODED_AT_A_TIME = 4

#: Instructions that a code takes as a factor on tensor cores. Counted in machine code for sm_90.
CODE_FACTOR = 2.5

#: The share of the bandwidth that reads of 64 bytes reach if the next loop step reads those that
#: follow in memory. Measured on an H200 with words of codes: 60 MB took 18.8 µs, and 15.0 in longer
#: runs.
CONTINUED = 0.8

#: The elements that one element of another input counts for in such a kernel. It is converted, and
#: moved to the threads whose codes it multiplies.
BESIDE_CODES = 4


def tensor_bytes(t: DTensor) -> int:
    """Return the bytes of the distinct elements of a tensor."""
    return stored_bytes(t)


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
        largest: Elements of the largest tile of an input.
        columns: Those of them that are in different sums.
        within: The share of elements of loops and whole axes that lie within these axes.
        reads_weights: Whether weights are the only matrices that are read.
    """

    moved: int
    loads: tuple[Mapping[str, int], ...]
    once: int
    streamed: int
    step_work: float
    once_work: float
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
    largest: int
    columns: float
    within: float
    reads_weights: bool


def footprint(plan: KernelPlan) -> Footprint:
    """Count what a plan's tiles load, hold and compute."""
    tiling, dots, block = plan.tiling, plan.layout.dots, plan.tiling.block
    loops = [s for s in block.stages if s.loop]
    loads = tuple({i: tile_bytes(plan, i) for i in _loads(plan, s)} for s in loops)
    factors = {x for d in dots.values() for x in (d.left, d.right)}
    unstaged = factors - {i for each in loads for i in each}
    has_running_maximum = any(a.shift is not None for s in block.stages for a in s.accumulators)
    step_flops, once_flops = _flops(plan)
    largest = max((tiling.numel(block.carried[i]) for i in tiling.inputs), default=1)
    summed = {c.over for c in block.contractions.values()}
    return Footprint(
        moved=_moved(plan),
        loads=loads,
        once=_once(plan),
        streamed=_streamed(plan, loads),
        step_work=sum(_work(plan, s) for s in block.stages if s.loop is not None),
        once_work=sum(_work(plan, s) for s in block.stages if s.loop is None),
        step_flops=step_flops,
        once_flops=once_flops,
        held=max((_held(plan, s) for s in block.stages), default=0.0),
        factors=sum(tiling.numel(block.carried[x]) for x in factors),
        unstaged=sum(tiling.numel(block.carried[x]) for x in unstaged),
        exchanged=_exchanged(plan, loops),
        rescales=bool(dots) and tiling.is_looped and has_running_maximum,
        accumulating=_accumulating(plan, loops),
        element_work=_element_work(plan),
        contiguity=_contiguity(plan),
        largest=largest,
        columns=largest / math.prod(map(tiling.tile, summed)),
        within=_within(plan),
        reads_weights=_reads_weights(plan),
    )


# -- bytes -----------------------------------------------------------------------------------------


def _moved(plan: KernelPlan) -> int:
    """Return the bytes of all operands and outputs, each counted once."""
    operands, read = plan.tiling.operands, dict[int, int]()
    for i in plan.tiling.block.inputs:
        for n in i.sources:
            read[n] = max(read.get(n, 0), read_bytes(i, operands, n))
        if i.taken is not None:
            read[i.taken.index] = tensor_bytes(operands[i.taken.index])
    return sum(read.values()) + sum(map(tensor_bytes, plan.tiling.outputs))


def _within(plan: KernelPlan) -> float:
    """Return the share of loop and tile elements that lie within their axes."""
    share = 1.0
    for a in plan.tiling.block.axes:
        if a.role in (Role.LOOP, Role.TILE):
            covered = plan.tiling.trips(a.name) * plan.tiling.tile(a.name)
            share *= plan.tiling.block.split_size(a.name) / covered
    return share


def _reads_weights(plan: KernelPlan) -> bool:
    """Return whether a kernel reads weights and no other matrices."""
    tiling = plan.tiling
    several = (i for i in tiling.block.inputs if len(i.carried) > 1)
    matrices = [i for i in several if tiling.numel(i.carried) > 1]
    return bool(matrices) and all(tiling.is_constant(i) and i.taken is None for i in matrices)


def read_bytes(i: BlockInput, operands: Sequence[DTensor], source: int) -> int:
    """Return the most bytes of one source that an input reads: of what an index chooses, or all."""
    whole = tensor_bytes(operands[source])
    if i.taken is None:
        return whole
    chosen = math.prod(operands[i.taken.index].dims)
    return min(whole, whole // i.taken.size * chosen)


def _loads(plan: KernelPlan, stage: Stage) -> list[str]:
    """Return the inputs that a stage reads in its loop."""
    read = {a for op in stage.body for a in op.args} | {a.arg for a in stage.accumulators}
    return [
        i.name for i in plan.tiling.block.inputs if i.name in read and stage.loop in i.read_axes
    ]


def _once(plan: KernelPlan) -> int:
    """Return the bytes of the inputs that do not have the loop axis."""
    loop = plan.tiling.loop
    inputs = [i for i in plan.tiling.block.inputs if loop is None or loop not in i.read_axes]
    return sum(tile_bytes(plan, i.name) for i in inputs)


def _streamed(plan: KernelPlan, loads: Sequence[Mapping[str, int]]) -> int:
    """Return the bytes of a step that no other block reads, or of a loop if there are none."""
    loop = plan.tiling.loop
    walked = [i for i in plan.tiling.block.inputs if loop is None or loop in i.read_axes]
    own = sum(tile_bytes(plan, i.name) for i in walked if plan.tiling.is_streamed(i))
    return own or max((sum(x.values()) for x in loads), default=0)


def tile_bytes(plan: KernelPlan, name: str) -> int:
    """Return the bytes of an input's tile."""
    i = plan.tiling.inputs[name]
    elements = plan.tiling.numel(plan.tiling.block.carried[name])
    return math.ceil(elements * element_bytes(plan.tiling.dtype(i)))


def _contiguity(plan: KernelPlan) -> float:
    """Return how well the largest input's tile uses memory.

    It is 1 for runs of 1 KB or more, and less for parts of a 128-byte line. A run shorter than a
    32-byte sector moves the whole sector. Measured: 230 µs where 18 were expected, one column of a
    (4096, 4096) matrix at a time.
    """
    operands = plan.tiling.operands
    largest = max(
        plan.tiling.block.inputs, key=lambda i: sum(read_bytes(i, operands, s) for s in i.sources)
    )
    operand = operands[largest.sources[0]]
    tiles = [
        (abs(stride), n, plan.tiling.tile(a))
        for a, n, stride in zip(largest.axes, operand.dims, operand.strides, strict=True)
        if a
    ]
    elements = max((tile for stride, _, tile in tiles if stride == 1), default=1)
    if is_packed(operand.dtype):
        elements = _side_by_side(tiles)
    elements *= _interleaved(plan, largest)
    run = elements * element_bytes(plan.tiling.dtype(largest))
    of_line = max(0.25, min(1.0, run / 128)) if run >= 32 else run / 128
    loop = plan.tiling.loop
    if run >= 64 and any(
        a == loop and s == elements for a, s in zip(largest.axes, operand.strides, strict=True)
    ):
        of_line = max(of_line, CONTINUED)
    return of_line * (0.95 + 0.05 * min(1.0, run / 1024))


def _interleaved(plan: KernelPlan, largest: BlockInput) -> int:
    """Return how many elements that lie side by side other inputs read, for each of an input.

    The input has a shortest stride of n elements, and the kernel reads n inputs like it. Then all n
    are views of one tensor, such as gate and up whose columns alternate.
    """
    tiling, source = plan.tiling, plan.tiling.operands[largest.sources[0]]
    axes = [a for a in zip(largest.axes, source.dims, source.strides, strict=True) if a[0]]
    shortest = min((s for _, n, s in axes if n > 1 and s > 0), default=1)
    alike = [tiling.operands[i.sources[0]] for i in tiling.block.inputs]
    count = sum(
        (t.dims, t.strides, t.dtype) == (source.dims, source.strides, source.dtype) for t in alike
    )
    if shortest == 1 or count < shortest:
        return 1
    return shortest * max(tiling.tile(str(a)) for a, _, s in axes if s == shortest)


def _side_by_side(tiles: Sequence[tuple[int, int, int]]) -> int:
    """Return how many codes of a tile lie side by side, from each dim's stride, size and tile."""
    run = end = 1
    for stride, size, tile in sorted(tiles):
        if size > 1 and stride == end:
            run, end = run * tile, (end * size if tile >= size else 0)
    return run


# -- work ------------------------------------------------------------------------------------------


def _work(plan: KernelPlan, stage: Stage) -> float:
    """Return the elements that a stage computes, in one step if it has a loop."""
    tiling, layout, carried = plan.tiling, plan.layout, plan.tiling.block.carried
    values = sum(
        tiling.numel(carried[str(op.args[0])] if op.over else op.axes)
        for op in stage.body
        if op.out not in layout.unformed_products
        and op.out not in layout.dots
        and op.out not in layout.decoded
        and op.out not in layout.code_factors
    )
    accumulated = sum(
        tiling.numel(carried[a.arg]) for a in stage.accumulators if a.out not in layout.dots
    )
    rescaled = sum(
        tiling.numel(a.axes) for a in stage.accumulators if a.shift is not None and tiling.is_looped
    )
    loaded = sum(
        tiling.numel(carried[i]) * _conversion(plan, i)
        for i in _loads(plan, stage)
        if i not in layout.kept_as_stored
    )
    return values + accumulated + rescaled + loaded


def _conversion(plan: KernelPlan, name: str) -> float:
    """Return how many elements the conversion of a loaded element counts for."""
    if name in plan.layout.code_factors:
        return CODE_FACTOR / _element_work(plan)
    is_beside_codes = plan.tiling.dtype(plan.tiling.inputs[name]) not in CODE_DTYPES
    return BESIDE_CODES if plan.layout.run_lengths and is_beside_codes else 1


def _flops(plan: KernelPlan) -> tuple[float, float]:
    """Return the tensor-core operations of one step, and those done once."""
    block = plan.tiling.block
    accumulated = {a.out for s in block.stages for a in s.accumulators}
    step = once = 0.0
    for out, dot in plan.layout.dots.items():
        flops = 2.0 * plan.tiling.numel(block.carried[dot.contraction.product])
        if out in accumulated:
            step += flops
        else:
            once += flops
    return step, once


def _exchanged(plan: KernelPlan, loops: Sequence[Stage]) -> int:
    """Return the elements of the largest sum or maximum in a loop that several warps share."""
    axes = [
        op.axes
        for s in loops
        for op in s.body
        if op.over is not None and op.out not in plan.layout.dots
    ]
    axes += [
        a.axes
        for s in loops
        for a in s.accumulators
        if a.out not in plan.layout.dots and not plan.is_reduced_after_loop(s, a)
    ]
    return max(map(plan.tiling.numel, axes), default=0)


def _accumulating(plan: KernelPlan, loops: Sequence[Stage]) -> int:
    """Return the number of tensor-core sums in loops, or 0 if loops have other sums too."""
    has_other_sums = any(op.over is not None for s in loops for op in s.body)
    if not plan.tiling.is_looped or has_other_sums:
        return 0
    return sum(a.out in plan.layout.dots for s in loops for a in s.accumulators)


def adds_in_runs(plan: KernelPlan) -> bool:
    """Return whether threads add runs of codes on their own."""
    lengths = plan.layout.run_lengths
    return any(plan.tiling.tile(axis) > length for axis, length in lengths.items())


def _element_work(plan: KernelPlan) -> float:
    """Return the instructions that one element takes."""
    tiling = plan.tiling
    if adds_in_runs(plan):
        return CODED_IN_WORDS if plan.layout.byte_words else CODED
    contractions = [c for c in tiling.block.contractions.values() if c.out not in plan.layout.dots]
    by_multiply_adds = {c.out for c in contractions}
    # Scores of one row are products of two axes. One thread mostly holds them alone.
    has_several_rows = any(
        sum(tiling.tile(a) > 1 for a in tiling.block.carried[c.product]) > 2 for c in contractions
    )
    loops = [s for s in tiling.block.stages if s.loop]
    within = {op.out for s in loops or tiling.block.stages for op in s.body}
    reduces_each_step = bool(loops) and tiling.is_looped and not by_multiply_adds.isdisjoint(within)
    if reduces_each_step and has_several_rows:
        return REDUCED_EACH_STEP
    accumulated = {a.out for s in loops for a in s.accumulators}
    return 1.0 if by_multiply_adds.isdisjoint(within | accumulated) else MULTIPLY_ADD


# -- registers -------------------------------------------------------------------------------------


def _held(plan: KernelPlan, stage: Stage) -> float:
    """Return the registers for accumulators, one step's loads, and the largest other value."""
    tiling = plan.tiling
    walked = stage.loop if tiling.is_looped else None
    summed = {a.arg for a in stage.accumulators if walked and plan.is_reduced_after_loop(stage, a)}
    formed = [
        tiling.numel(op.axes) * _registers_of_element(plan, op)
        for op in stage.body
        if op.out not in plan.layout.unformed_products and op.out not in summed
    ]
    loaded = _loads(plan, stage) if walked else list(tiling.inputs)
    # Walked loops copy into shared memory; loops held whole load through registers.
    copied = plan.layout.kept_as_stored if tiling.is_looped else ()
    through_registers = sum(tile_bytes(plan, i) / 4 for i in loaded if i not in copied)
    share = DECODED_AT_A_TIME if plan.layout.byte_words else 1
    held = through_registers + max(formed, default=0.0) / share
    return held + (_accumulators(plan, stage) if walked else 0)


def _registers_of_element(plan: KernelPlan, op: BlockOp) -> float:
    """Return the registers that an element of an op's result takes while it is formed."""
    if op.over is not None:
        return 0.0  # a sum is counted as what it adds up
    return 0.5 if op.out in plan.layout.code_factors else 1.0  # a register holds two codes


def _accumulators(plan: KernelPlan, stage: Stage) -> int:
    """Return the elements of a stage's accumulators inside its loop."""
    carried = plan.tiling.block.carried
    names = [a.arg if plan.is_reduced_after_loop(stage, a) else a.out for a in stage.accumulators]
    runs = 1
    if plan.layout.byte_words and adds_in_runs(plan):  # one sum for each run
        runs = plan.layout.run_lengths.get(str(plan.tiling.loop), 1)
    return sum(plan.tiling.numel(carried[name]) for name in names) // runs
