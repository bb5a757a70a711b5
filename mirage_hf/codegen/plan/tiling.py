"""How tiles cut the axes of a placed block graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mirage_hf.codegen.placement import Append, PlacedOp
from mirage_hf.codegen.schedule import next_power_of_two
from mirage_hf.graph.block import BlockGraph, BlockInput, BlockOp, BlockOutput, Role
from mirage_hf.graph.kernel import DTensor
from mirage_hf.ops.dtypes import CODES_PER_WORD, element_bytes, factor_dtype


@dataclass(frozen=True)
class Tiling:
    """A placed block graph and the tile of each of its axes."""

    op: PlacedOp
    tiles: Mapping[str, int]

    @cached_property
    def block(self) -> BlockGraph:
        """The block graph."""
        assert self.op.block is not None
        return self.op.block

    @cached_property
    def operands(self) -> tuple[DTensor, ...]:
        """The tensors that the kernel reads."""
        return self.op.operands

    @property
    def outputs(self) -> tuple[DTensor, ...]:
        """The tensors that the kernel writes."""
        return self.op.outputs

    @cached_property
    def inputs(self) -> dict[str, BlockInput]:
        """The block graph's inputs by name."""
        return self.block.inputs_by_name

    @cached_property
    def ops(self) -> dict[str, BlockOp]:
        """The block graph's ops by the name of their result."""
        return self.block.ops_by_name

    @cached_property
    def _tiles(self) -> dict[str, int]:
        return dict(self.tiles)

    # -- axes -------------------------------------------------------------------------------------

    @cached_property
    def loop(self) -> str | None:
        """The loop axis, if there is one."""
        return next((a.name for a in self.block.named(Role.LOOP)), None)

    @cached_property
    def is_looped(self) -> bool:
        """True if loops take more than one step. Otherwise the loop axis is held whole."""
        return self.loop is not None and self.trips(self.loop) > 1

    def tile(self, axis: str) -> int:
        """Return the elements of an axis that a block holds at a time."""
        return self._tiles[axis]

    def trips(self, axis: str) -> int:
        """Return the number of tiles along an axis, or along one split of it."""
        return self._trips[axis]

    @cached_property
    def _trips(self) -> dict[str, int]:
        size = self.block.split_size
        return {axis: -(-size(axis) // tile) for axis, tile in self._tiles.items()}

    def within(self, axis: str) -> int:
        """Return the elements of a tile up to the end of its axis, rounded to a power of two.

        A short axis may fill only part of its tile.
        """
        tile = self.tile(axis)
        if self.trips(axis) > 1 or self.split_axis(axis):
            return tile
        return min(tile, next_power_of_two(self.block.split_size(axis)))

    def numel(self, axes: Sequence[str]) -> int:
        """Return the elements of a tile with these axes."""
        return math.prod([self._tiles[a] for a in axes])

    @cached_property
    def elements(self) -> dict[str, int]:
        """The elements of each value's tile, by the name of the value."""
        return {value: self.numel(axes) for value, axes in self.block.carried.items()}

    @cached_property
    def input_bytes(self) -> dict[str, int]:
        """The bytes of each input's tile, by the name of the input."""
        return {
            i.name: math.ceil(self.elements[i.name] * element_bytes(self.dtype(i)))
            for i in self.block.inputs
        }

    @cached_property
    def num_tiles(self) -> int:
        """The number of tiles of all grid axes together."""
        return math.prod(self.trips(a.name) for a in self.block.named(Role.GRID))

    def split_axis(self, axis: str) -> str | None:
        """Return the grid axis that numbers the splits of an axis, if there are several splits."""
        split_axis = self.block.axis(axis).split_axis
        has_splits = split_axis is not None and self.block.axis(split_axis).size > 1
        return split_axis if has_splits else None

    def differs_along(self, grid: str, axes: Sequence[str | None]) -> bool:
        """Return True if a tensor's elements differ between blocks along a grid axis.

        Args:
            grid: The grid axis.
            axes: The tensor's axes.
        """
        return self.block.differs_along(grid, axes)

    # -- inputs -----------------------------------------------------------------------------------

    def dtype(self, i: BlockInput) -> torch.dtype:
        """Return the dtype in which an input is stored."""
        return self.operands[i.sources[0]].dtype

    @cached_property
    def mma_dtype(self) -> torch.dtype:
        """The dtype that computed factors have on tensor cores.

        It is float32 if no operand has 16 bits.
        """
        return factor_dtype(t.dtype for t in self.operands) or torch.float32

    def is_constant(self, i: BlockInput) -> bool:
        """Return True if an input may be read while earlier launches still run."""
        has_constant_index = i.taken is None or self.operands[i.taken.index].constant
        return self.is_weight(i) and has_constant_index

    def is_weight(self, i: BlockInput) -> bool:
        """Return True if the sources of an input are constant. An index may choose among them."""
        return i.bounds is None and all(self.operands[s].constant for s in i.sources)

    def has_index_in_loop(self, i: BlockInput) -> bool:
        """Return True if each step of the loop reads another part of the index of an input."""
        return self.is_looped and i.taken is not None and self.loop in i.taken.axes

    def chooses_again(self, i: BlockInput) -> bool:
        """Return True if an index has more elements than it chooses from, so it repeats some."""
        return i.taken is not None and i.taken.size < math.prod(self.operands[i.taken.index].dims)

    def prefetchable(self, i: BlockInput) -> bool:
        """Return True if an input may be prefetched into the L2 before the grid dependency wait.

        That holds for constants and for the old rows of a cache, which were written long before.
        Later writes go through the L2, so a prefetch cannot hide them. Constants may also be read
        before the wait, and so may rows within bounds: the previous launch writes none of these. If
        an index chooses what is read, it must be known before the wait.
        """
        if i.taken is not None:
            is_early = i.taken.index in self.op.readable_before_wait
            return self.is_weight(i) and (is_early or self.is_constant(i))
        is_cache = i.bounds is None and self.op.caches.issuperset(i.sources)
        return self.is_constant(i) or is_cache

    def is_streamed(self, i: BlockInput) -> bool:
        """Return True if each element of an input is read by one block only."""
        return all(self.trips(a) == 1 for a in shared_along(self.block, i))

    def selects_source(self, i: BlockInput) -> bool:
        """Return True if a tile of a joined input lies in one source, whose pointer is selected.

        The strides of weights may differ, except within words of codes. Other sources must have
        the same strides.
        """
        if i.joined is None:
            return False
        differing = [s for d in self.differing_dims(i) for s in self._strides_along(i, d)]
        if differing and (not self.is_weight(i) or min(differing) < CODES_PER_WORD):
            return False
        role = self.block.role(i.joined)
        is_cut = role is Role.GRID or (role is Role.LOOP and self.is_looped)
        boundaries = list(i.sizes[:-1])
        if self.split_axis(i.joined):
            boundaries.append(self.block.split_size(i.joined))
        return is_cut and all(b % self.tile(i.joined) == 0 for b in boundaries)

    def differing_dims(self, i: BlockInput) -> tuple[int, ...]:
        """Return the dims along which the sources of an input have different strides."""
        return tuple(d for d in range(len(i.axes)) if len(set(self._strides_along(i, d))) > 1)

    def _strides_along(self, i: BlockInput, dim: int) -> list[int]:
        return [self.operands[s].strides[dim] for s in i.sources]

    # -- outputs ----------------------------------------------------------------------------------

    def append_of(self, o: BlockOutput) -> Append | None:
        """Return how an output is stored into a cache, if it is."""
        number = self.block.outputs.index(o)
        return next((a for a in self.op.appends if a.output == number), None)

    def replicated_along(self, o: BlockOutput) -> tuple[str, ...]:
        """Return the grid axes along which all blocks hold the same elements of an output.

        Such an output is a copy of an input. The first block along these axes stores it.
        """
        return tuple(
            a.name
            for a in self.block.named(Role.GRID)
            if not self.differs_along(a.name, o.axes) and self.trips(a.name) > 1
        )

    def can_overwrite(self, o: BlockOutput, source: int) -> bool:
        """Return True if an output may be written over operand `source`.

        A block may write elements that no other block reads, after it has read them itself.
        """
        x, y = self.operands[source], self.outputs[self.block.outputs.index(o)]
        if (x.dims, x.strides, x.dtype) != (y.dims, y.strides, y.dtype) or x.constant:
            return False
        readers = [i for i in self.block.inputs if source in i.sources]
        if not all(_reads_plainly(i, source, o.axes) for i in readers):
            return False
        stored_after_loop = self.loop not in o.axes or not self.is_looped
        grid = self.block.named(Role.GRID)
        return stored_after_loop and all(self.differs_along(a.name, o.axes) for a in grid)

    @cached_property
    def may_overwrite_inputs(self) -> bool:
        """True if some output may be written over some operand."""
        sources = range(len(self.operands))
        return any(self.can_overwrite(o, n) for o in self.block.outputs for n in sources)


def _reads_plainly(i: BlockInput, source: int, axes: Sequence[str | None]) -> bool:
    """Return True if an input reads exactly the elements of one operand, by these axes."""
    options = (i.bounds, i.rotation, i.padding, i.taken)
    has_options = any(option is not None for option in options)
    return i.sources == (source,) and i.axes == axes and not has_options


def shared_along(block: BlockGraph, i: BlockInput) -> tuple[str, ...]:
    """Return the grid axes along which blocks read the same elements of an input."""
    return tuple(
        a.name for a in block.named(Role.GRID) if not block.differs_along(a.name, i.read_axes)
    )
