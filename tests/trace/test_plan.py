"""Plans: with and without kernels they run what was recorded, in the recorded order of writes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mirage_hf.trace.record import record
from mirage_hf.trace.sizes import generalized
from mirage_hf.trace.step_plan import StepPlan
from tests.helpers.traced_functions import (
    ROWS,
    WIDE,
    WIDTH,
    normal,
    outputs_of,
    plan_of,
    program_kernels,
    results_of,
)

X = normal(ROWS, 1, WIDTH)
GAMMA = normal(WIDTH, seed=1)
QKV = [normal(n, WIDTH, seed=n) for n in (8, 4, 4)]
PACKED, DOWN, OUT = normal(2 * WIDE, WIDTH), normal(WIDTH, WIDE), normal(WIDTH, 8)


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * GAMMA


def layer(x: Tensor) -> Tensor:
    """Attention over the rows, and a gated MLP with a packed weight."""
    y = norm(x)
    q, k, v = (F.linear(y, w) for w in QKV)
    scores = (q.view(ROWS, 2, 4) @ k.view(1, ROWS, 4).transpose(1, 2)).softmax(-1)
    x = x + F.linear((scores @ v.view(1, ROWS, 4)).reshape(ROWS, 1, 8), OUT)
    gate, up = F.linear(norm(x), PACKED).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, DOWN)


BIAS = normal(2 * WIDE, seed=5)


def biased(x: Tensor) -> tuple[Tensor, ...]:
    y = F.layer_norm(x, (WIDTH,), GAMMA, GAMMA)
    return F.gelu(F.linear(y, PACKED, BIAS)).softmax(-1), F.linear(y, QKV[0], BIAS[:8])


def mixer(x: Tensor) -> tuple[Tensor, ...]:
    """Read two of the three parts of a packed product, one of them in a program."""
    z, y, _ = F.linear(norm(x), PACKED).split([WIDTH, WIDE, WIDE - WIDTH], -1)
    few = F.linear(norm(x), QKV[1][:1]).sigmoid()
    return F.linear(F.silu(z) * y.cumsum(-1)[..., :WIDTH], QKV[0]), few.cumsum(0), y.cumsum(0)


def several(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w).cumsum(-1) for w in QKV)


def read_by_others(x: Tensor) -> tuple[Tensor, ...]:
    y = F.silu(F.linear(x, QKV[0]))
    return y.softmax(-1), y.view(ROWS, 2, 4).transpose(0, 1).clone(), F.linear(y, OUT)


def written(x: Tensor) -> Tensor:
    y = F.linear(x, QKV[0])
    y.add_(1)
    z = y * 2
    y.mul_(3)
    return z + y


def scaled(x: Tensor) -> Tensor:
    return x.cumsum(-1) * torch.tensor(0.5)


def test_numbers_of_a_forward_are_made_once() -> None:
    """A step in a CUDA graph cannot copy them from the host."""
    plan = plan_of(scaled, {"x": X})
    lifted = [n for n, node in enumerate(plan.recording.nodes) if node.name == "aten.lift_fresh"]
    assert lifted and set(lifted) <= plan.terms.constant
    plan.schedule({})
    wanted = outputs_of(scaled, {"x": X})
    assert torch.equal(results_of(plan, {"x": X}, wanted)[0], wanted[0])


def counted(x: Tensor) -> Tensor:
    numbers = torch.tensor([0.5, 0.5]).to(torch.bfloat16)
    numbers[0] = x.sum()
    numbers.mul_(2)
    return x.cumsum(-1) * numbers.float().sum()


def test_numbers_that_a_forward_changes_are_made_anew() -> None:
    plan = plan_of(counted, {"x": X})
    plan.schedule({})
    (wanted,) = outputs_of(counted, {"x": X})
    given = {"x": X.clone(), "out.0": torch.zeros_like(wanted)}
    run = plan.bind(given, ())
    for _ in range(2):
        run()
        torch.testing.assert_close(given["out.0"], wanted)


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("function", [layer, several, read_by_others, biased, mixer])
def test_results_are_those_of_the_function(function: Callable[..., Any], by_kernels: bool) -> None:
    plan = plan_of(function, {"x": X})
    assert plan.programs and not plan.reasons
    plan.schedule(program_kernels(plan) if by_kernels else {})
    assert any(u.program is not None for u in plan.step_ops) == by_kernels
    wanted = outputs_of(function, {"x": X})
    for theirs, ours in zip(wanted, results_of(plan, {"x": X}, wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_tensors_that_are_written_are_in_no_program() -> None:
    plan = plan_of(written, {"x": X})
    assert not plan.programs
    plan.schedule({})
    wanted = outputs_of(written, {"x": X})
    (ours,) = results_of(plan, {"x": X}, wanted)
    torch.testing.assert_close(ours, wanted[0])


def test_some_groups_may_have_a_kernel() -> None:
    plan = plan_of(layer, {"x": X})
    kernels = program_kernels(plan)
    assert len(kernels) == 4
    wanted = outputs_of(layer, {"x": X})
    for chosen in range(2 ** len(kernels)):
        some = [group for n, group in enumerate(kernels) if chosen >> n & 1]
        plan.schedule({group: kernels[group] for group in some})
        assert sum(u.program is not None for u in plan.step_ops) == len(some)
        (ours,) = results_of(plan, {"x": X}, wanted)
        torch.testing.assert_close(ours, wanted[0], rtol=1e-5, atol=1e-5)


def test_what_kernels_compute_runs_as_no_op() -> None:
    plan = plan_of(layer, {"x": X})
    plan.schedule(program_kernels(plan))
    names = {u.node.name for u in plan.step_ops if u.node is not None}
    assert names.isdisjoint({"aten.silu", "aten.rsqrt", "aten.mean", "aten.pow"})
    plan.schedule({})
    names = {u.node.name for u in plan.step_ops if u.node is not None}
    assert names >= {"aten.mm", "aten.silu", "aten.rsqrt", "aten.mean", "aten.pow"}


def test_what_nothing_reads_does_not_run() -> None:
    def function(x: Tensor) -> Tensor:
        x.exp().sum()
        return F.silu(x)

    plan = plan_of(function, {"x": X})
    plan.schedule({})
    assert [u.node.name for u in plan.step_ops if u.node] == ["aten.silu", "aten.copy_"]


# -- writes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_kernels", [False, True])
def test_writes_stay_in_order_with_reads(by_kernels: bool) -> None:
    """A kernel must not move a read of memory behind its next write, nor before its last one."""

    def function(x: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        before = memory.clone()
        memory[:, 0] = F.linear(x[:, 0], QKV[0])
        between = F.linear(memory, OUT)
        memory.mul_(2)
        after = F.linear(memory.view(ROWS, 8), OUT)
        memory.copy_(F.linear(x, QKV[0]))
        return before, between, after, memory + 0

    inputs = {"x": X, "memory": normal(ROWS, 1, 8, seed=3)}
    plan = plan_of(function, inputs)
    plan.schedule(program_kernels(plan) if by_kernels else {})
    wanted = outputs_of(function, inputs)
    for theirs, ours in zip(wanted, results_of(plan, inputs, wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_writes_into_inputs_are_seen_by_the_caller() -> None:
    def function(x: Tensor, memory: Tensor) -> Tensor:
        memory.index_copy_(1, torch.tensor([2]), F.linear(x, QKV[0]))
        return memory.sum(1)

    memory = normal(ROWS, 5, 8)
    wanted = memory.clone()
    (total,) = outputs_of(lambda x: function(x, wanted), {"x": X})
    plan = plan_of(function, {"x": X, "memory": memory})
    plan.schedule(program_kernels(plan))
    out = torch.zeros_like(total)
    plan.bind({"x": X, "memory": memory, "out.0": out}, ())()
    torch.testing.assert_close(memory, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, total, rtol=1e-5, atol=1e-5)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_kernels", [False, True])
def test_a_plan_runs_at_sizes_that_were_not_recorded(by_kernels: bool) -> None:
    def inputs(slots: int) -> dict[str, Tensor]:
        return {"x": X, "keys": normal(ROWS, slots, 8), "out": torch.zeros(ROWS, 1, WIDTH)}

    def recorded(slots: int) -> Any:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = {name: mode.from_tensor(x) for name, x in inputs(slots).items()}
        return record(lambda: step(**fakes), fakes, mode)

    def step(x: Tensor, keys: Tensor, out: Tensor) -> None:
        keys.index_copy_(1, torch.tensor([1]), F.linear(x, QKV[0]))
        scores = (keys @ F.linear(x, QKV[0]).transpose(1, 2)).squeeze(-1)
        scores = scores * torch.arange(keys.shape[1]).flip(0)
        out.copy_(F.linear(scores.softmax(-1)[:, None] @ keys, OUT) + x)

    sizes = 6, 10
    first, second = (recorded(size) for size in sizes)
    plan = StepPlan(generalized(first, second, ((sizes[0],), (sizes[1],))), ROWS)
    plan.schedule(program_kernels(plan) if by_kernels else {})
    for slots in (3, 6, 7, 10, 40):
        ours, wanted = inputs(slots), inputs(slots)
        plan.bind(ours, (slots,))()
        with torch.no_grad():
            step(**wanted)
        for name, x in wanted.items():
            torch.testing.assert_close(ours[name], x, rtol=1e-5, atol=1e-5)


# -- what a plan keeps ----------------------------------------------------------------------------


def test_values_are_dropped_after_their_last_reader() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    def kernel(wanted: Any) -> Any:
        def run(inputs: Any) -> Any:
            results = wanted(inputs)
            alive.append(sum(x() is not None for x in seen))
            seen.extend(weakref.ref(x) for x in results)
            return results

        return run

    square = [normal(WIDTH, WIDTH, seed=n) for n in range(6)]

    def function(x: Tensor) -> Tensor:
        for weight in square:
            x = F.linear(x, weight).cumsum(-1)
        return x

    plan = plan_of(function, {"x": X})
    plan.schedule({group: kernel(run) for group, run in program_kernels(plan).items()})
    gc.disable()
    try:
        plan.bind({"x": X, "out.0": torch.zeros_like(X)}, ())()
    finally:
        gc.enable()
    assert len(alive) == 6 and max(alive) == 0


def test_weights_that_change_in_place_are_read_as_they_are() -> None:
    """Views of weights are made once, so they must not be copies."""
    linear = nn.Linear(WIDTH, WIDE)

    def function(x: Tensor) -> Tensor:
        return F.linear(x, linear.weight[2:6] * 1, linear.bias[2:6]).softmax(-1)

    plan = plan_of(function, {"x": X})
    plan.schedule(program_kernels(plan))
    out = torch.zeros(ROWS, 1, 4)
    run = plan.bind({"x": X, "out.0": out}, ())
    run()
    with torch.no_grad():
        linear.weight.mul_(2)
        linear.bias.add_(1)
        run()
    (wanted,) = outputs_of(function, {"x": X})
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
