"""Launch hand-written kernels, with the helper that launches generated kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf import errors
from mirage_hf.codegen import launching
from mirage_hf.codegen.compile import prepare_triton

#: Rows of a batch: the last block of some kernels holds the state of all of them at once.
MAX_ROWS = 128
MAX_VOCAB = 1 << 20


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """A `@triton.jit` kernel with its sizes.

    The kernel's parameters are its tensors, then `overlaps`, then `constants` in this order.

    Attributes:
        kernel: The `@triton.jit` function.
        grid: Number of blocks.
        constants: Values of the constexprs, except `overlaps`.
    """

    kernel: Any
    grid: int
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        prepare_triton()


def launch(what: KernelLaunch, tensors: Sequence[Tensor]) -> None:
    """Launch a kernel on the tensors' device, on its current stream.

    The first launch for given sizes and dtypes compiles, so it must not be captured.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(what, tensors)
    launching.launch_with_constants(
        what.kernel,
        what.grid,
        tensors,
        num_warps=what.num_warps,
        num_stages=what.num_stages,
        constants=what.constants,
    )


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Check that a tensor fits a kernel, which would otherwise read or write outside of it.

    Raises:
        InputError: The tensor has another shape, dtype or device, or is not contiguous.
    """
    if (
        tuple(tensor.shape) != tuple(shape)
        or tensor.dtype != dtype
        or tensor.device != device
        or not tensor.is_contiguous()
    ):
        raise errors.InputError(
            f"decode: {name} is {tensor.dtype} {errors.shape(tensor.shape)}, "
            f"strides {errors.shape(tensor.stride())}, on {tensor.device}; "
            f"it must be {dtype} {errors.shape(shape)} on {device}, contiguous"
        )
