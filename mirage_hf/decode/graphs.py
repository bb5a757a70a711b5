"""Capturing a step in a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 3
"""Runs on the side stream before a capture: lazy initialisation (cuBLAS, Triton, autotuners) must not be captured."""

_one_capture = threading.Lock()
# torch.cuda.graph synchronises the device on entry, which fails while another thread of ours is capturing


def can_capture(device: torch.device) -> str | None:
    """Return why steps on this device are not captured, or None."""
    return None if device.type == "cuda" else f"no graphs on {device.type}"


def capture(
    run: Callable[[], None], device: torch.device, pool: Any | None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Warm `run` up, capture it, and return the graph and the memory pool it lives in.

    `run` reads and writes static tensors only and may be run any number of times without a lasting effect.
    Graphs that share a pool must never be replayed at the same time: the pool belongs to one cache block.
    Errors: whatever `run` raises, and RuntimeError where it synchronises with the host.
    """
    with _one_capture, torch.cuda.device(device):
        current = torch.cuda.current_stream(device)
        side = torch.cuda.Stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        try:
            # cuBLAS keeps a workspace per stream in memory that torch frees whenever torch.compile records a graph of its
            # own; a graph that still used it would fail at some later replay. Cleared here, the workspace is allocated
            # during the capture, in the graph's own pool, and cleared again it serves nobody else.
            # thread_local: what other threads do to the device meanwhile does not break this capture
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                # not before: torch.cuda.graph gives free memory back to the driver, and another thread may be about to launch a
                # product with its workspace, which is cleared too
                torch._C._cuda_clearCublasWorkspaces()
                run()
                torch._C._cuda_clearCublasWorkspaces()
        finally:
            # a capture that fails to end leaves torch on the side stream
            torch.cuda.set_stream(current)
        return graph, pool
