"""Say what torch ops compute: the same elements again, or an elementwise op of the op table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mirage_hf.trace.record import Node

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

#: Ops without arguments besides their operands: the op of the op table that each one is.
PLAIN_OPS = {
    **{op: op for op in ("div", "neg", "exp", "sqrt", "rsqrt", "sigmoid", "silu", "relu", "tanh")},
    "maximum": "max",
    "minimum": "min",
    "square": "square",
    "mul": "mul",
}

#: All ops that may be an elementwise op of the table, depending on their arguments.
ELEMENTWISE_OPS = (*PLAIN_OPS, "add", "sub", "pow", "gelu", "clamp", "clamp_min", "softplus")


class ElementwiseOp(NamedTuple):
    """An elementwise op of the op table, applied to operands of a recording.

    Attributes:
        op: The op's name.
        operands: Tensors of the recording and numbers.
        attrs: The op's attributes.
    """

    op: str
    operands: tuple[Any, ...]
    attrs: dict[str, Any]


def elementwise_op(node: Node) -> ElementwiseOp | None:
    """Return the elementwise op of the table that a torch op is, None if it is none."""
    name, args = node.name.removeprefix("aten."), node.args
    if name in PLAIN_OPS:
        return None if node.kwargs else ElementwiseOp(PLAIN_OPS[name], args, {})
    if name in ("add", "sub"):
        is_plain = node.kwargs.get("alpha", 1) == 1 and len(args) == 2
        return ElementwiseOp(name, args, {}) if is_plain else None
    if name == "pow":
        return _power(args)
    if name == "softplus":  # torch returns x where it is above 20, which rounds to the same
        is_plain = args[1:] in ((), (1,), (1, 20)) and not node.kwargs
        return ElementwiseOp("softplus", args[:1], {}) if is_plain else None
    if name == "gelu":
        kind = "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
        return ElementwiseOp(kind, args[:1], {})
    if name in ("clamp", "clamp_min"):
        return _clamp(args)
    return None


def _power(args: Sequence[Any]) -> ElementwiseOp | None:
    if len(args) != 2 or not isinstance(args[1], (int, float)):
        return None
    x, exponent = args
    named = {2: "square", -0.5: "rsqrt"}.get(exponent)
    return ElementwiseOp(named, (x,), {}) if named else ElementwiseOp("pow", (x, exponent), {})


def _clamp(args: Sequence[Any]) -> ElementwiseOp | None:
    lo, hi = [*args[1:], None, None][:2]
    if not all(b is None or isinstance(b, (int, float)) for b in (lo, hi)):
        return None
    attrs = {"min": -math.inf if lo is None else lo, "max": math.inf if hi is None else hi}
    return ElementwiseOp("clamp", tuple(args[:1]), attrs)
