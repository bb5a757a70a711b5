"""The pre-norm decoder layer: x + attention(norm(x)), then h + mlp(norm(h)). Its blocks are patterns of their own."""
from __future__ import annotations

from mirage_hf.match.pattern import LatentLayout, LayerLayout

LAYOUTS = (
    LayerLayout("Llama, Mistral, Qwen2, Qwen3", norm="input_layernorm", attention="self_attn",
                projections=("q_proj", "k_proj", "v_proj"), output="o_proj",
                mlp_norm="post_attention_layernorm", mlp="mlp"),
    LayerLayout("DeepSeek-V2 (Lite)", norm="input_layernorm", attention="self_attn", projections=("q_proj", "kv_a_proj_with_mqa"),
                output="o_proj", mlp_norm="post_attention_layernorm", mlp="mlp", latent=LatentLayout("kv_a_layernorm", "kv_b_proj")),
    LayerLayout("DeepSeek-V2, V3", norm="input_layernorm", attention="self_attn", projections=("q_a_proj", "kv_a_proj_with_mqa"),
                output="o_proj", mlp_norm="post_attention_layernorm", mlp="mlp",
                latent=LatentLayout("kv_a_layernorm", "kv_b_proj", "q_a_layernorm", "q_b_proj")),
)
"""The first row of which a layer has attention, its projections and MLP; else the first of which it has attention and MLP."""

EPS_NAMES = ("variance_epsilon", "eps")
"""What RMSNorm classes call their epsilon. The probe shows whether it is used as one."""

HINTS = {
    "residual_multiplier": "the layer scales what it adds to the residual (residual_multiplier)",
    "pre_feedforward_layernorm": "the layer has norms after attention and MLP too",
    "post_feedforward_layernorm": "the layer normalises after attention and MLP",
    "parallel_attn": "attention and MLP read the same norm",
}
"""Attributes or children that explain why a layer computes something else. Only wording: the probe decides."""
