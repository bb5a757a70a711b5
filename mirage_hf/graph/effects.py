"""Appends to caches: which of them the kernel that computes the rows does with its own store."""
from __future__ import annotations

from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp

APPEND = "cache_append"


def parts_of(append: KernelOp) -> tuple[DTensor, DTensor, DTensor]:
    """The cache, the new rows and the position of a cache_append."""
    cache, rows, position = append.inputs
    assert isinstance(cache, DTensor) and isinstance(rows, DTensor) and isinstance(position, DTensor)
    return cache, rows, position


def positions_of(graph: KernelGraph) -> dict[int, tuple[DTensor, DTensor]]:
    """The inputs that are positions of appends, by their number: the cache and the rows of the append."""
    at = {t.index: n for n, t in enumerate(graph.inputs)}
    found = {}
    for op in graph.ops:
        if op.name == APPEND:
            cache, rows, position = parts_of(op)
            if position.index in at:
                found[at[position.index]] = cache, rows
    return found


def stored(kernels: KernelGraph) -> dict[int, KernelOp]:
    """The appends that the kernel which computes the rows does by storing them into the cache, by the index of the rows.

    That is so where nothing else reads the rows, and where no kernel can see the slots that are written change: every kernel that reads
    the cache has bounds on its slots that end where the append begins, or comes before the one that stores.
    """
    made = {t.index: n for n, op in enumerate(kernels.ops) if op.name == CUSTOMIZED for t in op.outputs}
    readers: dict[int, list[tuple[int, KernelOp]]] = {}
    for n, op in enumerate(kernels.ops):
        for x in {x.index: x for x in op.inputs if isinstance(x, DTensor)}.values():
            readers.setdefault(x.index, []).append((n, op))
    inputs, outputs = {t.index for t in kernels.inputs}, {t.index for t in kernels.outputs}
    found = {}
    for op in kernels.ops:
        if op.name != APPEND:
            continue
        cache, rows, position = parts_of(op)
        if rows.index not in made or len(readers[rows.index]) > 1 or rows.index in outputs or cache.index not in inputs:
            continue
        others = [(n, r) for n, r in readers[cache.index] if r is not op]
        if position.index in inputs and all(n < made[rows.index] or _bounded(r, cache, position) for n, r in others):
            found[rows.index] = op
    return found


def _bounded(op: KernelOp, cache: DTensor, position: DTensor) -> bool:
    """Whether a kernel that reads a cache has bounds on its slots whose upper end is `position`."""
    block: BlockGraph | None = op.block
    if block is None:
        return False
    ends = {i.bounds for i in block.inputs if i.bounds is not None and op.inputs[i.sources[1]] is position}
    mine = [i for i in block.inputs if i.bounds is None and any(op.inputs[s] is cache for s in i.sources)]
    return all(len(i.sources) == 1 and i.axes[-2] in ends for i in mine)
