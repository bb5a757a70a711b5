"""Let a captured CUDA graph own the workspaces of its cuBLAS products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Allocate the workspaces of products in this block, a capture, in the graph's own pool.

    torch keeps a workspace of cuBLAS for each thread and stream, of 32 MiB on Hopper. It frees all
    of them when torch.compile records a graph. A graph that still used one of them would fail in a
    later replay. So all are freed when this block begins, and its products allocate others. These
    are freed when it ends, so that nothing but the graph uses them.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
