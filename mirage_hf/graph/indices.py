"""Find the inputs of a program that are indices, and check them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirage_hf import errors
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.operands import index_operands


def indices_of(graph: KernelGraph) -> dict[int, tuple[DTensor, int]]:
    """Return the inputs of a program that choose elements of other tensors, by position.

    Returns:
        For each such input, the tensor and the dim whose elements it chooses. If there are
        several, it is the one with the fewest elements along that dim.
    """
    positions = {t.index: n for n, t in enumerate(graph.inputs)}
    found: dict[int, tuple[DTensor, int]] = {}
    for op in graph.ops:
        for index, chosen, dim in _uses(op):
            n = positions.get(index.index)
            if n is None:
                continue
            known = found.get(n)
            if known is None or chosen.dims[dim] < known[0].dims[known[1]]:
                found[n] = chosen, dim
    return found


def _uses(op: KernelOp) -> list[tuple[DTensor, DTensor, int]]:
    """Return the indices that an op reads, each with a tensor and the dim that it chooses from."""
    if op.block is None:
        x = op.inputs[0]
        if not isinstance(x, DTensor):
            return []
        return [
            (index, x, dict(op.attrs)["dim"] % len(x.dims))
            for index in index_operands(op.name, op.inputs)
        ]
    uses = []
    for i in op.block.inputs:
        if i.taken is not None:
            index, source = op.inputs[i.taken.index], op.inputs[i.sources[0]]
            assert isinstance(index, DTensor)
            assert isinstance(source, DTensor)
            uses.append((index, source, i.taken.dim))
    return uses


def check_range(graph: KernelGraph, inputs: Sequence[torch.Tensor]) -> None:
    """Check that the indices among a program's inputs are in range. On a GPU this waits for them.

    Raises:
        InputError: If an index is out of range.
    """
    for n, (chosen, dim) in indices_of(graph).items():
        least, most = (int(x) for x in inputs[n].aminmax())
        size = chosen.dims[dim]
        if least < 0 or most >= size:
            raise errors.InputError(
                f"input {n} ({graph.inputs[n].name}): the index is {least} to {most}; it chooses "
                f"among {size} elements of {chosen.name}, so it must be 0 to {size - 1}"
            )
