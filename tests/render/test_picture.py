"""Pictures: valid SVG that shows every tensor and map.

No two boxes or texts overlap, no text is cut off, and no edge runs through a box.
"""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
)
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.maps import maps_of
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.render import drawing, labels, layered, picture
from tests.helpers import programs, random_block_graphs, ugraphs

SVG = "{http://www.w3.org/2000/svg}"


def split_attention(heads=3, keys=50, d=8, parts=4) -> UGraph:
    """Return two kernels of attention.

    The first splits the keys and rescales sums as the maximum grows. The second combines the
    splits.
    """
    first = BlockGraph(
        (
            Axis("h", heads, Role.GRID),
            Axis("s", parts, Role.GRID),
            Axis("d", d, Role.TILE),
            Axis("k", keys, Role.LOOP, "s"),
        ),
        (
            BlockInput("q", (0,), ("h", "d")),
            BlockInput("kk", (1,), ("h", "k", "d")),
            BlockInput("v", (2,), ("h", "k", "d")),
        ),
        (
            Stage(
                "k",
                (
                    BlockOp("p", "mul", ("q", "kk"), ("h", "d", "k")),
                    BlockOp("x", "sum", ("p",), ("h", "k"), (), "d"),
                    BlockOp("y", "sub", ("x", "m"), ("h", "s", "k")),
                    BlockOp("e", "exp", ("y",), ("h", "s", "k")),
                    BlockOp("ev", "mul", ("e", "v"), ("h", "s", "d", "k")),
                ),
                (
                    Accumulator("m", "x", "max", ("h", "s")),
                    Accumulator("l", "e", "sum", ("h", "s"), "m"),
                    Accumulator("o", "ev", "sum", ("h", "s", "d"), "m"),
                ),
            ),
        ),
        (
            BlockOutput("m", ("s", "h"), "float32"),
            BlockOutput("l", ("s", "h"), "float32"),
            BlockOutput("o", ("s", "h", "d"), "float32"),
        ),
    )
    second = BlockGraph(
        (Axis("h", heads, Role.GRID), Axis("d", d, Role.TILE), Axis("s", parts, Role.LOOP)),
        (
            BlockInput("mp", (0,), ("s", "h")),
            BlockInput("lp", (1,), ("s", "h")),
            BlockInput("op", (2,), ("s", "h", "d")),
        ),
        (
            Stage(
                "s",
                (
                    BlockOp("y", "sub", ("mp", "m"), ("h", "s")),
                    BlockOp("e", "exp", ("y",), ("h", "s")),
                    BlockOp("ev", "mul", ("e", "op"), ("h", "d", "s")),
                    BlockOp("el", "mul", ("e", "lp"), ("h", "s")),
                ),
                (
                    Accumulator("m", "mp", "max", ("h",)),
                    Accumulator("l", "el", "sum", ("h",), "m"),
                    Accumulator("o", "ev", "sum", ("h", "d"), "m"),
                ),
            ),
            Stage(None, (BlockOp("out", "div", ("o", "l"), ("h", "d")),)),
        ),
        (BlockOutput("out", ("h", "d"), "float32"),),
    )
    g = KernelGraph()
    q = g.new_input((heads, d), "float32", name="q")
    k, v = (g.new_input((heads, keys, d), "float32", name=name) for name in ("keys", "v"))
    g.mark_output(*g.customized(g.customized([q, k, v], first), second))
    return UGraph(g, g)


def many_kernels() -> UGraph:
    """Return split attention between library calls, three times in a row.

    The program has numbers, layouts and long names.
    """
    g, split = KernelGraph(), split_attention()
    blocks = [op.block for op in split.kernels.ops]
    q = g.new_input((3, 8), "float32", name="a_rather_long_name_of_a_tensor_that_somebody_gave_it")
    k, v = (
        g.new_input((3, 50, 8), "float32", name="键的张量"),
        g.new_input((3, 50, 8), "float32", name="v"),
    )
    for _ in range(3):
        q = g.sub(
            1.0,
            g.mul(
                g.customized(
                    g.customized([g.clamp(q, min=-1e-7, max=float("inf")), k, v], blocks[0]),
                    blocks[1],
                )[0],
                0.125,
            ),
        )
    g.mark_output(
        g.concat([q, g.reshape(g.permute(g.reshape(q, (3, 2, 4)), (0, 2, 1)), (3, 8)), q], 1), q
    )
    return UGraph(g, g)


def stored_input() -> UGraph:
    """Return an input that is stored as it is, and one that nothing reads."""
    block = BlockGraph(
        (Axis("m", 4, Role.GRID),),
        (BlockInput("x", (0,), ("m",)), BlockInput("y", (1,), ("m",))),
        (Stage(None, ()),),
        (BlockOutput("x", ("m",), "float32"),),
    )
    g = KernelGraph()
    g.mark_output(
        *g.customized([g.new_input((4,), "float32"), g.new_input((4,), "float32")], block)
    )
    return UGraph(g, g)


def scheduled() -> UGraph:
    u = ugraphs.rms_norm_linear()
    return replace(u, schedules=(Schedule({"m": 1, "n": 16, "k": 16}, num_warps=2),))


def random_ugraph(seed: int) -> UGraph:
    """Return a random µGraph. Seeds that give no kernel are skipped."""
    for n in itertools.count(seed, 1000):
        try:
            g = random_block_graphs.random_graph(n)
        except random_block_graphs.Unsuitable:
            continue
        return UGraph(g, g)
    raise AssertionError


OURS = {
    f.__name__: f
    for f in (split_attention, many_kernels, stored_input, scheduled, ugraphs.every_op)
}


def pictured(name: str) -> UGraph:
    written = ugraphs.ALL | OURS
    return (
        written[name]()
        if name in written
        else library_ugraph(programs.build(mi, name, small=False))
    )


class Drawn:
    """The rectangles of a picture, and points along every edge.

    A rectangle is (left, top, right, bottom) of a text, box, label or panel. A text is as wide as
    its font makes it.
    """

    def __init__(self, svg: str):
        root = ET.fromstring(svg)
        self.width, self.height = (float(root.get(k)) for k in ("width", "height"))
        self.texts, self.boxes, self.labels, self.panels, self.bands, self.edges = (
            [],
            [],
            [],
            [],
            [],
            [],
        )
        self._read(root, 0.0, 0.0)

    def _read(self, element, dx, dy):
        for e in element:
            tag, kind = e.tag.removeprefix(SVG), e.get("class", "")
            if tag == "g":
                x, y = map(
                    float, re.fullmatch(r"translate\((.*),(.*)\)", e.get("transform")).groups()
                )
                self._read(e, x, y)
            elif tag == "rect" and kind != "page":
                x, y, w, h = (float(e.get(k)) for k in ("x", "y", "width", "height"))
                where = {"panel": self.panels, "label": self.labels, "band": self.bands}.get(
                    kind, self.boxes
                )
                where.append((x + dx, y + dy, x + w + dx, y + h + dy))
            elif tag == "text":
                first = kind.split()[0]
                wide, size = (
                    drawing.width(e.text, first),
                    {"small": 10.5, "band": 11, "title": 14}.get(first, 12),
                )
                x, y = float(e.get("x")) + dx, float(e.get("y")) + dy
                left = x if kind in ("title", "band") or "left" in kind else x - wide / 2
                self.texts.append((left, y - 0.78 * size, left + wide, y + 0.24 * size, e.text))
            elif tag == "path" and kind == "edge":
                self.edges.append([(x + dx, y + dy) for x, y in _along(e.get("d"))])


def _along(d):
    """Yield points along a path of M, L and C."""
    points = []
    for letter, rest in re.findall(r"([MLC])([^MLC]*)", d):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", rest)]
        ends = list(zip(numbers[::2], numbers[1::2], strict=True))
        if letter == "M":
            points += ends
            continue
        a, z = points[-1], ends[-1]
        b, c = (ends[0], ends[1]) if letter == "C" else (a, z)
        for t in (i / 16 for i in range(1, 17)):
            points.append(
                tuple(
                    (1 - t) ** 3 * p + 3 * t * (1 - t) ** 2 * q + 3 * t * t * (1 - t) * r + t**3 * s
                    for p, q, r, s in zip(a, b, c, z, strict=True)
                )
            )
    return points


def overlap(a, b, slack=0.2):
    return (
        a[0] < b[2] - slack and b[0] < a[2] - slack and a[1] < b[3] - slack and b[1] < a[3] - slack
    )


def inside(a, b):
    return a[0] >= b[0] - 0.2 and a[1] >= b[1] - 0.2 and a[2] <= b[2] + 0.2 and a[3] <= b[3] + 0.2


def check(u: UGraph) -> None:
    drawn = Drawn(picture.svg(u))
    page = (0, 0, drawn.width, drawn.height)
    for boxes in (drawn.boxes, drawn.panels, drawn.bands, drawn.texts):
        for a, b in itertools.combinations(boxes, 2):
            assert not overlap(a, b), (a, b)
        assert all(inside(a, page) for a in boxes)
    for box in drawn.boxes:
        assert any(inside(box, p) for p in drawn.panels) or box[1] > max(
            p[3] for p in drawn.panels
        ), "neither in a panel nor in the legend"
        assert all(inside(box, band) or not overlap(box, band) for band in drawn.bands)
        assert not any(overlap(box, label) for label in drawn.labels)
    for text in drawn.texts:
        for box in drawn.boxes:
            assert inside(text, box) or not overlap(text, box), (text, box)
        assert any(inside(text, p) for p in drawn.panels) or not any(
            overlap(text, p) for p in drawn.panels
        ), text
        assert all(inside(text, band) or not overlap(text, band) for band in drawn.bands), text
    titles = [
        t for t in drawn.texts if not any(inside(t, box) for box in (*drawn.boxes, *drawn.labels))
    ]
    for edge in drawn.edges:
        for x, y in edge[1:-1]:
            point = (x - 0.1, y - 0.1, x + 0.1, y + 0.1)
            assert not any(
                overlap(point, (left + 0.5, top + 0.5, right - 0.5, bottom - 0.5), 0)
                for left, top, right, bottom in drawn.boxes
            ), point
            assert not any(overlap(point, top, 0) for top in titles), (point, titles)


@pytest.mark.parametrize("name", [*ugraphs.ALL, *OURS, *programs.PROGRAMS])
def test_nothing_overlaps_and_no_text_is_cut_off(name):
    check(pictured(name))


@pytest.mark.parametrize("seed", range(12))
def test_random_block_graphs_are_drawn(seed):
    check(random_ugraph(seed))


@pytest.mark.parametrize("name", [*ugraphs.ALL, "split_attention", "many_kernels"])
def test_tensors_values_and_maps_are_shown(name):
    u = pictured(name)
    shown = " ".join(ET.fromstring(picture.svg(u)).itertext())
    tensors = [*u.kernels.inputs, *(t for op in u.kernels.ops for t in op.outputs)]
    for t in tensors:
        assert t.name in shown and labels.tensor_type(t) in shown
    for op in u.block_ops:
        hidden = {c.product for c in op.block.contractions.values()}
        for value in op.block.carried:
            assert value in hidden or value in shown
        for m in (*maps_of(op.block).inputs, *maps_of(op.block).outputs):
            assert all(
                f"{axis}→{'φ' if dim is None else dim}" in shown for axis, dim in m.grid + m.loop
            )


def test_parts_running_maxima_and_rescaled_sums_are_shown():
    root = ET.fromstring(picture.svg(split_attention()))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    for line in (
        "grid  h = 3,  s = 4 (split of k)",
        "loop  k = 50 in 4 splits of 13",
        "tile  d = 8",
        "for k in 13",
        "split s of 50",
        "m = max[k] x",
        "running maximum",
        "l = Σ[k] e",
        "rescaled as m grows",
        "o = Σ[k] e × v",
        "once per block",
    ):
        assert line in texts, line
    assert texts.count("rescaled as m grows") == 4 and texts.count("running maximum") == 2
    assert (
        sum(r.get("class") == "rescaled" for r in root.iter(f"{SVG}rect")) == 4 + 1
    )  # and in the legend


def test_trips_are_shown_once_there_is_a_schedule():
    texts = [t.text for t in ET.fromstring(picture.svg(scheduled())).iter(f"{SVG}text")]
    assert (
        "16 at a time:" in texts and "4 trips" in texts and any("num_warps=2" in t for t in texts)
    )


def test_panels_flow_into_columns_in_order():
    assert drawing._columns([(400, 300)] * 3) == [[0], [1], [2]] or drawing._columns(
        [(400, 300)] * 3
    ) == [[0, 1], [2]]
    for sizes in ([(300, 200)], [(300, 900), (200, 100), (200, 100), (400, 800)], [(500, 100)] * 7):
        columns = drawing._columns(sizes)
        assert [n for column in columns for n in column] == list(range(len(sizes))) and all(columns)
    many = Drawn(picture.svg(many_kernels()))
    assert 0.4 < many.width / many.height < 3.5


def test_maps_in_the_paper_s_terms():
    maps = maps_of(ugraphs.rms_norm_linear().block_ops[0].block)
    assert [str(m) for m in maps.inputs] == [
        "imap {m→0, n→φ}, fmap {k→1}",
        "imap {m→φ, n→φ}, fmap {k→1}",
        "imap {m→φ, n→1}, fmap {k→0}",
    ]
    assert [str(m) for m in maps.outputs] == ["omap {m→0, n→1}"]
    assert (
        str(maps_of(ugraphs.softmax_rows().block_ops[0].block).outputs[0])
        == "omap {m→0}, fmap {j→1}"
    )


def test_the_number_of_a_part_cuts_the_dim_of_its_axis():
    maps = maps_of(split_attention().block_ops[0].block)
    assert [str(m) for m in maps.inputs] == [
        "imap {h→0, s→φ}, fmap {k→φ}",
        "imap {h→0, s→1}, fmap {k→1}",
        "imap {h→0, s→1}, fmap {k→1}",
    ]
    assert [str(m) for m in maps.outputs] == ["omap {h→1, s→0}"] * 3


def test_a_picture_stands_alone_and_in_a_page(tmp_path):
    path = ugraphs.qkv().visualize(tmp_path / "u.svg")
    assert path == tmp_path / "u.svg" and ET.parse(path).getroot().tag == f"{SVG}svg"
    text = path.read_text(encoding="utf-8")
    with pytest.raises(
        errors.GraphError, match=r"u.png ends in .png, and what is written is SVG; name it u.svg"
    ):
        ugraphs.qkv().visualize(tmp_path / "u.png")
    assert (
        "id=" not in text
        and "url(" not in text
        and all(line.startswith("  .ugraph ") for line in drawing._CSS.splitlines())
    )


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_has_contrast_on_every_box():
    """WCAG asks for 4.5 to 1, for normal and for small text.

    Borders differ from their fill by 1.6 to 1.
    """
    for fill, stroke, _ in drawing.STYLES.values():
        for text in ("#17202b", "#43515f"):
            assert (luminance(fill) + 0.05) / (luminance(text) + 0.05) > 4.5
        assert (luminance(fill) + 0.05) / (luminance(stroke) + 0.05) > 1.6


def test_layers_keep_distance_and_order():
    boxes = [layered.Box(k, 40, 20, n) for k, n in (("a", 0), ("b", 0), ("c", 1), ("d", 2))]
    placed = layered.place(boxes, [("a", "c"), ("b", "d"), ("c", "d")], {1: 10})
    assert abs(placed.centres["a"][0] - placed.centres["b"][0]) >= 40 + layered.GAP - 1e-9
    assert placed.layers[1][0] - placed.layers[0][1] == 44
    assert [y for _, y in placed.routes["b", "d"]] == [20, 20, 64, 84, 118, 118]  # passes layer 1
