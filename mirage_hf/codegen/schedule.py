"""Schedules: what is decided about a kernel after its block graph is fixed. No schedule changes algebra."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import BlockGraph, Role

VERSION = 10
"""Part of every key under which a tuned kernel is stored; raised when the same schedule generates different code."""


@dataclass(frozen=True)
class Schedule:
    """How one block graph becomes one kernel.

    tiles: elements of each axis that a block holds at a time, powers of two, by axis name (sorted pairs).
    mma: contractions that fit go to tensor cores; otherwise all are multiply-adds and sums.
    weights_first: with mma, the larger operand is the left side of the instruction (its 64 rows on Hopper).
    lazy: loop accumulators stay spread over the loop tile and are summed once after the loop (not those of tensor cores).
    evict_first: inputs that only one block reads are marked as first to leave the L2.
    split: blocks that share the loop of a tile, a power of two; the last of them to be done adds up what all of them found.
    preload: loop tiles of what lies ready (constants, caches) that a block asks for before it waits; a power of two or 0.
    hasten: the next kernel may begin before this one has waited, where it is known to settle nothing before its own wait.
    num_warps, num_stages: warps of a block, loop iterations whose loads are in flight.
    """

    tiles: tuple[tuple[str, int], ...]
    mma: bool = False
    weights_first: bool = True
    lazy: bool = True
    evict_first: bool = True
    num_warps: int = 4
    num_stages: int = 1
    split: int = 1
    preload: int = 0
    hasten: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", tuple(sorted((str(a), int(t)) for a, t in self.tiles)))
        for name, size in (
            *self.tiles,
            ("num_warps", self.num_warps),
            ("split", self.split),
            ("preload", self.preload or 1),
        ):
            if size < 1 or size & (size - 1):
                raise errors.CodegenError(
                    f"schedule: {name} is {size}; tiles, num_warps, split and preload must be powers of two"
                )
        if self.num_stages < 1:
            raise errors.CodegenError(
                f"schedule: num_stages is {self.num_stages}; it must be at least 1"
            )

    def tile(self, axis: str) -> int:
        return dict(self.tiles)[axis]

    def check(self, block: BlockGraph) -> None:
        """Errors: CodegenError when the tiles are not those of `block`'s axes, a tile axis (its part) is not held whole, or a block
        has several parts."""
        tiles, names = dict(self.tiles), {a.name for a in block.axes}
        if set(tiles) != names:
            raise errors.CodegenError(
                f"schedule: tiles are given for {sorted(tiles)}, the block graph's axes are {sorted(names)}"
            )
        for a in block.named(Role.TILE):
            part = block.split_size(a.name)
            if tiles[a.name] < part:
                what = (
                    f"size {a.size}"
                    if a.split_axis is None
                    else f"size {a.size}, of which a block has {part},"
                )
                raise errors.CodegenError(
                    f"schedule: tile axis {a.name} of {what} must be held whole; its tile is {tiles[a.name]}, "
                    f"give {next_power_of_two(part)}"
                )
        for a in block.named(Role.GRID):
            split = block.axis_split_by(a.name)
            if split is not None and tiles[a.name] != 1:
                raise errors.CodegenError(
                    f"schedule: {a.name} numbers the parts of {split}, of which a block has one; its tile is "
                    f"{tiles[a.name]}, give 1"
                )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tiles": dict(self.tiles)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Schedule:
        """The inverse of `to_dict`. Errors: FormatError for missing or unknown fields."""
        known = {f.name for f in fields(Schedule)}
        unknown = sorted(set(data) - known)
        if unknown or "tiles" not in data:
            what = f"unknown field {unknown[0]!r}" if unknown else "no tiles"
            raise errors.FormatError(f"schedule: {what}; rebuild the entry with this version")
        return Schedule(**{**data, "tiles": tuple(dict(data["tiles"]).items())})

    def __str__(self) -> str:
        tiles = " ".join(f"{a}:{t}" for a, t in self.tiles)
        how = ("mma" + (" weights-first" if self.weights_first else "")) if self.mma else "fma"
        lazy = " lazy" if self.lazy else ""
        more = "".join(
            f" {name}:{n}"
            for name, n, least in (("split", self.split, 1), ("preload", self.preload, 0))
            if n > least
        )
        hasten = " hasten" if self.hasten else ""
        return f"{tiles} {how}{lazy} warps:{self.num_warps} stages:{self.num_stages}{more}{hasten}"


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
