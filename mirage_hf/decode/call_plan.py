"""The plan of a covered call, made before its prefill."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from mirage_hf.decode.cache_exchange import held_tokens, of_self_attention, windows_of
from mirage_hf.decode.draft_sources import DraftPlan
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.model_fingerprint import ModelFingerprint, take_fingerprint
from mirage_hf.decode.not_covered import NotCoveredError, covered
from mirage_hf.decode.prompt_plan import PromptPlan
from mirage_hf.decode.rings import bucket, rings_of
from mirage_hf.decode.routing import (
    MODEL_INPUTS,
    cache_name,
    has_own_steps,
    is_covered_mode,
    rejected_length,
    rejected_masks,
    rejected_model,
    rejected_options,
)
from mirage_hf.decode.selection import Selection
from mirage_hf.decode.sources import (
    MaskUse,
    Source,
    decoder_arguments,
    decoder_config,
    follows_encoder,
)

#: New tokens for which a call reserves memory at first. Longer calls double their memory.
FIRST_REACH = 1024


@dataclass(frozen=True)
class CallInputs:
    """The arguments that stock's decoding method would get.

    Attributes:
        model: The model.
        input_ids: (batch, tokens).
        processors: HF's list of logits processors.
        criteria: HF's list of stopping criteria.
        config: The generation config in force.
        kwargs: The model's kwargs, with a cache.
        inputs_tensor: What the model's encoder was given, if it has one.
    """

    model: Any
    input_ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    kwargs: dict[str, Any]
    inputs_tensor: Tensor | None = None


@dataclass(frozen=True)
class CallPlan:
    """What is known about a covered call before its prefill.

    Attributes:
        cache: The DynamicCache that stock would fill: generate's own, or the user's.
        cache_is_users: Whether the user passed it.
        prompt: Where the prompt's tokens lie.
        slots: Cache slots to lease at first.
        most_slots: Cache slots that are needed if no stop token comes.
        budget: Most tokens to choose.
        windows: For each layer the window that its cache slides over, None if it keeps all keys.
        eos: The stop tokens, if a control has room for them.
        selection: How the step chooses and stops by itself, or why the host must.
        masks: Masks of the model.
        logits_to_keep: Whether the model's forward takes `logits_to_keep`.
        fingerprint: The model's fingerprint.
        stock_prefill: Whether stock's own prefill must fill stock's own cache: the prompt is more
            than tokens, or layers keep states, or the model has own methods for steps.
        tokens_alone: Whether the prompt is nothing but tokens.
        only_traced: Whether only a traced step may run, because nothing else was compared with
            stock's steps of this model.
        source: What the encoder gave, if there is one.
        drafts: How the call drafts, if it does.
        expected: Whether the fingerprint is only the last call's. Then the model's own is taken
            while the GPU works on the prompt.
    """

    cache: Any
    cache_is_users: bool
    prompt: PromptPlan
    slots: int
    most_slots: int
    budget: int
    windows: tuple[int | None, ...]
    eos: Tensor | None
    selection: Selection | str
    masks: MaskPlan
    logits_to_keep: bool
    fingerprint: ModelFingerprint
    expected: bool
    stock_prefill: bool = False
    only_traced: bool = False
    tokens_alone: bool = True
    source: Source | None = None
    drafts: DraftPlan | None = None

    @property
    def room(self) -> int:
        """The cache slots that a call may write at most: drafts lie after the text."""
        return self.most_slots + self.tokens - 1

    @property
    def tokens(self) -> int:
        """The new tokens of a row in a step."""
        return 1 if self.drafts is None else self.drafts.shape.tokens

    @property
    def source_slots(self) -> int:
        """The slots for what the encoder gave, 0 without one."""
        return 0 if self.source is None else self.source.slots

    @property
    def prompt_is_whole(self) -> bool:
        """Whether the prompt is a whole text, and only its last logits are wanted."""
        return self.prompt.counts_from_zero and self.logits_to_keep and not self.stock_prefill

    @property
    def repeats_stock_prefill(self) -> bool:
        """Whether stock's own prefill depends on nothing but the tokens and their number."""
        is_plain = self.prompt.is_plain and self.tokens_alone and self.source is None
        return self.stock_prefill and is_plain and not self.cache_is_users


def plan_call(
    inputs: CallInputs,
    *,
    cache_is_users: bool,
    max_cache_len: int | None,
    expected: ModelFingerprint | None = None,
    axes: int | None = None,
    mask_use: MaskUse = "hides",
    uses_rings: bool = True,
    only_traced: bool = False,
    drafts: DraftPlan | None = None,
) -> CallPlan:
    """Decide whether a call is covered, and how.

    Args:
        inputs: What stock's decoding method would get.
        cache_is_users: Whether the user passed the cache.
        max_cache_len: The most cache slots that a call may use.
        expected: The fingerprint that the model probably has. It is known without a walk.
        axes: If the model's step was traced, the axes of its positions.
        mask_use: What an encoder-decoder model does with `attention_mask` in steps.
        uses_rings: Whether sliding layers may share slots. If not, they keep all keys.
        only_traced: Whether only traced steps over our cache are known to be stock's.
        drafts: How the call drafts. Its sliding layers keep all keys.

    Raises:
        NotCoveredError: Stock must serve the call.
    """
    is_traced = axes is not None
    _check_options(inputs, is_traced=is_traced)
    model, kwargs, config = inputs.model, inputs.kwargs, inputs.config
    text_config = decoder_config(model)
    masks = covered(MaskPlan.of(text_config))
    cache = kwargs.get(cache_name(model))
    if masks.states and not is_traced:
        raise NotCoveredError(f"layer type {masks.states[0]}")
    if cache is None or not kwargs.get("use_cache"):
        raise NotCoveredError("no cache")
    windows = covered(windows_of(cache, text_config))
    covered(masks.mismatch(windows))
    covered(rejected_masks(model, masks, windows))
    _check_rows(cache, len(inputs.input_ids))
    tokens = inputs.input_ids.shape[1]
    mask_length = getattr(config, "_mask_length", tokens)
    past = covered(held_tokens(cache))
    source, of_prompt = None, kwargs
    if follows_encoder(model):
        source = Source.of(kwargs, mask_use)
        if not isinstance(cache, EncoderDecoderCache):
            raise NotCoveredError("a cache without a part for what an encoder gave")
        of_prompt, mask_length = decoder_arguments(model, kwargs, tokens), past + tokens
    prompt = PromptPlan.of(inputs.input_ids, past, mask_length, of_prompt, counts_itself=is_traced)
    if (0 if prompt.offsets is None else len(prompt.offsets)) != (axes or 0):
        raise NotCoveredError(f"position_ids of {kwargs['position_ids'].ndim} dimensions")
    budget = _budget(inputs)
    most_slots = prompt.length + budget - 1
    if masks.chunk is not None and most_slots > masks.chunk:
        raise NotCoveredError(f"a text that is longer than a chunk of attention ({masks.chunk})")
    if max_cache_len is not None and most_slots > max_cache_len:
        raise NotCoveredError(f"more cache slots needed than max_cache_len={max_cache_len}")
    covered(rejected_length(model, prompt.length + budget))
    has_stop_tokens = any(hasattr(c, "eos_token_id") for c in inputs.criteria)
    if config._pad_token_tensor is None and has_stop_tokens:
        raise NotCoveredError("stop tokens without a pad token")
    fingerprint = expected or take_fingerprint(model)
    covered(fingerprint.obstacle)
    why_traced = rejected_model(model) or fingerprint.misplaced if is_traced else None
    covered(None if is_traced else fingerprint.misplaced)
    vocab = getattr(text_config, "vocab_size", None)
    if not uses_rings or drafts is not None:
        windows = (None,) * len(windows)
    selection = Selection.of(inputs.processors, inputs.criteria, config, vocab)
    if drafts is not None:
        covered(_why_no_drafts(selection, past, len(inputs.input_ids)))
    return CallPlan(
        cache=cache,
        cache_is_users=cache_is_users,
        prompt=prompt,
        slots=_first_slots(windows, prompt.length, most_slots),
        most_slots=most_slots,
        budget=budget,
        windows=windows,
        eos=_eos(selection, inputs.criteria, inputs.input_ids.device),
        selection=selection,
        masks=masks,
        logits_to_keep="logits_to_keep" in kwargs,
        fingerprint=fingerprint,
        expected=expected is not None,
        stock_prefill=is_traced
        and (bool(masks.states) or bool(_prompt_inputs(kwargs)) or has_own_steps(model)),
        only_traced=is_traced
        and (
            only_traced
            or bool(why_traced)
            or bool(masks.states)
            or bool(_prompt_inputs(kwargs))
            or bool(axes)
        ),
        tokens_alone=not _prompt_inputs(kwargs),
        source=source,
        drafts=drafts,
    )


def _why_no_drafts(selection: Selection | str, past: int, rows: int) -> str | None:
    """Return why a call that would draft needs the stock method, or None."""
    if isinstance(selection, str):
        return f"drafts, and tokens that the host chooses: {selection}"
    if past:
        return "drafts after a cache that holds tokens"
    if rows > 1 and selection.stop_strings and not selection.pads:
        return "drafts for rows that go on after a stop string"
    return None


def _prompt_inputs(kwargs: dict[str, Any]) -> list[str]:
    """Return the model's kwargs beside those of any text, such as the pixels of images.

    transformers 5.23 gives every model of images a mapping of encoded inputs. A text has none.
    """
    given = {name: x for name, x in kwargs.items() if name not in MODEL_INPUTS}
    return [name for name, x in given.items() if x is not None and not _is_empty(x)]


def _is_empty(x: Any) -> bool:
    return isinstance(x, Mapping) and not x


def _check_options(inputs: CallInputs, *, is_traced: bool) -> None:
    """Check what does not depend on the prompt.

    Raises:
        NotCoveredError: Stock must serve such calls, whatever the prompt is.
    """
    model, config, kwargs, input_ids = inputs.model, inputs.config, inputs.kwargs, inputs.input_ids
    if not is_covered_mode(config):
        raise NotCoveredError(f"generation mode {config.get_generation_mode().value}")
    covered(rejected_options(lambda name: getattr(config, name, None)))
    # a traced model's own methods say what its steps take besides (`first_step_position`)
    if not is_traced and (names := _prompt_inputs(kwargs)):
        raise NotCoveredError(f"model kwarg {names[0]}")
    if kwargs.get("logits_to_keep", 0) is None:  # a forward that slices by it raises
        raise NotCoveredError("logits_to_keep=None")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise NotCoveredError("an empty prompt")
    embeds = kwargs.get("inputs_embeds")
    if embeds is not None and embeds.shape[1] != input_ids.shape[1]:
        raise NotCoveredError("inputs_embeds of other tokens than input_ids")
    # embeddings take no other dtypes, but a captured prompt would convert them
    if input_ids.dtype not in (torch.long, torch.int):
        raise NotCoveredError(f"input_ids of {input_ids.dtype}")
    if input_ids.device != model.device:
        raise NotCoveredError(f"input_ids on {input_ids.device}, the model on {model.device}")


def _check_rows(cache: Any, batch: int) -> None:
    """Check the rows of a cache, also of one that was cropped to no tokens."""
    for layer in of_self_attention(cache).layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dim() > 1 and len(keys) != batch:
            raise NotCoveredError(f"a cache of {len(keys)} rows for {batch}")


def _budget(inputs: CallInputs) -> int:
    """Return the most tokens to choose, at least one: criteria are asked after a token only."""
    # a user may give several maximum lengths, and floats
    lengths = [math.ceil(c.max_length) for c in inputs.criteria if type(c) is MaxLengthCriteria]
    if not lengths:
        raise NotCoveredError("no maximum length")
    return max(min(lengths) - inputs.input_ids.shape[1], 1)


def _first_slots(windows: Sequence[int | None], length: int, most_slots: int) -> int:
    """Return the cache slots to lease at first. Rings take no more memory for a longer text."""
    only_rings = None not in rings_of(windows, bucket(most_slots))
    return most_slots if only_rings else min(most_slots, length + FIRST_REACH)


def _eos(
    selection: Selection | str, criteria: Sequence[Any], device: torch.device
) -> Tensor | None:
    """Return the stop tokens for the control, None if there are none or others stop rows."""
    if isinstance(selection, str) or selection.eos is not None:
        return None
    eos = [c.eos_token_id.reshape(-1).to(device) for c in criteria if type(c) is EosTokenCriteria]
    return torch.cat(eos) if eos else None
