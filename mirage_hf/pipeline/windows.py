"""Search larger programs window by window, and stitch the cheapest sequence of windows together.

Windows overlap. A shortest path over the boundaries between units chooses among them. By the cost
model's estimates, the result is the best of all ways to stitch windows and library calls. Only
windows on a chosen path are verified: their µGraphs are proven and checked as programs of their own
(see `verify.accept`). If a window has no accepted µGraph, it is left out and the path is chosen
again.

**Why the whole is proven.** Windows and library calls pass tensors to each other. Each of them
computes its tensors from the same tensors as the program does. Their order keeps each
read after its write, and on its side of a write in place. A library call is the program's own op.
So if every window equals its part, the stitched µGraph equals the program. The probability that it
does not is at most the sum of the windows' error bounds. It may run as multiply-adds, or on tensor
cores, if every window may.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.rebuild import inline
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.pipeline.window_paths import (
    Choice,
    Path,
    Weight,
    by_launches,
    by_time,
    lightest_paths,
)
from mirage_hf.search.cut import Cut, Window, cut
from mirage_hf.search.engine import search
from mirage_hf.search.join import JoinedProducts, join
from mirage_hf.search.library_cost import VIEWS
from mirage_hf.search.library_cost import call_us as library_call_us
from mirage_hf.search.search_journal import RankedUGraph, SearchJournal
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.search_report import (
    Counters,
    RejectedCandidate,
    SearchReport,
    StopReason,
)
from mirage_hf.verify.accept import Candidate, accept
from mirage_hf.verify.verdict import Verdict

#: Called as progress(stage, detail): ("search", Counters), ("verify", Verdict) or
#: ("tune", (done, total, what)). A true result stops the search.
ProgressCallback = Callable[[str, Any], bool | None]

#: Returns the estimate of a library call in µs.
CallCost = Callable[[KernelOp], float]

#: How many of the best paths become candidates, for each kind of arithmetic.
_PATHS = 3

#: Candidates that a window keeps for each kind of arithmetic. The paths for the two kinds may
#: choose different candidates of a window.
_KEEP = 2

#: A window may take this many times its even share of the time that is left. Most take far less.
_TIME_SHARE = 8

#: The shares of the time limit after which no further window is cut, and none is compared with
#: others. Programs of a thousand ops reach them.
_CUT_SHARE, _KEY_SHARE = 0.3, 0.5

#: Why the search of a window may stop, the worst reason last. "not lowerable" is missing, because
#: it only says that one window has no kernel.
_STOPS = (
    StopReason.EXHAUSTED,
    StopReason.EXPANSIONS,
    StopReason.VALUES,
    StopReason.MEMORY,
    StopReason.TIME,
    StopReason.INTERRUPTED,
)


def search_windows(
    program: KernelGraph,
    options: SearchOptions,
    progress: ProgressCallback | None = None,
    *,
    seed: int = 0,
    reason: str = "",
    call_us: CallCost | None = None,
    journal: SearchJournal | None = None,
) -> tuple[tuple[Candidate, ...], SearchReport]:
    """Search a program window by window.

    Windows are searched at width 1 only. Wider searches of such windows may take minutes.

    Args:
        program: The tensor program.
        options: Limits of the search of each window. Only `time_limit` is for all together.
        progress: Called with each stage and its detail.
        seed: Seed of the random evaluations that prove and check candidates.
        reason: Why the program was not searched as one. It stays in the report.
        call_us: Estimates library calls; by default with the rates of `options.gpu`.
        journal: Steps that it holds are not searched again.

    Returns:
        Candidates for the whole program, lowest estimate first, and the report.
    """
    started = time.perf_counter()
    windows = cut(program, options.gpu, started + _CUT_SHARE * options.time_limit)
    estimate = call_us or partial(library_call_us, device=options.gpu)
    search_of_windows = _WindowSearch(windows, options, progress, seed, estimate, journal, started)
    return search_of_windows.run(reason)


@dataclass
class _WindowResults:
    """The results for a window, which hold for all windows that differ in names only.

    Attributes:
        window: One of the windows.
        ranked: The µGraphs that the search returned.
        joined: The window with products joined, if it has such products.
        ranked_joined: The µGraphs that the search returned for `joined`.
        candidates: The accepted µGraphs, or None as long as nothing is verified.
    """

    window: Window
    ranked: Sequence[RankedUGraph]
    joined: JoinedProducts | None = None
    ranked_joined: Sequence[RankedUGraph] = ()
    candidates: tuple[Candidate, ...] | None = None


class _WindowSearch:
    """The windows of one program and what was found for each."""

    def __init__(
        self,
        parts: Cut,
        options: SearchOptions,
        progress: ProgressCallback | None,
        seed: int,
        call_us: CallCost,
        journal: SearchJournal | None,
        started: float,
    ):
        self.options, self.seed, self.journal = options, seed, journal
        self.notify: ProgressCallback = progress or (lambda stage, detail: None)
        self.start = started
        self.deadline = self.start + options.time_limit
        self.keys: dict[tuple[int, int], str] = {}
        for w in sorted(parts.windows, key=lambda w: (w.stop - w.start, w.start)):
            if time.perf_counter() > started + _KEY_SHARE * options.time_limit:
                break
            if w.graph is not None:
                self.keys[w.start, w.stop] = graph_key(w.graph)
        windows = tuple(w for w in parts.windows if (w.start, w.stop) in self.keys)
        searchable = sum(w.graph is not None for w in parts.windows)
        is_whole = parts.is_whole and len(windows) == searchable
        self.cut = replace(parts, windows=windows, is_whole=is_whole)
        #: By key, the windows that were searched.
        self.results: dict[str, _WindowResults] = {}
        self.rejected: list[RejectedCandidate] = []
        self.counters, self.stop, self.proof_seconds = Counters(), StopReason.EXHAUSTED, 0.0
        self.library_choices = [_library_choice(w, call_us) for w in parts.singles]

    def run(self, reason: str) -> tuple[tuple[Candidate, ...], SearchReport]:
        """Search the windows, verify those on the best paths, and stitch the paths.

        `reason` says why the program was not searched as one.
        """
        self._search_all()
        if not self.cut.is_whole:
            self._note_stop(StopReason.TIME)
        stitched: dict[str, tuple[Candidate, Path]] = {}
        first_seconds = -1.0
        for path in self._best_paths():
            candidate = self._stitch(path)
            stitched.setdefault(str(candidate.ugraph.kernels), (candidate, path))
            if first_seconds < 0:
                first_seconds = time.perf_counter() - self.start
        best = sorted(stitched.values(), key=lambda s: (s[0].cost_us, s[0].ugraph.num_kernels))
        candidates = tuple(candidate for candidate, _ in best)
        if reason and not best and self.stop == StopReason.EXHAUSTED:
            self.stop = StopReason.NOT_LOWERABLE
        if not reason and not best:
            reason = (
                "no window has a kernel that was accepted and estimated to be faster than "
                "library calls"
            )
        report = SearchReport(
            self.counters,
            self.stop,
            reason,
            found=len(best),
            rejected=tuple(self.rejected),
            error_bound=max((c.error_bound for c in candidates), default=None),
            proof_seconds=self.proof_seconds,
            notes=self._notes(best[0][1] if best else ()),
            first_accepted_seconds=first_seconds,
        )
        return candidates, report

    # -- searching ---------------------------------------------------------------------------------

    def _search_all(self) -> None:
        """Search each different window, the shortest first, so that time runs out for long ones."""
        different: dict[str, Window] = {}
        for window in sorted(self.cut.windows, key=lambda w: (w.stop - w.start, w.start)):
            different.setdefault(self._key(window), window)
        for n, (key, window) in enumerate(different.items()):
            if not self._may_go_on():
                return
            assert window.graph is not None
            waiting = len(different) - n
            results = self.results[key] = _WindowResults(
                window, self._search_one(window.graph, waiting)
            )
            joined = join(window.graph)
            if joined is not None and self._may_go_on():
                results.joined = joined
                results.ranked_joined = self._search_one(joined.graph, waiting)

    def _key(self, window: Window) -> str:
        return self.keys[window.start, window.stop]

    def _may_go_on(self) -> bool:
        if self.stop != StopReason.INTERRUPTED and time.perf_counter() >= self.deadline:
            self._note_stop(StopReason.TIME)
        return self.stop not in (StopReason.INTERRUPTED, StopReason.TIME)

    def _note_stop(self, stop: StopReason) -> None:
        """Keep the worst reason."""
        if stop in _STOPS:
            self.stop = max(self.stop, stop, key=_STOPS.index)

    def _search_one(self, graph: KernelGraph, waiting: int) -> Sequence[RankedUGraph]:
        """Search one window; `waiting` windows share the time that is left."""
        left, before = self.deadline - time.perf_counter(), self.counters
        limit = min(left, _TIME_SHARE * left / waiting)
        options = replace(self.options, time_limit=limit, max_width=1)

        def progress(counters: Counters) -> bool | None:
            return self.notify("search", before + counters)

        ranked, report = search(graph, options, progress, self.journal)
        self.counters = before + report.counters
        self._note_stop(report.stop)
        return ranked

    # -- choosing ----------------------------------------------------------------------------------

    def _best_paths(self) -> Iterator[Path]:
        """Yield the verified paths with a µGraph that are lightest in time or in launches."""
        for mma in (False, True):
            for weight, count in ((by_time, _PATHS), (by_launches, 1)):
                for path in self._verified_paths(mma, weight, count):
                    if any(choice.candidate for choice in path):
                        yield path

    def _verified_paths(self, mma: bool, weight: Weight, count: int) -> list[Path]:
        """Return the lightest paths whose windows are all verified for this kind of arithmetic."""
        while True:
            choices = [c for window in self.cut.windows for c in self._choices(window, mma)]
            choices += self.library_choices
            paths = lightest_paths(choices, len(self.cut.units), weight, count)
            unverified = {
                self._key(choice.window): choice.window
                for path in paths
                for choice in path
                if choice.unverified
            }
            if not unverified:
                return paths
            for key, window in unverified.items():
                if self._must_end():
                    self.results[key].candidates = ()
                else:
                    self._verify(self.results[key], window)

    def _must_end(self) -> bool:
        """Return whether time is up and a window was verified, so the library runs the rest."""
        is_late = time.perf_counter() >= self.deadline
        if is_late and any(r.candidates for r in self.results.values()):
            self._note_stop(StopReason.TIME)
            return True
        return False

    def _choices(self, window: Window, mma: bool) -> list[Choice]:
        """Return the accepted µGraphs of a window, or the cheapest if none is verified yet."""
        results = self.results.get(self._key(window))
        if results is None:
            return []
        if results.candidates is not None:
            return [
                Choice(window, c.cost_us + window.view_us, c.ugraph.num_kernels, candidate=c)
                for c in results.candidates
                if c.allows(mma)
            ]
        return [
            Choice(window, r.cost_us + window.view_us, r.ugraph.num_kernels, unverified=r)
            for r in (*results.ranked[:1], *results.ranked_joined[:1])
        ]

    def _verify(self, results: _WindowResults, window: Window) -> None:
        """Prove and check the µGraphs of a chosen window."""
        kept = self._accepted(results.ranked, window)
        of_joined = self._accepted(results.ranked_joined, window)
        if results.joined is not None:
            kept += [replace(c, ugraph=results.joined.split(c.ugraph)) for c in of_joined]
        results.candidates = tuple(sorted(kept, key=lambda c: c.cost_us))

    def _accepted(self, ranked: Sequence[RankedUGraph], window: Window) -> list[Candidate]:
        result = accept(
            ranked,
            keep=_KEEP,
            seed=self.seed,
            on_candidate=lambda number, verdict: self.notify("verify", verdict),
        )
        name = self._name(window)
        self.rejected += [replace(r, reason=f"{name}: {r.reason}") for r in result.rejected]
        self.proof_seconds += result.seconds
        return list(result.candidates)

    # -- stitching ---------------------------------------------------------------------------------

    def _stitch(self, path: Path) -> Candidate:
        """Return the candidate for the whole program that a path describes."""
        program, kernels = self.cut.program, KernelGraph()
        now: dict[int, DTensor] = {t.index: kernels.input_like(t) for t in program.inputs}

        def make_views(views: Sequence[KernelOp]) -> None:
            for op in views:
                if op.outputs[0].index not in now:
                    args = [now[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
                    now[op.outputs[0].index] = kernels.apply(op.name, args, dict(op.attrs))

        for choice in path:
            window = choice.window
            make_views(window.before)
            if window.graph is not None:
                candidate = choice.candidate
                ugraph = candidate.ugraph if candidate else library_ugraph(window.graph)
                made = inline(kernels, ugraph.kernels, [now[n] for n in window.reads])
                now |= zip(window.writes, made, strict=True)
            make_views(window.after)
        kernels.mark_output(*(now[t.index] for t in program.outputs))
        chosen = [choice.candidate for choice in path if choice.candidate]
        return Candidate(
            UGraph(program, kernels),
            cost_us=sum(choice.us for choice in path),
            error_bound=sum(c.error_bound for c in chosen),
            scalar=_all_of([c.scalar for c in chosen]),
            tensor_cores=_all_of([c.tensor_cores for c in chosen]),
        )

    # -- reporting ---------------------------------------------------------------------------------

    def _name(self, window: Window) -> str:
        units = self.cut.units[window.start : window.stop]
        ops = [op.name for unit in units for op in unit.ops if op.name not in VIEWS]
        return "window " + ", ".join(ops)

    def _notes(self, path: Path) -> tuple[str, ...]:
        """Return notes on the search: windows, their kernels, and why the library runs the rest."""
        different = len(set(self.keys.values()))
        verified = sum(r.candidates is not None for r in self.results.values())
        notes = [
            f"windows: {len(self.keys)} over {len(self.cut.units)} units, "
            f"{len(self.results)} of {different} different ones searched, {verified} verified"
        ]
        calls: dict[str, list[str]] = {}
        for choice in path:
            unit = self.cut.units[choice.window.start]
            if choice.candidate:
                kernels = f"{choice.kernels} kernel{'s' if choice.kernels != 1 else ''}"
                notes.append(f"{self._name(choice.window)}: {kernels}, {choice.us:.1f} µs")
            elif not unit.is_view:
                why = unit.alone or "a library call was estimated to be as fast"
                calls.setdefault(why, []).append(unit.ops[-1].name)
        notes += [f"library: {', '.join(names)} ({why})" for why, names in calls.items()]
        return tuple(notes)


def _library_choice(window: Window, call_us: CallCost) -> Choice:
    ops = library_ugraph(window.graph).kernels.ops if window.graph is not None else ()
    calls = sum(op.name not in VIEWS for op in ops)
    return Choice(window, sum(map(call_us, ops)) + window.view_us, calls)


def graph_key(graph: KernelGraph) -> str:
    """Return a digest that is the same for graphs that differ in names only."""
    plain = KernelGraph()
    inputs = [
        plain.new_input(t.dims, t.dtype, t.strides, constant=t.constant) for t in graph.inputs
    ]
    plain.mark_output(*inline(plain, graph, inputs))
    return json_format.digest(json_format.graph_to_dict(plain))


def _all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the first rejection, or the first verdict if all are accepted."""
    return next((v for v in verdicts if isinstance(v, Rejected)), verdicts[0])
