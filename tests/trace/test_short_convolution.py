"""Steps of short convolutions become one op."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.trace.short_convolution import SHORT_CONVOLUTION
from mirage_hf.trace.step_plan import StepPlan
from tests.helpers.traced_functions import normal, recorded

ROWS, CHANNELS, WIDTH = 3, 6, 4
BIAS = normal(CHANNELS, seed=7)


def step(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, silu: bool = False
) -> Tensor:
    """One step as HF's models have it."""
    inputs = torch.cat([state, x], dim=-1).to(weight.dtype)
    state.copy_(inputs[:, :, -state.shape[-1] :])
    y = F.conv1d(inputs, weight[:, None], bias, groups=CHANNELS)[:, :, -1:]
    return F.silu(y) if silu else y


def the_state_is_read(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    before = state * 2
    return step(state, x, weight) + before[..., :1]


def all_outputs_are_read(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    inputs = torch.cat([state, x], dim=-1)
    state.copy_(inputs[:, :, -state.shape[-1] :])
    return F.conv1d(inputs, weight[:, None], groups=CHANNELS)


def the_first_inputs_stay(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    inputs = torch.cat([state, x], dim=-1)
    state.copy_(inputs[:, :, : state.shape[-1]])
    return F.conv1d(inputs, weight[:, None], groups=CHANNELS)[:, :, -1:]


def channels_are_mixed(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    inputs = torch.cat([state, x], dim=-1)
    state.copy_(inputs[:, :, -state.shape[-1] :])
    wide = weight[:, None].expand(CHANNELS, CHANNELS, WIDTH)
    return F.conv1d(inputs, wide)[:, :, -1:]


def the_new_state_is_read(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return step(state, x, weight) + state.sum(-1, keepdim=True)


def the_input_changes(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    x = x * 1.0
    inputs = torch.cat([state, x], dim=-1)
    state.copy_(inputs[:, :, -state.shape[-1] :])
    x.mul_(3)
    return F.conv1d(inputs, weight[:, None], groups=CHANNELS)[:, :, -1:] + x


def the_result_changes(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    y = step(state, x, weight, silu=True)
    first = (y * 2).tanh()
    y.mul_(5)
    return (first * y.cumsum(1)).tanh() * 2


def planned(function: Callable[..., Tensor], length: int) -> StepPlan:
    """Return the plan of a function. Two steps by it are as the function's."""
    inputs = {
        "state": normal(ROWS, CHANNELS, length, seed=1),
        "x": normal(ROWS, 1, CHANNELS, seed=2).transpose(1, 2),
        "weight": normal(CHANNELS, WIDTH, seed=3),
    }
    plan = StepPlan(recorded(function, inputs), ROWS)
    plan.schedule({})
    given, state = {n: x.clone() for n, x in inputs.items()}, inputs["state"].clone()
    for _ in range(2):
        wanted = function(state, inputs["x"], inputs["weight"])
        given["out.0"] = torch.zeros_like(wanted)
        with torch.no_grad():
            plan.bind(given, ())()
        assert torch.equal(given["state"], state)
        torch.testing.assert_close(given["out.0"], wanted)
    return plan


def ops_of(plan: StepPlan) -> list[str]:
    return [u.node.name for u in plan.step_ops if u.node is not None]


@pytest.mark.parametrize("length", [WIDTH - 1, WIDTH, WIDTH + 2])
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("silu", [False, True])
def test_a_step_is_one_op(length: int, bias: Tensor | None, silu: bool) -> None:
    ops = ops_of(planned(partial(step, bias=bias, silu=silu), length))
    assert ops.count(SHORT_CONVOLUTION) == 1
    launches = [name for name in ops if name in ("aten.cat", "aten.convolution", "aten.silu")]
    assert not launches and ops.count("aten.copy_") == 1  # of the result into its place


@pytest.mark.parametrize(
    "function",
    [
        the_state_is_read,
        the_new_state_is_read,
        all_outputs_are_read,
        the_first_inputs_stay,
        the_input_changes,
        the_result_changes,
        channels_are_mixed,
    ],
)
def test_other_convolutions_are_kept(function: Callable[..., Tensor]) -> None:
    ops = ops_of(planned(function, WIDTH))
    assert SHORT_CONVOLUTION not in ops and "aten.convolution" in ops
