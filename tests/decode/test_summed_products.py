"""Sums of broadcast products, computed as matrix products."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mirage_hf.decode import summed_products
from mirage_hf.decode.summed_products import SummedProducts
from tests.decode.test_traced_steps import GREEDY, agree, pair, text


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed_products, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(summed_products, "LEAST_GROWTH", 1)


@pytest.mark.parametrize("seed", range(60))
def test_sums_are_those_of_products(seed: int) -> None:
    choose = random.Random(seed)
    shape = [choose.randint(2, 5) for _ in range(choose.randint(2, 5))]
    axes = range(len(shape))
    one, other = choose.sample(axes, 2)  # each factor lacks an axis, so the product is larger
    factors = []
    for without in (one, other):
        sizes = [1 if n == without or choose.random() < 0.2 else d for n, d in enumerate(shape)]
        leading = next((n for n, d in enumerate(sizes) if d != 1), len(sizes) - 1)
        factors.append(torch.randn(sizes[choose.randint(0, leading) :], dtype=torch.float32))
    a, b = factors
    shape = list(torch.broadcast_shapes(a.shape, b.shape))
    dims = choose.sample(range(-len(shape), 0), choose.randint(1, len(shape)))
    keepdim = choose.random() < 0.5
    with SummedProducts() as mode:
        found = (a * b).sum(dims, keepdim)
    is_larger = torch.Size(shape).numel() >= a.numel() + b.numel()
    assert mode.count == is_larger
    expected = (a.double() * b.double()).sum(dims, keepdim)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert found.is_contiguous(), "stock's code may view it in another shape"
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(7, 1), torch.randn(1, 9)


def test_other_ops_get_the_product() -> None:
    a, b = factors()
    with SummedProducts() as mode:
        product = a * b
        results = product + 1, product.exp().sum(0), product[2:].sum(1), product.sum(1)
        again = product.sum(0, dtype=torch.float64)
    assert mode.count == 0, "after another op the product is there"
    expected = a * b
    wanted = expected + 1, expected.exp().sum(0), expected[2:].sum(1), expected.sum(1)
    for result, value in zip(results, wanted, strict=True):
        assert type(result) is torch.Tensor and torch.equal(result, value)
    assert again.dtype == torch.float64


def test_a_factor_may_change_before_the_sum() -> None:
    a, b = factors()
    expected = (a * b).sum(0)
    with SummedProducts() as mode:
        product = a * b
        a.mul_(3)
        found = product.sum(0)
    assert mode.count == 0 and torch.equal(found, expected)


def test_products_leave_the_mode_as_tensors() -> None:
    a, b = factors()
    with SummedProducts():
        product = a * b
    torch.testing.assert_close(product.sum(0), (a * b).sum(0))
    assert torch.equal(product * 2, a * b * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    a, b = (x.to(dtype) for x in factors())
    with SummedProducts() as mode:
        assert torch.equal((a * b).sum(0), (a.clone() * b.clone()).sum(0))
    assert mode.count == 0


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        ("mamba2", True),
        *(
            pytest.param(name, True, marks=pytest.mark.thorough)
            for name in ("falcon_h1", "bamba", "granitemoehybrid", "nemotron_h", "zamba2")
        ),
        ("lfm2", False),
    ],
)
def test_prompts_of_state_space_models(
    name: str, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that has no such sums is searched for them once for each length."""
    modes: list[Any] = []
    own = SummedProducts.__init__

    def counted(self: SummedProducts) -> None:
        own(self)
        modes.append(self)

    monkeypatch.setattr(SummedProducts, "__init__", counted)
    stock, ours = pair(name)
    modes.clear()
    for length in (9, 9, 7, 12):
        agree(stock, ours, {"inputs": text(1, length), **GREEDY})
    assert len(modes) == (4 if sums else 2)
    assert all((mode.count > 0) == sums for mode in modes)
