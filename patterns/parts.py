"""RMSNorm and RoPE as parts of blocks' programs, rounded as transformers rounds them."""
from __future__ import annotations

import torch

from mirage_hf.graph.kernel import DTensor, KernelGraph


def rms_norm(g: KernelGraph, x: DTensor, name: str, eps: float, offset: float = 0.0) -> DTensor:
    """x / sqrt(mean(x²) + eps) · (offset + w) over the last dim; w is a new input (1, d). What needs an offset adds it in float32."""
    dtype = x.dtype
    weight = g.new_input((1, x.dims[-1]), dtype, name=name, constant=True)
    if not offset:
        return g.rms_norm(x, weight, eps)
    if dtype.itemsize < 4:
        x, weight = g.cast(x, torch.float32), g.cast(weight, torch.float32)
    y = g.rms_norm(x, g.add(weight, offset), eps)
    return g.cast(y, dtype) if dtype.itemsize < 4 else y


def turned(g: KernelGraph, x: DTensor, cos: DTensor, sin: DTensor, interleaved: bool = False) -> DTensor:
    """RoPE by tables in the dtype of x, or in float32, in which it is then computed."""
    if cos.dtype == x.dtype:
        return g.rope(x, cos, sin, interleaved=interleaved)
    return g.cast(g.rope(g.cast(x, cos.dtype), cos, sin, interleaved=interleaved), x.dtype)
