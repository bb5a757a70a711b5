"""Known words of GPTQ, AWQ and bitsandbytes, in stand-ins for their linears, without a library."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mirage_hf.formats.bitsandbytes import TABLES
from tests.helpers import coded_modules

#: The class and file of a stand-in, and the outputs and inputs that nibbles 0 to 7 of a word hold.
KINDS = {
    "gptq": ("torch.TorchLinear", [(0, k) for k in range(8)]),
    "awq": ("torch_awq.AwqTorchLinear", [(n, 0) for n in (0, 2, 4, 6, 1, 3, 5, 7)]),
}


def stand_in(kind: str, rows: int = 16, columns: int = 32, group: int = 16) -> nn.Module:
    """Return a module with the class's name and attributes, and words of zeros."""
    file, _, name = KINDS[kind][0].partition(".")
    made = type(name, (nn.Module,), {"__module__": f"gptqmodel.nn_modules.qlinear.{file}"})()
    made.bits, made.group_size, made.bias = 4, group, None
    made.out_features, made.in_features = rows, columns
    words = (columns // 8, rows) if kind == "gptq" else (columns, rows // 8)
    made.qweight = torch.zeros(words, dtype=torch.int32)
    made.qzeros = torch.zeros(columns // group, rows // 8, dtype=torch.int32)
    made.scales = torch.ones(columns // group, rows, dtype=torch.float16)
    made.g_idx = torch.arange(columns, dtype=torch.int32) // group
    return made


def decoded(module: nn.Module) -> torch.Tensor:
    found = coded_modules.read(module)
    return coded_modules.decoded(found.coding, found.tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_holds_codes_in_the_order_of_the_format(kind):
    module = stand_in(kind)
    module.qweight[0, 0] = 0x76543210
    expected = torch.zeros(16, 32)
    for nibble, (row, column) in enumerate(KINDS[kind][1]):
        expected[row, column] = nibble
    assert torch.equal(decoded(module).float(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_points_and_scales_belong_to_an_output_and_a_group(kind):
    module = stand_in(kind)
    module.qzeros[1, 0] = 0x76543210
    module.scales[1] = torch.arange(16) / 4
    places = range(8) if kind == "gptq" else (0, 2, 4, 6, 1, 3, 5, 7)
    expected = torch.zeros(16, 32)
    for nibble, row in enumerate(places):
        expected[row, 16:] = -nibble * row / 4
    assert torch.equal(decoded(module).float(), expected)


def linear_of_bitsandbytes(kind: str, rows: int, columns: int) -> nn.Module:
    """Return a module with the names of a Linear4bit, and codes of zeros."""
    names = {"__module__": "bitsandbytes.nn.modules"}
    made = type("Linear4bit", (nn.Module,), names)()
    made.out_features, made.in_features, made.bias = rows, columns, None
    parameter = type("Params4bit", (nn.Parameter,), names)
    codes = torch.zeros(rows * columns // 2, 1, dtype=torch.uint8)
    made.weight = parameter(codes, requires_grad=False)
    made.weight.quant_state = SimpleNamespace(
        absmax=torch.ones(rows * columns // 64),
        shape=(rows, columns),
        blocksize=64,
        quant_type=kind,
        dtype=torch.float32,
        state2=None,
        offset=None,
    )
    return made


@pytest.mark.parametrize("kind", TABLES)
def test_a_byte_of_bitsandbytes_holds_the_first_code_in_its_high_half(kind):
    module = linear_of_bitsandbytes(kind, 2, 128)
    first = module.weight.data.view(2, 64)
    first[0, :8] = torch.tensor([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF])
    module.weight.quant_state.absmax.copy_(torch.tensor([1.0, 2.0, 4.0, 8.0]))
    table = torch.tensor(TABLES[kind])
    expected = table[0].expand(2, 128) * torch.tensor([[1.0, 2.0], [4.0, 8.0]]).repeat_interleave(
        64, 1
    )
    expected[0, :16] = table
    assert torch.equal(decoded(module), expected)
