"""The decoder layer.

It computes h = x + m · after(attention(norm(x))), then h + m · mlp_after(mlp(mlp_norm(h))).

Each family has some of these norms, and for most the multiplier m is 1. In parallel layers the MLP
reads mlp_norm(x). The blocks of a layer are patterns of their own.
"""

from __future__ import annotations

from mirage_hf.patterns.schema import LatentLayout, LayerLayout

#: If several layouts name all children of a layer, the first that passes the probe is taken.
LAYOUTS = (
    LayerLayout(
        "Llama, Mistral, Qwen2, Qwen3, Granite, Gemma, SmolLM3, GLM, ERNIE 4.5, StarCoder2, "
        "StableLM, gpt-oss, Nemotron",
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

#: The names of the epsilon in norm classes. A probe shows whether it is used as one.
EPS_NAMES = ("variance_epsilon", "eps")

#: What norm classes may add to their weight (Gemma and Nemotron: 1). A probe shows which it is.
OFFSETS = (0.0, 1.0)

#: Attributes of layers that choose between layouts. They are compared before every call.
SWITCHES = ("use_parallel_residual",)

#: Attributes of layers that may be a factor of their additions to the residual. A probe shows
#: whether they are.
MULTIPLIERS = ("residual_multiplier",)

#: Attributes of attention that may be a bound of its scores, cap · tanh(score / cap). A probe shows
#: whether it is used: the SDPA attention of some versions ignores it.
SOFTCAPS = ("attn_logit_softcapping",)

#: The names of the number of elements of a head, in attention.
HEAD_DIMS = ("head_dim", "head_size")

#: The name of the sinks in attention (gpt-oss). A sink is a logit of a head that takes a part of
#: its softmax and has no value. A probe shows whether it is used.
SINKS = "sinks"

#: The names of the cache among the arguments of layers.
CACHES = ("past_key_values", "layer_past")

#: Attributes of attention, or of its config, that clip the projections. A probe might not reach the
#: bound, and attention by kernels does not clip.
CLIPS = ("clip_qkv",)
