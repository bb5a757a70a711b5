"""µGraphs as pictures: kernels on the left, the block graph of each on the right, maps on the edges. Plain SVG."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from mirage_hf import errors
from mirage_hf.graph import layered
from mirage_hf.graph.block import BlockGraph, BlockOp, Role, Stage
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.graph.maps import TensorMap, maps_of
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table

CHAR, LINE, PAD = 7.25, 17.0, 11.0
"""Width of a character and height of a line of 12 px monospace text, and padding inside a box, in pixels."""

STYLE = """
  text { font: 12px "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1d2733; text-anchor: middle; }
  text.bold { font-weight: bold; }
  text.small { font-size: 10.5px; fill: #5a6b7d; }
  text.title { font: 600 15px "DejaVu Sans", Helvetica, Arial, sans-serif; text-anchor: start; }
  text.band { font: 600 12px "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #41566d; text-anchor: start; }
  path.edge { fill: none; stroke: #8495a8; stroke-width: 1.4; marker-end: url(#arrow); }
  rect { stroke-width: 1.4; }
  .page { fill: #ffffff; stroke: none; }
  .panel { fill: #f7f9fb; stroke: #d5dde5; }
  .band { fill: #ffffff; stroke: #b9c7d6; stroke-dasharray: 5 3; }
  .label { fill: #f7f9fb; stroke: none; }
  .tensor { fill: #e3eefb; stroke: #5b8fc9; }
  .block { fill: #fdebd3; stroke: #d99b3f; }
  .library { fill: #edeff2; stroke: #94a1af; }
  .view { fill: #ffffff; stroke: #b3bfcb; }
  .load { fill: #eaf3fd; stroke: #9dbfe3; }
  .thread { fill: #ffffff; stroke: #93a4b5; }
  .sum { fill: #dff3e4; stroke: #57a773; }
  .product { fill: #f2e6fa; stroke: #9a6fc0; }
"""

LEGEND = (("tensor", "device tensor"), ("block", "block graph"), ("library", "library call"), ("view", "view: moves no data"),
          ("load", "tile of a tensor"), ("thread", "thread graph: registers"), ("sum", "sum or maximum"), ("product", "sum of products"))

_SIGNS = {"sum": "Σ", "max": "max"}
_INFIX = {"add": "+", "sub": "−", "mul": "×", "div": "÷"}


@dataclass(frozen=True)
class _Node:
    """A box with lines of text; `style` is its class."""

    key: str
    lines: tuple[str, ...]
    style: str
    layer: int
    least: float = 0.0

    @property
    def box(self) -> layered.Box:
        width = max(CHAR * max(map(len, self.lines)) + 2 * PAD, self.least)
        return layered.Box(self.key, width, LINE * len(self.lines) + PAD, self.layer)


@dataclass
class _Panel:
    """A titled drawing. `bands`: first layer, last layer and title of each stage."""

    title: str
    nodes: list[_Node] = field(default_factory=list)
    edges: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    bands: list[tuple[int, int, str]] = field(default_factory=list)

    def add(self, *args: object) -> None:
        self.nodes.append(_Node(*args))  # type: ignore[arg-type]


def write_svg(ugraph: UGraph, path: str | Path) -> Path:
    """Draw a µGraph as SVG: its kernels, and every block graph with its stages and maps. Returns the path."""
    path = Path(path)
    path.write_text(svg(ugraph), encoding="utf-8")
    return path


def svg(ugraph: UGraph) -> str:
    """Return the picture as text."""
    blocks = [_block_panel(n + 1, op) for n, op in enumerate(ugraph.block_ops)]
    left = _draw(_kernel_panel(ugraph.kernels))
    right = [_draw(p) for p in blocks]
    margin, header, footer = 20.0, 46.0, 44.0
    x = margin + left.width + margin
    parts = [_group(left, margin, header)]
    y = header
    for drawing in right:
        parts.append(_group(drawing, x, y))
        y += drawing.height + margin
    width = max(x + max((d.width for d in right), default=-margin) + margin, 640.0)
    legend, legend_rows = _legend({n.style for p in (*blocks, _kernel_panel(ugraph.kernels)) for n in p.nodes}, width - 2 * margin)
    bottom = max(header + left.height, y - margin)
    height = bottom + footer + LINE * 1.4 * (legend_rows - 1)
    count, calls = len(blocks), ugraph.num_kernels - len(blocks)
    counted = [f"{n} {what}{'s' if n != 1 else ''}" for n, what in ((count, "searched kernel"), (calls, "library call")) if n]
    title = "µGraph: " + " and ".join(counted or ["no kernel"])
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0.8 L7,4 L0,7.2 z" fill="#8495a8"/></marker></defs>',
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
        f'<text class="title" x="{margin}" y="30">{escape(title)}</text>', *parts,
        f'<g transform="translate({margin},{bottom + 16:.1f})">', *legend, "</g>", "</svg>", ""])


# -- kernel level -----------------------------------------------------------------------------------------------------------

def _kernel_panel(graph: KernelGraph) -> _Panel:
    panel = _Panel("Kernel level")
    layer: dict[int, int] = {}
    node: dict[int, str] = {}
    for op in graph.ops:
        depth = 1 + max((layer[x.index] for x in op.inputs if isinstance(x, DTensor) and x.index in layer), default=0)
        layer |= {t.index: depth for t in op.outputs}
    first = {t.index: min((layer[op.outputs[0].index] for op in graph.ops if t in op.inputs), default=1) - 1 for t in graph.inputs}
    for t in graph.inputs:
        node[t.index] = f"tensor {t.index}"
        panel.add(node[t.index], (t.name, _type(t)), "tensor", first[t.index])
    blocks = 0
    for op in graph.ops:
        key = f"op {op.outputs[0].index}"
        blocks += op.name == CUSTOMIZED
        node |= {t.index: key for t in op.outputs}
        head = f"kernel {blocks}" if op.name == CUSTOMIZED else _kernel_text(op)
        style = "block" if op.name == CUSTOMIZED else "view" if op.name in ("permute", "reshape", "slice") else "library"
        panel.add(key, (head, *(f"→ {errors.shape(t.dims)}" for t in op.outputs)), style, layer[op.outputs[0].index])
        for x in op.inputs:
            if isinstance(x, DTensor):
                panel.edges[node[x.index], key] = ()
    last = 1 + max(layer.values(), default=0)
    for n, t in enumerate(graph.outputs):
        panel.add(f"output {n}", (f"output {n}" if len(graph.outputs) > 1 else "output", _type(t)), "tensor", last)
        panel.edges[node[t.index], f"output {n}"] = ()
    return panel


def _type(t: DTensor) -> str:
    return f"{table.dtype_name(t.dtype)} {errors.shape(t.dims)}"


def _kernel_text(op: KernelOp) -> str:
    numbers = [_number(x) for x in op.inputs if not isinstance(x, DTensor)]
    attrs = [f"{k}={errors.shape(v) if isinstance(v, tuple) else _number(v)}" for k, v in op.attrs]
    return op.name + (f"({', '.join(numbers + attrs)})" if numbers or attrs else "")


def _number(x: object) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)


# -- block level ------------------------------------------------------------------------------------------------------------

def _block_panel(number: int, op: KernelOp) -> _Panel:
    b = op.block
    assert b is not None
    roles = [f"{role.value} " + ", ".join(f"{a.name}={a.size}" for a in b.named(role)) for role in Role if b.named(role)]
    panel = _Panel(f"Kernel {number}, block level:  " + "  ·  ".join(roles))
    maps = maps_of(b)
    node: dict[str, str] = {}
    sources: dict[str, int] = {}
    at = 0
    for s, stage in enumerate(b.stages):
        used = [i for i in b.inputs if any(i.name in o.args for o in stage.body) or any(i.name == a.arg for a in stage.accumulators)]
        panel_row, first = at, at + bool(used)
        for i in used:
            label = _map_lines(maps.inputs[b.inputs.index(i)])
            wide = CHAR * 0.89 * max(map(len, label)) + 8
            if i.name not in sources:
                tensors = [t for k in i.sources if isinstance(t := op.inputs[k], DTensor)]
                sources[i.name] = panel_row
                panel.add(f"source {i.name}", (" | ".join(t.name for t in tensors), " | ".join(errors.shape(t.dims) for t in tensors)),
                          "tensor", panel_row)
            node[i.name] = f"load {s} {i.name}"
            panel.add(node[i.name], (f"{i.name} [{', '.join(b.input_axes(i))}]",), "load", first, wide)
            panel.edges[f"source {i.name}", node[i.name]] = label
        last = _stage_nodes(panel, b, s, stage, first if used else first - 1, node)
        title = f"for {stage.loop} in {b.axis(stage.loop).size}" if stage.loop else "once per block"
        panel.bands.append((first, last, title))
        at = last + 1
    for n, o in enumerate(b.outputs):
        label = _map_lines(maps.outputs[n])
        t = op.outputs[n]
        panel.add(f"store {n}", (f"{o.value}", _type(t)), "tensor", at, CHAR * 0.89 * max(map(len, label)) + 8)
        source = node[o.value]
        panel.edges[source, f"store {n}"] = label
    return panel


def _map_lines(m: TensorMap) -> tuple[str, ...]:
    lines = str(m).replace(", fmap", "\nfmap").replace("{", "").replace("}", "").split("\n")
    return tuple(line for line in lines if line.strip() not in ("imap", "omap"))


def _stage_nodes(panel: _Panel, b: BlockGraph, s: int, stage: Stage, floor: int, node: dict[str, str]) -> int:
    """Add the boxes of a stage below layer `floor`; returns its last layer. Chains of elementwise ops share a box."""
    products = {c.product: c for c in b.contractions.values()}
    readers: dict[str, int] = {}
    for op in b.ops():
        for a in set(op.args):
            if isinstance(a, str):
                readers[a] = readers.get(a, 0) + 1
    for other in b.stages:
        for acc in other.accumulators:
            readers[acc.arg] = readers.get(acc.arg, 0) + 1
    for o in b.outputs:
        readers[o.value] = readers.get(o.value, 0) + 1
    layer: dict[str, int] = {}
    boxes: dict[str, list[BlockOp]] = {}
    styles: dict[str, str] = {}
    texts: dict[str, list[str]] = {}
    edges: list[tuple[str, str]] = []

    def put(key: str, values: Sequence[str], text: str, style: str) -> None:
        own = [node[v] for v in values if v in node]
        layer[key] = max([floor + 1, *(layer[k] + 1 for k in own if k in layer)])
        texts[key], styles[key] = [text], style
        edges.extend((k, key) for k in dict.fromkeys(own))

    for op in stage.body:
        if op.out in products:
            continue
        values = [a for a in op.args if isinstance(a, str)]
        if op.over is not None:
            key = f"sum {s} {op.out}"
            c = b.contractions.get(op.out)
            text = f"{c.a} × {c.b}" if c else str(op.args[0])
            put(key, [c.a, c.b] if c else values, f"{op.out} = {_SIGNS[op.fn]}[{op.over}] {text}", "product" if c else "sum")
            node[op.out] = key
            continue
        chained = [node[v] for v in values if node.get(v) in boxes and readers[v] == 1]
        before = {node[v] for v in values if v in node and node[v] in layer}
        if len(chained) == 1 and before == set(chained):
            key = chained[0]
            outside = [node[v] for v in values if v in node and node[v] not in layer]
            edges.extend((k, key) for k in dict.fromkeys(outside) if (k, key) not in edges)
            texts[key].append(_op_text(op))
        else:
            key = f"thread {s} {op.out}"
            put(key, values, _op_text(op), "thread")
            boxes[key] = []
        boxes[key].append(op)
        node[op.out] = key
    last = max(layer.values(), default=floor)
    accumulators = []
    for acc in stage.accumulators:
        c = b.contractions.get(acc.out)
        key = f"accumulate {s} {acc.out}"
        text = f"{c.a} × {c.b}" if c else acc.arg
        put(key, [c.a, c.b] if c else [acc.arg], f"{acc.out} = {_SIGNS[acc.kind]}[{stage.loop}] {text}", "product" if c else "sum")
        accumulators.append((acc.out, key))
        last = max(last, layer[key])
    for out, key in accumulators:
        layer[key] = last
        node[out] = key
    for key, lines in texts.items():
        carried = b.carried[next(v for v, k in node.items() if k == key)] if key not in boxes else boxes[key][-1].axes
        panel.add(key, (*lines, f"[{', '.join(carried)}]"), styles[key], layer[key])
    panel.edges |= {e: () for e in edges}
    return last


def _op_text(op: BlockOp) -> str:
    args = [a if isinstance(a, str) else _number(float(a)) for a in op.args]
    attrs = [f"{k}={_number(v)}" for k, v in op.attrs]
    return f"{op.out} = " + (f" {_INFIX[op.fn]} ".join(args) if op.fn in _INFIX else f"{op.fn}({', '.join(args + attrs)})")


# -- drawing ----------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Drawing:
    width: float
    height: float
    lines: tuple[str, ...]


def _group(d: _Drawing, x: float, y: float) -> str:
    return "\n".join([f'<g transform="translate({x:.1f},{y:.1f})">', *d.lines, "</g>"])


def _draw(panel: _Panel) -> _Drawing:
    boxes = [n.box for n in panel.nodes]
    above: dict[int, float] = {}
    by_key = {n.key: n for n in panel.nodes}
    for (_, b), label in panel.edges.items():
        if label:
            above[by_key[b].layer] = max(above.get(by_key[b].layer, 0.0), 13.0 * len(label))
    for first, last, _ in panel.bands:
        above[first] = above.get(first, 0.0) + 20
        above[last + 1] = above.get(last + 1, 0.0) + 12
    placed = layered.place(boxes, list(panel.edges), above)
    inset, top = 22.0, 46.0
    width = max(placed.width + 2 * inset, 8.4 * len(panel.title) + 2 * inset)
    shift = (width - placed.width) / 2
    height = top + placed.layers[-1][1] + inset
    lines = [f'<rect class="panel" width="{width:.1f}" height="{height:.1f}" rx="10"/>',
             f'<text class="title" x="16" y="26">{escape(panel.title)}</text>']
    for first, last, title in panel.bands:
        y0, y1 = placed.layers[first][0] + top - 28, placed.layers[last][1] + top + 10
        lines += [f'<rect class="band" x="9" y="{y0:.1f}" width="{width - 18:.1f}" height="{y1 - y0:.1f}" rx="8"/>',
                  f'<text class="band" x="18" y="{y0 + 17:.1f}">{escape(title)}</text>']
    labels = []
    for edge, points in placed.routes.items():
        moved = [(x + shift, y + top) for x, y in points]
        lines.append(f'<path class="edge" d="{_curve(moved)}"/>')
        label = panel.edges[edge]
        inside = any(first == by_key[edge[1]].layer for first, _, _ in panel.bands)
        x, y = moved[-1][0], moved[-1][1] - 8 - 13 * len(label) - (26 if inside else 0)
        for i, text in enumerate(label):
            wide = CHAR * 0.89 * len(text) + 4
            labels += [f'<rect class="label" x="{x - wide / 2:.1f}" y="{y + 13 * i:.1f}" width="{wide:.1f}" height="13"/>',
                       f'<text class="small" x="{x:.1f}" y="{y + 13 * i + 10:.1f}">{escape(text)}</text>']
    lines += labels
    for n in panel.nodes:
        box, (cx, cy) = n.box, placed.centres[n.key]
        x, y = cx + shift - box.width / 2, cy + top - box.height / 2
        radius = box.height / 2 if n.style == "tensor" else 5
        lines.append(f'<rect class="{n.style}" x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
                     f'rx="{min(radius, 18):.0f}"/>')
        for i, text in enumerate(n.lines):
            kind = "small" if i and (text[0] in "[→(" or n.style == "tensor") else "bold" if n.style in ("tensor", "block") else "plain"
            lines.append(f'<text class="{kind}" x="{cx + shift:.1f}" y="{y + PAD / 2 + LINE * i + 12.5:.1f}">{escape(text)}</text>')
    return _Drawing(width, height, tuple(lines))


def _curve(points: Sequence[tuple[float, float]]) -> str:
    (x, y), *rest = points
    text = f"M{x:.1f},{y:.1f}"
    for nx, ny in rest:
        bend = (ny - y) / 2
        text += f" L{nx:.1f},{ny:.1f}" if abs(nx - x) < 0.5 else f" C{x:.1f},{y + bend:.1f} {nx:.1f},{ny - bend:.1f} {nx:.1f},{ny:.1f}"
        x, y = nx, ny
    return text


def _legend(styles: set[str], width: float) -> tuple[list[str], int]:
    """Boxes with their meaning, and how many rows they take."""
    lines, x, row = [], 0.0, 0
    for style, text in LEGEND:
        if style not in styles:
            continue
        wide = 24 + CHAR * 0.89 * len(text) + 22
        if x + wide > width:
            x, row = 0.0, row + 1
        y = row * LINE * 1.4
        lines += [f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="16" height="12" rx="3"/>',
                  f'<text class="small" style="text-anchor: start" x="{x + 22:.1f}" y="{y + 10:.1f}">{escape(text)}</text>']
        x += wide
    return lines, row + 1
