"""Tensors of any strides in memory of their own. Along a stride of 0, elements share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reach(dims: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a tensor spans, from its first to its last."""
    if not all(dims):
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(dims, strides, strict=True))


def flat(x: Tensor) -> Tensor:
    """Return the memory of a tensor, from its first element to its last, as one flat tensor."""
    return x.as_strided((reach(x.shape, x.stride()),), (1,))


def blank(
    dims: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return an uninitialised tensor. If elements share memory, fill it through `flat`."""
    return torch.empty(reach(dims, strides), dtype=dtype, device=device).as_strided(dims, strides)


def laid_out(
    x: Tensor, strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return x with these strides, in memory of its own.

    If elements share memory, the first of them is kept.
    """
    y = blank(x.shape, strides, dtype, device)
    for d, s in enumerate(strides):
        if s == 0 and x.shape[d]:
            x = x.narrow(d, 0, 1)
    y.as_strided(x.shape, strides).copy_(x)
    return y


def copied(x: Tensor) -> Tensor:
    """Return a copy with the same strides. `clone` would close the gaps between rows of a view."""
    return flat(x).clone().as_strided(x.shape, x.stride())
