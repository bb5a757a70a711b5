"""Tables of 4-bit codes as small integers, whose products are exact on tensor cores.

One instruction looks four codes up among eight bytes. It gives 0 for codes of the other half of the
table, if no byte has a sign. So each half of a table has products of its own. All entries of one
half are positive or 0, and those of the other half negative or 0. The results are subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

#: Numbers that a byte without a sign can hold.
_PER_BYTE = 128

#: The most bits by which digits may be shifted, so that what they count is no subnormal number.
_MOST_SHIFT = 4


@dataclass(frozen=True)
class TableBytes:
    """A table whose entries are whole numbers times a unit.

    Attributes:
        planes: For each entry, the bytes of its absolute value: one, or a higher and a lower one,
            which counts 1/128 as much.
        unit: What the last byte counts.
        negative: The half of the table whose entries are negative: 0 or 1.
    """

    planes: tuple[tuple[int, ...], ...]
    unit: float
    negative: int

    def entry(self, code: int) -> int:
        """Return the absolute value of an entry as a multiple of the unit."""
        return sum(p[code] * _PER_BYTE**n for n, p in enumerate(reversed(self.planes)))

    @property
    def shift(self) -> int:
        """The number of bits that the unit is shifted by, if it is a small power of two. Else 0."""
        bits = -math.log2(self.unit)
        return int(bits) if bits in range(_MOST_SHIFT + 1) else 0

    @property
    def factor(self) -> float:
        """What is left of the unit after the shift."""
        return self.unit * 2.0**self.shift

    def words(self, plane: int, half: int) -> tuple[int, int]:
        """Return the bytes of half a table as two words, the first byte lowest."""
        entries = self.planes[plane][8 * half : 8 * half + 8]
        low, high = (
            sum(byte << 8 * n for n, byte in enumerate(four)) for four in (entries[:4], entries[4:])
        )
        return low, high


@lru_cache(maxsize=64)
def table_bytes(values: Sequence[float]) -> TableBytes | None:
    """Return a table of 16 floats as whole numbers. None if its halves have no sign each.

    One byte is enough if the entries are exactly such numbers. Otherwise two bytes are closer to
    the entries than bfloat16 or float16 is.
    """
    halves = values[:8], values[8:]
    negative = next((n for n in (0, 1) if max(halves[n]) <= 0.0 <= min(halves[1 - n])), None)
    largest = max(map(abs, values))
    if negative is None or not 0.0 < largest < math.inf:
        return None
    parts = [abs(v) / largest for v in values]

    def error(most: int) -> float:
        """Return the largest relative error of an entry if the largest one is `most`."""
        return max((abs(round(p * most) / (p * most) - 1.0) for p in parts if p), default=0.0)

    small = next((most for most in range(1, _PER_BYTE) if error(most) < 1e-7), None)
    if small is not None:
        return TableBytes((tuple(round(p * small) for p in parts),), largest / small, negative)
    most = min(range(_PER_BYTE**2 // 2, _PER_BYTE**2), key=error)
    numbers = [round(p * most) for p in parts]
    planes = tuple(n // _PER_BYTE for n in numbers), tuple(n % _PER_BYTE for n in numbers)
    return TableBytes(planes, largest / most, negative)
