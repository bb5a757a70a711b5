"""Write the function between the two linears of experts as ops of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.trace.experts.form import ExpertsForm
from mirage_hf.trace.fake_mode import FakeOnceMode
from mirage_hf.trace.record import Input, Node, TraceError, Value, record
from mirage_hf.trace.torch_ops import SAME_TENSOR, elementwise_op


def gate(
    form: ExpertsForm,
    dtype: torch.dtype,
    graph: KernelGraph,
    columns: Callable[[slice], DTensor],
    mode: FakeOnceMode,
) -> DTensor:
    """Write the function between the two linears of experts.

    Args:
        form: The experts.
        dtype: The dtype of the activations.
        graph: The program.
        columns: Gives columns of the first linear's result.
        mode: The mode in which it is recorded.

    Raises:
        TraceError: The function is of another form.
    """
    width = form.first.rows
    with mode:
        x = torch.empty(1, width, dtype=dtype, device=form.first.tensors[0].device)
    recording = record(lambda: form.gate(x), {"x": x}, mode)
    made: dict[Any, Any] = {}

    def tensor(key: Any) -> Any:
        """Return the tensor of an operand. Columns are computed when they are read."""
        if isinstance(key, (int, float)) and not isinstance(key, bool):
            return key
        if key not in made:
            raise TraceError("experts whose gate reads other tensors")
        if isinstance(made[key], range):
            part = made[key]
            made[key] = columns(slice(part.start, part.stop, part.step))
        return made[key]

    made[Input("x")] = range(width)
    for number, node in enumerate(recording.nodes):
        if node.name in SAME_TENSOR:
            made[Value(number)] = made[node.args[0]]
        elif node.name in ("aten.split", "aten.split_with_sizes", "aten.slice"):
            _note_parts(made, number, node)
        elif (known := elementwise_op(node)) is not None:
            op, args, attrs = known
            made[Value(number)] = graph.apply(op, [tensor(a) for a in args], attrs)
        else:
            raise TraceError(f"experts whose gate runs {node.name}")
    result: DTensor = tensor(Value(len(recording.nodes) - 1))
    return result


def _note_parts(made: dict[Any, Any], number: int, node: Node) -> None:
    """Note which columns each result of a split or a slice is."""
    whole = made.get(node.args[0])
    dim = node.args[2] if node.name != "aten.slice" and len(node.args) > 2 else None
    if node.name == "aten.slice":
        dim = node.args[1] if len(node.args) > 1 else 0
    if not isinstance(whole, range) or dim not in (1, -1):
        raise TraceError("experts whose gate takes parts of a result")
    if node.name == "aten.slice":
        made[Value(number)] = whole[slice(*[*node.args[2:], None, None, None][:3])]
        return
    start = 0
    for output, meta in enumerate(node.outputs):
        assert meta is not None
        made[Value(number, output)] = whole[start : start + meta.shape[-1]]
        start += meta.shape[-1]
