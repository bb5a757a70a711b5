"""Scalar programs: the body of an elementwise op, traced once and evaluated under several algebras.

A body is an ordinary Python function of `Scalar`s. Tracing it gives a `ScalarProgram` over
`PRIMITIVES`. An algebra maps each primitive to a callable. So one body runs on torch tensors and on
elements of finite fields, and prints as Triton or CUDA text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PRIMITIVES = (
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "exp",
    "sqrt",
    "rsqrt",
    "tanh",
    "erf",
    "log1p",
    "max",
    "min",
    "pow",
    "select",
    "lookup",
    "bits",
)


@dataclass(frozen=True)
class ScalarProgram:
    """A straight-line program: nodes that each read earlier ones."""

    #: Number of arguments.
    arity: int

    #: Node i is ("arg", number), ("const", number) or (primitive, node index, …).
    nodes: tuple[tuple[Any, ...], ...]

    #: Index of the node that is the result.
    result: int

    def evaluate(
        self,
        algebra: Mapping[str, Callable[..., Any]],
        args: Sequence[Any],
        const: Callable[[float], Any] = float,
    ) -> Any:
        """Evaluate the program under an algebra.

        Args:
            algebra: The callable of each primitive.
            args: One element per argument.
            const: Converts a Python number to an element.

        Returns:
            The element that is the result.
        """
        values: list[Any] = []
        for op, *operands in self.nodes:
            if op == "arg":
                values.append(args[operands[0]])
            elif op == "const":
                values.append(const(operands[0]))
            else:
                values.append(algebra[op](*(values[i] for i in operands)))
        return values[self.result]


class Scalar:
    """A scalar that records the ops on it: + - * / and the functions of this module."""

    def __init__(self, trace: list[tuple[Any, ...]], index: int):
        self._trace, self._index = trace, index

    def _node(self, op: str, *operands: Scalar | float) -> Scalar:
        ids = []
        for x in operands:
            if not isinstance(x, Scalar):
                self._trace.append(("const", x))
                x = Scalar(self._trace, len(self._trace) - 1)
            ids.append(x._index)
        self._trace.append((op, *ids))
        return Scalar(self._trace, len(self._trace) - 1)

    def __add__(self, other: Scalar | float) -> Scalar:
        return self._node("add", self, other)

    def __radd__(self, other: float) -> Scalar:
        return self._node("add", other, self)

    def __sub__(self, other: Scalar | float) -> Scalar:
        return self._node("sub", self, other)

    def __rsub__(self, other: float) -> Scalar:
        return self._node("sub", other, self)

    def __mul__(self, other: Scalar | float) -> Scalar:
        return self._node("mul", self, other)

    def __rmul__(self, other: float) -> Scalar:
        return self._node("mul", other, self)

    def __truediv__(self, other: Scalar | float) -> Scalar:
        return self._node("div", self, other)

    def __rtruediv__(self, other: float) -> Scalar:
        return self._node("div", other, self)

    def __neg__(self) -> Scalar:
        return self._node("neg", self)


def exp(x: Scalar) -> Scalar:
    """Return e to the power of x."""
    return x._node("exp", x)


def sqrt(x: Scalar) -> Scalar:
    """Return the square root of x."""
    return x._node("sqrt", x)


def rsqrt(x: Scalar) -> Scalar:
    """Return 1 / sqrt(x)."""
    return x._node("rsqrt", x)


def tanh(x: Scalar) -> Scalar:
    """Return the hyperbolic tangent of x."""
    return x._node("tanh", x)


def erf(x: Scalar) -> Scalar:
    """Return the error function of x."""
    return x._node("erf", x)


def log1p(x: Scalar) -> Scalar:
    """Return the natural logarithm of 1 + x."""
    return x._node("log1p", x)


def maximum(x: Scalar, y: Scalar | float) -> Scalar:
    """Return the larger of x and y."""
    return x._node("max", x, y)


def minimum(x: Scalar, y: Scalar | float) -> Scalar:
    """Return the smaller of x and y."""
    return x._node("min", x, y)


def power(x: Scalar, y: Scalar | float) -> Scalar:
    """Return x to the power of y."""
    return x._node("pow", x, y)


def select(m: Scalar, x: Scalar | float, y: Scalar | float) -> Scalar:
    """Return x where m is not 0, else y."""
    return m._node("select", m, x, y)


def lookup(x: Scalar, values: Sequence[float]) -> Scalar:
    """Return values[i], where i is x rounded down and clamped to the indices of `values`."""
    return x._node("lookup", x, *values)


def bits(x: Scalar, start: Scalar | float, count: int) -> Scalar:
    """Return `count` bits of the byte x from bit `start` on, as a whole number.

    Both are rounded down. x is taken modulo 256 and `start` modulo 8. NaN and infinity count as 0.
    """
    return x._node("bits", x, start, count)


def trace(body: Callable[..., Scalar], arity: int, **attrs: Any) -> ScalarProgram:
    """Trace `body(*scalars, **attrs)`, a function of `arity` scalars, to a program."""
    nodes: list[tuple[Any, ...]] = [("arg", i) for i in range(arity)]
    out = body(*(Scalar(nodes, i) for i in range(arity)), **attrs)
    return ScalarProgram(arity, tuple(nodes), out._index)
