"""Give symbolic dims a size: one µGraph serves every size up to a maximum.

A graph is built and searched at the maximum of each `Dim`. A µGraph fixes roles and values but no
size, so giving a dim another size only rebuilds the graphs. That takes milliseconds, and needs no
search and no new proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import BlockGraph, BlockInput, Taken
from mirage_hf.graph.dim import Dim
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp, Operand, row_major
from mirage_hf.graph.rebuild import rebuilt
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table


def dims_of(graph: KernelGraph) -> dict[str, Dim]:
    """Return the symbolic dims of a graph's inputs, by name.

    Raises:
        GraphError: If one name has two maxima.
    """
    dims: dict[str, Dim] = {}
    for t in graph.inputs:
        for d in t.dims:
            if isinstance(d, Dim) and dims.setdefault(d.name, d) != d:
                raise errors.GraphError(
                    f"input {t.name}: dim {d.name} has maximum {int(d)} here, "
                    f"{int(dims[d.name])} in an earlier input"
                )
    return dims


# -- checks ----------------------------------------------------------------------------------------


def check(graph: KernelGraph) -> None:
    """Check that each symbolic dim of a graph can have every size up to its maximum.

    Raises:
        GraphError: If one cannot, because it must equal a fixed dim or a dim of another name, or
            must have a least size.
    """
    for name, d in dims_of(graph).items():
        for size in sorted({1, d - 1}):
            try:
                small = at(graph, {name: size})
            except errors.GraphError as e:
                raise errors.GraphError(
                    f"dim {name} cannot have every size up to {int(d)}: {e}"
                ) from e
            for op, small_op in zip(graph.ops, small.ops, strict=True):
                if op.name == CUSTOMIZED:
                    continue
                if table.lookup(op.name).kind in ("elementwise", "contract"):
                    _check_broadcast(op, small_op, d)


def _check_broadcast(op: KernelOp, small_op: KernelOp, d: Dim) -> None:
    """Check that dims of `op` that were equal and not 1 are equal in `small_op` too.

    If `d` is 1, a dim that depends on it broadcasts. That would hide that it must equal another
    dim.
    """
    kept = 2 if op.name == "matmul" else 0  # its last two dims do not broadcast
    shapes, small_shapes = (
        [x.dims[::-1][kept:] for x in o.inputs if isinstance(x, DTensor)] for o in (op, small_op)
    )
    for k in range(max(map(len, shapes))):
        sizes = {
            small[k]
            for dims, small in zip(shapes, small_shapes, strict=True)
            if k < len(dims) and dims[k] > 1
        }
        if len(sizes) > 1:
            raise errors.GraphError(
                f"dim {d.name} cannot have every size up to {int(d)}: {op.name}: "
                f"it must equal another dim of {int(d)}"
            )


def check_sizes(graph: KernelGraph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the size of every symbolic dim of a graph. Dims that `sizes` lacks get their maximum.

    Raises:
        GraphError: If `sizes` names a dim that the graph does not have, or a size is out of range.
    """
    known = dims_of(graph)
    for name, n in sizes.items():
        if name not in known:
            raise errors.GraphError(
                f"the graph has no dim {name!r}{errors.suggest(name, known)}; "
                f"it has {', '.join(known) or 'none'}"
            )
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= known[name]:
            raise errors.GraphError(
                f"dim {name} is {n!r}; it may be 1 to {int(known[name])}, "
                "build the graph with a larger max for more"
            )
    return {name: sizes.get(name, int(d)) for name, d in known.items()}


def sizes_of(graph: KernelGraph, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the sizes of the graph's symbolic dims in tensors of these shapes, one per input.

    Ranks are not compared here.

    Raises:
        InputError: If two tensors disagree, or a size is too large.
    """
    sizes: dict[str, int] = {}
    for t, shape in zip(graph.inputs, shapes, strict=True):
        for d, n in zip(t.dims, shape, strict=False):
            if not isinstance(d, Dim):
                continue
            if sizes.setdefault(d.name, n) != n:
                raise errors.InputError(
                    f"input {t.name}: dim {d.name} is {n}, in an earlier input it is "
                    f"{sizes[d.name]}"
                )
            if not 1 <= n <= d:
                raise errors.InputError(
                    f"input {t.name}: dim {d.name} is {n}; the graph was built for 1 to {int(d)}"
                )
    return sizes


# -- graphs at given sizes -------------------------------------------------------------------------


def at(graph: KernelGraph, sizes: Mapping[str, int]) -> KernelGraph:
    """Return the graph with its symbolic dims replaced by sizes.

    Raises:
        GraphError: If an op does not fit the sizes.
    """
    sizes = check_sizes(graph, sizes)
    resized_graph, size = KernelGraph(), _giving(sizes)
    inputs = [
        resized_graph.new_input(
            size(t.dims),
            t.dtype,
            None if t.strides == row_major(t.dims) else t.strides,
            t.name,
            constant=t.constant,
        )
        for t in graph.inputs
    ]
    outputs = rebuilt(
        graph, inputs, lambda op, operands: _resized_op(resized_graph, op, operands, size)
    )
    resized_graph.mark_output(*outputs)
    return resized_graph


def ugraph_at(ugraph: UGraph, sizes: Mapping[str, int]) -> UGraph:
    """Return a µGraph with the symbolic dims of its program replaced by sizes, without schedules.

    Raises:
        GraphError: If an op does not fit the sizes.
    """
    return for_program(ugraph, at(ugraph.program, sizes), sizes)


def for_program(
    ugraph: UGraph,
    program: KernelGraph,
    sizes: Mapping[str, int] | None = None,
    change: Callable[[KernelOp], KernelOp] = lambda op: op,
) -> UGraph:
    """Return a µGraph of another program with the kernels of this one, without schedules.

    Args:
        ugraph: The µGraph.
        program: A program that differs from the µGraph's own only in the sizes of dims.
        sizes: The sizes of symbolic dims.
        change: Changes numbers and attributes of an op before it gets its new operands.

    Raises:
        GraphError: If the kernels do not fit the program.
    """
    if ugraph.kernels is ugraph.program:
        return UGraph(program, program)
    kernels, size = KernelGraph(), _giving(sizes or {})
    # The dims come from the program, because its symbolic dims have names.
    inputs = [
        kernels.new_input(
            theirs.dims, theirs.dtype, theirs.strides, t.name, constant=theirs.constant
        )
        for t, theirs in zip(ugraph.kernels.inputs, program.inputs, strict=True)
    ]

    def make(op: KernelOp, operands: Sequence[Operand]) -> list[DTensor]:
        op = change(op)
        tensors = [
            new if isinstance(new, DTensor) else old
            for new, old in zip(operands, op.inputs, strict=True)
        ]
        return _resized_op(kernels, op, tensors, size)

    kernels.mark_output(*rebuilt(ugraph.kernels, inputs, make))
    return UGraph(program, kernels)


def _giving(sizes: Mapping[str, int]) -> Callable[[Any], Any]:
    """Return a function that replaces symbolic dims, alone or in tuples, by their sizes."""

    def size(x: Any) -> Any:
        if isinstance(x, Dim):
            return sizes.get(x.name, x)
        return tuple(map(size, x)) if isinstance(x, tuple) else x

    return size


def _resized_op(
    graph: KernelGraph, op: KernelOp, operands: Sequence[Operand], size: Callable[[Any], Any]
) -> list[DTensor]:
    """Add an op of another graph to `graph`, on operands that may have other dims."""
    if op.block is not None:
        op = replace(op, block=resized(op, operands))  # type: ignore[arg-type]
    op = replace(op, attrs=tuple((name, size(value)) for name, value in op.attrs))
    return graph.op_like(op, operands, [t.name for t in op.outputs])


def resized(op: KernelOp, operands: Sequence[DTensor]) -> BlockGraph:
    """Return the block graph of a `customized` op for operands of other sizes.

    Raises:
        GraphError: If the operands disagree about the size of an axis.
    """
    block = op.block
    assert block is not None
    sizes: dict[str, int] = {}
    inputs = []
    for i in block.inputs:
        i = replace(i, sizes=_joined_sizes(i, operands), taken=_taken(i, operands))
        inputs.append(i)
        pairs = [*zip(i.axes, operands[i.sources[0]].dims, strict=True)]
        if i.taken is not None:
            pairs += zip(i.taken.axes, operands[i.taken.index].dims, strict=True)
        for axis, n in pairs:
            if axis is None or (i.padding is not None and axis == i.padding.axis):
                continue
            n = sum(i.sizes) if axis == i.joined and i.sizes else n
            if sizes.setdefault(axis, n) != n:
                raise errors.GraphError(
                    f"block input {i.name}: axis {axis} is {n}, elsewhere {sizes[axis]}"
                )
    axes = []
    for a in block.axes:
        n = sizes.get(a.name, a.size)
        if (whole_axis := block.axis_split_by(a.name)) is not None:
            n = largest_num_splits(sizes.get(whole_axis, block.axis(whole_axis).size), a.size)
        axes.append(replace(a, size=n))
    return BlockGraph(tuple(axes), tuple(inputs), block.stages, block.outputs)


def _taken(i: BlockInput, operands: Sequence[DTensor]) -> Taken | None:
    """Return how an index chooses the elements of an input of other sizes."""
    if i.taken is None:
        return None
    return replace(i.taken, size=operands[i.sources[0]].dims[i.taken.dim])


def _joined_sizes(i: BlockInput, operands: Sequence[DTensor]) -> tuple[int, ...]:
    """Return the size of each source of an input along its joined axis."""
    if i.joined is None or not i.sizes:
        return ()
    dim = i.axes.index(i.joined)
    return tuple(operands[s].dims[dim] for s in i.sources)


# -- numbers of splits -----------------------------------------------------------------------------


def with_num_splits(ugraph: UGraph, axis: str, number: int) -> UGraph:
    """Return the µGraph with another number of splits. The result has no schedules.

    A µGraph's proof holds for any number of splits.

    Args:
        ugraph: The µGraph.
        axis: The name of the grid axes that number the splits. A block graph has at most one.
        number: The number of splits. If an axis cannot have so many, it gets the largest possible
            number.

    Raises:
        GraphError: If the µGraph cannot be built with that number.
    """
    blocks = []
    for op in ugraph.block_ops:
        block = op.block
        assert block is not None
        axes = []
        for a in block.axes:
            whole_axis = block.axis_split_by(a.name) if a.name == axis else None
            if whole_axis is not None:
                a = replace(a, size=largest_num_splits(block.axis(whole_axis).size, number))
            axes.append(a)
        blocks.append(replace(block, axes=tuple(axes)))
    return _with_blocks_of_other_sizes(ugraph, blocks)


def _with_blocks_of_other_sizes(ugraph: UGraph, blocks: Sequence[BlockGraph]) -> UGraph:
    """Return a µGraph with other block graphs, whose results may have other sizes."""
    kernels, changed = KernelGraph(), iter(blocks)

    def make(op: KernelOp, operands: Sequence[Operand]) -> list[DTensor]:
        op = op if op.block is None else replace(op, block=next(changed))
        return _resized_op(kernels, op, operands, lambda x: x)

    inputs = [kernels.input_like(t) for t in ugraph.kernels.inputs]
    kernels.mark_output(*rebuilt(ugraph.kernels, inputs, make))
    return UGraph(ugraph.program, kernels)


def largest_num_splits(size: int, most: int) -> int:
    """Return the largest number of splits of an axis, at most `most`, with none empty."""
    number = min(size, most)
    while (number - 1) * -(-size // number) >= size:
        number -= 1
    return number
