"""Kernels that workers compile while the caller goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton as compiler_of_kernels

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import early, triton, workers
from mirage_hf.codegen.generated_program import GeneratedProgram
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import CodegenError
from mirage_hf.pipeline import torch_op
from tests.helpers import kernel_cases


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    monkeypatch.setenv("MIRAGE_HF_THREADS", "2")
    yield
    for pool in workers._shared.values():
        pool.close()


def program(n: int) -> GeneratedProgram:
    """Return the program of a kernel that no other test and no other `n` compiles."""
    return triton.generate(
        kernel_cases.rms_norm_linear(1, 64, 32),
        [Schedule({"k": 64, "m": 1, "n": 8})],
        f"early_{os.getpid()}_{n}",
    )


def test_kernels_are_found_in_the_cache_after_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [program(n) for n in range(3)]
    waits = [early.begin(p, 90) for p in programs]
    hits: list[bool] = []
    monkeypatch.setattr(
        compiler_of_kernels.knobs.compilation,
        "listener",
        lambda **what: hits.append(what["cache_hit"]),
    )
    for wait, p in zip(waits, programs, strict=True):
        assert wait is not None
        wait()
        compiler.ahead_of_time(p, 90)
    assert hits == [True] * 3
    assert all(early.begin(p, 90) is None for p in programs), "they were loaded before"


def test_what_does_not_compile_raises_when_it_is_run() -> None:
    p = program(9)
    source = p.source.replace("tl.rsqrt", "tl.no_such_function")
    broken = GeneratedProgram(source, p.launches)
    wait = early.begin(broken, 90)
    assert wait is not None
    wait()
    with pytest.raises(CodegenError, match="no_such_function"):
        compiler.ahead_of_time(broken, 90)


def test_a_worker_that_cannot_start_leaves_the_work_to_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(server: workers.ForkServer) -> None:
        raise OSError("no processes here")

    monkeypatch.setattr(workers.ForkServer, "fork", refuse)
    monkeypatch.setattr(workers, "_shared", {})
    p = program(11)
    wait = early.begin(p, 90)
    assert wait is not None
    wait()
    assert compiler.ahead_of_time(p, 90)


def test_one_thread_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRAGE_HF_THREADS", "1")
    assert early.begin(program(12), 90) is None


def test_a_launcher_waits_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(early, "begin", lambda p, sm: lambda: order.append(f"waited for sm_{sm}"))
    ran = SimpleNamespace(run=lambda inputs, out=None: order.append(f"ran on {inputs}, {out}"))
    monkeypatch.setattr(compiler, "load", lambda source, digest: ran)
    run = torch_op.launcher(program(13), torch.device("cuda"))
    assert order == []
    run(["x"], out="y")  # type: ignore[call-arg, list-item]
    assert order == ["waited for sm_90", "ran on ['x'], y"]
