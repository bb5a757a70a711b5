"""Loads of codes as Triton text: whole words, decoded by arithmetic in registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mirage_hf.codegen.plan.code_order import OFFSETS, PAIR
from mirage_hf.codegen.plan.code_runs import WORD_BYTES
from mirage_hf.codegen.plan.code_words import codes_of_word, holds_words
from mirage_hf.codegen.plan.layout import Dot
from mirage_hf.codegen.plan.small_codes import SMALL
from mirage_hf.codegen.triton_tiles import Ahead, Coordinates, TileWriter, triton_dtype
from mirage_hf.graph.block import BlockInput, Role
from mirage_hf.graph.coded import high_first, is_packed
from mirage_hf.ops.dtypes import CODES_PER_WORD, E2M1

#: Functions that decode words of four codes of a byte.
_FROM_WORDS = {
    torch.int8: "int8_words_as_float32",
    torch.uint8: "uint8_words_as_float32",
    torch.float8_e4m3fn: "e4m3_words_as_float32",
}


class CodeWriter(TileWriter):
    """Writes loads of inputs whose words hold several codes each."""

    def holds_packed(self, i: BlockInput) -> bool:
        """Return True if a word of the input's memory holds several of its elements."""
        return is_packed(self.tiling.dtype(i))

    def holds_words(self, i: BlockInput) -> bool:
        """Return True if the kernel loads words of several codes: packed ones, or four bytes."""
        return holds_words(self.layout, i)

    def codes_per_word(self, i: BlockInput) -> int:
        """Return how many elements of an input a 32-bit word holds."""
        if i.name in self.layout.byte_words:
            return WORD_BYTES
        return CODES_PER_WORD if self.holds_packed(i) else 1

    def hold_words(self, i: BlockInput) -> None:
        """Load the words of an input before their codes are needed."""
        pointer, shift = self.selected_source(i)
        for _ in self.each_lane(i.name):
            if self.is_new(i.name, "words"):
                words = self.load_words(i, pointer, None, shift)
                self.line(f"{self.value[i.name]}_words = {words}")

    def hold_tables(self) -> None:
        """Put the tables of codes into registers, except those that arithmetic decodes."""
        for number, table in enumerate(self._tables()):
            self.line(f"values{number}: tl.constexpr = {table}")
            self.line(f"table{number} = table_of_lanes(values{number})")

    def _tables(self) -> list[tuple[float, ...]]:
        """Return the tables that are held in registers, without repeats."""
        return [t for t in dict.fromkeys(self.layout.tables.values()) if t != E2M1]

    def selected_source(self, i: BlockInput) -> tuple[str, Coordinates]:
        """Return the pointer to the source that this tile lies in, and its names of coordinates."""
        if len(i.sources) == 1:
            return self.pointers[i.name][0], Coordinates()
        value = self.value[i.name]
        return f"{value}_ptr", Coordinates({str(i.joined): f"{value}_at"})

    def read_words(
        self, i: BlockInput, pointer: str, policy: str | None, shift: Coordinates
    ) -> str:
        """Return one tile of codes, decoded to float32 or to the dtype of a factor.

        Each thread loads words, and decodes all codes of a word itself.

        Args:
            i: The input.
            pointer: The name of the pointer.
            policy: An eviction policy, or None.
            shift: Other names of coordinates.
        """
        has_lanes = self.layout.unrolled in self.block.carried[i.name]
        held = ("words", i.name, self.lane if has_lanes else None) in self.written
        words = f"{self.value[i.name]}_words"
        if not held:
            words = self.load_words(i, pointer, policy, shift)
        zero = self.layout.zero_points.get(i.name, 0.0)
        if self.tiling.dtype(i) is torch.int4:
            words, zero = f"({words}) ^ -0x77777778", zero + 8.0  # the other sign bit adds 8
        dims = self.layout.dims(self.block.input_axes(i))
        words_last = self._words_last(i)
        shape = [self.tiling.tile(a) for a in words_last]
        dtype = self.layout.code_factors.get(i.name)
        if dtype is None:
            text = f"tl.reshape({self._decoded(i, words, zero)}, {shape})"
            text = self.in_code_order(text, words_last)
        else:  # its packed axis, the last one, is in code order already
            is_float = self.layout.tables.get(i.name) == E2M1
            text = _factor(words, shape, None if is_float else zero, dtype)
            text = self.in_code_order(text, words_last, words_last[:-1])
        if list(dims) == words_last:
            return text
        order = ", ".join(str(words_last.index(a)) for a in dims)
        return f"tl.permute({text}, ({order}))"

    def _decoded(self, i: BlockInput, words: str, zero: float) -> str:
        """Return words as float32, with the codes of a word in new last dims.

        A number is subtracted from the codes, or they are looked up in a table.
        """
        if i.name in self.layout.byte_words:
            return f"{_FROM_WORDS[self.tiling.dtype(i)]}({words})"
        codes, operand = f"uint4_as_float32({words}, {zero!r})", self.tiling.operands[i.sources[0]]
        table = self.layout.tables.get(i.name)
        if table == E2M1:
            codes = f"small_e2m1({words}, {table})"
            is_small = i.name in self.layout.small_codes.inputs
            codes = codes if is_small else f"({codes} * {1 / SMALL!r})"
        elif table is not None:
            number = self._tables().index(table)
            codes = f"uint4_entries({words}, table{number}, values{number})"
        turned = high_first(operand.dims, operand.strides) is not None
        return f"high_first({codes})" if turned else codes

    def in_code_order(
        self, text: str, dims: Sequence[str], along: Sequence[str] | None = None
    ) -> str:
        """Return a tile in code order along the axes that need it. See plan/code_order.py.

        Args:
            text: The tile.
            dims: Its dims.
            along: The dims that are in the order of memory. None: all.
        """
        for a in sorted(self.layout.code_ordered.intersection(dims if along is None else along)):
            at, shape = dims.index(a), [self.tiling.tile(x) for x in dims]
            split = [*shape[:at], shape[at] // CODES_PER_WORD, CODES_PER_WORD, *shape[at + 1 :]]
            order = [*range(at), at + 1, at, *range(at + 2, len(split))]
            text = f"tl.reshape(tl.permute(tl.reshape({text}, {split}), {order}), {shape})"
        return text

    def groups_in_code_order(self, text: str, dims: Sequence[str], dot: Dot) -> str:
        """Return a tile whose groups are in code order: code 0 of the words of all groups first.

        Within a group the tile is in code order already. So threads that hold two words decode
        all codes that they multiply, even if a group has only four words.

        Args:
            text: The tile.
            dims: Its dims. That of the groups comes right before that of their codes.
            dot: The product that reads the tile.
        """
        groups, over = dot.summed
        if over not in self.layout.code_ordered:
            return text
        at, shape = dims.index(groups), [self.tiling.tile(x) for x in dims]
        words = shape[at + 1] // CODES_PER_WORD
        split = [*shape[: at + 1], CODES_PER_WORD, words, *shape[at + 2 :]]
        order = [*range(at), at + 1, at, *range(at + 2, len(split))]
        return f"tl.permute(tl.reshape({text}, {split}), {order})"

    def _words_last(self, i: BlockInput) -> list[str]:
        """Return the dims of a tile of codes with those of the words last."""
        packed = codes_of_word(self.layout, i)
        dims = self.layout.dims(self.block.input_axes(i))
        return [*(a for a in dims if a not in packed), *packed]

    def load_words(
        self,
        i: BlockInput,
        pointer: str,
        policy: str | None,
        shift: Coordinates,
        ahead: Ahead | None = None,
    ) -> str:
        """Return a load of the words of one tile, of a later loop step if `ahead` names one."""
        if ahead is not None:
            shift = shift.also(str(self.tiling.loop), ahead.at)
        self.load_index(i)
        packed = codes_of_word(self.layout, i)
        dims = [a for a in self._words_last(i) if self.tiling.tile(a) > packed.get(a, 1)]
        start = "" if ahead is None else ahead.start
        arguments = [self._word_address(i, pointer, packed, dims, shift, start)]
        later = () if ahead is None else (self.tiling.loop,)
        masked = [a for a in self.block.input_axes(i) if a not in packed and a not in later]
        mask = self.mask(masked, dims)
        mask += self.taken_inside(i, dims)
        mask += self.conditions(ahead, dims)
        if mask:
            arguments.append(f"mask={' & '.join(mask)}")
            arguments += ["other=0"] if self.needs_other(mask, ahead) else []
        if policy is not None:
            arguments.append(f'eviction_policy="{policy}"')
        return f"tl.load({', '.join(arguments)})"

    def needs_other(self, mask: Sequence[str], ahead: Ahead | None) -> bool:
        """Return True if elements that a mask leaves out may be read.

        No step reads what is loaded for a step that does not follow. Zeros for it would take an
        instruction for each register.
        """
        return self.layout.mma or ahead is None or [*mask] != [ahead.follows]

    def _word_address(
        self,
        i: BlockInput,
        pointer: str,
        packed: Mapping[str, int],
        dims: Sequence[str],
        shift: Coordinates,
        start: str = "",
    ) -> str:
        """Return pointer arithmetic for the words of a tile. Dims of one word are left out.

        Args:
            i: The input.
            pointer: The name of the pointer.
            packed: How many codes of a word lie along each axis.
            dims: The dims of the words.
            shift: Other names of coordinates.
            start: Where the tile of a later step begins on the loop axis.
        """
        operand, chosen = self.tiling.operands[i.sources[0]], self.chosen_strides(i)
        is_byte = i.name in self.layout.byte_words
        unit = self.codes_per_word(i)
        terms = [f"{pointer}.to(tl.pointer_type(tl.int32))" if is_byte else pointer]
        if i.taken is not None:
            stride = operand.strides[i.taken.dim]
            terms.append(self.taken_offset(i, i.taken, stride, dims, unit))
        for a, stride in zip(i.axes, operand.strides, strict=True):
            if a is None or self.is_fixed(a, stride):
                continue
            if a in packed:
                later = start if a == self.tiling.loop else ""
                terms += self._words_along(a, packed[a], dims, later or self._start(a))
                continue
            at = shift.names.get(a, self.axis[a])
            index = self.spread(at, self.layout.dims([a]), dims)
            step = chosen.get(a, stride // unit)
            terms.append(index if step == 1 else f"{index} * {step}")
        return " + ".join(terms)

    def _words_along(self, axis: str, count: int, dims: Sequence[str], start: str) -> list[str]:
        """Return the term of an address for the words of a tile along an axis, if it has several.

        Args:
            axis: The axis.
            count: How many codes of a word lie along it.
            dims: The dims of the words.
            start: Where the tile begins, "" if at 0.
        """
        terms = [f"{start} // {count}"] if start else []
        if axis in dims:
            terms.append(f"tl.arange(0, {self.tiling.tile(axis) // count})")
        text = " + ".join(terms)
        if axis not in dims:
            return terms
        return [self.spread(f"({text})" if start else text, [axis], dims)]

    def _start(self, axis: str) -> str:
        """Return the name of where a tile begins on an axis, "" if it begins at 0."""
        name = self.axis[axis]
        if self.block.role(axis) is Role.LOOP and self.tiling.is_looped:
            return f"{name}0"
        if self.tiling.split_axis(axis):
            return f"{name}_start"
        return f"{name}0" if self.tiling.trips(axis) > 1 else ""


def _factor(words: str, shape: Sequence[int], zero: float | None, dtype: torch.dtype) -> str:
    """Return words as codes in code order, in the 16-bit dtype of a factor.

    Args:
        words: The words.
        shape: The shape of the codes. Words hold them along the last dim.
        zero: The zero point that is subtracted. None: the codes are 4-bit floats.
        dtype: The dtype.
    """
    *others, codes = shape
    pairs = [*others, codes // PAIR, 2]
    at = len(others)
    order = [*range(at), at + 1, at + 2, at + 3, at, at + 4]
    by_pairs = f"tl.reshape({words}, {pairs})"
    if zero is None:
        decoded = f"e2m1_pairs({by_pairs})"
    else:
        decoded = f"uint4_pairs({by_pairs}, {OFFSETS[dtype] + zero!r}, {triton_dtype(dtype)})"
    return f"tl.reshape(tl.permute({decoded}, {order}), {[*shape]})"
