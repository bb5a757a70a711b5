"""Read the `GgufLinear` of transformers with blocks of type Q8_0.

A row of the weight is a row of blocks. A block of Q8_0 has 34 bytes: a float16 scale, and 32 signed
codes of 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, Stored, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor

_CLASS = "transformers.integrations.gguf.utils.GgufLinear"

#: The number that GGUF gives to Q8_0, the codes of a block and its bytes.
_Q8_0, _CODES, _BYTES = 8, 32, 34

#: Bytes of a scale, which begins a block.
_SCALE = torch.float16.itemsize


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is a GgufLinear."""
    return containers.qualified_name(module) == _CLASS


def tensors(module: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold the weight."""
    return (module._parameters.get("weight"),)


def read(module: Any, dtype: torch.dtype) -> CodedWeight | Rejected:
    """Return the weight of a module that `recognizes` accepts."""
    found = _read(module, dtype)
    return Rejected(f"GGUF: {found}") if isinstance(found, str) else found


def _read(module: Any, dtype: torch.dtype) -> CodedWeight | str:
    rows, columns = module.out_features, module.in_features
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if module.ggml_type != _Q8_0:
        return f"blocks of GGUF's type {module.ggml_type} are not read, only Q8_0"
    if getattr(module, "input_permutation", None) is not None:
        return "it reorders its inputs"
    (weight,) = tensors(module)
    blocks = columns // _CODES
    why = (
        containers.wrong_sizes(rows, columns)
        or containers.changed_module(module)
        or uneven("inputs", columns, _CODES)
        or wrong_tensor("weight", weight, (rows, blocks * _BYTES), (torch.uint8,))
        or containers.wrong_bias(module.bias, rows)
        or containers.other_device(weight, module.bias)
    )
    if why:
        return why
    assert weight is not None
    coding = _coding(rows, columns, dtype)
    flat = weight.detach().view(-1)
    return CodedWeight(coding, view_as(coding, (flat[_SCALE:], flat)), module.bias)


def _coding(rows: int, columns: int, dtype: torch.dtype) -> Coding:
    """Return the coding. Strides of codes are in bytes, and those of scales in float16."""
    blocks = columns // _CODES
    row = blocks * _BYTES
    codes = Stored((rows, blocks, _CODES), (row, _BYTES, 1), torch.int8)
    scales = Stored((rows, blocks, 1), (row // _SCALE, _BYTES // _SCALE, 1), torch.float16)
    return Coding(rows, columns, dtype, codes, scales, wide=True)
