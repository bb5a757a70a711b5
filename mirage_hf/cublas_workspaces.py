"""Let a captured CUDA graph own the workspaces of its cuBLAS products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Allocate the workspaces of products in this block, a capture, in the graph's own pool.

    cuBLAS keeps a workspace of 32 MiB for each stream. torch frees them all when torch.compile
    records a graph, and so does this block. A graph that still used one of them would fail in a
    later replay. So they are freed when the block begins, and the products allocate others. These
    are freed when it ends, so that nothing but the graph uses them.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
