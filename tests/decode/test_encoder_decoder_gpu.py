"""Steps of encoder-decoder models on a GPU: captured in CUDA graphs, with searched kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mirage_hf.api import optimize, restore
from tests.helpers import generate_features
from tests.helpers.encoder_decoders import MODELS, built, inputs
from tests.helpers.step_pairs import FULL, steps, stocks
from tests.helpers.tiny_models import twin_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with generate_features.alone(tmp_path_factory.mktemp("cache")):
        yield


def calls(model: Any) -> list[dict[str, Any]]:
    """Return calls of one row and of three, with inputs of two lengths: later ones are replays."""
    options = {**FULL, "max_new_tokens": 24}
    return [
        {**inputs(model, batch, length, seed=length), **options}
        for length in (11, 7)
        for batch in (1, 3)
    ]


def mean_error(exact: Any, given: dict[str, Any], result: Any) -> float:
    """Return how far a result's logits are on average from those of a float32 model.

    The float32 model reads the tokens of the result. The error is in units of its largest logit.
    """
    sources = ("input_ids", "input_features", "attention_mask")
    source = {name: given[name] for name in sources if name in given}
    source = {name: x.float() if x.is_floating_point() else x for name, x in source.items()}
    with torch.no_grad():
        wanted = exact(**source, decoder_input_ids=result.sequences[:, :-1]).logits
    wanted = wanted[:, -len(result.logits) :]
    got = torch.stack(result.logits, 1).float()
    is_finite = got.isfinite()  # a forced token hides the others
    return float((got - wanted)[is_finite].abs().mean() / wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_captured_and_as_stock(name: str, dtype: torch.dtype) -> None:
    """In float32 the tokens are stock's. In bfloat16 logits are as near to float32 as stock's.

    They may be far from stock's: T5 does not scale its attention, so it amplifies rounding.
    """
    stock = built(name).to("cuda", dtype)
    exact = twin_of(stock).float()
    ours = optimize(twin_of(stock), batch_sizes=(1, 3), tune="never")
    rows = [r for r in ours.mirage.report.rows if r.pattern == "traced"]
    assert any(r.status == "swapped" for r in rows), str(ours.mirage.report)
    for given in calls(stock):
        want, got = (model.generate(**given) for model in (stock, ours))
        if dtype == torch.float32:
            assert torch.equal(want.sequences, got.sequences)
            for theirs, mine in zip(want.logits, got.logits, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
        else:
            assert mean_error(exact, given, got) <= 1.25 * mean_error(exact, given, want)
    assert steps(ours) == {"traced": 4} and not stocks(ours)
    assert ours.mirage.report.decode["captured"] == 4
    restore(ours)
    given = calls(stock)[0]
    want, got = (model.generate(**given) for model in (stock, ours))
    assert torch.equal(want.sequences, got.sequences)
