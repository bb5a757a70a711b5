"""What is decided of a covered call before its prefill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from mirage_hf.decode.cache import bucket, rings_of, windows_of
from mirage_hf.decode.model_fingerprint import ModelFingerprint, take_fingerprint
from mirage_hf.decode.program import MaskPlan
from mirage_hf.decode.routing import (
    COVERED_MODES,
    MODEL_INPUTS,
    counts_from,
    is_plain,
    left_padding,
    refused_length,
    refused_masks,
    refused_options,
)
from mirage_hf.decode.selection import Selection

FIRST_REACH = 1024
"""New tokens a call reserves memory for at first; more is added by doubling when it gets there."""
_Found = TypeVar("_Found")


class NotCovered(Exception):
    """Raised before the call has had any effect: it is stock's, for the reason given."""


def _need(found: _Found | str) -> _Found:
    if isinstance(found, str):
        raise NotCovered(found)
    return found


@dataclass(frozen=True)
class PromptPlan:
    """Where the tokens of a call lie in its cache, and where their positions count from."""

    past: int
    """Tokens in the cache already."""
    length: int
    """Tokens of the text: those in the cache and the new ones."""
    lowest: Tensor | None
    """(batch, 1) counts of left padding; None without any."""
    position: Tensor
    """(batch or 1, 1) positions of the last tokens."""
    odd_positions: bool
    """Whether some row's position is beyond its slot or below 0, as only positions that a user gives are."""
    from_zero: bool
    """Whether every row is a prompt whose own tokens, behind left padding or none, count from position 0 on; no cache of the user's."""

    @classmethod
    def of(
        cls, input_ids: Tensor, past: int, mask_length: int, kwargs: dict[str, Any]
    ) -> PromptPlan:
        """`mask_length`: of the text as generate counts it, where no mask is given. Errors: NotCovered."""
        mask, positions, rows = (
            kwargs.get("attention_mask"),
            kwargs.get("position_ids"),
            input_ids.shape[0],
        )
        if positions is None or positions.ndim != 2:
            raise NotCovered(
                "no position_ids"
                if positions is None
                else f"position_ids of {positions.ndim} dimensions"
            )
        if positions.is_floating_point():
            raise NotCovered(f"position_ids of {positions.dtype}")
        if away := next(
            (x.device for x in (mask, positions) if x is not None and x.device != input_ids.device),
            None,
        ):
            raise NotCovered(f"a mask or position_ids on {away}, input_ids on {input_ids.device}")
        if mask is not None and mask.shape[0] != rows:
            raise NotCovered(f"a mask for {mask.shape[0]} rows of {rows}")
        if positions.shape[0] not in (1, rows):
            raise NotCovered(f"position_ids for {positions.shape[0]} rows of {rows}")
        whole = mask.shape[1] if mask is not None else mask_length
        # as in HF's _prefill: input_ids hold the whole sequence, or only what the cache does not have
        length = input_ids.shape[1] if whole == input_ids.shape[1] else past + input_ids.shape[1]
        if length <= past:
            raise NotCovered("a cache as long as the prompt")
        plain = past == 0 and is_plain(mask, positions, length)
        lowest = None if plain else _need(left_padding(mask, length))
        from_zero = plain or (
            past == 0 and lowest is not None and counts_from(positions, lowest, length)
        )
        first, last = (
            (0, length - 1) if plain else torch.stack(torch.aminmax(positions[:, -1])).tolist()
        )
        return cls(past, length, lowest, positions[:, -1:], last >= length or first < 0, from_zero)


@dataclass(frozen=True)
class CallPlan:
    """What is known of a covered call before its prefill."""

    cache: Any
    """The DynamicCache stock would fill: generate's own, or the user's."""
    cache_is_users: bool
    prompt: PromptPlan
    slots: int
    """Cache slots to lease at first."""
    most_slots: int
    """Cache slots needed if no stop token comes."""
    budget: int
    """Most tokens to choose."""
    windows: tuple[int | None, ...]
    """Of each layer what the cache slides over, None where it keeps everything."""
    eos: Tensor | None
    selection: Selection | str
    """How the step chooses and stops by itself, or why the host must."""
    masks: MaskPlan
    logits_to_keep: bool
    fingerprint: ModelFingerprint
    expected: bool
    """Whether the survey is that of the call before, and the model is looked at while the GPU is at work on the prompt."""

    @property
    def prompt_alone(self) -> bool:
        """Whether the prefill is that of whole prompts, of which only the last logits are wanted: what kernels can do."""
        return self.prompt.from_zero and self.logits_to_keep


def plan_call(
    model: Any,
    input_ids: Tensor,
    processors: Any,
    criteria: StoppingCriteriaList,
    config: Any,
    kwargs: dict[str, Any],
    *,
    users_cache: bool,
    max_cache_len: int | None,
    expected: ModelFingerprint | None = None,
) -> CallPlan:
    """Decide whether the call is covered, from the objects stock's decoding method would get. `expected`: what a look at the model would
    find, as far as one can tell without it.

    Errors: NotCovered, with the reason.
    """
    _check_options(model, input_ids, config, kwargs)
    text = model.config.get_text_config(decoder=True)
    masks = _need(MaskPlan.of(text))
    cache = kwargs.get("past_key_values")
    if cache is None or not kwargs.get("use_cache"):
        raise NotCovered("no cache")
    windows = _need(windows_of(cache, text.num_hidden_layers))
    _need(masks.mismatch(windows))
    _need(refused_masks(model, masks, windows))
    rows = {
        len(layer.keys) for layer in cache.layers if layer.is_initialized and layer.keys.dim() > 1
    }  # also of one cropped to nothing
    if others := rows - {len(input_ids)}:
        raise NotCovered(f"a cache of {max(others)} rows for {len(input_ids)}")
    prompt = PromptPlan.of(
        input_ids,
        int(cache.get_seq_length()),
        getattr(config, "_mask_length", input_ids.shape[1]),
        kwargs,
    )
    lengths = [
        math.ceil(c.max_length) for c in criteria if type(c) is MaxLengthCriteria
    ]  # a user may give several, and floats
    if not lengths:
        raise NotCovered("no maximum length")
    budget = max(min(lengths) - input_ids.shape[1], 1)  # criteria are asked behind a token only
    most_slots = prompt.length + budget - 1
    if max_cache_len is not None and most_slots > max_cache_len:
        raise NotCovered(f"more cache slots needed than max_cache_len={max_cache_len}")
    _need(refused_length(model, prompt.length + budget))
    if config._pad_token_tensor is None and any(hasattr(c, "eos_token_id") for c in criteria):
        raise NotCovered("stop tokens without a pad token")
    found = expected or take_fingerprint(model)
    _need(found.obstacle)
    selection = Selection.of(processors, criteria, config, getattr(text, "vocab_size", None))
    eos = (
        []
        if isinstance(selection, str) or selection.eos is not None
        else [
            c.eos_token_id.reshape(-1).to(input_ids.device)
            for c in criteria
            if type(c) is EosTokenCriteria
        ]
    )
    only_rings = None not in rings_of(
        windows, bucket(most_slots)
    )  # which take no more memory for a longer text
    return CallPlan(
        cache=cache,
        cache_is_users=users_cache,
        prompt=prompt,
        slots=most_slots if only_rings else min(most_slots, prompt.length + FIRST_REACH),
        most_slots=most_slots,
        budget=budget,
        windows=windows,
        eos=torch.cat(eos) if eos else None,
        selection=selection,
        masks=masks,
        logits_to_keep="logits_to_keep" in kwargs,
        fingerprint=found,
        expected=expected is not None,
    )


def _check_options(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> None:
    """Errors: NotCovered, where what is asked for is stock's whatever the prompt is."""
    if config.get_generation_mode() not in COVERED_MODES:
        raise NotCovered(f"generation mode {config.get_generation_mode().value}")
    _need(refused_options(lambda name: getattr(config, name, None)))
    _need(
        next(
            (
                f"model kwarg {k}"
                for k, v in kwargs.items()
                if k not in MODEL_INPUTS and v is not None
            ),
            None,
        )
    )
    if kwargs.get("logits_to_keep", 0) is None:  # what slices by it raises
        raise NotCovered("logits_to_keep=None")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise NotCovered("an empty prompt")
    if input_ids.dtype not in (
        torch.long,
        torch.int,
    ):  # no embedding takes others; a captured prompt would round them
        raise NotCovered(f"input_ids of {input_ids.dtype}")
    if input_ids.device != model.device:
        raise NotCovered(f"input_ids on {input_ids.device}, the model on {model.device}")
