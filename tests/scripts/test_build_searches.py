"""Which programs the package has searches for."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mirage_hf.zoo import known_search
from mirage_hf.zoo.store import packaged_store
from scripts import build_searches
from scripts.build_zoo import matched
from scripts.configs import random_model


def test_the_package_has_searches_for_norms_and_rotations_of_prompts() -> None:
    requests = [*build_searches.prompt_requests()]
    assert {r.pattern for r in requests} == {"prompt_rotation", "prompt_norm"}
    root = packaged_store().root
    missing = [r.key.title for r in requests if known_search.nearest([root], r.program) is None]
    assert not missing, "run python -m scripts.build_searches"


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        # Granite multiplies what it adds to the residual, and its logits
        ("granite-3.1-2b", {"rms_norm_linear", "attention", "linear_residual", "gated_mlp"}),
        ("opt-1.3b", {"attention", "traced"}),
    ],
)
def test_the_package_has_searches_for_the_programs_of_a_model(
    name: str, patterns: set[str]
) -> None:
    requests = [*build_searches.requests_of(name, 1)]
    found = {r.pattern for r in requests}
    assert patterns <= found and ("traced" in found) == ("traced" in patterns)
    root = packaged_store().root
    missing = [r.key.title for r in requests if known_search.nearest([root], r.program) is None]
    assert not missing, f"run python -m scripts.build_searches --configs {name}"


def test_prompts_of_a_matched_model_are_searched_for_both_lengths() -> None:
    found = matched("smoke", "bfloat16", torch.device("cpu"), 0)
    names = {block.pattern.name for block in build_searches._prompt_blocks(found)}
    assert {"prompt_gate", "prompt_rotation", "prompt_norm"} <= names
    rows = [r.program.outputs[0].dims[0] for r in build_searches.requests_of("smoke", 1)]
    assert all(rows.count(n) >= len(names) for n in build_searches.PROMPTS)


def test_linears_in_codes_are_searched_to_decode_and_to_multiply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = partial(random_model, "smoke", "cpu", layers=1)
    monkeypatch.setattr(build_searches, "random_model", lambda *_, **__: small())
    requests = [*build_searches.coded_requests("fp8")]
    assert requests and {r.pattern for r in requests} == {"decoding", "linear"}
    assert all(any(t.dtype is torch.float8_e4m3fn for t in r.program.inputs) for r in requests)
