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

#: What embedding classes call the buffer that they multiply their rows by (Gemma).
EMBEDDING_BUFFER = "embed_scale"

#: What backbones call the number that they multiply embeddings by (Granite).
EMBEDDING_MULTIPLIER = "embedding_multiplier"

#: What configs call the number that logits are divided by (Granite).
LOGITS_DIVISOR = "logits_scaling"

#: What models call the number that they multiply logits by (Cohere).
LOGITS_MULTIPLIER = "logit_scale"

#: What configs call the bound of logits, cap · tanh(logit / cap) (Gemma2).
LOGITS_SOFTCAP = "final_logit_softcapping"
