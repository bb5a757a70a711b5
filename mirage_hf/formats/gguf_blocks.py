"""Say where blocks of GGUF hold codes, scales and minima.

A block of Q8_0 has a float16 scale and 32 codes of 8 bits. Blocks of Q4_K, Q5_K and Q6_K have 256
codes. Each 32 of them, or 16 in Q6_K, have a scale that is a code, too: of 6 bits, or of 8 in Q6_K.
In Q4_K and Q5_K they also have a minimum of 6 bits, which is subtracted. Float16 numbers multiply
the scales and the minima of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mirage_hf.formats.coding import Coding
from mirage_hf.formats.stored import Bits, Field, Stored

#: The size and stride of each dim of an input within a block, in elements.
_Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a weight. They follow each other row by row.

    Attributes:
        rows: The rows of the weight: outputs of the linear.
        columns: Its columns: inputs of the linear.
        codes: The codes of a block.
        bytes: Its bytes.
    """

    rows: int
    columns: int
    codes: int
    bytes: int

    def stored(self, dtype: torch.dtype, pairs: _Pairs) -> Stored:
        """Return an input that all blocks have at the same place."""
        blocks = self.columns // self.codes
        block = 2 * self.bytes if dtype is torch.uint4 else self.bytes // dtype.itemsize
        return Stored.of([(self.rows, blocks * block), (blocks, block), *pairs], dtype)

    def field(self, count: int, pairs: _Pairs, starts: _Pairs = ()) -> Field:
        """Return bits of bytes that all blocks have at the same place.

        Args:
            count: How many bits of each byte.
            pairs: Where the bytes lie within a block.
            starts: Which bit is the first one, as a view of the numbers 0 to 7.
        """
        bits = Stored.of([(self.rows, 0), (1, 1), *starts], torch.uint8) if starts else None
        return Field(self.stored(torch.uint8, pairs), count, bits)


@dataclass(frozen=True)
class Layout:
    """A type of blocks.

    Attributes:
        name: Its name.
        codes: The codes of a block.
        bytes: Its bytes.
        begins: The byte of a block where each input of a program begins, by role. Of inputs that
            say which bits a field has, the bit.
        coding: Returns the coding of a weight.
    """

    name: str
    codes: int
    bytes: int
    begins: Mapping[str, int]
    coding: Callable[[Blocks, torch.dtype], Coding]


def _q8_0(blocks: Blocks, dtype: torch.dtype) -> Coding:
    codes = blocks.stored(torch.int8, [(32, 1)])
    scales = blocks.stored(torch.float16, [(1, 1)])
    return Coding(blocks.rows, blocks.columns, dtype, codes, scales, wide=True)


def _with_minima(blocks: Blocks, dtype: torch.dtype, codes: Stored | Bits) -> Coding:
    """Return the coding of Q4_K or Q5_K.

    The 256 codes are four dims of blocks, 2 · 2 · 2, and the 32 codes of a block. A nibble of the
    first four scales and minima, and two bits of all others, lie in bytes of others.
    """
    one = [(2, 2), (2, 1), (1, 1)]
    two_bits = [(2, 2), (1, 1), (1, 1), (1, 1)]
    scales = Bits(blocks.field(4, [(2, 8), *one]), blocks.field(2, [(2, 0), *one], two_bits))
    nibble = [(2, 4), (1, 1), (1, 1), (1, 1)]
    minima = Bits(
        blocks.field(4, [(2, 4), *one], nibble), blocks.field(2, [(2, 0), *one], two_bits)
    )
    factor = blocks.stored(torch.float16, [(1, 1)] * 4)
    return Coding(
        blocks.rows,
        blocks.columns,
        dtype,
        codes,
        scales,
        wide=True,
        factors=factor,
        minima=minima,
        minimum_factors=factor,
    )


#: A word of codes of 4 bits has four columns, and those 32 columns later.
_NIBBLES = [(2, 128), (2, 64), (2, 1), (32, 2)]


def _q4_k(blocks: Blocks, dtype: torch.dtype) -> Coding:
    return _with_minima(blocks, dtype, blocks.stored(torch.uint4, _NIBBLES))


def _q5_k(blocks: Blocks, dtype: torch.dtype) -> Coding:
    """Return the coding. Bit n of a byte is the highest bit of a code of block n."""
    high = blocks.field(1, [(2, 0), (2, 0), (2, 0), (32, 1)], [(2, 4), (2, 2), (2, 1), (1, 1)])
    return _with_minima(blocks, dtype, Bits(blocks.stored(torch.uint4, _NIBBLES), high))


def _q6_k(blocks: Blocks, dtype: torch.dtype) -> Coding:
    """Return the coding. The dims of a block are 2 halves, 2 nibbles, 2 runs, and 2 · 16 codes."""
    ones = [(1, 1), (1, 1)]
    low = blocks.field(
        4, [(2, 64), (2, 0), (2, 32), (2, 16), (16, 1)], [(1, 1), (2, 4), (1, 1), *ones]
    )
    high = blocks.field(
        2, [(2, 32), (2, 0), (2, 0), (2, 16), (16, 1)], [(1, 1), (2, 4), (2, 2), *ones]
    )
    scales = blocks.stored(torch.int8, [(2, 8), (2, 4), (2, 2), (2, 1), (1, 1)])
    factors = blocks.stored(torch.float16, [(1, 1)] * 5)
    codes = Bits(low, high)
    return Coding(
        blocks.rows, blocks.columns, dtype, codes, scales, zero=32.0, wide=True, factors=factors
    )


#: Where the inputs of scales and minima begin in Q4_K and Q5_K.
_SCALES_AND_MINIMA = {
    "scales": 4,
    "high bits of scales": 4,
    "starts of high bits of scales": 4,
    "factors": 0,
    "minima": 8,
    "starts of minima": 0,
    "high bits of minima": 8,
    "starts of high bits of minima": 4,
    "minimum factors": 2,
}

#: The types that are read, by the number that GGUF gives them.
LAYOUTS: Mapping[int, Layout] = {
    8: Layout("Q8_0", 32, 34, {"codes": 2, "scales": 0}, _q8_0),
    12: Layout("Q4_K", 256, 144, {"codes": 16, **_SCALES_AND_MINIMA}, _q4_k),
    13: Layout(
        "Q5_K",
        256,
        176,
        {
            "codes": 48,
            "high bits of codes": 16,
            "starts of high bits of codes": 0,
            **_SCALES_AND_MINIMA,
        },
        _q5_k,
    ),
    14: Layout(
        "Q6_K",
        256,
        210,
        {
            "codes": 0,
            "starts of codes": 0,
            "high bits of codes": 128,
            "starts of high bits of codes": 0,
            "scales": 192,
            "factors": 208,
        },
        _q6_k,
    ),
}
