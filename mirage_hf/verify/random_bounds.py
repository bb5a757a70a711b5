"""Draw bounds of ragged axes and positions of cache appends, for proofs and numeric checks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mirage_hf.graph.bounds import Bounds, bounds_of
from mirage_hf.graph.effects import positions_of
from mirage_hf.graph.kernel import DTensor, KernelGraph


def draw(
    rng: np.random.Generator, size: int, rows: int, first: int, partial: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Draw bounds [lo, hi) for several rows over an axis.

    Rows take turns among five kinds: some elements inside, all, none, the last ones, the first
    ones.

    Args:
        rng: Source of randomness.
        size: Elements of the axis.
        rows: The number of rows.
        first: The kind of the first row, modulo five.
        partial: Draw the first kind for every row. If the axis has three or more elements, the
            first and the last stay outside.

    Returns:
        lo and hi, with one element per row.
    """
    lo, hi = np.zeros(rows, dtype=np.int64), np.full(rows, size, dtype=np.int64)
    for row in range(rows):
        a = int(rng.integers(1, size)) if size > 1 else 0
        b = int(rng.integers(a, size)) if size > 1 else size
        kind = 0 if partial else (row + first) % 5
        if kind == 0 and partial and size > 2:
            lo[row] = min(a, size - 2)
            hi[row] = max(min(b, size - 1), min(a, size - 2) + 1)
        elif kind == 0:
            lo[row], hi[row] = (a, max(b, a + 1)) if size > 2 else (0, 1)
        elif kind == 2:
            lo[row], hi[row] = b, a  # b ≥ a, so no element is inside
        elif kind == 3:
            lo[row] = a
        elif kind == 4:
            hi[row] = max(a, 1)
    return lo, hi


def draw_all(
    graph: KernelGraph,
    shape: Callable[[int], tuple[int, ...]],
    extent: Callable[[Bounds], int],
    rng: np.random.Generator,
    first: int,
    partial: bool = False,
    slots: Callable[[DTensor], int] = lambda t: t.dims[-2],
) -> dict[int, np.ndarray]:
    """Draw every input of a program that is a bound or a position of an append.

    Args:
        graph: The program.
        shape: Returns the shape of an input, by number.
        extent: Returns the size of the axis that is bounded.
        rng: Source of randomness.
        first: As in `draw`.
        partial: As in `draw`.
        slots: Returns the slots of a cache, or the number of rows that are appended.

    Returns:
        The inputs, by number. Rows that are appended fit into their cache.
    """
    drawn: dict[int, np.ndarray] = {}
    for number, b in enumerate(bounds_of(graph)):
        rows = int(np.prod(shape(b.lo)))
        lo, hi = draw(rng, extent(b), rows, first + number, partial)
        drawn.setdefault(b.lo, lo.reshape(shape(b.lo)))
        drawn.setdefault(b.hi, hi.reshape(shape(b.hi)))
    for n, cache, rows_appended in positions_of(graph):
        last = slots(cache) - slots(rows_appended)
        if n not in drawn:
            drawn[n] = rng.integers(0, last + 1, size=shape(n))
        drawn[n] = np.clip(drawn[n], 0, last)
    return drawn
