"""Generated sources as modules, and ahead-of-time compilation for any GPU without one."""

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mirage_hf import errors
from mirage_hf.codegen import ahead, workers
from mirage_hf.codegen.triton import GeneratedProgram, Launch
from mirage_hf.settings import settings

ARCHITECTURES = (80, 89, 90, 100, 120)
"""Compute capabilities that every kernel must compile for."""

_log = logging.getLogger("mirage_hf")

_loaded: dict[str, ModuleType] = {}
_lock = threading.Lock()


def load(source: str, digest: str) -> ModuleType:
    """Import a generated source; the module has `run(inputs)`. The file is kept under the cache directory by its digest.

    Errors: CodegenError when the source is not the one that `digest` (SHA-256) names.
    """
    actual = hashlib.sha256(source.encode()).hexdigest()
    if actual != digest:
        raise errors.CodegenError(
            f"kernel source: its SHA-256 is {actual[:12]}…, expected {digest[:12]}…; the file is damaged, "
            "generate it again"
        )
    prepare_triton()
    with _lock:
        if digest not in _loaded:
            path = _keep(source, digest)
            _loaded[digest] = ahead.import_text(
                source, str(path), f"mirage_hf_generated_{digest[:16]}"
            )  # the text that was checked
        return _loaded[digest]


@contextlib.contextmanager
def passing() -> Iterator[None]:
    """Sources that are first loaded in this block are forgotten behind it, but by those who still hold their functions: each whose kernels
    share loops holds a megabyte of a GPU's memory for its counters (launching.py), and a tuner loads hundreds."""
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
    """Work around faults of Triton and Python that kernels would meet. Call it before a kernel is launched or compiled."""
    with _lock:
        if settings().interpret:
            _let_bounds_be_loaded()
        elif PARSER_RACES:
            _parse_in_turns()


def _let_bounds_be_loaded() -> None:
    """Let the interpreter of Triton 3.6 take loaded numbers as ends of a loop: to it they are arrays of one element, which NumPy 2.4
    and newer do not convert."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "__module__", "") == __name__:
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


PARSER_RACES = (3, 11) <= sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 2)
"""Threads of these that parse at the same time lose count of each other's depth, and one ends with a SystemError (Python's gh-106905)."""

_parsing = threading.Lock()


def _parse_in_turns() -> None:
    """Let threads in which Triton parses kernels wait for each other."""
    from triton.runtime.jit import JITFunction

    parse = JITFunction.parse
    if getattr(parse, "__module__", "") == __name__:
        return

    def parsed(self: Any) -> Any:
        with _parsing:
            return parse(self)

    JITFunction.parse = parsed


def _keep(source: str, digest: str) -> Path:
    folder = settings().cache_dir / "kernels"
    try:
        return _kept_in(folder, source, digest)
    except OSError as e:
        _log.warning(
            "%s cannot be written (%s): kernels are kept for this process only; set MIRAGE_HF_CACHE to a folder that can",
            folder,
            e.strerror,
        )
        return _kept_in(_own_folder(), source, digest)


@cache
def _own_folder() -> Path:
    """A folder of this process, removed when it ends."""
    folder = tempfile.mkdtemp(prefix="mirage_hf_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _kept_in(folder: Path, source: str, digest: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest}.py"
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        handle, partial = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(source)
        os.replace(partial, path)
    return path


@dataclass(frozen=True)
class Compiled:
    """A kernel for one architecture: texts by kind ("ptx", "ttgir" …), the cubin, and what ptxas says of its use."""

    kernel: str
    sm: int
    asm: dict[str, Any]
    shared: int
    """Bytes of shared memory a block uses."""
    num_warps: int

    @property
    def ptx(self) -> str:
        return str(self.asm["ptx"])


def ahead_of_time(program: GeneratedProgram, sm: int) -> list[Compiled]:
    """Compile every kernel of a program for compute capability `sm` (90 for H100 and H200); needs no GPU.

    Pointers are taken as 16-byte aligned, as the JIT finds torch's. Errors: CodegenError with the compiler's words.
    """
    module = load(program.source, program.digest)
    return [_compile(module, launch, sm) for launch in program.launches]


def _compile(module: ModuleType, launch: Launch, sm: int) -> Compiled:
    if not hasattr(getattr(module, launch.kernel), "cache_key"):
        raise errors.CodegenError(
            f"{launch.kernel}: the Triton interpreter is on, it cannot compile; unset TRITON_INTERPRET"
        )
    try:
        kernel = ahead.compile_kernel(module, _task(launch), sm)
    except Exception as e:
        raise _refused(launch.kernel, sm, errors.described(e, whole=True)) from e
    return Compiled(launch.kernel, sm, dict(kernel.asm), kernel.metadata.shared, launch.num_warps)


def _task(launch: Launch) -> ahead.Task:
    return launch.kernel, launch.signature, launch.num_warps, launch.num_stages


def _refused(kernels: str, sm: int, why: str) -> errors.CodegenError:
    return errors.CodegenError(f"{kernels}: no code for sm_{sm}: {why[:2000]}")


PROCESSES_FROM, FEW = 2, 8
"""Threads from which processes compile, and programs below which it is not worth beginning any."""

MOST_PROCESSES = 12
"""Each takes 80 to 130 MB."""


def compiling(
    programs: Sequence[GeneratedProgram], sm: int, threads: int | None = None
) -> Iterator[list[Compiled] | errors.CodegenError]:
    """Compile many programs in parallel and give each when it is done, in order; a program that does not compile gives its error
    instead. What nobody waits for any more is not begun."""
    threads = threads or settings().threads
    with contextlib.ExitStack() as stack:
        processes: workers.Workers | None = None
        if threads >= PROCESSES_FROM and len(programs) >= FEW and not settings().interpret:
            processes = stack.enter_context(workers.at_work(min(threads, MOST_PROCESSES)))

        def attempt(program: GeneratedProgram) -> list[Compiled] | errors.CodegenError:
            try:
                beside = (
                    _beside(processes, program, sm)
                    if processes is not None and program.launches
                    else None
                )
                compiled = ahead_of_time(program, sm)
            except errors.CodegenError as e:
                return e
            if beside is not None:
                _log.warning(
                    "a process that compiles kernels failed where this one did not: %s", beside
                )
            return compiled

        pool = ThreadPoolExecutor(threads)
        try:
            yield from pool.map(attempt, programs)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _beside(processes: workers.Workers, program: GeneratedProgram, sm: int) -> str | None:
    """Have a process compile a program's kernels, so that this one finds them in the cache. Returns what it raised, if anything: this one's
    word is what counts. Errors: CodegenError where the process ended, as this one might."""
    module = load(program.source, program.digest)
    try:
        path = _keep(
            program.source, program.digest
        )  # what was loaded long ago may have been deleted
        return processes.compile(str(path), module.__name__, [*map(_task, program.launches)], sm)
    except workers.Ended as e:
        raise _refused(", ".join(launch.kernel for launch in program.launches), sm, str(e)) from e
    except OSError:  # no more processes, or no memory for them: threads do
        return None
