"""Lay out a graph in layers, so that every edge points down.

The method is that of Sugiyama, Tagawa and Toda (1981). It orders the boxes of each layer so that
few edges cross. Then it chooses positions so that edges are straight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

#: Least distance between neighbours in a layer, in pixels.
GAP = 26.0

#: Sweeps over all layers that order their boxes.
_ORDER_SWEEPS = 12

#: Sweeps over all layers that move boxes sideways.
_SPREAD_SWEEPS = 60

#: The factor by which a box moves past the mean of its neighbours (successive over-relaxation).
#: With a smaller factor, long chains stay slanted. The last sweeps move boxes to the mean itself.
_OVERSHOOT = 1.7
_SWEEPS_WITHOUT_OVERSHOOT = 8

#: Width of the invisible box ("ghost") of a long edge in each layer that it passes, in pixels.
_GHOST_WIDTH = 4.0


@dataclass(frozen=True)
class Box:
    """A node to be placed."""

    key: str

    #: Size in pixels.
    width: float
    height: float

    #: 0 at the top.
    layer: int


@dataclass(frozen=True)
class Placement:
    """The positions of boxes and edges, in pixels."""

    #: The centre of each box.
    centres: Mapping[str, tuple[float, float]]

    #: The points that each edge passes, from the lower side of one box to the upper side of the
    #: other. An edge runs straight down through layers and changes its x only between layers.
    routes: Mapping[tuple[str, str], Sequence[tuple[float, float]]]

    #: Top and bottom of each layer.
    layers: Sequence[tuple[float, float]]

    width: float


@dataclass(frozen=True)
class _Rows:
    """The boxes of each layer, with invisible ones ("ghosts") where long edges pass."""

    #: Keys of boxes and ghosts, by layer and in order.
    rows: list[list[str]]
    width: dict[str, float]
    layer: dict[str, int]
    neighbours: dict[str, list[str]]

    #: The boxes and ghosts that each edge passes.
    chains: dict[tuple[str, str], list[str]]
    ghosts: set[str]


def place(
    boxes: Sequence[Box],
    edges: Sequence[tuple[str, str]],
    above: Mapping[int, float],
    gap: float = 34.0,
) -> Placement:
    """Return where to draw boxes and edges.

    Args:
        boxes: The boxes.
        edges: Pairs of keys. Each edge leads to a later layer.
        above: Extra pixels before a layer.
        gap: Pixels between layers.
    """
    graph = _rows(boxes, edges)
    _order(graph)
    x = _spread(graph)
    left = min((x[k] - graph.width[k] / 2 for k in x), default=0.0)
    layers = _layer_extents(boxes, len(graph.rows), above, gap)
    centres = {k: (x[k] - left, sum(layers[graph.layer[k]]) / 2) for k in x}
    height = {b.key: b.height for b in boxes}
    routes = {}
    for (start, end), chain in graph.chains.items():
        points: list[tuple[float, float]] = []
        for key in chain:
            top, bottom = layers[graph.layer[key]]
            points += [(centres[key][0], top), (centres[key][0], bottom)]
        points[0] = (points[0][0], centres[start][1] + height[start] / 2)
        points[-1] = (points[-1][0], centres[end][1] - height[end] / 2)
        routes[start, end] = points
    right = max((x[k] + graph.width[k] / 2 for k in x), default=0.0)
    return Placement(centres, routes, layers, right - left)


def _rows(boxes: Sequence[Box], edges: Sequence[tuple[str, str]]) -> _Rows:
    count = 1 + max((b.layer for b in boxes), default=0)
    rows = [[b.key for b in boxes if b.layer == n] for n in range(count)]
    width = {b.key: b.width for b in boxes}
    layer = {b.key: b.layer for b in boxes}
    chains: dict[tuple[str, str], list[str]] = {}
    ghosts = set()
    for start, end in edges:
        chain = [start]
        for n in range(layer[start] + 1, layer[end]):
            ghost = f"{start} to {end} at {n}"
            rows[n].append(ghost)
            width[ghost], layer[ghost] = _GHOST_WIDTH, n
            ghosts.add(ghost)
            chain.append(ghost)
        chains[start, end] = [*chain, end]
    neighbours: dict[str, list[str]] = {key: [] for key in width}
    for chain in chains.values():
        for upper, lower in pairwise(chain):
            neighbours[upper].append(lower)
            neighbours[lower].append(upper)
    return _Rows(rows, width, layer, neighbours, chains, ghosts)


def _layer_extents(
    boxes: Sequence[Box], count: int, above: Mapping[int, float], gap: float
) -> list[tuple[float, float]]:
    """Return top and bottom of each layer."""
    extents = []
    top = 0.0
    for n in range(count):
        top += above.get(n, 0.0) + (gap if n else 0.0)
        tallest = max((b.height for b in boxes if b.layer == n), default=0.0)
        extents.append((top, top + tallest))
        top += tallest
    return extents


# -- the order within layers -----------------------------------------------------------------------


def _order(graph: _Rows) -> None:
    """Order each layer by the mean position of its boxes' neighbours, sweeping down and up.

    The order with the fewest crossings is kept.
    """
    rows = graph.rows
    best, fewest = [list(row) for row in rows], _crossings(graph)
    for sweep in range(_ORDER_SWEEPS):
        down = sweep % 2 == 0
        for n in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            _order_row(graph, n, n - 1 if down else n + 1)
        crossings = _crossings(graph)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best


def _order_row(graph: _Rows, n: int, other: int) -> None:
    """Order layer `n` by the mean position of its boxes' neighbours in layer `other`."""
    position = {k: i for i, k in enumerate(graph.rows[other])}
    own = {k: i for i, k in enumerate(graph.rows[n])}

    def mean(key: str) -> float:
        places = [position[k] for k in graph.neighbours[key] if graph.layer[k] == other]
        return sum(places) / len(places) if places else float(own[key])

    graph.rows[n].sort(key=mean)


def _crossings(graph: _Rows) -> int:
    """Return how many pairs of edges cross."""
    total = 0
    for n, row in enumerate(graph.rows[:-1]):
        position = {k: i for i, k in enumerate(graph.rows[n + 1])}
        ends = [
            (i, position[k])
            for i, key in enumerate(row)
            for k in graph.neighbours[key]
            if graph.layer[k] == n + 1
        ]
        for j, (a, b) in enumerate(ends):
            total += sum((a - c) * (b - d) < 0 for c, d in ends[:j])
    return total


# -- positions within layers -----------------------------------------------------------------------


def _spread(graph: _Rows) -> dict[str, float]:
    """Return the x of each box.

    They minimise the sum of squared sideways steps of the edges, for the given order and with GAP
    kept.
    """
    x: dict[str, float] = {}

    def pull(a: str, b: str) -> float:
        # The pull must be the same at both ends, or the drawing would drift. It is stronger for
        # long edges, so that they are straighter.
        return (2.0 if a in graph.ghosts else 1.0) * (2.0 if b in graph.ghosts else 1.0)

    def mean(key: str, among: Collection[str]) -> float:
        pulls = [(pull(key, n), x[n]) for n in graph.neighbours[key] if n in among]
        if not pulls:
            return x.get(key, 0.0)
        # `fsum`, because `sum` rounds floats in another way since Python 3.12
        return math.fsum(w * at for w, at in pulls) / math.fsum(w for w, _ in pulls)

    def settle(row: Sequence[str], wishes: Sequence[float]) -> None:
        weights = [sum(pull(k, n) for n in graph.neighbours[k]) or 1e-3 for k in row]
        widths = [graph.width[k] for k in row]
        x.update(zip(row, _nearest(widths, weights, wishes), strict=True))

    # First guess: in each sweep, a row is placed by the row before it.
    for way in (graph.rows, graph.rows[::-1], graph.rows):
        before: Sequence[str] = ()
        for row in way:
            settle(row, [mean(k, before) for k in row])
            before = row
    for sweep in range(_SPREAD_SWEEPS):
        last = sweep >= _SPREAD_SWEEPS - _SWEEPS_WITHOUT_OVERSHOOT
        step = 1.0 if last else _OVERSHOOT
        for row in (*graph.rows, *reversed(graph.rows)):
            settle(row, [x[k] + step * (mean(k, x) - x[k]) for k in row])
    return x


@dataclass
class _Pool:
    """Neighbours in a row that stand as close as they may, and move together."""

    position: float
    weight: float
    members: int


def _nearest(
    widths: Sequence[float], weights: Sequence[float], wishes: Sequence[float]
) -> list[float]:
    """Return the positions nearest to `wishes` that keep the order and GAP.

    They minimise the weighted sum of squared differences. Neighbours that would overlap are pooled.
    """
    offsets: list[float] = []
    offset = 0.0
    for i, width in enumerate(widths):
        offset += (widths[i - 1] + width) / 2 + GAP if i else 0.0
        offsets.append(offset)
    pools: list[_Pool] = []
    for wish, offset, weight in zip(wishes, offsets, weights, strict=True):
        pools.append(_Pool(wish - offset, weight, 1))
        while len(pools) > 1 and pools[-2].position > pools[-1].position:
            b, a = pools.pop(), pools.pop()
            weight = a.weight + b.weight
            position = (a.position * a.weight + b.position * b.weight) / weight
            pools.append(_Pool(position, weight, a.members + b.members))
    positions = [pool.position for pool in pools for _ in range(pool.members)]
    return [p + offset for p, offset in zip(positions, offsets, strict=True)]
