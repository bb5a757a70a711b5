"""Kernels whose blocks form clusters: accepted, run on the CPU, and never run by Triton."""

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import triton
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
def test_the_triton_generator_refuses_clusters_and_names_the_way_out(name, tmp_path):
    u = cluster_ugraphs.ALL[name]()
    for generate in (triton.generate, lambda u: u.generate_triton_program(tmp_path / "kernel.py")):
        with pytest.raises(errors.CodegenError, match=f"{REASON}; generate_cuda_program"):
            generate(u)
    assert "which Triton cannot express" in space.obstacle(place_kernels(u))


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
