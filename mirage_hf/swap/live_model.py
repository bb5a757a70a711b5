"""Care that changes to a live model take: one thread at a time, and no memory left behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_one_at_a_time = threading.Lock()
_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


@contextmanager
def locked(model: nn.Module) -> Iterator[None]:
    """Let threads that optimize or restore one model take turns.

    A module that two threads swap at the same time could not be put back.
    """
    with _one_at_a_time:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        yield


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one. Wait for what the body launches on it, and free its memory."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        try:
            yield
        finally:
            torch.cuda.current_stream(device).synchronize()
            release_cached_memory(device)


def release_cached_memory(device: torch.device) -> None:
    """Give back what tuning and checks allocated, so that others can use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
