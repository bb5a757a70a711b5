"""`experts_implementation="mirage"`: experts by kernels, or by stock's products with a reason."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import mirage_hf
from mirage_hf import experts_interface
from mirage_hf.experts_interface import MOST_TOKENS, NAME, Experts
from mirage_hf.patterns import PATTERNS
from scripts import survey_models
from tests.trace.test_experts import CASES, CHOSEN, EXPERTS_COUNT, WIDTH, built


def given(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    index = torch.rand(tokens, EXPERTS_COUNT, generator=generator).topk(CHOSEN)[1]
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype)
    return x, index, torch.rand(tokens, CHOSEN, generator=generator).to(dtype)


def stock(module: nn.Module, *args: Tensor) -> Tensor:
    return ALL_EXPERTS_FUNCTIONS["batched_mm"](module, *args)


@pytest.fixture
def ours() -> Experts:
    return Experts(backend="cpu")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [1, 3, MOST_TOKENS])
def test_kernels_compute_what_stock_does(name: str, tokens: int, ours: Experts) -> None:
    module = built(name)
    for seed in range(2):
        args = given(tokens + seed) if tokens < MOST_TOKENS else given(tokens)
        torch.testing.assert_close(ours.forward(module, *args), stock(module, *args))
    report = ours.report()
    assert sum(report.by_kernels.values()) == 2 and not report.by_torch
    assert type(module).__name__ in str(report)


def test_layers_share_kernels_and_each_reads_its_own_weights(ours: Experts) -> None:
    first, args = built("gate and up"), given(2)
    second = copy.deepcopy(first)
    second.down_proj.data.mul_(2)
    one, two = (ours.forward(m, *args) for m in (first, second))
    torch.testing.assert_close(two, 2 * one)
    assert len(ours._found) == 2


def test_weights_that_change_are_seen(ours: Experts) -> None:
    module, args = built("gate and up"), given(2)
    ours.forward(module, *args)
    module.down_proj.data.mul_(3)
    torch.testing.assert_close(ours.forward(module, *args), stock(module, *args))
    module.down_proj = nn.Parameter(torch.randn_like(module.down_proj), requires_grad=False)
    torch.testing.assert_close(ours.forward(module, *args), stock(module, *args))
    assert not ours.report().by_torch


def test_modules_are_not_kept_alive(ours: Experts) -> None:
    module = built("gate and up")
    ours.forward(module, *given(2))
    dead = weakref.ref(module.down_proj)
    del module
    gc.collect()
    assert dead() is None


def changed(change: str) -> tuple[Any, tuple[Tensor, ...]]:
    module, args = built("gate and up"), given(2)
    if change == "gradients":
        module.requires_grad_(True)
    if change == "experts whose weights are of another form":
        module.has_gate = 1
    if change == "experts whose gate is of another form":
        module.act_fn = nn.Softmax(-1)
    if change == f"more than {MOST_TOKENS} tokens":
        args = given(MOST_TOKENS + 1)
    return module, args


@pytest.mark.parametrize(
    "reason",
    [
        "gradients",
        "experts whose weights are of another form",
        "experts whose gate is of another form",
        f"more than {MOST_TOKENS} tokens",
    ],
)
def test_what_has_no_kernels_runs_stock_with_the_reason(reason: str, ours: Experts) -> None:
    module, args = changed(reason)
    torch.testing.assert_close(ours.forward(module, *args), stock(module, *args))
    report = ours.report()
    assert report.by_torch == {reason: 1} and not report.by_kernels
    assert f"by torch: {reason}: 1" in str(report)


def test_models_ask_for_it_by_name() -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        want = model(ids).logits
        model.set_experts_implementation(NAME)
        before = mirage_hf.experts_report()
        torch.testing.assert_close(model(ids).logits, want)
    # there are no kernels for CPUs by this name: a CPU runs stock's products
    counts = mirage_hf.experts_report().by_torch
    assert counts["tensors on cpu"] == before.by_torch.get("tensors on cpu", 0) + 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    ours, module = Experts(tune="never"), built(name, dtype).cuda()
    exact = built(name, dtype).double().cuda()
    for tokens in (1, 2, 5, MOST_TOKENS):
        args = tuple(x.cuda() for x in given(tokens, dtype))
        wide = (args[0].double(), args[1], args[2].double())
        want = stock(exact, *wide)
        errors = [
            (y.double() - want).abs().max()
            for y in (ours.forward(module, *args), stock(module, *args))
        ]
        assert errors[0] <= 1.25 * errors[1] + 1e-5 * want.abs().max(), (tokens, errors)
    assert not ours.report().by_torch
    # a CUDA graph holds kernels that were found before
    graph, static = torch.cuda.CUDAGraph(), tuple(x.clone() for x in args)
    with torch.cuda.graph(graph):
        y = ours.forward(module, *static)
    static[1].copy_(static[1].flip(0))
    graph.replay()
    torch.testing.assert_close(y, ours.forward(module, *static))


def test_a_known_model_whose_steps_are_not_traced_runs_experts_by_kernels(
    ours: Experts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss has sinks, which a trace does not know. On a CPU, kernels run as torch code."""
    usual = experts_interface._experts
    monkeypatch.setattr(experts_interface, "_experts", ours)
    ours.register(NAME)
    try:
        model = survey_models.build("gpt_oss", survey_models.model_types()["gpt_oss"])
        before = model.get_experts_implementation()
        want = model.generate(text := torch.arange(2, 9)[None], max_new_tokens=6, do_sample=False)
        # named patterns trace nothing, not even the half of a layer
        mirage_hf.optimize(model, patterns=[*PATTERNS], backend="cpu")
        assert ours.report().by_kernels and model.get_experts_implementation() == before
        counts = sum(ours.report().by_kernels.values())
        assert torch.equal(model.generate(text, max_new_tokens=6, do_sample=False), want)
        assert sum(ours.report().by_kernels.values()) > counts and not ours.report().by_torch
        assert model.mirage.report.decode["step: all by kernels"] == 1
        assert model.get_experts_implementation() == before
    finally:
        usual.register(NAME)
