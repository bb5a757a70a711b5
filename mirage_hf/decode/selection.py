"""How a call chooses its tokens: on the device, in the step itself, or by HF's objects on the host's side, and why.

On the device are HF's own processors (decode/processors.py), greedy choice and sampling, stop tokens, lengths and stop strings. Sampling
takes one uniform number for each row and step: output `step` of Philox with the key (seed, row), where the seed is the one number
that a call draws from torch's generator. So a row's tokens do not depend on other rows, on how many steps ran ahead, or on
where they were chosen; they are not those of stock, which draws from the generator at every step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from mirage_hf.decode import processors as table
from mirage_hf.decode.cache import MOST_EOS, CacheBlock, Control, TokenHistory, send
from mirage_hf.decode.kernels.sampling import Sampler, sampler_of
from mirage_hf.decode.processors import Now, Place
from mirage_hf.decode.program import NOTHING, Chooser
from mirage_hf.default_device import on_the_cpu

BITS = 40
"""Of a uniform number: so few that no rounding of sums of probabilities puts the greatest number beyond their end."""
KEEP_CHOOSERS = 4
"""Ways to choose that a block keeps graphs for. A fifth pushes out the one not used for longest."""
_STOP_STRINGS = {
    "stop_strings",
    "_stop_string_matching_mode",
    "_stop_strings_for_matching",
    "embedding_vec",
    "max_valid_positions",
    "max_valid_end_lens",
    "maximum_token_len",
    "num_stop_strings",
    "target_lens",
}
"""What a StopStringCriteria has; one with more is of a version that this was not written for."""
_STOP_SIZES = ("maximum_token_len", "num_stop_strings", "max_valid_positions", "max_valid_end_lens")


# -- drawing ------------------------------------------------------------------------------------------------------------


def draw_seed() -> int:
    """Draw the 64-bit seed of a call from torch's generator."""
    return int(torch.randint(-(1 << 63), (1 << 63) - 1, (), device="cpu"))


def uniforms(seed: int, rows: int, steps: int, first: int = 0) -> Tensor:
    """(rows, steps) float64 numbers in [0, 1) for the steps from `first` on, a multiple of 4, on the CPU."""
    found = np.empty((rows, steps), dtype=np.uint64)
    for row in range(rows):
        source = np.random.Philox(key=np.array([seed % (1 << 64), row], dtype=np.uint64))
        found[row] = source.advance(first // 4).random_raw(
            steps
        )  # four numbers for each count of Philox
    return torch.from_numpy((found >> np.uint64(64 - BITS)).astype(np.float64) * 2.0**-BITS)


class UniformNumbers:
    """The uniform numbers of a call, step by step, for loops that choose on the host's side."""

    AT_ONCE = 1024

    def __init__(self, seed: int, rows: int, device: torch.device):
        self.seed, self.rows, self.device = seed, rows, device
        self._first, self._some = 0, torch.empty(rows, 0, device=device)

    def at(self, step: int) -> Tensor:
        """(rows, 1), on the device. Steps must be asked for in order."""
        if step >= self._first + self._some.shape[1]:
            self._first = step - step % self.AT_ONCE
            self._some = uniforms(self.seed, self.rows, self.AT_ONCE, self._first).to(self.device)
        return self._some[:, step - self._first, None].contiguous()


# -- what a call asks for -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """How a call chooses on the device."""

    processors: tuple[Any, ...] = ()
    stops: tuple[StopStringCriteria, ...] = ()
    eos: Tensor | None = None
    """Stop tokens, where there are more than a control has room for."""
    sample: bool = False
    pads: bool = True
    """Whether rows that have ended get the pad token; with stop strings alone stock goes on choosing for them."""
    records: bool = False
    """Whether scores behind processors are wanted."""
    clocks: tuple[MaxTimeCriteria, ...] = ()
    """Asked by the host at every token it reads."""

    @classmethod
    def of(
        cls, processors: Any, criteria: Sequence[Any], config: Any, vocab: int | None = None
    ) -> Selection | str:
        """Read what stock's decoding method would get; return why the host must choose where it must. vocab: tokens of the model."""
        if (why := table.obstacle(processors, vocab)) is not None:
            return why
        for c in criteria:
            # of a string without characters HF looks at the whole text
            strings = (
                type(c) is StopStringCriteria
                and vars(c).keys() <= _STOP_STRINGS
                and c.maximum_token_len > 0
            )
            if not strings and type(c) not in (
                EosTokenCriteria,
                MaxLengthCriteria,
                MaxTimeCriteria,
            ):
                return f"criterion {getattr(type(c), '__name__', type(c))}"
        eos = [c.eos_token_id.reshape(-1) for c in criteria if type(c) is EosTokenCriteria]
        # a user's own criterion has its tokens on the CPU before stock's loop asks it
        device = next((t.device for t in eos if t.device.type != "cpu"), None)
        eos = [t.to(device) for t in eos] if device is not None else eos
        return cls(
            processors=tuple(processors or ()),
            stops=tuple(c for c in criteria if type(c) is StopStringCriteria),
            eos=torch.cat(eos) if sum(map(len, eos)) > MOST_EOS else None,
            sample=bool(config.do_sample),
            pads=bool(eos),
            records=bool(processors and config.return_dict_in_generate and config.output_scores),
            clocks=tuple(c for c in criteria if type(c) is MaxTimeCriteria),
        )

    @property
    def plain(self) -> bool:
        """Whether it is the greatest logit, as the step's own end finds it."""
        return not (self.processors or self.stops or self.sample or self.eos is not None)

    def on(self, block: CacheBlock) -> Composed:
        """Return what chooses for this call on a block that holds logits: one that was there before, if it is of the same kind."""
        place = Place(block.logits.shape[1])
        rows = [table.TABLE[type(p)] for p in self.processors]
        sizes = [row.sizes(p) for row, p in zip(rows, self.processors, strict=True)]
        with on_the_cpu():
            values = [row.values(p, place) for row, p in zip(rows, self.processors, strict=True)]
        shapes = [tuple((tuple(v.shape), v.dtype) for v in each) for each in values]
        strings = [
            (
                tuple(getattr(c, n) for n in _STOP_SIZES),
                tuple(c.embedding_vec.shape),
                c.embedding_vec.dtype,
            )
            for c in self.stops
        ]
        key = (
            "composed",
            tuple(map(type, self.processors)),
            tuple(sizes),
            tuple(shapes),
            tuple(strings),
            self.eos is None,
            self.sample,
            self.pads,
            self.records,
            place.vocab,
        )
        if key not in block.choosers:
            while len(block.choosers) >= KEEP_CHOOSERS:
                block.drop_chooser(next(iter(block.choosers)))
            with torch.inference_mode(False), torch.no_grad():
                own = [
                    (row.run, s, [torch.empty_like(v, device=block.device) for v in each])
                    for row, s, each in zip(rows, sizes, values, strict=True)
                ]
                scores = (
                    torch.empty(block.batch, place.vocab, dtype=torch.float32, device=block.device)
                    if self.records
                    else None
                )
                block.choosers[key] = Composed(
                    key, block.own_history(), sampler_of(block), self, own, scores
                )
        chooser: Composed = block.choosers.pop(key)
        block.choosers[key] = chooser
        chooser.load(values, self.stops)
        if chooser.eos is not None:
            send(place.tokens(self.eos), chooser.eos)
        return chooser


class Composed(Chooser):
    """Processors, then the greatest score or a sample, then stop strings. It knows the history and not the block, which holds both."""

    def __init__(
        self,
        key: tuple[Any, ...],
        history: TokenHistory,
        sampler: Sampler,
        selection: Selection,
        rows: list[tuple[Any, tuple[Any, ...], list[Tensor]]],
        scores: Tensor | None,
    ):
        super().__init__(key)
        self.history, self.sampler, self.rows, self.scores = history, sampler, rows, scores
        self.sample, self.pads = selection.sample, selection.pads
        self._writes = bool(selection.stops) or any(
            table.TABLE[type(p)].text for p in selection.processors
        )
        self.eos = (
            None
            if selection.eos is None
            else torch.zeros(sampler.vocab, dtype=torch.bool, device=history.ids.device)
        )
        self._sources = [c.embedding_vec for c in selection.stops]
        self.stops = [_resident(c, history.ids.device) for c in selection.stops]

    def load(self, values: list[tuple[Tensor, ...]], stops: tuple[StopStringCriteria, ...]) -> None:
        """Take over the numbers of a call into the tensors that a captured graph reads, without waiting for the device."""
        for (_, _, own), each in zip(self.rows, values, strict=True):
            for mine, v in zip(own, each, strict=True):
                send(v, mine)
        for n, (mine, c) in enumerate(zip(self.stops, stops, strict=True)):
            send(c.target_lens, mine.target_lens)
            if (
                c.embedding_vec is not self._sources[n]
            ):  # HF keeps it between calls, and it is large
                send(c.embedding_vec, mine.embedding_vec)
                self._sources[n] = c.embedding_vec

    def tensors(self) -> list[Tensor]:
        """What the calls write."""
        rows = [v for _, _, own in self.rows for v in own]
        stops = [t for c in self.stops for t in (c.embedding_vec, c.target_lens)]
        return [*rows, *stops, *(t for t in (self.scores, self.eos) if t is not None)]

    def choose(self, control: Control, logits: Tensor) -> None:
        history = self.history
        step = history.budget - control.budget
        now = Now(history.ids, history.prompt + step, history.slots)
        scores = logits.float().contiguous()
        for run, sizes, values in self.rows:
            scores = run(now, scores, *sizes, *values)
        if self.scores is not None:
            self.scores.copy_(scores)
        if not (
            self.sample or self.stops or self.eos is not None
        ):  # one launch does all that follows
            self.sampler.argmax(control, scores.contiguous())
            if self._writes:
                history.ids.index_copy_(1, now.length, control.report[0][:, None])
            return
        token = (
            self.sampler.sample(scores, history.numbers.index_select(1, step))
            if self.sample
            else scores.argmax(-1)
        )
        if self.pads:
            token = torch.where(control.alive, token, control.pad)
        if self._writes:
            history.ids.index_copy_(
                1,
                now.length,
                token.masked_fill(token == NOTHING, 0)[:, None] if self.sample else token[:, None],
            )
        ended = (
            None
            if self.eos is None
            else self.eos.index_select(0, token.clamp(0, len(self.eos) - 1))
        )
        for c in self.stops:
            text, there = Now(history.ids, now.length + 1, history.slots).last(c.maximum_token_len)
            # a token that HF knows no text of, and so no part of a stop string
            found = c(torch.where(there & (text >= 0), text, c.embedding_vec.shape[0] - 1), None)
            ended = found if ended is None else ended | found
        self.sampler.advance(control, token, ended)


def _resident(criterion: StopStringCriteria, device: torch.device) -> StopStringCriteria:
    """A copy with tensors of its own on a device."""
    twin = copy.copy(criterion)
    twin.embedding_vec, twin.target_lens = (
        torch.clone(t).to(device) for t in (criterion.embedding_vec, criterion.target_lens)
    )
    return twin
