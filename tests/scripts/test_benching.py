"""What benchmarks share: checked results, and what they say without a GPU."""

import sys

import pytest
import torch

from scripts import bench_blocks, bench_chain, bench_choices, bench_generate, bench_sizes, benching


def test_a_rival_that_is_wrong_is_not_timed():
    exact = torch.randn(8, 8)
    assert benching.error_of([exact.half()], [exact]) < 1e-3
    for wrong in (exact.half() * 1.1, exact.half()[:4], torch.full((8, 8), torch.nan).half()):
        with pytest.raises(ValueError, match="wrong result"):
            benching.error_of([wrong], [exact])
    with pytest.raises(ValueError, match="2 results"):
        benching.error_of([exact.half()] * 2, [exact])


def test_a_float32_state_is_held_to_more_than_the_bfloat16_result_beside_it():
    exact = torch.randn(8, 8)
    result = exact.bfloat16()
    assert 1e-4 < benching.error_of([exact, result], [exact, exact]) < 0.01
    for wrong in ([exact * 1.001, result], [exact, result * 1.1]):
        with pytest.raises(ValueError, match="wrong result"):
            benching.error_of(wrong, [exact, exact])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "script",
    [bench_blocks, bench_chain, bench_choices, bench_generate, bench_sizes],
    ids=lambda s: s.__name__,
)
def test_without_a_gpu_a_script_says_so(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script.__name__])
    with pytest.raises(SystemExit, match="no GPU here"):
        script.main()
