"""Models whose linears hold codes, as benchmarks make them."""

import torch

from scripts import coded_models


def test_the_weights_of_a_product_of_torch_are_counted():
    """They are the peer's own, so they are no memory beyond its weights."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert coded_models.product_bytes(model) == 0
    product = coded_models.Int4Product.__new__(coded_models.Int4Product)
    torch.nn.Module.__init__(product)
    product.register_buffer("codes", torch.zeros(16, dtype=torch.int32))
    product.register_buffer("scales", torch.zeros(4, dtype=torch.bfloat16))
    model.append(product)
    assert coded_models.product_bytes(model) == 64 + 8
