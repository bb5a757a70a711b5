"""What a layer computes for whole prompts between the library's products and attention.

These are norms, the rotation of q and k, the gate of an MLP, and the residual plus a norm. A row is
one token of a sequence, and all rows are treated alike.

No module of a model is matched with these blocks. layers/prefill.py asks for them if all blocks of
a layer are matched. swap/ asks for norms and rotations if prompts run the model's own forward.
"""

from __future__ import annotations

import torch

from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.patterns.fragments import activated, normed, rotated
from mirage_hf.patterns.schema import Pattern


def build_norm(
    rows: int, k: int, eps: float, dtype: torch.dtype, offset: float, centred: bool, norm_bias: bool
) -> KernelGraph:
    """Return the program of norm(x). See `parts.normed` for the sizes of the norm."""
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    g.mark_output(normed(g, x, "gamma", eps, offset, centred, norm_bias))
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
    """Return the program of residual + scale · norm(x). See `parts.normed` for the norm's sizes."""
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    y = normed(g, x, "gamma", eps, offset, centred, norm_bias)
    if scale != 1:
        y = g.mul(y, scale)
    g.mark_output(g.add(y, g.new_input((rows, k), dtype, name="residual")))
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
    """Return the program of q and k, normalised and rotated.

    They are views of one row of packed projections for each token, or lie apart. If projections are
    packed by heads, each head of keys has one head of queries.

    Args:
        rows: The number of tokens. Each has its own row of cos and sin.
        kv_heads: The heads of keys.
        group: The heads of queries for each head of keys.
        head_dim: The elements of a head.
        norm: One of `attention.NORMS`. LayerNorm has no bias here.
        eps: The epsilon of the norms.
        dtype: The dtype of everything except cos and sin.
        offset: What is added to the weights of RMSNorm of heads.
        rope: One of `attention.ROPES`.
        rotary: How many elements of a head RoPE rotates, the first ones. None: all.
        rope_dtype: The dtype of cos and sin. None: `dtype`.
        packing: One of `attention.PACKINGS`, or "" if q and k lie apart.
    """
    g, d, heads = new_kernel_graph(), head_dim, kv_heads * group
    packed, step = (heads + 2 * kv_heads) * d, 3 * d if packing == "heads" else d
    q, k = (
        g.new_input((rows, n, d), dtype, (packed if packing else n * d, step, 1), name=name)
        for name, n in (("q", heads), ("k", kv_heads))
    )
    table = (rows, 1, rotary or d)
    if rope:
        cos, sin = (g.new_input(table, rope_dtype or dtype, name=n) for n in ("cos", "sin"))

    def head_normed(x: DTensor, name: str) -> DTensor:
        if norm == "rms":
            return normed(g, x, name, eps, offset)
        weight = g.new_input((1, *x.dims[1:]), dtype, name=name, constant=True)
        if norm == "layer":
            return g.mul(g.layer_norm(x, eps=eps), weight)
        mean = g.reduction(g.reduction(g.square(x), 2, "mean"), 1, "mean")
        return g.mul(g.mul(x, g.rsqrt(g.add(mean, eps))), weight)

    if norm:
        q, k = head_normed(q, "q_norm"), head_normed(k, "k_norm")
    if rope:
        q, k = (rotated(g, x, cos, sin, rope == "pairs") for x in (q, k))
    g.mark_output(q, k)
    return g


def build_gate(rows: int, n: int, activation: str, dtype: torch.dtype) -> KernelGraph:
    """Return the program of activation(gate) · up. gate and up are the halves of one packed row."""
    g = new_kernel_graph()
    gate, up = (g.new_input((rows, n), dtype, (2 * n, 1), name=name) for name in ("gate", "up"))
    g.mark_output(g.mul(activated(g, gate, activation), up))
    return g


def build_activation(rows: int, n: int, activation: str, dtype: torch.dtype) -> KernelGraph:
    """Return the program of activation(x)."""
    g = new_kernel_graph()
    g.mark_output(activated(g, g.new_input((rows, n), dtype, name="x"), activation))
    return g


_NORM_AXES = {"gamma": "1 k", "gamma_bias": "1 k"}

PROMPT_NORM = Pattern("prompt_norm", {"x": "rows k", **_NORM_AXES, "y": "rows k"}, build_norm)
PROMPT_ADDED = Pattern(
    "prompt_added",
    {"x": "rows k", **_NORM_AXES, "residual": "rows k", "y": "rows k"},
    build_added,
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
