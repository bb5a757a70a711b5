"""Read 4-bit floats of compressed-tensors: NVFP4 and MXFP4.

A byte holds two codes, the first one in its low bits. A code is a float with two bits of exponent
and one of mantissa (e2m1). A group of inputs of each output has a scale of 8 bits. The scale of
NVFP4 is a float8_e4m3, divided by a float32 number of the whole weight. That of MXFP4 is a power of
two, as a byte that holds its exponent plus 127 (e8m0).

A container has no dtype to compute in. The library always decodes to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, view_as
from mirage_hf.formats.containers import text_of, uneven, wrong_tensor
from mirage_hf.formats.stored import Split
from mirage_hf.ops.dtypes import CODES_PER_WORD, E2M1


@dataclass(frozen=True)
class Format:
    """What two formats of 4-bit floats differ in.

    Attributes:
        strategy: The name of the library for how weights share scales.
        stores: The dtype of scales in a container.
        scales: The dtype of scales in a program.
        divides: Whether one number divides all scales.
    """

    strategy: str
    stores: torch.dtype
    scales: torch.dtype
    divides: bool


#: The formats by their names.
FORMATS = {
    "nvfp4-pack-quantized": Format(
        "tensor_group", torch.float8_e4m3fn, torch.float8_e4m3fn, divides=True
    ),
    "mxfp4-pack-quantized": Format("group", torch.uint8, torch.float8_e8m0fnu, divides=False),
}


def read(module: Any, args: Any, written: Format, dtype: torch.dtype) -> CodedWeight | str:
    """Return the weight of a linear, or why it cannot be read.

    Args:
        module: The linear.
        args: How the library says that its weight is quantized.
        written: The format of the container.
        dtype: The dtype of the activations.
    """
    rows, columns, group = module.out_features, module.in_features, args.group_size
    why = (
        _wrong_scheme(args, written)
        or uneven("inputs", columns, group)
        or uneven("inputs of a group", group, CODES_PER_WORD)
        or _wrong_tensors(module, (rows, columns), group, written)
    )
    if why:
        return why
    computes = dtype if module.bias is None else module.bias.dtype
    coding = _coding(Split(rows, columns, group=group), computes, written)
    held = [module.weight_packed, module.weight_scale]
    if written.divides:
        held.append(module.weight_global_scale)
    return CodedWeight(coding, view_as(coding, tuple(held)), module.bias)


def _coding(split: Split, computes: torch.dtype, written: Format) -> Coding:
    return Coding(
        split.rows,
        split.columns,
        computes,
        split.codes(torch.uint4),
        split.per_row(written.scales),
        table=E2M1,
        divisors=split.shared(torch.float32) if written.divides else None,
    )


def _wrong_scheme(args: Any, written: Format) -> str | None:
    kind, strategy = text_of(args.type), text_of(args.strategy)
    if (kind, args.num_bits) != ("float", 4):
        return f"packed {kind} codes of {args.num_bits} bits are not read in this format"
    if strategy != written.strategy:
        return f"scales of strategy {strategy} are not read in this format"
    if not args.symmetric:
        return "zero points of 4-bit floats are not read"
    return None


def _wrong_tensors(module: Any, shape: tuple[int, int], group: int, written: Format) -> str | None:
    """Return what is wrong with the tensors of a module."""
    rows, columns = shape
    packed, scales, divisor, zeros = (
        getattr(module, f"weight_{name}", None)
        for name in ("packed", "scale", "global_scale", "zero_point")
    )
    if zeros is not None:
        return "it has zero points, but its scheme is symmetric"
    if divisor is not None and not written.divides:
        return "it has a global scale"
    why = wrong_tensor("weight_packed", packed, (rows, columns // 2), (torch.uint8,))
    why = why or wrong_tensor("weight_scale", scales, (rows, columns // group), (written.stores,))
    if written.divides:
        why = why or wrong_tensor("weight_global_scale", divisor, (1,), (torch.float32,))
    why = why or containers.wrong_bias(module.bias, rows)
    return why or containers.other_device(packed, scales, divisor, module.bias)
