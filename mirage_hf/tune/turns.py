"""Turns on a GPU: the calls of a model, and the measurements of a tuner in another process.

A measurement beside a call would slow the call, and its time would be wrong. So the tuner waits
until no call is under way, and measures again if one began meanwhile. If calls follow each other
without a gap, a call waits before it begins, for at most `SHARE` of the time of the calls so far.

The two processes share a few integers in memory. Each integer is written by one side only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import TypeVar

Result = TypeVar("Result")

#: The share of the time of calls that calls may wait for the tuner.
SHARE = 0.03

#: Seconds between looks at the shared integers.
_TUNER_LOOKS, _CALL_LOOKS = 1e-3, 2e-4

#: A gap between calls shorter than this is no time for the tuner.
_GAP_SECONDS = 2e-3

#: How long a forward that is not part of `generate` is taken to last. Only its begin is seen.
_FORWARD_SECONDS = 0.1

#: How often the tuner measures again after a call began meanwhile.
MOST_REPEATS = 4


class _Tuner(IntEnum):
    """What the tuner does: nothing on the GPU, waits for a turn, or measures."""

    IDLE, WAITS, MEASURES = range(3)


#: The places of the shared integers.
_UNDER_WAY, _BEGUN, _BUSY_UNTIL_NS, _TUNER, _NEEDS_NS, _BYTES = 0, 1, 2, 3, 4, 40


class SharedTurns:
    """The turns of one model's calls and one tuner.

    Attributes:
        handle: The file descriptor of the shared memory. The tuner's process inherits it.
    """

    def __init__(self, handle: int | None = None):
        """Make shared memory, or map that of a handle.

        Raises:
            OSError: There is no shared memory on this system.
        """
        if handle is None:
            if not hasattr(os, "memfd_create"):
                raise OSError("no shared memory without a file, which needs Linux")
            handle = os.memfd_create("mirage_hf_turns")
            os.ftruncate(handle, _BYTES)
        self.handle = handle
        self._fields = memoryview(mmap.mmap(handle, _BYTES)).cast("q")
        self._lock = threading.Lock()
        self._calls = 0
        self._began = self._busy = self._waited = 0.0

    # -- the model's side

    @property
    def calls(self) -> int:
        """How many calls are under way."""
        return self._calls

    def begin_call(self) -> None:
        """Note that a call begins. It may wait for the tuner before."""
        with self._lock:
            if not self._calls:
                self._wait_for_tuner()
                self._began = time.monotonic()
            self._calls += 1
            self._fields[_BEGUN] += 1
            self._fields[_UNDER_WAY] = self._calls

    def end_call(self) -> None:
        """Note that a call has ended."""
        with self._lock:
            self._calls -= 1
            if not self._calls:
                self._busy += time.monotonic() - self._began
                self._set_busy_until(_GAP_SECONDS)
            self._fields[_UNDER_WAY] = self._calls

    def note_forward(self) -> None:
        """Note that a forward begins. Its end is not seen."""
        self._fields[_BEGUN] += 1
        self._set_busy_until(_FORWARD_SECONDS)

    def _set_busy_until(self, seconds: float) -> None:
        self._fields[_BUSY_UNTIL_NS] = time.monotonic_ns() + int(seconds * 1e9)

    def _wait_for_tuner(self) -> None:
        """Let the tuner measure, if calls have run long enough since it did so last."""
        allowed = SHARE * self._busy - self._waited
        if self._fields[_TUNER] == _Tuner.IDLE or self._fields[_NEEDS_NS] >= allowed * 1e9:
            return
        began = time.monotonic()
        while self._fields[_TUNER] != _Tuner.IDLE and time.monotonic() - began < allowed:
            time.sleep(_CALL_LOOKS)
        self._waited += time.monotonic() - began

    def tuner_has_ended(self) -> None:
        """Note that no tuner waits or measures any more."""
        self._fields[_TUNER] = _Tuner.IDLE

    # -- the tuner's side

    def undisturbed(self, measure: Callable[[], Result]) -> Result:
        """Measure while no call is under way, and again if one began meanwhile.

        After `MOST_REPEATS` repeats the last result counts.
        """
        for _ in range(MOST_REPEATS):
            result, disturbed = self._turn(measure)
            if not disturbed:
                return result
        return self._turn(measure)[0]

    def _turn(self, measure: Callable[[], Result]) -> tuple[Result, bool]:
        """Measure in one turn. Return the result, and whether a call began meanwhile."""
        fields = self._fields
        fields[_TUNER] = _Tuner.WAITS
        try:
            while True:
                begun = fields[_BEGUN]
                is_quiet = not fields[_UNDER_WAY]
                if is_quiet and time.monotonic_ns() >= fields[_BUSY_UNTIL_NS]:
                    break
                time.sleep(_TUNER_LOOKS)
            fields[_TUNER] = _Tuner.MEASURES
            started = time.monotonic_ns()
            result = measure()
            fields[_NEEDS_NS] = time.monotonic_ns() - started
            return result, fields[_BEGUN] != begun
        finally:
            fields[_TUNER] = _Tuner.IDLE


_turns: SharedTurns | None = None


@contextlib.contextmanager
def sharing(turns: SharedTurns) -> Iterator[None]:
    """Let everything that this process measures wait for its turn."""
    global _turns
    _turns = turns
    try:
        yield
    finally:
        _turns = None


def undisturbed(measure: Callable[[], Result]) -> Result:
    """Call a function that measures on the GPU: in a turn of its own if this process shares it."""
    return measure() if _turns is None else _turns.undisturbed(measure)
