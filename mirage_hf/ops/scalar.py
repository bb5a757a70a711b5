"""Scalar programs: the body of an elementwise op, traced once and read under several algebras.

A body is an ordinary Python function of `Scalar`s. Tracing it gives a `ScalarProgram` over `PRIMITIVES`; an algebra is a
mapping from primitive to callable, so the same body runs on torch tensors, on finite-field elements, or prints as Triton
or CUDA text.
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
    "max",
    "min",
    "pow",
    "select",
)


@dataclass(frozen=True)
class ScalarProgram:
    """A straight-line program of `arity` arguments; node i is ("arg", i), ("const", number) or (primitive, node ids…)."""

    arity: int
    nodes: tuple[tuple[Any, ...], ...]
    result: int

    def evaluate(
        self,
        algebra: Mapping[str, Callable[..., Any]],
        args: Sequence[Any],
        const: Callable[[float], Any] = float,
    ) -> Any:
        """Run under `algebra`; `const` turns a Python number into an element of it."""
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
    """A traced scalar: supports + - * / ** and the functions of this module."""

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

    def __add__(self, o: Scalar | float) -> Scalar:
        return self._node("add", self, o)

    def __radd__(self, o: float) -> Scalar:
        return self._node("add", o, self)

    def __sub__(self, o: Scalar | float) -> Scalar:
        return self._node("sub", self, o)

    def __rsub__(self, o: float) -> Scalar:
        return self._node("sub", o, self)

    def __mul__(self, o: Scalar | float) -> Scalar:
        return self._node("mul", self, o)

    def __rmul__(self, o: float) -> Scalar:
        return self._node("mul", o, self)

    def __truediv__(self, o: Scalar | float) -> Scalar:
        return self._node("div", self, o)

    def __rtruediv__(self, o: float) -> Scalar:
        return self._node("div", o, self)

    def __neg__(self) -> Scalar:
        return self._node("neg", self)


def exp(x: Scalar) -> Scalar:
    return x._node("exp", x)


def sqrt(x: Scalar) -> Scalar:
    return x._node("sqrt", x)


def rsqrt(x: Scalar) -> Scalar:
    return x._node("rsqrt", x)


def tanh(x: Scalar) -> Scalar:
    return x._node("tanh", x)


def erf(x: Scalar) -> Scalar:
    return x._node("erf", x)


def maximum(x: Scalar, y: Scalar | float) -> Scalar:
    return x._node("max", x, y)


def minimum(x: Scalar, y: Scalar | float) -> Scalar:
    return x._node("min", x, y)


def power(x: Scalar, y: Scalar | float) -> Scalar:
    return x._node("pow", x, y)


def select(m: Scalar, x: Scalar | float, y: Scalar | float) -> Scalar:
    return m._node("select", m, x, y)  # x where m is not 0, else y


def trace(body: Callable[..., Scalar], arity: int, **attrs: float) -> ScalarProgram:
    """Trace `body(*scalars, **attrs)` to a program."""
    nodes: list[tuple[Any, ...]] = [("arg", i) for i in range(arity)]
    out = body(*(Scalar(nodes, i) for i in range(arity)), **attrs)
    return ScalarProgram(arity, tuple(nodes), out._index)
