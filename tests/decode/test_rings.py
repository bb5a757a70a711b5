"""Sliding layers whose caches are rings of as many slots as their window.

They give stock's tokens, logits and caches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from transformers import DynamicCache

from mirage_hf.decode import install
from tests.helpers import ring_cache_checks
from tests.helpers.generate_comparison import assert_same, both
from tests.helpers.generate_features import Pair, fake_captures
from tests.helpers.tiny_models import WINDOW, prompt, tiny

pytestmark = pytest.mark.models

SLOTS = 16
SLIDING: dict[str, Any] = dict(
    use_sliding_window=True,
    sliding_window=WINDOW,
    layer_types=["full_attention", "sliding_attention"],
)
MODELS: dict[str, tuple[tuple[bool, ...], Callable[[], Any]]] = {
    "mistral": ((True, True), lambda: tiny("mistral", num_hidden_layers=2)),
    "gemma2": ((True, False), lambda: tiny("gemma2", num_hidden_layers=2)),
    "gemma3": ((False, True), lambda: tiny("gemma3", num_hidden_layers=2)),
    "qwen2": ((False, True), lambda: tiny("qwen2", num_hidden_layers=2, **SLIDING)),
}


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ring_cache_checks.small(monkeypatch, SLOTS)
    return fake_captures(monkeypatch)


def of(family: str, how: str) -> ring_cache_checks.Rings:
    sliding, make = MODELS[family]
    r = ring_cache_checks.Rings(Pair(make(), how, {"verify": False}), WINDOW, SLOTS, sliding)
    r.pair.runner.depth = 2  # as on a GPU
    return r


@pytest.mark.parametrize("family", ["mistral", pytest.param("gemma2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ring_cache_checks.CHECKS)
def test_the_models_own_forward(name: str, family: str) -> None:
    r = of(family, "forward")
    ring_cache_checks.CHECKS[name](r)
    r.agree({"inputs": prompt(1, SLOTS)}, 3)
    r.check()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3", "qwen2"])
def test_steps_by_kernels(family: str, resolved: list[Any]) -> None:
    r = of(family, "kernels")
    for name in (
        "left_padding",
        "steps_that_find_no_row_alive",
        "caches_passed_in",
        "blocks_that_grow",
    )[: 4 if family == "gemma3" else 1]:
        ring_cache_checks.CHECKS[name](r)
    r.agree({"inputs": prompt(1, SLOTS)}, 3)
    r.check()


def test_nothing_is_captured_anew_as_rings_turn(captured: list[str]) -> None:
    model = tiny("gemma2", num_hidden_layers=2)
    install(model)
    for length in (SLOTS + 1, 2, SLOTS, WINDOW):
        model.generate(prompt(1, length), max_new_tokens=4 * SLOTS - length, do_sample=False)
    assert captured == ["step"]


@pytest.mark.parametrize(
    "changes", [dict(sliding_window=5), dict(layer_types=["sliding_attention"] * 2)]
)
def test_a_cache_that_slides_over_other_windows_is_stocks(changes: dict[str, Any]) -> None:
    model = tiny("gemma2", num_hidden_layers=2)
    runner, config = install(model), copy.deepcopy(model.config)
    vars(config).update(changes)
    assert_same(
        *both(
            model,
            lambda: {
                "inputs": prompt(),
                "max_new_tokens": 20,
                "past_key_values": DynamicCache(config=config),
            },
        )
    )
    assert runner.counts == {
        "stock: a cache that slides over other windows than the model's layers": 1
    }
