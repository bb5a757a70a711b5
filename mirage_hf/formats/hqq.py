"""Read the `HQQLinear` of HQQ: codes of 4 and 8 bits in groups along the inputs.

A byte of 4-bit codes holds one of the first half of the rows in its high bits, and one of the
second half in its low bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.formats.stored import Split, Stored
from mirage_hf.ops.dtypes import COMPUTE_DTYPES

_CLASS = "hqq.core.quantize.HQQLinear"

#: The bits of a code, by the name of the packing.
_BITS = {"8bit_u8": 8, "4bit_u8": 4}


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is an HQQLinear."""
    return containers.qualified_name(module) == _CLASS


def tensors(module: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold the weight."""
    meta = module.meta or {}
    return (module.W_q, meta.get("scale"), meta.get("zero"))


def loose_tensors(state: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the tensors of an HQQLinear that are neither parameters nor buffers.

    Args:
        state: The instance dictionary of a module. Other modules have none of these tensors.
    """
    meta = state.get("meta")
    if type(meta) is not dict:
        return ()
    return tuple(t for t in (*meta.values(), state.get("bias")) if isinstance(t, Tensor))


def read(module: Any, dtype: torch.dtype) -> CodedWeight | Rejected:
    """Return the weight of a module that `recognizes` accepts."""
    found = _read(module)
    return Rejected(f"HQQ: {found}") if isinstance(found, str) else found


def _read(module: Any) -> CodedWeight | str:
    meta = module.meta
    if module.W_q is None or not meta:
        return "it is not initialized"
    why = containers.changed_module(module) or _wrong_meta(meta)
    if "forward" in module.__dict__:
        why = why or "its forward was replaced"
    if why:
        return why
    rows, columns = meta["shape"]
    group = meta["group_size"]
    bits = _BITS[meta["packing"]]
    why = containers.wrong_sizes(rows, columns) or uneven("inputs", columns, group)
    if bits == 4:
        why = why or uneven("outputs", rows, 2) or uneven("inputs of a group", group, 4)
    if why:
        return why
    split = Split(rows, columns, group=group)
    computes = meta.get("compute_dtype", torch.float16)
    if computes not in COMPUTE_DTYPES:
        return f"it computes in {computes}"
    values = (rows * split.groups, 1)
    scale, zeros = meta["scale"], meta["zero"]
    why = (
        wrong_tensor("W_q", module.W_q, (values[0] * bits // 8, group), (torch.uint8,))
        or wrong_tensor("scale", scale, values, (computes,))
        or wrong_tensor("zero", zeros, values, (computes,))
        or containers.wrong_bias(module.bias, rows)
        or containers.other_device(module.W_q, scale, zeros, module.bias)
    )
    if why:
        return why
    coding = coding_of(rows, columns, group, bits, computes)
    return CodedWeight(coding, view_as(coding, (module.W_q, scale, zeros)), module.bias)


def coding_of(rows: int, columns: int, group: int, bits: int, computes: torch.dtype) -> Coding:
    """Return the coding of codes of some bits in groups of columns."""
    split = Split(rows, columns, group=group)
    codes, per_row = split.codes(torch.uint8), split.per_row(computes)
    if bits == 4:
        codes, per_row = _halves(split, computes)
    return Coding(rows, columns, computes, codes, per_row, per_row)


def _halves(split: Split, dtype: torch.dtype) -> tuple[Stored, Stored]:
    """Return codes of 4 bits and one value for each group, with the two halves of rows apart."""
    rows, groups, group = split.rows // 2, split.groups, split.group
    of_codes, of_values = [(2, -1), (rows, 2 * split.columns)], [(2, rows * groups), (rows, groups)]
    if groups > 1:
        of_codes.append((groups, 2 * group))
        of_values.append((groups, 1))
    codes = Stored.of([*of_codes, (group, 2)], torch.uint4)
    return codes, Stored.of([*of_values, (1, 1)], dtype)


def _wrong_meta(meta: dict[str, Any]) -> str | None:
    """Return why the settings of a container are not read."""
    missing = [name for name in ("shape", "group_size", "scale", "zero") if name not in meta]
    if missing:
        return f"{' and '.join(missing)} missing"
    if meta.get("axis") != 1:
        return f"groups along axis {meta.get('axis')} are not read, only along axis 1"
    if meta.get("packing") not in _BITS:
        return f"packing {meta.get('packing')} is not read"
    if meta.get("view_as_float") or meta.get("quant_scale") or meta.get("quant_zero"):
        return "its codes or scales are stored in another form"
    return None
