"""Read the `GgufLinear` of transformers, whose weight stays in blocks of GGUF.

A row of the weight is a row of blocks. All inputs of a program are views of the same bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.formats.gguf_blocks import LAYOUTS, Blocks

_CLASS = "transformers.integrations.gguf.utils.GgufLinear"


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
    layout = LAYOUTS.get(module.ggml_type)
    if layout is None:
        names = ", ".join(known.name for known in LAYOUTS.values())
        return f"blocks of GGUF's type {module.ggml_type} are not read, only {names}"
    if getattr(module, "input_permutation", None) is not None:
        return "it reorders its inputs"
    (weight,) = tensors(module)
    row_bytes = columns // layout.codes * layout.bytes
    why = (
        containers.wrong_sizes(rows, columns)
        or containers.changed_module(module)
        or uneven("inputs", columns, layout.codes)
        or wrong_tensor("weight", weight, (rows, row_bytes), (torch.uint8,))
        or containers.wrong_bias(module.bias, rows)
        or containers.other_device(weight, module.bias)
    )
    if why:
        return why
    assert weight is not None
    coding = coding_of(module.ggml_type, rows, columns, dtype)
    return CodedWeight(coding, views(module.ggml_type, coding, weight), module.bias)


def coding_of(kind: int, rows: int, columns: int, dtype: torch.dtype) -> Coding:
    """Return the coding of a weight in blocks of a type, given by its number."""
    layout = LAYOUTS[kind]
    return layout.coding(Blocks(rows, columns, layout.codes, layout.bytes), dtype)


def views(kind: int, coding: Coding, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of a program as views of the bytes of a weight."""
    begins, flat = LAYOUTS[kind].begins, weight.detach().view(-1)
    held = [_bits_of_a_byte(flat.device) if r.startswith("starts") else flat for r in coding.roles]
    return view_as(coding, tuple(x[begins[r] :] for r, x in zip(coding.roles, held, strict=True)))


@cache
def _bits_of_a_byte(device: torch.device) -> Tensor:
    """Return the numbers 0 to 7. Views of them say which bits a field has."""
    return torch.arange(8, dtype=torch.uint8, device=device)
