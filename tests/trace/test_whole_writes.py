"""Buffers that are overwritten as a whole are views of what is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mirage_hf.trace.step_plan import StepPlan
from tests.helpers.traced_functions import ROWS, normal, outputs_of, recorded, results_of


def by_index(x: Tensor) -> Tensor:
    """As in the loop over tokens of a gated delta net, with one token."""
    out = torch.zeros_like(x)
    seen = out.detach()
    out[:, :, 0] = x[:, :, 0] * 2
    return seen.transpose(1, 2).cumsum(-1)


def by_slice(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    out[:, 0:4].copy_(x.exp())
    return out + out.sum(-1, keepdim=True)


def in_part(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :2] = x[:, :2] * 2
    return out + 1


def read_before(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    first = out + x
    out.copy_(first.exp())
    return out + first


def written_twice(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out.copy_(x.exp())
    out.copy_(out * 2)
    return out + 1


def in_another_order(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out.transpose(1, 3).copy_(x.transpose(1, 3).exp())
    return out + 1


def a_part_is_read(x: Tensor) -> Tensor:
    """The part is a view from before the write."""
    out = torch.zeros_like(x)
    part = out[:, 1:3]
    out.copy_(x.exp())
    return part + 1


def in_another_dtype(x: Tensor) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.bfloat16)
    out.copy_(x.exp())
    return out.float() + 1


#: (rows, 4, 1, 4), as the buffer has a token
X = {"x": normal(ROWS, 4, 1, 4)}


@pytest.mark.parametrize("function", [by_index, by_slice])
def test_no_buffer_is_left(function: Callable[[Tensor], Tensor]) -> None:
    plan = run(function)
    assert [u.node.name for u in plan.step_ops if u.node and u.node.written] == ["aten.copy_"]
    assert not any(u.node and u.node.name.startswith("aten.zeros") for u in plan.step_ops)


@pytest.mark.parametrize(
    "function",
    [in_part, read_before, written_twice, in_another_order, a_part_is_read, in_another_dtype],
)
def test_other_buffers_are_kept(function: Callable[[Tensor], Tensor]) -> None:
    plan = run(function)
    assert any(u.node and u.node.name == "aten.zeros_like" for u in plan.step_ops)


def run(function: Callable[[Tensor], Tensor]) -> StepPlan:
    """Assert that a plan computes what a function does, and return it."""
    plan = StepPlan(recorded(function, X), ROWS)
    plan.schedule({})
    wanted = outputs_of(function, X)
    for got, x in zip(results_of(plan, X, wanted), wanted, strict=True):
        assert torch.equal(got, x)
    return plan
