"""Blocks that share the loop of one tile.

Each of `cooperating_blocks` blocks takes an equal number of the loop's steps, and stores its
partial results in scratch memory. The last block to finish adds the partial results of all blocks,
always in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mirage_hf import errors
from mirage_hf.codegen.plan.layout import TensorLayout
from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.graph.block import Accumulator

#: Partial results that a thread holds at a time while those of all blocks are added.
GATHERED_PER_THREAD = 64

#: Most blocks whose partial results are added without a loop. 64 in a row spilled registers.
MOST_UNLOOPED_BLOCKS = 16

_WARP = 32
_MOST_SCRATCH = 2**31


@dataclass(frozen=True)
class Cooperation:
    """How several blocks share a loop."""

    layout: TensorLayout
    #: Blocks that share the loop of a tile (`Schedule.cooperating_blocks`). 1: they do not share.
    blocks: int
    num_warps: int

    @property
    def _tiling(self) -> Tiling:
        return self.layout.tiling

    @cached_property
    def steps_per_block(self) -> int:
        """The number of loop steps that each block takes."""
        return -(-self._tiling.trips(str(self._tiling.loop)) // self.blocks)

    @cached_property
    def shared_accumulators(self) -> tuple[Accumulator, ...]:
        """The accumulators that are split: several blocks hold partial results of each."""
        if self.blocks == 1:
            return ()
        return self._tiling.block.accumulators

    @cached_property
    def partial_floats(self) -> int:
        """The number of partial results of one block, each a float32."""
        return 0 if self.blocks == 1 else self.layout.accumulated_elements

    @cached_property
    def scratch(self) -> int:
        """The number of partial results of all blocks, each a float32."""
        return self._tiling.num_tiles * self.blocks * self.partial_floats

    @property
    def gathers_in_loop(self) -> bool:
        """True if the partial results of all blocks are added in a loop."""
        return self.blocks > MOST_UNLOOPED_BLOCKS

    def counted(self, axis: str) -> int:
        """Return how many elements of a tile along an axis are gathered, a power of two.

        A short axis may fill only part of the smallest side of a tensor-core product. Then only
        that part is gathered. A loop gathers the whole tile, because Triton 3.6 finds no register
        layouts to pad the result of a loop.
        """
        return self._tiling.tile(axis) if self.gathers_in_loop else self._tiling.within(axis)

    @property
    def _gathered_elements(self) -> Mapping[str, int]:
        """How many partial results of one block are gathered for each accumulator, by name."""
        return self.layout.accumulated if self.gathers_in_loop else self.layout.accumulated_within

    def gathered(self, acc: Accumulator) -> int:
        """Return how many blocks' partial results are read at a time, a power of two."""
        return self._blocks_at_a_time(self._gathered_elements[acc.out])

    def _blocks_at_a_time(self, elements: int) -> int:
        fit = GATHERED_PER_THREAD * _WARP * self.num_warps // elements
        largest_power = 1 << max(0, fit.bit_length() - 1)
        return min(self.blocks, MOST_UNLOOPED_BLOCKS, largest_power)

    @cached_property
    def most_gathered(self) -> int:
        """The most partial results that are read at a time. 0 if blocks do not share the loop."""
        if self.blocks == 1:
            return 0
        sizes = self._gathered_elements.values()
        return max((n * self._blocks_at_a_time(n) for n in sizes), default=0)

    def check(self) -> None:
        """Check that the loop can be shared.

        Raises:
            CodegenError: If it cannot.
        """
        if self.blocks == 1:
            return
        loops = self._tiling.block.loops
        if len(loops) != 1 or not self._tiling.is_looped:
            raise errors.CodegenError(
                f"schedule: {self.blocks} blocks share the loop, so exactly one stage must loop, "
                f"in several steps; {len(loops)} stages loop"
                + ("" if self._tiling.is_looped else ", in one step")
            )
        steps = self._tiling.trips(str(self._tiling.loop))
        if (self.blocks - 1) * self.steps_per_block >= steps:
            raise errors.CodegenError(
                f"schedule: {steps} steps of the loop cannot be shared by {self.blocks} blocks "
                "without leaving one idle"
            )
        if not self.shared_accumulators:
            raise errors.CodegenError(
                f"schedule: the loop has no sums that {self.blocks} blocks could share; "
                "cut a grid axis into smaller tiles"
            )
        if self.scratch >= _MOST_SCRATCH:
            raise errors.CodegenError(
                f"schedule: {self.scratch} partial results are too many; give other tiles, "
                "or fewer cooperating_blocks"
            )
