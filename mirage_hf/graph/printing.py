"""Graphs as text: one line per tensor, block graphs as indented stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mirage_hf import errors
from mirage_hf.graph import maps
from mirage_hf.graph.block import Accumulator, Axis, BlockGraph, BlockInput, BlockOp, Stage
from mirage_hf.graph.dim import Dim
from mirage_hf.graph.tensors import DTensor, GraphContents, KernelOp, row_major
from mirage_hf.ops import table


def format_graph(graph: GraphContents) -> str:
    """Return a kernel graph as text, one tensor per line, in the order in which they were added."""
    lines = {t.index: _input(t) for t in graph.inputs}
    lines |= {op.outputs[0].index: _op(op) for op in graph.ops}
    outputs = "return " + ", ".join(map(str, graph.outputs))
    return "\n".join([*(lines[i] for i in sorted(lines)), outputs]).rstrip()


def tensor_type(t: DTensor) -> str:
    """Return dtype and dims of a tensor as text."""
    dims = ", ".join(f"{d.name}<={int(d)}" if isinstance(d, Dim) else str(d) for d in t.dims)
    return f"{table.dtype_name(t.dtype)} ({dims})"


def _input(t: DTensor) -> str:
    strides = "" if t.strides == row_major(t.dims) else f" strides {_value(t.strides)}"
    return f"{t} = input {tensor_type(t)}{strides}{' constant' if t.constant else ''}"


def _op(op: KernelOp) -> str:
    args = [str(x) if isinstance(x, DTensor) else _value(x) for x in op.inputs]
    args += [f"{name}={_value(v)}" for name, v in op.attrs]
    names = ", ".join(map(str, op.outputs))
    types = ", ".join(map(tensor_type, op.outputs))
    line = f"{names} = {op.name}({', '.join(args)}) : {types}"
    if op.block is None:
        return line
    body = "\n".join("  " + text for text in format_block_graph(op.block).splitlines())
    return f"{line} {{\n{body}\n}}"


def _value(v: Any) -> str:
    """Return an attribute or number as text. A float is the shortest text that reads back as it."""
    if isinstance(v, (tuple, list)):
        return errors.shape([*map(_value, v)])
    if isinstance(v, bool):
        return str(v).lower()
    return repr(v) if isinstance(v, (int, float)) else str(v)


# -- block graphs ----------------------------------------------------------------------------------


def format_block_graph(block: BlockGraph) -> str:
    """Return a block graph as text, with the maps of its loads and stores as comments."""
    block_maps = maps.maps_of(block)
    lines = ["axes " + ", ".join(map(_axis, block.axes))]
    for i, tensor_map in zip(block.inputs, block_maps.inputs, strict=True):
        lines.append(f"{_load(i)}  # {tensor_map}")
    for stage in block.stages:
        lines += _stage(stage)
    for o, tensor_map in zip(block.outputs, block_maps.outputs, strict=True):
        lines.append(f"store %{o.value} {_axes(o.axes)} {o.dtype}  # {tensor_map}")
    return "\n".join(lines)


def _axis(a: Axis) -> str:
    split = f" split by {a.split_axis}" if a.split_axis else ""
    return f"{a.name}={a.size} {a.role.value}{split}"


def _load(i: BlockInput) -> str:
    text = f"%{i.name} = load {', '.join(map(str, i.sources))} {_axes(i.axes)}"
    if i.joined:
        text += f" joined {i.joined} {errors.shape(i.sizes)}"
    elif i.bounds:
        text += f" bounds {i.bounds}"
    if i.rotation:
        text += f" rotated {i.rotation.axis} {i.rotation.how}"
        text += f" of {i.rotation.width}" if i.rotation.width else ""
    if i.padding:
        text += f" padded {i.padding.axis} {i.padding.size} with {_value(i.padding.value)}"
    if i.taken:
        taken = i.taken
        text += f" taken {taken.dim} of {taken.size} by {taken.index} {_axes(taken.axes)}"
    return text


def _stage(stage: Stage) -> list[str]:
    body = [f"  %{op.out} {_axes(op.axes)} = {_call(op)}" for op in stage.body]
    accumulators = [f"  %{a.out} {_axes(a.axes)} = {_accumulate(a)}" for a in stage.accumulators]
    return [f"for {stage.loop} {{" if stage.loop else "once {", *body, *accumulators, "}"]


def _call(op: BlockOp) -> str:
    args = [f"%{a}" if isinstance(a, str) else _value(a) for a in op.args]
    args += [f"{name}={_value(v)}" for name, v in op.attrs]
    args += [f"over={op.over}"] if op.over else []
    return f"{op.fn}({', '.join(args)})"


def _accumulate(a: Accumulator) -> str:
    shift = f" shift %{a.shift}" if a.shift else ""
    return f"accumulate {a.kind}(%{a.arg}){shift}"


def _axes(axes: Sequence[str | None]) -> str:
    return "[" + ", ".join(a or "1" for a in axes) + "]"
