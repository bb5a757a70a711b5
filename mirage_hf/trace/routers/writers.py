"""Tables of what writes a torch op as a part of a router's kernel, and the names of ops in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mirage_hf.trace.record import Node
from mirage_hf.trace.routers.steps import Step
from mirage_hf.trace.routers.tiles import RouterWriter, Tile, UnwrittenError
from mirage_hf.trace.torch_ops import ElementwiseOp, elementwise_op

#: Writes a step, and returns its results.
StepWriter = Callable[[RouterWriter, Step], list[Tile]]

#: The name in a table of all elementwise ops on float32 numbers, in-place forms included.
ELEMENTWISE = "elementwise"

_IN_PLACE = ("add_", "sub_", "mul_", "div_", "masked_fill_", "scatter_")


class StepWriters(dict[str, StepWriter]):
    """Step writers by the name of their op."""

    def writes(self, *names: str) -> Callable[[StepWriter], StepWriter]:
        """Return a decorator that adds a function under the names of aten ops."""

        def add(function: StepWriter) -> StepWriter:
            for name in names:
                self[name if name == ELEMENTWISE else f"aten.{name}"] = function
            return function

        return add


def names_of(node: Node | Step) -> list[str]:
    """Return the names under which tables may have an op: its own first."""
    name = f"{node.op.namespace}.{node.op._opname}"
    if name.removeprefix("aten.") in _IN_PLACE:
        name = name[:-1]
    return [name] if elementwise_op_of(node) is None else [name, ELEMENTWISE]


def elementwise_op_of(node: Node | Step) -> ElementwiseOp | None:
    """Return the elementwise op of the op table that a node or step is, None if it is none."""
    op = node.op
    if op._opname in _IN_PLACE:
        op = getattr(getattr(torch.ops.aten, op._opname[:-1]), op._overloadname)
    return elementwise_op(Node(op, node.args, dict(node.kwargs), [], ""))


def last_axes(tile: Tile, dim: Any) -> tuple[str, ...]:
    """Return the axes of the last dim, if an op works along that."""
    dim = dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim
    if dim not in (-1, len(tile.dims) - 1) or not tile.dims:
        raise UnwrittenError("an op along another dim")
    return tile.dims[-1]
