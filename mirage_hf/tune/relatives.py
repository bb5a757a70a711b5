"""Schedules for kernels that nobody tuned, from tuned kernels of the same structure.

Two kernels are relatives if they read matrices of the same layout, sum them over the same axes, and
give their axes the same roles. Sizes may differ, and so may names, constants, vectors beside the
matrices, and what follows the sums. These hardly change which schedule is fast. So the q, k, v
projection of one model is a relative of another's, and a traced program of a pattern's.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

from mirage_hf import errors
from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.gpus import Device
from mirage_hf.graph.block import BlockGraph, BlockInput, Role
from mirage_hf.graph.kernel import DTensor
from mirage_hf.ops.dtypes import element_bytes
from mirage_hf.tune import schedule_cost
from mirage_hf.tune.cost import estimate
from mirage_hf.tune.refit import refit
from mirage_hf.tune.space import REGISTER_BUDGET

#: Kernels whose sizes differ by more doublings than this, all axes together, are no relatives.
FARTHEST = 3.0

#: How much a doubling counts along an axis that the largest input does not carry, such as rows.
ROWS_COUNT = 3.0

#: How much a difference of one vector counts.
VECTORS_COUNT = 0.3

#: A relative's schedule may have an estimate that is above the best one by this share. The share
#: falls to 0 for relatives that are FARTHEST apart. Estimates of 9 in 10 packaged kernels, which
#: were measured as the fastest, are at most this far above the best.
TRUSTED = 0.2

#: Tiles of a loop that hold up to this many times its elements are kept. Otherwise another shape
#: of tile is taken if its estimate is below the share MUCH_BETTER.
MOSTLY_FULL, MUCH_BETTER = 1.25, 0.9


@dataclass(frozen=True)
class Shape:
    """What decides whether two ops are relatives, and how near.

    Attributes:
        structure: What an op has in common with its relatives, as a digest.
        sizes: The sizes of its axes.
        vectors: How many of its inputs are no matrices.
    """

    structure: str
    sizes: tuple[int, ...]
    vectors: int


class Tuned(Protocol):
    """The kernels of a µGraph that was tuned. They may still have to be read."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each op."""

    def read(self) -> TunedKernels | None:
        """Return the kernels, or None if they cannot be read."""


@dataclass(frozen=True)
class TunedKernels:
    """The kernels of a µGraph that was tuned, with their schedules."""

    ops: tuple[PlacedOp, ...]
    schedules: tuple[Schedule, ...]

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each op."""
        return tuple(map(shape_of, self.ops))

    def read(self) -> TunedKernels:
        """Return itself."""
        return self


AnyTuned = TypeVar("AnyTuned", bound=Tuned)


def shape_of(op: PlacedOp) -> Shape:
    """Return the shape of an op."""
    block = _block(op)
    vectors = sum(not _is_matrix(i) for i in block.inputs)
    return Shape(structure(op), tuple(a.size for a in block.axes), vectors)


def structure(op: PlacedOp) -> str:
    """Return a digest of what an op has in common with its relatives."""
    block = _block(op)
    number = {a.name: n for n, a in enumerate(block.axes)}
    roles = tuple(
        (a.role.value, number.get(str(a.split_axis)), block.axis_split_by(a.name) is not None)
        for a in block.axes
    )

    def numbers(axes: Sequence[str | None]) -> tuple[int, ...]:
        return tuple(number[a] for a in axes if a is not None)

    matrices = sorted(
        (numbers(i.axes), *_layout(op, i), i.bounds is not None, i.rotation is not None)
        for i in block.inputs
        if _is_matrix(i)
    )
    sums = sorted(
        (sorted(numbers(block.carried[c.product])), number[c.over])
        for c in block.contractions.values()
    )
    shifts = sum(a.shift is not None for s in block.stages for a in s.accumulators)
    outputs = tuple(sorted(numbers(o.axes)) for o in block.outputs)
    text = repr((roles, matrices, sums, shifts, outputs, bool(op.appends)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _block(op: PlacedOp) -> BlockGraph:
    assert op.block is not None
    return op.block


def _is_matrix(i: BlockInput) -> bool:
    return len(i.carried) > 1


def _operand(op: PlacedOp, i: BlockInput) -> DTensor:
    operand = op.inputs[i.sources[0]]
    assert isinstance(operand, DTensor)
    return operand


def _layout(op: PlacedOp, i: BlockInput) -> tuple[float, tuple[int, ...]]:
    """Return the bytes of an input's elements, and which dims are contiguous."""
    t = _operand(op, i)
    contiguous = tuple(
        n for n, (d, stride) in enumerate(zip(t.dims, t.strides, strict=True)) if d > 1 == stride
    )
    return element_bytes(t.dtype), contiguous


def distance(op: PlacedOp, shape: Shape, other: Shape) -> float:
    """Return how far an op of a shape is from one of another shape, in doublings of sizes."""
    block = _block(op)
    largest = max(block.inputs, key=lambda i: math.prod(_operand(op, i).dims))
    apart = 0.0
    for a, size in zip(block.axes, other.sizes, strict=True):
        count = 1.0 if a.name in largest.carried else ROWS_COUNT
        if block.axis_split_by(a.name) is None:
            apart += count * abs(math.log2(a.size / size))
    return apart + VECTORS_COUNT * abs(shape.vectors - other.vectors)


def relatives(ops: Sequence[PlacedOp], tuned: Sequence[AnyTuned]) -> list[tuple[float, AnyTuned]]:
    """Return the tuned kernels of the same structures with their distance, nearest first."""
    shapes = [shape_of(op) for op in ops]
    structures = [shape.structure for shape in shapes]
    found = []
    for each in tuned:
        if [shape.structure for shape in each.shapes] == structures:
            apart = sum(map(distance, ops, shapes, each.shapes))
            if apart <= FARTHEST:
                found.append((apart, each))
    return sorted(found, key=lambda pair: pair[0])


def refitted(
    ops: Sequence[PlacedOp], relative: TunedKernels, device: Device
) -> tuple[Schedule, ...] | None:
    """Return a relative's schedules for the sizes of some ops, or None if they do not fit."""
    schedules = []
    for op, other, schedule in zip(ops, relative.ops, relative.schedules, strict=True):
        new = _refitted(op, other, schedule, device)
        if new is None:
            return None
        schedules.append(replace(new, trigger_early=op.next_may_launch_early))
    return tuple(schedules)


def _refitted(op: PlacedOp, other: PlacedOp, schedule: Schedule, device: Device) -> Schedule | None:
    """Return a schedule for the sizes of an op, from one that was tuned for a relative of it.

    If the loop's tile would be mostly empty in the last step, shorter and wider ones are tried.
    """
    pairs = zip(_block(other).axes, _block(op).axes, strict=True)
    try:
        best = refit(schedule, other, op, device, {old.name: new.name for old, new in pairs})
    except errors.CodegenError:
        return None
    if schedule.cuda or not _leaves_tiles_empty(op, best):
        return best
    start, best_us = best, MUCH_BETTER * estimated_us([op], [best], device)
    for shorter, wider in itertools.product((2, 4), (1, 2, 4)):
        changed = _reshaped(op, start, shorter, wider)
        try:
            cost = estimate(plan_kernel(op, changed), device)
        except errors.CodegenError:
            continue
        if cost.us < best_us and cost.registers <= REGISTER_BUDGET:
            best, best_us = changed, cost.us
    return best


def _leaves_tiles_empty(op: PlacedOp, schedule: Schedule) -> bool:
    """Return whether the tiles of a loop have many elements beyond its end."""
    block = _block(op)
    for a in block.named(Role.LOOP):
        size, tile = block.split_size(a.name), schedule.tiles[a.name]
        if -(-size // tile) * tile > MOSTLY_FULL * size:
            return True
    return False


def _reshaped(op: PlacedOp, schedule: Schedule, shorter: int, wider: int) -> Schedule:
    """Return a schedule with a shorter tile of the loop and a wider tile of the columns."""
    block, tiles = _block(op), dict(schedule.tiles)
    largest = max(block.inputs, key=lambda i: math.prod(_operand(op, i).dims))
    for a in block.axes:
        if a.role is Role.LOOP:
            tiles[a.name] = max(1, tiles[a.name] // shorter)
        elif a.role is Role.GRID and a.name in largest.carried:
            tiles[a.name] = tiles[a.name] * wider
    return replace(schedule, tiles=tiles)


def is_trusted(apart: float, us: float, best_us: float) -> bool:
    """Return whether to take a relative's schedules.

    Args:
        apart: Its distance.
        us: The estimate of its schedules.
        best_us: The best estimate of all.
    """
    return us <= best_us * (1 + TRUSTED * (1 - apart / FARTHEST))


def estimated_us(ops: Sequence[PlacedOp], schedules: Sequence[Schedule], device: Device) -> float:
    """Return the estimate of some kernels together, if each launches the next one early."""
    early = [replace(s, trigger_early=True) for s in schedules]
    return sum(schedule_cost.estimated_us(op, s, device) for op, s in zip(ops, early, strict=True))
