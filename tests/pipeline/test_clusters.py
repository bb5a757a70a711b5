"""Kernels whose blocks form clusters: accepted, run on the CPU, and never run by Triton."""

from dataclasses import replace

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import triton
from mirage_hf.codegen.generated_program import CUDA
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.pipeline.choose import promising, schedule_candidates
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.search_report import Counters, SearchReport, StopReason
from mirage_hf.tune import space
from mirage_hf.verify.accept import Candidate, examine
from mirage_hf.zoo.key import ANY_TARGET, key_of
from tests.helpers import cluster_ugraphs, ugraphs

REASON = "axis [chs] is cut among the blocks of a cluster, which Triton cannot express"


@pytest.mark.parametrize("name", cluster_ugraphs.ALL)
def test_the_triton_generator_refuses_clusters_and_names_the_way_out(name):
    u = cluster_ugraphs.ALL[name]()
    ops = place_kernels(u)
    schedules = [replace(space.default_schedule(op), cuda=False) for op in ops]
    with pytest.raises(errors.CodegenError, match=f"{REASON}; give the kernel a schedule"):
        triton.generate(u, schedules)
    assert "which Triton cannot express" in space.obstacle(place_kernels(u))


@pytest.mark.parametrize("name", cluster_ugraphs.ALL)
def test_kernels_without_schedules_are_cuda_kernels(name):
    u = cluster_ugraphs.ALL[name]()
    program = triton.generate(u)
    clustered = [op.block.cluster is not None for op in u.block_ops]
    assert [launch.cuda for launch in program.launches] == clustered


def test_backend_cuda_takes_what_the_cuda_generator_writes():
    clustered, plain = cluster_ugraphs.rms_norm_linear(), ugraphs.rms_norm_linear()
    request = Request(
        plain.program,
        key_of(plain.program, ANY_TARGET),
        SearchOptions(clusters=True),
        all_candidates=True,
        generators=(CUDA,),
    )
    candidates = (examined(clustered), examined(plain))
    report = SearchReport(Counters(), StopReason.EXHAUSTED)
    outcome = schedule_candidates(request, VerifiedCandidates(candidates, report), lambda: ())
    fused = [u for u in outcome.ugraphs if u.is_fused]
    assert {u.is_clustered for u in fused} == {True, False}
    assert all(s.cuda for u in fused for s in u.schedules)
    assert "launch_cuda(" in outcome.entry().kernel


def examined(u) -> Candidate:
    """Return the accepted candidate."""
    candidate = examine(u)
    assert isinstance(candidate, Candidate), candidate
    return candidate


@pytest.mark.parametrize("all_candidates", [False, True])
def test_a_cluster_is_never_chosen_and_the_report_says_why(all_candidates):
    u = cluster_ugraphs.rms_norm_linear()
    plain = examined(ugraphs.rms_norm_linear())
    request = Request(
        u.program, key_of(u.program, ANY_TARGET), SearchOptions(), all_candidates=all_candidates
    )

    def chosen(*candidates: Candidate):
        verified = VerifiedCandidates(candidates, SearchReport(Counters(), StopReason.EXHAUSTED))
        return schedule_candidates(request, verified, tuned=lambda: ())

    outcome = chosen(examined(u))
    assert [x.is_fused for x in outcome.ugraphs] == [False]
    assert "which Triton cannot express" in outcome.reason
    outcome = chosen(examined(u), plain)
    assert [x.is_fused for x in outcome.ugraphs] == [True, False]
    assert outcome.ugraphs[0].block_ops[0].block.cluster is None
    assert "1 kernels was left out: axis c is cut" in "".join(outcome.verified.report.notes)
    assert promising([examined(u), plain]) == [plain]


@pytest.mark.parametrize("name", cluster_ugraphs.ALL)
def test_kernels_written_by_hand_are_accepted_and_run_on_the_cpu(name):
    u = cluster_ugraphs.ALL[name]()
    made = mi.ugraph(u.program, u.kernels)
    inputs = ugraphs.random_inputs(u.program)
    want = library_ugraph(u.program)(inputs)[0]
    torch.testing.assert_close(made(inputs)[0], want, rtol=2e-2, atol=2e-2)
