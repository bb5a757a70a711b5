"""Products with all experts, of which all but the chosen ones get 0: only the chosen are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.trace.experts.op import EXPERTS, MOST_TOKENS
from mirage_hf.trace.routers.op import ROUTE
from mirage_hf.trace.step_ops import RegionRun
from mirage_hf.trace.step_plan import StepPlan
from tests.helpers.traced_functions import normal, outputs_of, plan_of, results_of, runs

EXPERTS_COUNT, WIDTH, INNER, ROWS = 5, 16, 24, 3


def given(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    scores = normal(rows, EXPERTS_COUNT, seed=1).round()  # some are equal
    return {"x": normal(rows, WIDTH).to(dtype), "scores": scores.to(dtype)}


def swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return up * F.silu(gate)


def mixture(
    chosen: int = 1,
    dtype: torch.dtype = torch.float32,
    score: Callable[[Tensor], Tensor] = torch.sigmoid,
    gate: Callable[[Tensor], Tensor] = swiglu,
    also: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Any]:
    """Return a function as Llama 4 has it."""
    first = normal(EXPERTS_COUNT, WIDTH, 2 * INNER, seed=2).to(dtype)
    second = normal(EXPERTS_COUNT, INNER, WIDTH, seed=3).to(dtype)

    def function(x: Tensor, scores: Tensor) -> Any:
        values, index = torch.topk(scores, chosen, dim=1)
        whole = torch.full_like(scores, float("-inf")).scatter_(1, index, values)
        whole = score(whole.float()).to(scores.dtype)
        copies = x.repeat(EXPERTS_COUNT, 1) * whole.transpose(0, 1).reshape(-1, 1)
        y = torch.bmm(copies.view(EXPERTS_COUNT, -1, WIDTH), first)
        y = torch.bmm(gate(y), second).view(-1, WIDTH)
        y = y.reshape(EXPERTS_COUNT, -1, WIDTH).sum(dim=0)
        return y if also is None else (y, also(whole))

    return function


def regions_of(plan: StepPlan) -> list[Any]:
    return [region for region in plan.regions if region.kind == "experts"]


@pytest.mark.parametrize("chosen", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_kernels", [True, False])
def test_only_the_chosen_experts_are_read(
    chosen: int, dtype: torch.dtype, by_kernels: bool
) -> None:
    inputs, function = given(dtype=dtype), mixture(chosen, dtype)
    plan = plan_of(function, inputs)
    found = regions_of(plan)
    assert len(found) == 2
    one = WIDTH * INNER * dtype.itemsize
    assert [region.reads for region in found] == [
        min(ROWS * chosen, EXPERTS_COUNT) * size for size in (2 * one, one)
    ]
    plan.schedule({}, regions={r: RegionRun(runs(r.graph)) for r in found if by_kernels})
    names = [u.node.name for u in plan.step_ops if u.node is not None]
    assert names.count(ROUTE) == 1 and names.count(EXPERTS) == (not by_kernels)
    assert not {"aten.bmm", "aten.topk", "aten.scatter_", "aten.repeat"} & {*names}
    (wanted,) = outputs_of(function, inputs)
    (ours,) = results_of(plan, inputs, (wanted,))
    allowed = 8 * torch.finfo(dtype).eps * float(wanted.abs().max())
    assert float((ours - wanted).abs().max()) <= allowed


@pytest.mark.parametrize(
    "options",
    [
        {"score": lambda s: torch.sigmoid(s) + 1.0},
        {"score": lambda s: torch.sigmoid(s).clamp(min=0.1)},
        {"gate": lambda y: swiglu(y) + 1.0},
        {"gate": lambda y: y[..., :INNER].sigmoid()},
        {"also": lambda whole: whole.cumsum(-1)},
        {"also": lambda whole: whole.view(-1)},
    ],
    ids=["scores + 1", "least score", "gate + 1", "sigmoid gate", "read", "read as a view"],
)
def test_other_mixtures_stay_as_they_are(options: dict[str, Any]) -> None:
    """Their experts add something for 0, or their scores are read by something else."""
    inputs, function = given(), mixture(**options)
    plan = plan_of(function, inputs)
    assert not regions_of(plan)
    plan.schedule({})
    wanted = outputs_of(function, inputs)
    for ours, theirs in zip(results_of(plan, inputs, wanted), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_many_rows_stay_as_they_are() -> None:
    rows = MOST_TOKENS + 1
    assert not regions_of(plan_of(mixture(), given(rows), rows))
