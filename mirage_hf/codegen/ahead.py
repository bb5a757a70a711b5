"""Compile kernels of a generated file without a GPU, also on behalf of another process.

This file imports Triton and nothing else that is large, so the first worker starts in a fraction of
a second. Triton holds the GIL for a third of a compilation, so more than three threads gain little.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: A kernel's name, its arguments with their Triton types (without `overlaps`), warps and pipeline
#: stages.
Task = tuple[str, Sequence[tuple[str, str]], int, int]


def import_text(text: str, path: str, name: str) -> ModuleType:
    """Return a module of `text`, the contents of the file at `path`. No bytecode cache is read.

    Triton takes the functions' lines from Python's cache of lines, so it does not read the file. It
    caches what it compiles under the module's name.
    """
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def compile_options(num_warps: int, num_stages: int, sm: int) -> dict[str, Any]:
    """Return the options with which a kernel is compiled for a compute capability."""
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return options | ({"launch_pdl": True} if sm >= 90 else {})


def compile_kernel(
    kernel: Any,
    signature: Sequence[tuple[str, str]],
    num_warps: int,
    num_stages: int,
    sm: int,
    constants: Mapping[str, Any] | None = None,
) -> Any:
    """Return a compiled kernel for a compute capability. Pointers are 16-byte aligned.

    Args:
        kernel: The `@triton.jit` function.
        signature: Its tensors, with their Triton types.
        num_warps: Warps of a block.
        num_stages: Loop iterations whose loads are in flight.
        sm: The compute capability.
        constants: Values of constexprs besides `overlaps`, which hand-written kernels have.

    Raises:
        Exception: Whatever Triton raises: RuntimeError, CompilationError, OutOfResources …
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(signature))}
    constexprs = {"overlaps": sm >= 90, **(constants or {})}
    source = ASTSource(
        kernel,
        signature={**dict(signature), **dict.fromkeys(constexprs, "constexpr")},
        constexprs=constexprs,
        attrs=aligned,
    )
    options = compile_options(num_warps, num_stages, sm)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


class HollowTorch(MetaPathFinder, Loader):
    """An import hook that gives empty modules in the place of torch and its submodules.

    Generated files import torch, but need it only for launches and checks. It takes seconds and
    hundreds of MB.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec for torch and its modules."""
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Use the default module."""

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def hash_triton() -> None:
    """Let Triton hash its own files. It does so once in a process, and takes half a second."""
    from triton.runtime import cache

    with contextlib.suppress(AttributeError):  # other versions do it elsewhere
        cache.triton_key()


def build_launcher(kernel: Any) -> None:
    """Let Triton build the C function that launches a kernel, and keep it in its cache on disk.

    The C compiler takes 0.3 to 0.5 s for each new signature, and the first launch would wait for
    it. If this fails, for example without a driver, the launch builds it and raises the error.
    """
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


def prepare() -> None:
    """Import what `answer` needs, and do what all forks would do."""
    import triton  # noqa: F401

    sys.meta_path.insert(0, HollowTorch())
    hash_triton()


def answer(asked: str) -> str:
    """Compile what a line of JSON asks for. Return null or the error, as JSON."""
    from triton import knobs

    path, module_name, tasks, sm, builds_launchers, knobs.cache.dir = json.loads(asked)
    try:
        with open(path, encoding="utf-8") as f:
            module = import_text(f.read(), path, module_name)
        for name, signature, num_warps, num_stages in tasks:
            kernel = getattr(module, name)
            compiled = compile_kernel(kernel, signature, num_warps, num_stages, sm)
            if builds_launchers:
                build_launcher(compiled)
    except Exception as e:
        return json.dumps(f"{type(e).__name__}: {str(e).strip() or 'no message'}")
    return "null"
