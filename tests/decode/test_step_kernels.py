"""Kernels of traced steps, chosen by the time of the layers that they run in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf.decode import step_kernels
from mirage_hf.decode.step_kernels import layers_of
from mirage_hf.pipeline.resolver import Resolved
from tests.decode.test_traced_steps import built, text


def test_a_layer_ends_where_a_kernel_would_run_again() -> None:
    assert layers_of("abcde" * 3 + "h") == [tuple("abcde"), tuple("abcdeh")]
    assert layers_of("abcabxbcabc") == [*map(tuple, ("abc", "abx", "bca", "bc"))]
    assert layers_of("aa") == [("a",)]
    assert layers_of("") == [()]


@pytest.mark.models
def test_what_is_chosen_for_a_layer_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    asked: list[Sequence[Resolved]] = []
    ran: Counter[str] = Counter()

    def counted(kernel: Resolved) -> Resolved:
        def run(inputs: list[torch.Tensor], *out: Any) -> list[torch.Tensor]:
            ran[kernel.digest] += 1
            return kernel.run(inputs, *out)

        return replace(kernel, run=run)

    def choose(layer: Sequence[Resolved], **_: Any) -> list[Resolved]:
        asked.append(layer)
        return [counted(kernel) if kernel.outcome is not None else kernel for kernel in layer]

    monkeypatch.setattr(step_kernels, "chosen_for_layer", choose)
    model = built("gpt2")
    wanted = model.generate(text(), max_new_tokens=4, do_sample=False)
    mi.optimize(model)
    assert torch.equal(model.generate(text(), max_new_tokens=4, do_sample=False), wanted)
    layer, last = asked
    new = [kernel.digest for kernel in (*layer, *last) if kernel.outcome is not None]
    assert len(new) == len(set(new)) >= 5, "each kernel is chosen once"
    assert {kernel.digest for kernel in layer} <= {kernel.digest for kernel in last}
    assert sum(kernel.outcome is not None for kernel in last) == 1, "only the head is new"
    assert len(ran) >= 4 and min(ran.values()) >= 3, "what was chosen runs in each step"
