"""The state of drafted tokens on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.control import Control, TokenHistory


@dataclass(frozen=True, eq=False)
class Drafts:
    """The state of a call whose steps verify drafts, besides `Control`. Integers are int64.

    After a row's first token `Control` stays as it is, except for `alive`. `ahead` says how far a
    row has got since then: `Control.length + ahead` slots of its cache are valid, and the same
    holds for its position. `Control.budget - ahead` tokens may still be chosen.

    Keys of drafts that were not taken need no rollback. They lie after the row's valid slots, and
    the next step writes over them.

    Attributes:
        tokens: (batch, tokens): the token chosen last, which is not in the cache yet, then drafts.
        count: (batch, 1): how many drafts a row has. Those after them are never taken.
        ahead: (batch, 1): tokens of a row since its first one.
        report: (batch, tokens + 3): the tokens that a step found, how many drafts it verified, how
            many of the tokens the row takes, and whether it goes on. The host reads it.
        logits: (batch · tokens, vocabulary), in the model's dtype: those of the last step.
        sampler: Chooses a token for each row of `logits` (sampler.py).
        none_ended: (batch, tokens) bool, all False.
    """

    tokens: Tensor
    count: Tensor
    ahead: Tensor
    report: Tensor
    logits: Tensor
    sampler: Any
    none_ended: Tensor

    @classmethod
    def allocate(cls, batch: int, tokens: int, logits: Tensor, sampler: Any) -> Drafts:
        """Return a state for steps of `tokens` tokens.

        Args:
            batch: Rows.
            tokens: Tokens of a row.
            logits: Logits of the model, (batch, vocabulary).
            sampler: A sampler of batch · tokens rows.
        """
        device, rows = logits.device, batch * tokens

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        with torch.inference_mode(False):
            return cls(
                tokens=integers(batch, tokens),
                count=integers(batch, 1),
                ahead=integers(batch, 1),
                report=integers(batch, tokens + 3),
                logits=logits.new_zeros(rows, logits.shape[1]),
                sampler=sampler,
                none_ended=torch.zeros(batch, tokens, dtype=torch.bool, device=device),
            )

    @property
    def number(self) -> Tensor:
        """The numbers of a row's tokens, from 0 on."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    def start(self, control: Control, history: TokenHistory) -> None:
        """Begin after the choice of each row's first token."""
        self.ahead.zero_()
        self.count.zero_()
        self.tokens[:, :1].copy_(control.ids)
        self.report[:, 0].copy_(control.report[0])
        self.report[:, -3].zero_()
        self.report[:, -2].fill_(1)
        self.report[:, -1].copy_(control.report[1])
        history.ids.index_copy_(1, history.prompt, control.ids)

    def continue_from(self, other: Drafts) -> None:
        """Copy the state of steps of another shape, or in a block with fewer slots.

        Drafts for which these steps have no room are dropped.
        """
        shared = min(self.tokens.shape[1], other.tokens.shape[1])
        self.tokens[:, :shared].copy_(other.tokens[:, :shared])
        self.count.copy_(other.count.clamp_max(shared - 1))
        self.ahead.copy_(other.ahead)

    def as_rows(self, control: Control) -> Control:
        """Return a control whose rows are the new tokens of a step, each at its own length.

        A forward that takes one token of each row verifies drafts so. Rows of one text share its
        memory, and see the keys of the rows before them.
        """
        batch, tokens = self.tokens.shape
        rows, ahead = batch * tokens, self.ahead + self.number
        length = (control.length + ahead).view(rows, 1)
        vocabulary = self.logits.shape[1]
        # a model may have no position for tokens after the budget, which are never taken
        useful = torch.minimum(ahead, (control.budget - 1).clamp_min(0))
        return replace(
            control,
            # nothing is looked up for a draft outside of the vocabulary, which is never taken
            ids=self.tokens.clamp(0, vocabulary - 1).view(rows, 1),
            position=(control.position + useful).view(rows, 1),
            offsets=control.offsets.repeat_interleave(tokens, 1),
            length=length.view(1) if rows == 1 else length,
            lowest=control.lowest.repeat_interleave(tokens, 0),
            alive=control.alive.repeat_interleave(tokens),
        )

    def text_length(self, history: TokenHistory) -> Tensor:
        """Return the tokens (batch, 1) of each row's text, the one chosen last included."""
        return history.prompt + 1 + self.ahead
