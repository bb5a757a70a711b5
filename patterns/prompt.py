"""What the layers of a whole prompt do between the library's products: norms, q and k turned and put into the cache, an MLP's gate.

These are not blocks that optimize() looks for: decode/prefill.py asks for them, for layers whose blocks are matched.
"""
from __future__ import annotations

import torch

from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.match.pattern import Pattern


def build_norm(rows: int, k: int, eps: float, dtype: torch.dtype) -> KernelGraph:
    g = new_kernel_graph()
    g.mark_output(g.rms_norm(g.new_input((rows, k), dtype, name="x"), g.new_input((1, k), dtype, name="gamma", constant=True), eps))
    return g


def build_rotation(rows: int, tokens: int, kv_heads: int, group: int, head_dim: int, norm: bool, eps: float, dtype: torch.dtype,
                   slots: int) -> KernelGraph:
    """q and k are views of one row of packed projections for each token."""
    g, d, heads = new_kernel_graph(), head_dim, kv_heads * group
    packed = (heads + 2 * kv_heads) * d
    q = g.new_input((rows, tokens, heads, d), dtype, (tokens * packed, packed, d, 1), name="q")
    k = g.new_input((rows, kv_heads, tokens, d), dtype, (tokens * packed, d, packed, 1), name="new_keys")
    cos, sin = (g.new_input((1, 1, tokens, d), dtype, name=name) for name in ("cos", "sin"))
    keys = g.new_input((rows, kv_heads, slots, d), dtype, name="keys")
    slot = g.new_input((rows, 1, 1, 1), torch.int32, name="slot")
    if norm:
        q, k = (g.rms_norm(x, g.new_input((1, d), dtype, name=name, constant=True), eps) for x, name in ((q, "q_norm"), (k, "k_norm")))
    q = g.rope(q, *(g.permute(x, (0, 2, 1, 3)) for x in (cos, sin)))
    g.mark_output(q, g.cache_append(keys, g.rope(k, cos, sin), slot))
    return g


def build_gate(rows: int, n: int, activation: str, dtype: torch.dtype) -> KernelGraph:
    """Both factors are halves of one packed row."""
    g = new_kernel_graph()
    gate, up = (g.new_input((rows, n), dtype, (2 * n, 1), name=name) for name in ("gate", "up"))
    g.mark_output(g.mul(getattr(g, activation)(gate), up))
    return g


PROMPT_NORM = Pattern("prompt_norm", {"x": "rows k", "gamma": "1 k", "y": "rows k"}, build_norm)
PROMPT_ROTATION = Pattern("prompt_rotation", {
    "q": "rows tokens heads d", "new_keys": "rows kv_heads tokens d", "cos": "1 1 tokens d", "sin": "1 1 tokens d",
    "keys": "rows kv_heads slots d", "slot": "rows 1 1 1", "q_norm": "1 d", "k_norm": "1 d", "y": "rows tokens heads d"}, build_rotation)
PROMPT_GATE = Pattern("prompt_gate", {"gate": "rows n", "up": "rows n", "y": "rows n"}, build_gate)
