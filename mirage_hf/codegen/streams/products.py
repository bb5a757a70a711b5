"""What a kernel that streams codes computes: sums of codes times another factor, and how codes lie.

Such a kernel computes Σ (codes − zero) · other for one row of `other`, or for a batch of up to 16.
Zero points are one number, or inputs for each row and group of columns. Codes may be indices
of a table instead, such as 4-bit floats. Sums over groups of columns may be multiplied by scales.
Then shifts times the sums of `other` may be added: inputs for each row and group of columns.
All rows of codes share `other`, and any sums that no row of codes enters, such as the sum of
squares of a norm. What follows the sums is elementwise.

The words that hold codes are row-major, or column-major as those of GPTQ and AWQ. So are scales. A
word of GPTQ holds codes of one row, and a word of AWQ those of eight rows of one column. torchao's
tiles have their words in the order in which the lanes of a warp load them, and the scale of each
row beside its shift. A byte of HQQ holds codes of two rows.

An index may choose among the experts of a mixture. Along some of its axes it numbers rows of codes:
each chosen expert has its own. Along another one it numbers *pieces* of columns: one sum adds up
those of several experts, as if their rows lay end to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.graph.block import BlockGraph, Taken
from mirage_hf.graph.coded import is_packed
from mirage_hf.graph.kernel import DTensor

#: Rows of codes that a warp multiplies at a time: those of the instruction's left factor.
ROWS = 16

#: Rows of a tile of each product if words are column-major, the most first. A row of words of GPTQ
#: fills 128 or 64 bytes then, and one of AWQ 32 or 16.
_ROWS_OF_WORDS = 32, 16
_ROWS_IN_WORDS = 64, 32

#: The number that each dtype of codes has to have subtracted. The instructions multiply signed
#: bytes, or halves.
ZEROS = {
    torch.uint4: 8.0,
    torch.int4: 0.0,
    torch.uint8: 128.0,
    torch.int8: 0.0,
    torch.float8_e4m3fn: 0.0,
}


@dataclass(frozen=True)
class Product:
    """A sum of codes times the other factor.

    Attributes:
        out: The accumulator.
        codes: The input that holds the codes.
        scale: The input that multiplies the sum of each group of columns, if there is one.
        zero: The input that is subtracted from the codes of each group of columns, if there is one.
        shift: The input that is added to scaled codes of each group of columns, if there is one.
    """

    out: str
    codes: str
    scale: str | None
    zero: str | None = None
    shift: str | None = None

    @property
    def offset(self) -> str | None:
        """The zero point or the shift, if there is one. Sums of columns are multiplied by it."""
        return self.zero if self.shift is None else self.shift


@dataclass(frozen=True)
class Products:
    """What a kernel that streams codes computes.

    Attributes:
        op: The placed op.
        products: The sums of codes times `other`.
        other: Values whose product all codes are multiplied with. Together they carry `columns`,
            and may carry `batch`.
        sums: Accumulators of values that carry `columns`, and may carry `batch`, with these values.
        rows: The axes that number the rows of codes, the outer one first.
        columns: The summed axes, the outer one first: that of pieces if there is one, then those of
            the codes.
        batch: The axis that numbers the rows of `other`, if there is one.
        taken: The index that chooses among experts, if there is one.
        values: The table that the codes are looked up in, if there is one.
        pair: The last of `columns` if it numbers the two codes of a byte, the higher one first.
        word: The last of `columns` if it numbers the codes of a word, and words are column-major.
        word_rows: The last two of `rows` if they number the codes of a word. They are of rows
            0, 2, 4, 6, 1, 3, 5 and 7 of eight.
        lanes: The last four of `columns` if words lie as lanes load them: 128 columns of a row.
        row_pair: The last of `rows` if it numbers the two codes of a byte, the higher one first.
    """

    op: PlacedOp
    products: tuple[Product, ...]
    other: tuple[str, ...]
    sums: tuple[tuple[str, str], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    batch: str | None = None
    taken: Taken | None = None
    values: tuple[float, ...] = ()
    pair: str | None = None
    word: str | None = None
    word_rows: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()
    row_pair: str | None = None

    @property
    def block(self) -> BlockGraph:
        """The block graph."""
        assert self.op.block is not None
        return self.op.block

    def tensor(self, name: str) -> DTensor:
        """Return the operand that an input reads: the first, if several are joined."""
        return self.op.operands[self.block.inputs_by_name[name].sources[0]]

    @cached_property
    def grouped(self) -> tuple[tuple[Product, str | None], ...]:
        """Each product with its scales, and then each with its zero points or shifts, if any."""
        scales = tuple((p, p.scale) for p in self.products)
        return (*scales, *((p, p.offset) for p in self.products))

    @property
    def has_offsets(self) -> bool:
        """Whether zero points or shifts are inputs."""
        return any(p.offset is not None for p in self.products)

    @property
    def num_rows(self) -> int:
        """How many rows of codes each product has."""
        return self._size(self.rows)

    @property
    def num_columns(self) -> int:
        """How many columns all codes have, those of all pieces."""
        return self._size(self.columns)

    @property
    def choosing_rows(self) -> tuple[str, ...]:
        """The axes of rows that the index has."""
        return () if self.taken is None else tuple(a for a in self.taken.axes if a in self.rows)

    @property
    def own_rows(self) -> tuple[str, ...]:
        """The axes of rows that the codes of one expert have, or all codes without an index."""
        return self.rows[len(self.choosing_rows) :]

    @property
    def piece(self) -> str | None:
        """The axis of columns that the index has, if there is one."""
        chosen = () if self.taken is None else self.taken.axes
        return self.columns[0] if self.columns[0] in chosen else None

    @property
    def own_columns(self) -> tuple[str, ...]:
        """The axes of columns that the codes have. A loop walks the first one."""
        return self.columns[int(self.piece is not None) :]

    @property
    def num_own_rows(self) -> int:
        """How many rows of codes an expert has, or all rows without an index."""
        return self._size(self.own_rows)

    @property
    def num_pieces(self) -> int:
        """How many pieces the columns have."""
        return 1 if self.piece is None else self.block.axis(self.piece).size

    @property
    def piece_columns(self) -> int:
        """How many columns a piece has."""
        return self._size(self.own_columns)

    @property
    def num_choices(self) -> int:
        """How many elements the index has."""
        return 0 if self.taken is None else self._size(tuple(a for a in self.taken.axes if a))

    @property
    def batch_size(self) -> int:
        """How many rows `other` has."""
        return 1 if self.batch is None else self.block.axis(self.batch).size

    @property
    def is_grouped(self) -> bool:
        """Whether groups of columns may have scales."""
        return is_grouped(self.own_columns, self.pair or self.word, self.lanes)

    @property
    def is_in_lanes(self) -> bool:
        """Whether words lie as lanes load them."""
        return bool(self.lanes)

    @property
    def is_column_major(self) -> bool:
        """Whether words of codes of successive rows lie side by side."""
        return self.word is not None or self.has_rows_in_words

    @property
    def has_rows_in_words(self) -> bool:
        """Whether a word holds codes of eight rows."""
        return bool(self.word_rows)

    @property
    def inner_columns(self) -> int:
        """How many columns have the same place on the first axis of the codes' columns."""
        return self._size(self.own_columns[1:])

    @property
    def group(self) -> int:
        """How many columns share a scale."""
        return self.inner_columns if self.is_grouped else self.piece_columns

    @property
    def rows_of_each(self) -> int:
        """The rows of each product in a tile of one set, or the most if words are column-major."""
        if self.is_column_major:
            return self._rows_of_words[0]
        if self.row_pair is not None:
            return ROWS
        return ROWS // len(self.products)

    @property
    def least_rows(self) -> int:
        """The fewest rows of each product that a tile has if words are column-major."""
        return self._rows_of_words[-1]

    def eight_rows_stride(self, name: str) -> int:
        """Return the codes from eight rows to the next eight, if words lie as lanes load them."""
        i, t = self.block.inputs_by_name[name], self.tensor(name)
        return t.strides[i.axes.index(self.own_rows[0])]

    def row_step(self, name: str) -> int:
        """Return the elements from a row to the next one of scales or offsets side by side.

        It is more than 1 if scales and shifts take turns.
        """
        has_words = is_packed(self.tensor(name).dtype)
        return self.row_stride(name) if self.is_in_columns(name) and not has_words else 1

    @property
    def _rows_of_words(self) -> tuple[int, ...]:
        return _ROWS_IN_WORDS if self.has_rows_in_words else _ROWS_OF_WORDS

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return self.tensor(self.products[0].codes).dtype

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if is_packed(self.dtype) else 8

    @property
    def column_bits(self) -> int:
        """Bits of a column: those of a code, or of both codes that share a byte."""
        return self.bits if self.row_pair is None else 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes, or of two that share bytes."""
        return self.piece_columns * self.column_bits // 8

    def row_stride(self, name: str) -> int:
        """Return the elements between rows of an input of codes or scales, which may be codes."""
        i, t = self.block.inputs_by_name[name], self.tensor(name)
        return next(
            s for a, s in reversed([*zip(i.axes, t.strides, strict=True)]) if a in self.own_rows
        )

    def chosen_stride(self, name: str) -> int:
        """Return the elements between experts of an input that an index chooses."""
        i = self.block.inputs_by_name[name]
        assert i.taken is not None
        return self.tensor(name).strides[i.taken.dim]

    @property
    def read_columns(self) -> tuple[str, ...]:
        """The inputs that carry columns: what `other` and `sums` are computed from."""
        read = dict.fromkeys(
            name
            for value in (*self.other, *(v for _, v in self.sums))
            for name in self.inputs_of(value)
        )
        return tuple(read)

    def is_of_pieces(self, name: str) -> bool:
        """Return whether an input of `read_columns` has one element for each piece."""
        return self.own_columns[-1] not in self.block.carried[name]

    def batch_stride(self, name: str) -> int:
        """Return the elements between rows of an input of `read_columns`, 0 if it has one row."""
        i, t = self.block.inputs_by_name[name], self.tensor(name)
        return sum(s for a, s in zip(i.axes, t.strides, strict=True) if a and a == self.batch)

    def is_of_rows(self, name: str) -> bool:
        """Return whether each row has scales or zero points of its own. Otherwise blocks do."""
        return self.rows[-1] in self.block.carried[name]

    def is_in_columns(self, name: str) -> bool:
        """Return whether scales or zero points of successive rows lie side by side."""
        t, strides = self.tensor(name), self._strides(name)
        axes = self.block.inputs_by_name[name].axes
        of_groups = strides.get(self.own_columns[0], 0)
        # an axis of one element may have any stride
        of_rows = [
            strides[a] for a, n in zip(axes, t.dims, strict=True) if a in self.own_rows and n > 1
        ]
        return self.num_groups > 1 and of_groups > max(of_rows, default=of_groups)

    def _strides(self, name: str) -> dict[str, int]:
        """Return the strides of an input by axis: of the first source, if several are joined."""
        i, t = self.block.inputs_by_name[name], self.tensor(name)
        return {a: s for a, s in zip(i.axes, t.strides, strict=True) if a is not None}

    def has_groups_side_by_side(self, name: str) -> bool:
        """Return whether scales or offsets of a row lie side by side, row after row."""
        strides = self._strides(name)
        is_plain = strides.get(self.own_columns[0], 1) == 1 or self.num_groups == 1
        return is_plain and self.row_stride(name) == self.num_groups

    @property
    def num_groups(self) -> int:
        """How many groups of columns a piece has."""
        return self.piece_columns // self.group

    def source_rows(self, name: str) -> tuple[int, ...]:
        """Return how many rows of codes each source of an input has."""
        i, own = self.block.inputs_by_name[name], self.own_rows
        inner = self._size(own[1:])
        return tuple(n * inner for n in i.sizes or (self.block.axis(own[0]).size,))

    def inputs_of(self, value: str) -> Iterator[str]:
        """Yield the inputs that a value is computed from."""
        op = self.block.ops_by_name.get(value)
        if op is None:
            yield value
        else:
            for a in op.args:
                if isinstance(a, str):
                    yield from self.inputs_of(a)

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.block.axis(a).size for a in axes)


def is_grouped(columns: tuple[str, ...], in_word: str | None, in_lanes: tuple[str, ...]) -> bool:
    """Return whether codes have an axis of groups of columns, or may have one.

    Args:
        columns: The axes of columns that the codes have.
        in_word: The last of them if it numbers the codes of a byte or a word.
        in_lanes: The last four if words lie as lanes load them.
    """
    return bool(in_lanes) or len(columns) > 1 + (in_word is not None)
