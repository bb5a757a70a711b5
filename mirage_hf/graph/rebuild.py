"""Rebuild the ops of a kernel graph in another graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mirage_hf import errors
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp, Operand
from mirage_hf.ops import table


def rebuilt(
    graph: KernelGraph,
    inputs: Sequence[DTensor],
    make: Callable[[KernelOp, list[Operand]], Sequence[DTensor]],
) -> list[DTensor]:
    """Rebuild every op of `graph`, in order.

    Args:
        graph: The graph whose ops are rebuilt.
        inputs: The tensors that replace its inputs.
        make: Rebuilds an op, given the op and the tensors that replace its operands. It returns the
            tensors that replace the op's outputs.

    Returns:
        The tensors that replace the outputs of `graph`.
    """
    new = {t.index: x for t, x in zip(graph.inputs, inputs, strict=True)}
    for op in graph.ops:
        made = make(op, [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs])
        new |= {t.index: x for t, x in zip(op.outputs, made, strict=True)}
    return [new[t.index] for t in graph.outputs]


def inline(graph: KernelGraph, part: KernelGraph, tensors: Sequence[DTensor]) -> list[DTensor]:
    """Add the ops of `part` to `graph`. Block graphs stay as they are.

    Names that users gave are kept, with an underscore if they are taken. Other tensors get new
    names.

    Args:
        graph: The graph that gets the ops.
        part: The graph whose ops are added.
        tensors: Tensors of `graph` that replace the inputs of `part`.

    Returns:
        The tensors of `graph` that replace the outputs of `part`.

    Raises:
        GraphError: If `tensors` do not fit the inputs of `part`.
    """
    if [(t.dims, t.dtype) for t in tensors] != [(t.dims, t.dtype) for t in part.inputs]:
        raise errors.GraphError(
            f"inline: the graph reads {_types(part.inputs)}, it was given {_types(tensors)}; "
            "give a tensor like each of its inputs, in their order"
        )

    def add(op: KernelOp, operands: Sequence[Operand]) -> list[DTensor]:
        taken = graph.names
        names: list[str | None] = []
        for t in op.outputs:
            # t3 and t3_ are names that a graph made, so the new graph makes its own.
            name = None if t.name.rstrip("_") == f"t{t.index}" else t.name
            while name is not None and name in taken:
                name += "_"
            names.append(name)
            taken |= {name} if name is not None else set()
        return graph.op_like(op, operands, names)

    return rebuilt(part, tensors, add)


def _types(tensors: Sequence[DTensor]) -> str:
    types = (f"{table.dtype_name(t.dtype)} {errors.shape(t.dims)}" for t in tensors)
    return ", ".join(types) or "nothing"
