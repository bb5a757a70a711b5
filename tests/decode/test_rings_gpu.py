"""Sliding layers with ring caches on a GPU.

The checks of tests/helpers/ring_cache_checks.py run with real kernels and graphs, and with windows
of real sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mirage_hf.decode import step as decode_step
from tests.helpers import generate_features, ring_cache_checks
from tests.helpers.tiny_models import prompt, tiny

pytestmark = pytest.mark.gpu
WINDOW, SLOTS = 48, 64
QWEN2: dict[str, Any] = dict(
    use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]
)
PAIRS: dict[str, tuple[str, torch.dtype, str, tuple[bool, ...], dict[str, Any]]] = {
    "mistral, float32, kernels": ("mistral", torch.float32, "kernels", (True, True), {}),
    "gemma3, float32, kernels": (
        "gemma3",
        torch.float32,
        "kernels",
        (False, True),
        dict(head_dim=32),
    ),
    "qwen2, float32, kernels": ("qwen2", torch.float32, "kernels", (False, True), QWEN2),
    "gemma3, bfloat16, kernels": (
        "gemma3",
        torch.bfloat16,
        "kernels",
        (False, True),
        dict(head_dim=32),
    ),
    "gemma2, float32, forward": (
        "gemma2",
        torch.float32,
        "forward",
        (True, False),
        dict(head_dim=32),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with generate_features.alone(tmp_path_factory.mktemp("cache")) as patch:
        patch.setattr(generate_features, "ROWS", (1, 3))
        yield


def made(name: str, window: int, slots: int) -> ring_cache_checks.Rings:
    family, dtype, how, sliding, changes = PAIRS[name]
    model = tiny(
        family,
        dtype=dtype,
        max_position_embeddings=16384,
        sliding_window=window,
        **generate_features.WIDE,
        **changes,
    ).cuda()
    pair = generate_features.Pair(model, how, {"tune": "never"})
    if how == "kernels":
        assert (rows := pair.ours.mirage.report.rows) and all(
            r.status == "swapped" for r in rows
        ), str(pair.ours.mirage.report)
    return ring_cache_checks.Rings(pair, window, slots, sliding)


@pytest.fixture(scope="module", params=PAIRS)
def few_slots(request: pytest.FixtureRequest) -> ring_cache_checks.Rings:
    return made(request.param, WINDOW, SLOTS)


@pytest.mark.parametrize("name", ring_cache_checks.CHECKS)
def test_rings(
    name: str, few_slots: ring_cache_checks.Rings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring_cache_checks.small(monkeypatch, SLOTS)
    ring_cache_checks.CHECKS[name](few_slots)
    few_slots.agree({"inputs": prompt(1, SLOTS)}, 3)
    few_slots.check()


@pytest.mark.parametrize(
    ("name", "window", "calls"),
    [
        ("gemma3, float32, kernels", 512, ((700, 600), (3, 900), (511, 40), (512, 40))),
        ("mistral, float32, kernels", 1024, ((1500, 300), (1020, 200))),
        ("mistral, float32, kernels", 4096, ((4090, 60), (6000, 40))),
        ("qwen2, float32, kernels", 4000, ((4090, 60), (8300, 40))),
    ],
)
def test_windows_of_real_sizes(
    name: str, window: int, calls: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[str] = []
    captured = decode_step.capture

    def capture(*args: Any) -> Any:
        captures.append(name)
        return captured(*args)

    monkeypatch.setattr(decode_step, "capture", capture)
    r = made(name, window, 4096 if window == 4000 else window)
    for length, tokens in calls:
        r.agree({"inputs": prompt(1, length, seed=length)}, tokens)
        blocks = len(r.pair.runner.pool.blocks)
        assert len(captures) == blocks, (
            f"{name}, window {window}, prompt {length}: {len(captures)} captures for {blocks} "
            "blocks"
        )
    r.check()
    print(
        f"{name}, window {window}: blocks {r.pair.runner.pool.blocks}, "
        f"{r.pair.runner.bytes / 2**20:.1f} MiB"
    )
