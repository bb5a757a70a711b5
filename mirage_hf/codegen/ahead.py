"""One kernel of a generated file compiled without a GPU; and, as a script, a process that does so for others.

Imports Triton and nothing else that is large, so that such a process is there in a fraction of a second: Triton holds Python's lock
for a third of a compilation, and threads alone gain little beyond three.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Task = tuple[str, Sequence[tuple[str, str]], int, int]
"""A kernel's name, its arguments with their Triton types but for `overlaps`, warps and stages."""

READY = "ready"
"""The first line of a process that compiles: another program than Python's, or one without Triton, does not say it."""


def import_text(text: str, path: str, name: str) -> ModuleType:
    """A module of `text`, which `path` holds: no bytecode cache is read. Triton reads the functions' lines at `path`, and keeps what it
    compiles under the module's name."""
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def compile_kernel(module: ModuleType, task: Task, sm: int) -> Any:
    """Triton's compiled kernel for compute capability `sm`. Pointers are taken as 16-byte aligned, as the JIT finds torch's.

    Errors: whatever Triton raises: RuntimeError, CompilationError, OutOfResources, errors of its passes …
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, signature, num_warps, num_stages = task
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(signature))}
    source = ASTSource(
        getattr(module, kernel),
        signature={**dict(signature), "overlaps": "constexpr"},
        constexprs={"overlaps": sm >= 90},
        attrs=aligned,
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True} | (
        {"launch_pdl": True} if sm >= 90 else {}
    )
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


class HollowTorch(MetaPathFinder, Loader):
    """torch and what lies in it as empty modules: generated files import them, but need them for launches and checks only, and torch
    takes seconds and hundreds of MB."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: ModuleType) -> None: ...


def serve(asked: Iterable[str]) -> None:
    """Compile what each line of JSON asks for, into Triton's cache on disk, and answer with a line: what went wrong, or null."""
    from triton import knobs

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler's own words are no answers
    sys.meta_path.insert(0, HollowTorch())
    print(READY, file=answers, flush=True)
    for line in asked:
        path, name, tasks, sm, knobs.cache.dir = json.loads(line)
        failed = None
        try:
            with open(path, encoding="utf-8") as f:
                module = import_text(f.read(), path, name)
            for task in tasks:
                compile_kernel(module, task, sm)
        except Exception as e:
            failed = f"{type(e).__name__}: {str(e).strip() or 'no message'}"
        answers.write(json.dumps(failed) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path[:] = json.loads(
        sys.argv[1]
    )  # where the process that began this one finds Triton; not the folder of this file
    serve(sys.stdin)
