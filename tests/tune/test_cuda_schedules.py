"""Schedules of CUDA kernels: which are listed, refitted and ranked."""

from __future__ import annotations

import pytest

from mirage_hf.codegen.placement import place_kernels
from mirage_hf.errors import CodegenError
from mirage_hf.gpus import H200, Device, device_named
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune import neighbours, space
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.cuda_schedules import cuda_schedules, estimate_cuda
from mirage_hf.tune.ranking import CUDA, TRITON, rank_by_estimate
from tests.helpers import multi_kernel_ugraphs, ugraphs


def first_in_cuda(ugraph: UGraph) -> ScheduledCandidate:
    return next(c for c in rank_by_estimate([ugraph], generators=(CUDA,)) if not c.is_library)


def test_other_numbers_of_splits_stay_cuda_kernels() -> None:
    start = first_in_cuda(multi_kernel_ugraphs.split_attention(8, 8, 4096, 128, 4))
    found = list(neighbours._other_splits(start))
    assert len(found) == 2
    for ugraph, schedules in found:
        for op, schedule in zip(place_kernels(ugraph), schedules, strict=True):
            assert schedule.cuda and schedule.cooperating_blocks == 1 and not schedule.mma
            estimate_cuda(op, schedule)  # there is such a kernel


@pytest.mark.parametrize(
    "name",  # blocks of an A100 have less memory than an H200's, and more than an L40S's
    [
        "NVIDIA L40S",
        pytest.param("NVIDIA A100-SXM4-80GB", marks=pytest.mark.thorough),
        "NVIDIA H200",
    ],
)
def test_no_listed_schedule_needs_more_shared_memory_than_a_block_may_have(name: str) -> None:
    gpu: Device = device_named(name, {"L": 89, "A": 80, "H": 90}[name[7]])
    (op,) = place_kernels(ugraphs.attention(3, 64, 512, 128))
    listed = cuda_schedules(op, gpu)
    assert listed
    assert max(estimate_cuda(op, s, gpu).shared for s in listed) <= gpu.shared_bytes
    more = max(cuda_schedules(op, H200), key=lambda s: estimate_cuda(op, s, H200).shared)
    if gpu.shared_bytes < H200.shared_bytes:
        with pytest.raises(CodegenError, match="fits on no SM of " + gpu.name):
            estimate_cuda(op, more, gpu)


def test_cuda_kernels_are_listed_only_where_multiply_adds_hold() -> None:
    ugraph = ugraphs.rms_norm_linear(1, 256, 64)
    for kinds, has_cuda in (({True}, False), ({False}, True), ({False, True}, True)):
        ranked = rank_by_estimate(
            [ugraph],
            schedules=space.permitted([(ugraph, kinds)]),
            generators=(TRITON, CUDA),
            in_cuda=space.permitted_in_cuda([(ugraph, kinds)]),
        )
        assert any(s.cuda for c in ranked for s in c.schedules) == has_cuda, kinds
