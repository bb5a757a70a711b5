"""Attention of a decoding step: the new tokens of each sequence, over a cache that their keys and values are appended to in place.

q, k and v are views of rows of packed projections. Biases, norms and RoPE where a family has them, then softmax over the cached keys in
[lo, slot) and the new ones, which go to the slots from `slot` on; left padding and sliding windows are lower bounds.
"""

from __future__ import annotations

import torch

from mirage_hf.errors import GraphError
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.patterns.parts import normed as normalised
from mirage_hf.patterns.parts import rotated
from mirage_hf.patterns.schema import Pattern, PatternBlock

AXES = {
    "q": "rows kv_heads group queries d",
    "new_keys": "rows kv_heads 1 queries d",
    "new_values": "rows kv_heads 1 queries d",
    "cos": "rows 1 1 queries rotary",
    "sin": "rows 1 1 queries rotary",
    "keys": "rows kv_heads 1 slots d",
    "values": "rows kv_heads 1 slots d",
    "lo": "rows 1 1 1 1",
    "slot": "rows 1 1 1 1",
    "first": "rows 1 1 queries 1",
    "last": "rows 1 1 queries 1",
    "new_first": "1 1 1 queries 1",
    "new_last": "1 1 1 queries 1",
    "q_bias": "1 kv_heads group 1 d",
    "k_bias": "1 kv_heads 1 1 d",
    "v_bias": "1 kv_heads 1 1 d",
    "q_norm": "1 d",
    "k_norm": "1 d",
    "q_norm_bias": "1 kv_heads group 1 d",
    "k_norm_bias": "1 kv_heads 1 1 d",
    "mask": "rows 1 1 queries slots",
    "new_mask": "rows 1 1 queries queries",
    "sinks": "1 kv_heads group 1 1",
    "y": "rows kv_heads group queries d",
}
"""With one query a sequence the dim before the last of q, and with it dim 2 of all others, is left out."""

REFERENCE_SLOTS = 256
"""Slots of the cache that kernels are searched at, and tuned at for short caches. A µGraph serves every number of them, and its loop only
visits what is within bounds."""
LONG_SLOTS = 4096
"""Slots that they are tuned at for long caches."""
LONG_FROM = 1024
"""What is a long cache. Between the two sizes that are tuned; where the better one changes was not measured."""

NORMS = ("", "rms", "layer", "rms of all heads")
"""None; of each head, RMSNorm (Qwen3, Gemma3) or LayerNorm with weights of its own for each head (Chameleon, Cohere); RMSNorm of all heads
of a token together (OLMo2)."""
ROPES = ("", "halves", "pairs")
PACKINGS = ("parts", "heads")
"""How a row of projections is packed: q of all heads, then k, then v; or head by head q, k and v (GPT-NeoX)."""


def build(
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    scale: float,
    norm: str,
    eps: float,
    dtype: torch.dtype,
    slots: int = REFERENCE_SLOTS,
    *,
    queries: int = 1,
    bias: bool = False,
    rope: str = "halves",
    rotary: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    mask: bool = False,
    window: bool = False,
    offset: float = 0.0,
    rope_dtype: torch.dtype | None = None,
    packing: str = "parts",
    norm_bias: bool = True,
) -> KernelGraph:
    """`queries`: new tokens of a sequence; bounds [new_first, new_last) say which of them each of several sees. `rotary`: how many
    elements of a head RoPE turns, the first ones (None: all). `mask`: tensors added to the scores. `window`: bounds [first, last) of each
    query beside [lo, slot), for windows that move with the query. `offset` is added to the weights of the RMSNorm of each head.
    `rope_dtype`: that of cos and sin, `dtype` unless given. `packing`: one of PACKINGS. `norm_bias`: LayerNorm
    of heads has one.
    Errors: GraphError for another norm, RoPE or packing."""
    if norm not in NORMS or rope not in ROPES or packing not in PACKINGS:
        raise GraphError(
            f"attention: norm {norm!r}, rope {rope!r} and packing {packing!r} must be among {NORMS}, {ROPES} and {PACKINGS}"
        )
    g, d, several = new_kernel_graph(), head_dim, queries > 1
    packed = kv_heads * (group + 2) * d

    def given(
        name: str, *dims: int, kind: torch.dtype = dtype, lacks: int = 3, constant: bool = False
    ) -> DTensor:
        """An input; without dim `lacks` where there is one query only."""
        return g.new_input(
            dims if several else dims[:lacks] + dims[lacks + 1 :],
            kind,
            name=name,
            constant=constant,
        )

    def projected(name: str, width: int) -> DTensor:
        step = width if packing == "parts" else group + 2
        dims, strides = (
            (rows, kv_heads, width, queries, d),
            (queries * packed, step * d, d, packed, 1),
        )
        return g.new_input(
            *((dims, dtype, strides) if several else ((*dims[:3], d), dtype, (*strides[:3], 1))),
            name=name,
        )

    def weighted(x: DTensor, name: str) -> DTensor:
        return g.mul(x, given(name, 1, kv_heads, x.dims[2], 1, d, constant=True))

    def normed(x: DTensor, name: str) -> DTensor:
        if norm == "rms":
            return normalised(g, x, name, eps, offset)
        if norm == "layer":
            y = weighted(g.layer_norm(x, eps=eps), name)
            return (
                g.add(y, given(f"{name}_bias", 1, kv_heads, x.dims[2], 1, d, constant=True))
                if norm_bias
                else y
            )
        squares = g.square(x)
        for dim in (-1, 2, 1):
            squares = g.reduction(squares, dim, "mean")
        return weighted(g.mul(x, g.rsqrt(g.add(squares, eps))), name)

    q, k, v = projected("q", group), projected("new_keys", 1), projected("new_values", 1)
    tables = (rows, 1, 1, queries, rotary or d)
    cos, sin = (
        (given(name, *tables, kind=rope_dtype or dtype) for name in ("cos", "sin"))
        if rope
        else (None, None)
    )
    keys, values = (
        given(name, rows, kv_heads, 1, slots, d, lacks=2) for name in ("keys", "values")
    )
    lo, slot = (given(name, rows, 1, 1, 1, 1, kind=torch.int32) for name in ("lo", "slot"))
    if bias:
        q, k, v = (
            g.add(x, given(name, 1, kv_heads, x.dims[2], 1, d, constant=True))
            for x, name in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias"))
        )
    if norm:
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    if rope:
        q, k = (rotated(g, x, cos, sin, rope == "pairs") for x in (q, k))

    last = len(q.dims) - 1

    def weights(x: DTensor, name: str) -> DTensor:
        scores = g.mul(g.matmul(q, g.permute(x, (*range(last - 1), last, last - 1))), scale)
        scores = scores if softcap is None else g.mul(g.tanh(g.mul(scores, 1 / softcap)), softcap)
        return g.exp(
            g.add(scores, given(name, rows, 1, 1, queries, x.dims[-2])) if mask else scores
        )

    old, new = weights(keys, "mask"), weights(k, "new_mask")
    old = g.within(old, lo, slot, dim=last)
    if window:
        old = g.within(
            old,
            *(given(name, rows, 1, 1, queries, 1, kind=torch.int32) for name in ("first", "last")),
            dim=last,
        )
    if several:
        new = g.within(
            new,
            *(
                given(name, rows if window else 1, 1, 1, queries, 1, kind=torch.int32)
                for name in ("new_first", "new_last")
            ),
            dim=last,
        )
    summed = g.add(g.matmul(old, values), g.matmul(new, v))
    total = g.add(g.reduction(old, last), g.reduction(new, last))
    if sinks:
        total = g.add(total, g.exp(given("sinks", 1, kv_heads, group, 1, 1, constant=True)))
    divided = g.ratio if several else g.div  # one query sees its own key
    y = divided(summed, total)
    g.mark_output(y, g.cache_append(keys, k, slot), g.cache_append(values, v, slot))
    return g


def for_long_caches(block: PatternBlock) -> PatternBlock:
    """The same block at LONG_SLOTS."""
    return block.pattern.block(**{**dict(block.sizes), "slots": LONG_SLOTS})


ATTENTION = Pattern("attention", AXES, build, searched_at=REFERENCE_SLOTS)
