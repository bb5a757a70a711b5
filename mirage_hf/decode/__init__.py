"""Decoding: an instance-level `generate` over a cache pool, with the step captured in a CUDA graph."""

from mirage_hf.decode.cache import CachePool
from mirage_hf.decode.generate import DecodeError, DecodeRunner, Generate, install, uninstall
from mirage_hf.decode.program import CapturedForward, Step

__all__ = [
    "CachePool",
    "CapturedForward",
    "DecodeError",
    "DecodeRunner",
    "Generate",
    "Step",
    "install",
    "uninstall",
]
