"""Make a program of some ops of another program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.search.dim_classes import tensors_of


def subprogram(
    program: KernelGraph,
    ops: Sequence[KernelOp],
    writes: Sequence[int],
    known: Mapping[int, DTensor] | None = None,
) -> tuple[KernelGraph, tuple[int, ...]]:
    """Return some ops of a program as a graph of their own.

    Args:
        program: The program.
        ops: The ops, in an order in which they can run.
        writes: The tensors that the graph returns, by index in `program`.
        known: What `tensors_by_index(program)` returned, for callers that make many programs.

    Returns:
        The graph, and the tensors of `program` that its inputs are, by index.
    """
    graph = KernelGraph()
    made = {t.index for op in ops for t in op.outputs}
    read = [x.index for op in ops for x in tensors_of(op) if x.index not in made]
    reads = tuple(dict.fromkeys(read))
    known = tensors_by_index(program) if known is None else known
    new = {n: graph.input_like(known[n]) for n in reads}
    for op in ops:
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        if op.block is None:
            outputs = [graph.apply(op.name, args, dict(op.attrs))]
        else:
            outputs = graph.customized([x for x in args if isinstance(x, DTensor)], op.block)
        new |= {t.index: y for t, y in zip(op.outputs, outputs, strict=True)}
    graph.mark_output(*(new[n] for n in writes))
    return graph, reads


def tensors_by_index(program: KernelGraph) -> dict[int, DTensor]:
    """Return the inputs and results of a program by their indices."""
    made = [t for op in program.ops for t in op.outputs]
    return {t.index: t for t in (*program.inputs, *made)}
