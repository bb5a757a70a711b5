"""Read recorded torch ops as rows of the op table.

A term is one op over row-wise tensors: (rows, width), (rows, 1), or a weight. Views that keep this
form and casts between floats are no ops here. One table, `_LOWERINGS`, says which row of the op
table a torch op is. What is not in it has no term, and runs as the torch op that it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mirage_hf.trace.coded_linear import CODED_LINEAR, CodedLinear, linear_of
from mirage_hf.trace.record import VIEWS, Held, Input, Meta, Node, Recording, Value
from mirage_hf.trace.sizes import fixed_shape

Tensorlike = Value | Input | Held


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor that no step changes: a parameter, or a view of one.

    Attributes:
        source: The parameter, or the value that is a view of it.
        shape: Its shape.
        strides: Its strides.
        columns: The columns [start, stop) that are meant, None for all.
        coded: The linear whose codes it is decoded from, None for a plain weight.
        codes: The tensors of codes, zero points and scales, in the order of its coding.
    """

    source: Tensorlike
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    columns: tuple[int, int] | None = None
    coded: CodedLinear | None = None
    codes: tuple[Held, ...] = ()

    def narrowed(self, start: int, stop: int) -> Weight:
        """Return some of the columns."""
        offset = self.columns[0] if self.columns else 0
        shape = (*self.shape[:-1], stop - start)
        return Weight(self.source, shape, self.strides, (offset + start, offset + stop))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for weights that are the same memory."""
        source = id(self.source.tensor) if isinstance(self.source, Held) else self.source
        return source, self.columns


@dataclass(eq=False)
class Term:
    """A row of the op table, applied to terms and numbers.

    Attributes:
        op: The row's name; "value" for a tensor that is given, "weight" for a constant one.
        operands: Terms and numbers.
        attrs: The row's attributes.
        dims: (rows, width), (rows, 1) or a weight's (1, width).
        dtype: The dtype that torch gives.
        node: The number of the node that made it, −1 if none did.
        source: What a "value" is in the recording.
        weight: What a "weight" is.
    """

    op: str
    operands: tuple[Any, ...]
    attrs: dict[str, Any]
    dims: tuple[int, int]
    dtype: torch.dtype
    node: int = -1
    source: Tensorlike | None = None
    weight: Weight | None = None
    users: list[Term] = field(default_factory=list)
    #: Whether something that is no term reads it.
    escapes: bool = False

    @property
    def is_op(self) -> bool:
        """Whether it is computed."""
        return self.op not in ("value", "weight")

    @property
    def is_constant(self) -> bool:
        """Whether it is a weight, or a weight plus a number."""
        return all(x.is_constant for x in self.terms) if self.is_op else self.op == "weight"

    @property
    def terms(self) -> list[Term]:
        """The operands that are terms."""
        return [x for x in self.operands if isinstance(x, Term)]

    def __repr__(self) -> str:
        return f"{self.op}@{self.node}"


class Terms:
    """The terms of a recording.

    Attributes:
        of_value: The term of each tensor that has one. Several tensors may have one term.
        made: The tensor that holds a term's result as torch made it.
    """

    def __init__(self, recording: Recording, rows: int):
        self.recording, self.rows = recording, rows
        self.of_value: dict[Value, Term] = {}
        self.made: dict[Term, Value] = {}
        self.constant = _constant_views(recording)
        self._given: dict[Any, Term] = {}
        self._parts: dict[Value, tuple[Term, int, int]] = {}
        self._written = recording.changing
        for number, node in enumerate(recording.nodes):
            self._read(number, node)
        self._link()

    def all(self) -> list[Term]:
        """Return every computed term, in the order of the recording."""
        return [*self._ops]

    # -- operands

    def operand(self, x: Tensorlike) -> Term | None:
        """Return the term of a tensor, None if its form is none that terms have."""
        if isinstance(x, Value) and x in self.of_value:
            return self.of_value[x]
        if isinstance(x, Value) and x in self._parts:
            return self._part(x)
        meta = self.recording.meta(x)
        if not meta.dtype.is_floating_point or meta.storage in self._written:
            return None
        shape = fixed_shape(meta)
        if shape is None:
            return None
        if isinstance(x, Held) or (isinstance(x, Value) and x.node in self.constant):
            return self._weight_term(x, meta, tuple(shape))
        dims = self._row_form(shape)
        if dims is None:
            return None
        return self._cached(x, lambda: Term("value", (), {}, dims, meta.dtype, source=x))

    def _weight_term(self, x: Tensorlike, meta: Meta, shape: tuple[int, ...]) -> Term | None:
        if not shape or math.prod(shape) != shape[-1]:
            return None
        weight = Weight(x, (1, shape[-1]), (shape[-1], meta.strides[-1]))
        if shape[-1] > 1 and meta.strides[-1] != 1:
            return None
        return self._cached(
            x, lambda: Term("weight", (), {}, (1, shape[-1]), meta.dtype, weight=weight)
        )

    def matrix(self, x: Tensorlike) -> Term | None:
        """Return the term of a weight of two dims."""
        constant = isinstance(x, Held) or (isinstance(x, Value) and x.node in self.constant)
        meta = self.recording.meta(x)
        shape = fixed_shape(meta)
        if not constant or shape is None or len(shape) != 2 or 1 not in meta.strides:
            return None
        weight = Weight(x, tuple(shape), tuple(meta.strides))
        return self._cached(
            ("matrix", x),
            lambda: Term("weight", (), {}, (shape[0], shape[1]), meta.dtype, weight=weight),
        )

    def _cached(self, key: Any, make: Callable[[], Term]) -> Term:
        key = tuple(id(k.tensor) if isinstance(k, Held) else k for k in _as_tuple(key))
        if key not in self._given:
            self._given[key] = make()
        return self._given[key]

    def _row_form(self, shape: Sequence[int]) -> tuple[int, int] | None:
        if not shape or math.prod(shape[:-1]) != self.rows or math.prod(shape) == 0:
            return None
        return self.rows, shape[-1]

    # -- nodes

    def _read(self, number: int, node: Node) -> None:
        if number in self.constant or node.written:
            return
        name = node.name
        if name in SAME_TENSOR:
            self._read_view(number, node)
        elif name in ("aten.split", "aten.split_with_sizes", "aten.slice", "aten.narrow"):
            self._read_parts(number, node)
        elif name in _LOWERINGS:
            meta = node.outputs[0]
            if meta is None or not meta.dtype.is_floating_point or meta.storage in self._written:
                return
            term = _LOWERINGS[name](self, node)
            if term is not None:
                self._define(number, term)

    def _define(self, number: int, term: Term) -> None:
        value = Value(number)
        meta = self.recording.meta(value)
        shape = fixed_shape(meta)
        if shape is None or (self._row_form(shape) != term.dims and not term.is_constant):
            return
        term.node, term.dtype = number, meta.dtype
        for operand in term.terms:  # the product inside addmm
            if operand.is_op and operand.node < 0:
                operand.node = number
        self.of_value[value], self.made[term] = term, value

    def _read_view(self, number: int, node: Node) -> None:
        source, meta = node.args[0], node.outputs[0]
        if not isinstance(source, (Value, Held, Input)) or meta is None:
            return
        shape = fixed_shape(meta)
        if shape is None or not meta.dtype.is_floating_point:
            return
        if isinstance(source, Input) and meta.dtype != self.recording.meta(source).dtype:
            return
        if source in self._parts and self._row_form(shape) is not None:
            _, start, stop = self._parts[source]
            if shape[-1] == stop - start:
                self._parts[Value(number)] = self._parts[source]
            return
        known = self.of_value.get(source) if isinstance(source, Value) else None
        if known is None and self._row_form(shape) is not None:
            known = self.operand(source)
        if known is None and node.name == "aten._to_copy":
            known = self.operand(source)
        if known is None:
            return
        if known.is_constant or self._row_form(shape) == known.dims:
            self.of_value[Value(number)] = known

    def _read_parts(self, number: int, node: Node) -> None:
        """Note which columns of a product each part is."""
        source = node.args[0]
        if not isinstance(source, Value):
            return
        term = self.of_value.get(source)
        if term is None or not _is_product(term) or _is_coded(term):
            return
        shape = fixed_shape(self.recording.meta(source))
        if shape is None:
            return
        if node.name in ("aten.slice", "aten.narrow"):
            dim = node.args[1] if len(node.args) > 1 else 0
            start = node.args[2] if len(node.args) > 2 else 0
            if len(node.args) > 4 and node.args[4] != 1:
                return
        else:
            dim, start = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0), 0
        if dim not in (-1, len(shape) - 1) or not isinstance(start, int):
            return
        start = start + shape[-1] if start < 0 else start
        for output, meta in enumerate(node.outputs):
            assert meta is not None
            width = meta.shape[-1]
            if self._row_form(meta.shape) is None:
                return
            self._parts[Value(number, output)] = term, start, start + width
            start += width

    def _part(self, value: Value) -> Term:
        """Return a product with the columns of one part only."""
        whole, start, stop = self._parts[value]
        key = ("part", id(whole), start, stop)
        if key not in self._given:
            self._given[key] = self._narrowed(whole, start, stop)
        return self._given[key]

    def _narrowed(self, term: Term, start: int, stop: int) -> Term:
        dims = term.dims[0], stop - start
        if term.op == "add":
            product, bias = (self._narrowed(x, start, stop) for x in term.operands)
            return Term("add", (product, bias), {}, dims, term.dtype, term.node)
        if term.op == "weight":
            assert term.weight is not None
            weight = term.weight.narrowed(start, stop)
            return Term("weight", (), {}, dims, term.dtype, weight=weight)
        x, matrix = term.operands
        operands = x, self._narrowed(matrix, start, stop)
        return Term("matmul", operands, {}, dims, term.dtype, term.node)

    def _narrow(
        self, value: Value, readers: dict[Value, list[int]], escapes: Callable[[Value], bool]
    ) -> bool:
        """Let the parts of a product escape, and not all of it, if only terms read the others.

        Args:
            value: What holds a term. Something that is no term reads it, or a view of it.
            readers: The nodes that read a value.
            escapes: Tells whether something that is no term reads a value.

        Returns:
            False if all of it is read.
        """
        whole, waiting = self.of_value[value], [value]
        parts: list[Value] = []
        while waiting:
            for number in readers.get(waiting.pop(), ()):
                outputs = self.recording.nodes[number].outputs
                for x in (Value(number, n) for n in range(len(outputs))):
                    if self.of_value.get(x) is whole:
                        waiting.append(x)  # a view
                    elif x in self._parts:
                        parts.append(x)
                    else:
                        return False
        escaping = {self._part(x): x for x in parts if escapes(x)}
        columns = {n for x in escaping.values() for n in range(*self._parts[x][1:])}
        if len(escaping) < sum(map(escapes, parts)) or len(columns) == whole.dims[1]:
            return False
        for term, x in escaping.items():
            term.escapes = True
            self.made[term] = x
        return True

    # -- who reads what

    def coded_matrix(self, linear: CodedLinear, codes: Sequence[Held]) -> Term:
        """Return the term of a weight (k, n) that is stored in codes."""
        coding = linear.weight.coding
        shape = coding.columns, coding.rows
        weight = Weight(codes[0], shape, (1, shape[0]), coded=linear, codes=tuple(codes))
        return self._cached(
            ("coded", codes[0]),
            lambda: Term("weight", (), {}, shape, coding.dtype, weight=weight),
        )

    def _link(self) -> None:
        """Find out which terms are needed, and who reads them."""
        readers: dict[Value, list[int]] = {}
        for number, node in enumerate(self.recording.nodes):
            for x in node.operands:
                if isinstance(x, Value):
                    readers.setdefault(x, []).append(number)
        escaping: dict[Value, bool] = {}

        def escapes(value: Value) -> bool:
            """Return whether something that is no term reads a tensor, or a view of it."""
            if value not in escaping:
                escaping[value] = any(passes_on(n) for n in readers.get(value, ()))
            return escaping[value]

        def passes_on(number: int) -> bool:
            """Return whether a reader is no term, or a view that something else reads."""
            node = self.recording.nodes[number]
            outputs = [Value(number, n) for n, meta in enumerate(node.outputs) if meta is not None]
            if any(value in self._parts for value in outputs) or node.name in SAME_TENSOR:
                known = [v for v in outputs if v in self._parts or v in self.of_value]
                return len(known) < len(outputs) or any(map(escapes, known))
            return not any(value in self.of_value for value in outputs)

        needed: dict[Term, None] = {}

        def need(term: Term) -> None:
            if term.is_op and term not in needed:
                for operand in term.terms:
                    need(operand)
                    operand.users.append(term)
                needed[term] = None

        # later values first, so that the recursion stays flat
        for value in reversed(self.of_value):
            escapes(value)
        for term, value in [*self.made.items()]:
            term.escapes = escapes(value) and not self._narrow(value, readers, escapes)
        for term in self.made:
            if term.escapes:
                need(term)
        self._ops = sorted(needed, key=_place)


def _place(term: Term) -> tuple[int, int]:
    """Return where a term comes: parts of one product in the order of their columns."""
    weights = [x.weight for x in term.terms if x.weight is not None and x.weight.columns]
    return term.node, weights[0].columns[0] if weights and weights[0].columns else 0


def _as_tuple(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _is_product(term: Term) -> bool:
    """Return whether a term is a product with a weight, or one plus a bias."""
    if term.op == "add":
        first, second = term.operands
        return (
            isinstance(second, Term)
            and second.op == "weight"
            and isinstance(first, Term)
            and first.op == "matmul"
        )
    return term.op == "matmul"


def _is_coded(product: Term) -> bool:
    """Return whether the weight of a product, or of one plus a bias, is stored in codes."""
    if product.op == "add":
        product = product.operands[0]
    weight = product.operands[1].weight
    return weight is not None and weight.coded is not None


#: Ops that return the same elements in the same order.
SAME_TENSOR = frozenset(
    f"aten.{name}"
    for name in (
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "unsqueeze",
        "squeeze",
        "alias",
        "detach",
        "contiguous",
        "clone",
        "_to_copy",
        "expand",
        "lift_fresh",
        "view_as",
    )
)


def _constant_views(recording: Recording) -> set[int]:
    """Return the nodes that are views of held tensors, or of tensors of Python numbers.

    If a forward makes a tensor of numbers in its code, the tensor is held, and lifted to the
    model's device.
    """
    constant: set[int] = set()
    lifted: set[int] = set()
    for number, node in enumerate(recording.nodes):
        if len(operands := node.operands) != 1:
            continue
        (x,) = operands
        of_lifted = _made_in(x, lifted)
        meta = node.outputs[0]
        if meta is not None and meta.storage in recording.changing:
            continue
        is_lifted = node.name == "aten.lift_fresh" and isinstance(x, Held)
        if is_lifted or (node.name == "aten._to_copy" and of_lifted):
            lifted.add(number)
            constant.add(number)
        elif node.name in VIEWS and (isinstance(x, Held) or _made_in(x, constant)):
            constant.add(number)
    return constant


def _made_in(x: Tensorlike, nodes: set[int]) -> bool:
    return isinstance(x, Value) and x.node in nodes


# -- the table: torch's ops as rows of the op table ------------------------------------------------

_LOWERINGS: dict[str, Callable[[Terms, Node], Term | None]] = {}


def _lowering(*names: str) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        _LOWERINGS.update((name if "." in name else f"aten.{name}", function) for name in names)
        return function

    return add


def _elementwise(terms: Terms, node: Node, op: str, *args: Any, **attrs: Any) -> Term | None:
    """Return an elementwise term, None if the operands are not row-wise."""
    meta = node.outputs[0]
    assert meta is not None
    shape = fixed_shape(meta)
    if not shape:
        return None
    dims = terms._row_form(shape) or (1, shape[-1])
    operands: list[Any] = []
    for x in args:
        if isinstance(x, bool) or not isinstance(x, (Value, Input, Held, int, float)):
            return None
        if isinstance(x, (int, float)):
            operands.append(x)
            continue
        given = fixed_shape(terms.recording.meta(x))
        term = terms.operand(x)
        if term is None or given is None or not _broadcasts(given, shape, term):
            return None
        operands.append(term)
    tensors = [x for x in operands if isinstance(x, Term)]
    if all(x.is_constant for x in tensors):
        if op != "add" or len(tensors) != 1 or tensors[0].op != "weight" or len(shape) != 1:
            return None
        dims = tensors[0].dims
    elif terms._row_form(shape) is None:
        return None
    if op in ("add", "mul") and not _computed(operands[0]) and _computed(operands[1]):
        operands.reverse()
    return Term(op, tuple(operands), attrs, dims, meta.dtype)


def _computed(x: Any) -> bool:
    return isinstance(x, Term) and x.is_op


def _broadcasts(given: Sequence[int], shape: Sequence[int], term: Term) -> bool:
    if not term.is_constant:
        given = (1,) * (len(shape) - len(given)) + tuple(given)
    if tuple(given) == tuple(shape):
        return True
    if term.is_constant:
        return given[-1] == shape[-1]
    return len(given) == len(shape) and given[-1] == 1 and given[:-1] == tuple(shape[:-1])


#: Torch ops that are elementwise rows of the op table under another name, or with no arguments.
_ROWS = {
    **{op: op for op in ("div", "neg", "exp", "sqrt", "rsqrt", "sigmoid", "silu", "relu", "tanh")},
    "maximum": "max",
    "minimum": "min",
    "square": "square",
    "mul": "mul",
}


def elementwise_row(node: Node) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """Return the elementwise row that a torch op is: its name, operands and attributes."""
    name, args = node.name.removeprefix("aten."), node.args
    if name in _ROWS:
        return None if node.kwargs else (_ROWS[name], args, {})
    if name in ("add", "sub"):
        is_plain = node.kwargs.get("alpha", 1) == 1 and len(args) == 2
        return (name, args, {}) if is_plain else None
    if name == "pow":
        return _power(args)
    if name == "softplus":  # torch returns x where it is above 20, which rounds to the same
        is_plain = args[1:] in ((), (1,), (1, 20)) and not node.kwargs
        return ("softplus", args[:1], {}) if is_plain else None
    if name == "gelu":
        kind = "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
        return kind, args[:1], {}
    if name in ("clamp", "clamp_min"):
        return _clamp(args)
    return None


def _power(args: Sequence[Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    if len(args) != 2 or not isinstance(args[1], (int, float)):
        return None
    x, exponent = args
    named = {2: "square", -0.5: "rsqrt"}.get(exponent)
    return (named, (x,), {}) if named else ("pow", (x, exponent), {})


def _clamp(args: Sequence[Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    lo, hi = [*args[1:], None, None][:2]
    if not all(b is None or isinstance(b, (int, float)) for b in (lo, hi)):
        return None
    attrs = {"min": -math.inf if lo is None else lo, "max": math.inf if hi is None else hi}
    return "clamp", tuple(args[:1]), attrs


@_lowering(*_ROWS, "add", "sub", "pow", "gelu", "clamp", "clamp_min", "softplus")
def _row(terms: Terms, node: Node) -> Term | None:
    row = elementwise_row(node)
    if row is None:
        return None
    op, args, attrs = row
    term = _elementwise(terms, node, op, *args, **attrs)
    return _as_gelu(_as_norm(term)) if term is not None and op == "mul" else term


@_lowering("mean", "sum")
def _reduction(terms: Terms, node: Node) -> Term | None:
    if len(node.args) < 3 or node.args[2] is not True or node.kwargs.get("dtype") is not None:
        return None
    x = node.args[0]
    shape = fixed_shape(terms.recording.meta(x))
    term = terms.operand(x)
    if term is None or shape is None or term.is_constant:
        return None
    if list(node.args[1]) not in ([-1], [len(shape) - 1]):
        return None
    kind = node.name.removeprefix("aten.")
    return Term("reduction", (term,), {"dim": 1, "kind": kind}, (terms.rows, 1), term.dtype)


@_lowering("mm")
def _mm(terms: Terms, node: Node) -> Term | None:
    return _matmul(terms, *node.args)


@_lowering("addmm")
def _addmm(terms: Terms, node: Node) -> Term | None:
    bias, x, weight = node.args
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
        return None
    product, added = _matmul(terms, x, weight), terms.operand(bias)
    if product is None or added is None or added.op != "weight":
        return None
    return Term("add", (product, added), {}, product.dims, product.dtype)


@_lowering(CODED_LINEAR)
def _coded_linear(terms: Terms, node: Node) -> Term | None:
    x, codes, bias, number = node.args
    left = terms.operand(x)
    if left is None or left.is_constant or not all(isinstance(c, Held) for c in codes):
        return None
    right = terms.coded_matrix(linear_of(number), codes)
    if left.dims[1] != right.dims[0] or terms.recording.meta(x).dtype != right.dtype:
        return None
    product = Term("matmul", (left, right), {}, (terms.rows, right.dims[1]), right.dtype)
    if bias is None:
        return product
    added = terms.operand(bias)
    if added is None or added.op != "weight":
        return None
    return Term("add", (product, added), {}, product.dims, product.dtype)


def _matmul(terms: Terms, x: Any, weight: Any) -> Term | None:
    left, right = terms.operand(x), terms.matrix(weight)
    if left is None or right is None or left.is_constant or left.dims[1] != right.dims[0]:
        return None
    if terms.recording.meta(x).dtype != right.dtype:  # a cast of x has the term of x
        return None
    return Term("matmul", (left, right), {}, (terms.rows, right.dims[1]), right.dtype)


@_lowering("native_layer_norm")
def _layer_norm(terms: Terms, node: Node) -> Term | None:
    x, shape, weight, bias, eps = node.args
    if len(shape) != 1 or not isinstance(weight, (Value, Held)):
        return None
    operands = [terms.operand(t) for t in (x, weight, bias) if t is not None]
    if any(term is None for term in operands):
        return None
    return Term("layer_norm", tuple(operands), {"eps": eps}, operands[0].dims, operands[0].dtype)  # type: ignore[union-attr]


@_lowering("_fused_rms_norm")
def _rms_norm(terms: Terms, node: Node) -> Term | None:
    x, shape, weight, eps = node.args
    if len(shape) != 1 or eps is None:
        return None
    operands = [terms.operand(t) for t in (x, weight) if t is not None]
    if any(term is None for term in operands):
        return None
    return Term("rms_norm", tuple(operands), {"eps": eps}, operands[0].dims, operands[0].dtype)  # type: ignore[union-attr]


def _as_norm(product: Term) -> Term:
    """Return RMSNorm in place of the product that it ends with, if it is one.

    x · rsqrt(mean(x²) + eps) is a norm without a weight. A norm times a weight is one with it.
    """
    first, second = product.operands
    if not isinstance(first, Term) or not isinstance(second, Term):
        return product
    for x, y in ((first, second), (second, first)):
        eps = _root_mean_square_of(y, x)
        if eps is not None:
            return Term("rms_norm", (x,), {"eps": eps}, product.dims, product.dtype)
        if x.op == "rms_norm" and len(x.operands) == 1 and y.is_constant:
            return Term("rms_norm", (*x.operands, y), x.attrs, product.dims, product.dtype)
    return product


def _root_mean_square_of(factor: Term, x: Term) -> float | None:
    """Return eps if `factor` is rsqrt(mean(x²) + eps), else None."""
    if factor.op != "rsqrt" or not isinstance(total := factor.operands[0], Term):
        return None
    if total.op != "add" or not isinstance(eps := total.operands[1], (int, float)):
        return None
    mean = total.operands[0]
    if mean.op != "reduction" or mean.attrs["kind"] != "mean":
        return None
    square = mean.operands[0]
    is_square = square.op == "square" and square.operands[0] is x
    return float(eps) if is_square or (square.op == "mul" and square.operands == (x, x)) else None


def _as_gelu(product: Term) -> Term:
    """Return GELU by tanh in place of the product that it ends with, if it is one.

    It is 0.5 x · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
    """
    if product.op != "mul":
        return product
    x = inner = None
    for half, one_plus in (product.operands, product.operands[::-1]):
        x = _times(half, 0.5)
        inner = _times(_applied("tanh", _plus(one_plus, 1.0)), math.sqrt(2 / math.pi))
        if x is not None and inner is not None:
            break
    if x is None or inner is None or inner.op != "add" or x not in inner.operands:
        return product
    cube = _times(next(t for t in inner.operands if t is not x), 0.044715)
    if cube is None or cube.op != "pow" or cube.operands != (x, 3.0):
        return product
    return Term("gelu_tanh", (x,), {}, product.dims, product.dtype)


def _applied(op: str, term: Any) -> Term | None:
    """Return what `op` is applied to, if it is what a term ends with."""
    return term.operands[0] if isinstance(term, Term) and term.op == op else None


def _with_number(op: str, term: Any, number: float) -> Term | None:
    if not isinstance(term, Term) or term.op != op:
        return None
    x, y = term.operands
    if isinstance(x, Term) and isinstance(y, (int, float)) and math.isclose(y, number):
        return x
    return None


def _times(term: Any, number: float) -> Term | None:
    return _with_number("mul", term, number)


def _plus(term: Any, number: float) -> Term | None:
    return _with_number("add", term, number)
