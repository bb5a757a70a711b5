"""Write a program in double-precision C++, so that a generated file can check itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mirage_hf import errors
from mirage_hf.codegen.cuda_math import DOUBLE
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table
from mirage_hf.search.expand import expand

HOST_HELPERS = """\
// a tensor in row-major order
struct Array {
  std::vector<long> dims;
  std::vector<double> data;
  explicit Array(std::vector<long> d) : dims(std::move(d)) {
    long count = 1;
    for (long x : dims) count *= x;
    data.assign(count, 0.0);
  }
};

// the position in `a` of the element at `index`, sizes 1 being repeated and dims aligned at the right
inline long position(const Array& a, const std::vector<long>& index) {
  long at = 0;
  const size_t skip = index.size() - a.dims.size();
  for (size_t d = 0; d < a.dims.size(); ++d) at = at * a.dims[d] + (a.dims[d] == 1 ? 0 : index[skip + d]);
  return at;
}

// calls f(linear position, index) for every element of `dims`
template <class F> void each(const std::vector<long>& dims, F f) {
  std::vector<long> index(dims.size(), 0);
  for (long at = 0;; ++at) {
    f(at, index);
    size_t d = dims.size();
    while (d > 0 && ++index[d - 1] == dims[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

template <class F, class... Arrays> Array elementwise(std::vector<long> dims, F f, const Arrays&... arrays) {
  Array out(dims);
  each(dims, [&](long at, const std::vector<long>& index) { out.data[at] = f(arrays.data[position(arrays, index)]...); });
  return out;
}

inline Array matmul(std::vector<long> dims, const Array& a, const Array& b) {
  Array out(dims);
  const size_t r = dims.size();
  const long m = dims[r - 2], n = dims[r - 1], k = a.dims.back();
  for (long row = 0; row < long(out.data.size()) / n; ++row) {
    std::vector<long> index(r, 0);
    for (long d = long(r) - 2, rest = row; d >= 0; --d) { index[d] = rest % dims[d]; rest /= dims[d]; }
    const double* x = &a.data[position(a, index)];
    index[r - 2] = 0;
    const double* w = &b.data[position(b, index)];
    double* y = &out.data[row * n];
    for (long c = 0; c < k; ++c) for (long j = 0; j < n; ++j) y[j] += x[c] * w[c * n + j];
  }
  (void)m;
  return out;
}

enum class Kind { sum, mean, max };
inline Array reduction(std::vector<long> dims, const Array& x, Kind kind) {
  Array out(dims);
  if (kind == Kind::max) out.data.assign(out.data.size(), -INFINITY);
  each(x.dims, [&](long at, const std::vector<long>& index) {
    double& y = out.data[position(out, index)];
    y = kind == Kind::max ? maximum(y, x.data[at]) : y + x.data[at];
  });
  if (kind == Kind::mean) for (double& y : out.data) y *= double(out.data.size()) / double(x.data.size());
  return out;
}

inline Array reshape(std::vector<long> dims, const Array& x) {
  Array out(dims);
  out.data = x.data;
  return out;
}

inline Array permute(std::vector<long> dims, const Array& x, std::vector<long> order) {
  Array out(dims);
  each(dims, [&](long at, const std::vector<long>& index) {
    std::vector<long> from(order.size());
    for (size_t d = 0; d < order.size(); ++d) from[order[d]] = index[d];
    out.data[at] = x.data[position(x, from)];
  });
  return out;
}

// copies `x` to or from the range of dim `dim` that begins at `start`
inline void paste(Array& out, const Array& x, size_t dim, long start) {
  each(x.dims, [&](long at, std::vector<long> index) { index[dim] += start; out.data[position(out, index)] = x.data[at]; });
}
inline Array slice(std::vector<long> dims, const Array& x, size_t dim, long start) {
  Array out(dims);
  each(dims, [&](long at, std::vector<long> index) { index[dim] += start; out.data[at] = x.data[position(x, index)]; });
  return out;
}

inline Array rope(const Array& x, const Array& cosine, const Array& sine, bool interleaved) {
  Array out(x.dims);
  const long w = cosine.dims.back();
  each(x.dims, [&](long at, const std::vector<long>& index) {
    const long c = index.back();
    if (c >= w) { out.data[at] = x.data[at]; return; }
    const bool first = interleaved ? c % 2 == 0 : c < w / 2;
    const long other = at + (first ? 1 : -1) * (interleaved ? 1 : w / 2);
    out.data[at] = x.data[at] * cosine.data[position(cosine, index)] + (first ? -1 : 1) * x.data[other] * sine.data[position(sine, index)];
  });
  return out;
}
"""


def reference(program: KernelGraph) -> list[str]:
    """Return lines of C++ that compute `program` from Arrays in_0, in_1, … and return its outputs.

    Raises:
        CodegenError: An op has no host form.
    """
    graph = expand(program)
    names = {t.index: f"in_{i}" for i, t in enumerate(graph.inputs)}
    lines = []
    for op in graph.ops:
        out = op.outputs[0]
        names[out.index] = f"t{out.index}"
        lines.append(f"Array t{out.index} = {_call(op, names)};")
    return [*lines, f"return {{{', '.join(names[t.index] for t in graph.outputs)}}};"]


def _braces(dims: Sequence[int]) -> str:
    """Return a C++ initializer list."""
    return "{" + ", ".join(map(str, dims)) + "}"


def _call(op: KernelOp, names: dict[int, str]) -> str:
    """Return the call that computes one op."""
    row, dims = table.OPS.get(op.name), _braces(op.outputs[0].dims)
    args = [names[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
    if row is not None and row.kind == "elementwise":
        letters = iter("xyz")
        operands = [next(letters) if isinstance(a, str) else a for a in args]
        body = DOUBLE.apply(op.name, operands, dict(op.attrs))
        parameters = ", ".join(f"double {p}" for p in operands if isinstance(p, str))
        arrays = ", ".join(a for a in args if isinstance(a, str))
        return f"elementwise({dims}, []({parameters}) {{ return {body}; }}, {arrays})"
    if op.name not in _FORMS:
        raise errors.CodegenError(
            f"{op.name}: the CUDA self-check has no host form of it; generate a Triton program "
            "instead"
        )
    return _FORMS[op.name](dims, args, dict(op.attrs), op)


def _concat(dims: str, args: Sequence[Any], attrs: dict[str, Any], op: KernelOp) -> str:
    """Return a lambda that pastes operands side by side."""
    dim, start, pastes = attrs["dim"] % len(op.outputs[0].dims), 0, []
    for name, x in zip(args, op.inputs, strict=True):
        assert isinstance(x, DTensor)
        pastes.append(f"paste(out, {name}, {dim}, {start});")
        start += x.dims[dim]
    return f"[&] {{ Array out({dims}); {' '.join(pastes)} return out; }}()"


#: Ops of the host reference that are not elementwise.
_FORMS: dict[str, Callable[[str, Sequence[Any], dict[str, Any], KernelOp], str]] = {
    "matmul": lambda dims, args, attrs, op: f"matmul({dims}, {args[0]}, {args[1]})",
    "reduction": lambda dims, args, attrs, op: (
        f"reduction({dims}, {args[0]}, Kind::{attrs['kind']})"
    ),
    "reshape": lambda dims, args, attrs, op: f"reshape({dims}, {args[0]})",
    "permute": lambda dims, args, attrs, op: (
        f"permute({dims}, {args[0]}, {_braces(attrs['order'])})"
    ),
    "slice": lambda dims, args, attrs, op: (
        f"slice({dims}, {args[0]}, {attrs['dim'] % len(op.outputs[0].dims)}, {attrs['start']})"
    ),
    "concat": _concat,
    "rope": lambda dims, args, attrs, op: (
        f"rope({args[0]}, {args[1]}, {args[2]}, {str(attrs['interleaved']).lower()})"
    ),
}
