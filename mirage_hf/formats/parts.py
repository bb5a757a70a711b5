"""Cut a weight in codes into parts of its rows, which are decoded one after another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from mirage_hf.errors import GraphError
from mirage_hf.formats.coding import Coding, storages
from mirage_hf.graph.coded import Storage

#: Tensors of a part begin a multiple of so many bytes after those of the whole weight. So kernels
#: can load 16 bytes at once, as they do from the whole weight.
_ALIGNED = 16

#: Parts have a multiple of this many rows. The last one may have fewer. So may all parts if this
#: many exceed the limit. With parts of 4,779 and 4,780 rows, prefills took 1.4 to 3.5 times as long
#: as with whole weights (H200).
_TILE = 64


@dataclass(frozen=True)
class RowPart:
    """Successive rows of a weight in codes.

    Attributes:
        coding: How they are coded.
        cuts: For each tensor of the weight, where the rows begin along its first dim, and how many
            elements of that dim they take. None if all parts read the whole tensor.
    """

    coding: Coding
    cuts: tuple[tuple[int, int] | None, ...]

    def tensors(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Return what the inputs of `coding.write` read: views of the tensors of the weight."""
        return [
            t if cut is None else t.narrow(0, *cut) for t, cut in zip(whole, self.cuts, strict=True)
        ]


@lru_cache(maxsize=256)
def in_parts(coding: Coding, most_bytes: int) -> tuple[RowPart, ...]:
    """Cut a weight into parts that decode to at most `most_bytes` each. The last may be smaller.

    The weight stays whole if it has no such parts: rows may share words of codes, for example.
    """
    whole = (RowPart(coding, (None,) * len(coding.stored)),)
    first = coding.codes_dims[0]
    bytes_of_one = coding.rows * coding.columns * coding.dtype.itemsize // first
    if bytes_of_one * first <= most_bytes or coding.rows % first:
        return whole
    try:
        stored = storages(coding)
        step = max(_least_aligned(s, first) for s in stored)
        tile = math.lcm(step, _TILE // math.gcd(_TILE, coding.rows // first))
        most = most_bytes // bytes_of_one
        step = tile if tile <= most else step
        most = most // step * step
        if not most:
            return whole
        even = -(-first // -(-first // most))
        length = -(-even // step) * step
        return tuple(
            _part(coding, stored, begin, min(length, first - begin))
            for begin in range(0, first, length)
        )
    except GraphError:  # rows of several parts share words
        return whole


def _least_aligned(stored: Storage, first: int) -> int:
    """Return after how many elements of the first dim of the codes a tensor may be cut."""
    if stored.dims[0] != first:
        return 1  # it is not cut
    return _ALIGNED // math.gcd(_ALIGNED, stored.strides[0] * stored.dtype.itemsize)


def _part(coding: Coding, stored: Sequence[Storage], begin: int, length: int) -> RowPart:
    """Return the rows of some elements of the first dim of the codes.

    Raises:
        GraphError: They share words with other rows.
    """
    part, cuts = coding.part(length), []
    for a, b in zip(stored, storages(part), strict=True):
        if a != b and (a.dims[0], b.dims[0]) != (coding.codes_dims[0], length):
            raise GraphError("words hold codes of successive rows")
        cuts.append(None if a == b else (begin, length))
    return RowPart(part, tuple(cuts))
