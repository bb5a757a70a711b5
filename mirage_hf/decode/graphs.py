"""Capture in a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mirage_hf.cublas_workspaces import own_workspaces
from mirage_hf.garbage import no_garbage_collection

#: Runs before a capture. Libraries that initialise themselves lazily (cuBLAS, Triton, autotuners)
#: must not do so during a capture.
WARM_UPS = 3

# torch.cuda.graph synchronises the device on entry, which fails while another thread captures
_one_capture = threading.Lock()


def why_no_capture(device: torch.device) -> str | None:
    """Return why steps on this device are not captured, or None if they are."""
    return None if device.type == "cuda" else f"no graphs on {device.type}"


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's stream on a device is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class NumbersFilledIn(TorchFunctionMode):
    """Create tensors of one number by `torch.full`, which a CUDA graph can capture.

    `torch.tensor` copies the number from the host. transformers calls it for masks that are added
    to scores.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        is_number = (
            function is torch.tensor and len(args) == 1 and type(args[0]) in (bool, int, float)
        )
        if is_number and kwargs.keys() <= {"dtype", "device"}:
            return torch.full((), args[0], **kwargs)
        return function(*args, **kwargs)


def capture(
    run: Callable[[], None], device: torch.device, pool: Any | None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Warm `run` up, capture it, and return the graph and the memory pool it lives in.

    The warm-ups run on the caller's stream, because torch keeps a workspace of cuBLAS for each
    stream. Graphs that share a pool must never be replayed at the same time: a pool belongs to one
    block.

    Args:
        run: Reads and writes static tensors only, and may run any number of times without a lasting
            effect.
        device: The GPU.
        pool: A pool to share, None for a new one.

    Raises:
        RuntimeError: `run` synchronises with the host. What `run` raises passes through.
    """
    with _one_capture, torch.cuda.device(device):
        for _ in range(WARM_UPS):
            run()
        current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        try:
            # thread_local: what other threads do to the device does not break this capture.
            # Workspaces are not freed before torch.cuda.graph, which gives free memory back to the
            # driver: another thread may be about to launch a product with its workspace.
            with (
                no_garbage_collection(),
                torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
                own_workspaces(),
                NumbersFilledIn(),
            ):
                run()
        finally:
            # a capture that fails to end leaves torch on the side stream
            torch.cuda.set_stream(current)
        return graph, pool
