"""Traced steps that verify drafts, captured in CUDA graphs, with searched kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mirage_hf.api import optimize
from scripts.scripted_drafts import drafting
from tests.decode.test_traced_steps_gpu import MODELS, made
from tests.helpers import generate_features
from tests.helpers.generate_comparison import PAD, left_padded
from tests.helpers.step_pairs import stocks
from tests.helpers.tiny_models import prompt, twin_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with generate_features.alone(tmp_path_factory.mktemp("cache")):
        yield


def calls() -> Iterator[dict[str, Any]]:
    """Yield the arguments of calls for one row, and for three with left padding."""
    for given in ({"input_ids": prompt(1, 9)}, left_padded((4, 11, 7))):
        on_gpu = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        yield {**on_gpu, "do_sample": False, "max_new_tokens": 60, "pad_token_id": PAD}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_stocks_whatever_is_drafted(name: str) -> None:
    stock = made(name, torch.float32)
    ours = optimize(twin_of(stock), batch_sizes=(1, 3), draft_tokens=(3,), tune="never")
    for given in calls():
        want = stock.generate(**given)
        for script_name, script in (("good", want), ("always wrong", (want + 1) % 99)):
            with drafting(script, script_name):
                for _ in range(2):  # the second one replays what the first one captured
                    got = ours.generate(**given, prompt_lookup_num_tokens=3)
                    assert got.tolist() == want.tolist(), script_name
    decode = ours.mirage.report.decode
    assert not stocks(ours) and decode["captured"] == decode["step: traced"] == 8, decode
    assert decode["drafts: taken"] > 300 and decode["drafts: tokens of a step: 1"] > 100, decode
