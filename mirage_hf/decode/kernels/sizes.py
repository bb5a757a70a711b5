"""The largest sizes of the kernels, and the check of what they get."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mirage_hf import errors

#: Rows of a batch: the last block of some kernels holds the state of all of them at once.
MAX_ROWS = 128
MAX_VOCAB = 1 << 20


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
