"""Prompts whose norms, RoPE and activations run by kernels, in captured graphs.

Prompts may be padded, longer than a window, or of models with longrope.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from mirage_hf.api import optimize
from mirage_hf.decode import prompts as bucketed
from mirage_hf.decode import rings as ring_slots
from mirage_hf.layers import prefill as layer_prefill
from mirage_hf.layers import window_attention
from tests.helpers import tiny_models
from tests.helpers.generate_comparison import assert_same, left_padded, prompt
from tests.helpers.prompt_pairs import FEW, FULL, PROMPTED, agree, agree_padded, optimized

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("captures")]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTED)
def test_prompts_by_kernels(name: str, captures: list[str], resolved: list[Any]) -> None:
    stock, ours = optimized(name, PROMPTED[name])
    for batch, length in (
        (1, 7),
        (1, 9),
        (1, 64),
        (3, 5),
        (3, 65),
        (3, 6),
        (3, 66),
        (1, 1),
        (2, 4),
        (2, 5),
    ):
        agree(stock, ours, batch, length)
    runner = ours.generate.runner
    # By kernels: the later prompts of 64 tokens with one row and with three, and of 128 with
    # three. There are no kernels for two rows.
    assert (
        runner.prefills == {"captured, by kernels": 3 + 1 + 1, "captured": 1}
        and captures.count("prefill") == 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_padded_prompts_by_kernels(name: str, captures: list[str], resolved: list[Any]) -> None:
    """Prompts with padding have a graph of their own, which is replayed for any padding."""
    stock, ours = optimized(name, PROMPTED[name])
    agree(stock, ours, 3, 5)
    for lengths in ((4, 11, 7), (9, 1, 60), (64, 2, 3), (5, 5, 6)):
        agree_padded(stock, ours, *lengths)
    agree(stock, ours, 3, 6)
    agree_padded(stock, ours, 66, 65, 1)
    agree_padded(stock, ours, 64, 70, 128)
    assert (
        ours.generate.runner.prefills == {"captured, by kernels": 3 + 1 + 1}
        and captures.count("prefill") == 3
    )


@pytest.mark.slow
def test_positions_behind_padding_that_count_otherwise_are_hfs(
    captures: list[str], resolved: list[Any]
) -> None:
    stock, ours = optimized("llama", {})
    for _ in range(3):
        given = left_padded((4, 11, 7))
        agree_padded(
            stock,
            ours,
            4,
            11,
            7,
            position_ids=given["attention_mask"].cumsum(-1).sub(1).clamp_min(0) + 2,
        )
        agree_padded(stock, ours, 4, 11, 7, position_ids=torch.arange(11)[None].expand(3, -1))
    assert ours.generate.runner.prefills == {}


@pytest.mark.slow
def test_a_mask_of_one_row_for_several_is_stocks(captures: list[str], resolved: list[Any]) -> None:
    """Stock raises an error. Kernels would read the first row's tokens for all rows."""
    stock, ours = optimized("llama", {})
    for lengths in ((4, 11, 7), (9, 1, 60), (64, 2, 3)):
        agree_padded(stock, ours, *lengths)
        for model in (stock, ours):
            with pytest.raises(IndexError):
                model.generate(
                    prompt(3, 11), attention_mask=torch.tensor([[0] * 4 + [1] * 7]), **FULL
                )


@pytest.mark.slow
def test_padded_prompts_where_layers_have_rings(captures: list[str], resolved: list[Any]) -> None:
    """Rings hold NaN of earlier texts that wrapped around. Some prompts wrap around themselves."""
    kinds = ["full_attention", "sliding_attention"]
    stock, ours = optimized(
        "gemma3", dict(layer_types=kinds, num_hidden_layers=2, sliding_window=100), batch_sizes=(3,)
    )
    for lengths in ((9, 1, 60), (64, 3, 31), (3, 64, 5)):
        agree_padded(stock, ours, *lengths, max_new_tokens=200)
        agree(stock, ours, 3, 103)
        for block in ours.generate.runner.pool._idle:
            for ring, slab in block.ring_slabs:
                slab[:, :, :, : ring.window] = torch.nan
    assert ours.generate.runner.prefills == {"captured, by kernels": 4}
    assert any(
        ring is not None for block in ours.generate.runner.pool._idle for ring in block.rings
    )


@pytest.mark.slow
def test_padded_prompts_see_nothing_that_was_left(
    captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots hold NaN in rings and after the prompt, and 0 · NaN would be NaN."""
    monkeypatch.setattr(ring_slots, "GRAIN", 64)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    stock, ours = optimized("gemma3", dict(layer_types=kinds, sliding_window=100), batch_sizes=(3,))
    for lengths in ((9, 1, 60), (4, 11, 60), (60, 3, 31)):
        agree_padded(stock, ours, *lengths, max_new_tokens=90)
        (block,) = ours.generate.runner.pool._idle
        written = {id(slab): ring.window for ring, slab in block.ring_slabs}
        for slab in block.slabs:
            slab[:, :, :, : written.get(id(slab), block.dirty)] = torch.nan
        assert written
    assert ours.generate.runner.prefills == {"captured, by kernels": 2}


WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        dict(
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            sliding_window=70,
        ),
    ),
    "qwen3": (
        "qwen3",
        dict(
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            sliding_window=66,
            use_sliding_window=True,
        ),
    ),
    "mistral": ("mistral", dict(sliding_window=64)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("captured", "rings"),
    [
        (True, True),
        (False, False),
        *(
            pytest.param(*both, marks=pytest.mark.thorough)
            for both in ((True, False), (False, True))
        ),
    ],
)
@pytest.mark.parametrize("name", WINDOWED)
def test_prompts_beyond_a_window(
    name: str,
    captured: bool,
    rings: bool,
    captures: list[str],
    resolved: list[Any],
    kernels_pay: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts run in chunks of tokens, into rings and into full caches.

    They run with and without padding, over slots that hold NaN.
    """
    monkeypatch.setattr(ring_slots, "GRAIN", 64)
    monkeypatch.setattr(window_attention, "LEAST_RUN", 64)
    if not captured:
        monkeypatch.setattr(bucketed, "MAX_CAPTURED_TOKENS", 0)
    stock, ours = optimized(*WINDOWED[name], batch_sizes=(1, 3))
    runner = ours.generate.runner

    def given(ids: dict[str, Any]) -> dict[str, Any]:
        return {
            **ids,
            **FULL,
            "max_new_tokens": 9,
            "min_new_tokens": 9,
            **({} if rings else {"past_key_values": DynamicCache()}),
        }

    for length in (200, 201, 65, 66, 129, 199, 401):
        ids = {"inputs": prompt(1, length, seed=length)}
        assert_same(stock.generate(**given(ids)), ours.generate(**given(ids)))
        for block in runner.pool._idle:
            turning = {id(slab): ring.window for ring, slab in block.ring_slabs}
            assert bool(turning) == any(block.rings) and bool(turning) <= rings
            for slab in block.slabs:
                slab[:, :, :, : turning.get(id(slab), block.dirty)] = torch.nan
    assert any(any(block.rings) for block in runner.pool._idle) == rings
    for lengths in ((200, 3, 150), (193, 66, 1), (130, 129, 65), (196, 7, 102)):
        ids = left_padded(lengths, seed=lengths[1])
        assert_same(stock.generate(**given(ids)), ours.generate(**given(ids)))
    assert runner.prefills == (
        {"called, by kernels": 4, "captured, by kernels": 5}
        if captured
        else {"called, by kernels": 9}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama, biases", "gemma", "olmo2"])
def test_rows_of_large_batches_take_turns(
    name: str, captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    half = layer_prefill.LayerPrefill._mlp

    def counted(self: Any, kernels: Any, x: torch.Tensor, packed: Any = None) -> torch.Tensor:
        seen.append(x.shape[0])
        return half(self, kernels, x, packed)

    monkeypatch.setattr(layer_prefill, "MOST_ROWS", 128)
    monkeypatch.setattr(layer_prefill.LayerPrefill, "_mlp", counted)
    stock, ours = optimized(name, PROMPTED[name])
    for length in (7, 66, 9, 67):
        agree(stock, ours, 3, length)
    assert (
        ours.generate.runner.prefills == {"captured, by kernels": 2}
        and {64, 128} <= set(seen)
        and max(seen) == 128
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_prompts_with_longrope_are_by_kernels_or_called(
    family: str, captures: list[str], resolved: list[Any]
) -> None:
    """HF's forward reads the length on the host, and is not captured."""
    stock = tiny_models.longrope(family, 100)
    ours = optimize(tiny_models.twin_of(stock), batch_sizes=(1,), verify=False)
    for batch, length in (
        (1, 7),
        (1, 9),
        (1, 64),
        (1, 70),
        (1, 80),
        (2, 4),
        (2, 5),
        (2, 6),
        (1, 8),
    ):
        agree(stock, ours, batch, length)
    assert (
        ours.generate.runner.prefills == {"captured, by kernels": 3}
        and captures.count("prefill") == 1
    )


@pytest.mark.slow
def test_prompts_with_a_softcap_are_hfs(captures: list[str], resolved: list[Any]) -> None:
    full = dict(
        layer_types=["full_attention"],
        num_hidden_layers=1,
        attn_implementation="eager",
        attn_logit_softcapping=3.0,
    )
    stock, ours = optimized("gemma2", full)
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    assert ours.generate.runner.prefills == {
        "not by kernels: the library's attention has no softcap": 1,
        "captured": 2,
    }


@pytest.mark.slow
def test_numbers_that_change_after_a_capture(captures: list[str], resolved: list[Any]) -> None:
    stock, ours = optimized("llama", {})
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    for model in (stock, ours):
        model.model.norm.variance_epsilon = 0.5
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    # a graph holds the model's numbers: after a change HF's forward runs a bucket's first prompt
    assert ours.generate.runner.prefills == {"captured, by kernels": 2, "captured": 2}
