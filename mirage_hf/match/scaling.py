"""Scalings of PEFT adapters as numbers. PEFT's preparation for hot-swapping makes tensors of them, which it then writes in place."""
from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_read: Any = WeakIdKeyDictionary()
"""Of each tensor its version and number: reading it from a GPU waits for all that runs there."""


def scaling_of(given: float | Tensor) -> float:
    """A scaling's number. A tensor is read once, and again after each write to it."""
    if not isinstance(given, Tensor):
        return float(given)
    version = None if given.is_inference() else given._version
    known = _read.get(given)
    if known is None or version is None or known[0] != version:
        known = _read[given] = version, float(given)
    return known[1]  # type: ignore[no-any-return]
