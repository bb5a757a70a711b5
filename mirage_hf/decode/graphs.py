"""Capture in a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mirage_hf.garbage import no_garbage_collection

#: Runs on the side stream before a capture. Libraries that initialise themselves lazily (cuBLAS,
#: Triton, autotuners) must not do so during a capture.
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

    Graphs that share a pool must never be replayed at the same time: a pool belongs to one block.

    Args:
        run: Reads and writes static tensors only, and may run any number of times without a lasting
            effect.
        device: The GPU.
        pool: A pool to share, None for a new one.

    Raises:
        RuntimeError: `run` synchronises with the host. What `run` raises passes through.
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
            # thread_local: what other threads do to the device does not break this capture
            with (
                no_garbage_collection(),
                torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
            ):
                # cuBLAS keeps a workspace for each stream, which torch frees when torch.compile
                # records a graph. A graph of ours that still used it would fail in a later replay.
                # So it is cleared here, and allocated during the capture in the graph's own pool.
                # Then it is cleared again so that nothing else uses it. It is not cleared before
                # the capture, where torch.cuda.graph gives free memory back to the driver. Another
                # thread may then be about to launch a product with its workspace.
                torch._C._cuda_clearCublasWorkspaces()
                with NumbersFilledIn():
                    run()
                torch._C._cuda_clearCublasWorkspaces()
        finally:
            # a capture that fails to end leaves torch on the side stream
            torch.cuda.set_stream(current)
        return graph, pool
