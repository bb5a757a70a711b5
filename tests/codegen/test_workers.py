"""Kernels compiled by worker processes.

This process finds them in the cache. Errors and deaths of workers are handled.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton as compiler_of_kernels
from triton.backends.compiler import GPUTarget

from mirage_hf.codegen import ahead, fork_server, triton, workers
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen.generated_program import GeneratedProgram, Launch
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import CodegenError
from tests.helpers import kernel_cases


def program(n: int) -> GeneratedProgram:
    """Return the program of a kernel that no other test and no other `n` compiles."""
    return triton.generate(
        kernel_cases.rms_norm_linear(1, 64, 32),
        [Schedule({"k": 64, "m": 1, "n": 8})],
        f"worker_{os.getpid()}_{n}",
    )


def imports_functions_of_torch() -> GeneratedProgram:
    p = triton.generate(
        kernel_cases.gated_mlp(1, 64, 32),
        [Schedule({"k": 64, "m": 1, "n": 8})],
        f"worker_{os.getpid()}_f",
    )
    assert "import torch.nn.functional as F" in p.source
    return p


def broken() -> GeneratedProgram:
    p = program(0)
    source = p.source.replace("tl.rsqrt", "tl.no_such_function")
    assert source != p.source
    return GeneratedProgram(source, p.launches)


def asked(p: GeneratedProgram) -> Any:
    module = compiler.load(p.source, p.digest)
    return module.__file__, module.__name__, [*map(compiler._task, p.launches)], 90


@pytest.fixture
def one() -> Iterator[workers.Workers]:
    pool = workers.Workers(1)
    yield pool
    pool.close()


def process_of(pool: workers.Workers) -> workers.Worker:
    process = pool._idle.get()
    pool._idle.put(process)
    assert process is not None
    return process


def has_ended(pid: int, *, reaped: bool = True) -> bool:
    """Wait for a process to end, and return whether it did.

    Args:
        pid: The process.
        reaped: False if nobody may ask for its exit code.
    """
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z" and not reaped:
            return True
        time.sleep(0.02)
    return False


def test_kernels_that_a_worker_compiled_are_found_here(
    one: workers.Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one.compile(*asked(program(1))) is None
    first = process_of(one)
    assert is_in_cache(program(1))
    assert one.compile(*asked(imports_functions_of_torch())) is None
    assert "no_such_function" in str(one.compile(*asked(broken())))
    assert process_of(one) is first  # an error counts as an answer
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(workers.WorkerError, match="ended with exit code -9"):
        one.compile(*asked(program(2)))
    assert one.compile(*asked(program(2))) is None
    assert process_of(one) is not first


def is_in_cache(p: GeneratedProgram) -> bool:
    """Return whether Triton has compiled a program's kernels for sm_90 before."""
    hits: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        knobs = compiler_of_kernels.knobs.compilation
        patch.setattr(knobs, "listener", lambda **what: hits.append(what["cache_hit"]))
        compiler.ahead_of_time(p, 90)
    return hits == [True] * len(p.launches)


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
    found = list(compiler.Compilation(programs, 90, threads=2))
    assert found[0] is found[2] is None and len(compiled) == 3
    assert is_in_cache(programs[0]) and is_in_cache(programs[2])
    assert "no code for sm_90: CompilationError" in str(found[1])
    until = time.monotonic() + 20
    while workers._shared and time.monotonic() < until:
        time.sleep(0.05)
    assert not workers._shared
    assert (
        len(list(compiler.Compilation(programs[:2], 90, threads=2))) == 2 and len(compiled) == 3
    )  # too few


def written(begun: list[int], n: int, launches: tuple[Launch, ...] = ()) -> GeneratedProgram:
    begun.append(n)
    return GeneratedProgram(f"# {n}", launches)


def test_programs_are_written_and_compiled_shortly_before_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    compiled: list[str] = []
    monkeypatch.setattr(compiler, "FEW", 100)
    monkeypatch.setattr(
        compiler, "ahead_of_time", lambda program, sm, load: compiled.append(program.source)
    )
    found = compiler.Compilation([partial(written, begun, n) for n in range(20)], 90, threads=2)
    assert next(found) is None and compiled[0] == "# 0"
    until = time.monotonic() + 60
    while len(begun) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)  # nothing else begins until the next one is wanted
    assert len(begun) == len(compiled) == 3
    assert list(found) == [None] * 19 and begun == [*range(20)]
    assert sorted(compiled) == sorted(f"# {n}" for n in range(20))


def test_an_interrupt_while_texts_are_written_ends_what_is_under_way() -> None:
    begun: list[int] = []

    def interrupted() -> GeneratedProgram:
        raise KeyboardInterrupt

    before = {thread.ident for thread in threading.enumerate()}
    with pytest.raises(KeyboardInterrupt):
        compiler.Compilation([partial(written, begun, 0), interrupted], 90, threads=1)
    until = time.monotonic() + 20
    left = before
    while left and time.monotonic() < until:
        time.sleep(0.01)
        left = {thread.ident for thread in threading.enumerate()} - before
    assert begun == [0] and not left


def test_a_caller_may_let_fewer_be_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(compiler, "FEW", 100)
    monkeypatch.setattr(compiler, "ahead_of_time", lambda program, sm, load: [])
    found = compiler.Compilation([partial(written, begun, n) for n in range(20)], 90, threads=4)
    assert next(found) is None and len(begun) == 5
    found.most_under_way = 1
    for n in range(1, 20):
        assert next(found) is None
        assert len(begun) == min(20, max(5, n + 2))
    assert next(found, "over") == "over" and begun == [*range(20)]


def test_a_caller_that_stops_does_not_wait_for_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[int] = []
    may_end, ended = threading.Event(), threading.Semaphore(0)
    entered = threading.Semaphore(0)

    def in_worker(
        processes: Any, program: GeneratedProgram, sm: int, is_wanted: Callable[[], bool]
    ) -> str | None:
        if program.source == "# 0":
            return None
        entered.release()
        assert may_end.wait(60), "the caller waited"
        ended.release()
        return "refused"

    compiled: list[str] = []

    def compile_here(program: GeneratedProgram, sm: int, load: Any) -> list[Any]:
        compiled.append(program.source)
        return [program.source]

    launch = program(21).launches
    monkeypatch.setattr(compiler, "FEW", 1)
    monkeypatch.setattr(compiler, "in_worker", in_worker)
    monkeypatch.setattr(compiler, "ahead_of_time", compile_here)
    makers = [partial(written, begun, n, launch) for n in range(20)]
    found = compiler.Compilation(makers, 90, threads=2)
    assert next(found) is None and found.is_waiting
    for _ in range(2):
        assert entered.acquire(timeout=60)
    found.close()
    assert next(found, "over") == "over"
    may_end.set()
    for _ in range(len(begun) - 1):
        assert ended.acquire(timeout=60)
    time.sleep(0.1)
    assert len(begun) == 3 and not compiled and not caplog.records


def test_a_program_that_cannot_be_written_gives_its_error() -> None:
    def refuse() -> GeneratedProgram:
        raise CodegenError("its tile is too large")

    first, second = compiler.Compilation([refuse, program(19)], 90, threads=1)
    assert isinstance(first, CodegenError) and second is None and is_in_cache(program(19))


def test_workers_build_the_launchers_that_launches_will_look_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton names a launcher in its cache by a digest of its text."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    if not hasattr(driver, "make_launcher"):
        pytest.skip("this Triton makes launchers in another way")
    built: list[str] = []

    class Launcher:
        def __init__(self, source: Any, metadata: Any):
            assert metadata.num_warps
            names = source.fn.arg_names
            constants = {
                (names.index(k),) if isinstance(k, str) else k: v
                for k, v in source.constants.items()
            }
            built.append(driver.make_launcher(constants, dict(source.signature), None))

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    monkeypatch.setattr(driver, "CudaLauncher", Launcher)
    p = program(20)
    path, name, tasks, sm = asked(p)
    line = json.dumps([path, name, tasks, sm, True, str(tmp_path)])
    monkeypatch.setattr(compiler_of_kernels.knobs.cache, "dir", str(tmp_path))
    assert ahead.answer(line) == "null"
    module = compiler.load(p.source, p.digest)
    (launch,) = p.launches
    tensors = [torch.zeros(4096, dtype=torch.float16) for _ in launch.signature]
    monkeypatch.setattr(compiler_of_kernels.runtime.driver, "_active", Driver())
    kernel = getattr(module, launch.kernel).warmup(
        *tensors,
        overlaps=True,
        grid=(1,),
        **ahead.compile_options(launch.num_warps, launch.num_stages, sm),
    )
    ahead.build_launcher(kernel)
    assert len(built) == 2 and built[0] == built[1]


def test_a_kernel_without_a_launcher_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")

    def refuse(source: Any, metadata: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(driver, "CudaLauncher", refuse)
    ahead.build_launcher(SimpleNamespace(src=None, metadata=None))


def test_forks_of_the_server_collect_none_of_its_objects(tmp_path: Path) -> None:
    """Collecting would write to them, and so copy the server's memory."""
    (tmp_path / "counting_frozen.py").write_text(
        "import gc\n\n\ndef prepare():\n    pass\n\n\n"
        "def answer(line):\n    return str(gc.get_freeze_count())\n"
    )
    sys.path.append(str(tmp_path))
    pool = workers.Workers(1, "counting_frozen")
    try:
        assert int(pool.ask(lambda: "how many?") or 0) > 1000
    finally:
        pool.close()
        sys.path.remove(str(tmp_path))


def test_a_program_that_only_the_worker_refuses_is_compiled_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "PROCESSES_FROM", 1)
    monkeypatch.setattr(compiler, "FEW", 1)
    monkeypatch.setattr(workers.Workers, "compile", lambda *_: "ImportError: no such module")
    (result,) = compiler.Compilation([program(12)], 90, threads=2)
    assert result is None and is_in_cache(program(12))
    assert "this process compiled: ImportError: no such module" in caplog.text


def test_a_program_whose_process_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "PROCESSES_FROM", 1)
    monkeypatch.setattr(compiler, "FEW", 1)

    def ended(*_: Any) -> Any:
        raise workers.WorkerError("the process that compiled it ended with exit code -11")

    monkeypatch.setattr(workers.Workers, "compile", ended)
    (result,) = compiler.Compilation([program(13)], 90, threads=2)
    assert isinstance(result, CodegenError) and "exit code -11" in str(result)


def test_threads_compile_where_no_process_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "PROCESSES_FROM", 1)
    monkeypatch.setattr(compiler, "FEW", 1)

    def no(server: workers.ForkServer) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr(workers, "_shared", {})
    monkeypatch.setattr(workers.ForkServer, "fork", no)
    (result,) = compiler.Compilation([program(5)], 90, threads=2)
    assert result is None and is_in_cache(program(5))


@pytest.mark.parametrize("executable", [None, "", sys.executable, "/bin/false"])
def test_threads_compile_where_python_is_part_of_another_program(
    monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "frozen", executable == sys.executable, raising=False)
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(compiler, "PROCESSES_FROM", 1)
    monkeypatch.setattr(compiler, "FEW", 1)
    monkeypatch.setattr(workers, "_shared", {})
    begun: list[bool] = []
    begin = workers.ForkServer.fork

    def counted(server: workers.ForkServer) -> Any:
        begun.append(True)
        return begin(server)

    monkeypatch.setattr(workers.ForkServer, "fork", counted)
    programs = [program(6), program(7), program(8)]
    assert list(compiler.Compilation(programs, 90, threads=1)) == [None] * 3
    assert all(map(is_in_cache, programs))
    assert len(begun) == 1  # and it is not asked again for each program


def test_paths_that_are_no_strings_relative_or_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiler, "PROCESSES_FROM", 1)
    monkeypatch.setattr(compiler, "FEW", 1)
    monkeypatch.setattr(workers, "_shared", {})
    monkeypatch.setattr(sys, "path", [*sys.path, Path("no string")])
    monkeypatch.setenv("MIRAGE_HF_CACHE", "relative")
    first, second = program(9), program(10)
    for p, change in (
        (first, lambda: None),
        (second, lambda: monkeypatch.chdir("elsewhere")),
        (
            first,
            lambda: (
                Path(str(compiler.load(first.source, first.digest).__file__))
                .resolve()
                .unlink(missing_ok=True)
            ),
        ),
    ):
        change()
        (result,) = compiler.Compilation([p], 90, threads=1)
        assert result is None and is_in_cache(p)
    for pool in workers._shared.values():
        pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_neither_keeps_processes_nor_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_shared", {})
    with workers.at_work(1) as pool:
        assert pool.compile(*asked(program(11))) is None
        process = process_of(pool)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, bytes([len(workers._shared), workers._using]))
            time.sleep(60)
            os._exit(0)
        try:
            assert os.read(told, 2) == bytes([0, 0]) and len(workers._shared) == 1
            begun = time.monotonic()
            pool.close()  # with its sockets open in the child
            assert has_ended(process.pid) and time.monotonic() - begun < 30
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_workers_are_forks_of_one_process_and_end_with_the_one_that_asked() -> None:
    script = """
import sys, types
package = types.ModuleType("mirage_hf")
package.__path__ = [sys.argv[1]]
sys.modules["mirage_hf"] = package
from mirage_hf.codegen import workers
pool = workers.Workers(2)
both = pool._begin(), pool._begin()
print(*(worker.pid for worker in both), flush=True)
sys.stdin.read()
"""
    package = str(Path(workers.__file__).parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", script, package],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as asking:
        assert asking.stdout is not None
        first, second = map(int, asking.stdout.readline().split())
        server = parent_of(first)
        assert server == parent_of(second) != asking.pid and parent_of(server) == asking.pid
        asking.kill()
    assert has_ended(first) and has_ended(second)
    assert has_ended(server, reaped=False), "its parent has ended"


def test_a_worker_that_dies_after_its_server_is_replaced(one: workers.Workers) -> None:
    assert one.compile(*asked(program(14))) is None
    first = process_of(one)
    one._server.close()  # idle workers are ended in this way, too
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(workers.WorkerError, match="exit code None"):
        one.compile(*asked(program(15)))
    assert one.compile(*asked(program(15))) is None
    assert process_of(one).pid != first.pid


def test_exit_codes_are_known_if_this_process_ignores_its_children(one: workers.Workers) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert one.compile(*asked(program(16))) is None
    finally:
        signal.signal(signal.SIGCHLD, before)
    os.kill(process_of(one).pid, signal.SIGKILL)
    with pytest.raises(workers.WorkerError, match="exit code -9"):
        one.compile(*asked(program(17)))
    assert one.compile(*asked(program(17))) is None, "the server goes on"


def test_closed_workers_leave_no_processes() -> None:
    pool = workers.Workers(2)
    both = [pool._begin(), pool._begin()]
    for _ in both:
        pool._idle.get()
    for worker in both:
        pool._idle.put(worker)
    server = pool._server._process
    assert server is not None
    pool.close()
    assert server.returncode == 0, "it was killed"
    assert all(has_ended(worker.pid) for worker in both)


def test_a_fork_that_fails_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(os, "fork", fail)
    ours, theirs = socket.socketpair()
    with ours:
        fork_server._fork(theirs, theirs.detach(), None)
        assert ours.recv(1) == b""


def test_threads_compile_where_sockets_cannot_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "send_fds")
    monkeypatch.setattr(compiler, "PROCESSES_FROM", 1)
    monkeypatch.setattr(compiler, "FEW", 1)
    monkeypatch.setattr(workers, "_shared", {})
    (result,) = compiler.Compilation([program(18)], 90, threads=2)
    assert result is None and is_in_cache(program(18))


def test_threads_of_this_process_may_parse_at_the_same_time() -> None:
    """Meanwhile the garbage collector runs finalizers that let other threads run.

    In Python 3.11.7 several of these threads failed each time.
    """
    p = program(7)
    kernel = getattr(compiler.load(p.source, p.digest), p.launches[0].kernel)
    failed, over = list[BaseException](), threading.Event()

    class Litter:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            time.sleep(1e-4)

    def litter() -> None:
        while not over.is_set():
            Litter()
            time.sleep(1e-4)

    def parse(depth: int) -> None:
        if depth:
            return parse(depth - 1)
        try:
            for _ in range(60):
                kernel.parse()
        except SystemError as e:
            failed.append(e)

    threads = [threading.Thread(target=parse, args=(5 * n,)) for n in range(4)]
    before = gc.get_threshold()
    gc.set_threshold(200)
    try:
        for t in [threading.Thread(target=litter), *threads]:
            t.start()
        for t in threads:
            t.join()
    finally:
        over.set()
        gc.set_threshold(*before)
    assert not failed
