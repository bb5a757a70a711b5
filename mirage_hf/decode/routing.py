"""Which `generate` calls the cache pool and the step cover.

Stock serves all others, and the reason is counted.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import utils as stock_generation
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mirage_hf.decode.cache_layers import INDEXED_LAYERS
from mirage_hf.decode.masks import MaskPlan

COVERED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
#: Model kwargs whose effect on every step is known here.
MODEL_INPUTS = frozenset(
    {
        "attention_mask",
        "position_ids",
        "past_key_values",
        "cache_params",
        "use_cache",
        "logits_to_keep",
    }
)
#: Those of a decoder after an encoder.
DECODER_INPUTS = frozenset({"decoder_attention_mask", "decoder_position_ids", "encoder_outputs"})
ATTENTIONS = ("sdpa", "eager")
#: The argument by which models with nothing but states (Mamba) take their cache.
CACHE_OF_STATES = "cache_params"
_cache_names: dict[type, str] = {}
#: Methods that the loop relies on. Stock serves a model class or instance that has its own.
OVERRIDABLE = (
    "generate",
    "_sample",
    "_prefill",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "create_masks_for_generate",
)
#: Those that decide what a step takes. A traced model's are called, and what they give is compared
#: with what its steps take (step_inputs.py).
STEP_METHODS = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "create_masks_for_generate",
)
#: Methods of transformers that other methods of theirs let call GenerationMixin's `generate` for
#: each segment of a long input, with the keyword arguments that they do not know.
SEGMENTING = frozenset(
    {"transformers.models.whisper.generation_whisper.WhisperGenerationMixin.generate"}
)
#: Methods of transformers that do as GenerationMixin's up to a number of tokens. The config has the
#: number by this name. For longer texts Phi3's method drops the cache.
LIMITED = {
    "transformers.models.phi3.modeling_phi3.Phi3ForCausalLM"
    ".prepare_inputs_for_generation": "original_max_position_embeddings"
}
#: Configs of models that use caches in a way that the pool does not support. In transformers 5.4 an
#: indexer keeps keys in its module. Mllama asks which layers have keys of an image.
OWN_CACHES = {
    **({} if INDEXED_LAYERS else {"GlmMoeDsaConfig": "chooses keys by an indexer of its own"}),
    "MllamaTextConfig": "reads the cache's layers itself",
}


# -- options and arguments -------------------------------------------------------------------------


@dataclass(frozen=True)
class RoutingRule:
    """A generation option or argument that may need the stock method.

    Attributes:
        name: Name of the option.
        is_rejected: Whether a value needs the stock method.
        reason: The text of the reason. {} stands for the value.
    """

    name: str
    is_rejected: Callable[[Any], bool]
    reason: str


def _is_given(value: Any) -> bool:
    return value is not None


def _is_on(value: Any) -> bool:
    return value is not None and value is not False


#: Rules for the GenerationConfig in force.
OPTIONS = (
    RoutingRule("num_beams", lambda v: v not in (None, 1), "beam search (num_beams={})"),
    RoutingRule("use_cache", lambda v: v is False, "use_cache=False"),
    RoutingRule("assistant_early_exit", _is_given, "assisted decoding (early exit)"),
    RoutingRule("use_mtp", _is_on, "assisted decoding (MTP)"),
    RoutingRule("speculation_type", _is_given, "assisted decoding ({})"),
    RoutingRule("assistant_ensemble_weight", _is_given, "assisted decoding (ensemble)"),
    RoutingRule("penalty_alpha", lambda v: v is not None and v > 0, "contrastive search"),
    RoutingRule("dola_layers", _is_given, "DoLa decoding"),
    RoutingRule("constraints", _is_given, "constrained beam search"),
    RoutingRule("force_words_ids", _is_given, "constrained beam search"),
    RoutingRule("guidance_scale", lambda v: v not in (None, 1), "guidance_scale={}"),
    RoutingRule("output_attentions", _is_on, "output_attentions"),
    RoutingRule("output_hidden_states", _is_on, "output_hidden_states"),
    RoutingRule("prefill_chunk_size", _is_given, "chunked prefill"),
    RoutingRule(
        "cache_implementation",
        # transformers 5.4 gives calls with drafts a cache that keeps all keys, by the last name
        lambda v: v not in (None, "hybrid", "dynamic", "dynamic_full"),
        "cache_implementation={!r}",
    ),
    RoutingRule("token_healing", _is_on, "token healing"),
    RoutingRule("is_assistant", _is_on, "called as another model's assistant"),
)

#: Rules for generate's own arguments.
ARGUMENTS = (
    RoutingRule("custom_generate", _is_given, "custom_generate"),
    RoutingRule("assistant_tokenizer", _is_given, "assisted decoding"),
    RoutingRule("negative_prompt_ids", _is_given, "negative_prompt_ids"),
    RoutingRule("negative_prompt_attention_mask", _is_given, "negative_prompt_attention_mask"),
    RoutingRule("synced_gpus", _is_on, "synced_gpus"),
    RoutingRule("trust_remote_code", _is_on, "trust_remote_code"),
    RoutingRule("logits_to_keep", lambda v: isinstance(v, Tensor), "logits_to_keep as a tensor"),
)


def is_covered_mode(config: GenerationConfig) -> bool:
    """Return whether a generation config asks for a way of decoding that may be covered."""
    mode = config.get_generation_mode()
    looks_up = config.prompt_lookup_num_tokens is not None
    return mode in COVERED_MODES or (mode is GenerationMode.ASSISTED_GENERATION and looks_up)


def rejected_arguments(arguments: Mapping[str, Any]) -> str | None:
    """Return why generate's arguments need the stock method, or None."""
    return _first_reason(ARGUMENTS, arguments.get)


def rejected_options(option: Callable[[str], Any]) -> str | None:
    """Return why the options that `option(name)` gives need the stock method, or None."""
    return _first_reason(OPTIONS, option)


def _first_reason(rules: tuple[RoutingRule, ...], value_of: Callable[[str], Any]) -> str | None:
    for rule in rules:
        value = value_of(rule.name)
        if rule.is_rejected(value):
            return rule.reason.format(value)
    return None


def effective_options(
    arguments: Mapping[str, Any], given: GenerationConfig | None, default: GenerationConfig
) -> Callable[[str], Any]:
    """Return a look-up of options as generate will merge them.

    Args:
        arguments: Arguments of `generate`, which come first.
        given: The config passed to generate.
        default: The model's config, which comes last.
    """

    def option(name: str) -> Any:
        if name in arguments:
            return arguments[name]
        value = getattr(given, name, None)
        return value if value is not None else getattr(default, name, None)

    return option


# -- models ----------------------------------------------------------------------------------------


def rejected_model(model: Any, *, is_traced: bool = False) -> str | None:
    """Return why a model's class, config or surroundings need the stock method, or None.

    It takes a few microseconds, and longer if torch.distributed has several processes.

    Args:
        model: The model.
        is_traced: Whether its step over our cache was compared with stock's (tracing.py). Then it
            need not declare that it supports static caches.
    """
    config, name = model.config, type(model).__name__
    if model.training:
        return "training mode"
    if config.is_encoder_decoder and not is_traced:
        return "encoder-decoder model"
    own_method = _own_method(model, is_traced=is_traced)
    if own_method is not None:
        return f"the model has its own {own_method}"
    if not is_traced and not getattr(model, "_can_compile_fullgraph", False):
        return f"{name} does not declare support for static caches"
    if not is_traced and getattr(model, "_is_stateful", False):
        return f"{name} keeps state outside the cache"
    text_config = config.get_text_config()
    for kind in type(text_config).__mro__:
        if kind.__name__ in OWN_CACHES:
            return f"{name} {OWN_CACHES[kind.__name__]}"
    rejected_attention = _rejected_attention(text_config._attn_implementation)
    if rejected_attention is not None:
        return rejected_attention
    if not is_traced and getattr(model, "hf_quantizer", None) is not None:
        return "quantized model"
    return _rejected_processes(model)


def _rejected_attention(attention: str) -> str | None:
    if attention not in ATTENTIONS:
        return f"attention implementation {attention}"
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        function = functions.get(attention)
        module = str(getattr(function, "__module__", ""))
        if function is not None and not module.startswith("transformers."):
            return f"attention implementation {attention}, replaced by a registration"
    return None


def _rejected_processes(model: Any) -> str | None:
    """Return that several processes hold parts of the weights, or None.

    Such a model needs all of them in every step. Processes that hold a whole model each do not.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    processes = distributed.get_world_size()
    if processes > 1 and _is_spread(model):
        return f"weights spread over {processes} processes"
    return None


def _is_spread(model: Any) -> bool:
    """Return whether a model has marks of FSDP, ZeRO-3, or tensor or pipeline parallelism."""
    marks = ("_device_mesh", "_tp_size", "_pp_stage")  # of transformers
    tensors = itertools.chain(model.parameters(), model.buffers())
    return (
        stock_generation.is_deepspeed_zero3_enabled()
        or stock_generation.is_fsdp_managed_module(model)
        or any(getattr(model, mark, None) is not None for mark in marks)
        or any("FullyShardedDataParallel" in type(m).__name__ for m in model.modules())
        or any(hasattr(t, "device_mesh") or hasattr(t, "ds_id") for t in tensors)
    )


def rejected_length(model: Any, tokens: int) -> str | None:
    """Return why a text of so many tokens, new ones included, needs the stock method, or None."""
    for name, method in _overrides(type(model)):
        limit = getattr(model.config, LIMITED.get(_full_name(method), ""), None)
        if limit is not None and tokens > limit:
            return f"the model's own {name} treats more than {limit} tokens differently"
    return None


_overridden: dict[type, tuple[tuple[str, Any], ...]] = {}


def _overrides(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the methods of OVERRIDABLE that a class does not have from GenerationMixin."""
    if kind not in _overridden:
        methods = ((name, getattr(kind, name, None)) for name in OVERRIDABLE)
        _overridden[kind] = tuple(
            (name, method)
            for name, method in methods
            if method is not getattr(GenerationMixin, name, None)
        )
    return _overridden[kind]


def _own_method(model: Any, *, is_traced: bool) -> str | None:
    """Return a method that the model's class or the instance overrides, and must not, or None."""
    for name, method in _overrides(type(model)):
        full_name = _full_name(method)
        traced_may = name in STEP_METHODS or _calls_standard(method)
        if full_name not in LIMITED and not (is_traced and traced_may):
            return name
    # `generate` of the instance is ours
    own = (name for name in OVERRIDABLE[1:] if name in model.__dict__)
    return next((name for name in own if not (is_traced and name in STEP_METHODS)), None)


def _calls_standard(method: Any) -> bool:
    """Return whether a model's `generate` calls the one that it inherits, and hands options on.

    Then each of these calls comes to us. Only transformers' own methods are looked at.
    """
    if _full_name(method) in SEGMENTING:
        return True
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None or not _full_name(method).startswith("transformers.models."):
        return False
    calls_inherited = "generate" in code.co_names and "__class__" in code.co_freevars
    return calls_inherited and bool(code.co_flags & inspect.CO_VARKEYWORDS)


def cache_name(model: Any) -> str:
    """Return the name of the argument by which a model's forward takes its cache."""
    kind = type(model)
    if kind not in _cache_names:
        names = inspect.signature(kind.forward).parameters
        takes_other = CACHE_OF_STATES in names and "past_key_values" not in names
        _cache_names[kind] = CACHE_OF_STATES if takes_other else "past_key_values"
    return _cache_names[kind]


def takes_cache(model: Any) -> bool:
    """Return whether a model's forward names an argument for a cache."""
    return cache_name(model) in inspect.signature(type(model).forward).parameters


def has_own_steps(model: Any) -> bool:
    """Return whether a model decides itself what its steps take, or declares no static caches."""
    if not getattr(model, "_can_compile_fullgraph", False):
        return True
    names = {name for name, _ in _overrides(type(model))} | model.__dict__.keys()
    return not names.isdisjoint(STEP_METHODS)


def _full_name(method: Any) -> str:
    return f"{getattr(method, '__module__', '')}.{getattr(method, '__qualname__', '')}"


# -- masks -----------------------------------------------------------------------------------------


def rejected_masks(model: Any, masks: MaskPlan, cache_windows: Sequence[int | None]) -> str | None:
    """Return why a model's forward makes other masks than its config asks for, or None.

    Configs keep entries that a class does not read.

    Args:
        model: The model.
        masks: What its config asks for.
        cache_windows: For each layer the window that its cache slides over. Such a layer's mask
            does not matter, because only the window's keys are there.
    """
    window_by_mask = (
        not masks.by_layer_type and masks.windows[0][1] is not None and None in cache_windows
    )
    if not (masks.by_layer_type or window_by_mask) or not masks.windows:
        return None
    names: set[str] = set()
    inner, decoder = getattr(model, "model", model), model.get_decoder()
    # the decoder of a model of images may be a causal language model, with a model inside
    for module in (
        model,
        model.base_model,
        decoder,
        getattr(decoder, "base_model", decoder),
        inner,
    ):
        names |= _names_in_forward(type(module))
    if masks.by_layer_type and "dict" not in names:
        return "layer_types in the config of a model that takes one mask for all layers"
    mask_makers = ("create_sliding_window_causal_mask", "create_masks_for_generate")
    if window_by_mask and names.isdisjoint(mask_makers):
        return "a sliding_window in the config of a model that makes no mask for one"
    return None


_forward_names: dict[Any, frozenset[str]] = {}


def _names_in_forward(kind: type) -> frozenset[str]:
    """Return the names that the forward of a class and of its bases uses, under decorators."""
    forward = getattr(kind, "forward", None)
    if forward not in _forward_names:
        forwards = [c.__dict__["forward"] for c in kind.__mro__ if "forward" in c.__dict__]
        codes = [getattr(inspect.unwrap(f), "__code__", None) for f in forwards if f is not None]
        nested = [code for code in codes if code is not None]
        for code in nested:  # the list grows during the walk
            nested += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        _forward_names[forward] = frozenset(name for code in nested for name in code.co_names)
    return _forward_names[forward]
