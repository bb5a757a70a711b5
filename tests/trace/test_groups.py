"""How terms are cut into groups. Each group becomes one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.trace.groups import MOST_AFTER, NARROW, Group
from tests.helpers.traced_functions import ROWS, WIDTH, normal, plan_of

X, RESIDUAL = normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=1)
WEIGHTS = [normal(WIDTH, WIDTH, seed=n) for n in range(6)]
BIASES = [normal(WIDTH, seed=n) for n in range(6)]
GAMMA = normal(WIDTH, seed=9)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), GAMMA)


def linear(n: int, x: Tensor, bias: bool = False) -> Tensor:
    return F.linear(x, WEIGHTS[n], BIASES[n] if bias else None)


def attention(*given: Tensor) -> Tensor:
    """Stand in for what is no term."""
    return torch.stack(given).softmax(0).cumsum(0)[-1]


def groups(function: Callable[..., Any], **inputs: Tensor) -> list[Group]:
    return plan_of(function, inputs or {"x": X}).groups


def shape(function: Callable[..., Any], **inputs: Tensor) -> list[tuple[str, int, str]]:
    """Return for each group the ops before its products, their number, and the ops after them."""
    return [
        (" ".join(t.op for t in g.before), len(g.products), " ".join(t.op for t in g.after))
        for g in groups(function, **inputs)
    ]


def test_products_of_one_norm_run_side_by_side() -> None:
    def function(x: Tensor) -> Tensor:
        y = norm(x)
        return attention(linear(0, y), linear(1, y), linear(2, y))

    assert shape(function) == [("layer_norm", 3, "")]
    (group,) = groups(function)
    assert group.results == group.products


def test_biases_run_with_their_products() -> None:
    def function(x: Tensor) -> Tensor:
        return attention(*(linear(n, norm(x), bias=True) for n in range(3)))

    assert shape(lambda x: attention(*(linear(n, x, True) for n in range(3)))) == [
        ("", 3, "add add add")
    ]
    # three norms are three tensors
    assert shape(function) == [("layer_norm", 1, "add")] * 3


def test_products_with_and_without_a_bias_are_apart() -> None:
    def function(x: Tensor) -> Tensor:
        return attention(linear(0, x, True), linear(1, x), linear(2, x, True))

    assert shape(function) == [("", 2, "add add"), ("", 1, "")]


def test_a_gate_joins_two_products() -> None:
    def function(x: Tensor) -> Tensor:
        y = norm(x)
        return F.silu(linear(0, y)) * linear(1, y)

    assert shape(function) == [("layer_norm", 2, "silu mul")]
    (group,) = groups(function)
    assert [t.op for t in group.results] == ["mul"]


def test_a_residual_ends_a_product() -> None:
    def function(x: Tensor, residual: Tensor) -> Tensor:
        return residual + linear(0, attention(x), bias=True)

    assert shape(function, x=X, residual=RESIDUAL) == [("", 1, "add add")]


def test_a_norm_after_a_product_runs_with_it() -> None:
    def function(x: Tensor, residual: Tensor) -> Tensor:
        return residual + norm(linear(0, attention(x)))

    assert shape(function, x=X, residual=RESIDUAL) == [("", 1, "layer_norm add")]


def test_a_norm_before_the_next_product_belongs_to_it() -> None:
    def function(x: Tensor, residual: Tensor) -> Tensor:
        y = residual + linear(0, attention(x))
        return attention(linear(1, norm(y)), y)

    want = [("", 1, "add"), ("layer_norm", 1, "")]
    assert shape(function, x=X, residual=RESIDUAL) == want


def test_a_whole_layer() -> None:
    def function(x: Tensor) -> Tensor:
        y = norm(x)
        x = x + linear(3, attention(*(linear(n, y) for n in range(3))))
        y = norm(x)
        x = x + linear(2, F.silu(linear(4, y)) * linear(5, y))
        return attention(linear(0, norm(x)))

    assert shape(function) == [
        ("layer_norm", 3, ""),
        ("", 1, "add"),
        ("layer_norm", 2, "silu mul"),
        ("", 1, "add"),
        ("layer_norm", 1, ""),
    ]


def test_attention_and_mlp_beside_each_other() -> None:
    """One of the two last products adds the residual and the other one's result."""

    def function(x: Tensor) -> Tensor:
        y = norm(x)
        attended = linear(3, attention(*(linear(n, y) for n in range(3))))
        return attention(x + attended + linear(5, F.gelu(linear(4, y))))

    found = groups(function)
    products = [[t.node for t in g.products] for g in found]
    assert sorted(len(p) for p in products) == [1, 1, 1, 3]
    assert [t.op for g in found for t in g.before] == ["layer_norm"] * 2
    after = [" ".join(t.op for t in g.after) for g in found]
    assert after == ["", "add add", "gelu", ""]


def test_products_that_depend_on_each_other_are_apart() -> None:
    """Both read one tensor, but the second one waits for what attention makes of the first."""

    def function(x: Tensor) -> Tensor:
        first = attention(linear(0, x))
        memory = first.cumsum(0)
        with_memory = F.linear(x, WEIGHTS[1]).cumsum(0)
        return attention(memory, with_memory)

    assert shape(function) == [("", 2, "")]

    def waiting(x: Tensor, cache: Tensor) -> Tensor:
        y = x + 1
        cache.copy_(linear(0, y).cumsum(0))
        y2 = y * cache.sum(-1, keepdim=True)
        return attention(linear(1, y), y2) + linear(2, y2)

    for group in groups(waiting, x=X, cache=X):
        nodes = [p.node for p in group.products]
        assert len(nodes) in (1, 2)

    # the same, but the sum runs with the product that ends it
    def chained(x: Tensor) -> Tensor:
        a = linear(0, x)
        return linear(1, x) * a.cumsum(0)

    assert shape(chained) == [("", 1, ""), ("", 1, "mul")]


def test_what_several_read_is_a_result() -> None:
    def function(x: Tensor) -> Tensor:
        y = linear(0, x)
        return attention(y, F.silu(y))

    (group,) = groups(function)
    assert group.results == [group.products[0]] and group.after == []


def test_a_norm_that_others_read_is_computed_before() -> None:
    """It is an input of the products. Torch runs it."""

    def function(x: Tensor) -> Tensor:
        y = norm(x)
        return attention(linear(0, y), y)

    assert shape(function) == [("", 1, "")]


def test_long_chains_end() -> None:
    def function(x: Tensor) -> Tensor:
        y = linear(0, x)
        for _ in range(MOST_AFTER + 10):
            y = y.tanh()
        return y

    ((_, _, after),) = shape(function)
    assert after.split() == ["tanh"] * MOST_AFTER


def test_without_products_there_are_no_groups() -> None:
    assert groups(lambda x: F.silu(norm(x)) + x) == []


def test_a_norm_that_is_scaled_in_two_ways_is_computed_by_both_readers() -> None:
    def function(x: Tensor) -> Tensor:
        y = norm(x)
        return attention(linear(0, y * 2), linear(1, y * 3))

    assert shape(function) == [("layer_norm mul", 1, ""), ("layer_norm mul", 1, "")]
    assert shape(lambda x: attention(linear(0, norm(x) * 2), norm(x).cumsum(-1))) == [
        ("layer_norm mul", 1, "")
    ]


def test_a_norm_that_something_else_reads_is_no_part_of_a_group() -> None:
    def function(x: Tensor) -> Tensor:
        y = norm(x)
        return attention(linear(0, y * 2), (y * 3).cumsum(-1))

    assert shape(function) == [("mul", 1, "")]


def test_a_result_without_a_dim_of_one_token_is_added() -> None:
    """Falcon-H1 adds (rows, width) to (rows, 1, width) for one row."""

    def function(x: Tensor) -> Tensor:
        return linear(0, x) + linear(1, x)[:, None] if len(x) == 1 else x

    assert [t.op for t in plan_of(function, {"x": X[:1]}, rows=1).groups[0].after] == ["add"]


# -- what rides along -----------------------------------------------------------------------------

WIDE = normal(NARROW * 4, WIDTH, seed=10)
FEW = normal(4, WIDTH, seed=11)
PACKED = normal(3 * WIDTH, WIDTH, seed=12)


def mixer(x: Tensor) -> Tensor:
    """Multiply what a mixer gives by a gate, as Mamba-2 does."""
    z, wide, dt = F.linear(norm(x), PACKED).split([WIDTH, WIDTH, WIDTH], -1)
    return linear(0, attention(wide, dt) * F.silu(z))


def test_a_narrow_product_runs_beside_a_wide_one() -> None:
    def function(x: Tensor) -> Tensor:
        y = norm(x)
        wide, few = F.linear(y, WIDE), F.linear(y, FEW).sigmoid()
        return attention(wide) * attention(few).sum(-1, keepdim=True)

    assert shape(function) == [("layer_norm", 2, "")]


def test_a_narrow_product_runs_alone_if_something_follows_the_wide_one() -> None:
    def function(x: Tensor) -> Tensor:
        y = norm(x)
        wide, few = F.linear(y, WIDE).relu(), F.linear(y, FEW).sigmoid()
        return attention(wide) * attention(few).sum(-1, keepdim=True)

    assert shape(function) == [("layer_norm", 1, "relu"), ("layer_norm", 1, "sigmoid")]


def test_the_gate_of_a_mixer_is_computed_by_what_reads_it() -> None:
    assert shape(mixer) == [("layer_norm", 3, ""), ("silu mul", 1, "")]


def test_only_the_parts_that_are_read_are_computed() -> None:
    def function(x: Tensor) -> Tensor:
        _, wide, z = F.linear(norm(x), PACKED).split([WIDTH, WIDTH, WIDTH], -1)
        return attention(wide) + linear(0, F.silu(z))

    first, second = groups(function)
    assert [p.operands[1].weight.columns for p in first.products] == [
        (WIDTH, 2 * WIDTH),
        (2 * WIDTH, 3 * WIDTH),
    ]
    assert [t.op for t in second.before] == ["silu"]


def test_a_product_of_which_all_parts_are_read_stays_whole() -> None:
    def function(x: Tensor) -> Tensor:
        return attention(*F.linear(norm(x), PACKED).split([WIDTH, WIDTH, WIDTH], -1))

    (group,) = groups(function)
    assert [p.operands[1].weight.columns for p in group.products] == [None]
