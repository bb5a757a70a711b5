"""The state of one call on the device: what a step reads and writes besides keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

#: The most new tokens of a row in a step: one, and drafts.
MAX_STEP_TOKENS = 16
#: Stop tokens that a control has room for. A longer list becomes a table over the vocabulary
#: (selection.py). The kernels read all of them as one tile, so it is a power of two.
MAX_EOS = 32


@dataclass(frozen=True, eq=False)
class Control:
    """The state of one call, at addresses that a captured graph keeps. Integers are int64.

    Attributes:
        ids: (batch, 1): the token chosen last, which is not in the cache yet.
        position: (batch, 1): its RoPE position, smaller than its slot if the row has left padding.
        offsets: (axes, batch, 1): what each axis adds to `position`, for models whose positions
            have axes. Other models take `position` itself.
        length: (1,): valid slots of the cache, and so the slot of the next key. It is (batch, 1)
            for rows that are new tokens of a text (`Drafts.as_rows`).
        lowest: (batch, 1): the first slot that a row may see: its left padding.
        budget: (1,): tokens that may still be chosen.
        alive: (batch,) bool: rows that go on after the token in `ids`.
        eos: (MAX_EOS,): stop tokens, then −1.
        pad: (1,): the token of rows that have ended.
        report: (2, batch): the tokens chosen last, and which rows go on. The host reads it.
        slots: (1, capacity): 0, 1, 2, …
    """

    #: What rows have in common, even if they are new tokens of a text.
    FOR_ALL_ROWS: ClassVar = ("budget", "eos", "pad", "slots")

    ids: Tensor
    position: Tensor
    offsets: Tensor
    length: Tensor
    lowest: Tensor
    budget: Tensor
    alive: Tensor
    eos: Tensor
    pad: Tensor
    report: Tensor
    slots: Tensor

    @classmethod
    def allocate(cls, batch: int, capacity: int, device: torch.device, axes: int = 0) -> Control:
        """Return a state with no row alive, for caches of `capacity` slots."""

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        return cls(
            ids=integers(batch, 1),
            position=integers(batch, 1),
            offsets=integers(axes, batch, 1),
            length=integers(1),
            lowest=integers(batch, 1),
            budget=integers(1),
            alive=torch.zeros(batch, dtype=torch.bool, device=device),
            eos=integers(MAX_EOS),
            pad=integers(1),
            report=integers(2, batch),
            slots=torch.arange(capacity, device=device)[None],
        )

    def positions(self) -> Tensor:
        """Return the position_ids that a model's forward takes: (batch, 1) or (axes, batch, 1)."""
        return self.position + self.offsets if len(self.offsets) else self.position

    def start(
        self,
        *,
        length: int,
        position: Tensor,
        offsets: Tensor | None = None,
        lowest: Tensor | None,
        budget: int,
        eos: Tensor | None,
        pad: Tensor | None,
    ) -> None:
        """Set the state to that after the prompt: its last token was fed, and every row is alive.

        Args:
            length: Slots of the prompt, the last token's included.
            position: (batch or 1, 1): positions of the last tokens.
            offsets: (axes, batch or 1, 1): what each axis adds to them, None without axes.
            lowest: (batch, 1): left padding, None if no row has any.
            budget: Tokens that may be chosen.
            eos: Stop tokens, at most MAX_EOS.
            pad: The token of rows that have ended.
        """
        self.length.fill_(length - 1)
        self.position.copy_(position.expand_as(self.position))
        if offsets is not None:
            self.offsets.copy_(offsets.expand_as(self.offsets))
        self.lowest.zero_() if lowest is None else self.lowest.copy_(lowest)
        self.budget.fill_(budget)
        self.alive.fill_(True)
        self.eos.fill_(-1)
        if eos is not None:
            self.eos[: eos.numel()].copy_(eos.reshape(-1))
        if pad is not None:
            self.pad.copy_(pad.reshape(-1)[:1])

    def continue_from(self, other: Control) -> None:
        """Copy the state of a block with fewer slots."""
        for name in vars(self):
            if name != "slots":
                getattr(self, name).copy_(getattr(other, name))


@dataclass(frozen=True, eq=False)
class TokenHistory:
    """What processors and stop strings read, at addresses that a captured graph keeps.

    Integers are int64.

    Attributes:
        ids: (batch, room): the text so far, as stock's input_ids hold it. Steps that find no row
            alive write after its end, and so do drafts.
        numbers: (batch, room) float64 in [0, 1): the random number of each step.
        prompt: (1,): tokens of input_ids when the call began.
        budget: (1,): `Control.budget` when the call began. The difference is the step's number.
        slots: (1, room): 0, 1, 2, …
    """

    ids: Tensor
    numbers: Tensor
    prompt: Tensor
    budget: Tensor
    slots: Tensor

    @classmethod
    def allocate(cls, batch: int, capacity: int, device: torch.device) -> TokenHistory:
        """Return a history for `capacity` tokens, and for those of steps that run ahead."""
        room = capacity + 1 + MAX_STEP_TOKENS
        return cls(
            ids=torch.zeros(batch, room, dtype=torch.long, device=device),
            numbers=torch.zeros(batch, room, dtype=torch.float64, device=device),
            prompt=torch.zeros(1, dtype=torch.long, device=device),
            budget=torch.zeros(1, dtype=torch.long, device=device),
            slots=torch.arange(room, device=device)[None],
        )

    def start(self, input_ids: Tensor, budget: int) -> None:
        """Begin a call with a prompt (batch, length)."""
        self.ids[:, : input_ids.shape[1]].copy_(input_ids)
        self.prompt.fill_(input_ids.shape[1])
        self.budget.fill_(budget)

    def continue_from(self, other: TokenHistory) -> None:
        """Copy the text of a history with less room."""
        self.ids[:, : other.ids.shape[1]].copy_(other.ids)
        self.prompt.copy_(other.prompt)
        self.budget.copy_(other.budget)

    def set_numbers(self, numbers: Tensor) -> None:
        """Copy (batch, steps) numbers from the CPU without waiting for the device."""
        copy_async(numbers, self.numbers[:, : numbers.shape[1]])


def copy_async(values: Tensor, target: Tensor) -> None:
    """Copy without waiting for the device, whichever device the values are on."""
    if values.device.type == "cpu" and target.device.type == "cuda":
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)
