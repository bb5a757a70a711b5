"""The tensors that hold the codes of inputs: packed words of 4 bits, or one code per element.

An input of dtype uint4 or int4 has dims and strides in codes. In memory it is an int32 tensor. Its
words hold eight codes each, the first in the lowest bits: those along the dims of strides below 8.
A dim of two codes may have stride −1: its first code is in the high half of each byte.

An input of dtype float8_e8m0fnu is a uint8 tensor in memory, because Triton has no such type. All
other dtypes are stored as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mirage_hf import errors
from mirage_hf.graph import strided
from mirage_hf.graph.tensors import DTensor
from mirage_hf.ops.dtypes import CODES_PER_WORD, PACKED_DTYPES

_BITS = 32 // CODES_PER_WORD


@dataclass(frozen=True)
class Storage:
    """The torch tensor that holds a tensor of a graph."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def is_packed(dtype: torch.dtype) -> bool:
    """Return whether a word of memory holds several elements of this dtype."""
    return dtype in PACKED_DTYPES


def is_exponent(dtype: torch.dtype) -> bool:
    """Return whether elements of a dtype are powers of two. A byte holds the exponent plus 127."""
    return dtype is torch.float8_e8m0fnu


def word_dims(dims: Sequence[int], strides: Sequence[int]) -> dict[int, int]:
    """Return the dims along which words hold the codes of 4 bits of an input.

    Together they number the eight codes of a word. Only the first may go on in further words.

    Returns:
        How many codes of a word lie along each of these dims, the longest stride first.

    Raises:
        GraphError: If words cannot hold codes of these dims and strides.
    """
    wide = [(abs(s), d) for d, (n, s) in enumerate(zip(dims, strides, strict=True)) if n > 1]
    inside = sorted((s, d) for s, d in wide if 0 < s < CODES_PER_WORD)
    filled, fits = 1, all(s % CODES_PER_WORD == 0 for s, _ in wide if s >= CODES_PER_WORD)
    for stride, d in inside:
        fits &= stride == filled and (strides[d] > 0 or (stride, dims[d]) == (1, 2))
        filled *= dims[d]
    if not fits or not inside or filled % CODES_PER_WORD or CODES_PER_WORD % inside[-1][0]:
        raise errors.GraphError(
            f"new_input: codes of {errors.shape(dims)} with strides {errors.shape(strides)} do not "
            f"fill int32 words of {CODES_PER_WORD} codes; one dim must have stride 1, the "
            f"dims of a word must follow without gaps and hold a multiple of {CODES_PER_WORD} "
            f"codes, and the other strides must be such multiples"
        )
    ends = [s for s, _ in inside[1:]] + [CODES_PER_WORD]
    counts = [(d, end // s) for (s, d), end in zip(inside, ends, strict=True)]
    return dict(reversed(counts))


def high_first(dims: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the dim of two codes whose first is in the high half of each byte, if there is one."""
    found = [d for d, (n, s) in enumerate(zip(dims, strides, strict=True)) if n > 1 and s < 0]
    return found[0] if found else None


def storage(t: DTensor) -> Storage:
    """Return the torch tensor that holds `t`."""
    if not is_packed(t.dtype):
        return Storage(t.dims, t.strides, torch.uint8 if is_exponent(t.dtype) else t.dtype)
    per_word = word_dims(t.dims, t.strides)
    dims = tuple(n // per_word.get(d, 1) for d, n in enumerate(t.dims))
    strides = tuple(max(1, s // CODES_PER_WORD) if s else 0 for s in t.strides)
    return Storage(dims, strides, torch.int32)


def unpacked(t: DTensor, x: torch.Tensor) -> torch.Tensor:
    """Return the elements of an input that `x` stores. Codes of 4 bits are returned as bytes."""
    if not is_packed(t.dtype):
        return x.view(t.dtype) if is_exponent(t.dtype) else x
    decode = uint4_codes if t.dtype is torch.uint4 else int4_codes
    codes = decode(x, word_dims(t.dims, t.strides))
    turned = high_first(t.dims, t.strides)
    return codes if turned is None else codes.flip(turned)


def uint4_codes(words: torch.Tensor, per_word: dict[int, int]) -> torch.Tensor:
    """Return the codes in int32 words that hold `per_word[d]` of them along dim d.

    The last of these dims is that of the lowest bits.
    """
    pairs = words.unsqueeze(-1).view(torch.uint8)  # each byte holds two codes, the lower bits first
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    order = []
    for d in range(words.ndim):
        order += [d, words.ndim + [*per_word].index(d)] if d in per_word else [d]
    sizes = [n * per_word.get(d, 1) for d, n in enumerate(words.shape)]
    return codes.unflatten(-1, [*per_word.values()]).permute(order).reshape(sizes)


def int4_codes(words: torch.Tensor, per_word: dict[int, int]) -> torch.Tensor:
    """Return signed codes, as `uint4_codes` does unsigned ones."""
    flipped = words ^ -0x77777778  # 0x88888888: x and the other sign bit are x + 8
    return uint4_codes(flipped, per_word).view(torch.int8) - 8


def packed(t: DTensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the tensor that stores the elements `codes` of input `t`, with its strides."""
    stored = storage(t)
    if is_exponent(t.dtype):
        codes = codes.to(t.dtype).view(stored.dtype)
    if not is_packed(t.dtype):
        return strided.laid_out(codes, stored.strides, stored.dtype, codes.device)
    turned = high_first(t.dims, t.strides)
    codes = codes if turned is None else codes.flip(turned)
    groups, per_word = codes.to(torch.uint8) & 15, word_dims(t.dims, t.strides)
    for d, count in per_word.items():
        groups = groups.unflatten(d, (-1, count)).movedim(d + 1, -1)
    pairs = groups.flatten(-len(per_word)).unflatten(-1, (-1, 2))
    in_bytes = pairs[..., 0] | pairs[..., 1] << _BITS
    words = in_bytes.contiguous().view(torch.int32).squeeze(-1)
    return strided.laid_out(words, stored.strides, stored.dtype, codes.device)


#: A reach of `random_codes` that leaves out no code.
WHOLE_RANGE = 256

#: The least and largest exponent of random powers of two.
_EXPONENTS = (-4, 2)


def random_codes(
    t: DTensor,
    generator: torch.Generator,
    device: torch.device | str,
    reach: int = WHOLE_RANGE,
) -> torch.Tensor:
    """Return a tensor that stores random codes of input `t`.

    Floats of 8 bits are normal. Powers of two are between 1/16 and 4.

    Args:
        t: The input.
        generator: Draws the codes.
        device: Where the tensor lies.
        reach: Whole numbers are at most this far from the middle of their range.
    """
    if is_exponent(t.dtype):
        low, high = _EXPONENTS
        powers = torch.randint(low, high + 1, t.dims, generator=generator, device=device)
        x = torch.exp2(powers.float())
    elif t.dtype.is_floating_point:
        x = torch.randn(t.dims, generator=generator, dtype=torch.float32, device=device)
    else:
        low, high = _range(t.dtype)
        low = max(low, int(middle(t.dtype)) - reach)
        high = min(high, int(middle(t.dtype)) + reach)
        dtype = torch.uint8 if low >= 0 else torch.int8
        x = torch.randint(low, high + 1, t.dims, generator=generator, dtype=dtype, device=device)
    return packed(t, x)


def middle(dtype: torch.dtype) -> float:
    """Return the middle of the codes of an integer dtype, the usual zero point."""
    low, high = _range(dtype)
    return (low + high + 1) / 2


def _range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the largest code of an integer dtype."""
    if is_packed(dtype):
        return (0, 15) if dtype is torch.uint4 else (-8, 7)
    info = torch.iinfo(dtype)
    return info.min, info.max


def stored_bytes(t: DTensor) -> int:
    """Return the bytes of memory that hold the distinct elements of a tensor."""
    stored = storage(t)
    count = math.prod(n for n, s in zip(stored.dims, stored.strides, strict=True) if s)
    return count * stored.dtype.itemsize
