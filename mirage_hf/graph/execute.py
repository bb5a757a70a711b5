"""Run kernel graphs and block graphs under an algebra: torch numbers (the cpu backend, references) or finite fields (proofs).

One interpreter walks a block graph exactly as a kernel does: block by block, stage by stage, loop tile by loop tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mirage_hf.graph.block import Accumulator, BlockGraph, BlockInput, Role, Rotation, Stage
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table


class Algebra(Protocol):
    """Arrays and what may be done to them. In a block graph an array has one dim per axis of the graph, 1 if not carried."""

    def arrange(self, x: Any, order: Sequence[int], shape: Sequence[int]) -> Any: ...
    def join(self, xs: Sequence[Any], dim: int) -> Any: ...
    def cut(self, x: Any, slices: tuple[slice, ...]) -> Any: ...
    def empty(self, shape: Sequence[int]) -> Any: ...
    def full(self, shape: Sequence[int], value: float) -> Any: ...
    def put(self, out: Any, slices: tuple[slice, ...], x: Any) -> None: ...
    def elementwise(self, fn: str, args: Sequence[Any], attrs: Mapping[str, float]) -> Any: ...
    def reduce(self, kind: str, x: Any, dim: int) -> Any: ...
    def accumulate(self, kind: str, total: Any, x: Any) -> Any: ...
    def rescale(self, total: Any, old: Any, new: Any) -> Any:
        """total · e^(old − new), where `new` ≥ `old` is a running maximum."""

    def shift(self, maximum: Any) -> Any:
        """A running maximum as what a tile subtracts: 0 while only −inf has been seen."""

    def bounds(
        self, lo: Any, hi: Any, order: Sequence[int], shape: Sequence[int], dim: int, size: int
    ) -> Any:
        """1 where lo ≤ index along `dim`, of `size` elements, < hi, else 0. lo and hi, whole numbers, are arranged first."""

    def contract(self, a: Any, b: Any, dim: int) -> Any:
        """Σ over `dim` of a·b, or None where the algebra has no shortcut."""


class TorchAlgebra:
    """Numbers of one compute dtype. `mma` rounds the factors of contractions as tensor cores fed with that dtype would."""

    def __init__(
        self,
        compute: torch.dtype = torch.float32,
        mma: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        self.compute, self.mma, self.device = compute, mma, device

    def arrange(self, x: torch.Tensor, order: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return x.to(self.compute).permute(tuple(order)).reshape(tuple(shape))

    def join(self, xs: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        return torch.cat(list(xs), dim)

    def cut(self, x: torch.Tensor, slices: tuple[slice, ...]) -> torch.Tensor:
        return x[slices]

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.full(tuple(shape), float("nan"), dtype=self.compute, device=self.device)

    def full(self, shape: Sequence[int], value: float) -> torch.Tensor:
        return torch.full(tuple(shape), value, dtype=self.compute, device=self.device)

    def put(self, out: torch.Tensor, slices: tuple[slice, ...], x: torch.Tensor) -> None:
        out[slices] = x

    def elementwise(self, fn: str, args: Sequence[Any], attrs: Mapping[str, float]) -> torch.Tensor:
        tensors = [
            a.to(self.compute)
            if isinstance(a, torch.Tensor)
            else torch.tensor(a, dtype=self.compute, device="cpu")
            for a in args
        ]
        return table.lookup(fn).oracle(*tensors, **attrs)

    def reduce(self, kind: str, x: torch.Tensor, dim: int) -> torch.Tensor:
        return table.lookup("reduction").oracle(x, dim=dim, kind=kind)

    def accumulate(self, kind: str, total: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        if total is None:
            return x
        return total + x if kind == "sum" else torch.maximum(total, x)

    def rescale(self, total: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return total * torch.where(old == new, 1.0, torch.exp(old - new)).to(
            total.dtype
        )  # -inf to -inf: nothing was summed yet

    def shift(self, maximum: torch.Tensor) -> torch.Tensor:
        return maximum.masked_fill(maximum == float("-inf"), 0.0)

    def bounds(
        self,
        lo: torch.Tensor,
        hi: torch.Tensor,
        order: Sequence[int],
        shape: Sequence[int],
        dim: int,
        size: int,
    ) -> torch.Tensor:
        lo, hi = (x.permute(tuple(order)).reshape(tuple(shape)) for x in (lo, hi))
        at = torch.arange(size, device=lo.device).view(-1, *[1] * (len(shape) - 1 - dim))
        return ((at >= lo) & (at < hi)).to(self.compute)

    def contract(self, a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
        if self.mma is not None:
            a, b = a.to(self.mma).to(self.compute), b.to(self.mma).to(self.compute)
        letters = "abcdefghijklmnopqrstuvwxyz"[: a.dim()]
        out = torch.einsum(f"{letters},{letters}->{letters.replace(letters[dim], '')}", a, b)
        return out.unsqueeze(dim)


def _cuts(start: int, stop: int, pieces: int) -> list[slice]:
    size = stop - start
    step = -(-size // max(1, min(pieces, size)))
    return [slice(lo, min(lo + step, stop)) for lo in range(start, stop, step)]


def rotate_along(
    algebra: Algebra, x: Any, shape: Sequence[int], dim: int, rotation: Rotation
) -> Any:
    """An array of that shape, read along `dim` as `rotation` says."""
    rank, width = len(shape), rotation.width or shape[dim]
    half = width // 2

    def part(start: int, stop: int, step: int = 1) -> Any:
        return algebra.cut(
            x, tuple(slice(start, stop, step) if d == dim else slice(None) for d in range(rank))
        )

    first, second = (
        (part(k, 2 * half, 2) for k in (0, 1))
        if rotation.pairs
        else (part(0, half), part(half, 2 * half))
    )
    both = [second, first] if rotation.swaps else [algebra.elementwise("neg", [first], {}), second]
    joined = algebra.join(both, dim)
    if rotation.pairs:
        split = algebra.arrange(joined, range(rank), (*shape[:dim], 2, half, *shape[dim + 1 :]))
        joined = algebra.arrange(
            split,
            (*range(dim), dim + 1, dim, *range(dim + 2, rank + 1)),
            (*shape[:dim], width, *shape[dim + 1 :]),
        )
    return joined if width == shape[dim] else algebra.join([joined, part(width, shape[dim])], dim)


def run_block_graph(
    graph: BlockGraph,
    operands: Sequence[Any],
    algebra: Algebra,
    pieces: Mapping[str, int] | int = 1,
) -> list[Any]:
    """Execute a block graph. `pieces`: into how many pieces grid and loop axes are cut (int: all alike); parts of an axis are
    always taken one by one. Returns raw arrays in the outputs' dims."""
    return _BlockRun(graph, algebra, pieces).outputs(operands)


class _BlockRun:
    """One execution of a block graph: inputs are loaded whole, then every block runs its stages on its slices of them."""

    def __init__(
        self, graph: BlockGraph, algebra: Algebra, pieces: Mapping[str, int] | int
    ) -> None:
        self.graph, self.algebra, self.pieces = graph, algebra, pieces
        self.index = {a.name: n for n, a in enumerate(graph.axes)}
        self.products = {c.product: c for c in graph.contractions.values()}
        # with numbers all parts are computed at once, as an axis of their own, where they are equally long and no output carries the
        # axis that they are of: the same sums in the same order, without a Python loop over parts
        self.together = {
            a.name: a.split_axis
            for a in graph.axes
            if a.split_axis is not None
            and pieces == 1
            and isinstance(algebra, TorchAlgebra)
            and a.size == graph.split_size(a.name) * graph.axis(a.split_axis).size
            and not any(a.name in o.axes for o in graph.outputs)
        }

    def outputs(self, operands: Sequence[Any]) -> list[Any]:
        graph, algebra = self.graph, self.algebra
        loaded = {i.name: self._load(i, operands) for i in graph.inputs}
        raw = [
            algebra.empty(self._shape([a for a in o.axes if a is not None])) for o in graph.outputs
        ]
        grid = graph.named(Role.GRID)
        for slices in itertools.product(*(self._cuts(a.name, slice(0, a.size)) for a in grid)):
            self._block({a.name: s for a, s in zip(grid, slices, strict=True)}, loaded, raw)
        results = []
        for o, array in zip(graph.outputs, raw, strict=True):
            carried = [self.index[a] for a in o.axes if a is not None]
            order = carried + [d for d in range(len(graph.axes)) if d not in carried]
            results.append(algebra.arrange(array, order, graph.output_dims(o)))
        return results

    def _shape(self, axes: Sequence[str], extent: Mapping[str, int] | None = None) -> list[int]:
        """The shape of an array that carries `axes`; `extent`: those along which it is shorter."""
        return [
            (extent or {}).get(a.name, a.size) if a.name in axes else 1 for a in self.graph.axes
        ]

    def _window(self, axes: Sequence[str | None], at: Mapping[str, slice]) -> tuple[slice, ...]:
        return tuple(at.get(a, slice(None)) if a in axes else slice(None) for a in self.index)

    def _cuts(self, name: str, within: slice) -> list[slice]:
        """The slices in which blocks, or the trips of a loop, take an axis."""
        size = self.graph.axis(name).size
        if name in self.together.values():
            return [slice(0, size)]
        if self.graph.axis_split_by(name) is not None:
            return _cuts(0, size, size)
        return _cuts(
            within.start,
            within.stop,
            self.pieces if isinstance(self.pieces, int) else self.pieces.get(name, 1),
        )

    def _load(self, i: BlockInput, operands: Sequence[Any]) -> Any:
        """An input along all of its axes."""
        graph, algebra, index = self.graph, self.algebra, self.index
        present = [(index[a], d) for d, a in enumerate(i.axes) if a is not None]
        order = [d for _, d in sorted(present)] + [d for d, a in enumerate(i.axes) if a is None]
        if i.bounds is not None:
            lo, hi = (operands[s] for s in i.sources)
            shape = self._shape([a for a in i.axes if a is not None])
            whole = algebra.bounds(lo, hi, order, shape, index[i.bounds], graph.axis(i.bounds).size)
        else:
            sources = [
                self._source(i, k, operands[source], order) for k, source in enumerate(i.sources)
            ]
            whole = sources[0] if len(sources) == 1 else algebra.join(sources, index[str(i.joined)])
        for name, number in self.together.items():
            if name in i.carried:
                dealt = whole.unflatten(index[name], (graph.axis(number).size, -1)).movedim(
                    index[name], -1
                )
                whole = dealt.squeeze(index[number]).movedim(-1, index[number])
        return whole

    def _source(self, i: BlockInput, k: int, operand: Any, order: Sequence[int]) -> Any:
        """The k-th source of an input, rotated and padded as it says."""
        graph, algebra, index = self.graph, self.algebra, self.index
        extent = (
            {i.joined: i.sizes[k]}
            if i.joined and i.sizes
            else {i.padding.axis: i.padding.size}
            if i.padding
            else {}
        )
        shape = self._shape(graph.input_axes(i), extent)
        x = algebra.arrange(operand, order, shape)
        if i.rotation is not None:
            x = rotate_along(algebra, x, shape, index[i.rotation.axis], i.rotation)
        if i.padding is not None:
            shape[index[i.padding.axis]] = graph.axis(i.padding.axis).size - i.padding.size
            x = algebra.join([x, algebra.full(shape, i.padding.value)], index[i.padding.axis])
        return x

    def _block(self, at: dict[str, slice], loaded: Mapping[str, Any], raw: Sequence[Any]) -> None:
        """Run one block, which has the slices `at` of the grid axes, and store what it gives into `raw`."""
        graph = self.graph
        parts = {
            a.name: slice(0, graph.split_size(a.name))
            if a.name in self.together
            else slice(
                at[a.split_axis].start * graph.split_size(a.name),
                min(at[a.split_axis].stop * graph.split_size(a.name), a.size),
            )
            for a in graph.axes
            if a.split_axis is not None
        }
        at |= {name: s for name, s in parts.items() if graph.role(name) is Role.TILE}
        values: dict[str, Any] = {}
        for stage in graph.stages:
            loop, totals = stage.loop, dict[str, Any]()
            trips: list[slice | None] = [None]
            if loop is not None:
                trips = [*self._cuts(loop, parts.get(loop, slice(0, graph.axis(loop).size)))]
            for trip in trips:
                if loop is not None and trip is not None:
                    at[loop] = trip
                for i in graph.inputs:
                    if loop is not None or i.name not in values:
                        values[i.name] = self.algebra.cut(
                            loaded[i.name], self._window(graph.carried[i.name], at)
                        )
                self._body(stage, values, totals)
                for o, array in zip(graph.outputs, raw, strict=True):
                    if (
                        loop is not None
                        and loop in o.axes
                        and any(o.value == op.out for op in stage.body)
                    ):
                        self.algebra.put(array, self._window(o.axes, at), values[o.value])
            if loop is not None:
                at.pop(loop, None)
                for i in graph.inputs:  # a later stage loads its own tile
                    if loop in i.carried:
                        values.pop(i.name, None)
            values |= totals
        for o, array in zip(graph.outputs, raw, strict=True):
            if not any(a is not None and graph.role(a) is Role.LOOP for a in o.axes):
                self.algebra.put(array, self._window(o.axes, at), values[o.value])

    def _body(self, stage: Stage, values: dict[str, Any], totals: dict[str, Any]) -> None:
        """One trip of a stage: `values` get what the body computes, `totals` what the accumulators hold behind it."""
        algebra, index = self.algebra, self.index
        contracted: dict[
            str, Any
        ] = {}  # sums of products whose products were not formed, by the product's name
        maxima = {acc.out: acc for acc in stage.accumulators if acc.kind == "max"}
        before = dict(totals)

        def grow(acc: Accumulator) -> None:
            part = algebra.reduce("max", values[acc.arg], index[str(stage.loop)])
            totals[acc.out] = algebra.accumulate("max", before.get(acc.out), part)
            values[acc.out] = algebra.shift(totals[acc.out])  # for this tile

        for op in stage.body:
            for a in op.args:
                if isinstance(a, str) and a in maxima and a not in values:
                    grow(maxima.pop(a))
            c = self.products.get(op.out)
            if (
                c is not None
                and (shortcut := algebra.contract(values[c.a], values[c.b], index[c.over]))
                is not None
            ):
                contracted[op.out] = shortcut
            elif op.over is None:
                values[op.out] = algebra.elementwise(
                    op.fn, [values[a] if isinstance(a, str) else a for a in op.args], dict(op.attrs)
                )
            elif op.args[0] in contracted:
                values[op.out] = contracted[str(op.args[0])]
            else:
                values[op.out] = algebra.reduce(op.fn, values[str(op.args[0])], index[op.over])
        for acc in maxima.values():
            grow(acc)
        for acc in stage.accumulators:
            if acc.kind == "max":
                values.pop(acc.out, None)  # the next tile has its own
                continue
            part = (
                contracted[acc.arg]
                if acc.arg in contracted
                else algebra.reduce(acc.kind, values[acc.arg], index[str(stage.loop)])
            )
            total = totals.get(acc.out)
            if acc.shift is not None and total is not None:
                total = algebra.rescale(total, before[acc.shift], totals[acc.shift])
            totals[acc.out] = algebra.accumulate(acc.kind, total, part)


def run_kernel_graph(
    graph: KernelGraph,
    inputs: Sequence[torch.Tensor],
    wide: torch.dtype | None = None,
    as_on_gpu: bool = False,
    err: Callable[[KernelOp, torch.Tensor], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Run a kernel graph with torch: each op by its oracle in its own dtype, block graphs in float32 like their kernels.

    `wide` (float64) converts the inputs and computes everything in that dtype instead: the reference for numeric checks.
    `as_on_gpu`: a 16-bit matmul on a CPU is computed in float32 and rounded once, as tensor cores do; torch's own takes 25 times
    as long there. `err`: what is taken in place of an op's result.
    """
    values: dict[int, torch.Tensor] = {}
    for t, x in zip(graph.inputs, inputs, strict=True):
        values[t.index] = x.to(wide) if wide is not None and x.is_floating_point() else x
    for op in graph.ops:
        for t, y in zip(op.outputs, _run_op(op, values, wide, as_on_gpu), strict=True):
            values[t.index] = y if err is None else err(op, y)
    return [values[t.index] for t in graph.outputs]


def _run_op(
    op: KernelOp, values: Mapping[int, torch.Tensor], wide: torch.dtype | None, as_on_gpu: bool
) -> list[torch.Tensor]:
    args: list[Any] = [values[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
    if op.name == CUSTOMIZED:
        assert op.block is not None
        outs = run_block_graph(
            op.block, args, TorchAlgebra(wide or torch.float32, device=args[0].device)
        )
        return [y.to(wide or t.dtype) for t, y in zip(op.outputs, outs, strict=True)]
    row = table.lookup(op.name)
    if (
        as_on_gpu
        and op.name == "matmul"
        and args[0].device.type == "cpu"
        and args[0].dtype.itemsize == 2
    ):
        return [row.oracle(*(a.float() for a in args)).to(args[0].dtype)]
    if op.name == "cast" and wide is not None:
        return [args[0]]
    return [run_library(op, args, wide)]


def run_library(
    op: KernelOp, args: Sequence[torch.Tensor | float], wide: torch.dtype | None = None
) -> torch.Tensor:
    """One op of the table by its oracle, on tensors and numbers; the result has the dtype of the op's output, or `wide`."""
    oracle, attrs = table.lookup(op.name).oracle, dict(op.attrs)
    if all(isinstance(a, torch.Tensor) for a in args):
        return oracle(*args, **attrs)
    if op.name == "mul" and not isinstance(args[0], torch.Tensor):
        args = args[::-1]  # torch rounds the first factor to the second one's dtype
    # a 0-dim float64 takes part at full precision and does not change the result's dtype, as a Python number would
    tensors = [
        a if isinstance(a, torch.Tensor) else torch.tensor(a, dtype=torch.float64, device="cpu")
        for a in args
    ]
    return oracle(*tensors, **attrs).to(
        wide or op.outputs[0].dtype
    )  # select has numbers alone to choose from
