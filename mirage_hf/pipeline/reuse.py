"""Use what a search found for other sizes: order it by estimates, and prove it for these sizes."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from mirage_hf.codegen.placement import place_kernels
from mirage_hf.errors import GraphError, Rejected
from mirage_hf.graph import symbolic
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import versions
from mirage_hf.pipeline.choose import promising
from mirage_hf.pipeline.outcome import Outcome
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates, by_elements
from mirage_hf.pipeline.trust import examined_ugraph, too_large
from mirage_hf.search.search_report import Counters, RejectedCandidate, SearchReport, StopReason
from mirage_hf.tune import space
from mirage_hf.tune.schedule_cost import estimated_us
from mirage_hf.verify.accept import Candidate, kind_of
from mirage_hf.verify.numeric import NumericChecks
from mirage_hf.verify.verdict import Accepted
from mirage_hf.zoo.known_search import MOST_KERNELS, KnownSearch
from mirage_hf.zoo.structure import structure_of

#: Why a search may have missed candidates, or was none.
_NOT_A_WHOLE_SEARCH = (StopReason.TIME, StopReason.INTERRUPTED, StopReason.LOADED)


def reused(
    known: KnownSearch,
    program: KernelGraph,
    *,
    like: KernelGraph | None,
    keep: int,
    seed: int,
    next_may_launch_early: bool,
    gpu: torch.device | None = None,
    choose: Callable[[Sequence[Candidate]], int | None] | None = None,
) -> VerifiedCandidates | None:
    """Return the candidates of a search for other sizes that may run, best estimate first.

    Nothing of the old search is trusted. Each candidate is proven and checked for these sizes.

    Args:
        known: The search.
        program: The program.
        like: See `Request`. Rounding is checked at the smaller of both.
        keep: How many candidates to look at.
        seed: The seed of the proofs' random inputs.
        next_may_launch_early: See `placement.place_kernels`.
        gpu: The GPU that checks the rounding of large programs. None: the CPU does.
        choose: Returns the place of the candidate that will run, if all of them pass. Then only
            this one is proven. None, or no place: all of them are.

    Returns:
        None if no candidate passes.
    """
    start = time.perf_counter()
    small = min((program, like or program), key=by_elements)
    ugraphs, smaller = (_usable(known, each) for each in (program, small))
    rejected: list[RejectedCandidate] = []
    proven: dict[int, Candidate] = {}
    checks = NumericChecks(gpu)
    left = [n for n in _by_estimate(ugraphs, next_may_launch_early) if n in smaller]
    while kept := left[:keep]:
        place = choose([proven.get(n) or _assumed(ugraphs[n]) for n in kept]) if choose else None
        wanted = kept if place is None else [kept[place]]
        number = next((n for n in wanted if n not in proven), None)
        if number is None:
            break
        candidate = examined_ugraph(smaller[number], seed, checks)
        if isinstance(candidate, Rejected):
            rejected.append(RejectedCandidate(number, candidate.reason))
            left.remove(number)
            continue
        try:  # what runs is what was proven, cut to the sizes of the program
            ugraph = symbolic.for_program(candidate.ugraph, program)
        except GraphError:
            left.remove(number)
        else:
            proven[number] = replace(candidate, ugraph=ugraph)
    candidates = [proven[n] for n in (wanted if kept else ())]
    if not candidates:
        return None
    report = SearchReport(
        Counters(),
        StopReason.LOADED,
        reason="from a search for other sizes",
        found=len(candidates),
        rejected=tuple(rejected),
        error_bound=max(c.error_bound for c in candidates),
        proof_seconds=time.perf_counter() - start,
    )
    return VerifiedCandidates(tuple(candidates), report)


def _assumed(ugraph: UGraph) -> Candidate:
    """Return a µGraph as a candidate that passes all checks, to ask whether it would be chosen."""
    return Candidate(ugraph, 0.0, 0.0, Accepted(), Accepted())


def _usable(known: KnownSearch, program: KernelGraph) -> dict[int, UGraph]:
    """Return the µGraphs that fit a program and are worth a proof, by their places."""
    ugraphs = known.ugraphs(program)
    return {n: u for n, u in ugraphs.items() if u.is_fused and too_large(u) is None}


def _by_estimate(ugraphs: Mapping[int, UGraph], next_may_launch_early: bool) -> list[int]:
    """Return the places of the µGraphs that have a kernel, lowest estimate first."""
    estimates: dict[int, float] = {}
    for number, ugraph in ugraphs.items():
        with contextlib.suppress(Exception):  # whatever an edited file leads to
            ops = place_kernels(ugraph, next_may_launch_early)
            first = [replace(space.schedules(op, limit=1)[0], trigger_early=True) for op in ops]
            estimates[number] = sum(map(estimated_us, ops, first))
    return sorted(estimates, key=estimates.__getitem__)


def search_to_keep(outcome: Outcome) -> KnownSearch | None:
    """Return the search of an outcome with the best candidate of each kind, then the second best.

    Which kind is fast depends on sizes. Kinds of fewer kernels come first.

    Returns:
        None if it found nothing, was cut short, or was no search, or if its program has symbolic
        dims.
    """
    request, verified = outcome.request, outcome.verified
    if verified.report.stop in _NOT_A_WHOLE_SEARCH or structure_of(request.program) is None:
        return None
    ordered = promising(verified.candidates, request.key.next_may_launch_early)
    if not ordered:
        return None
    seen: Counter[object] = Counter()
    place: dict[int, tuple[int, int]] = {}
    for number, c in enumerate(ordered):
        kind = c.ugraph.num_kernels, kind_of(c.ugraph)
        place[number] = seen[kind], c.ugraph.num_kernels
        seen[kind] += 1
    best = sorted(range(len(ordered)), key=lambda n: place[n])[:MOST_KERNELS]
    kernels = tuple(ordered[n].ugraph.kernels for n in best)
    return KnownSearch(request.program, kernels, versions.search_version())
