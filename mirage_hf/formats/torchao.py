"""Read weights that are a tensor subclass of torchao: those of linears and of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers, torchao_int4
from mirage_hf.formats.coding import CodedWeight, Coding, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.formats.stored import Split
from mirage_hf.ops.dtypes import COMPUTE_DTYPES

#: The dtype of the codes of each class that is read.
_CODES = {
    "Int8Tensor": torch.int8,
    "IntxUnpackedToInt8Tensor": torch.int8,
    "Float8Tensor": torch.float8_e4m3fn,
}

#: Fields that say that the input is rounded to codes.
_ROUNDS_INPUT = ("act_quant_kwargs", "activation_quantization")

_TENSORS = ("qdata", "scale", "zero_point", "scale_and_zero")

#: Readers of classes whose codes share bytes or words.
_PACKED = {
    "Int4Tensor": torchao_int4.rows_of,
    "Int4TilePackedTo4dTensor": torchao_int4.tiles_of,
}

_REASONS = {
    "Int4PlainInt32Tensor": "Int4PlainInt32Tensor is for XPU and NPU devices",
    "Int4PreshuffledTensor": "the order of codes of Int4PreshuffledTensor is not documented",
}


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is a linear with a weight of torchao."""
    return isinstance(module, nn.Linear) and is_weight(module._parameters.get("weight"))


def is_weight(x: Any) -> bool:
    """Return whether a parameter is a tensor of torchao."""
    return type(x).__module__.partition(".")[0] == "torchao"


def tensors(module: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold the weight."""
    return tuple(getattr(module.weight, name, None) for name in _TENSORS)


def read(module: Any, dtype: torch.dtype) -> CodedWeight | Rejected:
    """Return the weight of a module that `recognizes` accepts."""
    found = _wrong_module(module) or _read(module)
    return Rejected(f"torchao: {found}") if isinstance(found, str) else found


def _wrong_module(module: Any) -> str | None:
    if containers.stock_class(module) is not nn.Linear:
        return f"its class is {type(module).__name__}"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    why = containers.changed_module(module)
    if why or tuple(module.weight.shape) != (module.out_features, module.in_features):
        return why or f"its weight has shape {tuple(module.weight.shape)}"
    return None


def _read(module: Any) -> CodedWeight | str:
    found = codes_of(module.weight)
    if isinstance(found, str):
        return found
    coding, held = found
    bias = module.bias
    why = containers.wrong_bias(bias, coding.rows) or containers.other_device(*held, bias)
    if why:
        return why
    return CodedWeight(coding, view_as(coding, held), bias, rounds_input(module.weight))


def rounds_input(weight: Any) -> bool:
    """Return whether products with a weight round their input to codes."""
    to_float8 = getattr(weight, "activation_dtype", None) is torch.float8_e4m3fn
    return to_float8 or any(getattr(weight, field, None) is not None for field in _ROUNDS_INPUT)


def codes_of(weight: Any) -> tuple[Coding, tuple[Tensor, ...]] | str:
    """Return how a tensor of torchao holds its weights, or why it cannot be read.

    Args:
        weight: A weight (outputs, inputs), or the weights (experts, outputs, inputs) of experts.

    Returns:
        The coding of one weight. For each of its inputs the tensor that holds it, in the order of
        memory, for all experts if there are any.
    """
    name = type(weight).__name__
    if name not in _CODES and name not in _PACKED:
        return _REASONS.get(name, f"the packing of {name} is not read")
    if getattr(weight, "act_pre_scale", None) is not None:
        return "it scales its input"
    if weight.dtype not in COMPUTE_DTYPES:
        return f"its weight decodes to {weight.dtype}"
    block = tuple(weight.block_size)
    if len(block) != weight.dim() or any(n != 1 for n in block[:-2]):
        return f"blocks of {block} are not read"
    read = _PACKED.get(name, _bytes_of)
    return read(weight, *block[-2:])


def _bytes_of(weight: Any, height: int, width: int) -> tuple[Coding, tuple[Tensor, ...]] | str:
    """Read codes of a byte each."""
    *experts, rows, columns = weight.shape
    why = uneven("outputs", rows, height) or uneven("inputs", columns, width)
    if why:
        return why
    whole = height == rows
    split = Split(rows, columns, 1 if whole else height, width)
    if whole and width != columns:
        return f"blocks of {tuple(weight.block_size)} are not read"
    code, scale = _CODES[type(weight).__name__], weight.scale
    zeros = getattr(weight, "zero_point", None)
    dims = (*experts, rows // height, columns // width)
    why = (
        wrong_tensor("qdata", weight.qdata, (*experts, rows, columns), (code,))
        or _wrong_scale(scale, dims)
        or (None if zeros is None else wrong_tensor("zero_point", zeros, dims, (torch.int8,)))
        or containers.other_device(weight.qdata, scale, zeros)
    )
    if why:
        return why
    stored = split.per_tensor if whole else split.per_block if height > 1 else split.per_row
    # symmetric quantization stores zero points too
    has_zeros = zeros is not None and containers.may_hold_numbers(zeros)
    stored_zeros = stored(torch.int8) if has_zeros else None
    coding = Coding(
        rows, columns, weight.dtype, split.codes(code), stored(scale.dtype), stored_zeros
    )
    return coding, (weight.qdata, scale) + ((zeros,) if has_zeros else ())


def _wrong_scale(scale: Any, dims: tuple[int, ...]) -> str | None:
    one = dims == (1, 1) and isinstance(scale, Tensor) and scale.numel() == 1
    return wrong_tensor("scale", scale, scale.shape if one else dims, COMPUTE_DTYPES)
