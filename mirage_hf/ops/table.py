"""The op table: every op of tensor programs, declared once.

An entry has the op's name, kind, shape rule and scalar body or expansion, and an independently
written torch oracle. Search, verification, code generation and the methods of graphs all read this
table.
One entry adds an elementwise op:

    _elementwise(
        "softsign", "x / (1 + |x|)", lambda x: x / (1.0 + scalar.maximum(x, -x)), F.softsign
    )

The op's name is then a method of kernel graphs and block graphs. The search and the code
generators handle the op like any other. If the entry has `activation=True`, a model's MLP may have
the op as its activation.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from mirage_hf import errors
from mirage_hf.ops import attributes, oracles, scalar, shapes
from mirage_hf.ops.dtypes import CODE_DTYPES, COMPUTE_DTYPES, DTYPES, as_dtype, dtype_name
from mirage_hf.ops.op import Op
from mirage_hf.ops.shapes import axis

__all__ = [
    "CODE_DTYPES",
    "COMPUTE_DTYPES",
    "DTYPES",
    "OPS",
    "Op",
    "activations",
    "add_methods",
    "as_dtype",
    "axis",
    "check_attrs",
    "dtype_name",
    "lookup",
    "register",
]


#: The entries by name.
OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add an entry and return it.

    Raises:
        GraphError: If the name is taken.
    """
    if op.name in OPS:
        raise errors.GraphError(f"op {op.name!r} is already in the table; choose another name")
    OPS[op.name] = op
    return op


def lookup(name: str) -> Op:
    """Return the entry called `name`.

    Raises:
        UnknownOpError: If there is none.
    """
    if name not in OPS:
        raise errors.unknown_op(name, OPS)
    return OPS[name]


def activations() -> tuple[str, ...]:
    """Return the names of the ops that models use as activations, in the order of the table."""
    return tuple(entry.name for entry in OPS.values() if entry.activation)


# -- methods of graphs -----------------------------------------------------------------------------


def add_methods(graph: type, apply: str) -> None:
    """Give the class `graph` a method for each elementwise op that it does not define itself.

    The method calls `self.<apply>(name, *operands, **attrs)`. Its signature and docstring let
    `help()` show the operands' names and the formula.
    """
    for entry in OPS.values():
        if entry.kind == "elementwise" and not hasattr(graph, entry.name):
            setattr(graph, entry.name, _method(entry, graph, apply))


def _method(entry: Op, graph: type, apply: str) -> Callable[..., Any]:
    def method(self: Any, *operands: Any, **attrs: Any) -> Any:
        return getattr(self, apply)(entry.name, *operands, **attrs)

    assert entry.body is not None
    names = list(inspect.signature(entry.body).parameters)[: entry.arity[0]]
    operands = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("self", *names)
    ]
    attrs = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in entry.attrs.items()
    ]
    method.__signature__ = inspect.Signature([*operands, *attrs])  # type: ignore[attr-defined]
    method.__name__ = entry.name
    method.__qualname__ = f"{graph.__name__}.{entry.name}"
    method.__module__ = graph.__module__
    method.__doc__ = (
        f"{entry.formula}. Elementwise, with broadcasting. "
        "One operand is a tensor, the others may be numbers."
    )
    return method


def check_attrs(op: str, attrs: dict[str, Any]) -> None:
    """Check the attributes given to an op.

    Raises:
        GraphError: If the op does not take one, misses one, or takes another type of value.
    """
    attributes.check(lookup(op), attrs)


# -- elementwise ops -------------------------------------------------------------------------------


def _elementwise(
    name: str,
    formula: str,
    body: Callable[..., Any],
    oracle: Callable[..., torch.Tensor],
    *,
    arity: int = 1,
    opaque: bool = True,
    attrs: dict[str, Any] | None = None,
    torch_form: str = "",
    activation: bool = False,
) -> Op:
    return register(
        Op(
            name,
            "elementwise",
            signature=", ".join(["..."] * arity) + " -> ...",
            infer=shapes.elementwise(name),
            oracle=oracle,
            attrs=attrs or {},
            arity=(arity, arity),
            body=body,
            opaque=opaque,
            formula=formula,
            torch_form=torch_form,
            activation=activation,
        )
    )


_elementwise("add", "x + y", lambda x, y: x + y, torch.add, arity=2, opaque=False)
_elementwise("sub", "x − y", lambda x, y: x - y, torch.sub, arity=2, opaque=False)
_elementwise("mul", "x · y", lambda x, y: x * y, torch.mul, arity=2, opaque=False)
_elementwise("div", "x / y", lambda x, y: x / y, torch.div, arity=2, opaque=False)
_elementwise("pow", "x to the power of y", scalar.power, torch.pow, arity=2)
_elementwise(
    "max", "The larger of x and y (over a dim: `reduction`)", scalar.maximum, torch.maximum, arity=2
)
_elementwise("min", "The smaller of x and y", scalar.minimum, torch.minimum, arity=2)
_elementwise("exp", "e to the power of x", scalar.exp, torch.exp, opaque=False)
_elementwise("sqrt", "√x", scalar.sqrt, torch.sqrt)
_elementwise("rsqrt", "1 / √x", scalar.rsqrt, torch.rsqrt)
_elementwise("square", "x · x", lambda x: x * x, torch.square, opaque=False)
_elementwise("neg", "−x", lambda x: -x, torch.neg, opaque=False)
_elementwise("sigmoid", "1 / (1 + e^−x)", lambda x: 1.0 / (1.0 + scalar.exp(-x)), torch.sigmoid)
_elementwise(
    "silu", "x · sigmoid(x)", lambda x: x / (1.0 + scalar.exp(-x)), F.silu, activation=True
)
_elementwise(
    "gelu",
    "x · Φ(x), by erf",
    lambda x: 0.5 * x * (1.0 + scalar.erf(x * math.sqrt(0.5))),
    F.gelu,
    activation=True,
)
_elementwise(
    "gelu_tanh",
    "gelu(x), by tanh",
    lambda x: 0.5 * x * (1.0 + scalar.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))),
    lambda x: F.gelu(x, approximate="tanh"),
    torch_form='F.gelu({0}, approximate="tanh")',
    activation=True,
)
_elementwise(
    "relu", "The larger of x and 0", lambda x: scalar.maximum(x, 0.0), F.relu, activation=True
)
_elementwise("tanh", "tanh(x)", scalar.tanh, torch.tanh)
_elementwise(
    "softplus",
    "The logarithm of 1 + e^x",
    lambda x: scalar.maximum(x, 0.0) + scalar.log1p(scalar.exp(scalar.minimum(x, -x))),
    F.softplus,
)
_elementwise(
    "clamp",
    "x, or `min` where it is below, `max` where it is above",
    lambda x, min, max: scalar.minimum(scalar.maximum(x, min), max),
    lambda x, min, max: torch.clamp(x, min, max),
    attrs={"min": -math.inf, "max": math.inf},
    torch_form="torch.clamp({0}, {min}, {max})",
)
_elementwise(
    "ratio",
    "x / y, and 0 where y is 0",
    lambda x, y: scalar.select(y, x / scalar.select(y, y, 1.0), 0.0),
    oracles.ratio,
    arity=2,
    opaque=False,
)
_elementwise(
    "select",
    "x where m is not 0, else y",
    scalar.select,
    oracles.select,
    arity=3,
    opaque=False,
)
_elementwise(
    "lookup",
    "values[i] for i = x rounded down and clamped to the indices of `values`",
    scalar.lookup,
    oracles.lookup,
    attrs={"values": None},
)
_elementwise(
    "bits",
    "`count` bits of the byte x from bit `start` on, as a whole number: (x >> start) mod 2^count",
    scalar.bits,
    oracles.bits,
    arity=2,
    attrs={"count": None},
)
register(
    Op(
        "cast",
        "elementwise",
        signature="... -> ...",
        infer=lambda x, dtype: x,
        oracle=lambda x, dtype: x.to(as_dtype(dtype)),
        attrs={"dtype": None},
        body=lambda x, dtype: x,
        out_dtype=lambda x, dtype: as_dtype(dtype),
        torch_form="({0} if {0}.dtype == torch.float64 else {0}.to(torch.{dtype}))",
    )
)


# -- products, reductions and composites -----------------------------------------------------------
#
# An expansion builds a composite from other ops. `g` is the graph that it is built in.


def _expand_rms_norm(g: Any, x: Any, weight: Any = None, eps: float = 1e-6) -> Any:
    last = len(x.dims) - 1
    y = g.mul(x, g.rsqrt(g.add(g.reduction(g.square(x), last, "mean"), eps)))
    return y if weight is None else g.mul(y, weight)


def _expand_layer_norm(
    g: Any, x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-6
) -> Any:
    last = len(x.dims) - 1
    centred = g.sub(x, g.reduction(x, last, "mean"))
    y = g.mul(centred, g.rsqrt(g.add(g.reduction(g.square(centred), last, "mean"), eps)))
    y = y if weight is None else g.mul(y, weight)
    return y if bias is None else g.add(y, bias)


def _expand_softmax(g: Any, x: Any, lo: Any = None, hi: Any = None, dim: int = -1) -> Any:
    # In exact arithmetic the shift by the maximum cancels. The numeric check decides whether a
    # candidate may leave it out.
    e = g.exp(x)
    if lo is None:
        return g.div(e, g.reduction(e, dim))
    e = g.within(e, lo, hi, dim=dim)
    return g.ratio(e, g.reduction(e, dim))


_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
}

register(
    Op(
        "matmul",
        "contract",
        signature="... m k, ... k n -> ... m n",
        infer=shapes.matmul,
        oracle=torch.matmul,
        arity=(2, 2),
    )
)
register(
    Op(
        "reduction",
        "reduce",
        signature="... d ... -> ... 1 ...",
        infer=shapes.reduction,
        oracle=lambda x, dim, kind="sum": _REDUCTIONS[kind](x, dim, keepdim=True),
        attrs={"dim": None, "kind": "sum"},
    )
)
register(
    Op(
        "rms_norm",
        "composite",
        signature="... d, 1 d -> ... d",
        infer=shapes.norm("rms_norm"),
        oracle=oracles.rms_norm,
        attrs={"eps": 1e-6},
        arity=(1, 2),
        expand=_expand_rms_norm,
    )
)
register(
    Op(
        "layer_norm",
        "composite",
        signature="... d, 1 d, 1 d -> ... d",
        infer=shapes.norm("layer_norm"),
        oracle=oracles.layer_norm,
        attrs={"eps": 1e-6},
        arity=(1, 3),
        expand=_expand_layer_norm,
    )
)
register(
    Op(
        "softmax",
        "composite",
        signature="... d ..., ... 1 ..., ... 1 ... -> ... d ...",
        infer=shapes.softmax,
        oracle=oracles.softmax,
        attrs={"dim": -1},
        arity=(1, 3),
        expand=_expand_softmax,
    )
)
register(
    Op(
        "within",
        "bounds",
        signature="... d ..., ... 1 ..., ... 1 ... -> ... d ...",
        infer=shapes.within,
        oracle=oracles.within,
        attrs={"dim": None},
        arity=(3, 3),
    )
)


# -- layout and effects ----------------------------------------------------------------------------

register(
    Op(
        "concat",
        "layout",
        signature="... a ..., ... b ... -> ... a+b ...",
        infer=shapes.concat,
        oracle=lambda *xs, dim: torch.cat(xs, dim),
        attrs={"dim": None},
        arity=(1, 1 << 16),
    )
)
register(
    Op(
        "slice",
        "layout",
        signature="... d ... -> ... stop-start ...",
        infer=shapes.slice_,
        oracle=lambda x, dim, start, stop: x.narrow(dim, start, stop - start),
        attrs={"dim": None, "start": None, "stop": None},
    )
)
register(
    Op(
        "reshape",
        "layout",
        signature="... -> dims",
        infer=shapes.reshape,
        oracle=lambda x, dims: x.reshape(dims),
        attrs={"dims": None},
    )
)
register(
    Op(
        "permute",
        "layout",
        signature="... -> order",
        infer=shapes.permute,
        oracle=lambda x, order: x.permute(tuple(order)),
        attrs={"order": None},
    )
)
register(
    Op(
        "take",
        "layout",
        signature="... d ..., i... -> ... i... ...",
        infer=shapes.take,
        oracle=oracles.take,
        attrs={"dim": 0},
        arity=(2, 2),
    )
)
register(
    Op(
        "rope",
        "layout",
        signature="... d, ... r, ... r -> ... d",
        infer=shapes.rope,
        oracle=oracles.rope,
        attrs={"interleaved": False},
        arity=(3, 3),
    )
)
register(
    Op(
        "cache_append",
        "effect",
        signature="b ... s d, b ... t d, b -> b ... s d",
        infer=shapes.cache_append,
        oracle=oracles.cache_append,
        arity=(3, 3),
    )
)
