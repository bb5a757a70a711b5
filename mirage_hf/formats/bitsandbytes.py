"""Read the `Linear4bit` of bitsandbytes: codes of NF4 and FP4 in blocks along the inputs.

A code is the index of an entry of a table of 16 floats. A byte holds two codes, the first one in
its high bits. Each block has a scale, the largest absolute value of its weights ("absmax").

With "double quantization" the scales are codes of 8 bits, in blocks of their own. They are decoded
once, to float32. So they take a part of the memory that double quantization saves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.formats.stored import Stored
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

#: Entries of the table of scales that are codes.
_SCALE_CODES = 256

#: Decoded scales by the weight that they belong to, with what they were decoded from.
_decoded: WeakIdKeyDictionary = WeakIdKeyDictionary()


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is a Linear4bit."""
    return containers.qualified_name(module) in _CLASSES


def is_parameter(kind: type) -> bool:
    """Return whether a class is that of the parameters that hold codes."""
    return f"{kind.__module__}.{kind.__qualname__}" == _PARAMETER


def tensors(module: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold the weight."""
    weight = module._parameters.get("weight")
    return (weight, *_tensors_of_state(getattr(weight, "quant_state", None)))


def loose_facts(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells whether tensors of a Linear4bit in no parameter or buffer are the same.

    Args:
        state: The instance dictionary of a module. Other modules have no such facts.
    """
    if not is_linear(state):
        return ()
    return _facts(getattr(state["_parameters"].get("weight"), "quant_state", None))


def is_linear(state: dict[str, Any]) -> bool:
    """Return whether an instance dictionary is that of a Linear4bit."""
    return "quant_storage" in state and "compute_type_is_set" in state


def copied_facts(module: Any) -> tuple[Any, ...]:
    """Return how often scales were written that are decoded once."""
    state = getattr(module._parameters.get("weight"), "quant_state", None)
    return _facts(state) if getattr(state, "state2", None) is not None else ()


def _facts(state: Any) -> tuple[Any, ...]:
    """Return which memory holds scales, and how often it was written if they are decoded once."""
    nested = getattr(state, "state2", None) is not None
    return tuple(
        [
            (containers.memory_of(t), t._version if nested and not t.is_inference() else 0)
            for t in _tensors_of_state(state)
            if isinstance(t, Tensor)
        ]
    )


def _tensors_of_state(state: Any) -> tuple[Tensor | None, ...]:
    absmax, nested = getattr(state, "absmax", None), getattr(state, "state2", None)
    if nested is None:
        return (absmax,)
    return (absmax, nested.absmax, nested.code, state.offset)


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
    if not is_parameter(type(weight)):
        return f"its weight is a {type(weight).__name__}, not a Params4bit"
    state = getattr(weight, "quant_state", None)
    if state is None:
        return "it is not quantized yet: bitsandbytes does that when the model moves to its device"
    if getattr(state, "packing_format_for_cpu", False):
        return "its codes are in the order of the library's CPU kernels; read it before it runs"
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
    words = weight.data
    flat = words.detach().reshape(-1) if words.is_contiguous() else words
    if flat.dtype.itemsize in (1, 2, 4):  # FSDP wants the codes in the dtype of other weights
        flat = flat.view(torch.uint8)
    why = (
        wrong_tensor("weight", flat, (rows * columns // 2,), (torch.uint8,))
        or _wrong_scales(state, rows * (columns // block))
        or containers.wrong_bias(module.bias, rows)
        or containers.other_device(flat, *_tensors_of_state(state), module.bias)
    )
    if why:
        return why
    coding = coding_of(rows, columns, block, state.dtype, TABLES[state.quant_type])
    scales = state.absmax if state.state2 is None else _decoded_scales(weight)
    return CodedWeight(coding, view_as(coding, (flat, scales)), module.bias)


def _wrong_scales(state: Any, blocks: int) -> str | None:
    """Return why scales are not read."""
    nested = state.state2
    if nested is None:
        return wrong_tensor("absmax", state.absmax, (blocks,), (torch.float32,))
    per_scale = nested.blocksize
    if type(per_scale) is not int or per_scale <= 0:
        return f"its scales come in blocks of {per_scale!r}"
    scale_blocks = -(-blocks // per_scale)
    return (
        wrong_tensor("absmax", state.absmax, (blocks,), (torch.uint8,))
        or wrong_tensor("absmax of scales", nested.absmax, (scale_blocks,), (torch.float32,))
        or wrong_tensor("table of scales", nested.code, (_SCALE_CODES,), (torch.float32,))
        or wrong_tensor("offset of scales", state.offset, (), (torch.float32,))
    )


def _decoded_scales(weight: Any) -> Tensor:
    """Return scales that are codes as float32. They are decoded again after a change."""
    state = weight.quant_state
    facts = _facts(state)
    known = _decoded.get(weight)
    if known is not None and known[0] == facts:
        return known[1]  # type: ignore[no-any-return]
    codes, nested = state.absmax, state.state2
    with torch.no_grad(), _disable_current_modes():
        of_block = nested.absmax.repeat_interleave(nested.blocksize)[: len(codes)]
        scales = nested.code[codes.long()] * of_block + state.offset
    # The facts name addresses. The tensors there are kept, so no other tensor takes their place.
    _decoded[weight] = facts, scales, _tensors_of_state(state)
    return scales


def coding_of(
    rows: int, columns: int, block: int, computes: torch.dtype, table: tuple[float, ...]
) -> Coding:
    """Return the coding of a weight. The two codes of a byte are a dim of their own.

    Args:
        rows: Outputs of the linear.
        columns: Its inputs.
        block: How many columns share a scale.
        computes: The dtype that the weight is decoded to.
        table: What codes stand for.
    """
    groups = columns // block
    of_codes, of_scales = [(rows, columns)], [(rows, groups)]
    if groups > 1:
        of_codes.append((groups, block))
        of_scales.append((groups, 1))
    of_codes += [(block // 2, 2), (2, -1)]
    of_scales += [(1, 1), (1, 1)]
    codes, scales = Stored.of(of_codes, torch.uint4), Stored.of(of_scales, torch.float32)
    return Coding(rows, columns, computes, codes, scales, table=table)
