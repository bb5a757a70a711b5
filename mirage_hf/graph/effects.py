"""Appends to caches: which of them the kernel that computes the rows does with its own store."""

from __future__ import annotations

from collections.abc import Iterator

from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp

APPEND = "cache_append"


def parts_of(append: KernelOp) -> tuple[DTensor, DTensor, DTensor]:
    """The cache, the new rows and the position of a cache_append."""
    cache, rows, position = append.inputs
    assert (
        isinstance(cache, DTensor) and isinstance(rows, DTensor) and isinstance(position, DTensor)
    )
    return cache, rows, position


def positions_of(graph: KernelGraph) -> Iterator[tuple[int, DTensor, DTensor]]:
    """Each append whose position is an input: the number of that input, the cache and the rows."""
    at = {t.index: n for n, t in enumerate(graph.inputs)}
    for op in graph.ops:
        if op.name == APPEND:
            cache, rows, position = parts_of(op)
            if position.index in at:
                yield at[position.index], cache, rows


def stored(kernels: KernelGraph) -> dict[int, KernelOp]:
    """The appends that the kernel which computes the rows does by storing them into the cache, by the index of the rows.

    That is so where nothing else reads the rows, and where no kernel can see the slots that are written change: every kernel that reads
    the cache comes before the one that stores, or lets nothing through from where the append begins (`_bounded`).
    """
    made = {
        t.index: n for n, op in enumerate(kernels.ops) if op.name == CUSTOMIZED for t in op.outputs
    }
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
        if (
            rows.index not in made
            or len(readers[rows.index]) > 1
            or rows.index in outputs
            or cache.index not in inputs
        ):
            continue
        others = [(n, r) for n, r in readers[cache.index] if r is not op]
        if position.index in inputs and all(
            n < made[rows.index] or _bounded(r, cache, position) for n, r in others
        ):
            found[rows.index] = op
    return found


def _bounded(op: KernelOp, cache: DTensor, position: DTensor) -> bool:
    """Whether what a kernel gives is the same whatever finite numbers a cache has from `position` on: before anything is reduced over its
    slots or stored, bounds that end there have selected something else, or made a factor 0."""
    block: BlockGraph | None = op.block
    if block is None:
        return False
    for i in block.inputs:
        if i.bounds is None and any(op.inputs[s] is cache for s in i.sources):
            slots = i.axes[-2]
            ends = {
                b.name
                for b in block.inputs
                if b.bounds is not None
                and b.bounds == slots
                and op.inputs[b.sources[1]] is position
            }
            if len(i.sources) > 1 or slots is None or not _closed(block, i.name, slots, ends):
                return False
    return True


def _closed(block: BlockGraph, cache: str, slots: str, ends: set[str]) -> bool:
    """Whether bounds (the values `ends`) come between a cache and every reduction over its slots, and every output."""
    seeing, zero = (
        {cache},
        set(ends),
    )  # values that depend on slots out of bounds, and those that are 0 there
    for stage in block.stages:
        for b in stage.body:
            chosen = b.fn == "select" and b.args[0] in ends and not isinstance(b.args[2], str)
            kept = b.fn == "select" and b.args[1] in zero and b.args[2] == 0.0
            if chosen or kept or (b.fn == "mul" and zero & set(b.args)):
                zero |= {b.out} if kept or b.fn == "mul" or b.args[2] == 0.0 else set()
            elif seeing & set(b.args):
                if b.over == slots:
                    return False
                seeing.add(b.out)
        if any(a.arg in seeing for a in stage.accumulators if stage.loop == slots):
            return False
        seeing |= {a.out for a in stage.accumulators if a.arg in seeing}
    return not any(o.value in seeing for o in block.outputs)
