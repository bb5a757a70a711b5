"""Kernels over a cache, cut to as many slots as a cache has."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from mirage_hf.errors import MirageError
from mirage_hf.layers.compose import Kernel
from mirage_hf.patterns.attention import LONG_FROM
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline import resize
from mirage_hf.pipeline.resolver import Resolved


class CacheKernels:
    """Kernels over caches on one device, made when a number of slots is first asked for."""

    def __init__(self, device: torch.device):
        self.device = device
        self._made: dict[tuple[str, int], Kernel] = {}
        self._lock = threading.Lock()

    def at(self, tuned: Sequence[Resolved], block: PatternBlock, rows: int, slots: int) -> Kernel:
        """Return a kernel of a block, cut to `slots`.

        Prefer the kernel tuned for caches of about this length. Take the other one if the first
        cannot be cut.

        Args:
            tuned: The kernel tuned for short caches, and that for long ones if there is one.
            block: The block.
            rows: The number of sequences.
            slots: The slots of the cache.

        Raises:
            MirageError: If none can be cut to so many slots.
        """
        preferred = list(tuned)[::-1] if slots >= LONG_FROM else list(tuned)
        first_error: MirageError | None = None
        for kernel in preferred:
            key = kernel.digest, slots
            try:
                with self._lock:
                    if key not in self._made:
                        program = block.program(rows, slots=slots)
                        self._made[key] = resize.at_size(kernel, program, self.device)
                    return self._made[key]
            except MirageError as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error
