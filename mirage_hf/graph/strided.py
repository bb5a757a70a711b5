"""Tensors of any strides over memory of their own, of which elements may share a place (stride 0)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reach(dims: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first one to the last one, both counted; 0 where there are none."""
    return 1 + sum((n - 1) * s for n, s in zip(dims, strides, strict=True)) if all(dims) else 0


def flat(x: Tensor) -> Tensor:
    """The memory of a tensor from its first element to its last, once."""
    return x.as_strided((reach(x.shape, x.stride()),), (1,))


def blank(
    dims: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """A tensor whose values are to be written, through `flat` where elements share a place."""
    return torch.empty(reach(dims, strides), dtype=dtype, device=device).as_strided(dims, strides)


def laid_out(
    x: Tensor, strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """x in these strides, in memory of its own. Where elements share a place, it has the first of them."""
    y = blank(x.shape, strides, dtype, device)
    for d, s in enumerate(strides):
        x = x.narrow(d, 0, 1) if s == 0 and x.shape[d] else x
    y.as_strided(x.shape, strides).copy_(x)
    return y


def copied(x: Tensor) -> Tensor:
    """A copy with the same strides, gaps and all: `clone` closes those of views of packed rows."""
    return flat(x).clone().as_strided(x.shape, x.stride())
