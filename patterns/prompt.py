"""What the layers of a whole prompt do between the library's products: norms, q and k turned and put into the cache, an MLP's gate,
and additions to the residual that are more than that.

These are not blocks that optimize() looks for: decode/prefill.py asks for them, for layers whose blocks are matched.
"""
from __future__ import annotations

import torch

from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.match.pattern import Pattern
from mirage_hf.patterns.parts import activated, normed, turned


def build_norm(rows: int, k: int, eps: float, dtype: torch.dtype, offset: float, centred: bool, norm_bias: bool) -> KernelGraph:
    g = new_kernel_graph()
    g.mark_output(normed(g, g.new_input((rows, k), dtype, name="x"), "gamma", eps, offset, centred, norm_bias))
    return g


def build_added(rows: int, k: int, eps: float, dtype: torch.dtype, offset: float, centred: bool, norm_bias: bool,
                scale: float) -> KernelGraph:
    """residual + scale · norm(x)."""
    g = new_kernel_graph()
    y = normed(g, g.new_input((rows, k), dtype, name="x"), "gamma", eps, offset, centred, norm_bias)
    g.mark_output(g.add(y if scale == 1 else g.mul(y, scale), g.new_input((rows, k), dtype, name="residual")))
    return g


def build_rotation(rows: int, tokens: int, kv_heads: int, group: int, head_dim: int, norm: str, eps: float, dtype: torch.dtype,
                   slots: int, offset: float = 0.0, rope: str = "halves", rotary: int | None = None,
                   rope_dtype: torch.dtype | None = None, packing: str = "parts") -> KernelGraph:
    """q and k are views of one row of packed projections for each token. `norm`, without a bias, `rope` and `packing`: as in
    patterns/attention.py (packed by heads each has a query of its own);
    `rotary`: how many elements of a head RoPE turns (None: all); `rope_dtype`: that of cos and sin (None: dtype)."""
    g, d, heads = new_kernel_graph(), head_dim, kv_heads * group
    packed, step = (heads + 2 * kv_heads) * d, d if packing == "parts" else 3 * d
    q = g.new_input((rows, tokens, heads, d), dtype, (tokens * packed, packed, step, 1), name="q")
    k = g.new_input((rows, kv_heads, tokens, d), dtype, (tokens * packed, step, packed, 1), name="new_keys")
    tables = [g.new_input((1, 1, tokens, rotary or d), rope_dtype or dtype, name=name) for name in ("cos", "sin")] if rope else []
    keys = g.new_input((rows, kv_heads, slots, d), dtype, name="keys")
    slot = g.new_input((rows, 1, 1, 1), torch.int32, name="slot")

    def with_weights_of_heads(x: DTensor, name: str, dim: int) -> DTensor:
        """LayerNorm of each head, or RMSNorm over the last dim and the heads, which are in `dim`."""
        weight = g.new_input(tuple(x.dims[n] if n in (dim, 3) else 1 for n in range(4)), dtype, name=name, constant=True)
        if norm == "layer":
            return g.mul(g.layer_norm(x, eps=eps), weight)
        mean = g.reduction(g.reduction(g.square(x), 3, "mean"), dim, "mean")
        return g.mul(g.mul(x, g.rsqrt(g.add(mean, eps))), weight)

    if norm == "rms":
        q, k = (normed(g, x, name, eps, offset) for x, name in ((q, "q_norm"), (k, "k_norm")))
    elif norm:
        q, k = with_weights_of_heads(q, "q_norm", 2), with_weights_of_heads(k, "k_norm", 1)
    if tables:
        q = turned(g, q, *(g.permute(x, (0, 2, 1, 3)) for x in tables), rope == "pairs")
        k = turned(g, k, *tables, rope == "pairs")
    g.mark_output(q, g.cache_append(keys, k, slot))
    return g


def build_gate(rows: int, n: int, activation: str, dtype: torch.dtype) -> KernelGraph:
    """Both factors are halves of one packed row."""
    g = new_kernel_graph()
    gate, up = (g.new_input((rows, n), dtype, (2 * n, 1), name=name) for name in ("gate", "up"))
    g.mark_output(g.mul(activated(g, gate, activation), up))
    return g


def build_activation(rows: int, n: int, activation: str, dtype: torch.dtype) -> KernelGraph:
    g = new_kernel_graph()
    g.mark_output(activated(g, g.new_input((rows, n), dtype, name="x"), activation))
    return g


NORM = {"gamma": "1 k", "gamma_bias": "1 k"}
PROMPT_NORM = Pattern("prompt_norm", {"x": "rows k", **NORM, "y": "rows k"}, build_norm)
PROMPT_ADDED = Pattern("prompt_added", {"x": "rows k", **NORM, "residual": "rows k", "y": "rows k"}, build_added)
PROMPT_ROTATION = Pattern("prompt_rotation", {
    "q": "rows tokens heads d", "new_keys": "rows kv_heads tokens d", "cos": "1 1 tokens rotary", "sin": "1 1 tokens rotary",
    "keys": "rows kv_heads slots d", "slot": "rows 1 1 1", "q_norm": "1 d", "k_norm": "1 d", "y": "rows tokens heads d"}, build_rotation)
PROMPT_GATE = Pattern("prompt_gate", {"gate": "rows n", "up": "rows n", "y": "rows n"}, build_gate)
PROMPT_ACTIVATION = Pattern("prompt_activation", {"x": "rows n", "y": "rows n"}, build_activation)
