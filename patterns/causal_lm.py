"""A causal language model around its layers: embedding → layers → norm → head.

Its last norm and head are a block of the pattern `rms_norm_linear`.
"""

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

#: Attributes of configs that decide which layers a forward calls: their number, and the kind of
#: each. They are compared before every call.
OF_LAYERS = ("num_hidden_layers", "layer_types")

# Further factors and bounds of embeddings and logits. A probe shows whether a model applies them.

#: The name of the buffer by which embedding classes multiply their rows (Gemma).
EMBEDDING_BUFFER = "embed_scale"

#: The name of the number by which backbones multiply embeddings (Granite).
EMBEDDING_MULTIPLIER = "embedding_multiplier"

#: The name in configs of the number by which logits are divided (Granite).
LOGITS_DIVISOR = "logits_scaling"

#: The name of the number by which models multiply logits (Cohere).
LOGITS_MULTIPLIER = "logit_scale"

#: The name in configs of the bound of logits, cap · tanh(logit / cap) (Gemma2).
LOGITS_SOFTCAP = "final_logit_softcapping"
