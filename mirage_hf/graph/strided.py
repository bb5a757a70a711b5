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


def in_turns(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors with equal contents. Those that fill each other's gaps share memory.

    So do the weights of gate and up if their rows lie in turns: both are views of one parameter.
    """
    found = list(tensors)
    alike: dict[object, list[int]] = {}
    for n, x in enumerate(found):
        alike.setdefault((x.shape, x.stride(), x.dtype), []).append(n)
    for numbers in alike.values():
        first = found[numbers[0]]
        row, gap = _row_and_gap(first)
        if len(numbers) < 2 or gap != len(numbers) * row:
            continue
        memory = first.new_empty(reach(first.shape, first.stride()) + gap - row)
        for turn, n in enumerate(numbers):
            view = memory.as_strided(first.shape, first.stride(), turn * row)
            found[n] = view.copy_(found[n])
    return found


def _row_and_gap(x: Tensor) -> tuple[int, int]:
    """Return how many elements lie side by side, and the distance to the next ones.

    The distance is 0 if there are no others, or if other distances are no multiples of it.
    """
    row, gap, end = 1, 0, 0
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if not gap and stride == row:
            row *= size
            continue
        gap = gap or stride
        if not gap or stride % gap or stride < end:
            return row, 0
        end = stride * size
    return row, gap


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
