"""A linear and the residual that it is added to: residual + scale · norm(x · w (+ b)).

Layers have one after attention and one after the MLP. Most families have no norm there, and a scale
of 1.
"""

from __future__ import annotations

import torch

from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.patterns.fragments import normed
from mirage_hf.patterns.lora import BlockAdapters
from mirage_hf.patterns.schema import Pattern

AXES = {
    "x": "rows k",
    "w": "k n",
    "b": "1 n",
    "gamma": "1 n",
    "gamma_bias": "1 n",
    "residual": "rows n",
    "y": "rows n",
    "low0": "rows r",
    "b0_up": "r n",
}


def build(
    rows: int,
    k: int,
    n: int,
    bias: bool,
    dtype: torch.dtype,
    norm: bool = False,
    eps: float = 1e-6,
    offset: float = 0.0,
    scale: float = 1.0,
    centred: bool = False,
    norm_bias: bool = False,
    lora: BlockAdapters | None = None,
) -> KernelGraph:
    """Return the program of a linear and the residual that it is added to.

    Args:
        rows: The number of rows.
        k: The width of x.
        n: The outputs of the linear.
        bias: Whether it has a bias.
        dtype: The dtype of everything.
        norm: Whether the product is normalised.
        eps: The epsilon of that norm.
        offset: As in `parts.normed`.
        scale: What is added is multiplied by this (Granite's residual multiplier).
        centred: As in `parts.normed`.
        norm_bias: Whether the norm has a bias.
        lora: The adapter of the linear, if it has one.
    """
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    lows = lora.low_inputs(g, rows, (n,)) if lora is not None else []
    y = g.matmul(x, g.new_input((k, n), dtype, strides=(1, k), name="w", constant=True))
    if bias:
        y = g.add(y, g.new_input((1, n), dtype, name="b", constant=True))
    if lora is not None:
        (y,) = lora.add_to_each(g, [y], lows)
    if norm:
        y = normed(g, y, "gamma", eps, offset, centred, norm_bias)
    if scale != 1:
        y = g.mul(y, scale)
    g.mark_output(g.add(y, g.new_input((rows, n), dtype, name="residual")))
    return g


LINEAR_RESIDUAL = Pattern("linear_residual", AXES, build)
