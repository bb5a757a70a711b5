"""Estimate library calls, at the rates that the core ranks kernels by, so that both compare."""

from __future__ import annotations

import math

from mirage_hf.gpus import H200, Device
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.graph.kernel import DTensor, KernelOp

#: Ops that launch nothing. A reshape that no strides describe is a copy, see `copy_us`.
VIEWS = ("permute", "reshape", "slice")

#: The share of the bandwidth that library kernels reach, as in tune/cost.py.
_BANDWIDTH_SHARE = 0.85


def bytes_of(t: DTensor) -> int:
    """Return how many bytes a read of a tensor moves. Dims with stride 0 are read once."""
    return stored_bytes(t)


def call_us(op: KernelOp, device: Device = H200) -> float:
    """Estimate a library call in µs.

    The estimate is a launch, and the longer of two times. One is that of moving its operands and
    results through memory once. The other is that of its multiplications. Views are free.
    """
    if op.name in VIEWS:
        return 0.0
    tensors = [t for t in (*op.inputs, *op.outputs) if isinstance(t, DTensor)]
    if op.name == "take":
        tensors = [*op.outputs] * 2  # only the chosen elements move
    memory_us = sum(map(bytes_of, tensors)) / _bytes_per_us(device)
    multiplications = 0
    if op.name == "matmul":
        multiplications = math.prod(op.outputs[0].dims) * tensors[0].dims[-1]
    products_us = multiplications / (device.mma_rate / 2 / 1e6)
    return device.launch_us + device.latency_us + max(memory_us, products_us)


def copy_us(t: DTensor, device: Device = H200) -> float:
    """Estimate a copy of a tensor in µs."""
    return device.launch_us + device.latency_us + 2 * bytes_of(t) / _bytes_per_us(device)


def _bytes_per_us(device: Device) -> float:
    return _BANDWIDTH_SHARE * (device.bandwidth / 1e6)
