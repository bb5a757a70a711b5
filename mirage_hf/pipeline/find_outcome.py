"""The one way from a program to its kernels: look up, else search, verify, tune and store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mirage_hf.errors import Rejected
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import searching_ahead, tuning_ahead
from mirage_hf.pipeline.checkpoint import CheckpointJournal
from mirage_hf.pipeline.choose import place_of_choice, schedule_candidates, takes_relatives
from mirage_hf.pipeline.outcome import Outcome
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.results import Results, StoredEntry
from mirage_hf.pipeline.reuse import reused
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates, search_and_verify
from mirage_hf.pipeline.windows import ProgressCallback
from mirage_hf.search.search_journal import SearchJournal
from mirage_hf.tune.relatives import Tuned


@dataclass(frozen=True)
class NewOutcome:
    """An outcome that was not looked up.

    Attributes:
        outcome: What came of the request.
        unkept: Why it could not be stored, so that it is made again next time. Empty if it was.
    """

    outcome: Outcome
    unkept: str = ""


def find_outcome(
    request: Request, results: Results, progress: ProgressCallback | None = None
) -> StoredEntry | NewOutcome:
    """Return what is stored for the request; if nothing is, search, verify, tune and store.

    Candidates of `superoptimize()` are stored as soon as they are verified, and measured in every
    process anew. The kernel of `optimize()` is stored after it was measured.

    Args:
        request: What is asked for.
        results: Where to look, and where to store.
        progress: Called with a stage and its detail.

    Raises:
        SearchError: The search cannot take the program, or nothing keeps to the restriction.
        FormatError: A checkpoint cannot be used.
    """
    loaded = results.load(request)
    if isinstance(loaded, StoredEntry):
        return loaded
    if isinstance(loaded, VerifiedCandidates):
        tuned = partial(results.tuned, request.key.target)
        under_way = tuning_ahead.begin(schedule_candidates(request, loaded, tuned))
        with contextlib.closing(under_way):
            return NewOutcome(tuning_ahead.finish(under_way, progress))
    journal = None if loaded is None or isinstance(loaded, Rejected) else loaded
    ahead = tuning_ahead.take(request)
    under_way = ahead or tuning_ahead.begin(_scheduled(request, results, journal, progress))
    with contextlib.closing(under_way):
        results.keep_search(under_way.outcome)
        if request.all_candidates:
            unkept = results.store(under_way.outcome)
            outcome = tuning_ahead.finish(under_way, progress)
        else:
            outcome = tuning_ahead.finish(under_way, progress)
            unkept = results.store(outcome)
    if isinstance(loaded, Rejected):
        outcome = with_notes(outcome, f"{loaded.reason}; searched anew")
    elif isinstance(loaded, CheckpointJournal) and loaded.loaded:
        steps = f"{loaded.loaded} finished steps of {loaded.path}"
        outcome = with_notes(outcome, f"went on from {steps}")
    return NewOutcome(outcome, unkept.reason if unkept is not None else "")


def _scheduled(
    request: Request,
    results: Results,
    journal: SearchJournal | None,
    progress: ProgressCallback | None,
) -> Outcome:
    """Search for a request, or take what was searched, and give the candidates schedules."""
    tuned = partial(results.tuned, request.key.target)
    verified = None
    if journal is None:
        name = searching_ahead.name_of(request)
        tuning_ahead.tune_others_until(lambda: not searching_ahead.is_under_way(name))
        meanwhile = tuned if takes_relatives(request) else lambda: ()
        verified = searching_ahead.take(request, meanwhile) or _reused(request, results, tuned)
    if verified is None:
        verified = search_and_verify(
            request.program,
            request.options,
            progress,
            seed=request.seed,
            like=request.like,
            keep=request.keep,
            journal=journal,
        )
    return schedule_candidates(request, verified.resized(request.program), tuned)


def _reused(
    request: Request, results: Results, tuned: Callable[[], Sequence[Tuned]]
) -> VerifiedCandidates | None:
    """Return the candidates of a search for other sizes that may run, or None.

    If nothing will be measured, the one that runs is enough.
    """
    known = request.known or results.known_search(request)
    if known is None:
        return None
    most = request.options.max_kernels
    few = tuple(k for k in known.kernels if UGraph(known.program, k).num_kernels <= most)
    if not few:
        return None
    return reused(
        replace(known, kernels=few),
        request.program,
        like=request.like,
        keep=request.keep,
        seed=request.seed,
        next_may_launch_early=request.key.next_may_launch_early,
        gpu=request.runs_on,
        choose=partial(place_of_choice, request=request, tuned=tuned)
        if takes_relatives(request)
        else None,
    )


def with_notes(outcome: Outcome, *notes: str) -> Outcome:
    """Return the outcome with further notes in its report."""
    report = replace(outcome.report, notes=(*outcome.report.notes, *notes))
    return replace(outcome, verified=replace(outcome.verified, report=report))
