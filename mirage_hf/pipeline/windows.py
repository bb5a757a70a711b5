"""Larger programs: their windows are searched, and the cheapest sequence of windows and library calls is chosen and verified.

Windows overlap, and a shortest path over the boundaries chooses among them, so the result is the best over all ways to
stitch them by the cost model's estimates. Only what a path chooses is verified: each window's candidates are proven and
checked as programs of their own (verify/accept.py); a window without an accepted one is left out and the path chosen again.

The proof of the whole is by composition. The windows and the library calls between them compute every tensor that the
program computes between them from the same tensors, in an order that keeps each read after its write and on its side of a
write in place; a library call is the program's own op. So if every window equals its part, the stitched µGraph equals the
program, and the chance that it does not is at most the sum of the windows' bounds. Its rounding may run with multiply-adds
(on tensor cores) where that of every window may.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp, inline
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.search.cut import Cut, Window, cut
from mirage_hf.search.engine import search
from mirage_hf.search.join import JoinedProducts, join
from mirage_hf.search.library_cost import VIEWS, call_us
from mirage_hf.search.search_journal import RankedUGraph, SearchJournal
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.search_report import Counters, RejectedCandidate, SearchReport
from mirage_hf.verify.accept import Candidate, accept
from mirage_hf.verify.verdict import Verdict

#: Called as progress(stage, detail): ("search", Counters), ("verify", Verdict) or
#: ("tune", (done, total, what)). A true result stops the search.
ProgressCallback = Callable[[str, Any], bool | None]
CallCost = Callable[[KernelOp], float]
"""Called as call_us(op): the estimate of a library call in µs."""

_PATHS = 3
"""Best paths that become candidates, per kind of arithmetic."""
_KEEP = 2
"""Candidates that a window keeps per kind of arithmetic: the second serves where a path of one kind wants another."""
_SHARE = 8
"""A window may take this many times its even share of the time that is left: most take far less."""
_STOPS = ("exhausted", "expansions", "values", "memory", "time", "interrupted")
"""Why a search stopped, worst last."""


@dataclass(frozen=True)
class Choice:
    """One way to compute a window: a candidate, one that is not verified yet, or (both None) library calls."""

    window: Window
    us: float
    kernels: int
    candidate: Candidate | None = None
    found: RankedUGraph | None = None


Path = tuple[Choice, ...]
Weight = Callable[[Choice], tuple[float, ...]]


def search_windows(
    program: KernelGraph,
    options: SearchOptions,
    progress: ProgressCallback | None = None,
    *,
    seed: int = 0,
    reason: str = "",
    call_us: CallCost = call_us,
    journal: SearchJournal | None = None,
) -> tuple[tuple[Candidate, ...], SearchReport]:
    """Search a program window by window: candidates for the whole, best estimate first, and the report.

    `options` bound each window, its max_kernels too; time_limit is that of all together. Windows are searched at
    width 1 only: wider searches of windows of this size may take minutes. `call_us` estimates library calls.
    `reason` says why the program was not searched as one, and stays in the report; steps that
    `journal` has are not made again.
    """
    return _Windows(cut(program), options, progress, seed, call_us, journal).run(reason)


class _Windows:
    """The windows of one program: what was found for each, what of it was accepted."""

    def __init__(
        self,
        parts: Cut,
        options: SearchOptions,
        progress: ProgressCallback | None,
        seed: int,
        call_us: CallCost,
        journal: SearchJournal | None,
    ):
        self.cut, self.options, self.seed, self.call_us, self.journal = (
            parts,
            options,
            seed,
            call_us,
            journal,
        )
        self.say: Callable[[str, Any], Any] = progress or (lambda stage, detail: None)
        self.start = time.perf_counter()
        self.deadline = self.start + options.time_limit
        self.keys = {(w.start, w.stop): _key(w.graph) for w in parts.windows if w.graph is not None}
        self.found: dict[str, list[RankedUGraph]] = {}
        self.joined: dict[str, tuple[JoinedProducts, list[RankedUGraph]]] = {}
        self.accepted: dict[str, tuple[Candidate, ...]] = {}
        self.rejected: list[RejectedCandidate] = []
        self.counters, self.stop, self.proof_seconds = Counters(), "exhausted", 0.0
        self.library = [self._library(w) for w in parts.singles]

    def run(self, reason: str) -> tuple[tuple[Candidate, ...], SearchReport]:
        self._search()
        made: dict[str, tuple[Candidate, Path]] = {}
        first = -1.0
        for mma in (False, True):
            for weight, count in ((_by_time, _PATHS), (_by_launches, 1)):
                for path in self._settle(mma, weight, count):
                    if any(c.candidate for c in path):
                        candidate = self._stitch(path)
                        made.setdefault(str(candidate.ugraph.kernels), (candidate, path))
                        first = first if first >= 0 else time.perf_counter() - self.start
        best = sorted(made.values(), key=lambda m: (m[0].cost_us, m[0].ugraph.num_kernels))
        candidates = tuple(c for c, _ in best)
        if reason and not best and self.stop == "exhausted":
            self.stop = "not lowerable"
        why = reason or (
            ""
            if best
            else "no window has a kernel that was accepted and estimated to be faster than library calls"
        )
        return candidates, SearchReport(
            self.counters,
            self.stop,
            why,
            len(best),
            tuple(self.rejected),
            max((c.error_bound for c in candidates), default=None),
            self.proof_seconds,
            self._notes(best[0][1] if best else ()),
            first,
        )

    # -- searching --------------------------------------------------------------------------------------------------------

    def _search(self) -> None:
        """Every different window at width 1, the shortest first: when time runs out, what is missing are long ones."""
        different: dict[str, Window] = {}
        for w in sorted(self.cut.windows, key=lambda w: (w.stop - w.start, w.start)):
            different.setdefault(self.keys[w.start, w.stop], w)
        for n, (key, w) in enumerate(different.items()):
            if not self._may_go_on():
                return
            assert w.graph is not None
            self.found[key] = self._search_one(w.graph, len(different) - n)
            joined = join(w.graph)
            if joined is not None and self._may_go_on():
                self.joined[key] = joined, self._search_one(joined.graph, len(different) - n)

    def _may_go_on(self) -> bool:
        if self.stop != "interrupted" and time.perf_counter() >= self.deadline:
            self._stopped("time")
        return self.stop not in ("interrupted", "time")

    def _stopped(self, why: str) -> None:
        if why in _STOPS:  # not "not lowerable": it says that a window has no kernel
            self.stop = max(self.stop, why, key=_STOPS.index)

    def _search_one(self, graph: KernelGraph, waiting: int) -> list[RankedUGraph]:
        left, before = self.deadline - time.perf_counter(), self.counters
        options = replace(self.options, time_limit=min(left, _SHARE * left / waiting), max_width=1)
        found, report = search(
            graph, options, lambda counters: self.say("search", before + counters), self.journal
        )
        self.counters = before + report.counters
        self._stopped(report.stop)
        return found

    # -- choosing ---------------------------------------------------------------------------------------------------------

    def _settle(self, mma: bool, weight: Weight, count: int) -> list[Path]:
        """The best paths of which every window is verified for this arithmetic."""
        while True:
            paths = self._paths(mma, weight, count)
            unverified = {
                self.keys[c.window.start, c.window.stop]: c.window
                for p in paths
                for c in p
                if c.found
            }
            if not unverified:
                return paths
            for key, w in unverified.items():
                self._verify(key, w)

    def _verify(self, key: str, w: Window) -> None:
        """Prove and check what was found for a chosen window."""
        kept: list[Candidate] = []
        joined, wide = self.joined.get(key, (None, []))
        for found in (self.found[key], wide):
            result = accept(
                found,
                keep=_KEEP,
                seed=self.seed,
                on_candidate=lambda number, verdict: self.say("verify", verdict),
            )
            kept += [
                replace(c, ugraph=joined.split(c.ugraph)) if joined and found is wide else c
                for c in result.candidates
            ]
            self.rejected += [
                replace(r, reason=f"{self._named(w)}: {r.reason}") for r in result.rejected
            ]
            self.proof_seconds += result.seconds
        self.accepted[key] = tuple(sorted(kept, key=lambda c: c.cost_us))

    def _choices(self, w: Window, mma: bool) -> list[Choice]:
        key = self.keys[w.start, w.stop]
        if key in self.accepted:
            return [
                Choice(w, c.cost_us + w.view_us, c.ugraph.num_kernels, c)
                for c in self.accepted[key]
                if c.allows(mma)
            ]
        first = [*self.found.get(key, [])[:1], *self.joined.get(key, (None, []))[1][:1]]
        return [Choice(w, f.cost_us + w.view_us, f.ugraph.num_kernels, None, f) for f in first]

    def _library(self, w: Window) -> Choice:
        ops = library_ugraph(w.graph).kernels.ops if w.graph is not None else ()
        return Choice(
            w, sum(map(self.call_us, ops)) + w.view_us, sum(op.name not in VIEWS for op in ops)
        )

    def _paths(self, mma: bool, weight: Weight, count: int) -> list[Path]:
        """The `count` lightest sequences of choices from the first unit to the last."""
        ending: list[list[Choice]] = [[] for _ in range(len(self.cut.units) + 1)]
        for w in self.cut.windows:
            ending[w.stop] += self._choices(w, mma)
        for c in self.library:
            ending[c.window.stop].append(c)
        best: list[list[tuple[tuple[float, ...], Path]]] = [[((0.0, 0.0, 0.0), ())]]
        for choices in ending[1:]:
            ways: list[tuple[tuple[float, ...], Path]] = []
            for c in choices:
                own = weight(c)
                ways += [
                    (tuple(map(operator.add, total, own)), (*path, c))
                    for total, path in best[c.window.start]
                ]
            best.append(
                sorted(ways, key=lambda way: way[0])[:count]
            )  # stable: the same for equal weights in every run
        return [path for _, path in best[-1]]

    # -- stitching --------------------------------------------------------------------------------------------------------

    def _stitch(self, path: Path) -> Candidate:
        program, kernels = self.cut.program, KernelGraph()
        now: dict[int, DTensor] = {t.index: kernels.input_like(t) for t in program.inputs}

        def view(op: KernelOp) -> None:
            if op.outputs[0].index not in now:
                args = [now[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
                now[op.outputs[0].index] = kernels.apply(op.name, args, dict(op.attrs))

        for c in path:
            for op in c.window.before:
                view(op)
            if c.window.graph is not None:
                ugraph = c.candidate.ugraph if c.candidate else library_ugraph(c.window.graph)
                now |= zip(
                    c.window.writes,
                    inline(kernels, ugraph.kernels, [now[n] for n in c.window.reads]),
                    strict=True,
                )
            for op in c.window.after:
                view(op)
        kernels.mark_output(*(now[t.index] for t in program.outputs))
        chosen = [c.candidate for c in path if c.candidate]
        return Candidate(
            UGraph(program, kernels),
            sum(c.us for c in path),
            sum(c.error_bound for c in chosen),
            _all([c.scalar for c in chosen]),
            _all([c.tensor_cores for c in chosen]),
        )

    # -- telling ----------------------------------------------------------------------------------------------------------

    def _named(self, w: Window) -> str:
        return "window " + ", ".join(
            op.name
            for u in self.cut.units[w.start : w.stop]
            for op in u.ops
            if op.name not in VIEWS
        )

    def _notes(self, path: Path) -> tuple[str, ...]:
        different = len(set(self.keys.values()))
        notes = [
            f"windows: {len(self.keys)} over {len(self.cut.units)} units, {len(self.found)} of {different} different ones searched, "
            f"{len(self.accepted)} verified"
        ]
        notes += [
            f"{self._named(c.window)}: {c.kernels} kernel{'s' if c.kernels != 1 else ''}, {c.us:.1f} µs"
            for c in path
            if c.candidate
        ]
        why: dict[str, list[str]] = {}
        for c in path:
            unit = self.cut.units[c.window.start]
            if c.candidate is None and not unit.is_view:
                why.setdefault(
                    unit.alone or "a library call was estimated to be as fast", []
                ).append(unit.ops[-1].name)
        return (
            *notes,
            *(f"library: {', '.join(names)} ({reason})" for reason, names in why.items()),
        )


def _by_time(c: Choice) -> tuple[float, ...]:
    return c.us, c.kernels, 0.0


def _by_launches(c: Choice) -> tuple[float, ...]:
    """Launches, and of as many those that are library calls: what the estimates know least about."""
    return c.kernels, 0.0 if c.candidate or c.found else c.kernels, c.us


def _key(graph: KernelGraph) -> str:
    """The same for graphs that differ in names only."""
    plain = KernelGraph()
    plain.mark_output(
        *inline(
            plain,
            graph,
            [
                plain.new_input(t.dims, t.dtype, t.strides, constant=t.constant)
                for t in graph.inputs
            ],
        )
    )
    return json_format.digest(json_format.graph_to_dict(plain))


def _all(verdicts: Sequence[Verdict]) -> Verdict:
    """Accepted when all are; else the first refusal."""
    return next((v for v in verdicts if isinstance(v, Rejected)), verdicts[0])
