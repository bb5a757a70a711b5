"""Rank the candidates of a program by the cost model alone: searched µGraphs × their schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mirage_hf.codegen.generated_program import CUDA, TRITON
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.gpus import H200, Device
from mirage_hf.graph import effects
from mirage_hf.graph.kernel import KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.tune import space
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.cost import library_us
from mirage_hf.tune.cuda_schedules import cuda_schedules
from mirage_hf.tune.schedule_cost import estimated_us

#: The schedules to try for an op on a GPU, best first.
Schedules = Callable[[KernelOp, Device], Sequence[Schedule]]

#: Candidates estimated to take this many times the best estimate are not tried.
HOPELESS = 3.0


def rank_by_estimate(
    ugraphs: Sequence[UGraph],
    gpu: Device = H200,
    per_graph: int = 32,
    schedules: Schedules = space.schedules,
    next_may_launch_early: bool = False,
    generators: Sequence[str] = (TRITON,),
    in_cuda: Schedules = cuda_schedules,
) -> list[ScheduledCandidate]:
    """Return candidates and the library path by the cost model alone, best estimate first.

    Args:
        ugraphs: µGraphs of the same program.
        gpu: The GPU to estimate for.
        per_graph: The most schedules of each µGraph.
        schedules: The schedules of Triton kernels to try for an op, best first. By default all.
        next_may_launch_early: See `placement.place_kernels`.
        generators: Which generators write the kernels. Their candidates take turns, because their
            estimates cannot be compared.
        in_cuda: The schedules of CUDA kernels to try for an op, best first.

    Raises:
        CodegenError: A block graph has no kernel at all.
    """
    ranked = [
        _ranked_of(
            [u for u in ugraphs if g == CUDA or not u.is_clustered],
            gpu,
            per_graph,
            in_cuda if g == CUDA else schedules,
            next_may_launch_early,
        )
        for g in generators
    ]
    turns = itertools.zip_longest(*ranked)
    found = [c for turn in turns for c in turn if c is not None]
    library = [_library(ugraphs[0].program, gpu)] if ugraphs else []
    later = [c.estimate_us > library[0].estimate_us for c in found] if library else []
    first = later.index(True) if True in later else len(found)
    return [*found[:first], *library, *found[first:]]


def _ranked_of(
    ugraphs: Sequence[UGraph],
    gpu: Device,
    per_graph: int,
    schedules: Schedules,
    next_may_launch_early: bool,
) -> list[ScheduledCandidate]:
    """Return the candidates of one generator, best estimate first."""
    found: list[ScheduledCandidate] = []
    for ugraph in ugraphs:
        if ugraph.is_fused:
            candidates = _scheduled(ugraph, gpu, schedules, next_may_launch_early)
            found += itertools.islice(candidates, per_graph)
    best = min((c.estimate_us for c in found), default=0.0)
    hopeful = [c for c in found if c.estimate_us <= HOPELESS * best]
    return sorted(hopeful, key=lambda c: c.estimate_us)


def _library(program: KernelGraph, gpu: Device) -> ScheduledCandidate:
    """Return the library path as a candidate."""
    library = library_ugraph(program)
    return ScheduledCandidate(library, (), sum(library_us(op, gpu) for op in library.kernels.ops))


def _scheduled(
    ugraph: UGraph, gpu: Device, schedules: Schedules, next_may_launch_early: bool
) -> Iterator[ScheduledCandidate]:
    """Yield a µGraph with the n-th best schedule of every block graph, if all have one."""
    ops = place_kernels(ugraph, next_may_launch_early)
    ranked = [schedules(op, gpu) for op in ops]
    if not ranked or not all(ranked):
        return
    library = _library_part_us(ugraph, gpu)
    for n in range(max(map(len, ranked))):
        chosen = tuple(
            replace(choices[min(n, len(choices) - 1)], trigger_early=op.next_may_launch_early)
            for choices, op in zip(ranked, ops, strict=True)
        )
        own = sum(estimated_us(op, s, gpu) for op, s in zip(ops, chosen, strict=True))
        yield ScheduledCandidate(
            ugraph, chosen, own + library, next_may_launch_early=next_may_launch_early
        )


def _library_part_us(ugraph: UGraph, gpu: Device) -> float:
    """Estimate the library calls of a µGraph, without the appends that generated kernels do."""
    appends_in_kernels = set(map(id, effects.stored(ugraph.kernels).values()))
    calls = [
        op for op in ugraph.kernels.ops if op.block is None and id(op) not in appends_in_kernels
    ]
    return sum(library_us(op, gpu) for op in calls)
