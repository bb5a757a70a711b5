"""States that move on token by token: each token's result is that of one step after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.trace.record import Recording, TraceError
from mirage_hf.trace.step_ops import RegionRun
from mirage_hf.trace.step_plan import StepPlan
from mirage_hf.trace.successive import kept_name, with_states_in_turn
from tests.helpers.traced_functions import normal, recorded

HEADS, WIDTH, TOKENS = 2, 6, 3
WEIGHT = normal(HEADS * WIDTH, HEADS * WIDTH, seed=9)

Step = Callable[..., Tensor]


def recurrence(state: Tensor, x: Tensor) -> Tensor:
    """The state is read, and written at the end. What is around it is made for all rows."""
    y = (x @ WEIGHT).view(-1, HEADS, WIDTH)
    new = state * y.sigmoid()[..., None] + y[..., None, :]
    state.copy_(new)
    return (new * y[..., None]).sum(-2).reshape(len(x), -1) + x


def in_place(state: Tensor, x: Tensor) -> Tensor:
    """The state is changed by two ops in place, and read between them and after them."""
    y = (x @ WEIGHT).view(-1, HEADS, WIDTH)
    before = state.sum(-1)
    state.mul_(0.5)
    between = state.sum(-2)
    state.add_(y[..., None])
    return (before * between + state.sum(-1)).reshape(len(x), -1)


def merged_rows(state: Tensor, x: Tensor) -> Tensor:
    """Rows and heads are one dim of what moves the state on."""
    y = x.reshape(-1, WIDTH)
    flat = state.view(-1, WIDTH, WIDTH)
    new = flat * y.exp()[..., None] + torch.bmm(y[..., None], y[:, None])
    state.copy_(new.view(state.shape))
    return torch.bmm(new, y[..., None]).view(len(x), -1)


CASES: dict[str, Step] = {f.__name__: f for f in (recurrence, in_place, merged_rows)}


def inputs_of(rows: int, seed: int = 3) -> dict[str, Tensor]:
    return {
        "state": normal(rows, HEADS, WIDTH, WIDTH, seed=1),
        "x": normal(rows, HEADS * WIDTH, seed=seed),
    }


def merged(step: Step, batch: int) -> Recording:
    several, one = (recorded(step, inputs_of(n)) for n in (batch * TOKENS, batch))
    return with_states_in_turn(several, one, batch, ["state"])


def after(step: Step, state: Tensor, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the state after each token, and the results, of one step after another."""
    batch, state = len(state), state.clone()
    states, results = [], []
    for token in range(TOKENS):
        results.append(step(state, x.unflatten(0, (batch, TOKENS))[:, token]))
        states.append(state.clone())
    return states, torch.stack(results, 1).flatten(0, 1)


def run(graph: KernelGraph, inputs: list[Tensor], out: list[Tensor] | None = None) -> list[Tensor]:
    results = run_kernel_graph(graph, inputs)
    return [y.copy_(x) for y, x in zip(out, results, strict=True)] if out else results


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_states_and_results_are_those_of_one_token_after_another(
    name: str, by_kernels: bool, batch: int
) -> None:
    step = CASES[name]
    plan = StepPlan(merged(step, batch), batch * TOKENS)
    regions = plan.regions if by_kernels else []
    plan.schedule({}, regions={r: RegionRun(partial(run, r.graph), False, True) for r in regions})
    updates = [unit for unit in plan.step_ops if unit.region and unit.region.state]
    assert len(updates) == (TOKENS if by_kernels and name == "recurrence" else 0)
    state, x = normal(batch, HEADS, WIDTH, WIDTH, seed=5), normal(batch * TOKENS, HEADS * WIDTH)
    wanted, result = after(step, state, x)
    given = {"state": state.clone(), "x": x, "out.0": torch.zeros_like(result)}
    given |= {kept_name("state", n): torch.full_like(state, torch.nan) for n in range(TOKENS)}
    with torch.no_grad():
        plan.bind(given, ())()
    torch.testing.assert_close(given["out.0"], result)
    for token in range(TOKENS):
        torch.testing.assert_close(given[kept_name("state", token)], wanted[token])
    assert torch.equal(given["state"], state)  # it moves on when the drafts are verified


def test_what_depends_on_rows_in_another_way_is_an_error() -> None:
    def other(state: Tensor, x: Tensor) -> Tensor:
        new = state + (x.sum() if len(x) > 1 else x.exp().sum())
        state.copy_(new)
        return new.sum(-1).view(len(x), -1)

    with pytest.raises(TraceError, match="state moves on in another way"):
        merged(lambda state, x: other(state, x) if len(x) > 1 else in_place(state, x), 1)
    with pytest.raises(TraceError, match="rows of a tensor that moves a state on"):
        several, one = recorded(recurrence, inputs_of(6)), recorded(recurrence, inputs_of(4))
        with_states_in_turn(several, one, 2, ["state"])


def test_a_write_into_another_tensor_is_an_error() -> None:
    def leaky(state: Tensor, x: Tensor) -> Tensor:
        y = x * 2
        y.add_(state.sum())
        state.copy_(state + y.sum())
        return y

    with pytest.raises(TraceError, match="writes another tensor than state"):
        merged(leaky, 1)
