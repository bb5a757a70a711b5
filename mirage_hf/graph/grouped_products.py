"""Matrix products that a block adds up over groups, with a scale of each group in a factor.

Such a block computes Σ over groups of Σ over a group of x · (code · scale). Both sums may be one
product. If the scale multiplies the sum over a group instead, each group is a product of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirage_hf.graph.block import BlockGraph, BlockOp, Contraction, Role, Stage
from mirage_hf.ops.dtypes import E2M1


@dataclass(frozen=True)
class GroupedProduct:
    """A product that is summed over a group, and then over all groups.

    Attributes:
        contraction: The product, summed over a group.
        groups: The axis of the groups.
        total: The sum over all groups: an op or an accumulator.
        factor: The factor that is a value times the scale of its group.
        value: That value.
        scale: The input that holds the scales.
    """

    contraction: Contraction
    groups: str
    total: str
    factor: str
    value: str
    scale: str


def looks_up_e2m1(op: BlockOp) -> bool:
    """Return True if an op gives the numbers that the codes of 4-bit floats (e2m1) stand for."""
    return op.fn == "lookup" and dict(op.attrs)["values"] == E2M1


def grouped_products(block: BlockGraph) -> tuple[GroupedProduct, ...]:
    """Return the products whose sums over groups may be one sum."""
    found = (_grouped(block, c) for c in block.contractions.values())
    return tuple(p for p in found if p is not None)


def _grouped(block: BlockGraph, c: Contraction) -> GroupedProduct | None:
    total = sum_of(block, c.out)
    if total is None:
        return None
    out, groups = total
    if not any(_computes_both(stage, c.out, out) for stage in block.stages):
        return None
    carried = block.carried
    is_shared = groups in carried[c.a] and groups in carried[c.b]
    if not is_shared or any(groups in o.axes for o in block.outputs):
        return None
    scaled = [p for x in (c.a, c.b) if (p := _scaled(block, c, x, groups, out)) is not None]
    return scaled[0] if len(scaled) == 1 else None


def _scaled(
    block: BlockGraph, c: Contraction, factor: str, groups: str, total: str
) -> GroupedProduct | None:
    """Return the grouped product if a factor is a value times the scale of its group."""
    op, carried = block.ops_by_name.get(factor), block.carried
    if op is None or op.fn != "mul" or op.over is not None:
        return None
    args = [a for a in op.args if isinstance(a, str)]
    scales = [
        a
        for a in args
        if a in block.inputs_by_name and groups in carried[a] and c.over not in carried[a]
    ]
    values = [a for a in args if a not in scales and c.over in carried[a]]
    if len(scales) != 1 or len(values) != 1:
        return None
    return GroupedProduct(c, groups, total, factor, values[0], scales[0])


def _computes_both(stage: Stage, part: str, total: str) -> bool:
    """Return True if an op of a stage computes a sum over a group, and the stage that of all."""
    made = {op.out for op in stage.body}
    return part in made and total in made | {a.out for a in stage.accumulators}


def sum_of(block: BlockGraph, value: str) -> tuple[str, str] | None:
    """Return the sum that alone reads a value, and the axis that it sums over."""
    if any(o.value == value for o in block.outputs):
        return None
    found: list[tuple[str, str] | None] = []
    for stage in block.stages:
        for op in stage.body:
            if value in op.args:
                is_sum = op.fn == "sum" and op.over is not None
                is_tile = is_sum and block.role(str(op.over)) is Role.TILE
                found.append((op.out, str(op.over)) if is_tile else None)
        for acc in stage.accumulators:
            if value in (acc.arg, acc.shift):
                is_plain = acc.kind == "sum" and acc.shift is None and stage.loop is not None
                found.append((acc.out, str(stage.loop)) if is_plain else None)
    return found[0] if len(found) == 1 else None
