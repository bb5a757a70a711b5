"""Cut the kernels found for a program to another that differs in the sizes of some dims."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import CodegenError
from mirage_hf.graph import symbolic
from mirage_hf.graph.block import BlockGraph, Role
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import torch_op
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.pipeline.torch_op import Run
from mirage_hf.tune.neighbours import MOST_SPLITS
from mirage_hf.tune.refit import refit


def at_size(resolved: Resolved, program: KernelGraph, device: torch.device) -> Run:
    """Return what runs a program by the kernels found for another that differs in sizes.

    The µGraph is the same, because its proof holds for every size. Its schedules are cut to the
    sizes of `program`.

    Raises:
        CodegenError: The kernels cannot be cut to these sizes.
        GraphError: The programs differ in more than sizes.
    """
    if not resolved.runs_kernel:
        return partial(run_kernel_graph, program)
    if device.type != "cuda":
        return partial(run_kernel_graph, symbolic.for_program(resolved.ugraph, program).kernels)
    schedules = resolved.ugraph.schedules or resolved.entry.schedules
    early = resolved.entry.key.next_may_launch_early
    try:
        ugraph, cut_schedules = cut_to(resolved.ugraph, schedules, program, early)
    except CodegenError as e:
        raise CodegenError(f"{resolved.entry.pattern}: {e}") from e
    generated = triton.generate(ugraph, cut_schedules, next_may_launch_early=early)
    return torch_op.launcher(generated)


def cut_to(
    ugraph: UGraph,
    schedules: Sequence[Schedule],
    program: KernelGraph,
    next_may_launch_early: bool = False,
) -> tuple[UGraph, list[Schedule]]:
    """Return a µGraph and its schedules for a program that differs in the sizes of some dims.

    Args:
        ugraph: The µGraph.
        schedules: One schedule for each of its block graphs.
        program: The program of other sizes.
        next_may_launch_early: See `placement.place_kernels`.

    Raises:
        CodegenError: No schedule fits.
        GraphError: The programs differ in more than sizes.
    """
    resized = _with_equal_splits(ugraph, symbolic.for_program(ugraph, program))
    before = place_kernels(ugraph, next_may_launch_early)
    after = place_kernels(resized, next_may_launch_early)
    cut_schedules = [
        refit(schedule, old, new)
        for schedule, old, new in zip(schedules, before, after, strict=True)
    ]
    return resized, cut_schedules


def _with_equal_splits(old: UGraph, new: UGraph) -> UGraph:
    """Return `new` with as many splits of each axis as keep them as long as in `old`."""
    for op in old.block_ops:
        assert op.block is not None
        for axis in op.block.named(Role.TILE):
            size = _same_block(op.block, new).axis(axis.name).size
            if axis.split_axis is not None and size > axis.size:
                number = -(-size // op.block.split_size(axis.name))
                new = symbolic.with_num_splits(new, axis.split_axis, min(MOST_SPLITS, number))
    return new


def _same_block(block: BlockGraph, ugraph: UGraph) -> BlockGraph:
    """Return the block graph of `ugraph` that has the stages of `block`."""
    blocks = (op.block for op in ugraph.block_ops if op.block is not None)
    return next(b for b in blocks if b.stages == block.stages)
