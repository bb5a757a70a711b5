"""A comparison of logits takes the other run's choices where scores nearly tie."""

from __future__ import annotations

import torch
from torch import Tensor

from mirage_hf.trace.near_ties import KeepChoices, TakeChoices

STOCKS = torch.tensor([[0.1, 1.000, 2.0, 0.999]])


def places(scores: Tensor, tolerance: float, stocks: Tensor = STOCKS) -> list[int]:
    """Return which two places are taken for scores, after another run over stock's."""
    with KeepChoices() as kept:
        stocks.topk(2)
    with TakeChoices(kept, tolerance):
        values, found = scores.topk(2)
    assert torch.equal(values, scores.gather(-1, found))
    return found[0].tolist()


def test_near_ties_take_the_other_choice() -> None:
    ours = torch.tensor([[0.1, 0.999, 2.0, 1.000]])
    assert places(ours, 0.0) == [2, 3]
    assert places(ours, 0.01) == [2, 1]


def test_other_scores_keep_their_choice() -> None:
    assert places(torch.tensor([[0.1, 0.5, 2.0, 1.0]]), 0.06) == [2, 3]
    assert places(torch.tensor([[9.0, 1.0, 2.0, 0.9]]), 0.06) == [0, 2]


def test_masked_scores_keep_their_choice() -> None:
    ours = torch.tensor([[0.1, float("-inf"), 2.0, 1.0]])
    assert places(ours, 0.06) == [2, 3]


def test_a_choice_of_another_shape_is_not_taken() -> None:
    assert places(STOCKS, 0.06, torch.cat([STOCKS, STOCKS])) == [2, 1]
