"""Processes that compile beside this one (codegen/ahead.py), shared by all that ask and ended when idle."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from mirage_hf.codegen import ahead

IDLE_SECONDS = 30.0
"""After which processes without work end."""


class Ended(Exception):
    """A process ended while it compiled."""


class Workers:
    """Up to `count` processes, begun as they are needed. What they compile lies in Triton's cache on disk, where compiling it in this
    process finds it. Safe from several threads; `close` when done."""

    def __init__(self, count: int):
        self._idle: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)
        self._refused = False

    def compile(self, path: str, name: str, tasks: Sequence[ahead.Task], sm: int) -> str | None:
        """Compile kernels of the file at `path`, which this process has imported as `name`, for compute capability `sm`. Returns what it
        raised. Errors: Ended, as when a compiler crashes; OSError where none can be begun."""
        from triton import knobs

        # the folder that relative paths are of may have changed since the process began
        asked = json.dumps(
            [os.path.abspath(path), name, tasks, sm, os.path.abspath(knobs.cache.dir)]
        )
        process = self._idle.get()
        try:
            process = process or self._begin()
            try:
                return _answer(process, asked)
            except (OSError, ValueError):
                ended, process = process, None
                _end(ended)
                raise Ended(
                    f"the process that compiled it ended with exit code {ended.returncode}"
                ) from None
        finally:
            self._idle.put(process)

    def _begin(self) -> subprocess.Popen[str]:
        if self._refused:
            raise OSError("processes that compile cannot be begun")
        try:
            return _begin()
        except OSError:
            self._refused = True
            raise

    def close(self) -> None:
        """End the processes that are idle."""
        for process in [self._idle.get() for _ in range(self._idle.qsize())]:
            if process is not None:
                process.kill()  # a process that was forked meanwhile may have its pipes open, too
                _end(process)
            self._idle.put(None)


def _begin() -> subprocess.Popen[str]:
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("no interpreter is known, as in a program that has one built in")
    # not multiprocessing, whose processes run the user's script again, up to its `if __name__ == "__main__"`; Ctrl-C is for this one
    command = [
        sys.executable,
        str(Path(ahead.__file__).resolve()),
        json.dumps([p for p in sys.path if isinstance(p, str)]),
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    if process.stdout.readline() != ahead.READY + "\n":  # type: ignore[union-attr]
        _end(process)
        raise OSError(f"a process that compiles could not begin: exit code {process.returncode}")
    return process


def _answer(process: subprocess.Popen[str], asked: str) -> str | None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(asked + "\n")
    process.stdin.flush()
    failed: str | None = json.loads(process.stdout.readline())
    return failed


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not sent to a process that died
            pipe.close()  # type: ignore[union-attr]
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_lock = threading.Lock()
_shared: dict[int, Workers] = {}
_using = 0
_timer: threading.Timer | None = None


@contextlib.contextmanager
def at_work(count: int) -> Iterator[Workers]:
    """Processes that all callers share, kept for IDLE_SECONDS after the last is done."""
    global _using, _timer
    with _lock:
        if _timer is not None:
            _timer.cancel()
        _using += 1
        workers = _shared.setdefault(count, Workers(count))
    try:
        yield workers
    finally:
        with _lock:
            _using -= 1
            if not _using:
                _timer = threading.Timer(IDLE_SECONDS, _rest)
                _timer.daemon = True
                _timer.start()


def _rest() -> None:
    with _lock:
        if not _using:
            for workers in _shared.values():
                workers.close()
            _shared.clear()


def _forget() -> None:
    """In a forked process: the others answer the one that began them."""
    global _lock, _using, _timer
    _lock, _using, _timer = threading.Lock(), 0, None
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
