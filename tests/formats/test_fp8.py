"""Containers of the FP8Linear of transformers."""

import pytest
import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import coded_weight
from tests.helpers import coded_modules

finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")


def module_of(block, rows=64, columns=128, bias=False, **options) -> nn.Module:
    torch.manual_seed(0)
    module = finegrained.FP8Linear(columns, rows, block_size=block, has_bias=bias, **options)
    module.weight.data = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    if module.weight_scale_inv.dtype is torch.float32:
        module.weight_scale_inv.data.uniform_(0.1, 1)
    return module


def weight_of(module, dtype=torch.bfloat16) -> torch.Tensor:
    """Return the weight that the kernels of transformers multiply by."""
    scale = module.weight_scale_inv.detach()
    for dim, size in enumerate(module.block_size or ()):
        scale = scale.repeat_interleave(size, dim)
    return (module.weight.detach().float() * scale).to(dtype)


@pytest.mark.parametrize("block", [(32, 32), (16, 64), (1, 32), (64, 128), None])
def test_a_program_decodes_blocks(block):
    module = module_of(block)
    found = coded_modules.read(module)
    assert found.coding.dtype is torch.bfloat16 and found.quantizes_activations
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), weight_of(module))
    assert coded_modules.lies_in_module(found, module)
    caught = coded_modules.caught(found, weight_of(module))
    assert all(caught.values()), caught


def test_a_program_decodes_rows():
    library = pytest.importorskip("transformers.integrations.compressed_tensors")
    if not hasattr(library, "CompressedTensorsFP8Linear"):
        pytest.skip("this transformers has no such linear")
    module = library.CompressedTensorsFP8Linear(128, 64)
    module.weight.data = torch.randn(64, 128).to(torch.float8_e4m3fn)
    module.weight_scale.data.uniform_(0.1, 1)
    expected = (module.weight.float() * module.weight_scale.T).bfloat16()
    found = coded_modules.read(module)
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    assert coded_modules.lies_in_module(found, module)
    assert all(coded_modules.caught(found, expected).values())


def test_the_caller_tells_the_dtype():
    assert coded_weight(module_of((32, 32)), torch.float16).coding.dtype is torch.float16


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("block", [(32, 32), None])
def test_one_kernel_is_found_and_proven(block, norm):
    coding = coded_weight(module_of(block), torch.float16).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


def set_scale(change):
    return lambda m: setattr(m, "weight_scale_inv", nn.Parameter(change(m.weight_scale_inv.data)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: setattr(m, "block_size", (48, 32)), "do not divide"),
        (set_scale(lambda t: t[1:]), "its scale has shape"),
        (set_scale(lambda t: t.half()), "its scale holds float16"),
        (lambda m: setattr(m.weight, "data", m.weight.data.bfloat16()), "weight holds bfloat16"),
        (lambda m: setattr(m, "weight", None), "weight is missing"),
        (lambda m: setattr(m, "forward", lambda x: x), "forward was replaced"),
    ],
)
def test_damaged_containers_are_refused(change, why):
    module = module_of((32, 32))
    change(module)
    found = coded_weight(module)
    assert isinstance(found, Rejected) and why in found.reason, found


def test_scales_of_powers_of_two_are_refused():
    found = coded_weight(module_of((32, 32), scale_fmt="ue8m0"))
    assert isinstance(found, Rejected) and "float8_e8m0fnu" in found.reason
