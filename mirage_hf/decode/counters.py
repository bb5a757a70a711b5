"""Counters that several threads add to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class AttemptCounters:
    """Adds to counters from several threads.

    What an attempt at a call has counted can be undone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def count(self, counter: Counter[str], what: str, by: int = 1) -> None:
        """Add to a counter, and note it for the attempt that this thread is in."""
        self._add(counter, what, by)
        notes = getattr(self._of_thread, "notes", None)
        if notes is not None:
            notes.append((counter, what, by))

    @contextmanager
    def attempt(self) -> Iterator[Callable[[], None]]:
        """Note what this thread counts in the block, except in attempts within it.

        Yields:
            A function that takes these counts back, to be called after the block.
        """
        outer = getattr(self._of_thread, "notes", None)
        notes: list[tuple[Counter[str], str, int]] = []

        def undo() -> None:
            for counter, what, by in notes:
                self._add(counter, what, -by)

        self._of_thread.notes = notes
        try:
            yield undo
        finally:
            self._of_thread.notes = outer

    def _add(self, counter: Counter[str], what: str, by: int) -> None:
        with self._lock:
            counter[what] += by
            if not counter[what]:
                del counter[what]
