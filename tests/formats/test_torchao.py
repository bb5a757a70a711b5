"""Weights of torchao, made and decoded by that library."""

import pytest
import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import coded_weight
from tests.helpers import coded_modules

pytest.importorskip("torchao")

from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerTensor,
    quantize_,
)

CASES = {
    "int8, rows": lambda: Int8WeightOnlyConfig(),
    "int8, groups": lambda: Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int8, one scale": lambda: Int8WeightOnlyConfig(granularity=PerTensor()),
    "int4 in bytes": lambda: IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(32)),
    "fp8, rows": lambda: Float8WeightOnlyConfig(),
    "int8, rounds its input": lambda: Int8DynamicActivationInt8WeightConfig(),
}


def module_of(name: str, dtype=torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64, dtype=dtype))
    quantize_(model, CASES[name]())
    return model[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_a_program_decodes_what_the_library_decodes(name, dtype):
    module = module_of(name, dtype)
    found = coded_modules.read(module)
    assert found.quantizes_activations == (name == "int8, rounds its input")
    assert found.coding.zeros is None  # all zero points are 0
    expected = module.weight.dequantize()
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    assert coded_modules.lies_in_module(found, module)
    caught = coded_modules.caught(found, expected)
    assert all(caught.values()), caught


def test_zero_points_that_are_not_0_are_subtracted():
    module = module_of("int8, groups")
    module.weight.zero_point.random_(-9, 9)
    found = coded_modules.read(module)
    expected = module.weight.dequantize()
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    caught = coded_modules.caught(found, expected)
    assert caught["no zero points"] and all(caught.values()), caught


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_is_found_and_proven(name, norm):
    coding = coded_modules.read(module_of(name, torch.float16)).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


def reason(module: nn.Module) -> str:
    found = coded_weight(module)
    assert isinstance(found, Rejected), found
    return found.reason


@pytest.mark.parametrize(
    ("field", "change", "why"),
    [
        ("scale", lambda t: None, "scale is missing"),
        ("scale", lambda t: t[1:], "scale has shape"),
        ("qdata", lambda t: t.short(), "qdata holds int16"),
        ("qdata", lambda t: t.T.contiguous().T, "not stored row by row"),
        ("zero_point", lambda t: t.float(), "zero_point holds float32"),
        ("block_size", lambda b: [1, 48], "do not divide"),
        ("block_size", lambda b: [1, 64], "scale has shape"),
        ("act_pre_scale", lambda t: torch.ones(128), "it scales its input"),
    ],
)
def test_damaged_containers_are_refused(field, change, why):
    module = module_of("int8, groups")
    setattr(module.weight, field, change(getattr(module.weight, field)))
    assert why in reason(module)


def test_other_classes_are_refused():
    module = module_of("int8, rows")
    module.forward = lambda x: x
    assert "forward was replaced" in reason(module)

    class OtherTensor(torch.Tensor):
        pass

    OtherTensor.__module__ = "torchao.later"
    plain = nn.Linear(128, 64)
    plain._parameters["weight"] = torch.zeros(64, 128).as_subclass(OtherTensor)
    assert "packing of OtherTensor" in reason(plain)
