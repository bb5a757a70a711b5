"""Write elementwise ops, views, reductions and conditions of routers as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mirage_hf.codegen import triton_math
from mirage_hf.codegen.triton_math import TRITON_ALGEBRA, Expr
from mirage_hf.ops import table
from mirage_hf.trace.routers.steps import Form, Local, Step
from mirage_hf.trace.routers.tiles import RouterWriter, SplitError, Tile, UnwrittenError, kind_of
from mirage_hf.trace.routers.writers import ELEMENTWISE, StepWriters, elementwise_op_of, last_axes
from mirage_hf.trace.torch_ops import SAME_TENSOR

#: What writes each op.
WRITERS = StepWriters()

#: The algebra of elementwise ops. Quotients, roots and powers of e are rounded as torch does.
_ALGEBRA: Mapping[str, Callable[..., Expr]] = {
    **TRITON_ALGEBRA,
    "exp": lambda x: Expr(f"exact_exp({x.text})"),
    "div": lambda x, y: Expr(f"tl.div_rn({_tile(x)}, {_tile(y)})"),
    "sqrt": lambda x: Expr(f"tl.sqrt_rn({x.text})"),
}


def _tile(x: Expr) -> str:
    return x.text if x.number is None else f"tl.full([], {x.text}, tl.float32)"


@WRITERS.writes(ELEMENTWISE)
def _elementwise(writer: RouterWriter, step: Step) -> list[Tile]:
    known = elementwise_op_of(step)
    assert known is not None
    name, operands, attrs = known
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


@WRITERS.writes("abs")
def _abs(writer: RouterWriter, step: Step) -> list[Tile]:
    (text,), axes, dims = writer.broadcast(step.args)
    return [writer.result(f"tl.abs({text})", axes, dims, step.outputs[0])]


@WRITERS.writes("clamp")
def _clamp(writer: RouterWriter, step: Step) -> list[Tile]:
    """Write bounds that are tensors or numbers. NaN stays NaN."""
    bounds = dict(zip(("maximum", "minimum"), step.args[1:], strict=False))
    given = [step.args[0], *(b for b in bounds.values() if b is not None)]
    (x, *texts), axes, dims = writer.broadcast(given)
    functions = [name for name, b in bounds.items() if b is not None]
    for function, bound in zip(functions, texts, strict=True):
        x = f"tl.{function}({x}, {bound}, propagate_nan=tl.PropagateNan.ALL)"
    return [writer.result(x, axes, dims, step.outputs[0])]


# -- views -----------------------------------------------------------------------------------------


@WRITERS.writes(*(name.removeprefix("aten.") for name in SAME_TENSOR))
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


# -- reductions ------------------------------------------------------------------------------------


@WRITERS.writes("_softmax")
def _softmax(writer: RouterWriter, step: Step) -> list[Tile]:
    x = writer.tensor(step.args[0])
    along = last_axes(x, step.args[1])
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
        along = last_axes(x, dim)
        if step.kwargs and dict(step.kwargs) != {"dtype": None}:
            raise UnwrittenError("a reduction with options")
        text, axes = writer.filled(x)
        text = writer.assign(writer.inside(text, along, axes, neutral))
        text = writer.reduced(text, function, along, axes)
        dims = (*x.dims[:-1], ()) if keeps[0] else x.dims[:-1]
        rest = [a for a in axes if a not in along]
        return [writer.result(text, rest, dims, step.outputs[0])]

    return write


WRITERS.writes("sum")(_reduction("sum", "0.0"))
WRITERS.writes("amax")(_reduction("max", 'float("-inf")'))


# -- constants and conditions ----------------------------------------------------------------------


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


WRITERS.writes("zeros_like")(_constant(0.0))
WRITERS.writes("ones_like")(_constant(1.0))
WRITERS.writes("full_like")(_constant(None))


@WRITERS.writes("masked_fill")
def _masked_fill(writer: RouterWriter, step: Step) -> list[Tile]:
    given, where, number = step.args
    x, mask = writer.tensor(given), writer.tensor(where)
    if mask.kind != "bool" or not isinstance(number, (int, float)):
        raise UnwrittenError("a mask of another type")
    (text, condition), axes, dims = writer.broadcast([given, where], (x.kind, "bool"))
    number_text = str(number) if x.kind == "int" else triton_math.constant(float(number)).text
    text = f"tl.where({condition}, {number_text}, {text})"
    return [writer.result(text, axes, dims, step.outputs[0])]


@WRITERS.writes("where")
def _where(writer: RouterWriter, step: Step) -> list[Tile]:
    if len(step.args) != 3 or writer.tensor(step.args[0]).kind != "bool":
        raise UnwrittenError("a condition of another type")
    (mask, x, y), axes, dims = writer.broadcast(step.args, ("float", "bool"))
    return [writer.result(f"tl.where({mask}, {x}, {y})", axes, dims, step.outputs[0])]


@WRITERS.writes("bitwise_not", "logical_not")
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
    WRITERS.writes(_name)(_comparison(_sign))
