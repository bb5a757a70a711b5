"""Search a program, then prove and check what the search returns."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from mirage_hf.errors import Rejected
from mirage_hf.graph import symbolic
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.pipeline.windows import ProgressCallback, search_windows
from mirage_hf.search.engine import search
from mirage_hf.search.lowering import lower
from mirage_hf.search.search_journal import RankedUGraph, SearchJournal
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.search_report import SearchReport, StopReason
from mirage_hf.search.split_appends import SplitAppends, split_appends
from mirage_hf.verify.accept import KEEP, Acceptance, Candidate, accept

#: A program of at most this many ops is searched as one. See `_computing_ops`. Attention of a
#: decoding step with q/k norms, RoPE and a cache has 21 ops and takes a second.
MAX_WHOLE_OPS = 24

#: Kinds of ops that compute more than a decoded weight.
_COMPUTING = ("contract", "reduce", "composite")

#: The least seconds that windows get if the program alone took the time limit.
_LEAST_SECONDS = 0.01

#: The same limit for a program that appends to caches, because windows would leave its appends to
#: library calls. Attention with biases, a mask, softcap and a sink has 33 ops and takes four
#: seconds. With a norm over all heads it has 47 ops.
MAX_WHOLE_OPS_WITH_APPENDS = 56


@dataclass(frozen=True)
class VerifiedCandidates:
    """What a search and its verification return.

    Attributes:
        candidates: Proven candidates that may run, lowest estimate first.
        report: What was tried, what was rejected, and why the search stopped.
    """

    candidates: tuple[Candidate, ...]
    report: SearchReport

    def ugraphs(self) -> tuple[UGraph, ...]:
        """Return the candidates' µGraphs, in order."""
        return tuple(c.ugraph for c in self.candidates)

    def resized(self, program: KernelGraph) -> VerifiedCandidates:
        """Return the same candidates for `program`, which may have other sizes of symbolic dims."""
        candidates = tuple(
            candidate
            if candidate.ugraph.program is program
            else replace(candidate, ugraph=symbolic.for_program(candidate.ugraph, program))
            for candidate in self.candidates
        )
        return replace(self, candidates=candidates)


def search_and_verify(
    program: KernelGraph,
    options: SearchOptions,
    progress: ProgressCallback | None = None,
    *,
    seed: int = 0,
    journal: SearchJournal | None = None,
    like: KernelGraph | None = None,
    keep: int = KEEP,
) -> VerifiedCandidates:
    """Search `program` and keep the candidates that are proven and whose rounding is accepted.

    A program is searched window by window (`windows.search_windows`) if it has ops that the search
    cannot lower, or more than `MAX_WHOLE_OPS` that do not just decode weights. So is one with more
    ops in all if no result of the whole search is accepted. `options.max_kernels` then limits each
    window. Options with `roles` name axes of the whole program, so such a search is never split.

    Args:
        program: The tensor program.
        options: Limits of the search.
        progress: Called with each stage and its detail.
        seed: Seed of the random evaluations that prove and check candidates.
        journal: Keeps finished steps, so that a stopped search can go on.
        like: The same program at other sizes. The larger of the two is searched, because size
            decides which kernels are fast. The smaller one is proven and checked, which is faster.
        keep: How many candidates to keep for each kind of arithmetic, as in `accept`.

    Returns:
        The candidates, as µGraphs of `program`, and the report.
    """
    start = time.perf_counter()
    small, large = sorted((program, like or program), key=by_elements)
    appends = split_appends(large)
    searched = appends.graph if appends else large
    lowered = lower(searched)
    reason = lowered.reason if isinstance(lowered, Rejected) else ""
    most_ops = MAX_WHOLE_OPS_WITH_APPENDS if appends else MAX_WHOLE_OPS

    may_split = not options.roles
    if may_split and (reason or _computing_ops(searched) > most_ops):
        return _by_windows(small, program, options, start, progress, seed, reason, journal)
    # a program of many ops may still need windows
    has_many_ops = may_split and len(searched.ops) > most_ops
    whole = replace(options, time_limit=options.time_limit / 2) if has_many_ops else options
    notify = progress or (lambda stage, detail: None)
    ranked, report = search(
        searched, whole, lambda counters: notify("search", counters), journal, lowered=lowered
    )
    ranked = [_of_program(r, appends, None if small is large else small) for r in ranked]
    seconds = time.perf_counter() - start
    accepted = accept(
        ranked,
        keep=keep,
        seed=seed,
        seconds=whole.time_limit - seconds,
        on_candidate=lambda number, verdict: notify("verify", verdict),
    )
    was_interrupted = report.stop is StopReason.INTERRUPTED
    if has_many_ops and not accepted.candidates and not was_interrupted:
        # windows may decode weights into memory, which rounds as the program does
        why = accepted.rejected[0].reason if accepted.rejected else "it found none"
        reason = f"no result of the whole search was accepted: {why}"
        return _by_windows(small, program, options, start, progress, seed, reason, journal)
    report = _with_acceptance(report, accepted, seconds)
    return VerifiedCandidates(accepted.candidates, report).resized(program)


def _by_windows(
    small: KernelGraph,
    program: KernelGraph,
    options: SearchOptions,
    start: float,
    progress: ProgressCallback | None,
    seed: int,
    reason: str,
    journal: SearchJournal | None,
) -> VerifiedCandidates:
    """Search a program window by window in the time that is left. `reason` says why."""
    left = options.time_limit - (time.perf_counter() - start)
    of_windows = replace(options, time_limit=max(left, _LEAST_SECONDS))
    candidates, report = search_windows(
        small, of_windows, progress, seed=seed, reason=reason, journal=journal
    )
    return VerifiedCandidates(candidates, report).resized(program)


def _computing_ops(graph: KernelGraph) -> int:
    """Return how many ops a search has to place, without those that decode weights.

    These are elementwise and layout ops on constants, and on what an index chooses from constants.
    A kernel computes them where it uses the weight.
    """
    constants = {t.index for t in graph.inputs if t.constant}
    count = 0
    for op in graph.ops:
        operands = op.inputs[:1] if op.name == "take" else op.inputs
        decodes = op.block is None and table.lookup(op.name).kind not in _COMPUTING
        if decodes and {x.index for x in operands if isinstance(x, DTensor)} <= constants:
            constants |= {t.index for t in op.outputs}
        else:
            count += 1
    return count


def by_elements(graph: KernelGraph) -> int:
    """Return the elements of a graph's inputs, by which programs of several sizes are ordered."""
    return sum(math.prod(t.dims) for t in graph.inputs)


def _of_program(
    ranked: RankedUGraph, appends: SplitAppends | None, small: KernelGraph | None
) -> RankedUGraph:
    """Put the appends back into a µGraph and resize it to the program that is verified."""
    ugraph = ranked.ugraph
    if appends:
        ugraph = appends.join(ugraph)
    if small is not None:
        ugraph = symbolic.for_program(ugraph, small)
    return replace(ranked, ugraph=ugraph)


def _with_acceptance(
    report: SearchReport, accepted: Acceptance, search_seconds: float
) -> SearchReport:
    """Add what verification did to the report of a search."""
    notes = report.notes
    if accepted.late:
        notes += (f"time was up before {accepted.late} more candidates were verified",)
    first = -1.0
    if accepted.first_seconds >= 0:
        first = search_seconds + accepted.first_seconds
    return replace(
        report,
        found=len(accepted.candidates),
        rejected=accepted.rejected,
        error_bound=accepted.error_bound,
        proof_seconds=accepted.seconds,
        first_accepted_seconds=first,
        notes=notes,
    )
