"""Where tiles reach past the end of an axis, so that loads and sums need masks."""

from __future__ import annotations

from dataclasses import dataclass

from mirage_hf.codegen.plan.cooperation import Cooperation
from mirage_hf.codegen.plan.loop_bounds import LoopBounds
from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.codegen.triton_math import keeps_zero


@dataclass(frozen=True)
class Masks:
    """The masks of a kernel's axes."""

    tiling: Tiling
    loop_bounds: LoopBounds
    cooperation: Cooperation

    def _splits_its_bounds(self, axis: str) -> bool:
        return self.loop_bounds.are_split and axis == self.tiling.loop

    def _steps(self, axis: str) -> int:
        """Return the tiles along an axis, or one split of it, that blocks visit."""
        if axis == self.tiling.loop:
            return self.cooperation.steps_per_block * self.cooperation.blocks
        return self.tiling.trips(axis)

    def passes_split(self, axis: str) -> bool:
        """Return True if some tile of an axis reaches past the end of its split, or of the axis."""
        tile = self.tiling.tile(axis)
        if self._splits_its_bounds(axis):
            return self.tiling.block.axis(axis).size % tile != 0
        return self._steps(axis) * tile != self.tiling.block.split_size(axis)

    def split_passes_axis(self, axis: str) -> bool:
        """Return True if the last split of an axis reaches past the end of the axis."""
        if self._splits_its_bounds(axis) or self.tiling.split_axis(axis) is None:
            return False
        block = self.tiling.block
        return block.axis(axis).size % block.split_size(axis) != 0

    def needed(self, axis: str) -> bool:
        """Return True if some elements of a tile do not count."""
        return self.passes_split(axis) or self.split_passes_axis(axis)

    def largest_index(self, axis: str) -> int:
        """Return the largest index along an axis for which a block forms an address."""
        block, tile = self.tiling.block, self.tiling.tile(axis)
        if self._splits_its_bounds(axis):
            return -(-block.axis(axis).size // tile) * tile - 1
        split_axis = self.tiling.split_axis(axis)
        start_of_last_split = 0
        if split_axis:
            start_of_last_split = (block.axis(split_axis).size - 1) * block.split_size(axis)
        return start_of_last_split + self._steps(axis) * tile - 1

    def is_zero_padded(self, value: str, axis: str) -> bool:
        """Return True if a value is 0 past the end of an axis, so that its sum needs no mask.

        Loads fill with 0, and some ops keep it.
        """
        if axis not in self.tiling.block.carried.get(value, ()):
            return False
        if value in self.tiling.inputs:
            padding = self.tiling.inputs[value].padding
            return padding is None or padding.value == 0.0
        op = self.tiling.ops.get(value)
        if op is None:
            return False
        if op.fn == "select" and op.args[2] == 0.0 and self.is_zero_padded(str(op.args[0]), axis):
            return True
        if op.over is not None:
            return False
        operands_are_zero = all(self.is_zero_padded(a, axis) for a in op.args if isinstance(a, str))
        numbers = tuple(None if isinstance(a, str) else a for a in op.args)
        return operands_are_zero and keeps_zero(op.fn, numbers, tuple(op.attrs))
