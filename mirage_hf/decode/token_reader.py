"""How the host reads tokens while later steps run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class RowsOfTokens:
    """The new tokens of each row that the host has read.

    Rows that verify drafts get on at their own pace.
    """

    def __init__(self, batch: int, pad: Tensor | None):
        self._rows: list[list[int]] = [[] for _ in range(batch)]
        self._pad = pad
        #: How many tokens are known of every row. A row that has ended has pad tokens.
        self.complete = 0

    @property
    def longest(self) -> int:
        """The most tokens of a row."""
        return max(map(len, self._rows))

    def add(self, new: list[list[int]], rows_go_on: list[int]) -> None:
        """Add the tokens of a step. Rows that do not go on get no more."""
        for row, tokens in zip(self._rows, new, strict=True):
            row.extend(tokens)
        pairs = zip(self._rows, rows_go_on, strict=True)
        alive = [len(row) for row, goes_on in pairs if goes_on]
        self.complete = min(alive) if alive else self.longest

    def columns(self, first: int = 0) -> Tensor:
        """Return the complete tokens (batch, tokens) from the one with number `first` on."""
        rows, count = [row[first : self.complete] for row in self._rows], self.complete - first
        if any(len(row) < count for row in rows):
            # read from the device only if it is needed: stop tokens come with a pad token
            pad = 0 if self._pad is None else int(self._pad.reshape(-1)[0])
            rows = [row + [pad] * (count - len(row)) for row in rows]
        return torch.tensor(rows, dtype=torch.long, device="cpu")


@dataclass
class TokenReader:
    """Ordered copies of reports from the device to the host, which do not wait for later steps.

    Attributes:
        depth: Steps that may be ahead of the host.
        waiting: Reports that were posted and not taken.
        tokens: The most tokens that each waiting report can give a row, in the same order.
    """

    depth: int
    waiting: deque[Any] = field(default_factory=deque)
    tokens: deque[int] = field(default_factory=deque)
    #: Pinned copies of reports by their shape. The next one to use is first.
    _slots: dict[torch.Size, deque[tuple[Tensor, torch.cuda.Event]]] = field(default_factory=dict)

    def post(self, report: Tensor, tokens: int) -> None:
        """Enqueue a copy of a report as it is after the steps enqueued so far.

        Args:
            report: The report.
            tokens: The most tokens that it can give a row.
        """
        self.tokens.append(tokens)
        if report.device.type == "cpu":
            self.waiting.append(report.tolist())
            return
        if report.shape not in self._slots:
            # one more than can wait at once, so that no slot is written before it was read
            self._slots[report.shape] = deque(
                (
                    torch.empty(report.shape, dtype=report.dtype, device="cpu", pin_memory=True),
                    torch.cuda.Event(),
                )
                for _ in range(self.depth + 2)
            )
        slots = self._slots[report.shape]
        slot, event = slots[0]
        slots.rotate(-1)
        slot.copy_(report, non_blocking=True)
        event.record(torch.cuda.current_stream(report.device))
        self.waiting.append((slot, event))

    def take(self) -> list[list[int]]:
        """Return the oldest report."""
        self.tokens.popleft()
        first = self.waiting.popleft()
        if isinstance(first, list):
            return first
        slot, event = first
        event.synchronize()
        return slot.tolist()
