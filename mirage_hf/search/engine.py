"""Search for µGraphs that compute a program: one call of the C++ core for each width."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mirage_hf import _core
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.search.core_program import core_limits, core_program, counters_of, symbols, too_large
from mirage_hf.search.emit import ugraph_of
from mirage_hf.search.lowered_program import LoweredProgram
from mirage_hf.search.lowering import lower
from mirage_hf.search.ranked_ugraphs import RankedUGraphs
from mirage_hf.search.search_journal import (
    RankedUGraph,
    SearchJournal,
    SearchStep,
    step_from_dict,
    step_to_dict,
)
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.search_report import Counters, SearchReport, StopReason

#: Called with the counters so far. A true result stops the search.
SearchProgress = Callable[[Counters], bool | None]

_Roles = tuple[tuple[str, Role], ...]


def search(
    graph: KernelGraph,
    options: SearchOptions | None = None,
    progress: SearchProgress | None = None,
    journal: SearchJournal | None = None,
    *,
    lowered: LoweredProgram | Rejected | None = None,
) -> tuple[Sequence[RankedUGraph], SearchReport]:
    """Search for µGraphs that compute the same as `graph`.

    Widths 1, 2, 4, … are searched in turn until one of them stops early. Each width is a step.
    `journal` keeps a step once it is searched to the end. If there is one step only, and no journal
    and no map to compare it with, each µGraph is made when it is first read.

    Args:
        graph: The tensor program.
        options: Limits of the search.
        progress: Called now and then with the counters so far.
        journal: Keeps finished steps. A step that it holds already is not searched again.
        lowered: What `lower(graph)` returned, if the caller has called it already.

    Returns:
        The µGraphs, cheapest first, and the report. If there are none, the report says why.

    Raises:
        SearchError: If a role names an axis that the program does not have, or if no kernel keeps
            to the allowed maps.
    """
    options = options or SearchOptions()
    if options.maps is not None:
        options.maps.check(graph)
    lowered = lower(graph) if lowered is None else lowered
    reason = lowered.reason if isinstance(lowered, Rejected) else too_large(lowered)
    if isinstance(lowered, Rejected) or reason:
        return [], SearchReport(Counters(), StopReason.NOT_LOWERABLE, reason)
    run = _Search(graph, lowered, options, progress, journal)
    if journal is None and options.max_width == 1 and options.maps is None:
        found = run.search_one_step()
        reason = "" if found else _why_none(run.stop, options)
        return found, SearchReport(run.counters, run.stop, reason)
    run.search_widths()
    ranked = sorted(run.ranked.values(), key=lambda r: r.cost_us)
    if options.maps is not None and ranked:
        ranked = _keep_allowed(ranked, options, run.stop)
    reason = "" if ranked else _why_none(run.stop, options)
    return ranked, SearchReport(run.counters, run.stop, reason)


class _Search:
    """The search of one program, width by width, with its results so far."""

    def __init__(
        self,
        graph: KernelGraph,
        lowered: LoweredProgram,
        options: SearchOptions,
        progress: SearchProgress | None,
        journal: SearchJournal | None,
    ):
        self.graph, self.lowered, self.options = graph, lowered, options
        self.progress, self.journal = progress, journal
        self.axes = list(lowered.sizes)
        self.functions = symbols(lowered)
        self.program = core_program(lowered)
        self.digest = json_format.digest(json_format.graph_to_dict(graph))
        self.deadline = time.perf_counter() + options.time_limit
        self.counters = Counters()
        self.stop = StopReason.EXHAUSTED
        #: Results by the text of their kernels, so that each is kept once.
        self.ranked: dict[str, RankedUGraph] = {}

    def search_widths(self) -> None:
        width = 1
        while width <= self.options.max_width:
            for roles in _forced_roles(self.options, self.lowered):
                step = self._step(width, roles)
                self.stop = step.stop
                self.counters += step.counters
                for ranked in step.ranked:
                    self.ranked.setdefault(str(ranked.ugraph.kernels), ranked)
                if self.stop != StopReason.EXHAUSTED:
                    return
            width *= 2

    def _step(self, width: int, roles: _Roles) -> SearchStep:
        """Return one width's step: the journal's if it has one, else a new search's."""
        key = f"{self.digest} width {width}"
        if self.options.maps is not None:
            key += f" roles {roles}"
        saved = self.journal.load(key) if self.journal else None
        if saved is not None:
            return step_from_dict(saved, self.graph)
        step, plans = self._run_core(width, roles)
        step = replace(step, ranked=tuple(self._emitted(plans, width)))
        if self.journal and step.stop == StopReason.EXHAUSTED:
            self.journal.save(key, step_to_dict(step))
        return step

    def search_one_step(self) -> RankedUGraphs:
        """Search width 1 with the forced roles of the options."""
        step, plans = self._run_core(1, self.options.roles)
        self.stop, self.counters = step.stop, step.counters
        return RankedUGraphs(_distinct(self._emitted(plans, 1)))

    def _run_core(self, width: int, roles: _Roles) -> tuple[SearchStep, list[_core.Candidate]]:
        """Return one width's step without its µGraphs, and their plans."""
        seconds = self.deadline - time.perf_counter()
        limits = core_limits(self.options, roles, self.axes, width, seconds)
        result = _core.search(self.program, limits, self._report_progress)
        stop = StopReason(result.stop)
        finished = width if stop == StopReason.EXHAUSTED else 0
        return SearchStep(stop, counters_of(result.stats, finished), ()), result.candidates

    def _emitted(self, plans: list[_core.Candidate], width: int) -> Iterator[RankedUGraph]:
        """Yield the µGraphs of plans.

        If some µGraph keeps all exponentials in range, the numeric check would only reject the
        others, so they are left out.
        """
        out_of_range: list[RankedUGraph] = []
        some_in_range = False
        for plan in plans:
            emitted = ugraph_of(plan, self.lowered, self.functions, self.graph)
            if emitted is None:
                continue
            ranked = RankedUGraph(emitted.ugraph, plan.cost_us, width)
            if emitted.in_range:
                some_in_range = True
                yield ranked
            elif not some_in_range:
                out_of_range.append(ranked)
        if not some_in_range:
            yield from out_of_range

    def _report_progress(self, statistics: _core.Statistics) -> bool:
        """Report the counters so far, and return whether to stop."""
        if self.progress is None:
            return False
        return bool(self.progress(self.counters + counters_of(statistics)))


def _distinct(ranked: Iterator[RankedUGraph]) -> Iterator[RankedUGraph]:
    """Yield the µGraphs whose kernels have another text than those of all before."""
    seen: set[str] = set()
    for r in ranked:
        text = str(r.ugraph.kernels)
        if text not in seen:
            seen.add(text)
            yield r


def _forced_roles(options: SearchOptions, lowered: LoweredProgram) -> list[_Roles]:
    """Return the forced roles to search with, in turn.

    The first are those that the options ask for. A restriction on maps suggests more.
    """
    forced = [options.roles]
    if options.maps is None:
        return forced
    asked = {axis for axis, _ in options.roles}
    for roles in options.maps.roles(lowered):
        if asked.isdisjoint(axis for axis, _ in roles):
            forced.append((*options.roles, *roles))
    return forced


def _keep_allowed(
    ranked: list[RankedUGraph], options: SearchOptions, stop: StopReason
) -> list[RankedUGraph]:
    """Return the µGraphs that keep to the allowed maps. Raises SearchError if none does."""
    assert options.maps is not None
    kept: dict[str, RankedUGraph] = {}
    for r in ranked:
        ugraph = options.maps.restricted(r.ugraph)
        if ugraph is not None:
            kept.setdefault(str(ugraph), replace(r, ugraph=ugraph))
    if not kept:
        raise options.maps.no_kernel_error(ranked[0].ugraph, stop)
    return list(kept.values())[: options.max_candidates]


def _why_none(stop: StopReason, options: SearchOptions) -> str:
    if stop != StopReason.EXHAUSTED:
        return f"no kernel found before the search stopped ({stop})"
    if options.roles:
        wanted = ", ".join(f"{name} {role.value}" for name, role in options.roles)
        return f"no kernels with axis roles {wanted}"
    kernels = "a kernel" if options.max_kernels == 1 else f"{options.max_kernels} kernels"
    return (
        f"not computed by {kernels} or fewer: an output is an input, a number or the same along "
        "one of its dims, or a block would need more than it can hold"
    )
