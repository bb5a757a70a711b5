"""Linears of AWQ in GEMM layout, packed and decoded by GPT-QModel and AutoAWQ."""

import contextlib
import io
import warnings

import pytest
import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import coded_weight
from tests.helpers import coded_modules

GROUP, COLUMNS, ROWS = 32, 128, 64


def library(name: str):
    """Return a module of a library. Skip the test if it cannot be imported."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def numbers(
    group: int, symmetric: bool, bias: bool
) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """Return a linear, and scales and zero points of which its weight is a multiple."""
    torch.manual_seed(0)
    groups = COLUMNS // group
    scales = (torch.rand(ROWS, groups) * 0.02 + 0.005).half()
    zeros = torch.randint(0, 16, (ROWS, groups))
    if symmetric:
        zeros.fill_(8)
    codes = torch.randint(0, 16, (ROWS, groups, group))
    linear = nn.Linear(COLUMNS, ROWS, bias=bias).half()
    with torch.no_grad():
        linear.weight.copy_(((codes - zeros[..., None]) * scales[..., None]).flatten(1))
    return linear, scales, zeros


def of_gptqmodel(group=GROUP, symmetric=False, bias=True) -> nn.Module:
    linear, scales, zeros = numbers(group, symmetric, bias)
    module = library("gptqmodel.nn_modules.qlinear.torch_awq").AwqTorchLinear(
        bits=4,
        group_size=group,
        sym=symmetric,
        desc_act=False,
        in_features=COLUMNS,
        out_features=ROWS,
        bias=bias,
        register_buffers=True,
    )
    module.pack(linear, scales, zeros)
    return module.eval()


def of_autoawq(group=GROUP, symmetric=False, bias=True) -> nn.Module:
    linear, scales, zeros = numbers(group, symmetric, bias)
    kind = library("awq.modules.linear.gemm").WQLinear_GEMM
    scales, zeros = scales.T.contiguous(), zeros.T.contiguous()
    return kind.from_linear(linear, 4, group, scales=scales, zeros=zeros).eval()


LIBRARIES = {"gptqmodel": of_gptqmodel, "autoawq": of_autoawq}


def expected_of(module: nn.Module) -> torch.Tensor:
    """Return the weight (outputs, inputs) that the library multiplies with."""
    held = (module.qweight, module.qzeros, module.scales, 4, module.group_size)
    name = "gptqmodel.quantization.awq" if hasattr(module, "bits") else "awq"
    return library(f"{name}.utils.packing_utils").dequantize_gemm(*held).T


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [GROUP, COLUMNS])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_program_decodes_what_the_library_decodes(name, group, symmetric):
    module = LIBRARIES[name](group, symmetric)
    found = coded_modules.read(module)
    expected = expected_of(module)
    assert found.bias is module.bias and expected.abs().max() > 0
    assert (found.coding.zeros is None) == symmetric
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    assert coded_modules.lies_in_module(found, module)
    caught = coded_modules.caught(found, expected)
    assert all(caught.values()), caught


def test_outputs_lie_in_words_in_the_order_of_awq():
    module = of_gptqmodel(bias=False)
    module.qweight.fill_(0x76543210)
    module.qzeros.zero_()
    module.scales.fill_(1)
    found = coded_modules.read(module)
    decoded = coded_modules.decoded(found.coding, found.tensors)
    assert decoded[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [GROUP, COLUMNS])
def test_one_kernel_is_found_and_proven(group, symmetric, norm):
    coding = coded_modules.read(of_gptqmodel(group, symmetric)).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


def reason(module: nn.Module) -> str:
    found = coded_weight(module)
    assert isinstance(found, Rejected), found
    return found.reason


@pytest.mark.parametrize(
    ("field", "change", "why"),
    [
        ("scales", lambda t: None, "scales is missing"),
        ("scales", lambda t: t[1:], "scales has shape"),
        ("qweight", lambda t: t[1:], "qweight has shape"),
        ("qweight", lambda t: t.short(), "qweight holds int16"),
        ("qzeros", lambda t: None, "qzeros is missing"),
        ("qzeros", lambda t: t[1:], "qzeros has shape"),
        ("group_size", lambda n: 48, "do not divide"),
        ("group_size", lambda n: 64, "qzeros has shape"),
        ("bits", lambda n: 8, "8 bits"),
        ("adapter", lambda a: object(), "adapter is set"),
        ("forward", lambda f: lambda x: x, "forward was replaced"),
        ("bias", lambda b: b[1:], "bias has shape"),
    ],
)
def test_damaged_containers_are_refused(field, change, why):
    module = of_gptqmodel()
    setattr(module, field, change(getattr(module, field)))
    assert why in reason(module)


def test_layouts_of_other_classes_are_refused():
    gemv = library("awq.modules.linear.gemv").WQLinear_GEMV
    assert "only the GEMM layout" in reason(gemv(4, 64, 128, 64, False, "cpu"))
