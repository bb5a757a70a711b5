"""Drafts of a chosen quality, for tests and benchmarks of steps that verify drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mirage_hf.decode.control import Control, TokenHistory
from mirage_hf.decode.draft_sources import DraftSource
from mirage_hf.decode.drafts import Drafts


@dataclass(frozen=True, eq=False)
class Scripted(DraftSource):
    """Drafts from a script: the token that should come at each place of a row's text.

    Attributes:
        script: (batch, tokens of a text).
        name: Identifies the script.
    """

    script: Tensor
    name: str = "script"

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies the source."""
        return "scripted", self.name

    def draft(self, control: Control, drafts: Drafts, history: TokenHistory) -> None:
        """Copy what should come."""
        places = drafts.text_length(history) + drafts.number[:-1]
        self.copy(drafts, places)

    def copy(self, drafts: Drafts, places: Tensor) -> None:
        """Draft the script's tokens at these places (batch, drafts)."""
        known = places < self.script.shape[1]
        tokens = self.script.gather(1, places.clamp_max(self.script.shape[1] - 1))
        drafts.tokens[:, 1:].copy_(tokens)
        drafts.count.copy_(known.sum(1, keepdim=True))


@contextmanager
def drafting(model: Any, source: DraftSource) -> Iterator[None]:
    """Let calls with prompt lookup take their drafts from another source."""
    runner = model.generate.runner
    plan_drafts = type(runner).plan_drafts

    def plan(inputs: Any, assistant: Any) -> Any:
        planned = plan_drafts(runner, inputs, assistant)
        return None if planned is None else replace(planned, source=source)

    runner.plan_drafts = plan
    try:
        yield
    finally:
        del runner.plan_drafts
