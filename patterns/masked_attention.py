"""Attention of one query for each sequence to the keys that a mask lets through.

This is what a model of transformers asks an attention function for. Norms, RoPE and the cache are
the model's. A mask is given twice. The bounds of the keys that it lets through end the loop early.
A bias of 0 or a very small number (`masked_bias`) is right for any mask between these bounds.

optimize() does not look for this block. attention_interface/ asks for it.
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


def masked_bias(dtype: torch.dtype) -> float:
    """Return the bias of a key that must get no weight.

    No score makes up for it, and it stays finite when kernels multiply it.
    """
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
    """Return the program of masked attention.

    Args:
        rows: The number of sequences.
        kv_heads: The heads of keys.
        group: The heads of queries for each head of keys.
        head_dim: The elements of a head of queries and keys.
        value_dim: The elements of a head of values.
        scale: What scores are multiplied by.
        softcap: The bound of scores, cap · tanh(score / cap), or None.
        sinks: Whether each head has a logit that takes a part of its softmax (gpt-oss).
        dtype: The dtype of everything except bounds.
        slots: The number of keys.
        strides: The strides of keys and of values. None: row-major.
    """
    g = new_kernel_graph()
    q = g.new_input((rows, kv_heads, group, head_dim), dtype, name="q")
    key_strides, value_strides = strides
    keys = g.new_input((rows, kv_heads, slots, head_dim), dtype, key_strides, name="keys")
    values = g.new_input((rows, kv_heads, slots, value_dim), dtype, value_strides, name="values")
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
