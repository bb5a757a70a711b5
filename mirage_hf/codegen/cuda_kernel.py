"""Write one block graph as a CUDA kernel: a thread block per tile of the grid axes.

Stages become nests of loops (cuda_nests.py). A value is staged in shared memory if it is read more
than once per element, or by a later stage. cuda_reductions.py writes sums and maxima, and
cuda_running.py maxima that a loop reads while they grow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf import errors
from mirage_hf.codegen.cuda_math import TYPES
from mirage_hf.codegen.cuda_nests import MOST_ROWS, Operand
from mirage_hf.codegen.cuda_running import RunningMaximumWriter
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.block import BlockGraph, BlockOp, Role, Stage
from mirage_hf.graph.printing import format_block_graph

#: Bytes of shared memory that any kernel gets, and the most that one may ask for on sm_90 and
#: sm_100 (CUDA programming guide).
SHARED_PLAIN, SHARED_MOST = 48 * 1024, 227 * 1024

#: The most bytes of a value that is staged for all trips of a loop at once.
WHOLE_BYTES = 32 * 1024

#: Threads of a block, without a schedule.
_THREADS = 256

#: Blocks of a cluster. All GPUs with clusters run these sizes.
_CLUSTER_SIZES = (2, 4, 8)


@dataclass(frozen=True)
class CudaKernel:
    """Generated text of one kernel, and what its launch needs.

    Attributes:
        source: The text.
        grid: Number of thread blocks.
        shared: Bytes of dynamic shared memory.
        is_clustered: Whether its blocks form clusters.
        threads: Threads of a block.
        loaded_ahead: Vectors of 16 bytes that a thread holds for the next tile of a loop.
        loaded_early: How many of them it reads before it waits for the previous kernel.
        helpers: Device functions that it calls and few others do. They come before the text.
        unaligned: Inputs of the block graph that it may read at any address.
    """

    source: str
    grid: int
    shared: int
    is_clustered: bool
    threads: int = _THREADS
    loaded_ahead: int = 0
    loaded_early: int = 0
    helpers: str = ""
    unaligned: frozenset[str] = frozenset()


def write_kernel(
    block: BlockGraph,
    operands: Sequence[Operand],
    outputs: Sequence[Operand],
    name: str,
    schedule: Schedule | None = None,
) -> CudaKernel:
    """Return a block graph as a CUDA kernel in namespace `name`.

    Without a schedule the kernel takes the largest loop tile whose staged values fit in shared
    memory.

    Raises:
        CodegenError: If a value that must be held whole does not fit, or if only the Triton
            generator can write the block graph.
    """
    _refuse(block, name)
    if schedule is not None:
        return _scheduled(block, operands, outputs, name, schedule)
    tiles = _grid_tiles(block)
    walks = {a.name: block.split_size(a.name) for a in block.named(Role.LOOP)}
    most = max((min(4096, 1 << (n - 1).bit_length()) for n in walks.values()), default=1)
    while True:
        for limit in (SHARED_PLAIN, SHARED_MOST):
            loop_tile = most
            while loop_tile:
                walked = {a: min(n, loop_tile) for a, n in walks.items()}
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


def _scheduled(
    block: BlockGraph,
    operands: Sequence[Operand],
    outputs: Sequence[Operand],
    name: str,
    schedule: Schedule,
) -> CudaKernel:
    """Return the kernel of a schedule.

    Raises:
        CodegenError: If its tiles do not fit in shared memory.
    """
    schedule.check(block)
    tiles = {
        a.name: min(schedule.tiles[a.name], block.split_size(a.name))
        for a in block.named(Role.GRID, Role.LOOP)
        if block.axis_split_by(a.name) is None
    }
    threads = 32 * schedule.num_warps
    kernel = _Writer(block, operands, outputs, tiles, name, threads, schedule=schedule).kernel()
    if kernel.shared > SHARED_MOST:
        raise errors.CodegenError(
            f"{name}: {schedule} needs {kernel.shared} bytes of shared memory, a block has "
            f"{SHARED_MOST}; give smaller tiles"
        )
    return kernel


def _refuse(block: BlockGraph, name: str) -> None:
    """Check that CUDA C++ can be written for a block graph.

    Raises:
        CodegenError: If only the Triton generator writes it.
    """
    why = obstacle(block)
    if why:
        raise errors.CodegenError(
            f"{name}: {why}; the CUDA generator does not write that; generate a Triton program, or "
            "choose another candidate"
        )


def obstacle(block: BlockGraph) -> str:
    """Return why CUDA C++ cannot be written for a block graph; empty if it can."""
    if block.cluster is not None and block.cluster.size not in _CLUSTER_SIZES:
        return (
            f"cluster axis {block.cluster.name} has {block.cluster.size} elements; there may be "
            f"clusters of {', '.join(map(str, _CLUSTER_SIZES))} blocks"
        )
    for i in block.inputs:
        if i.bounds is not None:
            return f"{i.name} holds bounds of axis {i.bounds}"
        if i.rotation is not None:
            return f"{i.name} is rotated along axis {i.rotation.axis}"
        if i.taken is not None:
            return f"an index chooses the elements of {i.name}"
        if i.padding is not None:
            return f"{i.name} is padded along axis {i.padding.axis}"
    return ""


def _grid_tiles(block: BlockGraph) -> dict[str, int]:
    """Return the tile of each grid axis: wide if a product can reuse a factor, otherwise 1."""
    reused = {
        axis
        for c in block.contractions.values()
        for axis in set(block.carried[c.a]) ^ set(block.carried[c.b])
    }
    grid = [a for a in block.named(Role.GRID) if block.axis_split_by(a.name) is None]
    wide = sorted((a for a in grid if a.name in reused), key=lambda a: -a.size)
    if not wide:  # nothing is reused, so widen the last dim of an output for its stores
        wide = [a for a in grid if any(o.axes[-1] == a.name for o in block.outputs)][:1]
    tiles = {a.name: 1 for a in grid} | {
        a.name: 64 if i == 0 else min(a.size, 16) for i, a in enumerate(wide)
    }
    rest = math.prod(block.split_size(a.name) for a in block.named(Role.TILE))
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


class _Writer(RunningMaximumWriter):
    """Writes the text of one kernel, top to bottom."""

    def __init__(self, *args: Any, schedule: Schedule | None = None):
        """Start the text of a kernel. The other arguments are those of `NestWriter`."""
        super().__init__(*args)
        self.loads_ahead = schedule is None or schedule.num_stages > 1
        self.loads_early = schedule is None or schedule.prefetch_steps > 0
        self.triggers_early = schedule is not None and schedule.trigger_early
        #: Loads of constants before the wait for the previous kernel.
        self.early: list[str] = []
        self.loaded_early = 0
        self.first_loop = next((s for s in self.block.stages if s.loop is not None), None)

    def kernel(self) -> CudaKernel:
        """Return the kernel."""
        if self.loads_ahead and self.first_loop is not None:
            self.load_loop(self.first_loop, early=True)
        if self.loads_ahead:
            self.load_once()
        for stage in self.block.stages:
            self.stage(stage)
        for o in self.block.outputs:
            if not any(a is not None and self.block.role(a) is Role.LOOP for a in o.axes):
                self.store(o)
        if self.published:
            self.put("cluster.sync();  // no block ends while another one reads its memory")
        self.lines, self.early = _used(self.lines), _used(self.early)
        shared = sum(a.bytes for a in self.arrays.values()) + -(-self.partial * 4 // 16) * 16
        cut = self.block.named(Role.GRID, Role.CLUSTER)
        grid = math.prod(self.trips(a.name) for a in cut)
        return CudaKernel(
            "\n".join([*self.head(), *self.lines, "}", "", f"}}  // namespace {self.name}"]),
            grid,
            shared,
            self.block.cluster is not None,
            self.threads,
            sum(a.held for a in self.ahead.values()),
            self.loaded_early,
        )

    def head(self) -> list[str]:
        """Return everything before the kernel's body. The body must have been written."""
        graph = [line.partition("  # ")[0] for line in format_block_graph(self.block).splitlines()]
        arrays, cluster = self._shared_arrays(), self.block.cluster
        lines = [
            *(f"// {line}" for line in graph),
            f"namespace {self.name} {{",
            "",
            f"constexpr int threads = {self.threads};",
        ]
        lines += [f"constexpr int cluster_blocks = {cluster.size};"] if cluster else []
        lines += self._sizes()
        lines += ["", "struct Shared {", *arrays, "};"] if arrays else []
        bounds = "__cluster_dims__(cluster_blocks, 1, 1) " if cluster else ""
        bounds += "__launch_bounds__(threads)"
        lines += [
            "",
            f"__global__ void {bounds} run({self._parameters()}) {{",
            "  const int tid = threadIdx.x;",
        ]
        if cluster:
            lines.append("  const cg::cluster_group cluster = cg::this_cluster();")
        if arrays:
            lines += [
                "  extern __shared__ __align__(16) unsigned char memory[];",
                "  Shared& shared = *reinterpret_cast<Shared*>(memory);",
            ]
        lines += self._block_coordinates()
        lines += ["  " + self.address(i) for i in self.block.inputs]
        trigger = ["  launch_next_kernel();"]
        lines += trigger if self.triggers_early else []
        lines += [*self.early, "  wait_for_previous_kernel();"]
        return lines + ([] if self.triggers_early else trigger)

    def _sizes(self) -> list[str]:
        """Return definitions of the sizes and tiles of axes that the body reads."""
        read = set(re.findall(r"\w+", "\n".join([*self.early, *self.lines])))
        read |= {f"{a.name}_tile" for a in self.block.named(Role.GRID) if self.trips(a.name) > 1}
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
        """Return the kernel's parameters: a pointer for each source and each output.

        Only constants are `__restrict__`. The compiler may move loads of such an input to before
        the wait for the previous kernel, which may write the others.
        """
        sources = [
            f"const {TYPES[self.operands[s].dtype]}* "
            f"{'__restrict__ ' * self.operands[s].constant}{self.pointer(i, k)}"
            for i in self.block.inputs
            for k, s in enumerate(i.sources)
        ]
        outputs = [
            f"{TYPES[t.dtype]}* {self.var(o.value)}_out{n}"
            for n, (o, t) in enumerate(zip(self.block.outputs, self.outputs, strict=True))
        ]
        return ", ".join([*sources, *outputs])

    def _block_coordinates(self) -> list[str]:
        """Return definitions of where the block's tile begins on each grid axis and split axis.

        Blocks of a cluster have numbers that follow each other.
        """
        cluster = self.block.cluster
        cut = [a.name for a in self.block.named(Role.GRID) if self.trips(a.name) > 1]
        first = "blockIdx.x / cluster_blocks" if cluster else "blockIdx.x"
        lines = [f"  int block = {first};"] if cut else []
        for a in reversed(cut):
            lines.append(f"  const int {a}_0 = block % {self.trips(a)} * {a}_tile;")
            lines += [f"  block /= {self.trips(a)};"] if a != cut[0] else []
        if cluster:
            lines.append(f"  const int {cluster.name}_0 = cluster.block_rank();")
        for axis in self.block.axes:
            if axis.split_axis is not None:
                lines += self._split(axis.name, axis.split_axis)
        return lines

    def _split(self, axis: str, number: str) -> list[str]:
        """Return definitions of where the block's split of an axis begins and ends."""
        size, part = self.size[axis], self.block.split_size(axis)
        begin = f"{axis}_begin" if self.block.role(axis) is Role.LOOP else f"{axis}_0"
        end = f"{begin} + {part}" if size % part == 0 else f"min({begin} + {part}, {size})"
        index = f"{number}_0" if self.trips(number) > 1 else "0"
        lines = [f"  const int {begin} = {index} * {part};"]
        if self.block.role(axis) is Role.LOOP:
            return [*lines, f"  const int {axis}_end = {end};"]
        if self.has_partial_tile(axis):
            lines.append(f"  const int {axis}_end = {end}, {axis}_count = {axis}_end - {begin};")
        return lines

    # -- stages -----------------------------------------------------------------------------------

    def stage(self, stage: Stage) -> None:
        """Write a stage: first the values that do not carry the loop axis, then the loop."""
        wanted = self.wanted(stage)
        self.planned = set(wanted)
        loop, moving = stage.loop, self.moving(stage)

        def walks(value: str) -> bool:
            return loop is not None and (loop in self.block.carried[value] or value in moving)

        running = self.running_maxima(stage)
        accumulators = [a for a in stage.accumulators if a.out not in running]
        if loop is not None and self.loads_ahead and stage is not self.first_loop:
            self.load_loop(stage, early=False)
        self.prepare(stage, [v for v in wanted if not walks(v)], walks, inside=False)
        if loop is None:
            return
        whole = [v for v in wanted if walks(v) and self.can_hold_whole(v, loop)]
        for number, value in enumerate(whole):
            if number and value in self.ops:  # it may read what has just been staged
                self.put("__syncthreads();")
            self.fill_whole(value, loop)
        if whole:
            self.put("__syncthreads();")
        wanted = [v for v in wanted if v not in whole]
        plans = [
            (self.ahead[a.out].nest, self.ahead[a.out].lanes)
            if a.out in self.ahead
            else self.reduce_plan(a.out, a.arg, loop)
            for a in accumulators
        ]
        for maximum in running:
            self.start_maximum(maximum)
        for a, (nest, lanes) in zip(accumulators, plans, strict=True):
            self.declare(a.out, a.kind, nest, lanes)
        begin, end = f"{loop}_begin" if self.is_split(loop) else "0", self.end(loop)
        with self.scope(f"for (int {loop}_0 = {begin}; {loop}_0 < {end}; {loop}_0 += {loop}_tile)"):
            if self.has_partial_tile(loop):
                self.put(f"const int {loop}_count = min({loop}_tile, {end} - {loop}_0);")
            before = len(self.lines)
            self.prepare(stage, [v for v in wanted if walks(v)], walks, inside=True)
            for a, (nest, lanes) in zip(accumulators, plans, strict=True):
                if a.shift is not None:
                    self.rescale(a, nest, lanes)
                self.accumulate(a.out, a.arg, a.kind, nest, lanes)
            here = {op.out for op in stage.body}
            for o in self.block.outputs:
                if o.value in here and loop in o.axes:
                    self.store(o)
            has_barriers = any("__syncthreads" in line for line in self.lines[before:])
            if has_barriers and self.trips(loop) > 1:
                self.put("__syncthreads();")
        self.staged = {v: a for v, a in self.staged.items() if not walks(v)}
        self.staged |= {maximum: self.top(maximum) for maximum in running}
        self.written |= {out for out, ahead in self.ahead.items() if ahead.loop == loop}
        pairs = zip(accumulators, plans, strict=True)
        self.combine([(a.out, a.kind, nest, lanes) for a, (nest, lanes) in pairs])

    def can_hold_whole(self, value: str, loop: str) -> bool:
        """Return whether a value is staged for all trips of a loop at once.

        Then the loop needs no barriers for it.
        """

        def is_known(v: str) -> bool:
            if v in self.inputs or v in self.staged:
                return True
            if self.is_reduced(v) or v not in self.ops:
                return False
            return all(is_known(a) for a in self.ops[v].args if isinstance(a, str))

        carried = self.block.carried[value]
        if loop not in carried or self.trips(loop) == 1 or not is_known(value):
            return False
        elements = self.extent(carried) // self.tile[loop] * self.block.split_size(loop)
        return elements * 4 <= WHOLE_BYTES

    def fill_whole(self, value: str, loop: str) -> None:
        """Stage a value for all trips of a loop."""
        tile, self.tile[loop] = self.tile[loop], self.block.split_size(loop)
        others = {v: a for v, a in self.staged.items() if a.loop == loop}
        self.staged |= {v: replace(a, index=f"i_{loop}") for v, a in others.items()}
        with self.scope(""):
            begin = f"{loop}_begin" if self.is_split(loop) else "0"
            self.put(f"const int {loop}_0 = {begin};")
            self.fill(value)
        self.tile[loop] = tile
        self.staged |= others
        terms = f"{loop}_0" + f" - {loop}_begin" * self.is_split(loop)
        terms += f" + i_{loop}" * (tile > 1)
        # What a tile reads beyond the end is not used, but may lie beyond the array.
        last = self.block.split_size(loop) - 1
        index = f"min({terms}, {last})" if self.has_partial_tile(loop) else f"({terms})"
        self.staged[value] = replace(self.staged[value], loop=loop, index=index)

    def load_loop(self, stage: Stage, early: bool) -> None:
        """Begin to load what the reductions of a loop read in its first trip.

        Constants may be loaded before the grid wait if `early`.
        """
        loop, running = stage.loop, self.running_maxima(stage)
        assert loop is not None
        self.planned = set(self.wanted(stage))
        moving = self.moving(stage)
        reductions = [
            (op.out, str(op.args[0]), str(op.over))
            for op in stage.body
            if op.over is not None
            and (loop in self.block.carried[op.out] or op.out in moving)
            and self.block.role(op.over) is not Role.CLUSTER
        ]
        reductions += [(a.out, a.arg, loop) for a in stage.accumulators if a.out not in running]
        ahead = [out for out, arg, over in reductions if self.plan_ahead(out, arg, over, loop)]
        self.begin_loads(ahead, early)

    def load_once(self) -> None:
        """Begin to load what reductions read that no loop contains."""
        ahead = []
        for stage in self.block.stages:
            if stage.loop is None:
                self.planned = set(self.wanted(stage))
                reductions = [op for op in stage.body if op.over is not None]
                ahead += [
                    op.out
                    for op in reductions
                    if self.block.role(str(op.over)) is not Role.CLUSTER
                    and self.plan_ahead(op.out, str(op.args[0]), str(op.over), None)
                ]
        self.begin_loads(ahead, early=True)

    def begin_loads(self, ahead: Sequence[str], early: bool) -> None:
        """Write the first loads of reductions, those of constants before the grid wait if `early`."""
        early = early and self.loads_early
        before = len(self.lines)
        for out in ahead:
            self.first_loads(out, constant=True)
        if early:
            self.early += self.lines[before:]
            del self.lines[before:]
            self.loaded_early += sum(
                self.ahead[out].vectors * sum(map(self.is_constant, self.ahead[out].values))
                for out in ahead
            )
        for out in ahead:
            self.first_loads(out, constant=False)

    def prepare(
        self, stage: Stage, wanted: Sequence[str], walks: Callable[[str], bool], inside: bool
    ) -> None:
        """Stage the wanted values and compute the reductions of the body, in the body's order.

        Args:
            stage: The stage.
            wanted: The values to stage.
            walks: Says of a value whether it changes in the loop.
            inside: True for the ops inside the loop, False for those before it.
        """
        growing = self.running_maxima(stage) if inside else {}
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
            if walks(op.out) is not inside:
                continue
            for maximum in [a for a in op.args if a in growing]:
                if dirty:
                    self.put("__syncthreads();")
                self.grow(growing.pop(str(maximum)), str(stage.loop))
                dirty = False
            if op.over is not None and self.block.role(op.over) is Role.CLUSTER:
                for part in self.parts_ready(stage, op):
                    if dirty:
                        self.put("__syncthreads();")
                    self.fill(part)
                    dirty = True
                self.exchange(op)
                dirty = False
            elif op.over is not None:
                if dirty:
                    self.put("__syncthreads();")
                self.reduce(op)
                dirty = False
            elif op.out in wanted and not (self.is_part(stage, op.out) and op.out in self.staged):
                if dirty:
                    self.put("__syncthreads();")
                self.fill(op.out)
                dirty = True
        if dirty:
            self.put("__syncthreads();")

    def is_part(self, stage: Stage, value: str) -> bool:
        """Return whether the blocks of the cluster exchange a value in a stage."""
        return any(
            value in op.args and self.block.role(op.over) is Role.CLUSTER
            for op in stage.body
            if op.over is not None
        )

    def parts_ready(self, stage: Stage, exchange: BlockOp) -> list[str]:
        """Return the parts of later exchanges that can be staged before an exchange.

        The blocks then wait for each other once.
        """

        def is_ready(value: str) -> bool:
            if value in self.inputs or value in self.staged:
                return True
            if value not in self.ops or self.is_reduced(value):
                return False
            args = [a for a in self.ops[value].args if isinstance(a, str)]
            return all(map(is_ready, args))

        found = []
        for op in stage.body[stage.body.index(exchange) + 1 :]:
            if op.over is not None and self.block.role(op.over) is Role.CLUSTER:
                part = str(op.args[0])
                is_new = part not in self.staged and part not in found
                if part in self.ops and is_new and is_ready(part):
                    found.append(part)
        return found

    def wanted(self, stage: Stage) -> list[str]:
        """Return the values to stage: those that reductions read more than once per element.

        What the blocks of a cluster exchange is staged too.
        """
        sums = [op.args[0] for op in stage.body if op.over is not None] + [
            a.arg for a in stage.accumulators
        ]
        exchanged = {
            op.args[0]
            for op in stage.body
            if op.over is not None and self.block.role(op.over) is Role.CLUSTER
        }
        found: list[str] = []

        def visit(value: str, axes: Sequence[str]) -> None:
            carried = self.block.carried[value]
            if self.is_reduced(value) or value in found:
                return
            missing = self.extent([a for a in axes if a not in carried])
            is_reread = missing > (MOST_ROWS if value == streamed else 1)
            if value in exchanged or (is_reread and self.extent(carried) > 1):
                found.append(value)
            elif value in self.ops:
                for a in self.ops[value].args:
                    if isinstance(a, str):
                        visit(a, axes)

        for arg in sums:
            streamed = self.streamed(str(arg))
            visit(str(arg), self.block.carried[str(arg)])
        return found

    def streamed(self, value: str) -> str | None:
        """Return the largest input of a value if a thread reads it 16 bytes at a time."""
        read: list[str] = []

        def visit(v: str) -> None:
            if v in self.inputs and v not in read:
                read.append(v)
            elif v in self.ops and not self.is_reduced(v):
                for a in self.ops[v].args:
                    if isinstance(a, str):
                        visit(a)

        visit(value)
        largest = max(read, key=lambda v: self.extent(self.block.carried[v]), default=None)
        if largest is None:
            return None
        axis = self.contiguous(largest)
        is_wide = axis is not None and self.tile[axis] > 1 and self.vector(largest, axis) > 1
        return largest if is_wide else None


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
