"""What library calls take, at the rates by which the core ranks kernels, so that windows of a program and calls compare."""

from __future__ import annotations

import math

from mirage_hf.gpus import H200, Device
from mirage_hf.graph.kernel import DTensor, KernelOp

VIEWS = ("permute", "reshape", "slice")
"""Ops that launch nothing; a reshape that no strides describe copies, see `copies`."""

_REACHED = 0.85
"""The part of the bandwidth that library kernels reach (as in tune/cost.py)."""


def bytes_of(t: DTensor) -> int:
    return math.prod(d for d, s in zip(t.dims, t.strides, strict=True) if s) * t.dtype.itemsize


def call_us(op: KernelOp, device: Device = H200) -> float:
    """Estimate a library call in µs: a launch, its operands and results once through memory, or its multiplications; views are free."""
    if op.name in VIEWS:
        return 0.0
    tensors = [t for t in (*op.inputs, *op.outputs) if isinstance(t, DTensor)]
    ops = math.prod(op.outputs[0].dims) * tensors[0].dims[-1] if op.name == "matmul" else 0
    bytes_us = sum(map(bytes_of, tensors)) / _bytes_per_us(device)
    products_us = ops / (device.mma_rate / 2 / 1e6)
    return device.launch_us + device.latency_us + max(bytes_us, products_us)


def copy_us(t: DTensor, device: Device = H200) -> float:
    """Estimate a copy of a tensor."""
    return device.launch_us + device.latency_us + 2 * bytes_of(t) / _bytes_per_us(device)


def _bytes_per_us(device: Device) -> float:
    return _REACHED * (device.bandwidth / 1e6)
