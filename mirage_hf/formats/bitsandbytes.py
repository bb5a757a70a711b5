"""Read the `Linear4bit` of bitsandbytes: codes of NF4 and FP4 in blocks along the inputs.

A code is the index of an entry of a table of 16 floats. A byte holds two codes, the first one in
its high bits. Each block has a scale, the largest absolute value of its weights ("absmax").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, Stored, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.ops.dtypes import COMPUTE_DTYPES

_MODULES = "bitsandbytes.nn.modules."

#: The classes, and their class of parameters.
_CLASSES = {_MODULES + name for name in ("Linear4bit", "LinearNF4", "LinearFP4")}
_PARAMETER = _MODULES + "Params4bit"

#: What codes stand for, by type. The library's kernels contain these tables, as float32. They
#: ignore the copy that each container has.
TABLES = {
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "fp4": (
        0.0,
        0.0052083334885537624,
        0.6666666865348816,
        1.0,
        0.3333333432674408,
        0.5,
        0.1666666716337204,
        0.25,
        0.0,
        -0.0052083334885537624,
        -0.6666666865348816,
        -1.0,
        -0.3333333432674408,
        -0.5,
        -0.1666666716337204,
        -0.25,
    ),
}


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is a Linear4bit."""
    return containers.qualified_name(module) in _CLASSES


def tensors(module: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold the weight."""
    weight = module._parameters.get("weight")
    return (weight, *_tensors_of_state(getattr(weight, "quant_state", None)))


def loose_tensors(state: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the tensors of a Linear4bit that are neither parameters nor buffers.

    Args:
        state: The instance dictionary of a module. Other modules have none of these tensors.
    """
    weight = (state.get("_parameters") or {}).get("weight")
    if containers.qualified_name(weight) != _PARAMETER:
        return ()
    held = _tensors_of_state(getattr(weight, "quant_state", None))
    return tuple(t for t in held if isinstance(t, Tensor))


def _tensors_of_state(state: Any) -> tuple[Tensor | None, ...]:
    return (getattr(state, "absmax", None),)


def read(module: Any, dtype: torch.dtype) -> CodedWeight | Rejected:
    """Return the weight of a module that `recognizes` accepts."""
    found = _wrong_module(module) or _read(module)
    return Rejected(f"bitsandbytes: {found}") if isinstance(found, str) else found


def _wrong_module(module: Any) -> str | None:
    if "forward" in module.__dict__:
        return "its forward was replaced"
    why = containers.changed_module(module) or containers.wrong_sizes(
        module.out_features, module.in_features
    )
    if why:
        return why
    weight = module._parameters.get("weight")
    if containers.qualified_name(weight) != _PARAMETER:
        return f"its weight is a {type(weight).__name__}, not a Params4bit"
    state = getattr(weight, "quant_state", None)
    if state is None:
        return "it is not quantized yet: bitsandbytes does that when the model moves to its device"
    if getattr(state, "packing_format_for_cpu", False):
        return "its codes are in the order of the library's CPU kernels; read it before it runs"
    if state.state2 is not None or state.offset is not None:
        return "its scales are codes, too: load it with bnb_4bit_use_double_quant=False"
    if state.quant_type not in TABLES:
        return f"codes of type {state.quant_type!r} are not read"
    if state.dtype not in COMPUTE_DTYPES:
        return f"its weight decodes to {state.dtype}"
    shape = (module.out_features, module.in_features)
    if tuple(state.shape or ()) != shape:
        return f"its weight has shape {tuple(state.shape or ())}, expected {shape}"
    return None


def _read(module: Any) -> CodedWeight | str:
    rows, columns = module.out_features, module.in_features
    weight = module._parameters["weight"]
    state = weight.quant_state
    block = state.blocksize
    why = uneven("inputs", columns, block) or uneven("inputs of a block", block, 8)
    if why:
        return why
    blocks, words = (rows * (columns // block),), weight.data
    flat = words.detach().reshape(-1) if words.is_contiguous() else words
    if flat.dtype.itemsize in (1, 2, 4):  # FSDP wants the codes in the dtype of other weights
        flat = flat.view(torch.uint8)
    why = (
        wrong_tensor("weight", flat, (rows * columns // 2,), (torch.uint8,))
        or wrong_tensor("absmax", state.absmax, blocks, (torch.float32,))
        or containers.wrong_bias(module.bias, rows)
        or containers.other_device(flat, state.absmax, module.bias)
    )
    if why:
        return why
    coding = _coding(rows, columns, block, state.dtype, TABLES[state.quant_type])
    return CodedWeight(coding, view_as(coding, (flat, state.absmax)), module.bias)


def _coding(
    rows: int, columns: int, block: int, computes: torch.dtype, table: tuple[float, ...]
) -> Coding:
    """Return the coding. The two codes of a byte are a dim of their own."""
    groups = columns // block
    of_codes, of_scales = [(rows, columns)], [(rows, groups)]
    if groups > 1:
        of_codes.append((groups, block))
        of_scales.append((groups, 1))
    of_codes += [(block // 2, 2), (2, -1)]
    of_scales += [(1, 1), (1, 1)]
    codes, scales = Stored.of(of_codes, torch.uint4), Stored.of(of_scales, torch.float32)
    return Coding(rows, columns, computes, codes, scales, table=table)
