"""Every feature of generate on a CPU.

The checks are those of tests/decode/test_features_gpu.py. "Graphs" are calls or fakes here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mirage_hf.pipeline import resolver
from tests.helpers import generate_features
from tests.helpers.tiny_models import Resolved

pytestmark = pytest.mark.models

PAIRS = {
    "kernels": ("llama", torch.float32, "kernels"),
    "captured kernels": ("llama", torch.bfloat16, "kernels"),
    "forward": ("qwen3", torch.float32, "forward"),
}


slow = pytest.mark.slow  # on the main version of transformers only


@pytest.fixture(
    scope="module",
    params=[
        "kernels",
        # other tests capture steps and prompts: test_drafts.py, test_prefill_*.py, test_traced_*.py
        pytest.param("captured kernels", marks=[slow, pytest.mark.thorough]),
        # test_generate.py runs calls of all kinds by the model's own forward
        pytest.param("forward", marks=[slow, pytest.mark.thorough]),
    ],
)
def pair(request: pytest.FixtureRequest) -> Iterator[generate_features.Pair]:
    family, dtype, how = PAIRS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolver, "resolve", lambda program, **_: Resolved(program))
        if "captured" in request.param:
            generate_features.fake_captures(patch)
        pair = generate_features.Pair(
            generate_features.small(family, dtype, "cpu"), how, {"verify": False}
        )
        if "captured" in request.param:
            pair.runner.depth = 2  # as on a GPU
        yield pair


@pytest.mark.parametrize("name", generate_features.FEATURES)
def test_feature(name: str, pair: generate_features.Pair) -> None:
    generate_features.FEATURES[name](pair)
    pair.check_counts()


def test_recordings_keep_what_python_computed() -> None:
    """A replayed recording does not read the host's values again, as a CUDA graph does not."""
    x, steps, total = torch.zeros(3), [1], torch.zeros(())

    def run() -> None:
        x.add_(steps[0])
        total.copy_((x.view(-1)[1:] * 2).sum())

    with generate_features.Recording() as graph:
        run()
    steps[0] = 50
    graph.replay()
    assert x.tolist() == [2.0] * 3 and total == 8
