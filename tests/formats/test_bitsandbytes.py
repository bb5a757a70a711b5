"""Linears of bitsandbytes with 4 bits, made and decoded by that library."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", TABLES)
def test_scales_that_are_codes_are_decoded_as_the_library_does(kind, dtype):
    module = module_of(kind, dtype, nested=True, columns=1024)  # 512 blocks, two for the scales
    found, expected = coded_modules.read(module), expected_of(module)
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    codes = module.weight.untyped_storage().data_ptr()
    assert found.tensors[0].untyped_storage().data_ptr() == codes
    caught = coded_modules.caught(found, expected)
    assert all(caught.values()), caught


def test_scales_that_are_codes_are_decoded_once():
    module = module_of(nested=True)
    first, second = (coded_modules.read(module).tensors[1].data_ptr() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.absmax.copy_(state.absmax.flip(0)),
        lambda state: state.state2.absmax.mul_(2.0),
        lambda state: state.offset.add_(1.0),
        lambda state: setattr(state.state2, "absmax", state.state2.absmax * 2.0),
        lambda state: setattr(state, "absmax", state.absmax.flip(0)),
    ],
    ids=["codes written", "scales written", "offset written", "scales replaced", "codes replaced"],
)
def test_scales_that_change_are_decoded_again(change):
    module = module_of(nested=True)
    coded_modules.read(module)
    change(module.weight.quant_state)
    found = coded_modules.read(module)
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected_of(module))


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


@pytest.mark.parametrize("nested", [False, True])
def test_linears_of_checkpoints_are_read(nested, tmp_path):
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16().save_pretrained(tmp_path)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
    )
    load = partial(AutoModelForCausalLM.from_pretrained, device_map={"": "cpu"})
    quantized = load(tmp_path, quantization_config=config, dtype=torch.bfloat16)
    quantized.save_pretrained(tmp_path / "quantized")
    for model in (quantized, load(tmp_path / "quantized")):
        linears = [m for m in model.model.modules() if isinstance(m, nn.Linear)]
        assert len(linears) == 7 and coded_weight(model.lm_head) is None
        for module in linears:
            found = coded_modules.read(module)
            decoded = coded_modules.decoded(found.coding, found.tensors)
            assert torch.equal(decoded, expected_of(module))


def reason(module: nn.Module) -> str:
    found = coded_weight(module)
    assert isinstance(found, Rejected), found
    return found.reason


def damaged(name: str, value) -> nn.Module:
    """Return a module with another value of a field of its state."""
    module = module_of()
    setattr(module.weight.quant_state, name, value)
    return module


def damaged_scales(name: str, value) -> nn.Module:
    """Return a module with another value of a field of the state of its scales."""
    module = module_of(nested=True)
    setattr(module.weight.quant_state.state2, name, value)
    return module


def without_offset() -> nn.Module:
    module = module_of(nested=True)
    module.weight.quant_state.offset = None
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
        (lambda: damaged_scales("absmax", torch.ones(3)), "absmax of scales has shape (3)"),
        (lambda: damaged_scales("code", torch.ones(16)), "table of scales has shape (16)"),
        (lambda: damaged_scales("blocksize", 0), "its scales come in blocks of 0"),
        (without_offset, "offset of scales is missing"),
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
