"""Define the values and axes of a customized op's block graph, to lower it like any other op.

A block graph is over named axes already. So its ops become terms once its axes have the program's
names. A sum over a loop or tile axis is a sum, and a running maximum is the maximum. A sum with a
shift is the same sum without it, because it ends as if the shift had been final from the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mirage_hf.graph.block import BlockGraph, BlockInput, BlockOp
from mirage_hf.graph.kernel import DTensor, KernelOp


@dataclass(frozen=True)
class Reduction:
    """The sum or maximum of a block graph's value over one of its axes."""

    kind: str
    arg: str
    axis: str


Definition = BlockInput | BlockOp | Reduction


@dataclass(frozen=True)
class AxisUse:
    """A dim of a tensor that an axis of a block graph ranges over."""

    axis: str
    tensor: DTensor
    dim: int


def definitions(block: BlockGraph) -> dict[str, Definition]:
    """Return the op or the reduction that makes each value of a block graph, by name."""
    made: dict[str, Definition] = {i.name: i for i in block.inputs}
    for stage in block.stages:
        for op in stage.body:
            reduces = op.over is not None
            made[op.out] = Reduction(op.fn, str(op.args[0]), str(op.over)) if reduces else op
        for acc in stage.accumulators:
            assert stage.loop is not None
            made[acc.out] = Reduction(acc.kind, acc.arg, stage.loop)
    return made


def axis_uses(op: KernelOp) -> Iterator[AxisUse]:
    """Yield the dims of a customized op's tensors with the axes that range over them.

    Operands come first, then outputs. A dim along which several operands lie end to end is left
    out, because the axis is longer than the dim of each operand.
    """
    block = op.block
    assert block is not None
    for i in block.inputs:
        several = len(i.sources) > 1
        for source in i.sources:
            tensor = op.inputs[source]
            assert isinstance(tensor, DTensor)
            for dim, axis in enumerate(i.axes):
                if axis is not None and not (several and axis == i.joined):
                    yield AxisUse(axis, tensor, dim)
        if i.taken is not None:
            index = op.inputs[i.taken.index]
            assert isinstance(index, DTensor)
            for dim, axis in enumerate(i.taken.axes):
                if axis is not None:
                    yield AxisUse(axis, index, dim)
    for output, tensor in zip(block.outputs, op.outputs, strict=True):
        for dim, axis in enumerate(output.axes):
            if axis is not None:
                yield AxisUse(axis, tensor, dim)
