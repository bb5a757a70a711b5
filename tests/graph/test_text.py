"""Graphs as text and JSON: they come back equal, and damaged files are refused."""

import contextlib
import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.graph import json_format, text
from mirage_hf.graph.block import Axis, BlockGraph, BlockInput, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.kernel import KernelGraph
from tests.helpers import programs, ugraphs

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_round_trip(name):
    g = programs.build(mi, name, small=False)
    assert (
        text.parse_graph(str(g)) == g and json_format.graph_from_dict(json.loads(g.to_json())) == g
    )


@pytest.mark.parametrize("name", ugraphs.ALL)
def test_ugraphs_round_trip(name, tmp_path):
    u = ugraphs.ALL[name]()
    assert text.parse_graph(str(u)) == u.kernels
    assert u.to_json(tmp_path / "u.json") == (tmp_path / "u.json").read_text(encoding="utf-8")
    assert json_format.load_ugraph(tmp_path / "u.json") == u
    for op in u.block_ops:
        assert json_format.block_from_dict(json_format.block_to_dict(op.block)) == op.block
    assert list(tmp_path.iterdir()) == [tmp_path / "u.json"]


def everything() -> KernelGraph:
    """Return a graph with names, strides, dtypes, numbers, and attributes that are easy to lose."""
    g = KernelGraph()
    x = g.new_input((4, 6), "bfloat16", strides=(1, 4), name="größe", constant=True)
    y = g.clamp(g.add(x, 0.1 + 0.2), min=-math.inf, max=1e-45)
    late = g.new_input((6,), "float32", name="late")
    g.pow(math.inf, g.cast(y, "float32"))
    g.mark_output(
        g.reshape(g.permute(g.slice(g.concat([y, y], 1), 1, 2, 8), (1, 0)), (2, 12)), late, y
    )
    return g


def test_everything_round_trips():
    g = everything()
    back = text.parse_graph(str(g)), json_format.graph_from_dict(json.loads(g.to_json()))
    for other in back:
        assert (
            other == g
            and [t.name for t in other.inputs] == ["größe", "late"]
            and other.outputs == g.outputs
        )
        assert str(other) == str(g)


def test_block_graph_numbers_and_attributes_round_trip():
    block = BlockGraph(
        (Axis("m", 3, Role.GRID), Axis("n", 5, Role.TILE)),
        (BlockInput("x", (0,), ("m", "n")),),
        (
            Stage(
                None,
                (
                    BlockOp("a", "clamp", ("x",), ("m", "n"), (("max", math.inf), ("min", -1.5))),
                    BlockOp("b", "max", ("a",), ("m",), (), "n"),
                    BlockOp("c", "cast", ("b",), ("m",), (("dtype", "float16"),)),
                    BlockOp("d", "lookup", ("c",), ("m",), (("values", (0.5, -1e-9, 2.0)),)),
                    BlockOp("o", "min", ("d", math.inf), ("m",)),
                ),
            ),
        ),
        (BlockOutput("o", ("m", None), "float16"),),
    )
    g = KernelGraph()
    g.customized([g.new_input((3, 5))], block)
    assert text.parse_graph(str(g)) == g == json_format.graph_from_dict(json.loads(g.to_json()))


@st.composite
def graphs(draw) -> KernelGraph:
    """Return random programs.

    Every step applies a random op to random earlier tensors, and is dropped if shapes do not fit.
    """
    g = KernelGraph()
    size = st.sampled_from((1, 2, 3, 4, 8))
    tensors = [
        g.new_input(
            draw(st.lists(size, min_size=1, max_size=3)),
            draw(st.sampled_from(("float16", "float32"))),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    for _ in range(draw(st.integers(0, 8))):
        a, b = (
            draw(st.sampled_from(tensors)),
            draw(st.sampled_from(tensors) | st.floats(allow_nan=False)),
        )
        steps = (
            lambda a, b: g.add(a, b),
            lambda a, b: g.matmul(a, b),
            lambda a, b: g.silu(a),
            lambda a, b: g.reduction(a, -1, "mean"),
            lambda a, b: g.softmax(a),
            lambda a, b: g.concat([a, b], 0),
            lambda a, b: g.reshape(a, (math.prod(a.dims),)),
            lambda a, b: g.permute(a, tuple(reversed(range(len(a.dims))))),
            lambda a, b: g.rms_norm(a, eps=1e-3),
            lambda a, b: g.cast(a, "float16"),
            lambda a, b: g.clamp(a, max=b),
            lambda a, b: g.new_input(a.dims, a.dtype),
        )
        try:
            tensors.append(draw(st.sampled_from(steps))(a, b))
        except errors.GraphError:
            continue
    g.mark_output(*draw(st.lists(st.sampled_from(tensors), max_size=2)))
    return g


@QUICK
@given(graphs())
def test_random_graphs_round_trip(g):
    assert text.parse_graph(str(g)) == g
    assert json_format.graph_from_dict(json.loads(g.to_json())) == g


def test_digest_is_of_content():
    d = json_format.graph_to_dict(everything())
    again = json_format.graph_to_dict(everything())
    assert (
        json_format.digest(d)
        == json_format.digest(dict(reversed(d.items())))
        == json_format.digest(again)
    )
    assert json_format.digest(d) != json_format.digest(d | {"outputs": ["late"]})
    assert len(json_format.digest(d)) == 64


# -- damaged files --------------------------------------------------------------------------------


def _ugraph_dict():
    return json_format.ugraph_to_dict(ugraphs.lora())


WRONG_FILES = [
    (
        lambda d: d | {"version": 3},
        "version 3 is newer than this package knows (2); update mirage_hf",
    ),
    (lambda d: d | {"version": 0}, "version 0 does not exist"),
    (
        lambda d: d | {"format": "mirage_hf.graph"},
        "holds mirage_hf.graph, not mirage_hf.ugraph; read it with load_graph",
    ),
    (
        lambda d: d | {"format": "onnx"},
        "format is 'onnx', not mirage_hf.ugraph; give a file written by to_json()",
    ),
    (lambda d: {}, "is no mirage_hf.ugraph, it names no format"),
    (lambda d: [], "expected an object, found []"),
    (
        lambda d: d | {"kernels": d["program"] | {"outputs": ["t5"]}},
        "program and kernels differ in their outputs",
    ),
    (
        lambda d: d | {"program": {"nodes": [{"op": "input"}], "outputs": []}},
        "at program.nodes[0]: 'dims' is missing",
    ),
    (
        lambda d: d | {"program": d["program"] | {"outputs": ["zz"]}},
        "at program.outputs[0]: no tensor 'zz' comes before",
    ),
]


@pytest.mark.parametrize("change, message", WRONG_FILES)
def test_wrong_files_are_refused_with_place_and_way_out(change, message, tmp_path):
    path = tmp_path / "u.json"
    json_format.save_json(change(_ugraph_dict()), path)
    with pytest.raises(errors.FormatError) as e:
        json_format.load_ugraph(path)
    assert str(e.value).startswith(str(path)) and message in str(e.value)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"1" * 5000, b"\x80\x04K\x01."],
    ids=range(6),
)
def test_files_that_are_not_json(raw, tmp_path):
    (tmp_path / "g.json").write_bytes(raw)
    with pytest.raises(errors.FormatError, match=r"g\.json: (not JSON|expected an object)"):
        json_format.load_graph(tmp_path / "g.json")


def _paths(value, path=()):
    yield path
    for k, v in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from _paths(v, (*path, k))


JUNK = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        7,
        1 << 70,
        0.5,
        math.inf,
        "",
        "m",
        "k",
        "x",
        "t4",
        "inf",
        "float16",
        "matmul",
        "customized",
        "sum",
        [],
        [1],
        ["m"],
        [None],
        {},
        {"number": "inf"},
        {"number": "nan"},
        {"number": 3},
    ]
)


@settings(QUICK, max_examples=400)
@given(st.data())
def test_mutated_json_gives_a_graph_or_a_format_error(data):
    d = copy.deepcopy(
        _ugraph_dict() if data.draw(st.booleans()) else json_format.ugraph_to_dict(ugraphs.qkv())
    )
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([p for p in _paths(d) if p]))
        parent = d
        for k in path[:-1]:
            parent = parent[k]
        match data.draw(st.sampled_from(("replace", "delete", "repeat"))):
            case "delete":
                del parent[path[-1]]
            case "repeat" if isinstance(parent, list):
                parent.insert(path[-1], parent[path[-1]])
            case _:
                parent[path[-1]] = data.draw(JUNK)
    try:
        u = json_format.ugraph_from_dict(d)
    except errors.FormatError:
        return
    assert json_format.ugraph_from_dict(json_format.ugraph_to_dict(u)) == u


@settings(QUICK, max_examples=300)
@given(st.data())
def test_mutated_text_gives_a_graph_or_a_format_error(data):
    source = data.draw(
        st.sampled_from([str(ugraphs.lora()), str(ugraphs.qkv()), str(everything())])
    )
    at = data.draw(st.integers(0, len(source) - 1))
    junk = data.draw(st.sampled_from([*" \n%(){}[],=:#-1é\0", "", "9" * 30, "1e999", "inf"]))
    source = source[:at] + junk + source[at + data.draw(st.integers(0, 3)) :]
    try:
        g = text.parse_graph(source)
    except errors.FormatError as e:
        assert "line" in str(e)
        return
    assert text.parse_graph(str(g)) == g


@settings(QUICK, max_examples=100)
@given(st.binary(max_size=3), st.integers(0, 10_000), st.integers(0, 3))
def test_mutated_bytes_give_a_graph_or_a_format_error(tmp_path_factory, junk, at, drop):
    raw = json_format.save_json(_ugraph_dict()).encode()
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_bytes(raw[: at % len(raw)] + junk + raw[at % len(raw) + drop :])
    with contextlib.suppress(errors.FormatError):
        json_format.load_ugraph(path)


WRONG_TEXT = [
    (
        "%x = input float16 (2, 3)\n%y = silo(%x)\nreturn %y",
        "line 2: unknown op 'silo' (did you mean silu?)",
    ),
    ("%x = input float16 (2, 3)\nreturn %y", "line 2: no tensor %y comes before"),
    (
        "%x = input float16 (2, 3)\n%y = exp(%x) : float16 (3, 2)\nreturn %y",
        "line 2: exp gives float16 (2, 3), not what is written after ':'",
    ),
    ("x = input float16 (2, 3)\nreturn", "line 1: expected a %name, found 'x'"),
    ("%x, %y = input float16 (2, 3)\nreturn", "2 names for one tensor"),
]


@pytest.mark.parametrize("source, message", WRONG_TEXT)
def test_wrong_text_is_refused_with_its_line(source, message):
    with pytest.raises(errors.FormatError) as e:
        text.parse_graph(source, "my.txt")
    assert message in str(e.value) and str(e.value).startswith("my.txt, line")


def test_text_may_leave_types_out_and_name_tensors():
    g = text.parse_graph("%x = input float16 (2, 3)  # a comment\n%h = exp(%x)\nreturn %h")
    assert g.outputs[0].name == "h" and g.outputs[0].dims == (2, 3)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    g = programs.rms_norm_linear(mi, 2, 32, 16)
    with pytest.raises(FileNotFoundError, match=r"none/g\.json'$"):
        g.to_json(tmp_path / "none" / "g.json")
    with pytest.raises(IsADirectoryError, match="it is a folder, name a file"):
        g.to_json(tmp_path)
    assert not list(tmp_path.iterdir())
