"""Steps of encoder-decoder models run as traced: all results are stock's.

Kernels run their programs op by op here, so that no search is needed.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PretrainedConfig
from transformers.generation.streamers import BaseStreamer

from mirage_hf.api import optimize, restore
from mirage_hf.decode import trace_check
from mirage_hf.decode.explaining import explain_step, meta_model
from mirage_hf.decode.not_covered import NotCoveredError
from mirage_hf.errors import OptimizeWarning
from tests.helpers.encoder_decoders import MODELS, POSITIONS, built, inputs, whisper_with_timestamps
from tests.helpers.generate_comparison import assert_same_cache
from tests.helpers.step_pairs import FULL, agree, no_kernels, shared, steps, stocks
from tests.helpers.thorough import count
from tests.helpers.tiny_models import same, snapshot, twin_of

# Not run with other versions of transformers, whose decoders are written in other ways.
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("resolved")]

GREEDY = {"do_sample": False, "max_new_tokens": count(64, 24)}
SHORT = {"do_sample": False, "max_new_tokens": 12}


def pair(name: str, batch_sizes: tuple[int, ...] = (1, 3)) -> tuple[Any, Any]:
    """Return a small stock model and its optimized copy."""
    stock = built(name)
    return stock, optimize(twin_of(stock), batch_sizes=batch_sizes, verify=False)


shared_pair = shared(pair)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_logits_and_caches_are_stocks(name: str) -> None:
    stock, ours = shared_pair(name)
    for batch in (1, 3):
        agree(stock, ours, {**inputs(stock, batch), **GREEDY, **FULL})
        agree(stock, ours, {**inputs(stock, batch), **GREEDY})
    assert steps(ours) == {"traced": 4} and not stocks(ours)


@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_a_model_is_as_it_was_after_restore(name: str) -> None:
    model = built(name)
    before, given = snapshot(model), {**inputs(model, 1), **SHORT}
    want = model.generate(**given)
    optimize(model, batch_sizes=(1,), verify=False)
    model.generate(**given)
    restore(model)
    assert "generate" not in vars(model)
    assert same(snapshot(model), before)
    assert torch.equal(model.generate(**given), want)


@pytest.mark.parametrize("length", [3, 90, 150])
def test_texts_of_other_lengths_leave_nothing_behind(length: int) -> None:
    """A block keeps what the encoder gave, until the next call."""
    stock, ours = shared_pair("bart")
    for next_length in (length, 7, length):
        given = inputs(stock, 3, next_length, seed=next_length)
        # Some CPUs add in another order: one logit of 633 then differs by 2.9e-5.
        agree(stock, ours, {**given, **SHORT, **FULL}, rounding=4e-5)
    assert steps(ours) == {"traced": 3}


def test_a_text_for_which_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    from mirage_hf.decode import call_plan

    monkeypatch.setattr(call_plan, "FIRST_REACH", 8)
    stock, ours = pair("t5")
    agree(stock, ours, {**inputs(stock, 3), "do_sample": False, "max_new_tokens": 300, **FULL})
    assert steps(ours) == {"traced": 1}


def test_sampling_draws_from_stocks_probabilities() -> None:
    stock, ours = shared_pair("marian")
    for options in ({}, {"top_k": 20, "temperature": 1.5}, {"top_p": 0.8}):
        given = {**inputs(stock, 3), "do_sample": True, "max_new_tokens": 24, **options}
        agree(stock, ours, given)
    assert steps(ours) == {"traced": 3}


@pytest.mark.parametrize(
    "options",
    [
        {"forced_bos_token_id": 9},
        {"forced_eos_token_id": 4},
        {"suppress_tokens": [3, 8], "begin_suppress_tokens": [5]},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"eos_token_id": [31, 77, 102], "min_new_tokens": 3},
        {"num_return_sequences": 3, "do_sample": True},
        {"decoder_input_ids": torch.tensor([[2, 9, 31]])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_are_stocks(options: dict[str, Any]) -> None:
    stock, ours = shared_pair("bart")
    agree(stock, ours, {**inputs(stock, 1), **SHORT, **options})
    assert steps(ours) == {"traced": 1}


def test_forced_and_suppressed_tokens_of_whisper() -> None:
    stock, ours = shared_pair("whisper")
    got = agree(stock, ours, {**inputs(stock, 3), **GREEDY, "return_dict_in_generate": False})
    assert not (got == 7).any()
    assert ours.mirage.report.decode["selection: on the device"] == 1


def test_segments_of_long_sound_with_timestamps() -> None:
    """Whisper's generate calls the standard one for each segment of 3 s."""
    stock = whisper_with_timestamps()
    ours = optimize(twin_of(stock), batch_sizes=(1, 2), verify=False)
    frames = torch.tensor([[700], [500]])
    given = {
        "input_features": torch.randn(2, 16, 700, generator=torch.Generator().manual_seed(1)),
        "attention_mask": (torch.arange(700) < frames).long(),
        "return_timestamps": True,
        "condition_on_prev_tokens": True,
        "do_sample": False,
        "max_new_tokens": 20,
    }
    agree(stock, ours, given)
    assert steps(ours)["traced"] > 1 and not stocks(ours)


def test_only_the_segments_that_need_it_run_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    from mirage_hf.decode import generate_method

    stock = whisper_with_timestamps()
    ours = optimize(twin_of(stock), batch_sizes=(1,), verify=False)
    run, calls = generate_method.generate, []

    def every_second(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise NotCoveredError("a reason")
        return run(*args, **kwargs)

    monkeypatch.setattr(generate_method, "generate", every_second)
    features = torch.randn(1, 16, 700, generator=torch.Generator().manual_seed(1))
    given = {"input_features": features, "return_timestamps": True, **SHORT}
    agree(stock, ours, {**given, "attention_mask": torch.ones(1, 700, dtype=torch.long)})
    assert len(calls) > 1
    assert steps(ours)["traced"] == (len(calls) + 1) // 2
    assert stocks(ours) == ["stock: a reason"]


def test_prompts_of_a_decoder_with_padding() -> None:
    """Whisper gives them positions of their own; BART counts slots."""
    ids = torch.tensor([[0, 0, 9, 31], [0, 8, 9, 32], [2, 8, 9, 33]])
    for name in ("whisper", "bart"):
        stock, ours = shared_pair(name)
        given = {"decoder_input_ids": ids, "decoder_attention_mask": (ids != 0).long()}
        want = stock.generate(**inputs(stock, 3), **given, **{**SHORT, **FULL})
        got = ours.generate(**inputs(stock, 3), **given, **{**SHORT, **FULL})
        assert steps(ours) == {"traced": 1}, ours.mirage.report.decode
        for a, b in zip(want.logits, got.logits, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=2e-5)


def test_the_encoders_output_may_be_given() -> None:
    stock, ours = shared_pair("t5")
    given = inputs(stock, 3)
    outputs = stock.get_encoder()(**given)
    mask = given["attention_mask"]
    for _ in range(2):
        agree(stock, ours, {"encoder_outputs": outputs, "attention_mask": mask, **SHORT})
    assert steps(ours) == {"traced": 2}


def test_a_users_cache_is_filled_and_continued() -> None:
    stock, ours = shared_pair("bart")
    given, ids = inputs(stock, 3), torch.full((3, 1), 2)
    caches = []
    for model in (stock, ours):
        cache = EncoderDecoderCache(
            DynamicCache(config=model.config), DynamicCache(config=model.config)
        )
        text = model.generate(
            **given, decoder_input_ids=ids, past_key_values=cache, **SHORT, use_cache=True
        )
        mask = torch.ones_like(text)
        longer = model.generate(
            **given,
            decoder_input_ids=text,
            decoder_attention_mask=mask,
            past_key_values=cache,
            **SHORT,
        )
        caches.append((cache, text, longer))
    (theirs, *want), (mine, *got) = caches
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)
    assert_same_cache(theirs, mine)
    assert steps(ours) == {"traced": 2}


@pytest.mark.parametrize("name", ["pegasus", "whisper"])
def test_streamers_get_every_token_once(name: str) -> None:
    class Tokens(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    stock, ours = shared_pair(name, (1,))
    streamed = []
    for model in (stock, ours):
        streamer = Tokens()
        model.generate(**inputs(model, 1), **SHORT, streamer=streamer)
        streamed.append(streamer.tokens)
    assert streamed[0] == streamed[1]
    assert steps(ours) == {"traced": 1}


# -- what runs stock -------------------------------------------------------------------------------


def test_beams_run_stock() -> None:
    stock, ours = shared_pair("bart", (1,))
    agree(stock, ours, {**inputs(stock, 1), **SHORT, "num_beams": 3})
    assert stocks(ours) == ["stock: beam search (num_beams=3)"]


def test_other_batch_sizes_run_stock() -> None:
    stock, ours = shared_pair("bart", (1,))
    agree(stock, ours, {**inputs(stock, 3), **SHORT})
    assert stocks(ours) == [f"stock: {no_kernels(3)}"]


def test_texts_beyond_a_table_of_positions_run_stock() -> None:
    """M2M100 makes a longer table if a text is longer. A recording does not."""
    stock, ours = pair("m2m_100", (1,))
    plans = ours.generate.runner.traced.plans.values()
    assert {plan.recording.reach for plan in plans} == {POSITIONS}
    for tokens in (POSITIONS, POSITIONS + 20):
        agree(stock, ours, {**inputs(stock, 1), "do_sample": False, "max_new_tokens": tokens})
    assert steps(ours) == {"traced": 1}
    assert stocks(ours) == [
        f"stock: a text longer than {POSITIONS + 1} tokens, which runs other ops"
    ]


def test_a_mask_of_another_length_than_the_encoders_output_runs_stock() -> None:
    stock, ours = shared_pair("bart", (1,))
    states = stock.get_encoder()(**inputs(stock, 1)).last_hidden_state
    given = {"encoder_outputs": (states,), "attention_mask": torch.tensor([[1, 1, 0]])}
    with pytest.raises((RuntimeError, ValueError, AttributeError)):
        ours.generate(**given, **SHORT)
    assert stocks(ours) == ["stock: padding in a mask that the model maps to the encoder's output"]


# -- the check and the cache -----------------------------------------------------------------------


def test_a_step_that_differs_from_stocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees a mask of the encoder's output that is lost."""
    monkeypatch.setattr(
        trace_check, "_mask_use", lambda model: "ignores"
    )  # so steps see padding, too
    random_source = trace_check._random_source
    monkeypatch.setattr(
        trace_check, "_random_source", lambda *args: random_source(*args[:-1], "hides")
    )
    store = trace_check.Source.store

    def without_mask(source: Any, block: Any, cache: Any) -> None:
        store(trace_check.Source(source.states, None), block, cache)

    monkeypatch.setattr(trace_check.Source, "store", without_mask)
    with pytest.warns(OptimizeWarning, match="differs from stock's"):
        optimize(built("bart"), batch_sizes=(1,), patterns=None, verify=False)


@pytest.mark.parametrize(("name", "use"), [("bart", "hides"), ("whisper", "ignores")])
def test_what_a_model_does_with_a_mask_is_found(name: str, use: str) -> None:
    _, ours = shared_pair(name, (1,))
    assert ours.generate.runner.traced.mask_use == use


def test_a_call_that_goes_to_stock_after_its_prefill_leaves_the_users_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mirage_hf.decode import generate

    def not_covered(*_: Any, **__: Any) -> None:
        raise NotCoveredError("a reason")

    stock, ours = pair("bart", (1,))
    monkeypatch.setattr(generate, "first_step_position", not_covered)
    caches = []
    for model in (stock, ours):
        cache = EncoderDecoderCache(
            DynamicCache(config=model.config), DynamicCache(config=model.config)
        )
        caches.append((model.generate(**inputs(model, 1), **SHORT, past_key_values=cache), cache))
    assert torch.equal(caches[0][0], caches[1][0])
    assert_same_cache(caches[0][1], caches[1][1])
    assert stocks(ours) == ["stock: a reason"]


def test_a_changed_model_runs_stock() -> None:
    stock, ours = pair("t5", (1,))
    for model in (stock, ours):
        model.decoder.block[1].layer[1].EncDecAttention.o = nn.Linear(64, 64, bias=False)
    stock.load_state_dict(copy.deepcopy(ours.state_dict()))
    agree(stock, ours, {**inputs(stock, 1), **SHORT})
    assert stocks(ours) == ["stock: the model has changed since optimize()"]


def test_an_encoder_of_unknown_width_runs_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("bart")
    encoder = SimpleNamespace(config=PretrainedConfig())
    monkeypatch.setattr(type(model), "get_encoder", lambda _: encoder)
    with pytest.warns(OptimizeWarning, match="the config of its encoder has no hidden_size"):
        optimize(model, batch_sizes=(1,), verify=False)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_steps_are_explained_from_a_config(name: str) -> None:
    model = meta_model(built(name).config, torch.bfloat16)
    kernels, ops = explain_step(model)
    assert type(model) is type(built(name))
    modules = {e.module for e in kernels}
    assert any("encoder_attn" in m or "EncDecAttention" in m for m in modules), modules
    assert not any(e.why for e in kernels)
    # T5 has a bias on scores, so both kinds of attention stay with torch
    assert sum(e.count for e in ops if e.what == "cached_attention") == (4 if name == "t5" else 2)
