"""Torch oracles that are more than one torch function.

An oracle says what an op computes, independently of its scalar body or expansion. It rounds as an
eager transformers model does. Generated kernel files hold the source of these functions as their
reference, so each one uses only `torch`, `F` and `errors.InputError`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mirage_hf import errors


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Compute RMSNorm: statistics in float32, cast to the dtype of x, then times the weight."""
    wide = x if x.dtype == torch.float64 else x.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else y * weight


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Compute LayerNorm over the last dim. Weight and bias may have leading dims of size 1."""
    n = x.shape[-1]
    return F.layer_norm(
        x,
        (n,),
        None if weight is None else weight.reshape(n),
        None if bias is None else bias.reshape(n),
        eps,
    )


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Compute RoPE on the first elements of the last dim, as many as cos and sin have."""
    w = cos.shape[-1]
    head, tail = x[..., :w], x[..., w:]
    if interleaved:
        rotated = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    else:
        rotated = torch.cat((-head[..., w // 2 :], head[..., : w // 2]), -1)
    return torch.cat((head * cos + rotated * sin, tail), -1)


def cache_append(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Write the rows `new` into `cache` in place, from the slots `position` on."""
    rows, position = new.shape[-2], position.reshape(-1)
    slots = position.to(torch.int64)[:, None] + torch.arange(rows, device=new.device)
    if cache.device.type == "cpu" and (int(slots.min()) < 0 or int(slots.max()) >= cache.shape[-2]):
        raise errors.InputError(
            f"cache_append: slots {int(slots.min())} to {int(slots.max())} are outside a cache of "
            f"{cache.shape[-2]} slots; give a longer cache"
        )
    lead = (len(position), *[1] * (cache.dim() - 3)) if cache.dim() > 2 else ()
    index = slots.view(*lead, rows, 1).expand(new.shape)
    return cache.scatter_(-2, index, new)


def take(x: torch.Tensor, index: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return the elements of x that an index chooses along `dim`.

    The index's dims replace the dim. An index out of range gives 0. On a CPU it is an error.
    """
    size, dim = x.shape[dim], dim % x.dim()
    inside = (index >= 0) & (index < size)
    if index.device.type == "cpu" and not bool(inside.all()):
        raise errors.InputError(
            f"take: the index is {int(index.min())} to {int(index.max())}, along a dim of {size} "
            f"elements it must be 0 to {size - 1}"
        )
    at = index.clamp(0, size - 1).to(torch.int64).flatten()
    taken = x.index_select(dim, at).unflatten(dim, index.shape)
    outside = ~inside.view(*index.shape, *[1] * (x.dim() - 1 - dim))
    stored = taken.view(torch.uint8) if taken.element_size() == 1 else taken
    stored.masked_fill_(outside, 0)  # torch fills no tensor of some dtypes of codes
    return taken


def within(x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, dim: int) -> torch.Tensor:
    """Return x where lo ≤ index along `dim` < hi, 0 elsewhere."""
    at = torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    return torch.where((at >= lo) & (at < hi), x, 0.0)


def softmax(
    x: torch.Tensor, lo: torch.Tensor | None = None, hi: torch.Tensor | None = None, dim: int = -1
) -> torch.Tensor:
    """Compute softmax over `dim`, or over lo ≤ index < hi with 0 elsewhere."""
    if lo is None or hi is None:
        return torch.softmax(x, dim)
    at = torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    inside = (at >= lo) & (at < hi)
    weights = torch.softmax(torch.where(inside, x, float("-inf")), dim)
    return torch.where(inside, weights, 0.0)  # a row with no index inside is NaN before this


def ratio(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x / y, and 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / y)


def select(m: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x where m is not 0, else y."""
    return torch.where(m != 0, x, y)


def bits(x: torch.Tensor | float, start: torch.Tensor | float, count: int) -> torch.Tensor:
    """Return `count` bits of the byte x from bit `start` on, as a whole number.

    Both are rounded down. x is taken modulo 256 and `start` modulo 8. NaN and infinity count as 0.
    """
    dtype = torch.result_type(x, start)
    floors = (torch.floor(torch.as_tensor(a)) for a in (x, start))
    byte, shift = (
        torch.nan_to_num(torch.remainder(a, n)).to(torch.int32)
        for a, n in zip(floors, (256, 8), strict=True)
    )
    return ((byte >> shift) & ((1 << count) - 1)).to(dtype)


def lookup(x: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Return values[i], where i is x rounded down and clamped to the indices of `values`."""
    last = len(values) - 1
    beyond = 2 * last + 1  # is not below `last`, however it is rounded
    known = torch.tensor(values, dtype=x.dtype, device=x.device)
    index = x.nan_to_num(nan=beyond).clamp(0, beyond).to(torch.int32).clamp_(max=last)
    return known.index_select(0, index.flatten()).view(x.shape)
