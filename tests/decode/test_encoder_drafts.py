"""Decoders after an encoder verify drafts: tokens are those of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mirage_hf.api import optimize
from mirage_hf.decode.sources import is_source
from mirage_hf.trace.cached_attention import ATTENTION_OP
from scripts.scripted_drafts import drafting
from tests.decode.test_traced_drafts import scripts, taken
from tests.helpers.encoder_decoders import MODELS, built, inputs
from tests.helpers.tiny_models import twin_of

# Not run with other versions of transformers, whose decoders are written in other ways.
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("resolved")]

GREEDY = {"do_sample": False, "max_new_tokens": 60}
LOOKUP = {"prompt_lookup_num_tokens": 3}


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a stock model and its optimized copy with traced steps for drafts."""
    stock = built(name)
    given = {"batch_sizes": (1, 3), "draft_tokens": (3,), "verify": False, **options}
    return stock, optimize(twin_of(stock), **given)


def whole(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the decoder's texts. Whisper's generate leaves out the token that they begin with."""
    if tokens.shape[1] > GREEDY["max_new_tokens"]:
        return tokens
    start = torch.full_like(tokens[:, :1], model.config.decoder_start_token_id)
    return torch.cat([start, tokens], 1)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_stocks_whatever_is_drafted(name: str) -> None:
    stock, ours = pair(name)
    for batch in (1, 3):
        given = {**inputs(stock, batch), **GREEDY}
        want = stock.generate(**given)
        for quality, script in scripts(whole(stock, want)).items():
            with drafting(script, quality):
                got = ours.generate(**given, **LOOKUP)
            assert got.tolist() == want.tolist(), (quality, batch)
        assert ours.generate(**given, **LOOKUP).tolist() == want.tolist()
    assert taken(ours) > 240


@pytest.mark.parametrize("name", ["bart", "whisper", "t5"])
def test_what_an_encoder_gave_is_read_once_for_all_tokens_of_a_text(name: str) -> None:
    _, ours = pair(name)
    for plan in ours.generate.runner.traced.drafting.values():
        nodes = [unit.node for unit in plan.units if unit.node is not None]
        copied = [x for node in nodes if "for_each_token" in node.name for x in node.operands]
        assert not any(is_source(x) for x in copied)
        read = [x for node in nodes if node.name == ATTENTION_OP for x in node.operands]
        assert sum(is_source(x) for x in read) == 4  # keys and values of two layers
