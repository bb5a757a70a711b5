"""Processes that compile beside this one (codegen/ahead.py), shared by all that ask and ended when idle."""
from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from mirage_hf.codegen import ahead

IDLE_SECONDS = 30.0
"""After which processes without work end."""


class Workers:
    """Up to `count` processes, begun as they are needed. What they compile lies in Triton's cache on disk, where compiling it in this
    process finds it. Safe from several threads; `close` when done."""

    def __init__(self, count: int):
        self._idle: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)

    def compile(self, path: str, name: str, tasks: Sequence[ahead.Task], sm: int) -> str | None:
        """Compile kernels of the file at `path`, which this process has imported as `name`, for compute capability `sm`. Returns what went
        wrong, also where the process ended, as when a compiler crashes. Errors: OSError where none can be begun."""
        from triton import knobs
        process = self._idle.get()
        try:
            process = process or _begin()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([path, name, tasks, sm, knobs.cache.dir]) + "\n")
                process.stdin.flush()
                failed: str | None = json.loads(process.stdout.readline())
            except (OSError, ValueError):
                _end(process)
                failed, process = f"the process that compiled it ended with exit code {process.returncode}", None
        finally:
            self._idle.put(process)
        return failed

    def close(self) -> None:
        """End the processes that are idle."""
        for process in [self._idle.get() for _ in range(self._idle.qsize())]:
            if process is not None:
                _end(process)
            self._idle.put(None)


def _begin() -> subprocess.Popen[str]:
    # not multiprocessing, whose processes run the user's script again, up to its `if __name__ == "__main__"`; Ctrl-C is for this one
    command = [sys.executable, str(Path(ahead.__file__).resolve()), json.dumps(sys.path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True)


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not sent to a process that died
            pipe.close()  # type: ignore[union-attr]
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
