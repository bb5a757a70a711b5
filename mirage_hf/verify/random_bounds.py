"""Draw bounds of ragged axes, positions of cache appends, and indices, for proofs and checks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mirage_hf.graph.bounds import Bounds, bounds_of
from mirage_hf.graph.effects import positions_of
from mirage_hf.graph.indices import indices_of
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


def draw_index(
    rng: np.random.Generator, size: int, shape: tuple[int, ...], kind: int
) -> np.ndarray:
    """Draw an index that chooses among `size` elements.

    Args:
        rng: Source of randomness.
        size: The number of elements.
        shape: The shape of the index.
        kind: Modulo four: 0 and 2 give random numbers, 1 gives as many different numbers as there
            are, 3 gives one number alone.
    """
    if kind % 4 == 1:
        shuffled = rng.permutation(size)
        return shuffled[np.arange(int(np.prod(shape))) % size].reshape(shape)
    if kind % 4 == 3:
        return np.full(shape, int(rng.integers(size)))
    return rng.integers(size, size=shape)


def draw_all(
    graph: KernelGraph,
    shape: Callable[[int], tuple[int, ...]],
    extent: Callable[[Bounds], int],
    rng: np.random.Generator,
    first: int,
    partial: bool = False,
    slots: Callable[[DTensor], int] = lambda t: t.dims[-2],
    choices: Callable[[DTensor, int], int] = lambda t, dim: t.dims[dim],
) -> dict[int, np.ndarray]:
    """Draw every input of a program that is a bound, a position of an append, or an index.

    Args:
        graph: The program.
        shape: Returns the shape of an input, by number.
        extent: Returns the size of the axis that is bounded.
        rng: Source of randomness.
        first: As in `draw`.
        partial: As in `draw`.
        slots: Returns the slots of a cache, or the number of rows that are appended.
        choices: Returns the size of a dim, given a tensor and the dim.

    Returns:
        The inputs, by number. Rows that are appended fit into their cache. Indices are in range.
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
    for number, (n, chosen) in enumerate(indices_of(graph).items()):
        size = min(choices(t, dim) for t, dim in chosen)
        drawn[n] = draw_index(rng, size, shape(n), first + number)
    return drawn
