"""The programs of parts, run op by op with torch. Probes use them in place of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.layers.compose import Kernel
from mirage_hf.layers.part import Part
from mirage_hf.patterns.lora import BlockAdapters
from mirage_hf.patterns.schema import PatternBlock


def program_in_dtype(
    block: PatternBlock, rows: int, dtype: torch.dtype, **changes: Any
) -> KernelGraph:
    """Return a block's program with one dtype for everything that has one."""
    dtypes: dict[str, Any] = {}
    for name, size in block.sizes:
        if isinstance(size, torch.dtype):
            dtypes[name] = dtype
        elif isinstance(size, BlockAdapters):
            dtypes[name] = size.in_dtype(dtype)
    return block.program(rows, **dtypes, **changes)


def torch_kernels(
    parts: Sequence[Part], rows: int, dtype: torch.dtype, slots: int | None = None
) -> dict[str, Kernel]:
    """Return what runs the program of each part with torch, by role.

    Args:
        parts: The parts of one module.
        rows: The number of rows, one token each.
        dtype: The dtype of everything that has one.
        slots: The slots of the cache, for parts over a cache.
    """

    def kernel(part: Part) -> Kernel:
        over_cache = part.block.pattern.over_cache and slots is not None
        caches = {"slots": slots} if over_cache else {}
        program = program_in_dtype(part.block, rows, dtype, **caches)
        return lambda inputs: run_kernel_graph(program, inputs)

    return {part.role: kernel(part) for part in parts}
