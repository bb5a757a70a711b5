"""THE op set, declared once: name, kind, shape rule, scalar body or expansion, and an independently written torch oracle.

An elementwise row is a scalar body and its oracle; everything else (search, finite fields, Triton and CUDA text, the
graph's method of that name) reads it from here, so adding one touches this table only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from mirage_hf import errors
from mirage_hf.ops import scalar
from mirage_hf.ops.scalar import ScalarProgram

Dims = tuple[int, ...]

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}
COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the torch dtype of a name or dtype. Errors: DTypeError for one the package does not know."""
    known = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if known not in DTYPES.values():
        raise errors.unknown_dtype(dtype, DTYPES)
    return known


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Op:
    """One row of the table.

    kind: "elementwise" (has `body`), "contract", "reduce", "layout", "bounds" (operands 1 and 2 are int32: [lo, hi) along a
    dim), "composite" (has `expand`, into other rows), or "effect" (writes into its first input). `opaque` elementwise ops
    are keyed random functions to the search and the field; the others are read through their body. `infer(dims…, **attrs)`
    gives the output dims. `oracle` computes the op with torch in the dtype of its inputs, as an eager model would. `formula`
    is for people: what an elementwise op gives for its operands, by their names in `body`.
    """

    name: str
    kind: str
    signature: str
    infer: Callable[..., Dims]
    oracle: Callable[..., torch.Tensor]
    attrs: dict[str, Any] = field(default_factory=dict)
    arity: tuple[int, int] = (1, 1)
    body: Callable[..., Any] | None = None
    opaque: bool = False
    expand: Callable[..., Any] | None = None
    out_dtype: Callable[..., torch.dtype] | None = None
    formula: str = ""

    def program(self, **attrs: float) -> ScalarProgram:
        """The traced body for the given attribute values."""
        assert self.body is not None, f"{self.name} has no scalar body"
        return _traced(self.name, self.body, self.arity[0], tuple(sorted(attrs.items())))


@cache
def _traced(
    name: str, body: Callable[..., Any], arity: int, attrs: tuple[tuple[str, float], ...]
) -> ScalarProgram:
    return scalar.trace(body, arity, **dict(attrs))


OPS: dict[str, Op] = {}


def add_methods(graph: type, apply: str) -> None:
    """Give a class a method for each elementwise op that it does not spell out: `self.<apply>(name, *operands, **attrs)`, with the
    operands' names and the formula for `help`."""
    for row in OPS.values():
        if row.kind == "elementwise" and not hasattr(graph, row.name):
            setattr(graph, row.name, _method(row, graph, apply))


def _method(row: Op, graph: type, apply: str) -> Callable[..., Any]:
    def method(self: Any, *operands: Any, **attrs: Any) -> Any:
        return getattr(self, apply)(row.name, *operands, **attrs)

    assert row.body is not None
    operands = ["self", *list(inspect.signature(row.body).parameters)[: row.arity[0]]]
    method.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in operands]
        + [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=value)
            for n, value in row.attrs.items()
        ]
    )
    method.__name__, method.__qualname__, method.__module__ = (
        row.name,
        f"{graph.__name__}.{row.name}",
        graph.__module__,
    )
    method.__doc__ = f"{row.formula}. Elementwise, with broadcasting; operands are tensors, and numbers beside a tensor."
    return method


def register(op: Op) -> Op:
    """Add a row. Errors: GraphError when the name is taken."""
    if op.name in OPS:
        raise errors.GraphError(f"op {op.name!r} is already in the table; choose another name")
    OPS[op.name] = op
    return op


def lookup(name: str) -> Op:
    if name not in OPS:
        raise errors.unknown_op(name, OPS)
    return OPS[name]


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return (isinstance(x, float) and x == x) or (_is_int(x) and abs(x) < 1 << 1023)


def _all_ints(low: int) -> Callable[[Any], bool]:
    return lambda x: (
        isinstance(x, (tuple, list))
        and len(x) > 0
        and all(_is_int(i) and low <= i < 1 << 63 for i in x)
    )


_ATTRS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "dim": ("an integer", _is_int),
    "start": ("an integer", _is_int),
    "stop": ("an integer", _is_int),
    "dims": ("positive integers", _all_ints(1)),
    "order": ("integers", _all_ints(-(1 << 63))),
    "kind": ("a word", lambda x: isinstance(x, str)),
    "dtype": ("a dtype", lambda x: as_dtype(x) is not None),
    "interleaved": ("True or False", lambda x: isinstance(x, bool)),
}
"""What an attribute of that name must be; any other is a number."""


def check_attrs(op: str, attrs: dict[str, Any]) -> None:
    """Errors: GraphError for an attribute that `op` lacks, misses or has with another type of value."""
    row = lookup(op)
    takes = ", ".join(row.attrs) or "none"
    for name, value in attrs.items():
        if name not in row.attrs:
            raise errors.GraphError(f"{op}: unknown argument {name!r}; it takes {takes}")
        wants, holds = _ATTRS.get(name, ("a number", _is_number))
        if not holds(value):
            raise errors.GraphError(f"{op}: {name} must be {wants}, it is {value!r}")
    for name, default in row.attrs.items():
        if default is None and name not in attrs:
            raise errors.GraphError(f"{op}: misses the argument {name!r}; it takes {takes}")


# -- shape rules ------------------------------------------------------------------------------------------------------


def broadcast(*dims: Dims, op: str = "elementwise") -> Dims:
    try:
        return tuple(torch.broadcast_shapes(*dims))
    except (RuntimeError, TypeError):  # TypeError: beyond 64 bits
        shapes = " and ".join(errors.shape(d) for d in dims)
        raise errors.GraphError(
            f"{op}: shapes {shapes} do not broadcast; sizes must be equal or 1, aligned at the right"
        ) from None


def axis(dim: int, rank: int, op: str) -> int:
    """Return `dim` counted from the left. Errors: GraphError when out of range."""
    if not _is_int(dim) or not -rank <= dim < rank:
        raise errors.GraphError(
            f"{op}: dim {dim!r} is out of range for a tensor of {rank} dims; use {-rank} to {rank - 1}"
        )
    return dim % rank


def _matmul_dims(a: Dims, b: Dims) -> Dims:
    if len(a) < 2 or len(b) < 2:
        raise errors.GraphError(
            f"matmul: needs matrices, got {errors.shape(a)} and {errors.shape(b)}; reshape to two dims or more"
        )
    if a[-1] != b[-2]:
        raise errors.inner_sizes_differ("X", a, "W", b)
    return (*broadcast(a[:-2], b[:-2], op="matmul"), a[-2], b[-1])


def _reduction_dims(x: Dims, dim: int, kind: str = "sum") -> Dims:
    if kind not in ("sum", "mean", "max"):
        raise errors.GraphError(f"reduction: unknown kind {kind!r}; use sum, mean or max")
    d = axis(dim, len(x), "reduction")
    return (*x[:d], 1, *x[d + 1 :])


def _norm_dims(name: str) -> Callable[..., Dims]:
    def infer(x: Dims, *params: Dims, eps: float = 1e-6) -> Dims:
        if not eps > 0:
            raise errors.GraphError(f"{name}: eps must be positive, it is {eps!r}")
        for p in params:
            if p[-1] != x[-1] or math.prod(p) != x[-1] or len(p) > len(x):
                raise errors.GraphError(
                    f"{name}: weight or bias {errors.shape(p)} does not fit the last dim of {errors.shape(x)}; "
                    f"give it as (1, {x[-1]})"
                )
        return x

    return infer


def _softmax_dims(x: Dims, *bounds: Dims, dim: int = -1) -> Dims:
    if bounds:
        return _within_dims(x, *bounds, dim=dim, op="softmax")
    axis(dim, len(x), "softmax")
    return x


def _within_dims(
    x: Dims, lo: Dims, hi: Dims | None = None, *, dim: int, op: str = "within"
) -> Dims:
    d = axis(dim, len(x), op)
    if hi is None:
        raise errors.GraphError(f"{op}: a bound lo needs a bound hi; give both or none")
    fits = (
        lo == hi
        and len(lo) <= len(x)
        and all(n in (1, m) for n, m in zip(reversed(lo), reversed(x), strict=False))
    )
    if not fits or (d >= len(x) - len(lo) and lo[d - len(x)] != 1):
        raise errors.GraphError(
            f"{op}: bounds lo {errors.shape(lo)} and hi {errors.shape(hi)} must be equal in shape, broadcast to "
            f"{errors.shape(x)} aligned at the right, and have size 1 at dim {d}"
        )
    return x


def _concat_dims(*xs: Dims, dim: int) -> Dims:
    d = axis(dim, len(xs[0]), "concat")
    for x in xs[1:]:
        if len(x) != len(xs[0]) or any(i != d and x[i] != xs[0][i] for i in range(len(x))):
            raise errors.GraphError(
                f"concat: {errors.shape(xs[0])} and {errors.shape(x)} differ outside dim {d}"
            )
    return (*xs[0][:d], sum(x[d] for x in xs), *xs[0][d + 1 :])


def _slice_dims(x: Dims, dim: int, start: int, stop: int) -> Dims:
    d = axis(dim, len(x), "slice")
    if not 0 <= start < stop <= x[d]:
        raise errors.GraphError(
            f"slice: [{start}, {stop}) is not a range inside dim {d} of size {x[d]}"
        )
    return (*x[:d], stop - start, *x[d + 1 :])


def _reshape_dims(x: Dims, dims: Sequence[int]) -> Dims:
    if math.prod(dims) != math.prod(x):
        raise errors.GraphError(
            f"reshape: {errors.shape(x)} has {math.prod(x)} elements, {errors.shape(dims)} has {math.prod(dims)}"
        )
    return tuple(dims)


def _permute_dims(x: Dims, order: Sequence[int]) -> Dims:
    if sorted(axis(o, len(x), "permute") for o in order) != list(range(len(x))):
        raise errors.GraphError(f"permute: {tuple(order)} is not an order of {len(x)} dims")
    return tuple(x[o] for o in order)


def _rope_dims(x: Dims, cos: Dims, sin: Dims, interleaved: bool = False) -> Dims:
    if cos != sin or cos[-1] > x[-1] or cos[-1] % 2:
        raise errors.GraphError(
            f"rope: cos {errors.shape(cos)} and sin {errors.shape(sin)} must be equal, of even width at most {x[-1]}"
        )
    if broadcast(x[:-1], cos[:-1], op="rope") != x[:-1]:
        raise errors.GraphError(
            f"rope: cos and sin {errors.shape(cos)} do not broadcast to {errors.shape(x)}; "
            "give them sizes 1 where x has 1"
        )
    return x


def _cache_append_dims(cache: Dims, new: Dims, position: Dims) -> Dims:
    if (
        len(cache) < 2
        or len(new) != len(cache)
        or cache[:-2] != new[:-2]
        or cache[-1] != new[-1]
        or new[-2] > cache[-2]
    ):
        raise errors.GraphError(
            f"cache_append: new rows {errors.shape(new)} do not fit a cache {errors.shape(cache)} "
            "(… slots d, … rows d -> … slots d)"
        )
    allowed = (
        ((1,),)
        if len(cache) == 2
        else tuple(dict.fromkeys(((1,), (cache[0],), (cache[0], *[1] * (len(cache) - 1)))))
    )
    if position not in allowed:
        raise errors.GraphError(
            f"cache_append: position must be {' or '.join(map(errors.shape, allowed))}, it is {errors.shape(position)}"
        )
    return cache


# -- torch oracles that need more than a name ---------------------------------------------------------------------------


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    # transformers' order of rounding: statistics in float32 (float64 stays), cast down, then times the weight
    wide = x if x.dtype == torch.float64 else x.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else y * weight


def _layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    n = x.shape[-1]
    return F.layer_norm(
        x,
        (n,),
        None if weight is None else weight.reshape(n),
        None if bias is None else bias.reshape(n),
        eps,
    )


def _rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    w = cos.shape[-1]
    head, tail = x[..., :w], x[..., w:]
    if interleaved:
        rotated = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    else:
        rotated = torch.cat((-head[..., w // 2 :], head[..., : w // 2]), -1)
    return torch.cat((head * cos + rotated * sin, tail), -1)


def _cache_append(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    rows, position = new.shape[-2], position.reshape(-1)
    slots = position.to(torch.int64)[:, None] + torch.arange(rows, device=new.device)
    if cache.device.type == "cpu" and (int(slots.min()) < 0 or int(slots.max()) >= cache.shape[-2]):
        raise errors.InputError(
            f"cache_append: slots {int(slots.min())} to {int(slots.max())} are outside a cache of "
            f"{cache.shape[-2]} slots; give a longer cache"
        )
    lead = (len(position), *[1] * (cache.dim() - 3)) if cache.dim() > 2 else ()
    index = slots.view(*lead, rows, 1).expand(new.shape)
    return cache.scatter_(-2, index, new)


def _within(x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, dim: int) -> torch.Tensor:
    at = torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    return torch.where((at >= lo) & (at < hi), x, 0.0)


def _softmax(
    x: torch.Tensor, lo: torch.Tensor | None = None, hi: torch.Tensor | None = None, dim: int = -1
) -> torch.Tensor:
    if lo is None or hi is None:
        return torch.softmax(x, dim)
    at = torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    inside = (at >= lo) & (at < hi)
    weights = torch.softmax(torch.where(inside, x, float("-inf")), dim)
    return torch.where(inside, weights, 0.0)  # a row without any is NaN so far


def _ratio(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(y == 0, 0.0, x / y)


def _select(m: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(m != 0, x, y)


_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
}


# -- expansions of composites, in terms of other rows (g is the graph they are built in) ----------------------------------


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
    # in exact arithmetic the shift by the maximum cancels; whether a candidate may go without it is for the numeric check
    e = g.exp(x)
    if lo is not None:
        e = g.within(e, lo, hi, dim=dim)
        return g.ratio(e, g.reduction(e, dim))
    return g.div(e, g.reduction(e, dim))


# -- rows ---------------------------------------------------------------------------------------------------------------


def _elementwise(
    name: str,
    formula: str,
    body: Callable[..., Any],
    oracle: Callable[..., torch.Tensor],
    *,
    arity: int = 1,
    opaque: bool = True,
    attrs: dict[str, Any] | None = None,
) -> Op:
    def infer(*dims: Dims, **_: Any) -> Dims:
        return broadcast(*dims, op=name)

    signature = ", ".join(["..."] * arity) + " -> ..."
    return register(
        Op(
            name,
            "elementwise",
            signature,
            infer,
            oracle,
            attrs or {},
            (arity, arity),
            body,
            opaque,
            formula=formula,
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
_elementwise("silu", "x · sigmoid(x)", lambda x: x / (1.0 + scalar.exp(-x)), F.silu)
_elementwise(
    "gelu", "x · Φ(x), by erf", lambda x: 0.5 * x * (1.0 + scalar.erf(x * math.sqrt(0.5))), F.gelu
)
_elementwise(
    "gelu_tanh",
    "gelu(x), by tanh",
    lambda x: 0.5 * x * (1.0 + scalar.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))),
    lambda x: F.gelu(x, approximate="tanh"),
)
_elementwise("relu", "The larger of x and 0", lambda x: scalar.maximum(x, 0.0), F.relu)
_elementwise("tanh", "tanh(x)", scalar.tanh, torch.tanh)
_elementwise(
    "clamp",
    "x, or `min` where it is below, `max` where it is above",
    lambda x, min, max: scalar.minimum(scalar.maximum(x, min), max),
    lambda x, min, max: torch.clamp(x, min, max),
    attrs={"min": -math.inf, "max": math.inf},
)

_elementwise(
    "ratio",
    "x / y, and 0 where y is 0",
    lambda x, y: scalar.select(y, x / scalar.select(y, y, 1.0), 0.0),
    _ratio,
    arity=2,
    opaque=False,
)
_elementwise("select", "x where m is not 0, else y", scalar.select, _select, arity=3, opaque=False)

register(
    Op(
        "cast",
        "elementwise",
        "... -> ...",
        lambda x, dtype: x,
        lambda x, dtype: x.to(as_dtype(dtype)),
        {"dtype": None},
        body=lambda x, dtype: x,
        out_dtype=lambda x, dtype: as_dtype(dtype),
    )
)
register(
    Op(
        "matmul",
        "contract",
        "... m k, ... k n -> ... m n",
        _matmul_dims,
        torch.matmul,
        arity=(2, 2),
    )
)
register(
    Op(
        "reduction",
        "reduce",
        "... d ... -> ... 1 ...",
        _reduction_dims,
        lambda x, dim, kind="sum": _REDUCTIONS[kind](x, dim, keepdim=True),
        {"dim": None, "kind": "sum"},
    )
)
register(
    Op(
        "rms_norm",
        "composite",
        "... d, 1 d -> ... d",
        _norm_dims("rms_norm"),
        _rms_norm,
        {"eps": 1e-6},
        (1, 2),
        expand=_expand_rms_norm,
    )
)
register(
    Op(
        "layer_norm",
        "composite",
        "... d, 1 d, 1 d -> ... d",
        _norm_dims("layer_norm"),
        _layer_norm,
        {"eps": 1e-6},
        (1, 3),
        expand=_expand_layer_norm,
    )
)
register(
    Op(
        "softmax",
        "composite",
        "... d ..., ... 1 ..., ... 1 ... -> ... d ...",
        _softmax_dims,
        _softmax,
        {"dim": -1},
        (1, 3),
        expand=_expand_softmax,
    )
)
register(
    Op(
        "within",
        "bounds",
        "... d ..., ... 1 ..., ... 1 ... -> ... d ...",
        _within_dims,
        _within,
        {"dim": None},
        (3, 3),
    )
)
register(
    Op(
        "concat",
        "layout",
        "... a ..., ... b ... -> ... a+b ...",
        _concat_dims,
        lambda *xs, dim: torch.cat(xs, dim),
        {"dim": None},
        (1, 1 << 16),
    )
)
register(
    Op(
        "slice",
        "layout",
        "... d ... -> ... stop-start ...",
        _slice_dims,
        lambda x, dim, start, stop: x.narrow(dim, start, stop - start),
        {"dim": None, "start": None, "stop": None},
    )
)
register(
    Op(
        "reshape",
        "layout",
        "... -> dims",
        _reshape_dims,
        lambda x, dims: x.reshape(dims),
        {"dims": None},
    )
)
register(
    Op(
        "permute",
        "layout",
        "... -> order",
        _permute_dims,
        lambda x, order: x.permute(tuple(order)),
        {"order": None},
    )
)
register(
    Op(
        "rope",
        "layout",
        "... d, ... r, ... r -> ... d",
        _rope_dims,
        _rope,
        {"interleaved": False},
        (3, 3),
    )
)
register(
    Op(
        "cache_append",
        "effect",
        "b ... s d, b ... t d, b -> b ... s d",
        _cache_append_dims,
        _cache_append,
        arity=(3, 3),
    )
)
