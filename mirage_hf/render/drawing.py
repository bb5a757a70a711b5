"""Draw panels of boxes and arrows as SVG text.

This file knows widths of text, columns of panels, colours and the legend. picture.py says what is
drawn.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from mirage_hf.render import layered

#: Pixels of a character of each class of text. All text is monospaced, so boxes can be made to fit.
ADVANCE = {"plain": 7.25, "bold": 7.25, "small": 6.35, "band": 6.65, "title": 8.45}
#: Pixels of a line in a box, of a line of small text outside one, and of the padding in a box.
LINE, SMALL, PAD = 17.0, 14.0, 11.0

#: Fill, stroke and meaning of each kind of box. The strokes are Okabe and Ito's colours, which any
#: eye can tell apart; the text in a box says the same.
STYLES = {
    "tensor": ("#e3eefa", "#0072b2", "tensor in device memory"),
    "block": ("#fdeccb", "#c98500", "kernel that runs a block graph"),
    "library": ("#eceef1", "#7d8794", "library call"),
    "view": ("#ffffff", "#7d8794", "view: moves no data"),
    "load": ("#edf6fd", "#56b4e9", "tile of a tensor"),
    "thread": ("#ffffff", "#5f6b78", "elementwise, in registers"),
    "sum": ("#d9f2e9", "#009e73", "sum or maximum"),
    "product": ("#f7e6f0", "#b3568a", "sum of products"),
    "rescaled": ("#fbe3d6", "#d55e00", "sum rescaled while the maximum grows"),
}
_DASHED = ("view",)

_CSS = "\n".join(
    [
        '  .ugraph text { font: 12px "DejaVu Sans Mono", Menlo, Consolas, monospace; '
        "fill: #17202b; text-anchor: middle; }",
        "  .ugraph text.bold { font-weight: bold; }",
        "  .ugraph text.small { font-size: 10.5px; fill: #43515f; }",
        "  .ugraph text.left { text-anchor: start; }",
        "  .ugraph text.title { font-size: 14px; font-weight: bold; text-anchor: start; }",
        "  .ugraph text.band { font-size: 11px; font-weight: bold; fill: #2f4256; text-anchor: "
        "start; }",
        "  .ugraph path.edge { fill: none; stroke: #6b7a8a; stroke-width: 1.4; }",
        "  .ugraph path.tip { fill: #6b7a8a; stroke: none; }",
        "  .ugraph rect { stroke-width: 1.5; }",
        "  .ugraph rect.page { fill: #ffffff; stroke: none; }",
        "  .ugraph rect.panel { fill: #f6f8fa; stroke: #cfd7df; }",
        "  .ugraph rect.band { fill: #ffffff; stroke: #a9b7c5; stroke-dasharray: 5 3; }",
        "  .ugraph rect.label { fill: #f6f8fa; stroke: none; }",
        *(
            f"  .ugraph rect.{name} {{ fill: {fill}; stroke: "
            f"{stroke};{' stroke-dasharray: 4 2.5;' if name in _DASHED else ''} }}"
            for name, (fill, stroke, _) in STYLES.items()
        ),
    ]
)

_MARGIN, _INSET = 20.0, 22.0
#: Width by height that a page of panels comes near to.
_ASPECT = 1.5


def width(text: str, kind: str) -> float:
    """Return the pixels that a text takes. East Asian wide characters take two columns."""
    return ADVANCE[kind] * sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


@dataclass(frozen=True)
class Node:
    """A box with lines of text.

    Attributes:
        lines: Pairs of text and class of text.
        style: A key of STYLES.
        layer: The layer it stands in, 0 at the top.
        least: Its least width in pixels.
    """

    key: str
    lines: tuple[tuple[str, str], ...]
    style: str
    layer: int
    least: float = 0.0

    @property
    def box(self) -> layered.Box:
        """Its size and layer."""
        wide = max(*(width(text, kind) + 2 * PAD for text, kind in self.lines), self.least)
        return layered.Box(self.key, wide, LINE * len(self.lines) + PAD, self.layer)


@dataclass(frozen=True)
class Frame:
    """A frame around layers `first` to `last`, with lines of text at its left."""

    first: int
    last: int
    lines: tuple[str, ...]


@dataclass
class Panel:
    """A titled drawing.

    It holds boxes, edges by their ends with lines of text before the head, frames, and facts below
    the title.
    """

    title: str
    facts: list[str] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    edges: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)

    def add(
        self, key: str, lines: Iterable[tuple[str, str]], style: str, layer: int, least: float = 0.0
    ) -> None:
        """Add a box."""
        self.nodes.append(Node(key, tuple(lines), style, layer, least))

    def join(self, a: str, b: str, label: tuple[str, ...] = ()) -> None:
        """Add an edge between two boxes."""
        self.edges.setdefault((a, b), label)


def label_width(lines: Sequence[str]) -> float:
    """Return the width of the widest line."""
    return max((width(line, "small") for line in lines), default=0.0) + 8


@dataclass(frozen=True)
class _Drawing:
    """A panel's SVG and its size."""

    width: float
    height: float
    lines: tuple[str, ...]


def page(title: str, panels: Sequence[Panel]) -> str:
    """Return panels as one SVG, in reading order: down a column, then the next column."""
    header = 46.0
    drawings = [_draw(p) for p in panels]
    columns = _columns([(d.width, d.height) for d in drawings])
    parts, x, bottom = [], _MARGIN, header
    for column in columns:
        y = header
        for n in column:
            parts.append(
                "\n".join(
                    [f'<g transform="translate({x:.1f},{y:.1f})">', *drawings[n].lines, "</g>"]
                )
            )
            y += drawings[n].height + _MARGIN
        bottom = max(bottom, y - _MARGIN)
        x += max(drawings[n].width for n in column) + _MARGIN
    wide = max(x, 640.0, width(title, "title") + 2 * _MARGIN)
    legend, rows = _legend({n.style for p in panels for n in p.nodes}, wide - 2 * _MARGIN)
    high = bottom + 24 + LINE * 1.4 * rows
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" class="ugraph" '
            f'width="{wide:.0f}" height="{high:.0f}" '
            f'viewBox="0 0 {wide:.0f} {high:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_CSS}\n</style>",
            f'<rect class="page" width="{wide:.0f}" height="{high:.0f}"/>',
            _text(_MARGIN, 30, title, "title"),
            *parts,
            f'<g transform="translate({_MARGIN:.1f},{bottom + 18:.1f})">',
            *legend,
            "</g>",
            "</svg>",
            "",
        ]
    )


def _columns(sizes: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Return panels in columns, in order.

    Every height of a run of panels is tried, so that the page comes near to _ASPECT.
    """
    best: tuple[float, list[list[int]]] = (float("inf"), [list(range(len(sizes)))])
    heights = {
        sum(h + _MARGIN for _, h in sizes[i:j])
        for i in range(len(sizes))
        for j in range(i + 1, len(sizes) + 1)
    }
    for limit in sorted(heights):
        columns: list[list[int]] = []
        filled = float("inf")
        for n, (_, h) in enumerate(sizes):
            if filled + h + _MARGIN > limit + 0.5:
                columns.append([])
                filled = 0.0
            columns[-1].append(n)
            filled += h + _MARGIN
        wide = sum(max(sizes[n][0] for n in column) + _MARGIN for column in columns)
        high = max(sum(sizes[n][1] + _MARGIN for n in column) for column in columns)
        best = min(best, (max(wide / _ASPECT, high) + 0.05 * (wide + high), columns))
    return best[1]


def _draw(panel: Panel) -> _Drawing:
    """Draw one panel."""
    boxes = [n.box for n in panel.nodes]
    by_key = {n.key: n for n in panel.nodes}
    above: dict[int, float] = {}
    for (_, b), label in panel.edges.items():
        if label:
            above[by_key[b].layer] = max(above.get(by_key[b].layer, 0.0), 13.0 * len(label))
    for band in panel.frames:
        above[band.first] = above.get(band.first, 0.0) + 14
        above[band.last + 1] = above.get(band.last + 1, 0.0) + 14
    placed = layered.place(boxes, list(panel.edges), above)
    short = {}
    for band in panel.frames:  # leave room for its text
        short[band] = max(
            0.0,
            SMALL * len(band.lines)
            + 12
            - (placed.layers[band.last][1] - placed.layers[band.first][0] + 24),
        )
        above[band.last + 1] = above.get(band.last + 1, 0.0) + short[band]
    if any(short.values()):
        placed = layered.place(boxes, list(panel.edges), above)
    gutter = max(
        (width(line, "band") + 18 for band in panel.frames for line in band.lines), default=0.0
    )
    top = 46.0 + SMALL * len(panel.facts)
    head = max([width(panel.title, "title"), *(width(f, "small") for f in panel.facts)]) + 36
    wide = max(placed.width + 2 * _INSET + gutter, head)
    shift = gutter + (wide - gutter - placed.width) / 2
    high = top + placed.layers[-1][1] + _INSET
    lines = [
        f'<rect class="panel" x="0" y="0" width="{wide:.1f}" height="{high:.1f}" rx="10"/>',
        _text(16, 27, panel.title, "title"),
    ]
    lines += [_text(16, 44 + SMALL * i, fact, "small left") for i, fact in enumerate(panel.facts)]
    for band in panel.frames:
        y0, y1 = (
            placed.layers[band.first][0] + top - 12,
            placed.layers[band.last][1] + top + 12 + short[band],
        )
        lines.append(
            f'<rect class="band" x="9" y="{y0:.1f}" width="{wide - 18:.1f}" '
            f'height="{y1 - y0:.1f}" rx="8"/>'
        )
        lines += [_text(18, y0 + 19 + SMALL * i, line, "band") for i, line in enumerate(band.lines)]
    labels = []
    starts = {band.first for band in panel.frames}
    for edge, points in placed.routes.items():
        moved = [(x + shift, y + top) for x, y in points]
        lines += _arrow(moved)
        label = panel.edges[edge]
        layer = by_key[edge[1]].layer
        x, y = (
            moved[-1][0],
            placed.layers[layer][0] + top - 9 - 13 * len(label) - (14 if layer in starts else 0),
        )
        for i, text in enumerate(label):
            w = width(text, "small") + 4
            labels += [
                f'<rect class="label" x="{x - w / 2:.1f}" y="{y + 13 * i:.1f}" '
                f'width="{w:.1f}" height="13"/>',
                _text(x, y + 13 * i + 10, text, "small"),
            ]
    lines += labels
    for n in panel.nodes:
        box, (cx, cy) = n.box, placed.centres[n.key]
        x, y = cx + shift - box.width / 2, cy + top - box.height / 2
        radius = min(box.height / 2, 18) if n.style == "tensor" else 5
        lines.append(
            f'<rect class="{n.style}" x="{x:.1f}" y="{y:.1f}" '
            f'width="{box.width:.1f}" height="{box.height:.1f}" '
            f'rx="{radius:.0f}"/>'
        )
        lines += [
            _text(cx + shift, y + PAD / 2 + LINE * i + 12.5, text, kind)
            for i, (text, kind) in enumerate(n.lines)
        ]
    return _Drawing(wide, high, tuple(lines))


def _text(x: float, y: float, text: str, kind: str) -> str:
    """Return one line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _arrow(points: Sequence[tuple[float, float]]) -> list[str]:
    """Return a line through the points and its head.

    It leaves and arrives downwards. The head is a path of its own, since a marker would need an id.
    """
    (x, y), *rest = points
    text = f"M{x:.1f},{y:.1f}"
    ex, ey = rest[-1]
    for nx, ny in [*rest[:-1], (ex, ey - 6)]:
        if abs(nx - x) < 0.5:
            text += f" L{nx:.1f},{ny:.1f}"
        else:
            bend = (ny - y) / 2
            text += f" C{x:.1f},{y + bend:.1f} {nx:.1f},{ny - bend:.1f} {nx:.1f},{ny:.1f}"
        x, y = nx, ny
    tip = f"M{ex - 3.8:.1f},{ey - 7:.1f} L{ex:.1f},{ey:.1f} L{ex + 3.8:.1f},{ey - 7:.1f} z"
    return [f'<path class="edge" d="{text}"/>', f'<path class="tip" d="{tip}"/>']


def _legend(styles: set[str], room: float) -> tuple[list[str], int]:
    """Return boxes with their meaning, and how many rows they take."""
    entries: Mapping[str, str] = {
        name: meaning for name, (_, _, meaning) in STYLES.items() if name in styles
    }
    lines, x, row = [], 0.0, 0
    for style, text in [
        *entries.items(),
        *(
            [("", "x→0: axis x cuts dim 0;  x→φ: the same for all of x")]
            if "load" in styles
            else []
        ),
    ]:
        wide = (22 if style else 0) + width(text, "small") + 22
        if x and x + wide - 22 > room:
            x, row = 0.0, row + 1
        y = row * LINE * 1.4
        if style:
            lines.append(
                f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="16" height="12" rx="3"/>'
            )
        lines.append(_text(x + (22 if style else 0), y + 10, text, "small left"))
        x += wide
    return lines, row + 1
