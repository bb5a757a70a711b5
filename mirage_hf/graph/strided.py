"""Tensors of any strides in memory of their own. With stride 0, elements share a place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reach(dims: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory lie between the first and the last, both counted."""
    if not all(dims):
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(dims, strides, strict=True))


def flat(x: Tensor) -> Tensor:
    """Return the memory of a tensor from its first element to its last, each place once."""
    return x.as_strided((reach(x.shape, x.stride()),), (1,))


def blank(
    dims: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return a tensor to be filled, through `flat` if elements share places."""
    return torch.empty(reach(dims, strides), dtype=dtype, device=device).as_strided(dims, strides)


def laid_out(
    x: Tensor, strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return x with these strides, in memory of its own.

    Where elements share a place, it has the first of them.
    """
    y = blank(x.shape, strides, dtype, device)
    for d, s in enumerate(strides):
        if s == 0 and x.shape[d]:
            x = x.narrow(d, 0, 1)
    y.as_strided(x.shape, strides).copy_(x)
    return y


def copied(x: Tensor) -> Tensor:
    """Return a copy with the same strides. `clone` would close the gaps of views of packed rows."""
    return flat(x).clone().as_strided(x.shape, x.stride())
