"""Tiles as Triton text: a block's indices along each axis, masks, addresses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.codegen.triton_names import KernelNames, slot_pointer
from mirage_hf.graph.block import Axis, BlockInput, Role, Taken

#: Offsets from here on do not fit in 32 bits.
FAR = 2**31


def triton_dtype(dtype: torch.dtype) -> str:
    """Return the Triton name of a dtype."""
    return "tl." + str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Coordinates:
    """Names for the indices of axes that replace the usual ones."""

    names: Mapping[str, str] = field(default_factory=dict)

    def also(self, axis: str, name: str) -> Coordinates:
        """Return these names and another one."""
        return Coordinates({**self.names, axis: name})


@dataclass(frozen=True)
class Ahead:
    """A later loop step whose tiles are loaded.

    Attributes:
        at: The variable that holds its indices on the loop axis.
        inside: The variable that is true for indices within the axis. "" if all are.
        follows: The variable that is true if the step exists. "" if it always does.
        start: The variable or number where the step begins on the loop axis. "" if words do not lie
            along it.
    """

    at: str
    inside: str = ""
    follows: str = ""
    start: str = ""


class TileWriter:
    """The lines of a kernel so far, and how its tiles are named and addressed."""

    def __init__(self, plan: KernelPlan, name: str) -> None:
        """Begin the kernel `name`."""
        self.plan, self.block, self.name = plan, plan.tiling.block, name
        self.tiling, self.layout, self.masks = plan.tiling, plan.layout, plan.masks
        self.loop_bounds, self.cooperation = plan.loop_bounds, plan.cooperation
        self.pipelining = plan.pipelining
        self.lines: list[str] = []
        self.indent = 1
        #: The bounds of the current loop, if it only visits what is within them.
        self.trimmed: BlockInput | None = None
        #: The inputs whose tiles of the first loop step are loaded already.
        self.first_words: frozenset[str] = frozenset()
        #: The element of the unrolled axis that is being written.
        self.lane: int | None = None
        #: What has been written already: the kind of line, its value, and the value's lane.
        self.written: set[tuple[str, str, int | None]] = set()
        names = KernelNames(plan, lambda: self.lane)
        self.axis, self.value = names.axis, names.value
        #: Pairs (pointer name, position). Positions count the op's operands, then its outputs.
        self.arguments: list[tuple[str, int]] = []
        self.pointers: dict[str, list[str]] = {}
        #: The names of indices that choose elements of inputs. Equal ones are loaded once.
        self.indices: dict[Taken, str] = {}
        self.out_pointers: list[str] = []
        self._name_pointers()

    def _name_pointers(self) -> None:
        for i in self.block.inputs:
            value = self.value[i.name]
            count = len(i.sources)
            numbers = [""] if count == 1 else [str(k) for k in range(count)]
            self.pointers[i.name] = [f"{value}{n}_ptr" for n in numbers]
            self.arguments += zip(self.pointers[i.name], i.sources, strict=True)
            if i.taken is not None and self._index_key(i.taken) not in self.indices:
                self.indices[self._index_key(i.taken)] = f"{value}_index"
                self.arguments.append((f"{value}_index_ptr", i.taken.index))
        for n, o in enumerate(self.block.outputs):
            taken = {argument for argument, _ in self.arguments}
            value = self.value[o.value]
            choices = (f"{value}_ptr", f"{value}_out_ptr", f"out{n}_ptr")
            pointer = next(p for p in choices if p not in taken)
            self.out_pointers.append(pointer)
            self.arguments.append((pointer, len(self.tiling.operands) + n))
            append = self.tiling.append_of(o)
            if append is not None:
                self.arguments.append((slot_pointer(pointer), append.position))

    @staticmethod
    def _index_key(taken: Taken) -> Taken:
        """Return what is equal for inputs that one load of an index serves."""
        return replace(taken, dim=0)

    # -- lines ------------------------------------------------------------------------------------

    def line(self, text: str = "") -> None:
        """Add a line."""
        self.lines.append(("    " * self.indent + text) if text else "")

    def lines_if(self, condition: str, lines: Sequence[str]) -> None:
        """Add lines under a condition."""
        self.line(f"if {condition}:")
        for line in lines:
            self.line(f"    {line}")

    def each_lane(self, value: str) -> Iterator[int]:
        """Yield each lane of a value or axis that has lanes.

        Yields only once for other values and axes, and if a lane is being written already.
        """
        carried = self.block.carried.get(value, (value,))
        if self.lane is not None or self.layout.unrolled not in carried:
            yield 0
            return
        for n in range(self.layout.lanes):
            self.lane = n
            yield n
        self.lane = None

    def is_new(self, value: str, what: str = "") -> bool:
        """Return True the first time that `what` of a value is asked for, once for each lane."""
        has_lanes = self.layout.unrolled in self.block.carried[value]
        key = what, value, self.lane if has_lanes else None
        if key in self.written:
            return False
        self.written.add(key)
        return True

    # -- axes -------------------------------------------------------------------------------------

    def offsets(self) -> None:
        """Define this block's indices along each axis that it does not loop over."""
        cut = [a for a in self.block.named(Role.GRID) if self.tiling.trips(a.name) > 1]
        pid = self._block_number(len(cut))
        before = 1
        for a in self.block.axes:
            is_loop = a.role is Role.LOOP and self.tiling.is_looped
            if is_loop or self.tiling.split_axis(a.name):
                continue
            number = None
            if a in cut:
                number = f"{pid} // {before}" if before > 1 else pid
                trips = self.tiling.trips(a.name)
                if a is not cut[-1]:
                    number = f"({number}) % {trips}" if before > 1 else f"{number} % {trips}"
                before *= trips
            self._offset(a, number)
        for a in self.block.axes:
            splits_bounds = self.loop_bounds.are_split and a.name == self.tiling.loop
            if self.tiling.split_axis(a.name) and not splits_bounds:
                self._offset_of_split(a)

    def _block_number(self, cut_axes: int) -> str:
        """Return the name of the variable that holds the number of the block's tile."""
        blocks = self.plan.schedule.cooperating_blocks
        if blocks > 1:
            loop = self.tiling.loop
            self.line(
                f"part = tl.program_id(0) % {blocks}"
                f"  # of {loop}: {blocks} cooperating blocks compute each tile"
            )
            self.line(f"tile = tl.program_id(0) // {blocks}")
            return "tile"
        if cut_axes > 1:
            self.line("pid = tl.program_id(0)")
            return "pid"
        return "tl.program_id(0)"

    def _offset(self, a: Axis, number: str | None) -> None:
        """Define a block's indices along an axis. `number`: its tile's, if there are several."""
        tile, var = self.tiling.tile(a.name), self.axis[a.name]
        if tile == 1:
            if number is not None:
                self.line(f"{var} = {number}  # {a.size} of them")
            return
        if number is not None:
            number = f"({number})" if " " in number else number
            self.line(f"{var}0 = {number} * {tile}")
        if a.name == self.layout.unrolled:
            self._lanes_of(a, starts_at_zero=number is None)
            return
        if number is not None:
            self.line(f"{var} = {var}0 + tl.arange(0, {tile})  # {a.size} in tiles of {tile}")
        else:
            self.line(f"{var} = tl.arange(0, {tile})  # all {a.size}")
        self.bound(a.name)

    def _lanes_of(self, a: Axis, starts_at_zero: bool) -> None:
        """Define each element of the unrolled axis as a variable of its own."""
        var = self.axis[a.name]
        if starts_at_zero:
            # 0, but the compiler must not know that. If it sees that a lane is outside, it drops
            # the lane. On three lanes the LLVM of Triton 3.6 then aborts with an assertion of its
            # SLP vectorizer. Seen for a gated MLP of 3 rows.
            self.line(f"{var}0 = tl.program_id(1)")
        for n in self.each_lane(a.name):
            self.line(f"{self.axis[a.name]} = {var}0 + {n}  # of {a.size}")
            self.bound(a.name)

    def _offset_of_split(self, a: Axis) -> None:
        """Define where this block's split of an axis begins, and its indices if held whole."""
        split_axis = str(self.tiling.split_axis(a.name))
        size, tile = self.block.split_size(a.name), self.tiling.tile(a.name)
        var = self.axis[a.name]
        start = f"{self.axis[split_axis]} * {size}" if size > 1 else self.axis[split_axis]
        is_loop = a.role is Role.LOOP and self.tiling.is_looped
        if tile == 1 and not is_loop:
            self.line(f"{var} = {start}  # {a.size} of them, one in each split")
            return
        count = self.block.axis(split_axis).size
        self.line(f"{var}_start = {start}  # {a.size} in {count} splits of {size}")
        if not is_loop:
            self.line(f"{var} = {var}_start + tl.arange(0, {tile})  # all {size}")
            self.bound(a.name)

    def bound(self, axis: str, var: str = "") -> None:
        """Define `<axis>_in`: which elements of a tile count. Write nothing if all of them do."""
        size, start = self.block.axis(axis).size, self.axis[axis]
        var = var or start
        splits_bounds = self.loop_bounds.are_split and axis == self.tiling.loop
        has_splits = self.tiling.split_axis(axis) and not splits_bounds
        # Two comparisons, not one with the smaller end, because the compiler knows the alignment
        # of each end.
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

    def loop_starts(self) -> list[str]:
        """Return the terms of where a block begins on the loop axis."""
        loop = str(self.tiling.loop)
        if self.trimmed is not None:
            return [f"{self.axis[loop]}_first"]
        starts = [f"{self.axis[loop]}_start"] if self.tiling.split_axis(loop) else []
        if self.plan.schedule.cooperating_blocks > 1:
            length = self.cooperation.steps_per_block * self.tiling.tile(loop)
            starts.append(f"part * {length}")
        return starts

    # -- masks and broadcasting -------------------------------------------------------------------

    def spread(self, text: str, dims: Sequence[str], onto: Sequence[str]) -> str:
        """Return `text` with dims `dims`, indexed so that it broadcasts against dims `onto`."""
        if not dims or tuple(dims) == tuple(onto):
            return text
        return f"{text}[{', '.join(':' if a in dims else 'None' for a in onto)}]"

    def mask(self, axes: Sequence[str], onto: Sequence[str]) -> list[str]:
        """Return the conditions under which elements of a tile count."""
        masked = [a for a in self.layout.order if a in axes and self.masks.needed(a)]
        return [self.within(a, onto) for a in masked]

    def conditions(self, ahead: Ahead | None, onto: Sequence[str]) -> list[str]:
        """Return the conditions under which elements of a later loop step are loaded."""
        if ahead is None:
            return []
        along = self.layout.dims([str(self.tiling.loop)])
        inside = [self.spread(ahead.inside, along, onto)] if ahead.inside else []
        return inside + ([ahead.follows] if ahead.follows else [])

    def within(self, axis: str, onto: Sequence[str]) -> str:
        """Return which elements along one axis count, to broadcast against dims `onto`."""
        return self.spread(f"{self.axis[axis]}_in", self.layout.dims([axis]), onto)

    # -- addresses --------------------------------------------------------------------------------

    def address(
        self,
        pointer: str,
        axes: Sequence[str | None],
        strides: Sequence[int],
        dims: Sequence[str],
        shift: Coordinates = Coordinates(),
        read: BlockInput | None = None,
    ) -> str:
        """Return pointer arithmetic for a tile.

        Args:
            pointer: The name of the pointer.
            axes: The axis of each dim of the tensor.
            strides: Its strides.
            dims: The dims of the tile.
            shift: Other names of coordinates.
            read: The input that is read. Its rotation may swap partners, `select` may have chosen
                its strides, and an index may choose its elements.
        """
        chosen = self.chosen_strides(read) if read is not None else {}
        pairs = list(zip(axes, strides, strict=True))
        longest = pairs if read is None else self._longest_strides(read)
        is_far = sum(self.masks.largest_index(a) * s for a, s in longest if a) >= FAR
        terms = [pointer]
        if read is not None and read.taken is not None:
            terms.append(self.taken_offset(read, read.taken, strides[read.taken.dim], dims))
        for a, stride in pairs:
            if a is None or self.is_fixed(a, stride):
                continue
            at = shift.names.get(a, self.axis[a])
            rotation = read.rotation if read is not None else None
            if read is not None and rotation is not None and rotation.swaps and a == rotation.axis:
                at = self._partner(a, at, read)
            term = self.spread(at, self.layout.dims([a]), dims)
            term += ".to(tl.int64)" if is_far else ""
            terms.append(term if stride == 1 else f"{term} * {chosen.get(a, stride)}")
        return " + ".join(terms)

    # -- indices ----------------------------------------------------------------------------------

    def load_index(self, i: BlockInput) -> None:
        """Load the index that chooses elements of an input, unless it is loaded already."""
        if i.taken is None:
            return
        key = self._index_key(i.taken)
        name, axes = self.indices[key], [a for a in key.axes if a is not None]
        if ("index", name, None) in self.written:
            return
        self.written.add(("index", name, None))
        dims = self.layout.dims(axes)
        strides = self.tiling.operands[key.index].strides
        arguments = [self.address(f"{name}_ptr", key.axes, strides, dims)]
        mask = self.mask(axes, dims)
        arguments += [f"mask={' & '.join(mask)}", "other=-1"] if mask else []
        arguments += self.from_l2(key.index)
        self.line(f"{name} = tl.load({', '.join(arguments)})")
        self.line(f"{name}_in = ({name} >= 0) & ({name} < {key.size})")

    def from_l2(self, operand: int) -> list[str]:
        """Return the cache option of a read before the wait: not the L1, which may be stale."""
        is_early = operand in self.plan.op.readable_before_wait
        return ['cache_modifier=".cg"'] if is_early else []

    def forget_indices_of_loop(self) -> None:
        """Let the next loop load the indices that change in a loop."""
        loop = self.tiling.loop
        ended = {name for key, name in self.indices.items() if loop in key.axes}
        self.written = {w for w in self.written if w[0] != "index" or w[1] not in ended}

    def taken_inside(self, i: BlockInput, dims: Sequence[str]) -> list[str]:
        """Return the condition that the index of an input is in range, if it has one."""
        if i.taken is None:
            return []
        own = self.layout.dims([a for a in i.taken.axes if a is not None])
        return [self.spread(f"{self.indices[self._index_key(i.taken)]}_in", own, dims)]

    def taken_offset(
        self,
        i: BlockInput,
        taken: Taken,
        stride: int,
        dims: Sequence[str],
        unit: int = 1,
        clamped: bool = False,
    ) -> str:
        """Return the term of an address for the elements that an index chooses.

        Args:
            i: The input.
            taken: The index and the dim that it chooses from.
            stride: The stride of that dim, if all sources have the same.
            dims: The dims of the tile.
            unit: How many elements a word of memory holds.
            clamped: True to take the nearest element for an index that is out of range.
        """
        own = self.layout.dims([a for a in taken.axes if a is not None])
        at = self.indices[self._index_key(taken)]
        if clamped:
            at = f"tl.minimum(tl.maximum({at}, 0), {taken.size - 1})"
        at = self.spread(at, own, dims)
        longest = max(self.tiling.operands[s].strides[taken.dim] for s in i.sources)
        is_short = self.tiling.operands[taken.index].dtype is torch.int32
        if is_short and taken.size * longest >= FAR:
            at += ".to(tl.int64)"
        step = self.chosen_taken_stride(i) or str(stride // unit)
        return at if step == "1" else f"{at} * {step}"

    def chosen_taken_stride(self, i: BlockInput) -> str | None:
        """Return the name of the stride that a selected source has along the dim of an index."""
        if i.taken is None or len(i.sources) == 1 or not self.tiling.selects_source(i):
            return None
        differs = i.taken.dim in self.tiling.differing_dims(i)
        return f"{self.value[i.name]}_by_index" if differs else None

    def _longest_strides(self, i: BlockInput) -> list[tuple[str | None, int]]:
        """Return the axis of each dim of an input, and its longest stride in any source."""
        strides = zip(*(self.tiling.operands[s].strides for s in i.sources), strict=True)
        return list(zip(i.axes, map(max, strides), strict=True))

    def chosen_strides(self, i: BlockInput) -> dict[str, str]:
        """Return the names of the strides that a selected source has of its own, by axis.

        They count elements, or words of codes.
        """
        if len(i.sources) == 1 or not self.tiling.selects_source(i):
            return {}
        axes = [i.axes[d] for d in self.tiling.differing_dims(i)]
        return {a: f"{self.value[i.name]}_by_{self.axis[a]}" for a in axes if a is not None}

    def is_fixed(self, axis: str, stride: int) -> bool:
        """Return True if no address depends on an axis. Its indices may then be undefined."""
        return self.tiling.tile(axis) == 1 and (stride == 0 or self.masks.largest_index(axis) == 0)

    def _partner(self, axis: str, at: str, i: BlockInput) -> str:
        """Return the indices of rotate-half partners. Elements without a partner keep their own."""
        assert i.rotation is not None
        width = self.block.rotation_width(i)
        half, is_partial = width // 2, width < self.block.extent(i, axis)
        if i.rotation.pairs:
            return f"tl.where({at} < {width}, {at} ^ 1, {at})" if is_partial else f"({at} ^ 1)"
        second = f"{at} - {half}"
        if is_partial:
            second = f"tl.where({at} < {width}, {second}, {at})"
        text = f"tl.where({at} < {half}, {at} + {half}, {second})"
        # A tile starts at a multiple of its size. Lanes and splits may start anywhere.
        is_aligned = self.layout.dims([axis]) and self.tiling.split_axis(axis) is None
        together = math.gcd(half, self.tiling.tile(axis)) if is_aligned else 1
        if together == 1:
            return text
        return f"tl.max_contiguous(tl.multiple_of({text}, {together}), {together})"
