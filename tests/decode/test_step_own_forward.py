"""Models whose steps run their own forward, because a part of them has no kernels.

Tokens are stock's, and the report has the reason.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention

from mirage_hf.api import optimize
from mirage_hf.decode.model_fingerprint import take_fingerprint
from mirage_hf.errors import CodegenError, SearchError
from mirage_hf.layers.part import LONG_CACHES_ROLE, StepShape
from mirage_hf.pipeline import resize, resolver
from mirage_hf.swap import check
from tests.helpers.generate_comparison import left_padded
from tests.helpers.step_pairs import (
    FULL,
    GREEDY,
    KERNELS,
    UNTRACED,
    Capped,
    ScaledEmbedding,
    agree,
    no_kernels,
    pair,
    steps,
    stocks,
)
from tests.helpers.tiny_models import SIZES, Resolved, longrope, prompt, tiny, twin_of

# Not run with other versions of transformers: there test_optimize.py generates too.
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("many_samples")]


class Lying(LlamaAttention):
    """Attention that does not scale by its `scaling`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        scaling = self.scaling
        self.scaling = 0.6 * scaling
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.scaling = scaling


def attention_is(kind: type) -> Callable[[Any], None]:
    return lambda m: setattr(m.model.layers[1].self_attn, "__class__", kind)


def max_norm(m: Any) -> None:
    m.model.embed_tokens.max_norm = 1.0


def twice(m: Any) -> None:
    class Twice(type(m)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = -out.logits
            return out

    m.__class__ = Twice


def another_norm(m: Any) -> None:
    class Plus(type(m.model.norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + 0.5 / self.weight)

    m.model.layers[1].input_layernorm.__class__ = Plus


def backbone(change: Callable[..., Any]) -> Callable[[Any], None]:
    """Give the backbone a forward that does something else around its layers."""

    def to(m: Any) -> None:
        class Other(type(m.model)):  # type: ignore[misc]
            def forward(self, **kwargs: Any) -> Any:
                return change(self, super().forward, kwargs)

        Other.__module__ = type(m.model).__module__
        m.model.__class__ = Other

    return to


def louder(self: Any, forward: Any, kwargs: dict[str, Any]) -> Any:
    ids = kwargs.pop("input_ids")
    return forward(**{**kwargs, "inputs_embeds": 5 * self.embed_tokens(ids)})


def stretched(self: Any, forward: Any, kwargs: dict[str, Any]) -> Any:
    positions = kwargs.pop("position_ids", None)
    positions = torch.arange(kwargs["input_ids"].shape[1])[None] if positions is None else positions
    return forward(**kwargs, position_ids=3 * positions)


def dynamic_rope(reach: int = 256) -> Any:
    return tiny(
        "llama",
        rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        max_position_embeddings=reach,
    )


def changed(change: Callable[[Any], Any], family: str = "llama") -> Callable[[], Any]:
    def make() -> Any:
        model = tiny(family)
        change(model)
        return model

    return make


NOT_SCALED = "model.layers.1: the layer's attention is not matched"


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a scale of logits that is not used": (
        changed(lambda m: setattr(m.config, "logits_scaling", 3.0)),
        "the model is not head(norm(layers(embedding))): off by",
    ),
    "a scale of the embedding that is not used": (
        changed(lambda m: setattr(m.model, "embedding_multiplier", 2.0)),
        "layer 0 is not given the embedding, or not RoPE of the positions: off by",
    ),
    "a multiplier that is not used": (
        changed(lambda m: setattr(m.model.layers[1], "residual_multiplier", 0.5)),
        "layers.1 is not matched",
    ),
    "a forward around the model": (
        changed(twice),
        "the model is not head(norm(layers(embedding))): off by",
    ),
    "a backbone that scales the embedding": (
        changed(backbone(louder)),
        "layer 0 is not given the embedding",
    ),
    "a backbone that stretches positions": (
        changed(backbone(stretched)),
        "or not RoPE of the positions",
    ),
    "a child of the model": (
        changed(lambda m: m.add_module("extra", nn.Tanh().eval())),
        "has extra too",
    ),
    "a child of the backbone": (
        changed(lambda m: m.model.add_module("final", nn.Tanh().eval())),
        "has final too",
    ),
    "embedding class": (
        changed(lambda m: setattr(m.model.embed_tokens, "__class__", ScaledEmbedding)),
        "layer 0 is not given the embedding",
    ),
    "embedding that renormalises": (changed(max_norm), "renormalises its rows (max_norm)"),
    "another norm": (changed(another_norm), "model.layers.1: the layer's qkv is not matched"),
    "a scaling that is not used": (changed(attention_is(Lying)), NOT_SCALED),
    "softcap": (changed(attention_is(Capped)), NOT_SCALED),
    "a part that is not matched": (
        lambda: tiny("llama", hidden_act="mish"),
        "the layer's gated is not matched",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_whose_steps_run_their_own_forward(case: str) -> None:
    make, reason = REFUSED[case]
    stock, ours = pair(make, **UNTRACED)
    agree(stock, ours, {**left_padded(), **FULL, "max_new_tokens": 12})
    report = ours.mirage.report
    assert ours.mirage.runner.model_kernels is None and steps(ours) == {} and report.swapped
    assert not [r for r in report.swapped if r.pattern == "attention" or r.module == "head"]
    assert any(
        n.startswith("steps of generate run the model's own forward") and reason in n
        for n in report.notes
    ), report.notes
    if reason == NOT_SCALED:
        row = next(
            r for r in report.rows if r.module == "model.layers.1" and r.pattern == "attention"
        )
        assert row.status == "stock" and row.reason.startswith(
            "attention is not softmax(scale · rope(q) · rope(k)) · v: off by"
        )
    assert any(r.calls > 0 for r in report.rows) or stocks(ours)


def test_rope_that_follows_the_length() -> None:
    """It may set new frequencies. That is no change of the model."""
    stock, ours = pair(lambda: dynamic_rope(reach=16))
    for length in (7, 19, 3):
        agree(stock, ours, {"inputs": prompt(1, length), **GREEDY})
    assert steps(ours) == {"RoPE of type dynamic reads the length on the host": 3}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_longrope_is_by_kernels_for_texts_within_its_reach(family: str) -> None:
    """It does not matter which frequencies the text before has left in the module."""
    stock, ours = pair(lambda: longrope(family, 32))
    lengths = [(7, 12), (20, 12), (7, 40), (7, 12), (40, 9), (24, 8), (7, 3)]
    for tokens, new in lengths:
        agree(stock, ours, {"inputs": prompt(1, tokens), **FULL, "max_new_tokens": new})
    assert steps(ours)[KERNELS] == 5
    beyond = {"RoPE of type longrope reads the length on the host"} if family == "llama" else set()
    assert set(steps(ours)) == {KERNELS, *beyond} and len(stocks(ours)) == (family == "phi3")
    before, tables = take_fingerprint(ours), ours.mirage.runner.model_kernels.rotary_tables(40)
    ours(prompt(1, 40))
    left = ours.model.rotary_emb.inv_freq
    assert left is not ours.model.rotary_emb.original_inv_freq
    assert (
        all(map(torch.equal, tables, ours.mirage.runner.model_kernels.rotary_tables(40)))
        and ours.model.rotary_emb.inv_freq is left
    )
    assert bool((tables[0][:, 31] != 0).all()) and not tables[0][:, 32:].any()
    assert take_fingerprint(ours) == before
    ours.model.rotary_emb.original_inv_freq.mul_(
        2
    )  # graphs captured before hold the earlier frequencies
    assert (
        take_fingerprint(ours).facts == before.facts
        and take_fingerprint(ours).graph_facts != before.graph_facts
    )
    stock.model.rotary_emb.original_inv_freq.mul_(2)
    agree(stock, ours, {"inputs": prompt(1, 9), **FULL, "max_new_tokens": 5})


@pytest.mark.parametrize(
    "patterns",
    [
        ["attention"],
        ["attention", "rms_norm_linear"],
        ["rms_norm_linear", "linear_residual", "gated_mlp"],
    ],
)
def test_patterns_that_make_no_whole_step(patterns: list[str]) -> None:
    stock = tiny("llama")
    ours = twin_of(stock)
    if patterns == ["attention"]:
        with pytest.warns(match="nothing in this LlamaForCausalLM was replaced"):
            optimize(ours, patterns=patterns)
        assert "mirage" not in ours.__dict__
        return
    optimize(ours, patterns=patterns)
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {} and all(r.calls == 11 for r in ours.mirage.report.swapped)


def resolve_but(monkeypatch: pytest.MonkeyPatch, other: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(
        resolver,
        "resolve",
        lambda program, pattern="", **_: other((pattern, program)) or Resolved(program),
    )


def rows_of(program: Any) -> int:
    return int(program.inputs[0].dims[0])


@pytest.mark.parametrize(
    ("order", "count", "why"),
    [
        ((1, 0, 2), 3, "its layer 0 has the layer_idx 1"),
        ((0, 1), 3, "it has 2 layers, but its config says 3"),
        ((0, 1), 2, ""),
    ],
)
def test_a_model_whose_layers_were_moved_or_taken_out(
    order: tuple[int, ...], count: int, why: str
) -> None:
    model = tiny("llama")
    model.model.layers = nn.ModuleList(model.model.layers[n] for n in order)
    model.config.num_hidden_layers = count
    stock, ours = pair(lambda: model, **UNTRACED)
    assert bool(why) == (ours.mirage.runner.model_kernels is None) and why in str(
        ours.mirage.report
    )
    agree(stock, ours, {"inputs": prompt(), **GREEDY, **FULL})


def test_a_batch_size_without_a_kernel_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(asked: Any) -> Any:
        if asked[0] == "attention" and rows_of(asked[1]) == 1:
            raise SearchError("nothing found in 60 s")

    resolve_but(monkeypatch, other)
    stock, ours = pair()
    for given in ({"inputs": prompt()}, left_padded()):
        agree(stock, ours, {**given, **FULL, "max_new_tokens": 9})
    assert steps(ours) == {KERNELS: 1, no_kernels(1): 1}
    rows = {r.rows: r for r in ours.mirage.report.rows if r.module == "head"}
    assert (
        rows[3].status == "swapped"
        and rows[1].status == "stock"
        and "another part has no kernel" in rows[1].reason
    )
    attention = {
        r.rows: (r.status, r.reason) for r in ours.mirage.report.rows if r.pattern == "attention"
    }
    assert attention[3] == ("swapped", "") and attention[1] == (
        "stock",
        "no kernel: nothing found in 60 s",
    )


def test_attention_by_the_library_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_but(
        monkeypatch,
        lambda asked: (
            Resolved(asked[1], runs_kernel=False, reason="slower")
            if asked[0] == "attention"
            else None
        ),
    )
    stock, ours = pair()
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {} and any("attention: slower" in n for n in ours.mirage.report.notes)


def test_a_second_thread_waits_for_what_a_cache_has_no_kernels_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, ours = pair()
    asked = threading.Event()

    def at_size(*_: Any) -> Any:
        asked.set()
        time.sleep(0.3)
        raise CodegenError("too large")

    monkeypatch.setattr(resize, "at_size", at_size)
    seen: list[Any] = []
    first = threading.Thread(target=lambda: seen.append(ours.generate(prompt(), **GREEDY)))
    first.start()
    assert asked.wait(60)
    seen.append(ours.generate(prompt(), **GREEDY))
    first.join()
    assert [x.tolist() for x in seen] == 2 * [stock.generate(prompt(), **GREEDY).tolist()]
    assert steps(ours) == {"no kernels for 256 slots (too large)": 2}


@pytest.mark.parametrize("slots, first", [(768, "short"), (4096, "long")])
def test_attention_takes_the_other_kernel_where_one_cannot_be_cut(
    monkeypatch: pytest.MonkeyPatch, slots: int, first: str
) -> None:
    _, ours = pair()
    tried: list[str] = []

    def at_size(found: Any, program: Any, device: Any) -> Any:
        tried.append(found.digest)
        if found.digest == first:
            raise CodegenError("too large")
        return found.digest

    monkeypatch.setattr(resize, "at_size", at_size)
    all_steps = ours.mirage.runner.model_kernels
    layer, shape = all_steps.layers[0], StepShape(1)
    found = {
        **layer.found[shape],
        "attention": SimpleNamespace(digest="short"),
        LONG_CACHES_ROLE: SimpleNamespace(digest="long"),
    }
    layer = replace(layer, found={shape: found})
    other = {"short": "long", "long": "short"}[first]
    assert all_steps.kernels(layer, shape, slots)["attention"] == other and tried == [first, other]
    with pytest.raises(CodegenError, match="too large"):
        monkeypatch.setattr(
            resize, "at_size", lambda *_: (_ for _ in ()).throw(CodegenError("too large"))
        )
        all_steps.kernels(layer, shape, slots + 256)


@pytest.mark.parametrize("bias", [False, True])
def test_the_wide_reference_of_a_head_is_computed_in_slices(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    monkeypatch.setattr(check, "SLICE", 7)
    head, x = nn.Linear(12, 30, bias=bias), torch.randn(3, 12, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(
            check._InSlices(head, torch.float64)(x),
            copy.deepcopy(head).double()(x),
            rtol=0,
            atol=1e-14,
        )


@pytest.mark.parametrize("wrong", ["attention", "head"])
def test_a_wrong_kernel_of_a_step_is_found_by_the_check(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(check, "SLICE", 7)

    def other(asked: Any) -> Any:
        pattern, program = asked
        head = pattern == "rms_norm_linear" and program.outputs[0].dims[-1] == SIZES["vocab_size"]
        return (
            Resolved(program, scale=1.01)
            if pattern == wrong or (head and wrong == "head")
            else None
        )

    resolve_but(monkeypatch, other)
    monkeypatch.setattr(
        resize, "at_size", lambda found, program, device: Resolved(program, scale=found.scale).run
    )
    stock, ours = pair(verify=True)
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    where = "head" if wrong == "head" else "model.layers.0"
    assert steps(ours) == {} and any(
        f"{where}: its step was rejected by the check: off by" in n
        for n in ours.mirage.report.notes
    )
    assert {
        r.status for r in ours.mirage.report.rows if r.module == "head" or r.pattern == "attention"
    } == {"stock"}
