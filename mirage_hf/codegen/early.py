"""Compile kernels in worker processes while the caller goes on, such as with the next search."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import cubin_launch, workers
from mirage_hf.codegen.generated_program import GeneratedProgram
from mirage_hf.errors import CodegenError
from mirage_hf.settings import settings


def begin(program: GeneratedProgram, sm: int) -> Callable[[], None] | None:
    """Begin to compile a program that has no cubins and that this machine has not loaded before.

    A failure is not told here: whoever runs the kernel compiles it again and gets the error.

    Args:
        program: The program.
        sm: The compute capability.

    Returns:
        A function that waits until the program is compiled. None if nothing was begun.
    """
    threads = settings().threads
    is_alone = threads < compiler.PROCESSES_FROM or settings().interpret
    if is_alone or not program.launches or compiler.was_loaded(program.digest):
        return None
    if cubin_launch.has_all(program, sm):
        return None
    count = min(threads, compiler.MOST_PROCESSES)
    thread = threading.Thread(target=_compile, args=(program, sm, count), daemon=True)
    thread.start()
    return thread.join


def _compile(program: GeneratedProgram, sm: int, count: int) -> None:
    with workers.at_work(count) as processes, contextlib.suppress(CodegenError, OSError):
        compiler.in_worker(processes, program, sm)
