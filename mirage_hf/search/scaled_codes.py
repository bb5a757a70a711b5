"""Move scales of groups of codes into factors: Σ s · Σ x · c becomes Σ Σ x · (c · s).

Tensor cores then sum over several groups in one product (`graph.grouped_products`). Multiply-adds
do better with the first form, which multiplies once for each group. So the search ranks it first.
"""

from __future__ import annotations

from dataclasses import replace

from mirage_hf.graph.block import BlockGraph, BlockOp, Contraction, Stage
from mirage_hf.graph.coded import is_packed
from mirage_hf.graph.grouped_products import grouped_products, looks_up_e2m1, sum_of
from mirage_hf.graph.kernel import DTensor, KernelOp
from mirage_hf.graph.ugraph import UGraph


def sums_groups_of_codes(ugraph: UGraph) -> bool:
    """Return True if a product of several rows may sum over several groups of packed codes."""
    return any(
        _has_rows(op.block, p.contraction, p.factor) and _are_codes(op, p.value)
        for op in ugraph.block_ops
        if op.block is not None
        for p in grouped_products(op.block)
    )


def with_scaled_codes(ugraph: UGraph) -> UGraph | None:
    """Return the µGraph with scales of groups moved into factors.

    Returns:
        The new µGraph, or None if no scale can be moved.
    """
    ops = [op for op in ugraph.block_ops if op.block is not None]
    changed = [_changed(op) for op in ops]
    return ugraph.with_blocks(changed) if changed != [op.block for op in ops] else None


def _changed(op: KernelOp) -> BlockGraph:
    block = op.block
    assert block is not None
    for c in block.contractions.values():
        for codes, other in ((c.a, c.b), (c.b, c.a)):
            if _are_codes(op, codes) and _has_rows(block, c, codes):
                block = _moved(block, c, codes, other)
    return block


def _moved(block: BlockGraph, c: Contraction, codes: str, other: str) -> BlockGraph:
    """Return a block with the scale of a sum over one group moved to its codes, if it has one."""
    readers = [op for op in block.ops() if c.out in op.args]
    stage = next((s for s in block.stages if any(op.out == c.product for op in s.body)), None)
    if stage is None or len(readers) != 1 or readers[0] not in stage.body:
        return block
    (scaled,) = readers
    scales = [a for a in scaled.args if isinstance(a, str) and a != c.out]
    if scaled.fn != "mul" or scaled.over is not None or len(scales) != 1:
        return block
    (scale,) = scales
    carried = block.carried
    is_of_codes = scale in block.inputs_by_name and set(carried[scale]) <= set(carried[codes])
    total = sum_of(block, scaled.out)
    if not is_of_codes or c.over in carried[scale] or total is None:
        return block
    _, groups = total
    accumulators = [a for s in block.stages for a in s.accumulators]
    kept = {o.value for o in block.outputs} | {x for a in accumulators for x in (a.arg, a.shift)}
    if groups not in carried[scale] or c.out in kept:
        return block
    factor = BlockOp(f"{codes}_scaled", "mul", (codes, scale), tuple(carried[codes]))
    if factor.out in block.ops_by_name:
        return block
    stages = tuple(_rewritten(s, c, factor, other, scaled.out) for s in block.stages)
    return replace(block, stages=stages)


def _rewritten(stage: Stage, c: Contraction, factor: BlockOp, other: str, scaled: str) -> Stage:
    """Return a stage that multiplies by a factor, and reads the sum in place of the scaled sum."""
    body: list[BlockOp] = []
    for op in stage.body:
        if op.out == scaled:
            continue
        if op.out == c.product:
            body += [factor, replace(op, args=(other, factor.out))]
        else:
            body.append(replace(op, args=tuple(c.out if a == scaled else a for a in op.args)))
    accumulators = tuple(
        replace(
            a,
            arg=c.out if a.arg == scaled else a.arg,
            shift=c.out if a.shift == scaled else a.shift,
        )
        for a in stage.accumulators
    )
    return replace(stage, body=tuple(body), accumulators=accumulators)


def _are_codes(op: KernelOp, value: str) -> bool:
    """Return True if a value is packed codes, their difference from zero points, or small floats.

    The last ones are the numbers that packed 4-bit floats (e2m1) stand for.
    """
    block = op.block
    assert block is not None
    made = block.ops_by_name.get(value)
    name = value
    if made is not None and (made.fn == "sub" or looks_up_e2m1(made)):
        name = str(made.args[0])
    if name not in block.inputs_by_name:
        return False
    operands = [t for t in op.inputs if isinstance(t, DTensor)]
    return is_packed(operands[block.inputs_by_name[name].sources[0]].dtype)


def _has_rows(block: BlockGraph, c: Contraction, factor: str) -> bool:
    """Return True if the other factor of a product has several rows."""
    other = c.b if factor == c.a else c.a
    rows = set(block.carried[other]) - set(block.carried[factor])
    return any(block.axis(a).size > 1 for a in rows)
