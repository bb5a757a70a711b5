"""The kernel of a step of a short convolution (trace/short_convolution.py)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, library

from mirage_hf.codegen.kernel_launch import KernelLaunch, launch
from mirage_hf.codegen.optional_triton import HAS_TRITON, tl, triton
from mirage_hf.ops.dtypes import COMPUTE_DTYPES
from mirage_hf.trace.short_convolution import short_convolution

#: Channels of a block.
BLOCK = 128
#: The longest state that the kernel takes. It keeps the inputs of a channel in registers.
MAX_LENGTH = 8


@triton.jit
def short_convolution_kernel(
    state_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    overlaps: tl.constexpr,
    COUNT: tl.constexpr,
    CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    X_BATCH: tl.constexpr,
    X_CHANNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute y = sum(weight · window), where the window is the state and x; shift the state.

    COUNT rows of the state have LENGTH inputs each. A block has BLOCK of them.

    References: `trace.short_convolution.short_convolution` does the same with torch.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < COUNT
    channel = n % CHANNELS
    x = tl.load(x_ptr + n // CHANNELS * X_BATCH + channel * X_CHANNEL, mask=inside, other=0.0)
    total = x.to(tl.float32) * tl.load(
        weight_ptr + channel * WIDTH + WIDTH - 1, mask=inside, other=0.0
    ).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(LENGTH):
        old = tl.load(state_ptr + n * LENGTH + k, mask=inside, other=0.0)
        if k >= LENGTH + 1 - WIDTH:
            weight_at = k + WIDTH - 1 - LENGTH
            weight = tl.load(weight_ptr + channel * WIDTH + weight_at, mask=inside, other=0.0)
            total += old.to(tl.float32) * weight.to(tl.float32)
        tl.debug_barrier()  # all threads have read this input, and those before it
        if k > 0:
            tl.store(state_ptr + n * LENGTH + k - 1, old, mask=inside)
    tl.store(state_ptr + n * LENGTH + LENGTH - 1, x, mask=inside)
    y = total.to(y_ptr.dtype.element_ty)
    if SILU:
        wide = y.to(tl.float32)
        y = (wide / (1.0 + tl.exp(-wide))).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + n, y, mask=inside)


def convolve(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Shift x into the state, and convolve the last inputs of each channel, by the kernel.

    Memory in another order, states that are too long and other dtypes are left to torch.
    """
    batch, channels, length = state.shape
    dense = all(t is None or t.is_contiguous() for t in (state, weight, bias))
    known = x.dtype in COMPUTE_DTYPES and length <= MAX_LENGTH
    if not HAS_TRITON or not dense or not known:
        return short_convolution(state, x, weight, bias, silu)
    y = torch.empty(batch, channels, 1, dtype=x.dtype, device=x.device)
    what = convolution_launch(
        batch, channels, length, weight.shape[2], x.stride()[:2], bias is not None, silu
    )
    launch(what, [state, x, weight, weight if bias is None else bias, y])
    return y


@lru_cache(maxsize=256)
def convolution_launch(
    batch: int,
    channels: int,
    length: int,
    width: int,
    strides: tuple[int, int],
    has_bias: bool,
    silu: bool,
) -> KernelLaunch:
    """Return the kernel for these sizes, and strides of x."""
    constants = {
        "COUNT": batch * channels,
        "CHANNELS": channels,
        "LENGTH": length,
        "WIDTH": width,
        "X_BATCH": strides[0],
        "X_CHANNEL": strides[1],
        "HAS_BIAS": has_bias,
        "SILU": silu,
        "BLOCK": BLOCK,
    }
    return KernelLaunch(
        short_convolution_kernel, -(-batch * channels // BLOCK), constants, num_warps=4
    )


library.impl("mirage_hf::short_convolution", "CUDA", convolve)
