"""What library calls take, at the rates by which the core ranks kernels, so that windows of a program and calls compare."""

from __future__ import annotations

import math

from mirage_hf.graph.kernel import DTensor, KernelOp

VIEWS = ("permute", "reshape", "slice")
"""Ops that launch nothing; a reshape that no strides describe copies, see `copies`."""

_LAUNCH_US, _LATENCY_US = 1.16, 1.5
_BYTES, _MATRIX_OPS = 4.47e6, 345e6
"""Per µs, of the H200 that csrc/core/gpu_rates.h describes; tests keep them equal."""
_REACHED = 0.85
"""The part of the bandwidth that library kernels reach (as in tune/cost.py)."""


def bytes_of(t: DTensor) -> int:
    return math.prod(d for d, s in zip(t.dims, t.strides, strict=True) if s) * t.dtype.itemsize


def call_us(op: KernelOp) -> float:
    """Estimate a library call in µs: a launch, its operands and results once through memory, or its multiplications; views are free."""
    if op.name in VIEWS:
        return 0.0
    tensors = [t for t in (*op.inputs, *op.outputs) if isinstance(t, DTensor)]
    ops = math.prod(op.outputs[0].dims) * tensors[0].dims[-1] if op.name == "matmul" else 0
    return (
        _LAUNCH_US
        + _LATENCY_US
        + max(sum(map(bytes_of, tensors)) / (_REACHED * _BYTES), ops / _MATRIX_OPS)
    )


def copy_us(t: DTensor) -> float:
    """Estimate a copy of a tensor."""
    return _LAUNCH_US + _LATENCY_US + 2 * bytes_of(t) / (_REACHED * _BYTES)
