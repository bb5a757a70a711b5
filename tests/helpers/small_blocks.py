"""Small sizes for the blocks of scripts/block_rows.py."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, dict[str, Any]] = {
    "int4_linear": {"k": 256, "n": 32},
    "norm_linear": dict(k=32, n=24),
    "norm_linear_6144": dict(k=32, n=40),
    "gated_mlp": dict(k=32, n=24),
    "lora": dict(k=32, n=24, r=4),
    "lora_256": dict(k=16, n=24, r=4),
    "gqa_decode": dict(keys=24, d=16),
    "gqa_paper": dict(q=5, keys=24, d=16),
    "qk_norm_attention": dict(keys=24, d=16),
    "mla_decode": dict(heads=2, keys=24, latent=16, nope=8, rope=4, value=8),
    "ntrans": dict(n=40),
    "gated_delta": dict(key_heads=16, key=8, value=16),
    "mamba2": dict(heads=4, head_dim=8, state=16),
}
