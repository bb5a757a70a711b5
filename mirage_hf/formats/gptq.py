"""Read the linears of GPTQ that GPT-QModel keeps as checkpoints store them.

A word holds codes of successive inputs of one output, and the words of all outputs follow each
other. Zero points are in words along the outputs. transformers loads such checkpoints into classes
of GPT-QModel. Most classes put the words into an order of their own, and are not read.

Checkpoints of format "gptq" store zero points minus one. The library adds it as it loads them. So
these classes subtract zero points as they are stored, and the reader does the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.formats.stored import Stored, words_of
from mirage_hf.ops.dtypes import COMPUTE_DTYPES

_CLASSES = (
    "gptqmodel.nn_modules.qlinear.torch.TorchLinear",
    "gptqmodel.nn_modules.qlinear.tritonv2.TritonV2Linear",
)

_CODES = {4: torch.uint4, 8: torch.uint8}

#: Settings of GPT-QModel that change what a linear computes, with the value that changes nothing.
_PLAIN_SETTINGS = {
    "adapter": None,
    "had_K": None,
    "online_full_had": False,
    "online_partial_had": False,
    "planar": False,
    "pack_dtype": torch.int32,
}


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is one of these linears."""
    return containers.qualified_name(module) in _CLASSES


def tensors(module: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold the weight."""
    names = ("qweight", "qzeros", "scales", "g_idx")
    return tuple(getattr(module, name, None) for name in names)


def read(module: Any, dtype: torch.dtype) -> CodedWeight | Rejected:
    """Return the weight of a module that `recognizes` accepts."""
    found = wrong_module(module) or _read(module, dtype)
    return Rejected(f"GPTQ: {found}") if isinstance(found, str) else found


def wrong_module(module: Any) -> str | None:
    """Return why a linear of GPT-QModel or AutoAWQ may compute something else than its class."""
    for name, plain in _PLAIN_SETTINGS.items():
        value = getattr(module, name, plain)
        if value is not plain:
            return f"its {name} is {value if isinstance(value, torch.dtype) else 'set'}"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    sizes = containers.wrong_sizes(module.out_features, module.in_features)
    return sizes or containers.changed_module(module)


def _read(module: Any, dtype: torch.dtype) -> CodedWeight | str:
    rows, columns, group = module.out_features, module.in_features, module.group_size
    code = _CODES.get(module.bits)
    if code is None:
        return f"codes of {module.bits} bits are not read"
    per_word = words_of(code)
    why = (
        uneven("inputs", columns, group)
        or uneven("inputs of a group", group, per_word)
        or uneven("outputs", rows, per_word)
    )
    if why:
        return why
    groups = columns // group
    words, zeros, scales, order = tensors(module)
    bias = getattr(module, "bias", None)
    why = (
        wrong_tensor("qweight", words, (columns // per_word, rows), (torch.int32,))
        or wrong_tensor("qzeros", zeros, (groups, rows // per_word), (torch.int32,))
        or wrong_tensor("scales", scales, (groups, rows), COMPUTE_DTYPES)
        or wrong_tensor("g_idx", order, (columns,), (torch.int32, torch.int64))
        or containers.wrong_bias(bias, rows)
        or containers.other_device(words, zeros, scales, order, bias)
        or _wrong_order(order, groups)
    )
    if why:
        return why
    assert words is not None and zeros is not None and scales is not None and order is not None
    computes = dtype if bias is None else bias.dtype
    zero = containers.equal_zero_point(zeros, module.bits)
    index = None if _is_in_order(order, group) else order.dtype
    coding = coding_of(rows, columns, group, code, scales.dtype, computes, zero, index)
    held = (words, scales) + ((zeros,) if zero is None else ())
    held += (order,) if index else ()
    return CodedWeight(coding, view_as(coding, held), bias)


def _wrong_order(order: Any, groups: int) -> str | None:
    """Return why the groups of inputs cannot be read."""
    if order.is_meta:
        return "its g_idx has no numbers yet (meta device)"
    least, most = (int(x) for x in order.aminmax())
    if least < 0 or most >= groups:
        return f"its g_idx names groups {least} to {most}, but there are {groups}"
    return None


def _is_in_order(order: Tensor, group: int) -> bool:
    """Return whether inputs are grouped in their own order. With act-order they are not."""
    own = torch.arange(len(order), dtype=order.dtype, device=order.device) // group
    return torch.equal(order, own)


def coding_of(
    rows: int,
    columns: int,
    group: int,
    code: torch.dtype,
    scale: torch.dtype,
    computes: torch.dtype,
    zero: int | None,
    index: torch.dtype | None = None,
) -> Coding:
    """Return the coding.

    Args:
        rows: The rows of the weight: outputs of the linear.
        columns: Its columns: inputs of the linear.
        group: The columns that share a scale.
        code: The dtype of the codes.
        scale: The dtype of the scales.
        computes: The dtype in which the module computes.
        zero: A zero point that all codes share. None if words hold zero points.
        index: The dtype of g_idx. None if columns are grouped in their own order.
    """
    per_word, groups = words_of(code), columns // group
    of_codes, of_scales = [(rows, per_word)], [(rows, 1)]
    if zero is None:  # words of zero points split the rows
        of_codes = [(rows // per_word, per_word * per_word), (per_word, per_word)]
        of_scales = [(rows // per_word, per_word), (per_word, 1)]
    if index:
        group = columns  # the words of a column follow each other, whatever their groups are
        of_scales.append((groups, rows))
    else:
        if groups > 1:
            of_codes.append((groups, group * rows))
            of_scales.append((groups, rows))
        of_scales += [(1, 1), (1, 1)]
    of_words = [(group // per_word, per_word), (per_word, 1)]
    of_codes += [(group // per_word, per_word * rows), (per_word, 1)]
    return Coding(
        rows,
        columns,
        computes,
        Stored.of(of_codes, code),
        Stored.of(of_scales, scale),
        Stored.of(of_scales, code) if zero is None else None,
        float(zero or 0),
        order=Stored.of(of_words, index) if index else None,
    )
