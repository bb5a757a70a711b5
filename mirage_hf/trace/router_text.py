"""Write a router as the text of one Triton kernel, one block for each row.

The kernel does what the steps do, in their order and with their rounding. A tensor of a row is a
tile over named axes. A view that splits the experts into groups splits their axis, so groups are
one dim of a tile, and places within a group another one.

Equal scores are chosen in the order of experts. NaN counts as the greatest score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from mirage_hf.codegen import triton_math
from mirage_hf.codegen.triton_math import TRITON_ALGEBRA, Expr
from mirage_hf.ops import table
from mirage_hf.trace.record import Node
from mirage_hf.trace.router_tiles import (
    Form,
    Local,
    Router,
    RouterText,
    RouterWriter,
    SplitError,
    Step,
    Tile,
    UnwrittenError,
    kind_of,
    padded,
)
from mirage_hf.trace.torch_ops import SAME_TENSOR, elementwise_row


def can_be_step(node: Node) -> bool:
    """Return whether kernels of routers know an op."""
    return _step_name(node) in _WRITERS


@cache
def router_text(router: Router) -> RouterText:
    """Return the kernel of a router. It takes the inputs, then the results.

    Raises:
        UnwrittenError: It cannot be written.
    """
    splits: dict[str, int] = {}
    while True:
        writer = RouterWriter(router, splits, _writer_of)
        try:
            return writer.write()
        except SplitError as error:
            if error.axis in splits:
                raise UnwrittenError("groups of several sizes") from None
            splits[error.axis] = error.inner


def _writer_of(step: Step) -> Callable[[RouterWriter, Step], list[Tile]]:
    return _WRITERS[_step_name(step)]


#: Ops of elements whose operands and results are float32 numbers, in-place forms included.
_ELEMENTWISE = "elementwise"

_IN_PLACE = ("add_", "sub_", "mul_", "div_", "masked_fill_", "scatter_")


def _step_name(node: Node | Step) -> str:
    """Return the name of an op in the table of writers."""
    name = f"{node.op.namespace}.{node.op._opname}"
    if name.removeprefix("aten.") in _IN_PLACE:
        name = name[:-1]
    if name in _WRITERS:
        return name
    return _ELEMENTWISE if _row_of(node) is not None else name


def _row_of(node: Node | Step) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """Return the row of the op table that a node or step is, None if it is another op."""
    op = node.op
    if op._opname in _IN_PLACE:
        op = getattr(getattr(torch.ops.aten, op._opname[:-1]), op._overloadname)
    return elementwise_row(Node(op, node.args, dict(node.kwargs), [], ""))


# -- the table: torch's ops as text ----------------------------------------------------------------

_WRITERS: dict[str, Callable[[RouterWriter, Step], list[Tile]]] = {}


def _writes(*names: str) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        for name in names:
            _WRITERS[name if name == _ELEMENTWISE else f"aten.{name}"] = function
        return function

    return add


#: The algebra of elementwise ops. Quotients, roots and powers of e are rounded as torch does.
_ALGEBRA: Mapping[str, Callable[..., Expr]] = {
    **TRITON_ALGEBRA,
    "exp": lambda x: Expr(f"exact_exp({x.text})"),
    "div": lambda x, y: Expr(f"tl.div_rn({_tile(x)}, {_tile(y)})"),
    "sqrt": lambda x: Expr(f"tl.sqrt_rn({x.text})"),
}


def _tile(x: Expr) -> str:
    return x.text if x.number is None else f"tl.full([], {x.text}, tl.float32)"


@_writes(_ELEMENTWISE)
def _elementwise(writer: RouterWriter, step: Step) -> list[Tile]:
    row = _row_of(step)
    assert row is not None
    name, operands, attrs = row
    if not all(isinstance(x, (Local, int, float)) for x in operands):
        raise UnwrittenError("an operand of another type")
    texts, axes, dims = writer.broadcast(operands)
    arguments = [
        Expr(text) if isinstance(x, Local) else triton_math.constant(float(x))
        for text, x in zip(texts, operands, strict=True)
    ]
    op = table.lookup(name)
    program = op.program(**(op.attrs | attrs))
    text = program.evaluate(_ALGEBRA, arguments, triton_math.constant).text
    return [writer.result(text, axes, dims, step.outputs[0])]


@_writes(*(name.removeprefix("aten.") for name in SAME_TENSOR))
def _view(writer: RouterWriter, step: Step) -> list[Tile]:
    """Write a view or a copy: the same elements in the same order, perhaps repeated."""
    x, form = writer.tensor(step.args[0]), step.outputs[0]
    name, kind = step.op._opname, kind_of(form.dtype)
    before = _form_of(writer, step.args[0])
    text = x.text
    if kind != x.kind:
        if name != "_to_copy" or "int" in (kind, x.kind):
            raise UnwrittenError("a conversion of integers")
        text = writer.assign(f"{text} != 0" if kind == "bool" else f"({text}).to(tl.float32)")
    elif kind == "float" and form.dtype != before.dtype:
        text = writer.assign(writer.rounded(text, form.dtype))
    dims = (_expanded if name == "expand" else _viewed)(writer, x, form)
    source = x.source if text == x.text and len(dims) == len(x.dims) else None
    return [Tile(text, x.axes, dims, kind, source)]


def _form_of(writer: RouterWriter, x: Any) -> Form:
    writer.tensor(x)
    return writer.form(x)


def _viewed(writer: RouterWriter, x: Tile, form: Form) -> tuple[tuple[str, ...], ...]:
    """Return the dims of a view. An axis of an input that it cuts is split."""
    axes = [a for entry in x.dims for a in entry]
    dims: list[tuple[str, ...]] = []
    for d, size in enumerate(form.shape):
        entry: list[str] = []
        is_row = d == 0 and writer.router.rows == size and len(form.shape) > 1
        left = 1 if is_row else size
        while left > 1:
            if not axes:
                raise UnwrittenError("a view of other rows")
            n = writer.sizes[axes[0]]
            if left % n:
                if n % left or not axes[0].startswith("e"):
                    raise UnwrittenError("a view that cuts dims in another way")
                raise SplitError(axes[0], n // left)
            entry.append(axes.pop(0))
            left //= n
        dims.append(tuple(entry))
    if axes:
        raise UnwrittenError("a view of other rows")
    return tuple(dims)


def _expanded(writer: RouterWriter, x: Tile, form: Form) -> tuple[tuple[str, ...], ...]:
    """Return the dims of a tensor whose elements are repeated along axes."""
    dims = [()] * (len(form.shape) - len(x.dims)) + [*x.dims]
    used = {a for entry in dims for a in entry}
    for d, size in enumerate(form.shape):
        if dims[d] or size == 1 or (d == 0 and size == writer.router.rows):
            continue
        found = [a for a, n in writer.sizes.items() if n == size and a not in used]
        if not found:
            raise UnwrittenError("a tensor that is repeated along a new dim")
        dims[d] = (found[0],)
        used.add(found[0])
    return tuple(dims)


def _last(tile: Tile, dim: Any) -> tuple[str, ...]:
    """Return the axes of the last dim, if an op works along that."""
    dim = dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim
    if dim not in (-1, len(tile.dims) - 1) or not tile.dims:
        raise UnwrittenError("an op along another dim")
    return tile.dims[-1]


@_writes("_softmax")
def _softmax(writer: RouterWriter, step: Step) -> list[Tile]:
    x = writer.tensor(step.args[0])
    along = _last(x, step.args[1])
    text, axes = writer.filled(x)
    rest = [a for a in axes if a not in along]
    inside = writer.assign(writer.inside(text, along, axes, 'float("-inf")'))
    most = writer.assign(writer.reduced(inside, "max", along, axes))
    powers = f"exact_exp({inside} - {writer.over(most, rest, axes)})"
    powers = writer.assign(writer.inside(powers, along, axes, "0.0"))
    total = writer.assign(writer.reduced(powers, "sum", along, axes))
    text = f"tl.div_rn({powers}, {writer.over(total, rest, axes)})"
    return [writer.result(text, axes, x.dims, step.outputs[0])]


def _reduction(function: str, neutral: str) -> Callable[[RouterWriter, Step], list[Tile]]:
    def write(writer: RouterWriter, step: Step) -> list[Tile]:
        """Write a reduction along the last dim."""
        x, (dim, *keeps) = writer.tensor(step.args[0]), (*step.args[1:], False)[:2]
        along = _last(x, dim)
        if step.kwargs and dict(step.kwargs) != {"dtype": None}:
            raise UnwrittenError("a reduction with options")
        text, axes = writer.filled(x)
        text = writer.assign(writer.inside(text, along, axes, neutral))
        text = writer.reduced(text, function, along, axes)
        dims = (*x.dims[:-1], ()) if keeps[0] else x.dims[:-1]
        rest = [a for a in axes if a not in along]
        return [writer.result(text, rest, dims, step.outputs[0])]

    return write


_writes("sum")(_reduction("sum", "0.0"))
_writes("amax")(_reduction("max", 'float("-inf")'))


@_writes("max")
def _max(writer: RouterWriter, step: Step) -> list[Tile]:
    """Write the greatest element along the last dim, and its place."""
    if len(step.args) < 2 or isinstance(step.args[1], Local):
        raise UnwrittenError("another form of max")
    given, dim, *keeps = step.args
    found = _greatest(writer, writer.tensor(given), dim, 1)
    if keeps == [True]:
        return found
    return [replace(tile, dims=tile.dims[:-1]) for tile in found]


@_writes("abs")
def _abs(writer: RouterWriter, step: Step) -> list[Tile]:
    (text,), axes, dims = writer.broadcast(step.args)
    return [writer.result(f"tl.abs({text})", axes, dims, step.outputs[0])]


@_writes("clamp")
def _clamp(writer: RouterWriter, step: Step) -> list[Tile]:
    """Write bounds that are tensors or numbers. NaN stays NaN."""
    bounds = dict(zip(("maximum", "minimum"), step.args[1:], strict=False))
    given = [step.args[0], *(b for b in bounds.values() if b is not None)]
    (x, *texts), axes, dims = writer.broadcast(given)
    functions = [name for name, b in bounds.items() if b is not None]
    for function, bound in zip(functions, texts, strict=True):
        x = f"tl.{function}({x}, {bound}, propagate_nan=tl.PropagateNan.ALL)"
    return [writer.result(x, axes, dims, step.outputs[0])]


@_writes("cat")
def _cat(writer: RouterWriter, step: Step) -> list[Tile]:
    """Write one element after the other as a new dim."""
    parts, dim = (*step.args, 0)[:2]
    tiles = [writer.tensor(x) for x in parts]
    if any(_last(tile, dim) or tile.axes for tile in tiles) or len({t.kind for t in tiles}) > 1:
        raise UnwrittenError("tensors that are joined along other dims")
    axis = writer.new_axis(len(tiles))
    axes = writer.axes_of([axis])
    text = tiles[-1].text
    for n, tile in enumerate(tiles[:-1]):
        text = f"tl.where(i_{axis} == {n}, {tile.text}, {text})"
    return [writer.result(text, axes, (*tiles[0].dims[:-1], (axis,)), step.outputs[0])]


@_writes("topk")
def _topk(writer: RouterWriter, step: Step) -> list[Tile]:
    """Write the choice of the greatest elements, each by one reduction.

    An element and its place are one integer: the bits of the float in the order of floats, then
    the place counted down. So the greatest integer is that of the first of equal elements.
    """
    given, count, *how = step.args
    dim, is_largest = (*how, *(-1, True)[len(how) :])[:2]
    if not is_largest or step.kwargs:
        raise UnwrittenError("a top-k in another order")
    return _greatest(writer, writer.tensor(given), dim, count)


def _greatest(writer: RouterWriter, x: Tile, dim: Any, count: int) -> list[Tile]:
    """Write the choice of the greatest elements along the last dim. One has no dim of its own."""
    along = _last(x, dim)
    if x.kind != "float":
        raise UnwrittenError("a choice by integers")
    if not along:  # there is one element
        zero = writer.assign("tl.full([], 0, tl.int32)")
        return [Tile(x.text, x.axes, x.dims), Tile(zero, (), x.dims, "int")]
    text, axes = writer.filled(x)
    rest = [a for a in axes if a not in along]
    place = writer.assign(writer.inside(writer.offset(along, axes), along, axes, "-1"))
    keys = writer.assign(writer.inside(f"packed({text}, {place})", along, axes, "TAKEN"))
    # Triton gives a name in a loop the type that it has before the loop, so names are new
    greatest, first, is_first, value = (
        writer.new_name(role) for role in ("greatest", "first", "is_first", "value")
    )
    step_lines = [
        f"{greatest} = {writer.reduced(keys, 'max', along, axes)}",
        f"{first} = 0x7FFFFFFF - ({greatest} & 0x7FFFFFFF).to(tl.int32)",
        f"{is_first} = {place} == {writer.over(first, rest, axes)}",
        f"{value} = {writer.reduced(f'tl.where({is_first}, {text}, 0.0)', 'sum', along, axes)}",
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


@_writes("gather")
def _gather(writer: RouterWriter, step: Step) -> list[Tile]:
    given, dim, where = step.args
    x, index = writer.tensor(given), writer.tensor(where)
    along = _last(x, dim)
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


@_writes("index")
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


@_writes("scatter")
def _scatter(writer: RouterWriter, step: Step) -> list[Tile]:
    given, dim, where, value = step.args
    x, index = writer.tensor(given), writer.tensor(where)
    along = _last(x, dim)
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


def _constant(value: float | None) -> Callable[[RouterWriter, Step], list[Tile]]:
    def write(writer: RouterWriter, step: Step) -> list[Tile]:
        """Write a tensor of one number, like another tensor."""
        x, form = writer.tensor(step.args[0]), step.outputs[0]
        number = step.args[1] if value is None else value
        if kind_of(form.dtype) != "float" or not isinstance(number, (int, float)):
            raise UnwrittenError("a tensor of integers")
        text = f"tl.full([], {triton_math.constant(float(number)).text}, tl.float32)"
        return [Tile(writer.assign(text), (), x.dims)]

    return write


_writes("zeros_like")(_constant(0.0))
_writes("ones_like")(_constant(1.0))
_writes("full_like")(_constant(None))


@_writes("masked_fill")
def _masked_fill(writer: RouterWriter, step: Step) -> list[Tile]:
    given, where, number = step.args
    x, mask = writer.tensor(given), writer.tensor(where)
    if mask.kind != "bool" or not isinstance(number, (int, float)):
        raise UnwrittenError("a mask of another type")
    (text, condition), axes, dims = writer.broadcast([given, where], (x.kind, "bool"))
    number_text = str(number) if x.kind == "int" else triton_math.constant(float(number)).text
    text = f"tl.where({condition}, {number_text}, {text})"
    return [writer.result(text, axes, dims, step.outputs[0])]


@_writes("where")
def _where(writer: RouterWriter, step: Step) -> list[Tile]:
    if len(step.args) != 3 or writer.tensor(step.args[0]).kind != "bool":
        raise UnwrittenError("a condition of another type")
    (mask, x, y), axes, dims = writer.broadcast(step.args, ("float", "bool"))
    return [writer.result(f"tl.where({mask}, {x}, {y})", axes, dims, step.outputs[0])]


@_writes("bitwise_not", "logical_not")
def _not(writer: RouterWriter, step: Step) -> list[Tile]:
    x = writer.tensor(step.args[0])
    if x.kind != "bool":
        raise UnwrittenError("a condition of another type")
    return [writer.result(f"{x.text} == 0", x.axes, x.dims, step.outputs[0])]


def _comparison(sign: str) -> Callable[[RouterWriter, Step], list[Tile]]:
    def write(writer: RouterWriter, step: Step) -> list[Tile]:
        """Write a comparison."""
        kind = writer.tensor(step.args[0]).kind
        (x, y), axes, dims = writer.broadcast(step.args, (kind,))
        return [writer.result(f"{x} {sign} {y}", axes, dims, step.outputs[0])]

    return write


for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _writes(_name)(_comparison(_sign))
