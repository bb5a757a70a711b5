"""Loops that only visit what counts.

An axis may have bounds per row, like the valid slots of a key cache. Tiles that lie outside of all
bounds need not be visited if they change no accumulator. Every sum must add zeros there. Every
maximum must take a number there that is so low that the maximum may as well start from it.

An index may choose nothing for a block of rows: the block has no expert. What the index chooses is
0 then. If every sum of a loop adds zeros, the block skips the loop.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.graph.block import Accumulator, BlockInput, Stage, Taken

#: The maximum of no scores at all. It is finite, and below any score that matters.
LOWEST = -1e30


@dataclass(frozen=True)
class LoopBounds:
    """The bounds of a block graph's loops."""

    tiling: Tiling

    def trimming(self, stage: Stage) -> BlockInput | None:
        """Return the bounds that let a stage's loop skip the steps outside of them."""
        return self.effective(stage) if self.tiling.is_looped else None

    @cached_property
    def trims_any(self) -> bool:
        """True if some loop skips the steps outside of its bounds."""
        return any(self.trimming(s) for s in self.tiling.block.stages)

    def effective(self, stage: Stage) -> BlockInput | None:
        """Return the bounds that select all elements that matter along a stage's loop axis.

        There are such bounds only if no output is stored along the axis. The axis may also be held
        whole.
        """
        block = self.tiling.block
        if stage.loop is None or any(stage.loop in o.axes for o in block.outputs):
            return None
        read = stage.reads
        for i in block.inputs:
            bounds_the_loop = i.bounds == stage.loop and stage.loop not in i.axes
            if bounds_the_loop and i.name in read and self._nothing_counts_outside(stage, i.name):
                return i
        return None

    def _nothing_counts_outside(self, stage: Stage, bounds: str) -> bool:
        return all(
            self._is_zero(a.arg, {bounds}) if a.kind == "sum" else self.floor(a, bounds) is not None
            for a in stage.accumulators
        )

    @cached_property
    def are_split(self) -> bool:
        """True if the elements inside the bounds are split among blocks, not the whole axis.

        Then no block is without work if only few elements are inside. All sums of one split must
        add the same elements, and only generated kernels may read the partial results.
        """
        tiling = self.tiling
        if not tiling.loop or not tiling.op.has_private_partials:
            return False
        split_axis = tiling.split_axis(tiling.loop)
        bounds = {self.trimming(s) for s in tiling.block.stages if s.loop}
        return (
            split_axis is not None
            and len(bounds) == 1
            and None not in bounds
            and all(split_axis not in i.axes for i in tiling.block.inputs)
        )

    def floor(self, acc: Accumulator, bounds: str) -> float | None:
        """Return the number that a maximum takes outside the bounds, if it may start from it."""
        if acc.kind != "max":
            return None
        op, outside = self.tiling.ops.get(acc.arg), None
        while op is not None and op.fn == "select":
            otherwise = op.args[2]
            if not isinstance(otherwise, float) or outside not in (None, otherwise):
                return None
            outside = otherwise
            if op.args[0] == bounds:
                return outside if outside <= LOWEST else None
            op = self.tiling.ops.get(str(op.args[1]))  # the value inside other bounds
        return None

    def skipped_without(self, stage: Stage) -> list[BlockInput]:
        """Return inputs that an index chooses, such that a loop adds zeros if it chooses nothing.

        There is one input for each such index. The index has one element in each block.
        """
        block, loop = self.tiling.block, stage.loop
        is_skippable = (
            loop is not None
            and self.tiling.is_looped
            and self.trimming(stage) is None
            and not any(loop in o.axes for o in block.outputs)
            and all(a.kind == "sum" for a in stage.accumulators)
        )
        if not is_skippable:
            return []
        chosen: dict[Taken, list[BlockInput]] = {}
        for i in block.inputs:
            if i.taken is not None and i.name in stage.reads:
                chosen.setdefault(replace(i.taken, dim=0), []).append(i)
        found = []
        for taken, inputs in chosen.items():
            axes = [a for a in taken.axes if a is not None]
            names = {i.name for i in inputs}
            is_single = loop not in axes and all(self.tiling.tile(a) == 1 for a in axes)
            if is_single and all(self._is_zero(a.arg, names) for a in stage.accumulators):
                found.append(inputs[0])
        return found

    def _is_zero(self, value: str | float, names: Collection[str]) -> bool:
        """Return True if a value is 0 where those of these names are, whatever others are."""
        op = self.tiling.ops.get(str(value))
        if op is None:
            return value in names
        if op.fn == "select":
            condition, inside, otherwise = op.args
            return otherwise == 0.0 and (condition in names or self._is_zero(inside, names))
        if op.fn == "mul" and any(self._is_zero(a, names) for a in op.args):
            return True
        keeps_zero = op.over is not None or op.fn in ("neg", "cast")
        return keeps_zero and self._is_zero(op.args[0], names)
