"""Multi-head latent attention of a decoding step: one new token of each sequence, over a cache of latents and of keys that RoPE has turned.

All heads share one latent and one rotated key per slot; a head's other keys and its values are products of the latent with its rows of one
weight. The program of attention expands them, as the model does. The search moves the weight to the query and to the result, so that
kernels read the latents only. A program before it turns q and the new key, norms the new latent, and appends both in place.
"""

from __future__ import annotations

import torch

from mirage_hf.errors import GraphError
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.patterns.attention import LONG_SLOTS, REFERENCE_SLOTS
from mirage_hf.patterns.schema import Pattern

AXES = {
    "q": "rows heads 1 nope",
    "q_rope…": "rows heads 1 rope",
    "latents": "rows 1 slots latent",
    "keys…": "rows 1 slots rope",
    "lo": "rows 1 1 1",
    "end": "rows 1 1 1",
    "w_k": "1 heads latent nope",
    "w_v": "1 heads latent value",
    "y": "rows heads 1 value",
}
APPEND_AXES = {
    "q_rope…": "rows heads 1 rope",
    "k_rope…": "rows 1 1 rope",
    "latent": "rows 1 1 latent",
    "norm": "1 latent",
    "cos": "rows 1 1 rope",
    "sin": "rows 1 1 rope",
    "latents": "rows 1 slots latent",
    "keys…": "rows 1 slots rope",
    "slot": "rows 1 1 1",
    "rotated…": "rows heads 1 rope",
}
"""Of q_rope, k_rope, keys and rotated there are two, of half the width, where RoPE parts pairs."""

ROPES = ("halves", "pairs", "parted pairs")
"""What turns with element i of q and k: i + rope / 2; or its neighbour, 2i with 2i + 1 (DeepSeek-V2); or its neighbour, but rotated elements
lie in halves (DeepSeek-V3). There q_rope and k_rope are two views of every second element, and keys are two of a half each."""


def strides_of(
    heads: int, latent: int, nope: int, rope: int, q_rank: int | None
) -> tuple[int, int]:
    """Elements from a row of q to the next, and from a row of new latents to the next. Where q has a low-rank projection, what that gives
    lies before the latent, and q in rows of its own; else (None) q itself does."""
    q = heads * (nope + rope)
    return (q + latent + rope,) * 2 if q_rank is None else (q, q_rank + latent + rope)


def parts_of(ropes: str, rope: int) -> tuple[tuple[str, int], ...]:
    """The tensors that rotated elements are: what follows their name, and their width. Errors: GraphError for another RoPE."""
    if ropes not in ROPES:
        raise GraphError(f"mla: rope {ropes!r} must be among {ROPES}")
    return (("_even", rope // 2), ("_odd", rope // 2)) if ropes == "parted pairs" else (("", rope),)


def _caches(
    g: KernelGraph, rows: int, slots: int, latent: int, rope: int, ropes: str, dtype: torch.dtype
) -> tuple[DTensor, list[DTensor]]:
    row = slots * rope
    return g.new_input((rows, 1, slots, latent), dtype, name="latents"), [
        g.new_input((rows, 1, slots, width), dtype, (row, row, rope, 1), name=f"keys{part}")
        for part, width in parts_of(ropes, rope)
    ]


def build(
    rows: int,
    heads: int,
    latent: int,
    nope: int,
    rope: int,
    value: int,
    q_rank: int | None,
    scale: float,
    ropes: str,
    dtype: torch.dtype,
    slots: int = REFERENCE_SLOTS,
) -> KernelGraph:
    g, head, (q_row, _) = (
        new_kernel_graph(),
        nope + rope,
        strides_of(heads, latent, nope, rope, q_rank),
    )
    q = g.new_input((rows, heads, 1, nope), dtype, (q_row, head, head, 1), name="q")
    rotated = [
        g.new_input((rows, heads, 1, width), dtype, name=f"q_rope{part}")
        for part, width in parts_of(ropes, rope)
    ]
    latents, keys = _caches(g, rows, slots, latent, rope, ropes, dtype)
    lo, end = (g.new_input((rows, 1, 1, 1), torch.int32, name=name) for name in ("lo", "end"))
    w_k, w_v = (
        g.new_input(
            (1, heads, latent, width),
            dtype,
            (heads * (nope + value) * latent, (nope + value) * latent, 1, latent),
            name=name,
            constant=True,
        )
        for name, width in (("w_k", nope), ("w_v", value))
    )
    scores = g.matmul(q, g.permute(g.matmul(latents, w_k), (0, 1, 3, 2)))
    for x, k in zip(rotated, keys, strict=True):
        scores = g.add(scores, g.matmul(x, g.permute(k, (0, 1, 3, 2))))
    g.mark_output(g.matmul(g.softmax(g.mul(scores, scale), 3, lo, end), g.matmul(latents, w_v)))
    return g


def build_append(
    rows: int,
    heads: int,
    latent: int,
    nope: int,
    rope: int,
    q_rank: int | None,
    eps: float,
    ropes: str,
    dtype: torch.dtype,
    rope_dtype: torch.dtype,
    slots: int = REFERENCE_SLOTS,
) -> KernelGraph:
    """`rope_dtype`: that of cos and sin, and so of the turning."""
    g, head, (q_row, row) = (
        new_kernel_graph(),
        nope + rope,
        strides_of(heads, latent, nope, rope, q_rank),
    )
    parts = parts_of(ropes, rope)
    q = [
        g.new_input(
            (rows, heads, 1, width), dtype, (q_row, head, head, len(parts)), name=f"q_rope{part}"
        )
        for part, width in parts
    ]
    k = [
        g.new_input((rows, 1, 1, width), dtype, (row, row, row, len(parts)), name=f"k_rope{part}")
        for part, width in parts
    ]
    new = g.new_input((rows, 1, 1, latent), dtype, (row, row, row, 1), name="latent")
    norm = g.new_input((1, latent), dtype, name="norm", constant=True)
    cos, sin = (
        g.new_input((rows, 1, 1, parts[0][1]), rope_dtype, name=name) for name in ("cos", "sin")
    )
    latents, keys = _caches(g, rows, slots, latent, rope, ropes, dtype)
    slot = g.new_input((rows, 1, 1, 1), torch.int32, name="slot")

    def rotated(halves: list[DTensor]) -> list[DTensor]:
        wide = halves if dtype == rope_dtype else [g.cast(x, rope_dtype) for x in halves]
        if len(wide) == 2:
            even, odd = wide
            wide = [
                g.sub(g.mul(even, cos), g.mul(odd, sin)),
                g.add(g.mul(odd, cos), g.mul(even, sin)),
            ]
        else:
            wide = [g.rope(wide[0], cos, sin, interleaved=ropes == "pairs")]
        return wide if dtype == rope_dtype else [g.cast(x, dtype) for x in wide]

    g.mark_output(
        *rotated(q),
        g.cache_append(latents, g.rms_norm(new, norm, eps), slot),
        *(g.cache_append(cache, x, slot) for cache, x in zip(keys, rotated(k), strict=True)),
    )
    return g


def build_query(
    rows: int, rank: int, row: int, n: int, eps: float, dtype: torch.dtype
) -> KernelGraph:
    """A low-rank query, normed and expanded. `row`: elements from one to the next, which lie in packed rows."""
    g = new_kernel_graph()
    x, norm = (
        g.new_input((rows, rank), dtype, (row, 1), name="x"),
        g.new_input((1, rank), dtype, name="q_norm", constant=True),
    )
    g.mark_output(
        g.matmul(
            g.rms_norm(x, norm, eps),
            g.new_input((rank, n), dtype, (1, rank), name="w", constant=True),
        )
    )
    return g


MLA = Pattern("mla", AXES, build, searched_at=LONG_SLOTS)
"""Searched at many slots: over few of them expanding the latents is no dearer than not to, and it would be found instead."""
MLA_APPEND = Pattern("mla_append", APPEND_AXES, build_append)
MLA_QUERY = Pattern(
    "mla_query", {"x": "rows rank", "q_norm": "1 rank", "w": "rank n", "y": "rows n"}, build_query
)
