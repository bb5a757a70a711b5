"""Some calls of scripts/soak_generate.py on a CPU.

tests/scripts/test_soak_gpu.py makes a thousand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scripts import soak_generate
from tests.helpers.generate_features import KERNELS, Pair
from tests.helpers.thorough import count

pytestmark = [
    pytest.mark.models,
    pytest.mark.usefixtures("resolved"),
    pytest.mark.slow,
]


def pair(family: str) -> Pair:
    return soak_generate.drafting_pair(family, "cpu", {"verify": False})


def test_calls_of_all_kinds() -> None:
    """Calls with drafts and without, interrupted ones among them."""
    calls = count(1000, 30)
    pairs = [pair(family) for family in ("llama", "mistral")]
    counts = soak_generate.soak(pairs, calls, seed=3)
    assert counts[f"step: {KERNELS}"] > min(calls, 60)
    assert counts["drafts: taken"] > 10


def test_a_stale_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_generate, "KINDS", {"greedy": soak_generate.KINDS["greedy"]})
    one = pair("llama")
    texts: list[Any] = []
    real = one.ours.generate

    def stale(**arguments: Any) -> Any:
        texts.append(real(**arguments))
        return texts[-1] if len(texts) < 12 else texts[-2]

    one.ours.__dict__["generate"] = stale
    monkeypatch.setattr(Pair, "runner", property(lambda self: real.runner))
    with pytest.raises(
        AssertionError, match=r"call \d+ of seed 0, greedy on llama, like .*input_ids"
    ):
        soak_generate.soak([one], 40, seed=0)


@pytest.mark.parametrize(
    "what",
    [
        "reachable tensors",
        *(pytest.param(what, marks=pytest.mark.thorough) for what in ("host", "objects")),
    ],
)
def test_growing_memory_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def leak(pair: Pair, rng: Any) -> None:
        kept.append([[] for _ in range(1000)] if what == "objects" else torch.ones(2**22))

    monkeypatch.setattr(soak_generate, "KINDS", {"leak": leak})
    limits = {what: soak_generate.LIMITS[what]}
    with pytest.raises(AssertionError, match=rf"memory grew in 5 calls by .*{what}"):
        soak_generate.soak([pair("llama")], 10, seed=0, limits=limits)
