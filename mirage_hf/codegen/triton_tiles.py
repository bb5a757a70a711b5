"""Tiles in Triton text: names, where a block stands on each axis, masks, addresses, loads and stores."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence

import torch

from mirage_hf.codegen import triton_math
from mirage_hf.codegen.placement import Append
from mirage_hf.codegen.plan import KernelPlan, stages
from mirage_hf.codegen.plan.cooperation import MOST_UNLOOPED_BLOCKS
from mirage_hf.codegen.schedule import next_power_of_two
from mirage_hf.graph.block import Axis, BlockInput, BlockOutput, Role

_RESERVED = frozenset(
    {
        "tl",
        "triton",
        "torch",
        "pid",
        "run",
        "program",
        "range",
        "float",
        "overlaps",
        "part",
        "some",
        "tile",
        "scratch_ptr",
        "counters_ptr",
        "arrived",
        *triton_math.HELPERS,
    }
)

LINE_BYTES = 128
"""What a prefetch asks for."""


def triton_dtype(dtype: torch.dtype) -> str:
    return "tl." + str(dtype).removeprefix("torch.")


class _Names(dict[str, str]):
    """Identifiers; those of `many` have one for each lane."""

    def __init__(self, tiles: Tiles, names: Mapping[str, str], many: Container[str | None]):
        super().__init__(names)
        self._tiles, self._many = tiles, many

    def __getitem__(self, name: str) -> str:
        plain, lane = super().__getitem__(name), self._tiles.lane
        return plain if lane is None or name not in self._many else f"{plain}_{lane}"


class Tiles:
    """The lines of a kernel so far, and how its tensors are named, read and written."""

    def __init__(self, plan: KernelPlan, name: str):
        self.plan, self.block, self.name = plan, plan.tiling.block, name
        self.tiling, self.layout, self.masks = plan.tiling, plan.layout, plan.masks
        self.loop_bounds, self.cooperation = plan.loop_bounds, plan.cooperation
        self.pipelining = plan.pipelining
        self.lines: list[str] = []
        self.indent = 1
        self.trimmed: BlockInput | None = (
            None  # the bounds of the loop at hand, where it only visits what is within them
        )
        self.lane: int | None = None  # the element of the unrolled axis that is being written
        self.have: set[tuple[str, str, int | None]] = (
            set()
        )  # what of which value (of which lane) is already written
        self.taken = set(_RESERVED)
        lanes = ("", *(f"_{n}" for n in range(plan.layout.lanes)))
        suffixes: tuple[str, ...] = (
            "",
            "0",
            "_in",
            "_start",
            "_step",
            "_next",
            "_next_in",
            "_first",
            "_last",
            "_share",
        )
        axes = {
            a.name: self._identifier(a.name, [n + x for n in lanes for x in suffixes])
            for a in self.block.axes
        }
        self.axis = _Names(self, axes, {plan.layout.unrolled})
        computed = [
            *(op.out for op in self.block.ops()),
            *(a.out for s in self.block.stages for a in s.accumulators),
        ]
        suffixes = (
            "",
            "_ptr",
            "_f32",
            "_again",
            "_at",
            "_next",
            "_now",
            "_scale",
            "_few",
            "_lo",
            "_hi",
            "_slot",
            "_slot_ptr",
            *(f"_each{n}" for n in range(MOST_UNLOOPED_BLOCKS)),
        )
        values = {
            v: self._identifier(v, [n + x for n in lanes for x in suffixes])
            for v in (*self.tiling.inputs, *computed)
        }
        self.value = _Names(
            self,
            values,
            {v for v, carried in self.block.carried.items() if plan.layout.unrolled in carried},
        )
        self.arguments: list[tuple[str, int]] = []
        self.pointers: dict[str, list[str]] = {}
        for i in self.block.inputs:
            self.pointers[i.name] = [
                f"{self.value[i.name]}_ptr"
                if len(i.sources) == 1
                else f"{self.value[i.name]}{k}_ptr"
                for k in range(len(i.sources))
            ]
            self.arguments += zip(self.pointers[i.name], i.sources, strict=True)
        self.out_pointers = []
        for n, o in enumerate(self.block.outputs):
            taken = {a for a, _ in self.arguments}
            pointer = next(
                p
                for p in (
                    f"{self.value[o.value]}_ptr",
                    f"{self.value[o.value]}_out_ptr",
                    f"out{n}_ptr",
                )
                if p not in taken
            )
            self.out_pointers.append(pointer)
            self.arguments.append((pointer, len(self.tiling.operands) + n))
            if (append := self.tiling.append_of(o)) is not None:
                self.arguments.append((self._slot_pointer(pointer), append.position))

    def _slot_pointer(self, pointer: str) -> str:
        return f"{pointer.removesuffix('_ptr')}_slot_ptr"

    def _identifier(self, name: str, suffixes: Sequence[str]) -> str:
        base = re.sub(r"\W", "_", name)
        base = base if base.isidentifier() and not keyword.iskeyword(base) else f"v_{base}"
        while any(base + s in self.taken for s in suffixes):
            base += "_"
        self.taken |= {base + s for s in suffixes}
        return base

    def line(self, text: str = "") -> None:
        self.lines.append(("    " * self.indent + text) if text else "")

    def lines_if(self, condition: str, lines: Sequence[str]) -> None:
        """Lines under a condition; nothing where there are none."""
        for text in (f"if {condition}:", *(f"    {line}" for line in lines)) if lines else ():
            self.line(text)

    def _lanes(self, value: str) -> Iterator[int]:
        """Each lane in turn of a value (or axis) that has lanes; once for others, and inside a lane."""
        carried = self.block.carried.get(value, (value,))
        if self.lane is not None or self.layout.unrolled not in carried:
            yield 0
            return
        for n in range(self.layout.lanes):
            self.lane = n
            yield n
        self.lane = None

    def _first(self, value: str, what: str = "") -> bool:
        """Whether this (of a value, in a lane) was not yet written; it is taken to be now."""
        key = (
            what,
            value,
            self.lane if self.layout.unrolled in self.block.carried[value] else None,
        )
        if key in self.have:
            return False
        self.have.add(key)
        return True

    # -- axes ---------------------------------------------------------------------------------------------------------------

    def _offsets(self) -> None:
        """Where this block stands on each axis that it does not walk."""
        cut = [a for a in self.block.named(Role.GRID) if self.tiling.trips(a.name) > 1]
        before, split, pid = 1, self.plan.schedule.cooperating_blocks, "tl.program_id(0)"
        if split > 1:
            pid = "tile"
            self.line(
                f"part = tl.program_id(0) % {split}  # of {self.tiling.loop}: each tile is computed by {split} blocks"
            )
            self.line(f"tile = tl.program_id(0) // {split}")
        elif len(cut) > 1:
            pid = "pid"
            self.line("pid = tl.program_id(0)")
        for a in self.block.axes:
            tile, trips, var = (
                self.tiling.tile(a.name),
                self.tiling.trips(a.name),
                self.axis[a.name],
            )
            if (a.role is Role.LOOP and self.tiling.is_looped) or self.tiling.split_axis(a.name):
                continue
            start = None
            if a in cut:
                start = f"{pid} // {before}" if before > 1 else pid
                if a is not cut[-1]:
                    start = f"({start}) % {trips}" if before > 1 else f"{start} % {trips}"
                before *= trips
            if tile == 1:
                if start is not None:
                    self.line(f"{var} = {start}  # {a.size} of them")
                continue
            if start is not None:
                self.line(f"{var}0 = {f'({start})' if ' ' in start else start} * {tile}")
            if a.name == self.layout.unrolled:
                if start is None:
                    # 0, but not for the compiler: if it sees that a lane is outside it drops the lane, and on three lanes LLVM
                    # (of Triton 3.6) aborts with an assertion of its SLP vectorizer, seen for a gated MLP of 3 rows
                    self.line(f"{var}0 = tl.program_id(1)")
                for n in self._lanes(a.name):
                    self.line(f"{self.axis[a.name]} = {var}0 + {n}  # of {a.size}")
                    self._bound(a.name)
                continue
            if start is not None:
                self.line(f"{var} = {var}0 + tl.arange(0, {tile})  # {a.size} in tiles of {tile}")
            else:
                self.line(f"{var} = tl.arange(0, {tile})  # all {a.size}")
            self._bound(a.name)
        for a in self.block.axes:
            if self.tiling.split_axis(a.name) and not (
                self.loop_bounds.are_split and a.name == self.tiling.loop
            ):
                self._offset_of_part(a)

    def _offset_of_part(self, a: Axis) -> None:
        """Where this block's part of an axis begins, and its elements if they are held whole."""
        parts, part, tile, var = (
            str(self.tiling.split_axis(a.name)),
            self.block.split_size(a.name),
            self.tiling.tile(a.name),
            self.axis[a.name],
        )
        start = f"{self.axis[parts]} * {part}" if part > 1 else self.axis[parts]
        walked = a.role is Role.LOOP and self.tiling.is_looped
        if tile == 1 and not walked:
            self.line(f"{var} = {start}  # {a.size} of them, one in each part")
            return
        self.line(
            f"{var}_start = {start}  # {a.size} in {self.block.axis(parts).size} parts of {part}"
        )
        if not walked:
            self.line(f"{var} = {var}_start + tl.arange(0, {tile})  # all {part}")
            self._bound(a.name)

    def _bound(self, axis: str, var: str = "") -> None:
        """Define `<axis>_in`: which elements of a tile count. Nothing if all of them do."""
        size, start = self.block.axis(axis).size, self.axis[axis]
        var = var or start
        has_splits = self.tiling.split_axis(axis) and not (
            self.loop_bounds.are_split and axis == self.tiling.loop
        )
        # Two comparisons, not one with the smaller end: the compiler sees how these ends are aligned.
        ends = []
        if self.masks.passes_split(axis):
            end_of_split = f"{start}_start + {self.block.split_size(axis)}"
            ends.append(end_of_split if has_splits else str(size))
        if self.masks.split_passes_axis(axis):
            ends.append(str(size))
        if len(ends) == 1:
            self.line(f"{var}_in = {var} < {ends[0]}")
        elif ends:
            self.line(f"{var}_in = " + " & ".join(f"({var} < {end})" for end in ends))

    def _spread(self, text: str, dims: Sequence[str], onto: Sequence[str]) -> str:
        """`text` with dims `dims`, indexed so that it broadcasts against a tensor with dims `onto`."""
        if not dims or tuple(dims) == tuple(onto):
            return text
        return f"{text}[{', '.join(':' if a in dims else 'None' for a in onto)}]"

    def _mask(self, axes: Sequence[str], onto: Sequence[str]) -> list[str]:
        return [
            self._within(a, onto) for a in self.layout.order if a in axes and self.masks.needed(a)
        ]

    def _within(self, axis: str, onto: Sequence[str]) -> str:
        """Whether elements of a ragged axis count, to be broadcast against a tensor with dims `onto`."""
        return self._spread(f"{self.axis[axis]}_in", self.layout.dims([axis]), onto)

    # -- loads and stores -----------------------------------------------------------------------------------------------------

    def _address(
        self,
        pointer: str,
        axes: Sequence[str | None],
        strides: Sequence[int],
        dims: Sequence[str],
        shift: tuple[str | None, str] = (None, ""),
        rotated: BlockInput | None = None,
    ) -> str:
        """Pointer arithmetic for a tile; `shift` names a joined axis and what its coordinate is called here; `rotated`: the input."""
        far = (
            sum(self.masks.largest_index(a) * s for a, s in zip(axes, strides, strict=True) if a)
            >= 2**31
        )
        terms = [pointer]
        for a, stride in zip(axes, strides, strict=True):
            if a is None or self._is_fixed(a, stride):
                continue
            at = shift[1] if a == shift[0] else self.axis[a]
            if (
                rotated is not None
                and rotated.rotation is not None
                and rotated.rotation.swaps
                and a == rotated.rotation.axis
            ):
                at = self._partner(a, at, rotated)
            term = self._spread(at, self.layout.dims([a]), dims)
            term += ".to(tl.int64)" if far else ""
            terms.append(term if stride == 1 else f"{term} * {stride}")
        return " + ".join(terms)

    def _is_fixed(self, axis: str, stride: int) -> bool:
        """Whether no address depends on where a block stands on an axis; its name may then not be defined."""
        return self.tiling.tile(axis) == 1 and (stride == 0 or self.masks.largest_index(axis) == 0)

    def _read(
        self,
        i: BlockInput,
        pointer: str,
        source: int,
        extra_mask: str | None = None,
        shift: tuple[str | None, str] = (None, ""),
        policy: str | None = None,
        ahead: bool = False,
    ) -> str:
        """`ahead`: at the next place of the loop."""
        if ahead:
            shift = self.tiling.loop, f"{self.axis[str(self.tiling.loop)]}_next"
        axes = self.block.input_axes(i)
        dims = self.layout.dims(axes)
        arguments = [
            self._address(
                pointer,
                i.axes,
                self.tiling.operands[i.sources[source]].strides,
                dims,
                shift,
                i,
            )
        ]
        mask = self._mask([a for a in axes if not (ahead and a == self.tiling.loop)], dims) + (
            [extra_mask] if extra_mask else []
        )
        if (ends := self._ends_of(i)) is not None:
            self._load_bounds(ends)
            mask += self._between(ends, dims)
        if ahead:
            mask.append(
                self._spread(f"{shift[1]}_in", self.layout.dims([str(self.tiling.loop)]), dims)
            )
        other = "0.0" if self.tiling.dtype(i).is_floating_point else "0"
        if i.padding is not None:
            at = shift[1] if i.padding.axis == shift[0] else self.axis[i.padding.axis]
            mask.append(
                self._spread(f"({at} < {i.padding.size})", self.layout.dims([i.padding.axis]), dims)
            )
            other = repr(i.padding.value)
        if mask:
            arguments += [f"mask={' & '.join(mask)}", f"other={other}"]
        if (
            policy is None
            and self.plan.schedule.evict_first
            and self.tiling.loop
            and self.tiling.loop in i.axes
            and self.tiling.is_streamed(i)
        ):
            policy = "evict_first"
        if policy is not None:
            arguments.append(f'eviction_policy="{policy}"')
        load = f"tl.load({', '.join(arguments)})"
        if i.rotation is None or i.rotation.swaps:
            return load
        at, width = (
            shift[1] if i.rotation.axis == shift[0] else self.axis[i.rotation.axis],
            self.block.rotation_width(i),
        )
        first = (
            f"(({at} & 1) == 0) & ({at} < {width})" if i.rotation.pairs else f"{at} < {width // 2}"
        )
        sign = self._spread(
            f"tl.where({first}, -1.0, 1.0)", self.layout.dims([i.rotation.axis]), dims
        )
        narrow = (
            f".to({triton_dtype(self.tiling.dtype(i))})"
            if i.name in self.layout.kept_as_stored
            else ""
        )
        return f"({load}.to(tl.float32) * {sign}){narrow}"

    def _partner(self, axis: str, at: str, i: BlockInput) -> str:
        """The coordinates of the partners of those in `at`; what has none stays where it is."""
        assert i.rotation is not None
        width = self.block.rotation_width(i)
        half, alone = width // 2, width < self.block.extent(i, axis)
        if i.rotation.pairs:
            return f"tl.where({at} < {width}, {at} ^ 1, {at})" if alone else f"({at} ^ 1)"
        second = f"tl.where({at} < {width}, {at} - {half}, {at})" if alone else f"{at} - {half}"
        text = f"tl.where({at} < {half}, {at} + {half}, {second})"
        # a tile starts at a multiple of itself; rows in variables of their own, and parts, start anywhere
        together = (
            math.gcd(half, self.tiling.tile(axis))
            if self.layout.dims([axis]) and self.tiling.split_axis(axis) is None
            else 1
        )
        return (
            f"tl.max_contiguous(tl.multiple_of({text}, {together}), {together})"
            if together > 1
            else text
        )

    def _prefetch(self, i: BlockInput) -> list[str]:
        """A line that asks for what the first steps of the loop read of an input, a cache line at a time. No line where that is known
        too late."""
        plan = self.plan
        steps = min(
            plan.schedule.prefetch_steps, next_power_of_two(plan.cooperation.steps_per_block)
        )
        joined = i.joined if len(i.sources) > 1 else None
        if joined is not None and not (
            self._is_selected(i) and self.block.role(joined) is Role.GRID
        ):
            return []  # which source the tiles lie in is known only inside the loop
        if (
            (plan.layout.unrolled and plan.layout.unrolled in i.axes)
            or i.rotation is not None
            or i.padding is not None
        ):
            return []
        ends = self._ends_of(i)
        if ends is not None and (
            plan.layout.dims([a for a in ends.axes if a])
            or not plan.op.readable_before_wait.issuperset(ends.sources)
        ):
            ends = None  # bounds of each row, or such as are not there yet
        strides = {
            a: s
            for a, s in zip(i.axes, plan.tiling.operands[i.sources[0]].strides, strict=True)
            if a and not self._is_fixed(a, s)
        }
        asked = {}
        for a, stride in strides.items():
            every = (
                LINE_BYTES // plan.tiling.dtype(i).itemsize if stride == 1 and a != joined else 1
            )
            if a == plan.tiling.loop and plan.tiling.is_looped:
                asked[a] = self._first_steps(a, steps, every)
            elif every > 1 and plan.tiling.tile(a) > 1:
                start = (
                    f"{self.axis[a]}_start"
                    if plan.tiling.split_axis(a)
                    else f"{self.axis[a]}0"
                    if plan.tiling.trips(a) > 1
                    else ""
                )
                asked[a] = self._lines(
                    start,
                    plan.tiling.tile(a),
                    every,
                    str(self.block.axis(a).size - 1) if plan.masks.needed(a) else None,
                )
            else:
                asked[a] = self._clamped(i, a, ends, a == joined), plan.tiling.tile(a)
        dims = [a for a in plan.layout.order if a in asked and asked[a][1] > 1]
        far = sum(plan.masks.largest_index(a) * s for a, s in strides.items()) >= 2**31
        terms = [f"{self.value[i.name]}_ptr"]
        for a, (index, count) in asked.items():
            term = (self._spread(index, [a], dims) if count > 1 else index) + (
                ".to(tl.int64)" if far and index != "(0)" else ""
            )
            terms.append(term if strides[a] == 1 else f"{term} * {strides[a]}")
        return [f"prefetch({' + '.join(terms)})"] if dims else []

    def _first_steps(self, axis: str, steps: int, every: int) -> tuple[str, int]:
        """The same as `_lines` of the first steps of the loop."""
        last = (
            str(self.block.axis(axis).size - 1)
            if self.trimmed is None
            else f"tl.maximum({self.axis[axis]}_last - 1, 0)"
        )
        beyond = (
            steps > self.cooperation.steps_per_block
            or self.masks.needed(axis)
            or self.trimmed is not None
        )
        return self._lines(
            " + ".join(self._loop_starts()),
            self.tiling.tile(axis) * steps,
            every,
            last if beyond else None,
        )

    def _lines(self, start: str, count: int, every: int, last: str | None) -> tuple[str, int]:
        """Every so many of `count` indices from `start`, and how many these are; with `last` none is beyond it."""
        count = max(1, count // every)
        index = f"tl.arange(0, {count})" + (f" * {every}" if every > 1 else "") if count > 1 else ""
        index = " + ".join(x for x in (start, index) if x) or "0"
        return (
            f"tl.minimum({index}, {last})" if last is not None and index != "0" else f"({index})",
            count,
        )

    def _clamped(self, i: BlockInput, axis: str, ends: BlockInput | None, joined: bool) -> str:
        """Where a tile lies along an axis, nothing of it beyond the axis or, if `ends` bounds the axis, beyond these."""
        at, last = (
            f"{self.value[i.name]}_at" if joined else self.axis[axis],
            str(self.block.axis(axis).size - 1),
        )
        if ends is not None and axis == ends.bounds:
            lo, hi = (f"{self.value[ends.name]}_{end}" for end in ("lo", "hi"))
            return (
                f"tl.minimum(tl.maximum(tl.minimum(tl.maximum({at}, {lo}), {hi} - 1), 0), {last})"
            )
        if not self.masks.needed(axis):
            return at
        # only the last source of a joined axis has an end inside a tile
        return (
            f"({at} - tl.maximum({self.axis[axis]} - {last}, 0))"
            if joined
            else f"tl.minimum({at}, {last})"
        )

    def _loop_starts(self) -> list[str]:
        """What a block's place on the loop axis begins with: the start of its part, of its share."""
        loop, plan = str(self.tiling.loop), self.plan
        if self.trimmed is not None:
            return [f"{self.axis[loop]}_first"]
        starts = [f"{self.axis[loop]}_start"] if plan.tiling.split_axis(loop) else []
        return starts + (
            [f"part * {plan.cooperation.steps_per_block * plan.tiling.tile(loop)}"]
            if plan.schedule.cooperating_blocks > 1
            else []
        )

    def _is_selected(self, i: BlockInput) -> bool:
        return i.joined is not None and len(i.sources) > 1 and self.tiling.selects_source(i)

    def _select(self, i: BlockInput) -> None:
        """Choose the source that this tile lies in."""
        value, axis = self.value[i.name], self.axis[i.joined]  # type: ignore[index]
        start = f"{axis}0" if self.tiling.tile(i.joined) > 1 else axis  # type: ignore[arg-type]
        self.line(
            f"# {i.name} lies end to end along {i.joined} in {len(i.sources)} tensors; this tile is in one of them"
        )
        low = 0
        for k, (size, pointer) in enumerate(zip(i.sizes, self.pointers[i.name], strict=True)):
            last = k == len(i.sizes) - 1
            self.line("else:" if last else f"{'el' if k else ''}if {start} < {low + size}:")
            self.line(f"    {value}_ptr = {pointer}")
            self.line(f"    {value}_at = {axis} - {low}" if low else f"    {value}_at = {axis}")
            low += size

    def _load_bounds(self, i: BlockInput) -> None:
        """lo and hi; where rows reach past their end both are 0, so that nothing is inside."""
        for _ in self._lanes(i.name):
            if not (self.tiling.is_looped and self.tiling.loop in i.axes) and self._first(
                i.name, "bounds"
            ):
                self._read_bounds(i)

    def _read_bounds(self, i: BlockInput) -> None:
        axes = [a for a in i.axes if a is not None]
        dims = self.layout.dims(axes)
        mask = self._mask(axes, dims)
        for end, pointer, source in zip(
            ("lo", "hi"), self.pointers[i.name], i.sources, strict=True
        ):
            arguments = [self._address(pointer, i.axes, self.tiling.operands[source].strides, dims)]
            arguments += [f"mask={' & '.join(mask)}", "other=0"] if mask else []
            arguments += self._from_l2(source)
            self.line(f"{self.value[i.name]}_{end} = tl.load({', '.join(arguments)})")

    def _from_l2(self, operand: int) -> list[str]:
        """How what may be read before the wait is read: an L1 may hold what was there before."""
        return ['cache_modifier=".cg"'] if operand in self.plan.op.readable_before_wait else []

    def _mask_of(self, i: BlockInput) -> str:
        """1.0 inside the bounds, 0.0 outside."""
        assert i.bounds is not None
        dims = self.layout.dims(self.block.input_axes(i))
        inside = [*self._between(i, dims), *self._mask([i.bounds], dims)]
        return f"tl.where({' & '.join(inside)}, 1.0, 0.0)"

    def _between(self, i: BlockInput, dims: Sequence[str]) -> list[str]:
        """Whether elements of the axis that is bounded are between lo and hi, to be broadcast against a tensor with dims `dims`."""
        assert i.bounds is not None
        axes = self.layout.dims([a for a in i.axes if a is not None])
        at = self._spread(self.axis[i.bounds], self.layout.dims([i.bounds]), dims)
        lo, hi = (self._spread(f"{self.value[i.name]}_{end}", axes, dims) for end in ("lo", "hi"))
        return [f"({at} >= {lo})", f"({at} < {hi})"]

    def _ends_of(self, i: BlockInput) -> BlockInput | None:
        """The bounds of a loop that is held whole, where nothing of an input matters outside of them: it is not read there."""
        plan = self.plan
        if (
            plan.tiling.is_looped
            or i.bounds is not None
            or plan.tiling.loop is None
            or plan.tiling.loop not in i.axes
            or plan.tiling.is_constant(i)
        ):
            return None
        found = {
            plan.loop_bounds.effective(s)
            for s in self.block.stages
            if i.name in stages.values_read(s)
        }
        ends = found.pop() if len(found) == 1 else None
        return (
            ends
            if ends is not None
            and {a for a in ends.axes if a} <= {*self.block.input_axes(i)}
            and (plan.layout.unrolled is None or plan.layout.unrolled not in ends.axes)
            else None
        )

    def _load(self, i: BlockInput) -> None:
        for _ in self._lanes(i.name):
            if self._first(i.name):
                self._load_here(i)

    def _load_here(self, i: BlockInput) -> None:
        if i.bounds is not None:
            if self.tiling.is_looped and self.tiling.loop in i.axes:
                self._read_bounds(i)
            else:
                self._load_bounds(i)
            self.line(f"{self.value[i.name]} = {self._mask_of(i)}")
            return
        value, dtype = self.value[i.name], self.tiling.dtype(i)
        wide = (
            ".to(tl.float32)"
            if dtype is not torch.float32 and i.name not in self.layout.kept_as_stored
            else ""
        )
        if len(i.sources) == 1:
            self.line(f"{value} = {self._read(i, self.pointers[i.name][0], 0)}{wide}")
        elif self._is_selected(i):
            if self.block.role(i.joined) is Role.LOOP:  # type: ignore[arg-type]
                self._select(i)
            self.line(
                f"{value} = {self._read(i, f'{value}_ptr', 0, shift=(i.joined, f'{value}_at'))}{wide}"
            )
        else:
            self._load_parts(i, value)
            if wide:
                self.line(f"{value} = {value}{wide}")

    def _load_parts(self, i: BlockInput, value: str) -> None:
        """A tile may reach over several sources: each gives its elements and 0 elsewhere."""
        axis = self.axis[i.joined]  # type: ignore[index]
        dims = self.layout.dims(self.block.input_axes(i))
        low = 0
        self.line(
            f"# {i.name} lies end to end along {i.joined} in {len(i.sources)} tensors; each gives its own elements"
        )
        for k, (size, pointer) in enumerate(zip(i.sizes, self.pointers[i.name], strict=True)):
            inside = [f"({axis} >= {low})"] if k else []
            inside += [f"({axis} < {low + size})"] if k < len(i.sizes) - 1 else []
            condition = f"({' & '.join(inside)})" if len(inside) > 1 else inside[0]
            mask = self._spread(
                condition, (i.joined,) if self.tiling.tile(i.joined) > 1 else (), dims
            )  # type: ignore[arg-type]
            self.line(
                f"{value} {'+=' if k else '='} {self._read(i, pointer, k, mask, (i.joined, f'({axis} - {low})' if low else axis))}"
            )
            low += size

    def _store(self, o: BlockOutput, pointer: str, text: str) -> None:
        """Store a value; `text` is what it is called in float32."""
        tensor = self.tiling.outputs[self.block.outputs.index(o)]
        dims = self.layout.value_dims(o.value)
        address, mask = (
            self._address(pointer, o.axes, tensor.strides, dims),
            self._mask([a for a in o.axes if a], dims),
        )
        if (append := self.tiling.append_of(o)) is not None:
            slot, inside = self._slot(o, pointer, append, dims)
            address, mask = f"{address} + {slot} * {tensor.strides[-2]}", [*mask, *inside]
        for a in self.tiling.replicated_along(o):
            mask.append(f"({self.axis[a]}{'0' if self.tiling.tile(a) > 1 else ''} == 0)")
        arguments = [address, f"{text}.to({triton_dtype(tensor.dtype)})"]
        if mask:
            arguments.append(f"mask={' & '.join(mask)}")
        self.line(f"tl.store({', '.join(arguments)})")

    def _slot(
        self, o: BlockOutput, pointer: str, append: Append, dims: Sequence[str]
    ) -> tuple[str, list[str]]:
        """The slot that an output's rows begin at, and what says that a row's slot is one: nothing is written outside of the cache."""
        axis = self._load_slot(o, pointer, append)
        slot = self._spread(
            self._slot_pointer(pointer).removesuffix("_ptr"),
            self.layout.dims([axis] if axis else []),
            dims,
        )
        row = o.axes[-2]
        at = (
            slot
            if row is None or self._is_fixed(row, 1)
            else f"({slot} + {self._spread(self.axis[row], self.layout.dims([row]), dims)})"
        )
        return slot, [f"({at} >= 0)", f"({at} < {append.slots})"]

    def _load_slot(self, o: BlockOutput, pointer: str, append: Append) -> str | None:
        """Read the position of an append, if that was not done; return the axis of rows that have one each."""
        position = self.tiling.operands[append.position]
        axis = o.axes[0] if position.dims[0] > 1 else None
        name = self._slot_pointer(pointer)
        if self._first(o.value, name):
            own = [axis] if axis else []
            arguments = [self._address(name, (axis,), position.strides[:1], self.layout.dims(own))]
            arguments += (
                [f"mask={self._within(axis, own)}", "other=0"]
                if axis and self.masks.needed(axis)
                else []
            )
            arguments += self._from_l2(append.position)
            self.line(f"{name.removesuffix('_ptr')} = tl.load({', '.join(arguments)}).to(tl.int64)")
        return axis

    def _read_again(self, i: BlockInput) -> str:
        """A load of its own for whatever else reads a factor of an asynchronous product.

        Triton (3.6) counts the buffers of a load that other code reads too as if no product read it asynchronously; the next
        copy then overwrites a tile that the product still reads: a race, seen as wrong sums on an H200. Another eviction
        policy keeps the compiler from joining the two loads again.
        """
        if len(i.sources) == 1:
            return self._read(i, self.pointers[i.name][0], 0, policy="evict_last")
        value = self.value[i.name]
        return self._read(
            i, f"{value}_ptr", 0, shift=(i.joined, f"{value}_at"), policy="evict_last"
        )
