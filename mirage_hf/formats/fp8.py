"""Read the linears of transformers that hold float8 codes.

`FP8Linear` has a scale for each square block, or one scale. `CompressedTensorsFP8Linear` has one
for each row. Both round their input to float8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.formats.stored import Split

_BLOCKS = "transformers.integrations.finegrained_fp8.FP8Linear"
_ROWS = "transformers.integrations.compressed_tensors.CompressedTensorsFP8Linear"


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is one of these linears."""
    return containers.qualified_name(module) in (_BLOCKS, _ROWS)


def tensors(module: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold the weight."""
    return (module.weight, _scale(module))


def read(module: Any, dtype: torch.dtype) -> CodedWeight | Rejected:
    """Return the weight of a module that `recognizes` accepts."""
    found = _read(module, dtype)
    name = type(module).__name__
    return Rejected(f"{name}: {found}") if isinstance(found, str) else found


def _scale(module: Any) -> Tensor | None:
    name = "weight_scale_inv" if containers.qualified_name(module) == _BLOCKS else "weight_scale"
    return getattr(module, name, None)


def _read(module: Any, dtype: torch.dtype) -> CodedWeight | str:
    rows, columns = module.out_features, module.in_features
    why = containers.wrong_sizes(rows, columns) or containers.changed_module(module)
    if "forward" in module.__dict__:
        why = why or "its forward was replaced"
    per_row = containers.qualified_name(module) == _ROWS
    block = None if per_row else module.block_size
    height, width = block or (1, columns)
    why = why or uneven("outputs", rows, height) or uneven("inputs", columns, width)
    if why:
        return why
    split = Split(rows, columns, height, width)
    scale_dims: tuple[int, ...] = () if block is None else (rows // height, split.groups)
    scale_dims = (1, rows) if per_row else scale_dims
    scale: Any = _scale(module)
    why = (
        wrong_tensor("weight", module.weight, (rows, columns), (torch.float8_e4m3fn,))
        or wrong_tensor("its scale", scale, scale_dims, (torch.float32,))
        or containers.wrong_bias(module.bias, rows)
        or containers.other_device(module.weight, scale, module.bias)
    )
    if why:
        return why
    stored = split.per_row if per_row else split.per_tensor if block is None else split.per_block
    codes = split.codes(torch.float8_e4m3fn)
    coding = Coding(rows, columns, dtype, codes, stored(torch.float32))
    views = view_as(coding, (module.weight, scale))
    return CodedWeight(coding, views, module.bias, quantizes_activations=True)
