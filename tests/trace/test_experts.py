"""Chosen experts as one node, and its two programs: they compute what stock's experts do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


class Normed(nn.Module):
    """Experts after a norm, which a product reads too."""

    def __init__(self, experts: Any, dtype: torch.dtype, kind: str):
        super().__init__()
        self.experts, self.kind = experts, kind
        self.weight = nn.Parameter(torch.rand(WIDTH).to(dtype), requires_grad=False)
        self.router = nn.Linear(WIDTH, 8, dtype=dtype).requires_grad_(False)

    def norm(self, x: Tensor) -> Tensor:
        if "layer_norm" in self.kind:
            weight = self.weight + 1.0 if "plus one" in self.kind else self.weight
            return F.layer_norm(x, (WIDTH,), weight, None, 1e-5)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        if self.kind == "plus one":
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        if self.kind == "cast last":
            return (self.weight * wide).to(x.dtype)
        return self.weight * wide.to(x.dtype)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = self.norm(x)
        if self.kind == "float32 router":
            scores = F.linear(y.float(), self.router.weight.float()).cumsum(-1).to(x.dtype)
        else:
            scores = self.router(y).cumsum(-1)
        return self.experts(y, index, weights).cumsum(-1) + scores.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "kind",
    ["rms_norm", "cast last", "plus one", "layer_norm", "layer_norm plus one", "float32 router"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_computed_by_those_who_read_it(kind: str, dtype: torch.dtype) -> None:
    function = Normed(built("gate and up", dtype), dtype, kind)
    inputs = {n: x for n, x in given(dtype).items() if n in ("x", "index", "weights")}
    plan = planned(function, inputs)
    (router,) = plan.programs.values()
    first, _ = kernels(plan)
    names = [[op.name for op in graph.ops] for graph in (router.graph, first.graph)]
    assert all(("layer_norm" if "layer" in kind else "rms_norm") in ops for ops in names)
    plan.schedule({group: runs(p.graph) for group, p in plan.programs.items()})
    assert {region.kind for region in plan.regions_to_run()} == {"experts"}
    plan.schedule(
        {group: runs(p.graph) for group, p in plan.programs.items()}, regions=kernels(plan)
    )
    left = [u.node.name for u in plan.step_ops if u.node is not None]
    assert not {"aten.mean", "aten.rsqrt", "aten.native_layer_norm", "aten.mul"} & {*left}
    assert "aten.mm" not in left and "aten.addmm" not in left
    wanted = outputs_of(function, inputs)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    scale = wanted[0].abs().max()
    difference = (results_of(plan, inputs, wanted)[0] - wanted[0]).abs().max()
    assert difference <= tolerance * scale


def test_a_norm_that_something_else_reads_is_computed_once() -> None:
    normed = Normed(built("gate and up"), torch.float32, "rms_norm")
    inputs = {n: x for n, x in given().items() if n in ("x", "index", "weights")}

    def twice(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y = normed.norm(x)
        return normed.experts(y, index, weights).cumsum(-1) + y.cumsum(-1)

    first, _ = kernels(planned(twice, inputs))
    assert "rms_norm" not in [op.name for op in first.graph.ops]


def test_a_result_need_not_be_copied() -> None:
    experts, inputs = built("gate and up"), given()
    names = ("x", "index", "weights")

    def function(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return experts(x, index, weights)

    plan = planned(function, {name: inputs[name] for name in names})
    plan.schedule({}, regions=kernels(plan))
    (wanted,) = outputs_of(function, {name: inputs[name] for name in names})
    for replaced in ((), ("out.0",)):
        out = torch.zeros_like(wanted)
        held = {**{name: inputs[name] for name in names}, "out.0": out}
        plan.bind(held, (), replaced=replaced)()
        torch.testing.assert_close(held["out.0"], wanted)
        assert (held["out.0"] is out) == (not replaced)


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
