"""The other grouping of a product of three: (x · γ) · W as x · (γ · W).

Factors of tensor-core products are rounded to the run dtype. x · γ leaves the range of float16 for inputs on which the stock
module, which divides x by its norm first, does not; x as it is and γ · W stay inside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mirage_hf.graph.block import BlockGraph, BlockOp
from mirage_hf.graph.ugraph import UGraph


def regrouped(ugraph: UGraph) -> UGraph | None:
    """The µGraph with every computed factor of a contraction moved to the other side where it fits; None where there is none."""
    blocks = [op.block for op in ugraph.block_ops if op.block is not None]
    changed = [_regrouped(b) for b in blocks]
    return ugraph.with_blocks(changed) if changed != blocks else None


def _regrouped(block: BlockGraph) -> BlockGraph:
    products = {c.product: c for c in block.contractions.values()}
    ops = {op.out: op for op in block.ops()}
    uses = Counter(a for op in ops.values() for a in op.args) + Counter(
        a.arg for s in block.stages for a in s.accumulators
    )
    uses += Counter(o.value for o in block.outputs)
    by_products = Counter(a for p in products for a in ops[p].args)

    def moved(product: BlockOp) -> tuple[BlockOp, BlockOp] | None:
        """The new factor and the new product."""
        for factor, other in (product.args, product.args[::-1]):
            scaled = ops.get(str(factor))
            if (
                scaled is None
                or scaled.fn != "mul"
                or scaled.over
                or uses[factor] != by_products[factor]
                or not isinstance(other, str)
            ):
                continue
            for stays, moves in (scaled.args, scaled.args[::-1]):
                if (
                    isinstance(stays, str)
                    and isinstance(moves, str)
                    and set(block.carried[moves]) <= set(block.carried[other])
                ):
                    new = BlockOp(
                        f"{product.out}_scaled", "mul", (moves, other), block.carried[other]
                    )
                    return new, replace(product, args=(stays, new.out))
        return None

    stages, taken = [], set[str | float]()
    for stage in block.stages:
        pairs = {
            op.out: moved(op)
            for op in stage.body
            if op.out in products and any(o.out in op.args for o in stage.body)
        }
        stages.append(
            replace(
                stage, body=tuple(new for op in stage.body for new in pairs.get(op.out) or (op,))
            )
        )
        taken |= {a for op in stage.body if pairs.get(op.out) for a in op.args}
    unread = taken - {
        a for stage in stages for op in stage.body for a in op.args
    }  # by products of later stages too
    return replace(
        block,
        stages=tuple(
            replace(s, body=tuple(op for op in s.body if op.out not in unread)) for s in stages
        ),
    )
