"""Integers that sort like floating-point numbers."""

from __future__ import annotations

import torch

from mirage_hf.codegen.optional_triton import tl, triton

#: The dtypes that embeddings, rotary tables, logits and scores may have.
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def total_order(x):
    """Compute key(x) = sign(x) · bits(|x|), an int32 tensor; key(NaN) = 2³¹ − 1.

    x <= y if and only if key(x) <= key(y); -0.0 equals 0.0, and every NaN is above everything else.

    References: "Radix tricks" (M. Herf, 2001), with sign and magnitude in place of flipped bits.
    """
    if x.dtype == tl.float16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        size = bits & 0x7FFF
        infinity = 0x7C00
    elif x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        size = bits & 0x7FFF
        infinity = 0x7F80
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        infinity = 0x7F800000
    return tl.where(size > infinity, 0x7FFFFFFF, tl.where(bits < 0, -size, size))
