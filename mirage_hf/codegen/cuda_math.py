"""Write scalar programs as C++: in float for kernels, in double for the host check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mirage_hf.codegen.triton_math import ATOM, PRODUCT, SUM, UNARY, Expr
from mirage_hf.ops import table

#: C++ type of each dtype.
TYPES = {
    torch.float16: "half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.int32: "int",
    torch.int64: "long long",
}

_FLOAT_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class CppNumbers:
    """One kind of C++ number.

    Attributes:
        suffix: The suffix of literals and math functions.
        largest: The largest finite value.
    """

    suffix: str
    largest: float

    def constant(self, x: float) -> Expr:
        """Return a literal."""
        if abs(x) > self.largest:
            return Expr("INFINITY" if x > 0 else "-INFINITY", ATOM if x > 0 else UNARY, x)
        text = repr(float(x))
        text = text if "." in text or "e" in text else text + ".0"
        return Expr(text + self.suffix, ATOM if x >= 0 else UNARY, x)

    @property
    def algebra(self) -> Mapping[str, Callable[..., Expr]]:
        """The text of each primitive."""
        return {
            "add": lambda x, y: Expr(f"{x.at(SUM)} + {y.at(PRODUCT)}", SUM),
            "sub": lambda x, y: Expr(f"{x.at(SUM)} - {y.at(PRODUCT)}", SUM),
            "mul": lambda x, y: Expr(f"{x.at(PRODUCT)} * {y.at(UNARY)}", PRODUCT),
            "div": lambda x, y: Expr(f"{x.at(PRODUCT)} / {y.at(UNARY)}", PRODUCT),
            "neg": lambda x: Expr(f"-{x.at(ATOM)}", UNARY),
            "max": lambda x, y: (
                x if y.number == -math.inf else Expr(f"maximum({x.text}, {y.text})")
            ),
            "min": lambda x, y: x if y.number == math.inf else Expr(f"minimum({x.text}, {y.text})"),
            "select": lambda m, x, y: Expr(f"({m.at(SUM)} != 0 ? {x.text} : {y.text})"),
            "lookup": _lookup,
            "bits": lambda x, start, count: Expr(
                f"bits_of({x.text}, {start.text}, {int(count.number or 0)})"
            ),
            "rsqrt": self._call("rsqrt")
            if self.suffix
            else lambda x: Expr(f"1.0 / sqrt({x.text})", PRODUCT),
            **{f: self._call(f) for f in ("exp", "sqrt", "tanh", "erf", "log1p", "pow")},
        }

    def _call(self, function: str) -> Callable[..., Expr]:
        """Return a function that writes a call."""
        return lambda *args: Expr(f"{function}{self.suffix}({', '.join(a.text for a in args)})")

    def apply(self, fn: str, args: Sequence[str | float], attrs: Mapping[str, float]) -> str:
        """Return the text of an elementwise op on values, given by name, and on numbers."""
        if fn == "cast":
            kind = TYPES[table.as_dtype(attrs["dtype"])]  # type: ignore[arg-type]
            return (
                str(args[0])
                if kind == "float" or not self.suffix
                else f"to_float(from_float<{kind}>({args[0]}))"
            )
        operands = [Expr(a) if isinstance(a, str) else self.constant(a) for a in args]
        return (
            table.lookup(fn).program(**attrs).evaluate(self.algebra, operands, self.constant).text
        )


def _lookup(x: Expr, *values: Expr) -> Expr:
    """Return a choice of one of several values by index."""
    steps = [f"{x.at(SUM)} < {i} ? {v.text} : " for i, v in enumerate(values[:-1], 1)]
    return Expr(f"({''.join(steps)}{values[-1].text})")


FLOAT, DOUBLE = CppNumbers("f", _FLOAT_MAX), CppNumbers("", math.inf)

#: What NVRTC needs instead of headers, which it does not have.
WITHOUT_HEADERS = """\
#define INFINITY __int_as_float(0x7f800000)

struct half { unsigned short bits; };
struct __nv_bfloat16 { unsigned short bits; };

__device__ __forceinline__ float __half2float(half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ half __float2half(float x) {
  half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ __nv_bfloat16 __float2bfloat16(float x) {
  __nv_bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

"""

#: What replaces cooperative groups, for files whose blocks form clusters.
CLUSTERS_WITHOUT_HEADERS = """\
namespace cooperative_groups {
// the blocks of a cluster
struct cluster_group {
  __device__ __forceinline__ unsigned block_rank() const {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
  }
  __device__ __forceinline__ void sync() const {
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
  }
  // the address of a block's own memory in the memory of another one
  template <class T> __device__ __forceinline__ T* map_shared_rank(T* own, unsigned rank) const {
    T* other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(own), "r"(rank));
    return other;
  }
};
__device__ __forceinline__ cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups
namespace cg = cooperative_groups;

"""

DEVICE_HELPERS = """\
__host__ __device__ inline float to_float(half x) { return __half2float(x); }
__host__ __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(int x) { return float(x); }
__host__ __device__ inline float to_float(long long x) { return float(x); }

template <class T> __host__ __device__ inline T from_float(float x) { return T(x); }
template <> __host__ __device__ inline half from_float<half>(float x) { return __float2half(x); }
template <> __host__ __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16(x); }

// NaN wins, as in torch
template <class T> __host__ __device__ inline T maximum(T a, T b) { return a > b || a != a ? a : b; }
template <class T> __host__ __device__ inline T minimum(T a, T b) { return a < b || a != a ? a : b; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ float maximum<float>(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
#endif

// N elements that lie side by side, in loads of 16 bytes
template <int N, class T> __device__ __forceinline__ void load(T (&to)[N], const T* from) {
  static_assert(N == 1 || N * sizeof(T) == 16);
  if constexpr (N == 1) to[0] = *from;
  else *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

// 16 bytes that nothing writes while the kernel runs; they are read once
__device__ __forceinline__ uint4 load_constant(const void* from) {
#ifdef __CUDA_ARCH__
  uint4 x;  // volatile and not .nc, so that it stays before the wait for the previous kernel
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
#else
  return *reinterpret_cast<const uint4*>(from);
#endif
}

// 16 bytes that an earlier kernel may have written
__device__ __forceinline__ uint4 load_plain(const void* from) { return *reinterpret_cast<const uint4*>(from); }

// waits until the kernel before this one is done, if this one was launched early (PDL)
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// lets the next kernel launch, which waits in the same way
__device__ __forceinline__ void launch_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes from device to shared memory
template <int N, class T> __device__ __forceinline__ void copy(T* to, const T* from) {
  static_assert(N * sizeof(T) == 16);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

// count bits of a byte from bit start on, as a whole number
template <class T> __host__ __device__ inline T bits_of(T x, T start, int count) {
  const T byte = floor(x) - 256 * floor(floor(x) / 256), shift = floor(start) - 8 * floor(floor(start) / 8);
  if (!(byte >= 0)) return 0;  // NaN
  return T((int(byte) >> (shift >= 0 ? int(shift) : 0)) & ((1 << count) - 1));
}

struct Sum {
  static __device__ float zero() { return 0.0f; }
  static __device__ float join(float a, float b) { return a + b; }
};
struct Max {
  static __device__ float zero() { return -INFINITY; }
  static __device__ float join(float a, float b) { return maximum(a, b); }
};

// joins the values of W lanes that are STRIDE lanes apart; every lane gets the result
template <class Op, int W, int STRIDE = 1> __device__ __forceinline__ float join_lanes(float x) {
#pragma unroll
  for (int step = W * STRIDE / 2; step >= STRIDE; step /= 2)
    x = Op::join(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
"""
