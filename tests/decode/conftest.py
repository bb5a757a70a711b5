"""Fixtures of the tests of decoding steps and of prefill."""

from __future__ import annotations

from typing import Any

import pytest

from mirage_hf.decode import prompts
from mirage_hf.decode import runner as decode_runner
from mirage_hf.swap import check
from tests.helpers.generate_features import fake_captures
from tests.helpers.thorough import count


@pytest.fixture
def many_samples(resolved: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare many samples in the check of optimize().

    Layers this small have few values, so the largest float32 error of 8 calls is a matter of luck.
    """
    monkeypatch.setattr(check, "SAMPLES", count(40, 16))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let "CUDA graphs" on a CPU run the captured ops again.

    Returns:
        A list that gets the name of the module, such as "prefill", at each capture.
    """
    return fake_captures(monkeypatch)


@pytest.fixture
def kernels_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch a prompt's kernels without a graph too, as on a GPU."""
    monkeypatch.setattr(decode_runner, "kernels_pay", lambda device: True)


@pytest.fixture
def no_captured_prompts(kernels_pay: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture no prompt, as on a GPU where all prompts are long."""
    monkeypatch.setattr(prompts, "MAX_CAPTURED_TOKENS", 0)
