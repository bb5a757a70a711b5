"""Rebuild block graphs that kernels can stream with one part changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.errors import CodegenError
from mirage_hf.graph.block import Axis, BlockGraph, BlockOp
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from tests.helpers.streamed_graphs import Hand

#: 64 rows whose words hold codes of eight rows. Dims of codes are rows / 8, 4 and 2, then groups
#: and their columns. Those of scales and zero points are the same, with one column of each group.
IN_WORDS = Hand(has_rows_in_words=True, scale_columns=(0,), has_zeros=True, zeros_in_words=True)
#: The axes of its codes.
IN_WORDS_AXES = ("n", "o", "p", "k", "r")


def refusal(call) -> str:
    """Return the text of the error that a call raises."""
    with pytest.raises(CodegenError) as raised:
        call()
    return str(raised.value)


def rebuilt_graph(
    hand: Hand, block: BlockGraph | None = None, strides=None, dims=None, changing=()
) -> KernelGraph:
    """Return a kernel graph of another block graph with the operands of `hand`.

    Args:
        hand: A block graph that fits.
        block: The other block graph. None: that of `hand`.
        strides: Strides of operands, by name. Others are those of `hand`, unless dims change.
        dims: Dims of operands, by name. Others are those of `hand`.
        changing: Names of operands that are not constant. Others are as in `hand`.
    """
    g = KernelGraph()
    old = hand.op
    strides, dims = strides or {}, dims or {}
    tensors = [
        g.new_input(
            dims.get(t.name, t.dims),
            t.dtype,
            strides.get(t.name, None if t.name in dims else t.strides),
            name=t.name,
            constant=t.constant and t.name not in changing,
        )
        for t in old.operands
    ]
    g.mark_output(*g.customized(tensors, block or old.block))
    return g


def placed(graph: KernelGraph) -> PlacedOp:
    """Return the only op of a kernel graph."""
    return place_kernels(UGraph(graph, graph))[0]


def rebuilt(hand: Hand, block: BlockGraph | None = None, **changes) -> PlacedOp:
    """Return the op of `rebuilt_graph`."""
    return placed(rebuilt_graph(hand, block, **changes))


def with_input(hand: Hand, name: str, axes: tuple[str | None, ...]) -> BlockGraph:
    """Return the block graph of `hand` with an input that has other axes."""
    block = hand.op.block
    inputs = tuple(replace(i, axes=axes) if i.name == name else i for i in block.inputs)
    return replace(block, inputs=inputs)


def with_axis(hand: Hand, axis: Axis) -> BlockGraph:
    """Return the block graph of `hand` with one more axis, which x and all that it enters have."""
    block = hand.op.block
    entered, stages = {"x"}, []

    def widened(part, read):
        """Return an op or an accumulator, with the axis if what it reads has it."""
        if not entered & {*read}:
            return part
        entered.add(part.out)
        return replace(part, axes=(axis.name, *part.axes))

    for stage in block.stages:
        body = tuple(widened(op, op.args) for op in stage.body)
        sums = tuple(widened(a, (a.arg,)) for a in stage.accumulators)
        stages.append(replace(stage, body=body, accumulators=sums))
    inputs = tuple(
        replace(i, axes=(axis.name, *i.axes)) if i.name == "x" else i for i in block.inputs
    )
    outputs = tuple(replace(o, axes=(axis.name, *o.axes)) for o in block.outputs)
    axes = (axis, *block.axes)
    return replace(block, axes=axes, inputs=inputs, stages=tuple(stages), outputs=outputs)


def with_body(hand: Hand, **ops: BlockOp) -> BlockGraph:
    """Return the block graph of `hand` with other ops in its loop, by their results."""
    block = hand.op.block
    first = block.stages[0]
    body = tuple(ops.get(op.out, op) for op in first.body)
    return replace(block, stages=(replace(first, body=body), *block.stages[1:]))


def op_of(hand: Hand, out: str) -> BlockOp:
    """Return the op that computes a value."""
    return hand.op.block.ops_by_name[out]
