"""Chosen experts as one node, and its two programs: they compute what stock's experts do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, PhimoeConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.phimoe.modeling_phimoe import PhimoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from mirage_hf.trace.experts.form import ExpertsForm, form_of
from mirage_hf.trace.experts.op import EXPERTS, MOST_TOKENS, experts_as_one_node
from mirage_hf.trace.step_ops import RegionRun
from mirage_hf.trace.step_plan import StepPlan
from tests.helpers.traced_functions import outputs_of, recorded, results_of, runs

ROWS, EXPERTS_COUNT, CHOSEN, WIDTH, INNER = 3, 6, 2, 16, 24
SIZES: dict[str, Any] = dict(hidden_size=WIDTH, num_experts_per_tok=CHOSEN, num_hidden_layers=2)
#: Experts, and their configs with the fields that have other names in some models.
CASES: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "gate and up": (
        Qwen3MoeExperts,
        Qwen3MoeConfig,
        {"num_experts": EXPERTS_COUNT, "moe_intermediate_size": INNER},
    ),
    "transposed, interleaved, biases": (
        GptOssExperts,
        GptOssConfig,
        {"num_local_experts": EXPERTS_COUNT, "intermediate_size": INNER},
    ),
    "another class": (
        PhimoeExperts,
        PhimoeConfig,
        {"num_local_experts": EXPERTS_COUNT, "intermediate_size": INNER},
    ),
}


def built(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return random experts, which run as stock's "batched_mm" ones."""
    kind, config_kind, fields = CASES[name]
    config = config_kind(**SIZES, **fields)
    config._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    experts = kind(config)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.5)
    return experts.to(dtype).requires_grad_(False)


def given(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(ROWS, EXPERTS_COUNT, generator=generator).topk(CHOSEN)[1]
    index[1] = index[0]
    return {
        "x": torch.randn(ROWS, WIDTH, generator=generator).to(dtype),
        "index": index,
        "weights": torch.rand(ROWS, CHOSEN, generator=generator).to(dtype),
        "residual": torch.randn(ROWS, 1, WIDTH, generator=generator).to(dtype),
        "shared": torch.randn(ROWS, WIDTH, generator=generator).to(dtype),
    }


def block(experts: Any) -> Callable[..., Tensor]:
    """Return what a layer does with experts: a shared expert and the residual are added."""

    def function(
        x: Tensor, index: Tensor, weights: Tensor, residual: Tensor, shared: Tensor
    ) -> Tensor:
        y = experts(x, index, weights) + shared.sigmoid()
        return (residual + y.reshape(ROWS, 1, WIDTH)).cumsum(-1)

    return function


def planned(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> StepPlan:
    with experts_as_one_node():
        return StepPlan(recorded(function, inputs), ROWS)


def kernels(plan: StepPlan) -> dict[Any, RegionRun]:
    found = [region for region in plan.regions if region.kind == "experts"]
    return {region: RegionRun(runs(region.graph)) for region in found}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_programs_compute_what_stock_does(name: str, dtype: torch.dtype) -> None:
    experts, inputs = built(name, dtype), given(dtype)
    function = block(experts)
    plan = planned(function, inputs)
    first, second = kernels(plan)
    names = [[op.name for op in region.graph.ops] for region in (first, second)]
    assert names[0].count("matmul") in (1, 2) and names[1].count("matmul") == 1
    assert names[1].count("add") == 2 + ("biases" in name)
    wanted = outputs_of(function, inputs)
    plan.schedule({}, regions=kernels(plan))
    assert sum(u.region is not None for u in plan.step_ops) == 2
    assert not any(u.node is not None and u.node.name == EXPERTS for u in plan.step_ops)
    (ours,) = results_of(plan, inputs, wanted)
    exact = outputs_of(
        block(built(name, dtype).double()),
        {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()},
    )[0]
    errors = [(x.double() - exact).abs().max() for x in (ours, wanted[0])]
    assert errors[0] <= 1.25 * errors[1] + 1e-5 * exact.abs().max(), errors


@pytest.mark.parametrize("which", [(), (0,), (1,)])
def test_without_both_kernels_stock_runs(which: tuple[int, ...]) -> None:
    experts, inputs = built("gate and up"), given()
    plan = planned(block(experts), inputs)
    found = [*kernels(plan).items()]
    plan.schedule({}, regions=dict(found[n] for n in which))
    wanted = outputs_of(block(experts), inputs)
    assert any(u.node is not None and u.node.name == EXPERTS for u in plan.step_ops)
    torch.testing.assert_close(results_of(plan, inputs, wanted), wanted)


def test_bytes_are_those_of_chosen_experts() -> None:
    experts = built("gate and up")
    first, second = kernels(planned(block(experts), given()))
    one = WIDTH * INNER * 4
    assert (first.reads, second.reads) == (6 * 2 * one, 6 * one)


@pytest.mark.parametrize(
    ("change", "is_known"),
    [
        (lambda e: None, True),
        (lambda e: setattr(e, "has_gate", None), False),
        (lambda e: e.register_parameter("down_proj", None), False),
        (lambda e: setattr(e, "down_proj", nn.Parameter(e.down_proj.data[:, :, ::2])), False),
        (lambda e: e.to(torch.float64), False),
    ],
)
def test_experts_of_other_forms_run_stocks_code(change: Any, is_known: bool) -> None:
    experts = built("gate and up")
    change(experts)
    assert isinstance(form_of(experts), ExpertsForm) == is_known


def test_a_gate_of_another_form_has_no_program() -> None:
    experts, inputs = built("gate and up"), given()
    experts.act_fn = nn.Softmax(-1)
    plan = planned(block(experts), inputs)
    assert not kernels(plan)
    plan.schedule({})
    wanted = outputs_of(block(experts), inputs)
    torch.testing.assert_close(results_of(plan, inputs, wanted), wanted)


def test_the_registry_is_as_before() -> None:
    before = dict(ALL_EXPERTS_FUNCTIONS._local_mapping), ALL_EXPERTS_FUNCTIONS["batched_mm"]
    with experts_as_one_node():
        assert ALL_EXPERTS_FUNCTIONS["batched_mm"] is not before[1]
    assert dict(ALL_EXPERTS_FUNCTIONS._local_mapping) == before[0]
    assert ALL_EXPERTS_FUNCTIONS["batched_mm"] is before[1]


def test_many_tokens_run_stocks_products() -> None:
    """Each token reads its experts' weights. Of many tokens, that is more than all weights."""
    experts, tokens = built("gate and up"), MOST_TOKENS + 1
    x = torch.randn(tokens, WIDTH)
    index, weights = torch.zeros(tokens, CHOSEN, dtype=torch.long), torch.ones(tokens, CHOSEN)
    inputs = {"x": x, "index": index, "weights": weights}
    with experts_as_one_node():
        plan = StepPlan(
            recorded(lambda x, index, weights: experts(x, index, weights), inputs), tokens
        )
    assert not kernels(plan)


def test_experts_with_an_unknown_feature_run_stocks_function() -> None:
    """Such as the norm after each expert of Muse Spark."""
    experts = built("gate and up")
    assert isinstance(form_of(experts), ExpertsForm)
    experts.has_post_expert_norm = False
    assert isinstance(form_of(experts), ExpertsForm)
    experts.has_post_expert_norm = True
    assert not isinstance(form_of(experts), ExpertsForm)
