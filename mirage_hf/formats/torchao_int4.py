"""Read torchao's weights of 4 bits: rows of signed nibbles, and tiles for tensor cores.

Both decode to code · scale + zero, for signed codes and a float `zero`. Int4Tensor has two codes
in each byte, the first in the low bits. Int4TilePackedTo4dTensor has words in the order in which
threads of a tensor-core product want them, as `torch.ops.aten._convert_weight_to_int4pack` makes
them on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mirage_hf.formats import containers
from mirage_hf.formats.coding import CodedWeight, Coding, Stored, view_as
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.ops.dtypes import CODES_PER_WORD, COMPUTE_DTYPES

#: Rows and columns of a tile, and columns of the block of tiles that lies in one piece.
_TILE_ROWS, _BLOCK = 8, 128

#: Sizes to which tiles pad a weight.
_PADDED_COLUMNS = 1024


def read_rows(module: Any) -> CodedWeight | str:
    """Return the weight of a linear with an Int4Tensor, or why it cannot be read."""
    weight = module.weight
    rows, columns = module.out_features, module.in_features
    group = _group(weight)
    if isinstance(group, str):
        return group
    why = uneven("inputs", columns, group) or uneven("inputs", columns, CODES_PER_WORD)
    if why:
        return why
    groups = columns // group
    scale, zero = weight.scale, weight.zero_point
    why = (
        wrong_tensor("qdata", weight.qdata, (rows, columns // 2), (torch.int8, torch.uint8))
        or wrong_tensor("scale", scale, (groups, rows), COMPUTE_DTYPES)
        or wrong_tensor("zero_point", zero, (groups, rows), COMPUTE_DTYPES)
        or containers.wrong_bias(module.bias, rows)
        or containers.other_device(weight.qdata, scale, zero, module.bias)
    )
    if why:
        return why
    shifts = zero.is_meta or bool(zero.any())
    coding = _coding_of_rows(rows, columns, group, scale.dtype, shifts)
    held = (weight.qdata, scale) + ((zero,) if shifts else ())
    rounds = getattr(weight, "activation_dtype", None) is torch.float8_e4m3fn
    return CodedWeight(coding, view_as(coding, held), module.bias, rounds)


def read_tiles(module: Any) -> CodedWeight | str:
    """Return the weight of a linear with an Int4TilePackedTo4dTensor, or why it cannot be read."""
    weight = module.weight
    rows, columns = module.out_features, module.in_features
    group = _group(weight)
    if isinstance(group, str):
        return group
    if torch.version.hip is not None:
        return "tiles of AMD GPUs are not read"
    if group not in (32, 64, 128, 256):
        return f"tiles in groups of {group} are not read"
    why = uneven("outputs", rows, _TILE_ROWS) or uneven("inputs", columns, max(group, _BLOCK))
    if why:
        return why
    padded = -(-columns // _PADDED_COLUMNS) * _PADDED_COLUMNS
    both = weight.scale_and_zero
    why = (
        wrong_tensor("qdata", weight.qdata, _tile_dims(rows, padded), (torch.int32,))
        or wrong_tensor("scale_and_zero", both, (padded // group, rows, 2), (torch.bfloat16,))
        or containers.wrong_bias(module.bias, rows)
        or containers.other_device(weight.qdata, both, module.bias)
    )
    if why:
        return why
    coding = _coding_of_tiles(rows, columns, padded, group, torch.bfloat16)
    flat: Tensor = both.view(-1)
    return CodedWeight(coding, view_as(coding, (weight.qdata, flat, flat[1:])), module.bias)


def _group(weight: Any) -> int | str:
    """Return the columns of a group, or why the blocks are not groups."""
    block = tuple(weight.block_size)
    return block[1] if len(block) == 2 and block[0] == 1 else f"blocks of {block} are not read"


def _tile_dims(rows: int, columns: int) -> tuple[int, ...]:
    return (rows // _TILE_ROWS, columns // _BLOCK, 32, 4)


def _coding_of_rows(
    rows: int, columns: int, group: int, dtype: torch.dtype, shifts: bool
) -> Coding:
    """Return the coding of signed codes, row by row. `shifts`: something is added to them."""
    groups = columns // group
    of_codes, of_values = [(rows, columns)], [(rows, 1)]
    if groups > 1:
        of_codes.append((groups, group))
        of_values.append((groups, rows))
    codes = Stored.of([*of_codes, (group, 1)], torch.int4)
    values = Stored.of([*of_values, (1, 1)], dtype)
    return Coding(rows, columns, dtype, codes, values, shifts=values if shifts else None)


def _coding_of_tiles(
    rows: int, columns: int, padded: int, group: int, dtype: torch.dtype
) -> Coding:
    """Return the coding of tiles whose rows have `padded` columns, in groups of columns."""
    # Column 128 b + 32 w + 8 t + 2 l + p is code t + 4 p of word w, which lane l of a row holds.
    words = [(_TILE_ROWS, 4 * 4 * 8), (columns // _BLOCK, 32 * 4 * 8), (4, 8), (4, 1), (4, 32)]
    codes = [(rows // _TILE_ROWS, padded // _BLOCK * 32 * 4 * 8), *words, (2, 4)]
    per_group = rows * 2
    values = [(rows // _TILE_ROWS, 2 * _TILE_ROWS), (_TILE_ROWS, 2)]
    if group > _BLOCK:
        blocks = group // _BLOCK
        codes[2:3] = [(columns // group, blocks * 32 * 4 * 8), (blocks, 32 * 4 * 8)]
        values += [(columns // group, per_group)] + [(1, 1)] * 5
    elif group == _BLOCK:
        values += [(columns // _BLOCK, per_group)] + [(1, 1)] * 4
    else:
        of_block = _BLOCK // group
        codes[3:4] = [(of_block, 4 // of_block * 8), (4 // of_block, 8)]
        values += [(columns // _BLOCK, of_block * per_group), (of_block, per_group)]
        values += [(1, 1)] * 4
    stored = Stored.of(values, dtype)
    words_of_codes = Stored.of(codes, torch.uint4)
    return Coding(rows, columns, dtype, words_of_codes, stored, zero=8.0, shifts=stored)
