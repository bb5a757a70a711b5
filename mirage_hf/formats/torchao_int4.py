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
from torch.utils._python_dispatch import _disable_current_modes

from mirage_hf.formats import containers
from mirage_hf.formats.coding import Coding
from mirage_hf.formats.containers import uneven, wrong_tensor
from mirage_hf.formats.stored import Stored
from mirage_hf.ops.dtypes import CODES_PER_WORD, COMPUTE_DTYPES

#: Rows and columns of a tile, and columns of the block of tiles that lies in one piece.
_TILE_ROWS, _BLOCK = 8, 128

#: Sizes to which tiles pad a weight.
_PADDED_COLUMNS = 1024


def rows_of(weight: Any, height: int, group: int) -> tuple[Coding, tuple[Tensor, ...]] | str:
    """Read an Int4Tensor, as `torchao.codes_of`.

    Args:
        weight: The tensor.
        height: The rows of a block.
        group: Its columns.
    """
    *experts, rows, columns = weight.shape
    if height != 1:
        return f"blocks of {tuple(weight.block_size)} are not read"
    why = uneven("inputs", columns, group) or uneven("inputs", columns, CODES_PER_WORD)
    if why:
        return why
    codes, scale, zero = weight.qdata, weight.scale, weight.zero_point
    dims = (*experts, columns // group, rows)
    why = (
        wrong_tensor("qdata", codes, (*experts, rows, columns // 2), (torch.int8, torch.uint8))
        or wrong_tensor("scale", scale, dims, COMPUTE_DTYPES)
        or wrong_tensor("zero_point", zero, dims, COMPUTE_DTYPES)
        or containers.other_device(codes, scale, zero)
    )
    if why:
        return why
    shifts = containers.may_hold_numbers(zero)
    coding = coding_of_rows(rows, columns, group, scale.dtype, shifts)
    return coding, (codes, scale) + ((zero,) if shifts else ())


def tiles_of(weight: Any, height: int, group: int) -> tuple[Coding, tuple[Tensor, ...]] | str:
    """Read an Int4TilePackedTo4dTensor, as `torchao.codes_of`.

    Args:
        weight: The tensor.
        height: The rows of a block.
        group: Its columns.
    """
    *experts, rows, columns = weight.shape
    if height != 1:
        return f"blocks of {tuple(weight.block_size)} are not read"
    if torch.version.hip is not None:
        return "tiles of AMD GPUs are not read"
    if group not in (32, 64, 128, 256):
        return f"tiles in groups of {group} are not read"
    why = uneven("outputs", rows, _TILE_ROWS) or uneven("inputs", columns, max(group, _BLOCK))
    if why:
        return why
    padded = -(-columns // _PADDED_COLUMNS) * _PADDED_COLUMNS
    codes, both = weight.qdata, weight.scale_and_zero
    dims = (*experts, padded // group, rows, 2)
    why = (
        wrong_tensor("qdata", codes, (*experts, *_tile_dims(rows, padded)), (torch.int32,))
        or wrong_tensor("scale_and_zero", both, dims, (torch.bfloat16,))
        or containers.other_device(codes, both)
    )
    if why:
        return why
    coding = coding_of_tiles(rows, columns, padded, group, torch.bfloat16)
    with _disable_current_modes():  # a step that is recorded holds these views, and no ops
        scales, shifts = both.detach().unbind(-1)
    return coding, (codes, scales, shifts)


def _tile_dims(rows: int, columns: int) -> tuple[int, ...]:
    return (rows // _TILE_ROWS, columns // _BLOCK, 32, 4)


def coding_of_rows(rows: int, columns: int, group: int, dtype: torch.dtype, shifts: bool) -> Coding:
    """Return the coding of signed codes, row by row. `shifts`: something is added to them."""
    groups = columns // group
    of_codes, of_values = [(rows, columns)], [(rows, 1)]
    if groups > 1:
        of_codes.append((groups, group))
        of_values.append((groups, rows))
    codes = Stored.of([*of_codes, (group, 1)], torch.int4)
    values = Stored.of([*of_values, (1, 1)], dtype)
    return Coding(rows, columns, dtype, codes, values, shifts=values if shifts else None)


def coding_of_tiles(rows: int, columns: int, padded: int, group: int, dtype: torch.dtype) -> Coding:
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
