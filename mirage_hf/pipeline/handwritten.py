"""µGraphs whose kernels somebody wrote: accepted like found ones, then run, compiled, drawn and saved like them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The µGraph that computes `program` by `kernels`, a kernel graph with customized ops on the same inputs.

    tiles: for each customized op in order, what `BlockGraphBuilder.schedule` returns, so that kernels have the numbers of blocks and
    trips that were written; without it the cost model chooses, and grid_dim and forloop_range decide roles only.
    Errors: VerificationError with the reason when the kernels compute something else or round worse; CodegenError for `tiles` that
    no kernel can have.
    """
    for what, graph in (("program", program), ("kernels", kernels)):
        if not isinstance(graph, KernelGraph):
            raise errors.GraphError(
                f"ugraph: {what} must be a graph made by mi.new_kernel_graph(), it is {type(graph).__name__}"
            )
    found = UGraph(
        program.copy(), kernels.copy()
    )  # what is proven stays as it is, whatever is added to theirs
    if tiles is not None and not (isinstance(tiles, (list, tuple)) and all(map(_is_tiles, tiles))):
        raise errors.CodegenError(
            f"ugraph: tiles is {tiles!r}; give a list of one mapping for each customized op, from axes to integers, "
            "as BlockGraphBuilder.schedule returns it"
        )
    if tiles is not None and len(tiles) != len(found.block_ops):
        raise errors.CodegenError(
            f"ugraph: {len(tiles)} tiles for {len(found.block_ops)} customized ops; give one mapping each, in order"
        )
    candidate = examine(found)
    if isinstance(candidate, Rejected):
        raise errors.VerificationError(
            f"these kernels are not accepted for the program: {candidate.reason}"
        )
    if tiles is not None:
        chosen = [
            _with_tiles(op, dict(t), candidate)
            for op, t in zip(place_kernels(found), tiles, strict=True)
        ]
        return replace(found, schedules=tuple(chosen))
    try:
        schedules = [
            space.chosen(op, [mma for mma in (False, True) if candidate.allows(mma)])
            for op in place_kernels(found)
        ]
    except errors.CodegenError:
        return found  # it runs on a CPU all the same; generating code says why it cannot
    return found if None in schedules else replace(found, schedules=tuple(schedules))


def _is_tiles(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(t, int) and not isinstance(t, bool) for t in given.values()
    )


def _with_tiles(op: KernelOp, tiles: dict[str, int], candidate: Candidate) -> Schedule:
    """The best schedule that has these tiles; what else it decides is the cost model's choice for other tiles."""
    assert op.block is not None
    reason = "its rounding was refused with multiply-adds and on tensor cores"
    for base in dict.fromkeys(
        [
            *(replace(s, tiles=tiles) for s in space.schedules(op)),
            *(Schedule(tiles, mma=mma) for mma in (False, True)),
        ]
    ):
        if not candidate.allows(base.mma):
            continue
        try:
            base.check(op.block)
            plan_kernel(op, base)
            return base
        except errors.CodegenError as e:
            reason = str(e)
    raise errors.CodegenError(
        f"no kernel has the tiles {tiles}: {reason}; write other counts, or leave tiles to the cost model"
    )
