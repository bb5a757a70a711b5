"""A trained model and its smaller trained assistant (scripts/train_tiny.py): real acceptance.

The bounds are below what was seen. A step with three drafts took 1.8 of them in greedy calls, and
1.3 in calls that sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mirage_hf.api import optimize
from tests.decode.test_drafts import counted_steps, steps_by_tokens, verified
from tests.helpers.generate_comparison import our_numbers
from tests.helpers.step_pairs import generated
from tests.helpers.thorough import count
from tests.helpers.tiny_models import twin_of

ASSETS = Path(__file__).parents[1] / "assets"
ASSISTANT = ASSETS / "tiny_llama_assistant"
TEXTS = ["The ", "Return a new ", "If the file is ", "Raise an error if "]

pytestmark = [
    pytest.mark.models,
    pytest.mark.slow,
    pytest.mark.usefixtures("resolved"),
    pytest.mark.skipif(not ASSISTANT.exists(), reason="the trained assets are not there"),
]


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def stock() -> Any:
    return loaded(ASSETS / "tiny_llama")


def prompts(texts: list[str]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny_llama", padding_side="left")
    given = tokenizer(texts, return_tensors="pt", padding=True)
    return {**given, "max_new_tokens": 200, "min_new_tokens": 200}


def taken_of_a_step(model: Any) -> float:
    """Return how many drafts a step with drafts took on average."""
    counts = model.mirage.report.decode
    return counts["drafts: taken"] / counts["drafts: steps of a row"]


def drafting_pair(stock: Any, batch: int = 1) -> tuple[Any, Any]:
    """Return the optimized model, and its optimized assistant."""
    options = {"batch_sizes": (batch,), "verify": False}
    ours = optimize(twin_of(stock), draft_tokens=(3, 7), **options)
    return ours, optimize(loaded(ASSISTANT), **options)


def test_the_assistant_is_small() -> None:
    assert (ASSISTANT / "model.safetensors").stat().st_size < 1_000_000


def test_greedy_drafts_are_mostly_taken(stock: Any) -> None:
    ours, assistant = drafting_pair(stock)
    texts, most = TEXTS[: count(len(TEXTS), 2)], 0
    for text in texts:
        given = {**prompts([text]), "do_sample": False}
        want = stock.generate(**given)
        got, steps = counted_steps(ours, {**given, "assistant_model": assistant})
        assert got.tolist() == want.tolist()
        most = max(most, steps)
    assert taken_of_a_step(ours) > 1.5
    assert most < 120 and verified(ours) == len(texts)
    # with a fifth of the model's weights, three drafts a step pay best, and none are given up
    used = steps_by_tokens(ours)
    assert used[4] > used.get(8, 0) and 1 not in used, used


def test_rows_of_a_batch_draft_together(stock: Any) -> None:
    ours, assistant = drafting_pair(stock, len(TEXTS))
    given = {**prompts(TEXTS), "do_sample": False}
    want = stock.generate(**given)
    got, steps = counted_steps(ours, {**given, "assistant_model": assistant})
    assert got.tolist() == want.tolist()
    assert taken_of_a_step(ours) > 1.5 and steps < 130


def test_samples_take_drafts_too(stock: Any) -> None:
    ours, assistant = drafting_pair(stock)
    given = {**prompts(TEXTS[:1]), "do_sample": True, "temperature": 0.8, "top_k": 0}
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.num_assistant_tokens = 3
    for seed in range(count(3, 1)):
        with our_numbers():
            want = generated(stock, given, seed)
        got = generated(ours, {**given, "assistant_model": assistant}, seed)
        assert got.tolist() == want.tolist()
    assert taken_of_a_step(ours) > 1.0
