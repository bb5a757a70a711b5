"""List tiles for kernels that decode weights and multiply nothing, such as those of prompts.

These kernels move whole weights, so both their reads and their writes must lie side by side. If a
weight is stored by columns, its codes follow each other along other axes than the results. So a
tile is long along both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from mirage_hf.codegen.schedule import Tiles, next_power_of_two
from mirage_hf.graph.block import BlockGraph, BlockInput, Role
from mirage_hf.graph.kernel import DTensor, KernelOp

#: Elements to try along the codes, and along the results.
_LENGTHS = tuple(1 << n for n in range(3, 14))

#: Least and most elements of a tile.
_LEAST, _MOST = 512, 16384


def decoding_tiles(
    op: KernelOp, codes: BlockInput, whole_words: Mapping[str | None, int]
) -> list[Tiles]:
    """Return the tiles to try. Empty if the kernel has a loop, or an axis that is held whole.

    Args:
        op: The op of the kernel.
        codes: The input that holds the codes.
        whole_words: The axes along which words hold codes, with the least tile that has whole
            words.
    """
    block = op.block
    assert block is not None
    if any(a.role is not Role.GRID for a in block.axes):
        return []
    operands = tuple(t for t in op.inputs if isinstance(t, DTensor))
    along_codes = _by_stride(block, codes.axes, operands[codes.sources[0]].strides)
    along_results = _by_stride(block, block.outputs[0].axes, op.outputs[0].strides)
    found = {}
    for lengths in itertools.product(_LENGTHS, _LENGTHS):
        tiles = {a.name: whole_words.get(a.name, 1) for a in block.axes}
        for axes, length in zip((along_codes, along_results), lengths, strict=True):
            for name, tile in _tiles_along(block, axes, length, whole_words):
                tiles[name] = max(tiles[name], tile)
        if _LEAST <= math.prod(tiles.values()) <= _MOST:
            found[tuple(tiles.values())] = Tiles(tiles)
    return list(found.values())


def _by_stride(block: BlockGraph, axes: Sequence[str | None], strides: Sequence[int]) -> list[str]:
    """Return the axes of a tensor that have several elements, the closest ones first."""
    pairs = zip(axes, strides, strict=True)
    kept = [(abs(s), a) for a, s in pairs if a is not None and s and block.split_size(a) > 1]
    return [a for _, a in sorted(kept)]


def _tiles_along(
    block: BlockGraph, axes: Sequence[str], length: int, whole_words: Mapping[str | None, int]
) -> Iterator[tuple[str, int]]:
    """Yield the tiles of axes for so many elements, which lie side by side as far as possible.

    Whole words of codes must divide an axis. If that makes a tile short, it spans the next axis.
    """
    for name in axes:
        size = block.split_size(name)
        wanted = min(length, next_power_of_two(size))
        tile = math.gcd(wanted, size) if name in whole_words else wanted
        yield name, tile
        length //= tile
        if length <= 1 or tile == wanted < size:
            return
