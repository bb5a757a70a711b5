"""Prompts that run HF's forward in a captured graph.

On a CPU a "graph" calls what was captured. The code is the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mirage_hf.decode import install, masks, prefill
from mirage_hf.decode import prompts as bucketed
from tests.helpers import tiny_models
from tests.helpers.generate_comparison import (
    FAMILIES,
    PAD,
    assert_same,
    both,
    left_padded,
    prompt,
    tiny,
)
from tests.helpers.prompt_pairs import FULL

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("captures")]


LENGTHS = (7, 9, 30, 7, 64, 63, 65, 70, 128, 3, 1)


def alike(model: Any, batch: int, length: int) -> None:
    assert_same(*both(model, lambda: {"inputs": prompt(batch, length, seed=length), **FULL}))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_changing_length(family: str, batch: int, captures: list[str]) -> None:
    """Compare tokens, logits and remaining keys.

    An earlier and longer prompt may have left data in the block.
    """
    model = tiny(family)
    runner = install(model)
    for length in LENGTHS:
        alike(model, batch, length)
    windowed = any(window is not None for _, window in masks.MaskPlan.of(model.config).windows)
    # eight prompts have a bucket of 64, three one of 128; the first of each runs HF's forward.
    # Where buckets exceed a window, lengths have no bucket, and one of them comes twice.
    replays, graphs = (1, 1) if windowed else (7 + 2, 2)
    assert runner.prefills == {"captured": replays} and captures.count("prefill") == graphs


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_prompts_beyond_a_window_are_captured_for_their_length(
    family: str, captures: list[str]
) -> None:
    model = tiny(family)
    runner = install(model)
    lengths = (70, 33, 70, 33, 7, 70, 7, 33, 71)
    for length in lengths:
        alike(model, 2, length)
    assert runner.prefills == {"captured": len(lengths) - 4} and captures.count("prefill") == 3


def test_a_prompt_that_is_not_plain_is_not_padded(captures: list[str]) -> None:
    model = tiny("llama")
    runner = install(model)
    for _ in range(3):
        alike(model, 2, 9)
    seen = dict(runner.prefills)
    assert seen == {"captured": 2}
    assert_same(*both(model, lambda: {**left_padded(), **FULL}))
    assert_same(
        *both(
            model,
            lambda: {"inputs": prompt(2, 9), "position_ids": torch.arange(4, 13)[None], **FULL},
        )
    )
    alike(model, 2, 5)
    assert runner.prefills == {"captured": 3} and captures.count("prefill") == 1
    block = runner.pool.lease(2, 1024, (None, None), torch.device("cpu"))
    large = runner.pool.lease(2, 4096, (None, None), torch.device("cpu"))
    every, some = (masks.MaskPlan((("", window),), False) for window in (None, 1000))
    for where, tokens in (
        (block, {960: 960, 961: 1024, 1025: None}),
        (large, {2047: 2048, 2048: 2048, 2049: 2304, 4096: 4096}),
    ):
        shapes = {n: bucketed.PromptShape.of(n, where, every) for n in tokens}
        assert {n: s and s.tokens for n, s in shapes.items()} == tokens and all(
            s is None or s.is_plain for s in shapes.values()
        )
    cut = [bucketed.PromptShape.of(n, block, some) for n in (960, 961)]
    assert [(s.windows, s.exceeds_windows_from, s.is_plain) for s in cut if s] == [
        ((None, None), 0, True),
        ((1000, 1000), 1001, False),
    ]
    forward = [s.for_forward(961) for s in cut if s]
    assert [(s.tokens, s.is_plain, s.is_exact) for s in forward] == [
        (960, True, False),
        (961, True, True),
    ]


def test_a_changed_model_is_captured_anew(captures: list[str]) -> None:
    model = tiny("llama")
    runner = install(model)
    for _ in range(3):
        alike(model, 1, 9)
    model.model.norm.weight = torch.nn.Parameter(2 * model.model.norm.weight.detach())
    for _ in range(3):
        alike(model, 1, 9)
    assert captures.count("prefill") == 2
    model.double()  # other keys, other logits: the first prompt runs HF's forward again
    for _ in range(3):
        alike(model, 1, 9)
    assert captures.count("prefill") == 3 and set(runner.prefills) == {"captured"}


@pytest.mark.parametrize("by_config", [False, True])
def test_prompts_that_see_what_comes_after_them_are_not_filled_up(
    by_config: bool, captures: list[str]
) -> None:
    changes = (
        dict(layer_types=["full_attention"] * 3, use_bidirectional_attention=True)
        if by_config
        else {}
    )
    model = tiny_models.tiny("gemma3" if by_config else "llama", **changes)
    runner = install(model)
    for _ in range(3):
        alike(model, 2, 9)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    for length in (9, 9, 30, 9):
        alike(model, 2, length)
    ((why, count),) = [found for found in runner.prefills.items() if found[0] != "captured"]
    assert (
        why.startswith(
            "called: capture failed (MirageError: prefill: tokens see what comes after them"
        )
        and count == 1
    )
    assert captures.count("prefill") == (not by_config)


def test_prompts_are_compared_over_tokens_that_there_are(captures: list[str]) -> None:
    """The head has more rows than the table of tokens, as if it were padded to a round number."""
    model = tiny("llama")
    head = torch.nn.Linear(32, 999)
    with torch.no_grad():
        head.bias.fill_(-1e3)
        head.bias[:99] = 0
    model.lm_head = head
    runner = install(model)
    for _ in range(3):
        alike(model, 2, 9)
    assert runner.prefills == {"captured": 2}


def test_tokens_of_other_dtypes_are_not_rounded(captures: list[str]) -> None:
    """A captured prompt would convert ids that no embedding takes."""
    model = tiny("llama")
    runner = install(model)
    for _ in range(3):
        alike(model, 1, 9)
    assert_same(*both(model, lambda: {"inputs": prompt(1, 9).int(), **FULL}))
    with pytest.raises(RuntimeError, match="FloatTensor"):
        model.generate(prompt(1, 9) + 0.7, **FULL)
    assert runner.prefills == {"captured": 3} and runner.counts == {
        "captured": 4,
        "stock: input_ids of torch.float32": 1,
    }


def test_prompts_are_not_filled_up_beyond_a_table_of_positions(captures: list[str]) -> None:
    """On a GPU the look-up would end the process."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=100, initializer_range=0.15
        )
    ).eval()
    model.generation_config.pad_token_id = PAD
    runner = install(model)
    for length in (70, 71, 9, 10, 90):
        alike(model, 2, length)
    assert runner.prefills == {"captured": 1} and captures.count("prefill") == 1


def test_a_forward_that_cannot_be_captured_is_hfs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise TypeError("no tensors here")

    monkeypatch.setattr(prefill, "capture", refuse)
    model = tiny("llama")
    runner = install(model)
    for length in (9, 9, 30, 9):
        alike(model, 1, length)
    assert runner.prefills == {"called: capture failed (TypeError: no tensors here)": 1}
