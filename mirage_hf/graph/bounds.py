"""Find the inputs of a program that are the bounds [lo, hi) of a ragged axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mirage_hf.graph.kernel import DTensor, KernelGraph, Operand
from mirage_hf.graph.operands import bound_operands


@dataclass(frozen=True)
class Bounds:
    """Two inputs of a program that are the bounds of a ragged axis.

    The axis is dim `dim` of the tensor `x`. If `x` is None, it is the axis `axis` of the block
    graph of op number `op`.
    """

    #: Positions among the program's inputs.
    lo: int
    hi: int

    #: The bounded tensor. None: an axis of a block graph is bounded.
    x: DTensor | None = None
    dim: int = 0

    op: int = -1
    axis: str = ""


def bounds_of(graph: KernelGraph) -> list[Bounds]:
    """Return the bounds that the ops of a graph read from its inputs."""
    return list(_bounds(graph))


def _bounds(graph: KernelGraph) -> Iterator[Bounds]:
    positions = {t.index: n for n, t in enumerate(graph.inputs)}

    def position(operand: Operand) -> int | None:
        return positions.get(operand.index) if isinstance(operand, DTensor) else None

    for number, op in enumerate(graph.ops):
        if op.block is not None:
            for i in op.block.inputs:
                if i.bounds is not None:
                    lo, hi = (position(op.inputs[s]) for s in i.sources)
                    if lo is not None and hi is not None:
                        yield Bounds(lo, hi, op=number, axis=i.bounds)
        elif operands := bound_operands(op.name, op.inputs):
            lo, hi = map(position, operands)
            x = op.inputs[0]
            assert isinstance(x, DTensor)
            if lo is not None and hi is not None:
                yield Bounds(lo, hi, x=x, dim=dict(op.attrs)["dim"] % len(x.dims))


def extent(program: KernelGraph, b: Bounds) -> int:
    """Return the size of the axis that is bounded."""
    if b.x is not None:
        return b.x.dims[b.dim]
    block = program.ops[b.op].block
    return 0 if block is None else block.axis(b.axis).size
