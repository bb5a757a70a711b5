"""Read the linears of AWQ in GEMM layout, of GPT-QModel and AutoAWQ.

A word holds codes of eight successive outputs for one input, in the order 0, 2, 4, 6, 1, 3, 5, 7
from its lowest bits. Zero points are in such words too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers, gptq
from mirage_hf.formats.coding import CodedWeight, Coding, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.formats.stored import Stored
from mirage_hf.ops.dtypes import CODES_PER_WORD, COMPUTE_DTYPES

_CLASSES = (
    "gptqmodel.nn_modules.qlinear.torch_awq.AwqTorchLinear",
    "gptqmodel.nn_modules.qlinear.gemm_awq.AwqGEMMLinear",
    "gptqmodel.nn_modules.qlinear.gemm_awq_triton.AwqGEMMTritonLinear",
    "awq.modules.linear.gemm.WQLinear_GEMM",
)


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is one of these linears."""
    return containers.qualified_name(module) in _CLASSES


def tensors(module: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold the weight."""
    return tuple(getattr(module, name, None) for name in ("qweight", "qzeros", "scales"))


def read(module: Any, dtype: torch.dtype) -> CodedWeight | Rejected:
    """Return the weight of a module that `recognizes` accepts."""
    found = gptq.wrong_module(module) or _read(module, dtype)
    return Rejected(f"AWQ: {found}") if isinstance(found, str) else found


def _read(module: Any, dtype: torch.dtype) -> CodedWeight | str:
    rows, columns, group = module.out_features, module.in_features, module.group_size
    bits = getattr(module, "bits", getattr(module, "w_bit", None))
    if bits != 4:
        return f"codes of {bits} bits are not read"
    why = uneven("inputs", columns, group) or uneven("outputs", rows, CODES_PER_WORD)
    if why:
        return why
    groups, words_of_row = columns // group, rows // CODES_PER_WORD
    words, zeros, scales = tensors(module)
    bias = getattr(module, "bias", None)
    why = (
        wrong_tensor("qweight", words, (columns, words_of_row), (torch.int32,))
        or wrong_tensor("qzeros", zeros, (groups, words_of_row), (torch.int32,))
        or wrong_tensor("scales", scales, (groups, rows), COMPUTE_DTYPES)
        or containers.wrong_bias(bias, rows)
        or containers.other_device(words, zeros, scales, bias)
    )
    if why:
        return why
    assert words is not None and zeros is not None and scales is not None
    computes = dtype if bias is None else bias.dtype
    zero = containers.equal_zero_point(zeros, bits)
    coding = coding_of(rows, columns, group, scales.dtype, computes, zero)
    held = (words, scales) + ((zeros,) if zero is None else ())
    return CodedWeight(coding, view_as(coding, held), bias)


def coding_of(
    rows: int,
    columns: int,
    group: int,
    scale: torch.dtype,
    computes: torch.dtype,
    zero: int | None,
) -> Coding:
    """Return the coding. `zero` is a zero point that all codes share."""
    # Output 8 w + 2 i + j is code i + 4 j of word w.
    in_words = [(rows // 8, 8), (4, 1), (2, 4)]
    in_order = [(rows // 8, 8), (4, 2), (2, 1)]
    of_groups = [(columns // group, rows)] if group < columns else []
    of_codes = [(size, group * rows) for size, _ in of_groups] + [(group, rows)]
    one = [*of_groups, (1, 1)]
    return Coding(
        rows,
        columns,
        computes,
        Stored.of([*in_words, *of_codes], torch.uint4),
        Stored.of([*in_order, *one], scale),
        Stored.of([*in_words, *one], torch.uint4) if zero is None else None,
        float(zero or 0),
    )
