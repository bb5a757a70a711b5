"""What `generate` calls the pool and the step cover, as rows of data; everything else is stock's, with a reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mirage_hf.decode.program import MaskPlan

MODEL_INPUTS = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
)
"""The model kwargs whose effect on every step is known here."""
ATTENTIONS = ("sdpa", "eager")
OVERRIDABLE = (
    "generate",
    "_sample",
    "_prefill",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "create_masks_for_generate",
)
"""Methods whose meaning the loop relies on; a model class or instance with its own goes the stock way."""
LIMITED = {
    "transformers.models.phi3.modeling_phi3.Phi3ForCausalLM.prepare_inputs_for_generation": "original_max_position_embeddings"
}
"""Methods of transformers that do as GenerationMixin's for texts of no more tokens than a number of the config; for longer ones Phi3's
drops the cache."""

OWN_CACHES = {
    "GlmMoeDsaConfig": "chooses keys by an indexer of its own",
    "MllamaTextConfig": "reads the cache's layers itself",
}
"""Configs of models that do with caches what the pool cannot follow: an indexer's keys are beside the cache's, in transformers 5.4 in its
module, and Mllama looks which layers have keys of an image."""


@dataclass(frozen=True)
class RoutingRule:
    """A generation option or argument, when it is not covered, and how to say so ({} is its value)."""

    name: str
    refuses: Callable[[Any], bool]
    reason: str


def _given(value: Any) -> bool:
    return value is not None


def _true(value: Any) -> bool:
    return value is not None and value is not False


OPTIONS = (
    RoutingRule("num_beams", lambda v: v not in (None, 1), "beam search (num_beams={})"),
    RoutingRule("use_cache", lambda v: v is False, "use_cache=False"),
    RoutingRule("prompt_lookup_num_tokens", _given, "prompt lookup"),
    RoutingRule("assistant_early_exit", _given, "assisted decoding (early exit)"),
    RoutingRule("use_mtp", _true, "assisted decoding (MTP)"),
    RoutingRule("penalty_alpha", lambda v: v is not None and v > 0, "contrastive search"),
    RoutingRule("dola_layers", _given, "DoLa decoding"),
    RoutingRule("constraints", _given, "constrained beam search"),
    RoutingRule("force_words_ids", _given, "constrained beam search"),
    RoutingRule("guidance_scale", lambda v: v not in (None, 1), "guidance_scale={}"),
    RoutingRule("output_attentions", _true, "output_attentions"),
    RoutingRule("output_hidden_states", _true, "output_hidden_states"),
    RoutingRule("prefill_chunk_size", _given, "chunked prefill"),
    RoutingRule(
        "cache_implementation",
        lambda v: v not in (None, "hybrid", "dynamic"),
        "cache_implementation={!r}",
    ),
    RoutingRule("token_healing", _true, "token healing"),
    RoutingRule("is_assistant", _true, "called as another model's assistant"),
)
"""Read from the GenerationConfig in force."""

ARGUMENTS = (
    RoutingRule("custom_generate", _given, "custom_generate"),
    RoutingRule("assistant_model", _given, "assisted decoding"),
    RoutingRule("assistant_tokenizer", _given, "assisted decoding"),
    RoutingRule("inputs_embeds", _given, "inputs_embeds"),
    RoutingRule("negative_prompt_ids", _given, "negative_prompt_ids"),
    RoutingRule("negative_prompt_attention_mask", _given, "negative_prompt_attention_mask"),
    RoutingRule("synced_gpus", _true, "synced_gpus"),
    RoutingRule("trust_remote_code", _true, "trust_remote_code"),
    RoutingRule("logits_to_keep", lambda v: isinstance(v, Tensor), "logits_to_keep as a tensor"),
)
"""Read from generate's own arguments."""

COVERED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def refused_arguments(arguments: Mapping[str, Any]) -> str | None:
    """Return why generate's arguments need the stock method, or None."""
    return _first(ARGUMENTS, arguments.get)


def refused_options(option: Callable[[str], Any]) -> str | None:
    """Return why the generation options that `option(name)` gives need the stock method, or None."""
    return _first(OPTIONS, option)


def _first(rules: tuple[RoutingRule, ...], value: Callable[[str], Any]) -> str | None:
    for rule in rules:
        if rule.refuses(v := value(rule.name)):
            return rule.reason.format(v)
    return None


def effective(
    arguments: Mapping[str, Any], given: GenerationConfig | None, default: GenerationConfig
) -> Callable[[str], Any]:
    """Return a look-up of options as generate will merge them: its kwargs, then the config given, then the model's."""

    def option(name: str) -> Any:
        if name in arguments:
            return arguments[name]
        value = getattr(given, name, None)
        return value if value is not None else getattr(default, name, None)

    return option


def refused_model(model: Any) -> str | None:
    """Return why a model's class, config or surroundings need the stock method, or None. A few microseconds."""
    config = model.config
    if model.training:
        return "training mode"
    if config.is_encoder_decoder:
        return "encoder-decoder model"
    own = _own_methods(type(model))
    if own is None:
        own = next((name for name in OVERRIDABLE[1:] if name in model.__dict__), None)
    if own is not None:
        return f"the model has its own {own}"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"{type(model).__name__} does not declare support for static caches"
    if getattr(model, "_is_stateful", False):
        return f"{type(model).__name__} keeps state outside the cache"
    text = config.get_text_config()
    if own_cache := next(
        (OWN_CACHES[c.__name__] for c in type(text).__mro__ if c.__name__ in OWN_CACHES), None
    ):
        return f"{type(model).__name__} {own_cache}"
    attention = text._attn_implementation
    if attention not in ATTENTIONS:
        return f"attention implementation {attention}"
    registered = [
        of.get(attention) for of in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    ]
    if not all(
        f is None or str(getattr(f, "__module__", "")).startswith("transformers.")
        for f in registered
    ):
        return f"attention implementation {attention}, registered anew"
    if getattr(model, "hf_quantizer", None) is not None:
        return "quantized model"
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return f"torch.distributed with {torch.distributed.get_world_size()} processes"
    return None


def refused_length(model: Any, tokens: int) -> str | None:
    """Return why a text of so many tokens, new ones included, needs the stock method of a model, or None."""
    for name, method in _overrides(type(model)):
        limit = getattr(model.config, LIMITED.get(_full_name(method), ""), None)
        if limit is not None and tokens > limit:
            return f"the model's own {name} takes more than {limit} tokens in its own way"
    return None


def refused_masks(model: Any, masks: MaskPlan, windows: Sequence[int | None]) -> str | None:
    """Return why a model's forward makes other masks than its config asks for, or None: configs keep entries that a class does not read.
    `windows`: of each layer what the cache slides over; where it does, only its keys are there, whatever the mask is."""
    slides = not masks.by_layer_type and masks.windows[0][1] is not None and None in windows
    if not (masks.by_layer_type or slides):
        return None
    names = frozenset[str]().union(
        *(_names_in_forward(type(m)) for m in (model, model.base_model, model.get_decoder()))
    )
    if masks.by_layer_type and "dict" not in names:
        return "layer_types in the config of a model that takes one mask for all layers"
    if slides and names.isdisjoint(
        ("create_sliding_window_causal_mask", "create_masks_for_generate")
    ):
        return "a sliding_window in the config of a model that makes no mask for one"
    return None


_NAMES: dict[Any, frozenset[str]] = {}


def _names_in_forward(kind: type) -> frozenset[str]:
    """The names that a class's forward uses, and those of the classes it is made from, under decorators."""
    forward = getattr(kind, "forward", None)
    if forward not in _NAMES:
        codes = [
            getattr(inspect.unwrap(f), "__code__", None)
            for c in kind.__mro__
            if (f := c.__dict__.get("forward")) is not None
        ]
        for code in codes:  # the list grows while it is walked
            codes += [] if code is None else [c for c in code.co_consts if isinstance(c, CodeType)]
        _NAMES[forward] = frozenset(
            name for code in codes if code is not None for name in code.co_names
        )
    return _NAMES[forward]


_OWN: dict[type, tuple[tuple[str, Any], ...]] = {}


def _overrides(kind: type) -> tuple[tuple[str, Any], ...]:
    if kind not in _OWN:
        methods = ((name, getattr(kind, name, None)) for name in OVERRIDABLE)
        _OWN[kind] = tuple(
            (name, m) for name, m in methods if m is not getattr(GenerationMixin, name, None)
        )
    return _OWN[kind]


def _full_name(method: Any) -> str:
    return f"{getattr(method, '__module__', '')}.{getattr(method, '__qualname__', '')}"


def _own_methods(kind: type) -> str | None:
    return next(
        (name for name, method in _overrides(kind) if _full_name(method) not in LIMITED), None
    )


def is_plain(mask: Tensor | None, positions: Tensor, slots: int) -> bool:
    """Whether all rows of a prompt count from position 0 on, and none of its (batch, slots) mask is zero. One read by the host."""
    if positions.shape[1] != slots or (
        mask is not None and (mask.ndim != 2 or mask.shape[1] != slots)
    ):
        return False
    same = positions == torch.arange(slots, device=positions.device)
    return bool((same if mask is None else same & (mask != 0)).all())


def counts_from(positions: Tensor, lowest: Tensor, slots: int) -> bool:
    """Whether positions (batch, slots) of each row count from 0 on behind its left padding (batch, 1). One read by the host."""
    if positions.shape[1] != slots:
        return False
    own = torch.arange(slots, device=positions.device) - lowest
    return bool(((positions == own) | (own < 0)).all())


def left_padding(mask: Tensor | None, slots: int) -> Tensor | str | None:
    """Return (batch, 1) counts of leading zeros of a (batch, slots) mask, None without any, or why it is not left padding."""
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[1] != slots:
        return f"a mask of shape {tuple(mask.shape)} for {slots} tokens"
    seen = mask != 0
    # a read or two by the host before the prefill; stock's own checks of the mask cost as much
    if bool(seen.all()):
        return None
    if not bool((seen[:, 1:] >= seen[:, :-1]).all() & seen[:, -1].all()):
        return "holes in the mask"
    return (~seen).sum(-1, keepdim=True)
