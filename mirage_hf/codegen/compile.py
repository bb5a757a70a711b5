"""Import generated sources, and compile them ahead of time for any GPU without one."""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import linecache
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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

#: Imports a source with a digest, as `load` does.
Load = Callable[[str, str], ModuleType]

_loaded: dict[str, ModuleType] = {}
_lock = threading.RLock()  # garbage collection inside it may forget sources


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
            module = ahead.import_text(source, str(path), _module_name(digest))
            cubin_launch.install(module, digest)
            _loaded[digest] = module
        return _loaded[digest]


def _module_name(digest: str) -> str:
    """Return the name under which a source is imported. Triton caches kernels under it."""
    return f"mirage_hf_generated_{digest[:16]}"


def was_loaded(digest: str) -> bool:
    """Return whether a process of this user has loaded the source with this digest before."""
    folder = settings().cache_dir / "kernels"
    return digest in _loaded or _is_kept(folder / f"{digest}.py", digest)


#: `sys.getrefcount` of an object that one other holds. The call itself adds one.
_HELD_ONCE = 2


@contextlib.contextmanager
def passing() -> Iterator[Load]:
    """Yield a `load` whose sources are forgotten after the block, unless they were known before.

    A tuner loads hundreds of sources. Each kernel whose blocks share loops holds a megabyte of GPU
    memory for counters (launching.py), until its functions are no longer held.
    """
    new: set[str] = set()

    def load_for_now(source: str, digest: str) -> ModuleType:
        with _lock:
            if digest not in _loaded:
                new.add(digest)
            return load(source, digest)

    try:
        yield load_for_now
    finally:
        with _lock:
            is_empty = [_forget(digest) for digest in new & _loaded.keys()]
        if not all(is_empty):
            gc.collect()


def _forget(digest: str) -> bool:
    """Forget a loaded source. Return whether its functions are gone, too.

    A module's functions refer to all that it holds, so they go once it is emptied. It is not if
    somebody holds it or its function, such as Triton after it compiled in this process.
    """
    module = _loaded.pop(digest)
    sys.modules.pop(module.__name__, None)
    linecache.cache.pop(str(module.__file__), None)
    is_held = sys.getrefcount(module) > _HELD_ONCE or sys.getrefcount(module.run) > _HELD_ONCE
    if not is_held:
        module.__dict__.clear()
    return not is_held


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


def ahead_of_time(program: GeneratedProgram, sm: int, load: Load = load) -> list[Compiled]:
    """Compile every kernel of a program for a compute capability, without a GPU.

    Pointers are taken as 16-byte aligned, as torch's are.

    Args:
        program: The program.
        sm: The compute capability.
        load: Imports its source.

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
    function = getattr(module, launch.kernel)
    if not hasattr(function, "cache_key"):
        raise errors.CodegenError(
            f"{launch.kernel}: the Triton interpreter is on and cannot compile; unset "
            "TRITON_INTERPRET"
        )
    try:
        kernel = ahead.compile_kernel(
            function, launch.signature, launch.num_warps, launch.num_stages, sm
        )
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


class Compilation:
    """Compiles programs in parallel. Iterate for what became of each, in order.

    That is None if a program compiles, and the error if not. Its first launch finds Triton's
    kernels in Triton's cache.

    Programs are generated in the caller's thread. In other threads they would take Python's lock
    from a caller that measures.

    Attributes:
        most_under_way: The most programs that are under way besides the next result. At first as
            many as there are threads, or workers if these are fewer.
    """

    def __init__(
        self,
        programs: Sequence[GeneratedProgram | Callable[[], GeneratedProgram]],
        sm: int,
        threads: int | None = None,
        load: Load = load,
    ):
        """Compile the first programs.

        Args:
            programs: The programs, or functions that generate them, called shortly before the
                compiler.
            sm: The compute capability.
            threads: Threads to use; by default MIRAGE_HF_THREADS.
            load: Imports sources that this process compiles itself.
        """
        threads = threads or settings().threads
        self._sm, self._load, self._programs = sm, load, deque(programs)
        self._is_over = threading.Event()
        self._workers: workers.Workers | None = None
        self._at_end = contextlib.ExitStack()
        if threads >= PROCESSES_FROM and len(programs) >= FEW and not settings().interpret:
            threads = min(threads, MOST_PROCESSES)
            self._workers = self._at_end.enter_context(workers.at_work(threads))
            self._pool = self._workers.threads
        else:
            self._pool = ThreadPoolExecutor(threads)
            self._at_end.callback(self._pool.shutdown, wait=False)
        self.most_under_way = threads
        self._under_way: deque[Future[errors.CodegenError | None]] = deque()
        try:
            self._begin_more()
        except BaseException:
            self.close()
            raise

    @property
    def is_waiting(self) -> bool:
        """Whether the next result is not there yet."""
        return bool(self._under_way) and not self._under_way[0].done()

    def __iter__(self) -> Iterator[errors.CodegenError | None]:
        return self

    def __next__(self) -> errors.CodegenError | None:
        self._begin_more()
        if not self._under_way:
            self.close()
            raise StopIteration
        return self._under_way.popleft().result()

    def close(self) -> None:
        """Begin no further program, and drop the results of those under way."""
        self._is_over.set()
        self._programs.clear()
        while self._under_way:
            self._under_way.popleft().cancel()
        self._at_end.close()

    def _is_wanted(self) -> bool:
        return not self._is_over.is_set()

    def _begin_more(self) -> None:
        while self._programs and len(self._under_way) <= self.most_under_way:
            given = self._programs.popleft()
            try:
                program = given() if callable(given) else given
            except errors.CodegenError as e:
                failed: Future[errors.CodegenError | None] = Future()
                failed.set_result(e)
                self._under_way.append(failed)
            else:
                self._under_way.append(self._pool.submit(self._compile, program))

    def _compile(self, program: GeneratedProgram) -> errors.CodegenError | None:
        """Compile a program, in a worker if there are any. Return the error if that fails."""
        refused = None
        try:
            if self._workers is not None:
                with contextlib.suppress(OSError):  # no process can be started
                    refused = in_worker(self._workers, program, self._sm, self._is_wanted)
                    if refused is None and not any(launch.cuda for launch in program.launches):
                        return None
            if not self._is_wanted():
                return None
            ahead_of_time(program, self._sm, self._load)
        except errors.CodegenError as e:
            return e
        if refused is not None:
            _log.warning(
                "a worker could not compile a kernel that this process compiled: %s", refused
            )
        return None


def in_worker(
    processes: workers.Workers,
    program: GeneratedProgram,
    sm: int,
    is_wanted: Callable[[], bool] = lambda: True,
) -> str | None:
    """Let a worker compile a program's Triton kernels. This process finds them in Triton's cache.

    Args:
        processes: The workers.
        program: The program.
        sm: The compute capability.
        is_wanted: As for `Workers.compile`.

    Returns:
        What the compiler raised in the worker, or None.

    Raises:
        CodegenError: If the worker crashed, because this process might crash too.
        OSError: If no worker can be started.
    """
    tasks = [_task(launch) for launch in program.launches if not launch.cuda]
    if not tasks:
        return None
    path, name = _keep(program.source, program.digest), _module_name(program.digest)
    try:
        return processes.compile(str(path), name, tasks, sm, is_wanted)
    except workers.WorkerError as e:
        raise _refused(", ".join(launch.kernel for launch in program.launches), sm, str(e)) from e
