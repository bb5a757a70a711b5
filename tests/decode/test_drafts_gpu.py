"""Captured steps that verify drafts give the tokens of plain decoding on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mirage_hf.api import optimize
from scripts.scripted_drafts import drafting
from tests.helpers.generate_comparison import PAD, left_padded
from tests.helpers.step_pairs import stocks
from tests.helpers.tiny_models import WINDOW, prompt, tiny, twin_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def calls() -> Iterator[dict[str, Any]]:
    """Yield the arguments of calls for one row, and for three with left padding."""
    for given in ({"input_ids": prompt()}, left_padded((1, 2 * WINDOW + 1, WINDOW))):
        on_gpu = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        yield {**on_gpu, "do_sample": False, "max_new_tokens": 120, "pad_token_id": PAD}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_greedy_tokens_are_stocks_whatever_is_drafted(family: str) -> None:
    stock = tiny(family, num_hidden_layers=2, max_position_embeddings=1024).cuda()
    ours = optimize(twin_of(stock), batch_sizes=(1, 3), draft_tokens=(3,), tune="never")
    lookup = {"prompt_lookup_num_tokens": 3}
    for given in calls():
        want = stock.generate(**given)
        for name, script in (("good", want), ("always wrong", (want + 1) % 99)):
            with drafting(script, name):
                for _ in range(2):  # the second one replays what the first one captured
                    assert ours.generate(**given, **lookup).tolist() == want.tolist(), name
        assert ours.generate(**given, **lookup).tolist() == want.tolist()
    decode = ours.mirage.report.decode
    assert not stocks(ours) and decode["captured"] == 10, decode
    assert decode["step: all by kernels"] == 10, decode
    # wrong drafts are given up, in captured steps, too
    assert decode["drafts: tokens of a step: 1"] > 300, decode


def test_a_text_that_becomes_predictable_is_drafted_again() -> None:
    stock = tiny("llama", num_hidden_layers=2, max_position_embeddings=1024).cuda()
    ours = optimize(twin_of(stock), batch_sizes=(1, 3), draft_tokens=(3, 7), tune="never")
    for given in calls():
        want = stock.generate(**given)
        wrong_at_first = torch.where(
            torch.arange(want.shape[1], device=want.device) < want.shape[1] - 60,
            (want + 1) % 99,
            want,
        )
        with drafting(wrong_at_first):
            for _ in range(2):
                got = ours.generate(**given, prompt_lookup_num_tokens=7)
                assert got.tolist() == want.tolist()
    decode = ours.mirage.report.decode
    assert not stocks(ours) and decode["captured"] == 4, decode
    by_tokens = [decode[f"drafts: tokens of a step: {n}"] for n in (1, 4, 8)]
    assert min(by_tokens) > 4 and sum(by_tokens) < 4 * 100, decode


def test_an_assistant_drafts_inside_the_captured_step() -> None:
    stock = tiny("llama", num_hidden_layers=2, max_position_embeddings=1024).cuda()
    ours = optimize(twin_of(stock), draft_tokens=(3,), tune="never")
    assistant = optimize(twin_of(stock), tune="never")
    assistant.generation_config.num_assistant_tokens = 3
    # it is as large as the model, so its drafts do not pay
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    given = next(calls())
    want = stock.generate(**given)
    for _ in range(2):
        got = ours.generate(**given, assistant_model=assistant)
        assert got.tolist() == want.tolist()
    decode = ours.mirage.report.decode
    assert not stocks(ours) and decode["drafts: taken"] > 150, decode
