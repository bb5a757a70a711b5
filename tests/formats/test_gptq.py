"""Linears of GPTQ, packed and decoded by GPT-QModel."""

import contextlib
import io
import weakref

import pytest
import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import coded_weight
from mirage_hf.trace import coded_linear
from tests.helpers import coded_modules


def library():
    """Return the module of TorchLinear. Skip the test if GPT-QModel cannot be imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        return pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")


torch_linears = library()


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch):
    monkeypatch.setenv("GPTQMODEL_DISABLE_PACK_EXT", "1")


def module_of(
    bits=4, group=32, symmetric=False, order=None, columns=128, rows=64, bias=True
) -> nn.Module:
    """Return a linear with random codes, zero points and scales."""
    torch.manual_seed(0)
    group = columns if group == -1 else group
    order = torch.arange(columns) // group if order is None else order
    groups, top = columns // group, 2**bits - 1
    scales = torch.rand(rows, groups) * 0.02 + 0.005
    zeros = torch.randint(0, top + 1, (rows, groups)).float()
    if symmetric:
        zeros.fill_((top + 1) // 2)
    codes = torch.randint(0, top + 1, (rows, columns))
    linear = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        linear.weight.copy_((codes - zeros[:, order]) * scales[:, order])
    module = torch_linears.TorchLinear(
        bits=bits,
        group_size=group,
        sym=symmetric,
        desc_act=False,
        in_features=columns,
        out_features=rows,
        bias=bias,
        register_buffers=True,
    )
    module.pack_block(linear, scales, zeros, order.to(torch.int32))
    return module.eval()


def expected_of(module: nn.Module) -> torch.Tensor:
    """Return the weight (outputs, inputs) that the library multiplies with."""
    module._init_wf_unsqueeze_buffers()
    return module.dequantize_weight().T


def shuffled(groups: int = 4, columns: int = 128, seed: int = 0) -> torch.Tensor:
    """Return the group of each column for a random act-order."""
    order = torch.arange(columns) * groups // columns
    return order[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]


CASES = {
    "int4": dict(),
    "int4, symmetric": dict(symmetric=True),
    "int4, one group": dict(group=-1, symmetric=True),
    "int4, one group, zero points": dict(group=-1),
    "int8": dict(bits=8),
    "int8, symmetric": dict(bits=8, symmetric=True),
    "int4, act-order": dict(order=shuffled()),
    "int4, symmetric, act-order": dict(symmetric=True, order=shuffled()),
    "int8, act-order": dict(bits=8, order=shuffled()),
    "int4, uneven groups": dict(order=shuffled().clamp(max=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_decodes_what_the_library_decodes(name):
    module = module_of(**CASES[name])
    found = coded_modules.read(module)
    expected = expected_of(module)
    assert found.bias is module.bias and expected.abs().max() > 0
    assert (found.coding.zeros is None) == ("symmetric" in name or "symmetric" in CASES[name])
    assert (found.coding.order is not None) == ("order" in CASES[name])
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    assert coded_modules.lies_in_module(found, module)
    caught = coded_modules.caught(found, expected)
    assert all(caught.values()), caught


def test_a_weight_is_decoded_in_the_dtype_of_the_scales_and_cast():
    module = module_of(bias=False)
    found = coded_weight(module, torch.bfloat16)
    decoded = coded_modules.decoded(found.coding, found.tensors)
    assert torch.equal(decoded, expected_of(module).bfloat16())


@pytest.mark.parametrize("format", ["gptq", "gptq_v2"])
def test_zero_points_of_both_formats_are_read_as_the_library_loads_them(format):
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    module = module_of(bias=False)
    module.qweight = torch.zeros(16, 64, dtype=torch.int32)
    module.scales = torch.ones(4, 64, dtype=torch.float16)
    stored = [6, 7, 1, 2, 3, 4, 5, 6]  # as a checkpoint stores them
    module.qzeros = torch.full((4, 8), 0x65432176, dtype=torch.int32)
    if format == "gptq":
        convert_gptq_v1_to_v2_format_module(module, bits=4, pack_dtype=torch.int32)
    found = coded_modules.read(module)
    decoded = coded_modules.decoded(found.coding, found.tensors)
    assert decoded[:8, 0].tolist() == [-zero - (format == "gptq") for zero in stored]
    assert torch.equal(decoded, expected_of(module))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_is_found_and_proven(name, norm):
    coding = coded_modules.read(module_of(**CASES[name])).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


def reason(module: nn.Module) -> str:
    found = coded_weight(module)
    assert isinstance(found, Rejected), found
    return found.reason


def test_weights_with_orders_of_their_own_are_not_joined():
    coding = coded_modules.read(module_of(order=shuffled())).coding
    assert not coding.joins(coding)
    assert coding.describe() == "uint4, groups of 32 in an order of their own, zero points"


def test_an_order_that_is_written_in_place_is_noticed():
    module = module_of(order=shuffled(), bias=False)
    weight = coded_weight(module, torch.float16)
    linear = coded_linear.CodedLinear("linear", weight, weakref.ref(module))
    module.g_idx.copy_(shuffled(seed=1))
    decoded = coded_modules.decoded(weight.coding, weight.tensors)
    assert torch.equal(decoded, expected_of(module))
    assert not coded_linear.is_replaced(linear)
    module.g_idx.copy_(torch.arange(128) // 32)
    assert coded_linear.is_replaced(linear)


@pytest.mark.parametrize(
    ("field", "change", "why"),
    [
        ("scales", lambda t: None, "scales is missing"),
        ("scales", lambda t: t[1:], "scales has shape"),
        ("scales", lambda t: t.short(), "scales holds int16"),
        ("qweight", lambda t: t[1:], "qweight has shape"),
        ("qweight", lambda t: t.T.contiguous().T, "not stored row by row"),
        ("qzeros", lambda t: t.short(), "qzeros holds int16"),
        ("qzeros", lambda t: t[:, 1:], "qzeros has shape"),
        ("g_idx", lambda t: t[1:], "g_idx has shape"),
        ("g_idx", lambda t: None, "g_idx is missing"),
        ("g_idx", lambda t: t.float(), "g_idx holds float32"),
        ("g_idx", lambda t: t + 1, "names groups 1 to 4, but there are 4"),
        ("g_idx", lambda t: t - 1, "names groups -1 to 2, but there are 4"),
        ("group_size", lambda n: 48, "do not divide"),
        ("group_size", lambda n: 64, "qzeros has shape"),
        ("bits", lambda n: 3, "3 bits"),
        ("planar", lambda b: True, "planar is set"),
        ("pack_dtype", lambda t: torch.int16, "pack_dtype is torch.int16"),
        ("online_full_had", lambda b: True, "online_full_had is set"),
        ("adapter", lambda a: object(), "adapter is set"),
        ("forward", lambda f: lambda x: x, "forward was replaced"),
    ],
)
def test_damaged_containers_are_refused(field, change, why):
    module = module_of()
    changed = change(getattr(module, field))
    setattr(module, field, changed)
    assert why in reason(module)


def test_classes_with_words_of_their_own_are_refused():
    marlin = pytest.importorskip("gptqmodel.nn_modules.qlinear.marlin")
    module = marlin.MarlinLinear.__new__(marlin.MarlinLinear)
    assert "order of words of its own" in reason(module)


def test_a_linear_of_float16_is_not_taken_for_replaced():
    module = module_of(bias=False)
    weight = coded_weight(module, torch.float16)
    linear = coded_linear.CodedLinear("linear", weight, weakref.ref(module))
    assert not coded_linear.is_replaced(linear)
    module.scales = module.scales.clone()
    assert coded_linear.is_replaced(linear)
