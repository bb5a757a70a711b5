"""A term: one op of the op table over row-wise tensors of a recording."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from mirage_hf.trace.coded_linear import CodedLinear
from mirage_hf.trace.record import Held, Input, Value

Tensorlike = Value | Input | Held

#: The ops that are norms of a row. Their operands are the row and weights.
NORMS = ("rms_norm", "layer_norm")


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor that no step changes: a parameter, or a view of one.

    Attributes:
        source: The parameter, or the value that is a view of it.
        shape: Its shape.
        strides: Its strides.
        columns: The columns [start, stop) that are meant, None for all.
        is_transposed: Whether the two dims of the source are exchanged.
        dtype: The dtype of the source, if each step casts it to the dtype of the term. None if the
            source is not cast.
        coded: The linear whose codes it is decoded from, None for a plain weight.
        codes: The tensors of codes, zero points and scales, in the order of its coding.
    """

    source: Tensorlike
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    columns: tuple[int, int] | None = None
    is_transposed: bool = False
    dtype: torch.dtype | None = None
    coded: CodedLinear | None = None
    codes: tuple[Held, ...] = ()

    def narrowed(self, start: int, stop: int) -> Weight:
        """Return some of the columns."""
        offset = self.columns[0] if self.columns else 0
        shape = (*self.shape[:-1], stop - start)
        return replace(self, shape=shape, columns=(offset + start, offset + stop))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for weights that are the same memory."""
        source = id(self.source.tensor) if isinstance(self.source, Held) else self.source
        return source, self.columns, self.is_transposed


@dataclass(eq=False)
class Term:
    """An op of the op table, applied to terms and numbers.

    Attributes:
        op: The op's name; "value" for a tensor that is given, "weight" for a constant one.
        operands: Terms and numbers.
        attrs: The op's attributes.
        dims: (rows, width), (rows, 1) or a weight's (1, width).
        dtype: The dtype that torch gives.
        node: The number of the node that made it, −1 if none did.
        source: What a "value" is in the recording.
        weight: What a "weight" is.
        users: The needed terms that read it.
        escapes: Whether something that is no term reads it.
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
    escapes: bool = False

    @property
    def is_op(self) -> bool:
        """Whether it is computed."""
        return self.op not in ("value", "weight")

    @cached_property
    def is_constant(self) -> bool:
        """Whether it is a weight, or a weight plus a number."""
        return all(x.is_constant for x in self.terms) if self.is_op else self.op == "weight"

    @property
    def terms(self) -> list[Term]:
        """The operands that are terms."""
        return [x for x in self.operands if isinstance(x, Term)]

    def __repr__(self) -> str:
        return f"{self.op}@{self.node}"


def weight_and_offset(term: Term) -> tuple[Term, float | None]:
    """Return a weight and the number that a term adds to it. Of other terms, the term and None."""
    if term.op == "add":
        for x, number in (term.operands, term.operands[::-1]):
            if isinstance(x, Term) and x.op == "weight" and isinstance(number, (int, float)):
                return x, float(number)
    return term, None


def is_product(term: Term) -> bool:
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


def is_coded(product: Term) -> bool:
    """Return whether the weight of a product, or of one plus a bias, is stored in codes."""
    if product.op == "add":
        product = product.operands[0]
    weight = product.operands[1].weight
    return weight is not None and weight.coded is not None


def columns_of(product: Term, start: int, stop: int) -> Term:
    """Return the term of some columns of a product, or of one plus a bias."""
    dims = product.dims[0], stop - start
    if product.op == "add":
        operands = tuple(columns_of(x, start, stop) for x in product.operands)
        return Term("add", operands, {}, dims, product.dtype, product.node)
    if product.op == "weight":
        assert product.weight is not None
        weight = product.weight.narrowed(start, stop)
        return Term("weight", (), {}, dims, product.dtype, weight=weight)
    x, matrix = product.operands
    operands = x, columns_of(matrix, start, stop)
    return Term("matmul", operands, {}, dims, product.dtype, product.node)
