"""NVFP4 and MXFP4 of compressed-tensors: containers made and decoded by that library."""

import math

import pytest
import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import CodedWeight, coded_weight, held_tensors
from tests.helpers import coded_modules

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.base import compress_module
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.quantization.lifecycle.initialize import (
    initialize_module_for_quantization,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from tests.formats.test_compressed_tensors import change_scheme, replaced, set_format, weight_of

ROWS, COLUMNS = 64, 128

#: The largest numbers of a code and of a scale of NVFP4.
LARGEST_CODE, LARGEST_SCALE = 6.0, 448.0

#: Names of the library: weights alone, and those whose linears round their inputs, too.
KINDS = ("NVFP4A16", "MXFP4A16")
ROUNDED = ("NVFP4", "MXFP4")


def module_of(
    kind: str,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = ROWS,
    columns: int = COLUMNS,
    bias: bool = True,
) -> nn.Linear:
    """Return a compressed linear. Its groups differ in size."""
    torch.manual_seed(0)
    return compressed(nn.Linear(columns, rows, bias=bias, dtype=dtype), kind)


def compressed(module: nn.Linear, kind: str) -> nn.Linear:
    """Compress a linear with the scales of its groups, and return it."""
    scheme = preset_name_to_scheme(kind, ["Linear"])
    initialize_module_for_quantization(module, scheme, force_zero_point=False)
    groups = module.weight.data.unflatten(1, (-1, scheme.weights.group_size))
    groups *= torch.exp2(torch.randint(-3, 2, (*groups.shape[:2], 1)).to(groups.dtype))
    largest = groups.abs().amax(-1).float().clamp_min(1e-6)
    divisor = torch.ones(1)
    if "NV" in kind:
        divisor = LARGEST_CODE * LARGEST_SCALE / largest.max().reshape(1)
        module.weight_global_scale.data = divisor
    module.weight_scale.data = largest / LARGEST_CODE * divisor
    module.quantization_status = QuantizationStatus.FROZEN
    compress_module(module)
    return module


def exact_weight_of(module: nn.Linear) -> torch.Tensor:
    """Return the weight in float64, by the definition of the format."""
    packed = module.weight_packed.data.to(torch.int64)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    sign, exponent, mantissa = 1.0 - 2.0 * (codes >> 3), (codes >> 1) & 3, codes & 1
    below_one = exponent == 0
    significand = torch.where(below_one, 0.0, 1.0) + mantissa.double() / 2
    numbers = sign * significand * torch.exp2((exponent - torch.where(below_one, 0, 1)).double())
    stored = module.weight_scale.data
    if stored.dtype is torch.uint8:
        scales = torch.exp2(stored.double() - 127)
    else:
        scales = stored.double() / module.weight_global_scale.data.double()
    return numbers * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_decodes_what_the_library_decodes(kind):
    module = module_of(kind)
    found, expected = coded_modules.read(module), weight_of(module)
    assert (found.coding.dtype, found.quantizes_activations) == (torch.bfloat16, False)
    assert found.bias is module.bias
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    assert coded_modules.lies_in_module(found, module)
    caught = coded_modules.caught(found, expected)
    assert {"high nibble first"} <= {name.removeprefix("codes: ") for name in caught}
    assert all(caught.values()), caught


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_decodes_the_numbers_of_the_format(kind, dtype):
    module = module_of(kind, dtype)
    found, exact = coded_modules.read(module), exact_weight_of(module)
    assert found.coding.dtype is dtype
    decoded = coded_modules.decoded(found.coding, found.tensors).double()
    # the scale is rounded to float32 once, its product once, and the weight to its dtype
    unit = torch.finfo(torch.float32).eps + torch.finfo(dtype).eps / 2
    assert ((decoded - exact).abs() <= unit * exact.abs() + torch.finfo(dtype).tiny / 1024).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_and_scale_is_decoded(kind):
    """A row has all sixteen codes, and each row has another scale."""
    module = module_of(kind, torch.float32, rows=256, columns=32, bias=False)
    module.weight_packed.data = torch.arange(16).repeat(256, 1).mul(17).to(torch.uint8)
    scales = torch.arange(256).to(torch.uint8)[:, None].repeat(1, module.weight_scale.shape[1])
    module.weight_scale.data = scales.view(module.weight_scale.dtype)
    found = coded_modules.read_as(module, torch.float32)
    decoded = coded_modules.decoded(found.coding, found.tensors).double()
    exact = exact_weight_of(module).float().double()  # the largest become infinite
    if kind == "MXFP4A16":
        exact[255] = math.nan  # the standard's, where the library has infinity
    torch.testing.assert_close(decoded, exact, rtol=1.2e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounded_inputs_are_told(kind):
    module = module_of(kind)
    found = coded_modules.read(module)
    assert found.quantizes_activations
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), weight_of(module))


@pytest.mark.parametrize("kind", KINDS)
def test_the_caller_tells_the_dtype_of_a_linear_without_bias(kind):
    module = module_of(kind, bias=False)
    for dtype in (torch.float16, torch.bfloat16):
        assert coded_modules.read_as(module, dtype).coding.dtype is dtype


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel_is_found_and_proven(kind, norm):
    coding = coded_modules.read(module_of(kind)).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_one_kind_are_joined_into_one_kernel(kind):
    first, second = (coded_modules.read(module_of(kind, rows=n)).coding for n in (64, 32))
    other = coded_modules.read(module_of(KINDS[kind == KINDS[0]])).coding
    assert first.joins(second) and not first.joins(other)
    assert coded_modules.proven_as_one_kernel(coded_modules.joined([first, second], 1, True))


def reason(module: nn.Module) -> str:
    found = coded_weight(module)
    assert isinstance(found, Rejected), found
    return found.reason


NV, MX = KINDS


@pytest.mark.parametrize(
    ("kind", "tensor", "change", "why"),
    [
        (NV, "weight_packed", lambda t: t[:, 1:].contiguous(), "weight_packed has shape"),
        (NV, "weight_packed", lambda t: t.view(torch.int32), "weight_packed has shape"),
        (NV, "weight_packed", lambda t: t.to(torch.int8), "weight_packed holds int8"),
        (NV, "weight_packed", lambda t: t.T.contiguous().T, "not stored row by row"),
        (NV, "weight_packed", lambda t: None, "weight_packed is missing"),
        (NV, "weight_scale", lambda t: None, "weight_scale is missing"),
        (NV, "weight_scale", lambda t: t[:, ::2].contiguous(), "weight_scale has shape"),
        (NV, "weight_scale", lambda t: t.view(torch.uint8), "weight_scale holds uint8"),
        (NV, "weight_scale", lambda t: t.bfloat16(), "weight_scale holds bfloat16"),
        (NV, "weight_scale", lambda t: t.to("meta"), "lie on"),
        (NV, "weight_global_scale", lambda t: None, "weight_global_scale is missing"),
        (NV, "weight_global_scale", lambda t: t.half(), "weight_global_scale holds float16"),
        (NV, "weight_global_scale", lambda t: t.repeat(64), "weight_global_scale has shape"),
        (MX, "weight_packed", lambda t: t[1:].contiguous(), "weight_packed has shape"),
        (MX, "weight_scale", lambda t: None, "weight_scale is missing"),
        (MX, "weight_scale", lambda t: t.repeat(1, 2), "weight_scale has shape"),
        (MX, "weight_scale", lambda t: t.view(torch.int8), "weight_scale holds int8"),
        (MX, "bias", lambda t: t[1:], "bias has shape"),
    ],
)
def test_damaged_containers_are_refused(kind, tensor, change, why):
    module = module_of(kind)
    replaced(module, tensor, change(getattr(module, tensor).data))
    assert why in reason(module)


def add(name: str, value: torch.Tensor):
    """Return a change that gives a module one more parameter."""
    return lambda m: m.register_parameter(name, nn.Parameter(value, requires_grad=False))


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        (NV, change_scheme(group_size=32), "weight_scale has shape"),
        (NV, change_scheme(group_size=48), "do not divide"),
        (NV, change_scheme(group_size=4), "do not divide 4 inputs of a group"),
        (NV, change_scheme(group_size=None), "blocks of None"),
        (NV, change_scheme(strategy="group"), "strategy group"),
        (NV, change_scheme(num_bits=6), "float codes of 6 bits"),
        (NV, change_scheme(type="int"), "int codes of 4 bits"),
        (NV, change_scheme(symmetric=False), "zero points"),
        (NV, change_scheme(dynamic=True), "quantized dynamically"),
        (NV, add("weight_zero_point", torch.zeros(64, 8)), "it has zero points"),
        (NV, set_format("mxfp4-pack-quantized"), "strategy tensor_group"),
        (NV, set_format("pack-quantized"), "packed float codes of 4 bits"),
        (NV, set_format("float-quantized"), "float codes of 4 bits"),
        (MX, change_scheme(strategy="channel"), "strategy channel"),
        (MX, add("weight_global_scale", torch.ones(1)), "it has a global scale"),
        (MX, set_format("nvfp4-pack-quantized"), "strategy group"),
        (MX, lambda m: m.add_module("transform", nn.Identity()), "submodules"),
    ],
)
def test_unknown_schemes_are_refused(kind, change, why):
    module = module_of(kind)
    change(module)
    assert why in reason(module)


def test_a_guard_sees_all_tensors():
    assert len(held_tensors(module_of(NV))) == 3 and len(held_tensors(module_of(MX))) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_later_is_read(kind):
    """Nothing is copied, so a reading sees writes to codes and scales."""
    module = module_of(kind)
    found = coded_modules.read(module)
    other = module_of(kind)
    for name in ("weight_packed", "weight_scale", "weight_global_scale"):
        t = getattr(module, name, None)
        if t is not None:
            t.data.copy_(getattr(other, name).data.flip(0))
    assert isinstance(found, CodedWeight)
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), weight_of(module))
