"""The decoder layer: h = x + m · after(attention(norm(x))), then h + m · mlp_after(mlp(mlp_norm(h))), with those norms that a family has
and a multiplier m that is 1 for most. In parallel layers the MLP is of mlp_norm(x). Its blocks are patterns of their own."""

from __future__ import annotations

from mirage_hf.patterns.schema import LatentLayout, LayerLayout

LAYOUTS = (
    LayerLayout(
        "Llama, Mistral, Qwen2, Qwen3, Granite, Gemma, SmolLM3, GLM, ERNIE 4.5, StarCoder2, StableLM, gpt-oss, Nemotron",
        norm="input_layernorm",
        attention="self_attn",
        projections=("q_proj", "k_proj", "v_proj"),
        output="o_proj",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
    LayerLayout(
        "GraniteMoe",
        norm="input_layernorm",
        attention="self_attn",
        projections=("q_proj", "k_proj", "v_proj"),
        output="o_proj",
        mlp_norm="post_attention_layernorm",
        mlp="block_sparse_moe",
    ),
    LayerLayout(
        "DeepSeek-V2 (Lite)",
        norm="input_layernorm",
        attention="self_attn",
        projections=("q_proj", "kv_a_proj_with_mqa"),
        output="o_proj",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
        latent=LatentLayout("kv_a_layernorm", "kv_b_proj"),
    ),
    LayerLayout(
        "DeepSeek-V2, V3",
        norm="input_layernorm",
        attention="self_attn",
        projections=("q_a_proj", "kv_a_proj_with_mqa"),
        output="o_proj",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
        latent=LatentLayout("kv_a_layernorm", "kv_b_proj", "q_a_layernorm", "q_b_proj"),
    ),
    LayerLayout(
        "Phi3",
        norm="input_layernorm",
        attention="self_attn",
        projections=("qkv_proj",),
        output="o_proj",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
    LayerLayout(
        "Gemma2, Gemma3",
        norm="input_layernorm",
        attention="self_attn",
        projections=("q_proj", "k_proj", "v_proj"),
        output="o_proj",
        after="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp="mlp",
        mlp_after="post_feedforward_layernorm",
    ),
    LayerLayout(
        "GLM4",
        norm="input_layernorm",
        attention="self_attn",
        projections=("q_proj", "k_proj", "v_proj"),
        output="o_proj",
        after="post_self_attn_layernorm",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
        mlp_after="post_mlp_layernorm",
    ),
    LayerLayout(
        "OLMo2, OLMo3, EXAONE4",
        norm="",
        attention="self_attn",
        projections=("q_proj", "k_proj", "v_proj"),
        output="o_proj",
        after="post_attention_layernorm",
        mlp_norm="",
        mlp="mlp",
        mlp_after="post_feedforward_layernorm",
    ),
    LayerLayout(
        "Cohere, Cohere2, StableLM (parallel)",
        norm="input_layernorm",
        attention="self_attn",
        projections=("q_proj", "k_proj", "v_proj"),
        output="o_proj",
        mlp_norm="input_layernorm",
        mlp="mlp",
        parallel=True,
    ),
    LayerLayout(
        "Phi",
        norm="input_layernorm",
        attention="self_attn",
        projections=("q_proj", "k_proj", "v_proj"),
        output="dense",
        mlp_norm="input_layernorm",
        mlp="mlp",
        parallel=True,
    ),
    LayerLayout(
        "GPT-NeoX",
        norm="input_layernorm",
        attention="attention",
        projections=("query_key_value",),
        output="dense",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
        parallel=True,
    ),
    LayerLayout(
        "GPT-NeoX (serial)",
        norm="input_layernorm",
        attention="attention",
        projections=("query_key_value",),
        output="dense",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
"""Of the rows that name all children of a layer the first whose layer a probe finds; else the first of which it has attention, its
linears and MLP; else the first of which it has attention and MLP."""

EPS_NAMES = ("variance_epsilon", "eps")
"""What norm classes call their epsilon. The probe shows whether it is used as one."""

OFFSETS = (0.0, 1.0)
"""What norm classes may add to their weight (Gemma's and Nemotron's add 1). The probe shows which one does."""

SWITCHES = ("use_parallel_residual",)
"""Attributes of layers that choose between rows. Compared before every call."""

MULTIPLIERS = ("residual_multiplier",)
"""Attributes of layers by which they scale what they add to the residual. The probe shows whether they do."""

SOFTCAPS = ("attn_logit_softcapping",)
"""Attributes of attentions that may be a bound of their scores, cap · tanh(score / cap). The probe shows whether it is used: what some
versions' SDPA does with it is nothing."""

HEAD_DIMS = ("head_dim", "head_size")
"""What attentions call the width of a head."""

SINKS = "sinks"
"""What attentions call the logit of each head that takes a part of its softmax and gives nothing (gpt-oss). The probe shows whether it is
used."""

CACHES = ("past_key_values", "layer_past")
"""What layers call the cache that they are given."""

CLIPS = ("clip_qkv",)
"""Attributes of attentions, or of their configs, that bound what the projections give. No probe is sure to reach a bound, and attention
by kernels has none."""
