"""Where drafts come from, and the end of a step that verifies them. The host reads nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirage_hf.codegen.kernel_launch import launch
from mirage_hf.codegen.optional_triton import HAS_TRITON
from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.choosing import Chooser
from mirage_hf.decode.control import Control, TokenHistory
from mirage_hf.decode.draft_schedule import Acceptance, DraftSchedule
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.kernels import drafting
from mirage_hf.decode.kernels.sizes import MAX_ROWS, MAX_VOCAB
from mirage_hf.decode.sampler import Sampler
from mirage_hf.decode.verifying import accept, look_up
from mirage_hf.layers.part import StepShape


class DraftSource(ABC):
    """Drafts tokens after the text so far.

    Captured steps are kept by `key`, so sources with equal keys must do the same.
    """

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """What identifies the source."""

    @property
    def resumes(self) -> bool:
        """Whether it can draft again after steps without drafts."""
        return True

    @property
    def captures_first_drafts(self) -> bool:
        """Whether a call's first drafts, which no step makes, get a graph of their own.

        Then the source must draft the same if it is called again: a capture runs it several times.
        """
        return False

    @abstractmethod
    def draft(
        self, control: Control, drafts: Drafts, history: TokenHistory, chooser: Chooser
    ) -> None:
        """Write drafts to `drafts.tokens` after the first column, and set `drafts.count`.

        Args:
            control: State of the call.
            drafts: State of the drafts.
            history: The text.
            chooser: Chooses tokens as plain decoding does.
        """


class NoDrafts(DraftSource):
    """Drafts nothing, in steps of one token."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies the source."""
        return ("none",)

    def draft(
        self, control: Control, drafts: Drafts, history: TokenHistory, chooser: Chooser
    ) -> None:
        """Leave the drafts as they are: there are none."""


@dataclass(frozen=True)
class PromptLookup(DraftSource):
    """Drafts what followed the same last tokens earlier in the text.

    Attributes:
        most: The most drafts.
        longest: The most tokens that are compared.
    """

    most: int
    longest: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies the source."""
        return "lookup", self.most, self.longest

    def draft(
        self, control: Control, drafts: Drafts, history: TokenHistory, chooser: Chooser
    ) -> None:
        """Draft for every row."""
        batch, tokens = drafts.tokens.shape
        most = min(self.most, tokens - 1)
        if not drafts.sampler.by_kernels:
            look_up(control, drafts, history, most, self.longest)
            return
        what = drafting.look_up_launch(batch, tokens, history.ids.shape[1], most, self.longest)
        state = [history.ids, history.prompt, drafts.ahead, control.lowest]
        launch(what, [*state, drafts.tokens, drafts.count])


@dataclass(frozen=True)
class DraftPlan:
    """How a call drafts.

    Attributes:
        shapes: The shapes of its steps. The last one takes most tokens.
        costs: By tokens of a step: its time as a multiple of that of one token.
        most: The most drafts of a row in a step.
        source: Where drafts come from. None: from an assistant.
        assistant: The assistant (assistants.py), if there is one.
        acceptance: What earlier calls saw of the drafts, if the call goes on from it.
    """

    shapes: tuple[StepShape, ...]
    costs: Mapping[int, float]
    most: int
    source: DraftSource | None
    assistant: Any = None
    acceptance: Acceptance | None = None

    @property
    def shape(self) -> StepShape:
        """The shape with most tokens."""
        return self.shapes[-1]

    def constant(self) -> DraftPlan:
        """Return the plan with steps of one shape only."""
        tokens = self.shape.tokens
        return replace(self, shapes=(self.shape,), costs={tokens: self.costs[tokens]})

    def schedule(self, source: DraftSource) -> DraftSchedule:
        """Return what chooses among the shapes in a call."""
        acceptance = Acceptance() if self.acceptance is None else self.acceptance
        return DraftSchedule(self.costs, self.most, source.resumes, acceptance)


def drafts_of(block: CacheBlock, tokens: int) -> Drafts:
    """Return a block's state of drafts, made when its first call with drafts has logits."""
    drafts: Drafts | None = block.drafts.get(tokens)
    logits, rows = block.logits, block.batch * tokens
    wanted = (rows, logits.shape[1]), logits.dtype
    if drafts is None or (tuple(drafts.logits.shape), drafts.logits.dtype) != wanted:
        fits = rows <= MAX_ROWS and logits.shape[1] <= MAX_VOCAB and HAS_TRITON
        by_kernels = None if fits else False
        sampler = Sampler.allocate(rows, logits.shape[1], block.device, by_kernels)
        drafts = Drafts.allocate(block.batch, tokens, logits, sampler)
        block.drafts[tokens] = drafts
    return drafts


class Verifier(Chooser):
    """The end of a step that verifies drafts: choose after every token, accept, and draft again.

    Its memory belongs to the block, as that of other choosers does.
    """

    def __init__(
        self, chooser: Chooser, source: DraftSource, drafts: Drafts, history: TokenHistory
    ):
        super().__init__(("verified", source.key, drafts.tokens.shape[1]))
        self.chooser, self.source, self.drafts, self.history = chooser, source, drafts, history

    @property
    def keys(self) -> tuple[tuple[Any, ...], ...]:
        """What identifies a captured step that ends so: what chooses, and what drafts."""
        return self.chooser.key, self.key

    def begin(self, control: Control, logits: Tensor) -> None:
        """Choose each row's first token from the prompt's logits. Nothing is drafted yet."""
        self.chooser.choose(control, logits)
        if self.chooser.scores is not None:
            self.chooser.keep_scores(self.chooser.scores)
        self.drafts.start(control, self.history)

    def draft(self, control: Control) -> None:
        """Draft after the tokens chosen last."""
        self.source.draft(control, self.drafts, self.history, self.chooser)

    def continue_from(self, other: Verifier, control: Control) -> None:
        """Go on after steps of another shape, which end with another verifier."""
        self.drafts.continue_from(other.drafts)
        if isinstance(other.source, NoDrafts):
            self.draft(control)

    def choose(self, control: Control, logits: Tensor) -> None:
        """Choose from (batch · tokens, vocabulary) logits and move the state on."""
        drafts, history = self.drafts, self.history
        token, ended, scores = self.chooser.pick(control, drafts, history, logits)
        if scores is not None:
            self.chooser.keep_scores(scores)
        picked = token.view(drafts.tokens.shape)
        ended = None if ended is None else ended.view(picked.shape)
        if drafts.sampler.by_kernels:
            self._accept_by_kernel(control, picked, ended)
        else:
            accept(control, drafts, history, picked, ended)
        self.draft(control)

    def _accept_by_kernel(self, control: Control, picked: Tensor, ended: Tensor | None) -> None:
        drafts, history = self.drafts, self.history
        batch, tokens = picked.shape
        ended = drafts.none_ended if ended is None else ended
        what = drafting.accept_launch(batch, tokens, history.ids.shape[1])
        state = [drafts.tokens, drafts.count, drafts.ahead, drafts.report]
        text = [history.ids, history.prompt]
        rest = [control.budget, control.alive.view(torch.uint8), control.eos]
        launch(what, [picked, ended.view(torch.uint8), *state, *text, *rest])

    def scores_of(self, rows: int) -> Tensor | None:
        """Return the scores (rows, vocabulary) of the last step, None if they are not kept."""
        return self.chooser.scores_of(rows)

    def report(self, control: Control) -> Tensor:
        """Return what the host reads after a step."""
        return self.drafts.report

    def read(self, report: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Return the new tokens of each row in a report, and 1 for each row that goes on."""
        return [row[: row[-2]] for row in report], [row[-1] for row in report]


def outcome(report: list[list[int]]) -> tuple[int, list[tuple[int, int]]]:
    """Return the tokens of a reported step, and how many drafts each row verified and took.

    Rows that were not alive have no entry.
    """
    rows = [(verified, taken - 1) for *_, verified, taken, _ in report if taken]
    return len(report[0]) - 3, rows
