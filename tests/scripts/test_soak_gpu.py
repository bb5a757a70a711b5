"""A thousand mixed generate calls on a GPU (scripts/soak_generate.py).

500 calls are made twice.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from scripts import soak_generate
from tests.helpers.generate_features import WIDE

pytestmark = pytest.mark.gpu


def test_a_thousand_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test prints memory and what ran. If it fails, it names the call that was wrong."""
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    assert not torch.backends.cuda.matmul.allow_tf32
    pairs = [
        soak_generate.drafting_pair(family, "cuda", {"tune": "never"}, **WIDE)
        for family in ("llama", "mistral")
    ]
    limits = dict(soak_generate.LIMITS)
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        del limits["driver"]  # the driver counts the memory of all processes
    print(soak_generate.soak(pairs, 1000, seed=0, limits=limits))
