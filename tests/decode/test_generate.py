"""The installed `generate` returns what stock returns.

Tokens, scores, caches, the number of calls and the order of streamer calls are compared.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from mirage_hf.decode import install
from mirage_hf.decode.choosing import choose_greedily
from mirage_hf.decode.control import Control
from tests.helpers.generate_comparison import (
    FAMILIES,
    FULL,
    PAD,
    VOCABULARY,
    WINDOW,
    Recorder,
    assert_same,
    assert_same_cache,
    both,
    handled,
    left_padded,
    prompt,
    tiny,
)

pytestmark = pytest.mark.models

CASES = {
    "greedy": lambda: {"inputs": prompt(), "max_new_tokens": 24},
    "greedy batch": lambda: {"inputs": prompt(3), "max_new_tokens": 24},
    "one token": lambda: {"inputs": prompt(2), "max_new_tokens": 1},
    "max_length": lambda: {"inputs": prompt(2), "max_length": 19},
    "prompt of one": lambda: {"inputs": prompt(1, 1), "max_new_tokens": 8},
    "left padding": lambda: {**left_padded(), "max_new_tokens": 20},
    "outputs": lambda: {**left_padded(), "max_new_tokens": 20, **FULL},
    "eos list": lambda: {
        **left_padded(),
        "max_new_tokens": 30,
        "eos_token_id": list(range(3, 40, 3)),
        **FULL,
    },
    "many eos": lambda: {
        **left_padded(),
        "max_new_tokens": 30,
        "eos_token_id": list(range(3, 99, 2)),
    },
    "min_new_tokens": lambda: {
        "inputs": prompt(2),
        "max_new_tokens": 20,
        "min_new_tokens": 9,
        "eos_token_id": list(range(3, 60)),
        **FULL,
    },
    "repetition_penalty": lambda: {
        **left_padded(),
        "max_new_tokens": 16,
        "repetition_penalty": 1.4,
        **FULL,
    },
    "bad_words_ids": lambda: {
        "inputs": prompt(2),
        "max_new_tokens": 16,
        "bad_words_ids": [[i] for i in range(5, 60)],
    },
    "sampling": lambda: {
        **left_padded(),
        "max_new_tokens": 20,
        "do_sample": True,
        "temperature": 1.5,
        **FULL,
    },
    "sampling, no processor": lambda: {
        "inputs": prompt(2),
        "max_new_tokens": 12,
        "do_sample": True,
        "top_k": 0,
    },
    "num_return_sequences": lambda: {
        **left_padded(),
        "max_new_tokens": 12,
        "do_sample": True,
        "top_p": 0.9,
        "top_k": 20,
        "num_return_sequences": 3,
        "eos_token_id": [7, 8, 9],
    },
    "prefix_allowed_tokens_fn": lambda: {
        "inputs": prompt(2),
        "max_new_tokens": 9,
        "prefix_allowed_tokens_fn": lambda row, ids: [11 + row, 20 + len(ids)],
    },
    "own position_ids": lambda: {
        "inputs": prompt(2),
        "max_new_tokens": 9,
        "position_ids": torch.arange(4, 11)[None],
    },
    "generation_config": lambda: {
        "inputs": prompt(2),
        "generation_config": GenerationConfig(
            max_new_tokens=14, do_sample=True, top_k=5, pad_token_id=PAD, eos_token_id=4
        ),
    },
}


#: Families without a window in all layers, and with one in some and a softcap.
UNLIKE = ("llama", "gemma2")


def family_and_attention():
    """Return pairs. All families run sdpa, and other versions of transformers some of them."""
    for family in FAMILIES:
        yield pytest.param(family, "sdpa", marks=[pytest.mark.slow] * (family not in UNLIKE))
        more = pytest.mark.slow if family in UNLIKE else pytest.mark.thorough
        yield pytest.param(family, "eager", marks=more)


@pytest.mark.parametrize(("family", "attention"), [*family_and_attention()])
def test_same_as_stock(family, attention):
    if attention == "sdpa" and not getattr(tiny(family), "_supports_sdpa", True):
        pytest.skip(f"this version of transformers gives {family} no sdpa")
    model = tiny(family, attn_implementation=attention)
    runner = install(model)
    for name, case in CASES.items():
        done = handled(runner)
        stock, ours = both(model, case)
        try:
            assert_same(stock, ours)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        assert handled(runner) == done + 1, (name, runner.counts)


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_steps_that_ran_ahead_leave_no_trace(family, depth):
    model = tiny(family)
    install(model, depth=depth)
    for eos in ([], list(range(3, 40)), list(range(3, 99))):
        arguments = {**left_padded(), "max_new_tokens": 13, "eos_token_id": eos or None, **FULL}
        assert_same(*both(model, arguments))


def test_text_longer_than_the_window_by_far():
    for family in ("mistral", "gemma2", "qwen3"):
        model = tiny(family)
        install(model)
        assert_same(
            *both(model, {"inputs": prompt(2, 3 * WINDOW), "max_new_tokens": 3 * WINDOW, **FULL})
        )
        assert_same(
            *both(
                model,
                {
                    **left_padded((2, WINDOW - 1, WINDOW, WINDOW + 1)),
                    "max_new_tokens": 2 * WINDOW,
                    **FULL,
                },
            )
        )


# -- streamers, processors, criteria --------------------------------------------------------------


@pytest.mark.parametrize(
    "extra", [{}, {"do_sample": True}, {"eos_token_id": list(range(3, 50))}, {"max_time": 100.0}]
)
@pytest.mark.parametrize(
    "parts",
    [
        ("streamer",),
        ("logits_processor",),
        ("stopping_criteria",),
        ("streamer", "logits_processor", "stopping_criteria"),
    ],
)
def test_same_calls_in_the_same_order(parts, extra):
    model = tiny("llama")
    runner = install(model)
    recorders = []
    wrap = {
        "streamer": lambda r: r,
        "logits_processor": lambda r: LogitsProcessorList([r.processor]),
        "stopping_criteria": lambda r: StoppingCriteriaList([r.criterion]),
    }

    def arguments():
        recorders.append(recorder := Recorder())
        return {
            "inputs": prompt(2),
            "max_new_tokens": 10,
            **extra,
            **{p: wrap[p](recorder) for p in parts},
        }

    assert_same(*both(model, arguments))
    stock, ours = recorders
    assert stock.events == ours.events and len(ours.events) > 1
    assert handled(runner) == 1


def test_scores_reach_the_criteria():
    model = tiny("llama")
    install(model)
    recorders = []

    def arguments():
        recorders.append(recorder := Recorder())
        return {
            "inputs": prompt(2),
            "max_new_tokens": 5,
            **FULL,
            "stopping_criteria": StoppingCriteriaList([recorder.criterion]),
        }

    assert_same(*both(model, arguments))
    assert recorders[0].events == recorders[1].events and recorders[1].events[-1][2] == 5


def test_max_time_zero_stops_after_one_token():
    model = tiny("llama")
    runner = install(model)
    stock, ours = both(model, {"inputs": prompt(2), "max_new_tokens": 50, "max_time": 0.0})
    assert_same(stock, ours)
    assert ours.shape[1] == prompt(2).shape[1] + 1 and handled(runner) == 1


def test_scores_are_logits_where_nothing_processed_them():
    model = tiny("llama")
    install(model)
    stock, ours = both(model, {"inputs": prompt(2), "max_new_tokens": 5, **FULL})
    assert all(a is b for a, b in zip(stock.scores, stock.logits, strict=True))
    assert all(a is b for a, b in zip(ours.scores, ours.logits, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_ties_take_the_lowest_index(dtype):
    control = Control.allocate(3, 256, torch.device("cpu"))
    control.start(
        length=5,
        position=torch.tensor([[4], [3], [2]]),
        lowest=None,
        budget=9,
        eos=torch.tensor([7]),
        pad=torch.tensor(PAD),
    )
    logits = torch.zeros(3, VOCABULARY, dtype=dtype)
    logits[0, [40, 30, 90]] = 1
    logits[1, [98, 7]] = 1
    logits[2] = 3
    choose_greedily(control, logits)
    assert control.ids.tolist() == [[30], [7], [0]]
    assert control.alive.tolist() == [True, False, True] and control.report.tolist() == [
        [30, 7, 0],
        [1, 0, 1],
    ]
    assert (
        control.length.tolist() == [5]
        and control.position.tolist() == [[5], [4], [3]]
        and control.budget.tolist() == [8]
    )


# -- caches ---------------------------------------------------------------------------------------


def caches(model):
    yield "with a config", lambda: DynamicCache(config=model.config)
    yield "without", DynamicCache


@pytest.mark.parametrize("family", FAMILIES)
def test_users_cache_ends_as_with_stock(family):
    model = tiny(family)
    runner = install(model)
    for name, make in caches(model):
        for given in (left_padded(), {"input_ids": prompt(2, 12)}):
            used = []

            def arguments(make=make, given=given, used=used):
                used.append(make())
                return {**given, "max_new_tokens": 6, "past_key_values": used[-1]}

            assert_same(*both(model, arguments))
            assert_same_cache(*used)
            # once more: the whole text with a few more tokens, with the cache of the first call
            first = type(model).generate(model, **given, max_new_tokens=6)
            longer = torch.cat([first, prompt(first.shape[0], 3, seed=9)], dim=-1)
            mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 9)], dim=-1)
            again = iter(used)

            def more(again=again, longer=longer, mask=mask):
                return {
                    "input_ids": longer,
                    "attention_mask": mask,
                    "past_key_values": next(again),
                    "max_new_tokens": 20,
                    **FULL,
                }

            done = handled(runner)
            assert_same(*both(model, more))
            assert_same_cache(*used)
            assert handled(runner) == done + 1, (name, runner.counts)


def test_only_the_new_tokens_beside_a_cache():
    model = tiny("llama")
    runner = install(model)
    used = []

    def first():
        used.append(DynamicCache(config=model.config))
        return {"inputs": prompt(2), "max_new_tokens": 4, "past_key_values": used[-1]}

    both(model, first)
    again = iter(used)

    def more():
        cache = next(again)
        new = prompt(2, 3, seed=4)
        return {
            "input_ids": new,
            "attention_mask": torch.ones(2, cache.get_seq_length() + 3, dtype=torch.long),
            "past_key_values": cache,
            "max_new_tokens": 5,
            **FULL,
        }

    assert_same(*both(model, more))
    assert_same_cache(*used)
    assert handled(runner) == 2, runner.counts


def test_returned_cache_is_not_pool_memory():
    model = tiny("mistral")
    runner = install(model)
    first = model.generate(prompt(2), max_new_tokens=5, **FULL)
    kept = [layer.keys.clone() for layer in first.past_key_values.layers]
    model.generate(prompt(2, seed=8), max_new_tokens=30)
    assert all(
        torch.equal(a, layer.keys)
        for a, layer in zip(kept, first.past_key_values.layers, strict=True)
    )
    slabs = {
        slab.untyped_storage().data_ptr() for block in runner.pool._idle for slab in block.slabs
    }
    assert not slabs & {
        layer.keys.untyped_storage().data_ptr() for layer in first.past_key_values.layers
    }


def test_data_of_an_earlier_call_is_never_seen():
    model = tiny("llama")
    runner = install(model)
    model.generate(prompt(2, 30), max_new_tokens=30)
    for block in runner.pool._idle:
        for slab in block.slabs:
            slab[:, :, :, : block.dirty] = float("nan")  # as after an overflow in half precision
    stock, ours = both(model, {"inputs": prompt(2), "max_new_tokens": 40})
    assert_same(stock, ours)
    assert runner.pool.blocks == [(2, 256)]


def test_growth_in_mid_call(monkeypatch):

    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
    for family, extra in (("llama", {}), ("gemma2", {}), ("llama", {"repetition_penalty": 1.1})):
        model = tiny(family, max_position_embeddings=1024)
        runner = install(model, depth=2)
        assert_same(
            *both(model, {**left_padded((250, 240)), "max_new_tokens": 40, **extra, **FULL})
        )
        assert sorted(runner.pool.blocks) == [(2, 256), (2, 512)]
