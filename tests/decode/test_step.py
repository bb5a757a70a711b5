"""Steps of generate by kernels give the tokens, logits and caches that stock gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList

from mirage_hf.api import optimize
from mirage_hf.swap import check
from tests.helpers.generate_comparison import Recorder, assert_same_cache, left_padded
from tests.helpers.step_pairs import FULL, GREEDY, KERNELS, agree, no_kernels, pair, steps, stocks
from tests.helpers.thorough import THOROUGH
from tests.helpers.tiny_models import (
    CENTRED,
    FOUR,
    MORE,
    OTHERS,
    WINDOW,
    longrope,
    parted_at_a_tie,
    prompt,
    tiny,
)

# Not run with other versions of transformers: there test_optimize.py generates too.
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("many_samples")]


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


#: Families that test_optimize.py compares with stock, too, and variants of what other models have.
ALIKE = (
    *("granite", "gemma", "gemma3", "olmo2", "phi3"),
    *("qwen3, tied", "qwen3, attention bias", "llama, longrope", "glm", "one layer"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough) if name in ALIKE else name for name in MODELS],
)
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
    checked = [r for r in rows if r.pattern != "traced"]  # halves are compared as a whole
    assert all(r.error < max(1e-5, 2 * (r.stock_error or 0)) for r in checked), ours.mirage.report
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
        # first the whole text with a few more tokens, then only the new tokens, with the cache
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
