"""Integers of the host become reads on the device, and branches hold up to some length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mirage_hf.trace.host_values import HostValues
from mirage_hf.trace.record import Recording, TraceError, record
from mirage_hf.trace.step_plan import StepPlan

TABLE = torch.arange(600.0).reshape(200, 3)


def recorded(function: Callable[[Any], Tensor]) -> Recording:
    """Record a function of a length that is 4 while it is recorded."""
    host, mode = HostValues(), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        length, out = torch.zeros(1, dtype=torch.long), torch.zeros(2, 3)
    seen = host.symbol(length, 4)

    def run() -> None:
        out.copy_(function(seen))

    return record(run, {"length": length, "out": out}, mode, host=host)


def at(recording: Recording, length: int) -> Tensor:
    """Run what was recorded at another length."""
    plan = StepPlan(recording, 2)
    plan.schedule({})
    out = torch.zeros(2, 3)
    plan.bind({"length": torch.tensor([length]), "out": out}, (0, 0))()
    return out


@pytest.mark.parametrize(
    "function",
    [
        lambda n: TABLE[torch.arange(n, n + 2)],
        lambda n: TABLE[torch.arange(n + 3, n + 7, 2)],
        lambda n: TABLE[n : n + 2],
        lambda n: TABLE[2 * n + 1 : 2 * n + 3],
        lambda n: TABLE.select(0, n).expand(2, 3),
        lambda n: TABLE[:2] + n,
        lambda n: TABLE[:2] * (3 * n - 1),
        lambda n: torch.full((2, 3), n + 1),
        lambda n: (TABLE[:2] < n).float(),
        lambda n: TABLE[:2] if n < 50 else TABLE[2:4],
    ],
)
def test_results_follow_the_length(function: Callable[[Any], Tensor]) -> None:
    recording = recorded(function)
    for length in (1, 4, 5, 40):
        assert torch.equal(at(recording, length), function(length).float())


def test_branches_hold_up_to_a_length() -> None:
    assert recorded(lambda n: TABLE.select(0, n).expand(2, 3)).reach == math.inf
    assert recorded(lambda n: TABLE[:2] if n + 3 <= 50 else TABLE[2:4]).reach == 47


def test_a_path_for_one_length_is_refused() -> None:
    with pytest.raises(TraceError, match="another path for each number of tokens"):
        recorded(lambda n: TABLE[: 2 * (int(n) // int(n))])


def test_a_shape_of_the_length_is_refused() -> None:
    with pytest.raises(TraceError, match=r"makes a shape of the number of tokens \(aten.arange"):
        recorded(lambda n: torch.arange(n).sum().expand(2, 3))
