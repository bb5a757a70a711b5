"""The dtypes that tensors of a graph may have."""

from __future__ import annotations

import torch

from mirage_hf import errors

#: Supported dtypes by name.
DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}

#: The dtypes that ops compute with. Integers are moved and compared, as positions and bounds.
COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a dtype given by itself or by its name ("float16" or "torch.float16").

    Raises:
        DTypeError: If the package does not support the dtype.
    """
    known = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if known not in DTYPES.values():
        raise errors.unknown_dtype(dtype, DTYPES)
    return known


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")
