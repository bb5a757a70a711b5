"""Linears of bitsandbytes with 4 bits, made and decoded by that library."""

import pytest
import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import coded_weight
from mirage_hf.formats.bitsandbytes import TABLES
from tests.helpers import coded_modules

bitsandbytes = pytest.importorskip("bitsandbytes")
functional = pytest.importorskip("bitsandbytes.functional")

ROWS, COLUMNS = 32, 256


def module_of(
    kind="nf4", dtype=torch.bfloat16, nested=False, storage=torch.uint8, columns=COLUMNS
) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Linear(columns, ROWS, dtype=dtype)
    module = bitsandbytes.nn.Linear4bit(
        columns,
        ROWS,
        compute_dtype=dtype,
        compress_statistics=nested,
        quant_type=kind,
        quant_storage=storage,
    )
    module.load_state_dict(plain.state_dict())
    return module.to(dtype).to("cpu").eval()


def expected_of(module: nn.Module) -> torch.Tensor:
    return functional.dequantize_4bit(module.weight.data, module.weight.quant_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", TABLES)
def test_a_program_decodes_what_the_library_decodes(kind, dtype):
    module = module_of(kind, dtype)
    found, expected = coded_modules.read(module), expected_of(module)
    assert found.bias is module.bias and expected.dtype is dtype
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    assert coded_modules.lies_in_module(found, module)
    caught = coded_modules.caught(found, expected)
    assert all(caught.values()), caught


@pytest.mark.parametrize("kind", TABLES)
def test_the_tables_are_those_of_the_library(kind):
    assert functional.get_4bit_type(kind, device="cpu").tolist() == list(TABLES[kind])


def test_codes_may_be_stored_as_other_dtypes():
    module = module_of(storage=torch.bfloat16)
    found = coded_modules.read(module)
    assert module.weight.dtype is torch.bfloat16
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected_of(module))


def test_a_weight_of_one_block_a_row_is_read():
    module = module_of(columns=64)
    found = coded_modules.read(module)
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected_of(module))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", TABLES)
def test_one_kernel_is_found_and_proven(kind, norm):
    coding = coded_modules.read(module_of(kind)).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


def test_weights_of_one_table_are_joined():
    nf4, fp4 = (coded_modules.read(module_of(kind)).coding for kind in TABLES)
    assert nf4.joins(nf4) and not nf4.joins(fp4)
    assert "by table, groups of 64" in nf4.describe()


def reason(module: nn.Module) -> str:
    found = coded_weight(module)
    assert isinstance(found, Rejected), found
    return found.reason


def damaged(name: str, value) -> nn.Module:
    """Return a module with another value of a field of its state."""
    module = module_of()
    setattr(module.weight.quant_state, name, value)
    return module


def with_plain_weight() -> nn.Module:
    module = module_of()
    module.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    return module


def with_other_codes() -> nn.Module:
    module = module_of()
    module.weight.data = module.weight.data[1:]
    return module


def for_cpu_kernels() -> nn.Module:
    return damaged("packing_format_for_cpu", True)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: module_of(nested=True), "bnb_4bit_use_double_quant=False"),
        (lambda: bitsandbytes.nn.Linear4bit(COLUMNS, ROWS), "it is not quantized yet"),
        (lambda: bitsandbytes.nn.Linear8bitLt(COLUMNS, ROWS), "outliers"),
        (for_cpu_kernels, "the order of the library's CPU kernels"),
        (with_plain_weight, "its weight is a Parameter"),
        (with_other_codes, "weight has shape (4095), expected (4096)"),
        (lambda: damaged("absmax", torch.ones(3)), "absmax has shape (3)"),
        (lambda: damaged("absmax", None), "absmax is missing"),
        (lambda: damaged("absmax", torch.ones(128).half()), "absmax holds float16"),
        (lambda: damaged("quant_type", "int4"), "codes of type 'int4'"),
        (lambda: damaged("shape", (ROWS, 3)), "its weight has shape (32, 3)"),
        (lambda: damaged("dtype", torch.float64), "decodes to torch.float64"),
        (lambda: damaged("blocksize", 96), "do not divide"),
    ],
)
def test_what_is_not_read_has_a_reason(make, why):
    assert why in reason(make())
