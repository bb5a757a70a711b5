"""Count the bytes of tensors that are alive at the same time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the memory of tensors made while the mode is entered, on any device.

    What a kernel of torch allocates and frees within one op is not seen.

    Attributes:
        live: Bytes that are alive.
        peak: The most bytes that were alive at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op, and count the memory that its results lie in."""
        results = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
        for x in tree_leaves(results):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self._count(x.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)
