"""Prefills of short prompts that are replayed: the same code on a CPU, where a "graph" calls what was captured."""
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import FAMILIES, assert_same, both, left_padded, prompt, tiny

from mirage_hf.decode import generate, install, prefill, program

FULL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 6}
LENGTHS = (7, 9, 30, 7, 64, 63, 65, 70, 128, 3, 1)


@pytest.fixture(autouse=True)
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Captures that call what they captured; how many there were, by module."""
    made: list[str] = []

    def capture_for(name: str) -> Callable[..., Any]:
        def capture(run: Callable[[], None], device: torch.device, pool: Any) -> Any:
            for _ in range(3):  # as warming up does
                run()
            made.append(name)
            return SimpleNamespace(replay=run), pool
        return capture
    monkeypatch.setattr(generate, "can_capture", lambda device: None)
    for module in (prefill, program):
        monkeypatch.setattr(module, "capture", capture_for(module.__name__.rpartition(".")[2]))
    return made


def alike(model: Any, batch: int, length: int) -> None:
    assert_same(*both(model, lambda: {"inputs": prompt(batch, length, seed=length), **FULL}))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_changing_length(family: str, batch: int, called: list[str]) -> None:
    """Tokens, logits and the keys that are left, whatever an earlier and longer prompt has left in the block."""
    model = tiny(family)
    runner = install(model)
    for length in LENGTHS:
        alike(model, batch, length)
    windowed = any(window is not None for _, window in program.MaskPlan.of(model.config).windows)
    # eight prompts have a bucket of 64, three one of 128; the first of each runs HF's forward
    assert runner.prefills == ({} if windowed else {"captured": 7 + 2}) and called.count("prefill") == (0 if windowed else 2)


def test_what_is_no_plain_prompt_runs_as_it_is(called: list[str]) -> None:
    model = tiny("llama")
    runner = install(model)
    for _ in range(3):
        alike(model, 2, 9)
    seen = dict(runner.prefills)
    assert seen == {"captured": 2}
    assert_same(*both(model, lambda: {**left_padded(), **FULL}))
    assert_same(*both(model, lambda: {"inputs": prompt(2, 9), "position_ids": torch.arange(4, 13)[None], **FULL}))
    alike(model, 2, 5)
    assert runner.prefills == {"captured": 3} and called.count("prefill") == 1
    block = runner.pool.lease(2, 4096, (False, False), torch.device("cpu"))
    assert prefill.bucket_of(2, 1024, block, ()) == 1024 and prefill.bucket_of(2, 1025, block, ()) is None


def test_a_changed_model_is_captured_anew(called: list[str]) -> None:
    model = tiny("llama")
    runner = install(model)
    for _ in range(3):
        alike(model, 1, 9)
    model.model.norm.weight = torch.nn.Parameter(2 * model.model.norm.weight.detach())
    for _ in range(3):
        alike(model, 1, 9)
    assert called.count("prefill") == 2
    model.double()  # other keys, other logits: the first prompt runs HF's forward again
    for _ in range(3):
        alike(model, 1, 9)
    assert called.count("prefill") == 3 and set(runner.prefills) == {"captured"}


def test_a_forward_that_cannot_be_captured_is_hfs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise TypeError("no tensors here")
    monkeypatch.setattr(prefill, "capture", refuse)
    model = tiny("llama")
    runner = install(model)
    for length in (9, 9, 30, 9):
        alike(model, 1, length)
    assert runner.prefills == {"called: capture failed (TypeError: no tensors here)": 1}
