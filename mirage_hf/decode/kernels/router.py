"""The kernel of routers, which choose experts by the greatest scores (trace/router.py)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, library

from mirage_hf.decode.kernels.kernel_launch import KernelLaunch, launch
from mirage_hf.decode.kernels.optional_triton import HAS_TRITON, tl, triton
from mirage_hf.ops.dtypes import COMPUTE_DTYPES
from mirage_hf.trace.router import NORMALIZE, SOFTMAX, route

#: Experts that are compared with all others in one step of the kernel's loop.
CHUNK = 32
#: The most experts that the kernel takes.
MAX_EXPERTS = 1024


@triton.jit
def route_kernel(
    scores_ptr,
    weights_ptr,
    index_ptr,
    overlaps: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    FIRST: tl.constexpr,
    THEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Choose experts for one row: each expert's rank is the number of those that come before it.

    Equal scores are in the order of experts. NaN counts as the greatest score.

    References: `trace.router.route` does the same with torch.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    inside = e < EXPERTS
    s = tl.load(scores_ptr + row * EXPERTS + e, mask=inside, other=-float("inf")).to(tl.float32)
    most = 0.0
    total = 1.0
    if FIRST == SOFTMAX:
        most = tl.max(s, 0)
        s = tl.exp(s - most)
        total = tl.sum(s, 0)
        s = tl.where(inside, s / total, -float("inf"))
    key = tl.where(s != s, float("inf"), s)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, EXPERTS, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there = other < EXPERTS
        o = tl.load(scores_ptr + row * EXPERTS + other, mask=there, other=-float("inf"))
        o = o.to(tl.float32)
        if FIRST == SOFTMAX:
            o = tl.where(there, tl.exp(o - most) / total, -float("inf"))
        o = tl.where(o != o, float("inf"), o)
        earlier = (o[None, :] == key[:, None]) & (other[None, :] < e[:, None])
        before = (o[None, :] > key[:, None]) | earlier
        rank += tl.sum(tl.where(before & there[None, :], 1, 0), 1)
    place = tl.arange(0, PLACES)
    is_there = (rank[None, :] == place[:, None]) & inside[None, :]
    weights = tl.sum(tl.where(is_there, s[None, :], 0.0), 1)
    index = tl.sum(tl.where(is_there, e[None, :], 0), 1)
    chosen = place < CHOSEN
    if THEN == NORMALIZE:
        weights = weights / tl.sum(tl.where(chosen, weights, 0.0), 0)
    if THEN == SOFTMAX:
        weights = tl.where(chosen, weights, -float("inf"))
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    at = row * CHOSEN + place
    tl.store(weights_ptr + at, weights.to(weights_ptr.dtype.element_ty), mask=chosen)
    tl.store(index_ptr + at, index.to(tl.int64), mask=chosen)


def route_by_kernel(
    scores: Tensor, chosen: int, first: int, then: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Choose experts by the kernel. What it does not take is left to torch."""
    rows, experts = scores.shape
    known = scores.dtype in COMPUTE_DTYPES and dtype in COMPUTE_DTYPES
    if not HAS_TRITON or not known or experts > MAX_EXPERTS or not scores.is_contiguous():
        return route(scores, chosen, first, then, dtype)
    weights = torch.empty(rows, chosen, dtype=dtype, device=scores.device)
    index = torch.empty(rows, chosen, dtype=torch.long, device=scores.device)
    launch(route_launch(rows, experts, chosen, first, then), [scores, weights, index])
    return weights, index


@lru_cache(maxsize=256)
def route_launch(rows: int, experts: int, chosen: int, first: int, then: int) -> KernelLaunch:
    """Return the kernel for these sizes."""
    constants = {
        "EXPERTS": experts,
        "CHOSEN": chosen,
        "FIRST": first,
        "THEN": then,
        "BLOCK": triton.next_power_of_2(experts),
        "PLACES": triton.next_power_of_2(chosen),
        "CHUNK": CHUNK,
        "SOFTMAX": SOFTMAX,
        "NORMALIZE": NORMALIZE,
    }
    return KernelLaunch(route_kernel, rows, constants, num_warps=4)


library.impl("mirage_hf::route", "CUDA", route_by_kernel)
