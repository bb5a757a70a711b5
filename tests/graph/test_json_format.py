"""The JSON format as its docstring describes it, and files of version 1."""

from __future__ import annotations

import json
import re

import pytest

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.graph import json_format
from tests.helpers import multi_kernel_ugraphs, ugraphs


def described_program() -> dict[str, object]:
    """Return the program in the docstring of json_format."""
    (text,) = re.findall(r"```json\n(.*?)```", json_format.__doc__ or "", re.DOTALL)
    return json.loads(text)  # type: ignore[no-any-return]


def test_the_described_program_is_read_and_written_as_it_stands() -> None:
    data = described_program()
    g = mi.new_graph()
    x = g.new_input((16, 4096), name="x")
    w = g.new_input((4096, 1024), strides=(1, 4096), name="w", constant=True)
    y = g.apply("matmul", [x, w], {}, "y")
    g.mark_output(g.apply("relu", [y], {}, "z"))
    read = json_format.graph_from_dict(data)
    assert read == g
    assert json_format.graph_to_dict(read) == data


def test_every_field_that_is_written_is_described() -> None:
    text = json_format.__doc__ or ""

    def fields(value: object) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(fields, value))
        if not isinstance(value, dict):
            return set()
        return {str(name) for name in value} | set().union(*map(fields, value.values()))

    written = set()
    for make in ugraphs.ALL.values():
        data = json_format.ugraph_to_dict(make())
        for graph in (data["program"], data["kernels"]):
            for node in graph["nodes"]:
                node["attrs"] = {}
                for stage in node.get("block", {}).get("stages", []):
                    for op in stage["body"]:
                        op["attrs"] = {}
        written |= fields(data)
    missing = [name for name in written if f"`{name}`" not in text and f'"{name}"' not in text]
    assert not missing


def in_version_1(data: dict[str, object]) -> dict[str, object]:
    """Return a µGraph's data with the field names of version 1."""

    def renamed(value: object) -> object:
        if isinstance(value, list):
            return [renamed(v) for v in value]
        if not isinstance(value, dict):
            return value
        value = {name: renamed(v) for name, v in value.items()}
        if "split_axis" in value:
            value["parts"] = value.pop("split_axis")
        if rotation := value.pop("rotation", None):
            value["turn"] = [rotation["axis"], rotation["how"]]
            if "width" in rotation:
                value["turned"] = rotation["width"]
        return value

    old = renamed(data)
    assert isinstance(old, dict)
    return old | {"version": 1}


def test_version_1_is_read() -> None:
    for ugraph, field in ((multi_kernel_ugraphs.split_k(), '"parts"'), (rope(), '"turn"')):
        old = in_version_1(json_format.ugraph_to_dict(ugraph))
        assert field in json.dumps(old)
        assert json_format.ugraph_from_dict(old) == ugraph


def rope() -> mi.UGraph:
    """Return a µGraph with rotated inputs."""
    g = mi.new_graph()
    x, cos, sin = (g.new_input((8, 16), name=name) for name in ("x", "cos", "sin"))
    g.mark_output(g.rope(x, cos, sin))
    found: list[mi.UGraph] = [u for u in g.superoptimize() if u.is_fused]
    return found[0]


def test_a_damaged_turn_of_version_1_says_where() -> None:
    data = in_version_1(json_format.ugraph_to_dict(rope()))
    text = json.dumps(data).replace('"turn": ["', '"turn": ["spare", "', 1)
    with pytest.raises(errors.FormatError, match=r"at kernels\.nodes.*turn names an axis and how"):
        json_format.ugraph_from_dict(json.loads(text))
