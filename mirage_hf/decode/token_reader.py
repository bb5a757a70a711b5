"""How the host reads tokens while later steps run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class TokenReader:
    """Ordered copies of reports from the device to the host, which do not wait for later steps.

    Attributes:
        depth: Steps that may be ahead of the host.
        waiting: Reports that were posted and not taken.
    """

    depth: int
    waiting: deque[Any] = field(default_factory=deque)
    _slots: list[tuple[Tensor, torch.cuda.Event]] = field(default_factory=list)
    _next: int = 0

    def post(self, report: Tensor) -> None:
        """Enqueue a copy of the (2, batch) report as it is after the steps enqueued so far."""
        if report.device.type == "cpu":
            self.waiting.append(report.tolist())
            return
        if not self._slots:
            # one more than can wait at once, so that no slot is written before it was read
            self._slots = [
                (
                    torch.empty(report.shape, dtype=report.dtype, device="cpu", pin_memory=True),
                    torch.cuda.Event(),
                )
                for _ in range(self.depth + 2)
            ]
        slot, event = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.copy_(report, non_blocking=True)
        event.record(torch.cuda.current_stream(report.device))
        self.waiting.append((slot, event))

    def take(self) -> list[list[int]]:
        """Return the oldest report: the tokens, and 1 for each row that goes on."""
        first = self.waiting.popleft()
        if isinstance(first, list):
            return first
        slot, event = first
        event.synchronize()
        return slot.tolist()
