"""Programs larger than one search.

The tests cover the windows, the path through them, library calls between them, and their
verification.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import CUSTOMIZED, KernelGraph
from mirage_hf.graph.rebuild import inline
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.ops import table
from mirage_hf.pipeline import windows
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates, search_and_verify
from mirage_hf.search import cut, library_cost
from mirage_hf.search.engine import search
from mirage_hf.search.join import join
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.cost import library_us
from mirage_hf.verify.accept import accept
from mirage_hf.verify.verdict import Accepted
from tests.helpers import mutants, remembered_verdicts
from tests.helpers.decoder_layers import decoder_layer
from tests.helpers.thorough import THOROUGH

pytestmark = pytest.mark.usefixtures("remembered_verdicts")

OPTIONS = SearchOptions(time_limit=60, threads=1)
SMALL = dict(hidden=32, heads=4, kv=2, ffn=48)
LAYERS = {"prompt": dict(tokens=5), "decode": dict(past=6), "sandwich": dict(past=6, sandwich=True)}


def searched(graph: KernelGraph, **options) -> VerifiedCandidates:
    result = search_and_verify(graph, replace(OPTIONS, **options))
    assert result.candidates, result.report
    return result


@functools.cache
def layer(**sizes) -> VerifiedCandidates:
    """Return the search result of a decoder layer, which several tests share."""
    return searched(decoder_layer(mi, **sizes))


def same_as_float64(ugraph: UGraph) -> bool:
    graph = ugraph.program
    inputs = [
        x if x.is_floating_point() else torch.zeros_like(x) for x in mutants.float64_inputs(graph)
    ]
    want, got = (
        run_kernel_graph(g, [x.clone() for x in inputs], torch.float64)
        for g in (graph, ugraph.kernels)
    )
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(want, got, strict=True))


def called(ugraph: UGraph) -> Counter[str]:
    """Return the library calls of a µGraph."""
    return Counter(
        op.name
        for op in ugraph.kernels.ops
        if op.name != CUSTOMIZED and op.name not in library_cost.VIEWS
    )


def fewest(result: VerifiedCandidates) -> UGraph:
    """Return the candidate with the fewest launches, and among equals the fewest library calls."""
    return min(
        (c.ugraph for c in result.candidates), key=lambda u: (u.num_kernels, called(u).total())
    )


# -- whole layers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_a_decoder_layer(name):
    g = decoder_layer(mi, **SMALL, **LAYERS[name])
    result = layer(**SMALL, **LAYERS[name])
    library = library_ugraph(g).num_kernels
    for c in result.candidates:
        assert same_as_float64(c.ugraph)
        assert c.ugraph.num_kernels < library and 0 < c.error_bound < 1e-6
        assert (c.ugraph.kernels.inputs, len(c.ugraph.kernels.outputs)) == (
            g.inputs,
            len(g.outputs),
        )
    best = result.candidates[0].ugraph
    past = "past" in LAYERS[name]
    assert called(best) == (
        Counter(concat=2) if past else Counter()
    )  # everything else is in kernels, and both rotations are in one
    assert (
        best.num_kernels <= (14 if LAYERS[name].get("sandwich") else 12)
        and best.num_kernels <= 0.6 * library
    )
    report = result.report
    assert report.stop == "exhausted" and report.error_bound == max(
        c.error_bound for c in result.candidates
    )
    assert (
        any(n.startswith("windows:") for n in report.notes)
        and any(n.startswith("library: concat, concat (concat of") for n in report.notes) == past
    )
    assert report.counters.values > 0 and report.counters.seconds > 0


@pytest.mark.parametrize("name", [pytest.param("prompt", marks=pytest.mark.thorough), "decode"])
def test_a_decoder_layer_at_the_sizes_of_llama_1b(name):
    start = time.process_time()
    result = layer(**(LAYERS[name] | (dict(past=127) if "past" in LAYERS[name] else {})))
    assert time.process_time() - start < 120 and result.report.stop == "exhausted"


def test_commuting_changes_nothing():
    plain, swapped = (
        layer(**SMALL, past=6),
        searched(decoder_layer(mi, **SMALL, past=6, swapped=True)),
    )
    assert [round(c.cost_us, 9) for c in plain.candidates] == [
        round(c.cost_us, 9) for c in swapped.candidates
    ]
    assert [c.ugraph.num_kernels for c in plain.candidates] == [
        c.ugraph.num_kernels for c in swapped.candidates
    ]


def test_the_result_does_not_depend_on_threads_or_on_the_run():
    g, first = decoder_layer(mi, **SMALL, past=6), layer(**SMALL, past=6)
    remembered_verdicts.forget()
    for other in (searched(g, threads=t) for t in ((2, 4) if THOROUGH else (4,))):
        assert [str(c.ugraph) for c in other.candidates] == [
            str(c.ugraph) for c in first.candidates
        ]
        assert other.report.notes == first.report.notes


def test_two_equal_layers_are_searched_once(monkeypatch):
    seen = []
    monkeypatch.setattr(
        windows,
        "search",
        lambda graph, *rest: seen.append(windows.graph_key(graph)) or search(graph, *rest),
    )

    def layers(count):
        g = mi.new_kernel_graph()
        x = g.new_input((2, 32))
        for _ in range(count):
            h = g.rms_norm(x, g.new_input((1, 32)))
            m = g.mul(
                g.silu(g.matmul(h, g.new_input((32, 48)))), g.matmul(h, g.new_input((32, 48)))
            )
            halves = [g.matmul(m, g.new_input((48, 16))) for _ in range(2)]
            # torch runs concat, because its parts are computed
            x = g.concat([g.silu(y) for y in halves], 1)
        g.mark_output(x)
        seen.clear()
        return searched(g), sorted(seen)

    (one, once), (three, thrice) = layers(1), layers(3)
    assert once == thrice and len(set(once)) == len(once)
    assert three.candidates[0].ugraph.num_kernels == 3 * one.candidates[0].ugraph.num_kernels
    assert three.candidates[0].cost_us == pytest.approx(3 * one.candidates[0].cost_us)
    assert same_as_float64(three.candidates[0].ugraph)


# -- what cannot be lowered -----------------------------------------------------------------------


def _mid_rope(g):
    x, c, s = (g.new_input((4, d)) for d in (8, 4, 4))
    g.exp(g.rope(g.silu(g.mul(x, x)), g.exp(c), s))


def _mid_slice(g):
    g.exp(g.slice(g.silu(g.square(g.new_input((4, 8)))), 1, 0, 4))


def _mid_split(g):
    g.matmul(
        g.permute(
            g.reshape(g.matmul(g.new_input((4, 8)), g.new_input((8, 12))), (4, 3, 4)), (1, 0, 2)
        ),
        g.new_input((4, 4)),
    )


def _mid_concat(g):
    x = g.new_input((4, 8))
    g.matmul(g.concat([g.exp(x), g.silu(x)], 1), g.new_input((16, 6)))


def _views_of_inputs(g):
    g.matmul(g.slice(g.new_input((4, 16)), 1, 4, 12), g.reshape(g.new_input((2, 4, 6)), (8, 6)))


def _view_twice(g):
    y = g.exp(g.new_input((4, 6)))
    g.mark_output(y, g.reshape(y, (2, 12)), g.permute(y, (1, 0)))


def _view_is_output(g):
    x = g.new_input((4, 6))
    p = g.permute(x, (1, 0))
    g.mark_output(p, g.matmul(x, p), g.reshape(p, (3, 8)))


def _rounded(g):
    x = g.new_input((4, 6), "float32")
    g.mul(g.cast(g.cast(g.mul(x, 3.0), "int32"), "float32"), x)


def _joined_weights(g):
    x = g.new_input((1, 32))
    joined = g.concat([g.new_input((n, 32)) for n in (32, 8, 8)], 0)
    g.exp(g.slice(g.matmul(g.rms_norm(x), g.permute(joined, (1, 0))), 1, 4, 24))


MIDDLES = {
    _mid_rope: Counter(),
    _mid_slice: Counter(),
    _mid_split: Counter(),
    _mid_concat: Counter(concat=1),
    _views_of_inputs: Counter(),
    _view_twice: Counter(),
    _view_is_output: Counter(),
    _rounded: Counter(cast=2),
    _joined_weights: Counter(),
}


@pytest.mark.parametrize("build", MIDDLES, ids=lambda f: f.__name__.strip("_"))
def test_ops_that_end_a_kernel_are_library_calls_between_kernels(build):
    g = mi.new_kernel_graph()
    build(g)
    result = searched(g)
    assert all(same_as_float64(c.ugraph) for c in result.candidates)
    assert called(fewest(result)) == MIDDLES[build]
    assert result.report.reason and result.report.error_bound < 1e-6


def test_a_cache_written_in_place_keeps_its_readers_in_order():
    g = mi.new_kernel_graph()
    cache, row, slot = g.new_input((1, 6, 8)), g.new_input((1, 1, 8)), g.new_input((1,), "int64")
    old = g.reduction(g.square(cache), 1)  # it reads the data from before the append
    new = g.cache_append(cache, g.exp(row), slot)
    g.mark_output(new, g.reduction(g.square(new), 1), old)
    units = cut.cut(g).units
    at = {op.outputs[0].index: n for n, u in enumerate(units) for op in u.ops}
    square = next(
        op.outputs[0].index for op in g.ops if op.name == "square" and op.inputs[0] == cache
    )
    assert at[square] < at[new.index]
    for c in searched(g).candidates:
        inputs = [torch.randn(1, 6, 8).double(), torch.randn(1, 1, 8).double(), torch.tensor([2])]
        want, got = (
            run_kernel_graph(graph, [x.clone() for x in inputs], torch.float64)
            for graph in (g, c.ugraph.kernels)
        )
        assert (
            all(torch.allclose(a, b) for a, b in zip(want, got, strict=True))
            and called(c.ugraph)["cache_append"] == 1
        )


def test_an_effect_that_nothing_reads_stays():
    g = mi.new_kernel_graph()
    cache, row, slot, x = (
        g.new_input((1, 6, 8)),
        g.new_input((1, 1, 8)),
        g.new_input((1,), "int64"),
        g.new_input((4, 8)),
    )
    g.cache_append(cache, row, slot)
    g.mark_output(g.exp(g.silu(x)))
    assert called(fewest(searched(g))) == Counter(cache_append=1)


def test_nothing_to_search_is_an_answer_with_a_reason():
    g = mi.new_kernel_graph()
    g.cast(g.new_input((4, 8)), "int32")
    result = search_and_verify(g, OPTIONS)
    assert (
        not result.candidates
        and result.report.stop == "not lowerable"
        and "cast to int32 ends" in result.report.reason
    )


# -- which way a program goes ---------------------------------------------------------------------


def _chain(ops):
    g = mi.new_kernel_graph()
    x = g.new_input((4, 16))
    for n in range(ops):
        x = (
            g.matmul(x, g.new_input((16, 16)))
            if n % 3 == 0
            else g.silu(x)
            if n % 3 == 1
            else g.add(x, 1.0)
        )
    g.mark_output(x)
    return g


def test_short_programs_are_searched_as_one_and_long_ones_in_windows():
    for ops, as_one in (*([(6, True)] if THOROUGH else []), (16, True), (33, False)):
        result = searched(_chain(ops))
        assert (not any("windows" in n for n in result.report.notes)) == as_one
        assert all(same_as_float64(c.ugraph) for c in result.candidates)
        assert result.candidates[0].ugraph.num_kernels <= -(-ops // 3) and not called(
            result.candidates[0].ugraph
        )
        assert result.report.reason == ""


def test_max_kernels_bounds_a_window_there_and_the_whole_in_superoptimize():
    g = decoder_layer(mi, **SMALL, past=6)
    for c in searched(g, max_kernels=1).candidates:
        assert same_as_float64(c.ugraph)
    assert all(u.num_kernels <= 14 for u in mi.superoptimize(g, backend="cpu", max_kernels=14))
    with pytest.raises(errors.SearchError, match="at most 3 kernels"):
        mi.superoptimize(g, backend="cpu", max_kernels=3)


# -- the path -------------------------------------------------------------------------------------


def test_a_refused_window_is_replaced(monkeypatch):
    """Each window of the best path is rejected in turn. The path must go around them."""
    g, free = decoder_layer(mi, **SMALL, past=6), layer(**SMALL, past=6).candidates[0]

    def no_gate(found, **more):
        result = accept(found, **more)
        gate = any(op.name == "silu" for f in found for op in f.ugraph.program.ops)
        return replace(result, candidates=()) if gate else result

    monkeypatch.setattr(windows, "accept", no_gate)
    result = searched(g)
    best = result.candidates[0]
    assert (
        best.cost_us > free.cost_us
        and called(best.ugraph)["silu"] == 1
        and same_as_float64(best.ugraph)
    )
    assert not any(op.fn == "silu" for o in best.ugraph.block_ops for op in o.block.ops())
    assert any("silu" in n and "as fast" in n for n in result.report.notes)


def test_verdicts_of_windows_combine(monkeypatch):
    def only_scalar(found, **more):
        result = accept(found, **more)
        gate = any(op.name == "silu" for f in found for op in f.ugraph.program.ops)
        return (
            replace(
                result,
                candidates=tuple(
                    replace(c, tensor_cores=Rejected("no")) for c in result.candidates
                ),
            )
            if gate
            else result
        )

    monkeypatch.setattr(windows, "accept", only_scalar)
    result = searched(decoder_layer(mi, **SMALL, past=6))
    assert any(c.allows(False) for c in result.candidates) and any(
        c.allows(True) for c in result.candidates
    )
    fused = [
        c
        for c in result.candidates
        if any(op.fn == "silu" for o in c.ugraph.block_ops for op in o.block.ops())
    ]
    assert fused
    for c in fused:
        assert isinstance(c.scalar, Accepted) and isinstance(c.tensor_cores, Rejected)


def test_costly_library_calls_are_avoided_and_free_ones_taken():
    g = decoder_layer(mi, **SMALL, tokens=3)
    dear, _ = windows.search_windows(g, OPTIONS, call_us=lambda op: 1e3)
    assert called(dear[0].ugraph) == Counter()
    free, report = windows.search_windows(g, OPTIONS, call_us=lambda op: 0.0)
    assert len(free[0].ugraph.block_ops) < len(dear[0].ugraph.block_ops)
    assert sum(called(free[0].ugraph).values()) > len(free[0].ugraph.block_ops)
    assert report.stop == "exhausted"


def test_candidates_differ_and_come_in_order():
    result = layer(**SMALL, past=6)
    assert len({str(c.ugraph) for c in result.candidates}) == len(result.candidates) > 1
    assert [c.cost_us for c in result.candidates] == sorted(c.cost_us for c in result.candidates)


# -- products of one tensor -----------------------------------------------------------------------


def test_projections_of_one_row_are_one_kernel_that_reads_it_once():
    best = layer(past=127).candidates[0].ugraph
    first = next(op for op in best.block_ops if any(t.name == "wq" for t in op.inputs))
    assert {"x", "gamma0", "wq", "wk", "wv"} == {t.name for t in first.inputs} and len(
        first.outputs
    ) == 1
    (joined,) = (i for i in first.block.inputs if i.joined)
    assert sorted(joined.sizes) == [512, 512, 2048]


@pytest.mark.parametrize("permuted", [False, True])
def test_joined_products_are_slices_of_one(permuted):
    g = mi.new_kernel_graph()
    x = g.silu(g.new_input((3, 16)))
    ws = [
        g.permute(g.new_input((n, 16)), (1, 0)) if permuted else g.new_input((16, n))
        for n in (8, 4, 12)
    ]
    a, b, c = (g.matmul(x, w) for w in ws)
    g.mark_output(c, x, a, b, a)
    joined = join(g)
    assert joined is not None and sum(op.name == "matmul" for op in joined.graph.ops) == 1
    assert same_as_float64(joined.split(library_ugraph(joined.graph)))
    for f in search(joined.graph, replace(OPTIONS, max_width=1))[0]:
        assert (
            same_as_float64(joined.split(f.ugraph))
            and joined.split(f.ugraph).num_kernels == f.ugraph.num_kernels
        )


def _used_inside(g):
    x, v, w = g.new_input((3, 16)), g.new_input((16, 8)), g.new_input((16, 8))
    g.mul(g.matmul(x, v), g.matmul(x, w))


def _other_rows(g):
    v, w = g.new_input((16, 8)), g.new_input((16, 8))
    g.matmul(g.new_input((3, 16)), v)
    g.matmul(g.new_input((3, 16)), w)


def _computed_weight(g):
    x, v, w = g.new_input((3, 16)), g.new_input((16, 8)), g.new_input((16, 8))
    g.matmul(x, g.exp(v))
    g.matmul(x, w)


@pytest.mark.parametrize(
    "build", [_used_inside, _other_rows, _computed_weight], ids=lambda f: f.__name__.strip("_")
)
def test_products_that_are_not_joined(build):
    g = mi.new_kernel_graph()
    build(g)
    assert join(g) is None


# -- limits ---------------------------------------------------------------------------------------


def test_no_time_is_no_error():
    result = search_and_verify(
        decoder_layer(mi, **SMALL, past=6), replace(OPTIONS, time_limit=1e-6)
    )
    assert result.report.stop == "time" and not result.candidates


def test_progress_is_reported_and_an_interrupted_search_returns_the_best_so_far():
    stages, seconds = [], []
    search_and_verify(
        decoder_layer(mi, **SMALL, tokens=3),
        OPTIONS,
        lambda stage, detail: stages.append(stage) and None,
    )
    assert "verify" in stages

    def stop_after(count):
        def progress(stage, detail):
            seconds.append(getattr(detail, "seconds", 0.0))
            return stage == "search" and len(seconds) > count

        return progress

    result = search_and_verify(
        decoder_layer(mi, past=127), replace(OPTIONS, threads=2), stop_after(0)
    )
    # a window may end before the callback is asked
    assert result.report.stop in ("interrupted", "exhausted")
    assert all(
        isinstance(c.ugraph, UGraph) and c.ugraph.num_kernels < 24 for c in result.candidates
    )


# -- helpers --------------------------------------------------------------------------------------


def test_inline_keeps_names_and_makes_them_unique():
    inner = mi.new_kernel_graph()
    a = inner.new_input((2, 3), name="a")
    y = inner.apply("exp", [a], {}, "y")
    inner.mark_output(y, a, inner.silu(y))
    outer = mi.new_kernel_graph()
    x = outer.new_input((2, 3), name="x")
    first = inline(outer, inner, [x])
    second = inline(outer, inner, [first[2]])
    assert (
        [t.name for t in (first[0], second[0])] == ["y", "y_"]
        and first[1] is x
        and second[1] is first[2]
    )
    outer.mark_output(second[2])
    z = torch.randn(2, 3).half()
    assert torch.equal(
        run_kernel_graph(outer, [z])[0],
        torch.nn.functional.silu(torch.exp(torch.nn.functional.silu(torch.exp(z)))),
    )
    with pytest.raises(
        errors.GraphError, match=r"reads float16 \(2, 3\), it was given float32 \(2, 3\)"
    ):
        inline(outer, inner, [outer.cast(x, "float32")])
    with pytest.raises(errors.GraphError, match="given nothing"):
        inline(outer, inner, [])


def test_calls_cost_what_the_tuner_thinks():
    g = decoder_layer(mi)
    for op in g.ops:
        assert library_cost.call_us(op) == pytest.approx(library_us(op), rel=0.02)
    assert library_cost.copy_us(g.inputs[0]) > 0


def test_every_window_is_its_part_of_the_program():
    """The views, core and views of each window make the same tensors as its units, run in order."""
    g = decoder_layer(mi, **SMALL, tokens=3)
    parts = cut.cut(g)
    inputs = mutants.float64_inputs(g)
    values = {t.index: x for t, x in zip(g.inputs, inputs, strict=True)}
    for u in parts.units:
        for op in u.ops:
            args = [values[x.index] if hasattr(x, "index") else x for x in op.inputs]
            values[op.outputs[0].index] = table.lookup(op.name).oracle(*args, **dict(op.attrs))
    assert len(parts.windows) > 20
    for w in (*parts.singles, *parts.windows):
        now = dict(values)
        for op in w.after:
            del now[op.outputs[0].index]
        if w.graph is not None:
            for n, y in zip(
                w.writes,
                run_kernel_graph(w.graph, [now[n] for n in w.reads], torch.float64),
                strict=True,
            ):
                assert torch.allclose(y, values[n])
        made = {t for op in (*w.before, *w.after) for t in (op.outputs[0].index,)} | set(w.writes)
        later = {
            x.index
            for u in (*parts.units[: w.start], *parts.units[w.stop :])
            for op in u.ops
            for x in op.inputs
            if hasattr(x, "index")
        }
        own = {u.ops[-1].outputs[0].index for u in parts.units[w.start : w.stop]}
        assert own & (later | {t.index for t in g.outputs}) <= made
