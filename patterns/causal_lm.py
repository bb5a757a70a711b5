"""A causal language model around its layers: embedding → layers → norm → head. Its last norm and head are `rms_norm_linear`."""
from __future__ import annotations

from mirage_hf.match.pattern import CausalLayout

LAYOUTS = (
    CausalLayout("Llama, Mistral, Qwen2, Qwen3", backbone="model", embedding="embed_tokens", layers="layers", norm="norm",
                 rotary="rotary_emb", head="lm_head"),
)
