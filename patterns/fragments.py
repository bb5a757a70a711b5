"""Norms, activations and RoPE as fragments of programs, rounded as transformers rounds them."""

from __future__ import annotations

import torch

from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.ops import table

#: The square of ReLU, which is no op of its own (Nemotron, Arcee).
RELU_SQUARED = "relu squared"


def activations() -> tuple[str, ...]:
    """Return the names of activations. A probe runs an MLP's module to find out which one it is.

    They are the ops of the op table with `activation=True`, and the square of ReLU.
    """
    return (*table.activations(), RELU_SQUARED)


def normed(
    g: KernelGraph,
    x: DTensor,
    name: str,
    eps: float,
    offset: float = 0.0,
    centred: bool = False,
    bias: bool = False,
) -> DTensor:
    """Return x normalised over its last dim: x / sqrt(mean(x²) + eps) · (offset + w) + b.

    With an offset it is computed in float32.

    Args:
        g: The graph. w and b become new inputs (1, d) of it.
        x: What is normalised.
        name: The name of w. The name of b ends in "_bias".
        eps: The epsilon.
        offset: What is added to w (Gemma: 1).
        centred: True for LayerNorm, which subtracts mean(x) first. Otherwise RMSNorm.
        bias: Whether there is a b.
    """
    dtype, in_float32 = x.dtype, bool(offset) and x.dtype.itemsize < 4
    names = (name, f"{name}_bias") if bias else (name,)
    operands = [x, *(g.new_input((1, x.dims[-1]), dtype, name=n, constant=True) for n in names)]
    if in_float32:
        operands = [g.cast(operand, torch.float32) for operand in operands]
    x, weight = operands[:2]
    b = operands[2] if bias else None
    weight = g.add(weight, offset) if offset else weight
    if centred:
        y = g.layer_norm(x, weight, eps=eps) if b is None else g.layer_norm(x, weight, b, eps=eps)
    else:
        y = g.rms_norm(x, weight, eps)
        y = y if b is None else g.add(y, b)
    return g.cast(y, dtype) if in_float32 else y


def activated(g: KernelGraph, x: DTensor, activation: str) -> DTensor:
    """Return x after one of `activations()`."""
    if activation == RELU_SQUARED:
        return g.square(g.relu(x))
    return getattr(g, activation)(x)  # type: ignore[no-any-return]


def rotated(
    g: KernelGraph, x: DTensor, cos: DTensor, sin: DTensor, interleaved: bool = False
) -> DTensor:
    """Return RoPE of x, computed in the dtype of cos and sin: that of x, or float32."""
    if cos.dtype == x.dtype:
        return g.rope(x, cos, sin, interleaved=interleaved)
    return g.cast(g.rope(g.cast(x, cos.dtype), cos, sin, interleaved=interleaved), x.dtype)
