"""Run a block graph under an algebra.

One interpreter walks a block graph exactly as a kernel does: block by block, stage by stage, tile
by tile of the loop. The blocks of a cluster run in turns. Each stops where it needs the values of
the others, until all of them are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mirage_hf.graph.algebra import Algebra, TorchAlgebra
from mirage_hf.graph.block import (
    Accumulator,
    BlockGraph,
    BlockInput,
    BlockOp,
    Role,
    Rotation,
    Stage,
)


def run_block_graph(
    graph: BlockGraph,
    operands: Sequence[Any],
    algebra: Algebra,
    pieces: Mapping[str, int] | int = 1,
) -> list[Any]:
    """Run a block graph.

    Args:
        graph: The block graph.
        operands: The operands of its kernel.
        algebra: The algebra that computes with arrays.
        pieces: The number of pieces that grid and loop axes are cut into, by name, or one number
            for all. The splits of an axis are always taken one by one. So are the elements of a
            cluster axis, unless there is one piece of everything.

    Returns:
        The outputs as arrays of the algebra, in the outputs' dims.
    """
    return _BlockRun(graph, algebra, pieces).run(operands)


def rotate_along(
    algebra: Algebra, x: Any, shape: Sequence[int], dim: int, rotation: Rotation
) -> Any:
    """Return the array `x` of shape `shape`, rotated along `dim` as `rotation` says."""
    rank, width = len(shape), rotation.width or shape[dim]
    half = width // 2

    def part(start: int, stop: int, step: int = 1) -> Any:
        slices = [slice(None)] * rank
        slices[dim] = slice(start, stop, step)
        return algebra.cut(x, tuple(slices))

    if rotation.pairs:
        first, second = part(0, width, 2), part(1, width, 2)
    else:
        first, second = part(0, half), part(half, width)
    if rotation.swaps:
        partners = [second, first]
    else:
        partners = [algebra.elementwise("neg", [first], {}), second]
    joined = algebra.join(partners, dim)
    if rotation.pairs:  # interleave the two halves
        before, after = shape[:dim], shape[dim + 1 :]
        halves = algebra.arrange(joined, range(rank), (*before, 2, half, *after))
        order = (*range(dim), dim + 1, dim, *range(dim + 2, rank + 1))
        joined = algebra.arrange(halves, order, (*before, width, *after))
    return joined if width == shape[dim] else algebra.join([joined, part(width, shape[dim])], dim)


@dataclass(frozen=True)
class _Offer:
    """What a block holds of a reduction among the blocks of its cluster."""

    op: BlockOp
    value: Any


#: A block that runs. It yields what it offers to its cluster, and is sent the total.
_RunningBlock = Generator[_Offer, Any, None]


class _BlockRun:
    """One run of a block graph.

    Inputs are loaded whole. Then every block runs its stages on its slices of the inputs.
    """

    def __init__(
        self, graph: BlockGraph, algebra: Algebra, pieces: Mapping[str, int] | int
    ) -> None:
        self.graph, self.algebra, self.pieces = graph, algebra, pieces
        self.index = {a.name: n for n, a in enumerate(graph.axes)}
        self.products = {c.product: c for c in graph.contractions.values()}
        self.batched_splits = self._batched_splits()

    def _batched_splits(self) -> dict[str, str]:
        """Return the axes whose splits are computed all at once, with the axes that number them.

        That gives the same sums in the same order, without a Python loop over splits. It works for
        torch numbers, splits of equal size, and outputs that do not carry the split axis itself.
        """
        graph = self.graph
        if self.pieces != 1 or not isinstance(self.algebra, TorchAlgebra):
            return {}
        return {
            a.name: a.split_axis
            for a in graph.axes
            if a.split_axis is not None
            and a.size == graph.split_size(a.name) * graph.num_splits(a.name)
            and not any(a.name in o.axes for o in graph.outputs)
        }

    def run(self, operands: Sequence[Any]) -> list[Any]:
        graph, algebra = self.graph, self.algebra
        loaded = {i.name: self._load(i, operands) for i in graph.inputs}
        raw = [
            algebra.empty(self._shape([a for a in o.axes if a is not None])) for o in graph.outputs
        ]
        grid = graph.named(Role.GRID)
        for slices in itertools.product(*(self._cuts(a.name, slice(0, a.size)) for a in grid)):
            at = {a.name: s for a, s in zip(grid, slices, strict=True)}
            self._run_cluster(at, loaded, raw)
        results = []
        for o, array in zip(graph.outputs, raw, strict=True):
            carried = [self.index[a] for a in o.axes if a is not None]
            order = carried + [d for d in range(len(graph.axes)) if d not in carried]
            results.append(algebra.arrange(array, order, graph.output_dims(o)))
        return results

    # -- shapes and slices -------------------------------------------------------------------------

    def _shape(self, axes: Sequence[str], extent: Mapping[str, int] | None = None) -> list[int]:
        """Return the shape of an array that carries `axes`, with the sizes in `extent`."""
        extent = extent or {}
        return [extent.get(a.name, a.size) if a.name in axes else 1 for a in self.graph.axes]

    def _window(self, axes: Sequence[str | None], at: Mapping[str, slice]) -> tuple[slice, ...]:
        """Return the slice of each axis that an array carries, as `at` gives it by name."""
        return tuple(at.get(a, slice(None)) if a in axes else slice(None) for a in self.index)

    def _cuts(self, name: str, within: slice) -> list[slice]:
        """Return the slices of an axis that blocks, or the trips of a loop, take one by one."""
        axis = self.graph.axis(name)
        size = axis.size
        if name in self.batched_splits.values():
            return [slice(0, size)]
        one_by_one = axis.role is Role.CLUSTER and self.pieces != 1
        if one_by_one or self.graph.axis_split_by(name) is not None:
            return _cut(0, size, size)
        pieces = self.pieces if isinstance(self.pieces, int) else self.pieces.get(name, 1)
        return _cut(within.start, within.stop, pieces)

    def _splits(self, at: Mapping[str, slice]) -> dict[str, slice]:
        """Return the elements of each split axis that the block at the slices `at` sees."""
        graph = self.graph
        splits = {}
        for a in graph.axes:
            if a.split_axis is None:
                continue
            size = graph.split_size(a.name)
            if a.name in self.batched_splits:
                splits[a.name] = slice(0, size)
            else:
                block = at[a.split_axis]
                splits[a.name] = slice(block.start * size, min(block.stop * size, a.size))
        return splits

    # -- inputs ------------------------------------------------------------------------------------

    def _load(self, i: BlockInput, operands: Sequence[Any]) -> Any:
        """Return an input along all of its axes."""
        graph, algebra, index = self.graph, self.algebra, self.index
        present = [(index[a], d) for d, a in enumerate(i.read_axes) if a is not None]
        alone = [d for d, a in enumerate(i.read_axes) if a is None]
        order = [d for _, d in sorted(present)] + alone
        if i.bounds is not None:
            lo, hi = (operands[s] for s in i.sources)
            shape = self._shape([a for a in i.axes if a is not None])
            whole = algebra.bounds(lo, hi, order, shape, index[i.bounds], graph.axis(i.bounds).size)
        else:
            arrays = [operands[source] for source in i.sources]
            if i.taken is not None:
                indices = operands[i.taken.index]
                arrays = [algebra.take(x, indices, i.taken.dim) for x in arrays]
            sources = [self._source(i, k, x, order) for k, x in enumerate(arrays)]
            whole = sources[0] if len(sources) == 1 else algebra.join(sources, index[str(i.joined)])
        for name, split_axis in self.batched_splits.items():
            if name in i.carried:
                dim, number = index[name], index[split_axis]
                split = whole.unflatten(dim, (graph.num_splits(name), -1)).movedim(dim, -1)
                whole = split.squeeze(number).movedim(-1, number)
        return whole

    def _source(self, i: BlockInput, k: int, operand: Any, order: Sequence[int]) -> Any:
        """Return the k-th source of an input, rotated and padded as the input says."""
        graph, algebra, index = self.graph, self.algebra, self.index
        extent = {}
        if i.joined and i.sizes:
            extent = {i.joined: i.sizes[k]}
        elif i.padding:
            extent = {i.padding.axis: i.padding.size}
        shape = self._shape(graph.input_axes(i), extent)
        x = algebra.arrange(operand, order, shape)
        if i.rotation is not None:
            x = rotate_along(algebra, x, shape, index[i.rotation.axis], i.rotation)
        if i.padding is not None:
            dim = index[i.padding.axis]
            shape[dim] = graph.axis(i.padding.axis).size - i.padding.size
            x = algebra.join([x, algebra.full(shape, i.padding.value)], dim)
        return x

    # -- blocks ------------------------------------------------------------------------------------

    def _run_cluster(
        self, at: dict[str, slice], loaded: Mapping[str, Any], raw: Sequence[Any]
    ) -> None:
        """Run the blocks of the cluster at the slices `at` of the grid axes, together."""
        axis = self.graph.cluster
        if axis is None:
            blocks = [self._run_block(at, loaded, raw)]
        else:
            ranks = self._cuts(axis.name, slice(0, axis.size))
            blocks = [self._run_block(at | {axis.name: rank}, loaded, raw) for rank in ranks]
        offers = [next(block, None) for block in blocks]
        while offers[0] is not None:  # all blocks run the same ops, so they end together
            total = self._reduced_among([offer for offer in offers if offer is not None])
            offers = [_resumed(block, total) for block in blocks]

    def _reduced_among(self, offers: Sequence[_Offer]) -> Any:
        """Return the total of what the blocks of a cluster offer."""
        op = offers[0].op
        dim = self.index[str(op.over)]
        values = [offer.value for offer in offers]
        joined = values[0] if len(values) == 1 else self.algebra.join(values, dim)
        return self.algebra.reduce(op.fn, joined, dim)

    def _run_block(
        self, at: dict[str, slice], loaded: Mapping[str, Any], raw: Sequence[Any]
    ) -> _RunningBlock:
        """Run the block at the slices `at`, and store its outputs into `raw`."""
        graph = self.graph
        splits = self._splits(at)
        at |= {name: s for name, s in splits.items() if graph.role(name) is Role.TILE}
        values: dict[str, Any] = {}
        for stage in graph.stages:
            totals: dict[str, Any] = {}
            if stage.loop is None:
                inputs = [i for i in graph.inputs if i.name not in values]
                yield from self._run_trip(stage, at, inputs, loaded, values, totals, raw)
            else:
                whole = slice(0, graph.axis(stage.loop).size)
                for trip in self._cuts(stage.loop, splits.get(stage.loop, whole)):
                    at[stage.loop] = trip
                    yield from self._run_trip(stage, at, graph.inputs, loaded, values, totals, raw)
                at.pop(stage.loop, None)
                for i in graph.inputs:  # a later stage loads its own tile
                    if stage.loop in i.carried:
                        values.pop(i.name, None)
            values |= totals
        for o, array in zip(graph.outputs, raw, strict=True):
            if not any(a is not None and graph.role(a) is Role.LOOP for a in o.axes):
                self.algebra.put(array, self._window(o.axes, at), values[o.value])

    def _run_trip(
        self,
        stage: Stage,
        at: Mapping[str, slice],
        inputs: Sequence[BlockInput],
        loaded: Mapping[str, Any],
        values: dict[str, Any],
        totals: dict[str, Any],
        raw: Sequence[Any],
    ) -> _RunningBlock:
        """Load tiles of `inputs`, run a stage once, and store its outputs along the loop axis."""
        graph = self.graph
        for i in inputs:
            window = self._window(graph.carried[i.name], at)
            values[i.name] = self.algebra.cut(loaded[i.name], window)
        yield from self._run_body(stage, values, totals)
        computed = {op.out for op in stage.body}
        for o, array in zip(graph.outputs, raw, strict=True):
            if stage.loop is not None and stage.loop in o.axes and o.value in computed:
                self.algebra.put(array, self._window(o.axes, at), values[o.value])

    def _run_body(
        self, stage: Stage, values: dict[str, Any], totals: dict[str, Any]
    ) -> _RunningBlock:
        """Run the body of a stage once.

        The values that the body computes are added to `values`. The new totals of the accumulators
        are added to `totals`.
        """
        algebra, index = self.algebra, self.index
        #: Sums of products that were not formed, by name of the product.
        contracted: dict[str, Any] = {}
        maxima = {acc.out: acc for acc in stage.accumulators if acc.kind == "max"}
        before = dict(totals)

        def grow(acc: Accumulator) -> None:
            tile_maximum = algebra.reduce("max", values[acc.arg], index[str(stage.loop)])
            totals[acc.out] = algebra.accumulate("max", before.get(acc.out), tile_maximum)
            values[acc.out] = algebra.shift(totals[acc.out])  # for this tile

        for op in stage.body:
            for a in op.args:
                if isinstance(a, str) and a in maxima and a not in values:
                    grow(maxima.pop(a))
            shortcut = None
            if c := self.products.get(op.out):
                shortcut = algebra.contract(values[c.a], values[c.b], index[c.over])
            if shortcut is not None:
                contracted[op.out] = shortcut
            elif op.over is None:
                args = [values[a] if isinstance(a, str) else a for a in op.args]
                values[op.out] = algebra.elementwise(op.fn, args, dict(op.attrs))
            elif self.graph.role(op.over) is Role.CLUSTER:
                values[op.out] = yield _Offer(op, values[str(op.args[0])])
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
            if acc.arg in contracted:
                tile_sum = contracted[acc.arg]
            else:
                tile_sum = algebra.reduce(acc.kind, values[acc.arg], index[str(stage.loop)])
            total = totals.get(acc.out)
            if acc.shift is not None and total is not None:
                total = algebra.rescale(total, before[acc.shift], totals[acc.shift])
            totals[acc.out] = algebra.accumulate(acc.kind, total, tile_sum)


def _resumed(block: _RunningBlock, total: Any) -> _Offer | None:
    """Send a block the total it waits for. Return its next offer, None if it has ended."""
    try:
        return block.send(total)
    except StopIteration:
        return None


def _cut(start: int, stop: int, pieces: int) -> list[slice]:
    """Return slices of equal size, except for the last one."""
    size = stop - start
    step = -(-size // max(1, min(pieces, size)))
    return [slice(low, min(low + step, stop)) for low in range(start, stop, step)]
