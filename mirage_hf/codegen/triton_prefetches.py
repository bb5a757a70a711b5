"""Prefetches of tiles into the L2 as Triton text."""

from __future__ import annotations

from mirage_hf.codegen.schedule import next_power_of_two, power_of_two_up_to
from mirage_hf.codegen.triton_ahead import AheadWriter
from mirage_hf.codegen.triton_tiles import FAR
from mirage_hf.graph.block import BlockInput, Role
from mirage_hf.ops.dtypes import CODES_PER_WORD, element_bytes

#: Bytes that one prefetch brings into the L2.
LINE_BYTES = 128


class PrefetchWriter(AheadWriter):
    """Writes prefetches of the tiles that the first loop steps read."""

    def prefetch(self, i: BlockInput) -> list[str]:
        """Return the statement that prefetches the tiles of an input that the first steps read.

        It has one address per cache line. The list is empty if the addresses are known only inside
        the loop.
        """
        joined = i.joined if len(i.sources) > 1 else None
        if not self._can_be_prefetched(i, joined):
            return []
        strides = {
            a: abs(s)
            for a, s in zip(i.axes, self.tiling.operands[i.sources[0]].strides, strict=True)
            if a and not self.is_fixed(a, s)
        }
        bounds = self.plan.early_bounds(i)
        indices: dict[str, tuple[str, int]] = {}
        for a, stride in strides.items():
            per_line = int(LINE_BYTES / element_bytes(self.tiling.dtype(i)))
            within_line = stride == 1 or (self.holds_packed(i) and 0 < stride < per_line)
            every = 1
            if within_line and a != joined:
                every = power_of_two_up_to(per_line // stride)  # `tl.arange` takes no other counts
            if a == self.tiling.loop and self.tiling.is_looped:
                indices[a] = self._lines_of_first_steps(a, every)
            elif every > 1 and self.tiling.tile(a) > 1:
                indices[a] = self._lines_of_tile(a, every)
            else:
                indices[a] = self._clamped(i, a, bounds, a == joined), self.tiling.tile(a)
        chosen_axes = [] if i.taken is None else [a for a in i.taken.axes if a is not None]
        own = self.layout.dims(chosen_axes)
        counts = {a: count for a, (_, count) in indices.items()} | {a: 2 for a in own}
        dims = [a for a in self.layout.order if counts.get(a, 1) > 1]
        is_far = sum(self.masks.largest_index(a) * s for a, s in strides.items()) >= FAR
        unit = CODES_PER_WORD if self.holds_packed(i) else 1
        chosen = {a: f"({name} * {unit})" for a, name in self.chosen_strides(i).items()}
        terms = [f"{self.value[i.name]}_ptr"]
        for a, (index, count) in indices.items():
            term = self.spread(index, [a], dims) if count > 1 else index
            term += ".to(tl.int64)" if is_far and index != "(0)" else ""
            terms.append(term if strides[a] == 1 else f"{term} * {chosen.get(a, strides[a])}")
        if i.taken is not None:
            stride = self.tiling.operands[i.sources[0]].strides[i.taken.dim]
            terms.insert(1, self.taken_offset(i, i.taken, stride, dims, clamped=True))
        if self.holds_packed(i):
            terms[1:] = [f"({' + '.join(terms[1:])}) // {unit}"]
        return [f"prefetch({' + '.join(terms)})"] if dims else []

    def _can_be_prefetched(self, i: BlockInput, joined: str | None) -> bool:
        """Return True if the addresses of an input's first tiles are known before the loop."""
        if joined is not None:
            is_selected_once = self.is_selected(i) and self.block.role(joined) is Role.GRID
            if not is_selected_once:
                return False
        is_unrolled = bool(self.layout.unrolled) and self.layout.unrolled in i.axes
        is_read_plainly = i.rotation is None and i.padding is None
        has_one_index = not self.tiling.has_index_in_loop(i) and self.chosen_taken_stride(i) is None
        return not is_unrolled and is_read_plainly and has_one_index

    def _lines_of_first_steps(self, axis: str, every: int) -> tuple[str, int]:
        """Return every `every`-th index of the first loop steps as text, and how many there are."""
        steps_per_block = self.cooperation.steps_per_block
        steps = min(self.plan.schedule.prefetch_steps, next_power_of_two(steps_per_block))
        last = str(self.block.axis(axis).size - 1)
        if self.trimmed is not None:
            last = f"tl.maximum({self.axis[axis]}_last - 1, 0)"
        may_pass_end = steps > steps_per_block or self.masks.needed(axis)
        clamps = may_pass_end or self.trimmed is not None
        start = " + ".join(self.loop_starts())
        return self._lines(start, self.tiling.tile(axis) * steps, every, last if clamps else None)

    def _lines_of_tile(self, axis: str, every: int) -> tuple[str, int]:
        """Return every `every`-th index of a tile as text, and how many there are."""
        start = ""
        if self.tiling.split_axis(axis):
            start = f"{self.axis[axis]}_start"
        elif self.tiling.trips(axis) > 1:
            start = f"{self.axis[axis]}0"
        last = str(self.block.axis(axis).size - 1) if self.masks.needed(axis) else None
        return self._lines(start, self.tiling.tile(axis), every, last)

    def _lines(self, start: str, count: int, every: int, last: str | None) -> tuple[str, int]:
        """Return every `every`-th of `count` indices from `start`, at most `last`."""
        count = max(1, count // every)
        index = f"tl.arange(0, {count})" if count > 1 else ""
        index += f" * {every}" if index and every > 1 else ""
        index = " + ".join(x for x in (start, index) if x) or "0"
        if last is not None and index != "0":
            return f"tl.minimum({index}, {last})", count
        return f"({index})", count

    def _clamped(self, i: BlockInput, axis: str, bounds: BlockInput | None, joined: bool) -> str:
        """Return the indices of a tile along an axis, clamped to the axis and its bounds."""
        at = f"{self.value[i.name]}_at" if joined else self.axis[axis]
        last = str(self.block.axis(axis).size - 1)
        if bounds is not None and axis == bounds.bounds:
            lo, hi = (f"{self.value[bounds.name]}_{end}" for end in ("lo", "hi"))
            inside = f"tl.minimum(tl.maximum({at}, {lo}), {hi} - 1)"
            return f"tl.minimum(tl.maximum({inside}, 0), {last})"
        if not self.masks.needed(axis):
            return at
        if joined:  # only the last source has an end inside a tile
            return f"({at} - tl.maximum({self.axis[axis]} - {last}, 0))"
        return f"tl.minimum({at}, {last})"
