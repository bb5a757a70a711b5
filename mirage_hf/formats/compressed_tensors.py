"""Read linears of compressed-tensors, in the state in which transformers loads them.

Such a linear is an nn.Linear with a `quantization_scheme`. Its first forward pass decompresses the
whole model, so a model must be read before it runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import compressed_tensors_fp4 as fp4
from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, view_as
from mirage_hf.formats.containers import text_of, uneven, wrong_tensor
from mirage_hf.formats.stored import Split, words_of
from mirage_hf.graph.coded import is_packed
from mirage_hf.ops.dtypes import COMPUTE_DTYPES

_SCHEME = "compressed_tensors.quantization.quant_scheme.QuantizationScheme"
_FORWARD = "compressed_tensors.quantization.lifecycle.forward"
_HOOK = "ct_decompress_hook"
_TENSORS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
)

#: Formats that hold one code in each element.
_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
_PACKED = "pack-quantized"
_PACKED_CODES = {4: torch.uint4, 8: torch.uint8}


def decoding_hooks(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Find the hooks that decompress a whole model at its first forward.

    Returns:
        The modules that have one, each with the name of the attribute that holds its handle.
    """
    found = []
    for module in model.modules():
        handle = module.__dict__.get(_HOOK)
        if handle is not None and handle.id in module._forward_pre_hooks:
            found.append((module, _HOOK))
    return found


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is a linear of this library with a quantized weight."""
    scheme: Any = getattr(module, "quantization_scheme", None)
    return (
        isinstance(module, nn.Linear)
        and containers.qualified_name(scheme) == _SCHEME
        and scheme.weights is not None
    )


def tensors(module: nn.Module) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold the weight."""
    return tuple(getattr(module, name, None) for name in _TENSORS)


def read(module: Any, dtype: torch.dtype) -> CodedWeight | Rejected:
    """Return the weight of a module that `recognizes` accepts."""
    why = _wrong_module(module) or _wrong_scheme(module.quantization_scheme)
    if why:
        return Rejected(f"compressed-tensors: {why}")
    scheme = module.quantization_scheme
    written = text_of(scheme.format)
    if written in fp4.FORMATS:
        found = fp4.read(module, scheme.weights, fp4.FORMATS[written], dtype)
    else:
        found = _read(module, scheme.weights, written == _PACKED)
    if isinstance(found, str):
        return Rejected(f"compressed-tensors: {found}")
    return replace(found, quantizes_activations=scheme.input_activations is not None)


def _wrong_module(module: Any) -> str | None:
    if containers.stock_class(module) is not nn.Linear:
        return f"its class is {type(module).__name__}"
    status = text_of(getattr(module, "quantization_status", None))
    if status == "decompressed":
        return "a forward pass has decompressed it; optimize the model before it runs"
    if status != "compressed":
        return f"its status is {status}, not compressed"
    forward = getattr(module.__dict__.get("forward"), "__func__", None)
    written_in = getattr(forward, "__globals__", {}).get("__name__")
    if written_in != _FORWARD and not containers.is_optimized(module):
        return "its forward was replaced"
    if getattr(module, "quantization_enabled", True) is not True:
        return "its quantization is switched off"
    if getattr(module, "weight_g_idx", None) is not None:
        return "its columns are grouped in another order (act-order)"
    sizes = containers.wrong_sizes(module.out_features, module.in_features)
    return sizes or containers.changed_module(module)


def _wrong_scheme(scheme: Any) -> str | None:
    args = scheme.weights
    if scheme.output_activations is not None:
        return "it quantizes its outputs"
    if args.dynamic:
        return "its weight is quantized dynamically"
    if args.actorder is not None and text_of(args.actorder) in ("group", "dynamic", "True"):
        return "its columns are grouped in another order (act-order)"
    written = text_of(scheme.format)
    if written in fp4.FORMATS:
        return None
    if written not in (_PACKED, *_PLAIN):
        return f"format {written} is not read"
    kind = text_of(args.type), args.num_bits
    if written == _PACKED and (kind[0] != "int" or kind[1] not in _PACKED_CODES):
        return f"packed {kind[0]} codes of {kind[1]} bits are not read"
    if kind[0] == "float" and kind[1] != 8:
        return f"float codes of {kind[1]} bits are not read"
    return None


def _read(module: Any, args: Any, packed: bool) -> CodedWeight | str:
    """Return the weight of a module whose scheme is known, or why it cannot be read."""
    if _get(module, "weight_global_scale") is not None:
        return "it has a global scale"
    rows, columns = module.out_features, module.in_features
    code = _code_dtype(args, packed)
    per_word = words_of(code)
    zeros_packed = packed and not args.symmetric
    strategy = text_of(args.strategy)
    height, group = 1, columns
    if strategy == "group":
        group = args.group_size
    elif strategy == "block":
        height, group = args.block_structure
    elif strategy not in ("channel", "tensor"):
        return f"scales of strategy {strategy} are not read"
    if zeros_packed and strategy in ("block", "tensor"):
        return f"zero points of strategy {strategy} are not read"
    why = uneven("inputs", columns, group) or uneven("outputs", rows, height)
    if packed:
        why = why or uneven("inputs", columns, per_word)
    if is_packed(code):
        why = why or uneven("inputs of a group", group, per_word)
    if zeros_packed:
        why = why or uneven("outputs", rows, per_word)
    if why:
        return why
    split = Split(rows, columns, per_word if zeros_packed else height, group)
    why = _wrong_tensors(module, split, args, code if packed else None, height)
    if why:
        return why
    scale = module.weight_scale
    stored = {"tensor": split.per_tensor, "block": split.per_block}.get(strategy, split.per_row)
    zeros = None
    if not args.symmetric:
        dtype = code if packed else module.weight_zero_point.dtype
        zeros = split.packed_along_rows(code, per_word) if packed else stored(dtype)
    middle = {torch.uint4: 8.0, torch.uint8: 128.0}.get(code, 0.0)
    zero = middle if zeros is None else 0.0
    coding = Coding(rows, columns, scale.dtype, split.codes(code), stored(scale.dtype), zeros, zero)
    held: tuple[Tensor, ...] = (module.weight_packed if packed else module.weight, scale)
    if zeros is not None:
        held += (module.weight_zero_point,)
    return CodedWeight(coding, view_as(coding, held), module.bias)


def _code_dtype(args: Any, packed: bool) -> torch.dtype:
    if packed:
        return _PACKED_CODES[args.num_bits]
    return torch.int8 if text_of(args.type) == "int" else torch.float8_e4m3fn


def _wrong_tensors(
    module: Any, split: Split, args: Any, packed: torch.dtype | None, height: int
) -> str | None:
    """Return what is wrong with the tensors of a module."""
    rows, columns = split.rows, split.columns
    strategy = text_of(args.strategy)
    scale_dims: tuple[int, ...] = (rows // height, split.groups)
    if strategy == "tensor":
        scale_dims = (1,)
    why = wrong_tensor("weight_scale", _get(module, "weight_scale"), scale_dims, COMPUTE_DTYPES)
    zeros = _get(module, "weight_zero_point")
    if packed is None:
        codes = _get(module, "weight")
        dtypes = (_code_dtype(args, False),)
        why = why or wrong_tensor("weight", codes, (rows, columns), dtypes)
        zero_dims, zero_dtypes = scale_dims, (torch.int8,)
    else:
        codes = _get(module, "weight_packed")
        words = columns // words_of(packed)
        why = why or wrong_tensor("weight_packed", codes, (rows, words), (torch.int32,))
        why = why or _wrong_shape(_get(module, "weight_shape"), rows, columns)
        zero_dims, zero_dtypes = (rows // words_of(packed), split.groups), (torch.int32,)
    if args.symmetric and zeros is not None:
        why = why or "it has zero points, but its scheme is symmetric"
    if not args.symmetric:
        why = why or wrong_tensor("weight_zero_point", zeros, zero_dims, zero_dtypes)
    why = why or containers.wrong_bias(module.bias, rows)
    return why or containers.other_device(codes, module.weight_scale, zeros, module.bias)


def _wrong_shape(shape: Any, rows: int, columns: int) -> str | None:
    """Return why the stored shape of a packed weight is not that of the module."""
    why = wrong_tensor("weight_shape", shape, (2,), (torch.int64, torch.int32))
    if why or shape.is_meta:
        return why
    if shape.tolist() != [rows, columns]:
        return f"weight_shape says {shape.tolist()}, the module {[rows, columns]}"
    return None


def _get(module: Any, name: str) -> Any:
    return getattr(module, name, None)
