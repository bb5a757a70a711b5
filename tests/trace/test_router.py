"""Routers: several torch ops that choose experts are one op, and its kernel agrees with torch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.decode.kernels.router import MAX_EXPERTS, route_by_kernel, route_launch
from mirage_hf.trace.plan import StepPlan
from mirage_hf.trace.router import NORMALIZE, NOTHING, ROUTE, SOFTMAX, route
from tests.helpers import triton_interpreter
from tests.helpers.decode_states import DTYPES, assert_compiles_and_waits
from tests.helpers.traced_functions import normal, outputs_of, plan_of, results_of

SCORES = normal(3, 16)


def qwen3(scores: Tensor) -> tuple[Tensor, Tensor]:
    chances = F.softmax(scores, dtype=torch.float, dim=-1)
    weights, index = torch.topk(chances, 4, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(scores.dtype), index


def mixtral(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, index = torch.topk(F.softmax(scores.float(), dim=-1), 2, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), index


def olmoe(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, index = torch.topk(F.softmax(scores, dim=-1, dtype=torch.float), 8, dim=-1)
    return weights.to(scores.dtype), index


def gpt_oss(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, index = torch.topk(scores, 4, dim=-1)
    return F.softmax(weights, dim=1, dtype=weights.dtype), index


def greatest(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, index = torch.topk(scores, 1, dim=-1)
    return weights.sigmoid(), index


def routers(plan: StepPlan) -> list[tuple[int, int, int]]:
    plan.schedule({})
    nodes = [u.node for u in plan.units if u.node is not None]
    assert not any(node.name == "aten.topk" for node in nodes)
    return [node.args[1:4] for node in nodes if node.name == ROUTE]


@pytest.mark.parametrize(
    ("function", "wanted", "most"),
    [
        (qwen3, (4, SOFTMAX, NORMALIZE), 4),
        (mixtral, (2, SOFTMAX, NORMALIZE), 3),
        (olmoe, (8, SOFTMAX, NOTHING), 3),
        (gpt_oss, (4, NOTHING, SOFTMAX), 3),
        (greatest, (1, NOTHING, NOTHING), 4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_is_one_op(
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    wanted: tuple[int, int, int],
    most: int,
    dtype: torch.dtype,
) -> None:
    scores = SCORES.to(dtype)
    plan = plan_of(function, {"scores": scores})
    assert routers(plan) == [wanted]
    ops = [u.node for u in plan.units if u.node is not None]
    assert sum("copy_" not in n.name and "view" not in n.name for n in ops) <= most
    outputs = outputs_of(function, {"scores": scores})
    for ours, theirs in zip(results_of(plan, {"scores": scores}, outputs), outputs, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_what_else_reads_scores_still_gets_them() -> None:
    def function(scores: Tensor) -> tuple[Tensor, ...]:
        chances = F.softmax(scores.float(), dim=-1)
        weights, index = torch.topk(chances, 2, dim=-1)
        return weights / (weights.sum(-1, keepdim=True) + 1e-3), index, chances.cumsum(-1), weights

    plan = plan_of(function, {"scores": SCORES})
    assert routers(plan) == [(2, NOTHING, NOTHING)]
    outputs = outputs_of(function, {"scores": SCORES})
    for ours, theirs in zip(results_of(plan, {"scores": SCORES}, outputs), outputs, strict=True):
        torch.testing.assert_close(ours, theirs)


def wrong_routes(count: int, device: str = "cpu") -> list[str]:
    """Return random cases in which the kernel differs from torch.

    Equal scores are chosen in the order of experts, as a stable sort would.
    """
    rng, wrong = random.Random(0), []
    for n in range(count):
        rows, experts = rng.randint(1, 5), rng.choice((1, 2, 7, 32, 60, 128, 129, 384))
        chosen, dtype = rng.randint(1, min(experts, 9)), DTYPES[n % 3]
        first, then = rng.choice((NOTHING, SOFTMAX)), rng.choice((NOTHING, SOFTMAX, NORMALIZE))
        scores = 3 * torch.randn(rows, experts)
        if rng.random() < 0.5:  # ties
            scores = scores.round()
        if rng.random() < 0.2:
            scores.zero_()
        scores = scores.to(dtype).to(device)
        then = SOFTMAX if then == NORMALIZE and first == NOTHING else then  # a sum may be 0
        weights, index = route_by_kernel(scores, chosen, first, then, torch.float32)
        order = torch.sort(scores.float(), dim=-1, descending=True, stable=True)[1][:, :chosen]
        exact, _ = route(scores.double().float(), chosen, first, then, torch.float32)
        if not torch.equal(index, order) or not torch.allclose(weights, exact, 1e-5, 1e-6):
            wrong.append(f"{rows} {experts} {chosen} {first} {then} {dtype}")
    return wrong


def test_the_kernel_is_as_torch() -> None:
    pytest.importorskip("triton")
    code = (
        "from tests.trace import test_router as t; import json; "
        "print(json.dumps(t.wrong_routes(30)))"
    )
    assert triton_interpreter.run(code) == []


@pytest.mark.gpu
def test_the_kernel_is_as_torch_on_a_gpu() -> None:
    assert wrong_routes(200, "cuda") == []


@pytest.mark.parametrize("experts", [8, 128, MAX_EXPERTS])
def test_the_kernel_compiles(experts: int) -> None:
    what = route_launch(2, experts, 8, SOFTMAX, NORMALIZE)
    assert_compiles_and_waits(what, [torch.bfloat16, torch.bfloat16, torch.int64])
