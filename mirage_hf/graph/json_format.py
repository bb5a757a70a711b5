"""Graphs as JSON: versioned, stable, floats exact. Reading builds the graph through the ordinary builders, so nothing of a
file is trusted: what they refuse becomes a FormatError that names the file, the place in it, and the way out.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Padding,
    Role,
    Rotation,
    Stage,
)
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.graph.symbolic import Dim
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table

VERSION = 2
GRAPH, UGRAPH, BLOCK = "mirage_hf.graph", "mirage_hf.ugraph", "mirage_hf.block"
_LOADERS = {GRAPH: "load_graph", UGRAPH: "load_ugraph", BLOCK: "block_from_dict"}
Json = dict[str, Any]


# -- writing ----------------------------------------------------------------------------------------------------------


def graph_to_dict(graph: KernelGraph) -> Json:
    """Return a kernel graph as plain data: its nodes in the order they were made, and the names of its outputs."""
    # Version 2 renamed fields of block graphs. A graph without any is the same in both versions. It is
    # written as version 1, because the keys of kernel zoos are digests of it.
    version = VERSION if any(op.block is not None for op in graph.ops) else 1
    return {"format": GRAPH, "version": version, **_graph_body(graph)}


def ugraph_to_dict(ugraph: UGraph) -> Json:
    """Return a µGraph as plain data: the program and the kernels that compute it."""
    return {
        "format": UGRAPH,
        "version": VERSION,
        "program": _graph_body(ugraph.program),
        "kernels": _graph_body(ugraph.kernels),
    }


def block_to_dict(block: BlockGraph) -> Json:
    """Return a block graph as plain data."""
    return {"format": BLOCK, "version": VERSION, **_block_body(block)}


def _graph_body(graph: KernelGraph) -> Json:
    made = {t.index: _input(t) for t in graph.inputs}
    made |= {op.outputs[0].index: _node(op) for op in graph.ops}
    return {
        "nodes": [made[i] for i in sorted(made)],
        "outputs": [t.name for t in graph.outputs],
    }


def _input(t: DTensor) -> Json:
    return {"op": "input", **_tensor(t), "strides": list(t.strides)} | (
        {"constant": True} if t.constant else {}
    )


def _tensor(t: DTensor) -> Json:
    return {"name": t.name, "dtype": table.dtype_name(t.dtype), "dims": [*map(_size, t.dims)]}


def _size(d: int) -> Any:
    return {"dim": d.name, "max": int(d)} if isinstance(d, Dim) else d


def _node(op: KernelOp) -> Json:
    node: Json = {
        "op": op.name,
        "inputs": [x.name if isinstance(x, DTensor) else _value(x) for x in op.inputs],
    }
    if op.block is None:
        node["attrs"] = {k: _value(v) for k, v in op.attrs}
    else:
        node["block"] = _block_body(op.block)
    return node | {"outputs": [_tensor(t) for t in op.outputs]}


def _block_body(b: BlockGraph) -> Json:
    return {
        "axes": [
            {"name": a.name, "size": _size(a.size), "role": a.role.value}
            | ({"split_axis": a.split_axis} if a.split_axis else {})
            for a in b.axes
        ],
        "inputs": [
            {
                "name": i.name,
                "sources": list(i.sources),
                "axes": list(i.axes),
                "joined": i.joined,
                "sizes": list(i.sizes),
            }
            | ({"bounds": i.bounds} if i.bounds else {})
            | ({"rotation": _rotation(i.rotation)} if i.rotation else {})
            | (
                {
                    "padding": {
                        "axis": i.padding.axis,
                        "size": i.padding.size,
                        "value": i.padding.value,
                    }
                }
                if i.padding
                else {}
            )
            for i in b.inputs
        ],
        "stages": [
            {
                "loop": s.loop,
                "body": [_block_op(op) for op in s.body],
                "accumulators": [
                    {"out": a.out, "arg": a.arg, "kind": a.kind, "axes": list(a.axes)}
                    | ({"shift": a.shift} if a.shift else {})
                    for a in s.accumulators
                ],
            }
            for s in b.stages
        ],
        "outputs": [{"value": o.value, "axes": list(o.axes), "dtype": o.dtype} for o in b.outputs],
    }


def _rotation(rotation: Rotation) -> Json:
    width = {"width": rotation.width} if rotation.width else {}
    return {"axis": rotation.axis, "how": rotation.how} | width


def _block_op(op: BlockOp) -> Json:
    return {
        "out": op.out,
        "fn": op.fn,
        "args": [a if isinstance(a, str) else _value(a) for a in op.args],
        "axes": list(op.axes),
        "attrs": {k: _value(v) for k, v in op.attrs},
        "over": op.over,
    }


def _value(v: Any) -> Any:
    """A number, word, flag or tuple of integers; infinities, which JSON lacks, as {"number": "inf"}."""
    if isinstance(v, float) and math.isinf(v):
        return {"number": repr(v)}
    return list(v) if isinstance(v, tuple) else v


def digest(data: Json | list[Any]) -> str:
    """Return the SHA-256 of the data's canonical JSON: the same for any order of keys and on any machine."""
    text = json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def save_json(data: Json, path: str | Path | None = None) -> str:
    """Return `data` as readable JSON and, if `path` is given, write it there: at once or not at all. Errors: OSError."""
    text = _pretty(data) + "\n"
    if path is not None:
        path = Path(path)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder, name a file", str(path))
        try:
            handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
        except OSError as e:  # which names a file that nobody knows
            raise type(e)(e.errno, e.strerror, str(path)) from None
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                f.write(text)
            os.chmod(partial, 0o666 & ~_umask())
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    return text


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _pretty(value: Any, indent: str = "", key: str = "") -> str:
    """JSON with one line for whatever fits on one."""
    head = f"{json.dumps(key, ensure_ascii=False)}: " if key else ""
    line = head + json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(indent) + len(line) <= 120 or not isinstance(value, (dict, list)):
        return indent + line
    inner = indent + "  "
    items = (
        [_pretty(v, inner, k) for k, v in value.items()]
        if isinstance(value, dict)
        else [_pretty(v, inner) for v in value]
    )
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{indent}{head}{left}\n" + ",\n".join(items) + f"\n{indent}{right}"


# -- reading ----------------------------------------------------------------------------------------------------------


def load_graph(path: str | Path) -> KernelGraph:
    """Read a kernel graph written by `to_json`. Errors: FormatError; OSError when the file cannot be read."""
    return graph_from_dict(_read(path), str(path))


def load_ugraph(path: str | Path) -> UGraph:
    """Read a µGraph written by `to_json`. Errors: FormatError; OSError when the file cannot be read."""
    return ugraph_from_dict(_read(path), str(path))


def graph_from_dict(data: Any, source: str = "graph") -> KernelGraph:
    """Build a kernel graph from plain data; `source` names it in errors. Errors: FormatError."""
    return _read_graph(_header(data, GRAPH, source))


def ugraph_from_dict(data: Any, source: str = "µGraph") -> UGraph:
    """Build a µGraph from plain data. Errors: FormatError."""
    place = _header(data, UGRAPH, source)
    program, kernels = _read_graph(place.key("program")), _read_graph(place.key("kernels"))
    for what in ("inputs", "outputs"):
        ours, theirs = ([(t.dims, t.dtype) for t in getattr(g, what)] for g in (program, kernels))
        if ours != theirs:
            raise place.error(f"program and kernels differ in their {what}")
    if [(t.strides, t.constant) for t in program.inputs] != [
        (t.strides, t.constant) for t in kernels.inputs
    ]:
        raise place.error(
            "program and kernels differ in the strides of their inputs, or in which are constant"
        )
    return UGraph(program, kernels)


def block_from_dict(data: Any, source: str = "block graph") -> BlockGraph:
    """Build a block graph from plain data. Errors: FormatError."""
    return _read_block(_header(data, BLOCK, source))


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "object": ("an object", lambda v: isinstance(v, dict)),
    "list": ("a list", lambda v: isinstance(v, list)),
    "text": ("a string", lambda v: isinstance(v, str)),
    "text?": ("a string or null", lambda v: v is None or isinstance(v, str)),
    "int": (
        "an integer below 2^63",
        lambda v: isinstance(v, int) and not isinstance(v, bool) and abs(v) < 1 << 63,
    ),
    "size": (
        "an integer below 2^63 or a dim",
        lambda v: isinstance(v, dict) or _KINDS["int"][1](v),
    ),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "number": (
        "a number",
        lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v),
    ),
    "scalar": (
        "a number, a string or a flag",
        lambda v: isinstance(v, (int, float, str)) and v == v,
    ),
}


@dataclass(frozen=True)
class _Place:
    """A value inside a file, with the path that leads to it."""

    source: str
    path: str
    value: Any

    def error(self, what: str) -> errors.FormatError:
        where = f" at {self.path}" if self.path else ""
        return errors.FormatError(
            f"{self.source}{where}: {what}; the file is damaged or was edited: write it again with to_json()"
        )

    def expect(self, kind: str) -> Any:
        wants, holds = _KINDS[kind]
        try:
            good = holds(self.value)
        except OverflowError:  # an integer beyond float64
            good = False
        if not good:
            raise self.error(f"expected {wants}, found {json.dumps(self.value, default=str)[:60]}")
        return self.value

    def key(self, name: str, kind: str = "object") -> _Place:
        if name not in self.expect("object"):
            raise self.error(f"{name!r} is missing")
        inside = _Place(self.source, f"{self.path}.{name}" if self.path else name, self.value[name])
        inside.expect(kind)
        return inside

    def get(self, name: str, kind: str) -> Any:
        return self.key(name, kind).value

    def each(self, kind: str) -> list[_Place]:
        inside = [
            _Place(self.source, f"{self.path}[{i}]", v) for i, v in enumerate(self.expect("list"))
        ]
        for place in inside:
            place.expect(kind)
        return inside

    def all(self, name: str, kind: str) -> tuple[Any, ...]:
        return tuple(place.value for place in self.key(name, "list").each(kind))

    def build(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a builder; what it refuses is an error of this place."""
        try:
            return make(*args, **kwargs)
        except errors.GraphError as e:
            raise self.error(str(e)) from e


def _read(path: str | Path) -> Any:
    raw = Path(path).read_bytes()
    try:
        return json.loads(raw)
    except (
        ValueError,
        RecursionError,
    ) as e:  # bad UTF-8, bad JSON, a number of absurd length, or absurd nesting
        detail = "too deeply nested" if isinstance(e, RecursionError) else str(e)
        raise errors.FormatError(
            f"{path}: not JSON ({detail}); the file is damaged: write it again with to_json()"
        ) from None


def _header(data: Any, kind: str, source: str) -> _Place:
    place = _Place(source, "", data)
    if "format" not in place.expect("object"):
        raise errors.FormatError(
            f"{source}: is no {kind}, it names no format; give a file written by to_json()"
        )
    found, version = place.get("format", "text"), place.get("version", "int")
    if found in _LOADERS and found != kind:
        raise errors.FormatError(
            f"{source}: holds {found}, not {kind}; read it with {_LOADERS[found]}"
        )
    if found != kind:
        raise errors.FormatError(
            f"{source}: format is {found[:60]!r}, not {kind}; give a file written by to_json()"
        )
    if version > VERSION:
        raise errors.FormatError(
            f"{source}: version {version} is newer than this package knows ({VERSION}); update mirage_hf"
        )
    if version < 1:
        raise place.error(f"version {version} does not exist")
    return place


def _read_graph(place: _Place) -> KernelGraph:
    graph = KernelGraph()
    tensors: dict[str, DTensor] = {}
    for node in place.key("nodes", "list").each("object"):
        for t in _read_node(graph, tensors, node):
            tensors[t.name] = t
    for out in place.key("outputs", "list").each("text"):
        graph.mark_output(_named(tensors, out))
    return graph


def _named(tensors: Mapping[str, DTensor], place: _Place) -> DTensor:
    if place.value not in tensors:
        raise place.error(f"no tensor {place.value[:60]!r} comes before")
    return tensors[place.value]


def _read_node(graph: KernelGraph, tensors: Mapping[str, DTensor], node: _Place) -> list[DTensor]:
    op = node.get("op", "text")
    if op == "input":
        dims, strides = (
            tuple(_dim(d) for d in _items(node.key("dims", "list"))),
            node.all("strides", "int"),
        )
        constant = "constant" in node.value and node.get("constant", "flag")
        return [
            node.build(
                graph.new_input,
                dims,
                node.get("dtype", "text"),
                strides,
                node.get("name", "text"),
                constant=constant,
            )
        ]
    operands = [
        _named(tensors, x) if isinstance(x.value, str) else _number(x)
        for x in _items(node.key("inputs", "list"))
    ]
    wanted = node.key("outputs", "list").each("object")
    names = [w.get("name", "text") for w in wanted]
    if op == CUSTOMIZED:
        made = node.build(graph.customized, operands, _read_block(node.key("block")), names)
    else:
        attrs = {k: _attr(v) for k, v in _entries(node.key("attrs"))}
        made = [node.build(graph.apply, op, operands, attrs, names[0] if names else None)]
    if [_tensor(t) for t in made] != [w.value for w in wanted]:
        raise node.error(f"{op} gives {[_tensor(t) for t in made]}, the file says otherwise")
    return made


def _dim(place: _Place) -> int:
    if isinstance(place.value, dict):
        return place.build(Dim, place.get("dim", "text"), place.get("max", "int"))  # type: ignore[no-any-return]
    return place.expect("int")  # type: ignore[no-any-return]


def _items(place: _Place) -> list[_Place]:
    return [_Place(place.source, f"{place.path}[{i}]", v) for i, v in enumerate(place.value)]


def _entries(place: _Place) -> list[tuple[str, _Place]]:
    return [(k, _Place(place.source, f"{place.path}.{k}", v)) for k, v in place.value.items()]


def _number(place: _Place) -> float:
    if isinstance(place.value, dict):
        text = place.get("number", "text")
        if text not in ("inf", "-inf"):
            raise place.error(f"{text[:60]!r} is not inf or -inf")
        return float(text)
    return float(place.expect("number"))


def _attr(place: _Place) -> Any:
    if isinstance(place.value, list):
        return tuple(p.value for p in place.each("int"))
    return _number(place) if isinstance(place.value, dict) else place.expect("scalar")


def _read_rotation(place: _Place) -> Rotation | None:
    if "turn" in place.value:  # version 1
        words = place.all("turn", "text")
        if len(words) != 2:
            raise place.error(f"turn names an axis and how, it is {words}")
        width = place.get("turned", "int") if "turned" in place.value else None
        return place.build(Rotation, *words, width)
    if "rotation" not in place.value:
        return None
    rotation = place.key("rotation", "object")
    width = rotation.get("width", "int") if "width" in rotation.value else None
    return rotation.build(
        Rotation, rotation.get("axis", "text"), rotation.get("how", "text"), width
    )


def _read_padding(place: _Place) -> Padding | None:
    if "padding" not in place.value:
        return None
    padding = place.key("padding", "object")
    return Padding(
        padding.get("axis", "text"),
        padding.get("size", "int"),
        float(padding.get("value", "number")),
    )


def _read_block(place: _Place) -> BlockGraph:
    roles = {r.value: r for r in Role}
    axes = []
    for a in place.key("axes", "list").each("object"):
        if a.get("role", "text") not in roles:
            raise a.error(f"role {a.value['role'][:60]!r} is none of {', '.join(roles)}")
        split_field = "parts" if "parts" in a.value else "split_axis"  # "parts" in version 1
        split_axis = a.get(split_field, "text") if split_field in a.value else None
        axes.append(
            Axis(
                a.get("name", "text"),
                _dim(a.key("size", "size")),
                roles[a.value["role"]],
                split_axis,
            )
        )
    inputs = [
        i.build(
            BlockInput,
            i.get("name", "text"),
            i.all("sources", "int"),
            i.all("axes", "text?"),
            i.get("joined", "text?"),
            i.all("sizes", "int"),
            i.get("bounds", "text") if "bounds" in i.value else None,
            _read_rotation(i),
            _read_padding(i),
        )
        for i in place.key("inputs", "list").each("object")
    ]
    stages = [
        Stage(
            s.get("loop", "text?"),
            tuple(_read_block_op(op) for op in s.key("body", "list").each("object")),
            tuple(
                Accumulator(
                    a.get("out", "text"),
                    a.get("arg", "text"),
                    a.get("kind", "text"),
                    a.all("axes", "text"),
                    a.get("shift", "text") if "shift" in a.value else None,
                )
                for a in s.key("accumulators", "list").each("object")
            ),
        )
        for s in place.key("stages", "list").each("object")
    ]
    outputs = [
        BlockOutput(o.get("value", "text"), o.all("axes", "text?"), o.get("dtype", "text"))
        for o in place.key("outputs", "list").each("object")
    ]
    return place.build(BlockGraph, tuple(axes), tuple(inputs), tuple(stages), tuple(outputs))


def _read_block_op(op: _Place) -> BlockOp:
    args = tuple(
        a.value if isinstance(a.value, str) else _number(a) for a in _items(op.key("args", "list"))
    )
    attrs = tuple(sorted((k, _attr(v)) for k, v in _entries(op.key("attrs"))))
    return BlockOp(
        op.get("out", "text"),
        op.get("fn", "text"),
        args,
        op.all("axes", "text"),
        attrs,
        op.get("over", "text?"),
    )
