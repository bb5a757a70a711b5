"""Random schedules of CUDA kernels, and µGraphs whose inputs are constants."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph


def random_schedule(op: PlacedOp, seed: int) -> Schedule:
    """Return a random schedule of a CUDA kernel. Tiles may be larger than axes."""
    assert op.block is not None
    r = random.Random(seed)
    tiles = {}
    for axis in op.block.axes:
        whole = next_power_of_two(op.block.split_size(axis.name))
        if axis.role is Role.CLUSTER or op.block.axis_split_by(axis.name) is not None:
            tiles[axis.name] = 1
        elif axis.role is Role.TILE:
            tiles[axis.name] = whole
        else:
            tiles[axis.name] = 1 << r.randint(0, whole.bit_length())
    return Schedule(
        tiles,
        num_warps=r.choice((1, 2, 4, 8)),
        num_stages=r.choice((1, 2, 2)),
        prefetch_steps=r.choice((0, 1)),
        trigger_early=r.random() < 0.3,
        cuda=True,
    )


def random_schedules(ugraph: UGraph, seed: int) -> tuple[Schedule, ...]:
    """Return a random schedule for each block graph."""
    return tuple(random_schedule(op, seed + n) for n, op in enumerate(place_kernels(ugraph)))


def with_constants(ugraph: UGraph, names: Collection[str] | None = None) -> UGraph:
    """Return a µGraph as its own program, whose inputs of these names are constants.

    Args:
        ugraph: The µGraph.
        names: The names. None: all inputs.
    """
    old, new = ugraph.kernels, KernelGraph()
    made: dict[int, DTensor] = {}
    for t in old.inputs:
        constant = names is None or t.name in names
        made[t.index] = new.new_input(t.dims, t.dtype, t.strides, t.name, constant=constant)
    for op in old.ops:
        inputs = [made[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        outputs = _added(new, op, inputs)
        made |= {a.index: b for a, b in zip(op.outputs, outputs, strict=True)}
    new.mark_output(*(made[t.index] for t in old.outputs))
    return UGraph(new, new)


def _added(graph: KernelGraph, op: object, inputs: Sequence[object]) -> Sequence[DTensor]:
    """Add an op to a graph and return its outputs."""
    if op.name == CUSTOMIZED:  # type: ignore[attr-defined]
        return graph.customized(inputs, op.block)  # type: ignore[attr-defined, arg-type]
    attrs = dict(op.attrs)  # type: ignore[attr-defined]
    return [getattr(graph, op.name)(*inputs, **attrs)]  # type: ignore[attr-defined]
