"""Norms, activations and RoPE as parts of blocks' programs, rounded as transformers rounds them."""

from __future__ import annotations

import torch

from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.ops import table

RELU_SQUARED = "relu squared"
ACTIVATIONS = (*table.activations(), RELU_SQUARED)
"""What an MLP's activation module may turn out to be: it is run on a probe, its name is not asked."""


def normed(
    g: KernelGraph,
    x: DTensor,
    name: str,
    eps: float,
    offset: float = 0.0,
    centred: bool = False,
    bias: bool = False,
) -> DTensor:
    """RMSNorm over the last dim, x / sqrt(mean(x²) + eps) · (offset + w), where `centred` LayerNorm: of x − mean(x); then + b where there
    is a bias. w and b are new inputs (1, d). What needs an offset adds it in float32."""
    dtype, wide = x.dtype, bool(offset) and x.dtype.itemsize < 4
    given = [
        g.new_input((1, x.dims[-1]), dtype, name=n, constant=True)
        for n in (name, *([f"{name}_bias"] if bias else []))
    ]
    if wide:
        x, *given = (g.cast(t, torch.float32) for t in (x, *given))
    weight, *biases = given
    weight = g.add(weight, offset) if offset else weight
    if centred:
        y = g.layer_norm(x, weight, *biases, eps=eps)
    else:
        y = g.rms_norm(x, weight, eps)
        y = g.add(y, *biases) if biases else y
    return g.cast(y, dtype) if wide else y


def activated(g: KernelGraph, x: DTensor, activation: str) -> DTensor:
    """x by one of ACTIVATIONS."""
    return g.square(g.relu(x)) if activation == RELU_SQUARED else getattr(g, activation)(x)  # type: ignore[no-any-return]


def rotated(
    g: KernelGraph, x: DTensor, cos: DTensor, sin: DTensor, interleaved: bool = False
) -> DTensor:
    """RoPE by tables in the dtype of x, or in float32, in which it is then computed."""
    if cos.dtype == x.dtype:
        return g.rope(x, cos, sin, interleaved=interleaved)
    return g.cast(g.rope(g.cast(x, cos.dtype), cos, sin, interleaved=interleaved), x.dtype)
