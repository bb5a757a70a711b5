"""A causal language model around its layers: embedding → layers → norm → head. Its last norm and head are `rms_norm_linear`."""

from __future__ import annotations

from mirage_hf.patterns.schema import CausalLayout

LAYOUTS = (
    CausalLayout(
        "Llama and most whose layers are known",
        backbone="model",
        embedding="embed_tokens",
        layers="layers",
        norm="norm",
        rotary="rotary_emb",
        head="lm_head",
    ),
    CausalLayout(
        "Phi",
        backbone="model",
        embedding="embed_tokens",
        layers="layers",
        norm="final_layernorm",
        rotary="rotary_emb",
        head="lm_head",
    ),
    CausalLayout(
        "GPT-NeoX",
        backbone="gpt_neox",
        embedding="embed_in",
        layers="layers",
        norm="final_layer_norm",
        rotary="rotary_emb",
        head="lm_head",
    ),
    CausalLayout(
        "GPT-NeoX of transformers 5.4",
        backbone="gpt_neox",
        embedding="embed_in",
        layers="layers",
        norm="final_layer_norm",
        rotary="rotary_emb",
        head="embed_out",
    ),
)

OF_LAYERS = ("num_hidden_layers", "layer_types")
"""What configs say of the layers that a forward calls: how many, and of which kind each is. Compared before every call."""

EMBEDDING_BUFFER = "embed_scale"
"""What embedding classes call the buffer that they multiply their rows by, in their weight's dtype (Gemma)."""
EMBEDDING_MULTIPLIER = "embedding_multiplier"
"""What backbones call the number that they multiply embeddings by (Granite)."""
LOGITS_DIVISOR = "logits_scaling"
"""What configs call the number that logits are divided by (Granite)."""
LOGITS_MULTIPLIER = "logit_scale"
"""What models call the number that they multiply logits by (Cohere)."""
LOGITS_SOFTCAP = "final_logit_softcapping"
"""What configs call the bound of logits, cap · tanh(logit / cap) (Gemma2). Whether a model does as these five say, a probe shows."""
