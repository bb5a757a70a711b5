"""imap, omap and fmap: how a kernel's tensors are cut, in the terms of the Mirage paper (section 2), derived from axis roles.

An imap sends each grid axis to the tensor dim it cuts, or to φ where every block reads the same (a replica); an fmap does so
for the loop axis; an omap says which dim of an output each grid axis fills. A grid axis that numbers the parts of another axis
cuts the dim of that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirage_hf.graph.block import BlockGraph, Role

REPLICA = "φ"


@dataclass(frozen=True)
class TensorMap:
    """One tensor's maps: pairs of axis and tensor dim (None: a replica). `kind` is "imap" or "omap"."""

    tensor: str
    kind: str
    grid: tuple[tuple[str, int | None], ...]
    loop: tuple[tuple[str, int | None], ...]

    def __str__(self) -> str:
        parts = [f"{self.kind} {_pairs(self.grid)}"] + (
            [f"fmap {_pairs(self.loop)}"] if self.loop else []
        )
        return ", ".join(parts)


@dataclass(frozen=True)
class Maps:
    """The maps of a block graph: one per input (imap, fmap) and one per output (omap; fmap where it is stored in the loop)."""

    inputs: tuple[TensorMap, ...]
    outputs: tuple[TensorMap, ...]


def maps_of(block: BlockGraph) -> Maps:
    """Return the maps of every input and output of `block`."""
    grid, loop = ([a.name for a in block.named(role)] for role in (Role.GRID, Role.LOOP))

    def dims(
        names: Sequence[str], axes: Sequence[str | None]
    ) -> tuple[tuple[str, int | None], ...]:
        def dim(name: str | None) -> int | None:
            return axes.index(name) if name is not None and name in axes else None

        return tuple(
            (name, dim(name if name in axes else block.axis_split_by(name))) for name in names
        )

    return Maps(
        tuple(
            TensorMap(i.name, "imap", dims(grid, i.axes), dims(loop, i.axes)) for i in block.inputs
        ),
        tuple(
            TensorMap(
                o.value, "omap", dims(grid, o.axes), dims([a for a in loop if a in o.axes], o.axes)
            )
            for o in block.outputs
        ),
    )


def _pairs(pairs: Sequence[tuple[str, int | None]]) -> str:
    return "{" + ", ".join(f"{axis}→{REPLICA if dim is None else dim}" for axis, dim in pairs) + "}"
