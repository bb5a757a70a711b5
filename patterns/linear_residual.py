"""A linear and the residual added to it, as after attention and after an MLP: x · w (+ b) + residual."""
from __future__ import annotations

import torch

from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.match.pattern import Pattern

AXES = {"x": "rows k", "w": "k n", "b": "1 n", "residual": "rows n", "y": "rows n"}


def build(rows: int, k: int, n: int, bias: bool, dtype: torch.dtype) -> KernelGraph:
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    y = g.matmul(x, g.new_input((k, n), dtype, strides=(1, k), name="w", constant=True))
    if bias:
        y = g.add(y, g.new_input((1, n), dtype, name="b", constant=True))
    g.mark_output(g.add(y, g.new_input((rows, n), dtype, name="residual")))
    return g


LINEAR_RESIDUAL = Pattern("linear_residual", AXES, build)
