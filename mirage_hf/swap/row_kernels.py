"""Kernels that treat all rows of a prompt alike, for models whose prompts run their own forward."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from mirage_hf.errors import described
from mirage_hf.layers.row_chunks import RowChunks, prepare_chunk_sizes
from mirage_hf.match.plain import ALIGNMENT
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline.resolver import KernelFinder

_log = logging.getLogger("mirage_hf")

#: The numbers of rows that kernels are made for. Fewer rows run stock's ops. More numbers would
#: save launches, and make `optimize` slower.
KERNEL_ROWS = (64, 256, 1024, 4096)

#: More rows run stock's ops. Up to this number, kernels take at most four launches.
MOST_ROWS = 4 * max(KERNEL_ROWS)


def takes_rows(count: int) -> bool:
    """Return whether kernels run so many rows."""
    return min(KERNEL_ROWS) <= count <= MOST_ROWS


def is_readable(x: Tensor, device: torch.device) -> bool:
    """Return whether kernels on a device can read a tensor: its first element is aligned."""
    return x.device == device and x.data_ptr() % ALIGNMENT == 0


def chunks_of_kernels(
    blocks: Mapping[PatternBlock, torch.device], finder: KernelFinder
) -> dict[PatternBlock, RowChunks]:
    """Return what runs blocks, for all that have kernels of KERNEL_ROWS rows.

    Args:
        blocks: The blocks, each with the device of its kernels.
        finder: Finds kernels.
    """
    chunks = {
        block: RowChunks(block, device, partial(finder.resolve, pattern=block.pattern.name))
        for block, device in blocks.items()
    }
    wanted = [
        (block.program(rows), {"pattern": block.pattern.name})
        for block in chunks
        for rows in KERNEL_ROWS
    ]
    with finder.searching(wanted):
        _prepare([*chunks.values()])
    return {block: made for block, made in chunks.items() if _runs_kernels(made)}


def _prepare(kinds: Sequence[RowChunks]) -> None:
    """Make the kernels of some blocks, all at once. A block that fails stays without."""
    try:
        prepare_chunk_sizes(kinds, KERNEL_ROWS)
    except Exception as error:  # whatever failed, stock runs as before
        if len(kinds) > 1:
            for kind in kinds:
                _prepare([kind])
        else:
            name = kinds[0].block.pattern.name
            _log.info("%s: no kernels: %s", name, described(error))


def _runs_kernels(chunks: RowChunks) -> bool:
    """Return whether kernels run all chunks, and not the library."""
    made = chunks.made
    return made.keys() >= {*KERNEL_ROWS} and all(c.kernel.runs_kernel for c in made.values())
