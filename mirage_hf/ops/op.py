"""What the op table says of one op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.ops import scalar, shapes
from mirage_hf.ops.scalar import ScalarProgram


@dataclass(frozen=True)
class Op:
    """One entry of the table."""

    name: str

    #: The sort of op:
    #:
    #: - "elementwise": computes `body` for each element, with broadcasting.
    #: - "contract": multiplies and sums (matmul).
    #: - "reduce": reduces one dim.
    #: - "layout": moves elements without computing, except rope.
    #: - "bounds": keeps what is inside [lo, hi) along a dim; operands 1 and 2 are int32 tensors lo,
    #:   hi.
    #: - "composite": is built from other ops, see `expand`.
    #: - "effect": writes into its first operand.
    kind: str

    #: Shapes of operands and result, for messages.
    signature: str

    #: Shape rule: dims of the operands, then attributes by name, to dims of the result.
    infer: shapes.ShapeRule

    #: Computes the op with torch, in the dtype of its inputs, as an eager model would.
    oracle: Callable[..., torch.Tensor]

    #: Attributes by name, with their defaults. An attribute with the default None must be given.
    attrs: dict[str, Any] = field(default_factory=dict)

    #: Least and largest number of operands.
    arity: tuple[int, int] = (1, 1)

    #: Elementwise ops: the function of `scalar.Scalar`s that is computed for each element.
    body: Callable[..., Any] | None = None

    #: Elementwise ops: True if search and proof treat the op as an unknown function of its
    #: operands. Otherwise they read its body.
    opaque: bool = False

    #: Composites: builds it from other ops, given a graph, operands and attributes.
    expand: Callable[..., Any] | None = None

    #: Returns the result's dtype from operands and attributes. None: it is that of the operands.
    out_dtype: Callable[..., torch.dtype] | None = None

    #: Elementwise ops: the result as a formula of the operands as `body` names them, for `help()`.
    formula: str = ""

    #: The op as torch code for generated files: {0}, {1}, … are operands, other names in braces are
    #: attributes. Empty: the oracle is called, which must be a function of torch or have a name.
    torch_form: str = ""

    #: True for functions of one operand that models use as the activation of an MLP.
    activation: bool = False

    def __post_init__(self) -> None:
        unnamed = getattr(self.oracle, "__name__", "<lambda>") == "<lambda>"
        if self.kind == "elementwise" and unnamed and not self.torch_form:
            raise errors.GraphError(
                f"op {self.name!r}: its oracle has no name that generated files could call; "
                "give a named function, or torch_form"
            )

    def program(self, **attrs: Any) -> ScalarProgram:
        """Return the traced body for these attribute values."""
        assert self.body is not None, f"{self.name} has no scalar body"
        return _traced(self.name, self.body, self.arity[0], tuple(sorted(attrs.items())))


@cache
def _traced(
    name: str, body: Callable[..., Any], arity: int, attrs: tuple[tuple[str, Any], ...]
) -> ScalarProgram:
    return scalar.trace(body, arity, **dict(attrs))
