"""What a kernel reads and writes, whatever its tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.plan.tiling import shared_along
from mirage_hf.graph.block import BlockGraph, BlockInput, Role, Stage
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.graph.kernel import DTensor
from mirage_hf.ops.dtypes import CODE_DTYPES


@dataclass(frozen=True)
class Traffic:
    """What a kernel reads and writes, whatever its tiles.

    Attributes:
        moved: Bytes of all operands and outputs, each counted once.
        largest: The input of which the most bytes are read.
        loads: For each stage, the inputs that it reads in its loop.
        once: The inputs that do not have the loop axis.
        walked: The inputs that have the loop axis, or all if there is none. Maps each to the grid
            axes along which blocks read the same elements.
        interleaved: How many tensors like the largest input alternate in memory with it. 1 if it
            lies alone.
        interleaved_axes: The axes along which they alternate.
        weights: The inputs that are weights which no index chooses.
        reads_codes: Whether some input holds codes.
    """

    moved: int
    largest: BlockInput
    loads: tuple[tuple[str, ...], ...]
    once: tuple[str, ...]
    walked: Mapping[str, tuple[str, ...]]
    interleaved: int
    interleaved_axes: tuple[str, ...]
    weights: frozenset[str]
    reads_codes: bool


def traffic(op: PlacedOp) -> Traffic:
    """Return what the kernel of a `customized` op reads and writes."""
    assert op.block is not None
    block, operands = op.block, op.operands
    loop = next((a.name for a in block.named(Role.LOOP)), None)
    largest = max(block.inputs, key=lambda i: sum(read_bytes(i, operands, s) for s in i.sources))
    interleaved, axes = _interleaved(block, operands, largest)
    return Traffic(
        moved=_moved(op),
        largest=largest,
        loads=tuple(_loads(block, s) for s in block.stages),
        once=tuple(i.name for i in block.inputs if loop is None or loop not in i.read_axes),
        walked={
            i.name: shared_along(block, i)
            for i in block.inputs
            if loop is None or loop in i.read_axes
        },
        interleaved=interleaved,
        interleaved_axes=axes,
        weights=_weights(op),
        reads_codes=any(operands[n].dtype in CODE_DTYPES for i in block.inputs for n in i.sources),
    )


def read_bytes(i: BlockInput, operands: Sequence[DTensor], source: int) -> int:
    """Return the most bytes of one source that an input reads: of what an index chooses, or all."""
    whole = stored_bytes(operands[source])
    if i.taken is None:
        return whole
    chosen = math.prod(operands[i.taken.index].dims)
    return min(whole, whole // i.taken.size * chosen)


def _moved(op: PlacedOp) -> int:
    """Return the bytes of all operands and outputs, each counted once."""
    assert op.block is not None
    operands, read = op.operands, dict[int, int]()
    for i in op.block.inputs:
        for n in i.sources:
            read[n] = max(read.get(n, 0), read_bytes(i, operands, n))
        if i.taken is not None:
            read[i.taken.index] = stored_bytes(operands[i.taken.index])
    return sum(read.values()) + sum(map(stored_bytes, op.outputs))


def _loads(block: BlockGraph, stage: Stage) -> tuple[str, ...]:
    """Return the inputs that a stage reads in its loop."""
    return tuple(
        i.name for i in block.inputs if i.name in stage.reads and stage.loop in i.read_axes
    )


def _weights(op: PlacedOp) -> frozenset[str]:
    """Return the inputs that are weights which no index chooses."""
    assert op.block is not None
    return frozenset(
        i.name
        for i in op.block.inputs
        if i.bounds is None and i.taken is None and all(op.operands[s].constant for s in i.sources)
    )


def _interleaved(
    block: BlockGraph, operands: Sequence[DTensor], largest: BlockInput
) -> tuple[int, tuple[str, ...]]:
    """Return how many tensors alternate in memory with an input, and along which axes.

    The input has a shortest stride of n elements, and the kernel reads n inputs like it. Then all n
    are views of one tensor, such as gate and up whose columns alternate.
    """
    source = operands[largest.sources[0]]
    axes = [a for a in zip(largest.axes, source.dims, source.strides, strict=True) if a[0]]
    shortest = min((s for _, n, s in axes if n > 1 and s > 0), default=1)
    alike = [operands[i.sources[0]] for i in block.inputs]
    count = sum(
        (t.dims, t.strides, t.dtype) == (source.dims, source.strides, source.dtype) for t in alike
    )
    if shortest == 1 or count < shortest:
        return 1, ()
    return shortest, tuple(str(a) for a, _, s in axes if s == shortest)
