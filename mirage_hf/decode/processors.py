"""HF's own logits processors on the device: one table from exact class to torch ops over static tensors, with nothing read by the host.

What a captured graph is made for (sizes, what removed tokens get) is told from what may change between calls (temperature, penalties,
how many to keep, lists of tokens), which lies in tensors. Where HF sorts a vocabulary, kernels search (decode/kernels/radix_threshold.py). Rounding is
that of HF's own ops in float32, but for the order of sums, and for divisions by a number, which CUDA may do as products with its
inverse. A class that is not here, a subclass of one that is, and an instance with attributes that this table does not know are the
host's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers.generation.logits_process as hf
from torch import Tensor

from mirage_hf.decode.kernels import radix_threshold
from mirage_hf.default_device import on_the_cpu

INFINITY = float("inf")


@dataclass(frozen=True)
class Now:
    """The text so far, as a processor of a captured step sees it."""

    ids: Tensor
    """(batch, room) int64: valid below `length`."""
    length: Tensor
    """(1,) int64: tokens that stock's input_ids would have."""
    slots: Tensor
    """(1, room): 0, 1, 2, …"""

    def last(self, count: int) -> tuple[Tensor, Tensor]:
        """The last `count` tokens (batch, count), and which of these places (count,) hold one."""
        at = self.length - count + torch.arange(count, device=self.ids.device)
        return self.ids.index_select(1, at.clamp(min=0)), at >= 0


@dataclass(frozen=True)
class Place:
    """Makes the tensors of one call for (batch, vocab) scores: on the CPU, but for what is made of tensors on the device."""

    vocab: int

    def number(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=torch.float32)

    def exact(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=torch.float64)

    def count(self, value: int) -> Tensor:
        return torch.full((1,), value, dtype=torch.long)

    def tokens(self, ids: Any) -> Tensor:
        """(vocab,) bool: the tokens in `ids`; others than the vocabulary's are left out, as HF does."""
        ids = (ids if isinstance(ids, Tensor) else torch.tensor(ids)).reshape(-1).long()
        found = torch.zeros(self.vocab + 1, dtype=torch.bool, device=ids.device)
        ids = torch.where((ids >= 0) & (ids < self.vocab), ids, self.vocab)
        return found.index_fill_(0, ids, True)[:-1]


@dataclass(frozen=True)
class ProcessorRow:
    """How the processors of one class run on the device."""

    run: Callable[..., Tensor]
    """From `Now`, float32 scores (batch, vocab), what `sizes` and what `values` gave, to new scores."""
    attributes: str
    """All that instances have. One that has more is of a version of transformers that this row was not written for."""
    values: Callable[[Any, Place], tuple[Tensor, ...]] = lambda p, at: ()
    sizes: Callable[[Any], tuple[Any, ...]] = lambda p: ()
    """What a captured graph is made for."""
    text: bool = False
    """Whether it reads the text so far, and not its length alone."""


# -- numbers alone ------------------------------------------------------------------------------------------------------


def _temperature(now: Now, scores: Tensor, temperature: Tensor) -> Tensor:
    return scores / temperature


def _top_k(now: Now, scores: Tensor, fill: float, k: Tensor) -> Tensor:
    return scores.masked_fill(scores < _kth(scores, k), fill)


def _kth(scores: Tensor, k: Tensor) -> Tensor:
    """(batch, 1): the `k`-th greatest of each row, the least where there are fewer."""
    if radix_threshold.fits(scores):
        return radix_threshold.kth_greatest(scores, k)
    if scores.device.type == "cpu":
        return torch.topk(scores, min(int(k), scores.shape[-1])).values[:, -1:]
    return torch.sort(scores, descending=True).values.index_select(
        1, k.clamp(max=scores.shape[-1]) - 1
    )


def _top_p(now: Now, scores: Tensor, fill: float, rest: Tensor, keep: Tensor) -> Tensor:
    if radix_threshold.fits(scores):
        return radix_threshold.mask_scores(
            scores, scores, _softmax(scores), rest, keep, fill, lowest_index_first=False
        )
    ordered, index = torch.sort(scores, descending=False)
    removed = (ordered.softmax(-1).cumsum(-1) <= rest) & (_ranks(scores) < scores.shape[-1] - keep)
    return scores.masked_fill(removed.scatter(1, index, removed), fill)


def _ranks(scores: Tensor) -> Tensor:
    return torch.arange(scores.shape[-1], device=scores.device)


def _top_h(now: Now, scores: Tensor, most: int, fill: float, share: Tensor) -> Tensor:
    top, index = torch.topk(scores, min(most, scores.shape[-1]))
    logits, p = _normalized(top)
    kept = (-p * torch.log(p)).cumsum(-1) <= (_entropy(logits, p) * share)[:, None]
    kept[:, 0].fill_(True)
    return scores.masked_fill(
        ~torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, kept), fill
    )


def _min_p(now: Now, scores: Tensor, keep: int, fill: float, share: Tensor) -> Tensor:
    p = _softmax(scores)
    removed = p < share * p.amax(-1, keepdim=True)
    if keep > 1:  # the greatest is never removed
        removed = removed.scatter(1, torch.topk(p, min(keep, p.shape[-1])).indices, False)
    return scores.masked_fill(removed, fill)


def _typical(now: Now, scores: Tensor, fill: float, mass: Tensor, keep: Tensor) -> Tensor:
    normalized = _log_softmax(scores)
    entropy = -(normalized * normalized.exp()).nansum(-1, keepdim=True)
    distance = (-normalized - entropy).abs()
    if radix_threshold.fits(scores):
        return radix_threshold.mask_scores(
            scores, -distance, _softmax(scores), 1 - mass, keep, fill, lowest_index_first=True
        )
    ordered, index = torch.sort(distance, descending=False)
    last = (
        (scores.gather(-1, index).softmax(-1).cumsum(-1) < mass)
        .sum(-1, keepdim=True)
        .clamp(max=scores.shape[-1] - 1)
    )
    removed = (ordered > ordered.gather(1, last)) & (_ranks(scores) >= keep)
    return scores.masked_fill(removed.scatter(1, index, removed), fill)


def _epsilon(now: Now, scores: Tensor, keep: int, fill: float, least: Tensor) -> Tensor:
    return _cut(scores, _softmax(scores) < least, keep, fill)


def _eta(now: Now, scores: Tensor, keep: int, fill: float, epsilon: Tensor) -> Tensor:
    least = torch.minimum(epsilon, epsilon.sqrt() * torch.exp(-_entropy(*_normalized(scores))))[
        :, None
    ]
    return _cut(scores, _softmax(scores) < least, keep, fill)


def _cut(scores: Tensor, removed: Tensor, keep: int, fill: float) -> Tensor:
    """Fill what is removed and not among the `keep` greatest."""
    least = (
        scores.amax(-1, keepdim=True)
        if keep == 1
        else torch.topk(scores, min(keep, scores.shape[-1])).values[:, -1:]
    )
    return scores.masked_fill(removed & (scores < least), fill)


def _normalized(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and probabilities as torch.distributions.Categorical has them."""
    logits = _log_softmax(scores)
    return logits, _softmax(logits)


def _softmax(scores: Tensor) -> Tensor:
    if not radix_threshold.fits(scores):
        return scores.softmax(-1)
    greatest, total = radix_threshold.softmax_totals(scores)
    return (scores - greatest).exp_().div_(total)


def _log_softmax(scores: Tensor) -> Tensor:
    if not radix_threshold.fits(scores):
        return scores.log_softmax(-1)
    greatest, total = radix_threshold.softmax_totals(scores)
    return (scores - greatest).sub_(total.log_())


def _entropy(logits: Tensor, p: Tensor) -> Tensor:
    return -(logits.clamp(min=torch.finfo(logits.dtype).min) * p).sum(-1)


def _remove_invalid(now: Now, scores: Tensor) -> Tensor:
    most = torch.finfo(scores.dtype).max
    kept = torch.where(scores != scores, 0.0, scores)
    kept = torch.where(scores == INFINITY, most, kept)
    return torch.where(scores == -INFINITY, -most, kept)


def _normalize(now: Now, scores: Tensor) -> Tensor:
    return _log_softmax(scores)


# -- some tokens, at some lengths ---------------------------------------------------------------------------------------


def _suppress(now: Now, scores: Tensor, tokens: Tensor) -> Tensor:
    return scores.masked_fill(tokens, -INFINITY)


def _suppress_below(now: Now, scores: Tensor, tokens: Tensor, length: Tensor) -> Tensor:
    return scores.masked_fill(tokens & (now.length < length), -INFINITY)


def _suppress_at(now: Now, scores: Tensor, tokens: Tensor, length: Tensor) -> Tensor:
    return scores.masked_fill(tokens & (now.length == length), -INFINITY)


def _force_at(now: Now, scores: Tensor, tokens: Tensor, length: Tensor) -> Tensor:
    forced = torch.where(tokens, 0.0, -INFINITY).to(
        scores.dtype
    )  # which is that of numbers by default
    return torch.where(now.length == length, forced, scores)


def _decay(now: Now, scores: Tensor, tokens: Tensor, start: Tensor, factor: Tensor) -> Tensor:
    growth = (factor ** (now.length - start).double() - 1).float()
    grows = tokens & (now.length > start)
    if _decay_leaves_infinity():
        grows = grows & scores.isfinite()
    return torch.where(grows, scores + scores.abs() * growth, scores)


@cache
def _decay_leaves_infinity() -> bool:
    """Whether this version of transformers leaves a suppressed stop token where it is; others make NaN of it."""
    with on_the_cpu():
        decay = hf.ExponentialDecayLengthPenalty((0, 2.0), [0], 0)
        return not bool(
            decay(torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), -INFINITY)).isnan()
        )


# -- the text so far ----------------------------------------------------------------------------------------------------


def _penalize(now: Now, scores: Tensor, penalty: Tensor, ignored: Tensor) -> Tensor:
    vocab = scores.shape[-1]
    counts = (now.slots >= ignored) & (now.slots < now.length) & (now.ids >= 0) & (now.ids < vocab)
    return torch.where(
        _present(counts, now.ids, scores),
        torch.where(scores < 0, scores * penalty, scores / penalty),
        scores,
    )


def _ignored(length: Any, at: Place) -> Tensor:
    """(1,), or (batch, 1) as newer versions give it for padding."""
    return length.reshape(-1, 1) if isinstance(length, Tensor) else at.count(length or 0)


def _no_repeat(now: Now, scores: Tensor, size: int) -> Tensor:
    if size > now.ids.shape[1]:
        return scores
    prefix, there = now.last(size - 1)
    windows = now.ids.unfold(1, size, 1)
    last = windows[..., -1]
    repeats = (
        (windows[..., :-1] == prefix[:, None]).all(-1)
        & there.all()
        & (now.slots[:, size - 1 :] < now.length)
    )
    return scores.masked_fill(
        _present(repeats & (last >= 0) & (last < scores.shape[-1]), last, scores), -INFINITY
    )


def _present(counts: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """(batch, vocab) bool: tokens that are in `ids` at a place that counts; those places hold tokens of the vocabulary."""
    vocab = scores.shape[-1]
    present = torch.zeros(scores.shape[0], vocab + 1, dtype=torch.bool, device=scores.device)
    return present.scatter_(1, torch.where(counts, ids, vocab), True)[:, :vocab]


def _bias(
    now: Now,
    scores: Tensor,
    single: Tensor,
    prefixes: Tensor,
    sizes: Tensor,
    least: Tensor,
    last: Tensor,
    values: Tensor,
) -> Tensor:
    bias = single[None].expand_as(scores).clone()
    if len(last):
        longest = prefixes.shape[1]
        text, there = now.last(longest)
        same = (text[:, None] == prefixes[None]) & there
        unneeded = (
            torch.arange(longest, device=sizes.device) < longest - sizes[:, None]
        )  # prefixes are aligned on the right
        matches = (same | unneeded[None]).all(-1) & (now.length >= least)
        bias.index_add_(1, last, torch.where(matches, values, 0.0))
    return scores + bias


def _biases(p: Any, at: Place) -> tuple[Tensor, ...]:
    if not p.prepared_bias_variables:
        p = copy.copy(p)  # the user's own is prepared where its scores will lie
        p._prepare_bias_variables(
            torch.empty(1, at.vocab)
        )  # and its error for tokens outside the vocabulary
    longer = [(ids, float(bias)) for ids, bias in p.sequence_bias.items() if len(ids) > 1]
    longest = max((len(ids) - 1 for ids, _ in longer), default=0)
    prefixes = torch.tensor(
        [[-1] * (longest - len(ids) + 1) + list(ids[:-1]) for ids, _ in longer], dtype=torch.long
    )
    sizes = torch.tensor([len(ids) - 1 for ids, _ in longer], dtype=torch.long)
    least = sizes + (
        not hasattr(p, "multi_token_biases")
    )  # older versions want one token more than the prefix
    last = torch.tensor([ids[-1] for ids, _ in longer], dtype=torch.long)
    values = torch.tensor([bias for _, bias in longer], dtype=torch.float32)
    return (
        p.length_1_bias.float(),
        prefixes.reshape(len(longer), longest),
        sizes,
        least,
        last,
        values,
    )


# -- the table ----------------------------------------------------------------------------------------------------------

_BIASED = "sequence_bias length_1_bias multi_token_biases prepared_bias_variables"
_KEEPS = "filter_value min_tokens_to_keep"


def _keeps(p: Any) -> tuple[Any, ...]:
    return p.min_tokens_to_keep, p.filter_value


def _fill(p: Any) -> tuple[Any, ...]:
    return (p.filter_value,)


ROWS = {
    "TemperatureLogitsWarper": ProcessorRow(
        _temperature, "temperature", lambda p, at: (at.number(p.temperature),)
    ),
    "TopKLogitsWarper": ProcessorRow(
        _top_k, f"top_k {_KEEPS}", lambda p, at: (at.count(p.top_k),), _fill
    ),
    "TopPLogitsWarper": ProcessorRow(
        _top_p,
        f"top_p {_KEEPS}",
        lambda p, at: (at.number(1 - p.top_p), at.count(p.min_tokens_to_keep)),
        _fill,
    ),
    "TopHLogitsWarper": ProcessorRow(
        _top_h,
        "top_h top_n filter_value",
        lambda p, at: (at.number(p.top_h),),
        lambda p: (p.top_n, p.filter_value),
    ),
    "MinPLogitsWarper": ProcessorRow(
        _min_p, f"min_p {_KEEPS}", lambda p, at: (at.number(p.min_p),), _keeps
    ),
    "TypicalLogitsWarper": ProcessorRow(
        _typical,
        f"mass {_KEEPS}",
        lambda p, at: (at.number(p.mass), at.count(p.min_tokens_to_keep)),
        _fill,
    ),
    "EpsilonLogitsWarper": ProcessorRow(
        _epsilon, f"epsilon {_KEEPS}", lambda p, at: (at.number(p.epsilon),), _keeps
    ),
    "EtaLogitsWarper": ProcessorRow(
        _eta, f"epsilon {_KEEPS}", lambda p, at: (p.epsilon.reshape(1).float(),), _keeps
    ),
    "InfNanRemoveLogitsProcessor": ProcessorRow(_remove_invalid, ""),
    "LogitNormalization": ProcessorRow(_normalize, ""),
    "SuppressTokensLogitsProcessor": ProcessorRow(
        _suppress, "suppress_tokens", lambda p, at: (at.tokens(p.suppress_tokens),)
    ),
    "SuppressTokensAtBeginLogitsProcessor": ProcessorRow(
        _suppress_at,
        "begin_suppress_tokens begin_index",
        lambda p, at: (at.tokens(p.begin_suppress_tokens), at.count(p.begin_index)),
    ),
    "MinLengthLogitsProcessor": ProcessorRow(
        _suppress_below,
        "min_length eos_token_id",
        lambda p, at: (at.tokens(p.eos_token_id), at.count(p.min_length)),
    ),
    "MinNewTokensLengthLogitsProcessor": ProcessorRow(
        _suppress_below,
        "prompt_length_to_skip min_new_tokens eos_token_id",
        lambda p, at: (
            at.tokens(p.eos_token_id),
            at.count(p.prompt_length_to_skip + p.min_new_tokens),
        ),
    ),
    "ForcedBOSTokenLogitsProcessor": ProcessorRow(
        _force_at, "bos_token_id", lambda p, at: (at.tokens(p.bos_token_id), at.count(1))
    ),
    "ForcedEOSTokenLogitsProcessor": ProcessorRow(
        _force_at,
        "max_length eos_token_id",
        lambda p, at: (at.tokens(p.eos_token_id), at.count(p.max_length - 1)),
    ),
    "ExponentialDecayLengthPenalty": ProcessorRow(
        _decay,
        "regulation_start regulation_factor eos_token_id",
        lambda p, at: (
            at.tokens(p.eos_token_id),
            at.count(p.regulation_start),
            at.exact(p.regulation_factor),
        ),
    ),
    "RepetitionPenaltyLogitsProcessor": ProcessorRow(
        _penalize,
        "penalty prompt_ignore_length logits_indices cu_seq_lens_q",
        lambda p, at: (at.number(p.penalty), _ignored(p.prompt_ignore_length, at)),
        text=True,
    ),
    "NoRepeatNGramLogitsProcessor": ProcessorRow(
        _no_repeat, "ngram_size", sizes=lambda p: (p.ngram_size,), text=True
    ),
    "SequenceBiasLogitsProcessor": ProcessorRow(_bias, _BIASED, _biases, text=True),
    "NoBadWordsLogitsProcessor": ProcessorRow(_bias, f"bad_word_ids {_BIASED}", _biases, text=True),
}
TABLE = {getattr(hf, name): row for name, row in ROWS.items() if hasattr(hf, name)}
"""By exact class. Names that this version of transformers does not have are left out."""


def obstacle(processors: Any, vocab: int | None = None) -> str | None:
    """Return which of HF's list of processors the host must run, or None. vocab: tokens of the model, where they are known."""
    if processors and type(processors) is not hf.LogitsProcessorList:
        return f"processors in a {type(processors).__name__}"
    for p in processors or ():
        row = TABLE.get(type(p))
        if row is None or not vars(p).keys() <= set(row.attributes.split()):
            return f"processor {getattr(type(p), '__name__', type(p))}"
        if row.run is _force_at and vocab is not None and not _are_tokens(_forced(p), vocab):
            return f"processor {type(p).__name__} of other tokens than the model's"
    return None


def _forced(p: Any) -> Any:
    return p.bos_token_id if hasattr(p, "bos_token_id") else p.eos_token_id


def _are_tokens(ids: Any, vocab: int) -> bool:
    """Whether all ids are: HF counts negative ones from the end, and raises for others, where there would be no token to force."""
    ids = torch.as_tensor(ids)
    return bool(((ids >= 0) & (ids < vocab)).all())
