"""Call a kernel of the pattern `attention` with its operands in the order of the program."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mirage_hf.layers.compose import Kernel


def run_attention(
    kernel: Kernel,
    heads: Sequence[Tensor],
    rope: Sequence[Tensor],
    memory: Sequence[Tensor],
    bounds: Sequence[Tensor],
    norms: Sequence[Tensor] = (),
    sinks: Sequence[Tensor] = (),
    *,
    windowed: bool = False,
) -> Tensor:
    """Append the new keys and values, and return attention (rows, heads · d).

    Rows are the new tokens of the first sequence, then those of the second, and so on.

    Args:
        kernel: The kernel, for as many tokens of each sequence as `bounds` says.
        heads: q, k and v (rows, kv_heads, ·, d), views of packed projections.
        rope: cos and sin of the rows, or nothing.
        memory: The cached keys and values (batch, kv_heads, slots, d).
        bounds: The first slot that each sequence sees and the slot of its first new key. If a
            sequence has several new tokens, also the four bounds of each (`TokenBounds`). All are
            int32 with an element for each sequence, or each token.
        norms: The weights of norms of heads. Their dims begin with 1.
        sinks: The sinks (1, kv_heads, ·, 1), or nothing.
        windowed: Whether the kernel reads all four bounds of a token.
    """
    lo, slot, *seen = bounds
    batch = lo.numel()
    if not seen:
        per_row = [x.view(batch, 1, 1, -1) for x in (*rope, lo, slot)]
        rope, range_of_cache = per_row[:-2], per_row[-2:]
        return kernel([*heads, *rope, *memory, *range_of_cache, *norms, *sinks])[0].flatten(1)

    # the program of several tokens has the dims that are 1 otherwise (patterns/attention.py)
    tokens = len(heads[0]) // batch
    heads = [x.unflatten(0, (batch, tokens)).permute(0, 2, 3, 1, 4) for x in heads]
    rope = [x.view(batch, 1, 1, tokens, -1) for x in rope]
    memory = [x[:, :, None] for x in memory]
    range_of_cache = [x.view(batch, 1, 1, 1, 1) for x in (lo, slot)]
    norms = [x if x.dim() == 2 else x[:, :, :, None] for x in norms]
    sinks = [x[..., None] for x in sinks]
    if not windowed:  # the kernels have one pair of bounds for all sequences
        seen = [x[:1] for x in seen[2:]]
    seen = [x.view(-1, 1, 1, tokens, 1) for x in seen]
    y = kernel([*heads, *rope, *memory, *range_of_cache, *norms, *seen, *sinks])[0]
    return y.reshape(batch * tokens, -1)  # a CPU copies here, because torch's permute only views
