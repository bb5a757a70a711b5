"""The table of torch ops as ops of the op table. A torch op that is not in it has no term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mirage_hf.trace.coded_linear import CODED_LINEAR, linear_of
from mirage_hf.trace.composites import as_composite
from mirage_hf.trace.record import Held, Input, Node, Value
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.term import Term
from mirage_hf.trace.term_operands import TermOperands
from mirage_hf.trace.torch_ops import ELEMENTWISE_OPS, elementwise_op

#: Returns the term of a node, None if it has none.
Lowering = Callable[[TermOperands, Node], Term | None]

_LOWERINGS: dict[str, Lowering] = {}


def lower(terms: TermOperands, node: Node) -> Term | None:
    """Return the term of a node, None if it has none."""
    lowering = _LOWERINGS.get(node.name)
    return None if lowering is None else lowering(terms, node)


def _lowering(*names: str) -> Callable[[Lowering], Lowering]:
    def add(function: Lowering) -> Lowering:
        _LOWERINGS.update((name if "." in name else f"aten.{name}", function) for name in names)
        return function

    return add


# -- elementwise ops and reductions ----------------------------------------------------------------


@_lowering(*ELEMENTWISE_OPS)
def _elementwise(terms: TermOperands, node: Node) -> Term | None:
    """Return an elementwise term, None if the operands are not row-wise."""
    known, meta = elementwise_op(node), node.outputs[0]
    if known is None:
        return None
    assert meta is not None
    shape = fixed_shape(meta)
    if not shape:
        return None
    operands = _elementwise_operands(terms, known.operands, shape)
    if operands is None:
        return None
    dims = _dims_of_elementwise(terms, known.op, operands, shape)
    if dims is None:
        return None
    if known.op in ("add", "mul") and not _is_computed(operands[0]) and _is_computed(operands[1]):
        operands.reverse()
    term = Term(known.op, tuple(operands), known.attrs, dims, meta.dtype)
    return as_composite(term) if known.op == "mul" else term


def _elementwise_operands(
    terms: TermOperands, args: Sequence[Any], shape: Sequence[int]
) -> list[Any] | None:
    """Return arguments as terms and numbers, None if one is not row-wise."""
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
    return operands


def _dims_of_elementwise(
    terms: TermOperands, op: str, operands: Sequence[Any], shape: Sequence[int]
) -> tuple[int, int] | None:
    """Return the dims of an elementwise term, None if it is not row-wise.

    A function of weights alone is a term only if it is a row of a weight plus a number.
    """
    tensors = [x for x in operands if isinstance(x, Term)]
    if not all(x.is_constant for x in tensors):
        return terms.row_form(shape)
    if op != "add" or len(tensors) != 1 or tensors[0].op != "weight" or len(shape) != 1:
        return None
    return tensors[0].dims


def _is_computed(x: Any) -> bool:
    return isinstance(x, Term) and x.is_op


def _broadcasts(given: Sequence[int], shape: Sequence[int], term: Term) -> bool:
    """Return whether an operand has the result's shape, or repeats along rows or columns."""
    if not term.is_constant:
        given = (1,) * (len(shape) - len(given)) + tuple(given)
    if tuple(given) == tuple(shape):
        return True
    if term.is_constant:
        return given[-1] == shape[-1]
    return len(given) == len(shape) and given[-1] == 1 and given[:-1] == tuple(shape[:-1])


@_lowering("mean", "sum")
def _reduction(terms: TermOperands, node: Node) -> Term | None:
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


# -- products with weights -------------------------------------------------------------------------


@_lowering("mm")
def _mm(terms: TermOperands, node: Node) -> Term | None:
    x, weight = node.args
    return _product(terms, x, terms.matrix(weight))


@_lowering("addmm")
def _addmm(terms: TermOperands, node: Node) -> Term | None:
    bias, x, weight = node.args
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
        return None
    return _with_bias(terms, _product(terms, x, terms.matrix(weight)), bias)


@_lowering(CODED_LINEAR)
def _coded_linear(terms: TermOperands, node: Node) -> Term | None:
    x, codes, bias, number = node.args
    if not all(isinstance(c, Held) for c in codes):
        return None
    product = _product(terms, x, terms.coded_matrix(linear_of(number), codes))
    return product if bias is None else _with_bias(terms, product, bias)


def _product(terms: TermOperands, x: Any, weight: Term | None) -> Term | None:
    left = terms.operand(x)
    if left is None or weight is None or left.is_constant or left.dims[1] != weight.dims[0]:
        return None
    if terms.recording.meta(x).dtype != weight.dtype:  # a cast of x has the term of x
        return None
    return Term("matmul", (left, weight), {}, (terms.rows, weight.dims[1]), weight.dtype)


def _with_bias(terms: TermOperands, product: Term | None, bias: Any) -> Term | None:
    added = terms.operand(bias)
    if product is None or added is None or added.op != "weight":
        return None
    return Term("add", (product, added), {}, product.dims, product.dtype)


# -- norms -----------------------------------------------------------------------------------------


@_lowering("native_layer_norm")
def _layer_norm(terms: TermOperands, node: Node) -> Term | None:
    x, shape, weight, bias, eps = node.args
    if not isinstance(weight, (Value, Held)):
        return None
    return _norm(terms, "layer_norm", (x, weight, bias), shape, eps)


@_lowering("_fused_rms_norm")
def _rms_norm(terms: TermOperands, node: Node) -> Term | None:
    x, shape, weight, eps = node.args
    return None if eps is None else _norm(terms, "rms_norm", (x, weight), shape, eps)


def _norm(
    terms: TermOperands, op: str, tensors: Sequence[Any], shape: Sequence[int], eps: float
) -> Term | None:
    """Return a norm of rows. Weight and bias may be None."""
    if len(shape) != 1:
        return None
    operands: list[Term] = []
    for x in tensors:
        term = None if x is None else terms.operand(x)
        if x is not None and term is None:
            return None
        operands += [] if term is None else [term]
    return Term(op, tuple(operands), {"eps": eps}, operands[0].dims, operands[0].dtype)
