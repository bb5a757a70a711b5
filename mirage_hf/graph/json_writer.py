"""Graphs as plain data for JSON. `graph/json_format.py` describes the format."""

from __future__ import annotations

import math
from typing import Any

from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Padding,
    Rotation,
    Stage,
    Taken,
)
from mirage_hf.graph.dim import Dim
from mirage_hf.graph.json_files import Json
from mirage_hf.graph.tensors import DTensor, GraphContents, KernelOp, UGraphContents
from mirage_hf.ops import table

#: The version of the format. Version 2 renamed fields of block graphs.
VERSION = 2

#: The values of "format".
GRAPH, UGRAPH, BLOCK = "mirage_hf.graph", "mirage_hf.ugraph", "mirage_hf.block"


def graph_to_dict(graph: GraphContents) -> Json:
    """Return a kernel graph as plain data."""
    # A graph without block graphs is the same in versions 1 and 2. It is written as version 1,
    # because the keys of kernel zoos are digests of it.
    version = VERSION if any(op.block is not None for op in graph.ops) else 1
    return {"format": GRAPH, "version": version, **_graph_body(graph)}


def ugraph_to_dict(ugraph: UGraphContents) -> Json:
    """Return a µGraph as plain data: the program, and the kernels that compute it."""
    return {
        "format": UGRAPH,
        "version": VERSION,
        "program": _graph_body(ugraph.program),
        "kernels": _graph_body(ugraph.kernels),
    }


def block_to_dict(block: BlockGraph) -> Json:
    """Return a block graph as plain data."""
    return {"format": BLOCK, "version": VERSION, **_block_body(block)}


# -- kernel graphs ---------------------------------------------------------------------------------


def _graph_body(graph: GraphContents) -> Json:
    nodes = {t.index: _input(t) for t in graph.inputs}
    nodes |= {op.outputs[0].index: _node(op) for op in graph.ops}
    return {
        "nodes": [nodes[i] for i in sorted(nodes)],
        "outputs": [t.name for t in graph.outputs],
    }


def _input(t: DTensor) -> Json:
    constant = {"constant": True} if t.constant else {}
    return {"op": "input", **tensor_to_dict(t), "strides": list(t.strides)} | constant


def tensor_to_dict(t: DTensor) -> Json:
    """Return name, dtype and dims of a tensor as plain data."""
    return {"name": t.name, "dtype": table.dtype_name(t.dtype), "dims": [*map(_size, t.dims)]}


def _size(d: int) -> Any:
    return {"dim": d.name, "max": int(d)} if isinstance(d, Dim) else d


def _node(op: KernelOp) -> Json:
    node: Json = {
        "op": op.name,
        "inputs": [x.name if isinstance(x, DTensor) else _value(x) for x in op.inputs],
    }
    if op.block is None:
        node["attrs"] = {name: _value(v) for name, v in op.attrs}
    else:
        node["block"] = _block_body(op.block)
    return node | {"outputs": [tensor_to_dict(t) for t in op.outputs]}


def _value(v: Any) -> Any:
    """Return an attribute or number. JSON lacks infinities: they are {"number": "inf"}."""
    if isinstance(v, float) and math.isinf(v):
        return {"number": repr(v)}
    return [*map(_value, v)] if isinstance(v, tuple) else v


# -- block graphs ----------------------------------------------------------------------------------


def _block_body(b: BlockGraph) -> Json:
    return {
        "axes": [*map(_axis, b.axes)],
        "inputs": [*map(_block_input, b.inputs)],
        "stages": [*map(_stage, b.stages)],
        "outputs": [*map(_block_output, b.outputs)],
    }


def _axis(a: Axis) -> Json:
    split = {"split_axis": a.split_axis} if a.split_axis else {}
    return {"name": a.name, "size": _size(a.size), "role": a.role.value} | split


def _block_input(i: BlockInput) -> Json:
    data: Json = {
        "name": i.name,
        "sources": list(i.sources),
        "axes": list(i.axes),
        "joined": i.joined,
        "sizes": list(i.sizes),
    }
    data |= {"bounds": i.bounds} if i.bounds else {}
    data |= {"rotation": _rotation(i.rotation)} if i.rotation else {}
    data |= {"padding": _padding(i.padding)} if i.padding else {}
    return data | ({"taken": _taken(i.taken)} if i.taken else {})


def _rotation(r: Rotation) -> Json:
    return {"axis": r.axis, "how": r.how} | ({"width": r.width} if r.width else {})


def _padding(p: Padding) -> Json:
    return {"axis": p.axis, "size": p.size, "value": p.value}


def _taken(t: Taken) -> Json:
    return {"dim": t.dim, "size": _size(t.size), "index": t.index, "axes": list(t.axes)}


def _stage(s: Stage) -> Json:
    return {
        "loop": s.loop,
        "body": [*map(_block_op, s.body)],
        "accumulators": [*map(_accumulator, s.accumulators)],
    }


def _block_op(op: BlockOp) -> Json:
    return {
        "out": op.out,
        "fn": op.fn,
        "args": [a if isinstance(a, str) else _value(a) for a in op.args],
        "axes": list(op.axes),
        "attrs": {name: _value(v) for name, v in op.attrs},
        "over": op.over,
    }


def _accumulator(a: Accumulator) -> Json:
    shift = {"shift": a.shift} if a.shift else {}
    return {"out": a.out, "arg": a.arg, "kind": a.kind, "axes": list(a.axes)} | shift


def _block_output(o: BlockOutput) -> Json:
    return {"value": o.value, "axes": list(o.axes), "dtype": o.dtype}
