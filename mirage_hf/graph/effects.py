"""Appends to caches, and those that a kernel carries out by storing the rows that it computes."""

from __future__ import annotations

from collections.abc import Iterator

from mirage_hf.graph.block import BlockGraph, BlockOp
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp

#: The op that writes rows into a cache.
APPEND = "cache_append"


def parts_of(append: KernelOp) -> tuple[DTensor, DTensor, DTensor]:
    """Return the cache, the new rows and the position of an append."""
    cache, rows, position = append.inputs
    assert isinstance(cache, DTensor)
    assert isinstance(rows, DTensor)
    assert isinstance(position, DTensor)
    return cache, rows, position


def positions_of(graph: KernelGraph) -> Iterator[tuple[int, DTensor, DTensor]]:
    """Iterate over the appends whose position is an input: that input's number, cache and rows."""
    numbers = {t.index: n for n, t in enumerate(graph.inputs)}
    for op in graph.ops:
        if op.name == APPEND:
            cache, rows, position = parts_of(op)
            if position.index in numbers:
                yield numbers[position.index], cache, rows


def stored(kernels: KernelGraph) -> dict[int, KernelOp]:
    """Return the appends that a kernel does with its own store, by the index of the rows.

    The kernel that computes the rows may store them into the cache if nothing else reads them. No
    kernel may see the written slots change. So each kernel that reads the cache must run before the
    one that stores, or ignore the slots from `position` on (`_ignores_from`).
    """
    made_by = {
        t.index: n for n, op in enumerate(kernels.ops) if op.name == CUSTOMIZED for t in op.outputs
    }
    readers = _readers(kernels)
    inputs = {t.index for t in kernels.inputs}
    outputs = {t.index for t in kernels.outputs}
    appends = {}
    for op in kernels.ops:
        if op.name != APPEND:
            continue
        cache, rows, position = parts_of(op)
        private = len(readers[rows.index]) == 1 and rows.index not in outputs
        given = cache.index in inputs and position.index in inputs
        if rows.index not in made_by or not private or not given:
            continue
        if all(
            n < made_by[rows.index] or _ignores_from(reader, cache, position)
            for n, reader in readers[cache.index]
            if reader is not op
        ):
            appends[rows.index] = op
    return appends


def _readers(kernels: KernelGraph) -> dict[int, list[tuple[int, KernelOp]]]:
    """Return the ops that read each tensor, with their numbers."""
    readers: dict[int, list[tuple[int, KernelOp]]] = {}
    for n, op in enumerate(kernels.ops):
        for index in {x.index for x in op.inputs if isinstance(x, DTensor)}:
            readers.setdefault(index, []).append((n, op))
    return readers


def _ignores_from(op: KernelOp, cache: DTensor, position: DTensor) -> bool:
    """Return whether a kernel's result does not depend on a cache's slots from `position` on.

    This holds for all finite numbers in these slots. Before the kernel reduces over the slots or
    stores anything, bounds that end at `position` replace the numbers, or multiply them by 0.
    """
    block = op.block
    if block is None:
        return False
    for i in block.inputs:
        reads = any(op.inputs[s] is cache for s in i.sources)
        if i.bounds is not None or not reads:
            continue
        slots = i.axes[-2]
        if len(i.sources) > 1 or slots is None:
            return False
        masks = {
            b.name
            for b in block.inputs
            if b.bounds == slots and op.inputs[b.sources[1]] is position
        }
        if not _masked(block, i.name, slots, masks):
            return False
    return True


def _masked(block: BlockGraph, cache: str, slots: str, masks: set[str]) -> bool:
    """Return whether masks come before each reduction over a cache's slots and each output."""
    #: Values that depend on slots out of bounds, and values that are 0 there.
    exposed, zero = {cache}, set(masks)
    for stage in block.stages:
        for op in stage.body:
            if _masks(op, masks, zero):
                if _is_zero_outside(op, zero):
                    zero.add(op.out)
            elif exposed & set(op.args):
                if op.over == slots:
                    return False
                exposed.add(op.out)
        accumulated = [a for a in stage.accumulators if a.arg in exposed]
        if accumulated and stage.loop == slots:
            return False
        exposed |= {a.out for a in accumulated}
    return not any(o.value in exposed for o in block.outputs)


def _masks(op: BlockOp, masks: set[str], zero: set[str]) -> bool:
    """Return whether an op's result does not depend on slots out of bounds."""
    if op.fn == "mul":
        return bool(zero & set(op.args))
    if op.fn != "select":
        return False
    chosen, inside, outside = op.args
    return (chosen in masks and not isinstance(outside, str)) or (inside in zero and outside == 0.0)


def _is_zero_outside(op: BlockOp, zero: set[str]) -> bool:
    """Return whether the result of an op that masks is 0 for slots out of bounds."""
    return op.fn == "mul" or op.args[2] == 0.0
