"""What a model's own methods give its steps, and when it is tried whether that matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig

from mirage_hf.decode.step_inputs import UnreadInputs


class Model(nn.Module):
    """A model whose step adds what `read` makes of an argument, and counts its calls."""

    dtype = torch.bfloat16

    def __init__(self, read: Callable[[Any], Any]):
        super().__init__()
        self.read, self.calls = read, 0
        self.config = LlamaConfig(num_hidden_layers=2)

    def forward(self, input_ids: Tensor, past_key_values: Any, types: Any = None, **_: Any) -> Any:
        self.calls += 1
        added = 0 if types is None else self.read(types)
        return type("Outputs", (), {"logits": input_ids.float() + added})


def differs(model: Model, unread: UnreadInputs, types: Any) -> bool:
    given = {"input_ids": torch.ones(1, 1), "past_key_values": DynamicCache(), "types": types}
    return not unread.make_no_difference(model, given, ["types"])


TYPES = [torch.zeros(1, n, dtype=torch.long) for n in (4, 5)]


def form(x: Tensor) -> int:
    return 0 * x.shape[1] * x.ndim


def test_what_no_step_reads_is_tried_once() -> None:
    model, unread = Model(form), UnreadInputs()
    unread.begin("a state")
    assert not any(differs(model, unread, types) for types in TYPES)
    assert model.calls == 2
    assert not differs(model, unread, TYPES[0].float()), "another dtype may take another branch"
    assert model.calls == 4
    unread.begin("a state")
    assert not differs(model, unread, TYPES[0]) and model.calls == 4
    unread.begin("another state")
    assert not differs(model, unread, TYPES[0]) and model.calls == 6


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[:, -1],
        lambda x: x.tolist()[0][0],
        lambda x: x.numpy()[0, 0],
        lambda x: x.view(-1).max().item(),
        lambda x: float(x[0, 0]),
        lambda x: int(bool((x == 1).any())),
    ],
)
def test_what_a_step_reads_is_tried_for_each_call(read: Callable[[Any], Any]) -> None:
    """It is zero at first, and changes nothing."""
    model, unread = Model(read), UnreadInputs()
    assert not any(differs(model, unread, types) for types in TYPES)
    assert model.calls == 4
    assert differs(model, unread, torch.ones_like(TYPES[0]))


def test_other_arguments_are_compared_by_value() -> None:
    model, unread = Model(lambda x: 1 if x == "loud" else 0), UnreadInputs()
    assert not differs(model, unread, "quiet") and not differs(model, unread, "quiet")
    assert model.calls == 2
    assert differs(model, unread, "loud") and differs(model, unread, "loud")


@pytest.mark.parametrize(
    ("read", "types", "is_told"),
    [
        (form, TYPES[0], False),  # another rounding, as that of a GPU
        (lambda x: 0 * x[:, -1], TYPES[0], True),
        (lambda x: 0, "quiet", True),
        (lambda x: 0.1, TYPES[0], True),
    ],
)
def test_logits_may_round_in_other_ways_if_nothing_reads_a_tensor(
    read: Callable[[Any], Any], types: Any, is_told: bool
) -> None:
    model = Model(lambda x: read(x) + 0.01)
    assert differs(model, UnreadInputs(), types) == is_told
