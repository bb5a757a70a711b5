"""The search with clusters=True: what it finds, that it is proven, and that it runs."""

from __future__ import annotations

import math
import random

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import cuda
from mirage_hf.graph.block import Role
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import cuda_on_cpu, thorough, ugraphs
from tests.search.test_fusable_dags import dag

DAGS = thorough.count(80, 12)


def rms_norm_linear(rows=1, k=1024, n=96) -> KernelGraph:
    g = KernelGraph()
    x, gamma = g.new_input((rows, k), name="x"), g.new_input((1, k), name="gamma")
    g.mark_output(g.matmul(g.rms_norm(x, gamma), g.new_input((k, n), name="w")))
    return g


def rms_norm(rows=4, k=4096) -> KernelGraph:
    g = KernelGraph()
    x, gamma = g.new_input((rows, k), name="x"), g.new_input((1, k), name="gamma")
    g.mark_output(g.rms_norm(x, gamma))
    return g


def layer_norm(rows=4, k=2048) -> KernelGraph:
    g = KernelGraph()
    g.mark_output(g.layer_norm(g.new_input((rows, k), name="x")))
    return g


def softmax(rows=3, n=1000) -> KernelGraph:
    g = KernelGraph()
    g.mark_output(g.softmax(g.new_input((rows, n), name="x")))
    return g


def mlp(rows=2, k=256, hidden=192, n=128) -> KernelGraph:
    g = KernelGraph()
    x, up = g.new_input((rows, k), name="x"), g.new_input((k, hidden), name="up")
    down = g.new_input((hidden, n), name="down")
    g.mark_output(g.matmul(g.silu(g.matmul(x, up)), down))
    return g


def attention(heads=2, keys=600, d=32) -> KernelGraph:
    g = KernelGraph()
    q, k, v = (
        g.new_input((heads, size, d), name=name)
        for name, size in (("q", 1), ("k", keys), ("v", keys))
    )
    scores = g.mul(g.matmul(q, g.permute(k, (0, 2, 1))), 1 / math.sqrt(d))
    g.mark_output(g.matmul(g.softmax(scores), v))
    return g


PROGRAMS = {
    "rms_norm_linear": rms_norm_linear,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "mlp": mlp,
    "attention": attention,
}


def found(program: KernelGraph, clusters: bool = True) -> list[UGraph]:
    """Return all µGraphs that the search finds, best estimate first."""
    ranked, _ = search(program, SearchOptions(clusters=clusters, threads=1))
    return [r.ugraph for r in ranked]


def clustered(program: KernelGraph) -> list[UGraph]:
    return [u for u in found(program) if u.is_clustered]


@pytest.mark.parametrize("name", PROGRAMS)
def test_clusters_are_found_only_if_asked_for_and_are_proven(name):
    program = PROGRAMS[name]()
    assert not any(u.is_clustered for u in found(program, clusters=False))
    made = clustered(program)
    assert made
    for u in made:
        verdict = prove(u)
        assert isinstance(verdict, Accepted) and verdict.bound < 1e-9, verdict
        block = u.block_ops[0].block
        assert u.num_kernels == 1 and block.cluster.size in (2, 4, 8)
        assert any(op.over == block.cluster.name for op in block.ops())


def roles(u: UGraph) -> dict[str, str]:
    """Return the role of each axis, with the axis that splits it."""
    return {
        a.name: a.role.value + (f" split by {a.split_axis}" if a.split_axis else "")
        for a in u.block_ops[0].block.axes
    }


def exchanges(u: UGraph) -> list[str]:
    """Return what the blocks of a cluster reduce, by name of the reduction."""
    block = u.block_ops[0].block
    return [op.fn for op in block.ops() if op.over == block.cluster.name]


def test_rms_norm_linear_sums_both_in_one_loop_that_the_cluster_splits():
    made = [u for u in clustered(rms_norm_linear()) if roles(u)["k"] == "loop split by k_split"]
    (stage,) = [s for s in made[0].block_ops[0].block.stages if s.loop]
    assert len(stage.accumulators) == 2  # the squares, and the product
    assert exchanges(made[0]) == ["sum", "sum"]
    assert roles(made[0]) == {
        "n": "grid",
        "k_split": "cluster",
        "k": "loop split by k_split",
    }


def test_the_statistics_of_a_norm_are_reduced_among_a_cluster_without_a_second_pass():
    best = clustered(rms_norm())[0]
    block = best.block_ops[0].block
    assert roles(best) == {"m": "grid", "k_split": "cluster", "k": "tile split by k_split"}
    assert [s.loop for s in block.stages] == [None] and exchanges(best) == ["sum"]
    assert block.outputs[0].axes == ("m", "k") and len(block.inputs) == 2  # x is read once
    assert block.cluster.size == 8


def test_both_halves_of_a_small_mlp_are_one_kernel():
    best = clustered(mlp())[0]
    assert best.num_kernels == 1 and exchanges(best) == ["sum"]
    assert "tile split" in " ".join(roles(best).values())


def test_attention_follows_a_maximum_in_each_block_and_rescales_among_them():
    made = [u for u in clustered(attention()) if "loop split" in " ".join(roles(u).values())]
    block = made[0].block_ops[0].block
    shifts = [a.shift for s in block.stages for a in s.accumulators]
    assert any(shifts) and sorted(exchanges(made[0])) == ["max", "sum", "sum"]


def test_axes_that_are_too_short_or_that_nothing_sums_are_not_split():
    g = KernelGraph()
    g.mark_output(g.exp(g.new_input((64, 1024))))
    assert not clustered(g)
    assert not clustered(rms_norm(4, 16))


@pytest.mark.skipif(cuda_on_cpu.CXX is None, reason="needs a C++ compiler, such as g++")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_found_runs_as_cuda_text(name, tmp_path):
    program = PROGRAMS[name]()
    made = clustered(program)
    library = cuda_on_cpu.Library([cuda.kernels_source(u) for u in made], tmp_path)
    inputs = ugraphs.random_inputs(program)
    exact = run_kernel_graph(program, inputs, torch.float64)
    plain = run_kernel_graph(program, inputs)
    for n, u in enumerate(made):
        for order in (0, 1):
            got = library.run(n, u.kernels, inputs, order)
            assert not isinstance(got, str), got
            assert not cuda_on_cpu.errors(got, exact, plain), str(u)


def test_superoptimize_returns_clusters_that_run_on_the_cpu(tmp_path):
    program = rms_norm_linear()
    result = mi.superoptimize(program, backend="cpu", clusters=True, cache=False)
    made = [u for u in result if u.is_clustered]
    assert made and not made[0].schedules
    inputs = ugraphs.random_inputs(program)
    torch.testing.assert_close(made[0](inputs), result[-1](inputs), rtol=2e-2, atol=2e-2)
    text = made[0].generate_cuda_program(tmp_path / "kernel.cu").read_text("utf-8")
    assert "__cluster_dims__" in text
    plain = mi.superoptimize(program, backend="cpu", cache=False)
    assert not any(u.is_clustered for u in plain)


def test_results_with_clusters_are_read_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    first = mi.superoptimize(rms_norm(), backend="cpu", clusters=True)
    again = mi.superoptimize(rms_norm(), backend="cpu", clusters=True)
    file = tmp_path / "search.json"
    kept = [
        mi.superoptimize(rms_norm(), backend="cpu", clusters=True, checkpoint=file)
        for _ in range(2)
    ]
    for result in (again, *kept):
        assert [str(u) for u in result] == [str(u) for u in first]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"backend": "triton"}, r"generated as CUDA C\+\+, .*; pass backend='c"),
        ({"griddims": [(4,)]}, "allowed maps, blocks, threads and trips do not hold for clusters"),
        ({"imaps": [{"x": 0}]}, "allowed maps, blocks, threads and trips do not hold for clusters"),
        ({"clusters": 4}, "clusters must be True or False"),
    ],
)
def test_options_that_do_not_go_with_clusters_are_refused(options, says):
    with pytest.raises(errors.SearchError, match=says):
        mi.superoptimize(rms_norm(), **{"backend": "cpu", "clusters": True, **options})


def test_codes_of_clusters_are_cuda_files(tmp_path):
    found = mi.superoptimize(rms_norm(), backend="cpu", clusters=True, save_codes=tmp_path)
    for n, ugraph in enumerate(found):
        kind = "cu" if ugraph.is_clustered else "py"
        assert (tmp_path / f"ugraph_{n}.{kind}").exists()
    assert any(u.is_clustered for u in found)


def test_symbolic_dims_are_refused():
    g = KernelGraph()
    g.mark_output(g.rms_norm(g.new_input((mi.Dim("rows", 8), 256))))
    with pytest.raises(errors.SearchError, match="the program has symbolic dims"):
        mi.superoptimize(g, backend="cpu", clusters=True)


def test_no_axis_of_a_program_is_forced_to_be_a_cluster():
    options = SearchOptions(clusters=True, roles=(("k", Role.CLUSTER),))
    with pytest.raises(errors.SearchError, match="'k' cannot be forced to be a cluster axis"):
        search(rms_norm(), options)


@pytest.fixture(scope="module")
def of_random_dags() -> list[tuple[list[UGraph], list[UGraph]]]:
    """Return what is found for each of `DAGS` random programs: clusters, and other kernels."""
    options = SearchOptions(time_limit=2, threads=1, max_cuts=0, max_kernels=1, clusters=True)
    made = []
    for seed in range(DAGS):
        ranked, _ = search(dag(random.Random(seed)), options)
        sides = [[r.ugraph for r in ranked if r.ugraph.is_clustered is on] for on in (True, False)]
        made.append((sides[0], sides[1]))
    return made


def test_clusters_of_random_dags_are_proven(of_random_dags):
    """The proof refuses what holds at full sizes alone, such as Σ c / n = c, of any kernel."""
    assert sum(bool(made) for made, _ in of_random_dags) > DAGS / 2
    for made, plain in of_random_dags:
        proven = [isinstance(prove(u), Accepted) for u in made]
        if not all(proven):
            assert not any(isinstance(prove(u), Accepted) for u in plain), str(made[0])


@pytest.mark.skipif(cuda_on_cpu.CXX is None, reason="needs a C++ compiler, such as g++")
def test_clusters_of_random_dags_run_as_cuda_text(of_random_dags, tmp_path):
    best = [made[0] for made, _ in of_random_dags if made]
    library = cuda_on_cpu.Library([cuda.kernels_source(u) for u in best], tmp_path)
    for n, u in enumerate(best):
        inputs = ugraphs.random_inputs(u.program, n)
        exact = run_kernel_graph(u.kernels, inputs, torch.float64)
        plain = run_kernel_graph(u.kernels, inputs)
        got = library.run(n, u.kernels, inputs, order=n % 4)
        assert not isinstance(got, str), got
        assert not cuda_on_cpu.errors(got, exact, plain), str(u)
