"""Small configs of every architecture of transformers, for `survey_models`.

`small_config` makes a new config of a type from small numbers. Names of fields decide most of
them: `NUMBERS` says what a field of that name gets. Lists with an entry for each layer keep one
layer of each kind. `OVERRIDES` has what a type needs besides. `IMPOSSIBLE` names the types without
a small config, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

#: Text tokens are below this number, special tokens are not.
SPECIAL_TOKENS = 180

#: The number of layers, and the largest number that lists of kinds may ask for.
_LAYERS, _MOST_LAYERS = 2, 8

#: What a field of this name gets if its default is a number.
NUMBERS: Mapping[str, int | float] = {
    # sizes of the text
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_seq_len": 256,
    "context_length": 256,
    "initializer_range": 0.125,
    # layers
    "num_hidden_layers": _LAYERS,
    "num_layers": _LAYERS,
    "n_layer": _LAYERS,
    "n_layers": _LAYERS,
    "layers": _LAYERS,
    "depth": _LAYERS,
    "encoder_layers": _LAYERS,
    "decoder_layers": _LAYERS,
    "num_encoder_layers": _LAYERS,
    "num_decoder_layers": _LAYERS,
    "num_blocks": _LAYERS,
    "max_window_layers": _LAYERS,
    "num_kv_shared_layers": 0,
    # widths
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "emb_dim": 64,
    "embed_dim": 64,
    "embedding_dim": 64,
    "embedding_size": 64,
    "out_hidden_size": 64,
    "output_dim": 64,
    "word_embed_proj_dim": 64,
    "projection_dim": 64,
    "intermediate_size": 144,
    "intermediate_size_mlp": 144,
    "dense_intermediate_size": 144,
    "ffn_dim": 144,
    "ffn_hidden_size": 144,
    "encoder_ffn_dim": 144,
    "decoder_ffn_dim": 144,
    "d_ff": 144,
    "dff": 144,
    "mlp_dim": 144,
    "d_inner": 144,
    "dim_ff": 144,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 211,
    # heads
    "num_attention_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "kv_n_heads": 2,
    "head_dim": 16,
    "dim_head": 16,
    "d_head": 16,
    "d_kv": 16,
    "kv_channels": 16,
    "rotary_dim": 8,
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "o_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    # experts
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    # linear attention and state space models
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "state_size": 16,
    "ssm_state_size": 16,
    # images
    "image_seq_length": 4,
    "mm_tokens_per_image": 4,
    "num_image_tokens": 4,
    "spatial_merge_size": 2,
}

#: What a field of this name gets, whatever its default.
LISTS: Mapping[str, Any] = {
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
}

#: Fields whose lists of layers follow from other fields.
_DERIVED = {"moe_layers", "full_attn_idxs", "attention_layers"}


def _mrope(*sections: int) -> dict[str, Any]:
    """Return RoPE parameters for positions of three dimensions, for small heads."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"rope_parameters": parameters}


#: What a config of a type needs besides, also as a part of another config. A dict is for the
#: sub-config of that name.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "num_local_experts": 4},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32},
    "blip-2": {"image_token_index": 190, "num_query_tokens": 4},
    "blt": {
        "encoder_hash_byte_group_vocab": 300,
        "patcher_config": {"vocab_size": 260},
        "encoder_config": {"vocab_size": 260, "hidden_size_global": 64},
        "decoder_config": {"vocab_size": 260, "hidden_size_global": 64},
        "vocab_size": 260,
        "num_hidden_layers": 2,
    },
    "chameleon": {"vocabulary_map": {"<image>": 190}},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [3, 3, 2],
            },
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {"canvas_length": 16},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "ernie4_5_vl_moe_text": _mrope(3, 3, 2),
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {
        "global_head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "glm4v_moe_text": _mrope(1, 1, 2) | {"head_dim": 16},
    "glm4v_text": _mrope(2, 3, 3),
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16, "index_kpool": 4},
    "glm_ocr_text": _mrope(2, 3, 3),
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "window_size": 32,
        "max_position_embeddings": 2048,  # it makes its mask of so many, like real models
    },
    "granite4_vision": {
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [0, 0, 1, 1],
        "downsample_rate": "2/4",
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4},
    "hunyuan_vl_text": _mrope(2, 2, 2, 2) | {"head_dim": 16},
    "inkling_audio": {"text_hidden_size": 64},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
    },
    "inkling2_vision": {"text_hidden_size": 64},
    "inkling_vision": {"text_hidden_size": 64},
    "instructblip": {"image_token_index": 190, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 190, "num_query_tokens": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kosmos-2": {"latent_query_num": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 64}},
    "ministral": {"head_dim": 16},
    "mpt": {"max_seq_len": 2048},  # it makes its biases for so many
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "paddleocr_vl_text": _mrope(2, 3, 3),
    "pp_formulanet": {"vision_config": {"decoder_hidden_size": 64}},
    "qwen2_5_omni_text": _mrope(2, 3, 3),
    "qwen2_5_omni_thinker": {"vision_start_token_id": 190, "audio_start_token_id": 191},
    "qwen2_5_vl_text": _mrope(2, 3, 3),
    "qwen2_vl_text": _mrope(2, 3, 3),
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 190, "audio_start_token_id": 191},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 500,
        "split_ngram_parts": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 48],
        "attention_head_size": 16,
        "num_buckets": 2,  # else it counts them by the prompt, and fails beyond
    },
    "rwkv": {"attention_hidden_size": 64, "intermediate_size": 144},
    "step3p5": {"sliding_window": 32},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "chunk_size": 16,
        "n_mamba_heads": 4,
        "mamba_headdim": 32,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "adapter_rank": 8,
        "kv_channels": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}

#: Settings that a type's default config needs to be made at all.
REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "diffusion_gemma": {"vision_config": {}},
    "granite4_vision": {"text_config": {"model_type": "granite4_vision_text"}},
    "encoder-decoder": {
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    "speech-encoder-decoder": {
        "encoder": {"model_type": "wav2vec2"},
        "decoder": {"model_type": "gpt2", "is_decoder": True, "add_cross_attention": True},
    },
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "gpt2", "is_decoder": True, "add_cross_attention": True},
    },
}

#: Types without a small config, with the reason.
IMPOSSIBLE: Mapping[str, str] = {
    "evolla": "it reads proteins, and AutoModelForImageTextToText does not make it",
    "gemma4_assistant": "it generates only with the cache of another model",
    "gemma4_unified_assistant": "it generates only with the cache of another model",
    "musicgen": "it generates codes of sound, not text",
    "musicgen_melody": "it generates codes of sound, not text",
    "pi0": "it has no generate: it moves robots",
}

#: What is done to a model of a type before it generates.
PREPARED: Mapping[str, Callable[[Any], Any]] = {
    "xmod": lambda model: model.set_default_language("en_XX"),
}


def small_config(model_type: str) -> PreTrainedConfig:
    """Return a config of a type, with small numbers. It raises whatever the type's config does."""
    default = AutoConfig.for_model(model_type, **REQUIRED.get(model_type, {}))
    return AutoConfig.for_model(model_type, **_small_fields(default))


def _small_fields(default: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields in which a small config differs from a default one."""
    values = vars(default)
    declared = _declared(default)
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            kind = {"model_type": value.model_type} if value.model_type else {}
            small[name] = kind | _set_by_the_whole(value) | _small_fields(value)
        elif name not in declared or value is None:
            continue
        elif name in LISTS:
            small[declared[name]] = LISTS[name]
        elif name in NUMBERS and _is_number(value):
            small[declared[name]] = NUMBERS[name]
        elif name == "image_size":
            small[declared[name]] = _image_size(value, values.get("patch_size"))
    small |= _special_tokens(values)
    small |= _layer_lists(values)
    small |= _latent_attention(small)
    merged = _merged(small, OVERRIDES.get(default.model_type, {}))
    if rope := _rope_parameters(values, merged):
        merged["rope_parameters"] = rope
    return merged


def _declared(config: PreTrainedConfig) -> dict[str, str]:
    """Return the attributes that a config's class declares, each with its argument's name."""
    other_names = config.attribute_map
    names = [field.name for field in dataclasses.fields(config)]
    return {other_names.get(name, name): name for name in names}


def _set_by_the_whole(part: PreTrainedConfig) -> dict[str, Any]:
    """Return the plain values that a sub-config has only as part of this whole."""
    usual = vars(type(part)())
    declared = _declared(part)
    return {
        declared[name]: value
        for name, value in vars(part).items()
        if name in declared
        and isinstance(value, (bool, int, float, str))
        and name in usual
        and usual[name] != value
    }


def _merged(small: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, with the second in the first. Dicts of sub-configs are merged too."""
    merged = dict(small)
    for name, value in more.items():
        old = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(old, dict)
        merged[name] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _is_number(value: Any) -> bool:
    """Return whether a value is a number other than 0, which means that there is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0


def _image_size(value: Any, patch: Any) -> Any:
    """Return the size of an image of four patches by four."""
    edge = 4 * (patch[0] if isinstance(patch, (tuple, list)) else patch or 8)
    return type(value)([edge] * len(value)) if isinstance(value, (tuple, list)) else edge


def _special_tokens(values: Mapping[str, Any]) -> dict[str, int]:
    """Return small ids for the special tokens that a config names."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    small = {name: token for name, token in ids.items() if name in values}
    others = [
        name
        for name, value in values.items()
        if name.endswith(("_token_id", "_token_index")) and name not in ids and _is_number(value)
    ]
    return small | {name: SPECIAL_TOKENS + i for i, name in enumerate(sorted(others))}


def _layer_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return short forms of the lists that have an entry for each layer, and their length.

    They keep the first layer of each kind, and at least `_LAYERS` layers.
    """
    counts = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
    count = next((name for name in counts if name in values), None)
    if count is None:
        return {}
    layers = values[count]
    lists = {
        name: list(value)
        for name, value in values.items()
        if isinstance(value, (list, tuple))
        and len(value) == layers
        and name not in _DERIVED
        and list(value) != list(range(layers))
    }
    if not lists:
        return {}
    kinds = list(zip(*map(_hashable, lists.values()), strict=True))
    kept = sorted({kinds.index(kind) for kind in kinds})[:_MOST_LAYERS]
    missing = max(0, _LAYERS - len(kept))
    kept += [i for i in range(layers) if i not in kept][:missing]
    kept.sort()
    kept_lists = {name: [value[i] for i in kept] for name, value in lists.items()}
    return {count: len(kept)} | kept_lists


def _hashable(values: Sequence[Any]) -> list[str]:
    return [repr(value) for value in values]


def _latent_attention(small: Mapping[str, Any]) -> dict[str, Any]:
    """Return what latent attention asks of its heads: keys are not shared, RoPE reads head_dim."""
    if "qk_rope_head_dim" not in small:
        return {}
    equal = {"head_dim": "qk_rope_head_dim", "num_key_value_heads": "num_attention_heads"}
    return {name: small[other] for name, other in equal.items() if name in small}


def _rope_parameters(values: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return RoPE parameters whose mrope sections fit the small heads, or None."""
    rope = values.get("rope_parameters")
    if "rope_parameters" in small or not isinstance(rope, dict) or "mrope_section" not in rope:
        return None
    head = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    parts = len(rope["mrope_section"])
    rest = [half // parts] * (parts - 1)
    return rope | {"mrope_section": [half - sum(rest), *rest]}
