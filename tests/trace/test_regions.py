"""Regions as programs: they compute what was recorded, and update states in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.trace.regions import Region
from mirage_hf.trace.step_ops import RegionRun
from mirage_hf.trace.step_plan import StepPlan
from tests.helpers.traced_functions import normal, outputs_of, recorded, results_of

ROWS, HEADS, KEYS, VALUES = 2, 4, 8, 6
STATE = normal(ROWS, HEADS, KEYS, VALUES, seed=1)
A = normal(HEADS, seed=2)


def gated_delta(state: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """Two query heads share a key head, and keys are normed, as in Qwen3-Next."""
    q, k = (x.repeat_interleave(2, dim=1) for x in (q, k))
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    decay, beta = gates[:, 0].exp()[..., None, None], gates[:, 1].sigmoid()[..., None]
    faded = state * decay
    delta = (v - (faded * k[..., None]).sum(-2)) * beta
    new = faded + k[..., None] * delta[..., None, :]
    state.copy_(new)
    return (new * q[..., None]).sum(-2)


def mamba(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The decay is as large as the state where torch makes it, and the result is a `bmm`."""
    dt = dt[..., None].expand(ROWS, HEADS, KEYS)
    decay = (dt[..., None] * -A[:, None, None].expand(HEADS, KEYS, VALUES).exp()).exp()
    new = state * decay + dt[..., None] * b[:, None, None] * x[..., None]
    state.copy_(new)
    c = c[:, None].expand(ROWS, HEADS, VALUES).reshape(ROWS * HEADS, VALUES, 1)
    y = torch.bmm(new.view(ROWS * HEADS, KEYS, VALUES), c).view(ROWS, HEADS, KEYS)
    return (y + x * A[:, None]).reshape(ROWS, 1, HEADS * KEYS)


def in_half(state: Tensor, x: Tensor) -> Tensor:
    """A state in bfloat16 that is computed in float32, and read in another order of dims."""
    new = state.float() * x.float().exp() + x.transpose(1, 2).float().transpose(1, 2)
    state.copy_(new)
    return new.transpose(1, 3).sum(-1)


CASES: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "gated delta": (
        gated_delta,
        {
            "q": normal(ROWS, HEADS // 2, KEYS, seed=3),
            "k": normal(ROWS, HEADS // 2, KEYS, seed=4),
            "v": normal(ROWS, HEADS, VALUES, seed=5),
            "gates": normal(ROWS, 2, HEADS, seed=6),
        },
    ),
    "mamba": (
        mamba,
        {
            "x": normal(ROWS, HEADS, KEYS, seed=3),
            "dt": normal(ROWS, HEADS, seed=4),
            "b": normal(ROWS, VALUES, seed=5),
            "c": normal(ROWS, VALUES, seed=6),
        },
    ),
    "bfloat16": (in_half, {"x": normal(ROWS, HEADS, 1, VALUES, seed=3, dtype=torch.bfloat16)}),
}


def planned(name: str) -> tuple[StepPlan, dict[str, Tensor], Tensor]:
    """Return the plan of a case, its inputs, and the result that stock gives."""
    function, inputs = CASES[name]
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    inputs = {"state": STATE.to(dtype), **inputs}
    result = function(**{n: x.clone() for n, x in inputs.items()})
    return StepPlan(recorded(function, inputs), ROWS), inputs, torch.zeros_like(result)


def update_of(plan: StepPlan) -> Region:
    """Return the region that updates the state."""
    (region,) = (r for r in plan.regions if r.state is not None)
    return region


def state_and_result(plan: StepPlan, inputs: dict[str, Tensor], out: Tensor) -> list[Tensor]:
    """Run a plan twice, and return the state and the last result."""
    given = {name: x.clone() for name, x in inputs.items()} | {"out.0": out.clone()}
    with torch.no_grad():
        run = plan.bind(given, ())
        run()
        run()
    return [given["state"], given["out.0"]]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_update_computes_what_was_recorded(name: str, in_place: bool) -> None:
    plan, inputs, out = planned(name)
    region = update_of(plan)
    ran = []

    def run(operands: list[Tensor], outputs: list[Tensor] | None = None) -> list[Tensor]:
        ran.append(outputs is not None)
        results = run_kernel_graph(region.graph, operands)
        if outputs is None:
            return results
        return [y.copy_(x) for y, x in zip(outputs, results, strict=True)]

    plan.schedule({})
    wanted = state_and_result(plan, inputs, out)
    assert not ran
    plan.schedule({}, regions={region: RegionRun(run, in_place)})
    got = state_and_result(plan, inputs, out)
    assert ran == [in_place] * 2
    assert not torch.equal(wanted[0], inputs["state"]) and wanted[1].abs().max() > 0
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_read_and_written_by_the_program_alone(name: str) -> None:
    plan, _, _ = planned(name)
    region = update_of(plan)
    plan.schedule({}, regions={region: RegionRun(lambda *_: [])})
    left = [u.node.name for u in plan.step_ops if u.node is not None]
    assert "aten.exp" not in left and "aten.bmm" not in left, left
    assert left.count("aten.copy_") == 1, left  # of the result into its place
    size = STATE.numel()
    assert sum(t.numel() >= size for t in map(_zeros, region.graph.inputs)) == 1


def _zeros(t: object) -> Tensor:
    return torch.empty(t.dims)  # type: ignore[attr-defined]


def test_heads_that_share_a_key_read_it_once() -> None:
    plan, _, _ = planned("gated delta")
    sizes = [t.dims for region in plan.regions for t in region.graph.inputs]
    assert sum(torch.empty(dims).numel() == ROWS * HEADS // 2 * KEYS for dims in sizes) == 2, sizes


def twice_written(state: Tensor, x: Tensor) -> Tensor:
    state.copy_(state * x)
    state.copy_(state + x)
    return state.sum(-1)


def read_elsewhere(state: Tensor, x: Tensor) -> Tensor:
    sums = state.cumsum(-1)
    state.copy_(sums * x)
    return sums


def not_from_itself(state: Tensor, x: Tensor) -> Tensor:
    state.copy_(x * 2)
    return x + 1


def reads_a_part_too(state: Tensor, x: Tensor) -> Tensor:
    """A kernel in place would read a part that it has written."""
    row = x[:, :, :1, :1] * state[:, :, 0, :VALUES].unsqueeze(-2)
    state.copy_(state + row)
    return state.cumsum(-1)


@pytest.mark.parametrize(
    "function", [twice_written, read_elsewhere, not_from_itself, reads_a_part_too]
)
def test_other_writes_run_as_they_are(function: Callable[..., Tensor]) -> None:
    inputs = {"state": STATE, "x": normal(*STATE.shape, seed=3)}
    plan = StepPlan(recorded(function, inputs), ROWS)
    assert not plan.regions
    plan.schedule({})
    given = {n: x.clone() for n, x in inputs.items()}
    result = function(**given)
    got = {n: x.clone() for n, x in inputs.items()} | {"out.0": torch.zeros_like(result)}
    plan.bind(got, ())()
    assert torch.equal(got["state"], given["state"]) and torch.equal(got["out.0"], result)


def test_ops_without_a_row_stay_around_an_update() -> None:
    """What has no row runs before the program, and what reads the next state after it."""

    def function(state: Tensor, x: Tensor) -> Tensor:
        new = state * torch.cos(x)
        state.copy_(new)
        return new.cumsum(-1)

    inputs = {"state": STATE, "x": normal(*STATE.shape, seed=3)}
    plan = StepPlan(recorded(function, inputs), ROWS)
    (region,) = plan.regions
    wanted = function(**{n: x.clone() for n, x in inputs.items()})
    plan.schedule({}, regions={region: RegionRun(lambda xs: run_kernel_graph(region.graph, xs))})
    given = {n: x.clone() for n, x in inputs.items()} | {"out.0": torch.zeros_like(wanted)}
    plan.bind(given, ())()
    torch.testing.assert_close(given["out.0"], wanted)


def test_regions_do_not_wait_for_each_other() -> None:
    """Both sums could have both products: then each region would need the other one first."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b = x * x, y * y
        first = a.sum(-1, keepdim=True).exp().sqrt()
        second = b.sum(-1, keepdim=True).exp().sqrt()
        return (first * b.cumsum(-1)).exp() * 2.0, (second * a.cumsum(-1)).exp() * 2.0

    inputs = {"x": 0.1 * normal(3, 2, 8), "y": 0.1 * normal(3, 2, 8, seed=1)}
    wanted = outputs_of(function, inputs)
    plan = StepPlan(recorded(function, inputs), ROWS)
    assert len(plan.regions) == 2
    regions = {r: RegionRun(partial(run_kernel_graph, r.graph)) for r in plan.regions}
    plan.schedule({}, regions=regions)
    for got, x in zip(results_of(plan, inputs, wanted), wanted, strict=True):
        torch.testing.assert_close(got, x)


def test_a_part_of_a_result_is_read_after_its_region() -> None:
    """As in a RoPE over a part of each head, after a norm."""

    def function(x: Tensor) -> Tensor:
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        return y * torch.cat((y[..., 4:], y[..., :4]), -1)

    inputs = {"x": normal(3, 2, 8)}
    plan = StepPlan(recorded(function, inputs), ROWS)
    (region,) = plan.regions
    plan.schedule({}, regions={region: RegionRun(partial(run_kernel_graph, region.graph))})
    wanted = outputs_of(function, inputs)
    torch.testing.assert_close(results_of(plan, inputs, wanted)[0], wanted[0])


def region_runs(plan: StepPlan) -> dict[Region, RegionRun]:
    """Return what runs each region, op by op."""
    return {r: RegionRun(partial(run_kernel_graph, r.graph)) for r in plan.regions}


def assert_as_recorded(function: Callable[..., Any], inputs: dict[str, Tensor]) -> StepPlan:
    """Assert that a function's only region computes its result. Return the plan."""
    plan = StepPlan(recorded(function, inputs), ROWS)
    (region,) = plan.regions
    plan.schedule({}, regions=region_runs(plan))
    assert any(unit.region is region for unit in plan.step_ops)
    wanted = outputs_of(function, inputs)
    for got, x in zip(results_of(plan, inputs, wanted), wanted, strict=True):
        torch.testing.assert_close(got, x)
    return plan


def test_a_result_may_repeat_along_an_axis() -> None:
    """As queries that heads share, normed after they were repeated."""

    def function(x: Tensor) -> Tensor:
        x = x.repeat_interleave(2, dim=1)
        return (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).cumsum(-1)

    plan = assert_as_recorded(function, {"x": normal(3, 2, 8)})
    (y,) = plan.regions[0].graph.outputs
    assert y.dims == (6, 8)


def test_elementwise_ops_that_are_left_are_one_region() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (-F.softplus(x + y).exp() * y).cumsum(-1)

    plan = assert_as_recorded(function, {"x": normal(3, 2, 8), "y": normal(2, 8, seed=1)})
    assert plan.regions[0].kind == "elementwise"


def test_a_result_that_is_cast_is_stored_in_that_dtype() -> None:
    def function(x: Tensor) -> Tensor:
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return y.to(torch.bfloat16).cumsum(-1)

    plan = assert_as_recorded(function, {"x": normal(3, 2, 8, dtype=torch.bfloat16)})
    assert [t.dtype for t in plan.regions[0].graph.outputs] == [torch.bfloat16]
    assert not any(u.node is not None and u.node.name == "aten._to_copy" for u in plan.step_ops)


def test_a_result_that_is_read_before_and_after_a_cast_is_stored_twice() -> None:
    def function(x: Tensor) -> Tensor:
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return y.cumsum(-1) + y.to(torch.bfloat16).cumsum(-1)

    plan = assert_as_recorded(function, {"x": normal(3, 2, 8, dtype=torch.bfloat16)})
    dtypes = [t.dtype for t in plan.regions[0].graph.outputs]
    assert dtypes == [torch.float32, torch.bfloat16]
    assert sum(u.node is not None and u.node.name == "aten._to_copy" for u in plan.step_ops) == 0


def test_a_norm_after_an_update_keeps_its_square() -> None:
    def function(state: Tensor, x: Tensor) -> Tensor:
        new = state * x.exp() + x
        state.copy_(new)
        y = (new * x).sum(-1)
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).cumsum(-1)

    inputs = {"state": STATE, "x": normal(*STATE.shape, seed=3)}
    plan = StepPlan(recorded(function, inputs), ROWS)
    update = update_of(plan)
    (norm,) = (r for r in plan.regions if r is not update)
    assert norm.kind == "norm"
    assert "square" in {op.name for op in norm.graph.ops}
    assert "square" not in {op.name for op in update.graph.ops}


def crossed(x: Tensor) -> Tensor:
    """Two dims come from one axis."""
    return ((x[:, :, None] - x[:, None]).square() * 2).sum(-1).cumsum(-1)


def unread(x: Tensor) -> Tensor:
    _ = (x * 2).exp() * x
    return x.cumsum(-1)


def in_double(x: Tensor) -> Tensor:
    y = x.double()
    return ((y * 2).exp() * y).cumsum(-1)


def then_in_double(x: Tensor) -> Tensor:
    return ((x * 2).exp() * x).double()


def of_a_double(x: Tensor) -> Tensor:
    return ((x * torch.tensor(2.0, dtype=torch.float64)).exp() * x + 1).cumsum(-1)


def to_codes(x: Tensor) -> Tensor:
    return ((x * 2).exp() * x).to(torch.float8_e4m3fn).float()


def without_elements(x: Tensor) -> Tensor:
    return ((x[..., 8:] * 2).exp() * x[..., :1] + 1).sum(-1)


def repeated_in_pairs(x: Tensor) -> Tensor:
    y = x[..., None].expand(3, 8, 2)
    return torch.view_as_complex(((y * 2).exp() * y) + 1).real


@pytest.mark.parametrize(
    "function",
    [
        crossed,
        unread,
        in_double,
        then_in_double,
        of_a_double,
        to_codes,
        without_elements,
        repeated_in_pairs,
    ],
)
def test_what_cannot_be_a_program_runs_as_recorded(function: Callable[[Tensor], Tensor]) -> None:
    inputs = {"x": 0.3 * normal(3, 8)}
    plan = StepPlan(recorded(function, inputs), ROWS)
    plan.schedule({}, regions=region_runs(plan))
    wanted = outputs_of(function, inputs)
    for got, x in zip(results_of(plan, inputs, wanted), wanted, strict=True):
        torch.testing.assert_close(got, x)


def test_updates_share_no_op() -> None:
    """The results of both meet in ops that each of them could have."""

    def function(state: Tensor, other: Tensor, x: Tensor) -> Tensor:
        first, second = state * x.exp() + x, other * x.exp() + 1
        state.copy_(first)
        other.copy_(second)
        a, b = (first * x).sum(-1), (second * x).sum(-1)
        return (a / (b * b + 1.0)).cumsum(-1)

    x = normal(*STATE.shape, seed=3)
    plan = StepPlan(recorded(function, {"state": STATE, "other": STATE + 1, "x": x}), ROWS)
    assert sum(r.state is not None for r in plan.regions) == 2


def test_a_sum_that_a_product_reads_is_computed_once() -> None:
    """The product reads the float32 result, since kernels round what they need."""
    weight = normal(5, 8, seed=4, dtype=torch.bfloat16)

    def function(state: Tensor, x: Tensor) -> Tensor:
        new = state * x.exp() + x
        state.copy_(new)
        y = (new * x).sum(-1).reshape(ROWS, 1, 8)
        return torch.nn.functional.linear(y.to(torch.bfloat16), weight).cumsum(-1)

    shape = (ROWS, 8, 6)
    inputs = {"state": normal(*shape), "x": normal(*shape, seed=3)}
    plan = StepPlan(recorded(function, inputs), ROWS)
    kernels = {g: partial(run_kernel_graph, p.graph) for g, p in plan.programs.items()}
    assert kernels
    plan.schedule(kernels, regions=region_runs(plan))
    left = [u.node.name for u in plan.step_ops if u.node is not None]
    assert not {"aten.exp", "aten.mul", "aten.sum"} & set(left), left
