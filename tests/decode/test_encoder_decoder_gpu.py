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


def assert_close_while_same(want: Any, got: Any) -> None:
    """Assert that logits are close for each row as long as its tokens are the same."""
    start = want.sequences.shape[1] - len(want.logits)
    same = (want.sequences == got.sequences).cumprod(-1).bool()[:, start - 1 : -1]
    assert bool(same[:, 0].all())
    for step, (theirs, mine) in enumerate(zip(want.logits, got.logits, strict=True)):
        rows = same[:, step]
        limit = 6e-2 * float(theirs.abs().max())
        torch.testing.assert_close(mine[rows], theirs[rows], rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_captured_and_as_stock(name: str, dtype: torch.dtype) -> None:
    """In float32 the tokens are stock's. In bfloat16 logits are, as long as the tokens are."""
    stock = built(name).to("cuda", dtype)
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
            assert_close_while_same(want, got)
    assert steps(ours) == {"traced": 4} and not stocks(ours)
    assert ours.mirage.report.decode["captured"] == 4
    restore(ours)
    given = calls(stock)[0]
    want, got = (model.generate(**given) for model in (stock, ours))
    assert torch.equal(want.sequences, got.sequences)
