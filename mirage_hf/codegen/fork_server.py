"""Import once what workers need, and fork a worker for each request. Run as a script.

A worker that imports torch takes seconds to start, and several at once take longer. A fork of this
process takes milliseconds. This process has no threads and uses no GPU, so its forks are safe.
Those of the user's process would not be.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

#: A request or an answer: a number. The request 0 asks for a new worker, whose socket comes along.
#: Any other request is the process ID of a worker that has ended, and the answer is its exit code.
MESSAGE = struct.Struct("<q")

#: The answer if the exit code is not known.
UNKNOWN = 1 << 32


def serve(control: socket.socket, module: Any) -> None:
    """Answer requests until the other side shuts the socket. Then wait for the workers to end.

    Args:
        control: Requests come from it.
        module: Its `answer` is what a worker does with a line.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the user's process may ignore it
    # Garbage collection in a fork would write to all objects of this process, and so copy them.
    gc.collect()
    gc.freeze()
    ended: dict[int, int] = {}
    while True:
        request, files, _, _ = socket.recv_fds(control, MESSAGE.size, 1)
        ended |= _reaped(os.WNOHANG)
        if not request:
            _reaped(0)
            return
        (pid,) = MESSAGE.unpack(request)
        if pid:
            while pid not in ended and (found := _reaped(0, pid)):
                ended |= found
            control.sendall(MESSAGE.pack(ended.pop(pid, UNKNOWN)))
        elif files:
            _fork(control, files[0], module)


def _reaped(options: int, pid: int = -1) -> dict[int, int]:
    """Return the exit codes of children that have ended, or of one, by process ID."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):  # there are no others
        while True:
            child, status = os.waitpid(pid, options)
            if not child:
                break
            codes[child] = os.waitstatus_to_exitcode(status)
    return codes


def _fork(control: socket.socket, connection: int, module: Any) -> None:
    """Fork a worker. If that fails, the other side sees the end of its connection."""
    try:
        with warnings.catch_warnings():  # Python 3.12 warns of threads, which no import may start
            warnings.simplefilter("ignore", DeprecationWarning)
            is_worker = os.fork() == 0
    except OSError:
        is_worker = False
    if is_worker:
        control.close()
        _work(socket.socket(fileno=connection), module)
    os.close(connection)


def _work(connection: socket.socket, module: Any) -> None:
    """Be a worker: tell the process ID, then answer lines until there are no more."""
    code = 1
    try:
        with connection.makefile("rw", encoding="utf-8") as lines:
            print(os.getpid(), file=lines, flush=True)
            for line in lines:
                print(module.answer(line), file=lines, flush=True)
        code = 0
    except ConnectionError:  # the process that asked has ended
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _import_without_transformers() -> None:
    """Let the package be imported without what `mirage_hf/__init__.py` imports."""
    package = ModuleType("mirage_hf")
    package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["mirage_hf"] = package


if __name__ == "__main__":
    # Find packages where the parent finds them, and not in the folder of this file.
    sys.path[:] = json.loads(sys.argv[3])
    os.dup2(2, 1)  # what is printed is no answer
    _import_without_transformers()
    asked = importlib.import_module(sys.argv[2])
    asked.prepare()
    with contextlib.suppress(ConnectionError):  # the parent has ended
        serve(socket.socket(fileno=int(sys.argv[1])), asked)
