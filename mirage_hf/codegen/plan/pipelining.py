"""Which loads of a pipelined loop Triton copies asynchronously, and which need care for that.

On Hopper a product of 64 rows or more is asynchronous (wgmma). It may still read its factors from
shared memory while the next loop step runs. Triton 3.6 handles some uses of such factors wrongly,
so other code gets loads of its own.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata

from mirage_hf import errors
from mirage_hf.codegen.plan import code_order
from mirage_hf.codegen.plan.cooperation import Cooperation
from mirage_hf.codegen.plan.layout import MMA_COLUMNS, Dot, TensorLayout
from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.graph.coded import is_packed

#: Rows of Hopper's asynchronous tensor-core instruction.
WARPGROUP_ROWS = 64

#: Warps of a warpgroup, which issues that instruction.
WARPGROUP_WARPS = 4

#: Fewest bytes that a thread copies into shared memory when Triton loads ahead.
COPIED_BYTES = 4

#: The `num_stages` with which a loop of multiply-adds holds the words of its next step.
HELD_STAGES = 2

_WARP = 32


def _triton_version() -> tuple[int, ...]:
    """Return the major and minor version of the installed Triton, or () without one."""
    for name in ("triton", "pytorch-triton"):  # the second one is a nightly build
        with contextlib.suppress(metadata.PackageNotFoundError):
            return tuple(map(int, re.findall(r"\d+", metadata.version(name))[:2]))
    return ()


#: True if Triton uses the asynchronous instruction for products of 8 columns too. Triton 3.6 does
#: not, 3.8 and 3.9 do (read off their PTX).
WGMMA_TAKES_8_COLUMNS = _triton_version() >= (3, 7)


@dataclass(frozen=True)
class LoopLoads:
    """What a kernel's loop loads, whatever its warps and stages."""

    layout: TensorLayout

    @cached_property
    def from_one_tensor(self) -> frozenset[str]:
        """The inputs of a loop that each tile reads from one tensor."""
        tiling = self.layout.tiling
        return frozenset(
            i.name
            for i in tiling.block.inputs
            if tiling.loop in i.axes
            and i.bounds is None
            and not tiling.has_index_in_loop(i)
            and (len(i.sources) == 1 or tiling.selects_source(i))
        )

    @cached_property
    def are_packed_along_loop(self) -> bool:
        """True if words of an input hold codes along the loop axis."""
        return code_order.packs_along(self.layout.tiling, str(self.layout.tiling.loop))

    @cached_property
    def have_added_words(self) -> bool:
        """True if a loop of multiply-adds may hold the words of its next step.

        Only weights whose loads need no index of the step are held.
        """
        tiling, loop = self.layout.tiling, str(self.layout.tiling.loop)
        if not tiling.is_looped or len(tiling.block.loops) != 1 or self.are_packed_along_loop:
            return False
        coded = [
            i
            for i in tiling.block.inputs
            if i.name in self.layout.byte_words or is_packed(tiling.dtype(i))
        ]
        walked = [i.name for i in coded if loop in i.axes and tiling.is_constant(i)]
        return bool(walked) and self.from_one_tensor.issuperset(walked)


@dataclass(frozen=True)
class Pipelining:
    """The asynchronous loads of a kernel's loop."""

    loads: LoopLoads
    cooperation: Cooperation
    num_stages: int
    num_warps: int
    #: Loop steps that a trip of the loop takes (`Schedule.steps_per_trip`).
    steps_per_trip: int = 1

    @property
    def layout(self) -> TensorLayout:
        """The dims of the kernel's tensors."""
        return self.loads.layout

    @property
    def _tiling(self) -> Tiling:
        return self.layout.tiling

    @cached_property
    def _is_pipelined(self) -> bool:
        return self._tiling.is_looped and self.num_stages > 1

    def is_asynchronous(self, dot: Dot) -> bool:
        """Return True if Hopper may read a product's factors while the next step runs."""
        if self.num_warps < WARPGROUP_WARPS or self.layout.rows(dot) < WARPGROUP_ROWS:
            return False
        return WGMMA_TAKES_8_COLUMNS or self.layout.columns(dot) > MMA_COLUMNS

    def reads_as_stored(self, dot: Dot, x: str) -> bool:
        """Return True if an asynchronous product reads input `x` without a conversion.

        A conversion would be other code that reads the load.
        """
        i = self._tiling.inputs[x]
        return (
            self.is_asynchronous(dot)
            and self._tiling.dtype(i) is dot.dtype
            and len(self.layout.value_dims(x)) == 2
            and self.layout.code_ordered.isdisjoint(i.axes)
            and (i.rotation is None or i.rotation.swaps)
        )

    @cached_property
    def has_asynchronous(self) -> bool:
        """True if Hopper may read the factors of some product while the next step runs."""
        return any(self.is_asynchronous(d) for d in self.layout.dots.values())

    @cached_property
    def read_asynchronously(self) -> frozenset[str]:
        """Inputs of the loop that an asynchronous product reads as they are stored."""
        if not self._is_pipelined:
            return frozenset()
        inputs = self._tiling.inputs
        return frozenset(
            x
            for dot in self.layout.dots.values()
            for x in (dot.left, dot.right)
            if x in inputs
            and self._tiling.loop in inputs[x].read_axes
            and self.reads_as_stored(dot, x)
            and (len(inputs[x].sources) == 1 or self._tiling.selects_source(inputs[x]))
        )

    @cached_property
    def loaded_twice(self) -> frozenset[str]:
        """Inputs read asynchronously that other code of the loop reads too.

        That code gets a load of its own, see `LoadWriter.second_load`.
        """
        if not self.layout.dots or not self.read_asynchronously:
            return frozenset()
        block, layout = self._tiling.block, self.layout
        read = {a for op in block.ops() if op.out not in layout.unformed_products for a in op.args}
        read |= {a.arg for s in block.stages for a in s.accumulators}
        read |= {
            x
            for dot in layout.dots.values()
            for x in (dot.left, dot.right)
            if x in self._tiling.inputs and not self.reads_as_stored(dot, x)
        }
        return frozenset(x for x in self.read_asynchronously if x in read)

    @cached_property
    def loaded_ahead(self) -> frozenset[str]:
        """Inputs of a loop of tensor-core products that are too small for an asynchronous copy.

        An example is 128 elements of a norm's weight: less than 4 bytes for each thread. Triton
        would load them in the step that reads them, and each step would wait for memory. So they
        are loaded one step ahead. On an H200 this took 32 steps from 33 to 22 µs.
        """
        if self.holds_words_ahead:
            return self.loads.from_one_tensor
        if not (self.layout.dots and self._is_pipelined):
            return frozenset()
        fewest = COPIED_BYTES * _WARP * self.num_warps
        tiling = self._tiling
        walked = (tiling.inputs[name] for name in self.loads.from_one_tensor)
        return frozenset(
            i.name
            for i in walked
            if len(i.sources) == 1
            and i.name not in self.loaded_twice
            and not is_packed(tiling.dtype(i))
            and tiling.numel(tiling.block.input_axes(i)) * tiling.dtype(i).itemsize < fewest
        )

    @property
    def holds_words_ahead(self) -> bool:
        """Return True if all that a step loads is loaded one step ahead, in registers.

        A step has few words of codes, so registers have room for those of the next one. Threads
        then load the words that they multiply, and wait for no other thread. The loop must not be
        pipelined through shared memory, nor walk the codes of packed words.
        """
        if not self.layout.mma:
            # Two stages mean that multiply-adds hold the words of their next step.
            return self.num_stages == HELD_STAGES and self.loads.have_added_words
        if self.num_stages > 1 or not self._tiling.is_looped or not self.layout.code_factors:
            return False
        return not self.loads.are_packed_along_loop

    @property
    def walks_trips(self) -> bool:
        """Return True if the loop is written in trips, which load for later steps themselves."""
        return self.steps_per_trip > 1 or (self.holds_words_ahead and not self.layout.mma)

    @cached_property
    def loaded_together(self) -> tuple[range, ...]:
        """The steps of a trip whose loads are issued together: its halves.

        Groups of codes that follow each other in memory then make longer reads.
        """
        steps = range(self.steps_per_trip)
        half = max(1, len(steps) // 2)
        return tuple(x for x in (steps[:half], steps[half:]) if x)

    @property
    def takes_one_trip(self) -> bool:
        """Return True if all steps of a block are in one trip, so nothing is loaded in the loop."""
        return self.steps_per_trip == self.cooperation.steps_per_block

    # -- what Triton gets wrong -------------------------------------------------------------------

    def check(self) -> None:
        """Reject kernels for which Triton generates wrong code, or which load too far ahead.

        Raises:
            CodegenError: If the schedule gives such a kernel.
        """
        if self.layout.dots:
            self._check_dots()
        if self.steps_per_trip > 1:
            self._check_trips()

    def _check_dots(self) -> None:
        """Reject kernels whose products on tensor cores Triton gets wrong."""
        for x in self.loaded_twice:
            if self._tiling.has_index_in_loop(self._tiling.inputs[x]):
                raise errors.CodegenError(
                    f"{x}: a product of {WARPGROUP_ROWS} rows and other code read it, and its "
                    "index changes in each step; give fewer rows"
                )
        for dot in self.layout.dots.values():
            if self.is_asynchronous(dot):
                self._check_chained(dot)
                self._check_transposed(dot)

    def _check_trips(self) -> None:
        """Reject trips of several steps if words are not held ahead, or if a trip is not filled."""
        if not self.holds_words_ahead:
            raise errors.CodegenError(
                f"schedule: steps_per_trip is {self.steps_per_trip}, but this loop holds no words "
                "of codes ahead; give 1"
            )
        steps = self.cooperation.steps_per_block
        if steps % self.steps_per_trip:
            raise errors.CodegenError(
                f"schedule: trips of {self.steps_per_trip} steps do not divide the {steps} steps "
                "of a block; give fewer steps_per_trip, or other cooperating_blocks"
            )

    def _check_chained(self, dot: Dot) -> None:
        """Reject a product of 64 rows that reads another product's result from unpipelined loads.

        Triton 3.6 gives wrong numbers, the same ones every time (seen on an H200), if loads are not
        copied asynchronously.
        """
        if not all(self._loads_are_copied(d) for d in self._products_behind(dot)):
            raise errors.CodegenError(
                f"{dot.contraction.out} multiplies what another product gives, with "
                f"{WARPGROUP_ROWS} rows; pipeline the loop (num_stages of 2 or more, a tile "
                "shorter than the loop), or give fewer rows"
            )

    def _check_transposed(self, dot: Dot) -> None:
        """Reject a right factor with columns of several axes before the summed one.

        Triton 3.6 copies the next tile into the shared memory that the product still reads.
        """
        has_several_axes = len(self.layout.value_dims(dot.right)) > 2
        if dot.right_transposed and has_several_axes and dot.right in self._tiling.inputs:
            raise errors.CodegenError(
                f"{dot.right}: columns of several axes before the summed one, with "
                f"{WARPGROUP_ROWS} rows; give fewer rows, or warps"
            )

    def _loads_are_copied(self, dot: Dot) -> bool:
        """Return True if a product is in a loop of several steps whose loads are copied ahead."""
        in_loops = {
            name
            for s in self._tiling.block.stages
            if s.loop
            for name in (*(op.out for op in s.body), *(a.out for a in s.accumulators))
        }
        is_in_pipelined_loop = dot.contraction.out in in_loops and self._is_pipelined
        return is_in_pipelined_loop and self.cooperation.steps_per_block > 1

    def _products_behind(self, dot: Dot) -> list[Dot]:
        """Return the nearest products that a factor of a product is computed from."""
        ops, dots = self._tiling.ops, self.layout.dots
        todo, visited, nearest = [dot.contraction.a, dot.contraction.b], set[str](), list[Dot]()
        while todo:
            value = todo.pop()
            if value in dots:
                nearest.append(dots[value])
            elif value not in visited and value in ops:
                visited.add(value)
                todo += [a for a in ops[value].args if isinstance(a, str)]
        return nearest
