"""Write the ops of routers that choose elements, or move them by an index, as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mirage_hf.codegen import triton_math
from mirage_hf.trace.routers.steps import Local, Step
from mirage_hf.trace.routers.tiles import RouterWriter, Tile, UnwrittenError, padded
from mirage_hf.trace.routers.writers import StepWriters, last_axes

#: What writes each op.
WRITERS = StepWriters()


@WRITERS.writes("max")
def _max(writer: RouterWriter, step: Step) -> list[Tile]:
    """Write the greatest element along the last dim, and its place."""
    if len(step.args) < 2 or isinstance(step.args[1], Local):
        raise UnwrittenError("another form of max")
    given, dim, *keeps = step.args
    found = _greatest(writer, writer.tensor(given), dim, 1)
    if keeps == [True]:
        return found
    return [replace(tile, dims=tile.dims[:-1]) for tile in found]


@WRITERS.writes("topk")
def _topk(writer: RouterWriter, step: Step) -> list[Tile]:
    """Write the choice of the greatest elements, each by two reductions.

    The first one finds the greatest element, the second one the first place that has it. Both
    reduce integers of 32 bits: one instruction for the threads of a warp. The integers are the bits
    of the floats, in the order of floats.
    """
    given, count, *how = step.args
    dim, is_largest = (*how, *(-1, True)[len(how) :])[:2]
    if not is_largest or step.kwargs:
        raise UnwrittenError("a top-k in another order")
    return _greatest(writer, writer.tensor(given), dim, count)


def _greatest(writer: RouterWriter, x: Tile, dim: Any, count: int) -> list[Tile]:
    """Write the choice of the greatest elements along the last dim. One has no dim of its own."""
    along = last_axes(x, dim)
    if x.kind != "float":
        raise UnwrittenError("a choice by integers")
    if not along:  # there is one element
        zero = writer.assign("tl.full([], 0, tl.int32)")
        return [Tile(x.text, x.axes, x.dims), Tile(zero, (), x.dims, "int")]
    text, axes = writer.filled(x)
    rest = [a for a in axes if a not in along]
    place = writer.assign(writer.inside(writer.offset(along, axes), along, axes, "-1"))
    keys = writer.assign(writer.inside(f"ordered({text})", along, axes, "TAKEN"))
    # Triton gives a name in a loop the type that it has before the loop, so names are new
    greatest, first, is_first, value = (
        writer.new_name(role) for role in ("greatest", "first", "is_first", "value")
    )
    has_it = f"{keys} == {writer.over(greatest, rest, axes)}"
    places = f"tl.where({has_it}, {place}, 0x7FFFFFFF)"
    step_lines = [
        f"{greatest} = {writer.reduced(keys, 'max', along, axes)}",
        f"{first} = {writer.reduced(places, 'min', along, axes)}",
        f"{is_first} = {place} == {writer.over(first, rest, axes)}",
        f"{value} = from_ordered({greatest})",
    ]
    if count == 1:
        writer.lines += step_lines
        dims = (*x.dims[:-1], ())
        return [Tile(value, tuple(rest), dims), Tile(first, tuple(rest), dims, "int")]
    chosen = writer.new_axis(count)
    outer = writer.axes_of([*rest, chosen])
    whole = ", ".join(str(padded(writer.sizes[a])) for a in outer)
    values, index = (
        writer.assign(f"tl.zeros([{whole}], {dtype})") for dtype in ("tl.float32", "tl.int32")
    )
    at = f"{writer.place(chosen, outer)} == j"
    step_lines += [
        f"{values} = tl.where({at}, {writer.over(value, rest, outer)}, {values})",
        f"{index} = tl.where({at}, {writer.over(first, rest, outer)}, {index})",
        f"{keys} = tl.where({is_first}, TAKEN, {keys})",
    ]
    writer.lines += [f"for j in range({count}):", *(f"    {line}" for line in step_lines)]
    dims = (*x.dims[:-1], (chosen,))
    return [Tile(values, outer, dims), Tile(index, outer, dims, "int")]


@WRITERS.writes("cat")
def _cat(writer: RouterWriter, step: Step) -> list[Tile]:
    """Write one element after the other as a new dim."""
    parts, dim = (*step.args, 0)[:2]
    tiles = [writer.tensor(x) for x in parts]
    if any(last_axes(tile, dim) or tile.axes for tile in tiles) or len({t.kind for t in tiles}) > 1:
        raise UnwrittenError("tensors that are joined along other dims")
    axis = writer.new_axis(len(tiles))
    axes = writer.axes_of([axis])
    text = tiles[-1].text
    for n, tile in enumerate(tiles[:-1]):
        text = f"tl.where(i_{axis} == {n}, {tile.text}, {text})"
    return [writer.result(text, axes, (*tiles[0].dims[:-1], (axis,)), step.outputs[0])]


@WRITERS.writes("gather")
def _gather(writer: RouterWriter, step: Step) -> list[Tile]:
    given, dim, where = step.args
    x, index = writer.tensor(given), writer.tensor(where)
    along = last_axes(x, dim)
    if x.dims[:-1] != index.dims[:-1] or any(x.dims[:-1]) or index.kind != "int":
        raise UnwrittenError("elements of other rows")
    text, axes = writer.filled(x)
    outer = writer.axes_of([*index.axes, *axes])
    place = writer.inside(writer.offset(along, outer), along, outer, "-1")
    is_there = f"{place} == {writer.over(index.text, index.axes, outer)}"
    if x.kind == "bool":
        raise UnwrittenError("conditions that are taken by an index")
    text = f"tl.where({is_there}, {writer.over(text, axes, outer)}, 0)"
    text = writer.reduced(writer.assign(text), "sum", along, outer)
    return [writer.result(text, index.axes, index.dims, step.outputs[0])]


@WRITERS.writes("index")
def _index(writer: RouterWriter, step: Step) -> list[Tile]:
    """Write elements of a weight that an index takes from memory."""
    given, indices = step.args
    x = writer.tensor(given)
    if len(indices) != 1 or x.source is None or len(x.dims) != 1:
        raise UnwrittenError("elements of a computed tensor")
    if not writer.router.is_weight[x.source]:
        raise UnwrittenError("elements of other rows")
    index = writer.tensor(indices[0])
    (size,) = writer.router.inputs[x.source].shape
    inside = f"({index.text} >= 0) & ({index.text} < {size})"
    text = f"tl.load(in{x.source} + {index.text}, mask={inside}, other=0).to(tl.float32)"
    return [writer.result(text, index.axes, index.dims, step.outputs[0])]


@WRITERS.writes("scatter")
def _scatter(writer: RouterWriter, step: Step) -> list[Tile]:
    given, dim, where, value = step.args
    x, index = writer.tensor(given), writer.tensor(where)
    along = last_axes(x, dim)
    if index.kind != "int" or any(x.dims[:-1]) or any(index.dims[:-1]) or x.kind != "float":
        raise UnwrittenError("elements of other rows")
    text, axes = writer.filled(x)
    chosen = [a for entry in index.dims for a in entry]
    outer = writer.axes_of([*chosen, *axes])
    place = writer.offset(along, outer)
    there = f"({place} == {writer.over(index.text, index.axes, outer)})"
    if mask := writer.mask(chosen, outer):
        there = f"{there} & {mask}"
    there = writer.assign(f"({there}).to(tl.int32)")
    is_there = writer.assign(f"{writer.reduced(there, 'max', chosen, outer)} != 0")
    if isinstance(value, Local):
        source = writer.tensor(value)
        if source.dims != index.dims:
            raise UnwrittenError("elements of other rows")
        source_text = writer.over(source.text, source.axes, outer)
        written = writer.assign(f"tl.where({there} != 0, {source_text}, 0.0)")
        new = writer.reduced(written, "sum", chosen, outer)
    else:
        new = triton_math.constant(float(value)).text
    return [writer.result(f"tl.where({is_there}, {new}, {text})", axes, x.dims, step.outputs[0])]
