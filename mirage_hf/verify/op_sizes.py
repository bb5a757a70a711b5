"""Relate the sizes of the dims that each op of a kernel graph reads and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mirage_hf.graph.block import Taken
from mirage_hf.graph.effects import APPEND, parts_of
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelOp
from mirage_hf.graph.operands import bound_operands, index_operands
from mirage_hf.ops import table
from mirage_hf.verify.size_relations import (
    AxisSegment,
    BlockAxis,
    DimSegment,
    Key,
    ResizeError,
    SizeRelations,
    TensorDim,
    rotated_segment,
)


def relate_sizes(relations: SizeRelations, side: str, number: int, op: KernelOp) -> None:
    """Relate the sizes of an op's tensors, and of the axes of its block graph if it has one.

    Args:
        relations: Where the relations are added. It has the full sizes of all tensors.
        side: Whether the op is the program's or the kernels'.
        number: The op's number in its graph.
        op: The op.

    Raises:
        ResizeError: The op cannot be proven, or sizes contradict each other.
    """
    if op.name == CUSTOMIZED:
        _block_graph(relations, side, number, op)
        return
    _check_dtypes(op)
    rule = _RULES.get(op.name) or _RULES.get(table.OPS[op.name].kind)
    if rule is None:
        raise ResizeError(f"{op.name} cannot be proven yet")
    rule(relations, side, op)


def _elementwise(relations: SizeRelations, side: str, op: KernelOp) -> None:
    out = op.outputs[0]
    for t in _tensors(op):
        _join_from_right(relations, side, t, out)


def _join_from_right(
    relations: SizeRelations, side: str, t: DTensor, other: DTensor, first: int = 1
) -> None:
    """Join dims of equal size, aligned at the right, without the last `first - 1` dims."""
    for k in range(first, len(t.dims) + 1):
        if t.dims[-k] == other.dims[-k]:
            mine = TensorDim(side, t.index, len(t.dims) - k)
            relations.join(mine, TensorDim(side, other.index, len(other.dims) - k))


def _along_dim(relations: SizeRelations, side: str, op: KernelOp) -> None:
    """Relate the dims of a composite, or of an op with bounds: elementwise except along one dim."""
    _elementwise(relations, side, op)
    x = _tensors(op)[0]
    dim = dict(op.attrs).get("dim", -1) % len(op.outputs[0].dims)
    relations.reduced.add(TensorDim(side, x.index, dim))


def _matmul(relations: SizeRelations, side: str, op: KernelOp) -> None:
    (a, b), out = _tensors(op), op.outputs[0]
    rank = len(out.dims)
    for t, dim, other, other_dim in (
        (a, len(a.dims) - 1, b, len(b.dims) - 2),
        (a, len(a.dims) - 2, out, rank - 2),
        (b, len(b.dims) - 1, out, rank - 1),
    ):
        relations.join(TensorDim(side, t.index, dim), TensorDim(side, other.index, other_dim))
    for t in (a, b):
        _join_from_right(relations, side, t, out, first=3)


def _reduction(relations: SizeRelations, side: str, op: KernelOp) -> None:
    (x,), out = _tensors(op), op.outputs[0]
    dim = dict(op.attrs)["dim"] % len(out.dims)
    relations.reduced.add(TensorDim(side, x.index, dim))
    _join_all_except(relations, side, x, out, dim)


def _join_all_except(
    relations: SizeRelations, side: str, t: DTensor, out: DTensor, dim: int
) -> None:
    for k in range(len(out.dims)):
        if k != dim:
            relations.join(TensorDim(side, t.index, k), TensorDim(side, out.index, k))


def _permute(relations: SizeRelations, side: str, op: KernelOp) -> None:
    (x,), out = _tensors(op), op.outputs[0]
    for k, source in enumerate(dict(op.attrs)["order"]):
        mine = TensorDim(side, x.index, source % len(out.dims))
        relations.join(mine, TensorDim(side, out.index, k))


def _concat(relations: SizeRelations, side: str, op: KernelOp) -> None:
    out = op.outputs[0]
    dim = dict(op.attrs)["dim"] % len(out.dims)
    for t in _tensors(op):
        _join_all_except(relations, side, t, out, dim)
    parts = [TensorDim(side, t.index, dim) for t in _tensors(op)]
    relations.add_rule("sum", TensorDim(side, out.index, dim), parts)


def _slice(relations: SizeRelations, side: str, op: KernelOp) -> None:
    (x,), out, attrs = _tensors(op), op.outputs[0], dict(op.attrs)
    dim = attrs["dim"] % len(out.dims)
    _join_all_except(relations, side, x, out, dim)
    parts: list[Key] = [TensorDim(side, out.index, dim)]
    if before := attrs["start"]:
        parts.insert(0, _segment(relations, side, out, "before", before))
    if after := x.dims[dim] - attrs["stop"]:
        parts.append(_segment(relations, side, out, "after", after))
    relations.add_rule("sum", TensorDim(side, x.index, dim), parts)


def _take(relations: SizeRelations, side: str, op: KernelOp) -> None:
    (x, index), out = _tensors(op), op.outputs[0]
    dim = dict(op.attrs)["dim"] % len(x.dims)
    for d in range(len(index.dims)):
        relations.join(TensorDim(side, index.index, d), TensorDim(side, out.index, dim + d))
    for d in range(len(x.dims)):
        if d != dim:
            after = d if d < dim else d + len(index.dims) - 1
            relations.join(TensorDim(side, x.index, d), TensorDim(side, out.index, after))


def _reshape(relations: SizeRelations, side: str, op: KernelOp) -> None:
    """Pair runs of dims with equal products, the shortest runs first."""
    (x,), out = _tensors(op), op.outputs[0]
    old, new = ([d for d, n in enumerate(t.dims) if n > 1] for t in (x, out))
    while old and new:
        before, after = [old.pop(0)], [new.pop(0)]
        while (a := _product(x, before)) != (b := _product(out, after)):
            if a < b:
                before.append(old.pop(0))
            else:
                after.append(new.pop(0))
        if len(before) > 1 and len(after) > 1:
            raise ResizeError("a reshape mixes dims that have no common factors")
        left = [TensorDim(side, x.index, d) for d in before]
        right = [TensorDim(side, out.index, d) for d in after]
        total, parts = (left, right) if len(left) == 1 else (right, left)
        relations.add_rule("product", total[0], parts)


def _rope(relations: SizeRelations, side: str, op: KernelOp) -> None:
    (x, cos, sin), out = _tensors(op), op.outputs[0]
    for t in (cos, sin, out):
        _join_from_right(relations, side, t, x, first=2)
    last = TensorDim(side, x.index, len(x.dims) - 1)
    relations.join(last, TensorDim(side, out.index, len(out.dims) - 1))
    width = TensorDim(side, cos.index, len(cos.dims) - 1)
    relations.join(width, TensorDim(side, sin.index, len(sin.dims) - 1))
    two = _segment(relations, side, out, "two", 2)
    half = _segment(relations, side, out, "half", cos.dims[-1] // 2)
    relations.fixed.add(two)
    relations.add_rule("product", width, [two, half])
    relations.reduced |= {width, last}
    if cos.dims[-1] == x.dims[-1]:
        relations.join(width, last)
    else:
        rest = _segment(relations, side, out, "rest", x.dims[-1] - cos.dims[-1])
        relations.add_rule("sum", last, [width, rest])


def _append(relations: SizeRelations, side: str, op: KernelOp) -> None:
    cache, rows, position = parts_of(op)
    out = op.outputs[0]
    slots = len(out.dims) - 2
    _join_all_except(relations, side, cache, out, -1)
    _join_all_except(relations, side, rows, out, slots)
    parts: list[Key] = [TensorDim(side, rows.index, slots)]
    if rest := cache.dims[slots] - rows.dims[slots]:
        parts.append(_segment(relations, side, out, "rest", rest))
    relations.add_rule("sum", TensorDim(side, out.index, slots), parts)
    if position.dims[0] == cache.dims[0]:
        relations.join(TensorDim(side, position.index, 0), TensorDim(side, out.index, 0))


def _block_graph(relations: SizeRelations, side: str, number: int, op: KernelOp) -> None:
    block = op.block
    assert block is not None
    relations.full |= {BlockAxis(side, number, a.name): a.size for a in block.axes}
    for i in block.inputs:
        sources = [x for s in i.sources if isinstance(x := op.inputs[s], DTensor)]
        for d, name in enumerate(i.axes):
            if name is None:
                continue
            axis = BlockAxis(side, number, name)
            dims = [TensorDim(side, t.index, d) for t in sources]
            if name == i.joined:
                relations.add_rule("sum", axis, dims)
            elif i.padding is not None and name == i.padding.axis:
                relations.cut(axis, dims[0], AxisSegment(side, number, i.name, "padding"))
            else:
                for dim in dims:
                    relations.join(axis, dim)
        if i.taken is not None:
            _index(relations, side, number, op, i.taken)
        if i.rotation is not None and i.rotation.width is not None:
            rotated = rotated_segment(side, number, i.name)
            relations.full[rotated] = i.rotation.width
            straight = AxisSegment(side, number, i.name, "straight")
            relations.cut(BlockAxis(side, number, i.rotation.axis), rotated, straight)
    for t, output in zip(op.outputs, block.outputs, strict=True):
        for d, name in enumerate(output.axes):
            if name is not None:
                relations.join(TensorDim(side, t.index, d), BlockAxis(side, number, name))
    for a in block.axes:
        if a.split_axis is not None:
            pair = (BlockAxis(side, number, a.name), BlockAxis(side, number, a.split_axis))
            relations.splits.append(pair)


def _index(relations: SizeRelations, side: str, number: int, op: KernelOp, taken: Taken) -> None:
    index = op.inputs[taken.index]
    assert isinstance(index, DTensor)
    for d, name in enumerate(taken.axes):
        if name is not None:
            relations.join(BlockAxis(side, number, name), TensorDim(side, index.index, d))


def _segment(relations: SizeRelations, side: str, t: DTensor, name: str, size: int) -> DimSegment:
    segment = DimSegment(side, t.index, name)
    relations.full[segment] = size
    return segment


_RULES: dict[str, Callable[[SizeRelations, str, KernelOp], None]] = {
    "elementwise": _elementwise,
    "composite": _along_dim,
    "bounds": _along_dim,
    "contract": _matmul,
    "reduce": _reduction,
    "permute": _permute,
    "reshape": _reshape,
    "concat": _concat,
    "slice": _slice,
    "take": _take,
    "rope": _rope,
    APPEND: _append,
}


def _tensors(op: KernelOp) -> list[DTensor]:
    return [x for x in op.inputs if isinstance(x, DTensor)]


def _product(t: DTensor, dims: Sequence[int]) -> int:
    return math.prod(t.dims[d] for d in dims)


def _check_dtypes(op: KernelOp) -> None:
    """Raise ResizeError if an op computes with integers. Bounds and positions are no values."""
    indices = bound_operands(op.name, op.inputs) + index_operands(op.name, op.inputs)
    if op.name == APPEND:
        indices = (*indices, parts_of(op)[2])
    values = [t for t in (*_tensors(op), op.outputs[0]) if t not in indices]
    if op.name == "cast":  # a code is a number
        values = [t for t in values if t.dtype not in table.CODE_DTYPES]
    if any(t.dtype not in table.COMPUTE_DTYPES for t in values):
        raise ResizeError(
            f"{op.name} works on whole numbers: proofs are about floating-point tensors"
        )
