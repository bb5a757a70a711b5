"""How torch rounds float32 products, by both of its switches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mirage_hf import float32_products
from mirage_hf.decode import model_fingerprint

matmul = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    _forget_newer()
    yield
    _forget_newer()
    torch.set_float32_matmul_precision(before)
    _forget_newer()  # the older one sets it, too


def _forget_newer() -> None:
    if hasattr(matmul, "fp32_precision"):
        torch.backends.fp32_precision = matmul.fp32_precision = "none"


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_older_switch(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    assert float32_products.precision() == precision
    assert float32_products.are_exact() == (precision == "highest")


@pytest.mark.skipif(not hasattr(matmul, "fp32_precision"), reason="torch has no such switch")
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_the_newer_switch(precision: str) -> None:
    """After it was set, torch's function for the older one may raise an error."""
    matmul.fp32_precision = precision
    assert float32_products.are_exact() == (precision == "ieee")
    assert float32_products.precision() in model_fingerprint._global_switches()


@pytest.mark.skipif(not hasattr(matmul, "fp32_precision"), reason="torch has no such switch")
def test_the_newer_switch_for_everything() -> None:
    torch.backends.fp32_precision = "tf32"
    assert not float32_products.are_exact()
