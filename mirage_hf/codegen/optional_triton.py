"""Triton where it is installed, else stand-ins that let the kernels' files be imported.

Triton has packages for Linux only. On other systems decoding runs the torch versions of the
kernels.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _NoTriton:
        """Leaves functions and constants as they are. Nothing compiles or launches them."""

        @staticmethod
        def jit(function: Any) -> Any:
            return function

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

    triton = tl = _NoTriton()

__all__ = ["HAS_TRITON", "tl", "triton"]
