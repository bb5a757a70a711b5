"""Every feature of generate on a GPU.

The checks are those of tests/decode/test_features.py, with real kernels and graphs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers import generate_features

pytestmark = pytest.mark.gpu
PAIRS = {
    "llama, float32, kernels": ("llama", torch.float32, "kernels"),
    "mistral, float32, kernels": ("mistral", torch.float32, "kernels"),
    "llama, bfloat16, kernels": ("llama", torch.bfloat16, "kernels"),
    "qwen2, bfloat16, kernels": ("qwen2", torch.bfloat16, "kernels"),
    "qwen2, float32, forward": ("qwen2", torch.float32, "forward"),
}


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with generate_features.alone(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> generate_features.Pair:
    family, dtype, how = PAIRS[request.param]
    pair = generate_features.Pair(
        generate_features.small(family, dtype, "cuda", **generate_features.WIDE),
        how,
        {"tune": "never"},
    )
    if how == "kernels":
        rows = pair.ours.mirage.report.rows
        assert rows and all(r.status == "swapped" for r in rows), str(pair.ours.mirage.report)
    return pair


@pytest.mark.parametrize("name", generate_features.FEATURES)
def test_feature(name: str, pair: generate_features.Pair) -> None:
    generate_features.FEATURES[name](pair)
    pair.check_counts()
