"""Prompts whose kernels are launched without a CUDA graph, such as long ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from mirage_hf.decode import cache_layers
from tests.helpers.generate_comparison import assert_same, left_padded, prompt
from tests.helpers.prompt_pairs import FEW, FULL, PROMPTED, agree, agree_padded, optimized

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("captures")]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_prompts_whose_kernels_are_called(
    name: str, no_captured_prompts: None, resolved: list[Any]
) -> None:
    """Prompts have any length, in blocks with and without a prompt before.

    The blocks may hold data of a longer prompt.
    """
    stock, ours = optimized(name, PROMPTED[name])
    for batch, length in (
        (1, 7),
        (1, 300),
        (1, 9),
        (3, 5),
        (3, 65),
        (3, 6),
        (1, 200),
        (2, 4),
        (1, 1),
        (1, 9),
    ):
        agree(stock, ours, batch, length)
    assert ours.generate.runner.prefills == {
        "called, by kernels": 5 + 2
    }  # not the first prompt of a batch size, and none of two rows
    assert {p.inputs[0].dims[0] for p in resolved} >= {64, 128, 256}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_padded_prompts_whose_kernels_are_called(
    name: str, no_captured_prompts: None, resolved: list[Any]
) -> None:
    """Their caches are returned, and later calls continue with them."""
    stock, ours = optimized(name, PROMPTED[name], batch_sizes=(3,))
    agree(stock, ours, 3, 5)
    for lengths in ((4, 11, 7), (70, 1, 130), (200, 2, 3)):
        agree_padded(stock, ours, *lengths)
    given = {**left_padded((9, 30, 2)), **FULL}
    first = [model.generate(**given) for model in (stock, ours)]
    assert_same(*first)
    mask = torch.cat(
        [given["attention_mask"], torch.ones(3, FULL["max_new_tokens"] + 4, dtype=torch.long)], -1
    )
    more = [
        model.generate(
            torch.cat([seen.sequences, prompt(3, 4)], -1),
            past_key_values=seen.past_key_values,
            attention_mask=mask,
            **FULL,
        )
        for model, seen in zip((stock, ours), first, strict=True)
    ]
    assert_same(*more)
    assert ours.generate.runner.prefills == {"called, by kernels": 4}


@pytest.mark.slow
def test_a_prompt_that_hfs_forward_lacks_the_memory_for_is_by_kernels(
    no_captured_prompts: None, resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the first prompt too, which HF's forward runs otherwise."""
    stock, ours = optimized("llama", {}, batch_sizes=(3,))
    given = {"inputs": prompt(3, 240), **FULL}
    want = stock.generate(**given)

    def no_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GenerationMixin, "_prefill", no_memory)
    assert_same(want, ours.generate(**given))
    assert ours.generate.runner.prefills == {"called, by kernels": 1}


@pytest.mark.slow
def test_caches_of_called_prompts_are_returned(
    no_captured_prompts: None, resolved: list[Any]
) -> None:
    """The model's own forward never ran in these blocks. One call grows into a larger block."""
    stock, ours = optimized("llama", {})
    for length in (7, 9, 300, 500):
        given = {"inputs": prompt(1, length, seed=length), **FULL}
        first = [model.generate(**given) for model in (stock, ours)]
        assert_same(*first)
        more = [
            model.generate(
                torch.cat([seen.sequences, prompt(1, 4)], -1),
                past_key_values=seen.past_key_values,
                **FULL,
            )
            for model, seen in zip((stock, ours), first, strict=True)
        ]
        assert_same(*more)
    assert ours.generate.runner.prefills == {"called, by kernels": 3}


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise KeyboardInterrupt (Ctrl-C) in the second layer of a prompt's forward."""
    update = cache_layers.PrefillLayer.update

    def to_the_second(self: Any, *states: Any, **kwargs: Any) -> Any:
        if self.index == 1:
            raise KeyboardInterrupt
        return update(self, *states, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cache_layers.PrefillLayer, "update", to_the_second)
        yield


@pytest.mark.slow
def test_a_replayed_prompt_returns_all_layers_behind_a_forward_that_failed(
    captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = optimized("llama", {})
    for length in (7, 8):
        agree(stock, ours, 1, length)
    with interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        ours.generate(prompt(1, 70), **FULL)
    agree(stock, ours, 1, 9)
    assert captures.count("prefill") == 1


@pytest.mark.slow
def test_a_prompt_is_called_in_a_block_with_some_of_its_memory(
    no_captured_prompts: None, resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a ring allocate their memory after those without."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    stock, ours = optimized("gemma3", dict(layer_types=kinds, sliding_window=400), batch_sizes=(1,))
    for length in (7, 9):
        agree(stock, ours, 1, length)
    given = dict(max_new_tokens=200, do_sample=False)  # more than the window in all
    mask = torch.ones(1, 300, dtype=torch.long)
    mask[:, :3] = 0
    with interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        ours.generate(prompt(1, 300), attention_mask=mask, **given)
    assert (
        stock.generate(prompt(1, 300), **given).tolist()
        == ours.generate(prompt(1, 300), **given).tolist()
    )
    assert ours.generate.runner.prefills == {"called, by kernels": 2}


@pytest.mark.slow
def test_prompts_are_called_until_they_are_captured(
    kernels_pay: None, captures: list[str], resolved: list[Any]
) -> None:
    stock, ours = optimized("llama", {})
    seen = []
    for length in (7, 70, 8, 9, 71):
        agree(stock, ours, 1, length)
        seen.append(dict(ours.generate.runner.prefills))
    assert seen == [
        {},
        {"called, by kernels": 1},
        *({"called, by kernels": 1, "captured, by kernels": n} for n in (1, 2, 3)),
    ]
    for model in (stock, ours):
        model.model.norm.weight = torch.nn.Parameter(2 * model.model.norm.weight.detach())
    for length in (7, 300):  # weights that the kernels were not made for
        agree(stock, ours, 1, length)
    assert ours.generate.runner.prefills == seen[-1]


@pytest.mark.slow
def test_a_changed_model_has_no_room_that_it_does_not_use(
    no_captured_prompts: None, resolved: list[Any]
) -> None:
    """In another dtype, its layers would allocate memory of their own in addition."""
    stock, ours = optimized("llama", {}, batch_sizes=(1,))
    for length in (7, 9):
        agree(stock, ours, 1, length)
    for model in (stock, ours):
        model.double()
    for length in (7, 300, 300):
        agree(stock, ours, 1, length)
    for block in ours.generate.runner.pool._idle:
        assert [slab.dtype for slab in block.slabs] == [torch.float64] * 2


@pytest.mark.slow
def test_a_model_that_is_as_it_was_before_has_its_prompts_called(
    no_captured_prompts: None, resolved: list[Any]
) -> None:
    """An example is a model whose adapters are switched off and on again."""
    stock, ours = optimized("llama", {}, batch_sizes=(1,))
    weights = [model.model.norm.weight for model in (stock, ours)]
    own, other = [weight.data for weight in weights], torch.full((32,), 0.5)
    for length, changed in (
        (7, False),
        (8, False),
        (9, True),
        (10, False),
        (11, True),
        (12, True),
        (13, False),
    ):
        for weight, data in zip(weights, own, strict=True):
            weight.data = other if changed else data
        agree(stock, ours, 1, length)
    assert ours.generate.runner.prefills == {"called, by kernels": 3}


@pytest.mark.slow
def test_prompts_are_not_called_where_they_cannot_be(
    no_captured_prompts: None, resolved: list[Any]
) -> None:
    """These have a softcap in attention, padding, positions of a user's own, or a cache."""
    full = dict(
        layer_types=["full_attention"],
        num_hidden_layers=1,
        attn_implementation="eager",
        attn_logit_softcapping=3.0,
    )
    stock, ours = optimized("gemma2", full)
    for length in (7, 8):
        agree(stock, ours, 1, length)
    assert not ours.generate.runner.prefills
    stock, ours = optimized("llama", {}, batch_sizes=(1, 2))
    for given in (
        {"inputs": prompt(2, 9)},
        left_padded(),
        {"inputs": prompt(2, 9), "position_ids": torch.arange(4, 13)[None]},
    ):
        assert_same(stock.generate(**given, **FULL), ours.generate(**given, **FULL))
    assert not ours.generate.runner.prefills
