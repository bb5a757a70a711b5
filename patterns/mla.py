"""Multi-head latent attention of a decoding step: new tokens of each sequence, over a cache.

The cache holds latents, and keys that RoPE has rotated. All heads share one latent and one rotated
key for each slot. A head's other keys and its values are products of the latent with the head's
rows of one weight. The program of attention (`build`) expands them, as the model does. The search
moves the weight to the query and to the result, so that kernels read only the latents. A program
before it (`build_append`) rotates q and the new keys, normalises the new latents, and appends both
in place. So each of several new tokens has bounds of its own: it sees the cache up to itself.
"""

from __future__ import annotations

import torch

from mirage_hf.errors import GraphError
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.patterns.attention import LONG_SLOTS, REFERENCE_SLOTS
from mirage_hf.patterns.schema import Pattern, PatternBlock

AXES = {
    "q": "rows heads queries nope",
    "q_rope…": "rows heads queries rope",
    "latents": "rows 1 slots latent",
    "keys…": "rows 1 slots rope",
    "lo": "rows 1 queries 1",
    "end": "rows 1 queries 1",
    "w_k": "1 heads latent nope",
    "w_v": "1 heads latent value",
    "y": "rows heads queries value",
}

#: With "parted pairs" there are two each of q_rope, k_rope, keys and rotated, of half the width.
APPEND_AXES = {
    "q_rope…": "rows heads queries rope",
    "k_rope…": "rows 1 queries rope",
    "latent": "rows 1 queries latent",
    "norm": "1 latent",
    "cos": "rows 1 queries rope",
    "sin": "rows 1 queries rope",
    "latents": "rows 1 slots latent",
    "keys…": "rows 1 slots rope",
    "slot": "rows 1 1 1",
    "rotated…": "rows heads queries rope",
}

#: How RoPE pairs the elements of q and k. "halves": i with i + rope / 2. "pairs": 2 i with 2 i + 1
#: (DeepSeek-V2). "parted pairs": the same, but the rotated elements lie in halves (DeepSeek-V3).
#: Then q_rope and k_rope are views of every second element. Keys are two tensors, one for each
#: half.
ROPES = ("halves", "pairs", "parted pairs")


def strides_of(
    heads: int, latent: int, nope: int, rope: int, q_rank: int | None
) -> tuple[int, int]:
    """Return how many elements lie between rows of q, and between rows of new latents.

    If q has a low-rank projection, its output lies before the latent, and q in rows of its own.
    Otherwise q itself lies before the latent.
    """
    q = heads * (nope + rope)
    if q_rank is None:
        return q + latent + rope, q + latent + rope
    return q, q_rank + latent + rope


def _rotated_parts(ropes: str, rope: int) -> tuple[tuple[str, int], ...]:
    """Return the tensors that rotated elements are: the end of their name, and their width.

    Raises:
        GraphError: For another RoPE.
    """
    if ropes not in ROPES:
        raise GraphError(f"mla: rope {ropes!r} must be among {ROPES}")
    if ropes == "parted pairs":
        return ("_even", rope // 2), ("_odd", rope // 2)
    return (("", rope),)


def _strides(queries: int, row: int, head: int, step: int = 1) -> tuple[int, int, int, int]:
    """Return the strides of a part of packed rows (sequences, heads, queries, elements).

    Args:
        queries: The new tokens of a sequence. Each has a row.
        row: The elements between rows.
        head: The elements between heads.
        step: The elements between those of a part.
    """
    return queries * row, head, row if queries > 1 else head, step


def _caches(
    g: KernelGraph, rows: int, slots: int, latent: int, rope: int, ropes: str, dtype: torch.dtype
) -> tuple[DTensor, list[DTensor]]:
    """Return new inputs for the cached latents and the cached keys."""
    row = slots * rope
    latents = g.new_input((rows, 1, slots, latent), dtype, name="latents")
    keys = [
        g.new_input((rows, 1, slots, width), dtype, (row, row, rope, 1), name=f"keys{part}")
        for part, width in _rotated_parts(ropes, rope)
    ]
    return latents, keys


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
    *,
    queries: int = 1,
) -> KernelGraph:
    """Return the program of attention over latents.

    Args:
        rows: The number of sequences.
        heads: The heads of queries.
        latent: The elements of a latent.
        nope: The elements of a head of q and k that RoPE does not rotate.
        rope: The elements that it rotates.
        value: The elements of a head of values.
        q_rank: The rank of the query's projection, or None.
        scale: What scores are multiplied by.
        ropes: One of ROPES.
        dtype: The dtype of everything except bounds.
        slots: The slots of the cache.
        queries: The new tokens of a sequence.
    """
    g, head = new_kernel_graph(), nope + rope
    q_row, _ = strides_of(heads, latent, nope, rope, q_rank)
    q = g.new_input((rows, heads, queries, nope), dtype, _strides(queries, q_row, head), name="q")
    rotated = [
        g.new_input((rows, heads, queries, width), dtype, name=f"q_rope{part}")
        for part, width in _rotated_parts(ropes, rope)
    ]
    latents, keys = _caches(g, rows, slots, latent, rope, ropes, dtype)
    bounds = (rows, 1, queries, 1)
    lo, end = (g.new_input(bounds, torch.int32, name=name) for name in ("lo", "end"))
    of_head = (nope + value) * latent

    def expansion(name: str, width: int) -> DTensor:
        """Return a new input for each head's rows of the weight that expands latents."""
        dims, strides = (1, heads, latent, width), (heads * of_head, of_head, 1, latent)
        return g.new_input(dims, dtype, strides, name=name, constant=True)

    w_k, w_v = expansion("w_k", nope), expansion("w_v", value)
    scores = g.matmul(q, g.permute(g.matmul(latents, w_k), (0, 1, 3, 2)))
    for x, k in zip(rotated, keys, strict=True):
        scores = g.add(scores, g.matmul(x, g.permute(k, (0, 1, 3, 2))))
    weights = g.softmax(g.mul(scores, scale), 3, lo, end)
    g.mark_output(g.matmul(weights, g.matmul(latents, w_v)))
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
    *,
    queries: int = 1,
) -> KernelGraph:
    """Return the program that rotates q and appends the new latent and the new rotated key.

    Args:
        rows: The number of sequences.
        heads: The heads of queries.
        latent: The elements of a latent.
        nope: The elements of a head of q and k that RoPE does not rotate.
        rope: The elements that it rotates.
        q_rank: The rank of the query's projection, or None.
        eps: The epsilon of the latent's norm.
        ropes: One of ROPES.
        dtype: The dtype of everything except cos, sin and bounds.
        rope_dtype: The dtype of cos and sin, in which RoPE is computed.
        slots: The slots of the cache.
        queries: The new tokens of a sequence.
    """
    g, head = new_kernel_graph(), nope + rope
    q_row, row = strides_of(heads, latent, nope, rope, q_rank)
    parts = _rotated_parts(ropes, rope)
    step = len(parts)
    q = [
        g.new_input(
            (rows, heads, queries, width),
            dtype,
            _strides(queries, q_row, head, step),
            name=f"q_rope{part}",
        )
        for part, width in parts
    ]
    k = [
        g.new_input(
            (rows, 1, queries, width),
            dtype,
            _strides(queries, row, row, step),
            name=f"k_rope{part}",
        )
        for part, width in parts
    ]
    new = g.new_input((rows, 1, queries, latent), dtype, _strides(queries, row, row), name="latent")
    norm = g.new_input((1, latent), dtype, name="norm", constant=True)
    table = (rows, 1, queries, parts[0][1])
    cos, sin = (g.new_input(table, rope_dtype, name=name) for name in ("cos", "sin"))
    latents, keys = _caches(g, rows, slots, latent, rope, ropes, dtype)
    slot = g.new_input((rows, 1, 1, 1), torch.int32, name="slot")

    def rotated(parts: list[DTensor]) -> list[DTensor]:
        wide = parts if dtype == rope_dtype else [g.cast(x, rope_dtype) for x in parts]
        if len(wide) == 2:
            even, odd = wide
            wide = [
                g.sub(g.mul(even, cos), g.mul(odd, sin)),
                g.add(g.mul(odd, cos), g.mul(even, sin)),
            ]
        else:
            wide = [g.rope(wide[0], cos, sin, interleaved=ropes == "pairs")]
        return wide if dtype == rope_dtype else [g.cast(x, dtype) for x in wide]

    rotated_q = rotated(q)
    new_latents = g.cache_append(latents, g.rms_norm(new, norm, eps), slot)
    rotated_k = rotated(k)
    new_keys = [g.cache_append(cache, x, slot) for cache, x in zip(keys, rotated_k, strict=True)]
    g.mark_output(*rotated_q, new_latents, *new_keys)
    return g


def build_query(
    rows: int, rank: int, row: int, n: int, eps: float, dtype: torch.dtype
) -> KernelGraph:
    """Return the program of a low-rank query: normalised, then expanded to all heads.

    Args:
        rows: The number of sequences.
        rank: The rank of the query's projection.
        row: The elements between rows of x, which are parts of packed rows.
        n: The elements of the query of all heads.
        eps: The epsilon of the norm.
        dtype: The dtype of everything.
    """
    g = new_kernel_graph()
    x = g.new_input((rows, rank), dtype, (row, 1), name="x")
    norm = g.new_input((1, rank), dtype, name="q_norm", constant=True)
    normed = g.rms_norm(x, norm, eps)
    weight = g.new_input((rank, n), dtype, (1, rank), name="w", constant=True)
    g.mark_output(g.matmul(normed, weight))
    return g


#: It is searched at many slots. Over few slots it is as cheap to expand the latents, and the search
#: would choose that.
MLA = Pattern("mla", AXES, build, searched_at=LONG_SLOTS)
MLA_APPEND = Pattern("mla_append", APPEND_AXES, build_append)
MLA_QUERY = Pattern(
    "mla_query", {"x": "rows rank", "q_norm": "1 rank", "w": "rank n", "y": "rows n"}, build_query
)


def for_several_tokens(block: PatternBlock, tokens: int) -> PatternBlock:
    """Return a block of `MLA` or `MLA_APPEND` for `tokens` new tokens of each sequence."""
    return block.pattern.block(**{**dict(block.sizes), "queries": tokens})
