"""How a step chooses its tokens and moves the state on, with torch. The kernels do the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirage_hf.decode.control import Control, TokenHistory
from mirage_hf.decode.drafts import Drafts

#: Reported in place of a token if none can be drawn: a score is NaN, or none is above −inf.
NOTHING = -(1 << 62)


class Picked(NamedTuple):
    """What plain decoding would choose after each token of a step.

    Attributes:
        token: (rows,) int64, NOTHING where no token can be drawn.
        ended: (rows,) bool: whether the row ends there whatever the token is. None if no row does.
        scores: (rows, vocabulary) float32: scores after all processors, if the call keeps them.
    """

    token: Tensor
    ended: Tensor | None = None
    scores: Tensor | None = None


class Chooser(ABC):
    """The last part of a step: the choice of the next tokens.

    Captured steps are kept by `key`, so choosers with equal keys must do the same.

    Attributes:
        key: Identifies what the chooser does.
        scores: (batch, vocabulary) float32: the scores after all processors, of the step enqueued
            last, if the call keeps them.
    """

    scores: Tensor | None = None

    def __init__(self, key: tuple[Any, ...]):
        self.key = key

    def tensors(self) -> list[Tensor]:
        """Return the memory that the chooser owns."""
        return []

    @property
    def keys(self) -> tuple[tuple[Any, ...], ...]:
        """What identifies a captured step that ends with this chooser."""
        return (self.key,)

    @abstractmethod
    def choose(self, control: Control, logits: Tensor) -> None:
        """Choose from (batch, vocabulary) logits and move the state on. The host reads nothing."""

    def begin(self, control: Control, logits: Tensor) -> None:
        """Choose from the prompt's logits."""
        self.choose(control, logits)

    def pick(
        self, control: Control, drafts: Drafts, history: TokenHistory, logits: Tensor
    ) -> Picked:
        """Choose after each token of a step that verifies drafts, and move nothing on.

        Args:
            control: State of the call.
            drafts: What the step was fed.
            history: The text.
            logits: (batch · tokens, vocabulary).
        """
        raise NotImplementedError

    def keep_scores(self, scores: Tensor) -> None:
        """Copy the scores (rows, vocabulary) of a step to where `scores_of` finds them.

        Only choosers that pick scores have memory for them.
        """
        raise NotImplementedError

    def scores_of(self, rows: int) -> Tensor | None:
        """Return the scores (rows, vocabulary) of the last step, None if they are not kept."""
        return self.scores

    def report(self, control: Control) -> Tensor:
        """Return what the host reads after a step."""
        return control.report

    def read(self, report: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Return the new tokens of each row in a report, and 1 for each row that goes on."""
        tokens, rows_go_on = report
        return [[token] for token in tokens], rows_go_on


def choose_greedily(control: Control, logits: Tensor) -> None:
    """Choose the greatest of (batch, vocabulary) logits, the first of equal ones, and move on.

    Logits are compared in their own dtype, float32 at most. Rounding up to float32 first, as stock
    does, changes neither their order nor their ties.
    """
    best = torch.argmax(logits.float() if logits.dtype == torch.float64 else logits, dim=-1)
    settle(control, torch.where(control.alive, best, control.pad))


def settle(control: Control, token: Tensor, ended: Tensor | None = None) -> None:
    """Take tokens as chosen and move the state on.

    Args:
        control: State of the call.
        token: (batch,) int64.
        ended: (batch,) bool: rows that end here whatever their token is.
    """
    alive = control.alive
    any_alive = alive.any()
    move_on(control, any_alive)
    control.budget.sub_(any_alive.long())
    # not torch.isin: from about ten stop tokens on it sorts, and so synchronises
    no_stop = (token[:, None] != control.eos).all(-1)
    goes_on = alive & no_stop & (control.budget > 0)
    if ended is not None:
        goes_on = goes_on & ~ended
    control.ids.copy_(torch.where(any_alive, token, control.ids[:, 0])[:, None])
    control.alive.copy_(goes_on)
    control.report[0].copy_(token)
    control.report[1].copy_(goes_on)


def draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Choose the first token at which the sum of probabilities exceeds a share of the total.

    Args:
        probabilities: (batch, vocab).
        numbers: (batch, 1) in [0, 1).

    Returns:
        (batch,) tokens, NOTHING for rows without a probability above 0 or with a NaN.
    """
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    # sums that are taken in parallel may round up where nothing is added
    exceeds = (sums > numbers * total) & (probabilities > 0)
    token = exceeds.to(torch.uint8).argmax(-1)
    return torch.where(total[:, 0] > 0, token, NOTHING)


def move_on(control: Control, any_alive: Tensor) -> None:
    """Count the slot just written and advance the RoPE position, if the 0-dim bool is true."""
    control.length.add_(any_alive)
    control.position.add_(any_alive)
