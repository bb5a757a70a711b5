"""Expand composites such as softmax and rms_norm into other ops of the table."""

from __future__ import annotations

from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.ops import table


def expand(graph: KernelGraph) -> KernelGraph:
    """Return the same program with every composite expanded into other ops."""
    expanded = KernelGraph()
    new: dict[int, DTensor] = {}
    for t in graph.inputs:
        new[t.index] = expanded.new_input(t.dims, t.dtype, t.strides, constant=t.constant)
    for op in graph.ops:
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        if op.block is not None:
            results = expanded.customized(args, op.block)  # type: ignore[arg-type]
        elif (write_out := table.lookup(op.name).expand) is not None:
            results = [write_out(expanded, *args, **dict(op.attrs))]
        else:
            results = [expanded._apply(op.name, *args, **dict(op.attrs))]
        for t, result in zip(op.outputs, results, strict=True):
            new[t.index] = result
    expanded.mark_output(*(new[t.index] for t in graph.outputs))
    return expanded
