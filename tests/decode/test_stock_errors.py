"""Errors in the middle of a call.

What the streamer got, the user's cache and the error's type are the same as with stock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.generation.logits_process as hf
from torch.distributions import Distribution
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from mirage_hf.decode import install
from tests.helpers.generate_comparison import (
    VOCABULARY,
    Recorder,
    assert_same_cache,
    prompt,
    tiny,
)

pytestmark = pytest.mark.models


class Interrupted(Exception):
    pass


class FailingStreamer(BaseStreamer):
    """A streamer that raises at its n-th call. The first call brings the prompt."""

    def __init__(self, calls: int):
        self.calls = calls

    def put(self, value: torch.Tensor) -> None:
        self.calls -= 1
        if not self.calls:
            raise Interrupted

    def end(self) -> None:
        pass


class FailingProcessor(LogitsProcessor):
    def __init__(self, calls: int):
        self.calls = calls

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if not self.calls:
            raise Interrupted
        return scores


class FailingCriterion(StoppingCriteria):
    def __init__(self, calls: int):
        self.calls = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls -= 1
        if not self.calls:
            raise Interrupted
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


FAILING: dict[str, Callable[[], dict[str, Any]]] = {
    "streamer, prompt": lambda: {"streamer": FailingStreamer(1)},
    "streamer, first token": lambda: {"streamer": FailingStreamer(2)},
    "streamer, sixth token": lambda: {"streamer": FailingStreamer(7)},
    "processor": lambda: {"logits_processor": [FailingProcessor(4)]},
    "criterion": lambda: {"stopping_criteria": [FailingCriterion(5)]},
}


def generates(model: Any) -> list[Callable[..., Any]]:
    """Return stock's generate and ours."""
    return [type(model).generate.__get__(model), model.generate]


def cache_after(
    model: Any, generate: Callable[..., Any], past: int, given: Callable[[], dict[str, Any]]
) -> DynamicCache:
    """Return a user's cache after a call that raised."""
    cache, ids = DynamicCache(config=model.config), prompt(2, 12)
    if past:
        with torch.no_grad():
            model(ids[:, :past], past_key_values=cache, use_cache=True)
    with pytest.raises(Interrupted):
        generate(inputs=ids, past_key_values=cache, max_new_tokens=12, **given())
    return cache


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("given", FAILING)
def test_a_users_cache_holds_what_was_written_up_to_an_error(given, past, depth):
    model = tiny("llama")
    install(model, depth=depth)
    stock, ours = (cache_after(model, g, past, FAILING[given]) for g in generates(model))
    assert_same_cache(stock, ours)


@pytest.mark.parametrize("given", FAILING)
def test_a_users_cache_in_rings_holds_it_if_no_step_ran_ahead(given):
    model = tiny("mistral", max_position_embeddings=1024)
    install(model, depth=0)
    stock, ours = (cache_after(model, g, 0, FAILING[given]) for g in generates(model))
    assert_same_cache(stock, ours)


def order_of(
    model: Any, generate: Callable[..., Any], **given: Any
) -> tuple[list[tuple[Any, ...]], BaseException | None]:
    """Return the calls of a streamer and of the embedding in their order, and the error."""
    recorder, table = Recorder(), model.get_input_embeddings()
    embed = type(table).forward.__get__(table)

    def noted(ids: torch.Tensor) -> torch.Tensor:
        recorder.events.append(("forward", tuple(ids.shape)))
        return embed(ids)

    table.forward = noted
    try:
        generate(streamer=recorder, **given)
    except ValueError as error:
        return recorder.events, error
    finally:
        del table.forward
    return recorder.events, None


def test_a_streamer_gets_the_prompt_before_its_forward():
    model = tiny("llama")
    runner = install(model)
    given = {"inputs": prompt(1, 7), "max_new_tokens": 3}
    (stock, _), (ours, _) = (order_of(model, g, **given) for g in generates(model))
    assert [event[0] for event in stock][:2] == ["put", "forward"] and ours == stock
    assert set(runner.counts) == {"called: no graphs on cpu"}


@pytest.mark.parametrize("by", ["max_length", "an invalid cache"])
def test_a_streamer_gets_the_prompt_before_an_error(by):
    model = tiny("llama")
    install(model)
    given = {"inputs": prompt(1, 7), "max_length": 5}
    if by == "an invalid cache":
        given = {"inputs": prompt(1, 7), "max_new_tokens": 4, "cache_implementation": "no such"}
    (stock, stocks), (ours, error) = (order_of(model, g, **given) for g in generates(model))
    assert stock == ours and type(stocks) is type(error) and str(stocks) == str(error)
    assert by != "max_length" or [event[0] for event in ours] == ["put"]


def test_a_streamer_gets_the_prompt_once_if_the_call_turns_out_to_be_stocks():
    model = tiny("llama")
    runner = install(model)
    mask = torch.ones(1, 7, dtype=torch.long)
    mask[0, 3] = 0
    given = {"inputs": prompt(1, 7), "attention_mask": mask, "max_new_tokens": 3}
    (stock, _), (ours, _) = (order_of(model, g, **given) for g in generates(model))
    assert ours == stock
    assert runner.counts == {"stock: holes in the mask": 1}


EVERYTHING = list(range(VOCABULARY))


@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": True, "top_h": 0.4},
        {"do_sample": True, "top_k": 0, "eta_cutoff": 0.1},
        {"do_sample": False, "logits_processor": [hf.TopHLogitsWarper(0.4)]},
        {"do_sample": False, "logits_processor": [hf.EtaLogitsWarper(0.1)]},
    ],
    ids=["top_h", "eta_cutoff", "greedy top_h", "greedy eta_cutoff"],
)
@pytest.mark.parametrize("start", [0, 2])
def test_a_distribution_of_nothing_is_a_value_error(given, start, monkeypatch):
    """The error has the type of stock's, which torch's Categorical raises.

    It is raised at the first new token or at the third. The test switches torch's check of
    distributions on, because a compiled model of another test may have switched it off.
    """
    monkeypatch.setattr(Distribution, "_validate_args", True)
    model, recorders = tiny("llama"), (Recorder(), Recorder())
    runner = install(model)
    for generate, recorder in zip(generates(model), recorders, strict=True):
        suppressing = hf.SuppressTokensAtBeginLogitsProcessor(EVERYTHING, 7 + start, device="cpu")
        processors = LogitsProcessorList([suppressing, *given.get("logits_processor", ())])
        with pytest.raises(ValueError):
            generate(
                inputs=prompt(2, 7),
                max_new_tokens=6,
                streamer=recorder,
                **{**given, "logits_processor": processors},
            )
    puts = [[event for event in recorder.events if event[0] == "put"] for recorder in recorders]
    assert len(puts[0]) == len(puts[1]) == 1 + start
    assert set(runner.selections) == {"on the device"}


def test_nothing_left_without_a_distribution_is_a_runtime_error():
    model = tiny("llama")
    install(model)
    for generate in generates(model):
        suppressing = hf.SuppressTokensLogitsProcessor(EVERYTHING, device="cpu")
        with pytest.raises(RuntimeError):
            generate(
                inputs=prompt(1, 7),
                do_sample=True,
                max_new_tokens=3,
                logits_processor=LogitsProcessorList([suppressing]),
            )
