"""A thousand mixed generate calls on a GPU (scripts/soak_generate.py).

500 calls are made twice. The test needs the GPU for itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts import soak_generate
from tests.helpers.generate_features import WIDE, Pair, small

pytestmark = pytest.mark.gpu


def test_a_thousand_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test prints memory and what ran. If it fails, it names the call that was wrong."""
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    assert not torch.backends.cuda.matmul.allow_tf32
    pairs = [
        Pair(small(family, torch.float32, "cuda", **WIDE), "kernels", {"tune": "never"})
        for family in ("llama", "mistral")
    ]
    print(soak_generate.soak(pairs, 1000, seed=0))
