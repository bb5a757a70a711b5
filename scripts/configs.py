"""Hold the real sizes of models, so that scripts can build them without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PretrainedConfig,
    PreTrainedModel,
)


@dataclass(frozen=True)
class Sizes:
    """The parts of a config that matter for speed.

    Attributes:
        rope_factor: Llama 3's stretching of 8,192 trained positions, if any.
        window: The window of sliding layers. The model type's own config says which layers slide.
    """

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    tied: bool
    eps: float
    positions: int
    rope_factor: float | None = None
    window: int | None = None


#: `smoke` is no real model: it tries a script on a CPU.
MODELS = {
    "llama-3.2-1b": Sizes(
        "llama", 2048, 8192, 16, 32, 8, 64, 128256, 5e5, True, 1e-5, 131072, 32.0
    ),
    "llama-3.2-3b": Sizes(
        "llama", 3072, 8192, 28, 24, 8, 128, 128256, 5e5, True, 1e-5, 131072, 32.0
    ),
    "llama-3.1-8b": Sizes(
        "llama", 4096, 14336, 32, 32, 8, 128, 128256, 5e5, False, 1e-5, 131072, 8.0
    ),
    "llama-3.1-70b": Sizes(
        "llama", 8192, 28672, 80, 64, 8, 128, 128256, 5e5, False, 1e-5, 131072, 8.0
    ),
    "mistral-7b": Sizes("mistral", 4096, 14336, 32, 32, 8, 128, 32768, 1e6, False, 1e-5, 32768),
    "smollm2-360m": Sizes("llama", 960, 2560, 32, 15, 5, 64, 49152, 1e5, True, 1e-5, 8192),
    "qwen2.5-0.5b": Sizes("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 1e6, True, 1e-6, 32768),
    "qwen2.5-1.5b": Sizes("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 1e6, True, 1e-6, 131072),
    "qwen2.5-7b": Sizes("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 1e6, False, 1e-6, 131072),
    "qwen3-0.6b": Sizes("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 1e6, True, 1e-6, 40960),
    "qwen3-1.7b": Sizes("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 1e6, True, 1e-6, 40960),
    "qwen3-4b": Sizes("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 1e6, True, 1e-6, 40960),
    "qwen3-8b": Sizes("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 1e6, False, 1e-6, 40960),
    "gemma-3-1b": Sizes(
        "gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, 1e6, True, 1e-6, 32768, window=512
    ),
    "smoke": Sizes("llama", 128, 256, 2, 4, 2, 32, 512, 1e4, True, 1e-5, 2048),
}


#: Models whose configs have fields of their own: the type of model, and what differs from the
#: defaults of that type.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart-large": (
        "bart",
        {
            "vocab_size": 50265,
            "d_model": 1024,
            "encoder_layers": 12,
            "decoder_layers": 12,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "forced_eos_token_id": None,
        },
    ),
    "whisper-large-v3": (
        "whisper",
        {
            "vocab_size": 51866,
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "num_mel_bins": 128,
        },
    ),
    "gemma-2-2b": ("gemma2", {}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "opt-1.3b": (
        "opt",
        {
            "hidden_size": 2048,
            "word_embed_proj_dim": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
        },
    ),
    "lfm2-1.2b": (
        "lfm2",
        {
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "block_ff_dim": 12288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": [
                "full_attention" if n in (2, 5, 8, 10, 12, 14) else "conv" for n in range(16)
            ],
        },
    ),
    "qwen3-vl-2b": (
        "qwen3_vl",
        {
            "text_config": {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 151936,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5e6,
                    "mrope_section": [24, 20, 20],
                    "mrope_interleaved": True,
                },
                "max_position_embeddings": 262144,
            },
            "vision_config": {
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "out_hidden_size": 2048,
                "deepstack_visual_indexes": [5, 11, 17],
            },
            "tie_word_embeddings": True,
        },
    ),
    "gemma-3-4b": (
        "gemma3",
        {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "vocab_size": 262208,
                "sliding_window": 1024,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 896,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "mm_tokens_per_image": 256,
        },
    ),
    "qwen3.5-4b": (
        "qwen3_5",
        {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 9216,
                "num_hidden_layers": 32,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "vocab_size": 248320,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "mrope_section": [11, 11, 10],
                    "mrope_interleaved": True,
                    "partial_rotary_factor": 0.25,
                },
                "max_position_embeddings": 262144,
            },
            "vision_config": {
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "out_hidden_size": 2560,
            },
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-1.5b": (
        "falcon_h1",
        {
            "hidden_size": 2048,
            "intermediate_size": 4608,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
            "max_position_embeddings": 131072,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "vocab_size": 65536,
        },
    ),
    "mamba2-1.3b": (
        "mamba2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_heads": 64,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "vocab_size": 50288,
            "tie_word_embeddings": True,
        },
    ),
    "olmo-2-1b": (
        "olmo2",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 100352,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
        },
    ),
    "granite-3.1-2b": (
        "granite",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 49155,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "phi-4-mini": (  # with plain RoPE: longrope changes numbers, and no sizes
        "phi3",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "vocab_size": 200064,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3-3b": (
        "smollm3",
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 128256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
            "max_position_embeddings": 65536,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2-3b": (
        "starcoder2",
        {
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "vocab_size": 49152,
            "rope_parameters": {"rope_type": "default", "rope_theta": 999999.4420358813},
            "max_position_embeddings": 16384,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "pythia-1.4b": (
        "gpt_neox",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
        },
    ),
    "command-r7b": (
        "cohere2",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 256000,
            "logit_scale": 0.25,
            "sliding_window": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
            "max_position_embeddings": 132096,
            "tie_word_embeddings": True,
        },
    ),
    "glm-4-9b": (
        "glm4",
        {
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 151552,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "mixtral-8x7b": ("mixtral", {}),
    "olmoe-1b-7b": ("olmoe", {"intermediate_size": 1024}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 163840,
        },
    ),
}


def names() -> list[str]:
    """Return the names of all models."""
    return [*MODELS, *OTHERS]


def config_of(name: str, layers: int | None = None) -> PretrainedConfig:
    """Return the transformers config of a model, with fewer layers if given.

    Raises:
        SystemExit: The tables have no such model.
    """
    if name in OTHERS:
        return _other_config(name, layers)
    if name not in MODELS:
        raise SystemExit(f"no model {name!r} in scripts/configs.py; it has {', '.join(names())}")
    s = MODELS[name]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": s.rope_theta}
    if s.rope_factor is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": s.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if s.window is not None:  # layers of two kinds, with a RoPE each
        rope = {"full_attention": rope, "sliding_attention": rope | {"rope_theta": 1e4}}
    sliding = (
        {"sliding_window": s.window} if s.window is not None or s.model_type == "mistral" else {}
    )
    return AutoConfig.for_model(
        s.model_type,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=layers or s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        vocab_size=s.vocab,
        rms_norm_eps=s.eps,
        tie_word_embeddings=s.tied,
        max_position_embeddings=s.positions,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **sliding,
    )


def _other_config(name: str, layers: int | None) -> PretrainedConfig:
    model_type, fields = OTHERS[name]
    config = AutoConfig.for_model(model_type, **fields)
    if config.is_encoder_decoder:
        if layers is not None:
            config.encoder_layers = config.decoder_layers = layers
        return config  # type: ignore[no-any-return]
    text = config.get_text_config(decoder=True)
    if layers is not None:
        text.num_hidden_layers = layers
        if "layer_types" in vars(text) and text.layer_types:
            text.layer_types = _first_kinds(text.layer_types, layers)
        if hasattr(config, "vision_config"):
            _cut_vision(config.vision_config, layers)
    for each in (config, text):
        each.bos_token_id = each.eos_token_id = each.pad_token_id = None
    return config  # type: ignore[no-any-return]


def _first_kinds(kinds: Sequence[str], layers: int) -> list[str]:
    """Return the kinds of the first layers. Kinds that they lack replace the last of them."""
    first = list(kinds[:layers])
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in first][:layers]
    return first[: layers - len(missing)] + missing


def _cut_vision(config: PretrainedConfig, layers: int) -> None:
    """Cut a vision config down to so many layers. Features come from one of those left."""
    config.update({"depth" if hasattr(config, "depth") else "num_hidden_layers": layers})
    if hasattr(config, "deepstack_visual_indexes"):
        indexes = {min(n, layers - 1) for n in config.deepstack_visual_indexes}
        config.deepstack_visual_indexes = sorted(indexes)


def _kind_of(config: PretrainedConfig) -> Any:
    """Return the class that makes the model of a config."""
    if config.is_encoder_decoder:
        has_text = type(config) in AutoModelForSeq2SeqLM._model_mapping
        return AutoModelForSeq2SeqLM if has_text else AutoModelForSpeechSeq2Seq
    is_text = config.get_text_config(decoder=True) is config
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def random_model(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Return the model with random weights, which depend on the seed and the device alone.

    It never stops early.
    """
    with torch.device(device), torch.no_grad():
        torch.manual_seed(seed)
        config = config_of(name, layers)
        model = _kind_of(config).from_config(config, dtype=dtype).eval()
        for key, parameter in model.named_parameters():
            if "norm" in key and key.endswith("weight"):
                # They begin as one, or as zero if the model adds one. If all stayed so, a
                # forgotten weight would not show.
                parameter.copy_(parameter.mean() + 0.1 * torch.randn_like(parameter))
            elif key.endswith(("bias", "mm_input_projection_weight")):
                parameter.normal_(0.0, 0.02)  # Gemma's projection begins as zero and hides images
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def with_adapters(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """Return the model with a random, unmerged float32 adapter on every linear but the head."""
    import peft

    config = peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(model, config).eval().get_base_model()  # type: ignore[no-any-return]


def floor_bytes(model: PreTrainedModel, rows: int = 1) -> int:
    """Return the bytes that a step must read.

    Every weight of the text model and of the head once, and no embedding table unless it is the
    head. A decoder's keys and values of the encoder's output are there before its steps. Of a
    mixture's experts, as many as `rows` tokens choose on average if each chooses at random.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    made_once = ("encoder_attn.k_proj", "encoder_attn.v_proj")
    read = dict.fromkeys(
        p
        for name, p in model.get_decoder().named_parameters()
        if not any(x in name for x in made_once)
    )
    read.pop(table, None)
    if head is not None:
        read |= dict.fromkeys(head.parameters())
    config = model.config.get_text_config(decoder=True)
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    experts = {
        p
        for name, module in model.named_modules()
        if name.endswith(".experts")
        for p in module.parameters()
    }

    def share(p: torch.Tensor) -> float:
        return 1 - (1 - chosen / len(p)) ** rows if p in experts else 1.0

    return round(sum(p.nbytes * share(p) for p in read))
