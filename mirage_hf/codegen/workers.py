"""Worker processes that answer lines with lines. All callers share them. They end when idle.

They compile kernels (codegen/ahead.py), or search for them (pipeline/search_worker.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mirage_hf.codegen import ahead, fork_server, loaded_cubin
from mirage_hf.codegen.fork_server import MESSAGE, UNKNOWN

#: Seconds after which idle workers end.
IDLE_SECONDS = 30.0

#: Seconds to wait for the process that forks workers to end.
_END_SECONDS = 2.0

#: With this environment, libraries start no threads when they are imported. A fork of a process
#: with threads is not safe.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

#: The module whose functions are what workers that compile do.
COMPILER = ahead.__name__

_SERVER = str(Path(fork_server.__file__).resolve())


class WorkerError(Exception):
    """An error raised if a worker ended while it worked."""


class Worker:
    """One worker process.

    Attributes:
        pid: Its process ID.
    """

    def __init__(self, server: ForkServer, connection: socket.socket):
        """Wait until a worker answers.

        Raises:
            OSError: It does not.
        """
        self._server, self._connection = server, connection
        self._lines = connection.makefile("rw", encoding="utf-8")
        first = self._lines.readline()
        if not first.endswith("\n"):
            self.end()
            raise OSError("a worker could not start")
        self.pid = int(first)

    def answer(self, asked: str) -> str:
        """Send a line and return the answer.

        Raises:
            WorkerError: If the process ended, for example because a compiler crashed.
        """
        try:
            print(asked, file=self._lines, flush=True)
            answer = self._lines.readline()
        except (OSError, ValueError):
            answer = ""
        if not answer.endswith("\n"):
            self.end()
            code = self._server.exit_code(self.pid)
            raise WorkerError(f"the worker that was asked ended with exit code {code}")
        return answer

    def end(self) -> None:
        """Let the process end once it is idle, also if a fork of this process has its socket."""
        with contextlib.suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)
        for each in (self._lines, self._connection):
            with contextlib.suppress(OSError):  # unsent text of a worker that died
                each.close()


class ForkServer:
    """The process that forks workers. It starts with the first one."""

    def __init__(self, module: str):
        """Name the module with the work. See `fork_server.serve`."""
        self._module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process, unless it has been started.

        Raises:
            OSError: No process can be started.
        """
        if hasattr(socket, "send_fds"):
            with self._lock:
                self._control_socket()

    def fork(self) -> Worker:
        """Return a new worker.

        Raises:
            OSError: No process can be started, or it cannot do the work.
        """
        if not (hasattr(os, "fork") and hasattr(socket, "send_fds")):
            raise OSError("this platform cannot pass a socket to a forked process")
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._control_socket(), [MESSAGE.pack(0)], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return Worker(self, ours)

    def _control_socket(self) -> socket.socket:
        """Return the socket for requests. Start the process first if it has not been started."""
        if self._control is not None:
            return self._control
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("sys.executable names no Python interpreter")
        ours, theirs = socket.socketpair()
        with theirs:
            # multiprocessing would run the user's script again. A session of its own keeps Ctrl-C
            # from workers.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    _SERVER,
                    str(theirs.fileno()),
                    self._module,
                    json.dumps([p for p in sys.path if isinstance(p, str)]),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | _ONE_THREAD,
                start_new_session=True,
            )
        self._control = ours
        return ours

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker that has ended, or None if it is not known."""
        with self._lock, contextlib.suppress(OSError, struct.error):
            if self._control is not None:
                self._control.sendall(MESSAGE.pack(pid))
                code: int = MESSAGE.unpack(self._control.recv(MESSAGE.size))[0]
                return None if code == UNKNOWN else code
        return None

    def close(self) -> None:
        """Let the process end after its workers. If that takes long, end it at once."""
        with self._lock:
            if self._control is not None and self._process is not None:
                with contextlib.suppress(OSError):  # it has ended
                    self._control.shutdown(socket.SHUT_RDWR)
                self._control.close()
                try:
                    self._process.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:  # it imports, or a worker is busy
                    self._process.kill()
                    self._process.wait()
            self._control = self._process = None


class Workers:
    """Up to `count` worker processes, started when needed. Safe from several threads.

    Call `close` when done.

    Attributes:
        threads: Threads that wait for workers, one for each.
    """

    def __init__(self, count: int, module: str = COMPILER):
        """Reserve places for workers that do what a module says."""
        self._server = ForkServer(module)
        self._idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)
        self._refused = False
        self.threads = ThreadPoolExecutor(count)

    def start(self) -> None:
        """Start the process that forks workers, which first imports what they need."""
        with contextlib.suppress(OSError):  # the first worker will not start either
            self._server.start()

    def compile(
        self,
        path: str,
        name: str,
        tasks: Sequence[ahead.Task],
        sm: int,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> str | None:
        """Compile kernels of a file into Triton's cache on disk, where this process finds them.

        Args:
            path: The file.
            name: The module name under which this process imports it.
            tasks: The kernels.
            sm: The compute capability.
            is_wanted: Asked as soon as a worker is ready. If it says no, nothing is compiled.

        Returns:
            What the compiler raised, or None.

        Raises:
            WorkerError, OSError: As for `ask`.
        """
        from triton import knobs

        # The working directory may have changed since the worker started.
        cache = os.path.abspath(knobs.cache.dir)
        builds_launchers = not loaded_cubin.can_launch()
        asked = json.dumps([os.path.abspath(path), name, tasks, sm, builds_launchers, cache])
        failed: str | None = json.loads(self.ask(lambda: asked if is_wanted() else None) or "null")
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
        worker = self._idle.get()
        try:
            worker = worker or self._begin()
            line = asked()
            if line is None:
                return None
            busy, worker = worker, None
            answer = busy.answer(line)
            worker = busy
            return answer
        finally:
            self._idle.put(worker)  # None: the worker has ended

    def _begin(self) -> Worker:
        """Start a worker, unless that failed before."""
        if self._refused:
            raise OSError("workers cannot be started")
        try:
            return self._server.fork()
        except OSError:
            self._refused = True
            raise

    def close(self) -> None:
        """End the workers that are idle."""
        for worker in [self._idle.get() for _ in range(self._idle.qsize())]:
            if worker is not None:
                worker.end()
            self._idle.put(None)
        self.threads.shutdown(wait=False)
        self._server.close()


_lock = threading.RLock()  # garbage collection inside it may end a use
_shared: dict[tuple[str, int], Workers] = {}
_using = 0
_timer: threading.Timer | None = None


@contextlib.contextmanager
def at_work(count: int, module: str = COMPILER) -> Iterator[Workers]:
    """Yield the workers that all callers share. They stay for IDLE_SECONDS after the last use."""
    global _using, _timer
    with _lock:
        if _timer is not None:
            _timer.cancel()
        _using += 1
        workers = _shared.setdefault((module, count), Workers(count, module))
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
    _lock, _using, _timer = threading.RLock(), 0, None
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
