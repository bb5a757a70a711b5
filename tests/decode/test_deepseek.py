"""DeepSeek-V2 and V3: multi-head latent attention over HF's latent cache.

The models have dense layers and mixtures of experts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from mirage_hf.api import optimize, restore
from mirage_hf.match.matcher import match
from mirage_hf.patterns import PATTERNS
from scripts.scripted_drafts import drafting
from tests.helpers.drafted import scripts
from tests.helpers.generate_comparison import assert_same, left_padded
from tests.helpers.tiny_models import SIZES, parted_at_a_tie, prompt, same, snapshot, twin_of

pytestmark = pytest.mark.models

slow = pytest.mark.slow  # on the main version of transformers only

LATENT = dict(
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=12,
    num_key_value_heads=4,
    num_hidden_layers=2,
    moe_intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    n_shared_experts=1,
)
DENSE = dict(first_k_dense_replace=2)
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2 Lite": ("V2", dict(q_lora_rank=None, **DENSE)),
    "V2": ("V2", dict(q_lora_rank=20, **DENSE)),
    "V2 Lite, YaRN": ("V2", dict(q_lora_rank=None, rope_parameters=YARN, **DENSE)),
    "V2, experts": ("V2", dict(q_lora_rank=None, first_k_dense_replace=1, topk_method="greedy")),
    "V3": ("V3", dict(q_lora_rank=20, **DENSE)),
    "V3, YaRN, experts": (
        "V3",
        dict(q_lora_rank=20, rope_parameters=YARN, first_k_dense_replace=1),
    ),
    "V3, halves": ("V3", dict(q_lora_rank=None, rope_interleave=False, **DENSE)),
}
FULL = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "do_sample": False,
}


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
    return {
        what: n
        for what, n in model.mirage.report.decode.items()
        if what.startswith(("step", "stock"))
    }


@slow
@pytest.mark.parametrize("kind", ["V2 Lite", "V3"])
def test_half_precision(kind: str, resolved: list[Any]) -> None:
    """Complex RoPE tables are float32, in checks as in steps.

    Kernels take the dtypes that their programs name. `Resolved` checks this.
    """
    ours = optimize(tiny(kind).bfloat16(), batch_sizes=(1, 3))
    rows = [r for r in ours.mirage.report.rows if r.pattern.startswith("mla")]
    assert rows and all(r.status == "swapped" for r in rows), str(ours.mirage.report)
    ours.generate(prompt(), do_sample=False, max_new_tokens=4)
    assert steps(ours) == {"step: all by kernels": 1}


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_logits_and_cache_are_stocks(kind: str, resolved: list[Any]) -> None:
    stock = tiny(kind)
    ours = optimize(twin_of(stock), batch_sizes=(1, 3))
    rows = [r for r in ours.mirage.report.rows if r.pattern.startswith("mla")]
    assert rows and all(r.status == "swapped" and r.error < 1e-5 for r in rows), str(
        ours.mirage.report
    )
    for given in ({"inputs": prompt()}, left_padded((4, 9, 7))):
        want, got = (m.generate(**given, **FULL, max_new_tokens=9) for m in (stock, ours))
        assert_same(want, got)
        for mine, theirs in zip(
            got.past_key_values.layers, want.past_key_values.layers, strict=True
        ):
            torch.testing.assert_close(
                (mine.keys, mine.values), (theirs.keys, theirs.values), rtol=1e-4, atol=1e-5
            )
    assert steps(ours) == {"step: all by kernels": 2}, ours.mirage.report


#: Kinds whose mechanisms are all in other kinds: both versions, both forms of the query, YaRN.
ALIKE = ("V2 Lite", "V2", "V3")


@slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.thorough) if kind in ALIKE else kind for kind in KINDS],
)
def test_tokens_are_stocks_whatever_is_drafted(kind: str, resolved: list[Any]) -> None:
    stock = tiny(kind)
    ours = optimize(twin_of(stock), batch_sizes=(1, 3), draft_tokens=(3,))
    rows = [r for r in ours.mirage.report.rows if r.pattern.startswith("mla") and r.tokens == 4]
    assert rows and all(r.status == "swapped" and r.error < 1e-5 for r in rows), rows
    for given in ({"inputs": prompt()}, left_padded((4, 9, 7))):
        given = {**given, "do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
        want = stock.generate(**given)
        for quality, script in scripts(want).items():
            with drafting(script, quality):
                got = ours.generate(**given, prompt_lookup_num_tokens=3)
            assert got.tolist() == want.tolist(), quality
    assert steps(ours) == {"step: all by kernels": 8}
    assert ours.mirage.report.decode["drafts: taken"] > 200


@slow
def test_an_assistant_with_latent_attention_drafts(resolved: list[Any]) -> None:
    stock = tiny("V3")
    ours = optimize(twin_of(stock), batch_sizes=(3,), draft_tokens=(3,), verify=False)
    helper = optimize(twin_of(stock), batch_sizes=(3,), verify=False)
    helper.generation_config.num_assistant_tokens = 3
    given = {**left_padded((4, 9, 7)), "do_sample": False, "max_new_tokens": 40}
    given |= {"pad_token_id": 0}
    want = stock.generate(**given).tolist()
    assert ours.generate(**given, assistant_model=helper).tolist() == want
    counts = ours.mirage.report.decode
    assert steps(ours) == {"step: all by kernels": 1}
    assert counts["drafts: taken"] > 0.8 * counts["drafts: drafted"]


@slow
def test_half_precision_parts_from_stock_at_ties_only(resolved: list[Any]) -> None:
    for kind in ("V2 Lite", "V3"):
        parted_at_a_tie(tiny(kind).bfloat16(), prompt(), optimize, tokens=24)


@slow
def test_the_searched_programs_are_those_of_the_model(resolved: list[Any]) -> None:
    """Two views read the weight that expands latents in its place.

    Caches are HF's, and nothing of the size of keys is made.
    """
    model = optimize(tiny("V3"), verify=False)
    programs = {p.inputs[0].name + str(len(p.inputs)): p for p in resolved}
    attention = next(p for p in resolved if any(t.name == "w_k" for t in p.inputs))
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    views = {t.name: t for t in attention.inputs if t.constant}
    assert set(views) == {"w_k", "w_v"} and all(
        t.strides[1:] == (20 * 16, 1, 16) for t in views.values()
    ), views
    assert weight.shape == (4 * 20, 16) and len(programs) > 1
    assert {t.dims[-1] for t in attention.inputs if t.dims[-2] > 100} == {
        16,
        2,
    }  # latents, and two halves of rotated keys


@slow
def test_weights_that_change_are_read_and_restore_is_exact(resolved: list[Any]) -> None:
    stock = tiny("V2 Lite")
    ours = twin_of(stock)
    before = snapshot(ours)
    optimize(ours, verify=False)
    call = dict(
        inputs=prompt(),
        do_sample=False,
        max_new_tokens=6,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert_same(stock.generate(**call), ours.generate(**call))
    for model in (stock, ours):  # in place, as an optimizer or a merge of adapters does
        with torch.no_grad():
            model.model.layers[1].self_attn.kv_b_proj.weight.mul_(-1.5)
    assert_same(stock.generate(**call), ours.generate(**call))
    assert steps(ours) == {"step: all by kernels": 2}
    for model in (stock, ours):  # new memory
        attention = model.model.layers[0].self_attn
        attention.kv_b_proj.weight = torch.nn.Parameter(attention.kv_b_proj.weight.detach() * 0.5)
    assert_same(stock.generate(**call), ours.generate(**call))
    assert steps(ours)["step: the model has changed since optimize()"] == 1
    restore(ours)
    assert (
        not hasattr(ours, "mirage")
        and {n: type(m) for n, m in ours.named_modules()} == before["classes"]
    )
    again = tiny("V3")
    first = snapshot(again)
    optimize(again, verify=False)
    assert not same(first, snapshot(again)) and same(first, snapshot(restore(again)))


def changed(kind: str, change: Any) -> Any:
    model = tiny(kind)
    for layer in model.model.layers:
        change(layer.self_attn)
    return model


NOT_OURS: dict[str, tuple[Any, str]] = {
    "a biased expansion": (
        lambda: changed(
            "V2 Lite", lambda a: setattr(a, "kv_b_proj", torch.nn.Linear(16, 80).eval())
        ),
        "kv_b_proj has a bias",
    ),
    "another child": (
        lambda: changed("V3", lambda a: setattr(a, "gate", torch.nn.Linear(3, 3))),
        "attention has gate too",
    ),
    "a hook": (
        lambda: changed("V3", lambda a: a.kv_a_layernorm.register_forward_hook(lambda *_: None)),
        "kv_a_layernorm has a forward hook",
    ),
    "a scaling that is no number": (
        lambda: changed("V2", lambda a: setattr(a, "scaling", None)),
        "attention has no scaling (None)",
    ),
}


@slow
@pytest.mark.parametrize("name", NOT_OURS)
def test_a_refused_model_says_why(name: str) -> None:
    make, reason = NOT_OURS[name]
    found = match(make(), list(PATTERNS))
    reasons = [r.reason for r in found.rejected]
    assert not any(p.pattern == "mla" for m in found.modules for p in m.parts) and any(
        reason in r for r in reasons
    ), reasons


@slow
def test_attention_that_computes_something_else_is_refused_by_the_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The structure is that of DeepSeek-V3. Only a run shows that its scores are capped."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    class Capped(v3.DeepseekV3Attention):
        def expand_kv(
            self, kv_nope: torch.Tensor, k_rot: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = super().expand_kv(kv_nope, k_rot)
            return torch.tanh(keys), values

    model = tiny("V3")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Capped
    found = match(model, list(PATTERNS), model)
    assert {p.role for m in found.modules for p in m.parts} == {"qkv", "out", "gated", "down"}
    assert all("over latents: off by" in r.reason for r in found.rejected) and found.rejected, (
        found.rejected
    )
    assert "attention is not matched" in found.causal.reason


@pytest.mark.parametrize("kind", ["V2 Lite", "V3, YaRN, experts"])
def test_every_version_of_transformers_gives_stocks_tokens(kind: str, resolved: list[Any]) -> None:
    """transformers 5.4 caches keys and values expanded.

    Steps run the model's own forward there, and the report says why.
    """
    stock = tiny(kind)
    ours = optimize(twin_of(stock), batch_sizes=(1, 2))
    for given in ({"inputs": prompt()}, left_padded((4, 9))):
        want, got = (m.generate(**given, do_sample=False, max_new_tokens=8) for m in (stock, ours))
        assert torch.equal(want, got)
    reasons = {r.reason for r in ours.mirage.report.rows if r.pattern == "mla"}
    if hasattr(stock.model.layers[0].self_attn, "expand_kv"):
        assert reasons == {""} and steps(ours) == {"step: all by kernels": 2}
    else:
        assert reasons == {
            "attention caches 4 heads of 12 and 4 heads of 12, not latents of 16 and rotated keys "
            "of 4; newer versions of transformers do"
        }
