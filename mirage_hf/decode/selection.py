"""How a call chooses its tokens: on the device in the step itself, or by HF's objects on the host.

These run on the device: HF's own processors (processors.py), greedy choice, sampling
(uniform_numbers.py), stop tokens, lengths and stop strings. The host runs anything else, and the
reason is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.choosing import NOTHING, Chooser, Picked
from mirage_hf.decode.control import MAX_EOS, Control, TokenHistory, copy_async
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.processor_ops import TextSoFar
from mirage_hf.decode.processors import TABLE, CallTensors, ProcessorKind, why_host_runs
from mirage_hf.decode.sampler import Sampler, sampler_of
from mirage_hf.default_device import on_the_cpu

#: Choosers that a block keeps graphs for. A further one replaces the least recently used.
KEEP_CHOOSERS = 4
#: Attributes of a StopStringCriteria. An instance with more is from a version that this file was
#: not written for.
_STOP_STRING_ATTRIBUTES = {
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
_STOP_STRING_SIZES = (
    "maximum_token_len",
    "num_stop_strings",
    "max_valid_positions",
    "max_valid_end_lens",
)


@dataclass(frozen=True)
class Selection:
    """How a call chooses on the device.

    Attributes:
        processors: HF's processors, in order.
        stop_strings: Criteria that end rows at a string.
        eos: Stop tokens, if there are more than a control has room for.
        sample: Whether tokens are drawn; otherwise the greatest score is taken.
        pads: Whether rows that have ended get the pad token. With stop strings alone stock goes on
            choosing for them.
        records: Whether the scores after all processors are kept.
        clocks: Criteria that the host asks at every token it reads.
    """

    processors: tuple[Any, ...] = ()
    stop_strings: tuple[StopStringCriteria, ...] = ()
    eos: Tensor | None = None
    sample: bool = False
    pads: bool = True
    records: bool = False
    clocks: tuple[MaxTimeCriteria, ...] = ()

    @classmethod
    def of(
        cls, processors: Any, criteria: Sequence[Any], config: Any, vocab: int | None = None
    ) -> Selection | str:
        """Read the arguments that stock's decoding method would get.

        Args:
            processors: Logits processors.
            criteria: Stopping criteria.
            config: Generation config in force.
            vocab: Tokens of the model, if its config says so.

        Returns:
            The selection, or why the host must choose.
        """
        if (why := why_host_runs(processors, vocab)) is not None:
            return why
        for criterion in criteria:
            if not _runs_on_device(criterion):
                return f"criterion {getattr(type(criterion), '__name__', type(criterion))}"
        eos = _stop_tokens(criteria)
        return cls(
            processors=tuple(processors or ()),
            stop_strings=tuple(c for c in criteria if type(c) is StopStringCriteria),
            eos=torch.cat(eos) if sum(map(len, eos)) > MAX_EOS else None,
            sample=bool(config.do_sample),
            pads=bool(eos),
            records=bool(processors and config.return_dict_in_generate and config.output_scores),
            clocks=tuple(c for c in criteria if type(c) is MaxTimeCriteria),
        )

    @property
    def is_plain(self) -> bool:
        """Whether each token is that of the greatest logit. One kernel finds it."""
        return not (self.processors or self.stop_strings or self.sample or self.eos is not None)

    @property
    def kinds(self) -> list[ProcessorKind]:
        """The kinds of the processors, in order."""
        return [TABLE[type(p)] for p in self.processors]

    @property
    def makes_distribution(self) -> bool:
        """Whether stock raises a ValueError if there is no distribution.

        torch's distributions check their parameters, unless that is switched off.
        """
        return Distribution._validate_args and any(kind.makes_distribution for kind in self.kinds)

    def chooser_on(self, block: CacheBlock) -> ProcessedChooser:
        """Return the chooser of this call on a block that holds logits.

        If the block has one of the same kind, return that one, with its graphs.
        """
        make = CallTensors(block.logits.shape[1])
        with on_the_cpu():
            values = [
                kind.values(p, make) for kind, p in zip(self.kinds, self.processors, strict=True)
            ]
        key = self._key(values, make.vocab)
        if key not in block.choosers:
            while len(block.choosers) >= KEEP_CHOOSERS:
                block.drop_chooser(next(iter(block.choosers)))
            with torch.inference_mode(False), torch.no_grad():
                block.choosers[key] = ProcessedChooser(key, self, block, values)
        chooser: ProcessedChooser = block.choosers.pop(key)
        block.choosers[key] = chooser  # the one used last is last
        chooser.load(values, self.stop_strings)
        if chooser.eos is not None:
            copy_async(make.mask(self.eos), chooser.eos)
        return chooser

    def _key(self, values: Sequence[tuple[Tensor, ...]], vocab: int) -> tuple[Any, ...]:
        """Return everything that a captured choice depends on."""
        sizes = [kind.sizes(p) for kind, p in zip(self.kinds, self.processors, strict=True)]
        shapes = [tuple((tuple(v.shape), v.dtype) for v in each) for each in values]
        strings = [
            (
                *(getattr(criterion, name) for name in _STOP_STRING_SIZES),
                tuple(criterion.embedding_vec.shape),
                criterion.embedding_vec.dtype,
            )
            for criterion in self.stop_strings
        ]
        return (
            "processed",
            tuple(map(type, self.processors)),
            tuple(sizes),
            tuple(shapes),
            tuple(strings),
            self.eos is None,
            self.sample,
            self.pads,
            self.records,
            self.makes_distribution,
            vocab,
        )


def _runs_on_device(criterion: Any) -> bool:
    if type(criterion) is StopStringCriteria:
        is_known = vars(criterion).keys() <= _STOP_STRING_ATTRIBUTES
        # for a string without characters HF looks at the whole text
        return is_known and criterion.maximum_token_len > 0
    return type(criterion) in (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)


def _stop_tokens(criteria: Sequence[Any]) -> list[Tensor]:
    """Return the stop tokens of each criterion, all on one device."""
    eos = [c.eos_token_id.reshape(-1) for c in criteria if type(c) is EosTokenCriteria]
    # a user's own criterion has its tokens on the CPU until stock's loop asks it
    device = next((tokens.device for tokens in eos if tokens.device.type != "cpu"), None)
    return eos if device is None else [tokens.to(device) for tokens in eos]


@dataclass(frozen=True)
class _CapturedProcessor:
    """A processor in a captured step. It owns the tensors that its values are copied to."""

    kind: ProcessorKind
    sizes: tuple[Any, ...]
    values: tuple[Tensor, ...]

    def __call__(self, text: TextSoFar, scores: Tensor) -> Tensor:
        return self.kind.run(text, scores, *self.sizes, *self.values)


class ProcessedChooser(Chooser):
    """Processors, then the greatest score or a sample, then stop strings.

    It knows the token history and not the block, which holds both.
    """

    def __init__(
        self,
        key: tuple[Any, ...],
        selection: Selection,
        block: CacheBlock,
        values: Sequence[tuple[Tensor, ...]],
    ):
        super().__init__(key)
        device = block.device
        self.history: TokenHistory = block.own_history()
        self.sampler: Sampler = sampler_of(block)
        self.sample, self.pads = selection.sample, selection.pads
        self.processors = [
            _CapturedProcessor(
                kind, kind.sizes(p), tuple(torch.empty_like(v, device=device) for v in each)
            )
            for kind, p, each in zip(selection.kinds, selection.processors, values, strict=True)
        ]
        if selection.records:
            shape = block.batch, self.sampler.vocab
            self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        #: By the number of rows: `scores` of steps that verify drafts.
        self._scores_after_drafts: dict[int, Tensor] = {}
        self.eos: Tensor | None = None
        if selection.eos is not None:
            self.eos = torch.zeros(self.sampler.vocab, dtype=torch.bool, device=device)
        self.stop_strings = [_copy_to(c, device) for c in selection.stop_strings]
        self._embeddings = [c.embedding_vec for c in selection.stop_strings]
        self._writes_history = bool(selection.stop_strings) or any(
            kind.reads_text for kind in selection.kinds
        )
        # A sample of rows without a distribution is NOTHING anyway.
        self._checks = selection.makes_distribution and not selection.sample

    def load(
        self,
        values: Sequence[tuple[Tensor, ...]],
        stop_strings: Sequence[StopStringCriteria],
    ) -> None:
        """Copy the values of a call to where a captured graph reads them, without waiting."""
        for processor, each in zip(self.processors, values, strict=True):
            for own, value in zip(processor.values, each, strict=True):
                copy_async(value, own)
        for n, (own, criterion) in enumerate(zip(self.stop_strings, stop_strings, strict=True)):
            copy_async(criterion.target_lens, own.target_lens)
            if criterion.embedding_vec is not self._embeddings[n]:
                # it is large, and HF keeps it between calls
                copy_async(criterion.embedding_vec, own.embedding_vec)
                self._embeddings[n] = criterion.embedding_vec

    def tensors(self) -> list[Tensor]:
        """Return the memory that the chooser owns."""
        owned = [value for processor in self.processors for value in processor.values]
        owned += [t for c in self.stop_strings for t in (c.embedding_vec, c.target_lens)]
        owned += self._scores_after_drafts.values()
        return owned + [t for t in (self.scores, self.eos) if t is not None]

    def choose(self, control: Control, logits: Tensor) -> None:
        """Choose from (batch, vocabulary) logits and move the state on. The host reads nothing."""
        history = self.history
        step = history.budget - control.budget
        text = TextSoFar(history.ids, history.prompt + step, history.slots)
        scores, is_valid = self._process(text, logits.float().contiguous())
        if self.scores is not None:
            self.scores.copy_(scores)
        if not (self.sample or self.stop_strings or self.eos is not None or self._checks):
            self.sampler.argmax(control, scores.contiguous())  # one launch does all that follows
            if self._writes_history:
                history.ids.index_copy_(1, text.length, control.report[0][:, None])
            return
        numbers = history.numbers.index_select(1, step) if self.sample else None
        token = self._token(self.sampler, scores, numbers, is_valid)
        if self.pads:
            token = torch.where(control.alive, token, control.pad)
        if self._writes_history:
            may_be_nothing = self.sample or self._checks
            written = token.masked_fill(token == NOTHING, 0) if may_be_nothing else token
            history.ids.index_copy_(1, text.length, written[:, None])
        self.sampler.advance(control, token, self._ended(text, token))

    def pick(
        self, control: Control, drafts: Drafts, history: TokenHistory, logits: Tensor
    ) -> Picked:
        """Choose after each token of a step that verifies drafts, as if it ended the text.

        Each row of `logits` has its own text, and the random number that plain decoding would take
        at this place. So an accepted token is the one that plain decoding would sample, and drafts
        change nothing but the number of steps.
        """
        rows, number = drafts.logits.shape[0], drafts.number
        length = drafts.text_length(history)
        history.ids.scatter_(1, length + number[:-1], drafts.tokens[:, 1:])
        ids = history.ids[:, None].expand(-1, len(number), -1).flatten(0, 1)
        text = TextSoFar(ids, (length + number).view(rows, 1), history.slots)
        scores, is_valid = self._process(text, logits.float().contiguous())
        numbers = None
        if self.sample:
            step = history.budget - control.budget + drafts.ahead + number
            numbers = history.numbers.gather(1, step).view(rows, 1)
        token = self._token(drafts.sampler, scores, numbers, is_valid)
        return Picked(token, self._ended(text, token), None if self.scores is None else scores)

    def keep_scores(self, scores: Tensor) -> None:
        """Copy the scores (rows, vocabulary) of a step to where `scores_of` finds them."""
        rows = len(scores)
        if rows not in self._scores_after_drafts:
            self._scores_after_drafts[rows] = torch.empty_like(scores)
        self._scores_after_drafts[rows].copy_(scores)

    def scores_of(self, rows: int) -> Tensor | None:
        """Return the scores (rows, vocabulary) of the last step, None if they are not kept."""
        return self._scores_after_drafts.get(rows, self.scores)

    def _token(
        self, sampler: Sampler, scores: Tensor, numbers: Tensor | None, is_valid: Tensor | None
    ) -> Tensor:
        """Return a sample of each row, or its greatest score, or NOTHING if it is not valid."""
        token = scores.argmax(-1) if numbers is None else sampler.sample(scores, numbers)
        return token if is_valid is None else torch.where(is_valid, token, NOTHING)

    def _process(self, text: TextSoFar, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the processed scores, and whether they are valid for each row (batch,).

        They are if every processor that makes a distribution could make one. None if nothing needs
        this check.
        """
        is_valid: Tensor | None = None
        for processor in self.processors:
            if self._checks and processor.kind.makes_distribution:
                has_distribution = scores.amax(-1).isfinite()
                is_valid = has_distribution if is_valid is None else is_valid & has_distribution
            scores = processor(text, scores)
        return scores, is_valid

    def _ended(self, text: TextSoFar, token: Tensor) -> Tensor | None:
        """Return which rows (batch,) end by a long list of stop tokens or by a stop string."""
        ended: Tensor | None = None
        if self.eos is not None:
            ended = self.eos.index_select(0, token.clamp(0, len(self.eos) - 1))
        for criterion in self.stop_strings:
            before, exists = text.last(criterion.maximum_token_len - 1)
            tokens = torch.cat([before, token[:, None]], dim=1)
            exists = torch.nn.functional.pad(exists, (0, 1), value=True)
            # the last row of the table stands for tokens that HF knows no text of
            no_text = criterion.embedding_vec.shape[0] - 1
            matches = criterion(torch.where(exists & (tokens >= 0), tokens, no_text), None)
            ended = matches if ended is None else ended | matches
        return ended


def _copy_to(criterion: StopStringCriteria, device: torch.device) -> StopStringCriteria:
    """Return a copy whose tensors are its own, on a device."""
    own = copy.copy(criterion)
    own.embedding_vec = criterion.embedding_vec.clone().to(device)
    own.target_lens = criterion.target_lens.clone().to(device)
    return own
