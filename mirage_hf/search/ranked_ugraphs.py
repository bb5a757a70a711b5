"""The results of a search as a sequence that makes each µGraph when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from mirage_hf.search.search_journal import RankedUGraph


class RankedUGraphs(Sequence[RankedUGraph]):
    """µGraphs in order, each made when it is first read.

    To make a µGraph of a plan takes longer than to find the plan, and a caller that wants a few of
    many plans need not wait for the others.

    Args:
        source: Makes the µGraphs, in order.
    """

    def __init__(self, source: Iterable[RankedUGraph]):
        self._rest: Iterator[RankedUGraph] = iter(source)
        self._made: list[RankedUGraph] = []

    @overload
    def __getitem__(self, place: int) -> RankedUGraph: ...
    @overload
    def __getitem__(self, place: slice) -> list[RankedUGraph]: ...
    def __getitem__(self, place: int | slice) -> RankedUGraph | list[RankedUGraph]:
        """Return the µGraphs at a place, and make those before it."""
        if isinstance(place, slice):
            is_counted = place.stop is not None and place.stop >= 0
            self._make(place.stop if is_counted and (place.start or 0) >= 0 else None)
        else:
            self._make(place + 1 if place >= 0 else None)
        return self._made[place]

    def __len__(self) -> int:
        """Return how many there are, which makes all of them."""
        self._make(None)
        return len(self._made)

    def __bool__(self) -> bool:
        """Return whether there is one, which makes the first."""
        self._make(1)
        return bool(self._made)

    def _make(self, count: int | None) -> None:
        """Make the first `count` µGraphs, or all."""
        while count is None or len(self._made) < count:
            ranked = next(self._rest, None)
            if ranked is None:
                return
            self._made.append(ranked)
