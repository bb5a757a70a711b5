"""Pictures: valid SVG, every tensor and map in it, boxes that do not overlap."""
import itertools
import xml.etree.ElementTree as ET

import programs
import pytest
import ugraphs

import mirage_hf as mi
from mirage_hf.graph import layered, picture
from mirage_hf.graph.maps import maps_of
from mirage_hf.graph.ugraph import UGraph, library_ugraph

SVG = "{http://www.w3.org/2000/svg}"
BOXES = {"tensor", "block", "library", "view", "load", "thread", "sum", "product"}


def pictured(name: str) -> UGraph:
    return ugraphs.ALL[name]() if name in ugraphs.ALL else library_ugraph(programs.build(mi, name, small=False))


@pytest.mark.parametrize("name", [*ugraphs.ALL, *programs.PROGRAMS])
def test_boxes_do_not_overlap_and_hold_their_text(name):
    root = ET.fromstring(picture.svg(pictured(name)))
    for group in root.findall(f"{SVG}g")[:-1]:  # the last is the legend
        boxes = [tuple(float(r.get(k)) for k in ("x", "y", "width", "height"))
                 for r in group.findall(f"{SVG}rect") if r.get("class") in BOXES]
        panel = next(r for r in group.findall(f"{SVG}rect") if r.get("class") == "panel")
        for x, y, w, h in boxes:
            assert x >= 0 and y >= 0 and x + w <= float(panel.get("width")) and y + h <= float(panel.get("height"))
        for (x, y, w, h), (x2, y2, w2, h2) in itertools.combinations(boxes, 2):
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y
        for text in group.findall(f"{SVG}text"):
            if text.get("class") in ("plain", "bold"):
                middle, wide = float(text.get("x")), picture.CHAR * len(text.text)
                assert any(x <= middle - wide / 2 and middle + wide / 2 <= x + w for x, _, w, _ in boxes), text.text


@pytest.mark.parametrize("name", ugraphs.ALL)
def test_tensors_values_and_maps_are_shown(name):
    u = pictured(name)
    shown = " ".join(ET.fromstring(picture.svg(u)).itertext())
    for t in u.kernels.inputs:
        assert t.name in shown and str(t.dims) in shown
    for op in u.block_ops:
        hidden = {c.product for c in op.block.contractions.values()}
        for value in op.block.carried:
            assert value in hidden or value in shown
        for m in (*maps_of(op.block).inputs, *maps_of(op.block).outputs):
            assert all(f"{axis}→{'φ' if dim is None else dim}" in shown for axis, dim in m.grid + m.loop)


def test_maps_in_the_paper_s_terms():
    maps = maps_of(ugraphs.rms_norm_linear().block_ops[0].block)
    assert [str(m) for m in maps.inputs] == ["imap {m→0, n→φ}, fmap {k→1}", "imap {m→φ, n→φ}, fmap {k→1}", "imap {m→φ, n→1}, fmap {k→0}"]
    assert [str(m) for m in maps.outputs] == ["omap {m→0, n→1}"]
    assert str(maps_of(ugraphs.softmax_rows().block_ops[0].block).outputs[0]) == "omap {m→0}, fmap {j→1}"


def test_text_is_escaped_and_the_file_written(tmp_path):
    path = ugraphs.qkv().visualize(tmp_path / "u.svg")
    assert path == tmp_path / "u.svg" and ET.parse(path).getroot().tag == f"{SVG}svg"


def test_layers_keep_distance_and_order():
    boxes = [layered.Box(k, 40, 20, n) for k, n in (("a", 0), ("b", 0), ("c", 1), ("d", 2))]
    placed = layered.place(boxes, [("a", "c"), ("b", "d"), ("c", "d")], {1: 10})
    assert abs(placed.centres["a"][0] - placed.centres["b"][0]) >= 40 + layered.GAP - 1e-9
    assert placed.layers[1][0] - placed.layers[0][1] == 44
    assert len(placed.routes["b", "d"]) == 4  # passes layer 1
