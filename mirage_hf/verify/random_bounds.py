"""Bounds and positions of appends for proofs and numbers: draws with empty, full and partial rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mirage_hf.graph.effects import positions_of
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ragged import Bounds, bounds_of


def draw(
    rng: np.random.Generator, size: int, rows: int, turn: int, partial: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of `rows` rows over an axis of `size` elements: in turn some elements inside, all, none, the last, the first ones.
    With `partial`, no row has the first or the last element where there are three or more."""
    lo, hi = np.zeros(rows, dtype=np.int64), np.full(rows, size, dtype=np.int64)
    for r in range(rows):
        a = int(rng.integers(1, size)) if size > 1 else 0
        b = int(rng.integers(a, size)) if size > 1 else size
        kind = 0 if partial else (r + turn) % 5
        if kind == 0:
            lo[r], hi[r] = (a, max(b, a + 1)) if size > 2 else (0, 1)
            if partial and size > 2:
                lo[r], hi[r] = min(a, size - 2), max(min(b, size - 1), min(a, size - 2) + 1)
        elif kind == 2:
            lo[r], hi[r] = b, a  # b ≥ a: none inside
        elif kind == 3:
            lo[r] = a
        elif kind == 4:
            hi[r] = max(a, 1)
    return lo, hi


def draw_all(
    graph: KernelGraph,
    shape: Callable[[int], tuple[int, ...]],
    extent: Callable[[Bounds], int],
    rng: np.random.Generator,
    turn: int,
    partial: bool = False,
    slots: Callable[[DTensor], int] = lambda t: t.dims[-2],
) -> dict[int, np.ndarray]:
    """Bounds, and positions of appends, for the inputs that are, by number; `shape` of an input, `extent` of what is bounded and
    `slots` of a cache or of new rows, at the sizes at hand. Rows that are appended fit."""
    drawn: dict[int, np.ndarray] = {}
    for number, b in enumerate(bounds_of(graph)):
        lo, hi = draw(rng, extent(b), int(np.prod(shape(b.lo))), turn + number, partial)
        drawn.setdefault(b.lo, lo.reshape(shape(b.lo)))
        drawn.setdefault(b.hi, hi.reshape(shape(b.hi)))
    for n, cache, rows in positions_of(graph):
        room = slots(cache) - slots(rows)
        if n not in drawn:
            drawn[n] = rng.integers(0, room + 1, size=shape(n))
        drawn[n] = np.clip(drawn[n], 0, room)
    return drawn
