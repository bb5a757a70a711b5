"""Shape rules: the output dims of each op from the dims of its operands and its attributes.

If the operands do not fit, a rule raises GraphError. The message says what they are and what fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirage_hf import errors

Dims = tuple[int, ...]

#: A shape rule takes the dims of each operand, then the attributes by name.
ShapeRule = Callable[..., Dims]


def is_int(x: Any) -> bool:
    """Return whether `x` is an integer. True and False are not."""
    return isinstance(x, int) and not isinstance(x, bool)


def axis(dim: int, rank: int, op: str) -> int:
    """Return `dim` counted from the left.

    Raises:
        GraphError: If a tensor of `rank` dims has no such dim. `op` opens the message.
    """
    if not is_int(dim) or not -rank <= dim < rank:
        raise errors.GraphError(
            f"{op}: dim {dim!r} is out of range for a tensor of {rank} dims; "
            f"use {-rank} to {rank - 1}"
        )
    return dim % rank


def broadcast(*dims: Dims, op: str = "elementwise") -> Dims:
    """Return the dims that `dims` broadcast to, by torch's rules.

    Raises:
        GraphError: If they do not broadcast. `op` opens the message.
    """
    of_tensors = [d for d in dims if d]  # numbers have no dims
    first = of_tensors[0] if of_tensors else ()
    if all(d == first for d in of_tensors) and all(type(size) is int for size in first):
        return first  # torch takes 40 µs for the same
    try:
        return tuple(torch.broadcast_shapes(*dims))
    except (RuntimeError, TypeError):  # torch raises TypeError for sizes beyond 64 bits
        shapes = " and ".join(errors.shape(d) for d in dims)
        raise errors.GraphError(
            f"{op}: shapes {shapes} do not broadcast; "
            "sizes must be equal or 1, aligned at the right"
        ) from None


def elementwise(name: str) -> ShapeRule:
    """Return the rule of the elementwise op `name`: its operands broadcast."""

    def infer(*dims: Dims, **_: Any) -> Dims:
        return broadcast(*dims, op=name)

    return infer


def matmul(a: Dims, b: Dims) -> Dims:
    """Infer (… m k) times (… k n): (… m n). The leading dims broadcast."""
    if len(a) < 2 or len(b) < 2:
        raise errors.GraphError(
            f"matmul: needs matrices, got {errors.shape(a)} and {errors.shape(b)}; "
            "reshape to two dims or more"
        )
    if a[-1] != b[-2]:
        raise errors.inner_sizes_differ("X", a, "W", b)
    return (*broadcast(a[:-2], b[:-2], op="matmul"), a[-2], b[-1])


def reduction(x: Dims, dim: int, kind: str = "sum") -> Dims:
    """Infer a reduction: the reduced dim has size 1."""
    if kind not in ("sum", "mean", "max"):
        raise errors.GraphError(f"reduction: unknown kind {kind!r}; use sum, mean or max")
    d = axis(dim, len(x), "reduction")
    return (*x[:d], 1, *x[d + 1 :])


def norm(name: str) -> ShapeRule:
    """Return the rule of the norm `name`: weight and bias have one element per column of x."""

    def infer(x: Dims, *parameters: Dims, eps: float = 1e-6) -> Dims:
        if not eps > 0:
            raise errors.GraphError(f"{name}: eps must be positive, it is {eps!r}")
        for p in parameters:
            if p[-1] != x[-1] or math.prod(p) != x[-1] or len(p) > len(x):
                raise errors.GraphError(
                    f"{name}: weight or bias {errors.shape(p)} does not fit the last dim of "
                    f"{errors.shape(x)}; give it as (1, {x[-1]})"
                )
        return x

    return infer


def softmax(x: Dims, *bounds: Dims, dim: int = -1) -> Dims:
    """Infer a softmax over `dim`, with or without bounds: x's dims."""
    if bounds:
        return within(x, *bounds, dim=dim, op="softmax")
    axis(dim, len(x), "softmax")
    return x


def within(x: Dims, lo: Dims, hi: Dims | None = None, *, dim: int, op: str = "within") -> Dims:
    """Infer x within bounds: x's dims. The bounds broadcast to x and have size 1 at `dim`."""
    d = axis(dim, len(x), op)
    if hi is None:
        raise errors.GraphError(f"{op}: a bound lo needs a bound hi; give both or none")
    aligned = zip(reversed(lo), reversed(x), strict=False)
    broadcasts = len(lo) <= len(x) and all(n in (1, m) for n, m in aligned)
    has_dim = d >= len(x) - len(lo)
    if lo != hi or not broadcasts or (has_dim and lo[d - len(x)] != 1):
        raise errors.GraphError(
            f"{op}: bounds lo {errors.shape(lo)} and hi {errors.shape(hi)} must be equal in shape, "
            f"broadcast to {errors.shape(x)} aligned at the right, and have size 1 at dim {d}"
        )
    return x


def concat(*xs: Dims, dim: int) -> Dims:
    """Infer tensors joined along `dim`: the sum of their sizes there."""
    first = xs[0]
    d = axis(dim, len(first), "concat")
    for x in xs[1:]:
        if len(x) != len(first) or any(i != d and x[i] != first[i] for i in range(len(x))):
            raise errors.GraphError(
                f"concat: {errors.shape(first)} and {errors.shape(x)} differ outside dim {d}"
            )
    return (*first[:d], sum(x[d] for x in xs), *first[d + 1 :])


def slice_(x: Dims, dim: int, start: int, stop: int) -> Dims:
    """Infer elements [start, stop) of `dim`."""
    d = axis(dim, len(x), "slice")
    if not 0 <= start < stop <= x[d]:
        raise errors.GraphError(
            f"slice: [{start}, {stop}) is not a range inside dim {d} of size {x[d]}"
        )
    return (*x[:d], stop - start, *x[d + 1 :])


def reshape(x: Dims, dims: Sequence[int]) -> Dims:
    """Infer the same elements under other dims."""
    if math.prod(dims) != math.prod(x):
        raise errors.GraphError(
            f"reshape: {errors.shape(x)} has {math.prod(x)} elements, "
            f"{errors.shape(dims)} has {math.prod(dims)}"
        )
    return tuple(dims)


def permute(x: Dims, order: Sequence[int]) -> Dims:
    """Infer the dims of x in another order."""
    if sorted(axis(o, len(x), "permute") for o in order) != list(range(len(x))):
        raise errors.GraphError(f"permute: {tuple(order)} is not an order of {len(x)} dims")
    return tuple(x[o] for o in order)


def take(x: Dims, index: Dims, dim: int = 0) -> Dims:
    """Infer elements of x that an index chooses along `dim`: the index's dims replace that dim."""
    d = axis(dim, len(x), "take")
    return (*x[:d], *index, *x[d + 1 :])


def rope(x: Dims, cos: Dims, sin: Dims, interleaved: bool = False) -> Dims:
    """Infer RoPE: x's dims. cos and sin may be narrower than x; their width is even."""
    if cos != sin or cos[-1] > x[-1] or cos[-1] % 2:
        raise errors.GraphError(
            f"rope: cos {errors.shape(cos)} and sin {errors.shape(sin)} must be equal, "
            f"of even width at most {x[-1]}"
        )
    if broadcast(x[:-1], cos[:-1], op="rope") != x[:-1]:
        raise errors.GraphError(
            f"rope: cos and sin {errors.shape(cos)} do not broadcast to {errors.shape(x)}; "
            "give them sizes 1 where x has 1"
        )
    return x


def cache_append(cache: Dims, new: Dims, position: Dims) -> Dims:
    """Infer new rows written into a cache: the cache's dims."""
    rank = len(cache)
    same_batch = len(new) == rank and cache[:-2] == new[:-2]
    if rank < 2 or not same_batch or cache[-1] != new[-1] or new[-2] > cache[-2]:
        raise errors.GraphError(
            f"cache_append: new rows {errors.shape(new)} do not fit a cache {errors.shape(cache)} "
            "(… slots d, … rows d -> … slots d)"
        )
    allowed: list[Dims] = [(1,)]
    if rank > 2:
        allowed += [(cache[0],), (cache[0], *[1] * (rank - 1))]
    if position not in allowed:
        shapes = " or ".join(dict.fromkeys(map(errors.shape, allowed)))
        raise errors.GraphError(
            f"cache_append: position must be {shapes}, it is {errors.shape(position)}"
        )
    return cache
