"""Decoders after an encoder verify drafts: tokens are those of plain decoding."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import WhisperConfig, WhisperForCausalLM, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mirage_hf.api import optimize
from mirage_hf.decode.sources import is_source
from mirage_hf.trace.cached_attention import ATTENTION_OP
from scripts.scripted_drafts import drafting
from tests.helpers.drafted import scripts, taken
from tests.helpers.encoder_decoders import (
    MODELS,
    OF_WHISPER,
    SIZES,
    built,
    inputs,
    whisper_with_timestamps,
)
from tests.helpers.step_pairs import shared, stocks
from tests.helpers.thorough import THOROUGH
from tests.helpers.tiny_models import twin_of

# Not run with other versions of transformers, whose decoders are written in other ways.
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("resolved")]

#: Models with assistants that agree (seed 0), and that do not.
ASSISTANTS = (
    list(itertools.product(["bart", "t5", "marian", "whisper"], [0, 1]))
    if THOROUGH
    else [("bart", 0), ("t5", 1)]  # Whisper has tests of its own below
)

#: Models whose steps are BART's, with other positions or activations.
AS_BART = ("marian", "pegasus")

GREEDY = {"do_sample": False, "max_new_tokens": 60}
LOOKUP = {"prompt_lookup_num_tokens": 3}


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a stock model and its optimized copy with traced steps for drafts."""
    stock = built(name)
    given = {"batch_sizes": (1, 3), "draft_tokens": (3,), "verify": False, **options}
    return stock, optimize(twin_of(stock), **given)


shared_pair = shared(pair)


def whole(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the decoder's texts. Whisper's generate leaves out the token that they begin with."""
    if tokens.shape[1] > GREEDY["max_new_tokens"]:
        return tokens
    start = torch.full_like(tokens[:, :1], model.config.decoder_start_token_id)
    return torch.cat([start, tokens], 1)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.thorough] * (x in AS_BART)) for x in MODELS]
)
def test_greedy_tokens_are_stocks_whatever_is_drafted(name: str) -> None:
    stock, ours = shared_pair(name)
    for batch in (1, 3):
        given = {**inputs(stock, batch), **GREEDY}
        want = stock.generate(**given)
        for quality, script in scripts(whole(stock, want)).items():
            if batch == 1 and quality not in ("good", "often right") and not THOROUGH:
                continue
            with drafting(script, quality):
                got = ours.generate(**given, **LOOKUP)
            assert got.tolist() == want.tolist(), (quality, batch)
        assert ours.generate(**given, **LOOKUP).tolist() == want.tolist()
    assert taken(ours) > 240


@pytest.mark.parametrize("name", ["bart", "whisper", "t5"])
def test_what_an_encoder_gave_is_read_once_for_all_tokens_of_a_text(name: str) -> None:
    _, ours = shared_pair(name)
    for plan in ours.generate.runner.traced.drafting.values():
        nodes = [unit.node for unit in plan.step_ops if unit.node is not None]
        copied = [x for node in nodes if "for_each_token" in node.name for x in node.operands]
        assert not any(is_source(x) for x in copied)
        read = [x for node in nodes if node.name == ATTENTION_OP for x in node.operands]
        assert sum(is_source(x) for x in read) == 4  # keys and values of two layers


# -- assistants ------------------------------------------------------------------------------------


def assistant(name: str, seed: int, **options: Any) -> Any:
    """Return an optimized model of the same kind. With the seed 0 it is the model itself."""
    helper = built(name)
    if seed:
        torch.manual_seed(seed)
        helper = type(helper)(helper.config).eval()
    given = {"batch_sizes": (1, 3), "draft_tokens": (1,), "verify": False, **options}
    helper = optimize(helper, **given)
    helper.generation_config.num_assistant_tokens = 3
    return helper


@pytest.mark.parametrize(("name", "seed"), ASSISTANTS)
def test_an_assistant_with_an_encoder_of_its_own_drafts(name: str, seed: int) -> None:
    stock, ours = shared_pair(name)
    helper = assistant(name, seed)
    for batch in (1, 3):
        given = {**inputs(stock, batch), **GREEDY}
        want = stock.generate(**given)
        for _ in range(2):
            assert ours.generate(**given, assistant_model=helper).tolist() == want.tolist()
        if batch == 1:  # stock takes no batches
            assert stock.generate(**given, assistant_model=built(name)).tolist() == want.tolist()
    assert_drafted(ours, good=seed == 0)


def assert_drafted(model: Any, *, good: bool) -> None:
    """Check that calls drafted, and that most drafts were taken if they are good."""
    assert not stocks(model), model.mirage.report
    counts = model.mirage.report.decode
    assert counts["drafts: drafted"] == 3 * counts["drafts: steps of a row"] > 0
    assert not good or counts["drafts: taken"] > 0.9 * counts["drafts: drafted"]


def decoder_of_whisper(stock: Any, seed: int) -> Any:
    """Return a Whisper's decoder as a model, as distil-whisper is used. Its layers are fewer.

    With the seed 0 they are the first ones of the other model.
    """
    config = copy.deepcopy(stock.config)
    config.decoder_layers = 2 if seed == 0 else 1
    torch.manual_seed(seed)
    model = WhisperForCausalLM(config).eval()
    if seed == 0:
        model.model.decoder.load_state_dict(stock.model.decoder.state_dict())
        model.proj_out.load_state_dict(stock.proj_out.state_dict())
    model.generation_config.pad_token_id = 0
    model.generation_config.num_assistant_tokens = 3
    return model


@pytest.mark.parametrize("seed", [0, 1])
def test_a_decoder_alone_drafts_after_the_same_encoder(seed: int) -> None:
    stock, ours = shared_pair("whisper")
    plain = decoder_of_whisper(stock, seed)
    helper = optimize(twin_of(plain), batch_sizes=(1, 3), draft_tokens=(1,), verify=False)
    for batch in (1, 3):
        given = {**inputs(stock, batch), **GREEDY}
        want = stock.generate(**given)
        for _ in range(2):
            assert ours.generate(**given, assistant_model=helper).tolist() == want.tolist()
        if batch == 1:
            assert stock.generate(**given, assistant_model=plain).tolist() == want.tolist()
    assert_drafted(ours, good=seed == 0)


def test_a_call_of_whisper_with_an_assistant_may_end_at_once() -> None:
    """Whisper suppresses no first tokens if there is an assistant."""
    stock, ours = pair("whisper", batch_sizes=(1,))
    helper = assistant("whisper", 0, batch_sizes=(1,))
    given = {**inputs(stock, 1), **GREEDY}
    first = int(stock.generate(**given)[0, 0])
    for model in (stock, ours):
        model.generation_config.begin_suppress_tokens = [first]
    plain = stock.generate(**given)
    want = stock.generate(**given, assistant_model=built("whisper"))
    assert int(want[0, 0]) == first != int(plain[0, 0])
    assert ours.generate(**given, assistant_model=helper).tolist() == want.tolist()
    assert ours.generate(**given).tolist() == plain.tolist()
    assert_drafted(ours, good=True)


@pytest.mark.parametrize("drafts", ["lookup", "assistant"])
def test_segments_with_timestamps_are_stocks(drafts: str) -> None:
    """The host chooses timestamps. Each segment is stock's assisted decoding."""
    stock = whisper_with_timestamps()
    stock.generation_config.eos_token_id = 3  # stock would take the first token for an end
    ours = optimize(twin_of(stock), batch_sizes=(1,), draft_tokens=(3,), verify=False)
    helper = optimize(whisper_with_timestamps(), batch_sizes=(1,), verify=False)
    features = torch.randn(1, 16, 700, generator=torch.Generator().manual_seed(1))
    given = {"input_features": features, "attention_mask": torch.ones(1, 700, dtype=torch.long)}
    given |= {"return_timestamps": True, "do_sample": False, "max_new_tokens": 20}
    options = [LOOKUP, LOOKUP]
    if drafts == "assistant":
        options = [{"assistant_model": whisper_with_timestamps()}, {"assistant_model": helper}]
    want = stock.generate(**given, **options[0])
    assert ours.generate(**given, **options[1]).tolist() == want.tolist()
    (why,) = stocks(ours)
    assert why.endswith("tokens that the host chooses: processor WhisperTimeStampLogitsProcessor")
    assert ours.mirage.report.decode[why] > 1


def test_what_stock_rejects_is_stocks() -> None:
    stock, ours = pair("whisper", batch_sizes=(1,))
    given = {**inputs(stock, 1), **GREEDY}
    other = decoder_of_whisper(stock, 1)
    other.config.encoder_ffn_dim += 1
    optimize(other, batch_sizes=(1,), verify=False)
    with pytest.raises(ValueError, match="compatible encoder-dependent input shapes"):
        ours.generate(**given, assistant_model=other)
    wide = WhisperForConditionalGeneration(
        WhisperConfig(**SIZES, **{**OF_WHISPER, "num_mel_bins": 8})
    )
    optimize(wide.eval(), batch_sizes=(1,), verify=False)
    with pytest.raises(RuntimeError):
        ours.generate(**given, assistant_model=wide)
    encoder, raised = sorted(stocks(ours))
    assert encoder == "stock: assisted decoding: an assistant for another encoder, or for none"
    assert raised.startswith("stock: assisted decoding: the assistant's encoder raised Runtime")


def test_the_decoder_of_whisper_alone_runs_stock() -> None:
    torch.manual_seed(0)
    config = WhisperConfig(**{**SIZES, "encoder_layers": 2}, **OF_WHISPER)
    stock = WhisperForCausalLM(config).eval()
    ours = optimize(twin_of(stock), batch_sizes=(1,), verify=False)
    given = {"input_ids": torch.tensor([[2, 9, 31]]), **GREEDY, "pad_token_id": 0}
    outputs = BaseModelOutput(last_hidden_state=torch.randn(1, 150, 64))
    for more in ({}, {"encoder_outputs": outputs}):
        assert ours.generate(**given, **more).tolist() == stock.generate(**given, **more).tolist()
    assert sorted(stocks(ours)) == [
        "stock: a cache without a part for what an encoder gave",
        "stock: a call without encoder_outputs, which its steps read",
    ]
