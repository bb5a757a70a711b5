"""Halves of layers with a mixture of experts, traced one by one in steps of known models."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mirage_hf.api import restore
from mirage_hf.pipeline import resolver
from mirage_hf.swap import traced_half
from scripts import survey_models
from tests.helpers.generate_comparison import left_padded
from tests.helpers.step_pairs import GREEDY, KERNELS, UNTRACED, agree, pair, steps
from tests.helpers.tiny_models import Resolved, prompt, tiny

pytestmark = [
    pytest.mark.models,
    pytest.mark.usefixtures("resolved"),
    pytest.mark.skipif(
        not hasattr(PreTrainedModel, "get_experts_implementation"),
        reason="this transformers runs experts of float32 in another way",
    ),
]


def deepseek() -> Any:
    """Return a small model with latent attention, groups of experts and a shared expert."""
    return survey_models.build("deepseek_v2", survey_models.model_types()["deepseek_v2"])


def rows_of(model: Any) -> dict[str, set[str]]:
    """Return the statuses of each part of traced halves, by part."""
    found: dict[str, set[str]] = {}
    for row in model.mirage.report.rows:
        if row.pattern == "traced":
            found.setdefault(row.part, set()).add(row.status)
    return found


def own_layers(model: Any) -> list[Any]:
    """Return the layers whose MLP is of another kind."""
    return [x for x in model.mirage.runner.model_kernels.layers if not x.step.first]


def own_steps(model: Any) -> list[Any]:
    """Return the steps of these layers."""
    return [layer.step for layer in own_layers(model)]


@pytest.mark.parametrize("make", ["gpt_oss", deepseek], ids=["gpt_oss", "deepseek"])
def test_router_experts_and_linears_run_by_kernels_with_the_norm_in_front(make: Any) -> None:
    stock, ours = pair(make)
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    agree(stock, ours, {**left_padded(), **GREEDY})
    assert steps(ours) == {KERNELS: 2}
    assert own_steps(ours) and all({*step.traced_halves} == {1, 3} for step in own_steps(ours))
    found = rows_of(ours)
    assert all(statuses == {"swapped"} for statuses in found.values())
    up = "mlp.shared_experts.gate_proj, mlp.shared_experts.up_proj"
    products = ["mlp.gate", up, "mlp.shared_experts.down_proj"]
    products = ["mlp.router"] if make == "gpt_oss" else products
    assert [*found] == [*products, "experts, program 1", "experts, program 2"]


@pytest.mark.parametrize("make", ["gpt_oss", deepseek], ids=["gpt_oss", "deepseek"])
def test_a_traced_half_computes_what_stocks_does(make: Any) -> None:
    stock, ours = pair(make)
    name, step = own_layers(ours)[0].name, own_steps(ours)[0]
    layer = stock.get_submodule(name)
    for seed in range(4):
        torch.manual_seed(seed)
        h = torch.randn(3, ours.config.hidden_size)
        with torch.no_grad():
            added = layer.mlp(layer.post_attention_layernorm(h[:, None]))
            added = added[0] if isinstance(added, tuple) else added
            found = step.traced_halves[3](h, h)
        torch.testing.assert_close(found, h + added[:, 0], rtol=1e-5, atol=1e-5)


class Gates(nn.Module):
    """An MLP that no pattern has."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.mid, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(torch.tanh(up) * torch.sigmoid(self.mid(up)))


@pytest.mark.slow
def test_other_mlps_are_traced_too() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = tiny("llama")
        for layer in model.model.layers:
            layer.mlp = Gates(model.config.hidden_size).eval()
        return model

    stock, ours = pair(make)
    agree(stock, ours, {**left_padded(), **GREEDY})
    assert steps(ours) == {KERNELS: 1}
    assert {"mlp.up", "mlp.mid", "mlp.down"} == rows_of(ours).keys() - {"norm"}


@pytest.mark.slow
def test_equal_programs_are_asked_for_once(resolved: list[Any]) -> None:
    pair("gpt_oss", batch_sizes=(1,))
    texts = [str(program) for program in resolved]
    experts = [text for text in texts if "take(" in text]
    assert len(experts) == len({*experts}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["take(", "matmul"])
def test_a_wrong_kernel_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(program: Any, pattern: str = "", **_: Any) -> Resolved:
        is_wrong = pattern == "traced" and wrong in str(program)
        return Resolved(program, scale=1.05 if is_wrong else 1.0)

    monkeypatch.setattr(resolver, "resolve", resolve)
    stock, ours = pair("gpt_oss", batch_sizes=(1,))
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {KERNELS: 1}
    reasons = [row.reason for row in ours.mirage.report.rows if row.pattern == "traced"]
    assert reasons and all("it differs from its own forward by" in reason for reason in reasons)
    assert not any(step.traced_halves for step in own_steps(ours))


def reads_on_the_host(model: Any) -> None:
    own = type(model.model.layers[0].mlp)

    class Reads(own):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Any) -> Any:
            assert hidden_states.sum().item() < 1e9
            return super().forward(hidden_states)

    for layer in model.model.layers:
        layer.mlp.__class__ = Reads


@pytest.mark.slow
def test_a_forward_that_reads_values_is_called() -> None:
    def make() -> Any:
        model = deepseek()
        reads_on_the_host(model)
        return model

    stock, ours = pair(make, batch_sizes=(1,))
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    reasons = [row.reason for row in ours.mirage.report.rows if row.pattern == "traced"]
    assert reasons and all("on the host" in reason for reason in reasons)


def another_weight(model: Any) -> None:
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(-experts.down_proj.detach())


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("change", [another_weight, hooked])
def test_a_changed_mixture_is_served_as_it_is(change: Callable[[Any], None]) -> None:
    stock, ours = pair("gpt_oss")
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    for model in (stock, ours):
        change(model)
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours).get(KERNELS) == 1


@pytest.mark.slow
def test_weights_that_change_in_place_are_read_as_they_are() -> None:
    stock, ours = pair("gpt_oss")
    for model in (stock, ours):
        with torch.no_grad():
            for p in model.model.layers[0].mlp.parameters():
                p.mul_(-0.7)
    agree(stock, ours, {"inputs": prompt(), **GREEDY})
    assert steps(ours) == {KERNELS: 1}


@pytest.mark.slow
def test_named_patterns_trace_no_mixture() -> None:
    _, ours = pair("gpt_oss", batch_sizes=(1,), **UNTRACED)
    assert not rows_of(ours) and not any(step.traced_halves for step in own_steps(ours))


@pytest.mark.slow
def test_restore_lets_go_of_traces() -> None:
    _, ours = pair("gpt_oss", batch_sizes=(1,))
    kept = weakref.ref(own_steps(ours)[0].traced_halves[1])
    gc.collect()
    gc.disable()
    try:
        restore(ours)
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_trace_keeps_no_input() -> None:
    _, ours = pair("gpt_oss", batch_sizes=(1,))
    half = own_steps(ours)[0].traced_halves[1]
    assert isinstance(half, traced_half.TracedHalf)
    h = torch.randn(1, ours.config.hidden_size)
    kept = weakref.ref(h)
    half(h, h)
    del h
    assert kept() is None
