"""Fixtures of the tests on models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import swapping


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Replace the resolver by one whose kernels are the programs themselves; yields the programs it was asked for."""
    from mirage_hf.pipeline import kernels

    asked: list[Any] = []

    def resolve(program: Any, **_: Any) -> swapping.Resolved:
        asked.append(program)
        return swapping.Resolved(program)

    monkeypatch.setattr(kernels, "resolve", resolve)
    yield asked
