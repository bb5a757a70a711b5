"""The blocks that optimize() looks for, one small declarative file each."""

from mirage_hf.patterns.attention import ATTENTION
from mirage_hf.patterns.gated_mlp import GATED_MLP
from mirage_hf.patterns.linear_residual import LINEAR_RESIDUAL
from mirage_hf.patterns.lora import LORA
from mirage_hf.patterns.mla import MLA, MLA_APPEND, MLA_QUERY
from mirage_hf.patterns.mlp_up import MLP_UP
from mirage_hf.patterns.rms_norm_linear import RMS_NORM_LINEAR

#: The patterns that users can choose, by name.
PATTERNS = {
    p.name: p for p in (RMS_NORM_LINEAR, ATTENTION, MLA, GATED_MLP, MLP_UP, LINEAR_RESIDUAL, LORA)
}

#: The patterns whose kernels run only in steps of `generate`, because they are over our cache.
IN_STEPS = frozenset(p.name for p in (ATTENTION, MLA, MLA_APPEND, MLA_QUERY))
