"""Attention of a decoding step: one new token per sequence, over a cache that its key and value are appended to in place.

q, k and v are views of one row of packed projections. Norms of each head (Qwen3), then RoPE, then softmax over the cached keys in
[lo, slot) and the new one, which goes to slot `slot`; left padding and sliding windows are lower bounds.
"""
from __future__ import annotations

import torch

from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.match.pattern import Block, Pattern

AXES = {"q": "rows kv_heads group d", "new_keys": "rows kv_heads 1 d", "new_values": "rows kv_heads 1 d",
        "cos": "rows 1 1 d", "sin": "rows 1 1 d", "keys": "rows kv_heads slots d",
        "values": "rows kv_heads slots d", "lo": "rows 1 1 1", "slot": "rows 1 1 1",
        "q_norm": "1 d", "k_norm": "1 d", "y": "rows kv_heads group d"}

REFERENCE_SLOTS = 256
"""Slots of the cache that kernels are searched at, and tuned at for short caches. A µGraph serves every number of them, and its loop only
visits what is within bounds."""
LONG_SLOTS = 4096
"""Slots that they are tuned at for long caches."""
LONG_FROM = 1024
"""What is a long cache. Between the two sizes that are tuned; where the better one changes was not measured."""


def build(rows: int, kv_heads: int, group: int, head_dim: int, scale: float, norm: bool, eps: float, dtype: torch.dtype,
          slots: int = REFERENCE_SLOTS) -> KernelGraph:
    g, d = new_kernel_graph(), head_dim
    packed = kv_heads * (group + 2) * d
    q = g.new_input((rows, kv_heads, group, d), dtype, (packed, group * d, d, 1), name="q")
    k, v = (g.new_input((rows, kv_heads, 1, d), dtype, (packed, d, d, 1), name=name) for name in ("new_keys", "new_values"))
    cos, sin = (g.new_input((rows, 1, 1, d), dtype, name=name) for name in ("cos", "sin"))
    keys, values = (g.new_input((rows, kv_heads, slots, d), dtype, name=name) for name in ("keys", "values"))
    lo, slot = (g.new_input((rows, 1, 1, 1), torch.int32, name=name) for name in ("lo", "slot"))
    if norm:
        q, k = (g.rms_norm(x, g.new_input((1, d), dtype, name=name, constant=True), eps) for x, name in ((q, "q_norm"), (k, "k_norm")))
    q, k = (g.rope(x, cos, sin) for x in (q, k))
    old, new = (g.exp(g.mul(g.matmul(q, g.permute(x, (0, 1, 3, 2))), scale)) for x in (keys, k))
    old = g.within(old, lo, slot, dim=3)
    y = g.div(g.add(g.matmul(old, values), g.matmul(new, v)), g.add(g.reduction(old, 3), g.reduction(new, 3)))
    g.mark_output(y, g.cache_append(keys, k, slot), g.cache_append(values, v, slot))
    return g


def for_long_caches(block: Block) -> Block:
    """The same block at LONG_SLOTS."""
    return block.pattern.block(**{**dict(block.sizes), "slots": LONG_SLOTS})


ATTENTION = Pattern("attention", AXES, build)
