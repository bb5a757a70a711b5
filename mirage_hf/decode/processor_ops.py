"""Hugging Face's logits processors as torch ops that never wait for the device.

Each function takes the text so far and float32 scores (batch, vocab), and returns new scores.
Further arguments are the sizes that a graph is captured for, and tensors whose values may change
between calls.

Rounding is that of HF's own ops in float32, with two exceptions. Sums may have another order, and
CUDA may compute a division by a number as a product with its inverse. Where HF sorts a vocabulary,
a radix search is used on CUDA (kernels/radix_threshold.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import transformers.generation.logits_process as hf
from torch import Tensor

from mirage_hf.decode.kernels import radix_threshold
from mirage_hf.default_device import on_the_cpu

INFINITY = float("inf")


@dataclass(frozen=True)
class TextSoFar:
    """The text so far, as a processor of a captured step sees it.

    Attributes:
        ids: (batch, room) int64, valid below `length`.
        length: (1,) or (batch, 1) int64: tokens that stock's input_ids would have.
        slots: (1, room): 0, 1, 2, …
    """

    ids: Tensor
    length: Tensor
    slots: Tensor

    def last(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the last `count` tokens (batch, count), and which places hold one.

        The second tensor is (count,) if all texts have one length, otherwise (batch, count).
        """
        places = self.length - count + torch.arange(count, device=self.ids.device)
        index = places.clamp(min=0).expand(len(self.ids), count)
        return self.ids.gather(1, index), places >= 0


# -- warpers ---------------------------------------------------------------------------------------


def temperature(text: TextSoFar, scores: Tensor, value: Tensor) -> Tensor:
    """Divide by the temperature."""
    return scores / value


def top_k(text: TextSoFar, scores: Tensor, fill: float, k: Tensor) -> Tensor:
    """Keep the k greatest scores, and all scores equal to the least of them."""
    return scores.masked_fill(scores < _kth_greatest(scores, k), fill)


def _kth_greatest(scores: Tensor, k: Tensor) -> Tensor:
    """Return the k-th greatest score (batch, 1) of each row, the least one if there are fewer."""
    if radix_threshold.fits(scores):
        return radix_threshold.kth_greatest(scores, k)
    vocab = scores.shape[-1]
    if scores.device.type == "cpu":
        return torch.topk(scores, min(int(k), vocab)).values[:, -1:]
    ordered = torch.sort(scores, descending=True).values
    return ordered.index_select(1, k.clamp(max=vocab) - 1)


def top_p(text: TextSoFar, scores: Tensor, fill: float, removable: Tensor, keep: Tensor) -> Tensor:
    """Remove the least scores with probabilities of up to `removable`, but leave `keep`."""
    if radix_threshold.fits(scores):
        return radix_threshold.mask_scores(
            scores, scores, _softmax(scores), removable, keep, fill, lowest_index_first=False
        )
    ordered, index = torch.sort(scores, descending=False)
    may_go = _ranks(scores) < scores.shape[-1] - keep
    removed = (ordered.softmax(-1).cumsum(-1) <= removable) & may_go
    return scores.masked_fill(removed.scatter(1, index, removed), fill)


def _ranks(scores: Tensor) -> Tensor:
    return torch.arange(scores.shape[-1], device=scores.device)


def top_h(text: TextSoFar, scores: Tensor, top_n: int, fill: float, share: Tensor) -> Tensor:
    """Keep the greatest scores up to a share of the entropy of the `top_n` greatest."""
    top, index = torch.topk(scores, min(top_n, scores.shape[-1]))
    logits, probabilities = _categorical(top)
    entropy = (-probabilities * torch.log(probabilities)).cumsum(-1)
    kept = entropy <= (_entropy(logits, probabilities) * share)[:, None]
    kept[:, 0].fill_(True)
    is_kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, kept)
    return scores.masked_fill(~is_kept, fill)


def min_p(text: TextSoFar, scores: Tensor, keep: int, fill: float, share: Tensor) -> Tensor:
    """Remove tokens that are less probable than a share of the greatest probability."""
    probabilities = _softmax(scores)
    removed = probabilities < share * probabilities.amax(-1, keepdim=True)
    if keep > 1:  # the greatest is never removed
        kept = torch.topk(probabilities, min(keep, scores.shape[-1])).indices
        removed = removed.scatter(1, kept, False)
    return scores.masked_fill(removed, fill)


def typical(text: TextSoFar, scores: Tensor, fill: float, mass: Tensor, keep: Tensor) -> Tensor:
    """Keep the tokens whose information is nearest to the entropy, up to a mass of probability."""
    normalized = _log_softmax(scores)
    entropy = -(normalized * normalized.exp()).nansum(-1, keepdim=True)
    distance = (-normalized - entropy).abs()
    if radix_threshold.fits(scores):
        return radix_threshold.mask_scores(
            scores, -distance, _softmax(scores), 1 - mass, keep, fill, lowest_index_first=True
        )
    ordered, index = torch.sort(distance, descending=False)
    sums = scores.gather(-1, index).softmax(-1).cumsum(-1)
    last = (sums < mass).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    removed = (ordered > ordered.gather(1, last)) & (_ranks(scores) >= keep)
    return scores.masked_fill(removed.scatter(1, index, removed), fill)


def epsilon(text: TextSoFar, scores: Tensor, keep: int, fill: float, least: Tensor) -> Tensor:
    """Remove tokens that are less probable than `least`."""
    return _remove(scores, _softmax(scores) < least, keep, fill)


def eta(text: TextSoFar, scores: Tensor, keep: int, fill: float, value: Tensor) -> Tensor:
    """Remove tokens that are less probable than a bound that falls with the entropy."""
    entropy = _entropy(*_categorical(scores))
    least = torch.minimum(value, value.sqrt() * torch.exp(-entropy))[:, None]
    return _remove(scores, _softmax(scores) < least, keep, fill)


def _remove(scores: Tensor, removed: Tensor, keep: int, fill: float) -> Tensor:
    """Fill the removed scores, except the `keep` greatest scores."""
    if keep == 1:
        least_kept = scores.amax(-1, keepdim=True)
    else:
        least_kept = torch.topk(scores, min(keep, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(removed & (scores < least_kept), fill)


def _categorical(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and probabilities as torch.distributions.Categorical has them."""
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


def _entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    finite = logits.clamp(min=torch.finfo(logits.dtype).min)
    return -(finite * probabilities).sum(-1)


def remove_invalid(text: TextSoFar, scores: Tensor) -> Tensor:
    """Replace NaN by 0 and infinities by the greatest finite numbers."""
    most = torch.finfo(scores.dtype).max
    valid = torch.where(scores != scores, 0.0, scores)
    valid = torch.where(scores == INFINITY, most, valid)
    return torch.where(scores == -INFINITY, -most, valid)


def normalize(text: TextSoFar, scores: Tensor) -> Tensor:
    """Return log-probabilities."""
    return _log_softmax(scores)


# -- some tokens, at some lengths ------------------------------------------------------------------


def suppress(text: TextSoFar, scores: Tensor, tokens: Tensor) -> Tensor:
    """Forbid tokens, a mask (vocab,)."""
    return scores.masked_fill(tokens, -INFINITY)


def suppress_below(text: TextSoFar, scores: Tensor, tokens: Tensor, length: Tensor) -> Tensor:
    """Forbid tokens while the text is shorter than `length`."""
    return scores.masked_fill(tokens & (text.length < length), -INFINITY)


def suppress_at(text: TextSoFar, scores: Tensor, tokens: Tensor, length: Tensor) -> Tensor:
    """Forbid tokens when the text has this length."""
    return scores.masked_fill(tokens & (text.length == length), -INFINITY)


def force_at(text: TextSoFar, scores: Tensor, tokens: Tensor, length: Tensor) -> Tensor:
    """Forbid all other tokens when the text has this length."""
    # numbers in torch.where would have the default dtype
    forced = torch.where(tokens, 0.0, -INFINITY).to(scores.dtype)
    return torch.where(text.length == length, forced, scores)


def decay(text: TextSoFar, scores: Tensor, tokens: Tensor, start: Tensor, factor: Tensor) -> Tensor:
    """Raise the scores of stop tokens exponentially from a length on."""
    growth = (factor ** (text.length - start).double() - 1).float()
    grows = tokens & (text.length > start)
    if _decay_keeps_infinity():
        grows = grows & scores.isfinite()
    return torch.where(grows, scores + scores.abs() * growth, scores)


@cache
def _decay_keeps_infinity() -> bool:
    """Return whether this version of transformers keeps a suppressed stop token.

    Others make it NaN.
    """
    with on_the_cpu():
        processor = hf.ExponentialDecayLengthPenalty((0, 2.0), [0], 0)
        scores = processor(torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), -INFINITY))
        return not bool(scores.isnan())


# -- the text so far -------------------------------------------------------------------------------


def penalize_repetition(
    text: TextSoFar, scores: Tensor, penalty: Tensor, ignored: Tensor
) -> Tensor:
    """Penalise tokens of the text after the first `ignored` ones."""
    vocab = scores.shape[-1]
    is_text = (text.slots >= ignored) & (text.slots < text.length)
    is_token = (text.ids >= 0) & (text.ids < vocab)
    present = _present(is_text & is_token, text.ids, scores)
    return torch.where(present, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def forbid_repeated_ngrams(text: TextSoFar, scores: Tensor, size: int) -> Tensor:
    """Forbid tokens that would complete an n-gram of the text."""
    if size > text.ids.shape[1]:
        return scores
    prefix, exists = text.last(size - 1)
    ngrams = text.ids.unfold(1, size, 1)
    last = ngrams[..., -1]
    is_repeated = (ngrams[..., :-1] == prefix[:, None]).all(-1) & exists.all(-1, keepdim=True)
    is_text = text.slots[:, size - 1 :] < text.length
    is_token = (last >= 0) & (last < scores.shape[-1])
    forbidden = _present(is_repeated & is_text & is_token, last, scores)
    return scores.masked_fill(forbidden, -INFINITY)


def _present(counts: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """Return which tokens (batch, vocab) are in `ids` at a place that counts.

    Places that count must hold tokens of the vocabulary.
    """
    vocab = scores.shape[-1]
    present = torch.zeros(scores.shape[0], vocab + 1, dtype=torch.bool, device=scores.device)
    return present.scatter_(1, torch.where(counts, ids, vocab), True)[:, :vocab]


def add_bias(
    text: TextSoFar,
    scores: Tensor,
    single: Tensor,
    prefixes: Tensor,
    sizes: Tensor,
    min_lengths: Tensor,
    last: Tensor,
    values: Tensor,
) -> Tensor:
    """Add biases to tokens, and to those that would complete a sequence.

    Args:
        text: The text so far.
        scores: (batch, vocab).
        single: (vocab,): biases of single tokens.
        prefixes: (sequences, longest): all tokens but the last, aligned on the right.
        sizes: (sequences,): lengths of the prefixes.
        min_lengths: (sequences,): lengths of the text from which a sequence counts.
        last: (sequences,): last tokens.
        values: (sequences,): biases.
    """
    bias = single[None].expand_as(scores).clone()
    if len(last):
        longest = prefixes.shape[1]
        tokens, exists = text.last(longest)
        is_same = (tokens[:, None] == prefixes[None]) & exists.unsqueeze(-2)
        is_unused = torch.arange(longest, device=sizes.device) < longest - sizes[:, None]
        matches = (is_same | is_unused[None]).all(-1) & (text.length >= min_lengths)
        bias.index_add_(1, last, torch.where(matches, values, 0.0))
    return scores + bias
