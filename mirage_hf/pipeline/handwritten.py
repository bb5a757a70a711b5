"""µGraphs whose kernels the user wrote: checked like searched ones, then used like them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mirage_hf import errors
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.graph.kernel import KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune import space
from mirage_hf.verify.accept import Candidate, examine


def ugraph(
    program: KernelGraph, kernels: KernelGraph, tiles: Sequence[Mapping[str, int]] | None = None
) -> UGraph:
    """Return the µGraph that computes `program` by kernels that the user wrote.

    It is proven equivalent, and its rounding is checked.

    Args:
        program: The tensor program.
        kernels: A kernel graph with customized ops on the same inputs.
        tiles: The result of `BlockGraphBuilder.schedule` for each customized op, in order. Kernels
            then have the numbers of blocks and trips that the block graphs were written with.
            Without it the cost model chooses them, and grid_dim and forloop_range decide only the
            roles of axes.

    Raises:
        GraphError: An argument is no kernel graph.
        VerificationError: The kernels compute something else or round worse than torch.
        CodegenError: No kernel can have these `tiles`.
    """
    for what, graph in (("program", program), ("kernels", kernels)):
        if not isinstance(graph, KernelGraph):
            raise errors.GraphError(
                f"ugraph: {what} must be a graph made by mi.new_kernel_graph(), "
                f"it is {type(graph).__name__}"
            )
    # Copy, because the user may add ops to their graphs after the proof.
    written = UGraph(program.copy(), kernels.copy())
    if tiles is not None:
        _check_tiles(tiles, len(written.block_ops))
    candidate = examine(written)
    if isinstance(candidate, Rejected):
        raise errors.VerificationError(
            f"these kernels are not accepted for the program: {candidate.reason}"
        )
    if tiles is not None:
        ops = place_kernels(written)
        chosen = [_with_tiles(op, dict(t), candidate) for op, t in zip(ops, tiles, strict=True)]
        return replace(written, schedules=tuple(chosen))
    kinds = [mma for mma in (False, True) if candidate.allows(mma)]
    try:
        schedules = [space.chosen(op, kinds) for op in place_kernels(written)]
    except errors.CodegenError:
        return written  # It runs on a CPU. Generating code for it raises this error again.
    return written if None in schedules else replace(written, schedules=tuple(schedules))


def _check_tiles(tiles: object, ops: int) -> None:
    if not isinstance(tiles, (list, tuple)) or not all(map(_is_tiles, tiles)):
        raise errors.CodegenError(
            f"ugraph: tiles is {tiles!r}; give a list of one mapping for each customized op, "
            "from axes to integers, as BlockGraphBuilder.schedule returns it"
        )
    if len(tiles) != ops:
        raise errors.CodegenError(
            f"ugraph: {len(tiles)} tiles for {ops} customized ops; give one mapping each, in order"
        )


def _is_tiles(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(t, int) and not isinstance(t, bool) for t in given.values()
    )


def _with_tiles(op: KernelOp, tiles: dict[str, int], candidate: Candidate) -> Schedule:
    """Return the best schedule with these tiles.

    Everything else in it is the cost model's choice for other tiles.
    """
    assert op.block is not None
    reason = "its rounding was rejected with multiply-adds and on tensor cores"
    for schedule in _schedules_with_tiles(op, tiles):
        if not candidate.allows(schedule.mma):
            continue
        try:
            schedule.check(op.block)
            plan_kernel(op, schedule)
            return schedule
        except errors.CodegenError as e:
            reason = str(e)
    raise errors.CodegenError(
        f"no kernel has the tiles {tiles}: {reason}; write other counts, or leave tiles to the "
        "cost model"
    )


def _schedules_with_tiles(op: KernelOp, tiles: dict[str, int]) -> Iterator[Schedule]:
    """Yield each schedule of the op with `tiles` in place of its own, then default schedules."""
    ranked = [replace(s, tiles=tiles) for s in space.schedules(op)]
    plain = [Schedule(tiles, mma=mma) for mma in (False, True)]
    yield from dict.fromkeys([*ranked, *plain])
