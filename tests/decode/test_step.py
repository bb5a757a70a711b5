"""Steps of generate by kernels.

They give what stock gives. Otherwise the model's own forward runs, and the reason is counted.
Nothing is left behind.
"""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

from mirage_hf.api import optimize, restore
from mirage_hf.decode.model_fingerprint import take_fingerprint
from mirage_hf.errors import CodegenError, SearchError
from mirage_hf.layers.model_kernels import LONG_CACHES_ROLE
from mirage_hf.pipeline import resize, resolver
from mirage_hf.swap import check
from tests.helpers.generate_comparison import (
    Recorder,
    assert_same,
    assert_same_cache,
    left_padded,
    our_numbers,
)
from tests.helpers.thorough import THOROUGH
from tests.helpers.tiny_models import (
    CENTRED,
    FOUR,
    MORE,
    OTHERS,
    SIZES,
    WINDOW,
    Resolved,
    longrope,
    parted_at_a_tie,
    prompt,
    same,
    snapshot,
    tiny,
    twin_of,
)

# Slow: other versions of transformers run test_optimize.py, which generates too.
pytestmark = [pytest.mark.models, pytest.mark.slow]

FULL = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "do_sample": False,
}
GREEDY = {"do_sample": False, "max_new_tokens": 12}
KERNELS, CHANGED = "all by kernels", "the model has changed since optimize()"


def no_kernels(batch: int) -> str:
    return f"no kernels for a batch of {batch}; optimize(batch_sizes=…) makes them"


@pytest.fixture(autouse=True)
def many_samples(resolved: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare many samples in the check of optimize().

    Layers this small have few values, so the largest float32 error of 8 calls is a matter of luck.
    """
    monkeypatch.setattr(check, "SAMPLES", 40)


def pair(
    make: str | Callable[[], Any] = "llama", batch_sizes: tuple[int, ...] = (1, 3), **options: Any
) -> tuple[Any, Any]:
    """A stock model and its optimized copy, which is not checked unless a test asks for it.

    The fakes are right.
    """
    stock = tiny(make) if isinstance(make, str) else make()
    return stock, optimize(twin_of(stock), batch_sizes=batch_sizes, **{"verify": False, **options})


def generated(model: Any, arguments: Any, seed: int = 5) -> Any:
    torch.manual_seed(seed)
    return model.generate(**(arguments() if callable(arguments) else arguments))


def agree(stock: Any, ours: Any, arguments: Any, seed: int = 5) -> Any:
    """Run both on fresh arguments with one seed; return ours."""
    with our_numbers():
        want = generated(stock, arguments, seed)
    got = generated(ours, arguments, seed)
    assert_same(want, got)
    return got


def steps(model: Any) -> dict[str, int]:
    """How the steps of calls so far ran, and how often."""
    return {
        what.removeprefix("step: "): n
        for what, n in model.mirage.report.decode.items()
        if what.startswith("step: ")
    }


def stocks(model: Any) -> list[str]:
    return [what for what in model.mirage.report.decode if what.startswith("stock: ")]


# -- the same as stock ----------------------------------------------------------------------------


def rescaled() -> Any:
    model = tiny("llama")
    model.model.layers[1].self_attn.scaling *= 1.7
    return model


MODELS: dict[str, Callable[[], Any]] = {
    **{family: lambda family=family: tiny(family) for family in FOUR},
    **{
        family: lambda family=family: tiny(family, num_hidden_layers=2)
        for family in (*OTHERS, *MORE, *CENTRED)
    },
    "gpt_oss": lambda: tiny("gpt_oss", num_hidden_layers=2),
    "stablelm": lambda: tiny("stablelm", num_hidden_layers=2, use_parallel_residual=True),
    "gemma2, eager": lambda: tiny(
        "gemma2", attn_implementation="eager", attn_logit_softcapping=3.0, num_hidden_layers=2
    ),
    **{
        f"{family}, tied": lambda family=family: tiny(family, tie_word_embeddings=True)
        for family in ("llama", "qwen3")
    },
    "biases": lambda: tiny("llama", attention_bias=True, mlp_bias=True),
    "qwen3, attention bias": lambda: tiny("qwen3", attention_bias=True),
    "wide heads": lambda: tiny("llama", head_dim=16),
    "a key for each query": lambda: tiny("llama", num_key_value_heads=4),
    "one key for all": lambda: tiny("qwen2", num_key_value_heads=1),
    "eager attention": lambda: tiny("mistral", attn_implementation="eager"),
    "one layer": lambda: tiny("qwen3", num_hidden_layers=1),
    "a scaling of its own": rescaled,
    "llama3 RoPE": lambda: tiny(
        "llama",
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 10000.0,
        },
    ),
    "YaRN, which scales cos and sin": lambda: tiny(
        "llama",
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 10000.0,
        },
    ),
    **{
        f"{family}, longrope": lambda family=family: longrope(family, 48)
        for family in ("llama", "phi3")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logits_are_stocks(name: str) -> None:
    stock, ours = pair(MODELS[name], verify=True)
    calls = [
        {"inputs": prompt()},
        left_padded((1, 2 * WINDOW + 1, WINDOW)),
        *([left_padded((4, 11, 7))] if THOROUGH else []),
    ]
    for given in calls:
        agree(stock, ours, {**given, **FULL, "max_new_tokens": 2 * WINDOW + 3})
    assert steps(ours) == {KERNELS: len(calls)} and not stocks(ours), ours.mirage.report
    rows = [r for r in ours.mirage.report.rows if "experts" not in r.reason]
    assert rows and all(r.status == "swapped" and r.calls == 0 for r in rows), ours.mirage.report
    assert all(r.error < max(1e-5, 2 * (r.stock_error or 0)) for r in rows), ours.mirage.report
    assert ours.mirage.report.fallbacks == {"prefill": len(calls) * len(ours.base_model.layers)}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parts_from_stock_at_ties_only(family: str, dtype: torch.dtype) -> None:
    model = tiny(family, dtype=dtype)
    parted_at_a_tie(model, prompt(), optimize, tokens=24)
    assert steps(model) == {KERNELS: 1}


def test_prompts_in_a_row() -> None:
    stock, ours = pair(lambda: tiny("qwen3", max_position_embeddings=1024))
    wanted: dict[str, int] = {}
    calls = [
        (1, 7, 9),
        (3, 2, 5),
        (1, 300, 4),
        (2, 9, 6),
        (1, 1, 12),
        (3, 270, 3),
        (1, 30, 2),
        (4, 3, 4),
        (1, 7, 1),
        (3, 17, 11),
        (1, 600, 3),
        (1, 7, 9),
    ]
    for n, (batch, length, tokens) in enumerate(calls):
        agree(
            stock, ours, {"inputs": prompt(batch, length, seed=n), **FULL, "max_new_tokens": tokens}
        )
        how = KERNELS if batch in (1, 3) else no_kernels(batch)
        wanted[how] = wanted.get(how, 0) + 1
    assert (
        steps(ours) == wanted
        and set(wanted) == {KERNELS, no_kernels(2), no_kernels(4)}
        and not stocks(ours)
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_block_that_grows_in_mid_call(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
    stock, ours = pair(lambda: tiny(family, max_position_embeddings=1024))
    runner = ours.mirage.runner
    agree(stock, ours, {**left_padded((250, 240, 3)), **FULL, "max_new_tokens": 40})
    assert sorted(runner.pool.blocks) == [(3, 256), (3, 512)]
    agree(
        stock, ours, {**left_padded((250, 240, 3)), **FULL, "do_sample": True, "max_new_tokens": 20}
    )
    runner.depth = 2  # steps ahead of the host
    agree(stock, ours, {"inputs": prompt(1, 254), **GREEDY})
    assert steps(ours) == {KERNELS: 3} and (1, 512) in runner.pool.blocks


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_sampling_with_a_seed(family: str) -> None:
    stock, ours = pair(family)
    sample = {**FULL, "do_sample": True, "max_new_tokens": 20}
    cases = [
        {"inputs": prompt(), **sample},
        {**left_padded(), **sample, "temperature": 1.5, "top_k": 0},
        {
            "inputs": prompt(),
            **sample,
            "top_p": 0.9,
            "num_return_sequences": 3,
            "repetition_penalty": 1.2,
        },
    ]
    seen = [
        agree(stock, ours, case, seed=seed).sequences.tolist() for seed in (1, 2) for case in cases
    ]
    assert seen[:3] != seen[3:] and steps(ours) == {KERNELS: 6}


@pytest.mark.parametrize("depth", [0, 2])
def test_stop_tokens(depth: int) -> None:
    stock, ours = pair("qwen2")
    ours.mirage.runner.depth = depth
    free = stock.generate(**left_padded(), do_sample=False, max_new_tokens=16)[:, 11:].tolist()
    early = next(t for t in free[1][2:8] if t not in free[0] + free[2])
    for eos in (early, [early, free[0][9], free[2][5]], list(range(3, 99, 2))):
        got = agree(
            stock, ours, {**left_padded(), **FULL, "max_new_tokens": 16, "eos_token_id": eos}
        )
        ended = (got.sequences[:, -1] == ours.config.pad_token_id).tolist()
        assert (
            ended == [False, True, False]
            if eos is early
            else True in ended or got.sequences.shape[1] < 27
        )
    assert steps(ours) == {KERNELS: 3}


def test_min_length_processors_and_max_length() -> None:
    stock, ours = pair()
    agree(
        stock,
        ours,
        {
            **left_padded(),
            **FULL,
            "max_new_tokens": 14,
            "min_new_tokens": 9,
            "eos_token_id": list(range(3, 60)),
        },
    )
    agree(
        stock,
        ours,
        {
            "inputs": prompt(),
            **FULL,
            "max_length": 19,
            "bad_words_ids": [[i] for i in range(5, 60)],
        },
    )
    agree(stock, ours, {"inputs": prompt(), **FULL, "max_new_tokens": 1})
    assert steps(ours) == {KERNELS: 3}


@pytest.mark.parametrize("extra", [{}, {"do_sample": True}, {"eos_token_id": list(range(3, 50))}])
def test_streamers_processors_and_criteria_get_the_same_calls(extra: dict[str, Any]) -> None:
    stock, ours = pair(batch_sizes=(1, 2))
    for batch in (1, 2):
        for whole in (False, True):
            seen: list[Recorder] = []

            def arguments(
                seen: list[Recorder] = seen, whole: bool = whole, batch: int = batch
            ) -> dict[str, Any]:
                seen.append(r := Recorder())
                more = {
                    "logits_processor": LogitsProcessorList([r.processor]),
                    "stopping_criteria": StoppingCriteriaList([r.criterion]),
                }
                return {
                    "inputs": prompt(batch),
                    "max_new_tokens": 8,
                    "streamer": r,
                    **extra,
                    **(more if whole else {}),
                }

            agree(stock, ours, arguments)
            assert seen[0].events == seen[1].events and len(seen[1].events) > 2
    assert steps(ours) == {KERNELS: 4}


# -- caches and positions -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("configured", [True, False])
def test_users_caches(family: str, configured: bool) -> None:
    stock, ours = pair(family)
    for given in ({"input_ids": prompt(1, 12)}, left_padded()):
        batch, length = given["input_ids"].shape
        used: list[DynamicCache] = []

        def first(used: list[DynamicCache] = used, given: dict[str, Any] = given) -> dict[str, Any]:
            used.append(DynamicCache(config=stock.config) if configured else DynamicCache())
            return {**given, **GREEDY, "past_key_values": used[-1]}

        text = agree(stock, ours, first)
        assert_same_cache(*used)
        # the text so far and a few tokens more; then only the new tokens beside the cache
        again, longer = iter(used), torch.cat([text, prompt(batch, 3, seed=9)], -1)
        mask = given.get("attention_mask", torch.ones(batch, length, dtype=torch.long))
        mask = torch.cat([mask, mask.new_ones(batch, 15)], -1)
        text = agree(
            stock,
            ours,
            lambda again=again, longer=longer, mask=mask: {
                "input_ids": longer,
                "attention_mask": mask,
                "past_key_values": next(again),
                **FULL,
                "max_new_tokens": 11,
            },
        ).sequences
        assert_same_cache(*used)
        again, mask = iter(used), torch.cat([mask, mask.new_ones(batch, 14)], -1)
        new = torch.cat([text[:, -1:], prompt(batch, 3, seed=8)], -1)
        agree(
            stock,
            ours,
            lambda again=again, new=new, mask=mask: {
                "input_ids": new,
                "attention_mask": mask,
                "past_key_values": next(again),
                **FULL,
                "max_new_tokens": 5,
            },
        )
        assert_same_cache(*used)
    assert steps(ours) == {KERNELS: 6} and not stocks(ours)


def test_a_returned_cache_is_not_pool_memory() -> None:
    stock, ours = pair("mistral")
    first = agree(stock, ours, {"inputs": prompt(), **FULL, "max_new_tokens": 5})
    kept = [layer.keys.clone() for layer in first.past_key_values.layers]
    agree(stock, ours, {"inputs": prompt(seed=8), **FULL, "max_new_tokens": 30})
    assert all(
        torch.equal(a, layer.keys)
        for a, layer in zip(kept, first.past_key_values.layers, strict=True)
    )


def test_data_of_an_earlier_call_is_never_seen() -> None:
    stock, ours = pair()
    agree(stock, ours, left_padded((20, 30, 9)) | {"max_new_tokens": 30})
    for block in ours.mirage.runner.pool._idle:
        for slab in block.slabs:
            slab[:, :, :, : block.dirty] = float("nan")  # as after an overflow in half precision
    agree(stock, ours, {**left_padded(), **FULL, "max_new_tokens": 40})
    assert ours.mirage.runner.pool.blocks == [(3, 256)] and steps(ours) == {KERNELS: 2}


@pytest.mark.parametrize(
    ("positions", "how"),
    [
        (torch.arange(4, 11)[None], "positions outside the slots of the cache"),
        (torch.arange(400, 407)[None], "positions outside the slots of the cache"),
        (
            torch.stack([torch.arange(7), torch.arange(7), torch.arange(1, 8)]),
            "positions outside the slots of the cache",
        ),
        (torch.arange(7)[None] // 2, KERNELS),
        (
            torch.stack([torch.arange(7) // 3, torch.arange(7), torch.zeros(7, dtype=torch.long)]),
            KERNELS,
        ),
    ],
)
def test_positions_that_a_user_gives(positions: torch.Tensor, how: str) -> None:
    stock, ours = pair(lambda: tiny("llama", max_position_embeddings=1024))
    free = stock.generate(prompt(len(positions)), **GREEDY)
    got = agree(
        stock,
        ours,
        {"inputs": prompt(len(positions)), "position_ids": positions, **FULL, "max_new_tokens": 12},
    )
    assert steps(ours) == {how: 1} and got.sequences.shape == free.shape


def test_positions_below_zero() -> None:
    stock, ours = pair()
    agree(
        stock,
        ours,
        {
            "inputs": prompt(),
            "position_ids": torch.arange(-12, -5)[None],
            **FULL,
            "max_new_tokens": 12,
        },
    )


def test_max_cache_len() -> None:
    stock, ours = pair(max_cache_len=20)
    agree(stock, ours, {"inputs": prompt(), **FULL, "max_new_tokens": 14})
    agree(stock, ours, {"inputs": prompt(), **FULL, "max_new_tokens": 15})
    assert steps(ours) == {KERNELS: 1} and stocks(ours) == [
        "stock: more cache slots needed than max_cache_len=20"
    ]


def test_windows_that_change() -> None:
    stock, ours = pair("mistral")
    seen = []
    for window in (WINDOW, 4, 30):
        for model in (stock, ours):
            model.config.sliding_window = window
        seen.append(agree(stock, ours, {**left_padded((20, 25, 9)), **GREEDY}).tolist())
    assert seen[0] != seen[1] and steps(ours) == {KERNELS: 3}


# -- models whose steps run their own forward -----------------------------------------------------


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(ids)


class Lying(LlamaAttention):
    """Attention that does not scale by its `scaling`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        scaling = self.scaling
        self.scaling = 0.6 * scaling
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.scaling = scaling


class Capped(LlamaAttention):
    """Attention with a softcap on its scores."""

    def forward(
        self,
        hidden_states: Any,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        batch, length, _width = hidden_states.shape
        q, k, v = (
            p(hidden_states).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        scores = 0.5 * torch.tanh(
            q @ repeat_kv(k, self.num_key_value_groups).transpose(2, 3) * self.scaling / 0.5
        )
        if attention_mask is None:
            attention_mask = torch.ones(length, k.shape[2], dtype=torch.bool).tril(
                k.shape[2] - length
            )
        kept = attention_mask.dtype == torch.bool
        weights = (
            scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
            if kept
            else scores + attention_mask
        ).softmax(-1)
        out = (
            (weights @ repeat_kv(v, self.num_key_value_groups))
            .transpose(1, 2)
            .reshape(batch, length, -1)
        )
        return self.o_proj(out), weights


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
    stock, ours = pair(make)
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
    """Also when it has set new frequencies: it is no change of the model's."""
    stock, ours = pair(lambda: dynamic_rope(reach=16))
    for length in (7, 19, 3):
        agree(stock, ours, {"inputs": prompt(1, length), **GREEDY})
    assert steps(ours) == {"RoPE of type dynamic reads the length on the host": 3}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_longrope_is_by_kernels_for_texts_within_its_reach(family: str) -> None:
    """Whatever frequencies the text before has left in the module."""
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
    )  # graphs captured before hold the frequencies that were
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
    stock, ours = pair(lambda: model)
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
            Resolved(asked[1], is_fused=False, reason="slower") if asked[0] == "attention" else None
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
    layer = all_steps.layers[0]
    found = {
        **layer.found[1],
        "attention": SimpleNamespace(digest="short"),
        LONG_CACHES_ROLE: SimpleNamespace(digest="long"),
    }
    layer = replace(layer, found={1: found})
    other = {"short": "long", "long": "short"}[first]
    assert all_steps.kernels(layer, 1, slots)["attention"] == other and tried == [first, other]
    with pytest.raises(CodegenError, match="too large"):
        monkeypatch.setattr(
            resize, "at_size", lambda *_: (_ for _ in ()).throw(CodegenError("too large"))
        )
        all_steps.kernels(layer, 1, slots + 256)


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


# -- after changes --------------------------------------------------------------------------------


def test_the_numbers_of_a_model_are_read_alike_whatever_other_models_were_read() -> None:
    first, second = (tiny("llama") for _ in range(2))
    first.model.layers[0].mlp.note, second.model.layers[0].mlp.number = (
        "no number",
        3,
    )  # as many attributes, of other names
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
    # eps scales all logits alike, and new tokens are not chosen
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
        )  # installs hooks of transformers that stay and do nothing
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {KERNELS: 1}


def test_a_call_with_a_static_cache_changes_nothing() -> None:
    stock, ours = pair()
    cached = {"cache_implementation": "static"}
    for lengths in (
        {},
        {"max_new_tokens": 20},
    ):  # transformers remembers on the model how long its static cache is
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


# -- coming and going -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FOUR)
def test_restore_leaves_nothing(family: str) -> None:
    model = tiny(family)
    before, want = snapshot(model), model.generate(**left_padded(), **GREEDY)
    optimize(model, batch_sizes=(3,))
    assert torch.equal(model.generate(**left_padded(), **GREEDY), want) and steps(model) == {
        KERNELS: 1
    }
    kept = weakref.ref(model.mirage.runner.model_kernels)
    gc.collect()
    gc.disable()
    try:
        restore(model)
        assert kept() is None
    finally:
        gc.enable()
    assert same(before, snapshot(model)) and "generate" not in model.__dict__
    assert torch.equal(model.generate(**left_padded(), **GREEDY), want)


def test_a_copy_is_stock_and_uses_its_own_weights() -> None:
    stock, ours = pair()
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    twin, other = copy.deepcopy(ours), copy.deepcopy(stock)
    assert not {"mirage", "generate"} & set(twin.__dict__)
    for model in (twin, other):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(-1.3)
    given = {**left_padded(), **FULL, "max_new_tokens": 12}
    assert_same(generated(other, given, 5), generated(twin, given, 5))
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {KERNELS: 2}
    optimize(twin)
    agree(other, twin, {"inputs": prompt(), **GREEDY})
    assert steps(twin) == {KERNELS: 1}


def test_a_deleted_model_frees_its_memory() -> None:
    model = optimize(tiny("qwen3"))
    model.generate(prompt(), **GREEDY)
    model.generate(prompt(), do_sample=True, max_new_tokens=5)
    runner = model.mirage.runner
    assert steps(model) == {KERNELS: 2}
    inner = (
        model.model.layers[1],
        model.model.embed_tokens.weight,
        runner,
        runner.model_kernels,
        runner.pool._idle[0],
    )
    alive = [weakref.ref(x) for x in (model, *inner)]
    del runner, inner
    gc.collect()
    gc.disable()
    try:
        del model
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("path", ["lm_head", "model.layers.0.self_attn.q_proj", "model.norm"])
def test_replaced_weights_are_not_kept(path: str) -> None:
    stock, ours = pair()
    agree(stock, ours, {"inputs": prompt(3), **GREEDY})
    replaced = weakref.ref(ours.get_submodule(path).weight)
    for model in (stock, ours):
        module = model.get_submodule(path)
        module.weight = nn.Parameter(module.weight.detach().flip(0).contiguous())
    for batch in (3, 1):
        agree(stock, ours, {"inputs": prompt(batch), **GREEDY})
    gc.collect()
    assert replaced() is None and steps(ours) == {KERNELS: 1, CHANGED: 2}


def test_released_memory_comes_back() -> None:
    stock, ours = pair()
    for _ in range(2):
        agree(stock, ours, {"inputs": prompt(), **GREEDY})
        assert ours.mirage.runner.bytes > 0
        ours.mirage.release()
        assert ours.mirage.runner.bytes == 0
    assert steps(ours) == {KERNELS: 2}


# -- kernels that were really searched ------------------------------------------------------------


def test_searched_kernels_step_as_stock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(check, "SAMPLES", 64)
    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    stock, ours = pair(
        lambda: tiny("qwen3", max_position_embeddings=1024), batch_sizes=(1, 2), verify=True
    )
    rows = ours.mirage.report.rows
    assert {(r.status, r.kernel) for r in rows} == {("swapped", "1 kernel")} and any(
        r.source == "searched" for r in rows
    )
    assert all(0 <= r.error_bound < 1e-9 for r in rows)
    agree(stock, ours, {"inputs": prompt(), **FULL, "max_new_tokens": 2 * WINDOW + 3})
    agree(stock, ours, {**left_padded((3, 11)), **FULL, "max_new_tokens": 2 * WINDOW})
    agree(stock, ours, {**left_padded((240, 250)), **FULL, "max_new_tokens": 12})
    agree(stock, ours, {**left_padded((250, 1)), "do_sample": True, "max_new_tokens": 5})
    assert steps(ours) == {KERNELS: 4} and sorted(ours.mirage.runner.pool.blocks) == [
        (1, 256),
        (2, 256),
        (2, 512),
    ]
