"""The decoding loop: steps run ahead of the host, or wait for the host's choice, and tokens come out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import transformers.generation.utils as generation
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

STREAM_FIRST = not hasattr(generation, "StopCheck")
"""Whether this version of transformers hands a token to the streamer before it asks the stopping criteria."""


@dataclass
class Record:
    """What a call keeps besides its tokens, in the order of the steps."""

    scores: list[Tensor] | None = None
    logits: list[Tensor] | None = None


@dataclass
class Reader:
    """Ordered copies of the report from the device to the host, without waiting for later steps."""

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


def run_ahead(
    advance: Callable[[], Tensor],
    report: Tensor,
    steps: int,
    depth: int,
    on_tokens: Callable[[list[int]], bool],
    meanwhile: Callable[[], None],
) -> None:
    """Choose on the device, up to `depth` steps ahead of the host.

    `report` holds the choice made from the prompt; `advance` enqueues a step that chooses and returns its report;
    at most `steps` follow. `on_tokens` gets each step's tokens, one per row, in order, and says whether to stop after them; steps behind
    that one, and those found dead, are dropped. `meanwhile` is called once, when the first steps are enqueued and none was read.
    """
    reader = Reader(depth)
    waiting = reader.waiting
    reader.post(report)
    begun = False
    while True:
        while steps and len(waiting) <= depth:
            reader.post(advance())
            steps -= 1
        if not begun:
            meanwhile()
            begun = True
        if not waiting:
            return
        tokens, goes_on = reader.take()
        if on_tokens(tokens) or 1 not in goes_on:
            return


def run_with_host(
    advance: Callable[[Tensor], Tensor],
    logits: Tensor,
    input_ids: Tensor,
    *,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    pad: Tensor | None,
    choose: Callable[[Tensor, int], Tensor],
    streamer: Any,
    record: Record,
) -> Tensor:
    """Choose on the host's side with HF's own objects, one step at a time, exactly as stock's `_sample` does.

    `logits` (batch, vocabulary) come from the prompt; `advance` feeds the chosen (batch,) tokens and returns the next; `choose` takes
    tokens from scores (batch, vocabulary) and the number of the step.
    Returns the sequences. Source: GenerationMixin._sample, whose order of calls this keeps.
    """
    has_eos = any(hasattr(c, "eos_token_id") for c in criteria)
    pad = pad.to(input_ids.device) if pad is not None else None
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
    for step in count():
        raw = logits.to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = processors(input_ids, raw)
        if record.scores is not None:
            record.scores.append(scores)
        if record.logits is not None:
            record.logits.append(raw)
        tokens = choose(scores, step)
        if has_eos and pad is not None:  # generate sets a pad token wherever there is a stop token
            tokens = tokens * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        if streamer is not None and STREAM_FIRST:
            streamer.put(tokens.cpu())
        seen = tuple(record.scores) if record.scores is not None else None
        unfinished = unfinished & ~criteria(input_ids, seen)
        if streamer is not None and not STREAM_FIRST:
            streamer.put(tokens.cpu())
        if unfinished.max() == 0:
            break
        logits = advance(tokens)
    return input_ids
