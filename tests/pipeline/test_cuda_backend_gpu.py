"""`superoptimize()` with CUDA kernels on a GPU: forced, and side by side with Triton kernels."""

from __future__ import annotations

import pytest
import torch

import mirage_hf as mi
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from tests.helpers import tolerances
from tests.helpers.ugraphs import random_inputs

pytestmark = pytest.mark.gpu


def rms_norm_linear(k=2048, n=512) -> KernelGraph:
    g = KernelGraph()
    x, gamma = g.new_input((1, k), name="x"), g.new_input((1, k), name="gamma", constant=True)
    w = g.new_input((k, n), strides=(1, k), name="w", constant=True)
    g.mark_output(g.matmul(g.rms_norm(x, gamma), w))
    return g


def softmax(rows=2, n=20000) -> KernelGraph:
    g = KernelGraph()
    g.mark_output(g.softmax(g.new_input((rows, n), name="x")))
    return g


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))


def needs_clusters():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need sm_90")


def check(run, program):
    """Compare with float64, as close as torch."""
    inputs = [x.cuda().as_strided(x.shape, x.stride()) for x in random_inputs(program, 0)]
    exact = run_kernel_graph(program, inputs, torch.float64)
    tolerances.as_close_as(run(inputs), run_kernel_graph(program, inputs), exact, "result")


def test_backend_cuda_measures_cuda_kernels_only(tmp_path):
    program = rms_norm_linear()
    found = mi.superoptimize(program, backend="cuda")
    measured = [c for c in found.tuned.candidates if c.timing and not c.is_library]
    assert measured and all(s.cuda for c in measured for s in c.schedules)
    fused = next(u for u in found if u.is_fused)
    check(fused, program)
    fused.to_json(tmp_path / "ugraph.json")
    check(mi.load_ugraph(tmp_path / "ugraph.json"), program)
    again = mi.superoptimize(program, backend="cuda")
    assert len(again) == len(found)


@pytest.mark.parametrize("make", [rms_norm_linear, softmax])
def test_clusters_are_measured(make):
    needs_clusters()
    program = make()
    found = mi.superoptimize(program, backend="cuda", clusters=True)
    clustered = [
        c for c in found.tuned.candidates if c.timing is not None and c.ugraph.is_clustered
    ]
    assert clustered, [c.reason for c in found.tuned.candidates if c.reason][:5]
    check(clustered[0].ugraph, program)
    check(next(u for u in found if u.is_fused), program)


def test_both_generators_are_measured_side_by_side():
    needs_clusters()
    found = mi.superoptimize(rms_norm_linear(), clusters=True)
    measured = [c for c in found.tuned.candidates if c.timing and not c.is_library]
    assert {s.cuda for c in measured for s in c.schedules} == {True, False}
    check(found, rms_norm_linear())
