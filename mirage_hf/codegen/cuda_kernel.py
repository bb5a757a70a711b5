"""One block graph as a CUDA kernel: a thread block per tile of the grid axes, its threads working together on each value.

What a reduction reads again and again is staged in shared memory; everything else is computed where it is needed, in float.
A *nest* is a loop of all threads over the elements of a value's tile. Three kinds of nest make up a kernel: *fill* (stage a
value), *reduce* (a sum or maximum, each thread owning elements and lanes of the reduced axis) and *store*.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from mirage_hf import errors
from mirage_hf.codegen.cuda_math import FLOAT, TYPES
from mirage_hf.graph.block import BlockGraph, BlockInput, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.text import format_block_graph

THREADS = 256
SHARED_PLAIN, SHARED_MOST = 48 * 1024, 227 * 1024
"""Shared memory in bytes that any kernel gets, and that a kernel may ask for on sm_90 and sm_100 (CUDA programming guide)."""

_RESERVED = frozenset(
    "alignas and asm auto bool break case catch char class const continue default delete do double else enum explicit export extern false "
    "float for friend goto if inline int long mutable namespace new not operator or private protected public register return short "
    "signed sizeof static struct switch template this throw true try typedef union unsigned using virtual void volatile while xor "
    "half uint4 threads tid block memory shared partial run load to_float from_float maximum minimum join_lanes Sum Max Shared e r v g x_ "
    "min max exp sqrt tanh erf pow".split())


@dataclass(frozen=True)
class Operand:
    """A tensor as a kernel sees it: elements of `dtype` at `offset` + Σ index · stride behind its pointer."""

    dtype: torch.dtype
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class CudaKernel:
    """Generated text of one kernel, and what its launch needs."""

    source: str
    grid: int
    shared: int


@dataclass(frozen=True)
class _Array:
    """A value's tile in shared memory; the last axis is contiguous, the one before it steps by `pitch`."""

    name: str
    ctype: str
    axes: tuple[str, ...]
    extents: tuple[int, ...]
    pitch: int

    @property
    def elements(self) -> int:
        return math.prod(self.extents[:-1]) * self.pitch if self.extents else 1

    @property
    def bytes(self) -> int:
        return -(-self.elements * (2 if self.ctype in ("half", "__nv_bfloat16") else 8 if self.ctype == "long long" else 4) // 16) * 16

    def at(self, axes: Sequence[str] | None = None) -> str:
        terms, step = [], 1
        for d in reversed(range(len(self.axes))):
            if self.extents[d] > 1:
                terms.append(f"i_{self.axes[d]}" + (f" * {step}" if step > 1 else ""))
            step = self.pitch if d == len(self.axes) - 1 else step * self.extents[d]
        return f"shared.{self.name}[{' + '.join(reversed(terms)) or '0'}]"


def write_kernel(block: BlockGraph, operands: Sequence[Operand], outputs: Sequence[Operand], name: str) -> CudaKernel:
    """Return `block` as a CUDA kernel in namespace `name`, with the largest loop tile whose staged values fit.

    Errors: CodegenError when a value that must be held whole does not fit in shared memory.
    """
    tiles = _grid_tiles(block)
    most = max((min(4096, 1 << (a.size - 1).bit_length()) for a in block.named(Role.LOOP)), default=1)
    while True:
        for limit in (SHARED_PLAIN, SHARED_MOST):
            loop_tile = most
            while loop_tile:
                kernel = _Writer(block, operands, outputs, tiles | {a.name: min(a.size, loop_tile) for a in block.named(Role.LOOP)}, name).kernel()
                if kernel.shared <= limit:
                    return kernel
                loop_tile //= 2
        widest = max(tiles, key=lambda a: tiles[a], default=None)
        if widest is None or tiles[widest] == 1:
            raise errors.CodegenError(f"{name}: needs {kernel.shared} bytes of shared memory, a block has {SHARED_MOST}; "
                                      "make one of its tile axes the loop axis or a grid axis")
        tiles = tiles | {widest: tiles[widest] // 2}


def _grid_tiles(block: BlockGraph) -> dict[str, int]:
    """Tile sizes of the grid axes: wide along axes that let a contraction read a factor again, 1 along the others."""
    reused = {axis for c in block.contractions.values() for axis in set(block.carried[c.a]) ^ set(block.carried[c.b])}
    grid = block.named(Role.GRID)
    wide = sorted((a for a in grid if a.name in reused), key=lambda a: -a.size)
    if not wide:  # nothing to read again: the last dim of an output for the sake of its stores
        wide = [a for a in grid if any(o.axes[-1] == a.name for o in block.outputs)][:1]
    tiles = {a.name: 1 for a in grid} | {a.name: 64 if i == 0 else min(a.size, 16) for i, a in enumerate(wide)}
    rest = math.prod(a.size for a in block.named(Role.TILE))
    if wide:
        first = wide[0]

        def blocks() -> int:
            return math.prod(-(-a.size // tiles[a.name]) for a in grid)

        def elements() -> int:
            return math.prod(tiles.values()) * min(rest, 256)
        while tiles[first.name] > 16 and (blocks() < 256 or elements() > 4096):
            tiles[first.name] //= 2
        tiles[first.name] = min(first.size, tiles[first.name])
    return tiles


@dataclass
class _Nest:
    """All threads over the tile of `axes`, `fast` varying fastest and `vector` elements of it at a time."""

    axes: tuple[str, ...]
    fast: str | None
    vector: int
    over: str | None = None
    lines: list[str] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    vectors: list[str] = field(default_factory=list)


class _Writer:
    """Writes the text of one kernel, top to bottom."""

    def __init__(self, block: BlockGraph, operands: Sequence[Operand], outputs: Sequence[Operand], tiles: dict[str, int], name: str):
        self.block, self.operands, self.outputs, self.name = block, operands, outputs, name
        self.tile = {a.name: tiles.get(a.name, a.size) for a in block.axes}
        self.size = {a.name: a.size for a in block.axes}
        self.inputs = {i.name: i for i in block.inputs}
        self.ops = {op.out: op for op in block.ops()}
        self.staged: dict[str, _Array] = {}
        self.planned: set[str] = set()
        self.arrays: dict[str, _Array] = {}
        self.partial = 0
        self.depth = 1
        self.lines: list[str] = []

    # -- text -------------------------------------------------------------------------------------------------------------

    def put(self, *lines: str) -> None:
        self.lines += [("" if line.startswith("#") else "  " * self.depth) + line for line in lines]

    @contextmanager
    def scope(self, head: str) -> Iterator[None]:
        self.put(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.put("}")

    @contextmanager
    def repeat(self, index: str, count: int) -> Iterator[None]:
        """An unrolled loop, or just its body where it runs once."""
        if count == 1:
            yield
            return
        self.put("#pragma unroll")
        with self.scope(f"for (int {index} = 0; {index} < {count}; ++{index})"):
            yield

    def kernel(self) -> CudaKernel:
        for stage in self.block.stages:
            self.stage(stage)
        for o in self.block.outputs:
            if not any(a is not None and self.block.role(a) is Role.LOOP for a in o.axes):
                self.store(o)
        shared = sum(a.bytes for a in self.arrays.values()) + -(-self.partial * 4 // 16) * 16
        grid = math.prod(self.trips(a.name) for a in self.block.named(Role.GRID))
        return CudaKernel("\n".join([*self.head(), *_used(self.lines), "}", "", f"}}  // namespace {self.name}"]), grid, shared)

    def head(self) -> list[str]:
        lines = [*("// " + line.partition("  # ")[0] for line in format_block_graph(self.block).splitlines()), f"namespace {self.name} {{", "",
                 f"constexpr int threads = {THREADS};"]
        body = set(re.findall(r"\w+", "\n".join(self.lines))) | {f"{a.name}_tile" for a in self.block.axes if self.trips(a.name) > 1}
        sizes = {f"{a.name}_size": a.size for a in self.block.axes} | {f"{a}_tile": tile for a, tile in self.tile.items()}
        lines += [f"constexpr int {name} = {value};" for name, value in sizes.items() if name in body]
        arrays = [f"  alignas(16) {a.ctype} {a.name}[{a.elements}];  // [{', '.join(a.axes)}]" for a in self.arrays.values()]
        arrays += [f"  alignas(16) float partial[{self.partial}];"] if self.partial else []
        lines += ["", "struct Shared {", *arrays, "};"] if arrays else []
        parameters = [f"const {TYPES[self.operands[s].dtype]}* __restrict__ {self.pointer(i, k)}"
                      for i in self.block.inputs for k, s in enumerate(i.sources)]
        parameters += [f"{TYPES[t.dtype]}* __restrict__ {self.var(o.value)}_out{n}" for n, (o, t) in enumerate(zip(self.block.outputs, self.outputs, strict=True))]
        lines += ["", f"__global__ void __launch_bounds__(threads) run({', '.join(parameters)}) {{", "  const int tid = threadIdx.x;"]
        if arrays:
            lines += ["  extern __shared__ __align__(16) unsigned char memory[];", "  Shared& shared = *reinterpret_cast<Shared*>(memory);"]
        cut = [a.name for a in self.block.named(Role.GRID) if self.trips(a.name) > 1]
        if cut:
            lines.append("  int block = blockIdx.x;")
        for a in reversed(cut):
            lines.append(f"  const int {a}_0 = block % {self.trips(a)} * {a}_tile;")
            lines += [f"  block /= {self.trips(a)};"] if a != cut[0] else []
        return lines + ["  " + self.address(i) for i in self.block.inputs]

    def address(self, i: BlockInput) -> str:
        """A lambda from coordinates to the address of an element of an input, whichever source it lies in."""
        axes = [a for a in i.axes if a is not None]

        def at(source: int, k: int, start: int) -> str:
            t = self.operands[source]
            reach = t.offset + sum((self.size[a] - 1) * s for a, s in zip(i.axes, t.strides, strict=True) if a)
            wide = "LL" if reach >= 1 << 31 else ""
            terms = [(f"(at_{a} - {start})" if a == i.joined and start else f"at_{a}") + (f" * {s}{wide}" if s != 1 else "")
                     for a, s in zip(i.axes, t.strides, strict=True) if a and s]
            return " + ".join([self.pointer(i, k), *([str(t.offset)] if t.offset else []), *terms])
        text, start = "", 0
        for k, source in enumerate(i.sources):
            piece = at(source, k, start)
            start += i.sizes[k] if i.sizes else 0
            text += piece if k == len(i.sources) - 1 else f"at_{i.joined} < {start} ? {piece} : "
        return f"const auto {self.var(i.name)}_at = [&]({', '.join(f'int at_{a}' for a in axes)}) {{ return {text}; }};"

    def var(self, name: str) -> str:
        """A C++ name for a value."""
        name = re.sub(r"[^A-Za-z0-9_]", lambda m: f"u{ord(m.group()):x}", name)
        return name + "_" if name in _RESERVED or re.match(r"(i_|at_|j_)|.*(_size|_tile|_0|_count|_at|_ptr\d*|_out\d*|_acc|_v)$", name) else name

    def pointer(self, i: BlockInput, k: int) -> str:
        return f"{self.var(i.name)}_ptr{k if len(i.sources) > 1 else ''}"

    def trips(self, axis: str) -> int:
        return -(-self.size[axis] // self.tile[axis])

    def ragged(self, axis: str) -> bool:
        return self.size[axis] % self.tile[axis] != 0

    def extent(self, axes: Sequence[str]) -> int:
        return math.prod(self.tile[a] for a in axes)

    # -- stages -----------------------------------------------------------------------------------------------------------

    def stage(self, stage: Stage) -> None:
        """Values that do not carry the loop axis first, once; then the loop."""
        wanted = self.wanted(stage)
        self.planned = set(wanted)
        loop = stage.loop

        def walks(value: str) -> bool:
            return loop is not None and loop in self.block.carried[value]
        self.prepare(stage, [v for v in wanted if not walks(v)], inside=False)
        if loop is None:
            return
        plans = [self.reduce_plan(a.out, a.arg, loop) for a in stage.accumulators]
        for a, (nest, lanes) in zip(stage.accumulators, plans, strict=True):
            self.declare(a.out, a.kind, nest, lanes)
        with self.scope(f"for (int {loop}_0 = 0; {loop}_0 < {loop}_size; {loop}_0 += {loop}_tile)"):
            if self.ragged(loop):
                self.put(f"const int {loop}_count = min({loop}_tile, {loop}_size - {loop}_0);")
            before = len(self.lines)
            self.prepare(stage, [v for v in wanted if walks(v)], inside=True)
            for a, (nest, lanes) in zip(stage.accumulators, plans, strict=True):
                self.accumulate(a.out, a.arg, a.kind, nest, lanes)
            here = {op.out for op in stage.body}
            for o in self.block.outputs:
                if o.value in here and loop in o.axes:
                    self.store(o)
            if any("__syncthreads" in line for line in self.lines[before:]):
                self.put("__syncthreads();")
        self.staged = {v: a for v, a in self.staged.items() if not walks(v)}
        for a, (nest, lanes) in zip(stage.accumulators, plans, strict=True):
            self.combine(a.out, a.kind, nest, lanes)

    def prepare(self, stage: Stage, wanted: Sequence[str], inside: bool) -> None:
        """Stage what is wanted and compute the sums of the body, in the body's order."""
        fresh = [v for v in wanted if v in self.inputs and v not in self.staged]
        here = {op.out for op in stage.body}
        earlier = [v for v in self.ops if v in wanted and v not in here and v not in self.staged]
        for value in fresh:
            self.fill(value)
        for value in earlier:  # made in an earlier stage and not needed whole until now
            self.put("__syncthreads();")
            self.fill(value)
        dirty = bool(fresh or earlier)
        for op in stage.body:
            if (stage.loop is not None and stage.loop in op.axes) is not inside:
                continue
            if op.over is not None:
                if dirty:
                    self.put("__syncthreads();")
                self.reduce(op)
                dirty = False
            elif op.out in wanted:
                if dirty:
                    self.put("__syncthreads();")
                self.fill(op.out)
                dirty = True
        if dirty:
            self.put("__syncthreads();")

    def wanted(self, stage: Stage) -> list[str]:
        """Values that the reductions of a stage read more than once per element: they must lie in shared memory."""
        sums = [op.args[0] for op in stage.body if op.over is not None] + [a.arg for a in stage.accumulators]
        found: list[str] = []

        def visit(value: str, axes: Sequence[str]) -> None:
            carried = self.block.carried[value]
            if self.is_reduced(value) or value in found:
                return
            missing = self.extent([a for a in axes if a not in carried])
            if missing > 1 and self.extent(carried) > 1:
                found.append(value)
            elif value in self.ops:
                for a in self.ops[value].args:
                    if isinstance(a, str):
                        visit(a, axes)
        for arg in sums:
            visit(str(arg), self.block.carried[str(arg)])
        return found

    def is_reduced(self, value: str) -> bool:
        return value not in self.inputs and (value not in self.ops or self.ops[value].over is not None)

    # -- nests ------------------------------------------------------------------------------------------------------------

    def direct(self, value: str, filling: bool = False) -> list[str]:
        """Inputs that computing `value` reads from device memory; `filling`: to stage it."""
        found: list[str] = []

        def visit(v: str) -> None:
            staged = v in self.staged or v in self.planned
            if (staged and not (filling and v == value)) or v in found or self.is_reduced(v):
                return
            if v in self.inputs:
                found.append(v)
            else:
                for a in self.ops[v].args:
                    if isinstance(a, str):
                        visit(a)
        visit(value)
        return found

    def contiguous(self, value: str) -> str | None:
        """The axis along which an input's elements lie side by side."""
        i = self.inputs[value]
        sides = [{a for a, s in zip(i.axes, self.operands[k].strides, strict=True) if a and s == 1 and self.size[a] > 1} for k in i.sources]
        return next((a for a in i.axes if a and all(a in side for side in sides)), None)

    def vector(self, value: str, axis: str) -> int:
        """How many elements of an input along `axis` fit in one load of 16 bytes everywhere; 1 if alignment does not allow it."""
        i = self.inputs[value]
        n = min(16 // self.operands[k].dtype.itemsize for k in i.sources)
        steps = [s for k in i.sources for a, s in zip(i.axes, self.operands[k].strides, strict=True) if a and a != axis and self.size[a] > 1]
        steps += [self.operands[k].offset for k in i.sources] + [self.size[axis], self.tile[axis]]
        steps += list(i.sizes) if i.joined == axis else []
        return n if self.contiguous(value) == axis and all(s % n == 0 for s in steps) else 1

    def plan(self, value: str, axes: Sequence[str], over: str | None, vectors: bool) -> _Nest:
        """Which axis varies fastest: that along which the largest input read directly is contiguous."""
        read = sorted(self.direct(value, filling=over is None), key=lambda v: -self.extent(self.block.carried[v]))
        fast = next((a for v in read if (a := self.contiguous(v)) in axes and self.tile[a] > 1), None)  # type: ignore[index]
        width = 1
        if fast is not None and vectors:
            carrying = [v for v in read if fast in self.block.carried[v]]
            widths = {self.vector(v, fast) for v in carrying}
            width = widths.pop() if len(widths) == 1 else 1
        elements = tuple(a for a in axes if a != over)
        if fast is None or fast == over:
            last = max(elements, key=lambda a: self.tile[a], default=None)
        else:
            last = fast
        return _Nest((*(a for a in elements if a != last), *([last] if last else [])), fast, width, over)

    def coordinates(self, nest: _Nest, index: str, clamp: bool) -> None:
        """Define i_a (inside the tile) and at_a (in the tensor) of every element axis from a linear index."""
        rest = index
        for a in reversed(nest.axes):
            step = nest.vector if a == nest.fast else 1
            count = self.tile[a] // step
            if self.tile[a] == 1:
                continue
            outer = [b for b in nest.axes[:nest.axes.index(a)] if self.tile[b] > 1]
            text = (f"{rest} % {count}" if outer else rest) + (f" * {step}" if step > 1 else "")
            self.put(f"const int {'j' if step > 1 else 'i'}_{a} = {text};")
            rest = f"{rest} / {count}"
        for a in nest.axes:
            if not (a == nest.fast and nest.vector > 1):
                self.global_coordinate(a, "i", clamp, 1)

    def global_coordinate(self, a: str, local: str, clamp: bool, width: int) -> None:
        base = f"{a}_0" if self.block.role(a) is not Role.TILE and self.trips(a) > 1 else ""
        inner = f"{local}_{a}" if self.tile[a] > 1 else ""
        text = " + ".join(t for t in (base, inner) if t) or "0"
        if clamp and self.block.role(a) is not Role.TILE and self.ragged(a):
            text = f"min({text}, {a}_size - {width})"
        self.put(f"const int at_{a} = {text};")

    def load_vectors(self, nest: _Nest, value: str, clamp: bool) -> None:
        """Read the vectors of all inputs that lie along the fast axis."""
        if nest.vector == 1 or nest.fast is None:
            return
        names = [v for v in self.direct(value, filling=nest.over is None) if nest.fast in self.block.carried[v]]
        for v in names:
            self.put(f"{self.ctype(v)} {self.var(v)}_v[{nest.vector}];")
        with self.scope(""):
            self.global_coordinate(nest.fast, "j", clamp and nest.fast != nest.over, nest.vector)
            for v in names:
                self.put(f"load({self.var(v)}_v, {self.element(v)});")
        nest.vectors = names

    def ctype(self, value: str) -> str:
        return TYPES[self.operands[self.inputs[value].sources[0]].dtype]

    def element(self, value: str) -> str:
        return f"{self.var(value)}_at({', '.join(f'at_{a}' for a in self.inputs[value].axes if a)})"

    def ref(self, nest: _Nest, value: str) -> str:
        """Text of a value at the nest's current element; defines what it needs first, each value once."""
        if value in nest.known:
            return nest.known[value]
        if value in self.staged:
            array = self.staged[value]
            text = array.at() if array.ctype == "float" else f"to_float({array.at()})"
        elif value in nest.vectors:
            text = f"to_float({self.var(value)}_v[v])"
        elif value in self.inputs:
            text = f"to_float(*{self.element(value)})"
        else:
            op = self.ops[value]
            args = [self.ref(nest, a) if isinstance(a, str) else a for a in op.args]
            text = FLOAT.apply(op.fn, args, dict(op.attrs))
        name = self.var(value)
        self.put(f"const float {name} = {text};")
        nest.known[value] = name
        return name

    @contextmanager
    def elements(self, nest: _Nest, value: str) -> Iterator[None]:
        """Every element of a nest without reduction, those beyond the end of an axis left out."""
        count = self.extent(nest.axes) // nest.vector
        with self.scope(f"for (int e = tid; e < {count}; e += threads)"):
            self.coordinates(nest, "e", clamp=False)
            beyond = [f"{'j' if a == nest.fast and nest.vector > 1 else 'i'}_{a} >= {a}_size - {a}_0" for a in nest.axes
                      if self.block.role(a) is not Role.TILE and self.ragged(a)]
            if beyond:
                self.put(f"if ({' || '.join(beyond)}) continue;")
            yield

    def fill(self, value: str) -> None:
        """Stage a value's tile in shared memory."""
        axes = self.block.carried[value]
        nest = self.plan(value, axes, None, vectors=value in self.inputs)
        last = nest.axes[-1] if nest.axes else None
        order = nest.axes if value in self.inputs else axes
        half = value in self.inputs and self.operands[self.inputs[value].sources[0]].dtype.itemsize == 2
        pitch = self.tile[order[-1]]
        if value in self.inputs and len(order) > 1 and self.reduced_over(value, order[-1]):
            pitch += 2 if half else 1  # rows start in different banks when lanes walk down a column
        array = self.keep(value, self.ctype(value) if value in self.inputs else "float", order, pitch)
        self.put(f"// {value} [{', '.join(axes)}]" + (" from device memory" if value in self.inputs else ""))
        with self.elements(nest, value):
            if nest.vector > 1 and array.pitch % nest.vector == 0:
                self.put(f"const int i_{last} = j_{last};")
                self.global_coordinate(str(last), "i", False, 1)
                self.put(f"copy<{nest.vector}>(&{array.at()}, {self.element(value)});")
            elif nest.vector > 1:
                self.load_vectors(nest, value, clamp=False)
                with self.repeat("v", nest.vector):
                    self.put(f"const int i_{last} = j_{last} + v;", f"{array.at()} = {self.var(value)}_v[v];")
            elif value in self.inputs:
                self.put(f"{array.at()} = *{self.element(value)};")
            else:
                self.put(f"{array.at()} = {self.ref(nest, value)};")
        self.staged[value] = array

    def reduced_over(self, value: str, axis: str) -> bool:
        """Whether some reduction that reads an input runs over `axis`."""
        return self.block.role(axis) is Role.LOOP or any(op.over == axis for op in self.ops.values())

    def keep(self, value: str, ctype: str, order: Sequence[str], pitch: int | None = None) -> _Array:
        extents = tuple(self.tile[a] for a in order)
        array = _Array(self.var(value), ctype, tuple(order), extents, pitch or (extents[-1] if extents else 1))
        return self.arrays.setdefault(value, array)

    def store(self, o: BlockOutput) -> None:
        """Write a value to device memory; where blocks differ in an axis that it lacks, the first of them does."""
        n = self.block.outputs.index(o)
        t = self.outputs[n]
        axes = tuple(a for a in o.axes if a is not None)
        nest = _Nest(axes, axes[-1] if axes else None, 1)
        alone = [f"{a.name}_0 == 0" for a in self.block.named(Role.GRID) if a.name not in axes and self.trips(a.name) > 1]
        self.put(f"// {o.value} [{', '.join(a or '1' for a in o.axes)}] to device memory")
        with self.scope(f"if ({' && '.join(alone)})") if alone else nullcontext(), self.elements(nest, o.value):
            reach = sum((self.size[a] - 1) * s for a, s in zip(o.axes, t.strides, strict=True) if a)
            wide = "LL" if reach >= 1 << 31 else ""
            at = " + ".join(f"at_{a}" + (f" * {s}{wide}" if s != 1 else "") for a, s in zip(o.axes, t.strides, strict=True) if a) or "0"
            self.put(f"{self.var(o.value)}_out{n}[{at}] = from_float<{TYPES[t.dtype]}>({self.ref(nest, o.value)});")

    # -- reductions ---------------------------------------------------------------------------------------------------------

    def reduce(self, op: BlockOp) -> None:
        """A sum or maximum over a tile axis."""
        arg = str(op.args[0])
        with self.scope(""):
            nest, lanes = self.reduce_plan(op.out, arg, str(op.over))
            self.declare(op.out, op.fn, nest, lanes)
            self.accumulate(op.out, arg, op.fn, nest, lanes)
            self.combine(op.out, op.fn, nest, lanes)

    def reduce_plan(self, out: str, arg: str, over: str) -> tuple[_Nest, _Lanes]:
        """How threads share the work: `own` groups of elements and `across` lanes of the reduced axis; `own * across` = THREADS."""
        nest = self.plan(arg, self.block.carried[arg], over, vectors=True)
        inner = nest.fast == over
        units = max(1, self.extent(nest.axes) // (1 if inner else nest.vector))
        step = nest.vector if inner else 1
        if not inner and nest.fast is None and self.tile[over] % 4 == 0 and self.size[over] % 4 == 0:
            step = 4  # everything staged: read 4 neighbours at once
        steps = max(1, self.tile[over] // step)
        if inner:
            across = min(max(32, THREADS // _pow2(units)), _pow2(steps), THREADS)
        elif nest.fast is None:  # each thread owns up to 8 elements, so that what it reads serves several
            across = min(THREADS // min(THREADS, max(32, _pow2(units) // 8)), _pow2(steps))
        else:
            across = THREADS // min(THREADS, _pow2(units))
        own = THREADS // across
        return nest, _Lanes(own, across, -(-units // own), units, inner, step)

    def declare(self, out: str, kind: str, nest: _Nest, lanes: _Lanes) -> None:
        slots = lanes.rounds * (1 if lanes.inner else nest.vector)
        self.put(f"float {self.var(out)}_acc[{slots}];")
        with self.repeat("r", slots):
            self.put(f"{self.var(out)}_acc[{'r' if slots > 1 else 0}] = {_OPS[kind]}::zero();")

    def owned(self, nest: _Nest, lanes: _Lanes) -> str:
        text = lanes.element + (f" + r * {lanes.own}" if lanes.rounds > 1 else "")
        return f"min({text}, {lanes.units - 1})" if lanes.rounds * lanes.own > lanes.units else text

    def accumulate(self, out: str, arg: str, kind: str, nest: _Nest, lanes: _Lanes) -> None:
        over, name = str(nest.over), self.var(out)
        nest.known, nest.vectors = {}, []
        width = lanes.step
        end = f"{over}_count" if self.block.role(over) is Role.LOOP and self.ragged(over) else str(self.tile[over])
        start = lanes.lane + (f" * {width}" if width > 1 else "")
        self.put(f"// {out} [{', '.join(self.block.carried[out])}]: {kind} of {arg} over {over}")
        with self.scope(f"for (int {'j' if width > 1 else 'i'}_{over} = {start}; {'j' if width > 1 else 'i'}_{over} < {end}; "
                        f"{'j' if width > 1 else 'i'}_{over} += {lanes.across * width})"):
            if width == 1:
                self.global_coordinate_over(over)
            with self.repeat("r", lanes.rounds):
                self.put(f"const int e = {self.owned(nest, lanes)};")
                self.coordinates(nest, "e", clamp=True)
                self.load_vectors(nest, arg, clamp=True)
                along = over if lanes.step > 1 else str(nest.fast)
                with self.repeat("v", max(lanes.step, nest.vector)):
                    if max(lanes.step, nest.vector) > 1:
                        self.put(f"const int i_{along} = j_{along} + v;")
                        self.global_coordinate(along, "i", along != over, 1)
                    slot = lanes.slot(1 if lanes.inner else nest.vector)
                    value = self.ref(nest, arg)
                    self.put(f"{name}_acc[{slot}] = {_OPS[kind]}::join({name}_acc[{slot}], {value});")

    def global_coordinate_over(self, over: str) -> None:
        base = f"{over}_0 + " if self.block.role(over) is Role.LOOP else ""
        self.put(f"const int at_{over} = {base}i_{over};")

    def combine(self, out: str, kind: str, nest: _Nest, lanes: _Lanes) -> None:
        """Join the lanes' parts and keep the result in shared memory."""
        name, op = self.var(out), _OPS[kind]
        array = self.keep(out, "float", self.block.carried[out])
        shuffled = min(lanes.across, 32) if lanes.inner else 1
        groups = lanes.across // shuffled
        total = self.extent(nest.axes)
        width = 1 if lanes.inner else nest.vector
        if groups > 1:
            self.partial = max(self.partial, groups * total)
        with self.scope(""), self.repeat("r", lanes.rounds):
            self.put(f"const int e = {lanes.element}" + (f" + r * {lanes.own}" if lanes.rounds > 1 else "") + ";")
            with self.repeat("v", width):
                part = f"{name}_acc[{lanes.slot(width)}]"
                self.put(f"const float joined = {f'join_lanes<{op}, {shuffled}>({part})' if shuffled > 1 else part};")
                guards = [f"e < {lanes.units}"] if lanes.rounds * lanes.own > lanes.units else []
                guards += [f"{lanes.lane} == 0" if groups == 1 else f"{lanes.lane} % {shuffled} == 0"] if shuffled > 1 else []
                linear = f"(e * {width} + v)" if width > 1 else "e"
                with self.scope(f"if ({' && '.join(guards)})") if guards else nullcontext():
                    if groups > 1:
                        group = f"{lanes.lane} / {shuffled}" if shuffled > 1 else lanes.lane
                        self.put(f"shared.partial[{group} * {total} + {linear}] = joined;")
                    else:
                        self.coordinates(_Nest(nest.axes, None, 1), linear, clamp=False)
                        self.put(f"{array.at()} = joined;")
        self.put("__syncthreads();")
        if groups > 1:
            with self.scope(f"for (int e = tid; e < {total}; e += threads)"):
                self.coordinates(_Nest(nest.axes, None, 1), "e", clamp=False)
                self.put("float joined = shared.partial[e];",
                         f"for (int g = 1; g < {groups}; ++g) joined = {op}::join(joined, shared.partial[g * {total} + e]);",
                         f"{array.at()} = joined;")
            self.put("__syncthreads();")
        self.staged[out] = array


@dataclass(frozen=True)
class _Lanes:
    """`own` threads own elements, each `rounds` of `units`; `across` threads share the reduced axis, as neighbours if `inner`,
    and take `step` of its elements at a time."""

    own: int
    across: int
    rounds: int
    units: int
    inner: bool
    step: int

    @property
    def element(self) -> str:
        if self.across == 1:
            return "tid"
        return f"tid / {self.across}" if self.inner else f"tid % {self.own}"

    @property
    def lane(self) -> str:
        if self.across == 1:
            return "0"
        return f"tid % {self.across}" if self.inner else f"tid / {self.own}"

    def slot(self, width: int) -> str:
        """Which of a thread's registers holds the current element."""
        if self.rounds == 1:
            return "v" if width > 1 else "0"
        return f"r * {width} + v" if width > 1 else "r"


_OPS = {"sum": "Sum", "max": "Max"}


def _used(lines: Sequence[str]) -> list[str]:
    """The lines without those that define a coordinate which nothing in its scope reads."""
    kept: list[str] = []
    names: list[set[str]] = [set()]  # read below, one set per open scope; walking from the end
    depths = [0]
    for line in reversed(lines):
        depth = len(line) - len(line.lstrip())
        while depth and depth > depths[-1]:
            depths.append(depth)
            names.append(set())
        while depth and depth < depths[-1]:
            inner = names.pop()
            depths.pop()
            names[-1] |= inner
        defined = re.match(r"\s*const int (\w+) = (.*);", line)
        if defined and defined.group(1) not in names[-1]:
            continue
        if defined:
            names[-1].discard(defined.group(1))
        names[-1] |= set(re.findall(r"[A-Za-z_]\w*", defined.group(2) if defined else line))
        kept.append(line)
    return kept[::-1]


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
