"""Loads of packed codes as Triton text: whole words, decoded by arithmetic in registers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirage_hf import errors
from mirage_hf.codegen.plan.code_order import OFFSETS, PAIR
from mirage_hf.codegen.triton_tiles import Coordinates, TileWriter, triton_dtype
from mirage_hf.graph.block import BlockInput, Role
from mirage_hf.graph.coded import is_packed, packed_dim
from mirage_hf.ops.dtypes import CODES_PER_WORD


class CodeWriter(TileWriter):
    """Writes loads of inputs whose words hold several codes each."""

    def holds_packed(self, i: BlockInput) -> bool:
        """Return True if a word of the input's memory holds several of its elements."""
        return is_packed(self.tiling.dtype(i))

    def hold_words(self, i: BlockInput) -> None:
        """Load the words of an input before their codes are needed."""
        pointer, shift = self.selected_source(i)
        for _ in self.each_lane(i.name):
            if self.is_new(i.name, "words"):
                words = self.load_words(i, pointer, None, shift)
                self.line(f"{self.value[i.name]}_words = {words}")

    def selected_source(self, i: BlockInput) -> tuple[str, Coordinates]:
        """Return the pointer to the source that this tile lies in, and its names of coordinates."""
        if len(i.sources) == 1:
            return self.pointers[i.name][0], Coordinates()
        value = self.value[i.name]
        return f"{value}_ptr", Coordinates({str(i.joined): f"{value}_at"})

    def read_packed(
        self, i: BlockInput, pointer: str, policy: str | None, shift: Coordinates
    ) -> str:
        """Return one tile of uint4 codes, decoded to float32, or to the dtype of a factor.

        Each thread loads words, and decodes the eight codes of a word itself.

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
        dims = self.layout.dims(self.block.input_axes(i))
        words_last = self._words_last(i)
        shape = [self.tiling.tile(a) for a in words_last]
        dtype = self.layout.code_factors.get(i.name)
        if dtype is None:
            text = f"tl.reshape(uint4_as_float32({words}, {zero!r}), {shape})"
            text = self.in_code_order(text, words_last)
        else:
            text = _factor(words, shape, zero, dtype)
        if list(dims) == words_last:
            return text
        order = ", ".join(str(words_last.index(a)) for a in dims)
        return f"tl.permute({text}, ({order}))"

    def in_code_order(self, text: str, dims: Sequence[str]) -> str:
        """Return a tile with the axes that hold codes in code order. See plan/code_order.py."""
        for a in self.layout.code_ordered.intersection(dims):
            at, shape = dims.index(a), [self.tiling.tile(x) for x in dims]
            split = [*shape[:at], shape[at] // CODES_PER_WORD, CODES_PER_WORD, *shape[at + 1 :]]
            order = [*range(at), at + 1, at, *range(at + 2, len(split))]
            text = f"tl.reshape(tl.permute(tl.reshape({text}, {split}), {order}), {shape})"
        return text

    def _packed_axis(self, i: BlockInput) -> str:
        """Return the axis along which words hold codes."""
        operand = self.tiling.operands[i.sources[0]]
        axis = i.axes[packed_dim(operand.dims, operand.strides)]
        assert axis is not None
        return axis

    def _words_last(self, i: BlockInput) -> list[str]:
        """Return the dims of a tile of codes with the packed axis last."""
        packed = self._packed_axis(i)
        dims = self.layout.dims(self.block.input_axes(i))
        return [*(a for a in dims if a != packed), packed]

    def load_words(
        self,
        i: BlockInput,
        pointer: str,
        policy: str | None,
        shift: Coordinates,
        condition: str | None = None,
    ) -> str:
        """Return a load of the words of one tile, if a condition holds."""
        packed, dims = self._packed_axis(i), self._words_last(i)
        self._check_words(i, packed)
        arguments = [self._word_address(i, pointer, packed, dims, shift)]
        mask = self.mask([a for a in self.block.input_axes(i) if a != packed], dims)
        mask += [condition] if condition else []
        if mask:
            arguments += [f"mask={' & '.join(mask)}", "other=0"]
        if policy is not None:
            arguments.append(f'eviction_policy="{policy}"')
        return f"tl.load({', '.join(arguments)})"

    def _check_words(self, i: BlockInput, axis: str) -> None:
        """Check that tiles of an input consist of whole words.

        Raises:
            CodegenError: If they do not.
        """
        reason = ""
        if len(i.sources) > 1 and not (self.tiling.selects_source(i) and i.joined != axis):
            reason = "has a tile that lies in several tensors"
        elif i.rotation is not None or i.padding is not None:
            reason = "is rotated or padded"
        elif axis == self.layout.unrolled or self.tiling.tile(axis) < CODES_PER_WORD:
            reason = f"has a tile of fewer than {CODES_PER_WORD} codes"
        elif self.masks.needed(axis) or self.block.split_size(axis) % CODES_PER_WORD:
            reason = "has a tile that reaches past the end of its codes"
        if reason:
            raise errors.CodegenError(
                f"block input {i.name} of packed codes {reason}; along {axis} give a tile of "
                f"{CODES_PER_WORD} or more that divides its size"
            )

    def _word_address(
        self, i: BlockInput, pointer: str, packed: str, dims: Sequence[str], shift: Coordinates
    ) -> str:
        """Return pointer arithmetic for the words of a tile. The packed axis is its last dim."""
        operand = self.tiling.operands[i.sources[0]]
        starts = self._start(packed)
        words = f"tl.arange(0, {self.tiling.tile(packed) // CODES_PER_WORD})"
        if starts:
            words = f"({starts} // {CODES_PER_WORD} + {words})"
        terms = [pointer]
        for a, stride in zip(i.axes, operand.strides, strict=True):
            if a is None or self.is_fixed(a, stride):
                continue
            if a == packed:
                terms.append(self.spread(words, [a], dims))
                continue
            at = shift.names.get(a, self.axis[a])
            index = self.spread(at, self.layout.dims([a]), dims)
            step = stride // CODES_PER_WORD
            terms.append(index if step == 1 else f"{index} * {step}")
        return " + ".join(terms)

    def _start(self, axis: str) -> str:
        """Return the name of where a tile begins on an axis, "" if it begins at 0."""
        name = self.axis[axis]
        if self.block.role(axis) is Role.LOOP and self.tiling.is_looped:
            return f"{name}0"
        if self.tiling.split_axis(axis):
            return f"{name}_start"
        return f"{name}0" if self.tiling.trips(axis) > 1 else ""


def _factor(words: str, shape: Sequence[int], zero: float, dtype: torch.dtype) -> str:
    """Return words as codes in code order, in the 16-bit dtype of a factor, minus a zero point.

    Args:
        words: The words.
        shape: The shape of the codes. Words hold them along the last dim.
        zero: The zero point.
        dtype: The dtype.
    """
    *others, codes = shape
    pairs = [*others, codes // PAIR, 2]
    at = len(others)
    order = [*range(at), at + 1, at + 2, at + 3, at, at + 4]
    offset = OFFSETS[dtype] + zero
    decoded = f"uint4_pairs(tl.reshape({words}, {pairs}), {offset!r}, {triton_dtype(dtype)})"
    return f"tl.reshape(tl.permute({decoded}, {order}), {[*shape]})"
