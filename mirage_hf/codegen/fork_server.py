"""Import once what workers need, and fork a worker for each request. Run as a script.

A worker that imports torch takes seconds to start, and several at once take longer. A fork of this
process takes milliseconds. This process has no threads and uses no GPU, so its forks are safe.
Those of the user's process would not be.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import struct
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

#: A request: a process ID. 0 asks for a new worker, whose socket comes along. Any other number asks
#: for the exit code of that worker, which has ended.
REQUEST = struct.Struct("<q")


def serve(control: socket.socket, module: Any) -> None:
    """Answer requests until the other side closes the socket.

    Args:
        control: Requests come from it.
        module: Its `serve` is what a worker does with the lines that it reads.
    """
    while True:
        request, files, _, _ = socket.recv_fds(control, REQUEST.size, 1)
        if not request:
            return
        (pid,) = REQUEST.unpack(request)
        if pid:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            control.sendall(REQUEST.pack(code))
            continue
        with warnings.catch_warnings():  # Python 3.12 warns of threads, which no import may start
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            os.close(files[0])
            continue
        control.close()
        _work(socket.socket(fileno=files[0]), module)


def _work(connection: socket.socket, module: Any) -> None:
    """Be a worker: tell the process ID, then answer lines until there are no more."""
    code = 1
    try:
        with connection.makefile("rw", encoding="utf-8") as lines:
            print(os.getpid(), file=lines, flush=True)
            for line in lines:
                print(module.answer(line), file=lines, flush=True)
        code = 0
    except (BrokenPipeError, ConnectionResetError):  # the process that asked has ended
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
    with contextlib.suppress(ConnectionResetError):  # the parent has ended
        serve(socket.socket(fileno=int(sys.argv[1])), asked)
