"""A PEFT linear with one plain adapter, unmerged: x · w (+ bias) + scaling · (x · a) · b, reading x once.

PEFT keeps adapters of half-precision models in float32 unless told otherwise, and adds in the wider dtype; so does this.
"""
from __future__ import annotations

import torch

from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.match.pattern import Pattern

AXES = {"x": "rows k", "w": "k n", "bias": "1 n", "a": "k r", "b": "r n", "y": "rows n"}


def build(rows: int, k: int, n: int, r: int, bias: bool, scaling: float, dtype: torch.dtype,
          adapter_dtype: torch.dtype) -> KernelGraph:
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    y = g.matmul(x, g.new_input((k, n), dtype, strides=(1, k), name="w", constant=True))
    if bias:
        y = g.add(y, g.new_input((1, n), dtype, name="bias", constant=True))
    a = g.new_input((k, r), adapter_dtype, strides=(1, k), name="a", constant=True)
    b = g.new_input((r, n), adapter_dtype, strides=(1, r), name="b", constant=True)
    wider = torch.promote_types(dtype, adapter_dtype)
    delta = g.mul(g.matmul(g.matmul(x if dtype == adapter_dtype else g.cast(x, adapter_dtype), a), b), scaling)
    y = g.add(y if dtype == wider else g.cast(y, wider), delta if adapter_dtype == wider else g.cast(delta, wider))
    g.mark_output(y if dtype == wider else g.cast(y, dtype))
    return g


LORA = Pattern("lora", AXES, build)
