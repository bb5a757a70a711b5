"""How a program reads the tensors of a container: codes, bits of bytes, scales and zero points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mirage_hf.graph import coded
from mirage_hf.ops.dtypes import CODES_PER_WORD


@dataclass(frozen=True)
class Stored:
    """A tensor of a container, as a program reads it. Dims and strides of uint4 are in codes."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(pairs: Sequence[tuple[int, int]], dtype: torch.dtype) -> Stored:
        """Return a tensor from the size and stride of each dim."""
        dims, strides = zip(*pairs, strict=True)
        return Stored(dims, strides, dtype)

    def in_part(self, dims: Sequence[int], length: int) -> Stored:
        """Return how this is stored for a part of a weight's rows.

        Args:
            dims: The dims that it broadcasts to. If its first dim differs, all parts share it.
            length: How many elements of the first dim the part has.
        """
        if len(self.dims) < len(dims) or self.dims[0] != dims[0]:
            return self
        return replace(self, dims=(length, *self.dims[1:]))


@dataclass(frozen=True)
class Field:
    """Some bits of each of several bytes, as a program reads them. They are a whole number.

    Attributes:
        stored: The bytes.
        count: How many bits.
        starts: The first of these bits, as bytes. Their dims broadcast to those of the others. None
            if it is the lowest bit.
    """

    stored: Stored
    count: int
    starts: Stored | None = None

    def in_part(self, dims: Sequence[int], length: int) -> Field:
        """Return how this is stored for a part of a weight's rows. See `Stored.in_part`."""
        starts = self.starts and self.starts.in_part(dims, length)
        return replace(self, stored=self.stored.in_part(dims, length), starts=starts)


@dataclass(frozen=True)
class Bits:
    """A number whose bits lie in several places, the lowest ones first.

    Attributes:
        low: The lowest bits: codes of 4 bits, or a field.
        high: The bits above them.
    """

    low: Stored | Field
    high: Field

    def in_part(self, dims: Sequence[int], length: int) -> Bits:
        """Return how this is stored for a part of a weight's rows. See `Stored.in_part`."""
        low, high = self.low.in_part(dims, length), self.high.in_part(dims, length)
        return Bits(low, high)

    @property
    def places(self) -> int:
        """How many bits are below those of `high`."""
        return self.low.count if isinstance(self.low, Field) else 4


#: A number of each element of a weight, or of a block of them.
Number = Stored | Field | Bits


def lowest_bits(number: Number) -> Stored:
    """Return where the lowest bits of a number are stored."""
    while not isinstance(number, Stored):
        number = number.low if isinstance(number, Bits) else number.stored
    return number


def inputs_by_role(name: str, number: Number | None) -> dict[str, Stored]:
    """Return the inputs of a number by their roles. The lowest bits have its name."""
    if number is None:
        return {}
    if isinstance(number, Stored):
        return {name: number}
    if isinstance(number, Bits):
        high = inputs_by_role(f"high bits of {name}", number.high)
        return inputs_by_role(name, number.low) | high
    return {name: number.stored} | inputs_by_role(f"starts of {name}", number.starts)


@dataclass(frozen=True)
class Split:
    """How the rows and columns of a weight are split into blocks, one for each scale.

    Attributes:
        rows: The rows of the weight: outputs of the linear.
        columns: Its columns: inputs of the linear.
        row_block: How many rows one block has. 1 does not split the rows.
        group: How many columns one block has. All columns do not split them.
    """

    rows: int
    columns: int
    row_block: int = 1
    group: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", self.group or self.columns)

    @property
    def groups(self) -> int:
        """The groups of a row."""
        return self.columns // self.group

    def codes(self, dtype: torch.dtype) -> Stored:
        """Return codes that are stored row by row."""
        return self._row_major(self._rows() + self._columns(self.group), dtype)

    def per_row(self, dtype: torch.dtype) -> Stored:
        """Return one value for each group of each row, stored row by row."""
        return self._row_major(self._rows() + self._columns(1), dtype)

    def per_block(self, dtype: torch.dtype) -> Stored:
        """Return one value for each block of rows and columns, stored row by row."""
        if self.row_block == 1:
            return self.per_row(dtype)
        dims = self._rows()[:-1] + (1,) + self._columns(1)
        return self._row_major(dims, dtype)

    def per_tensor(self, dtype: torch.dtype) -> Stored:
        """Return one value for the whole weight."""
        return self._row_major((1,) * (len(self._rows()) + len(self._columns(1))), dtype)

    def shared(self, dtype: torch.dtype) -> Stored:
        """Return one value for the whole weight that is read as one for each row.

        Weights with such values can be joined.
        """
        ones = (1,) * (len(self._rows()) + len(self._columns(1)) - 1)
        return Stored((self._rows()[0], *ones), (0, *ones), dtype)

    def packed_along_rows(self, dtype: torch.dtype, per_word: int) -> Stored:
        """Return one code for each group of each row, where words hold codes of successive rows.

        The words are stored as a row-major tensor (rows / per_word, groups), and `row_block` is
        `per_word`.
        """
        dims = self._rows() + self._columns(1)
        strides = (self.groups * per_word, 1, per_word, 1)[: len(dims)]
        return Stored(dims, strides, dtype)

    def _rows(self) -> tuple[int, ...]:
        if self.row_block == 1:
            return (self.rows,)
        return (self.rows // self.row_block, self.row_block)

    def _columns(self, group: int) -> tuple[int, ...]:
        if self.group == self.columns:
            return (group,)
        return (self.groups, group)

    def _row_major(self, dims: tuple[int, ...], dtype: torch.dtype) -> Stored:
        strides = tuple(math.prod(dims[d + 1 :]) for d in range(len(dims)))
        return Stored(dims, strides, dtype)


def words_of(dtype: torch.dtype) -> int:
    """Return how many codes of a dtype an int32 word holds."""
    return CODES_PER_WORD if coded.is_packed(dtype) else 4 // dtype.itemsize
