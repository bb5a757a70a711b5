"""Attention of a decoding step: the new tokens of each sequence, over a cache.

The keys and values of the new tokens are appended to the cache in place, from `slot` on. The views
q, k and v are parts of rows of packed projections. Biases, norms and RoPE follow if a family has
them. The softmax is over the cached keys in [lo, slot) and the new ones. Left padding and sliding
windows are lower bounds.
"""

from __future__ import annotations

import torch

from mirage_hf.errors import GraphError
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.patterns.fragments import normed, rotated
from mirage_hf.patterns.schema import Pattern, PatternBlock

#: With one query for each sequence, q and y lack the dim of queries, and all others lack dim 2.
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
    "y": "rows queries kv_heads group d",
}

#: The slots of the cache at which kernels are searched, and tuned for short caches. A µGraph serves
#: any number of slots, and its loop visits only those within bounds.
REFERENCE_SLOTS = 256

#: The slots at which kernels are tuned for long caches.
LONG_SLOTS = 4096

#: From how many slots on a cache is long. It lies between the two sizes that are tuned. Where the
#: better kernel changes was not measured.
LONG_FROM = 1024

#: The norms of q and k: none; RMSNorm of each head (Qwen3, Gemma3); LayerNorm of each head with
#: weights of its own (Chameleon, Cohere); RMSNorm of all heads of a token together (OLMo2).
NORMS = ("", "rms", "layer", "rms of all heads")

#: How RoPE pairs the elements of a head: not at all, i with i + d / 2, or 2 i with 2 i + 1.
ROPES = ("", "halves", "pairs")

#: How a row of projections is packed. "parts": q of all heads, then k, then v. "heads": q, k and v
#: of each head (GPT-NeoX).
PACKINGS = ("parts", "heads")


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
    """Return the program of attention over a cache.

    Args:
        rows: The number of sequences.
        kv_heads: The heads of keys.
        group: The heads of queries for each head of keys.
        head_dim: The elements of a head.
        scale: What scores are multiplied by.
        norm: One of NORMS.
        eps: The epsilon of the norms.
        dtype: The dtype of everything except bounds, cos and sin.
        slots: The slots of the cache.
        queries: The new tokens of a sequence. If there are several, bounds [new_first, new_last)
            say which of these tokens each of them sees.
        bias: Whether q, k and v have biases.
        rope: One of ROPES.
        rotary: How many elements of a head RoPE rotates, the first ones. None: all.
        softcap: The bound of scores, cap · tanh(score / cap), or None.
        sinks: Whether each head has a logit that takes a part of its softmax (gpt-oss).
        mask: Whether tensors are added to the scores.
        window: Whether each query has bounds [first, last) besides [lo, slot). Windows that move
            with the query need them.
        offset: What is added to the weights of RMSNorm of heads.
        rope_dtype: The dtype of cos and sin. None: `dtype`.
        packing: One of PACKINGS.
        norm_bias: Whether LayerNorm of heads has a bias.

    Raises:
        GraphError: For another norm, RoPE or packing.
    """
    if norm not in NORMS or rope not in ROPES or packing not in PACKINGS:
        raise GraphError(
            f"attention: norm {norm!r}, rope {rope!r} and packing {packing!r} must be among "
            f"{NORMS}, {ROPES} and {PACKINGS}"
        )
    g, d, several = new_kernel_graph(), head_dim, queries > 1
    packed = kv_heads * (group + 2) * d

    def new_input(
        name: str, *dims: int, kind: torch.dtype = dtype, lacks: int = 3, constant: bool = False
    ) -> DTensor:
        """Return a new input. With one query it lacks the dim `lacks`."""
        own = dims if several else dims[:lacks] + dims[lacks + 1 :]
        return g.new_input(own, kind, name=name, constant=constant)

    def of_heads(name: str, x: DTensor) -> DTensor:
        """Return a new constant with an element for each element of the heads of x."""
        return new_input(name, 1, kv_heads, x.dims[2], 1, d, constant=True)

    def projected(name: str, width: int) -> DTensor:
        """Return a new input that is a view of packed projections."""
        step = width if packing == "parts" else group + 2
        dims: tuple[int, ...] = (rows, kv_heads, width, queries, d)
        strides: tuple[int, ...] = (queries * packed, step * d, d, packed, 1)
        if not several:
            dims, strides = (*dims[:3], d), (*strides[:3], 1)
        return g.new_input(dims, dtype, strides, name=name)

    def head_normed(x: DTensor, name: str) -> DTensor:
        """Return x after the norm of its heads."""
        if norm == "rms":
            return normed(g, x, name, eps, offset)
        if norm == "layer":
            y = g.layer_norm(x, eps=eps)
            y = g.mul(y, of_heads(name, y))
            return g.add(y, of_heads(f"{name}_bias", x)) if norm_bias else y
        squares = g.square(x)
        for dim in (-1, 2, 1):
            squares = g.reduction(squares, dim, "mean")
        y = g.mul(x, g.rsqrt(g.add(squares, eps)))
        return g.mul(y, of_heads(name, y))

    q, k, v = projected("q", group), projected("new_keys", 1), projected("new_values", 1)
    tables = (rows, 1, 1, queries, rotary or d)
    if rope:
        cos, sin = (new_input(name, *tables, kind=rope_dtype or dtype) for name in ("cos", "sin"))
    keys, values = (
        new_input(name, rows, kv_heads, 1, slots, d, lacks=2) for name in ("keys", "values")
    )
    lo, slot = (new_input(name, rows, 1, 1, 1, 1, kind=torch.int32) for name in ("lo", "slot"))
    if bias:
        q = g.add(q, of_heads("q_bias", q))
        k = g.add(k, of_heads("k_bias", k))
        v = g.add(v, of_heads("v_bias", v))
    if norm:
        q, k = head_normed(q, "q_norm"), head_normed(k, "k_norm")
    if rope:
        q, k = (rotated(g, x, cos, sin, rope == "pairs") for x in (q, k))

    last = len(q.dims) - 1

    def weights(x: DTensor, mask_name: str) -> DTensor:
        """Return exp(scores) of q with keys x."""
        transposed = g.permute(x, (*range(last - 1), last, last - 1))
        scores = g.mul(g.matmul(q, transposed), scale)
        if softcap is not None:
            scores = g.mul(g.tanh(g.mul(scores, 1 / softcap)), softcap)
        if mask:
            scores = g.add(scores, new_input(mask_name, rows, 1, 1, queries, x.dims[-2]))
        return g.exp(scores)

    def query_bound(name: str, sequences: int) -> DTensor:
        """Return a new bound for each query."""
        return new_input(name, sequences, 1, 1, queries, 1, kind=torch.int32)

    old, new = weights(keys, "mask"), weights(k, "new_mask")
    old = g.within(old, lo, slot, dim=last)
    if window:
        first_key, last_key = query_bound("first", rows), query_bound("last", rows)
        old = g.within(old, first_key, last_key, dim=last)
    if several:
        sequences = rows if window else 1
        first_new = query_bound("new_first", sequences)
        last_new = query_bound("new_last", sequences)
        new = g.within(new, first_new, last_new, dim=last)
    summed = g.add(g.matmul(old, values), g.matmul(new, v))
    total = g.add(g.reduction(old, last), g.reduction(new, last))
    if sinks:
        total = g.add(total, g.exp(new_input("sinks", 1, kv_heads, group, 1, 1, constant=True)))
    # A single query sees its own key, so its total is not 0.
    y = g.ratio(summed, total) if several else g.div(summed, total)
    if several:
        y = g.permute(y, (0, 3, 1, 2, 4))  # the order of tokens, as later products read them
    g.mark_output(y, g.cache_append(keys, k, slot), g.cache_append(values, v, slot))
    return g


def for_long_caches(block: PatternBlock) -> PatternBlock:
    """Return the same block with LONG_SLOTS slots."""
    return block.pattern.block(**{**dict(block.sizes), "slots": LONG_SLOTS})


def for_several_tokens(block: PatternBlock, tokens: int, *, window: bool) -> PatternBlock:
    """Return the same block for `tokens` new tokens of each sequence.

    Args:
        block: A block of this pattern.
        tokens: New tokens of a sequence.
        window: Whether each of them has bounds of its own among the cached keys.
    """
    return block.pattern.block(**{**dict(block.sizes), "queries": tokens, "window": window})


ATTENTION = Pattern("attention", AXES, build, searched_at=REFERENCE_SLOTS)
