"""Tiles: what a block holds of a tensor while a block graph is written by hand (see graph/builder.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mirage_hf import errors

GRID_DIMS = ("x", "y", "z")


@dataclass(eq=False)
class Span:
    """What a dim of a tile ranges over: its full size, the grid dim that cuts it and whether the loop walks it. Spans that met are
    one; `first` says where it comes from, for messages. `reduced`: a block reduces over it."""

    size: int
    grid: str | None
    walked: bool
    first: str
    reduced: bool = False
    joined: Span | None = None

    @property
    def root(self) -> Span:
        return self if self.joined is None else self.joined.root

    @property
    def how(self) -> str:
        cut = f"cut by grid dim {self.grid}" if self.grid else "whole in every block"
        return cut + (" and walked by the loop" if self.walked else "")


@dataclass(frozen=True, eq=False)
class Node:
    """What computes a value: "input", an op of the table, "sum" or "max" over a dim, or "accumulate"."""

    op: str
    args: tuple[STensor | float, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()
    over: Span | None = None
    source: int = -1
    shift: STensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class STensor:
    """A tile. `dims` is its shape in one block and trip; `axes` the dim class behind each dim (None: size 1); `parts` the split
    dims whose part it belongs to without carrying them. `time`: "any", "loop" (changes from trip to trip) or "after" the loop.
    `pending`: summed (or maximised) in this trip only, over the walked dim; `half`: accumulated, its walked dim not yet summed."""

    name: str
    node: Node
    axes: tuple[Span | None, ...]
    dims: tuple[int, ...]
    splits: tuple[Span, ...] = ()
    time: str = "any"
    pending: str | None = None
    half: str | None = None
    running: STensor | None = None  # in the loop: the running maximum that it depends on
    owner: object = None  # its builder

    def __str__(self) -> str:
        return f"%{self.name} {errors.shape(self.dims)}"

    def __repr__(self) -> str:  # fields lead to all that it is made of, and to its builder
        return f"<STensor: {self}>"

    @property
    def is_maximum(self) -> bool:
        return (
            self.node.op == "accumulate"
            and dict(self.node.attrs)["kind"] == "max"
            and self.half is None
        )


@dataclass(frozen=True)
class Output:
    """What is stored: the class behind each dim, parts included, and the dtype (None: that of the first input)."""

    tensor: STensor
    axes: tuple[Span | None, ...]
    splits_at: tuple[tuple[int, Span], ...]
    dtype: str | None
