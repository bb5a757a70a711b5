"""Attention of one query per sequence to the keys that a mask lets through: what a model of transformers asks an attention function for.

Norms, RoPE and the cache are the model's. A mask is given twice: as bounds of the keys it lets through, which end the loop early, and as
a bias of 0 or SHUT, which is right for any mask between these bounds.
"""

from __future__ import annotations

from typing import Any

import torch

from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.patterns.schema import Pattern

AXES = {
    "q": "rows kv_heads group d",
    "keys": "rows kv_heads slots d",
    "values": "rows kv_heads slots d_values",
    "lo": "rows 1 1 1",
    "hi": "rows 1 1 1",
    "bias": "rows 1 1 slots",
    "sinks": "1 kv_heads group 1",
    "y": "rows kv_heads group d_values",
}


def shut(dtype: torch.dtype) -> float:
    """The bias of a key that no weight may go to: no score reaches it, and what kernels multiply it by leaves it finite."""
    return max(torch.finfo(dtype).min, -1e30)


def build(
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    value_dim: int,
    scale: float,
    softcap: float | None,
    sinks: bool,
    dtype: torch.dtype,
    slots: int,
    strides: Any = (None, None),
) -> KernelGraph:
    """`strides`: those of keys and values, row-major where None."""
    g = new_kernel_graph()
    q = g.new_input((rows, kv_heads, group, head_dim), dtype, name="q")
    keys, values = (
        g.new_input((rows, kv_heads, slots, d), dtype, s, name=name)
        for name, d, s in zip(("keys", "values"), (head_dim, value_dim), strides, strict=True)
    )
    lo, hi = (g.new_input((rows, 1, 1, 1), torch.int32, name=name) for name in ("lo", "hi"))
    bias = g.new_input((rows, 1, 1, slots), dtype, name="bias")
    scores = g.mul(g.matmul(q, g.permute(keys, (0, 1, 3, 2))), scale)
    if softcap is not None:
        scores = g.mul(g.tanh(g.mul(scores, 1 / softcap)), softcap)
    scores = g.add(scores, bias)
    if sinks:
        weights = g.within(g.exp(scores), lo, hi, dim=3)
        sink = g.exp(g.new_input((1, kv_heads, group, 1), dtype, name="sinks", constant=True))
        g.mark_output(g.div(g.matmul(weights, values), g.add(g.reduction(weights, 3), sink)))
    else:
        g.mark_output(g.matmul(g.softmax(scores, -1, lo, hi), values))
    return g


MASKED_ATTENTION = Pattern("masked_attention", AXES, build)
"""Not one of the blocks that optimize() looks for: attention_interface.py asks for it."""
