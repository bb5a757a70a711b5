"""Read the `FP8Linear` of transformers: float8 codes with a scale for each square block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, Split, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor

_CLASS = "transformers.integrations.finegrained_fp8.FP8Linear"


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is an FP8Linear."""
    return containers.qualified_name(module) == _CLASS


def tensors(module: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold the weight."""
    return (module.weight, module.weight_scale_inv)


def read(module: Any, dtype: torch.dtype) -> CodedWeight | Rejected:
    """Return the weight of a module that `recognizes` accepts."""
    rows, columns = module.out_features, module.in_features
    why = containers.wrong_sizes(rows, columns) or containers.changed_module(module)
    if "forward" in module.__dict__:
        why = why or "its forward was replaced"
    height, width = (1, columns) if module.block_size is None else module.block_size
    why = why or uneven("outputs", rows, height) or uneven("inputs", columns, width)
    if why:
        return Rejected(f"FP8Linear: {why}")
    split = Split(rows, columns, height, width)
    scale = module.weight_scale_inv
    scale_dims = () if module.block_size is None else (rows // height, split.groups)
    why = (
        wrong_tensor("weight", module.weight, (rows, columns), (torch.float8_e4m3fn,))
        or wrong_tensor("weight_scale_inv", scale, scale_dims, (torch.float32,))
        or containers.wrong_bias(module.bias, rows)
        or containers.other_device(module.weight, scale, module.bias)
    )
    if why:
        return Rejected(f"FP8Linear: {why}")
    stored = split.per_tensor if module.block_size is None else split.per_block
    computes = dtype if module.bias is None else module.bias.dtype
    codes = split.codes(torch.float8_e4m3fn)
    coding = Coding(rows, columns, computes, codes, stored(torch.float32))
    # "dynamic" and "static" both round the input to float8
    views = view_as(coding, (module.weight, scale))
    return CodedWeight(coding, views, module.bias, quantizes_activations=True)
