"""A number that a model takes for all rows becomes a number of each row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mirage_hf.trace.record import Recording, TraceError, record
from mirage_hf.trace.row_values import RowValues
from mirage_hf.trace.step_plan import StepPlan

ROWS, SLOTS, WIDTH, HEADS = 3, 20, 4, 2
TABLE = torch.randn(SLOTS, WIDTH, generator=torch.Generator().manual_seed(0))
FREQUENCIES = 1 / 7 ** torch.arange(WIDTH // 2)
SLOPES = torch.tensor([0.5, 0.25])

#: What takes a number of tokens and an input (rows, 1, WIDTH), and gives a tensor with rows.
Function = Callable[[Tensor, Tensor], Tensor]


def learned(length: Tensor, x: Tensor) -> Tensor:
    """Add the row of a table for one position."""
    places = torch.arange(1) + length
    return x + F.embedding(places.unsqueeze(0), TABLE)


def expanded(length: Tensor, x: Tensor) -> Tensor:
    return x + F.embedding((torch.arange(1) + length).expand(len(x), -1), TABLE)


def repeated(length: Tensor, x: Tensor) -> Tensor:
    return x + TABLE[(torch.arange(1) + length).unsqueeze(0).repeat(len(x), 1)]


def rotated(length: Tensor, x: Tensor) -> Tensor:
    """Multiply by cos and sin of products of positions and frequencies."""
    angles = (FREQUENCIES[None, :, None] @ (length[None, None] + 0.0)).transpose(1, 2)
    both = torch.cat((angles, angles), -1)
    return x * both.cos() + x.flip(-1) * both.sin()


def masked(length: Tensor, x: Tensor) -> Tensor:
    """Take a softmax over the slots up to the length, with a bias of each head."""
    slots = torch.arange(SLOTS)
    bias = SLOPES[None, :, None, None] * (slots - length)
    hidden = (slots[None, :] > length[:, None])[None, None]
    scores = torch.where(hidden, -torch.inf, (x @ TABLE.T)[:, None] + bias)
    return scores.softmax(-1).sum(1) @ TABLE


def ordered(length: Tensor, x: Tensor) -> Tensor:
    """Read the memory of each row in an order that begins after the length."""
    memory = x * TABLE
    order = (torch.arange(SLOTS) + length + 1) % SLOTS
    weights = torch.arange(SLOTS)[:, None] / SLOTS
    return (memory.index_select(1, order) * weights).sum(1, keepdim=True)


def of_heads(length: Tensor, x: Tensor) -> Tensor:
    """Put heads into the dim of rows."""
    both = x.repeat_interleave(HEADS, 0) * (length + 1)[:, None, None]
    return both.view(len(x), HEADS, WIDTH).sum(1, keepdim=True)


FUNCTIONS = [learned, expanded, repeated, rotated, masked, ordered, of_heads]


def recorded(function: Function) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        number, numbers = torch.zeros(1).long(), torch.zeros(ROWS, 1).long()
        x, out = torch.zeros(ROWS, 1, WIDTH), torch.zeros(ROWS, 1, WIDTH)
    values = RowValues(number, numbers, [x, out])
    inputs = {"x": x, "out": out, "length": numbers}
    return record(lambda: out.copy_(function(number, x)), inputs, mode, number, row_values=values)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_row_gets_what_its_own_number_gives(function: Function) -> None:
    plan = StepPlan(recorded(function), ROWS)
    plan.schedule({})
    x = torch.randn(ROWS, 1, WIDTH, generator=torch.Generator().manual_seed(1))
    for lengths in ([2, 3, 4], [11, 0, 5]):
        given = {"x": x, "out": torch.zeros_like(x), "length": torch.tensor(lengths)[:, None]}
        plan.bind(given, (0, 0))()
        want = [function(torch.tensor([n]), x[[row]]) for row, n in enumerate(lengths)]
        torch.testing.assert_close(given["out"], torch.cat(want))


def in_place(length: Tensor, x: Tensor) -> Tensor:
    return x + (torch.arange(1) + length).mul_(2)


def rows_are_not_first(length: Tensor, x: Tensor) -> Tensor:
    return (x.permute(2, 1, 0) * length).permute(2, 1, 0)


@pytest.mark.parametrize("function", [in_place, rows_are_not_first])
def test_what_is_unknown_is_refused(function: Function) -> None:
    why = r"test_row_values\.py:.* one number of tokens for all rows"
    with pytest.raises(TraceError, match=why):
        recorded(function)


def test_a_branch_on_the_number_holds_up_to_some_length() -> None:
    def function(length: Tensor, x: Tensor) -> Tensor:
        places = length + 2
        return learned(length, x) if places <= 12 else x

    assert recorded(function).reach == 10
