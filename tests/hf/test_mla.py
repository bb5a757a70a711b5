"""Multi-head latent attention in models: DeepSeek-V2 and V3, dense layers and mixtures of experts, by kernels over HF's latent cache."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from decoding import assert_same, left_padded
from swapping import SIZES, prompt, same, snapshot, twin_of

from mirage_hf.api import optimize, restore
from mirage_hf.match.matcher import match
from mirage_hf.patterns import PATTERNS

pytestmark = pytest.mark.slow  # on the main version of transformers only

LATENT = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12, num_key_value_heads=4, num_hidden_layers=2,
              moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1)
DENSE = dict(first_k_dense_replace=2)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0, "mscale": 0.7,
        "mscale_all_dim": 0.7}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2 Lite": ("V2", dict(q_lora_rank=None, **DENSE)), "V2": ("V2", dict(q_lora_rank=20, **DENSE)),
    "V2 Lite, YaRN": ("V2", dict(q_lora_rank=None, rope_parameters=YARN, **DENSE)),
    "V2, experts": ("V2", dict(q_lora_rank=None, first_k_dense_replace=1, topk_method="greedy")),
    "V3": ("V3", dict(q_lora_rank=20, **DENSE)), "V3, YaRN, experts": ("V3", dict(q_lora_rank=20, rope_parameters=YARN, first_k_dense_replace=1)),
    "V3, halves": ("V3", dict(q_lora_rank=None, rope_interleave=False, **DENSE))}
FULL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": False}


def tiny(kind: str, **changes: Any) -> Any:
    version, more = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(tf, f"Deepseek{version}Config")(**{**SIZES, **LATENT, **more, **changes})
    model = getattr(tf, f"Deepseek{version}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
            elif p.dim() == 3:  # experts
                p.normal_(std=0.15)
    model.generation_config.eos_token_id = None
    return model


def steps(model: Any) -> dict[str, int]:
    return {what: n for what, n in model.mirage.report.decode.items() if what.startswith(("step", "stock"))}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_logits_and_cache_are_stocks(kind: str, resolved: list[Any]) -> None:
    stock = tiny(kind)
    ours = optimize(twin_of(stock), batch_sizes=(1, 3))
    rows = [r for r in ours.mirage.report.rows if r.pattern.startswith("mla")]
    assert rows and all(r.status == "swapped" and r.error < 1e-5 for r in rows), str(ours.mirage.report)
    for given in ({"inputs": prompt()}, left_padded((4, 9, 7))):
        want, got = (m.generate(**given, **FULL, max_new_tokens=9) for m in (stock, ours))
        assert_same(want, got)
        for mine, theirs in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            torch.testing.assert_close((mine.keys, mine.values), (theirs.keys, theirs.values), rtol=1e-4, atol=1e-5)
    assert steps(ours) == {"step: all by kernels": 2}, ours.mirage.report
