"""The results of a search that are made when they are read."""

from __future__ import annotations

from typing import Any

import mirage_hf as mi
from mirage_hf.search import engine
from mirage_hf.search.engine import search
from mirage_hf.search.ranked_ugraphs import RankedUGraphs
from mirage_hf.search.search_options import SearchOptions


class Kept:
    """A journal, which needs all results at once."""

    def load(self, key: str) -> Any:
        return None

    def save(self, key: str, step: Any) -> None:
        pass


def gated() -> Any:
    g = mi.new_kernel_graph()
    x = g.rms_norm(g.new_input((2, 32)), g.new_input((1, 32)))
    g.mark_output(g.mul(g.silu(g.matmul(x, g.new_input((32, 48)))), 2.0))
    return g


def test_results_that_are_made_when_read_are_those_made_at_once() -> None:
    graph, options = gated(), SearchOptions(max_width=1, threads=1)
    late, report = search(graph, options)
    at_once, same = search(graph, options, journal=Kept())
    assert isinstance(late, RankedUGraphs) and isinstance(at_once, list) and len(at_once) > 2
    assert [(str(r.ugraph), r.cost_us, r.width) for r in late] == [
        (str(r.ugraph), r.cost_us, r.width) for r in at_once
    ]
    assert (report.stop, report.reason) == (same.stop, same.reason)
    assert report.counters.values == same.counters.values


def test_only_what_is_read_is_made(monkeypatch: Any) -> None:
    made = []
    ugraph_of = engine.ugraph_of

    def counted(*args: Any) -> Any:
        made.append(args)
        return ugraph_of(*args)

    monkeypatch.setattr(engine, "ugraph_of", counted)
    ranked, _ = search(gated(), SearchOptions(max_width=1, threads=1))
    first = ranked[0]
    few = len(made)
    assert ranked[:1] == [first] and len(made) == few < 4
    assert ranked[-1] is list(ranked)[-1] and len(made) >= len(ranked) > few


def test_a_sequence_reads_no_further_than_asked() -> None:
    read: list[Any] = []

    def source() -> Any:
        for n in range(4):
            read.append(n)
            yield n

    ranked: Any = RankedUGraphs(source())
    assert ranked and read == [0]
    assert ranked[1] == 1 and ranked[:2] == [0, 1] and read == [0, 1]
    assert ranked[1:] == [1, 2, 3] and ranked[-2:] == [2, 3] and len(ranked) == 4
    assert list(ranked) == read == [0, 1, 2, 3] and not RankedUGraphs(())
