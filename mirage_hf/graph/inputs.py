"""Check the tensors that a graph is called with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirage_hf import errors
from mirage_hf.graph.coded import storage
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.ops import table
from mirage_hf.ops.dtypes import BYTE_DTYPES


def check_tensors(graph: KernelGraph, inputs: Sequence[torch.Tensor]) -> None:
    """Check that `inputs` is a list of tensors, one for each of `graph.inputs`.

    Raises:
        InputError: If it is not.
    """
    if not isinstance(inputs, (list, tuple)) or len(inputs) != len(graph.inputs):
        got = type(inputs).__name__
        if isinstance(inputs, torch.Tensor):
            got = "one tensor"
        elif isinstance(inputs, (list, tuple)):
            got = str(len(inputs))
        raise errors.InputError(
            f"expected a list of {len(graph.inputs)} tensors in the order of graph.inputs, "
            f"got {got}"
        )
    for i, (t, x) in enumerate(zip(graph.inputs, inputs, strict=True)):
        if not isinstance(x, torch.Tensor):
            raise errors.InputError(
                f"input {i} ({t.name}): expected a torch tensor, got {type(x).__name__}"
            )


def check_inputs(
    graph: KernelGraph, inputs: Sequence[torch.Tensor], device_type: str | None = None
) -> None:
    """Check that `inputs` fit the inputs of a graph, and are all on one device.

    Args:
        graph: The graph.
        inputs: One tensor per input of the graph, with the input's dims, dtype and strides.
        device_type: "cuda" or "cpu". None: any.

    Raises:
        InputError: If a tensor differs from its input, or is on another device.
    """
    check_tensors(graph, inputs)
    device = None
    for i, (t, x) in enumerate(zip(graph.inputs, inputs, strict=True)):
        where = f"input {i} ({t.name})"
        _check_input(t, x, where)
        if device is not None and x.device != device:
            raise errors.InputError(
                f"{where}: is on {x.device}, earlier inputs are on {device}; "
                "move all inputs to one device"
            )
        device = x.device
    if device_type is not None and device is not None and device.type != device_type:
        raise errors.InputError(
            f"inputs are on {device}, this kernel runs on {device_type}; "
            "move them, or choose another backend"
        )


def _check_input(t: DTensor, x: torch.Tensor, where: str) -> None:
    stored = storage(t)
    if tuple(x.shape) != stored.dims:
        raise errors.InputError(
            f"{where}: built for shape {errors.shape(stored.dims)}, got {errors.shape(x.shape)}; "
            "superoptimize a graph of that shape"
        )
    if x.dtype != stored.dtype:
        raise errors.InputError(
            f"{where}: built for {table.dtype_name(stored.dtype)}, "
            f"got {table.dtype_name(x.dtype)}; "
            "convert it, or build the graph with that dtype"
        )
    if x.device.type == "cuda" and t.dtype in BYTE_DTYPES and x.storage_offset() % 4:
        raise errors.InputError(
            f"{where}: begins at byte {x.storage_offset()} of its memory, and kernels read codes "
            "as words of 4 bytes; call .clone()"
        )
    strides = zip(x.stride(), stored.strides, stored.dims, strict=True)
    if any(ours != theirs for ours, theirs, size in strides if size > 1):
        raise errors.InputError(
            f"{where}: built for strides {errors.shape(stored.strides)}, "
            f"got {errors.shape(x.stride())}; "
            "call .contiguous(), or give strides= at new_input"
        )
