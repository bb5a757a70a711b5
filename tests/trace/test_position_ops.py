"""Ops that read positions alone: their tables hold what the ops give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mirage_hf.trace.position_ops import PositionOps
from mirage_hf.trace.record import Value
from mirage_hf.trace.step_plan import StepPlan
from tests.helpers.traced_functions import Function, normal, plan_of

ROWS, WIDTH, COUNT = 3, 8, 600
FREQUENCIES = normal(WIDTH // 2, seed=1).exp()
INPUTS = {
    "position": torch.tensor([[5], [0], [17]]),
    "x": normal(ROWS, 1, WIDTH, seed=2),
}


def tables_of_rope(position: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin (rows, 1, WIDTH), as Llama makes them."""
    by_row = FREQUENCIES[None, :, None].expand(ROWS, -1, 1) @ position[:, None].float()
    angles = by_row.transpose(1, 2)
    both = torch.cat([angles, angles], -1)
    return both.cos() * 1.5, both.sin() * 1.5


def rotated(position: Tensor, x: Tensor) -> Tensor:
    cos, sin = tables_of_rope(position)
    turned = torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1)
    return x * cos + turned * sin


def scheduled(function: Function) -> StepPlan:
    plan = plan_of(function, INPUTS)
    plan.schedule({})
    return plan


def found(function: Function) -> PositionOps | None:
    return scheduled(function).position_ops


def filled(ops: PositionOps, rows: int = ROWS) -> Tensor | None:
    """Return the tables of ops, None if there are none."""
    assert ops.have_one_form
    tables = torch.empty(len(ops.results), COUNT, ops.width, dtype=ops.dtype)
    return tables if ops.fill(tables, rows) else None


def test_tables_hold_cos_and_sin_at_every_position() -> None:
    ops = found(rotated)
    assert ops is not None
    assert len(ops.results) == 2
    tables = filled(ops)
    assert tables is not None
    for first in (0, 299, COUNT - ROWS):
        positions = torch.arange(first, first + ROWS)[:, None]
        for table, wanted in zip(tables, tables_of_rope(positions), strict=True):
            assert table.shape == (COUNT, WIDTH)
            assert torch.equal(table[positions[:, 0]], wanted[:, 0])


def test_a_step_takes_rows_in_place_of_the_ops() -> None:
    plan = scheduled(rotated)
    ops = plan.position_ops
    assert ops is not None
    tables = filled(ops)
    assert tables is not None
    place, position = torch.zeros(ROWS, 1, WIDTH), INPUTS["position"]
    rows = {
        value: table[position[:, 0]][:, None]
        for value, table in zip(ops.results, tables, strict=True)
    }
    inputs = {**INPUTS, "position": torch.full_like(position, -1), "out.0": place}
    plan.bind(inputs, (), given=rows, left_out=ops.nodes)()
    assert torch.equal(place, rotated(**INPUTS))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda position, x: x + x.cos(), id="no positions"),
        pytest.param(lambda position, x: x * x.cos() * position[..., None], id="only an index"),
        pytest.param(
            lambda position, x: x * position.float().sum(0)[None, None].cos(), id="one for all rows"
        ),
    ],
)
def test_other_ops_have_no_tables(function: Callable[..., Tensor]) -> None:
    assert found(function) is None


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(
            lambda position, x: x * (position.float() / (1 + position.max()))[..., None],
            id="rows depend on each other",
        ),
        pytest.param(
            lambda position, x: (
                x * (position.float() * torch.tensor([[1.0], [2.0], [3.0]]))[..., None]
            ),
            id="rows have numbers of their own",
        ),
        pytest.param(
            lambda position, x: x * (position.float()[..., None] / 0 * 0), id="results are NaN"
        ),
    ],
)
def test_results_that_are_no_rows_of_a_table_have_none(function: Callable[..., Tensor]) -> None:
    ops = found(function)
    assert ops is not None
    assert filled(ops) is None


def test_random_numbers_have_no_table() -> None:
    def noisy(position: Tensor, x: Tensor) -> Tensor:
        return x * torch.bernoulli(position.float().sigmoid())[..., None]

    ops = found(noisy)
    assert ops is not None
    assert noisy_node(ops) not in ops.nodes


def noisy_node(ops: PositionOps) -> int:
    (number,) = (n for n, x in enumerate(ops.recording.nodes) if "bernoulli" in x.name)
    return number


def test_an_op_that_cannot_be_run_at_many_positions_has_no_table() -> None:
    ops = found(rotated)
    assert ops is not None

    def fails(positions: Tensor) -> list[Tensor]:
        raise RuntimeError("vmap: no batching rule")

    object.__setattr__(ops, "at", fails)
    assert filled(ops) is None


def test_ops_run_if_they_give_something_that_is_no_row_of_a_table() -> None:
    def function(position: Tensor, x: Tensor) -> Tensor:
        doubled = position[..., None] * 2
        return x * doubled.float().cos() + x * doubled

    plan = scheduled(function)
    ops = plan.position_ops
    assert ops is not None
    names = {ops.recording.nodes[n].name for n in ops.nodes}
    assert names == {"aten._to_copy", "aten.cos"}
    (result,) = ops.results
    rows = INPUTS["position"][..., None].double().mul(2).float().cos()
    place = torch.zeros(ROWS, 1, WIDTH)
    plan.bind({**INPUTS, "out.0": place}, (), given={result: rows}, left_out=ops.nodes)()
    assert torch.equal(place, function(**INPUTS))


def test_a_parameter_is_no_constant_and_a_change_of_another_tensor_gives_another_version() -> None:
    speeds = normal(WIDTH, seed=3)

    def scaled(position: Tensor, x: Tensor) -> Tensor:
        return x * (position[..., None] * speeds)

    ops = found(scaled)
    assert ops is not None
    before = ops.versions
    speeds.mul_(2)
    assert ops.versions != before
    speeds = nn.Parameter(speeds)
    assert found(scaled) is None
    with torch.inference_mode():
        speeds = normal(WIDTH, seed=3)
    assert found(scaled) is None


@pytest.mark.parametrize(
    "look_up",
    [
        lambda rows, position: rows[position],
        lambda rows, position: torch.nn.functional.embedding(position, rows),
        lambda rows, position: rows.gather(0, position.expand(ROWS, WIDTH))[:, None],
        lambda rows, position: rows.index_select(0, position[:, 0])[:, None],
    ],
)
def test_a_table_of_the_model_is_not_read_beyond_its_rows(look_up: Callable[..., Tensor]) -> None:
    """Positions go up to 17, and slots to 600."""
    rows = normal(18, WIDTH, seed=3)
    assert found(lambda position, x: x + look_up(rows, position)) is None


def test_both_results_of_one_op_have_tables() -> None:
    def function(position: Tensor, x: Tensor) -> Tensor:
        angles = position.float()[..., None] * torch.cat([FREQUENCIES, FREQUENCIES])
        first, second = angles.cos().split(WIDTH // 2, -1)
        return torch.cat([x[..., : WIDTH // 2] * second, x[..., WIDTH // 2 :] * first], -1)

    ops = found(function)
    assert ops is not None
    assert len(ops.results) == 2
    assert {x.output for x in ops.results} == {0, 1}


def test_constants_that_a_step_writes_are_none() -> None:
    speeds = normal(WIDTH, seed=3)

    def scaled(position: Tensor, x: Tensor) -> Tensor:
        y = x * (position[..., None] * speeds)
        speeds.mul_(2)
        return y

    assert found(scaled) is None


def test_ops_on_constants_run_only_if_results_need_them() -> None:
    speeds, other = normal(2, WIDTH, seed=3)

    def scaled(position: Tensor, x: Tensor) -> Tensor:
        return x * (position[..., None] * speeds.cos()) + other.sin()

    ops = found(scaled)
    assert ops is not None
    names = [x.node.name for x in ops.step_ops if x.node is not None]
    assert sorted(names) == ["aten.cos", "aten.mul", "aten.unsqueeze"]
    assert {ops.recording.nodes[n].name for n in ops.nodes} == {"aten.mul", "aten.unsqueeze"}


def test_results_are_those_that_other_ops_read() -> None:
    def function(position: Tensor, x: Tensor) -> Tensor:
        angles = position.float()[..., None] * FREQUENCIES[:1]
        return x * (angles.sin() + angles.cos())

    ops = found(function)
    assert ops is not None
    (result,) = ops.results
    assert isinstance(result, Value)
    assert ops.recording.nodes[result.node].name == "aten.add"
