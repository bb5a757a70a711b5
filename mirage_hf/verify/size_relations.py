"""Relations among the sizes of dims and axes: which are equal, and which follow from others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PROGRAM, KERNELS = "program", "kernels"


class ResizeError(Exception):
    """The dims of a program and its kernels cannot be resized together. The message says why."""


# Keys are tuples, because proofs look them up very often.


class TensorDim(NamedTuple):
    """A dim of a tensor of the program or of the kernels (`side`)."""

    side: str
    tensor: int
    dim: int


class BlockAxis(NamedTuple):
    """An axis of the block graph of an op, by the op's number."""

    side: str
    op: int
    axis: str


class DimSegment(NamedTuple):
    """A segment of a dim that is no dim of any tensor, such as the rest of a slice."""

    side: str
    tensor: int
    name: str
    #: Without it, the tuple could equal that of a `BlockAxis`.
    kind: str = "segment of a dim"


class AxisSegment(NamedTuple):
    """A segment of an axis of a block graph's input: the padding, or what a rotation moves."""

    side: str
    op: int
    input: str
    name: str


Key = TensorDim | BlockAxis | DimSegment | AxisSegment


@dataclass(frozen=True)
class SizeRule:
    """The size of `total` is the "sum" or the "product" of the sizes of `parts`, in order."""

    kind: str
    total: Key
    parts: tuple[Key, ...]

    def value(self, sizes: Sequence[int]) -> int:
        """Return the size of the total for given sizes of the parts."""
        return sum(sizes) if self.kind == "sum" else math.prod(sizes)


class SizeRelations:
    """Union-find over dims and axes, and the rules between their sizes.

    Attributes:
        full: The full size of every dim, axis and segment.
        rules: Sizes that follow from others.
        splits: Pairs of a split axis and the axis that numbers its splits.
        reduced: Dims that an op reduces or normalises along, except those that matmuls sum over.
        fixed: Parts that keep their size.
    """

    def __init__(self) -> None:
        self.full: dict[Key, int] = {}
        self.rules: list[SizeRule] = []
        self.splits: list[tuple[BlockAxis, BlockAxis]] = []
        self.reduced: set[Key] = set()
        self.fixed: set[Key] = set()
        #: Of keys that represent no class: another key of their class.
        self._parent: dict[Key, Key] = {}

    def find(self, key: Key) -> Key:
        """Return the representative of a class."""
        root = key
        while (above := self._parent.get(root)) is not None:
            root = above
        if root is not key:
            self._parent[key] = root  # so that the next call takes one step
        return root

    def join(self, a: Key, b: Key) -> None:
        """Put two dims or axes into one class.

        Raises:
            ResizeError: Their sizes differ.
        """
        if self.full[a] != self.full[b]:
            sizes = sorted((self.full[a], self.full[b]))
            raise ResizeError(f"axes of sizes {sizes} meet in one dim")
        first, second = self.find(a), self.find(b)
        if first != second:
            self._parent[first] = second

    def roots(self) -> dict[Key, int]:
        """Return the full size of each class."""
        return {self.find(key): n for key, n in self.full.items()}

    def add_rule(self, kind: str, total: Key, parts: Sequence[Key]) -> None:
        """Add the rule that `total` is the "sum" or the "product" of `parts`.

        A total of one part is joined with it.
        """
        if len(parts) == 1:
            self.join(total, parts[0])
        else:
            self.rules.append(SizeRule(kind, total, tuple(parts)))

    def cut(self, total: Key, first: Key, rest: Key) -> None:
        """Cut a dim in two: its first elements are the dim `first`, and `rest` gets the others."""
        self.full[rest] = self.full[total] - self.full[first]
        self.add_rule("sum", total, [first, rest])


def rotated_segment(side: str, number: int, name: str) -> AxisSegment:
    """Return the segment of a block graph's input that a rotation of limited width moves."""
    return AxisSegment(side, number, name, "rotated")
