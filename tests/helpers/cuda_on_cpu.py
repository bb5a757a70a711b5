"""Compile and run generated CUDA C++ on the CPU (see cuda_on_cpu.h)."""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from mirage_hf.codegen.cuda_math import DEVICE_HELPERS
from mirage_hf.graph.kernel import KernelGraph

CXX = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("c++")

#: Orders of threads: by number, from the last to the first, and random ones.
ORDERS = (0, 1, 2, 3)

_LAUNCH = re.compile(r"(\w+)::run<<<(.*), (.*), (.*), stream>>>\(([^;]*)\);")
_SHARED = re.compile(r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];")
_CLUSTER = re.compile(r"^namespace (\w+) \{$.*?__cluster_dims__\((\w+), 1, 1\)", re.M | re.S)


def as_cpp(text: str) -> str:
    """Return a generated file as C++ that cuda_on_cpu.h runs, without its includes."""
    clusters = {}
    for part in re.split(r"^\}  // namespace \w+$", text, flags=re.M):
        if found := _CLUSTER.search(part):
            clusters[found.group(1)] = f"{found.group(1)}::{found.group(2)}"
    text = re.sub(r"^#include.*$", "", text, flags=re.M)
    text = _SHARED.sub(r"unsigned char* \1 = cuda_on_cpu::shared_memory();", text)
    return _LAUNCH.sub(
        lambda m: (
            f"cuda_on_cpu::launch({m[2]}, {m[3]}, {m[4]}, {clusters.get(m[1], 1)}, "
            f"[&] {{ {m[1]}::run({m[5]}); }});"
        ),
        text,
    )


def _is_clang() -> bool:
    """Return whether the compiler is Clang, which may also be called g++ or c++."""
    if CXX is None:
        return False
    done = subprocess.run([CXX, "--version"], capture_output=True, text=True, check=False)
    return "clang" in done.stdout


#: An access beyond an array in shared memory ends the program. Clang has another name for it.
IN_BOUNDS = (
    "-fsanitize=bounds" if _is_clang() else "-fsanitize=bounds-strict",
    "-fsanitize-undefined-trap-on-error",
)


def compile_cpp(source: Path, output: Path, *options: str) -> None:
    """Compile a file. Raise an error that shows what the compiler says."""
    command = [
        str(CXX),
        "-std=c++17",
        "-O0",
        *IN_BOUNDS,
        "-fno-exceptions",
        "-w",
        "-fno-strict-aliasing",
        "-fno-gnu-unique",
        *options,
    ]
    command += [str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


#: Options of a library that is loaded.
_LIBRARY = ("-shared", "-fPIC")


@cache
def _include() -> str:
    """Return the line that includes cuda_on_cpu.h, compiled once in a process.

    That takes a second. A compiler that does not find the compiled header reads the text.
    """
    folder = tempfile.TemporaryDirectory(prefix="cuda_on_cpu_")
    atexit.register(folder.cleanup)
    header = Path(folder.name) / "all.h"
    header.write_text(f'#include "{Path(__file__).with_suffix(".h")}"\n', encoding="utf-8")
    if not _is_clang():
        compile_cpp(header, header.with_suffix(".h.gch"), *_LIBRARY, "-x", "c++-header")
    return f'#include "{header}"'


class Library:
    """Several generated files, compiled together."""

    def __init__(self, texts: Sequence[str], folder: Path, name: str = "kernels"):
        parts = [_include()]
        for n, text in enumerate(texts):
            for function in ("launch", "workspace_bytes"):
                text = text.replace(f" {function}(", f" {function}_{n}(")
            parts.append(f"namespace file_{n} {{\n{as_cpp(text)}\n}}")
        self.loaded = _load("\n".join(parts), folder, name)

    def run(
        self, n: int, graph: KernelGraph, inputs: Sequence[torch.Tensor], order: int
    ) -> list[torch.Tensor] | str:
        """Run the n-th file in an order of threads. Return its outputs, or what went wrong."""
        outputs = [torch.full(t.dims, math.nan, dtype=t.dtype) for t in graph.outputs]
        size = getattr(self.loaded, f"workspace_bytes_{n}")
        size.restype = ctypes.c_size_t
        workspace = torch.full((size() + 16,), 0xFF, dtype=torch.uint8)
        tensors = (*(_storage(x) for x in inputs), *outputs, workspace)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
        self.loaded.set_order(order)
        if getattr(self.loaded, f"launch_{n}")(*pointers, None):
            return str(self.loaded.last_error().decode())
        return outputs


def _load(text: str, folder: Path, name: str) -> ctypes.CDLL:
    """Compile C++ that includes cuda_on_cpu.h, and load it."""
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text, encoding="utf-8")
    compile_cpp(source, library, *_LIBRARY)
    loaded = ctypes.CDLL(str(library))
    loaded.last_error.restype = ctypes.c_char_p
    return loaded


#: Launches a kernel with as many pointers as it has parameters.
_LAUNCHER = """
template <class... T, std::size_t... n>
void call(void (*kernel)(T...), void** pointers, std::index_sequence<n...>) {
  kernel(static_cast<T>(pointers[n])...);
}

template <class... T>
void launch(void (*kernel)(T...), int cluster, int grid, int threads, int shared, void** pointers,
            int count) {
  if (count != sizeof...(T)) return cuda_on_cpu::fail("the kernel has other parameters");
  if (threads % cuda_on_cpu::kWarp) return cuda_on_cpu::fail("a block has whole warps only");
  cuda_on_cpu::launch(grid, threads, shared, cluster, [=] {
    call(kernel, pointers, std::index_sequence_for<T...>());
  });
}
"""

#: What files whose blocks form clusters include.
_CLUSTERS = "namespace cg = cooperative_groups;"

#: The namespaces of a kernel's source, of which some have a function `run`.
_NAMESPACE = re.compile(r"^namespace (\w+) \{$(.*?)(?=^namespace |\Z)", re.M | re.S)

#: Compiled sources.
_COMPILED: dict[str, ctypes.CDLL] = {}


def _compiled(source: str, folder: Path) -> ctypes.CDLL:
    """Compile the kernels of a source, each in its namespace, unless this was done before."""
    if source not in _COMPILED:
        parts = [_include(), _CLUSTERS, as_cpp(DEVICE_HELPERS), as_cpp(source), _LAUNCHER]
        for name, body in _NAMESPACE.findall(source):
            if re.search(r"__global__[^;{]*\brun\(", body):
                cluster = re.search(r"__cluster_dims__\((\w+), 1, 1\)", body)
                size = f"{name}::{cluster[1]}" if cluster else 1
                parts.append(
                    f'extern "C" void launch_{name}(int grid, int threads, int shared, '
                    "void** pointers, int count) "
                    f"{{ launch({name}::run, {size}, grid, threads, shared, pointers, count); }}"
                )
        _COMPILED[source] = _load("\n".join(parts), folder, f"streams_{len(_COMPILED)}")
    return _COMPILED[source]


def run_kernel(
    source: str,
    name: str,
    grid: int,
    threads: int,
    shared: int,
    tensors: Sequence[torch.Tensor],
    order: int,
    folder: Path,
) -> str:
    """Run one kernel in an order of threads. Return "" or what went wrong.

    Args:
        source: Text of namespaces that each have a kernel `run`, whose parameters are pointers.
            It calls the functions of streams_on_cpu.h without defining them.
        name: The namespace of the kernel.
        grid: Number of blocks.
        threads: Threads of a block, a multiple of 32.
        shared: Bytes of shared memory of a block.
        tensors: What the pointers point to: inputs, with strides that the kernel knows, and then
            the output.
        order: One of ORDERS, or another number for a random order.
        folder: Where the source is compiled. A source is compiled once in a process.
    """
    assert tensors[-1].is_contiguous()
    loaded = _compiled(source, folder)
    pointers = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
    loaded.set_order(order)
    getattr(loaded, f"launch_{name}")(grid, threads, shared, pointers, len(tensors))
    return str(loaded.last_error().decode())


def _storage(x: torch.Tensor) -> torch.Tensor:
    """Return all elements from the first to the last one of a tensor, as they lie in memory."""
    reach = 1 + sum((d - 1) * s for d, s in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((reach,), (1,))


def errors(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]
) -> list[str]:
    """Say which outputs are further from `want`, in float64, than a few times those of eager."""
    found = []
    for n, (x, exact, plain) in enumerate(zip(got, want, eager, strict=True)):
        finite = exact.isfinite() & plain.isfinite()
        if not finite.any():
            continue
        if not bool(x[finite].isfinite().all()):
            found.append(f"output {n} is not finite")
            continue
        error = (x.double() - exact)[finite].abs().max()
        allowed = 4 * (plain.double() - exact)[finite].abs().max()
        allowed += 4 * torch.finfo(x.dtype).eps * exact[finite].abs().max()
        if error > allowed:
            found.append(f"output {n}: error {error:.3g}, allowed {allowed:.3g}")
    return found
