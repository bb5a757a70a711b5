"""Count what the tiles of a kernel load, hold and compute."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.graph.block import BlockOp, Role, Stage
from mirage_hf.graph.coded import is_packed, stored_bytes
from mirage_hf.graph.kernel import DTensor
from mirage_hf.ops.dtypes import BYTE_DTYPES, CODE_DTYPES, element_bytes
from mirage_hf.tune.traffic import Traffic, traffic

#: Instructions that an element takes in a kernel whose products are multiply-adds. The second
#: number holds if threads share sums in each step, as in scores of attention of several rows.
#: Fitted to 560 kernels measured on an H200. They took 2.8 to 8 times, and 13 to 26 times, what one
#: instruction each would take.
MULTIPLY_ADD, REDUCED_EACH_STEP = 3.0, 12.0

#: The same for sums over packed codes that each thread begins on its own (plan/code_runs.py).
#: Counted in machine code for sm_90, in 215 kernels of one row: a code of an integer takes 3.6
#: instructions from its word to the sum. It is three elements: one decoded, one product and one
#: addition.
CODED = 1.2

#: The elements that decoding a packed code counts for, in place of one. LOOKED_UP holds for numbers
#: of tables, SMALL_FLOAT for 4-bit floats whose products are small until they are summed
#: (plan/small_codes.py). Counted likewise.
LOOKED_UP, SMALL_FLOAT = 2.4, 1.5

#: The same for codes of a byte that are loaded one by one. Counted in kernels of int4, before these
#: were counted again.
CODED_IN_BYTES = 1.5

#: The same if a thread decodes words of four bytes: 3.4 instructions a code.
CODED_IN_WORDS = 1.15

#: Elements of a decoded tile for each that a thread holds at a time if it decodes words of bytes.
DECODED_AT_A_TIME = 4

#: Instructions that a code takes as a factor on tensor cores. Counted in machine code for sm_90.
CODE_FACTOR = 2.5

#: The same for a code times the scale of its group, and for an element of the other factor of such
#: a product, which is put into code order: with the weights as the second factor, and as the first
#: one. Counted likewise, in kernels of 16 and 128 rows.
SCALED_CODE, BESIDE_SCALED = 2.05, (1.1, 3.0)

#: The same for a 4-bit float (e2m1) times a power of two. Counted likewise, in kernels of 16 rows.
SCALED_FLOAT = 3.45

#: Instructions of a thread in each step of such a loop, beside those of codes and other elements.
SCALED_STEP = 62

#: The share of the bandwidth that reads reach, by the bytes of a run, if the next loop step reads
#: those that follow in memory. Measured on an H200 with words of codes in runs of 64 bytes: 60 MB
#: took 18.8 µs, and 15.0 in longer runs. Shorter runs are a guess: a step reads whole sectors of 32
#: bytes, and the next one finds the rest of a line in the L2.
CONTINUED = {64: 0.8, 32: 0.65, 16: 0.5}

#: The elements that one element of another input counts for beside codes of a byte. It is
#: converted, and moved to the threads whose codes it multiplies.
BESIDE_CODES = 4


class Footprint(NamedTuple):
    """What the tiles of a plan decide alone, whatever its warps, stages and cooperating blocks.

    Attributes:
        moved: Bytes between device memory and the chip.
        step_bytes: Bytes that one step of all loops loads.
        longest_step_bytes: Bytes that one step of the loop with the longest steps loads.
        longest_step_copied: The same with a tile that may lie in several tensors counted for each.
            It is loaded from all of them, and masked.
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
        reads_codes: Whether some input holds codes.
        words: Bytes of the words of codes of a byte that one step of all loops loads.
        beside_words: Inputs of a loop along such words that are no codes, such as x.
        longest_beside: Elements of the largest tile of such an input.
        byte_factors: Codes of a byte that one step of all loops gives to tensor cores.
        packed: Packed codes that one step of all loops multiplies and adds, or the whole kernel
            without a loop, by input.
        reduced: Elements that threads add for each other in one step of all loops, counted once for
            each exchange. 0 without packed codes.
        scaled: Instructions of codes that one step multiplies by scales of their groups, as factors
            of tensor cores.
    """

    moved: int
    step_bytes: int
    longest_step_bytes: int
    longest_step_copied: int
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
    reads_codes: bool
    words: int
    beside_words: int
    longest_beside: int
    byte_factors: int
    packed: tuple[int, ...]
    reduced: float
    scaled: float


def footprint(plan: KernelPlan, known: Traffic | None = None) -> Footprint:
    """Count what a plan's tiles load, hold and compute.

    Args:
        plan: The plan.
        known: What the kernel reads and writes, if it is known.
    """
    tiling, dots, block = plan.tiling, plan.layout.dots, plan.tiling.block
    known = known or traffic(plan.op)
    elements, input_bytes = tiling.elements, tiling.input_bytes
    stages = list(zip(block.stages, known.loads, strict=True))
    loads = [names for s, names in stages if s.loop]
    each_step = [sum(input_bytes[i] for i in names) for names in loads]
    factors = {x for d in dots.values() for x in (d.left, d.right)}
    unstaged = factors.difference(*loads)
    has_running_maximum = any(a.shift is not None for s in block.stages for a in s.accumulators)
    step_flops, once_flops = _flops(plan)
    element_work = _element_work(plan)
    uncounted = _uncounted(plan)
    work = [(s, _work(plan, s, names, uncounted, element_work)) for s, names in stages]
    largest = max((elements[i] for i in tiling.inputs), default=1)
    summed = {c.over for c in block.contractions.values()}
    beside = beside_words(plan)
    return Footprint(
        moved=known.moved,
        step_bytes=sum(each_step),
        longest_step_bytes=max(each_step, default=0),
        longest_step_copied=max(map(partial(_copied, tiling), loads), default=0),
        once=sum(input_bytes[i] for i in known.once),
        streamed=_streamed(plan, known, each_step),
        step_work=sum(n for s, n in work if s.loop is not None),
        once_work=sum(n for s, n in work if s.loop is None),
        step_flops=step_flops,
        once_flops=once_flops,
        held=_most_held(plan, known),
        factors=sum(elements[x] for x in factors),
        unstaged=sum(elements[x] for x in unstaged),
        exchanged=_exchanged(plan),
        rescales=bool(dots) and tiling.is_looped and has_running_maximum,
        accumulating=_accumulating(plan),
        element_work=element_work,
        contiguity=_contiguity(plan, known),
        largest=largest,
        columns=largest / math.prod(map(tiling.tile, summed)),
        within=_within(plan),
        reads_weights=_reads_weights(plan, known),
        reads_codes=known.reads_codes,
        words=sum(input_bytes[i] for x in loads for i in x if i in plan.layout.byte_words),
        beside_words=len(beside),
        longest_beside=max((elements[i] for i in beside), default=0),
        byte_factors=sum(elements[i] for x in loads for i in x if _is_byte_factor(plan, i)),
        packed=_packed(plan),
        reduced=_reduced(plan),
        scaled=sum(elements[x] * _scaled_code(plan, x) for x in plan.layout.scaled_factors),
    )


def _packed(plan: KernelPlan) -> tuple[int, ...]:
    """Return the elements of each tile of packed codes that are summed by multiply-adds.

    Zero points may be packed, too, but lack an axis of the codes.
    """
    tiling, axes = plan.tiling, plan.layout.run_lengths.keys()
    if not axes:
        return ()
    return tuple(
        tiling.elements[i.name]
        for i in tiling.block.inputs
        if is_packed(tiling.dtype(i)) and axes <= {*i.read_axes}
    )


def _is_byte_factor(plan: KernelPlan, name: str) -> bool:
    """Return whether tensor cores multiply bytes, which are converted first."""
    is_factor = any(name in (d.left, d.right) for d in plan.layout.dots.values())
    return is_factor and plan.tiling.dtype(plan.tiling.inputs[name]) in BYTE_DTYPES


def with_same_layout(plan: KernelPlan, other: Footprint, known: Traffic) -> Footprint:
    """Return the footprint of a plan that has the layout of another one.

    Args:
        plan: The plan.
        other: The footprint of the other plan.
        known: What the kernel reads and writes.
    """
    return other._replace(
        held=_most_held(plan, known), exchanged=_exchanged(plan), reduced=_reduced(plan)
    )


# -- bytes -----------------------------------------------------------------------------------------


def _within(plan: KernelPlan) -> float:
    """Return the share of loop and tile elements that lie within their axes."""
    share = 1.0
    for a in plan.tiling.block.named(Role.LOOP, Role.TILE):
        covered = plan.tiling.trips(a.name) * plan.tiling.tile(a.name)
        share *= plan.tiling.block.split_size(a.name) / covered
    return share


def _reads_weights(plan: KernelPlan, known: Traffic) -> bool:
    """Return whether a kernel reads weights and no other matrices."""
    elements = plan.tiling.elements
    several = (i.name for i in plan.tiling.block.inputs if len(i.carried) > 1)
    matrices = [name for name in several if elements[name] > 1]
    return bool(matrices) and known.weights.issuperset(matrices)


def _copied(tiling: Tiling, names: Iterable[str]) -> int:
    """Return the bytes that loads of tiles copy, each tensor that a tile may lie in counted."""
    total = 0
    for name in names:
        i = tiling.inputs[name]
        total += tiling.input_bytes[name] * (1 if tiling.selects_source(i) else len(i.sources))
    return total


def _streamed(plan: KernelPlan, known: Traffic, each_step: Sequence[int]) -> int:
    """Return the bytes of a step that no other block reads, or of a loop if there are none."""
    sizes, trips = plan.tiling.input_bytes, plan.tiling.trips
    own = sum(sizes[i] for i, shared in known.walked.items() if all(trips(a) == 1 for a in shared))
    return own or max(each_step, default=0)


def beside_words(plan: KernelPlan) -> list[str]:
    """Return the inputs of a loop along words of bytes that are no codes, such as x."""
    axes = {*plan.layout.byte_words.values()}
    return [
        i.name
        for i in plan.tiling.block.inputs
        if axes.intersection(i.axes) and plan.tiling.dtype(i) not in CODE_DTYPES
    ]


def _contiguity(plan: KernelPlan, known: Traffic) -> float:
    """Return how well a kernel uses memory: how its tile of the largest input lies there.

    What it writes counts too if it decodes a weight and multiplies nothing. It is 1 for runs of
    1 KB or more, and less for parts of a 128-byte line. A run shorter than a 32-byte sector moves
    the whole sector. Measured: 230 µs where 18 were expected, one column of a (4096, 4096) matrix
    at a time.
    """
    largest = known.largest
    operand = plan.tiling.operands[largest.sources[0]]
    tiles = _strides_and_tiles(plan, largest.axes, operand)
    loop = plan.tiling.loop
    only_decodes = known.reads_codes and not loop and not plan.tiling.block.contractions
    elements = max((tile for stride, _, tile in tiles if stride == 1), default=1)
    if is_packed(operand.dtype) or only_decodes:
        elements = _side_by_side(tiles)
    if known.interleaved > 1:
        elements *= known.interleaved * max(map(plan.tiling.tile, known.interleaved_axes))
    run = elements * element_bytes(plan.tiling.dtype(largest))
    of_line = _share_of_lines(run)
    strides = zip(largest.axes, operand.strides, strict=True)
    step = plan.tiling.tile(loop) if loop else 0
    if any(a == loop and step * stride == elements for a, stride in strides):
        of_line = max([of_line, *(share for least, share in CONTINUED.items() if run >= least)])
    reading = _share_of_speed(of_line, run)
    if not only_decodes:
        return reading
    result = plan.op.outputs[0]
    elements = _side_by_side(_strides_and_tiles(plan, plan.tiling.block.outputs[0].axes, result))
    run = elements * element_bytes(result.dtype)
    writing = _share_of_speed(_share_of_lines(run), run)
    read, written = stored_bytes(operand), stored_bytes(result)
    return (read + written) / (read / reading + written / writing)


def _share_of_lines(run: float) -> float:
    """Return how much of the 128-byte lines is used if so many bytes lie side by side."""
    return max(0.25, min(1.0, run / 128)) if run >= 32 else run / 128


def _share_of_speed(of_lines: float, run: float) -> float:
    """Return the share of memory's speed from that of lines, and the bytes side by side."""
    return of_lines * (0.95 + 0.05 * min(1.0, run / 1024))


def _strides_and_tiles(
    plan: KernelPlan, axes: Sequence[str | None], tensor: DTensor
) -> list[tuple[int, int, int]]:
    """Return the stride, the size and the tile of each dim of a tensor that has an axis."""
    dims = zip(axes, tensor.dims, tensor.strides, strict=True)
    return [(abs(stride), n, plan.tiling.tile(a)) for a, n, stride in dims if a]


def _side_by_side(tiles: Sequence[tuple[int, int, int]]) -> int:
    """Return how many elements of a tile lie side by side, from strides, sizes and tiles."""
    run = end = 1
    for stride, size, tile in sorted(tiles):
        if size > 1 and stride == end:
            run, end = run * tile, (end * size if tile >= size else 0)
    return run


# -- work ------------------------------------------------------------------------------------------


def _uncounted(plan: KernelPlan) -> set[str]:
    """Return the ops that take no instructions of their own."""
    layout = plan.layout
    coded = layout.code_factors.keys() | layout.scaled_factors
    return {*layout.unformed_products, *layout.dots, *layout.decoded, *coded}


def _work(
    plan: KernelPlan,
    stage: Stage,
    loads: Sequence[str],
    uncounted: Collection[str],
    element_work: float,
) -> float:
    """Return the elements that a stage computes, in one step if it has a loop.

    Args:
        plan: The plan.
        stage: The stage.
        loads: The inputs that the stage reads in its loop.
        uncounted: The ops that take no instructions of their own.
        element_work: The instructions that one element takes.
    """
    layout, elements = plan.layout, plan.tiling.elements
    values = sum(
        elements[str(op.args[0]) if op.over else op.out]
        for op in stage.body
        if op.out not in uncounted
    )
    accumulated = sum(elements[a.arg] for a in stage.accumulators if a.out not in layout.dots)
    rescaled = 0
    if plan.tiling.is_looped:
        rescaled = sum(elements[a.out] for a in stage.accumulators if a.shift is not None)
    loaded = sum(
        elements[i] * _conversion(plan, i, element_work)
        for i in loads
        if i not in layout.kept_as_stored
    )
    return values + accumulated + rescaled + loaded


def _conversion(plan: KernelPlan, name: str, element_work: float) -> float:
    """Return how many elements the conversion of a loaded element counts for."""
    layout = plan.layout
    if name in layout.code_factors:
        if not layout.scaled_factors:
            return CODE_FACTOR / element_work
        return (SCALED_FLOAT if name in layout.tables else SCALED_CODE) / element_work
    if plan.tiling.op.reads_packed_codes and adds_in_runs(plan):
        is_small = name in layout.small_codes.inputs
        return SMALL_FLOAT if is_small else LOOKED_UP if name in layout.tables else 1
    if not layout.run_lengths or plan.tiling.dtype(plan.tiling.inputs[name]) in CODE_DTYPES:
        return 1
    return BESIDE_CODES


def _scaled_code(plan: KernelPlan, factor: str) -> float:
    """Return the instructions of a code in a factor that is codes times scales of their groups."""
    ops = plan.tiling.ops
    are_floats = any(a in ops and ops[a].fn == "lookup" for a in map(str, ops[factor].args))
    return SCALED_FLOAT if are_floats else SCALED_CODE


def _flops(plan: KernelPlan) -> tuple[float, float]:
    """Return the tensor-core operations of one step, and those done once."""
    accumulated = {a.out for s in plan.tiling.block.stages for a in s.accumulators}
    step = once = 0.0
    for out, dot in plan.layout.dots.items():
        flops = 2.0 * plan.tiling.elements[dot.contraction.product]
        if out in accumulated:
            step += flops
        else:
            once += flops
    return step, once


def _exchanged(plan: KernelPlan) -> int:
    """Return the elements of the largest sum or maximum in a loop that several warps share."""
    elements, dots = plan.tiling.elements, plan.layout.dots
    largest = 0
    for s in plan.tiling.block.stages:
        if s.loop is None:
            continue
        unformed = plan.layout.unformed_products
        shared = [op.out for op in s.body if op.over is not None and op.out not in unformed]
        if plan.tiling.tile(s.loop) > 1:  # otherwise a step has nothing to add up
            shared += [a.out for a in s.accumulators if not plan.is_reduced_after_loop(a)]
        largest = max([largest, *(elements[x] for x in shared if x not in dots)])
    return largest


def _reduced(plan: KernelPlan) -> float:
    """Return the elements that threads add for each other in one step, once for each exchange."""
    if not plan.tiling.op.reads_packed_codes:
        return 0.0  # other estimates do not count them
    return sum(
        plan.tiling.elements[a.arg] * math.log2(plan.tiling.tile(s.loop))
        for s in plan.tiling.block.stages
        for a in s.accumulators
        if s.loop and not plan.is_reduced_after_loop(a) and a.out not in plan.layout.dots
    )


def _accumulating(plan: KernelPlan) -> int:
    """Return the number of tensor-core sums in loops, or 0 if loops have other sums too."""
    dots, unformed = plan.layout.dots, plan.layout.unformed_products
    loops = [s for s in plan.tiling.block.stages if s.loop]
    summed = [op for s in loops for op in s.body if op.over and op.out not in unformed]
    if not dots or not plan.tiling.is_looped or summed:
        return 0
    return sum(a.out in dots for s in loops for a in s.accumulators)


def adds_in_runs(plan: KernelPlan) -> bool:
    """Return whether threads add codes on their own: runs of bytes, or any packed codes."""
    lengths = plan.layout.run_lengths
    if plan.tiling.op.reads_packed_codes:
        return bool(_packed(plan))
    return any(plan.tiling.tile(axis) > length for axis, length in lengths.items())


def _element_work(plan: KernelPlan) -> float:
    """Return the instructions that one element takes."""
    tiling = plan.tiling
    if adds_in_runs(plan):
        if tiling.op.reads_packed_codes:
            return CODED
        return CODED_IN_WORDS if plan.layout.byte_words else CODED_IN_BYTES
    unformed = plan.layout.unformed_products
    contractions = [c for c in tiling.block.contractions.values() if c.product not in unformed]
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


def _most_held(plan: KernelPlan, known: Traffic) -> float:
    """Return the registers that all threads together need for the tiles of the largest stage."""
    stages = zip(plan.tiling.block.stages, known.loads, strict=True)
    return max((_held(plan, s, loads) for s, loads in stages), default=0.0)


def _held(plan: KernelPlan, stage: Stage, loads: Sequence[str]) -> float:
    """Return the registers for accumulators, one step's loads, and the largest other value.

    Args:
        plan: The plan.
        stage: The stage.
        loads: The inputs that the stage reads in its loop.
    """
    tiling = plan.tiling
    walked = stage.loop if tiling.is_looped else None
    unformed = set(plan.layout.unformed_products)
    if walked:
        unformed |= {a.arg for a in stage.accumulators if plan.is_reduced_after_loop(a)}
    formed = [
        tiling.elements[op.out] * _registers_of_element(plan, op)
        for op in stage.body
        if op.out not in unformed
    ]
    loaded = loads if walked else tiling.inputs
    # Walked loops copy into shared memory; loops held whole load through registers.
    copied = plan.layout.kept_as_stored if tiling.is_looped else ()
    through_registers = sum(tiling.input_bytes[i] / 4 for i in loaded if i not in copied)
    share = DECODED_AT_A_TIME if plan.layout.byte_words else 1
    held = through_registers + max(formed, default=0.0) / share
    return held + (_accumulators(plan, stage) if walked else 0)


def _registers_of_element(plan: KernelPlan, op: BlockOp) -> float:
    """Return the registers that an element of an op's result takes while it is formed."""
    if op.over is not None:
        return 0.0  # a sum is counted as what it adds up
    halves = plan.layout.code_factors.keys() | plan.layout.scaled_factors
    return 0.5 if op.out in halves else 1.0  # a register holds two codes


def _accumulators(plan: KernelPlan, stage: Stage) -> int:
    """Return the elements of a stage's accumulators inside its loop."""
    names = [a.arg if plan.is_reduced_after_loop(a) else a.out for a in stage.accumulators]
    runs = 1
    if plan.layout.byte_words and adds_in_runs(plan):  # one sum for each run
        runs = plan.layout.run_lengths.get(str(plan.tiling.loop), 1)
    return sum(plan.tiling.elements[name] for name in names) // runs
