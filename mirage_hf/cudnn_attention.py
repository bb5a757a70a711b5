"""Switch torch's attention by cuDNN off for a while. The switch is one for the whole process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_blocks = 0


def is_allowed() -> bool:
    """Return whether cuDNN may compute attention, apart from blocks that switch it off."""
    with _lock:
        return bool(_blocks) or torch.backends.cuda.cudnn_sdp_enabled()


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Let other libraries compute attention in this block, if others are allowed.

    cuDNN plans each shape anew, which takes 0.05 to 0.4 s. Blocks of several threads may overlap.
    """
    global _blocks
    cuda = torch.backends.cuda
    with _lock:
        others = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
        counts = _blocks > 0 or (cuda.cudnn_sdp_enabled() and any(other() for other in others))
        if counts:
            _blocks += 1
            cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if counts:
            with _lock:
                _blocks -= 1
                if not _blocks:
                    cuda.enable_cudnn_sdp(True)
