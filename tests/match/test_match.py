"""Matching: some families match in full, others in the parts that a probe confirms.

Every rejection has a reason.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import mirage_hf as mi
from mirage_hf.errors import Rejected
from mirage_hf.layers.rope import Rope
from mirage_hf.match.matcher import match
from mirage_hf.match.matches import CausalMatch
from mirage_hf.match.probe import Probes
from mirage_hf.patterns import PATTERNS, decoder_layer
from tests.helpers.tiny_models import CENTRED, FOUR, OTHERS, SIZES, tiny

pytestmark = pytest.mark.models

ALL = list(PATTERNS)
WHOLE = ["qkv", "attention", "out", "gated", "down"]


def found(model: nn.Module, patterns: list[str] = ALL) -> dict[str, list[str]]:
    return {m.name: [p.role for p in m.parts] for m in match(model, patterns)[0]}


def reasons(model: nn.Module, module: str) -> str:
    return "; ".join(r.reason for r in match(model, ALL)[1] if r.name == module)


@pytest.mark.parametrize("family", FOUR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_four_families_match_in_full(family: str, dtype: torch.dtype) -> None:
    model = tiny(family, dtype=dtype)
    assert found(model) == {f"model.layers.{i}": WHOLE for i in range(3)}
    parts = {p.role: p for p in match(model, ALL).modules[0].parts}
    sizes, attention = (dict(parts[role].block.sizes) for role in ("qkv", "attention"))
    assert (
        sizes["n"] == (32, 16, 16)
        and sizes["dtype"] is dtype
        and sizes["bias"] is (family == "qwen2")
    )
    assert attention == dict(
        kv_heads=2,
        group=2,
        head_dim=8,
        scale=8**-0.5,
        norm="rms" if family == "qwen3" else "",
        eps=1e-6,
        offset=0.0,
        rope="halves",
        rotary=8,
        rope_dtype=dtype,
        softcap=None,
        sinks=False,
        norm_bias=False,
        packing="parts",
        dtype=dtype,
    )
    assert parts["attention"].weights == (
        (("self_attn.q_norm", "weight"), ("self_attn.k_norm", "weight"))
        if family == "qwen3"
        else ()
    )


SAID: dict[str, dict[str, dict[str, Any]]] = {
    "granite": {
        "attention": dict(scale=0.3),
        "out": dict(scale=0.22, norm=False),
        "head": dict(scale=1 / 3),
    },
    "gemma": {
        "qkv": dict(offset=1.0),
        "gated": dict(offset=1.0, norm=True, activation="gelu_tanh"),
        "head": dict(offset=1.0),
    },
    "gemma2": {
        "qkv": dict(offset=1.0),
        "out": dict(norm=True, offset=1.0),
        "down": dict(norm=True, offset=1.0),
        "head": dict(softcap=30.0),
    },
    "gemma3": {
        "attention": dict(norm="rms", offset=1.0, softcap=None),
        "down": dict(norm=True, offset=1.0),
        "head": dict(softcap=None),
    },
    "olmo2": {
        "qkv": dict(norm=False),
        "attention": dict(norm="rms of all heads", rope_dtype=torch.float32),
        "out": dict(norm=True, offset=0.0),
        "gated": dict(norm=False),
    },
    "phi3": {
        "qkv": dict(n=(64,)),
        "attention": dict(rotary=4, kv_heads=2, group=2),
        "gated": dict(n=48),
    },
}
"""What the blocks of families are, beside the sizes."""


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_families_match_in_full(family: str, dtype: torch.dtype) -> None:
    model = tiny(family, dtype=dtype, num_hidden_layers=2)
    matches = match(model, ALL, model)
    assert {m.name: [p.role for p in m.parts] for m in matches.modules} == {
        f"model.layers.{i}": WHOLE for i in range(2)
    }
    assert isinstance(matches.causal, CausalMatch), matches.causal
    sizes = {p.role: dict(p.block.sizes) for p in (*matches.modules[0].parts, matches.causal.head)}
    for role, said in SAID[family].items():
        assert said.items() <= sizes[role].items(), (role, sizes[role])
    scale = {
        "granite": 12.0,
        **dict.fromkeys(("gemma", "gemma2", "gemma3"), float(torch.tensor(32**0.5).to(dtype))),
    }
    assert matches.causal.embedding_scale(dtype) == scale.get(family, 1.0)
    assert set(matches.causal.rope_kinds) == (
        {"full_attention", "sliding_attention"} if family == "gemma3" else {""}
    )


LAYER_NORM = dict(norm=True, centred=True, norm_bias=True)
WITHOUT_BIAS = {**LAYER_NORM, "norm_bias": False}
CENTRED_SAID: dict[str, dict[str, dict[str, Any]]] = {
    "starcoder2": {
        "qkv": dict(bias=True, **LAYER_NORM),
        "out": dict(bias=True),
        "up": dict(activation="gelu_tanh", **LAYER_NORM),
    },
    "stablelm": {
        "attention": dict(rotary=4, rope="halves"),
        "gated": LAYER_NORM,
        "head": LAYER_NORM,
    },
    "cohere": {
        "attention": dict(rope="pairs"),
        "gated": WITHOUT_BIAS,
        "head": dict(scale=0.25, **WITHOUT_BIAS),
    },
    "cohere, heads normed": {"attention": dict(rope="pairs", norm="layer", norm_bias=False)},
    "cohere2": {"attention": dict(rope=""), "head": dict(scale=0.0625)},
    "gpt_neox": {
        "qkv": dict(n=(96,)),
        "attention": dict(packing="heads", rotary=4),
        "up": dict(activation="gelu", bias=True),
    },
    "gpt_neox, serial": {"attention": dict(packing="heads")},
    "phi": {
        "attention": dict(rotary=4),
        "up": dict(activation="gelu_tanh"),
        "head": dict(bias=True, **LAYER_NORM),
    },
    "nemotron": {
        "qkv": dict(offset=1.0, **LAYER_NORM),
        "up": dict(activation="relu squared", bias=False),
    },
    "arcee": {
        "qkv": dict(norm=True, centred=False),
        "up": dict(activation="relu squared", centred=False),
    },
}
PARALLEL = ("cohere", "cohere2", "gpt_neox", "phi")
MORE_OF = {"heads normed": dict(use_qk_norm=True), "serial": dict(use_parallel_residual=False)}


@pytest.mark.parametrize("name", CENTRED_SAID)
def test_families_with_layer_norm_or_without_a_gate_match_in_full(name: str) -> None:
    family, _, more = name.partition(", ")
    model = tiny(family, dtype=torch.bfloat16, num_hidden_layers=1, **MORE_OF.get(more, {}))
    if family == "nemotron" and "rotary_emb" in model.model.layers[0].self_attn._modules:
        pytest.skip(
            "attention of transformers 5.4 has a rotary embedding of its own and no scaling"
        )
    matches = match(model, ALL, model)
    (found,) = matches.modules
    gate = "gated" if "gated" in CENTRED_SAID[name] or family in ("cohere", "cohere2") else "up"
    assert [p.role for p in found.parts] == [
        "qkv",
        "attention",
        "out",
        gate,
        "down",
    ] and not matches.rejected
    assert found.layer_layout.parallel == (family in PARALLEL and more != "serial")
    assert isinstance(matches.causal, CausalMatch), matches.causal
    assert matches.causal.rope.order == ("pairs" if family in ("cohere", "cohere2") else "halves")
    sizes = {p.role: dict(p.block.sizes) for p in (*found.parts, matches.causal.head)}
    for role, said in CENTRED_SAID[name].items():
        assert said.items() <= sizes[role].items(), (role, sizes[role])
    assert {family for family, _, _ in (n.partition(", ") for n in CENTRED_SAID)} == {
        *CENTRED,
        "arcee",
    }


def test_gpt_oss_matches_except_its_experts() -> None:
    model = tiny("gpt_oss", num_hidden_layers=2)
    matches = match(model, ALL, model)
    assert [[p.role for p in m.parts] for m in matches.modules] == [["qkv", "attention", "out"]] * 2
    assert isinstance(matches.causal, CausalMatch) and matches.causal.rope == Rope(
        8, torch.float32, "once"
    )
    attention = matches.modules[0].parts[1]
    assert dict(attention.block.sizes)["sinks"] is True and attention.weights == (
        ("self_attn", "sinks"),
    )
    model.config._attn_implementation = (
        "flash_attention_2"  # no probe can tell what it does with sinks
    )
    assert (
        "a probe cannot tell whether the sinks are used with flash_attention_2 attention"
        in reasons(model, "model.layers.0")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "helium",
        "seed_oss",
        "ministral",
        "jais2",
        "cwm",
        "qwen3_moe",
        "glm4_moe",
        "ernie4_5_moe",
        "granitemoe",
        "flex_olmo",
        "solar_open",
        "cohere2_moe",
    ],
)
def test_families_that_rows_of_others_describe(family: str) -> None:
    config = AutoConfig.for_model(family, **{**SIZES, "num_hidden_layers": 1, "head_dim": 8})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    matches = match(model, ALL, model)
    assert isinstance(matches.causal, CausalMatch), matches
    assert not matches.rejected or {r.reason.partition(" (")[0] for r in matches.rejected} == {
        "has no gate_proj",
        "has no down_proj",
    }


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("stablelm", dict(qk_layernorm=True), "attention has q_layernorm, k_layernorm too"),
        ("phi", dict(qk_layernorm=True), "attention has q_layernorm, k_layernorm too"),
    ],
)
def test_norms_of_heads_that_are_not_known_leave_attention_stock(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    model = tiny(family, num_hidden_layers=1, **changes)
    assert "attention" not in found(model)["model.layers.0"] and reason in reasons(
        model, "model.layers.0"
    )


@pytest.mark.parametrize("change", ["mean", "bias"])
def test_the_probe_sees_another_layer_norm(change: str) -> None:
    model = tiny("starcoder2", num_hidden_layers=1)
    norm = model.model.layers[0].input_layernorm

    class Other(type(norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (
                0.01 * x.mean(-1, keepdim=True) if change == "mean" else -0.1 * self.bias
            )

    norm.__class__ = Other
    assert "qkv" not in found(model)["model.layers.0"]
    assert (
        "input_layernorm (Other) is not (x − mean(x)) / sqrt(var(x) + eps) · w + b: off by"
        in reasons(model, "model.layers.0")
    )


def test_a_softcap_is_what_the_installed_attention_makes_of_it() -> None:
    model = tiny("gemma2", attn_implementation="eager", num_hidden_layers=1)
    attention = next(p for p in match(model, ALL).modules[0].parts if p.role == "attention")
    assert dict(attention.block.sizes)["softcap"] == 50.0
    if not model._supports_sdpa:
        return
    model.set_attn_implementation("sdpa")  # some versions ignore it
    x = torch.randn(1, 3, 32)
    rope = model.model.rotary_emb(x, torch.arange(3)[None])
    seen = []
    for cap in (50.0, 0.5):
        model.model.layers[0].self_attn.attn_logit_softcapping = cap
        seen.append(
            model.model.layers[0].self_attn(x, position_embeddings=rope, attention_mask=None)[0]
        )
    attention = next(p for p in match(model, ALL).modules[0].parts if p.role == "attention")
    assert dict(attention.block.sizes)["softcap"] == (None if torch.equal(*seen) else 0.5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_backends_match(implementation: str) -> None:
    assert len(found(tiny("qwen3", attn_implementation=implementation))) == 3


@pytest.mark.parametrize("bound", [None, 100.0])
def test_bounds_that_no_probe_reaches_are_refused(bound: float | None) -> None:
    """OLMoE's config has such a bound.

    Transformers 5.4.0 cannot make one (it takes no bool for `tie_word_embeddings`).
    """
    model = tiny("llama", num_hidden_layers=1)
    model.config.clip_qkv = bound
    matches = match(model, ALL, model)
    assert ("attention" in [p.role for p in matches.modules[0].parts]) == (bound is None)
    assert (bound is None) == isinstance(matches.causal, CausalMatch)
    if bound is not None:
        assert "attention clips what its projections give (clip_qkv 100.0)" in reasons(
            model, "model.layers.0"
        )


def test_patterns_can_be_chosen() -> None:
    assert found(tiny("llama"), ["gated_mlp"])["model.layers.0"] == ["gated"]
    assert found(tiny("llama"), ["lora"]) == {}


@pytest.mark.parametrize(
    ("family", "parts", "reason"),
    [
        (
            "mixtral",
            {"model.layers.0": ["qkv", "attention", "out"]},
            "has no gate_proj (it has gate, experts)",
        ),
    ],
)
def test_other_families_match_in_part_or_say_why_not(
    family: str, parts: dict[str, list[str]], reason: str
) -> None:
    model = tiny(family, num_hidden_layers=1)
    assert found(model) == parts
    assert reason in reasons(model, "model.layers.0")


def test_a_foreign_norm_before_the_mlp_stays() -> None:
    model = tiny("llama", num_hidden_layers=1)
    norm = model.model.layers[0].post_attention_layernorm

    class Other(type(norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.1

    norm.__class__ = Other
    gated = next(p for p in match(model, ALL).modules[0].parts if p.role == "gated")
    assert dict(gated.block.sizes)["norm"] is False and found(model)["model.layers.0"] == [
        "qkv",
        "out",
        "gated",
        "down",
    ]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("gelu", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
        ("relu", "relu"),
    ],
)
def test_activations_are_known_by_what_they_compute(name: str, op: str) -> None:
    gated = next(
        p for p in match(tiny("llama", hidden_act=name), ALL)[0][0].parts if p.role == "gated"
    )
    assert dict(gated.block.sizes)["activation"] == op


@pytest.mark.parametrize("name", ["mish", "gelu_10"])
def test_an_unknown_activation_is_refused(name: str) -> None:
    model = tiny("llama", hidden_act=name)
    assert found(model)["model.layers.0"] == ["qkv", "out", "down"]
    assert "is none of silu, gelu, gelu_tanh, relu, relu squared" in reasons(
        model, "model.layers.0"
    )


def test_the_probe_sees_differences_that_the_structure_hides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("llama")
    layer, stock = type(model.model.layers[0]), type(model.model.layers[0]).forward

    class Twice(layer):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return stock(self, hidden_states, *args, **kwargs) + 0.05 * hidden_states

    model.model.layers[1].__class__ = Twice
    assert set(found(model)) == {"model.layers.0", "model.layers.1.mlp", "model.layers.2"}
    assert (
        "the layer computes something else than x + attention(norm(x)), then h + mlp(norm(h)) with"
        in reasons(model, "model.layers.1")
    )


def test_the_probe_sees_an_epsilon_that_is_not_used_as_one() -> None:
    model = tiny("llama")
    norm = model.model.layers[0].input_layernorm

    class Other(type(norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 3e-6)

    norm.__class__ = Other
    assert found(model)["model.layers.0"] == ["out", "gated", "down"]


def test_the_probe_sees_another_attention() -> None:
    model = tiny("llama")
    attention = model.model.layers[0].self_attn

    class Reads(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            out, weights = super().forward(hidden_states, **kwargs)
            return out * hidden_states.mean(
                -1, keepdim=True
            ), weights  # a gate that reads the normed input

    attention.__class__ = Reads
    assert "model.layers.0" not in found(model)


CHANGES = {
    "q_proj has a forward hook": lambda layer: layer.self_attn.q_proj.register_forward_hook(
        lambda *a: None
    ),
    "q_proj has a forward of its own": lambda layer: setattr(
        layer.self_attn.q_proj, "forward", layer.self_attn.q_proj.forward
    ),
    "q_proj is torch's NonDynamicallyQuantizableLinear": lambda layer: setattr(
        layer.self_attn, "q_proj", nn.modules.linear.NonDynamicallyQuantizableLinear(32, 32)
    ),
    "differ in input size or bias": lambda layer: setattr(
        layer.self_attn.q_proj, "bias", nn.Parameter(torch.zeros(32))
    ),
    "q_proj has a weight of float64": lambda layer: layer.self_attn.q_proj.double(),
    "q_proj has a weight that is not contiguous": lambda layer: setattr(
        layer.self_attn.q_proj,
        "weight",
        nn.Parameter(layer.self_attn.q_proj.weight.detach().t().contiguous().t()),
    ),
    "a weight is bfloat16 on cpu, others are float32": lambda layer: (
        layer.self_attn.k_proj.bfloat16()
    ),
    "its queries have 64 elements, but o_proj reads 32": lambda layer: setattr(
        layer.self_attn, "q_proj", nn.Linear(32, 64, bias=False).eval()
    ),
    "has no q_proj": lambda layer: delattr(layer.self_attn, "q_proj"),
    "self_attn has a forward hook": lambda layer: layer.self_attn.register_forward_pre_hook(
        lambda *a: None
    ),
    "the layer has a forward of its own": lambda layer: setattr(layer, "forward", layer.forward),
    "mlp is in training mode": lambda layer: layer.mlp.train(),
    "q_proj is torch's ParametrizedLinear": lambda layer: nn.utils.parametrizations.weight_norm(
        layer.self_attn.q_proj
    ),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_every_rejection_names_its_reason(reason: str) -> None:
    model = tiny("llama")
    CHANGES[reason](model.model.layers[1])
    assert reason in reasons(model, "model.layers.1")
    assert not {"qkv", "attention"} & set(found(model).get("model.layers.1", []))
    assert found(model)["model.layers.0"] == WHOLE


def test_output_capture_hooks_do_not_count() -> None:
    model = tiny("llama")
    model(torch.tensor([[3, 4]]), output_hidden_states=True, output_attentions=True)
    assert any(m._forward_hooks for m in model.modules())
    assert len(found(model)) == 3


def test_matching_leaves_the_model_and_the_random_state_alone() -> None:
    model = tiny("qwen3")
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    match(model, ALL)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_alike_layers_share_one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[Any] = []
    once = Probes.once

    def counting(self: Probes, key: Any, probe: Any) -> Any:
        def run() -> Any:
            probed.append(key)
            return probe()

        return once(self, key, run)

    monkeypatch.setattr(Probes, "once", counting)
    match(tiny("llama", num_hidden_layers=5), ALL)
    assert sum(key[0] == "layer" for key in probed) == 1


def test_steps_without_a_matched_layer_say_so() -> None:
    model = tiny("llama", num_hidden_layers=1)
    model.model.layers[0].mlp.train()
    said = match(model, ALL, model)
    assert not said.modules and said.causal == Rejected("layers.0 is not matched")
    assert match(model, ["gated_mlp"], model).causal == Rejected("no pattern asked for")


def test_a_rejection_is_a_value() -> None:
    assert Rejected("x") == Rejected("x") and Rejected("x").reason == "x"


def test_the_documented_row_for_a_new_architecture_works(monkeypatch):
    class Layer(nn.Module):
        def __init__(self, config, index):
            super().__init__()
            self.ln1, self.attn = (
                modeling_llama.LlamaRMSNorm(config.hidden_size),
                modeling_llama.LlamaAttention(config, index),
            )
            self.ln2, self.ffn = (
                modeling_llama.LlamaRMSNorm(config.hidden_size),
                modeling_llama.LlamaMLP(config),
            )

        def forward(self, hidden_states, **kwargs):
            h = hidden_states + self.attn(self.ln1(hidden_states), **kwargs)[0]
            return h + self.ffn(self.ln2(h))

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
    )
    model = LlamaForCausalLM(config)
    model.model.layers = nn.ModuleList([Layer(config, 0)])
    model.eval()
    monkeypatch.setattr(decoder_layer, "LAYOUTS", decoder_layer.LAYOUTS)
    assert {r.pattern for r in mi.optimize(model, dry_run=True).rows} == {"gated_mlp"}
    text = (Path(__file__).parents[2] / "docs" / "new-architecture.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], {"mi": mi, "model": model})
    assert {"rms_norm_linear", "attention", "linear_residual"} < {
        r.pattern for r in mi.optimize(model, dry_run=True).rows
    }
