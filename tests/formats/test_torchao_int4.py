"""torchao's weights of 4 bits, in containers that these tests fill.

The library makes them on a GPU only: Int4Tensor with mslk, and tiles with torch's CUDA op. So the
packing is written out here: that of mslk's `pack_int4`, and that of the kernel
`matrix_to_m16n8k16_Bint4_layout` in torch's int4mm.cu.
"""

import pytest
import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import coded_weight
from tests.helpers import coded_modules, torchao_tensors

pytest.importorskip("torchao")

from torchao.quantization.quantize_.workflows import (
    Int4PreshuffledTensor,
    Int4Tensor,
    Int4TilePackedTo4dTensor,
)


def linear_with(weight, rows: int, columns: int, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def numbers(rows: int, columns: int, group: int):
    """Return codes from 0 to 15, scales, and what is added."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (rows, columns))
    scales = (torch.rand(rows, columns // group) * 0.02 + 0.005).bfloat16()
    return codes, scales, torch.randn_like(scales) * 0.1


def expected_of(codes, scales, zeros, group: int) -> torch.Tensor:
    """Return (code − 8) · scale + zero, rounded once."""
    scales, zeros = (x.double().repeat_interleave(group, 1) for x in (scales, zeros))
    return ((codes - 8) * scales + zeros).to(torch.bfloat16)


def of_rows(group=128, symmetric=False, rows=16, columns=256):
    """Return a linear with an Int4Tensor, and its weight."""
    codes, scales, zeros = numbers(rows, columns, group)
    if symmetric:
        zeros.zero_()
    signed = (codes - 8).to(torch.int8)
    packed = (signed[:, ::2] & 15) | (signed[:, 1::2] << 4)
    weight = Int4Tensor(
        packed, scales.T.contiguous(), zeros.T.contiguous(), [1, group], codes.shape
    )
    return linear_with(weight, rows, columns), expected_of(codes, scales, zeros, group)


def tiles_of(codes: torch.Tensor, inner: int = 8) -> torch.Tensor:
    """Return codes in the order of torch's CUDA kernel, word by word."""
    return torchao_tensors.tiles_of(codes[:, ::2] << 4 | codes[:, 1::2], inner)


def of_tiles(group=128, rows=16, columns=1024):
    """Return a linear with an Int4TilePackedTo4dTensor, and its weight."""
    codes, scales, zeros = numbers(rows, columns, group)
    padded = nn.functional.pad(codes, (0, -columns % 1024))
    both = torch.stack([scales, zeros], -1).transpose(0, 1)
    both = nn.functional.pad(both, (0, 0, 0, 0, 0, -columns % 1024 // group)).contiguous()
    weight = Int4TilePackedTo4dTensor(tiles_of(padded), both, [1, group], codes.shape)
    return linear_with(weight, rows, columns), expected_of(codes, scales, zeros, group)


CASES = {
    "rows": lambda: of_rows(),
    "rows, symmetric": lambda: of_rows(symmetric=True),
    "rows, one group": lambda: of_rows(group=256),
    "tiles": lambda: of_tiles(),
    "tiles, groups of 32": lambda: of_tiles(32),
    "tiles, groups of 64": lambda: of_tiles(64),
    "tiles, groups of 256": lambda: of_tiles(256),
    "tiles, padded": lambda: of_tiles(128, columns=384),
}


def test_a_word_of_a_tile_holds_what_the_kernel_of_torch_puts_there():
    codes = torch.zeros(8, 128, dtype=torch.int64)
    columns = [2, 10, 18, 26, 3, 11, 19, 27]  # of lane 1 in the first two tiles
    codes[0, columns] = torch.arange(8)
    assert tiles_of(codes)[0, 0, 1, 0] == 0x76543210


@pytest.mark.parametrize("name", CASES)
def test_a_program_decodes_codes_scales_and_zero_points(name):
    module, expected = CASES[name]()
    found = coded_modules.read(module)
    assert found.bias is module.bias and not found.quantizes_activations
    assert (found.coding.shifts is None) == ("symmetric" in name)
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    assert coded_modules.lies_in_module(found, module)
    caught = coded_modules.caught(found, expected)
    assert all(caught.values()), caught


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_is_found_and_proven(name, norm):
    coding = coded_modules.read(CASES[name]()[0]).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


def test_inputs_that_the_library_rounds_are_told():
    module, _ = of_rows(symmetric=True)
    module.weight.activation_dtype = torch.float8_e4m3fn
    assert coded_modules.read(module).quantizes_activations


def reason(module: nn.Module) -> str:
    found = coded_weight(module)
    assert isinstance(found, Rejected), found
    return found.reason


@pytest.mark.parametrize(
    ("make", "field", "change", "why"),
    [
        (of_rows, "scale", lambda t: None, "scale is missing"),
        (of_rows, "scale", lambda t: t[1:], "scale has shape"),
        (of_rows, "zero_point", lambda t: t.char(), "zero_point holds int8"),
        (of_rows, "qdata", lambda t: t[:, 1:].contiguous(), "qdata has shape"),
        (of_rows, "qdata", lambda t: t.T.contiguous().T, "not stored row by row"),
        (of_rows, "block_size", lambda b: [2, 128], "blocks of (2, 128)"),
        (of_rows, "block_size", lambda b: [1, 96], "do not divide"),
        (of_rows, "act_pre_scale", lambda t: torch.ones(256), "it scales its input"),
        (of_tiles, "qdata", lambda t: t[:, :, :16].contiguous(), "qdata has shape"),
        (of_tiles, "scale_and_zero", lambda t: t[1:], "scale_and_zero has shape"),
        (of_tiles, "scale_and_zero", lambda t: t.float(), "scale_and_zero holds float32"),
        (of_tiles, "block_size", lambda b: [1, 16], "groups of 16"),
    ],
)
def test_damaged_containers_are_refused(make, field, change, why):
    module, _ = make()
    setattr(module.weight, field, change(getattr(module.weight, field)))
    assert why in reason(module)


def test_an_order_that_is_not_documented_is_refused():
    scales = torch.ones(2, 16, dtype=torch.bfloat16)
    codes = torch.zeros(16, 128, dtype=torch.int8)
    weight = Int4PreshuffledTensor(codes, scales, [1, 128], [16, 256], scales.clone())
    assert "Int4PreshuffledTensor is not documented" in reason(linear_with(weight, 16, 256))
