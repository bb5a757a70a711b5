"""Place boxes in layers so that every edge points down (Sugiyama, Tagawa and Toda, 1981)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

#: Least pixels between neighbours of a layer.
GAP = 26.0
#: Sweeps over all layers, and how much farther than the mean of its neighbours a box moves in all
#: except the last few sweeps. With less, long chains stay slanted (successive over-relaxation).
_SWEEPS, _EAGER = 60, 1.7


@dataclass(frozen=True)
class Box:
    """A node: its size in pixels and its layer, 0 at the top."""

    key: str
    width: float
    height: float
    layer: int


@dataclass(frozen=True)
class Placement:
    """Where everything is drawn.

    Attributes:
        centres: Centres of boxes.
        routes: The points that each edge passes, from the lower side of one box to the upper side
            of the other. An edge goes straight through layers and changes its x between them only.
        layers: Tops and bottoms of layers.
        width: The drawing's width.
    """

    centres: Mapping[str, tuple[float, float]]
    routes: Mapping[tuple[str, str], Sequence[tuple[float, float]]]
    layers: Sequence[tuple[float, float]]
    width: float


def place(
    boxes: Sequence[Box],
    edges: Sequence[tuple[str, str]],
    above: Mapping[int, float],
    gap: float = 34.0,
) -> Placement:
    """Return where to draw boxes.

    Args:
        boxes: The boxes by key.
        edges: Pairs of keys. Each leads to a later layer.
        above: Extra pixels before a layer.
        gap: Pixels between layers.
    """
    count = 1 + max((b.layer for b in boxes), default=0)
    rows: list[list[str]] = [[b.key for b in boxes if b.layer == n] for n in range(count)]
    width = {b.key: b.width for b in boxes}
    layer = {b.key: b.layer for b in boxes}
    chains: dict[tuple[str, str], list[str]] = {}
    for a, b in edges:  # a long edge passes an invisible box in every layer on its way
        chain = [a]
        for n in range(layer[a] + 1, layer[b]):
            ghost = f"{a} to {b} at {n}"
            rows[n].append(ghost)
            width[ghost], layer[ghost] = 4.0, n
            chain.append(ghost)
        chains[a, b] = [*chain, b]
    links = [(p, q) for chain in chains.values() for p, q in pairwise(chain)]
    near: dict[str, list[str]] = {key: [] for key in width}
    for p, q in links:
        near[p].append(q)
        near[q].append(p)

    _order(rows, layer, near)
    x = _spread(rows, width, near)
    left = min((x[k] - width[k] / 2 for k in x), default=0.0)
    y: list[tuple[float, float]] = []
    top = 0.0
    for n in range(count):
        top += above.get(n, 0.0) + (gap if n else 0.0)
        tallest = max((b.height for b in boxes if b.layer == n), default=0.0)
        y.append((top, top + tallest))
        top += tallest
    centres = {k: (x[k] - left, sum(y[layer[k]]) / 2) for k in x}
    routes = {}
    height = {b.key: b.height for b in boxes}
    for edge, chain in chains.items():
        points: list[tuple[float, float]] = []
        for key in chain:
            cx = centres[key][0]
            points += [(cx, y[layer[key]][0]), (cx, y[layer[key]][1])]
        points[0] = (points[0][0], centres[edge[0]][1] + height[edge[0]] / 2)
        points[-1] = (points[-1][0], centres[edge[1]][1] - height[edge[1]] / 2)
        routes[edge] = points
    return Placement(centres, routes, y, max((x[k] + width[k] / 2 for k in x), default=0.0) - left)


def _order(
    rows: list[list[str]], layer: Mapping[str, int], near: Mapping[str, Sequence[str]]
) -> None:
    """Order each layer by its neighbours' mean position; the order with fewest crossings stays."""
    best, fewest = [list(row) for row in rows], _crossings(rows, layer, near)
    for sweep in range(12):
        down = sweep % 2 == 0
        for n in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            other = n - 1 if down else n + 1
            at = {k: i for i, k in enumerate(rows[other])}
            own = {k: i for i, k in enumerate(rows[n])}

            def mean(
                key: str,
                other: int = other,
                at: Mapping[str, int] = at,
                own: Mapping[str, int] = own,
            ) -> float:
                found = [at[k] for k in near[key] if layer[k] == other]
                return sum(found) / len(found) if found else float(own[key])

            rows[n].sort(key=mean)
        crossings = _crossings(rows, layer, near)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best


def _crossings(
    rows: Sequence[Sequence[str]], layer: Mapping[str, int], near: Mapping[str, Sequence[str]]
) -> int:
    """Return how many edges cross."""
    total = 0
    for n, row in enumerate(rows[:-1]):
        at = {k: i for i, k in enumerate(rows[n + 1])}
        ends = [(i, at[k]) for i, key in enumerate(row) for k in near[key] if layer[k] == n + 1]
        total += sum((a - c) * (b - d) < 0 for j, (a, b) in enumerate(ends) for c, d in ends[:j])
    return total


def _spread(
    rows: Sequence[Sequence[str]], width: Mapping[str, float], near: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return the x of each box, with the least squared sideways steps of edges, GAP apart."""
    x: dict[str, float] = {}

    def pull(k: str, n: str) -> float:
        # The same at both ends, or the drawing would drift. Long edges are straightened.
        return (2.0 if " to " in k else 1.0) * (2.0 if " to " in n else 1.0)

    def settle(row: Sequence[str], wish: Sequence[float]) -> None:
        offset, offsets = 0.0, []
        for i, k in enumerate(row):
            offset += (width[row[i - 1]] + width[k]) / 2 + GAP if i else 0.0
            offsets.append(offset)
        # Least squares in a fixed order: pool neighbours that would overlap.
        pools: list[list[float]] = []
        for i, k in enumerate(row):
            pools.append([wish[i] - offsets[i], sum(pull(k, n) for n in near[k]) or 1e-3, 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                b, a = pools.pop(), pools.pop()
                weight = a[1] + b[1]
                pools.append([(a[0] * a[1] + b[0] * b[1]) / weight, weight, a[2] + b[2]])
        i = 0
        for position, _weight, members in pools:
            for _member in range(int(members)):
                x[row[i]] = position + offsets[i]
                i += 1

    def mean(k: str, among: Collection[str]) -> float:
        pulls = [(pull(k, n), x[n]) for n in near[k] if n in among]
        if not pulls:
            return x.get(k, 0.0)
        # `sum` of floats rounds differently since Python 3.12.
        return math.fsum(w * at for w, at in pulls) / math.fsum(w for w, _ in pulls)

    # A first guess follows the row before, so changes reach far rows at once.
    for way in (rows, rows[::-1], rows):
        before: Sequence[str] = ()
        for row in way:
            settle(row, [mean(k, before) for k in row])
            before = row
    for sweep in range(_SWEEPS):
        eager = _EAGER if sweep < _SWEEPS - 8 else 1.0
        for row in (*rows, *reversed(rows)):
            settle(row, [x[k] + eager * (mean(k, x) - x[k]) for k in row])
    return x
