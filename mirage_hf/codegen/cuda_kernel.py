"""Write one block graph as a CUDA kernel: a thread block per tile of the grid axes.

Stages become nests of loops (cuda_nests.py). A value is staged in shared memory if it is read more
than once per element, or by a later stage. cuda_reductions.py writes sums and maxima.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mirage_hf import errors
from mirage_hf.codegen.cuda_math import TYPES
from mirage_hf.codegen.cuda_nests import Operand
from mirage_hf.codegen.cuda_reductions import THREADS, ReductionWriter
from mirage_hf.graph.block import BlockGraph, BlockInput, Role, Stage
from mirage_hf.graph.text import format_block_graph

#: Bytes of shared memory that any kernel gets, and the most that one may ask for on sm_90 and
#: sm_100 (CUDA programming guide).
SHARED_PLAIN, SHARED_MOST = 48 * 1024, 227 * 1024


@dataclass(frozen=True)
class CudaKernel:
    """Generated text of one kernel, and what its launch needs.

    Attributes:
        source: The text.
        grid: Number of thread blocks.
        shared: Bytes of dynamic shared memory.
    """

    source: str
    grid: int
    shared: int


def write_kernel(
    block: BlockGraph, operands: Sequence[Operand], outputs: Sequence[Operand], name: str
) -> CudaKernel:
    """Return a block graph as a CUDA kernel in namespace `name`.

    The kernel takes the largest loop tile whose staged values fit in shared memory.

    Raises:
        CodegenError: If a value that must be held whole does not fit, or if only the Triton
            generator can write the block graph.
    """
    _refuse(block, name)
    tiles = _grid_tiles(block)
    most = max(
        (min(4096, 1 << (a.size - 1).bit_length()) for a in block.named(Role.LOOP)), default=1
    )
    while True:
        for limit in (SHARED_PLAIN, SHARED_MOST):
            loop_tile = most
            while loop_tile:
                walked = {a.name: min(a.size, loop_tile) for a in block.named(Role.LOOP)}
                kernel = _Writer(block, operands, outputs, tiles | walked, name).kernel()
                if kernel.shared <= limit:
                    return kernel
                loop_tile //= 2
        widest = max(tiles, key=lambda a: tiles[a], default=None)
        if widest is None or tiles[widest] == 1:
            raise errors.CodegenError(
                f"{name}: needs {kernel.shared} bytes of shared memory, a block has {SHARED_MOST}; "
                "make one of its tile axes the loop axis or a grid axis"
            )
        tiles = tiles | {widest: tiles[widest] // 2}


def _refuse(block: BlockGraph, name: str) -> None:
    """Check that CUDA C++ can be written for a block graph.

    Raises:
        CodegenError: If only the Triton generator writes it.
    """
    way_out = (
        "the CUDA generator does not write that; generate a Triton program, or choose another "
        "candidate"
    )
    for a in block.axes:
        if a.split_axis is not None:
            raise errors.CodegenError(
                f"{name}: axis {a.name} is split by {a.split_axis}; {way_out}"
            )
    for i in block.inputs:
        if i.bounds is not None:
            raise errors.CodegenError(
                f"{name}: {i.name} holds bounds of axis {i.bounds}; {way_out}"
            )
        if i.rotation is not None:
            raise errors.CodegenError(
                f"{name}: {i.name} is rotated along axis {i.rotation.axis}; {way_out}"
            )
        if i.taken is not None:
            raise errors.CodegenError(
                f"{name}: an index chooses the elements of {i.name}; {way_out}"
            )
        if i.padding is not None:
            raise errors.CodegenError(
                f"{name}: {i.name} is padded along axis {i.padding.axis}; {way_out}"
            )
    for stage in block.stages:
        read = {x for op in stage.body for x in op.args}
        for acc in stage.accumulators:
            if acc.out in read:
                raise errors.CodegenError(
                    f"{name}: {acc.out} is read while it is accumulated, a running maximum; "
                    f"{way_out}"
                )


def _grid_tiles(block: BlockGraph) -> dict[str, int]:
    """Return the tile of each grid axis: wide if a product can reuse a factor, otherwise 1."""
    reused = {
        axis
        for c in block.contractions.values()
        for axis in set(block.carried[c.a]) ^ set(block.carried[c.b])
    }
    grid = block.named(Role.GRID)
    wide = sorted((a for a in grid if a.name in reused), key=lambda a: -a.size)
    if not wide:  # nothing is reused, so widen the last dim of an output for its stores
        wide = [a for a in grid if any(o.axes[-1] == a.name for o in block.outputs)][:1]
    tiles = {a.name: 1 for a in grid} | {
        a.name: 64 if i == 0 else min(a.size, 16) for i, a in enumerate(wide)
    }
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


class _Writer(ReductionWriter):
    """Writes the text of one kernel, top to bottom."""

    def kernel(self) -> CudaKernel:
        """Return the kernel."""
        for stage in self.block.stages:
            self.stage(stage)
        for o in self.block.outputs:
            if not any(a is not None and self.block.role(a) is Role.LOOP for a in o.axes):
                self.store(o)
        shared = sum(a.bytes for a in self.arrays.values()) + -(-self.partial * 4 // 16) * 16
        grid = math.prod(self.trips(a.name) for a in self.block.named(Role.GRID))
        return CudaKernel(
            "\n".join([*self.head(), *_used(self.lines), "}", "", f"}}  // namespace {self.name}"]),
            grid,
            shared,
        )

    def head(self) -> list[str]:
        """Return everything before the kernel's body. The body must have been written."""
        graph = [line.partition("  # ")[0] for line in format_block_graph(self.block).splitlines()]
        arrays = self._shared_arrays()
        lines = [
            *(f"// {line}" for line in graph),
            f"namespace {self.name} {{",
            "",
            f"constexpr int threads = {THREADS};",
            *self._sizes(),
        ]
        lines += ["", "struct Shared {", *arrays, "};"] if arrays else []
        lines += [
            "",
            f"__global__ void __launch_bounds__(threads) run({self._parameters()}) {{",
            "  const int tid = threadIdx.x;",
        ]
        if arrays:
            lines += [
                "  extern __shared__ __align__(16) unsigned char memory[];",
                "  Shared& shared = *reinterpret_cast<Shared*>(memory);",
            ]
        lines += self._block_coordinates()
        return lines + ["  " + self.address(i) for i in self.block.inputs]

    def _sizes(self) -> list[str]:
        """Return definitions of the sizes and tiles of axes that the body reads."""
        read = set(re.findall(r"\w+", "\n".join(self.lines)))
        read |= {f"{a.name}_tile" for a in self.block.axes if self.trips(a.name) > 1}
        sizes = {f"{a.name}_size": a.size for a in self.block.axes}
        sizes |= {f"{a}_tile": tile for a, tile in self.tile.items()}
        return [f"constexpr int {name} = {value};" for name, value in sizes.items() if name in read]

    def _shared_arrays(self) -> list[str]:
        """Return the members of the struct of shared memory."""
        arrays = [
            f"  alignas(16) {a.ctype} {a.name}[{a.elements}];  // [{', '.join(a.axes)}]"
            for a in self.arrays.values()
        ]
        return arrays + ([f"  alignas(16) float partial[{self.partial}];"] if self.partial else [])

    def _parameters(self) -> str:
        """Return the kernel's parameters: a pointer for each source and each output."""
        sources = [
            f"const {TYPES[self.operands[s].dtype]}* __restrict__ {self.pointer(i, k)}"
            for i in self.block.inputs
            for k, s in enumerate(i.sources)
        ]
        outputs = [
            f"{TYPES[t.dtype]}* __restrict__ {self.var(o.value)}_out{n}"
            for n, (o, t) in enumerate(zip(self.block.outputs, self.outputs, strict=True))
        ]
        return ", ".join([*sources, *outputs])

    def _block_coordinates(self) -> list[str]:
        """Return definitions of where the block's tile begins on each grid axis."""
        cut = [a.name for a in self.block.named(Role.GRID) if self.trips(a.name) > 1]
        lines = ["  int block = blockIdx.x;"] if cut else []
        for a in reversed(cut):
            lines.append(f"  const int {a}_0 = block % {self.trips(a)} * {a}_tile;")
            lines += [f"  block /= {self.trips(a)};"] if a != cut[0] else []
        return lines

    def address(self, i: BlockInput) -> str:
        """Return a C++ lambda from coordinates to the address of an input's element."""
        axes = [a for a in i.axes if a is not None]

        def at(source: int, k: int, start: int) -> str:
            t = self.operands[source]
            reach = t.offset + sum(
                (self.size[a] - 1) * s for a, s in zip(i.axes, t.strides, strict=True) if a
            )
            wide = "LL" if reach >= 1 << 31 else ""
            terms = [
                (f"(at_{a} - {start})" if a == i.joined and start else f"at_{a}")
                + (f" * {s}{wide}" if s != 1 else "")
                for a, s in zip(i.axes, t.strides, strict=True)
                if a and s
            ]
            return " + ".join([self.pointer(i, k), *([str(t.offset)] if t.offset else []), *terms])

        text, start = "", 0
        for k, source in enumerate(i.sources):
            piece = at(source, k, start)
            start += i.sizes[k] if i.sizes else 0
            text += piece if k == len(i.sources) - 1 else f"at_{i.joined} < {start} ? {piece} : "
        parameters = ", ".join(f"int at_{a}" for a in axes)
        return f"const auto {self.var(i.name)}_at = [&]({parameters}) {{ return {text}; }};"

    # -- stages -----------------------------------------------------------------------------------

    def stage(self, stage: Stage) -> None:
        """Write a stage: first the values that do not carry the loop axis, then the loop."""
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
            if self.has_partial_tile(loop):
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
        """Stage the wanted values and compute the reductions of the body, in the body's order.

        Args:
            stage: The stage.
            wanted: The values to stage.
            inside: True for the ops inside the loop, False for those before it.
        """
        fresh = [v for v in wanted if v in self.inputs and v not in self.staged]
        here = {op.out for op in stage.body}
        earlier = [v for v in self.ops if v in wanted and v not in here and v not in self.staged]
        for value in fresh:
            self.fill(value)
        for value in earlier:  # computed in an earlier stage, and needed whole only now
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
        """Return the values to stage: those that reductions read more than once per element."""
        sums = [op.args[0] for op in stage.body if op.over is not None] + [
            a.arg for a in stage.accumulators
        ]
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


def _used(lines: Sequence[str]) -> list[str]:
    """Return the lines without the coordinates that nothing in their scope reads."""
    kept: list[str] = []
    names: list[set[str]] = [set()]  # names read further down, one set per open scope
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
