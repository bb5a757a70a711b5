"""A linear and the residual it is added to, as after attention and after an MLP: residual + scale · norm(x · w (+ b)).

Most families have no norm there, and a scale of 1.
"""

from __future__ import annotations

import torch

from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.patterns.lora import BlockAdapters
from mirage_hf.patterns.parts import normed
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
    """`norm`: of the product; `offset`, `centred`, `norm_bias`: what it is, as in `parts.normed`."""
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    lows = lora.low_inputs(g, rows, (n,)) if lora is not None else []
    y = g.matmul(x, g.new_input((k, n), dtype, strides=(1, k), name="w", constant=True))
    if bias:
        y = g.add(y, g.new_input((1, n), dtype, name="b", constant=True))
    if lora is not None:
        (y,) = lora.apart(g, [y], lows)
    if norm:
        y = normed(g, y, "gamma", eps, offset, centred, norm_bias)
    if scale != 1:
        y = g.mul(y, scale)
    g.mark_output(g.add(y, g.new_input((rows, n), dtype, name="residual")))
    return g


LINEAR_RESIDUAL = Pattern("linear_residual", AXES, build)
