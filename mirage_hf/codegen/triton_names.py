"""Identifiers of a kernel: the names of its axes, values and pointers."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Container, Mapping, Sequence

from mirage_hf.codegen import triton_math
from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.codegen.plan.cooperation import MOST_UNLOOPED_BLOCKS

#: Names that a kernel or its file uses for something else.
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

#: Suffixes of an axis's name, for variables that say where a block stands on the axis.
_AXIS_SUFFIXES = (
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

#: Suffixes of a value's name, for its pointer, its other forms and its partial results.
_VALUE_SUFFIXES = (
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
    "_index",
    "_index_ptr",
    "_index_in",
    "_by_index",
    *(f"_each{n}" for n in range(MOST_UNLOOPED_BLOCKS)),
)


class LaneNames(dict[str, str]):
    """Identifiers by name. A name with lanes gets the number of the lane that is being written."""

    def __init__(
        self,
        names: Mapping[str, str],
        with_lanes: Container[str | None],
        lane: Callable[[], int | None],
    ) -> None:
        """Begin with identifiers by name.

        Args:
            names: The identifiers without lanes.
            with_lanes: The names that have lanes.
            lane: Returns the lane that is being written, or None outside of lanes.
        """
        super().__init__(names)
        self._with_lanes, self._lane = with_lanes, lane

    def __getitem__(self, name: str) -> str:
        plain, lane = super().__getitem__(name), self._lane()
        return plain if lane is None or name not in self._with_lanes else f"{plain}_{lane}"


class KernelNames:
    """Gives every axis and value of a kernel an identifier of its own."""

    def __init__(self, plan: KernelPlan, lane: Callable[[], int | None]) -> None:
        """Name the axes and values of `plan`. `lane` returns the lane that is being written."""
        block, unrolled = plan.tiling.block, plan.layout.unrolled
        self._taken = set(_RESERVED)
        lanes = ("", *(f"_{n}" for n in range(plan.layout.lanes)))
        axis_endings = [n + suffix for n in lanes for suffix in _AXIS_SUFFIXES]
        value_endings = [n + suffix for n in lanes for suffix in _VALUE_SUFFIXES]
        axes = {a.name: self._identifier(a.name, axis_endings) for a in block.axes}
        computed = [op.out for op in block.ops()]
        computed += [a.out for s in block.stages for a in s.accumulators]
        values = {v: self._identifier(v, value_endings) for v in (*plan.tiling.inputs, *computed)}
        with_lanes = {v for v, carried in block.carried.items() if unrolled in carried}
        #: Identifiers of axes.
        self.axis = LaneNames(axes, {unrolled}, lane)
        #: Identifiers of inputs and computed values.
        self.value = LaneNames(values, with_lanes, lane)

    def _identifier(self, name: str, endings: Sequence[str]) -> str:
        """Return an identifier like `name` that is free with each of the endings."""
        base = re.sub(r"\W", "_", name)
        base = base if base.isidentifier() and not keyword.iskeyword(base) else f"v_{base}"
        while any(base + ending in self._taken for ending in endings):
            base += "_"
        self._taken |= {base + ending for ending in endings}
        return base


def slot_pointer(pointer: str) -> str:
    """Return the name of the pointer to the first slot of an append that is stored at `pointer`."""
    return f"{pointer.removesuffix('_ptr')}_slot_ptr"
