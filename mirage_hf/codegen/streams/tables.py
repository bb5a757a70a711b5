"""Tables of 4-bit codes as bytes, which kernels look up four at a time.

One instruction looks four codes up among eight bytes. It gives 0 for codes of the other half of
the table, if no byte has a sign. So the bytes of a table have seven bits, and entries that need
more have two bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

#: Numbers that a byte without a sign can hold.
_PER_BYTE = 128

#: The most bits by which digits may be shifted, so that what they count is no subnormal number.
_MOST_SHIFT = 4

#: What is added to the higher bytes of halves, so that none is negative.
OFFSET = 64

#: The bytes of a table: for each entry one byte, or a higher one and a lower one, which counts
#: 1/128 as much.
Planes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TableBytes:
    """A table whose entries are whole numbers times a unit, for products of signed bytes.

    All entries of one half are positive or 0, and those of the other half negative or 0. Each half
    has products of its own, and the results are subtracted.

    Attributes:
        planes: The bytes of the absolute values.
        unit: What the last byte counts.
        negative: The half of the table whose entries are negative: 0 or 1.
    """

    planes: Planes
    unit: float
    negative: int

    @property
    def shift(self) -> int:
        """The number of bits that the unit is shifted by, if it is a small power of two. Else 0."""
        bits = -math.log2(self.unit)
        return int(bits) if bits in range(_MOST_SHIFT + 1) else 0

    @property
    def factor(self) -> float:
        """What is left of the unit after the shift."""
        return self.unit * 2.0**self.shift


@dataclass(frozen=True)
class TableHalves:
    """A table whose entries are (higher byte + lower byte / 128 - OFFSET) times a unit."""

    planes: Planes
    unit: float


def words(bytes_: Sequence[int]) -> tuple[int, ...]:
    """Return bytes as words, the first byte of each lowest."""
    return tuple(
        sum(byte << 8 * n for n, byte in enumerate(bytes_[at : at + 4]))
        for at in range(0, len(bytes_), 4)
    )


@lru_cache(maxsize=64)
def table_bytes(values: Sequence[float]) -> TableBytes | None:
    """Return a table of 16 floats as whole numbers. None if its halves have no sign each.

    One byte is enough if the entries are exactly such numbers. Otherwise two bytes are closer to
    the entries than bfloat16 or float16 is.
    """
    halves = values[:8], values[8:]
    negative = next((n for n in (0, 1) if max(halves[n]) <= 0.0 <= min(halves[1 - n])), None)
    largest = _largest(values)
    if negative is None or not largest:
        return None
    error = _error_of(values)
    most = next((most for most in range(1, _PER_BYTE) if error(most) < 1e-7), None)
    is_small = most is not None
    most = most or min(range(_PER_BYTE**2 // 2, _PER_BYTE**2), key=error)
    numbers = tuple(round(abs(v) / largest * most) for v in values)
    return TableBytes((numbers,) if is_small else _planes(numbers), largest / most, negative)


@lru_cache(maxsize=64)
def table_halves(values: Sequence[float]) -> TableHalves | None:
    """Return a table of 16 floats in two bytes with an offset. None if an entry is infinite."""
    largest = _largest(values)
    if not largest:
        return None
    end = OFFSET * _PER_BYTE
    most = min(range(end // 2, end), key=_error_of(values))
    numbers = tuple(round(v / largest * most) + end for v in values)
    return TableHalves(_planes(numbers), largest / most * _PER_BYTE)


def _largest(values: Sequence[float]) -> float:
    """Return the largest absolute value, 0 if it is infinite or NaN."""
    largest = max(map(abs, values))
    return largest if all(map(math.isfinite, values)) else 0.0


def _error_of(values: Sequence[float]) -> Callable[[int], float]:
    """Return a function: the largest relative error of an entry if the largest one is a number."""
    largest = _largest(values)
    parts = [abs(v) / largest for v in values if v]

    def error(most: int) -> float:
        return max(abs(round(p * most) / (p * most) - 1.0) for p in parts)

    return error


def _planes(numbers: Sequence[int]) -> Planes:
    """Return the higher and the lower bytes of numbers of 14 bits."""
    return tuple(n // _PER_BYTE for n in numbers), tuple(n % _PER_BYTE for n in numbers)
