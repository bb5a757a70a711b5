"""Traced steps on a GPU: captured in CUDA graphs, with searched kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from mirage_hf.api import optimize, restore
from tests.helpers import generate_features
from tests.helpers.generate_comparison import left_padded
from tests.helpers.step_pairs import steps, stocks
from tests.helpers.tiny_models import prompt, rows_parted, twin_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

COMMON: dict[str, Any] = dict(
    vocab_size=512, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.1
)
SIZES: dict[str, Any] = COMMON | dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=2, n_head=4, **COMMON))


def lfm2() -> Any:
    sizes = {name: n for name, n in SIZES.items() if name != "head_dim"}
    return Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv", "full_attention"]))


def qwen3_next() -> Any:
    kinds = ["linear_attention", "full_attention"]
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **EXPERTS, layer_types=kinds))


MODELS = {"gpt2": gpt2, "lfm2": lfm2, "qwen3_next": qwen3_next}


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with generate_features.alone(tmp_path_factory.mktemp("cache")):
        yield


def made(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval().to("cuda", dtype)
    model.generation_config.eos_token_id = None
    return model


def calls(new_tokens: int) -> list[dict[str, Any]]:
    """Return calls of one row and of three, twice each: later ones replay the graphs."""
    options = dict(
        do_sample=False,
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    plain = {"input_ids": prompt(1, 9).cuda()}
    padded = {key: x.cuda() for key, x in left_padded((4, 11, 7)).items()}
    return [{**given, **options} for given in (plain, padded, plain, padded)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_traced_steps_are_captured_and_as_stock(name: str, dtype: torch.dtype) -> None:
    """In float32 the tokens are stock's. In bfloat16 they differ at ties only."""
    stock = made(name, dtype)
    ours = optimize(twin_of(stock), batch_sizes=(1, 3), tune="never")
    rows = [r for r in ours.mirage.report.rows if r.pattern == "traced"]
    assert any(r.status == "swapped" for r in rows), str(ours.mirage.report)
    for given in calls(24):
        want, got = (model.generate(**given) for model in (stock, ours))
        if dtype == torch.float32:
            assert torch.equal(want.sequences, got.sequences)
            for theirs, mine in zip(want.logits, got.logits, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
        else:
            rows_parted(stock, want, got.sequences, given)
    assert steps(ours) == {"traced": 4} and not stocks(ours)
    assert ours.mirage.report.decode["captured"] == 4
    restore(ours)
    given = calls(24)[0]
    want, got = (model.generate(**given) for model in (stock, ours))
    assert torch.equal(want.sequences, got.sequences)


def test_steps_go_on_beyond_a_block_of_slots() -> None:
    stock = made("gpt2", torch.float32)
    ours = optimize(twin_of(stock), tune="never")
    given = {"input_ids": prompt(1, 9).cuda(), "do_sample": False, "max_new_tokens": 300}
    assert torch.equal(stock.generate(**given), ours.generate(**given))
    assert steps(ours) == {"traced": 1} and ours.mirage.report.decode["captured"] == 1


def test_weights_that_change_in_place_are_read_by_captured_steps() -> None:
    stock = made("gpt2", torch.float32)
    ours = optimize(twin_of(stock), tune="never")
    given = {"input_ids": prompt(1, 9).cuda(), "do_sample": False, "max_new_tokens": 24}
    for _ in range(2):
        assert torch.equal(stock.generate(**given), ours.generate(**given))
        for model in (stock, ours):
            with torch.no_grad():
                model.transformer.h[0].mlp.c_fc.weight.mul_(1.5)
    assert steps(ours) == {"traced": 2}
