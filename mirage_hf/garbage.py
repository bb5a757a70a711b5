"""Hold Python's garbage collector back while a CUDA graph is captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_blocks = 0
_was_enabled = False


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Let no thread collect garbage by itself in this block.

    Garbage may hold CUDA graphs and kernels. If the collector frees one of them while a graph is
    captured, CUDA ends the capture with an error. Code that switches the collector on or off in the
    meantime is not stopped.
    """
    global _blocks, _was_enabled
    with _lock:
        if not _blocks:
            _was_enabled = gc.isenabled()
            gc.disable()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks and _was_enabled:
                gc.enable()
