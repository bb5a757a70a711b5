"""Regroup a product of three factors: (x · γ) · W becomes x · (γ · W).

Factors of tensor-core products are rounded to the dtype of the run. The stock module divides x by
its norm before it multiplies by γ, so its values stay in range. Without that division, x · γ may
leave the range of float16. The factors x and γ · W stay in range.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mirage_hf.graph.block import BlockGraph, BlockOp, Stage
from mirage_hf.graph.ugraph import UGraph


def regrouped(ugraph: UGraph) -> UGraph | None:
    """Return the µGraph with computed factors of contractions moved to the other side.

    Returns:
        The new µGraph, or None if no factor can be moved.
    """
    blocks = [op.block for op in ugraph.block_ops if op.block is not None]
    changed = [_Regrouping(block).run() for block in blocks]
    return ugraph.with_blocks(changed) if changed != blocks else None


class _Regrouping:
    def __init__(self, block: BlockGraph):
        self.block = block
        self.ops = {op.out: op for op in block.ops()}
        self.products = {c.product for c in block.contractions.values()}
        args = [a for op in self.ops.values() for a in op.args]
        args += [acc.arg for stage in block.stages for acc in stage.accumulators]
        args += [output.value for output in block.outputs]
        self.uses = Counter(args)
        self.uses_by_products = Counter(a for p in self.products for a in self.ops[p].args)

    def run(self) -> BlockGraph:
        old_args: set[str | float] = set()
        stages = []
        for stage in self.block.stages:
            moved = self._moved_in(stage)
            body = tuple(new for op in stage.body for new in moved.get(op.out, (op,)))
            stages.append(replace(stage, body=body))
            old_args |= {a for op in stage.body if op.out in moved for a in op.args}
        # A factor may still be read by a product of a later stage.
        unread = old_args - {a for stage in stages for op in stage.body for a in op.args}
        return replace(self.block, stages=tuple(_without(stage, unread) for stage in stages))

    def _moved_in(self, stage: Stage) -> dict[str, tuple[BlockOp, BlockOp]]:
        """Return the new factor and the new product for each product of a stage that changes.

        A product changes only if the same stage computes one of its factors.
        """
        made = {op.out for op in stage.body}
        moved = {}
        for op in stage.body:
            if op.out in self.products and not made.isdisjoint(op.args):
                pair = self._move_factor(op)
                if pair is not None:
                    moved[op.out] = pair
        return moved

    def _move_factor(self, product: BlockOp) -> tuple[BlockOp, BlockOp] | None:
        """Return the new factor and the new product, or None if no factor can be moved."""
        carried = self.block.carried
        for factor, other in (product.args, product.args[::-1]):
            scaled = self.ops.get(str(factor))
            if scaled is None or scaled.fn != "mul" or scaled.over or not isinstance(other, str):
                continue
            if self.uses[factor] != self.uses_by_products[factor]:
                continue
            for stays, moves in (scaled.args, scaled.args[::-1]):
                if not isinstance(stays, str) or not isinstance(moves, str):
                    continue
                if set(carried[moves]) <= set(carried[other]):
                    name = f"{product.out}_scaled"
                    new = BlockOp(name, "mul", (moves, other), carried[other])
                    return new, replace(product, args=(stays, new.out))
        return None


def _without(stage: Stage, unread: set[str | float]) -> Stage:
    return replace(stage, body=tuple(op for op in stage.body if op.out not in unread))
