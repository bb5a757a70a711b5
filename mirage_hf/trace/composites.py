"""Recognize RMSNorm and GELU by tanh in the products that they end with."""

from __future__ import annotations

import math
from typing import Any

from mirage_hf.trace.term import Term


def as_composite(product: Term) -> Term:
    """Return the RMSNorm or GELU that a product ends, or the product itself."""
    return _as_gelu(_as_norm(product))


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
    """Return the operand of a term that is `op` of one operand, else None."""
    return term.operands[0] if isinstance(term, Term) and term.op == op else None


def _with_number(op: str, term: Any, number: float) -> Term | None:
    """Return x if a term is `op` of x and a number, else None."""
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
