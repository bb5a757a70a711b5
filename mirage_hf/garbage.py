"""Hold Python's garbage collector back, and spare it objects that exist already."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_blocks = 0
_was_enabled = False
_sparing = 0


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


@contextmanager
def sparing_old_objects() -> Iterator[None]:
    """Let the collector skip the objects that exist when the block begins, until it ends.

    With torch and transformers, a process has some 400,000, and the collector would look at all of
    them many times. Cyclic garbage from before the block is collected after it. If the caller has
    frozen objects (`gc.freeze`), nothing is done. What is frozen in the block is thawed at its end.
    """
    global _sparing
    with _lock:
        spares = _sparing > 0 or not gc.get_freeze_count()
        if spares and not _sparing:
            gc.freeze()
        _sparing += spares
    try:
        yield
    finally:
        with _lock:
            _sparing -= spares
            if spares and not _sparing:
                gc.unfreeze()
