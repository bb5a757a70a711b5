"""The dtypes that tensors of a graph may have."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mirage_hf import errors

#: Supported dtypes by name.
DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint4": torch.uint4,
    "int4": torch.int4,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
}

#: The dtypes that ops compute with. Integers are moved and compared, as positions and bounds.
COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: The dtypes of codes. A code is a number that kernels convert as they load it. Only inputs have
#: such dtypes, and the op `cast` reads them.
CODE_DTYPES = (
    torch.uint4,
    torch.int4,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
)

#: The dtypes of codes of a byte that kernels may load as words of four.
BYTE_DTYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn)

#: The dtypes of codes that share a word of memory. int4 codes are in two's complement.
PACKED_DTYPES = (torch.uint4, torch.int4)

#: The numbers that the codes of a 4-bit float stand for: a sign, two bits of exponent and one of
#: mantissa (e2m1).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

#: How many codes of 4 bits one int32 word holds. The first code is in the lowest bits.
CODES_PER_WORD = 8


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


def factor_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the dtype that computed factors have on tensor cores, given those of the operands.

    It is that of the operands of 16 bits, and bfloat16, whose range is larger, if both are among
    them. None if no operand has 16 bits.
    """
    found = {*dtypes}
    return next((d for d in (torch.bfloat16, torch.float16) if d in found), None)


def can_be_added(dtype: torch.dtype) -> bool:
    """Return False for floats of 8 bits, which GPUs convert but do not add."""
    return not (dtype.is_floating_point and dtype.itemsize == 1)


def element_bytes(dtype: torch.dtype) -> float:
    """Return the bytes that an element takes in memory."""
    return 4 / CODES_PER_WORD if dtype in PACKED_DTYPES else float(dtype.itemsize)
