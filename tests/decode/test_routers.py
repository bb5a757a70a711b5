"""Float32 tokens of models with each kind of router are stock's, over 128 tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

import mirage_hf as mi
from mirage_hf.trace.experts.form import ExpertsForm, form_of
from scripts.survey_configs import small_config
from tests.helpers import thorough

pytestmark = pytest.mark.models

NEW = thorough.count(128, 48)

#: Types of models by the kind of their router. Of gpt-oss and DeepSeek, mixtures alone are traced.
KINDS = {
    "softmax, normalized": "qwen3_moe",
    "softmax of the chosen, biases": "gpt_oss",
    "softmax of the chosen": "granitemoe",
    "sigmoid, bias": "minimax_m2",
    "sigmoid, bias, groups, a dense layer first": "glm4_moe",
    "sigmoid, bias, groups, latent attention": "deepseek_v3",
    "softmax, groups": "deepseek_v2",
    "softmax, bias, clamped sum": "ernie4_5_moe",
    "sigmoid of the chosen": "cohere2_moe",
    "sigmoid of the greatest, all experts": "llama4_text",
    "max twice": "phimoe",
    "a shared expert with a gate": "qwen2_moe",
}
#: Those that are tried in each run of the tests.
FEW = ("sigmoid, bias, groups, a dense layer first", "max twice", "softmax, bias, clamped sum")


@pytest.mark.parametrize("kind", KINDS if thorough.THOROUGH else FEW)
def test_tokens_are_stocks(kind: str) -> None:
    model_type = KINDS[kind]
    if model_type not in KNOWN:
        pytest.skip(f"this transformers has no {model_type}")
    if not hasattr(PreTrainedModel, "get_experts_implementation"):
        pytest.skip("this transformers runs experts of float32 in another way")
    torch.manual_seed(0)
    config = small_config(model_type)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 1
    if "groups" in kind:
        config.n_group, config.topk_group, config.num_experts_per_tok = 2, 1, 2
        config.topk_method = "group_limited_greedy"  # other types than DeepSeek-V2 ignore it
    model = AutoModelForCausalLM.from_config(config).eval()
    assert any(isinstance(form_of(m), ExpertsForm) for m in model.modules()) or "all" in kind
    for p in model.parameters():  # so that equal scores are frequent
        if p.dim() == 2 and p.shape[0] <= 16:
            p.data = (8 * p.data).round() / 8
    ids = torch.arange(1, 13).view(2, 6)
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = model.generate(ids, **options)
    mi.optimize(model, backend="cpu", batch_sizes=(2,))
    assert torch.equal(model.generate(ids, **options), wanted)
    assert sum(v for k, v in model.mirage.report.decode.items() if k.startswith("step: ")) == 1
    mi.restore(model)
