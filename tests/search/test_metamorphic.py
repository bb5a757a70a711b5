"""One program written in several ways has one best cost.

Operands are commuted, inputs renamed and reordered, identities inserted.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st

import mirage_hf as mi
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from tests.helpers import programs
from tests.helpers.thorough import THOROUGH
from tests.search.test_brute_force import small_program

SEARCH = SearchOptions(time_limit=20, threads=1, max_kernels=3, max_cuts=2, max_variants=400)
IDENTITIES = ("times one", "plus zero", "negated twice", "permuted twice", "reshaped")
RANDOM = 60


def written(
    graph: KernelGraph,
    rng: random.Random,
    *,
    commute: bool = False,
    rename: bool = False,
    identities: int = 0,
) -> KernelGraph:
    """Return the same program, written differently."""
    g = KernelGraph()
    order = list(graph.inputs)
    if rename:
        rng.shuffle(order)
    new: dict[int, DTensor] = {
        t.index: g.new_input(t.dims, t.dtype, t.strides, f"tensor_{k}" if rename else t.name)
        for k, t in enumerate(order)
    }

    def padded(x: DTensor) -> DTensor:
        kind = rng.choice(IDENTITIES)
        if kind == "times one":
            return g.mul(x, 1.0)
        if kind == "plus zero":
            return g.add(x, 0.0)
        if kind == "negated twice":
            return g.neg(g.neg(x))
        if kind == "permuted twice":
            swap = (*range(len(x.dims) - 2), len(x.dims) - 1, len(x.dims) - 2)
            return g.permute(g.permute(x, swap), swap)
        return g.reshape(x, x.dims)

    places = set(rng.sample(range(len(graph.ops)), min(identities, len(graph.ops))))
    for k, op in enumerate(graph.ops):
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        if commute and op.name in ("add", "mul"):
            args.reverse()
        y = g.apply(op.name, args, dict(op.attrs))
        new[op.outputs[0].index] = padded(y) if k in places else y
    g.mark_output(*(new[t.index] for t in graph.outputs))
    return g


def best(graph: KernelGraph) -> float | None:
    found, report = search(graph, SEARCH)
    assert report.stop == "exhausted", report
    return found[0].cost_us if found else None


WAYS = {
    "commuted": {"commute": True},
    "renamed": {"rename": True},
    "padded": {"identities": 2},
    "all": {"commute": True, "rename": True, "identities": 2},
}


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_of_the_list(name):
    graph = programs.build(mi, name, small=False)
    cost = best(graph)
    for way in WAYS if THOROUGH else ("padded", "all"):
        again = written(graph, random.Random(way), **WAYS[way])
        assert best(again) == pytest.approx(cost, rel=1e-9), (way, str(again))


def test_random_programs():
    counts: Counter[str] = Counter()

    @settings(
        max_examples=RANDOM,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=(Phase.explicit, Phase.generate),
    )
    @given(st.randoms(use_true_random=True))
    def one(rng):
        graph = small_program(rng)
        cost = best(graph)
        counts["searched"] += 1
        assume(cost is not None)
        for way, changes in WAYS.items():
            again = written(graph, rng, **changes)
            note(f"{way}\n{again}")
            assert best(again) == pytest.approx(cost, rel=1e-9), way
        counts["compared"] += 1

    one()
    assert counts["compared"] >= RANDOM, counts
