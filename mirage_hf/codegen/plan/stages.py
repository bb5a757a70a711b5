"""What the stages of a block graph read, and in which order a kernel runs them."""

from __future__ import annotations

from mirage_hf.codegen.plan.tiling import Tiling
from mirage_hf.graph.block import Accumulator, BlockOp, Stage


def running_maxima(stage: Stage) -> dict[str, Accumulator]:
    """Return, by name, the maxima of a stage that its body reads while they grow."""
    read = {a for op in stage.body for a in op.args}
    return {a.out: a for a in stage.accumulators if a.kind == "max" and a.out in read}


def loop_invariant(stage: Stage) -> tuple[BlockOp, ...]:
    """Return the ops of a stage that are the same in every step of its loop."""
    varying, invariant = set(running_maxima(stage)), []
    for op in stage.body:
        if varying & set(op.args) or stage.loop in op.axes:
            varying.add(op.out)
        else:
            invariant.append(op)
    return tuple(invariant)


def execution_order(tiling: Tiling) -> tuple[tuple[int, Stage], ...]:
    """Return the stages with their numbers in the order in which a kernel runs them.

    Before a loop of several steps, a stage without a loop is delayed until something reads its
    results. So a loop that does not need them starts its loads earlier.
    """
    ordered: list[tuple[int, Stage]] = []
    delayed: list[tuple[int, Stage]] = []
    for number, stage in enumerate(tiling.block.stages):
        if stage.loop is None and tiling.is_looped:
            delayed.append((number, stage))
            continue
        read = stage.reads
        needed: list[tuple[int, Stage]] = []
        for earlier in reversed(delayed):
            if any(op.out in read for op in earlier[1].body):
                read |= earlier[1].reads
                needed.insert(0, earlier)
        delayed = [s for s in delayed if s not in needed]
        ordered += [*needed, (number, stage)]
    return tuple(ordered + delayed)
