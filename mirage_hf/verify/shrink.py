"""A program and its kernels at other sizes: proofs run on a few elements per axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph.block import BlockGraph, BlockInput
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelOp
from mirage_hf.verify.evaluate import SmallGraph
from mirage_hf.verify.size_classes import SizeClasses
from mirage_hf.verify.size_relations import (
    KERNELS,
    PROGRAM,
    BlockAxis,
    DimSegment,
    Key,
    ResizeError,
    TensorDim,
    rotated_segment,
)

Sizes = Mapping[Key, int]


def shrink(
    classes: SizeClasses, sizes: Sequence[int], split_size: int
) -> tuple[SmallGraph, SmallGraph] | Rejected:
    """Return the program and the kernels at a few elements per axis, or why that cannot be.

    `sizes` and `split_size` are those of `SizeClasses.small_sizes`.
    """
    try:
        small = classes.small_sizes(sizes, split_size)
        return small_graph(classes, PROGRAM, small), small_graph(classes, KERNELS, small)
    except ResizeError as e:
        return Rejected(str(e))
    except errors.GraphError as e:
        return Rejected(f"it cannot be shrunk: {e}")


def small_graph(classes: SizeClasses, side: str, sizes: Sizes) -> SmallGraph:
    """Return the program or the kernels (`side`) at other sizes, to be evaluated.

    Raises:
        GraphError: If a block graph cannot have these sizes.
    """
    graph = classes.program if side == PROGRAM else classes.kernels
    tensors = (*graph.inputs, *(t for op in graph.ops for t in op.outputs))
    dims = {t.index: resized_dims(classes, side, t, sizes) for t in tensors}
    blocks, starts = {}, {}
    for number, op in enumerate(graph.ops):
        if op.name == CUSTOMIZED:
            blocks[number] = resized_block(classes, side, number, op, sizes)
        elif op.name == "slice":
            before = DimSegment(side, op.outputs[0].index, "before")
            starts[number] = sizes[classes.find(before)] if dict(op.attrs)["start"] else 0
    return SmallGraph(graph, dims, blocks, starts)


def resized_dims(classes: SizeClasses, side: str, t: DTensor, sizes: Sizes) -> tuple[int, ...]:
    """Return the dims of a tensor at other sizes."""
    keys = (TensorDim(side, t.index, d) for d in range(len(t.dims)))
    return tuple(sizes[classes.find(key)] for key in keys)


def resized_block(
    classes: SizeClasses, side: str, number: int, op: KernelOp, sizes: Sizes
) -> BlockGraph:
    """Return the block graph of an op (by number) at other sizes.

    Raises:
        GraphError: If it cannot have these sizes.
    """
    block = op.block
    assert block is not None

    def size_along(source: int, dim: int) -> int:
        tensor = op.inputs[source]
        assert isinstance(tensor, DTensor)
        return sizes[classes.find(TensorDim(side, tensor.index, dim))]

    def resized(i: BlockInput) -> BlockInput:
        if i.joined is not None:
            dim = i.axes.index(i.joined)
            i = replace(i, sizes=tuple(size_along(s, dim) for s in i.sources))
        if i.padding is not None:
            size = size_along(i.sources[0], i.axes.index(i.padding.axis))
            i = replace(i, padding=replace(i.padding, size=size))
        if i.taken is not None:
            size = size_along(i.sources[0], i.taken.dim)
            i = replace(i, taken=replace(i.taken, size=size))
        if i.rotation is not None and i.rotation.width is not None:
            width = sizes[classes.find(rotated_segment(side, number, i.name))]
            i = replace(i, rotation=replace(i.rotation, width=width))
        return i

    axes = tuple(
        replace(a, size=sizes[classes.find(BlockAxis(side, number, a.name))]) for a in block.axes
    )
    return replace(block, axes=axes, inputs=tuple(map(resized, block.inputs)))
