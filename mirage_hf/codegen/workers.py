"""Worker processes that answer lines with lines. All callers share them. They end when idle.

They compile kernels (codegen/ahead.py), or search for them (pipeline/search_worker.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mirage_hf.codegen import ahead

#: Seconds after which idle workers end.
IDLE_SECONDS = 30.0


#: The script of workers that compile.
COMPILER = str(Path(ahead.__file__).resolve())


class WorkerError(Exception):
    """An error raised if a worker ended while it worked."""


class Workers:
    """Up to `count` worker processes, started when needed. Safe from several threads.

    Call `close` when done.
    """

    def __init__(self, count: int, script: str = COMPILER):
        """Reserve places for workers that run a script."""
        self._script = script
        self._idle: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)
        self._refused = False

    def compile(self, path: str, name: str, tasks: Sequence[ahead.Task], sm: int) -> str | None:
        """Compile kernels of a file into Triton's cache on disk, where this process finds them.

        Args:
            path: The file.
            name: The module name under which this process has imported it.
            tasks: The kernels.
            sm: The compute capability.

        Returns:
            What the compiler raised, or None.

        Raises:
            WorkerError, OSError: As for `ask`.
        """
        from triton import knobs

        # The working directory may have changed since the worker started.
        asked = json.dumps(
            [os.path.abspath(path), name, tasks, sm, os.path.abspath(knobs.cache.dir)]
        )
        failed: str | None = json.loads(self.ask(lambda: asked) or "null")
        return failed

    def ask(self, asked: Callable[[], str | None]) -> str | None:
        """Send a line to an idle worker and return the line that it answers with.

        Args:
            asked: Returns the line as soon as a worker is ready. None: there is nothing to ask any
                more, and the answer is None.

        Raises:
            WorkerError: If the worker ended, for example because a compiler crashed.
            OSError: If no worker can be started.
        """
        process = self._idle.get()
        try:
            process = process or self._begin()
            try:
                line = asked()
                return None if line is None else _answer(process, line)
            except (OSError, ValueError):
                ended, process = process, None
                _end(ended)
                raise WorkerError(
                    f"the worker that was asked ended with exit code {ended.returncode}"
                ) from None
        finally:
            self._idle.put(process)

    def _begin(self) -> subprocess.Popen[str]:
        """Start a worker, unless that failed before."""
        if self._refused:
            raise OSError("workers cannot be started")
        try:
            return _begin(self._script)
        except OSError:
            self._refused = True
            raise

    def close(self) -> None:
        """End the workers that are idle."""
        for process in [self._idle.get() for _ in range(self._idle.qsize())]:
            if process is not None:
                process.kill()  # a forked process may hold its pipes open too
                _end(process)
            self._idle.put(None)


def _begin(script: str) -> subprocess.Popen[str]:
    """Start a worker."""
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("sys.executable names no Python interpreter")
    # multiprocessing would run the user's script again. A session of its own keeps Ctrl-C from
    # workers.
    command = [
        sys.executable,
        script,
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
        raise OSError(f"a worker could not start: exit code {process.returncode}")
    return process


def _answer(process: subprocess.Popen[str], asked: str) -> str:
    """Send a line and return the answer.

    Raises:
        ValueError, OSError: If the process has ended.
    """
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(asked + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer.endswith("\n"):
        raise ValueError("no answer")
    return answer


def _end(process: subprocess.Popen[str]) -> None:
    """End a worker."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # unsent text of a worker that died
            pipe.close()  # type: ignore[union-attr]
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_lock = threading.Lock()
_shared: dict[tuple[str, int], Workers] = {}
_using = 0
_timer: threading.Timer | None = None


@contextlib.contextmanager
def at_work(count: int, script: str = COMPILER) -> Iterator[Workers]:
    """Yield the workers that all callers share. They stay for IDLE_SECONDS after the last use."""
    global _using, _timer
    with _lock:
        if _timer is not None:
            _timer.cancel()
        _using += 1
        workers = _shared.setdefault((script, count), Workers(count, script))
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
    """End idle workers."""
    with _lock:
        if not _using:
            for workers in _shared.values():
                workers.close()
            _shared.clear()


def _forget() -> None:
    """Forget the workers in a forked process: they answer the process that started them."""
    global _lock, _using, _timer
    _lock, _using, _timer = threading.Lock(), 0, None
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
