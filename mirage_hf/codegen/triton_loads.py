"""Loads and stores of tiles as Triton text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mirage_hf.codegen.placement import Append
from mirage_hf.codegen.triton_codes import CodeWriter
from mirage_hf.codegen.triton_names import slot_pointer
from mirage_hf.codegen.triton_tiles import Ahead, Coordinates, triton_dtype
from mirage_hf.graph.block import BlockInput, BlockOutput, Role
from mirage_hf.ops.dtypes import CODES_PER_WORD, can_be_added

#: The dim of a store that stands for several dims of its value.
FLAT = "flat"

#: A dim of so many elements is stored well by itself: 64 bytes of bfloat16.
LONG_DIM = 32

_NO_SHIFT = Coordinates()

#: Functions that convert codes of 8 bits. The instruction for integers is slow, and Triton has no
#: type of powers of two.
_FROM_BYTES = {
    torch.int8: "int8_as_float32",
    torch.uint8: "uint8_as_float32",
    torch.float8_e8m0fnu: "e8m0_as_float32",
}


def is_byte(dtype: torch.dtype) -> bool:
    """Return True if kernels load a dtype as bytes, which a function converts."""
    return dtype in _FROM_BYTES


def as_float32(text: str, dtype: torch.dtype) -> str:
    """Return an expression of this dtype in float32."""
    if dtype is torch.float32:
        return text
    function = _FROM_BYTES.get(dtype)
    return f"{text}.to(tl.float32)" if function is None else f"{function}({text})"


class LoadWriter(CodeWriter):
    """Writes the code that moves tiles between memory and registers."""

    # -- loads ------------------------------------------------------------------------------------

    def load(self, i: BlockInput) -> None:
        """Load an input, each lane once."""
        for _ in self.each_lane(i.name):
            if self.is_new(i.name):
                self._load_here(i)

    def _load_here(self, i: BlockInput) -> None:
        value = self.value[i.name]
        if i.bounds is not None:
            if self.tiling.is_looped and self.tiling.loop in i.axes:
                self._read_bounds(i)
            else:
                self.load_bounds(i)
            self.line(f"{value} = {self._bounds_as_number(i)}")
            return
        if len(i.sources) == 1:
            loaded = self.read(i, self.pointers[i.name][0])
            self.line(f"{value} = {self.to_float32(i, loaded)}")
        elif self.is_selected(i):
            if self.block.role(str(i.joined)) is Role.LOOP:
                self.select(i)
            self.line(f"{value} = {self.to_float32(i, self._read_selected(i))}")
        else:
            self._load_from_each_source(i, value)
            converted = self.to_float32(i, value)
            if converted != value:
                self.line(f"{value} = {converted}")

    def to_float32(self, i: BlockInput, loaded: str) -> str:
        """Return a loaded input in float32, or as it is stored if the kernel keeps it so."""
        if self.holds_words(i) or i.name in self.layout.kept_as_stored:
            return loaded
        return as_float32(loaded, self.tiling.dtype(i))

    def second_load(self, i: BlockInput) -> str:
        """Return a second load of a factor of an asynchronous product, for other code to read.

        If other code reads the product's own load, Triton 3.6 gives that load too few buffers. The
        next copy then overwrites a tile that the product still reads. This race gave wrong sums on
        an H200. A different eviction policy keeps the compiler from merging the two loads.
        """
        if len(i.sources) == 1:
            return self.read(i, self.pointers[i.name][0], policy="evict_last")
        return self._read_selected(i, policy="evict_last")

    def _read_selected(self, i: BlockInput, policy: str | None = None) -> str:
        pointer, shift = self.selected_source(i)
        return self.read(i, pointer, shift=shift, policy=policy)

    def read(
        self,
        i: BlockInput,
        pointer: str,
        source: int = 0,
        extra_mask: str | None = None,
        shift: Coordinates = _NO_SHIFT,
        policy: str | None = None,
        ahead: Ahead | None = None,
    ) -> str:
        """Return a load of one tile.

        Args:
            i: The input.
            pointer: The name of the pointer.
            source: The number of the source that it points to, if several are joined.
            extra_mask: A condition besides those of the tile.
            shift: Other names of coordinates.
            policy: An eviction policy. None: as the schedule says.
            ahead: The later loop step whose tile is loaded, if it is not the current one.
        """
        if self.holds_words(i):
            return self.read_words(i, pointer, policy or self.policy(i), shift)
        self.load_index(i)
        loop = self.tiling.loop
        if ahead is not None:
            shift = shift.also(str(loop), ahead.at)
        axes = self.block.input_axes(i)
        dims = self.layout.dims(axes)
        strides = self.tiling.operands[i.sources[source]].strides
        arguments = [self.address(pointer, i.axes, strides, dims, shift, i)]
        masked = [a for a in axes if ahead is None or a != loop]
        mask = self.mask(masked, dims) + ([extra_mask] if extra_mask else [])
        mask += self.taken_inside(i, dims)
        bounds = self.plan.effective_bounds(i)
        if bounds is not None:
            self.load_bounds(bounds)
            mask += self._between(bounds, dims)
        mask += self.conditions(ahead, dims)
        dtype = self.tiling.dtype(i)
        other = "0.0" if dtype.is_floating_point and not is_byte(dtype) else "0"
        if i.padding is not None:
            axis = i.padding.axis
            at = shift.names.get(axis, self.axis[axis])
            inside = f"({at} < {i.padding.size})"
            mask.append(self.spread(inside, self.layout.dims([axis]), dims))
            other = repr(i.padding.value)
        if mask:
            arguments.append(f"mask={' & '.join(mask)}")
            arguments += [f"other={other}"] if self.needs_other(mask, ahead) else []
        policy = policy or self.policy(i)
        if policy is not None:
            arguments.append(f'eviction_policy="{policy}"')
        load = self.in_code_order(f"tl.load({', '.join(arguments)})", dims)
        if i.rotation is None or i.rotation.swaps:
            return load
        return self._negated_half(i, load, dims, shift)

    def policy(self, i: BlockInput) -> str | None:
        """Return the eviction policy that the schedule gives an input."""
        in_loop = bool(self.tiling.loop) and self.tiling.loop in i.read_axes
        is_read_once = self.tiling.is_streamed(i) and not self.tiling.chooses_again(i)
        evicts = self.plan.schedule.evict_first and in_loop and is_read_once
        return "evict_first" if evicts else None

    def _negated_half(
        self, i: BlockInput, load: str, dims: Sequence[str], shift: Coordinates
    ) -> str:
        """Return a load of sines, negated where rotate-half subtracts."""
        assert i.rotation is not None
        axis = i.rotation.axis
        at = shift.names.get(axis, self.axis[axis])
        width = self.block.rotation_width(i)
        is_negative = f"{at} < {width // 2}"
        if i.rotation.pairs:
            is_negative = f"(({at} & 1) == 0) & ({at} < {width})"
        sign = self.spread(f"tl.where({is_negative}, -1.0, 1.0)", self.layout.dims([axis]), dims)
        is_kept = i.name in self.layout.kept_as_stored
        back = f".to({triton_dtype(self.tiling.dtype(i))})" if is_kept else ""
        return f"({load}.to(tl.float32) * {sign}){back}"

    # -- joined inputs ----------------------------------------------------------------------------

    def is_selected(self, i: BlockInput) -> bool:
        """Return True if each tile of a joined input is read from one selected source."""
        return len(i.sources) > 1 and self.tiling.selects_source(i)

    def select(self, i: BlockInput) -> None:
        """Choose the source that this tile lies in."""
        joined = str(i.joined)
        value, axis = self.value[i.name], self.axis[joined]
        start = f"{axis}0" if self.tiling.tile(joined) > 1 else axis
        self.line(
            f"# {i.name} is {len(i.sources)} tensors end to end along {joined}; "
            "this tile lies in one of them"
        )
        low, unit = 0, CODES_PER_WORD if self.holds_packed(i) else 1
        chosen = self.chosen_strides(i)
        dims = {a: i.axes.index(a) for a in chosen}
        for k, (size, pointer) in enumerate(zip(i.sizes, self.pointers[i.name], strict=True)):
            is_last = k == len(i.sizes) - 1
            self.line("else:" if is_last else f"{'el' if k else ''}if {start} < {low + size}:")
            self.line(f"    {value}_ptr = {pointer}")
            self.line(f"    {value}_at = {axis} - {low}" if low else f"    {value}_at = {axis}")
            strides = self.tiling.operands[i.sources[k]].strides
            for a, name in chosen.items():
                self.line(f"    {name} = {strides[dims[a]] // unit}")
            taken_stride = self.chosen_taken_stride(i)
            if taken_stride is not None and i.taken is not None:
                self.line(f"    {taken_stride} = {strides[i.taken.dim] // unit}")
            low += size

    def _load_from_each_source(self, i: BlockInput, value: str) -> None:
        """Load a tile that may lie in several sources: one masked load from each.

        The loads are added, or selected if their dtype cannot be added.
        """
        joined = str(i.joined)
        axis = self.axis[joined]
        dims = self.layout.dims(self.block.input_axes(i))
        low = 0
        self.line(
            f"# {i.name} is {len(i.sources)} tensors end to end along {joined}; "
            "each gives its own elements"
        )
        for k, (size, pointer) in enumerate(zip(i.sizes, self.pointers[i.name], strict=True)):
            inside = [f"({axis} >= {low})"] if k else []
            inside += [f"({axis} < {low + size})"] if k < len(i.sizes) - 1 else []
            condition = f"({' & '.join(inside)})" if len(inside) > 1 else inside[0]
            own = (joined,) if self.tiling.tile(joined) > 1 else ()
            mask = self.spread(condition, own, dims)
            shift = Coordinates({joined: f"({axis} - {low})" if low else axis})
            load = self.read(i, pointer, k, mask, shift)
            if k and not can_be_added(self.tiling.dtype(i)):
                load = f"tl.where({mask}, {load}, {value})"
            added = k and can_be_added(self.tiling.dtype(i))
            self.line(f"{value} {'+=' if added else '='} {load}")
            low += size

    # -- bounds -----------------------------------------------------------------------------------

    def load_bounds(self, i: BlockInput) -> None:
        """Load `_lo` and `_hi`. Rows past their end get 0 for both, so that nothing is inside."""
        changes_in_loop = self.tiling.is_looped and self.tiling.loop in i.axes
        for _ in self.each_lane(i.name):
            if not changes_in_loop and self.is_new(i.name, "bounds"):
                self._read_bounds(i)

    def _read_bounds(self, i: BlockInput) -> None:
        axes = [a for a in i.axes if a is not None]
        dims = self.layout.dims(axes)
        mask = self.mask(axes, dims)
        ends = zip(("lo", "hi"), self.pointers[i.name], i.sources, strict=True)
        for end, pointer, source in ends:
            strides = self.tiling.operands[source].strides
            arguments = [self.address(pointer, i.axes, strides, dims)]
            arguments += [f"mask={' & '.join(mask)}", "other=0"] if mask else []
            arguments += self.from_l2(source)
            self.line(f"{self.value[i.name]}_{end} = tl.load({', '.join(arguments)})")

    def _bounds_as_number(self, i: BlockInput) -> str:
        """Return 1.0 inside the bounds and 0.0 outside."""
        assert i.bounds is not None
        dims = self.layout.dims(self.block.input_axes(i))
        inside = [*self._between(i, dims), *self.mask([i.bounds], dims)]
        return f"tl.where({' & '.join(inside)}, 1.0, 0.0)"

    def _between(self, i: BlockInput, dims: Sequence[str]) -> list[str]:
        """Return the conditions that elements are inside the bounds, broadcast against `dims`."""
        assert i.bounds is not None
        axes = self.layout.dims([a for a in i.axes if a is not None])
        at = self.spread(self.axis[i.bounds], self.layout.dims([i.bounds]), dims)
        lo, hi = (self.spread(f"{self.value[i.name]}_{end}", axes, dims) for end in ("lo", "hi"))
        return [f"({at} >= {lo})", f"({at} < {hi})"]

    # -- stores -----------------------------------------------------------------------------------

    def store(self, o: BlockOutput, pointer: str, text: str) -> None:
        """Store an output. `text` is its value in float32."""
        tensor = self.tiling.outputs[self.block.outputs.index(o)]
        dims = self.layout.value_dims(o.value)
        value = f"{text}.to({triton_dtype(tensor.dtype)})"
        append = self.tiling.append_of(o)
        flat = self._contiguous_dims(o, dims) if append is None else ()
        if flat:
            address, value = self._flat_store(o, pointer, value, dims, flat)
            dims = (*dims[: -len(flat)], FLAT)
        else:
            address = self.address(pointer, o.axes, tensor.strides, dims)
        mask = self.mask([a for a in o.axes if a and a not in flat], dims)
        if append is not None:
            slot, inside = self._slot(o, pointer, append, dims)
            address = f"{address} + {slot} * {tensor.strides[-2]}"
            mask += inside
        for a in self.tiling.replicated_along(o):
            mask.append(f"({self.axis[a]}{'0' if self.tiling.tile(a) > 1 else ''} == 0)")
        arguments = [address, value]
        if mask:
            arguments.append(f"mask={' & '.join(mask)}")
        self.line(f"tl.store({', '.join(arguments)})")

    def _contiguous_dims(self, o: BlockOutput, dims: Sequence[str]) -> tuple[str, ...]:
        """Return the last dims of a tile that lie side by side, if the last one alone is short.

        Triton gives neighbouring threads what lies side by side along one dim. If that is short,
        it spreads other threads in any order. So these dims are stored as one. Products on tensor
        cores have layouts of their own and were not measured.
        """
        tensor = self.tiling.outputs[self.block.outputs.index(o)]
        strides = dict(zip(o.axes, tensor.strides, strict=True))
        sizes = {a: self.block.split_size(a) for a in dims if a in strides}
        if self.layout.dots or len(sizes) < max(2, len(dims)) or strides[dims[-1]] != 1:
            return ()
        found = [dims[-1]]
        if self.layout.dim_size(found[0]) >= LONG_DIM or self.masks.needed(found[0]):
            return ()
        for outer in reversed(dims[:-1]):
            inner = found[0]
            is_whole = self.layout.dim_size(inner) == sizes[inner]
            if not is_whole or strides[outer] != strides[inner] * sizes[inner]:
                break
            if self.block.role(outer) is not Role.GRID or self.masks.needed(outer):
                break
            found.insert(0, outer)
        return tuple(found) if len(found) > 1 else ()

    def _flat_store(
        self, o: BlockOutput, pointer: str, value: str, dims: Sequence[str], flat: Sequence[str]
    ) -> tuple[str, str]:
        """Return the address and the value of a store whose last dims are stored as one."""
        tensor = self.tiling.outputs[self.block.outputs.index(o)]
        first, own = flat[0], (*dims[: -len(flat)], FLAT)
        length = math.prod(map(self.layout.dim_size, flat))
        sizes = [*map(self.layout.dim_size, own[:-1]), length]
        others = [None if a in flat else a for a in o.axes]
        address = self.address(pointer, others, tensor.strides, own)
        if self.layout.dim_size(first) < self.block.split_size(first):
            stride = tensor.strides[o.axes.index(first)]
            address += f" + {self.axis[first]}0.to(tl.int64) * {stride}"
        address += f" + {self.spread(f'tl.arange(0, {length})', [FLAT], own)}"
        return address, f"tl.reshape({value}, [{', '.join(map(str, sizes))}])"

    def _slot(
        self, o: BlockOutput, pointer: str, append: Append, dims: Sequence[str]
    ) -> tuple[str, list[str]]:
        """Return the first slot of an append, and conditions that rows lie inside the cache."""
        axis = self.load_slot(o, pointer, append)
        own = self.layout.dims([axis] if axis else [])
        slot = self.spread(slot_pointer(pointer).removesuffix("_ptr"), own, dims)
        row, at = o.axes[-2], slot
        if row is not None and not self.is_fixed(row, 1):
            at = f"({slot} + {self.spread(self.axis[row], self.layout.dims([row]), dims)})"
        return slot, [f"({at} >= 0)", f"({at} < {append.slots})"]

    def load_slot(self, o: BlockOutput, pointer: str, append: Append) -> str | None:
        """Read the position of an append once; return the axis of rows that have one each."""
        position = self.tiling.operands[append.position]
        axis = o.axes[0] if position.dims[0] > 1 else None
        name = slot_pointer(pointer)
        if self.is_new(o.value, name):
            own = [axis] if axis else []
            dims = self.layout.dims(own)
            arguments = [self.address(name, (axis,), position.strides[:1], dims)]
            if axis and self.masks.needed(axis):
                arguments += [f"mask={self.within(axis, own)}", "other=0"]
            arguments += self.from_l2(append.position)
            self.line(f"{name.removesuffix('_ptr')} = tl.load({', '.join(arguments)}).to(tl.int64)")
        return axis
