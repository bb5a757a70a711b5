"""Let torch's ops on the CPU run on one thread, where their tensors are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let this thread's torch ops on the CPU run without others while the block runs.

    With small tensors, the threads of a large machine mostly wait for each other
    (docs/decisions/010-tuning.md), and longer if other processes work too.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
