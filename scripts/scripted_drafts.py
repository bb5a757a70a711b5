"""Drafts of a chosen quality: from a script of what should come, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode import generate
from mirage_hf.decode.choosing import Chooser
from mirage_hf.decode.control import Control, TokenHistory
from mirage_hf.decode.draft_sources import DraftSource
from mirage_hf.decode.drafts import Drafts


@dataclass(frozen=True, eq=False)
class Scripted(DraftSource):
    """Runs another source, so that its time counts, and replaces its drafts by those of a script.

    Attributes:
        script: (batch, tokens of a text): the token that should come at each place of a text.
        inner: The other source.
        name: Identifies the script.
    """

    script: Tensor
    inner: DraftSource
    name: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies the source."""
        return "scripted", self.name, self.inner.key

    @property
    def resumes(self) -> bool:
        """Whether the other source can draft again after steps without drafts."""
        return self.inner.resumes

    @property
    def captures_first_drafts(self) -> bool:
        """Whether first drafts of the other source get a graph."""
        return self.inner.captures_first_drafts

    def draft(
        self, control: Control, drafts: Drafts, history: TokenHistory, chooser: Chooser
    ) -> None:
        """Draft for every row."""
        self.inner.draft(control, drafts, history, chooser)
        places = drafts.text_length(history) + drafts.number[:-1]
        known = places < self.script.shape[1]
        tokens = self.script.gather(1, places.clamp_max(self.script.shape[1] - 1))
        drafts.tokens[:, 1:].copy_(tokens)
        drafts.count.copy_(known.sum(1, keepdim=True))


@contextmanager
def drafting(script: Tensor, name: str = "script") -> Iterator[None]:
    """Let calls that draft take their drafts from a script."""
    source_of = generate.draft_source

    def scripted(session: Any) -> DraftSource | None:
        inner = source_of(session)
        return None if inner is None else Scripted(script, inner, name)

    generate.draft_source = scripted
    try:
        yield
    finally:
        generate.draft_source = source_of


def with_errors(script: Tensor, accept: float, vocab: int, seed: int = 0) -> Tensor:
    """Return a script in which each token is right with the probability `accept`."""
    generator = torch.Generator().manual_seed(seed)
    is_right = torch.rand(script.shape, generator=generator) < accept
    return torch.where(is_right.to(script.device), script, (script + 1) % vocab)


@contextmanager
def assisted_by_script(model: Any, script: Tensor, count: int) -> Iterator[None]:
    """Let stock's assisted decoding of a model take `count` drafts at a time from a script.

    Its own candidate generator runs, too, so that its time counts.
    """
    make = type(model)._get_candidate_generator

    def scripted(*args: Any, **kwargs: Any) -> Any:
        generator = make(model, *args, **kwargs)
        candidates = generator.get_candidates

        def get_candidates(input_ids: Tensor, **more: Any) -> tuple[Tensor, None]:
            candidates(input_ids, **more)
            length = input_ids.shape[1]
            most = min(count, script.shape[1] - length - 1)
            drafts = script[: len(input_ids), length : length + max(most, 0)]
            return torch.cat([input_ids, drafts], dim=1), None

        generator.get_candidates = get_candidates
        return generator

    model._get_candidate_generator = scripted
    try:
        yield
    finally:
        del model._get_candidate_generator
