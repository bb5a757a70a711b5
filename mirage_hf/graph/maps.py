"""The maps imap, omap and fmap of the Mirage paper (section 2): how tensors are cut.

The maps follow from the roles of axes. An imap sends each grid axis to the tensor dim that it cuts.
It sends the axis to φ (a replica) if every block reads the same. An fmap does the same for the loop
axis. An omap says which dim of an output each grid axis fills. The cluster axis is treated as a
grid axis. An axis that numbers the splits of another axis cuts the dim of that other axis. If an
index chooses the elements of a dim, the axes of the index cut that dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirage_hf.graph.block import BlockGraph, BlockInput, Role

REPLICA = "φ"

#: Pairs of an axis and the tensor dim that it cuts. None: a replica.
AxisMap = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class TensorMap:
    """The maps of one tensor."""

    tensor: str

    #: "imap" for inputs, "omap" for outputs.
    kind: str

    #: The dim that each grid axis, and the cluster axis, cuts or fills.
    grid: AxisMap

    #: The dim that the loop axis walks: the fmap. Empty for outputs that are stored after the loop.
    loop: AxisMap

    def __str__(self) -> str:
        text = f"{self.kind} {_text(self.grid)}"
        return f"{text}, fmap {_text(self.loop)}" if self.loop else text


@dataclass(frozen=True)
class Maps:
    """The maps of a block graph, one per input and one per output."""

    inputs: tuple[TensorMap, ...]
    outputs: tuple[TensorMap, ...]


def maps_of(block: BlockGraph) -> Maps:
    """Return the maps of every input and output of `block`."""
    grid = [a.name for a in block.named(Role.GRID, Role.CLUSTER)]
    loop = [a.name for a in block.named(Role.LOOP)]
    inputs = [
        TensorMap(i.name, "imap", _read(block, grid, i), _read(block, loop, i))
        for i in block.inputs
    ]
    outputs = []
    for o in block.outputs:
        in_loop = [a for a in loop if a in o.axes]
        outputs.append(
            TensorMap(o.value, "omap", _cut(block, grid, o.axes), _cut(block, in_loop, o.axes))
        )
    return Maps(tuple(inputs), tuple(outputs))


def _read(block: BlockGraph, names: Sequence[str], i: BlockInput) -> AxisMap:
    """Return which dim of an input each axis of `names` cuts, itself or by choosing its index."""
    pairs = _cut(block, names, i.axes)
    if i.taken is None:
        return pairs
    chosen = _cut(block, names, i.taken.axes)
    return tuple(
        (name, i.taken.dim if dim is None and by_index is not None else dim)
        for (name, dim), (_, by_index) in zip(pairs, chosen, strict=True)
    )


def _cut(block: BlockGraph, names: Sequence[str], axes: Sequence[str | None]) -> AxisMap:
    """Return which dim of a tensor with `axes` each axis of `names` cuts."""
    pairs = []
    for name in names:
        cuts = name if name in axes else block.axis_split_by(name)
        pairs.append((name, axes.index(cuts) if cuts is not None and cuts in axes else None))
    return tuple(pairs)


def _text(pairs: AxisMap) -> str:
    return "{" + ", ".join(f"{axis}→{REPLICA if dim is None else dim}" for axis, dim in pairs) + "}"
