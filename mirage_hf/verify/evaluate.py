"""Evaluate a kernel graph under an algebra, op by op, on small arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mirage_hf.graph.algebra import Algebra
from mirage_hf.graph.block import (
    SIGN_HALVES,
    SIGN_PAIRS,
    SWAP_HALVES,
    SWAP_PAIRS,
    BlockGraph,
    Role,
    Rotation,
)
from mirage_hf.graph.effects import APPEND
from mirage_hf.graph.execute_block import rotate_along, run_block_graph
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table

Dims = tuple[int, ...]


class ProofAlgebra(Algebra, Protocol):
    """An algebra that can also repeat arrays along dims of size 1."""

    def spread(self, x: Any, shape: Sequence[int]) -> Any:
        """Repeat dims of size 1 until the array has this shape."""


@dataclass(frozen=True)
class SmallGraph:
    """A kernel graph, with composites written out, and the sizes at which it is evaluated.

    Numbers in the graph, such as the 1/n of a mean, stay those of the full sizes.

    Attributes:
        graph: The kernel graph at its full sizes.
        dims: The small dims of each tensor, by index.
        blocks: The small block graph of each customized op, by the op's number.
        starts: Where each slice begins, by the op's number.
    """

    graph: KernelGraph
    dims: Mapping[int, Dims]
    blocks: Mapping[int, BlockGraph]
    starts: Mapping[int, int]

    def run(
        self, operands: Sequence[Any], algebra: ProofAlgebra, pieces: int, whole_grid: bool = False
    ) -> list[Any]:
        """Return the outputs.

        Args:
            operands: Arrays for the inputs, in their small dims.
            algebra: What computes with them.
            pieces: How many pieces each loop and grid axis of a block graph is executed in.
            whole_grid: Execute each grid axis in one piece.
        """
        values = {t.index: x for t, x in zip(self.graph.inputs, operands, strict=True)}
        for number, op in enumerate(self.graph.ops):
            args = [values[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
            if op.name == CUSTOMIZED:
                block = self.blocks[number]
                in_one_piece = {a.name for a in block.axes if whole_grid and a.role is Role.GRID}
                cuts = {a.name: 1 if a.name in in_one_piece else pieces for a in block.axes}
                results = run_block_graph(block, args, algebra, cuts)
            else:
                y = self._library_op(number, op, args, algebra)
                results = [algebra.spread(y, self.dims[op.outputs[0].index])]
            values |= {t.index: y for t, y in zip(op.outputs, results, strict=True)}
        return [values[t.index] for t in self.graph.outputs]

    def _library_op(self, number: int, op: KernelOp, args: list[Any], algebra: ProofAlgebra) -> Any:
        if table.OPS[op.name].kind == "elementwise":
            return algebra.elementwise(op.name, args, dict(op.attrs))
        dims = [self.dims[x.index] if isinstance(x, DTensor) else () for x in op.inputs]
        out = self.dims[op.outputs[0].index]
        call = _Call(op, args, dims, out, algebra, self.starts.get(number, 0))
        return _RULES[op.name](call)


@dataclass(frozen=True)
class _Call:
    """One library op at small sizes."""

    op: KernelOp
    args: list[Any]
    dims: list[Dims]
    out: Dims
    algebra: ProofAlgebra
    start: int

    @property
    def attrs(self) -> dict[str, Any]:
        return dict(self.op.attrs)

    @property
    def rank(self) -> int:
        return len(self.dims[0])

    @property
    def dim(self) -> int:
        return int(self.attrs["dim"]) % self.rank

    def cut(self, x: Any, ranges: Mapping[int, slice]) -> Any:
        """Return a part of an array of the first operand's rank, given for some dims."""
        return self.algebra.cut(x, tuple(ranges.get(d, slice(None)) for d in range(self.rank)))


def _within(call: _Call) -> Any:
    x, lo, hi = call.args
    missing = call.rank - len(call.dims[1])
    shape = (*[1] * missing, *call.dims[1])
    order = range(len(call.dims[1]))
    inside = call.algebra.bounds(lo, hi, order, shape, call.dim, call.dims[0][call.dim])
    return call.algebra.elementwise("select", [inside, x, 0.0], attrs={})


def _matmul(call: _Call) -> Any:
    algebra, (a_dims, b_dims) = call.algebra, call.dims
    a = algebra.arrange(call.args[0], range(len(a_dims)), (*a_dims, 1))
    b = algebra.arrange(call.args[1], range(len(b_dims)), (*b_dims[:-2], 1, *b_dims[-2:]))
    rank = len(call.out)
    summed = algebra.reduce("sum", algebra.elementwise("mul", [a, b], {}), rank - 1)
    return algebra.arrange(summed, range(rank + 1), call.out)


def _reduction(call: _Call) -> Any:
    x, kind = call.op.inputs[0], call.attrs["kind"]
    assert isinstance(x, DTensor)
    full = x.dims[call.dim]
    if full == 1:
        return call.args[0]
    total = call.algebra.reduce("max" if kind == "max" else "sum", call.args[0], call.dim)
    if kind != "mean":
        return total
    return call.algebra.elementwise("mul", [total, 1.0 / full], {})


def _permute(call: _Call) -> Any:
    order = [d % call.rank for d in call.attrs["order"]]
    return call.algebra.arrange(call.args[0], order, call.out)


def _reshape(call: _Call) -> Any:
    return call.algebra.arrange(call.args[0], range(call.rank), call.out)


def _slice(call: _Call) -> Any:
    stop = call.start + call.out[call.dim]
    return call.cut(call.args[0], {call.dim: slice(call.start, stop)})


def _take(call: _Call) -> Any:
    return call.algebra.take(call.args[0], call.args[1], call.dim)


def _concat(call: _Call) -> Any:
    return call.algebra.join(call.args, call.dim)


def _append(call: _Call) -> Any:
    """Return a cache with some rows replaced, at one position or at one for each of dim 0."""
    cache, rows, position = call.args
    slots_dim = call.rank - 2
    slots, count = call.dims[0][slots_dim], call.dims[1][slots_dim]
    starts = [int(p) for p in position.reshape(-1)]
    each = 1 if len(starts) > 1 else call.dims[0][0]

    def appended(n: int, start: int) -> Any:
        def part(x: Any, first: int, stop: int) -> Any:
            ranges = {slots_dim: slice(first, stop)}
            if call.rank > 2:
                ranges[0] = slice(n * each, (n + 1) * each)
            return call.cut(x, ranges)

        parts = [part(rows, 0, count)]
        if start:
            parts.insert(0, part(cache, 0, start))
        if start + count < slots:
            parts.append(part(cache, start + count, slots))
        return parts[0] if len(parts) == 1 else call.algebra.join(parts, slots_dim)

    whole = [appended(n, start) for n, start in enumerate(starts)]
    return whole[0] if len(whole) == 1 else call.algebra.join(whole, 0)


def _rope(call: _Call) -> Any:
    """Return x · cos + rotated x · sin for the first elements, and the others as they are."""
    algebra = call.algebra
    x, cos, sin = call.args
    last, length, width = call.rank - 1, call.dims[0][-1], call.dims[1][-1]
    head = rotated = call.cut(x, {last: slice(0, width)})
    halves, pairs = (SWAP_HALVES, SIGN_HALVES), (SWAP_PAIRS, SIGN_PAIRS)
    for how in pairs if call.attrs["interleaved"] else halves:
        shape = (*call.dims[0][:-1], width)
        rotated = rotate_along(algebra, rotated, shape, last, Rotation("", how))
    straight = algebra.elementwise("mul", [head, cos], {})
    crossed = algebra.elementwise("mul", [rotated, sin], {})
    summed = algebra.elementwise("add", [straight, crossed], {})
    if width == length:
        return summed
    return algebra.join([summed, call.cut(x, {last: slice(width, length)})], last)


#: The rule of each op. `op_sizes` rejects ops that have none.
_RULES: dict[str, Callable[[_Call], Any]] = {
    "within": _within,
    "matmul": _matmul,
    "reduction": _reduction,
    "permute": _permute,
    "reshape": _reshape,
    "slice": _slice,
    "concat": _concat,
    "take": _take,
    "rope": _rope,
    APPEND: _append,
}
