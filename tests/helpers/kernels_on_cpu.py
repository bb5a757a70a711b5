"""Find kernels of prompts on a CPU, as if it were a GPU. Torch runs what the search found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mirage_hf.layers.row_chunks import RowChunks
from mirage_hf.pipeline.resolver import KernelFinder
from mirage_hf.swap import prompt_kernels


class OnACpu(KernelFinder):
    """Finds kernels on a CPU as if it were a GPU."""

    gpu = torch.device("cpu")  # type: ignore[assignment]

    def searching(self, wanted: Any) -> Any:
        return contextlib.nullcontext()


def finder_on_cpu() -> OnACpu:
    return OnACpu(torch.device("cpu"), tune="never")


def count_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the rows of each call of kernels."""
    seen: list[int] = []
    run = RowChunks.with_overlap

    def counted(self: RowChunks, inputs: Sequence[Tensor]) -> list[Tensor]:
        seen.append(len(inputs[0]))
        return run(self, inputs)

    monkeypatch.setattr(RowChunks, "with_overlap", counted)
    return seen


def set_times(monkeypatch: pytest.MonkeyPatch, is_ours: Callable[[Any], bool]) -> dict[str, float]:
    """Let kernels be faster than stock. A test may change the times in what this returns.

    Args:
        monkeypatch: Puts the clock back.
        is_ours: Whether what is timed runs kernels.
    """
    us = {"ours": 1.0, "stock": 2.0}

    def time(run: Any, *_: Any, **__: Any) -> Any:
        (forward,) = run.args
        return SimpleNamespace(us=us["ours" if is_ours(forward) else "stock"])

    monkeypatch.setattr(prompt_kernels, "time_run", time)
    monkeypatch.setattr(prompt_kernels, "_us_called", lambda *_: 1.0)
    return us
