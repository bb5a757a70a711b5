"""The results of `superoptimize()` that this process used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Result = TypeVar("Result")

MOST_RESULTS = 128


class ResultMemory(Generic[Result]):
    """The results used last, at most `most`. Safe among threads."""

    def __init__(self, most: int = MOST_RESULTS) -> None:
        self._most, self._lock = most, threading.Lock()
        self._results: OrderedDict[Hashable, Result] = OrderedDict()

    def get(self, key: Hashable) -> Result | None:
        """Return the result, or None."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def put(self, key: Hashable, result: Result) -> None:
        """Keep a result. The one that was used least recently goes if there are too many."""
        with self._lock:
            self._results[key] = result
            self._results.move_to_end(key)
            while len(self._results) > self._most:
                self._results.popitem(last=False)

    def clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._results.clear()
