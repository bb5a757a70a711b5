"""What the layers of a whole prompt do between the library's products: norms, q and k rotated, an MLP's gate, and additions to the
residual that are more than that. All of them do the same for each row, a token of a sequence.

These are not blocks that optimize() looks for: decode/prefill.py asks for them, for layers whose blocks are matched.
"""

from __future__ import annotations

import torch

from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.patterns.parts import activated, normed, rotated
from mirage_hf.patterns.schema import Pattern


def build_norm(
    rows: int, k: int, eps: float, dtype: torch.dtype, offset: float, centred: bool, norm_bias: bool
) -> KernelGraph:
    g = new_kernel_graph()
    g.mark_output(
        normed(g, g.new_input((rows, k), dtype, name="x"), "gamma", eps, offset, centred, norm_bias)
    )
    return g


def build_added(
    rows: int,
    k: int,
    eps: float,
    dtype: torch.dtype,
    offset: float,
    centred: bool,
    norm_bias: bool,
    scale: float,
) -> KernelGraph:
    """residual + scale · norm(x)."""
    g = new_kernel_graph()
    y = normed(g, g.new_input((rows, k), dtype, name="x"), "gamma", eps, offset, centred, norm_bias)
    g.mark_output(
        g.add(y if scale == 1 else g.mul(y, scale), g.new_input((rows, k), dtype, name="residual"))
    )
    return g


def build_rotation(
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    norm: str,
    eps: float,
    dtype: torch.dtype,
    offset: float = 0.0,
    rope: str = "halves",
    rotary: int | None = None,
    rope_dtype: torch.dtype | None = None,
    packing: str = "parts",
) -> KernelGraph:
    """q and k are views of one row of packed projections for each token, which has its own row of cos and sin. `norm`, without a bias,
    `rope` and `packing`: as in patterns/attention.py (packed by heads each has a query of its own);
    `rotary`: how many elements of a head RoPE turns (None: all); `rope_dtype`: that of cos and sin (None: dtype)."""
    g, d, heads = new_kernel_graph(), head_dim, kv_heads * group
    packed, step = (heads + 2 * kv_heads) * d, d if packing == "parts" else 3 * d
    q, k = (
        g.new_input((rows, n, d), dtype, (packed, step, 1), name=name)
        for n, name in ((heads, "q"), (kv_heads, "k"))
    )
    tables = (
        [
            g.new_input((rows, 1, rotary or d), rope_dtype or dtype, name=name)
            for name in ("cos", "sin")
        ]
        if rope
        else []
    )

    def with_weights_of_heads(x: DTensor, name: str) -> DTensor:
        """LayerNorm of each head, or RMSNorm over the last dim and the heads."""
        weight = g.new_input((1, *x.dims[1:]), dtype, name=name, constant=True)
        if norm == "layer":
            return g.mul(g.layer_norm(x, eps=eps), weight)
        mean = g.reduction(g.reduction(g.square(x), 2, "mean"), 1, "mean")
        return g.mul(g.mul(x, g.rsqrt(g.add(mean, eps))), weight)

    if norm == "rms":
        q, k = (normed(g, x, name, eps, offset) for x, name in ((q, "q_norm"), (k, "k_norm")))
    elif norm:
        q, k = with_weights_of_heads(q, "q_norm"), with_weights_of_heads(k, "k_norm")
    if tables:
        q, k = (rotated(g, x, *tables, rope == "pairs") for x in (q, k))
    g.mark_output(q, k)
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
PROMPT_ADDED = Pattern(
    "prompt_added", {"x": "rows k", **NORM, "residual": "rows k", "y": "rows k"}, build_added
)
PROMPT_ROTATION = Pattern(
    "prompt_rotation",
    {
        "q": "rows heads d",
        "k": "rows kv_heads d",
        "cos": "rows 1 rotary",
        "sin": "rows 1 rotary",
        "q_norm": "1 d",
        "k_norm": "1 d",
        "rotated_q": "rows heads d",
        "rotated_k": "rows kv_heads d",
    },
    build_rotation,
)
PROMPT_GATE = Pattern("prompt_gate", {"gate": "rows n", "up": "rows n", "y": "rows n"}, build_gate)
PROMPT_ACTIVATION = Pattern("prompt_activation", {"x": "rows n", "y": "rows n"}, build_activation)
