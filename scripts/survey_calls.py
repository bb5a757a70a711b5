"""Calls of `survey_models`: their inputs, what they return, and how that differs from stock's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scripts.survey_configs import SPECIAL_TOKENS
from scripts.survey_images import IMAGES, NEEDED, image_inputs

#: New tokens of a text that goes on from a cache.
MORE_TOKENS = 4

#: Names of the first inputs of models of sound: features of frames, or samples.
SOUND = ("input_features", "input_values", "inputs")

#: What models call the cache that they take.
CACHES = ("past_key_values", "cache_params", "state")

# -- inputs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of generate.

    Attributes:
        name: What the table says.
        inputs: The arguments.
    """

    name: str
    inputs: Mapping[str, Tensor]


def text_calls(model: Any, model_type: str) -> list[Call]:
    """Return a call with one text, and one with three texts of different lengths.

    Causal models get padding on the left, encoders on the right. Encoders of sound get sound.
    """
    needed = NEEDED.get(model_type, lambda _model, _batch: {})
    is_of_sound = model.config.is_encoder_decoder and model.main_input_name in SOUND
    torch.manual_seed(2)
    calls = []
    for batch in (1, 3):
        ids = torch.randint(5, SPECIAL_TOKENS, (batch, 9))
        if is_of_sound:
            calls.append(Call(f"batch {batch}", sound_inputs(model, batch)))
            continue
        padding = torch.arange(batch)[:, None] * 2
        mask = (torch.arange(9) >= padding).long()
        if model.config.is_encoder_decoder:
            mask = mask.flip(-1)
        texts = {"input_ids": ids * mask, "attention_mask": mask}
        calls.append(Call(f"batch {batch}", texts | needed(model, batch)))
    return calls


def sound_inputs(model: Any, batch: int) -> dict[str, Tensor]:
    """Return random sound with padding on the right: samples, or the features of frames."""
    name, config = model.main_input_name, model.config
    if name != "input_features":
        mask = torch.arange(4000) < 4000 - 1000 * torch.arange(batch)[:, None]
        return {"input_values": torch.randn(batch, 4000) * mask, "attention_mask": mask.long()}
    config = getattr(config, "encoder_config", config)
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return {name: torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)}
    width = getattr(config, "input_feat_per_channel", None) or config.num_mel_bins
    mask = torch.arange(40) < 40 - 8 * torch.arange(batch)[:, None]
    return {name: torch.randn(batch, 40, width), "attention_mask": mask.long()}


def calls_of(model: Any, model_type: str) -> list[Call]:
    """Return the calls of a type."""
    calls = text_calls(model, model_type)
    if model_type in IMAGES and hasattr(model.config, "vision_config"):
        calls.append(Call("image", image_inputs(model, model_type)))
    return calls


# -- what a call returns ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Returned:
    """What a call of generate returned.

    Attributes:
        text: The prompt, unless there is an encoder, and the new tokens.
        logits: Those of each new token. None if the model's own generate returns the text alone.
        cache: The cache, None if there is none.
    """

    text: Tensor
    logits: Sequence[Tensor] | None = None
    cache: Any = None


def generated(model: Any, call: Call, tokens: int, **kwargs: Any) -> Any:
    """Return what greedy generate returns for a call."""
    torch.manual_seed(3)  # some models draw numbers in their forward
    greedy = {"do_sample": False, "num_beams": 1}  # a config may ask for beams
    return model.generate(**call.inputs, max_new_tokens=tokens, **greedy, **kwargs)


def text_of(model: Any, call: Call, tokens: int, **kwargs: Any) -> Tensor:
    """Return the text that greedy generate gives for a call."""
    text = generated(model, call, tokens, **kwargs)
    return text if isinstance(text, Tensor) else text.sequences


def returned(model: Any, call: Call, tokens: int) -> Returned:
    """Return the text, logits and cache of a call."""
    out = generated(model, call, tokens, return_dict_in_generate=True, output_logits=True)
    return Returned(out.sequences, out.logits, out.get("past_key_values"))


def stock_returned(model: Any, call: Call, text: Tensor, tokens: int) -> Returned:
    """Return what stock's generate returns: `text` alone if it refuses to return more."""
    try:
        return returned(model, call, tokens)
    except Exception:  # a generate of the model's own
        return Returned(text)


def continued(model: Any, call: Call, text: Tensor, cache: Any) -> Tensor:
    """Return the text of a call that goes on after a text, from its cache."""
    if model.config.is_encoder_decoder:
        inputs = {**call.inputs, "decoder_input_ids": text}
    else:
        inputs = _longer(call, text)
    text_of(model, call, 1)  # so that what modules keep of a text is of this prompt
    known = inspect.signature(model.forward).parameters
    name = next((name for name in CACHES if name in known), CACHES[0])
    return text_of(model, Call(call.name, inputs), MORE_TOKENS, **{name: cache})


def _longer(call: Call, text: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a call whose prompt is a longer text. Its images are in the cache."""
    prompt = call.inputs["input_ids"]
    inputs = {}
    for name, value in call.inputs.items():
        if name == "input_ids":
            inputs[name] = text
        elif value.shape == prompt.shape:
            new = value.new_full((len(text), text.shape[1] - prompt.shape[1]), "mask" in name)
            inputs[name] = torch.cat([value, new], 1)
        elif call.name != "image":
            inputs[name] = value
    return inputs


def logits_difference(ours: Sequence[Tensor], stock: Sequence[Tensor]) -> float:
    """Return the largest difference of logits, as a share of stock's largest logit.

    Logits that are not finite must be equal. Otherwise the difference is infinite.
    """
    if [step.shape for step in ours] != [step.shape for step in stock]:
        return math.inf
    mine, theirs = torch.cat([*ours]).double(), torch.cat([*stock]).double()
    finite = theirs.isfinite()
    if not torch.equal(mine[~finite], theirs[~finite]) or not mine[finite].isfinite().all():
        return math.inf
    largest = theirs[finite].abs().max()
    return float((mine[finite] - theirs[finite]).abs().max() / largest) if largest else 0.0
