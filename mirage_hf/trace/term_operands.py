"""The terms of the tensors that recorded ops read: values, rows of weights, and matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf.trace.coded_linear import CodedLinear
from mirage_hf.trace.record import VIEWS, Held, Meta, Recording, Value
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.term import Tensorlike, Term, Weight, columns_of


@dataclass(frozen=True)
class ColumnSlice:
    """Columns [start, stop) of a product."""

    product: Term
    start: int
    stop: int

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.stop - self.start


class TermOperands:
    """The terms of the tensors of a recording. Each tensor has one term.

    Attributes:
        recording: The recording.
        rows: The rows of row-wise tensors.
        of_value: The term of each value that was read as one. Several values may have one term.
        slices: The values that are columns of a product.
        constant: The nodes that are views of weights.
    """

    def __init__(self, recording: Recording, rows: int):
        self.recording, self.rows = recording, rows
        self.of_value: dict[Value, Term] = {}
        self.slices: dict[Value, ColumnSlice] = {}
        self.constant = _constant_views(recording)
        self._casts = _casts_of_matrices(recording)
        self._made: dict[Any, Term] = {}

    def operand(self, x: Tensorlike) -> Term | None:
        """Return the term of a tensor, None if its form is none that terms have."""
        if isinstance(x, Value) and x in self.of_value:
            return self.of_value[x]
        if isinstance(x, Value) and x in self.slices:
            return self.slice_of(x)
        meta = self.recording.meta(x)
        if not meta.dtype.is_floating_point or meta.storage in self.recording.changing:
            return None
        shape = fixed_shape(meta)
        if shape is None:
            return None
        if self._is_constant(x):
            return self._weight_row(x, meta, tuple(shape))
        dims = self.row_form(shape)
        if dims is None:
            return None
        return self._once(x, lambda: Term("value", (), {}, dims, meta.dtype, source=x))

    def matrix(self, x: Tensorlike) -> Term | None:
        """Return the term of a weight of two dims, or of its cast to another dtype."""
        meta = self.recording.meta(x)
        shape = fixed_shape(meta)
        if shape is None or len(shape) != 2:
            return None
        if isinstance(x, Value) and x in self._casts:
            weight = self._casts[x]
        elif self._is_constant(x):
            weight = Weight(x, tuple(shape), tuple(meta.strides))
        else:
            return None
        if 1 not in weight.strides:
            return None
        dims = shape[0], shape[1]
        return self._once(
            ("matrix", x), lambda: Term("weight", (), {}, dims, meta.dtype, weight=weight)
        )

    def coded_matrix(self, linear: CodedLinear, codes: Sequence[Held]) -> Term:
        """Return the term of a weight (k, n) that is stored in codes."""
        coding = linear.weight.coding
        shape = coding.columns, coding.rows
        weight = Weight(codes[0], shape, (1, shape[0]), coded=linear, codes=tuple(codes))
        return self._once(
            ("coded", codes[0]), lambda: Term("weight", (), {}, shape, coding.dtype, weight=weight)
        )

    def slice_of(self, value: Value) -> Term:
        """Return the term of a value that is columns of a product."""
        one = self.slices[value]
        key = "slice", id(one.product), one.start, one.stop
        return self._once(key, lambda: columns_of(one.product, one.start, one.stop))

    def row_form(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return (rows, width) of a row-wise tensor, None for tensors of other shapes."""
        if not shape or math.prod(shape[:-1]) != self.rows or math.prod(shape) == 0:
            return None
        return self.rows, shape[-1]

    def _is_constant(self, x: Tensorlike) -> bool:
        return isinstance(x, Held) or _made_in(x, self.constant)

    def _weight_row(self, x: Tensorlike, meta: Meta, shape: tuple[int, ...]) -> Term | None:
        """Return the term of a weight that is one row, None for other weights."""
        if not shape or math.prod(shape) != shape[-1]:
            return None
        if shape[-1] > 1 and meta.strides[-1] != 1:
            return None
        dims = 1, shape[-1]
        weight = Weight(x, dims, (shape[-1], meta.strides[-1]))
        return self._once(x, lambda: Term("weight", (), {}, dims, meta.dtype, weight=weight))

    def _once(self, key: Any, make: Callable[[], Term]) -> Term:
        """Return the term that was made for a key, or make it."""
        keys = key if isinstance(key, tuple) else (key,)
        key = tuple(id(k.tensor) if isinstance(k, Held) else k for k in keys)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


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


def _casts_of_matrices(recording: Recording) -> dict[Value, Weight]:
    """Return the values that are casts of a parameter of two dims, or transposes of such a cast.

    Some routers cast their weight in each step.
    """
    found: dict[Value, Weight] = {}
    for number, node in enumerate(recording.nodes):
        if node.name not in ("aten._to_copy", "aten.t") or len(node.operands) != 1:
            continue
        (x,), value = node.operands, Value(number)
        if node.name == "aten.t" and isinstance(x, Value) and x in found:
            one = found[x]
            found[value] = replace(
                one,
                shape=one.shape[::-1],
                strides=one.strides[::-1],
                is_transposed=not one.is_transposed,
            )
        elif node.name == "aten._to_copy" and isinstance(x, Held):
            before, after = recording.meta(x), recording.meta(value)
            shape = fixed_shape(before)
            is_cast = (
                before.dtype.is_floating_point
                and after.dtype.is_floating_point
                and before.device == after.device
                and before.storage not in recording.changing
            )
            if shape is not None and len(shape) == 2 and is_cast:
                found[value] = Weight(x, tuple(shape), tuple(before.strides), dtype=before.dtype)
    return found


def _made_in(x: Tensorlike, nodes: set[int]) -> bool:
    return isinstance(x, Value) and x.node in nodes
