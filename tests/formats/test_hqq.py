"""Containers of HQQ, made and decoded by that library."""

import pytest
import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import coded_weight
from tests.helpers import coded_modules

hqq = pytest.importorskip("hqq.core.quantize")


def module_of(bits=8, group=32, axis=1, dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    config = hqq.BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
    linear = nn.Linear(128, 64)
    return hqq.HQQLinear(linear, config, compute_dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_program_decodes_what_the_library_decodes(bits, group, dtype):
    module = module_of(bits, group, dtype=dtype)
    found = coded_modules.read(module)
    expected = module.dequantize()
    assert found.bias is module.bias
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    assert coded_modules.lies_in_module(found, module)
    caught = coded_modules.caught(found, expected)
    assert all(caught.values()), caught


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 32)])
def test_one_kernel_is_found_and_proven(bits, group, norm):
    coding = coded_modules.read(module_of(bits, group, dtype=torch.float16)).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: module_of(bits=2), "packing 2bit_u8"),
        (lambda: module_of(bits=3), "packing 3bit_32"),
        (lambda: module_of(axis=0), "axis 0"),
        (lambda: hqq.HQQLinear(None, None, initialize=False), "not initialized"),
    ],
)
def test_other_packings_are_refused(module, why):
    found = coded_weight(module())
    assert isinstance(found, Rejected) and why in found.reason, found


@pytest.mark.parametrize(
    ("key", "change", "why"),
    [
        ("scale", lambda t: t[1:], "scale has shape"),
        ("scale", lambda t: t.float(), "scale holds float32"),
        ("zero", lambda t: None, "zero is missing"),
        ("group_size", lambda n: 48, "do not divide"),
        ("shape", lambda s: (128, 64), "bias has shape"),
        ("view_as_float", lambda b: True, "another form"),
    ],
)
def test_damaged_containers_are_refused(key, change, why):
    module = module_of()
    module.meta[key] = change(module.meta[key])
    found = coded_weight(module)
    assert isinstance(found, Rejected) and why in found.reason, found


def test_weights_whose_rows_share_words_are_not_joined():
    coding = coded_modules.read(module_of(bits=4)).coding
    assert not coding.joins(coding)
    eight = coded_modules.read(module_of(bits=8)).coding
    assert eight.joins(eight)


def test_missing_settings_are_refused():
    module = module_of()
    del module.meta["zero"]
    assert "zero missing" in coded_weight(module).reason
