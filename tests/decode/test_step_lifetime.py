"""Optimized models that are restored, copied, deleted or released: nothing is left behind."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from mirage_hf.api import optimize, restore
from tests.helpers.generate_comparison import assert_same, left_padded
from tests.helpers.step_pairs import CHANGED, FULL, GREEDY, KERNELS, agree, generated, pair, steps
from tests.helpers.tiny_models import FOUR, prompt, same, snapshot, tiny

# Not run with other versions of transformers: there test_optimize.py generates too.
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("many_samples")]


@pytest.mark.parametrize("family", FOUR)
def test_restore_leaves_nothing(family: str) -> None:
    model = tiny(family)
    before, want = snapshot(model), model.generate(**left_padded(), **GREEDY)
    optimize(model, batch_sizes=(3,))
    assert torch.equal(model.generate(**left_padded(), **GREEDY), want) and steps(model) == {
        KERNELS: 1
    }
    kept = weakref.ref(model.mirage.runner.model_kernels)
    gc.collect()
    gc.disable()
    try:
        restore(model)
        assert kept() is None
    finally:
        gc.enable()
    assert same(before, snapshot(model)) and "generate" not in model.__dict__
    assert torch.equal(model.generate(**left_padded(), **GREEDY), want)


def test_a_copy_is_stock_and_uses_its_own_weights() -> None:
    stock, ours = pair()
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    twin, other = copy.deepcopy(ours), copy.deepcopy(stock)
    assert not {"mirage", "generate"} & set(twin.__dict__)
    for model in (twin, other):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(-1.3)
    given = {**left_padded(), **FULL, "max_new_tokens": 12}
    assert_same(generated(other, given, 5), generated(twin, given, 5))
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {KERNELS: 2}
    optimize(twin)
    agree(other, twin, {"inputs": prompt(), **GREEDY})
    assert steps(twin) == {KERNELS: 1}


def test_a_deleted_model_frees_its_memory() -> None:
    model = optimize(tiny("qwen3"))
    model.generate(prompt(), **GREEDY)
    model.generate(prompt(), do_sample=True, max_new_tokens=5)
    runner = model.mirage.runner
    assert steps(model) == {KERNELS: 2}
    inner = (
        model.model.layers[1],
        model.model.embed_tokens.weight,
        runner,
        runner.model_kernels,
        runner.pool._idle[0],
    )
    alive = [weakref.ref(x) for x in (model, *inner)]
    del runner, inner
    gc.collect()
    gc.disable()
    try:
        del model
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("path", ["lm_head", "model.layers.0.self_attn.q_proj", "model.norm"])
def test_replaced_weights_are_not_kept(path: str) -> None:
    stock, ours = pair()
    agree(stock, ours, {"inputs": prompt(3), **GREEDY})
    replaced = weakref.ref(ours.get_submodule(path).weight)
    for model in (stock, ours):
        module = model.get_submodule(path)
        module.weight = nn.Parameter(module.weight.detach().flip(0).contiguous())
    for batch in (3, 1):
        agree(stock, ours, {"inputs": prompt(batch), **GREEDY})
    gc.collect()
    assert replaced() is None and steps(ours) == {KERNELS: 1, CHANGED: 2}


def test_released_memory_comes_back() -> None:
    stock, ours = pair()
    for _ in range(2):
        agree(stock, ours, {"inputs": prompt(), **GREEDY})
        assert ours.mirage.runner.bytes > 0
        ours.mirage.release()
        assert ours.mirage.runner.bytes == 0
    assert steps(ours) == {KERNELS: 2}
