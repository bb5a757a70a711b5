"""Find the inputs of a program that are indices, and check them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from mirage_hf import errors
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.operands import index_operands

#: A tensor, and a dim of it whose elements an index chooses.
Chosen = tuple[DTensor, int]


def indices_of(graph: KernelGraph) -> Mapping[int, Sequence[Chosen]]:
    """Return the inputs of a program that are indices, by position, with what they choose from."""
    positions = {t.index: n for n, t in enumerate(graph.inputs)}
    found: dict[int, list[Chosen]] = {}
    for op in graph.ops:
        for index, chosen in _uses(op):
            if index.index in positions:
                found.setdefault(positions[index.index], []).append(chosen)
    return found


def _uses(op: KernelOp) -> Iterator[tuple[DTensor, Chosen]]:
    """Yield the indices that an op reads, each with what it chooses from."""
    if op.block is None:
        x = op.inputs[0]
        for index in index_operands(op.name, op.inputs):
            assert isinstance(x, DTensor)
            yield index, (x, dict(op.attrs)["dim"] % len(x.dims))
        return
    tensors = [x for x in op.inputs if isinstance(x, DTensor)]  # kernels read tensors alone
    for i in op.block.inputs:
        if i.taken is not None:
            yield tensors[i.taken.index], (tensors[i.sources[0]], i.taken.dim)


def num_choices(chosen: Sequence[Chosen]) -> int:
    """Return how many elements an index can choose from. All its tensors have so many."""
    return min(t.dims[dim] for t, dim in chosen)


def check_range(graph: KernelGraph, inputs: Sequence[torch.Tensor]) -> None:
    """Check that the indices among a program's inputs are in range. On a GPU this waits for them.

    Raises:
        InputError: If an index is out of range.
    """
    for n, chosen in indices_of(graph).items():
        least, most = (int(x) for x in inputs[n].aminmax())
        size = num_choices(chosen)
        if least < 0 or most >= size:
            raise errors.InputError(
                f"input {n} ({graph.inputs[n].name}): the index is {least} to {most}; it chooses "
                f"among {size} elements of {chosen[0][0].name}, so it must be 0 to {size - 1}"
            )
