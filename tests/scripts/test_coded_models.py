"""Models whose linears hold codes, as benchmarks make them."""

import pytest
import torch

from scripts import coded_models


def test_the_weights_of_a_product_of_torch_are_counted():
    """They are the peer's own, so they are no memory beyond its weights."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert coded_models.product_bytes(model) == 0
    product = coded_models.Product()
    product.register_buffer("codes", torch.zeros(16, dtype=torch.int32))
    product.register_buffer("scales", torch.zeros(4, dtype=torch.bfloat16))
    model.append(product)
    assert coded_models.product_bytes(model) == 64 + 8


def product_error(kind: str, rows: int, device: str) -> float:
    """Return how far torch's own product is from a plain one, of the mean size of its results."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 256, bias=False, dtype=torch.bfloat16, device=device)
    x = torch.randn(1, rows, 512, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        y, expected = coded_models.PRODUCTS[kind](linear.weight)(x), linear(x)
    assert y.shape == expected.shape
    return ((y - expected).abs().mean() / expected.abs().mean()).item()


def test_a_product_of_int8_is_near_the_plain_one():
    assert product_error("int8", 3, "cpu") < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 200])
@pytest.mark.parametrize(("kind", "most"), [("int4", 0.15), ("int8", 0.02), ("fp8", 0.06)])
def test_products_of_torch_are_near_the_plain_one(kind, most, rows):
    assert product_error(kind, rows, "cuda") < most


def test_a_format_with_a_head_in_codes_has_the_same_product():
    assert coded_models.product_of("fp8-and-head") is coded_models.Fp8Product
    assert coded_models.product_of("int8-and-head") is coded_models.Int8Product
    assert coded_models.product_of("nf4") is None
