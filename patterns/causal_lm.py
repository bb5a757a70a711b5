"""A causal language model around its layers: embedding → layers → norm → head. Its last norm and head are `rms_norm_linear`."""
from __future__ import annotations

from mirage_hf.match.pattern import CausalLayout

LAYOUTS = (
    CausalLayout("Llama and all whose layers are known", backbone="model", embedding="embed_tokens", layers="layers",
                 norm="norm", rotary="rotary_emb", head="lm_head"),
)

EMBEDDING_BUFFER = "embed_scale"
"""What embedding classes call the buffer that they multiply their rows by, in their weight's dtype (Gemma)."""
EMBEDDING_MULTIPLIER = "embedding_multiplier"
"""What backbones call the number that they multiply embeddings by (Granite)."""
LOGITS_DIVISOR = "logits_scaling"
"""What configs call the number that logits are divided by (Granite)."""
LOGITS_SOFTCAP = "final_logit_softcapping"
"""What configs call the bound of logits, cap · tanh(logit / cap) (Gemma2). Whether a model does as these four say, a probe shows."""
