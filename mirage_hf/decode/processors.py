"""The table of Hugging Face's logits processors that run on the device, by exact class.

A captured graph is made for constants: sizes, and the score of removed tokens. Everything that may
change between calls lies in tensors: temperatures, penalties, how many to keep, lists of tokens.

The host runs processors of all other classes, subclasses of the table's classes included. It also
runs an instance with attributes that the table does not know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers.generation.logits_process as hf
from torch import Tensor

from mirage_hf.decode import processor_ops as ops


@dataclass(frozen=True)
class CallTensors:
    """Makes the tensors of one call for (batch, vocab) scores.

    They are on the CPU, except those made from tensors on the device.
    """

    vocab: int

    def float32(self, value: float) -> Tensor:
        """Return a number (1,)."""
        return torch.full((1,), value, dtype=torch.float32)

    def float64(self, value: float) -> Tensor:
        """Return an exact number (1,)."""
        return torch.full((1,), value, dtype=torch.float64)

    def int64(self, value: int) -> Tensor:
        """Return an integer (1,)."""
        return torch.full((1,), value, dtype=torch.long)

    def mask(self, ids: Any) -> Tensor:
        """Return a (vocab,) bool mask of tokens. Tokens outside the vocabulary are left out."""
        ids = (ids if isinstance(ids, Tensor) else torch.tensor(ids)).reshape(-1).long()
        mask = torch.zeros(self.vocab + 1, dtype=torch.bool, device=ids.device)
        ids = torch.where((ids >= 0) & (ids < self.vocab), ids, self.vocab)
        return mask.index_fill_(0, ids, True)[:-1]


def _no_values(processor: Any, make: CallTensors) -> tuple[Tensor, ...]:
    return ()


def _no_sizes(processor: Any) -> tuple[Any, ...]:
    return ()


@dataclass(frozen=True)
class ProcessorKind:
    """How the processors of one class run on the device.

    Attributes:
        run: An op of processor_ops.py: from the text so far, scores, sizes and values to new
            scores.
        attributes: Names of all attributes of instances. An instance with more attributes is from a
            version of transformers that this entry was not written for.
        values: Makes the tensors whose values may change between calls.
        sizes: Makes the constants that a captured graph is made for.
        reads_text: Whether it reads the text so far, and not only its length.
        makes_distribution: Whether HF's class makes a `Categorical`. That raises a ValueError for
            rows with a NaN or with no score above −inf.
    """

    run: Callable[..., Tensor]
    attributes: tuple[str, ...] = ()
    values: Callable[[Any, CallTensors], tuple[Tensor, ...]] = _no_values
    sizes: Callable[[Any], tuple[Any, ...]] = _no_sizes
    reads_text: bool = False
    makes_distribution: bool = False


# -- values and sizes of processors ----------------------------------------------------------------


def _fill(p: Any) -> tuple[Any, ...]:
    return (p.filter_value,)


def _keep_and_fill(p: Any) -> tuple[Any, ...]:
    return p.min_tokens_to_keep, p.filter_value


def _ignored_length(length: Any, make: CallTensors) -> Tensor:
    """Return (1,), or (batch, 1) if the length is one for each row, as newer versions give it."""
    return length.reshape(-1, 1) if isinstance(length, Tensor) else make.int64(length or 0)


def _biases(p: Any, make: CallTensors) -> tuple[Tensor, ...]:
    """Return the tensors of `processor_ops.add_bias`."""
    if not p.prepared_bias_variables:
        # a copy, because HF prepares the user's processor for the device of its first scores
        p = copy.copy(p)
        # HF's own error is raised here for tokens outside the vocabulary
        p._prepare_bias_variables(torch.empty(1, make.vocab))
    sequences = [(ids, float(bias)) for ids, bias in p.sequence_bias.items() if len(ids) > 1]
    longest = max((len(ids) - 1 for ids, _ in sequences), default=0)
    prefixes = torch.tensor(
        [[-1] * (longest - len(ids) + 1) + list(ids[:-1]) for ids, _ in sequences],
        dtype=torch.long,
    ).reshape(len(sequences), longest)
    sizes = torch.tensor([len(ids) - 1 for ids, _ in sequences], dtype=torch.long)
    # older versions of transformers want one token more than the prefix
    min_lengths = sizes + (not hasattr(p, "multi_token_biases"))
    last = torch.tensor([ids[-1] for ids, _ in sequences], dtype=torch.long)
    values = torch.tensor([bias for _, bias in sequences], dtype=torch.float32)
    return p.length_1_bias.float(), prefixes, sizes, min_lengths, last, values


# -- the table -------------------------------------------------------------------------------------

_KEEP = ("filter_value", "min_tokens_to_keep")
_BIAS = ("sequence_bias", "length_1_bias", "multi_token_biases", "prepared_bias_variables")

KINDS = {
    "TemperatureLogitsWarper": ProcessorKind(
        ops.temperature, ("temperature",), lambda p, make: (make.float32(p.temperature),)
    ),
    "TopKLogitsWarper": ProcessorKind(
        ops.top_k, ("top_k", *_KEEP), lambda p, make: (make.int64(p.top_k),), _fill
    ),
    "TopPLogitsWarper": ProcessorKind(
        ops.top_p,
        ("top_p", *_KEEP),
        lambda p, make: (make.float32(1 - p.top_p), make.int64(p.min_tokens_to_keep)),
        _fill,
    ),
    "TopHLogitsWarper": ProcessorKind(
        ops.top_h,
        ("top_h", "top_n", "filter_value"),
        lambda p, make: (make.float32(p.top_h),),
        lambda p: (p.top_n, p.filter_value),
        makes_distribution=True,
    ),
    "MinPLogitsWarper": ProcessorKind(
        ops.min_p, ("min_p", *_KEEP), lambda p, make: (make.float32(p.min_p),), _keep_and_fill
    ),
    "TypicalLogitsWarper": ProcessorKind(
        ops.typical,
        ("mass", *_KEEP),
        lambda p, make: (make.float32(p.mass), make.int64(p.min_tokens_to_keep)),
        _fill,
    ),
    "EpsilonLogitsWarper": ProcessorKind(
        ops.epsilon, ("epsilon", *_KEEP), lambda p, make: (make.float32(p.epsilon),), _keep_and_fill
    ),
    "EtaLogitsWarper": ProcessorKind(
        ops.eta,
        ("epsilon", *_KEEP),
        lambda p, make: (p.epsilon.reshape(1).float(),),
        _keep_and_fill,
        makes_distribution=True,
    ),
    "InfNanRemoveLogitsProcessor": ProcessorKind(ops.remove_invalid),
    "LogitNormalization": ProcessorKind(ops.normalize),
    "SuppressTokensLogitsProcessor": ProcessorKind(
        ops.suppress, ("suppress_tokens",), lambda p, make: (make.mask(p.suppress_tokens),)
    ),
    "SuppressTokensAtBeginLogitsProcessor": ProcessorKind(
        ops.suppress_at,
        ("begin_suppress_tokens", "begin_index"),
        lambda p, make: (make.mask(p.begin_suppress_tokens), make.int64(p.begin_index)),
    ),
    "MinLengthLogitsProcessor": ProcessorKind(
        ops.suppress_below,
        ("min_length", "eos_token_id"),
        lambda p, make: (make.mask(p.eos_token_id), make.int64(p.min_length)),
    ),
    "MinNewTokensLengthLogitsProcessor": ProcessorKind(
        ops.suppress_below,
        ("prompt_length_to_skip", "min_new_tokens", "eos_token_id"),
        lambda p, make: (
            make.mask(p.eos_token_id),
            make.int64(p.prompt_length_to_skip + p.min_new_tokens),
        ),
    ),
    "ForcedBOSTokenLogitsProcessor": ProcessorKind(
        ops.force_at,
        ("bos_token_id",),
        lambda p, make: (make.mask(p.bos_token_id), make.int64(1)),
    ),
    "ForcedEOSTokenLogitsProcessor": ProcessorKind(
        ops.force_at,
        ("max_length", "eos_token_id"),
        lambda p, make: (make.mask(p.eos_token_id), make.int64(p.max_length - 1)),
    ),
    "ExponentialDecayLengthPenalty": ProcessorKind(
        ops.decay,
        ("regulation_start", "regulation_factor", "eos_token_id"),
        lambda p, make: (
            make.mask(p.eos_token_id),
            make.int64(p.regulation_start),
            make.float64(p.regulation_factor),
        ),
    ),
    "RepetitionPenaltyLogitsProcessor": ProcessorKind(
        ops.penalize_repetition,
        ("penalty", "prompt_ignore_length", "logits_indices", "cu_seq_lens_q"),
        lambda p, make: (make.float32(p.penalty), _ignored_length(p.prompt_ignore_length, make)),
        reads_text=True,
    ),
    "NoRepeatNGramLogitsProcessor": ProcessorKind(
        ops.forbid_repeated_ngrams,
        ("ngram_size",),
        sizes=lambda p: (p.ngram_size,),
        reads_text=True,
    ),
    "SequenceBiasLogitsProcessor": ProcessorKind(ops.add_bias, _BIAS, _biases, reads_text=True),
    "NoBadWordsLogitsProcessor": ProcessorKind(
        ops.add_bias, ("bad_word_ids", *_BIAS), _biases, reads_text=True
    ),
}
#: By exact class, without the names that this version of transformers does not have.
TABLE = {getattr(hf, name): kind for name, kind in KINDS.items() if hasattr(hf, name)}


def why_host_runs(processors: Any, vocab: int | None = None) -> str | None:
    """Return which of HF's list of processors the host must run, or None.

    Args:
        processors: What stock's decoding method would get.
        vocab: Tokens of the model, if the config says so.
    """
    if processors and type(processors) is not hf.LogitsProcessorList:
        return f"processors in a {type(processors).__name__}"
    for p in processors or ():
        kind = TABLE.get(type(p))
        if kind is None or not vars(p).keys() <= set(kind.attributes):
            return f"processor {getattr(type(p), '__name__', type(p))}"
        if kind.run is ops.force_at and vocab is not None and not _are_tokens(_forced(p), vocab):
            return f"processor {type(p).__name__} of tokens outside the model's vocabulary"
    return None


def _forced(p: Any) -> Any:
    return p.bos_token_id if hasattr(p, "bos_token_id") else p.eos_token_id


def _are_tokens(ids: Any, vocab: int) -> bool:
    """Return whether all ids are tokens.

    HF counts negative ids from the end, and raises for other ids outside the vocabulary.
    """
    ids = torch.as_tensor(ids)
    return bool(((ids >= 0) & (ids < vocab)).all())
