"""The outcome of a request: candidates with schedules, times, and the entry that a store keeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mirage_hf.codegen import triton
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.pipeline import versions
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates
from mirage_hf.search.search_report import SearchReport
from mirage_hf.tune.candidates import ScheduledCandidate, TuneResult
from mirage_hf.tune.measure import Timing
from mirage_hf.zoo.entry import Entry, Measurement
from mirage_hf.zoo.search_record import SearchRecord

#: Names of measurements in entries: the searched kernel and its rival, called on their own.
OURS, LIBRARY = "searched kernel", "library"
#: Added to both names when the calls were a chain of dependent kernels.
CHAINED = ", in a chain of dependent kernels"


@dataclass(frozen=True)
class Outcome:
    """The results of search, verification and tuning for a request.

    `SearchResult` shows all of it, `Resolved` the one kernel to run.

    Attributes:
        request: The request.
        verified: The candidates that have a kernel, and the report of the search.
        ugraphs: The µGraphs that can run, best first, each with its schedules. The library path is
            among them.
        reason: Why no searched kernel is among them. Empty if one is.
        tuned: The measured times. None if nothing was measured.
    """

    request: Request
    verified: VerifiedCandidates
    ugraphs: tuple[UGraph, ...]
    reason: str = ""
    tuned: TuneResult | None = None

    @property
    def report(self) -> SearchReport:
        """The report of the search."""
        return self.verified.report

    @property
    def measured(self) -> tuple[ScheduledCandidate, ...]:
        """The searched candidates that were measured, best first."""
        return self.tuned.searched if self.tuned else ()

    def contenders(self) -> tuple[ScheduledCandidate, ...]:
        """Return the measured candidates that are faster than the library, best first.

        A candidate is compared by its time in a chain if both have one, else by calls on their own.
        """
        library = self._library()
        if library is None:
            return self.measured
        chained, others = [], []
        for c in self.measured:
            if c.chain and library.chain:
                if not _is_slower(c.chain, library.chain):
                    chained.append(c)
            elif not _is_slower(c.timing, library.timing):
                others.append(c)
        return (*chained, *others)

    @cached_property
    def best_entry(self) -> Entry:
        """The entry for the best candidate.

        Raises:
            CodegenError: No code can be generated for it.
        """
        return self.entry()

    def entry(
        self, chosen: ScheduledCandidate | None = None, layer_us: float | None = None
    ) -> Entry:
        """Return the entry for one kernel: the chosen candidate, or the best.

        Args:
            chosen: The measured candidate to take.
            layer_us: The time of the layer that it was chosen for.

        Raises:
            CodegenError: No code can be generated for it.
        """
        best = chosen or next(iter(self.measured), None)
        library = self._library()
        if best is not None:
            ugraph, schedules = best.ugraph, best.schedules
        elif self.tuned is not None:
            ugraph, schedules = library_ugraph(self.request.program), ()
        else:
            ugraph, schedules = self.ugraphs[0], tuple(self.ugraphs[0].schedules or ())
            if len(schedules) != len(ugraph.block_ops):
                ugraph, schedules = library_ugraph(self.request.program), ()
        timings: tuple[Measurement, ...] = ()
        if best is not None and library is not None:
            timings = measurements(best, library)
        search = self._statistics()
        if layer_us:
            search["layer_us"] = round(layer_us, 3)
        generated = triton.generate(
            ugraph,
            schedules or None,
            next_may_launch_early=self.request.key.next_may_launch_early,
        )
        report = self.report
        record = SearchRecord(self.verified.ugraphs(), report)
        return Entry(
            self.request.key,
            self.request.pattern,
            UGraph(ugraph.program, ugraph.kernels, schedules or None),
            generated.source,
            schedules,
            timings,
            report.error_bound or 0.0,
            search,
            record=record if self.request.all_candidates else None,
        )

    def _library(self) -> ScheduledCandidate | None:
        return self.tuned.library if self.tuned and self.tuned.searched else None

    def _statistics(self) -> dict[str, Any]:
        report, counters = self.report, self.report.counters
        statistics = {
            "stop": report.stop,
            "reason": self.reason or report.reason,
            "seconds": counters.seconds,
            "width": counters.width,
            "examined": counters.examined,
            "values": counters.values,
            "kernels": counters.kernels,
            "candidates": report.found,
            "refused": [r.reason for r in report.rejected],
            "version": versions.search_version(),
        }
        if self.tuned is not None:
            statistics["tried"] = len(self.tuned.candidates)
        return statistics


def _is_slower(mine: Timing | None, theirs: Timing | None) -> bool:
    return mine is not None and theirs is not None and mine.us > theirs.us


def measurements(best: ScheduledCandidate, library: ScheduledCandidate) -> tuple[Measurement, ...]:
    """Return the timings of a kernel and of the library, which has none if it ran out of memory."""
    return tuple(
        Measurement(name + how, t.us, t.low, t.high, t.replays)
        for name, candidate in ((OURS, best), (LIBRARY, library))
        for how, t in (("", candidate.timing), (CHAINED, candidate.chain))
        if t is not None
    )


def library_wins(entry: Entry) -> str:
    """Return why the library runs instead of an entry's kernel; empty if the kernel does."""
    times = {t.name: t.median_us for t in entry.timings}
    if LIBRARY not in times or OURS not in times:
        return ""
    both_chained = OURS + CHAINED in times and LIBRARY + CHAINED in times
    how = CHAINED if both_chained else ""
    ours, library = times[OURS + how], times[LIBRARY + how]
    if ours <= library:
        return ""
    return f"the library path was measured faster ({library:.1f} µs, searched {ours:.1f} µs)"
