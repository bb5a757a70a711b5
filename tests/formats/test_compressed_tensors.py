"""Containers of compressed-tensors, made and decoded by that library."""

import copy

import pytest
import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import coded_weight, held_tensors
from tests.helpers import coded_modules

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.base import (
    compress_module,
    decompress_module,
)
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.lifecycle.initialize import (
    initialize_module_for_quantization,
)

ROWS, COLUMNS = 64, 128

#: Settings of weights by name.
WEIGHTS = {
    "int4, groups of 32": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "int4, groups of 64": {"num_bits": 4, "strategy": "group", "group_size": 64},
    "int4, one group": {"num_bits": 4, "strategy": "group", "group_size": 128},
    "int4, rows": {"num_bits": 4, "strategy": "channel"},
    "int8 in words, rows": {"num_bits": 8, "strategy": "channel"},
    "int8 in words, groups": {"num_bits": 8, "strategy": "group", "group_size": 32},
    "fp8, rows": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8, one scale": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8, blocks": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [32, 32],
    },
    "fp8, blocks of one row": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [1, 32],
    },
}
ASYMMETRIC = {
    f"{name}, zero points": {**args, "symmetric": False}
    for name, args in WEIGHTS.items()
    if name.startswith("int")
}
CASES = {**WEIGHTS, **ASYMMETRIC}


def module_of(
    name: str, activations: dict | None = None, dtype=torch.bfloat16, rows: int = ROWS
) -> nn.Linear:
    """Return a compressed linear."""
    torch.manual_seed(0)
    return compressed(nn.Linear(COLUMNS, rows, dtype=dtype), CASES[name], activations)


def compressed(module: nn.Linear, args: dict, activations: dict | None = None) -> nn.Linear:
    """Compress a linear with random scales and zero points, and return it."""
    inputs = None if activations is None else QuantizationArgs(**activations)
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    initialize_module_for_quantization(module, scheme, force_zero_point=False)
    scale = module.weight_scale
    scale.data.uniform_(0.005, 0.02)
    if not weights.symmetric:
        module.weight_zero_point.data.random_(-7, 8)
    module.quantization_status = QuantizationStatus.FROZEN
    compress_module(module)
    return module


def weight_of(module: nn.Linear) -> torch.Tensor:
    """Return the weight as the library decodes it."""
    stock = copy.deepcopy(module)
    decompress_module(stock)
    return stock.weight.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_a_program_decodes_what_the_library_decodes(name, dtype):
    module = module_of(name, dtype=dtype)
    found = coded_modules.read(module)
    assert (found.coding.dtype, found.quantizes_activations) == (dtype, False)
    assert found.bias is module.bias
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), weight_of(module))
    assert coded_modules.lies_in_module(found, module)


def test_a_program_decodes_a_single_word_of_zero_points():
    """The stride of a dim of one word may be any number."""
    module = module_of("int8 in words, rows, zero points", rows=4)
    expected = weight_of(module)
    words = module.weight_zero_point.data.as_strided((1, 1), (4, 4))
    module.weight_zero_point = nn.Parameter(words, requires_grad=False)
    found = coded_modules.read(module)
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_wrong_decodings_differ(name, dtype):
    module = module_of(name, dtype=dtype)
    caught = coded_modules.caught(coded_modules.read(module), weight_of(module))
    assert all(caught.values()), caught


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", [n for n in CASES if "64" not in n])
def test_one_kernel_is_found_and_proven(name, norm):
    coding = coded_modules.read(module_of(name, dtype=torch.float16)).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


@pytest.mark.parametrize(("name", "kind"), [("int8 in words, rows", "int"), ("fp8, rows", "float")])
def test_rounded_activations_are_told(name, kind):
    inputs = {"num_bits": 8, "type": kind, "dynamic": True, "strategy": "token"}
    module = module_of(name, inputs)
    found = coded_modules.read(module)
    assert found.quantizes_activations
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), weight_of(module))


def reason(module: nn.Module) -> str:
    found = coded_weight(module)
    assert isinstance(found, Rejected), found
    return found.reason


def test_a_decompressed_module_is_refused():
    module = module_of("int4, rows")
    decompress_module(module)
    assert "optimize the model before it runs" in reason(module)


def replaced(module: nn.Module, name: str, value) -> None:
    module._parameters[name] = None if value is None else nn.Parameter(value, requires_grad=False)


@pytest.mark.parametrize(
    ("tensor", "change", "why"),
    [
        ("weight_packed", lambda t: t[:, 1:].contiguous(), "weight_packed has shape"),
        ("weight_packed", lambda t: t.long(), "weight_packed holds int64"),
        ("weight_packed", lambda t: t.T.contiguous().T, "not stored row by row"),
        ("weight_packed", lambda t: None, "weight_packed is missing"),
        ("weight_scale", lambda t: None, "weight_scale is missing"),
        ("weight_scale", lambda t: t[:-1], "weight_scale has shape"),
        ("weight_scale", lambda t: t.double(), "weight_scale holds float64"),
        ("weight_scale", lambda t: t.to("meta"), "lie on"),
        ("weight_zero_point", lambda t: None, "weight_zero_point is missing"),
        ("weight_zero_point", lambda t: t.repeat(8, 1), "weight_zero_point has shape"),
        ("weight_shape", lambda t: t.flip(0), "weight_shape says"),
        ("weight_shape", lambda t: None, "weight_shape is missing"),
        ("bias", lambda t: t[1:], "bias has shape"),
    ],
)
def test_damaged_containers_are_refused(tensor, change, why):
    module = module_of("int4, groups of 32, zero points")
    replaced(module, tensor, change(getattr(module, tensor).data))
    assert why in reason(module)


def change_scheme(**changes):
    return lambda m: [setattr(m.quantization_scheme.weights, k, v) for k, v in changes.items()]


def set_format(name):
    return lambda m: setattr(m.quantization_scheme, "format", name)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (change_scheme(group_size=48), "do not divide"),
        (change_scheme(group_size=4), "do not divide 4 inputs of a group"),
        (change_scheme(group_size=64), "weight_scale has shape"),
        (change_scheme(num_bits=3), "codes of 3 bits"),
        (change_scheme(num_bits=8), "weight_packed has shape"),
        (change_scheme(strategy="tensor_group"), "strategy tensor_group"),
        (change_scheme(symmetric=True), "it has zero points"),
        (change_scheme(dynamic=True), "quantized dynamically"),
        (set_format("mxfp6-pack-quantized"), "format mxfp6"),
        (set_format("nvfp4-pack-quantized"), "packed int codes of 4 bits"),
        (lambda m: setattr(m, "forward", nn.Linear.forward.__get__(m)), "forward was replaced"),
        (lambda m: setattr(m, "quantization_enabled", False), "switched off"),
        (lambda m: setattr(m, "quantization_status", QuantizationStatus.FROZEN), "not compressed"),
        (lambda m: setattr(m, "weight_g_idx", torch.arange(COLUMNS)), "act-order"),
        (lambda m: m.add_module("transform", nn.Identity()), "submodules"),
    ],
)
def test_unknown_schemes_are_refused(change, why):
    module = module_of("int4, groups of 32, zero points")
    change(module)
    assert why in reason(module)


def test_a_guard_sees_all_tensors():
    module = module_of("int4, groups of 32, zero points")
    assert len(held_tensors(module)) == 4
    assert coded_weight(nn.Linear(8, 8)) is None and held_tensors(nn.Linear(8, 8)) == ()
