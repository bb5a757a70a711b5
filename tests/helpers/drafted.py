"""Calls that draft: what is drafted, and how much of it was taken."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.step_pairs import stocks


def scripts(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return scripts of drafts for texts: good, often right, and adversarial ones."""
    is_wrong = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    wrong = tokens.roll(1, 1) + 1
    return {
        "good": tokens,
        "often right": torch.where(is_wrong, wrong, tokens),
        "wrong": wrong,
        "outside of the vocabulary": torch.full_like(tokens, -1),
    }


def taken(model: Any) -> int:
    """Return how many drafts were taken in traced steps. No call may have run stock."""
    assert not stocks(model), model.mirage.report
    assert model.mirage.report.decode["step: traced"]
    return int(model.mirage.report.decode["drafts: taken"])
