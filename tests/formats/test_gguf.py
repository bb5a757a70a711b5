"""Blocks of GGUF in the GgufLinear of transformers, decoded by that library."""

import pytest
import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import coded_weight, held_tensors, runs_codes
from tests.helpers import coded_modules, gguf_reference

gguf = pytest.importorskip("transformers.integrations.gguf.utils")
dequant = pytest.importorskip("transformers.integrations.gguf.dequant")

ROWS, COLUMNS = 48, 128


def module_of(rows: int = ROWS, columns: int = COLUMNS, bias: bool = True) -> nn.Module:
    """Return a linear with blocks of Q8_0."""
    torch.manual_seed(0)
    return filled(nn.Linear(columns, rows, bias=bias))


def filled(plain: nn.Linear) -> nn.Module:
    """Return a GgufLinear with the weight of a plain linear. transformers cannot pack blocks."""
    rows, columns = plain.weight.shape
    module = gguf.GgufLinear(columns, rows, dequant.GGML_Q8_0, bias=plain.bias is not None)
    blocks = plain.weight.detach().unflatten(1, (-1, 32))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = (blocks / scales).round().clamp(-127, 127).to(torch.int8)
    packed = torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], -1)
    module.weight.data = packed.flatten(1)
    if plain.bias is not None:
        module.bias.data = plain.bias.detach().clone()
    return module.eval()


#: The types of blocks with 256 codes, by name.
K_TYPES = {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


def module_of_type(name: str, rows: int = ROWS, columns: int = 512) -> nn.Module:
    """Return a linear with random blocks. No library of Python makes such blocks."""
    kind = K_TYPES[name]
    module = gguf.GgufLinear(columns, rows, kind)
    module.weight.data = gguf_reference.random_blocks(kind, rows, columns, 0)
    return module.eval()


@pytest.mark.parametrize("columns", [256, 768])
@pytest.mark.parametrize("name", K_TYPES)
def test_blocks_of_256_codes_are_decoded_as_libraries_decode_them(name, columns):
    module = module_of_type(name, columns=columns)
    found = coded_modules.read_as(module, torch.float32)
    decoded = coded_modules.decoded(found.coding, found.tensors)
    assert torch.equal(decoded, weight_of(module)) and decoded.abs().max() > 0
    exact = gguf_reference.decoded(K_TYPES[name], module.weight.data)
    assert (decoded - exact).abs().max() <= 2**-22 * exact.abs().max()
    reference = pytest.importorskip("gguf")
    kind = reference.GGMLQuantizationType[name]
    assert torch.equal(decoded, torch.from_numpy(reference.dequantize(module.weight.numpy(), kind)))


@pytest.mark.parametrize("name", K_TYPES)
def test_blocks_of_256_codes_are_not_copied(name):
    module = module_of_type(name)
    found = coded_modules.read_as(module, torch.float32)
    own = module.weight.untyped_storage().data_ptr()
    copies = {
        role
        for role, t in zip(found.coding.roles, found.tensors, strict=True)
        if t.untyped_storage().data_ptr() != own
    }
    assert copies == {role for role in found.coding.roles if role.startswith("starts of")}
    again = coded_modules.read_as(module, torch.float32)
    assert [t.data_ptr() for t in again.tensors] == [t.data_ptr() for t in found.tensors]


@pytest.mark.parametrize("name", K_TYPES)
def test_wrong_decodings_of_256_codes_differ(name):
    module = module_of_type(name, 16)
    caught = coded_modules.caught(coded_modules.read_as(module, torch.float32), weight_of(module))
    assert len(caught) > 60 and all(caught.values()), [k for k, ok in caught.items() if not ok]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", K_TYPES)
def test_one_kernel_is_found_and_proven_for_256_codes(name, norm):
    coding = coded_modules.read(module_of_type(name)).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


@pytest.mark.parametrize("name", K_TYPES)
def test_weights_of_256_codes_are_joined(name):
    first, second = (coded_modules.read(module_of_type(name, n)).coding for n in (48, 16))
    assert first.joins(second)
    assert coded_modules.proven_as_one_kernel(coded_modules.joined([first, second], 1, True))


def test_a_linear_of_256_codes_runs_a_kernel_of_its_own_blocks():
    module = module_of_type("Q4_K")
    before = module.weight.data.clone()
    weight = coded_modules.read(module)
    decoded = coded_modules.decoded(weight.coding, weight.tensors)
    module.weight.data.copy_(module.weight.data.roll(1, 0))
    assert torch.equal(coded_modules.decoded(weight.coding, weight.tensors), decoded.roll(1, 0))
    module.weight.data.copy_(before)


def weight_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight as the library decodes it."""
    shape = module.out_features, module.in_features
    return dequant.dequantize(module.weight.data, module.ggml_type, dtype).reshape(shape)


@pytest.mark.parametrize("columns", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_program_decodes_what_the_library_decodes(dtype, columns):
    module = module_of(columns=columns)
    found, expected = coded_modules.read_as(module, dtype), weight_of(module, dtype)
    assert found.coding.dtype is dtype and found.bias is module.bias
    assert torch.equal(coded_modules.decoded(found.coding, found.tensors), expected)
    assert coded_modules.lies_in_module(found, module)


def test_a_program_rounds_a_weight_in_bfloat16_once():
    """The library first rounds the scale."""
    module = module_of()
    found = coded_modules.read(module)
    decoded = coded_modules.decoded(found.coding, found.tensors)
    assert torch.equal(decoded, weight_of(module).bfloat16())


def test_wrong_decodings_differ():
    module = module_of()
    caught = coded_modules.caught(coded_modules.read_as(module, torch.float32), weight_of(module))
    assert len(caught) > 20 and all(caught.values()), caught


@pytest.mark.parametrize("norm", [False, True])
def test_one_kernel_is_found_and_proven(norm):
    coding = coded_modules.read(module_of()).coding
    assert coded_modules.proven_as_one_kernel(coded_modules.linear(coding, 2, norm))


def test_weights_are_joined():
    first, second = (coded_modules.read(module_of(rows)).coding for rows in (48, 16))
    assert first.joins(second)
    assert coded_modules.proven_as_one_kernel(coded_modules.joined([first, second], 1, True))


def reason(module: nn.Module) -> str:
    found = coded_weight(module)
    assert isinstance(found, Rejected), found
    return found.reason


def replaced(name: str, change):
    """Return a change of a parameter."""
    return lambda m: setattr(getattr(m, name), "data", change(getattr(m, name).data))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: setattr(m, "ggml_type", 2), "type 2 are not read, only Q8_0, Q4_K"),
        (lambda m: setattr(m, "ggml_type", dequant.GGML_Q4_K), "256 do not divide 128 inputs"),
        (lambda m: setattr(m, "input_permutation", torch.arange(COLUMNS)), "reorders its inputs"),
        (lambda m: setattr(m, "forward", m.forward), "forward was replaced"),
        (lambda m: setattr(m, "in_features", 120), "do not divide 120 inputs"),
        (lambda m: m.add_module("x", nn.Identity()), "submodules"),
        (lambda m: m._parameters.update(weight=None), "weight is missing"),
        (replaced("weight", lambda t: t[:, 34:].contiguous()), "weight has shape"),
        (replaced("weight", lambda t: t[1:]), "weight has shape"),
        (replaced("weight", lambda t: t.float()), "weight holds float32"),
        (replaced("weight", lambda t: t.T.contiguous().T), "not stored row by row"),
        (replaced("bias", lambda t: t[1:]), "bias has shape"),
    ],
)
def test_what_is_not_read_has_a_reason(change, why):
    module = module_of()
    change(module)
    assert why in reason(module)


@pytest.mark.parametrize("name", K_TYPES)
def test_damaged_blocks_of_256_codes_have_a_reason(name):
    module = module_of_type(name)
    module.weight.data = module.weight.data[:, :-1].contiguous()
    assert "weight has shape" in reason(module)
    module = module_of_type(name)
    module.ggml_type = dequant.GGML_Q8_0
    assert "weight has shape" in reason(module)


def test_a_guard_sees_the_blocks():
    module = module_of()
    assert len(held_tensors(module)) == 1 and not runs_codes(module)
