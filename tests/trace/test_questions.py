"""What a model asks on the host about the length of a text, while it is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mirage_hf.trace.record import Recording, TraceError, record


def asked(question: Callable[[Tensor], Any]) -> tuple[bool, Recording]:
    """Return the answer to a question about a length, and the recording."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    length = mode.from_tensor(torch.tensor([7]))
    answers: list[bool] = []
    recording = record(
        lambda: answers.append(bool(question(length))), {"length": length}, mode, length
    )
    return answers[0], recording


@pytest.mark.parametrize(
    ("question", "answer", "reach"),
    [
        (lambda n: n + 3 > 100, False, 97),
        (lambda n: 2 + n.clone() - 1 >= 100, False, 98),
        (lambda n: n < 100, True, 99),
        (lambda n: n.to(torch.int32).view(1, 1) <= 100, True, 100),
        (lambda n: n != 0, True, math.inf),
        (lambda n: n == 0, False, math.inf),
        (lambda n: n == 50, False, 49),
        (lambda n: n != 50, True, 49),
        (lambda n: n > 0, True, math.inf),
        (lambda n: n + 0.5 > 10, False, 9),
        (lambda n: 1 - (n + 1) > 0, False, math.inf),
        (lambda n: 50 - n > 0, True, 49),
        (lambda n: 3 - (50 - n) >= 0, False, 46),
        (lambda n: 50 - n == 20, False, 29),
    ],
)
def test_comparisons_are_answered_up_to_a_length(
    question: Callable[[Tensor], Any], answer: bool, reach: float
) -> None:
    given, recording = asked(question)
    assert (given, recording.reach) == (answer, reach)
    for length in range(1, 120):
        same = bool(question(torch.tensor([length]))) == answer
        assert same or length > reach


def test_the_reach_is_the_least_of_all_answers() -> None:
    _, recording = asked(lambda n: (n > 80) or (n > 30) or (n > 50))
    assert recording.reach == 30


@pytest.mark.parametrize(
    "question",
    [
        lambda n: n,
        lambda n: n * 2 > 3,
        lambda n: torch.add(n, 1, alpha=2) > 3,
        lambda n: n > n + 1,
        lambda n: torch.ones(1, device=n.device) > n,
        lambda n: n.clone().add_(100) > 50,
        lambda n: n.to(torch.bool) == 5,
        lambda n: torch.rsub(n, 40, alpha=3) > 10,
    ],
)
def test_other_questions_are_refused(question: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TraceError, match="reads values of the device on the host"):
        asked(question)
