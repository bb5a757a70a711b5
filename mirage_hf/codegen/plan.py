"""What a kernel will look like before a line of it is written: tile shapes, order of tensor dims, tensor-core products, masks.

A tensor in the kernel has one dim per carried axis whose tile is larger than 1, in `KernelPlan.order`; axes of tile 1 are scalars.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata

import torch

from mirage_hf import errors
from mirage_hf.codegen.placement import Append, PlacedOp
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.codegen.triton_math import keeps_zero
from mirage_hf.graph.block import (
    Accumulator,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Contraction,
    Role,
    Stage,
)
from mirage_hf.graph.kernel import DTensor, KernelOp

WARPGROUP_ROWS = 64
"""Rows of Hopper's asynchronous tensor-core instruction."""

MMA_MIN = 16
"""Fewest rows of a product that tensor cores take, and fewest elements that each of its sums is over."""

MMA_COLUMNS = 8
"""Fewest columns."""


def _triton_version() -> tuple[int, ...]:
    """The major and minor version of the Triton that is installed; empty without one."""
    for name in ("triton", "pytorch-triton"):  # the second are nightly builds
        with contextlib.suppress(metadata.PackageNotFoundError):
            return tuple(map(int, re.findall(r"\d+", metadata.version(name))[:2]))
    return ()


WGMMA_TAKES_8_COLUMNS = _triton_version() >= (3, 7)
"""Whether Triton takes Hopper's asynchronous instruction for so few columns, too: 3.6 does not, 3.8 and 3.9 do (read off their PTX)."""

MOST_UNROLLED = 8
"""Elements of an axis that are variables of their own at most."""

_MOST_ORDERS = 5040
"""Orders of axes that are tried at most: all of seven."""

LOWEST = -1e30
"""What shifts of sums are where nothing counts; a maximum that is lower is no number to care about."""

GATHERED_PER_THREAD = 64
"""Partial results that a thread holds at a time while those of all blocks are added up."""

MOST_STRAIGHT = 16
"""Blocks whose partial results are added up without a loop: 64 in a row spilled registers."""

COPIED_BYTES = 4
"""What a thread copies into shared memory at least, where Triton loads ahead."""

MAX_ELEMENTS = 1 << 20
"""Largest tile that Triton takes."""


@dataclass(frozen=True)
class Dot:
    """`out` = left · right on tensor cores, both cast to `dtype`; `left` is stored (rows, over) unless `left_transposed`. Rows may be those
    of several axes, as heads and queries are; so may columns."""

    contraction: Contraction
    left: str
    right: str
    left_transposed: bool
    right_transposed: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class KernelPlan:
    """A block graph with its operands, as it runs, and a schedule. Errors: CodegenError when no kernel can be made of them."""

    op: PlacedOp
    schedule: Schedule

    def __post_init__(self) -> None:
        self.schedule.check(self.block)
        for i in self.block.inputs:
            if len({self.operands[s].dtype for s in i.sources}) > 1:
                raise errors.CodegenError(
                    f"block input {i.name}: its joined sources have different dtypes; cast them to one"
                )
        for axis in self.block.named(Role.GRID):
            for o in self.block.outputs:
                if not self.cuts(axis.name, o.axes) and o.value not in self.input:
                    raise errors.CodegenError(
                        f"output {o.value} does not carry the grid axis {axis.name}, so its blocks would write "
                        "the same elements; make the axis a loop or tile axis, or a dim of the output"
                    )
        loop = self.loop
        stored_in_loop = {op.out for s in self.block.stages if s.loop for op in s.body}
        for o in self.block.outputs:
            if loop and loop in o.axes and o.value not in stored_in_loop:
                raise errors.CodegenError(
                    f"output {o.value} carries the loop axis {loop} but no stage that loops computes it"
                )
        for stage in self.block.stages:
            for op in stage.body:
                if stage.loop is None and loop and loop in self.block.carried[op.out]:
                    raise errors.CodegenError(
                        f"{op.out} carries the loop axis {loop} in a stage without a loop; give the stage the loop"
                    )

        for dot in self.dots.values():
            if self.is_asynchronous(dot) and any(
                not self._pipelined(d) for d in self._products_in(dot)
            ):
                # Triton 3.6 gets these wrong (seen on an H200, the same wrong numbers every time): two products of 64 rows, the
                # second reading the first's result, where loads are not copied asynchronously
                raise errors.CodegenError(
                    f"{dot.contraction.out} multiplies what another product gives, with {WARPGROUP_ROWS} rows; "
                    "pipeline the loop (num_stages of 2 or more, a tile shorter than the loop), or give fewer rows"
                )

            if (
                dot.right_transposed
                and len(self.value_dims(dot.right)) > 2
                and self.is_asynchronous(dot)
                and dot.right in self.input
            ):
                # Triton 3.6 lets the product read such a tile from where it was copied to, and copies the next one there meanwhile
                raise errors.CodegenError(
                    f"{dot.right}: columns of several axes before the summed one, with {WARPGROUP_ROWS} rows; "
                    "give fewer rows, or warps"
                )

        if self.schedule.cooperating_blocks > 1:
            self._check_split()
        for value in self.block.carried:
            if value not in self.skipped and self.numel(self.block.carried[value]) > MAX_ELEMENTS:
                raise errors.CodegenError(
                    f"{value} has {self.numel(self.block.carried[value])} elements in a tile, Triton takes "
                    f"{MAX_ELEMENTS}; give smaller tiles, or make a tile axis the loop"
                )

    def alike(self, schedule: Schedule) -> KernelPlan:
        """The plan of a schedule that differs from this one's in warps, stages, shares of the loop and what is read early: what depends
        on tiles alone is not found out again. Errors: CodegenError."""
        assert (
            schedule.tiles,
            schedule.mma,
            schedule.weights_first,
            schedule.reduce_after_loop,
        ) == (
            self.schedule.tiles,
            self.schedule.mma,
            self.schedule.weights_first,
            self.schedule.reduce_after_loop,
        )
        other = object.__new__(KernelPlan)
        vars(other).update(
            {
                n: x
                for n, x in vars(self).items()
                if n in _OF_TILES or n in self.__dataclass_fields__
            },
            schedule=schedule,
        )
        other.__post_init__()
        return other

    def _check_split(self) -> None:
        split, loops = self.schedule.cooperating_blocks, [s for s in self.block.stages if s.loop]
        if len(loops) != 1 or not self.walks:
            raise errors.CodegenError(
                f"schedule: the loop is split among {split} blocks, so there must be one stage that walks; "
                f"{len(loops)} stages loop" + ("" if self.walks else ", in one step")
            )
        if (split - 1) * self.steps_per_block >= self.trips(str(self.loop)):
            raise errors.CodegenError(
                f"schedule: {self.trips(str(self.loop))} steps of the loop cannot be split among {split} blocks of "
                "which none is without work"
            )
        if not self.shared_sums:
            raise errors.CodegenError(
                f"schedule: the loop has no sums that {split} blocks could share; cut a grid axis into smaller tiles"
            )
        if self.scratch >= 2**31:
            raise errors.CodegenError(
                f"schedule: {self.scratch} partial results are too many; give other tiles or a smaller split"
            )

    @cached_property
    def block(self) -> BlockGraph:
        assert self.op.block is not None
        return self.op.block

    @cached_property
    def operands(self) -> tuple[DTensor, ...]:
        return tuple(t for t in self.op.inputs if isinstance(t, DTensor))

    @property
    def outputs(self) -> tuple[DTensor, ...]:
        return self.op.outputs

    @cached_property
    def steps_per_block(self) -> int:
        """Steps of the loop that a block does."""
        return -(-self.trips(str(self.loop)) // self.schedule.cooperating_blocks)

    @cached_property
    def shared_sums(self) -> tuple[Accumulator, ...]:
        """The accumulators that several blocks have a part of."""
        return (
            tuple(a for s in self.block.stages for a in s.accumulators)
            if self.schedule.cooperating_blocks > 1
            else ()
        )

    @cached_property
    def partial_floats(self) -> int:
        """Partial results of one block."""
        return sum(self.numel(self.block.carried[a.out]) for a in self.shared_sums)

    def few(self, axis: str) -> int:
        """Elements of a tile that may count, as a power of two: fewer than the least side of a tensor-core product where the axis is short.
        Not where they are added up in a loop: Triton 3.6 finds no layouts for filling up what comes out of one."""
        cut = (
            self.trips(axis) > 1
            or self.parts(axis)
            or self.schedule.cooperating_blocks > MOST_STRAIGHT
        )
        return (
            self.tile(axis)
            if cut
            else min(self.tile(axis), next_power_of_two(self.block.split_size(axis)))
        )

    def gathered(self, acc: Accumulator) -> int:
        """Of how many blocks the partial results of an accumulator are read at a time, a power of two."""
        fit = (
            GATHERED_PER_THREAD
            * 32
            * self.schedule.num_warps
            // math.prod(self.few(a) for a in self.value_dims(acc.out))
        )
        return min(
            self.schedule.cooperating_blocks, MOST_STRAIGHT, 1 << max(0, fit.bit_length() - 1)
        )

    @cached_property
    def scratch(self) -> int:
        """Partial results of all blocks, float32."""
        return self.grid * self.partial_floats

    @cached_property
    def loop(self) -> str | None:
        return next((a.name for a in self.block.named(Role.LOOP)), None)

    def replicated_along(self, o: BlockOutput) -> tuple[str, ...]:
        """The grid axes along which all blocks have the same of an output, a copy of an input: the first of them stores it."""
        return tuple(
            a.name
            for a in self.block.named(Role.GRID)
            if not self.cuts(a.name, o.axes) and self.trips(a.name) > 1
        )

    def append(self, o: BlockOutput) -> Append | None:
        """Where an output is stored into a cache, how."""
        number = self.block.outputs.index(o)
        return next((a for a in self.op.appends if a.output == number), None)

    @cached_property
    def _tile(self) -> dict[str, int]:
        return dict(self.schedule.tiles)

    def tile(self, axis: str) -> int:
        return self._tile[axis]

    def parts(self, axis: str) -> str | None:
        """The grid axis that numbers the parts of an axis, where there is more than one."""
        parts = self.block.axis(axis).split_axis
        return parts if parts is not None and self.block.axis(parts).size > 1 else None

    def cuts(self, grid: str, axes: Sequence[str | None]) -> bool:
        """Whether blocks at different places on a grid axis have different elements of a tensor with dims `axes`."""
        return grid in axes or (
            self.block.axis_split_by(grid) is not None and self.block.axis_split_by(grid) in axes
        )

    def trips(self, axis: str) -> int:
        """Tiles along an axis; along a part of it where it is dealt out in parts."""
        return -(-self.block.split_size(axis) // self.tile(axis))

    def _steps(self, axis: str) -> int:
        """Tiles along an axis, or along its part, that blocks look at: as many for each block that shares a loop."""
        return (
            self.steps_per_block * self.schedule.cooperating_blocks
            if axis == self.loop
            else self.trips(axis)
        )

    def bounds(self, axis: str) -> tuple[bool, bool]:
        """Whether some tile of an axis reaches past the end of its part, and whether some part reaches past the end of the axis."""
        if self.dealt and axis == self.loop:
            return self.block.axis(axis).size % self.tile(axis) != 0, False
        part = self.block.split_size(axis)
        return self._steps(axis) * self.tile(axis) != part, self.parts(
            axis
        ) is not None and self.block.axis(axis).size % part != 0

    def ragged(self, axis: str) -> bool:
        """Whether a tile of an axis may reach past the end of its part or of the axis, so that what is there does not count."""
        return any(self.bounds(axis))

    def reach(self, axis: str) -> int:
        """The largest index along an axis that a block forms an address of."""
        parts = self.parts(axis)
        if self.dealt and axis == self.loop:
            return -(-self.block.axis(axis).size // self.tile(axis)) * self.tile(axis) - 1
        before = (self.block.axis(parts).size - 1) * self.block.split_size(axis) if parts else 0
        return before + self._steps(axis) * self.tile(axis) - 1

    @cached_property
    def walks(self) -> bool:
        """Whether loops take more than one step; otherwise the loop axis is held whole."""
        return self.loop is not None and self.trips(self.loop) > 1

    @property
    def triggers_early(self) -> bool:
        """Whether the launch behind may begin before this one has waited."""
        return self.schedule.trigger_early and self.op.next_may_launch_early

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """The stages and their numbers in the order in which a kernel runs them: where a loop walks, what is computed once waits until
        something reads it, so that the loads of a loop that does not are asked for before."""
        found, waiting = [], list[tuple[int, Stage]]()
        for number, stage in enumerate(self.block.stages):
            if stage.loop is None and self.walks:
                waiting.append((number, stage))
                continue
            read, needed = self.read_in(stage), list[tuple[int, Stage]]()
            for earlier in reversed(waiting):
                if any(op.out in read for op in earlier[1].body):
                    read |= self.read_in(earlier[1])
                    needed.insert(0, earlier)
            waiting = [s for s in waiting if s not in needed]
            found += [*needed, (number, stage)]
        return tuple(found + waiting)

    @cached_property
    def unrolled(self) -> str | None:
        """The axis whose elements in a tile are variables of their own instead of a dim: the rows that multiply-adds are done for.

        As a dim they would be broadcast against the weights, and all weights would be moved to another layout for it.
        """
        if self.schedule.mma:
            return None
        rows = {
            a
            for c in self.block.contractions.values()
            for a in set(self.block.carried[c.a]) ^ set(self.block.carried[c.b])
            if a not in self.block.carried[self._weight(c)]
        }
        rows -= {a for i in self.block.inputs if len(i.sources) > 1 for a in i.carried}
        return next(
            (
                a.name
                for a in self.block.named(Role.GRID)
                if a.name in rows and 1 < self.tile(a.name) <= MOST_UNROLLED
            ),
            None,
        )

    @property
    def lanes(self) -> int:
        """Variables for the elements of the unrolled axis."""
        return self.tile(self.unrolled) if self.unrolled else 0

    def dims(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes among `axes` that are dims of a tensor, in order."""
        return tuple(a for a in self.order if a in axes and self.tile(a) > 1 and a != self.unrolled)

    def value_dims(self, value: str) -> tuple[str, ...]:
        return self.dims(self.block.carried[value])

    def numel(self, axes: Sequence[str]) -> int:
        return math.prod([self._tile[a] for a in axes])

    @cached_property
    def tiles(self) -> int:
        """Tiles of the grid axes."""
        return math.prod(self.trips(a.name) for a in self.block.named(Role.GRID))

    @cached_property
    def grid(self) -> int:
        """Thread blocks."""
        return self.tiles * self.schedule.cooperating_blocks

    def dtype(self, i: BlockInput) -> torch.dtype:
        return self.operands[i.sources[0]].dtype

    def in_place(self, o: BlockOutput, source: int) -> bool:
        """Whether an output may be written over operand `source`: each block writes what no other block reads, after it read it."""
        x, y = self.operands[source], self.outputs[self.block.outputs.index(o)]
        readers = [i for i in self.block.inputs if source in i.sources]
        return (
            (x.dims, x.strides, x.dtype, x.constant) == (y.dims, y.strides, y.dtype, False)
            and all(
                i.sources == (source,)
                and i.axes == o.axes
                and i.bounds is None
                and i.rotation is None
                and i.padding is None
                for i in readers
            )
            and (self.loop not in o.axes or not self.walks)
            and all(self.cuts(a.name, o.axes) for a in self.block.named(Role.GRID))
        )

    @cached_property
    def overwrites(self) -> bool:
        """Whether some output may be written over some operand."""
        return any(
            self.in_place(o, n) for o in self.block.outputs for n in range(len(self.operands))
        )

    def constant(self, i: BlockInput) -> bool:
        """Whether an input may be read while earlier launches still run."""
        return i.bounds is None and all(self.operands[s].constant for s in i.sources)

    def prefetchable(self, i: BlockInput) -> bool:
        """Whether what is read of an input was written long before the launches ahead: constants, and the old rows of a cache. It may be
        asked for early (into the L2, where later writes would be seen); only constants may be read early."""
        return self.constant(i) or (i.bounds is None and self.op.caches.issuperset(i.sources))

    @cached_property
    def input(self) -> dict[str, BlockInput]:
        return {i.name: i for i in self.block.inputs}

    @cached_property
    def run_dtype(self) -> torch.dtype:
        """The dtype that computed factors are rounded to before tensor cores: that of the largest 16-bit input."""
        halves = [t for t in self.operands if t.dtype in (torch.float16, torch.bfloat16)]
        return max(halves, key=lambda t: math.prod(t.dims)).dtype if halves else torch.float32

    def is_streamed(self, i: BlockInput) -> bool:
        """Whether each element of an input is read by one block only."""
        return all(
            self.cuts(a.name, i.axes) for a in self.block.named(Role.GRID) if self.trips(a.name) > 1
        )

    def whole_sources(self, i: BlockInput) -> bool:
        """Whether every tile of a joined input lies in one source, and their strides agree, so that a pointer can be selected."""
        strides = {self.operands[s].strides for s in i.sources}
        role = self.block.role(i.joined) if i.joined else None
        starts = [
            *i.sizes[:-1],
            *([self.block.split_size(i.joined)] if i.joined and self.parts(i.joined) else []),
        ]
        return (
            role is not None
            and len(strides) == 1
            and (role is Role.GRID or (role is Role.LOOP and self.walks))
            and all(size % self.tile(i.joined) == 0 for size in starts)
        )  # type: ignore[arg-type]

    # -- tensor cores -----------------------------------------------------------------------------------------------------

    def _fits_mma(self, c: Contraction) -> bool:
        a, b = (self._free(x, c.over) for x in (c.a, c.b))
        return (
            self.run_dtype is not torch.float32
            and not set(a) & set(b)
            and self.tile(c.over) >= MMA_MIN
            and self.numel(a) >= MMA_COLUMNS <= self.numel(b)
            and max(self.numel(a), self.numel(b)) >= MMA_MIN
            and all(
                self.dtype(self.input[x]).is_floating_point for x in (c.a, c.b) if x in self.input
            )
        )

    @cached_property
    def _mma(self) -> tuple[Contraction, ...]:
        return (
            tuple(c for c in self.block.contractions.values() if self._fits_mma(c))
            if self.schedule.mma
            else ()
        )

    def _weight(self, c: Contraction) -> str:
        """The factor with more data: an input (or one scaled by another) before a computed value, then the larger one."""

        def weigh(x: str) -> tuple[bool, int]:
            scaled = self._ops.get(x)
            stored = x in self.input or (
                scaled is not None
                and scaled.fn == "mul"
                and all(a in self.input for a in scaled.args)
            )
            return stored, math.prod(self.block.axis(a).size for a in self.block.carried[x])

        return max((c.a, c.b), key=weigh)

    def _sides(self, c: Contraction) -> tuple[str, str]:
        """The factors as (left, right), wished for by the schedule."""
        weight = self._weight(c)
        other = c.b if weight == c.a else c.a
        return (weight, other) if self.schedule.weights_first else (other, weight)

    def _free(self, value: str, over: str) -> tuple[str, ...]:
        """The axes of a factor that stay."""
        return tuple(a for a in self.block.carried[value] if a != over and self.tile(a) > 1)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Axes in the order of tensor dims: grid, tile, loop, but rows before summed before columns of each tensor-core product. What
        several products read one way and the other keeps the order in which it is stored: Triton (3.6) copies it ahead then only."""
        axes = [
            a.name for role in (Role.GRID, Role.TILE, Role.LOOP) for a in self.block.named(role)
        ]
        after: dict[str, set[str]] = {a: set() for a in axes}

        def reaches(start: str, goal: str) -> bool:
            return start == goal or any(reaches(x, goal) for x in after[start])

        for i in (
            self.input[x]
            for x in dict.fromkeys(x for c in self._mma for x in (c.a, c.b))
            if x in self.input
        ):
            if len({c.over for c in self._mma if i.name in (c.a, c.b)}) > 1:
                stored = sorted(
                    (-s, a)
                    for a, s in zip(i.axes, self.operands[i.sources[0]].strides, strict=True)
                    if a and self.tile(a) > 1
                )
                for (_, first), (_, second) in itertools.pairwise(stored):
                    if not reaches(second, first):
                        after[first].add(second)
        for c in self._mma:
            left, right = self._sides(c)
            wishes = [
                [
                    *((a, c.over) for a in self._free(x, c.over)),
                    *((c.over, a) for a in self._free(y, c.over)),
                ]
                for x, y in ((left, right), (right, left))
            ]
            wish = next(
                (w for w in wishes if not any(reaches(second, first) for first, second in w)),
                wishes[0],
            )
            for first, second in wish:
                if not reaches(second, first):
                    after[first].add(second)
        order: list[str] = []
        while axes:
            free = next(a for a in axes if not any(a in after[x] for x in axes))
            order.append(free)
            axes.remove(free)
        if not self._rounds(order):
            return tuple(order)
        allowed = (
            p
            for p in itertools.permutations(order)
            if not any(p.index(b) < p.index(a) for a in after for b in after[a])
        )
        return next(
            (p for p in itertools.islice(allowed, _MOST_ORDERS) if not self._rounds(p)),
            tuple(order),
        )

    def _rounds(self, order: Sequence[str]) -> bool:
        """Whether Triton (3.6) would take a sum of float32 products to TF32 tensor cores, unasked.

        It rewrites a sum over the middle dim of x[m, k, 1] · y[1, k, n] as a dot with rounded factors: seen as errors 25 times
        those of multiply-adds. With the summed axis first or last it does not.
        """
        dots = {c.out for c in self._mma}
        for c in self.block.contractions.values():
            carried = {*self.block.carried[c.a], *self.block.carried[c.b]} - {self.unrolled}
            dims = [a for a in order if a in carried and self.tile(a) > 1]
            if c.out not in dots and c.over in dims[1:-1]:
                return True
        return False

    @cached_property
    def dots(self) -> dict[str, Dot]:
        """Tensor-core products, by the name of the sum."""
        place = {a: n for n, a in enumerate(self.order)}
        found = {}
        for c in self._mma:
            at = {x: sorted(place[a] for a in self._free(x, c.over)) for x in (c.a, c.b)}
            left, right = sorted((c.a, c.b), key=at.__getitem__)
            over = place[c.over]
            if at[left][-1] > at[right][0] or any(p[0] < over < p[-1] for p in at.values()):
                continue  # the rows, or the columns, are not side by side
            if self.numel(self._free(left, c.over)) < MMA_MIN:
                continue  # 8 of them would have to be columns
            given = {self.dtype(self.input[x]) for x in (left, right) if x in self.input}
            dtype = given.pop() if len(given) == 1 else torch.float32 if given else self.run_dtype
            found[c.out] = Dot(c, left, right, at[left][0] > over, over > at[right][0], dtype)
        return found

    def rows(self, dot: Dot) -> int:
        return self.numel(self._free(dot.left, dot.contraction.over))

    def columns(self, dot: Dot) -> int:
        return self.numel(self._free(dot.right, dot.contraction.over))

    def _pipelined(self, dot: Dot) -> bool:
        """Whether a product is one of a loop of several steps whose loads are copied ahead."""
        looped = {
            name
            for s in self.block.stages
            if s.loop
            for name in (*(op.out for op in s.body), *(a.out for a in s.accumulators))
        }
        return (
            dot.contraction.out in looped
            and self.walks
            and self.steps_per_block > 1
            and self.schedule.num_stages > 1
        )

    def _products_in(self, dot: Dot) -> list[Dot]:
        """The products that a factor of a product is computed from, the nearest ones."""
        todo, known, found = [dot.contraction.a, dot.contraction.b], set[str](), list[Dot]()
        while todo:
            value = todo.pop()
            if value in self.dots:
                found.append(self.dots[value])
            elif value not in known and value in self._ops:
                known.add(value)
                todo += [a for a in self._ops[value].args if isinstance(a, str)]
        return found

    def is_asynchronous(self, dot: Dot) -> bool:
        """Whether Hopper may still read a product's factors while the next iteration runs: 64 rows or more, whole warpgroups, and more
        columns than those for which Triton may take the older instruction."""
        enough = WGMMA_TAKES_8_COLUMNS or self.columns(dot) > MMA_COLUMNS
        return self.rows(dot) >= WARPGROUP_ROWS and enough and self.schedule.num_warps >= 4

    def reads_as_stored(self, dot: Dot, x: str) -> bool:
        """Whether an asynchronous product reads input `x` without a conversion, which would be code of its own."""
        rotation = self.input[x].rotation
        return (
            self.is_asynchronous(dot)
            and self.dtype(self.input[x]) is dot.dtype
            and len(self.value_dims(x)) == 2
            and (rotation is None or rotation.swaps)
        )

    @cached_property
    def read_asynchronously(self) -> frozenset[str]:
        """Inputs of the loop that such a product reads as they are stored."""
        return frozenset(
            x
            for d in self.dots.values()
            if self.walks and self.schedule.num_stages > 1
            for x in (d.left, d.right)
            if x in self.input
            and self.loop in self.input[x].axes
            and self.reads_as_stored(d, x)
            and (len(self.input[x].sources) == 1 or self.whole_sources(self.input[x]))
        )

    @cached_property
    def read_again(self) -> frozenset[str]:
        """Those among them that other code of the loop reads too; it gets a load of its own (see triton_kernel.py)."""
        others = {a for op in self.block.ops() if op.out not in self.skipped for a in op.args}
        others |= {a.arg for s in self.block.stages for a in s.accumulators}
        others |= {
            x
            for d in self.dots.values()
            for x in (d.left, d.right)
            if x in self.input and not self.reads_as_stored(d, x)
        }
        return frozenset(x for x in self.read_asynchronously if x in others)

    @cached_property
    def read_ahead(self) -> frozenset[str]:
        """Inputs of a loop of tensor-core products of which a thread has too little for an asynchronous copy, like 128 elements of a norm's
        weight. Triton would load them in the step that reads them, and each step would wait for memory: 32 steps took 33 µs instead of 22
        on an H200."""
        if not (self.dots and self.walks and self.schedule.num_stages > 1):
            return frozenset()
        least = COPIED_BYTES * 32 * self.schedule.num_warps
        return frozenset(
            i.name
            for i in self.block.inputs
            if self.loop in i.axes
            and i.bounds is None
            and len(i.sources) == 1
            and i.name not in self.read_again
            and self.numel(self.block.input_axes(i)) * self.dtype(i).itemsize < least
        )

    @cached_property
    def skipped(self) -> frozenset[str]:
        """Products that only feed tensor cores and are never formed."""
        return frozenset(d.contraction.product for d in self.dots.values())

    @cached_property
    def narrow(self) -> frozenset[str]:
        """Products of two inputs that are factors of tensor-core products only, all of one 16-bit dtype: computed in it, which rounds
        once as rounding the float32 product would."""

        def is_half(x: str | float, dtype: torch.dtype) -> bool:
            return (
                x in self.input
                and self.input[str(x)].bounds is None
                and self.dtype(self.input[str(x)]) is dtype
            )

        kept = {o.value for o in self.block.outputs} | {
            a.arg for s in self.block.stages for a in s.accumulators
        }
        found = set()
        for out, dtype in {
            x: d.dtype for d in self.dots.values() for x in (d.left, d.right)
        }.items():
            op = self._ops.get(out)
            if (
                op is None
                or op.fn != "mul"
                or op.over is not None
                or dtype.itemsize != 2
                or out in kept
            ):
                continue
            if all(is_half(a, dtype) for a in op.args) and all(
                o.out in self.skipped for o in self._ops.values() if out in o.args
            ):
                found.add(out)
        return frozenset(found)

    @cached_property
    def native(self) -> frozenset[str]:
        """Inputs that are kept in the dtype they are stored in."""
        read = {x for d in self.dots.values() for x in (d.left, d.right)} | {
            a for out in self.narrow for a in self._ops[out].args
        }
        return frozenset(str(x) for x in read if x in self.input)

    # -- running maxima ---------------------------------------------------------------------------------------------------

    def maxima(self, stage: Stage) -> dict[str, Accumulator]:
        """The maxima of a stage that its body reads while they grow, by name."""
        read = {a for op in stage.body for a in op.args}
        return {a.out: a for a in stage.accumulators if a.kind == "max" and a.out in read}

    def fixed(self, stage: Stage) -> tuple[BlockOp, ...]:
        """The ops of a stage that are the same in every iteration of its loop."""
        moving, found = set(self.maxima(stage)), []
        for op in stage.body:
            if moving & set(op.args) or stage.loop in op.axes:
                moving.add(op.out)
            else:
                found.append(op)
        return tuple(found)

    def is_reduced_after_loop(self, stage: Stage, acc: Accumulator) -> bool:
        """Whether an accumulator stays spread over the loop tile. A maximum that the body reads must be that of whole tiles, and a
        sum that shifts with it is multiplied as it grows, so neither is."""
        return (
            self.schedule.reduce_after_loop
            and acc.out not in self.dots
            and self.loop in self.value_dims(acc.arg)
            and acc.shift is None
            and acc.out not in self.maxima(stage)
        )

    def read_in(self, stage: Stage) -> set[str | float]:
        """The values that a stage reads."""
        return {a for op in stage.body for a in op.args} | {a.arg for a in stage.accumulators}

    # -- loops that only visit what is within bounds -----------------------------------------------------------------------

    def trimmed(self, stage: Stage) -> BlockInput | None:
        """The bounds of a stage's loop, where tiles that they leave nothing of may be passed over: every sum is of what is 0 there, every
        maximum of what is a number there (`floor`), and nothing is stored for each tile."""
        return self.bounded(stage) if self.walks else None

    def bounded(self, stage: Stage) -> BlockInput | None:
        """The same, whether the loop is walked or held whole: what else is read along it does not matter out of these bounds."""
        if stage.loop is None:
            return None
        read = self.read_in(stage)
        bounds = [
            i
            for i in self.block.inputs
            if i.bounds == stage.loop and i.name in read and stage.loop not in i.axes
        ]
        if any(stage.loop in o.axes for o in self.block.outputs):
            return None
        return next(
            (
                i
                for i in bounds
                if all(
                    self._is_zero(a.arg, i.name)
                    if a.kind == "sum"
                    else self.floor(a, i.name) is not None
                    for a in stage.accumulators
                )
            ),
            None,
        )

    @cached_property
    def dealt(self) -> bool:
        """Whether what is within bounds is dealt out in parts, instead of the whole axis: so that no block is without work where only few
        elements are inside. All sums of a part are then of the same elements."""
        parts = self.parts(self.loop) if self.loop and self.op.has_private_partials else None
        bounds = {self.trimmed(s) for s in self.block.stages if s.loop}
        return (
            parts is not None
            and len(bounds) == 1
            and None not in bounds
            and all(parts not in i.axes for i in self.block.inputs)
        )

    def floor(self, acc: Accumulator, bounds: str) -> float | None:
        """What a maximum is taken of where bounds leave nothing, if it is so low that a maximum may begin with it."""
        if acc.kind != "max":
            return None
        op, outside = self._ops.get(acc.arg), None
        while (
            op is not None
            and op.fn == "select"
            and isinstance(op.args[2], float)
            and outside in (None, op.args[2])
        ):
            outside = op.args[2]
            if op.args[0] == bounds:
                return outside if outside <= LOWEST else None
            op = self._ops.get(str(op.args[1]))  # what other bounds leave
        return None

    def _is_zero(self, value: str | float, bounds: str) -> bool:
        """Whether a value is 0 where bounds leave nothing, whatever else is there."""
        op = self._ops.get(str(value))
        if op is None:
            return value == bounds
        if op.fn == "select":
            return op.args[2] == 0.0 and (op.args[0] == bounds or self._is_zero(op.args[1], bounds))
        return (op.fn == "mul" and any(self._is_zero(a, bounds) for a in op.args)) or (
            (op.over is not None or op.fn in ("neg", "cast")) and self._is_zero(op.args[0], bounds)
        )

    # -- masks ------------------------------------------------------------------------------------------------------------

    @cached_property
    def _ops(self) -> dict[str, BlockOp]:
        return {op.out: op for op in self.block.ops()}

    def zero_padded(self, value: str, axis: str) -> bool:
        """Whether `value` is known to be 0 where `axis` reaches past its end: loads fill with 0, and some ops keep it."""
        if axis not in self.block.carried.get(value, ()):
            return False
        if value in self.input:
            padding = self.input[value].padding
            return padding is None or padding.value == 0.0
        op = self._ops.get(value)
        if (
            op is not None
            and op.fn == "select"
            and op.args[2] == 0.0
            and self.zero_padded(str(op.args[0]), axis)
        ):
            return True
        return (
            op is not None
            and op.over is None
            and all(self.zero_padded(a, axis) for a in op.args if isinstance(a, str))
            and keeps_zero(
                op.fn, [None if isinstance(a, str) else a for a in op.args], dict(op.attrs)
            )
        )


_OF_TILES = frozenset(
    {
        "_mma",
        "_ops",
        "_tile",
        "block",
        "dealt",
        "dots",
        "input",
        "loop",
        "narrow",
        "native",
        "operands",
        "order",
        "run_dtype",
        "skipped",
        "tiles",
        "unrolled",
        "walks",
    }
)
"""The properties of a plan that tiles and the kind of product decide."""


def plan_kernel(op: KernelOp, schedule: Schedule) -> KernelPlan:
    """The plan of a `customized` op. Errors: CodegenError."""
    return KernelPlan(
        op
        if isinstance(op, PlacedOp)
        else PlacedOp(op.name, op.inputs, op.outputs, op.attrs, op.block),
        schedule,
    )
