"""Choose among verified candidates: order them, give them schedules, measure them on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from mirage_hf.codegen.generated_program import CUDA, TRITON
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.kernel import KernelOp
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.pipeline.outcome import Outcome
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates
from mirage_hf.tune import relatives, schedule_cost, space
from mirage_hf.tune.candidates import TuneResult
from mirage_hf.tune.cuda_schedules import cuda_schedules
from mirage_hf.tune.relatives import Tuned
from mirage_hf.tune.stream_schedules import LEAST_SM
from mirage_hf.tune.tuner import Tuning
from mirage_hf.verify.accept import Candidate, kind_of

#: How many candidates of two kernels, of different kinds, are moved forward in the order, and the
#: place of the first.
_PAIRS_MOVED, _FIRST_PLACE = 3, 2

#: The most kernels of a µGraph of `superoptimize()` that get schedules at once. Each takes 20 ms,
#: so those of a µGraph with a thousand outputs would take longer than the search.
_MOST_SCHEDULED = 64


def schedule_candidates(
    request: Request, verified: VerifiedCandidates, tuned: Callable[[], Sequence[Tuned]]
) -> Outcome:
    """Return the outcome of a search without measuring: candidates with schedules, best first.

    Args:
        request: The request.
        verified: Its candidates.
        tuned: Returns kernels that were measured on the target. If nothing will be measured, a
            candidate may take its schedules from them.

    Raises:
        SearchError: No kernel keeps to the request's restriction.
    """
    library = library_ugraph(request.program)
    if TRITON not in request.generators:
        return _in_cuda(request, verified, library)
    verified, obstacle = _without_obstacles(verified, request)
    if not verified.candidates:
        return Outcome(request, verified, (library,), obstacle or verified.report.reason)
    if request.restriction is not None:
        restricted = request.restriction.scheduled(verified.ugraphs())
        verified = _only(verified, restricted)
        return Outcome(request, verified, (*restricted, library))
    if request.all_candidates:
        scheduled = [
            _scheduled(c) if _has_schedules(c, request) else c.ugraph for c in verified.candidates
        ]
        return Outcome(request, verified, (*scheduled, library))
    best = _best_scheduled(verified.candidates, request, tuned)
    if not best.is_fused:
        reason = "the numbers of every candidate were rejected for all of its schedules"
        return Outcome(request, verified, (library,), reason)
    return Outcome(request, verified, (best, library))


def _best_scheduled(
    candidates: Sequence[Candidate], request: Request, tuned: Callable[[], Sequence[Tuned]]
) -> UGraph:
    """Return the best of candidates that have kernels, with schedules. Else the library path."""
    early, streams = request.key.next_may_launch_early, may_stream(request)
    ranked = promising(candidates, early, streams)
    best = first_scheduled(ranked[0], request.runs_generated, early, streams)
    if best.is_fused and takes_relatives(request):
        best = _like_a_relative(ranked, tuned(), request) or best
    return best


def place_of_choice(
    candidates: Sequence[Candidate], request: Request, tuned: Callable[[], Sequence[Tuned]]
) -> int | None:
    """Return which candidate `schedule_candidates` would choose without measuring.

    None if the library would run.
    """
    early = request.key.next_may_launch_early
    places = {
        id(c.ugraph.kernels): place
        for place, c in enumerate(candidates)
        if not space.obstacle(place_kernels(c.ugraph, early))
    }
    usable = [candidates[place] for place in places.values()]
    best = _best_scheduled(usable, request, tuned) if usable else None
    return None if best is None else places.get(id(best.kernels))


def _in_cuda(request: Request, verified: VerifiedCandidates, library: UGraph) -> Outcome:
    """Return the outcome of a request for CUDA kernels, at the schedules of the best estimates."""
    usable = tuple(promising_in_cuda(verified.candidates, request.key.next_may_launch_early))
    left_out = len(verified.candidates) - len(usable)
    notes = (f"{left_out} µGraphs were left out: the CUDA generator does not write them",)
    report = replace(verified.report, notes=(*verified.report.notes, *notes[: min(1, left_out)]))
    verified = replace(verified, candidates=usable, report=report)
    scheduled = []
    for c in usable:
        ops = place_kernels(c.ugraph, request.key.next_may_launch_early)
        schedules = tuple(cuda_schedules(op)[0] for op in ops)
        scheduled.append(replace(c.ugraph, schedules=schedules))
    none = verified.report.reason or "the CUDA generator writes no candidate; use backend='triton'"
    reason = "" if usable else none
    return Outcome(request, verified, (*scheduled, library), reason)


def tuning_of(outcome: Outcome) -> Tuning | None:
    """Return the tuning that measures an outcome's candidates and the library on the request's GPU.

    None if no GPU is named, or if there is no searched kernel.
    """
    request, candidates = outcome.request, outcome.verified.candidates
    if request.device is None or not outcome.ugraphs[0].is_fused:
        return None
    restriction, effort = request.restriction, request.effort
    if restriction is not None:
        ugraphs: Sequence[UGraph] = [u for u in outcome.ugraphs if u.is_fused]
    elif CUDA in request.generators:
        in_cuda = [c.ugraph for c in promising_in_cuda(candidates)]
        plain = outcome.verified.ugraphs() if TRITON in request.generators else []
        ugraphs = list({id(u.kernels): u for u in (*plain, *in_cuda)}.values())
    elif request.all_candidates:
        ugraphs = outcome.verified.ugraphs()
    else:
        early = request.key.next_may_launch_early
        ugraphs = [c.ugraph for c in promising(candidates, early, may_stream(request))]
    return Tuning(
        ugraphs[: effort.graphs],
        device=request.device,
        per_graph=effort.schedules,
        rounds=effort.rounds,
        patience=effort.patience,
        schedules=restriction.schedules
        if restriction
        else permitted(candidates, may_stream(request)),
        resplit=restriction is None,
        next_may_launch_early=request.key.next_may_launch_early,
        checks_slow=request.all_candidates,
        generators=request.generators,
        in_cuda=permitted_in_cuda(candidates),
    )


def with_times(outcome: Outcome, result: TuneResult) -> Outcome:
    """Return the outcome with what tuning its candidates gave."""
    reason = "" if result.searched else next((c.reason for c in result.candidates if c.reason), "")
    return replace(outcome, ugraphs=result.ugraphs(), reason=reason, tuned=result)


def _without_obstacles(
    verified: VerifiedCandidates, request: Request
) -> tuple[VerifiedCandidates, str]:
    """Return the candidates that have a kernel, and the first reason why one has none.

    If every accepted µGraph is wanted, those without schedules are not looked at.
    """
    early, unseen = request.key.next_may_launch_early, request.all_candidates

    def obstacle(c: Candidate) -> str:
        if unseen and not _has_schedules(c, request):
            return ""
        return space.obstacle(place_kernels(c.ugraph, early))

    obstacles = {id(c): obstacle(c) for c in verified.candidates}
    usable = tuple(c for c in verified.candidates if not obstacles[id(c)])
    notes = [
        f"a µGraph of {c.ugraph.num_kernels} kernels was left out: {obstacles[id(c)]}"
        for c in verified.candidates
        if obstacles[id(c)]
    ]
    report = replace(verified.report, notes=(*verified.report.notes, *notes))
    first = next((reason for reason in obstacles.values() if reason), "")
    return replace(verified, candidates=usable, report=report), first


def _only(verified: VerifiedCandidates, ugraphs: Sequence[UGraph]) -> VerifiedCandidates:
    """Return the candidates whose kernels are those of one of the µGraphs."""
    kernels = {id(u.kernels) for u in ugraphs}
    kept = [c for c in verified.candidates if id(c.ugraph.kernels) in kernels]
    return replace(verified, candidates=tuple(kept))


def _has_schedules(candidate: Candidate, request: Request) -> bool:
    """Return whether a result of `superoptimize()` gets schedules.

    Those of many kernels, and those whose blocks form clusters, are scheduled when their code is
    generated.
    """
    is_clustered = request.options.clusters and candidate.ugraph.is_clustered
    return not is_clustered and len(candidate.ugraph.block_ops) <= _MOST_SCHEDULED


def _scheduled(candidate: Candidate) -> UGraph:
    """Give a µGraph the cost model's first choice among schedules whose rounding holds.

    Without a GPU nothing is compiled and checked, so the rounding must have been accepted before.
    """
    kinds = kinds_of_product(candidate)
    schedules = tuple(space.chosen(op, kinds) for op in place_kernels(candidate.ugraph))
    if None in schedules:
        return candidate.ugraph
    return replace(candidate.ugraph, schedules=schedules)


def takes_relatives(request: Request) -> bool:
    """Return whether kernels get the schedules of tuned ones: nothing will be measured."""
    return request.runs_generated and request.device is None and not request.all_candidates


def may_stream(request: Request) -> bool:
    """Return whether a request may be served by CUDA kernels that stream codes.

    They are for models, and for GPUs of compute capability 9.0 and more.
    """
    target = request.key.target.removeprefix("sm_")
    return not request.all_candidates and target.isdecimal() and int(target) >= LEAST_SM


def first_scheduled(
    candidate: Candidate,
    runs_generated: bool,
    next_may_launch_early: bool = False,
    streams: bool = False,
) -> UGraph:
    """Return the candidate at its first permitted schedules.

    Its kernels launch the next one early where they may, as the tuner's candidates do. If it has no
    schedule and generated kernels will run, return the library path. A CPU runs no schedule, so any
    will do there.
    """
    allowed = permitted([candidate], streams)
    schedules = []
    for op in place_kernels(candidate.ugraph, next_may_launch_early):
        choices = allowed(op, H200)
        if not choices and runs_generated:
            return library_ugraph(candidate.ugraph.program)
        first = (choices or space.schedules(op, limit=1))[0]
        schedules.append(replace(first, trigger_early=op.next_may_launch_early))
    return replace(candidate.ugraph, schedules=tuple(schedules))


def _like_a_relative(
    candidates: Sequence[Candidate], tuned: Sequence[Tuned], request: Request
) -> UGraph | None:
    """Return a candidate with the schedules of the nearest tuned kernels of the same structure.

    Candidates that the estimate says are clearly slow are left out. None if no other has relatives.
    """
    early, gpu = request.key.next_may_launch_early, request.options.gpu
    found: list[tuple[float, float, UGraph]] = []
    best_us = math.inf
    for candidate in candidates:
        kinds = kinds_of_product(candidate)
        ops = place_kernels(candidate.ugraph, early)
        first = [space.chosen(op, kinds) for op in ops]
        schedules = [s for s in first if s is not None]
        if len(schedules) == len(ops):
            best_us = min(best_us, relatives.estimated_us(ops, schedules, gpu))
        for apart, stored in relatives.relatives(ops, tuned):
            relative = stored.read()
            refitted = None if relative is None else relatives.refitted(ops, relative, gpu)
            if refitted is not None and all(s.mma in kinds for s in refitted):
                us = relatives.estimated_us(ops, refitted, gpu)
                found.append((apart, us, replace(candidate.ugraph, schedules=refitted)))
                break
    likely = [f for f in found if relatives.is_trusted(f[0], f[1], best_us)]
    return min(likely, key=lambda f: f[:2])[2] if likely else None


def kinds_of_product(candidate: Candidate) -> set[bool]:
    """Return the kinds of product whose rounding holds, as values of `Schedule.mma`."""
    return {mma for mma in (False, True) if candidate.allows(mma)}


def permitted(
    candidates: Sequence[Candidate], streams: bool = False
) -> Callable[[KernelOp, Device], list[Schedule]]:
    """Return a function that lists an op's schedules whose rounding was accepted.

    Schedules on tensor cores are among them only if their rounding was accepted. CUDA kernels that
    stream codes are among them if `streams`.
    """
    kinds = ((c.ugraph, kinds_of_product(c)) for c in candidates)
    return space.permitted(kinds, streams)


def permitted_in_cuda(
    candidates: Sequence[Candidate],
) -> Callable[[KernelOp, Device], list[Schedule]]:
    """Return a function that lists an op's schedules of CUDA kernels.

    It lists none if the rounding of multiply-adds was not accepted.
    """
    return space.permitted_in_cuda((c.ugraph, kinds_of_product(c)) for c in candidates)


def promising(
    candidates: Sequence[Candidate], next_may_launch_early: bool = False, streams: bool = False
) -> list[Candidate]:
    """Return the candidates that have a kernel, in the order in which to tune them.

    The cost model's estimate of a permitted schedule decides. A candidate without one comes last.
    The best candidates of two kernels, of three different kinds, come fifth at the latest, because
    the model misjudges them. If the first two are of one kind, the best single kernel of another
    kind comes second, such as one that loops where they hold all in registers. A second kernel
    costs less than it says if launches overlap, and only measuring shows which intermediate result
    is best stored.

    Args:
        candidates: Verified candidates for one program.
        next_may_launch_early: See `placement.place_kernels`.
        streams: Whether they may be CUDA kernels that stream codes.
    """
    usable = [
        c for c in candidates if not space.obstacle(place_kernels(c.ugraph, next_may_launch_early))
    ]
    schedules_of = permitted(usable, streams)

    def estimated_us(c: Candidate) -> float:
        total = 0.0
        for op in place_kernels(c.ugraph, next_may_launch_early):
            schedules = schedules_of(op, H200)
            if not schedules:
                return math.inf
            total += schedule_cost.estimated_us(op, replace(schedules[0], trigger_early=True))
        return total

    us = {id(c): estimated_us(c) for c in usable}
    ordered = sorted(usable, key=lambda c: us[id(c)])
    kinds = {kind_of(c.ugraph) for c in ordered[:_FIRST_PLACE]}
    others = (c for c in ordered if c.ugraph.num_kernels == 1 and kind_of(c.ugraph) not in kinds)
    single = next(others, None)
    if single is not None and len(kinds) == 1 and math.isfinite(us[id(single)]):
        ordered.remove(single)
        ordered.insert(_FIRST_PLACE - 1, single)
    pairs: dict[object, Candidate] = {}
    for c in ordered:
        if c.ugraph.num_kernels == 2:
            pairs.setdefault(kind_of(c.ugraph), c)
    for place, pair in enumerate(list(pairs.values())[:_PAIRS_MOVED], _FIRST_PLACE):
        if ordered.index(pair) > place:
            ordered.remove(pair)
            ordered.insert(place, pair)
    return ordered


def promising_in_cuda(
    candidates: Sequence[Candidate], next_may_launch_early: bool = False
) -> list[Candidate]:
    """Return the candidates whose kernels the CUDA generator writes, best estimate first.

    Their products are multiply-adds, so the rounding of these must have been accepted.
    """
    found = []
    for c in candidates:
        if not c.allows(False):
            continue
        ops = place_kernels(c.ugraph, next_may_launch_early)
        first = [next(iter(cuda_schedules(op)), None) for op in ops]
        if None not in first:
            pairs = zip(ops, first, strict=True)
            found.append((sum(schedule_cost.estimated_us(op, s) for op, s in pairs if s), c))
    return [c for _, c in sorted(found, key=lambda pair: pair[0])]
