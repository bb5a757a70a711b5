"""Draw panels of boxes and arrows as SVG text. `render/picture.py` decides what they show."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from mirage_hf.render import layered

#: Width of a character of each class of text, in pixels. All text is monospaced, so boxes can fit
#: it.
ADVANCE = {"plain": 7.25, "bold": 7.25, "small": 6.35, "band": 6.65, "title": 8.45}

#: Height of a line in a box, in pixels.
LINE = 17.0

#: Height of a line of small text outside a box, in pixels.
SMALL = 14.0

#: Height of a line of an edge's label, in pixels.
LABEL = 13.0

#: Padding inside a box, in pixels.
PAD = 11.0

#: Fill, stroke and meaning of each kind of box. The strokes are the colours of Okabe and Ito, which
#: people with colour blindness can tell apart. The text in a box says the same.
STYLES = {
    "tensor": ("#e3eefa", "#0072b2", "tensor in device memory"),
    "block": ("#fdeccb", "#c98500", "kernel that runs a block graph"),
    "library": ("#eceef1", "#7d8794", "library call"),
    "view": ("#ffffff", "#7d8794", "view: moves no data"),
    "load": ("#edf6fd", "#56b4e9", "tile of a tensor"),
    "thread": ("#ffffff", "#5f6b78", "elementwise, in registers"),
    "sum": ("#d9f2e9", "#009e73", "sum or maximum"),
    "product": ("#f7e6f0", "#b3568a", "sum of products"),
    "exchange": ("#e9e4f7", "#6a51a3", "sum or maximum among the blocks of a cluster"),
    "rescaled": ("#fbe3d6", "#d55e00", "sum rescaled while the maximum grows"),
}
_DASHED = ("view",)

_TEXT_CSS = """\
  .ugraph text { font: 12px "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #17202b; \
text-anchor: middle; }
  .ugraph text.bold { font-weight: bold; }
  .ugraph text.small { font-size: 10.5px; fill: #43515f; }
  .ugraph text.left { text-anchor: start; }
  .ugraph text.title { font-size: 14px; font-weight: bold; text-anchor: start; }
  .ugraph text.band { font-size: 11px; font-weight: bold; fill: #2f4256; text-anchor: start; }
  .ugraph path.edge { fill: none; stroke: #6b7a8a; stroke-width: 1.4; }
  .ugraph path.tip { fill: #6b7a8a; stroke: none; }
  .ugraph rect { stroke-width: 1.5; }
  .ugraph rect.page { fill: #ffffff; stroke: none; }
  .ugraph rect.panel { fill: #f6f8fa; stroke: #cfd7df; }
  .ugraph rect.band { fill: #ffffff; stroke: #a9b7c5; stroke-dasharray: 5 3; }
  .ugraph rect.label { fill: #f6f8fa; stroke: none; }
"""


def _css() -> str:
    boxes = []
    for name, (fill, stroke, _) in STYLES.items():
        dashes = " stroke-dasharray: 4 2.5;" if name in _DASHED else ""
        boxes.append(f"  .ugraph rect.{name} {{ fill: {fill}; stroke: {stroke};{dashes} }}")
    return _TEXT_CSS + "\n".join(boxes)


_CSS = _css()


#: Pixels around panels, and between them.
_MARGIN = 20.0

#: Pixels inside a panel, beside and below its drawing.
_INSET = 22.0

#: The ratio of width to height that a page of panels aims at.
_ASPECT = 1.5

#: Pixels between a frame and the boxes above and below it that it encloses.
_FRAME_PAD = 12.0

#: Pixels of extra room between layers for the upper or lower edge of a frame.
_FRAME_MARGIN = 14.0

#: Height of a title, and least width of a page, in pixels.
_HEADER, _LEAST_WIDTH = 46.0, 640.0


def width(text: str, kind: str) -> float:
    """Return the width of a text in pixels. East Asian wide characters take two columns."""
    return ADVANCE[kind] * sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


@dataclass(frozen=True)
class Node:
    """A box with lines of text."""

    key: str

    #: Pairs of a text and its class, a key of ADVANCE.
    lines: tuple[tuple[str, str], ...]

    #: A key of STYLES.
    style: str

    layer: int

    #: Least width in pixels.
    least: float = 0.0

    @property
    def box(self) -> layered.Box:
        """The box to be placed."""
        wide = max(*(width(text, kind) + 2 * PAD for text, kind in self.lines), self.least)
        return layered.Box(self.key, wide, LINE * len(self.lines) + PAD, self.layer)


@dataclass(frozen=True)
class LayerFrame:
    """A frame around layers `first` to `last`, with lines of text at its left."""

    first: int
    last: int
    lines: tuple[str, ...]


@dataclass
class Panel:
    """A titled drawing."""

    title: str

    #: Lines below the title.
    facts: list[str] = field(default_factory=list)

    nodes: list[Node] = field(default_factory=list)

    #: Lines of text at an edge's head, by the keys of the edge's two boxes.
    edges: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    frames: list[LayerFrame] = field(default_factory=list)

    def add(
        self, key: str, lines: Iterable[tuple[str, str]], style: str, layer: int, least: float = 0.0
    ) -> None:
        """Add a box."""
        self.nodes.append(Node(key, tuple(lines), style, layer, least))

    def join(self, a: str, b: str, label: tuple[str, ...] = ()) -> None:
        """Add an edge."""
        self.edges.setdefault((a, b), label)


def label_width(lines: Sequence[str]) -> float:
    """Return the width of an edge's label in pixels."""
    return max((width(line, "small") for line in lines), default=0.0) + 8


# -- pages -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawing:
    """A drawn panel."""

    width: float
    height: float
    lines: tuple[str, ...]


def page(title: str, panels: Sequence[Panel]) -> str:
    """Return panels as one SVG, in reading order: down a column, then the next column."""
    drawings = [_PanelDrawing(p).drawing() for p in panels]
    parts, x, bottom = [], _MARGIN, _HEADER
    for column in _columns([(d.width, d.height) for d in drawings]):
        y = _HEADER
        for n in column:
            parts += [f'<g transform="translate({x:.1f},{y:.1f})">', *drawings[n].lines, "</g>"]
            y += drawings[n].height + _MARGIN
        bottom = max(bottom, y - _MARGIN)
        x += max(drawings[n].width for n in column) + _MARGIN
    wide = max(x, _LEAST_WIDTH, width(title, "title") + 2 * _MARGIN)
    legend, rows = _legend({n.style for p in panels for n in p.nodes}, wide - 2 * _MARGIN)
    high = bottom + 24 + LINE * 1.4 * rows
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ugraph" width="{wide:.0f}" '
        f'height="{high:.0f}" viewBox="0 0 {wide:.0f} {high:.0f}" role="img">',
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
    return "\n".join(lines)


def _columns(sizes: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Return panels in columns, in order, so that the shape of the page is close to _ASPECT.

    The height of every run of panels is tried as the height of the columns.
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


def _legend(styles: set[str], room: float) -> tuple[list[str], int]:
    """Return the legend: a box of each style with its meaning, and the number of rows it takes."""
    entries = [(name, meaning) for name, (_, _, meaning) in STYLES.items() if name in styles]
    if "load" in styles:
        entries.append(("", "x→0: axis x cuts dim 0;  x→φ: the same for all of x"))
    lines, x, row = [], 0.0, 0
    for style, text in entries:
        sample = 22 if style else 0
        wide = sample + width(text, "small") + 22
        if x and x + wide - 22 > room:
            x, row = 0.0, row + 1
        y = row * LINE * 1.4
        if style:
            lines.append(
                f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="16" height="12" rx="3"/>'
            )
        lines.append(_text(x + sample, y + 10, text, "small left"))
        x += wide
    return lines, row + 1


# -- panels ----------------------------------------------------------------------------------------


class _PanelDrawing:
    """Draws one panel."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.layer_of = {n.key: n.layer for n in panel.nodes}
        self.placed, self.extra_height = self._place()
        self.gutter = max(
            (width(line, "band") + 18 for frame in panel.frames for line in frame.lines),
            default=0.0,
        )
        self.top = _HEADER + SMALL * len(panel.facts)
        head = max([width(panel.title, "title"), *(width(f, "small") for f in panel.facts)]) + 36
        self.width = max(self.placed.width + 2 * _INSET + self.gutter, head)
        self.height = self.top + self.placed.layers[-1][1] + _INSET
        #: The offset from an x of the placement to an x of the panel.
        self.shift = self.gutter + (self.width - self.gutter - self.placed.width) / 2

    def drawing(self) -> _Drawing:
        panel = self.panel
        lines = [
            f'<rect class="panel" x="0" y="0" width="{self.width:.1f}" '
            f'height="{self.height:.1f}" rx="10"/>',
            _text(16, 27, panel.title, "title"),
        ]
        lines += [_text(16, 44 + SMALL * i, f, "small left") for i, f in enumerate(panel.facts)]
        lines += [line for frame in panel.frames for line in self._frame(frame)]
        lines += [line for points in self.placed.routes.values() for line in self._arrow(points)]
        lines += [line for edge in self.placed.routes for line in self._label(edge)]
        lines += [line for node in panel.nodes for line in self._node(node)]
        return _Drawing(self.width, self.height, tuple(lines))

    def _place(self) -> tuple[layered.Placement, dict[LayerFrame, float]]:
        """Return the placement, and the extra height that frames need for their text.

        Boxes are placed a second time if a frame needs extra height.
        """
        panel = self.panel
        boxes, edges = [n.box for n in panel.nodes], list(panel.edges)
        room_above: dict[int, float] = {}
        for (_, end), label in panel.edges.items():
            if label:
                layer = self.layer_of[end]
                room_above[layer] = max(room_above.get(layer, 0.0), LABEL * len(label))
        for frame in panel.frames:
            for layer in (frame.first, frame.last + 1):
                room_above[layer] = room_above.get(layer, 0.0) + _FRAME_MARGIN
        placed = layered.place(boxes, edges, room_above)
        extra = {}
        for frame in panel.frames:
            top, bottom = placed.layers[frame.first][0], placed.layers[frame.last][1]
            inside = bottom - top + 2 * _FRAME_PAD
            extra[frame] = max(0.0, SMALL * len(frame.lines) + _FRAME_PAD - inside)
            below = frame.last + 1
            room_above[below] = room_above.get(below, 0.0) + extra[frame]
        if any(extra.values()):
            placed = layered.place(boxes, edges, room_above)
        return placed, extra

    def _frame(self, frame: LayerFrame) -> list[str]:
        upper = self.placed.layers[frame.first][0] + self.top - _FRAME_PAD
        lower = self.placed.layers[frame.last][1] + self.top + _FRAME_PAD
        lower += self.extra_height[frame]
        return [
            f'<rect class="band" x="9" y="{upper:.1f}" width="{self.width - 18:.1f}" '
            f'height="{lower - upper:.1f}" rx="8"/>',
            *(_text(18, upper + 19 + SMALL * i, t, "band") for i, t in enumerate(frame.lines)),
        ]

    def _arrow(self, points: Sequence[tuple[float, float]]) -> list[str]:
        """Return an edge: a line that leaves and arrives downwards, and its head.

        The head is a path of its own, because a marker would need an id. Ids of several pictures
        in one page could clash.
        """
        (x, y), *rest = [(x + self.shift, y + self.top) for x, y in points]
        text = f"M{x:.1f},{y:.1f}"
        end_x, end_y = rest[-1]
        for next_x, next_y in [*rest[:-1], (end_x, end_y - 6)]:
            if abs(next_x - x) < 0.5:
                text += f" L{next_x:.1f},{next_y:.1f}"
            else:
                bend = (next_y - y) / 2
                text += f" C{x:.1f},{y + bend:.1f} {next_x:.1f},{next_y - bend:.1f} "
                text += f"{next_x:.1f},{next_y:.1f}"
            x, y = next_x, next_y
        head = f"M{end_x - 3.8:.1f},{end_y - 7:.1f} L{end_x:.1f},{end_y:.1f} "
        head += f"L{end_x + 3.8:.1f},{end_y - 7:.1f} z"
        return [f'<path class="edge" d="{text}"/>', f'<path class="tip" d="{head}"/>']

    def _label(self, edge: tuple[str, str]) -> list[str]:
        """Return the text before the head of an edge."""
        label, layer = self.panel.edges[edge], self.layer_of[edge[1]]
        below_frame = _FRAME_MARGIN if layer in {frame.first for frame in self.panel.frames} else 0
        x = self.placed.routes[edge][-1][0] + self.shift
        y = self.placed.layers[layer][0] + self.top - 9 - LABEL * len(label) - below_frame
        lines = []
        for i, text in enumerate(label):
            wide = width(text, "small") + 4
            lines += [
                f'<rect class="label" x="{x - wide / 2:.1f}" y="{y + LABEL * i:.1f}" '
                f'width="{wide:.1f}" height="{LABEL:.0f}"/>',
                _text(x, y + LABEL * i + 10, text, "small"),
            ]
        return lines

    def _node(self, n: Node) -> list[str]:
        box, (centre_x, centre_y) = n.box, self.placed.centres[n.key]
        x, y = centre_x + self.shift - box.width / 2, centre_y + self.top - box.height / 2
        radius = min(box.height / 2, 18) if n.style == "tensor" else 5
        lines = [
            f'<rect class="{n.style}" x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" '
            f'height="{box.height:.1f}" rx="{radius:.0f}"/>'
        ]
        for i, (text, kind) in enumerate(n.lines):
            lines.append(_text(centre_x + self.shift, y + PAD / 2 + LINE * i + 12.5, text, kind))
        return lines


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
