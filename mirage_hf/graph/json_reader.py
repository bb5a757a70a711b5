"""Build graphs from plain data of JSON. `graph/json_format.py` describes the format.

Nothing in a file is trusted: graphs are built through the ordinary builders. If a builder rejects
the data, a FormatError names the file, the place in it, and what to do.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
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
    Taken,
)
from mirage_hf.graph.dim import Dim
from mirage_hf.graph.json_writer import BLOCK, GRAPH, UGRAPH, VERSION, tensor_to_dict
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph

#: The most bytes of a file. Weights are not part of a graph, so real files are far smaller.
_MOST_BYTES = 1 << 28

_LOADERS = {GRAPH: "load_graph", UGRAPH: "load_ugraph", BLOCK: "block_from_dict"}


def load_graph(path: str | Path) -> KernelGraph:
    """Read a kernel graph from a file that `to_json` wrote.

    Raises:
        FormatError: If the file is damaged, of another kind or of a newer version.
        OSError: If the file cannot be read.
    """
    return graph_from_dict(_read(path), str(path))


def load_ugraph(path: str | Path) -> UGraph:
    """Read a µGraph from a file that `to_json` wrote.

    Raises:
        FormatError: If the file is damaged, of another kind or of a newer version.
        OSError: If the file cannot be read.
    """
    return ugraph_from_dict(_read(path), str(path))


def graph_from_dict(data: Any, source: str = "graph") -> KernelGraph:
    """Build a kernel graph from plain data. `source` names the data in error messages.

    Raises:
        FormatError: If the data is not a kernel graph.
    """
    with _damage_is_an_error(source):
        return _read_graph(_header(data, GRAPH, source))


def ugraph_from_dict(data: Any, source: str = "µGraph") -> UGraph:
    """Build a µGraph from plain data. `source` names the data in error messages.

    Raises:
        FormatError: If the data is not a µGraph.
    """
    with _damage_is_an_error(source):
        return _read_ugraph(_header(data, UGRAPH, source))


def block_from_dict(data: Any, source: str = "block graph") -> BlockGraph:
    """Build a block graph from plain data. `source` names the data in error messages.

    Raises:
        FormatError: If the data is not a block graph.
    """
    with _damage_is_an_error(source):
        return _read_block(_header(data, BLOCK, source))


@contextlib.contextmanager
def _damage_is_an_error(source: str) -> Iterator[None]:
    """Turn what edited data leads to in builders into a FormatError."""
    try:
        yield
    except errors.MirageError:
        raise
    except Exception as e:
        raise errors.FormatError(
            f"{source}: is damaged or was edited ({errors.described(e)[:200]}); "
            "write it again with to_json()"
        ) from e


# -- places in a file ------------------------------------------------------------------------------


def _is_int(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and abs(v) < 1 << 63


def _is_number(v: Any) -> bool:
    return isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)


#: Kinds of values: their names in messages, and a test for each.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "object": ("an object", lambda v: isinstance(v, dict)),
    "list": ("a list", lambda v: isinstance(v, list)),
    "text": ("a string", lambda v: isinstance(v, str)),
    "text?": ("a string or null", lambda v: v is None or isinstance(v, str)),
    "int": ("an integer below 2^63", _is_int),
    "size": ("an integer below 2^63 or a dim", lambda v: isinstance(v, dict) or _is_int(v)),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "number": ("a number", _is_number),
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
            f"{self.source}{where}: {what}; "
            "the file is damaged or was edited: write it again with to_json()"
        )

    def expect(self, kind: str) -> Any:
        """Return the value, which must be of a kind."""
        wants, holds = _KINDS[kind]
        try:
            good = holds(self.value)
        except OverflowError:  # an integer beyond float64
            good = False
        if not good:
            raise self.error(f"expected {wants}, found {json.dumps(self.value, default=str)[:60]}")
        return self.value

    def has(self, name: str) -> bool:
        """Return whether the object has a key."""
        return name in self.value

    def key(self, name: str, kind: str = "object") -> _Place:
        """Return the place of a key's value, which must be of a kind."""
        if name not in self.expect("object"):
            raise self.error(f"{name!r} is missing")
        inside = _Place(self.source, f"{self.path}.{name}" if self.path else name, self.value[name])
        inside.expect(kind)
        return inside

    def get(self, name: str, kind: str) -> Any:
        """Return the value of a key, which must be of a kind."""
        return self.key(name, kind).value

    def optional(self, name: str, kind: str) -> Any:
        """Return the value of a key, None if it is missing."""
        return self.get(name, kind) if self.has(name) else None

    def items(self) -> list[_Place]:
        """Return the places in a list."""
        return [
            _Place(self.source, f"{self.path}[{i}]", v) for i, v in enumerate(self.expect("list"))
        ]

    def entries(self) -> list[tuple[str, _Place]]:
        """Return the names and places in an object."""
        return [
            (name, _Place(self.source, f"{self.path}.{name}", v)) for name, v in self.value.items()
        ]

    def each(self, name: str, kind: str) -> list[_Place]:
        """Return the places in the list of a key, which must all be of a kind."""
        places = self.key(name, "list").items()
        for place in places:
            place.expect(kind)
        return places

    def all(self, name: str, kind: str) -> tuple[Any, ...]:
        """Return the values in the list of a key, which must all be of a kind."""
        return tuple(place.value for place in self.each(name, kind))

    def build(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a builder. If it rejects its arguments, raise the error at this place."""
        try:
            return make(*args, **kwargs)
        except errors.GraphError as e:
            raise self.error(str(e)) from e


def _read(path: str | Path) -> Any:
    with Path(path).open("rb") as f:
        raw = f.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise errors.FormatError(
            f"{path}: has more than {_MOST_BYTES:,} bytes, so it is no graph; "
            "give a file written by to_json()"
        )
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as e:
        # bad UTF-8, bad JSON, a number of absurd length, or absurd nesting
        detail = "too deeply nested" if isinstance(e, RecursionError) else str(e)
        raise errors.FormatError(
            f"{path}: not JSON ({detail}); the file is damaged: write it again with to_json()"
        ) from None


def _header(data: Any, kind: str, source: str) -> _Place:
    """Return the place of the whole data after checking its format and version."""
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
            f"{source}: version {version} is newer than this package knows ({VERSION}); "
            "update mirage_hf"
        )
    if version < 1:
        raise place.error(f"version {version} does not exist")
    return place


# -- kernel graphs ---------------------------------------------------------------------------------


def _read_graph(place: _Place) -> KernelGraph:
    graph = KernelGraph()
    tensors: dict[str, DTensor] = {}
    for node in place.each("nodes", "object"):
        for t in _read_node(graph, tensors, node):
            tensors[t.name] = t
    for out in place.each("outputs", "text"):
        graph.mark_output(_tensor(tensors, out))
    return graph


def _read_ugraph(place: _Place) -> UGraph:
    program, kernels = _read_graph(place.key("program")), _read_graph(place.key("kernels"))
    for what in ("inputs", "outputs"):
        ours, theirs = ([(t.dims, t.dtype) for t in getattr(g, what)] for g in (program, kernels))
        if ours != theirs:
            raise place.error(f"program and kernels differ in their {what}")
    ours, theirs = ([(t.strides, t.constant) for t in g.inputs] for g in (program, kernels))
    if ours != theirs:
        raise place.error(
            "program and kernels differ in the strides of their inputs, or in which are constant"
        )
    return UGraph(program, kernels)


def _tensor(tensors: Mapping[str, DTensor], place: _Place) -> DTensor:
    if place.value not in tensors:
        raise place.error(f"no tensor {place.value[:60]!r} comes before")
    return tensors[place.value]


def _read_node(graph: KernelGraph, tensors: Mapping[str, DTensor], node: _Place) -> list[DTensor]:
    op = node.get("op", "text")
    if op == "input":
        return [_read_input(graph, node)]
    operands = [
        _tensor(tensors, x) if isinstance(x.value, str) else _number(x)
        for x in node.key("inputs", "list").items()
    ]
    wanted = node.each("outputs", "object")
    names = [w.get("name", "text") for w in wanted]
    if op == CUSTOMIZED:
        made = node.build(graph.customized, operands, _read_block(node.key("block")), names)
    else:
        attrs = {name: _attr(v) for name, v in node.key("attrs").entries()}
        made = [node.build(graph.apply, op, operands, attrs, names[0] if names else None)]
    types = [tensor_to_dict(t) for t in made]
    if types != [w.value for w in wanted]:
        raise node.error(f"{op} gives {types}, the file says otherwise")
    return made


def _read_input(graph: KernelGraph, node: _Place) -> DTensor:
    dims = tuple(_dim(d) for d in node.key("dims", "list").items())
    strides = node.all("strides", "int")
    made: DTensor = node.build(
        graph.new_input,
        dims,
        node.get("dtype", "text"),
        strides,
        node.get("name", "text"),
        constant=bool(node.optional("constant", "flag")),
    )
    return made


def _dim(place: _Place) -> int:
    if isinstance(place.value, dict):
        return place.build(Dim, place.get("dim", "text"), place.get("max", "int"))  # type: ignore[no-any-return]
    return place.expect("int")  # type: ignore[no-any-return]


def _number(place: _Place) -> float:
    if isinstance(place.value, dict):
        text = place.get("number", "text")
        if text not in ("inf", "-inf"):
            raise place.error(f"{text[:60]!r} is not inf or -inf")
        return float(text)
    return float(place.expect("number"))


def _attr(place: _Place) -> Any:
    if isinstance(place.value, list):
        return tuple(map(_attr, place.items()))
    return _number(place) if isinstance(place.value, dict) else place.expect("scalar")


# -- block graphs ----------------------------------------------------------------------------------


def _read_block(place: _Place) -> BlockGraph:
    axes = tuple(map(_read_axis, place.each("axes", "object")))
    inputs = tuple(map(_read_block_input, place.each("inputs", "object")))
    stages = tuple(map(_read_stage, place.each("stages", "object")))
    outputs = tuple(
        BlockOutput(o.get("value", "text"), o.all("axes", "text?"), o.get("dtype", "text"))
        for o in place.each("outputs", "object")
    )
    block: BlockGraph = place.build(BlockGraph, axes, inputs, stages, outputs)
    return block


def _read_axis(place: _Place) -> Axis:
    roles = {r.value: r for r in Role}
    role = place.get("role", "text")
    if role not in roles:
        raise place.error(f"role {role[:60]!r} is none of {', '.join(roles)}")
    split_field = "parts" if place.has("parts") else "split_axis"  # "parts" in version 1
    return Axis(
        place.get("name", "text"),
        _dim(place.key("size", "size")),
        roles[role],
        place.optional(split_field, "text"),
    )


def _read_block_input(place: _Place) -> BlockInput:
    made: BlockInput = place.build(
        BlockInput,
        place.get("name", "text"),
        place.all("sources", "int"),
        place.all("axes", "text?"),
        place.get("joined", "text?"),
        place.all("sizes", "int"),
        place.optional("bounds", "text"),
        _read_rotation(place),
        _read_padding(place),
        _read_taken(place),
    )
    return made


def _read_rotation(place: _Place) -> Rotation | None:
    if place.has("turn"):  # in version 1
        words = place.all("turn", "text")
        if len(words) != 2:
            raise place.error(f"turn names an axis and how, it is {words}")
        axis, how = words
        width = place.optional("turned", "int")
    elif place.has("rotation"):
        place = place.key("rotation")
        axis, how = place.get("axis", "text"), place.get("how", "text")
        width = place.optional("width", "int")
    else:
        return None
    made: Rotation = place.build(Rotation, axis, how, width)
    return made


def _read_padding(place: _Place) -> Padding | None:
    if not place.has("padding"):
        return None
    padding = place.key("padding")
    axis, size = padding.get("axis", "text"), padding.get("size", "int")
    return Padding(axis, size, float(padding.get("value", "number")))


def _read_taken(place: _Place) -> Taken | None:
    if not place.has("taken"):
        return None
    taken = place.key("taken")
    size = _dim(taken.key("size", "size"))
    return Taken(
        taken.get("dim", "int"), size, taken.get("index", "int"), taken.all("axes", "text?")
    )


def _read_stage(place: _Place) -> Stage:
    accumulators = [
        Accumulator(
            a.get("out", "text"),
            a.get("arg", "text"),
            a.get("kind", "text"),
            a.all("axes", "text"),
            a.optional("shift", "text"),
        )
        for a in place.each("accumulators", "object")
    ]
    return Stage(
        place.get("loop", "text?"),
        tuple(map(_read_block_op, place.each("body", "object"))),
        tuple(accumulators),
    )


def _read_block_op(place: _Place) -> BlockOp:
    args = tuple(
        a.value if isinstance(a.value, str) else _number(a)
        for a in place.key("args", "list").items()
    )
    attrs = {name: _attr(v) for name, v in place.key("attrs").entries()}
    return BlockOp(
        place.get("out", "text"),
        place.get("fn", "text"),
        args,
        place.all("axes", "text"),
        tuple(sorted(attrs.items())),
        place.get("over", "text?"),
    )
