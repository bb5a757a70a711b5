"""Write a router as the text of one Triton kernel, one block for each row.

The kernel does what the steps do, in their order and with their rounding. A tensor of a row is a
tile over named axes. A view that splits the experts into groups splits their axis, so groups are
one dim of a tile, and places within a group another one.

Equal scores are chosen in the order of experts. NaN counts as the greatest score.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from mirage_hf.codegen import triton_math
from mirage_hf.codegen.triton_math import TRITON_ALGEBRA, Expr
from mirage_hf.ops import table
from mirage_hf.ops.dtypes import COMPUTE_DTYPES
from mirage_hf.trace.record import Node
from mirage_hf.trace.terms import SAME_TENSOR, elementwise_row


@dataclass(frozen=True)
class Local:
    """Output number `output` of step number `step`. The inputs are those of step -1."""

    step: int
    output: int = 0


@dataclass(frozen=True)
class Form:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Step:
    """One call of a torch op. Tensors among its arguments are `Local`s."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Form, ...]


@dataclass(frozen=True)
class Router:
    """The steps of a router. It is hashable and holds no tensor.

    Attributes:
        rows: The rows.
        inputs: The forms of its inputs.
        is_weight: For each input, whether all rows share its one row.
        steps: What is computed, in order.
        results: What is returned.
    """

    rows: int
    inputs: tuple[Form, ...]
    is_weight: tuple[bool, ...]
    steps: tuple[Step, ...]
    results: tuple[Local, ...]


@dataclass(frozen=True)
class RouterText:
    """A kernel of a router.

    Attributes:
        name: The kernel's name.
        source: The text of the file.
        num_warps: Warps of a block.
    """

    name: str
    source: str
    num_warps: int

    @property
    def digest(self) -> str:
        """The SHA-256 of the text."""
        return hashlib.sha256(self.source.encode()).hexdigest()


class UnwrittenError(Exception):
    """A router that is not written as a kernel.

    Attributes:
        step: The number of the step that is not, None if no step is the reason.
    """

    def __init__(self, why: str, step: int | None = None):
        super().__init__(why)
        self.step = step


class _SplitError(Exception):
    """An axis of an input must be two axes."""

    def __init__(self, axis: str, inner: int):
        super().__init__(axis)
        self.axis, self.inner = axis, inner


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
        writer = _Writer(router, splits)
        try:
            return writer.write()
        except _SplitError as error:
            if error.axis in splits:
                raise UnwrittenError("groups of several sizes") from None
            splits[error.axis] = error.inner


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


@dataclass(frozen=True)
class _Tile:
    """A tensor of a row in the kernel.

    Attributes:
        text: The name of its tile, or a number.
        axes: The axes of the tile, in order.
        dims: For each dim of the tensor its axes. Those that the tile lacks repeat its elements.
        kind: "float", "int" or "bool".
        source: The input that it is, None for computed tensors.
    """

    text: str
    axes: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]
    kind: str = "float"
    source: int | None = None


@dataclass
class _Writer:
    """Writes the kernel of a router, top to bottom."""

    router: Router
    splits: dict[str, int]
    lines: list[str] = field(default_factory=list)
    #: The sizes of axes. Tiles have their axes in this order.
    sizes: dict[str, int] = field(default_factory=dict)
    tiles: dict[Local, _Tile] = field(default_factory=dict)
    count: int = 0
    largest: int = 1

    def write(self) -> RouterText:
        """Return the kernel.

        Raises:
            UnwrittenError: It cannot be written.
            _SplitError: An axis must be split first.
        """
        router = self.router
        for n, form in enumerate(router.inputs):
            self.tiles[Local(-1, n)] = self._load(n, form, router.is_weight[n])
        for n, step in enumerate(router.steps):
            try:
                results = _WRITERS[_step_name(step)](self, step)
            except UnwrittenError as error:
                raise UnwrittenError(str(error), n) from None
            self.tiles |= {Local(n, k): tile for k, tile in enumerate(results)}
        for n, result in enumerate(router.results):
            if result not in self.tiles:
                raise UnwrittenError("a result that is not computed", result.step)
            self._store(n, self.tiles[result], self._form(result))
        return self._file()

    def _form(self, x: Local) -> Form:
        if x.step < 0:
            return self.router.inputs[x.output]
        return self.router.steps[x.step].outputs[x.output]

    def _file(self) -> RouterText:
        body = [f"i_{a} = tl.arange(0, {_padded(n)})" for a, n in self.sizes.items()]
        names = [f"in{n}" for n in range(len(self.router.inputs))]
        names += [f"out{n}" for n in range(len(self.router.results))]
        text = "\n".join(f"    {line}" for line in [*_BEGIN, *body, *self.lines])
        name = f"route_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        kernel = f"@triton.jit\ndef {name}({', '.join(names)}, overlaps: tl.constexpr):\n{text}\n"
        needed = triton_math.helpers_of(f"INTERPRETED, {_EXP}{kernel}")
        helpers = [triton_math.HELPERS[h].strip("\n") for h in needed]
        source = "\n\n\n".join([_HEAD, *helpers, _EXP, kernel])
        warps = min(8, max(1, self.largest // 1024))
        return RouterText(name, source, warps)

    # -- tiles

    def assign(self, text: str) -> str:
        """Write an assignment to a new name and return it."""
        self.count += 1
        self.lines.append(f"v{self.count} = {text}")
        return f"v{self.count}"

    def axes_of(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return axes in the order of tiles."""
        wanted = {*axes}
        ordered = tuple(a for a in self.sizes if a in wanted)
        self.largest = max(self.largest, math.prod(_padded(self.sizes[a]) for a in ordered))
        return ordered

    def over(self, text: str, has: Sequence[str], axes: Sequence[str]) -> str:
        """Return a tile with new dims where it lacks axes."""
        if not has or tuple(has) == tuple(axes):
            return text
        return f"{text}[{', '.join(':' if a in has else 'None' for a in axes)}]"

    def place(self, axis: str, axes: Sequence[str]) -> str:
        """Return the numbers of the places along an axis, as a tile that spreads over axes."""
        return self.over(f"i_{axis}", (axis,), axes)

    def mask(self, axes: Sequence[str], over: Sequence[str]) -> str | None:
        """Return what is true inside the sizes of axes, None if it is true everywhere."""
        tests = [
            f"({self.place(a, over)} < {self.sizes[a]})"
            for a in axes
            if self.sizes[a] != _padded(self.sizes[a])
        ]
        return " & ".join(tests) or None

    def offset(self, entries: Sequence[str], axes: Sequence[str]) -> str:
        """Return the number of an element, where the entries number it row by row."""
        terms, stride = [], 1
        for a in reversed(entries):
            terms.append(f"{self.place(a, axes)} * {stride}")
            stride *= self.sizes[a]
        return " + ".join(terms) or "0"

    def new_axis(self, size: int) -> str:
        """Return a new axis."""
        name = f"c{len(self.sizes)}"
        self.sizes[name] = size
        return name

    def tensor(self, x: Any) -> _Tile:
        """Return a tensor among the arguments of a step."""
        if not isinstance(x, Local) or x not in self.tiles:
            raise UnwrittenError("an argument that is no tensor of the router")
        return self.tiles[x]

    def _load(self, n: int, form: Form, is_weight: bool) -> _Tile:
        kind = _kind(form.dtype)
        shape = form.shape
        entries: list[tuple[str, ...]] = []
        for d, size in enumerate(shape):
            is_row = d == 0 and not is_weight
            entries.append(() if is_row or size == 1 else self._input_axes(size))
        flat = [a for entry in entries for a in entry]
        if len({*flat}) != len(flat):
            raise UnwrittenError("an input with two equal dims")
        axes = self.axes_of(flat)
        row = "" if is_weight else f"row * {math.prod(shape[1:])} + "
        pointer = f"in{n} + {row}{self.offset(flat, axes)}"
        mask = self.mask(flat, axes)
        text = f"tl.load({pointer}{f', mask={mask}, other=0' if mask else ''})"
        text += {"float": ".to(tl.float32)", "int": ".to(tl.int32)", "bool": " != 0"}[kind]
        return _Tile(self.assign(text), axes, tuple(entries), kind, n)

    def _input_axes(self, size: int) -> tuple[str, ...]:
        """Return the axes of a dim of an input. Equal sizes have the same axes."""
        name = f"e{size}"
        if name not in self.splits:
            self.sizes.setdefault(name, size)
            return (name,)
        inner = self.splits[name]
        self.sizes.setdefault(f"{name}_groups", size // inner)
        self.sizes.setdefault(f"{name}_places", inner)
        return (f"{name}_groups", f"{name}_places")

    def _store(self, n: int, tile: _Tile, form: Form) -> None:
        flat = [a for entry in tile.dims for a in entry]
        axes = self.axes_of(flat)
        size = math.prod(self.sizes[a] for a in flat)
        text = self.over(tile.text, tile.axes, axes)
        if tile.kind == "int":
            text = f"{text}.to(tl.int64)"
        mask = self.mask(flat, axes)
        pointer = f"out{n} + row * {size} + {self.offset(flat, axes)}"
        if axes and tile.axes != axes:
            dims = ", ".join(str(_padded(self.sizes[a])) for a in axes)
            text = f"tl.broadcast_to({text}, [{dims}])"
        self.lines.append(
            f"tl.store({pointer}, {text}.to(out{n}.dtype.element_ty)"
            f"{f', mask={mask}' if mask else ''})"
        )

    # -- steps

    def rounded(self, text: str, dtype: torch.dtype) -> str:
        """Return a float32 tile as torch stores it in a dtype."""
        names = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
        return f"({text}).to({names[dtype]}).to(tl.float32)" if dtype in names else text

    def result(
        self, text: str, axes: Sequence[str], dims: Sequence[tuple[str, ...]], form: Form
    ) -> _Tile:
        """Write a result of a step and return it."""
        kind = _kind(form.dtype)
        name = self.assign(self.rounded(text, form.dtype) if kind == "float" else text)
        return _Tile(name, tuple(axes), tuple(dims), kind)

    def broadcast(
        self, operands: Sequence[Any], kinds: Sequence[str] = ("float",)
    ) -> tuple[list[str], tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Return operands over common axes, these axes, and the dims of the result."""
        found = [self.tensor(x) if isinstance(x, Local) else x for x in operands]
        tiles = [x for x in found if isinstance(x, _Tile)]
        if any(t.kind not in kinds for t in tiles):
            raise UnwrittenError("an operand of another type")
        rank = max(len(t.dims) for t in tiles)
        dims: list[tuple[str, ...]] = [()] * rank
        for t in tiles:
            for d, entry in enumerate(t.dims, rank - len(t.dims)):
                if entry and dims[d] and entry != dims[d]:
                    raise UnwrittenError("operands with other dims")
                dims[d] = entry or dims[d]
        axes = self.axes_of([a for t in tiles for a in t.axes])
        texts = [
            self.over(x.text, x.axes, axes)
            if isinstance(x, _Tile)
            else triton_math.constant(float(x)).text
            for x in found
        ]
        return texts, axes, tuple(dims)

    def reduced(self, text: str, function: str, along: Sequence[str], axes: Sequence[str]) -> str:
        """Return a tile reduced along some of its axes."""
        for a in reversed([a for a in axes if a in along]):
            text = f"tl.{function}({text}, {list(axes).index(a)})"
            axes = [b for b in axes if b != a]
        return text

    def inside(self, text: str, along: Sequence[str], axes: Sequence[str], other: str) -> str:
        """Return a tile with another number outside of the sizes of axes."""
        mask = self.mask(along, axes)
        return f"tl.where({mask}, {text}, {other})" if mask else text

    def filled(self, tile: _Tile) -> tuple[str, tuple[str, ...]]:
        """Return a tile that has all axes of its dims, and these axes."""
        axes = self.axes_of([a for entry in tile.dims for a in entry])
        text = self.over(tile.text, tile.axes, axes)
        if axes != tile.axes:
            dims = ", ".join(str(_padded(self.sizes[a])) for a in axes)
            text = self.assign(f"tl.broadcast_to({text}, [{dims}])")
        return text, axes


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _kind(dtype: torch.dtype) -> str:
    if dtype in COMPUTE_DTYPES:
        return "float"
    if dtype in (torch.int64, torch.int32):
        return "int"
    if dtype is torch.bool:
        return "bool"
    raise UnwrittenError(f"tensors of {dtype}")


# -- the table: torch's ops as text ----------------------------------------------------------------

_WRITERS: dict[str, Callable[[_Writer, Step], list[_Tile]]] = {}


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
def _elementwise(writer: _Writer, step: Step) -> list[_Tile]:
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
def _view(writer: _Writer, step: Step) -> list[_Tile]:
    """Write a view or a copy: the same elements in the same order, perhaps repeated."""
    x, form = writer.tensor(step.args[0]), step.outputs[0]
    name, kind = step.op._opname, _kind(form.dtype)
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
    return [_Tile(text, x.axes, dims, kind, source)]


def _form_of(writer: _Writer, x: Any) -> Form:
    writer.tensor(x)
    return writer._form(x)


def _viewed(writer: _Writer, x: _Tile, form: Form) -> tuple[tuple[str, ...], ...]:
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
                raise _SplitError(axes[0], n // left)
            entry.append(axes.pop(0))
            left //= n
        dims.append(tuple(entry))
    if axes:
        raise UnwrittenError("a view of other rows")
    return tuple(dims)


def _expanded(writer: _Writer, x: _Tile, form: Form) -> tuple[tuple[str, ...], ...]:
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


def _last(tile: _Tile, dim: Any) -> tuple[str, ...]:
    """Return the axes of the last dim, if an op works along that."""
    dim = dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim
    if dim not in (-1, len(tile.dims) - 1) or not tile.dims:
        raise UnwrittenError("an op along another dim")
    return tile.dims[-1]


@_writes("_softmax")
def _softmax(writer: _Writer, step: Step) -> list[_Tile]:
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


def _reduction(function: str, neutral: str) -> Callable[[_Writer, Step], list[_Tile]]:
    def write(writer: _Writer, step: Step) -> list[_Tile]:
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
def _max(writer: _Writer, step: Step) -> list[_Tile]:
    """Write the greatest element along the last dim, and its place."""
    if len(step.args) < 2 or isinstance(step.args[1], Local):
        raise UnwrittenError("another form of max")
    given, dim, *keeps = step.args
    found = _greatest(writer, writer.tensor(given), dim, 1)
    if keeps == [True]:
        return found
    return [replace(tile, dims=tile.dims[:-1]) for tile in found]


@_writes("abs")
def _abs(writer: _Writer, step: Step) -> list[_Tile]:
    (text,), axes, dims = writer.broadcast(step.args)
    return [writer.result(f"tl.abs({text})", axes, dims, step.outputs[0])]


@_writes("clamp")
def _clamp(writer: _Writer, step: Step) -> list[_Tile]:
    """Write bounds that are tensors or numbers. NaN stays NaN."""
    bounds = dict(zip(("maximum", "minimum"), step.args[1:], strict=False))
    given = [step.args[0], *(b for b in bounds.values() if b is not None)]
    (x, *texts), axes, dims = writer.broadcast(given)
    functions = [name for name, b in bounds.items() if b is not None]
    for function, bound in zip(functions, texts, strict=True):
        x = f"tl.{function}({x}, {bound}, propagate_nan=tl.PropagateNan.ALL)"
    return [writer.result(x, axes, dims, step.outputs[0])]


@_writes("cat")
def _cat(writer: _Writer, step: Step) -> list[_Tile]:
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
def _topk(writer: _Writer, step: Step) -> list[_Tile]:
    """Write the choice of the greatest elements, each by one reduction.

    An element and its place are one integer: the bits of the float in the order of floats, then
    the place counted down. So the greatest integer is that of the first of equal elements.
    """
    given, count, *how = step.args
    dim, is_largest = (*how, *(-1, True)[len(how) :])[:2]
    if not is_largest or step.kwargs:
        raise UnwrittenError("a top-k in another order")
    return _greatest(writer, writer.tensor(given), dim, count)


def _greatest(writer: _Writer, x: _Tile, dim: Any, count: int) -> list[_Tile]:
    """Write the choice of the greatest elements along the last dim. One has no dim of its own."""
    along = _last(x, dim)
    if x.kind != "float":
        raise UnwrittenError("a choice by integers")
    if not along:  # there is one element
        zero = writer.assign("tl.full([], 0, tl.int32)")
        return [_Tile(x.text, x.axes, x.dims), _Tile(zero, (), x.dims, "int")]
    text, axes = writer.filled(x)
    rest = [a for a in axes if a not in along]
    place = writer.assign(writer.inside(writer.offset(along, axes), along, axes, "-1"))
    keys = writer.assign(writer.inside(f"packed({text}, {place})", along, axes, "TAKEN"))
    step_lines = [
        f"greatest = {writer.reduced(keys, 'max', along, axes)}",
        "first = 0x7FFFFFFF - (greatest & 0x7FFFFFFF).to(tl.int32)",
        f"is_first = {place} == {writer.over('first', rest, axes)}",
        f"value = {writer.reduced(f'tl.where(is_first, {text}, 0.0)', 'sum', along, axes)}",
    ]
    if count == 1:
        writer.lines += step_lines
        dims = (*x.dims[:-1], ())
        values, index = writer.assign("value"), writer.assign("first")
        return [_Tile(values, tuple(rest), dims), _Tile(index, tuple(rest), dims, "int")]
    chosen = writer.new_axis(count)
    outer = writer.axes_of([*rest, chosen])
    whole = ", ".join(str(_padded(writer.sizes[a])) for a in outer)
    values, index = (
        writer.assign(f"tl.zeros([{whole}], {dtype})") for dtype in ("tl.float32", "tl.int32")
    )
    at = f"{writer.place(chosen, outer)} == j"
    step_lines += [
        f"{values} = tl.where({at}, {writer.over('value', rest, outer)}, {values})",
        f"{index} = tl.where({at}, {writer.over('first', rest, outer)}, {index})",
        f"{keys} = tl.where(is_first, TAKEN, {keys})",
    ]
    writer.lines += [f"for j in range({count}):", *(f"    {line}" for line in step_lines)]
    dims = (*x.dims[:-1], (chosen,))
    return [_Tile(values, outer, dims), _Tile(index, outer, dims, "int")]


@_writes("gather")
def _gather(writer: _Writer, step: Step) -> list[_Tile]:
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
def _index(writer: _Writer, step: Step) -> list[_Tile]:
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
def _scatter(writer: _Writer, step: Step) -> list[_Tile]:
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


def _constant(value: float | None) -> Callable[[_Writer, Step], list[_Tile]]:
    def write(writer: _Writer, step: Step) -> list[_Tile]:
        """Write a tensor of one number, like another tensor."""
        x, form = writer.tensor(step.args[0]), step.outputs[0]
        number = step.args[1] if value is None else value
        if _kind(form.dtype) != "float" or not isinstance(number, (int, float)):
            raise UnwrittenError("a tensor of integers")
        text = f"tl.full([], {triton_math.constant(float(number)).text}, tl.float32)"
        return [_Tile(writer.assign(text), (), x.dims)]

    return write


_writes("zeros_like")(_constant(0.0))
_writes("ones_like")(_constant(1.0))
_writes("full_like")(_constant(None))


@_writes("masked_fill")
def _masked_fill(writer: _Writer, step: Step) -> list[_Tile]:
    given, where, number = step.args
    x, mask = writer.tensor(given), writer.tensor(where)
    if mask.kind != "bool" or not isinstance(number, (int, float)):
        raise UnwrittenError("a mask of another type")
    (text, condition), axes, dims = writer.broadcast([given, where], (x.kind, "bool"))
    number_text = str(number) if x.kind == "int" else triton_math.constant(float(number)).text
    text = f"tl.where({condition}, {number_text}, {text})"
    return [writer.result(text, axes, dims, step.outputs[0])]


@_writes("where")
def _where(writer: _Writer, step: Step) -> list[_Tile]:
    if len(step.args) != 3 or writer.tensor(step.args[0]).kind != "bool":
        raise UnwrittenError("a condition of another type")
    (mask, x, y), axes, dims = writer.broadcast(step.args, ("float", "bool"))
    return [writer.result(f"tl.where({mask}, {x}, {y})", axes, dims, step.outputs[0])]


@_writes("bitwise_not", "logical_not")
def _not(writer: _Writer, step: Step) -> list[_Tile]:
    x = writer.tensor(step.args[0])
    if x.kind != "bool":
        raise UnwrittenError("a condition of another type")
    return [writer.result(f"{x.text} == 0", x.axes, x.dims, step.outputs[0])]


def _comparison(sign: str) -> Callable[[_Writer, Step], list[_Tile]]:
    def write(writer: _Writer, step: Step) -> list[_Tile]:
        """Write a comparison."""
        kind = writer.tensor(step.args[0]).kind
        (x, y), axes, dims = writer.broadcast(step.args, (kind,))
        return [writer.result(f"{x} {sign} {y}", axes, dims, step.outputs[0])]

    return write


for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _writes(_name)(_comparison(_sign))


# -- the text of every file ------------------------------------------------------------------------

_HEAD = '''"""A router as one kernel (mirage_hf/trace/router_text.py)."""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

#: What no element's integer is: its place was taken.
TAKEN = tl.constexpr(-(2**63))'''

_EXP = '''@triton.jit
def exact_exp(x):
    """Return e^x, rounded as torch does. `tl.exp` first multiplies by log2(e), which is coarser."""
    if INTERPRETED:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def packed(x, place):
    """Return each float and its place as one int64, in the order of floats.

    Of equal floats the first one is the greatest. NaN is greater than any number.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(x != x, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | ((0x7FFFFFFF - place) & 0x7FFFFFFF).to(tl.int64)'''

_BEGIN = (
    "if overlaps:",
    "    tl.extra.cuda.gdc_wait()",
    "    tl.extra.cuda.gdc_launch_dependents()",
    "row = tl.program_id(0)",
)
