"""Prompts by kernels on a GPU, of any length, launched or replayed.

Their logits are as close to float32 as stock's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mirage_hf.api import optimize
from mirage_hf.decode import prompts as bucketed
from mirage_hf.layers import row_chunks
from mirage_hf.patterns.prompt import PROMPT_GATE, PROMPT_NORM
from mirage_hf.pipeline import resolver
from mirage_hf.tune.measure import random_inputs
from tests.helpers.generate_comparison import left_padded
from tests.helpers.tiny_models import prompt, tiny, twin_of

pytestmark = pytest.mark.gpu
EVERY: dict[str, Any] = dict(layer_types=["full_attention"] * 2)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {**EVERY, "head_dim": 64},
    "granite": {},
    "gemma": dict(head_dim=32),
    "gemma3": {**EVERY, "head_dim": 32},
    "olmo2": {},
    "phi3": dict(original_max_position_embeddings=8192),
    "gpt_neox": {},
    "cohere": dict(use_qk_norm=True),
}
SIZES: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=640,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=2,
    initializer_range=0.05,
    max_position_embeddings=8192,
)
SHAPES = [(1, 6), (1, 300), (1, 90), (1, 5000), (1, 64), (3, 6), (3, 1700), (3, 77)]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIRAGE_HF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def first_logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of the first and the second new token.

    The second reads the keys and values that the prompt has stored.
    """
    out = model.generate(
        ids,
        do_sample=False,
        max_new_tokens=2,
        min_new_tokens=2,
        return_dict_in_generate=True,
        output_logits=True,
        **({} if mask is None else {"attention_mask": mask}),
    )
    return torch.stack([x.float() for x in out.logits])


def assert_as_close(
    ids: torch.Tensor, exact: Any, stock: Any, ours: Any, mask: torch.Tensor | None = None
) -> None:
    """Assert that our logits are as close to float64's as stock's."""
    want, seen, mine = (first_logits(m, ids, mask) for m in (exact, stock, ours))
    same = seen[0].argmax(-1) == mine[0].argmax(
        -1
    )  # after a tie the first tokens may differ, so the second belong to other texts
    for k, rows in ((0, slice(None)), (1, same & (want[0].argmax(-1) == mine[0].argmax(-1)))):
        far, near = (
            (x[k, rows] - want[k, rows]).abs().max() if x[k, rows].numel() else torch.zeros(())
            for x in (mine, seen)
        )
        assert far <= 1.5 * near + 0.01 * want.abs().max(), (tuple(ids.shape), k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_any_length(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucketed, "MAX_CAPTURED_TOKENS", 0)
    sizes = {
        k: v for k, v in SIZES.items() if not (name == "gpt_neox" and k == "num_key_value_heads")
    }
    stock = tiny(name, dtype=dtype, **sizes, **MODELS[name]).cuda()
    exact = twin_of(stock).double()
    ours = optimize(twin_of(stock), tune="never", batch_sizes=(1, 3))
    for batch, length in SHAPES:
        assert_as_close(prompt(batch, length, seed=length).cuda(), exact, stock, ours)
    found = ours.generate.runner.prefills
    assert found == {"called, by kernels": 6}, found  # not the first prompt of a batch


@pytest.mark.parametrize("tokens", [0, bucketed.MAX_CAPTURED_TOKENS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_padded_prompts(
    name: str, dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are launched, or captured if they are short."""
    monkeypatch.setattr(bucketed, "MAX_CAPTURED_TOKENS", tokens)
    stock = tiny(name, dtype=dtype, **SIZES, **MODELS[name]).cuda()
    exact, ours = twin_of(stock).double(), optimize(twin_of(stock), tune="never", batch_sizes=(3,))
    first_logits(ours, prompt(3, 5).cuda())  # the first prompt of a batch is HF's forward
    for lengths in ((4, 11, 7), (64, 1, 33), (200, 2, 3), (150, 140, 199), (1700, 30, 900)):
        given = left_padded(lengths, seed=lengths[0])
        assert_as_close(
            given["input_ids"].cuda(), exact, stock, ours, given["attention_mask"].cuda()
        )
    captured = {"captured, by kernels": 2} if tokens else {}
    assert ours.generate.runner.prefills == {
        "called, by kernels": 5 - len(captured) * 2,
        **captured,
    }


@pytest.mark.parametrize("tokens", [0, bucketed.MAX_CAPTURED_TOKENS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_prompts_beyond_a_window(
    name: str, dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with and without padding are launched, or captured if they are short."""
    monkeypatch.setattr(bucketed, "MAX_CAPTURED_TOKENS", tokens)
    windowed = (
        dict(sliding_window=200)
        if name == "mistral"
        else dict(
            layer_types=["full_attention", "sliding_attention"], sliding_window=200, head_dim=32
        )
    )
    stock = tiny(name, dtype=dtype, **SIZES, **windowed).cuda()
    exact, ours = (
        twin_of(stock).double(),
        optimize(twin_of(stock), tune="never", batch_sizes=(1, 3)),
    )
    for length in (5, 300, 310, 200, 201, 1900, 1910, 3000):
        assert_as_close(prompt(1, length, seed=length).cuda(), exact, stock, ours)
    for lengths in ((250, 1, 5), (260, 199, 201), (270, 7, 260)):
        given = left_padded(lengths, seed=lengths[0])
        assert_as_close(
            given["input_ids"].cuda(), exact, stock, ours, given["attention_mask"].cuda()
        )
    assert ours.generate.runner.prefills == (
        {"called, by kernels": 5, "captured, by kernels": 4}
        if tokens
        else {"called, by kernels": 9}
    )


def test_first_prompts_of_a_bucket_are_called_and_later_ones_captured() -> None:
    model = optimize(tiny("llama", dtype=torch.bfloat16, **SIZES).cuda(), tune="never")
    for length in (6, 70, 130, 75, 131, 9):
        model.generate(prompt(1, length, seed=length).cuda(), do_sample=False, max_new_tokens=3)
    assert model.generate.runner.prefills == {"called, by kernels": 2, "captured, by kernels": 3}


@pytest.mark.parametrize(
    "block",
    [
        PROMPT_NORM.block(
            k=1024, eps=1e-6, dtype=torch.bfloat16, offset=0.0, centred=False, norm_bias=False
        ),
        PROMPT_GATE.block(n=3072, activation="silu", dtype=torch.bfloat16),
    ],
    ids=["norm", "gate"],
)
def test_row_chunks_give_the_same_bits_as_the_whole(block: Any) -> None:
    device = torch.device("cuda")
    kernel = row_chunks.RowChunks(
        block, device, lambda program: resolver.resolve(program, device=device, tune="never")
    )
    rows = 4096 + 1024 + 64
    inputs = random_inputs(block.program(rows), device)
    row_chunks.prepare_row_chunks([kernel], rows)
    whole = kernel(inputs)[0]
    for first, size in ((0, 4096), (4096, 1024), (5120, 64)):
        part = [x[first : first + size] if x.shape[0] == rows else x for x in inputs]
        assert torch.equal(kernel(part)[0], whole[first : first + size])
