"""Tensors of torchao for a weight, or for the weights of all experts, and what they stand for.

The library makes them itself. Two of its steps need what a CPU does not have, so they are written
here: mslk's `int4_row_quantize_zp` and `pack_int4`, and torch's CUDA op for tiles. If mslk can be
imported (`MSLK_PYTHON_ONLY=1` without a GPU), its own functions run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn


def pack_int4(codes: Tensor) -> Tensor:
    """Return bytes of two codes each (rows, columns / 2), the first in the low bits, as mslk's."""
    return codes[:, ::2] & 15 | codes[:, 1::2] << 4


def int4_row_quantize_zp(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes −8 to 7, and scales and zeros (groups, rows), as mslk's.

    A weight is code · scale + zero.
    """
    groups = x.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (high - low).clamp(min=1e-6) / 15
    codes = ((groups - low) / scales).round().clamp(0, 15) - 8
    zeros = low + scales * 8
    return (codes.flatten(1).to(torch.int8), *(t[..., 0].T.contiguous() for t in (scales, zeros)))


def tiles_of(pairs: Tensor, inner: int) -> Tensor:
    """Return codes in the order of torch's CUDA kernel `matrix_to_m16n8k16_Bint4_layout`.

    Args:
        pairs: Bytes (rows, columns / 2) of two codes each, the first in the high bits.
        inner: Tiles of 16 columns in a block.
    """
    rows, columns = pairs.shape[0], 2 * pairs.shape[1]
    sizes = rows // 8, columns // (inner * 16), 32, inner // 2
    n, k, lane, word = torch.meshgrid(*(torch.arange(s) for s in sizes), indexing="ij")
    first = (k * inner + 2 * word) * 8 + lane % 4
    out = torch.zeros(sizes, dtype=torch.int64)
    for place, at in enumerate((0, 4, 8, 12)):
        both = pairs.long()[n * 8 + lane // 4, first + at]
        out |= (both >> 4) << 4 * place | (both & 15) << 4 * place + 16
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def of_bytes(config: str, **settings: Any) -> Callable[[Tensor], tuple[Any, Tensor]]:
    """Return what makes tensors of a weight-only config whose codes have a byte each.

    It gives the tensor, and its weights in float64.
    """

    def make(weight: Tensor) -> tuple[Any, Tensor]:
        library = pytest.importorskip("torchao.quantization")
        if "group" in settings:
            granularity = library.PerGroup(settings["group"])
        else:
            granularity = library.PerRow()
        kind = getattr(library, f"{config}Tensor")
        more = {}
        if settings.get("zero_points"):
            mapping = importlib.import_module("torchao.quantization.quant_primitives").MappingType
            more["mapping_type"] = mapping.ASYMMETRIC
        made = kind.from_hp(weight, granularity=granularity, **more)
        codes, scales = made.qdata.double(), made.scale.double()
        if settings.get("zero_points"):
            assert made.zero_point.any()
        zeros = getattr(made, "zero_point", None)
        width = made.block_size[-1]
        if zeros is not None:
            codes = codes - zeros.double().repeat_interleave(width, -1)
        return made, codes * scales.repeat_interleave(width, -1)

    return make


def int4_module() -> Any:
    """Return the module of torchao that calls mslk."""
    pytest.importorskip("torchao")
    return importlib.import_module("torchao.quantization.quantize_.workflows.int4.int4_tensor")


def of_rows(group: int, symmetric: bool = False) -> Callable[[Tensor], tuple[Any, Tensor]]:
    """Return what makes an Int4Tensor, and its weights in float64."""

    def make(weight: Tensor) -> tuple[Any, Tensor]:
        with packing():
            block = [1] * (weight.dim() - 1) + [group]
            made = int4_module().Int4Tensor.from_hp(weight, block)
        if symmetric:
            made.zero_point.zero_()
        return made, weights_of_rows(made)

    return make


@contextmanager
def packing() -> Iterator[None]:
    """Let torchao make Int4Tensors without mslk."""
    library = int4_module()
    with ExitStack() as patches:
        if library.pack_int4 is None:
            own = {"pack_int4": pack_int4, "int4_row_quantize_zp": int4_row_quantize_zp}
            patches.enter_context(mock.patch.multiple(library, **own))
        yield


def weights_of_rows(x: Any) -> Tensor:
    """Return what an Int4Tensor stands for, in float64."""
    pairs = x.qdata.to(torch.int8)
    codes = torch.stack([pairs << 4 >> 4, pairs >> 4], -1).flatten(-2).double()
    scales, zeros = (
        t.double().transpose(-1, -2).repeat_interleave(x.block_size[-1], -1)
        for t in (x.scale, x.zero_point)
    )
    return codes * scales + zeros


def with_decoded(model: nn.Module) -> nn.Module:
    """Give experts the weights that their tensors of torchao stand for, in place."""
    for module in model.modules():
        for name in ("gate_up_proj", "down_proj"):
            held: Any = module._parameters.get(name)
            if held is None:
                continue
            is_rows = type(held).__name__ == "Int4Tensor"
            weight = weights_of_rows(held) if is_rows else held.dequantize()
            setattr(module, name, nn.Parameter(weight.to(held.dtype), requires_grad=False))
    return model


def of_tiles(group: int) -> Callable[[Tensor], tuple[Any, Tensor]]:
    """Return what makes an Int4TilePackedTo4dTensor, and its weights in float64."""

    def make(weight: Tensor) -> tuple[Any, Tensor]:
        pytest.importorskip("torchao")
        library = importlib.import_module("torchao.quantization.quantize_.workflows")
        given: list[Tensor] = []

        def convert(pairs: Tensor, inner: int) -> Tensor:
            given.append(pairs)
            return tiles_of(pairs, inner)

        with ExitStack() as patches:
            if not weight.is_cuda:
                patched = mock.patch.object(torch.ops.aten, "_convert_weight_to_int4pack", convert)
                patches.enter_context(patched)
                capability = mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0))
                patches.enter_context(capability)
            block = [1] * (weight.dim() - 1) + [group]
            made = library.Int4TilePackedTo4dTensor.from_hp(weight, block)
        *_, rows, columns = weight.shape
        pairs = torch.stack(given).view(*weight.shape[:-2], rows, -1).long()
        codes = torch.stack([pairs >> 4, pairs & 15], -1).flatten(-2).double() - 8
        scales, zeros = made.scale_and_zero.double().transpose(-3, -2).unbind(-1)
        weights = codes * scales.repeat_interleave(group, -1)
        weights += zeros.repeat_interleave(group, -1)
        return made, weights[..., :columns]

    return make


def empty_bytes(kind: str, shape: torch.Size) -> Any:
    """Return an empty Int8Tensor or Float8Tensor on the meta device, with scales for rows."""
    library = pytest.importorskip("torchao.quantization")
    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return getattr(library, f"{kind}Tensor").from_hp(weight, granularity=library.PerRow())


def empty_rows(shape: torch.Size, group: int = 128) -> Any:
    """Return an empty Int4Tensor on the meta device."""
    experts, rows, columns = shape
    codes = torch.empty(experts, rows, columns // 2, dtype=torch.int8, device="meta")
    scales = torch.empty(experts, columns // group, rows, dtype=torch.bfloat16, device="meta")
    return int4_module().Int4Tensor(codes, scales, scales.clone(), [1, 1, group], shape)


def empty_tiles(shape: torch.Size, group: int = 128) -> Any:
    """Return an empty Int4TilePackedTo4dTensor on the meta device."""
    pytest.importorskip("torchao")
    library = importlib.import_module("torchao.quantization.quantize_.workflows")
    experts, rows, columns = shape
    padded = -(-columns // 1024) * 1024
    codes = torch.empty(experts, rows // 8, padded // 128, 32, 4, dtype=torch.int32, device="meta")
    both = torch.empty(experts, padded // group, rows, 2, dtype=torch.bfloat16, device="meta")
    return library.Int4TilePackedTo4dTensor(codes, both, [1, 1, group], shape)
