"""Lowering a kernel that is part of a program: the values of its block graph as terms, as if its kernel had been spelled out.

A block graph is over named axes already, so its ops are terms once its axes have names of the program. Sums over a loop or a tile
axis are sums, a running maximum is the maximum (a sum with a shift ends as if the shift had been final from the start). An axis
dealt out in parts is expressible where the partial results are combined again: their sum is the sum over the whole axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mirage_hf.graph.block import Accumulator, BlockGraph, BlockInput, BlockOp
from mirage_hf.graph.kernel import DTensor, KernelOp


@dataclass(frozen=True)
class Reduction:
    """Of a value over an axis of its block graph."""

    kind: str
    arg: str
    axis: str


Definition = BlockInput | BlockOp | Reduction


def definitions(block: BlockGraph) -> dict[str, Definition]:
    """How each value comes about."""
    found: dict[str, Definition] = {i.name: i for i in block.inputs}
    for stage in block.stages:
        for op in stage.body:
            found[op.out] = op if op.over is None else Reduction(op.fn, str(op.args[0]), op.over)
        for acc in stage.accumulators:
            found[acc.out] = _accumulated(acc, stage.loop)
    return found


def _accumulated(acc: Accumulator, loop: str | None) -> Reduction:
    assert loop is not None
    return Reduction(acc.kind, acc.arg, loop)


def places(op: KernelOp) -> Iterator[tuple[str, DTensor, int]]:
    """Axes of a customized op's block graph with the dims that range over them: operands first, joined dims left out."""
    block = op.block
    assert block is not None
    for i in block.inputs:
        for source in i.sources:
            t = op.inputs[source]
            assert isinstance(t, DTensor)
            yield from (
                (a, t, d)
                for d, a in enumerate(i.axes)
                if a is not None and not (len(i.sources) > 1 and a == i.joined)
            )
    for o, t in zip(block.outputs, op.outputs, strict=True):
        yield from ((a, t, d) for d, a in enumerate(o.axes) if a is not None)


def renamed(
    axes: tuple[str | None, ...], names: Mapping[str, str | None]
) -> tuple[str | None, ...]:
    """The index of a tensor whose dims range over these axes of a block graph."""
    return tuple(None if a is None else names[a] for a in axes)
