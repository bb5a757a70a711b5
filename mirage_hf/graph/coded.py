"""The tensors that hold the codes of inputs: packed words of uint4, or one code per element.

An input of dtype uint4 has dims and strides in codes. In memory it is an int32 tensor, whose words
hold eight codes each along the dim of stride 1. All other dtypes are stored as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mirage_hf import errors
from mirage_hf.graph import strided
from mirage_hf.graph.tensors import DTensor
from mirage_hf.ops.dtypes import CODES_PER_WORD

_BITS = 32 // CODES_PER_WORD


@dataclass(frozen=True)
class Storage:
    """The torch tensor that holds a tensor of a graph."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def is_packed(dtype: torch.dtype) -> bool:
    """Return whether a word of memory holds several elements of this dtype."""
    return dtype is torch.uint4


def packed_dim(dims: Sequence[int], strides: Sequence[int]) -> int:
    """Return the dim along which a word holds the codes of a uint4 input.

    Raises:
        GraphError: If words cannot hold codes of these dims and strides.
    """
    wide = [(d, s) for d, (n, s) in enumerate(zip(dims, strides, strict=True)) if n > 1]
    packed = [d for d, s in wide if s == 1]
    others = [s for _, s in wide if s != 1]
    if (
        len(packed) != 1
        or dims[packed[0]] % CODES_PER_WORD
        or any(s % CODES_PER_WORD for s in others)
    ):
        raise errors.GraphError(
            f"new_input: uint4 codes of {errors.shape(dims)} with strides {errors.shape(strides)} "
            f"do not fill int32 words of {CODES_PER_WORD} codes; one dim must have stride 1 and a "
            f"multiple of {CODES_PER_WORD} codes, and the other strides must be such multiples"
        )
    return packed[0]


def storage(t: DTensor) -> Storage:
    """Return the torch tensor that holds `t`."""
    if not is_packed(t.dtype):
        return Storage(t.dims, t.strides, t.dtype)
    packed = packed_dim(t.dims, t.strides)
    dims = tuple(n // CODES_PER_WORD if d == packed else n for d, n in enumerate(t.dims))
    strides = tuple(max(1, s // CODES_PER_WORD) if s else 0 for s in t.strides)
    return Storage(dims, strides, torch.int32)


def unpacked(t: DTensor, x: torch.Tensor) -> torch.Tensor:
    """Return the elements of an input that `x` stores: codes of uint4 as uint8, others as is."""
    if not is_packed(t.dtype):
        return x
    return uint4_codes(x, packed_dim(t.dims, t.strides))


def uint4_codes(words: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the codes in int32 words that hold eight of them along `dim`, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & 15
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1).to(torch.uint8)


def packed(t: DTensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the tensor that stores the elements `codes` of input `t`, with its strides."""
    stored = storage(t)
    if not is_packed(t.dtype):
        return strided.laid_out(codes, stored.strides, stored.dtype, codes.device)
    dim = packed_dim(t.dims, t.strides)
    shifts = torch.arange(0, 32, _BITS, dtype=torch.int64, device=codes.device)
    groups = codes.to(torch.int64).unflatten(dim, (-1, CODES_PER_WORD)).movedim(dim + 1, -1)
    words = (groups << shifts).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return strided.laid_out(words, stored.strides, stored.dtype, codes.device)


#: A reach of `random_codes` that leaves out no code.
WHOLE_RANGE = 256


def random_codes(
    t: DTensor,
    generator: torch.Generator,
    device: torch.device | str,
    reach: int = WHOLE_RANGE,
) -> torch.Tensor:
    """Return a tensor that stores random codes of input `t`. Floats of 8 bits are normal.

    Args:
        t: The input.
        generator: Draws the codes.
        device: Where the tensor lies.
        reach: Whole numbers are at most this far from the middle of their range.
    """
    if t.dtype.is_floating_point:
        x = torch.randn(t.dims, generator=generator, dtype=torch.float32, device=device)
    else:
        low, high = _range(t.dtype)
        low = max(low, int(middle(t.dtype)) - reach)
        high = min(high, int(middle(t.dtype)) + reach)
        x = torch.randint(low, high + 1, t.dims, generator=generator, device=device)
    return packed(t, x)


def middle(dtype: torch.dtype) -> float:
    """Return the middle of the codes of an integer dtype, the usual zero point."""
    low, high = _range(dtype)
    return (low + high + 1) / 2


def _range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the largest code of an integer dtype."""
    if is_packed(dtype):
        return 0, 15
    info = torch.iinfo(dtype)
    return info.min, info.max


def stored_bytes(t: DTensor) -> int:
    """Return the bytes of memory that hold the distinct elements of a tensor."""
    stored = storage(t)
    count = math.prod(n for n, s in zip(stored.dims, stored.strides, strict=True) if s)
    return count * stored.dtype.itemsize
