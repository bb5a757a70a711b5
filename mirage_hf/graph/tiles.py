"""Tiles: what a block holds of a tensor while a block graph is written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.tensors import DTensor

#: The names of grid dims, in order.
GRID_DIMS = ("x", "y", "z")


@dataclass(eq=False)
class Span:
    """What a dim of a tile ranges over. Spans that met in an op are one, and share a `root`."""

    #: The full size.
    size: int

    #: The grid dim that cuts it. None: it is whole in every block.
    grid: str | None

    #: True if the loop walks it.
    walked: bool

    #: Where it comes from, for messages.
    first: str

    #: True if a block reduces over it.
    reduced: bool = False

    #: The span that it became one with.
    joined: Span | None = None

    @property
    def root(self) -> Span:
        """The span that stands for all that this one met."""
        return self if self.joined is None else self.joined.root

    @property
    def how(self) -> str:
        """How it is cut and walked, in words."""
        cut = f"cut by grid dim {self.grid}" if self.grid else "whole in every block"
        return cut + (" and walked by the loop" if self.walked else "")

    @property
    def cut(self) -> tuple[int, str | None, bool]:
        """What spans must have in common to become one."""
        return self.size, self.grid, self.walked


@dataclass(frozen=True, eq=False)
class Node:
    """How a tile is computed."""

    #: "input", an elementwise op of the table, "sum" or "max" over a dim, or "accumulate".
    op: str

    args: tuple[STensor | float, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()

    #: "sum" and "max": what is reduced.
    over: Span | None = None

    #: "input": the number of the operand.
    source: int = -1

    #: "accumulate": the running maximum that the sum is relative to.
    shift: STensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class STensor:
    """A tile: what one block holds of a tensor in one trip of the loop."""

    name: str
    node: Node

    #: What each dim ranges over. None: the dim has size 1.
    axes: tuple[Span | None, ...]

    #: The shape in one block and trip.
    dims: tuple[int, ...]

    #: Split dims that the tile is a partial result over, without carrying them.
    splits: tuple[Span, ...] = ()

    #: When it exists: "any", "loop" (it changes from trip to trip) or "after" the loop.
    time: str = "any"

    #: "sum" or "max" if it is reduced over the walked dim in this trip only.
    pending: str | None = None

    #: "sum" or "max" if it is accumulated tile by tile, with the walked dim still to be reduced.
    unreduced: str | None = None

    #: In the loop: the running maximum that it depends on.
    running: STensor | None = None

    #: The builder that made it.
    owner: object = None

    def __str__(self) -> str:
        return f"%{self.name} {errors.shape(self.dims)}"

    def __repr__(self) -> str:
        # The fields lead to all that the tile is made of, and to its builder.
        return f"<STensor: {self}>"

    @property
    def is_maximum(self) -> bool:
        """True if it is a maximum over the loop."""
        accumulated = self.node.op == "accumulate" and self.unreduced is None
        return accumulated and dict(self.node.attrs)["kind"] == "max"


@dataclass(frozen=True)
class TiledOutput:
    """A tile that is stored."""

    tensor: STensor

    #: What each dim of the tile ranges over.
    axes: tuple[Span | None, ...]

    #: The dims that number splits: their position in the output (−1: a new first dim), and the
    #: split dim.
    splits_at: tuple[tuple[int, Span], ...]

    #: The dtype by name. None: that of the first input.
    dtype: str | None


@dataclass(frozen=True)
class TiledBlock:
    """A block graph in tiles, as it was written."""

    #: Blocks along each grid dim.
    grid_dim: tuple[int, ...]

    #: The tiles that are loaded, with the tensors that they are tiles of.
    inputs: tuple[tuple[STensor, DTensor], ...]

    outputs: tuple[TiledOutput, ...]
