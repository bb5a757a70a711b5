"""Write µGraphs as stand-alone CUDA C++ files.

A file holds a kernel per block graph, a launcher with C linkage, and a main() that checks them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mirage_hf import errors, files
from mirage_hf.codegen import cuda_check
from mirage_hf.codegen.cuda_kernel import SHARED_PLAIN, CudaKernel, write_kernel
from mirage_hf.codegen.cuda_math import DEVICE_HELPERS, TYPES
from mirage_hf.codegen.cuda_nests import Operand
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph import conveniences, json_format
from mirage_hf.graph.kernel import DTensor, KernelOp, row_major
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table

#: Alignment of intermediates in the workspace, in bytes.
ALIGN = 256

#: The error that the self-check allows, as a share of the output's largest element. For 16-bit
#: outputs it is 4 half-ulps. For float32 it also covers another order of summation.
TOLERANCE = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-13}


@conveniences.write_cuda_program.register
def write_program(
    ugraph: UGraph, path: str | Path, schedules: Sequence[Schedule] | None = None
) -> Path:
    """Write a readable, stand-alone CUDA C++ file, and return its path.

    Args:
        ugraph: The µGraph.
        path: Where to write the file.
        schedules: One for each block graph, in order, each with `cuda=True`. By default the
            µGraph's own, if they are such. Otherwise each kernel chooses tiles that fit.

    Raises:
        CodegenError: A kernel is a library call.
    """
    path = Path(path)
    files.write_text(path, program_source(ugraph, schedules))
    return path


def program_source(ugraph: UGraph, schedules: Sequence[Schedule] | None = None) -> str:
    """Return the file as text. The arguments are those of `write_program`.

    Raises:
        CodegenError: A kernel is a library call, a block graph is too large for a thread block, or
            an input holds codes.
    """
    program = _CudaFile(ugraph, schedules)
    return f"{program.kernels()}\n{program.check()}"


def kernels_source(ugraph: UGraph, schedules: Sequence[Schedule] | None = None) -> str:
    """Return the file without its check: kernels, `workspace_bytes` and `launch`.

    Raises:
        CodegenError: In the same cases as `program_source`.
    """
    return _CudaFile(ugraph, schedules).kernels()


@dataclass(frozen=True)
class _View:
    """A tensor as elements of a buffer.

    Attributes:
        base: The input, kernel output or intermediate that owns the buffer.
        strides: Elements between neighbours along each dim.
        offset: The first element.
    """

    base: DTensor
    strides: tuple[int, ...]
    offset: int = 0


class _CudaFile:
    """Where each tensor lies, and the text of the file."""

    def __init__(self, ugraph: UGraph, schedules: Sequence[Schedule] | None = None):
        self.ugraph, self.graph = ugraph, ugraph.kernels
        schedules = schedules or ugraph.schedules or ()
        given = schedules if schedules and all(s.cuda for s in schedules) else ()
        if given and len(given) != len(ugraph.block_ops):
            raise errors.CodegenError(
                f"{len(given)} schedules for {len(ugraph.block_ops)} block graphs; give one each, "
                "in order"
            )
        for t in self.graph.inputs:
            if t.dtype in table.CODE_DTYPES:
                raise errors.CodegenError(
                    f"input {t.name} holds codes ({table.dtype_name(t.dtype)}), which CUDA files "
                    "do not decode; generate a Triton program instead"
                )
        self.views: dict[int, _View] = {t.index: _View(t, t.strides) for t in self.graph.inputs}
        self.launched: list[tuple[KernelOp, CudaKernel]] = []
        for op in self.graph.ops:
            if op.block is None:
                self.views[op.outputs[0].index] = self.view(op)
                continue
            for t in op.outputs:
                self.views[t.index] = _View(t, row_major(t.dims))
            operands = [
                Operand(t.dtype, v.strides, v.offset, v.base.constant)
                for t in op.inputs
                if isinstance(t, DTensor)
                for v in (self.views[t.index],)
            ]
            outputs = [Operand(t.dtype, row_major(t.dims)) for t in op.outputs]
            number = len(self.launched)
            schedule = given[number] if given else None
            kernel = write_kernel(op.block, operands, outputs, f"kernel_{number}", schedule)
            self.launched.append((op, kernel))
        self.outputs: dict[int, int] = {}
        for n, t in enumerate(self.graph.outputs):
            v = self.views[t.index]
            whole = v.strides == row_major(t.dims) and math.prod(t.dims) == math.prod(v.base.dims)
            if v.base in self.graph.inputs or v.base.index in self.outputs or not whole:
                raise errors.CodegenError(
                    f"output {n} ({t.name}) is not a kernel's whole output in row-major order; "
                    "generate a Triton program instead, or choose another candidate"
                )
            self.outputs[v.base.index] = n
        self.workspace: dict[int, int] = {}
        self.bytes = 0
        for op, _ in self.launched:
            for t in op.outputs:
                if t.index not in self.outputs:
                    self.workspace[t.index] = self.bytes
                    self.bytes += -(-math.prod(t.dims) * t.dtype.itemsize // ALIGN) * ALIGN

    def view(self, op: KernelOp) -> _View:
        """Return the view that a layout op makes; it moves no data.

        Raises:
            CodegenError: The op would launch a library kernel.
        """
        x, out, attrs = op.inputs[0], op.outputs[0], dict(op.attrs)
        v = self.views[x.index] if isinstance(x, DTensor) else None
        if v is not None and isinstance(x, DTensor):
            if op.name == "permute":
                return _View(v.base, tuple(v.strides[d] for d in attrs["order"]), v.offset)
            if op.name == "slice":
                return _View(
                    v.base,
                    v.strides,
                    v.offset + attrs["start"] * v.strides[attrs["dim"] % len(x.dims)],
                )
            if op.name == "reshape" and v.strides == row_major(x.dims):
                return _View(v.base, row_major(out.dims), v.offset)
        raise errors.CodegenError(
            f"{op.name} ({out.name}) is a library call, and a CUDA file holds searched kernels "
            "only; "
            "generate a Triton program, or choose a candidate whose kernels are all block graphs"
        )

    # -- text -------------------------------------------------------------------------------------

    def kernels(self) -> str:
        """Return the part of the file that runs."""
        kernels = "\n\n".join(k.source for _, k in self.launched)
        includes = _INCLUDES
        if any(k.is_clustered for _, k in self.launched):
            includes += _CLUSTERS
        return f"{self.header()}\n{includes}\n{DEVICE_HELPERS}\n{kernels}\n\n{self.launcher()}"

    def header(self) -> str:
        """Return the comment at the top of the file."""
        digest = json_format.digest(json_format.ugraph_to_dict(self.ugraph))
        program = "\n".join(f"//   {line}" for line in str(self.ugraph.program).splitlines())
        return (
            f"// Generated by mirage_hf from µGraph {digest[:16]}. The program that it "
            f"computes:\n{program}\n//\n"
            "// Check it:     nvcc -std=c++17 -O3 -arch=native -DMIRAGE_CHECK <this file> -o check "
            "&& ./check\n"
            "// Use it:       nvcc -std=c++17 -O3 -arch=sm_90 -shared -Xcompiler -fPIC <this file> "
            "-o kernel.so\n"
            "// Tensors must begin at multiples of 16 bytes and have the shapes and strides "
            "above.\n"
        )

    def arguments(self) -> str:
        """Return the launcher's parameters."""
        names = [f"const void* {t.name}" for t in self.graph.inputs] + [
            f"void* out{n}" for n in range(len(self.graph.outputs))
        ]
        return ", ".join([*names, "void* workspace", "cudaStream_t stream"])

    def pointer(self, t: DTensor) -> str:
        """Return the argument, or the place in the workspace, of a tensor's buffer."""
        base = self.views[t.index].base
        if base.index in self.workspace:
            return f"static_cast<char*>(workspace) + {self.workspace[base.index]}"
        return f"out{self.outputs[base.index]}" if base.index in self.outputs else base.name

    def launcher(self) -> str:
        """Return `workspace_bytes` and `launch`."""
        lines = [
            "// bytes of scratch memory that launch() needs",
            f'extern "C" size_t workspace_bytes() {{ return {self.bytes}; }}',
            "",
            "// launches every kernel on a stream; returns the cudaError_t of the first that fails",
            f'extern "C" int launch({self.arguments()}) {{',
        ]
        for op, kernel in self.launched:
            name = f"kernel_{self.launched.index((op, kernel))}"
            assert op.block is not None
            pointers = []
            for i in op.block.inputs:
                for s in i.sources:
                    t = op.inputs[s]
                    assert isinstance(t, DTensor)
                    pointers.append(f"(const {TYPES[t.dtype]}*)({self.pointer(t)})")
            pointers += [f"({TYPES[t.dtype]}*)({self.pointer(t)})" for t in op.outputs]
            if kernel.shared > SHARED_PLAIN:
                lines += [
                    f"  if (cudaError_t e = cudaFuncSetAttribute({name}::run, "
                    f"cudaFuncAttributeMaxDynamicSharedMemorySize, {kernel.shared})) return e;",
                ]
            lines += [
                f"  {name}::run<<<{kernel.grid}, {name}::threads, {kernel.shared}, stream>>>(",
                f"      {', '.join(pointers)});",
                "  if (cudaError_t e = cudaGetLastError()) return e;",
            ]
        return "\n".join([*lines, "  return cudaSuccess;", "}", ""])

    def check(self) -> str:
        """Return main(), which runs the kernels on random inputs.

        It compares the results with the program in double precision on the host.
        """
        program = self.ugraph.program
        setup = [
            f"  inputs.push_back(Input({TYPES[t.dtype]}(), {_list(t.dims)}, {_list(t.strides)}, "
            f"{n + 1}));"
            for n, t in enumerate(program.inputs)
        ]
        results = [
            f"  outputs.push_back(Output({TYPES[t.dtype]}(), {_list(t.dims)}, "
            f"{TOLERANCE.get(t.dtype, 0.0)!r}));"
            for t in program.outputs
        ]
        arguments = [f"inputs[{n}].device" for n in range(len(program.inputs))]
        arguments += [f"outputs[{n}].device" for n in range(len(program.outputs))]
        parameters = ", ".join(f"const Array& in_{n}" for n in range(len(program.inputs)))
        reference = "\n".join(f"  {line}" for line in cuda_check.reference(program))
        return _CHECK.format(
            host=cuda_check.HOST_HELPERS,
            parameters=parameters,
            reference=reference,
            setup="\n".join(setup),
            results="\n".join(results),
            launch=f"launch({', '.join(arguments)}, workspace, 0)",
            arrays=", ".join(f"inputs[{n}].logical" for n in range(len(program.inputs))),
        )


def _list(values: Sequence[int]) -> str:
    """Return a C++ initializer list."""
    return "{" + ", ".join(map(str, values)) + "}"


_INCLUDES = """\
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#ifdef MIRAGE_CHECK
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>
#endif
"""

_CLUSTERS = """\
#include <cooperative_groups.h>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "blocks of this file form clusters, which need sm_90 or later: compile with -arch=sm_90"
#endif
namespace cg = cooperative_groups;
"""

_CHECK = """\
#ifdef MIRAGE_CHECK
// -- the program on the host, in double precision ---------------------------------------------------------------------------

{host}
std::vector<Array> reference({parameters}) {{
{reference}
}}

// -- the check -----------------------------------------------------------------------------------------------------------------

// uniform in [-1, 1), the same on every machine
inline double random_number(unsigned long long& state) {{
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return double(state >> 40) / double(1 << 23) - 1.0;
}}

inline void* on_device(const std::vector<char>& bytes) {{
  void* p = nullptr;
  if (cudaMalloc(&p, bytes.size() + 16) != cudaSuccess) {{ std::printf("cudaMalloc failed\\n"); std::exit(2); }}
  cudaMemcpy(p, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
  return p;
}}

struct Input {{
  Array logical;
  void* device;
  template <class T> Input(T, std::vector<long> dims, std::vector<long> strides, unsigned long long seed) : logical(dims) {{
    long reach = 1;
    for (size_t d = 0; d < dims.size(); ++d) reach += (dims[d] - 1) * strides[d];
    std::vector<char> bytes(reach * sizeof(T));
    T* stored = reinterpret_cast<T*>(bytes.data());
    each(dims, [&](long at, const std::vector<long>& index) {{
      long from = 0;
      for (size_t d = 0; d < dims.size(); ++d) from += index[d] * strides[d];
      stored[from] = from_float<T>(float(random_number(seed)));
      logical.data[at] = to_float(stored[from]);
    }});
    device = on_device(bytes);
  }}
}};

struct Output {{
  long count;
  size_t size;
  double tolerance;
  void* device;
  float (*read)(const char*);
  float (*round)(double);
  template <class T> Output(T, std::vector<long> dims, double t) : count(1), size(sizeof(T)), tolerance(t) {{
    for (long d : dims) count *= d;
    device = on_device(std::vector<char>(count * size, char(0xff)));  // NaN, so that what is not written shows
    read = [](const char* p) {{ T x; std::memcpy(&x, p, sizeof(T)); return to_float(x); }};
    round = [](double x) {{ return to_float(from_float<T>(float(x))); }};
  }}
}};

int main() {{
  std::vector<Input> inputs;
  std::vector<Output> outputs;
{setup}
{results}
  void* workspace = on_device(std::vector<char>(workspace_bytes(), char(0xff)));
  int failed = {launch};
  if (!failed) failed = cudaDeviceSynchronize();
  if (failed) {{
    std::printf("launch failed: %s\\n", cudaGetErrorString(cudaError_t(failed)));
    return 2;
  }}
  const std::vector<Array> wanted = reference({arrays});
  for (size_t n = 0; n < outputs.size(); ++n) {{
    const Output& o = outputs[n];
    std::vector<char> bytes(o.count * o.size);
    cudaMemcpy(bytes.data(), o.device, bytes.size(), cudaMemcpyDeviceToHost);
    double worst = 0, scale = 0;
    bool wrong = false;
    for (long i = 0; i < o.count; ++i) {{
      const double got = o.read(&bytes[i * o.size]), want = o.round(wanted[n].data[i]);
      if (isnan(got) != isnan(want) || isinf(got) != isinf(want)) wrong = true;
      if (isfinite(got) && isfinite(want)) {{
        worst = fmax(worst, fabs(got - want));
        scale = fmax(scale, fabs(want));
      }}
    }}
    wrong = wrong || worst > o.tolerance * scale;
    std::printf("output %zu: max error %.3g, allowed %.3g: %s\\n", n, worst, o.tolerance * scale, wrong ? "WRONG" : "ok");
    failed += wrong;
  }}
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  cudaEventRecord(start);
  for (int i = 0; i < 20; ++i) {launch};
  cudaEventRecord(stop);
  cudaEventSynchronize(stop);
  float ms = 0;
  cudaEventElapsedTime(&ms, start, stop);
  std::printf("time per run: %.2f us (20 runs, caches warm)\\n", ms * 50);
  return failed ? 1 : 0;
}}
#endif  // MIRAGE_CHECK
"""
