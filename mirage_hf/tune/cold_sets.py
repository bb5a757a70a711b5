"""Make the sets of inputs over which measurements rotate, so that none is left in the L2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mirage_hf.graph.indices import indices_of, num_choices
from mirage_hf.graph.kernel import DTensor, KernelGraph


def read_bytes(graph: KernelGraph, inputs: Sequence[torch.Tensor]) -> int:
    """Return the bytes that a call reads. Of weights, these are what an index chooses."""
    sizes = {n: num_choices(chosen) for n, chosen in indices_of(graph).items()}
    chosen_by, total = _chosen_inputs(graph), 0.0
    for n, x in enumerate(inputs):
        index = chosen_by.get(n)
        part = 1.0 if index is None else min(1.0, inputs[index].numel() / sizes[index])
        total += x.nbytes * part
    return int(total)


def cold_sets(
    graph: KernelGraph, inputs: Sequence[torch.Tensor], count: int
) -> list[list[torch.Tensor]]:
    """Return the inputs of a program, and other sets like them.

    Each set has tensors of its own. Weights that an index chooses are shared by as many sets as can
    choose different elements of them.

    Args:
        graph: The program.
        inputs: The first set.
        count: The number of sets.
    """
    sizes = {n: num_choices(chosen) for n, chosen in indices_of(graph).items()}
    chosen_by = _chosen_inputs(graph)
    #: How many sets choose different elements.
    turns = {n: max(1, size // inputs[n].numel()) for n, size in sizes.items()}
    #: Copies of the memory of inputs, by its address and the number of the copy.
    copies: dict[tuple[int, int], torch.UntypedStorage] = {}

    def copied(x: torch.Tensor, copy: int) -> torch.Tensor:
        memory = x.untyped_storage()
        key = memory.data_ptr(), copy
        if key not in copies:
            copies[key] = memory.clone()
        like = torch.empty(0, dtype=x.dtype, device=x.device)
        return like.set_(copies[key], x.storage_offset(), x.shape, x.stride())

    def of_set(number: int, n: int) -> torch.Tensor:
        x = inputs[n]
        if number == 0:
            return x
        if n in sizes:
            return (x + number % turns[n] * x.numel()) % sizes[n]
        if n not in chosen_by:
            return copied(x, number)
        copy = number // turns[chosen_by[n]]
        return x if copy == 0 else copied(x, -copy)

    return [[of_set(number, n) for n in range(len(inputs))] for number in range(count)]


def _chosen_inputs(graph: KernelGraph) -> Mapping[int, int]:
    """Return the inputs of which an index chooses the elements that are read, with that index.

    An index may also choose from what ops compute of them alone, such as decoded weights. Inputs
    are given by position.
    """
    made = {t.index: number for number, op in enumerate(graph.ops) for t in op.outputs}
    positions = {t.index: n for n, t in enumerate(graph.inputs)}
    found: dict[int, int] = {}
    for index, chosen in indices_of(graph).items():
        read, path = {t.index for t, _ in chosen}, set[int]()
        waiting = [made[t.index] for t, _ in chosen if t.index in made]
        while waiting:
            number = waiting.pop()
            path.add(number)
            tensors = [x.index for x in graph.ops[number].inputs if isinstance(x, DTensor)]
            read |= set(tensors)
            waiting += [made[t] for t in tensors if t in made and made[t] not in path]
        takes = {n for n, op in enumerate(graph.ops) if graph.inputs[index] in op.inputs}
        for n in sorted(positions[t] for t in read if t in positions):
            readers = {k for k, op in enumerate(graph.ops) if graph.inputs[n] in op.inputs}
            has_dim = num_choices(chosen) in graph.inputs[n].dims
            if readers <= path | takes and has_dim:
                found[n] = index
    return found
