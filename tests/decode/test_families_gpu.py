"""Steps and prompts of families other than Llama on a GPU.

All run by kernels and give stock's tokens in bfloat16 and float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mirage_hf.swap.swap_report import ReportRow
from tests.helpers import generate_features
from tests.helpers.generate_comparison import FULL, left_padded
from tests.helpers.tiny_models import CENTRED, WINDOW, prompt

pytestmark = pytest.mark.gpu
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [2.0 + 0.5 * n for n in range(8)],
    "original_max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
EVERY = dict(layer_types=["full_attention"] * 2)
MODELS = {
    "granite": {},
    "gemma": dict(head_dim=32),
    "gemma2": dict(head_dim=32),
    "gemma2, softcap": dict(head_dim=32, attn_implementation="eager", attn_logit_softcapping=3.0),
    "gemma3": dict(head_dim=32),
    "gemma3, without windows": dict(head_dim=32, **EVERY),
    "olmo2": {},
    "phi3": {},
    "smollm3": {},
    "phi3, longrope": dict(rope_scaling=LONGROPE, original_max_position_embeddings=512),
    "glm4": dict(head_dim=32),
    "gpt_oss": dict(head_dim=32),
    "starcoder2": {},
    "starcoder2, without windows": dict(sliding_window=None),
    "stablelm": dict(use_parallel_residual=True),
    "cohere": dict(use_qk_norm=True),
    "gpt_neox": {},
    "phi": {},
    "nemotron": dict(head_dim=32),
}
BY_KERNELS = (
    "granite",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3, without windows",
    "olmo2",
    "phi3",
    "phi3, longrope",
    "smollm3",
    "glm4",
    "starcoder2",
    "starcoder2, without windows",
    "stablelm",
    "cohere",
    "gpt_neox",
    "phi",
    "nemotron",
)
"""Models whose prompts are by kernels too.

Those of models with a softcap or experts are not.
"""


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with generate_features.alone(tmp_path_factory.mktemp("cache")) as patch:
        patch.setattr(generate_features, "ROWS", (1, 3))
        yield


def may_stay(row: ReportRow, name: str, dtype: torch.dtype) -> bool:
    """Return whether a part of a model may run without our kernel.

    Experts run their own forward. A LayerNorm over equal numbers may stay too: torch gives exact
    zeros there. A float32 sum that adds many of them one by one may be further off than allowed.
    Then the library runs the norm and the linears that read it.
    """
    return "experts" in row.reason or (
        row.kernel == "library" and dtype == torch.float32 and name.partition(",")[0] in CENTRED
    )


CASES = [
    (name, dtype)
    for name in MODELS
    for dtype in (torch.bfloat16, torch.float32)
    if dtype == torch.bfloat16 or name.partition(",")[0] not in CENTRED[1:]
]
"""In float32 one family with LayerNorm."""


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_generate_is_by_kernels_and_as_stock(name: str, dtype: torch.dtype) -> None:
    model = generate_features.small(
        name.partition(",")[0], dtype, "cuda", **generate_features.WIDE, **MODELS[name]
    )
    pair = generate_features.Pair(model, "kernels", {"tune": "never"})
    report = pair.ours.mirage.report
    assert report.rows and all(
        r.status == "swapped" or may_stay(r, name, dtype) for r in report.rows
    ), str(report)
    tokens = {"do_sample": False, "max_new_tokens": 2 * WINDOW + 3, **FULL}
    for n in range(3):  # the first prompt runs HF's forward, later ones kernels
        pair.agree({"inputs": prompt(1, 7 + n, seed=n), **tokens})
    pair.agree({**left_padded((4, 11, 7)), **tokens})
    pair.agree({**left_padded((1, 2 * WINDOW + 1, WINDOW)), **tokens})
    pair.agree({"inputs": prompt(1, 250), **tokens})  # over the end of a block of 256 slots
    pair.check_counts()
    prefills = pair.runner.prefills
    # The second and third plain prompt, and the left-padded one.
    assert (prefills.get("captured, by kernels") == 3) == (name in BY_KERNELS), prefills
