"""Symbolic dims: one graph, and the µGraphs found for it, for every size up to a maximum.

A `Dim` is an int, its maximum, with a name; graphs are built and searched at the maximum, and a µGraph fixes roles and values
but no size, so giving a dim another size only rebuilds the graphs: milliseconds, no search, no new proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import Axis, BlockGraph
from mirage_hf.graph.kernel import (
    CUSTOMIZED,
    DTensor,
    KernelGraph,
    KernelOp,
    Operand,
    rebuilt,
    row_major,
)
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table


class Dim(int):
    """A dim whose size is known when a kernel runs: `Dim("tokens", max=16)`. Dims of the same name have the same size.

    As a number it is its maximum. Errors: GraphError for a name that is no identifier or a maximum below 2.
    """

    name: str

    def __new__(cls, name: str, max: int) -> Dim:
        if not isinstance(name, str) or not name.isidentifier():
            raise errors.GraphError(f"Dim: the name {name!r} must be an identifier")
        if isinstance(max, bool) or not isinstance(max, int) or max < 2:
            raise errors.GraphError(
                f"Dim {name}: max is {max!r}; it must be an integer of at least 2"
            )
        self = super().__new__(cls, max)
        self.name = name
        return self

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return (self.name, int(self))

    def __deepcopy__(self, memo: Any) -> Dim:
        return self


def dims_of(graph: KernelGraph) -> dict[str, Dim]:
    """The symbolic dims of a graph's inputs, by name. Errors: GraphError when one name has two maxima."""
    found: dict[str, Dim] = {}
    for t in graph.inputs:
        for d in t.dims:
            if isinstance(d, Dim) and found.setdefault(d.name, d) != d:
                raise errors.GraphError(
                    f"input {t.name}: dim {d.name} has maximum {int(d)} here, {int(found[d.name])} in an earlier input"
                )
    return found


def check(graph: KernelGraph) -> None:
    """Errors: GraphError where a symbolic dim cannot have every size: it must equal a fixed one, or one of another name, or be longer than
    something."""
    for name, d in dims_of(graph).items():
        for size in sorted({1, d - 1}):
            try:
                small = at(graph, {name: size})
            except errors.GraphError as e:
                raise errors.GraphError(
                    f"dim {name} cannot have every size up to {int(d)}: {e}"
                ) from e
            for op, now in zip(graph.ops, small.ops, strict=True):
                if op.name != CUSTOMIZED and table.lookup(op.name).kind in (
                    "elementwise",
                    "contract",
                ):
                    _check_broadcast(op, now, d)


def _check_broadcast(op: KernelOp, now: KernelOp, d: Dim) -> None:
    """Errors: GraphError where dims that were equal and no 1 differ now that `d` is 1, which broadcasts and so hides it."""
    rows = 2 if op.name == "matmul" else 0  # whose last two dims do not broadcast
    shapes = [[x.dims[::-1][rows:] for x in o.inputs if isinstance(x, DTensor)] for o in (op, now)]
    for k in range(max(map(len, shapes[0]))):
        pairs = [
            (was[k], n[k]) for was, n in zip(*shapes, strict=True) if k < len(was) and was[k] > 1
        ]
        if len({n for _, n in pairs}) > 1:
            raise errors.GraphError(
                f"dim {d.name} cannot have every size up to {int(d)}: {op.name}: it must equal another dim of {int(d)}"
            )


def check_sizes(graph: KernelGraph, sizes: Mapping[str, int]) -> dict[str, int]:
    """`sizes` with every dim of the graph in it (those left out at their maximum). Errors: GraphError."""
    known = dims_of(graph)
    for name, n in sizes.items():
        if name not in known:
            raise errors.GraphError(
                f"the graph has no dim {name!r}{errors.suggest(name, known)}; it has {', '.join(known) or 'none'}"
            )
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= known[name]:
            raise errors.GraphError(
                f"dim {name} is {n!r}; it may be 1 to {int(known[name])}, build the graph with a larger max for more"
            )
    return {name: sizes.get(name, int(d)) for name, d in known.items()}


def sizes_of(graph: KernelGraph, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The sizes of the graph's dims in tensors of these shapes. Errors: InputError where two disagree or one is too large."""
    found: dict[str, int] = {}
    for t, shape in zip(graph.inputs, shapes, strict=True):
        for d, n in zip(
            t.dims, shape, strict=False
        ):  # ranks are compared with everything else, later
            if not isinstance(d, Dim):
                continue
            if found.setdefault(d.name, n) != n:
                raise errors.InputError(
                    f"input {t.name}: dim {d.name} is {n}, in an earlier input it is {found[d.name]}"
                )
            if not 1 <= n <= d:
                raise errors.InputError(
                    f"input {t.name}: dim {d.name} is {n}; the graph was built for 1 to {int(d)}"
                )
    return found


def at(graph: KernelGraph, sizes: Mapping[str, int]) -> KernelGraph:
    """The graph with its symbolic dims given sizes. Errors: GraphError where an op does not fit them."""
    sizes = check_sizes(graph, sizes)
    out, size = KernelGraph(), _giving(sizes)
    inputs = [
        out.new_input(
            size(t.dims),
            t.dtype,
            None if t.strides == row_major(t.dims) else t.strides,
            t.name,
            constant=t.constant,
        )
        for t in graph.inputs
    ]
    out.mark_output(*rebuilt(graph, inputs, lambda op, operands: _again(out, op, operands, size)))
    return out


def _giving(sizes: Mapping[str, int]) -> Callable[[Any], Any]:
    """A function that gives sizes to dims, and to those in tuples, by their names; whatever else it is given stays."""

    def size(d: Any) -> Any:
        return (
            sizes.get(d.name, d)
            if isinstance(d, Dim)
            else tuple(map(size, d))
            if isinstance(d, tuple)
            else d
        )

    return size


def _again(
    out: KernelGraph, op: KernelOp, operands: Sequence[Operand], size: Callable[[Any], Any]
) -> list[DTensor]:
    """The op in another graph, on tensors that may have other dims."""
    if op.block is not None:
        op = replace(op, block=resized(op, operands))  # type: ignore[arg-type]
    op = replace(op, attrs=tuple((k, size(v)) for k, v in op.attrs))
    return out.op_like(op, operands, [t.name for t in op.outputs])


def resized(op: KernelOp, operands: Sequence[DTensor]) -> BlockGraph:
    """The block graph of a `customized` op for operands of other sizes. Errors: GraphError where they do not agree."""
    block = op.block
    assert block is not None
    found: dict[str, int] = {}
    inputs = []
    for i in block.inputs:
        extents = (
            tuple(operands[s].dims[i.axes.index(i.joined)] for s in i.sources)
            if i.joined is not None and i.sizes
            else ()
        )
        inputs.append(replace(i, sizes=extents))
        for a, n in zip(i.axes, operands[i.sources[0]].dims, strict=True):
            if a is not None and (i.padding is None or a != i.padding.axis):
                n = sum(extents) if a == i.joined and extents else n
                if found.setdefault(a, n) != n:
                    raise errors.GraphError(
                        f"block input {i.name}: axis {a} is {n}, elsewhere {found[a]}"
                    )
    axes = []
    for axis in block.axes:
        size = found.get(axis.name, axis.size)
        if (whole := block.axis_split_by(axis.name)) is not None:
            size = largest_num_splits(found.get(whole, block.axis(whole).size), axis.size)
        axes.append(Axis(axis.name, size, axis.role, axis.split_axis))
    return BlockGraph(tuple(axes), tuple(inputs), block.stages, block.outputs)


def with_num_splits(ugraph: UGraph, axis: str, number: int) -> UGraph:
    """The same µGraph with the axes called `axis`, which number parts, `number` long where an axis can be dealt out in so many: into how
    many parts a sum is taken apart is no part of its proof. Errors: GraphError."""

    def again(op: KernelOp, operands: Sequence[Operand]) -> list[DTensor]:
        if (block := op.block) is not None:
            axes = tuple(
                replace(a, size=largest_num_splits(block.axis(whole).size, number))
                if a.name == axis and (whole := block.axis_split_by(a.name)) is not None
                else a
                for a in block.axes
            )
            op = replace(op, block=replace(block, axes=axes))
        return _again(kernels, op, operands, lambda d: d)

    kernels = KernelGraph()
    kernels.mark_output(
        *rebuilt(ugraph.kernels, [kernels.input_like(t) for t in ugraph.kernels.inputs], again)
    )
    return UGraph(ugraph.program, kernels)


def largest_num_splits(size: int, most: int) -> int:
    """Into how many parts, at most `most`, an axis can be dealt out so that none is empty."""
    parts = min(size, most)
    while (parts - 1) * -(-size // parts) >= size:
        parts -= 1
    return parts


def ugraph_at(ugraph: UGraph, sizes: Mapping[str, int]) -> UGraph:
    """A µGraph with the symbolic dims of its program given sizes; schedules are chosen anew. Errors: GraphError."""
    return for_program(ugraph, at(ugraph.program, sizes), sizes)


def for_program(
    ugraph: UGraph, program: KernelGraph, sizes: Mapping[str, int] | None = None
) -> UGraph:
    """The kernels of a µGraph for another program that differs from its own in the sizes of dims only. Errors: GraphError."""
    if ugraph.kernels is ugraph.program:
        return UGraph(program, program)
    # the kernels' inputs are the program's, whose dims know their names
    kernels, size = KernelGraph(), _giving(sizes or {})
    theirs = zip(ugraph.kernels.inputs, program.inputs, strict=True)
    inputs = [
        kernels.new_input(u.dims, u.dtype, u.strides, t.name, constant=u.constant)
        for t, u in theirs
    ]
    kernels.mark_output(
        *rebuilt(ugraph.kernels, inputs, lambda op, operands: _again(kernels, op, operands, size))
    )
    return UGraph(program, kernels)
