"""Evaluate a kernel graph under an algebra, op by op on small arrays: programs and µGraphs of several kernels alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
from mirage_hf.graph.execute import Algebra, rotate_along, run_block_graph
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table


class ProofAlgebra(Algebra, Protocol):
    """What a proof needs beyond block graphs: arrays repeated along dims of size 1."""

    def spread(self, x: Any, shape: Sequence[int]) -> Any: ...


@dataclass(frozen=True)
class SmallGraph:
    """A kernel graph (composites written out) and the sizes it is evaluated at: `dims` by tensor index, a small block graph
    by op number, where slices start. Numbers in it (1/n of a mean) stay those of the full sizes."""

    graph: KernelGraph
    dims: Mapping[int, tuple[int, ...]]
    blocks: Mapping[int, BlockGraph]
    starts: Mapping[int, int]

    def run(
        self, operands: Sequence[Any], algebra: ProofAlgebra, pieces: int, whole_grid: bool = False
    ) -> list[Any]:
        """The outputs, in their dims. Block graphs are executed in `pieces` pieces per loop axis, and per grid axis too unless
        `whole_grid`."""
        values: dict[int, Any] = {
            t.index: x for t, x in zip(self.graph.inputs, operands, strict=True)
        }
        for number, op in enumerate(self.graph.ops):
            args = [values[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
            if op.name == CUSTOMIZED:
                block = self.blocks[number]
                cuts = {
                    a.name: 1 if whole_grid and a.role is Role.GRID else pieces for a in block.axes
                }
                results = run_block_graph(block, args, algebra, cuts)
            else:
                results = [
                    algebra.spread(
                        self._library(number, op, args, algebra), self.dims[op.outputs[0].index]
                    )
                ]
            values |= {t.index: y for t, y in zip(op.outputs, results, strict=True)}
        return [values[t.index] for t in self.graph.outputs]

    def _library(self, number: int, op: KernelOp, args: list[Any], algebra: ProofAlgebra) -> Any:
        attrs, out = dict(op.attrs), self.dims[op.outputs[0].index]
        dims = [self.dims[x.index] if isinstance(x, DTensor) else () for x in op.inputs]
        rank = len(dims[0])
        if table.OPS[op.name].kind == "elementwise":
            return algebra.elementwise(op.name, args, attrs)
        if op.name == "within":
            order, shape = range(len(dims[1])), (*[1] * (rank - len(dims[1])), *dims[1])
            inside = algebra.bounds(
                args[1], args[2], order, shape, attrs["dim"] % rank, dims[0][attrs["dim"] % rank]
            )
            return algebra.elementwise("select", [inside, args[0], 0.0], attrs={})
        if op.name == "matmul":
            a = algebra.arrange(args[0], range(rank), (*dims[0], 1))
            b = algebra.arrange(args[1], range(len(dims[1])), (*dims[1][:-2], 1, *dims[1][-2:]))
            summed = algebra.reduce("sum", algebra.elementwise("mul", [a, b], {}), len(out) - 1)
            return algebra.arrange(summed, range(len(out) + 1), out)
        if op.name == "reduction":
            full = op.inputs[0].dims[attrs["dim"] % rank]  # type: ignore[union-attr]
            if full == 1:
                return args[0]
            total = algebra.reduce(
                "max" if attrs["kind"] == "max" else "sum", args[0], attrs["dim"] % rank
            )
            return (
                algebra.elementwise("mul", [total, 1.0 / full], {})
                if attrs["kind"] == "mean"
                else total
            )
        if op.name == "permute":
            return algebra.arrange(args[0], [o % rank for o in attrs["order"]], out)
        if op.name == "reshape":
            return algebra.arrange(args[0], range(rank), out)
        if op.name == "slice":
            dim, start = attrs["dim"] % rank, self.starts[number]
            return algebra.cut(
                args[0],
                tuple(
                    slice(start, start + out[d]) if d == dim else slice(None) for d in range(rank)
                ),
            )
        if op.name == "concat":
            return algebra.join(args, attrs["dim"] % rank)
        if op.name == APPEND:
            return self._append(args, dims, algebra)
        assert op.name == "rope", op.name  # shrink.py refuses the others
        return self._rope(args, dims, attrs["interleaved"], algebra)

    def _append(self, args: list[Any], dims: list[tuple[int, ...]], algebra: ProofAlgebra) -> Any:
        cache, rows, position = args
        rank, slots, count = len(dims[0]), dims[0][-2], dims[1][-2]
        starts = [int(p) for p in position.reshape(-1)]
        each = 1 if len(starts) > 1 else dims[0][0]  # with one position all of dim 0 at once

        def cut(x: Any, n: int, start: int, stop: int) -> Any:
            own = {0: slice(n * each, (n + 1) * each)} if rank > 2 else {}
            return algebra.cut(
                x,
                tuple(
                    slice(start, stop) if d == rank - 2 else own.get(d, slice(None))
                    for d in range(rank)
                ),
            )

        def appended(n: int, start: int) -> Any:
            parts = [cut(cache, n, 0, start)] if start else []
            parts.append(cut(rows, n, 0, count))
            parts += [cut(cache, n, start + count, slots)] if start + count < slots else []
            return parts[0] if len(parts) == 1 else algebra.join(parts, rank - 2)

        whole = [appended(n, start) for n, start in enumerate(starts)]
        return whole[0] if len(whole) == 1 else algebra.join(whole, 0)

    def _rope(
        self, args: list[Any], dims: list[tuple[int, ...]], interleaved: bool, algebra: ProofAlgebra
    ) -> Any:
        x, cos, sin = args
        rank, width = len(dims[0]), dims[1][-1]

        def part(start: int, stop: int) -> Any:
            return algebra.cut(x, (*[slice(None)] * (rank - 1), slice(start, stop)))

        head = rotated = part(0, width)
        for how in (SWAP_PAIRS, SIGN_PAIRS) if interleaved else (SWAP_HALVES, SIGN_HALVES):
            rotated = rotate_along(
                algebra, rotated, (*dims[0][:-1], width), rank - 1, Rotation("", how)
            )
        both = [algebra.elementwise("mul", pair, {}) for pair in ([head, cos], [rotated, sin])]
        summed = algebra.elementwise("add", both, {})
        return (
            summed
            if width == dims[0][-1]
            else algebra.join([summed, part(width, dims[0][-1])], rank - 1)
        )
