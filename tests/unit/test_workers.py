"""Kernels that processes of their own compile: found in the cache by this one, errors and deaths among the answers."""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import blocks
import pytest
import triton as compiler_of_kernels

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton, workers
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.triton import Program
from mirage_hf.errors import CodegenError


def program(n: int) -> Program:
    """Of a kernel that no other test compiles, nor another `n`."""
    return triton.generate(blocks.rms_norm_linear(1, 64, 32), [Schedule((("k", 64), ("m", 1), ("n", 8)))], f"worker_{os.getpid()}_{n}")


def broken() -> Program:
    p = program(0)
    source = p.source.replace("tl.rsqrt", "tl.no_such_function")
    assert source != p.source
    return Program(source, p.launches)


def asked(p: Program) -> Any:
    module = compiler.load(p.source, p.digest)
    return module.__file__, module.__name__, [*map(compiler._task, p.launches)], 90


@pytest.fixture
def one() -> Iterator[workers.Workers]:
    pool = workers.Workers(1)
    yield pool
    pool.close()


def process_of(pool: workers.Workers) -> Any:
    process = pool._idle.get()
    pool._idle.put(process)
    return process


def test_what_a_process_compiled_is_found_here(one: workers.Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    hits: list[bool] = []
    monkeypatch.setattr(compiler_of_kernels.knobs.compilation, "listener", lambda **what: hits.append(what["cache_hit"]))
    assert one.compile(*asked(program(1))) is None
    first = process_of(one)
    kernel, = compiler.ahead_of_time(program(1), 90)
    assert hits == [True] and kernel.asm["cubin"]
    assert "no_such_function" in str(one.compile(*asked(broken())))
    assert process_of(one) is first  # an error is an answer
    os.kill(first.pid, signal.SIGKILL)
    assert one.compile(*asked(program(2))) == "the process that compiled it ended with exit code -9"
    assert one.compile(*asked(program(2))) is None
    assert process_of(one) is not first


def test_many_programs_take_processes_which_end_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "PROCESSES_FROM", 1)
    monkeypatch.setattr(compiler, "FEW", 3)
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.1)
    compiled: list[str] = []
    right = workers.Workers.compile

    def compile(self: workers.Workers, path: str, *rest: Any) -> Any:
        compiled.append(path)
        return right(self, path, *rest)
    monkeypatch.setattr(workers.Workers, "compile", compile)
    programs = [program(3), broken(), program(4)]
    found = list(compiler.compiling(programs, 90, threads=2))
    assert [isinstance(f, CodegenError) for f in found] == [False, True, False] and len(compiled) == 3
    assert "no code for sm_90: CompilationError" in str(found[1])
    until = time.monotonic() + 20
    while workers._shared and time.monotonic() < until:
        time.sleep(0.05)
    assert not workers._shared
    assert len(list(compiler.compiling(programs[:2], 90, threads=2))) == 2 and len(compiled) == 3  # too few


def test_threads_compile_where_no_process_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "PROCESSES_FROM", 1)
    monkeypatch.setattr(compiler, "FEW", 1)

    def no() -> Any:
        raise OSError("no memory")
    monkeypatch.setattr(workers, "_begin", no)
    result, = compiler.compiling([program(5)], 90, threads=2)
    assert isinstance(result, list) and result[0].asm["cubin"]
