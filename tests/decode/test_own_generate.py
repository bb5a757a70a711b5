"""Models with a `generate` of their own: it calls the inherited one, or that of a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mirage_hf.api import optimize, restore
from mirage_hf.decode.step_inputs import gives_positions
from scripts import survey_calls, survey_models
from tests.helpers.step_pairs import steps
from tests.helpers.tiny_models import same, snapshot

pytestmark = pytest.mark.models


def built(name: str) -> Any:
    kind = survey_models.model_types().get(name)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    return survey_models.build(name, kind)


def texts(model: Any, calls: list[survey_calls.Call]) -> list[Tensor]:
    return [survey_calls.text_of(model, call, 6) for call in calls]


def decoder_of(model: Any, name: str) -> Any:
    return model.get_submodule(name) if name else model


@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        pytest.param("seamless_m4t/seq2seq", "", marks=pytest.mark.slow),
        ("blip-2", "language_model"),
    ],
)
def test_its_steps_are_traced(name: str, decoder: str) -> None:
    """Seamless chooses a language and calls super(), BLIP-2 gives a module embeddings of images."""
    model = built(name)
    calls = survey_calls.calls_of(model, name)
    before, wanted = snapshot(model), texts(model, calls)
    optimize(model, batch_sizes=(1, 3))
    assert "generate" in decoder_of(model, decoder).__dict__
    got = [text for _ in range(2) for text in texts(model, calls)]
    assert all(torch.equal(*pair) for pair in zip(got, 2 * wanted, strict=True))
    assert steps(model) == {"traced": 2 * len(calls)}
    restore(model)
    assert same(before, snapshot(model))
    assert "generate" not in decoder_of(model, decoder).__dict__


def test_a_model_that_counts_positions_from_another_number_is_traced_so() -> None:
    """Kosmos-2 counts from its pad token if it is given no positions, as in its own generate.

    Each pad token has the same position, also among new tokens.
    """
    model = built("kosmos-2")
    calls = survey_calls.text_calls(model, "kosmos-2")
    wanted = texts(model, calls)
    assert not gives_positions(model.text_model)
    optimize(model, batch_sizes=(1, 3))
    assert "generate" in model.text_model.__dict__
    assert all(torch.equal(*pair) for pair in zip(texts(model, calls), wanted, strict=True))
    assert steps(model) == {"traced": 2}


def test_embeddings_without_their_tokens_are_stocks() -> None:
    model = built("blip-2").language_model
    embeds = model.get_input_embeddings()(torch.tensor([[5, 6, 7]])).detach()
    calls: list[dict[str, Tensor]] = [
        {"inputs_embeds": embeds},
        {"inputs_embeds": embeds, "input_ids": torch.tensor([[7]])},
    ]
    optimize(model)
    for given in calls:
        options = {**given, "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(**options), type(model).generate(model, **options))
    assert not steps(model)
    assert len(model.mirage.report.decode) == 2
    assert all(reason.startswith("stock: ") for reason in model.mirage.report.decode)


def test_a_generate_that_does_not_come_to_us_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("seamless_m4t/seq2seq")
    own = type(model).generate

    def generate(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("custom_generate", None)
        return own(self, input_ids, **kwargs)

    model = optimize(model)
    monkeypatch.setattr(type(model), "generate", generate)
    monkeypatch.setattr("mirage_hf.decode.generate_method.rejected_model", lambda *_, **__: None)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
    reason = "stock: the model's own generate did not call the inherited one"
    assert model.mirage.report.decode == {reason: 1}
