"""Models that change after optimize(): steps by kernels, or the model's own forward.

Tokens are those of a stock model with the same change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention

from mirage_hf.api import optimize
from mirage_hf.decode.model_fingerprint import take_fingerprint
from tests.helpers.generate_comparison import left_padded
from tests.helpers.step_pairs import (
    CHANGED,
    FULL,
    GREEDY,
    KERNELS,
    Capped,
    ScaledEmbedding,
    agree,
    generated,
    no_kernels,
    pair,
    steps,
    stocks,
)
from tests.helpers.tiny_models import prompt, tiny

# Not run with other versions of transformers: there test_optimize.py generates too.
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("many_samples")]


def test_the_numbers_of_a_model_are_read_alike_whatever_other_models_were_read() -> None:
    first, second = (tiny("llama") for _ in range(2))
    first.model.layers[0].mlp.note, second.model.layers[0].mlp.number = (
        "no number",
        3,
    )  # as many attributes, with other names
    seen = take_fingerprint(second).facts
    take_fingerprint(first)
    assert take_fingerprint(second).facts == seen
    second.model.layers[0].mlp.number = 4
    assert take_fingerprint(second).facts != seen


def _norm(m: Any) -> None:
    m.model.norm = copy.deepcopy(m.model.norm)
    m.model.norm.weight.data.mul_(torch.linspace(-2, 2, 32))


def _layer_norm(m: Any) -> None:
    m.model.layers[1].input_layernorm = copy.deepcopy(m.model.layers[1].input_layernorm)
    m.model.layers[1].input_layernorm.weight.data.mul_(3)


def _data(m: Any) -> None:
    m.model.layers[0].self_attn.k_proj.weight.data = (
        2 * m.model.layers[0].self_attn.k_proj.weight.data
    )


def _embedding_data(m: Any) -> None:
    m.model.embed_tokens.weight.data = m.model.embed_tokens.weight.data.flip(0).contiguous()


def _head(m: Any) -> None:
    m.lm_head.weight = nn.Parameter(m.lm_head.weight.detach().flip(0).contiguous())


def _assign(m: Any) -> None:
    m.load_state_dict({k: v.flip(-1).contiguous() for k, v in m.state_dict().items()}, assign=True)


def _resize(m: Any) -> None:
    torch.manual_seed(3)
    m.resize_token_embeddings(112)


def _hook(m: Any) -> None:
    m.model.layers[1].register_forward_hook(lambda module, args, out: 2 * out)


def _head_hook(m: Any) -> None:
    m.lm_head.register_forward_hook(lambda module, args, out: -out)


def _forward(m: Any) -> None:
    linear = m.model.layers[1].self_attn.v_proj
    linear.forward = lambda x: 2 * nn.functional.linear(x, linear.weight)


def _norm_forward(m: Any) -> None:
    norm = m.model.norm
    norm.forward = lambda x: type(norm).forward(norm, x).flip(-1)


def _class(m: Any) -> None:
    m.model.layers[1].self_attn.__class__ = Capped


def _embedding_class(m: Any) -> None:
    m.model.embed_tokens.__class__ = ScaledEmbedding


def _layer_gone(m: Any) -> None:
    del m.model.layers[2]
    m.config.num_hidden_layers = 2


def _rotary(m: Any) -> None:
    m.model.rotary_emb = copy.deepcopy(m.model.rotary_emb)
    m.model.rotary_emb.inv_freq.mul_(0.3)


def _layer_epsilon(m: Any) -> None:
    m.model.layers[1].post_attention_layernorm.variance_epsilon = 0.5


def _epsilon(m: Any) -> None:
    m.model.norm.variance_epsilon = 5.0


def _scaling(m: Any) -> None:
    m.model.layers[1].self_attn.scaling *= 4


def _eager(m: Any) -> None:
    m.set_attn_implementation("eager")


def _lora(m: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    m.add_adapter(
        peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
        "late",
    )
    m.eval()


def _late_head(m: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False), m
    )
    m.eval()


def _train(m: Any) -> None:
    m.train()


def _in_place(m: Any) -> None:
    m.load_state_dict({k: v.flip(-1) for k, v in m.state_dict().items()})


def _scale_in_place(m: Any) -> None:
    m.model.embed_tokens.embed_scale.mul_(0.3)


def _set(path: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda m: setattr(m.get_submodule(path), name, value)


def _config(m: Any) -> None:
    m.config = copy.deepcopy(m.config)
    m.config.final_logit_softcapping = 0.5


def _backbones_config(m: Any) -> None:
    m.model.config = copy.deepcopy(m.config)
    m.model.config.num_hidden_layers = 1


OF_FAMILIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "granite, residual": (
        _set("model.layers.1", "residual_multiplier", 0.7),
        "a residual_multiplier was changed",
    ),
    "granite, embedding": (
        _set("model", "embedding_multiplier", 2),
        "a embedding_multiplier was changed",
    ),
    "granite, logits": (
        lambda m: setattr(m.config, "logits_scaling", 0.5),
        "a logits_scaling was changed",
    ),
    "gemma2, logits": (
        lambda m: setattr(m.config, "final_logit_softcapping", 2.0),
        "a final_logit_softcapping was changed",
    ),
    "gemma2, scores": (
        _set("model.layers.0.self_attn", "attn_logit_softcapping", 0.5),
        "a attn_logit_softcapping was changed",
    ),
    "gemma2, attention": (_eager, "a _attn_implementation_internal was changed"),
    "gemma3, embedding": (_scale_in_place, "a embed_scale was changed"),
    "gpt_neox, parallel": (
        _set("gpt_neox.layers.1", "use_parallel_residual", False),
        "a use_parallel_residual was changed",
    ),
    "cohere, logits": (_set("", "logit_scale", 2.0), "a logit_scale was changed"),
    "phi, epsilon": (_set("model.layers.1.input_layernorm", "eps", 0.5), "a eps was changed"),
    "gemma3, epsilon": (
        _set("model.layers.1.post_feedforward_layernorm", "eps", 0.5),
        "a eps was changed",
    ),
    "gemma2, config": (_config, CHANGED),
    "llama, backbone's config": (_backbones_config, CHANGED),
    "gemma3, kinds": (lambda m: m.config.layer_types.reverse(), "a layer_types was changed"),
    "smollm3, RoPE": (_set("model.layers.1.self_attn", "use_rope", 0), CHANGED),
    "llama, depth": (
        lambda m: setattr(m.config, "num_hidden_layers", 1),
        "a num_hidden_layers was changed",
    ),
}


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_numbers_of_a_family_that_change(name: str) -> None:
    change, how = OF_FAMILIES[name]
    stock, ours = pair(lambda: tiny(name.partition(",")[0], num_hidden_layers=2), batch_sizes=(3,))
    if change is _eager and stock.config._attn_implementation == "eager":
        pytest.skip("it has no other attention in this version of transformers")
    calls = {**left_padded(), **FULL, "max_new_tokens": 5}
    agree(stock, ours, calls)
    for model in (stock, ours):
        with torch.no_grad():
            change(model)
    agree(stock, ours, calls)
    assert steps(ours) == {KERNELS: 1, how: 1}


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    **{
        name: (change, CHANGED)
        for name, change in {
            "last norm replaced": _norm,
            "a layer's norm replaced": _layer_norm,
            "weights moved": _data,
            "embedding moved": _embedding_data,
            "head's weight replaced": _head,
            "weights assigned": _assign,
            "embedding resized": _resize,
            "a forward of its own": _forward,
            "last norm with a forward of its own": _norm_forward,
            "attention of another class": _class,
            "embedding of another class": _embedding_class,
            "a layer removed": _layer_gone,
            "another RoPE": _rotary,
            "an adapter": _lora,
            "an adapter on the head": _late_head,
        }.items()
    },
    "last norm's epsilon": (_epsilon, "a variance_epsilon was changed"),
    "a layer's epsilon": (_layer_epsilon, "a variance_epsilon was changed"),
    "attention's scaling": (_scaling, "a scaling was changed"),
    "a hook": (_hook, "stock: forward hook"),
    "a hook on the head": (_head_hook, "stock: forward hook"),
    "training": (_train, "stock: training mode"),
    "eager attention": (_eager, KERNELS),
    "weights changed in place": (_in_place, KERNELS),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_gives_stocks_tokens(name: str) -> None:
    change, how = CHANGES[name]
    stock, ours = pair("llama", batch_sizes=(3,))
    before = agree(stock, ours, {**left_padded(), **FULL, "max_new_tokens": 12}).sequences
    for model in (stock, ours):
        change(model)
    after = agree(stock, ours, {**left_padded(), **FULL, "max_new_tokens": 12}).sequences
    # eps scales all logits alike, and the tokens that a resize adds are not chosen
    assert torch.equal(before, after) == (
        name in ("eager attention", "training", "embedding resized", "last norm's epsilon")
    )
    if how.startswith("stock: "):
        assert steps(ours) == {KERNELS: 1} and [
            what for what in stocks(ours) if what.startswith(how)
        ]
    else:
        assert steps(ours) == (
            {KERNELS: 2} if how == KERNELS else {KERNELS: 1, how: 1}
        ) and not stocks(ours)


def test_classes_patched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, ours = pair("llama")
    plain = generated(stock, {"inputs": prompt(), **GREEDY})
    for kind in (
        type(stock.model.norm),
        type(stock.model),
        type(stock),
        LlamaAttention,
        nn.Embedding,
        type(stock.model.rotary_emb),
    ):
        forward = kind.forward

        @wraps(forward)  # generate reads its signature
        def patched(*args: Any, forward: Any = forward, kind: Any = kind, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            if kind is type(stock.model):
                out.last_hidden_state = out.last_hidden_state.flip(-1)
            elif kind is type(stock):
                out.logits = out.logits.flip(-1)
            else:
                out = (-out[0], *out[1:]) if isinstance(out, tuple) else out.flip(-1)
            return out

        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", patched)
            assert not torch.equal(agree(stock, ours, {"inputs": prompt(), **GREEDY}), plain), kind
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {CHANGED: 6, KERNELS: 1}


def test_looking_at_hidden_states_changes_nothing() -> None:
    stock, ours = pair()
    with torch.no_grad():
        ours(
            prompt(), output_hidden_states=True
        )  # installs hooks of transformers, which stay and do nothing
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {KERNELS: 1}


def test_a_call_with_a_static_cache_changes_nothing() -> None:
    stock, ours = pair()
    cached = {"cache_implementation": "static"}
    for lengths in (
        {},
        {"max_new_tokens": 20},
    ):  # the model keeps the length of its static cache
        agree(stock, ours, {"inputs": prompt(), **GREEDY, **cached, **lengths})
        agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {KERNELS: 2}


def test_optimizing_again_takes_the_model_as_it_is() -> None:
    stock, ours = pair()
    for model in (stock, ours):
        _norm(model)
    optimize(ours, batch_sizes=(2,))
    agree(stock, ours, {"inputs": prompt(2), **GREEDY})
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {KERNELS: 1, no_kernels(1): 1}
