"""Import generated sources, and compile them ahead of time for any GPU without one."""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mirage_hf import errors, files
from mirage_hf.codegen import ahead, cubin_launch, workers
from mirage_hf.codegen.generated_program import GeneratedProgram, Launch
from mirage_hf.settings import settings

#: Compute capabilities that every kernel must compile for.
ARCHITECTURES = (80, 89, 90, 100, 120)

#: The most bytes of a kept source.
_MOST_BYTES = 1 << 26

_log = logging.getLogger("mirage_hf")

_loaded: dict[str, ModuleType] = {}
_lock = threading.Lock()


def load(source: str, digest: str) -> ModuleType:
    """Import a generated source and return its module, which has `run(inputs)`.

    The file is kept in the cache directory under its digest. Its kernels that the packaged zoo has
    cubins for are not compiled.

    Raises:
        CodegenError: If the source does not have this digest (SHA-256).
    """
    actual = hashlib.sha256(source.encode()).hexdigest()
    if actual != digest:
        raise errors.CodegenError(
            f"kernel source: its SHA-256 is {actual[:12]}…, expected {digest[:12]}…; the file is "
            "damaged, "
            "generate it again"
        )
    prepare_triton()
    with _lock:
        if digest not in _loaded:
            path = _keep(source, digest)
            name = f"mirage_hf_generated_{digest[:16]}"
            module = ahead.import_text(source, str(path), name)
            cubin_launch.install(module, digest)
            _loaded[digest] = module
        return _loaded[digest]


def was_loaded(digest: str) -> bool:
    """Return whether a process of this user has loaded the source with this digest before."""
    folder = settings().cache_dir / "kernels"
    return digest in _loaded or _is_kept(folder / f"{digest}.py", digest)


@contextlib.contextmanager
def passing() -> Iterator[None]:
    """Forget sources first loaded in this block, unless their functions are still held.

    A tuner loads hundreds of sources. Each kernel whose blocks share loops holds a megabyte of GPU
    memory for counters (launching.py).
    """
    with _lock:
        known = set(_loaded)
    try:
        yield
    finally:
        with _lock:
            for digest in _loaded.keys() - known:
                sys.modules.pop(_loaded.pop(digest).__name__, None)
        gc.collect()  # a module and its functions refer to each other


def prepare_triton() -> None:
    """Work around faults of Triton and Python. Call it before a kernel is launched or compiled."""
    with _lock:
        if settings().interpret:
            _let_bounds_be_loaded()
        elif PARSER_RACES:
            _parse_in_turns()


def _let_bounds_be_loaded() -> None:
    """Let Triton 3.6's interpreter take loaded numbers as the bounds of a loop.

    The interpreter holds them as arrays of one element, which NumPy 2.4 and newer do not convert
    to an index.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "__module__", "") == __name__:
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


#: True for Python versions in which threads may not parse at the same time. They would miscount the
#: depth of recursion, and one would end with a SystemError (Python issue gh-106905).
PARSER_RACES = (3, 11) <= sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 2)

_parsing = threading.Lock()


def _parse_in_turns() -> None:
    """Let only one thread at a time parse a kernel for Triton."""
    from triton.runtime.jit import JITFunction

    parse = JITFunction.parse
    if getattr(parse, "__module__", "") == __name__:
        return

    def parsed(self: Any) -> Any:
        with _parsing:
            return parse(self)

    JITFunction.parse = parsed


def _keep(source: str, digest: str) -> Path:
    """Write a source to the cache, or to a folder of this process if that fails."""
    folder = settings().cache_dir / "kernels"
    try:
        return _kept_in(folder, source, digest)
    except OSError as e:
        _log.warning(
            "%s cannot be written (%s): kernels are kept for this process only; set "
            "MIRAGE_HF_CACHE "
            "to a folder that can be written",
            folder,
            e.strerror,
        )
        return _kept_in(_own_folder(), source, digest)


@cache
def _own_folder() -> Path:
    """Return a folder of this process, removed when it ends."""
    folder = tempfile.mkdtemp(prefix="mirage_hf_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _kept_in(folder: Path, source: str, digest: str) -> Path:
    """Write a source to a folder atomically, and return the path of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest}.py"
    if not _is_kept(path, digest):
        handle, partial = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(source)
        os.replace(partial, path)
    return path


def _is_kept(path: Path, digest: str) -> bool:
    try:
        kept = files.read_bytes(path, _MOST_BYTES)
    except OSError:
        return False
    return hashlib.sha256(kept).hexdigest() == digest


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one architecture.

    Attributes:
        kernel: Its name.
        sm: The compute capability, as 90.
        asm: Texts by kind ("ptx", "ttgir" …), and the cubin.
        shared: Bytes of shared memory that a block uses.
        num_warps: Warps of a block.
    """

    kernel: str
    sm: int
    asm: dict[str, Any]
    shared: int
    num_warps: int

    @property
    def ptx(self) -> str:
        """The PTX text."""
        return str(self.asm["ptx"])


def ahead_of_time(program: GeneratedProgram, sm: int) -> list[Compiled]:
    """Compile every kernel of a program for a compute capability, without a GPU.

    Pointers are taken as 16-byte aligned, as torch's are.

    Raises:
        CodegenError: If the compiler rejects a kernel. The message quotes the compiler.
    """
    module = load(program.source, program.digest)
    return [_compile(module, launch, sm) for launch in program.launches]


def _compile(module: ModuleType, launch: Launch, sm: int) -> Compiled:
    """Compile one kernel."""
    if launch.cuda:
        try:
            _, cubin = module.compiled_cuda(launch.kernel, getattr(module, launch.kernel), sm)
        except Exception as e:
            raise _refused(launch.kernel, sm, errors.described(e, whole=True)) from e
        return Compiled(launch.kernel, sm, {"cubin": cubin}, launch.shared, launch.num_warps)
    if not hasattr(getattr(module, launch.kernel), "cache_key"):
        raise errors.CodegenError(
            f"{launch.kernel}: the Triton interpreter is on and cannot compile; unset "
            "TRITON_INTERPRET"
        )
    try:
        kernel = ahead.compile_kernel(module, _task(launch), sm)
    except Exception as e:
        raise _refused(launch.kernel, sm, errors.described(e, whole=True)) from e
    return Compiled(launch.kernel, sm, dict(kernel.asm), kernel.metadata.shared, launch.num_warps)


def _task(launch: Launch) -> ahead.Task:
    """Return a launch as a task for ahead.py."""
    return launch.kernel, launch.signature, launch.num_warps, launch.num_stages


def _refused(kernels: str, sm: int, why: str) -> errors.CodegenError:
    """Return the error for kernels that do not compile."""
    return errors.CodegenError(f"{kernels}: no code for sm_{sm}: {why[:2000]}")


#: Worker processes compile if there are at least this many threads and programs. For fewer,
#: starting them takes longer than they save.
PROCESSES_FROM, FEW = 2, 8

#: Most worker processes. Each takes 80 to 130 MB.
MOST_PROCESSES = 16


def compiling(
    programs: Iterable[GeneratedProgram | Callable[[], GeneratedProgram]],
    sm: int,
    threads: int | None = None,
) -> Iterator[list[Compiled] | errors.CodegenError]:
    """Compile many programs in parallel and yield each result in order.

    A program that does not compile yields its error. Beyond the one that is yielded, as many
    programs are under way as there are threads, or workers if these are fewer. Once the caller
    stops iterating, no further one is started, and the results of those under way are dropped.

    Args:
        programs: The programs, or functions that generate them, called shortly before the compiler.
        sm: The compute capability.
        threads: Threads to use; by default MIRAGE_HF_THREADS.
    """
    threads = threads or settings().threads
    programs = deque(programs)
    is_over = threading.Event()
    processes: workers.Workers | None = None
    at_work = contextlib.ExitStack()
    if threads >= PROCESSES_FROM and len(programs) >= FEW and not settings().interpret:
        threads = min(threads, MOST_PROCESSES)
        processes = at_work.enter_context(workers.at_work(threads))

    def attempt(
        given: GeneratedProgram | Callable[[], GeneratedProgram],
    ) -> list[Compiled] | errors.CodegenError:
        try:
            program = given() if callable(given) else given
            worker_error = (
                in_worker(processes, program, sm)
                if processes is not None and program.launches and not is_over.is_set()
                else None
            )
            if is_over.is_set():
                return []
            compiled = ahead_of_time(program, sm)
        except errors.CodegenError as e:
            return e
        if worker_error is not None:
            _log.warning(
                "a worker could not compile a kernel that this process compiled: %s",
                worker_error,
            )
        return compiled

    pool = ThreadPoolExecutor(threads)
    under_way: deque[Future[list[Compiled] | errors.CodegenError]] = deque()
    try:
        while programs or under_way:
            while programs and len(under_way) <= threads:
                under_way.append(pool.submit(attempt, programs.popleft()))
            yield under_way.popleft().result()
    finally:
        is_over.set()
        pool.shutdown(wait=False, cancel_futures=True)
        at_work.close()


def in_worker(processes: workers.Workers, program: GeneratedProgram, sm: int) -> str | None:
    """Let a worker compile a program, so that this process finds it in Triton's cache.

    Returns:
        What the worker raised, or None. This process then compiles for itself, so its own result
        counts.

    Raises:
        CodegenError: If the worker crashed, because this process might crash too.
    """
    module = load(program.source, program.digest)
    try:
        # The file of a source that was loaded long ago may have been deleted.
        path = _keep(program.source, program.digest)
        tasks = [_task(launch) for launch in program.launches if not launch.cuda]
        return processes.compile(str(path), module.__name__, tasks, sm) if tasks else None
    except workers.WorkerError as e:
        raise _refused(", ".join(launch.kernel for launch in program.launches), sm, str(e)) from e
    except OSError:  # no process can be started, so threads do the work
        return None
