"""Rounding checks by torch on a GPU, as `optimize()` runs those of large programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.verify import numeric
from mirage_hf.verify.verdict import Accepted
from tests.helpers import multi_kernel_ugraphs, ugraphs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def verdicts(ugraph: UGraph, checks: numeric.NumericChecks) -> list[bool]:
    return [
        isinstance(numeric.judge_by_torch(ugraph, checks, tensor_cores), Accepted)
        for tensor_cores in (False, True)
    ]


@pytest.mark.parametrize(
    "made",
    [
        ugraphs.rms_norm_linear,
        ugraphs.gated_mlp,
        ugraphs.attention,
        ugraphs.softmax_rows,
        multi_kernel_ugraphs.flash,
        multi_kernel_ugraphs.split_k,
        multi_kernel_ugraphs.norm_in_two,
    ],
    ids=lambda made: made.__name__,
)
def test_verdicts_on_the_gpu_are_those_on_the_cpu(
    made: Callable[[], UGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numeric, "_LARGE", 1)
    on_cpu, on_gpu = numeric.NumericChecks(), numeric.NumericChecks(torch.device("cuda"))
    ugraph = made()
    assert verdicts(ugraph, on_gpu) == verdicts(ugraph, on_cpu)
    (check,) = on_gpu.made.values()
    assert all(x.is_cuda for _, inputs in check.each() for x in inputs)


def test_a_wrong_candidate_is_refused_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes its program without the last factor."""
    monkeypatch.setattr(numeric, "_LARGE", 1)
    right = ugraphs.rms_norm_linear()
    program = KernelGraph()
    x, gamma, w = (program.new_input(t.dims, t.dtype) for t in right.program.inputs)
    y = program.matmul(program.rms_norm(x, gamma), w)
    program.mark_output(program.mul(y, 1.05))
    wrong = replace(right, program=program)
    checks = numeric.NumericChecks(torch.device("cuda"))
    assert verdicts(right, checks)[0] and verdicts(wrong, checks) == [False, False]
