"""Tiles: the parts of tensors that a block holds, while a block graph is written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.tensors import DTensor

#: The names of grid dims, in order.
GRID_DIMS = ("x", "y", "z")


@dataclass(eq=False)
class Span:
    """The range of a dim of a tile. Spans whose dims met in an op are joined and share a `root`."""

    #: The full size.
    size: int

    #: The grid dim that cuts the span. None: it is whole in every block.
    grid: str | None

    #: True if the loop walks the span.
    walked: bool

    #: The tensor and dim that it comes from, for messages.
    first: str

    #: True if a block reduces over the span.
    reduced: bool = False

    #: The span that it was joined to.
    joined: Span | None = None

    @property
    def root(self) -> Span:
        """The span that stands for all spans that this one is joined with."""
        return self if self.joined is None else self.joined.root

    @property
    def how(self) -> str:
        """How the span is cut and walked, in words."""
        cut = f"cut by grid dim {self.grid}" if self.grid else "whole in every block"
        return cut + (" and walked by the loop" if self.walked else "")

    @property
    def cut(self) -> tuple[int, str | None, bool]:
        """The properties in which spans must agree to be joined."""
        return self.size, self.grid, self.walked


@dataclass(frozen=True, eq=False)
class Node:
    """How a tile is computed."""

    #: "input", an elementwise op of the table, "sum" or "max" over a dim, or "accumulate".
    op: str

    args: tuple[STensor | float, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()

    #: For "sum" and "max": the span that is reduced.
    over: Span | None = None

    #: For "sum" and "max" among the blocks of a cluster: the span whose splits they hold.
    among: Span | None = None

    #: For "input": the number of the operand.
    source: int = -1

    #: For "accumulate": the running maximum that the sum is relative to.
    shift: STensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class STensor:
    """A tile: the part of a tensor that one block holds in one trip of the loop."""

    name: str
    node: Node

    #: The span of each dim. None: the dim has size 1.
    axes: tuple[Span | None, ...]

    #: The shape in one block and trip.
    dims: tuple[int, ...]

    #: The split spans over which the tile is a partial result. It does not carry them.
    splits: tuple[Span, ...] = ()

    #: When the tile exists: "any", "loop" (it changes from trip to trip) or "after" the loop.
    time: str = "any"

    #: "sum" or "max" if the tile is reduced over the walked dim in this trip only.
    pending: str | None = None

    #: "sum" or "max" if trips were accumulated tile by tile, with the walked dim still to be
    #: reduced.
    unreduced: str | None = None

    #: In the loop: the running maximum that the tile depends on.
    running: STensor | None = None

    #: The builder that made the tile.
    owner: object = None

    def __str__(self) -> str:
        return f"%{self.name} {errors.shape(self.dims)}"

    def __repr__(self) -> str:
        # The default would print all tiles that this one is computed from, and its builder.
        return f"<STensor: {self}>"

    @property
    def is_maximum(self) -> bool:
        """True if the tile is a maximum over the loop."""
        accumulated = self.node.op == "accumulate" and self.unreduced is None
        return accumulated and dict(self.node.attrs)["kind"] == "max"


@dataclass(frozen=True)
class TiledOutput:
    """A tile that is stored."""

    tensor: STensor

    #: The span of each dim of the tile. None: the dim has size 1.
    axes: tuple[Span | None, ...]

    #: Pairs (position, span) of the output's dims that number splits. Position −1 is a new first
    #: dim.
    splits_at: tuple[tuple[int, Span], ...]

    #: The dtype by name. None: that of the first input.
    dtype: str | None


@dataclass(frozen=True)
class TiledBlock:
    """A block graph in tiles, as it was written."""

    #: Blocks along each grid dim.
    grid_dim: tuple[int, ...]

    #: The tiles that are loaded, each with its tensor.
    inputs: tuple[tuple[STensor, DTensor], ...]

    outputs: tuple[TiledOutput, ...]

    #: The grid dim whose blocks form a cluster. None: there are no clusters.
    cluster: str | None = None
