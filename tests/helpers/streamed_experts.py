"""Build block graphs whose codes an index chooses, with schedules of kernels that stream them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mirage_hf.codegen.cuda_kernel import CudaKernel
from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.codegen.streams.layout import StreamLayout, stream_layout
from mirage_hf.codegen.streams.products import ZEROS
from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
    Taken,
)
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.dtypes import E2M1
from mirage_hf.ops.table import as_dtype
from mirage_hf.tune.measure import random_inputs
from tests.helpers.cuda_on_cpu import run_kernel

#: Codes of 4-bit floats. Their dtype is uint4.
SMALL_FLOAT = "e2m1"


@dataclass(frozen=True)
class Experts:
    """A block graph that is built directly, with a schedule and an index.

    Each product is Σ (codes − zero) · scale · x for the rows of an expert. With `chosen`, the
    results have the rows of each chosen expert. With `pieces`, each of that many experts multiplies
    its own columns of x, and the results are summed.

    Attributes:
        codes: The dtype of the codes, or "e2m1".
        scales: The dtype of the scales. Empty: there are none.
        experts: How many experts there are.
        index: The experts that are chosen. Those of a number out of range are missing.
        index_dtype: The dtype of the index.
        chosen: How many experts have rows in the results. 0: the index has no axis of rows.
        pieces: How many pieces the columns have. 0: the index has no axis of pieces.
        rows: How many rows an expert has.
        columns: How many columns an expert has.
        group: How many columns share a scale.
        square: How many rows share a scale. 0: each row has its own.
        dtype: The dtype of activations and outputs.
        has_gate: Whether two products share x. The result is silu(first) · second.
        has_bias: Whether each product has a bias of each expert.
        has_weights: Whether each piece has a weight. It multiplies the biases, too.
        weighs_first: Whether the weights multiply x. Otherwise they multiply the sums.
        scales_first: Whether scales multiply x. Otherwise they multiply the sum of each group.
        walks_groups: Whether the loop walks the groups of columns, not the columns of a group.
        in_turns: Whether rows of both products may lie in turns: there is a gap after each.
        is_apart: Whether they do not: one product lies after the other.
        is_swapped: Whether the second product comes first in memory.
        gap: Codes between rows that belong to nothing. Scales have one element there.
        shift: Elements between the begin of the scales and a multiple of 16 bytes.
        tile: Tile along the outer columns.
        tile_rows: Rows of a tile. 0: the most.
        stages: Chunks of the ring.
        warps: Warps that multiply.
        blocks: Thread blocks.
        batch: Rows of x. Kernels with an index have one.
    """

    codes: str = SMALL_FLOAT
    scales: str = "float8_e8m0fnu"
    experts: int = 4
    index: tuple[int, ...] = (2, 0)
    index_dtype: str = "int64"
    chosen: int = 2
    pieces: int = 0
    rows: int = 32
    columns: int = 128
    group: int = 32
    square: int = 0
    dtype: str = "float32"
    has_gate: bool = False
    has_bias: bool = False
    has_weights: bool = False
    weighs_first: bool = False
    scales_first: bool = False
    walks_groups: bool = True
    in_turns: bool = False
    is_apart: bool = False
    is_swapped: bool = False
    gap: int = 0
    shift: int = 0
    tile: int = 4
    tile_rows: int = 0
    stages: int = 2
    warps: int = 2
    blocks: int = 3
    batch: int = 1

    # -- axes -------------------------------------------------------------------------------------

    @property
    def index_axes(self) -> tuple[str, ...]:
        """The axes of the index."""
        return ("b",) * bool(self.chosen) + ("s",) * bool(self.pieces)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axis of rows of x, if there are several."""
        return ("m",) * (self.batch > 1)

    @property
    def piece_axes(self) -> tuple[str, ...]:
        """The axis of pieces, if there are any."""
        return ("s",) * bool(self.pieces)

    @property
    def own_row_axes(self) -> tuple[str, ...]:
        """The axes of the rows of an expert."""
        return ("n", "o") if self.square else ("n",)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes of all rows."""
        return ("b",) * bool(self.chosen) + self.own_row_axes

    @property
    def result_axes(self) -> tuple[str, ...]:
        """The axes of a result."""
        return (*self.batch_axes, *self.row_axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        sizes = {"b": self.chosen, "m": self.batch, "s": self.pieces}
        sizes |= {"n": self.rows // (self.square or 1), "o": self.square}
        return sizes | {"k": self.columns // self.group, "r": self.group}

    def dims(self, *axes: str | None) -> tuple[int, ...]:
        """Return the sizes of axes. A dim without an axis has size 1."""
        return tuple(1 if a is None else self.sizes[a] for a in axes)

    # -- operands ---------------------------------------------------------------------------------

    @property
    def products(self) -> range:
        """The numbers of the products."""
        return range(2 if self.has_gate else 1)

    @property
    def kind(self) -> str:
        """The dtype of the codes."""
        return "uint4" if self.codes == SMALL_FLOAT else self.codes

    def strides_of(self, axes: Sequence[str | None], row: int) -> tuple[int, ...]:
        """Return the strides of an operand of all experts, with a distance between its rows."""
        strides, step = [], 1
        for a, n in reversed([*zip(axes, self.dims(*axes), strict=True)]):
            step = max(step, row) if a in self.own_row_axes else step
            strides.insert(0, step)
            step *= n
        return (step, *strides)

    @cached_property
    def graph(self) -> KernelGraph:
        """A kernel graph whose only op is the block graph."""
        g = KernelGraph()
        tensors: list[DTensor] = []
        inputs: list[BlockInput] = []
        index = g.new_input((1, *self.dims(*self.index_axes)), self.index_dtype, name="index")
        taken = Taken(0, self.experts, 0, (None, *self.index_axes))
        tensors.append(index)

        def add(name, axes, dtype, row=0):
            """Add an input. If its rows have a distance, it has those of all experts."""
            source, dims, strides, chosen = (len(tensors),), self.dims(*axes), None, None
            if row:
                strides, chosen = self.strides_of(axes, row), taken
                dims, axes = (self.experts, *dims), (None, *axes)
            tensors.append(g.new_input(dims, dtype, strides, name=name, constant=row > 0))
            inputs.append(BlockInput(name, source, axes, taken=chosen))

        batch, own = self.batch_axes, self.own_row_axes
        times = 2 if self.in_turns else 1
        add("x", (*batch, *self.piece_axes, "k", "r"), self.dtype)
        for p in self.products:
            add(f"codes{p}", (*own, "k", "r"), self.kind, times * self.columns + self.gap)
            if self.scales:
                axes = ("n", None, "k", None) if self.square else (*own, "k", None)
                row = self.sizes["k"] * (1 if self.square else times) + bool(self.gap)
                add(f"scales{p}", axes, self.scales, row)
            if self.has_bias:
                add(f"bias{p}", own, "float32", times)
        if self.has_weights:
            add("weights", (*batch, "s"), self.dtype)
        output = BlockOutput("y", self.result_axes, self.dtype)
        roles = {"r": Role.TILE, "k": Role.LOOP, "s": Role.TILE}
        if not self.walks_groups:
            roles |= {"r": Role.LOOP, "k": Role.TILE}
        names = (*self.result_axes, *self.piece_axes, "k", "r")
        axes = tuple(Axis(a, self.sizes[a], roles.get(a, Role.GRID)) for a in names)
        block = BlockGraph(axes, tuple(inputs), self.block_stages, (output,))
        g.mark_output(*g.customized(tensors, block))
        return g

    @property
    def block_stages(self) -> tuple[Stage, ...]:
        """The loop over the columns, and what comes before and after it."""
        return _Stages(self).stages()

    @cached_property
    def op(self) -> PlacedOp:
        """The op as it runs."""
        return place_kernels(UGraph(self.graph, self.graph))[0]

    # -- kernels ----------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        tiles = dict.fromkeys(self.row_axes, 1)
        tiles[self.row_axes[-1]] = self.tile_rows or (8 if self.has_gate else 16)
        tiles |= {a: next_power_of_two(self.sizes[a]) for a in (*self.batch_axes, *self.piece_axes)}
        groups = self.tile if self.walks_groups else next_power_of_two(self.sizes["k"])
        tiles |= {"k": groups, "r": next_power_of_two(self.group)}
        return Schedule(
            tiles,
            num_stages=self.stages,
            num_warps=self.warps,
            persistent_blocks=self.blocks,
            cuda=True,
        )

    @property
    def layout(self) -> StreamLayout:
        """How the schedule divides the work."""
        return stream_layout(self.op, self.schedule)

    def kernel(self, name: str = "kernel") -> CudaKernel:
        """Return the kernel in namespace `name`."""
        return write_stream_kernel(self.op, self.schedule, name)

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The index and random inputs. Blocks of 256 columns differ by powers of two."""
        names = [t.name for t in self.graph.inputs]
        found = dict(zip(names, random_inputs(self.graph, "cpu"), strict=True))
        found["index"].copy_(torch.tensor(self.index).view_as(found["index"]))
        largest = {SMALL_FLOAT: 3.0, "uint4": 5.0, "int4": 5.0, "float8_e4m3fn": 1.0}
        found["x"] /= largest.get(self.codes, 74.0) * self.columns**0.5
        blocks = torch.arange((self.pieces or 1) * self.columns) // 256
        found["x"] *= torch.exp2(2 * blocks % 6).view(found["x"].shape[self.batch > 1 :])
        for kind in ("codes", "scales", "bias"):
            if f"{kind}0" in found:
                self.lay(found, kind)
        return [*found.values()]

    def lay(self, found: dict[str, Tensor], kind: str) -> None:
        """Move the codes, the scales or the biases to where they lie in memory: in one storage.

        Before the first expert and after the last one there is one more, which is none.
        """
        names = [f"{kind}{p}" for p in self.products]
        first = found[names[0]]
        margin = -(-first.stride(0) // 16) * 16 + 16
        step = (first.shape[0] + 2) * margin
        numbers = first[0].reshape(-1)  # of one expert, again and again
        storage = numbers.repeat(-(-2 * step // len(numbers)))
        is_square = kind == "scales" and self.square
        if self.in_turns and not self.is_apart and not is_square:
            step = first.stride(len(self.own_row_axes)) // 2
        margin += self.shift if kind == "scales" else 0
        for n, name in enumerate(reversed(names) if self.is_swapped else names):
            old = found[name]
            place = storage[margin + n * step :].as_strided(old.shape, old.stride())
            found[name] = place.copy_(old)

    def run(
        self,
        kernel: CudaKernel,
        name: str,
        order: int,
        folder: Path,
        source: str = "",
        inputs: Sequence[Tensor] = (),
    ) -> Tensor | str:
        """Return the output of a kernel, or what went wrong.

        Args:
            kernel: The kernel.
            name: Its namespace.
            order: The order of threads and copies.
            folder: Where kernels are compiled.
            source: The text of this and other kernels. Empty: that of the kernel.
            inputs: The inputs. Empty: `self.inputs`.
        """
        output = torch.full(self.graph.outputs[0].dims, math.nan, dtype=as_dtype(self.dtype))
        index, *others = inputs or self.inputs
        sizes = kernel.grid, kernel.threads, kernel.shared
        tensors = [*others, index, output]
        failure = run_kernel(source or kernel.source, name, *sizes, tensors, order, folder)
        return failure or output

    @cached_property
    def exact(self) -> Tensor:
        """The result in float64. Missing experts are one more, whose numbers are 0."""
        more = replace(self, experts=self.experts + 1, in_turns=False, gap=0)
        inputs = []
        for t, x in zip(self.graph.inputs, self.inputs, strict=True):
            if t.name == "index":
                inputs.append(x.masked_fill((x < 0) | (x >= self.experts), self.experts))
            elif t.constant:
                inputs.append(torch.cat((x, torch.zeros_like(x[:1]))))
            else:
                inputs.append(x)
        return run_kernel_graph(more.graph, inputs, torch.float64)[0]

    @cached_property
    def largest(self) -> float:
        """The largest result, also if the first expert takes the place of missing ones.

        Columns of different pieces share powers of two. So those of a missing expert make others
        less exact.
        """
        index = tuple(i if 0 <= i < self.experts else 0 for i in self.index)
        all_there = self if index == self.index else replace(self, index=index)
        return float(max(self.exact.abs().max(), all_there.exact.abs().max()))

    def error(self, got: Tensor) -> float:
        """Return the largest error as a multiple of what rounding explains."""
        want = self.exact
        # x in 22 bits; halves hold 11 bits of x
        bits = 9 if as_dtype(self.kind).is_floating_point else 18
        allowed = torch.finfo(got.dtype).eps * want.abs() + self.largest * 2.0**-bits
        allowed = 4 * allowed if self.has_gate else allowed  # the errors of both factors add up
        return float(((got.double() - want).abs() / allowed).nan_to_num(math.inf).max())


class _Stages:
    """Builds the stages of a block graph."""

    def __init__(self, experts: Experts):
        self.of = experts
        self.before: list[BlockOp] = []
        self.body: list[BlockOp] = []
        self.sums: list[Accumulator] = []
        self.after: list[BlockOp] = []

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages."""
        e = self.of
        other = "x"
        if e.weighs_first and e.has_weights:
            axes = (*e.batch_axes, *e.piece_axes, "k", "r")
            other = self.op(self.body, "weighted", "mul", "x", "weights", axes=axes)
        results = [self.product(p, other) for p in e.products]
        if e.has_gate:
            gate = self.op(self.after, "gate", "silu", results[0], axes=e.result_axes)
            results = [self.op(self.after, "gated", "mul", gate, results[1], axes=e.result_axes)]
        self.op(self.after, "y", "mul", results[0], 1.0, axes=e.result_axes)
        loop = "k" if e.walks_groups else "r"
        stages = [Stage(loop, tuple(self.body), tuple(self.sums)), Stage(None, tuple(self.after))]
        return (Stage(None, tuple(self.before)), *stages) if self.before else tuple(stages)

    def op(self, to, out, fn, *args, axes, over=None, **attrs):
        """Add an op, and return its result."""
        to.append(BlockOp(out, fn, args, axes, attrs=tuple(attrs.items()), over=over))
        return out

    def product(self, p: int, other: str) -> str:
        """Add the sum of a product, and return its name."""
        e = self.of
        columns = (*e.piece_axes, "k", "r")
        value = f"codes{p}"
        axes = (*e.row_axes, *columns)
        if e.codes == SMALL_FLOAT:
            value = self.op(self.body, f"numbers{p}", "lookup", value, axes=axes, values=E2M1)
        elif zero := ZEROS[as_dtype(e.codes)]:
            value = self.op(self.body, f"centered{p}", "sub", value, zero, axes=axes)
        scale_rows = e.row_axes[:-1] if e.square else e.row_axes
        everything = (*e.batch_axes, *axes)
        if e.scales and e.scales_first:
            scaled = (*e.batch_axes, *scale_rows, *columns)
            other = self.op(self.body, f"scaled{p}", "mul", other, f"scales{p}", axes=scaled)
        value = self.op(self.body, f"product{p}", "mul", value, other, axes=everything)
        value = self.summed(p, value)
        result = e.result_axes
        if not e.pieces:
            if e.has_bias:
                value = self.op(self.after, f"biased{p}", "add", value, f"bias{p}", axes=result)
            return value
        return self.sum_of_pieces(p, value)

    def summed(self, p: int, value: str) -> str:
        """Add the sum over the columns of an expert."""
        e = self.of
        axes = (*e.result_axes, *e.piece_axes)
        groups = (*axes, "k")
        if e.walks_groups:
            value = self.op(self.body, f"total{p}", "sum", value, axes=groups, over="r")
            if e.scales and not e.scales_first:
                value = self.op(self.body, f"times{p}", "mul", value, f"scales{p}", axes=groups)
            self.sums.append(Accumulator(f"sum{p}", value, "sum", axes))
            return f"sum{p}"
        self.sums.append(Accumulator(f"open{p}", value, "sum", groups))
        value = f"open{p}"
        if e.scales and not e.scales_first:
            value = self.op(self.after, f"times{p}", "mul", value, f"scales{p}", axes=groups)
        return self.op(self.after, f"sum{p}", "sum", value, axes=axes, over="k")

    def sum_of_pieces(self, p: int, value: str) -> str:
        """Add the sum over pieces, and that of the biases."""
        e = self.of
        result, axes = e.result_axes, (*e.result_axes, "s")
        if e.has_weights and not e.weighs_first:
            value = self.op(self.after, f"weighed{p}", "mul", value, "weights", axes=axes)
        value = self.op(self.after, f"all{p}", "sum", value, axes=result, over="s")
        if not e.has_bias:
            return value
        bias, bias_axes = f"bias{p}", (*e.row_axes, "s")
        if e.has_weights:
            bias_axes = (*e.batch_axes, *bias_axes)
            bias = self.op(self.before, f"part{p}", "mul", bias, "weights", axes=bias_axes)
        bias_axes = tuple(a for a in bias_axes if a != "s")
        bias = self.op(self.before, f"biases{p}", "sum", bias, axes=bias_axes, over="s")
        return self.op(self.after, f"biased{p}", "add", value, bias, axes=result)


def random_experts(seed: int) -> Experts:
    """Return a random block graph and schedule that fit together."""
    r = random.Random(seed)
    codes = r.choice((SMALL_FLOAT, SMALL_FLOAT, "uint4", "int4", "uint8", "int8", "float8_e4m3fn"))
    scales = r.choice(("bfloat16", "float16", "float32"))
    if codes == SMALL_FLOAT or r.random() < 0.2:
        scales = "float8_e8m0fnu"
    if r.random() < 0.1 and codes not in ("uint4", "uint8"):
        scales = ""
    experts = r.randint(1, 9)
    kind = r.choice(("rows", "rows", "pieces", "pieces", "both"))
    chosen = r.randint(1, 5) if kind != "pieces" else 0
    pieces = r.randint(1, 5) if kind != "rows" else 0
    # one of them is often missing, and small numbers repeat each other
    numbers = [*range(-1, experts + 1)]
    index = tuple(r.choice(numbers) for _ in range((chosen or 1) * (pieces or 1)))
    group = r.choice((32, 32, 64, 128))
    columns = group * r.randint(1, 9)
    columns += columns % 64
    has_gate = r.random() < (0.5 if kind == "rows" else 0.15)
    square = r.choice((16, 32)) if codes == "float8_e4m3fn" and r.random() < 0.6 else 0
    in_turns = has_gate and r.random() < 0.7
    is_short = has_gate or (codes != "float8_e4m3fn" and r.random() < 0.5)
    return Experts(
        codes=codes,
        scales=scales,
        experts=experts,
        index=index,
        index_dtype=r.choice(("int64", "int32")),
        chosen=chosen,
        pieces=pieces,
        rows=square * r.randint(1, 3) if square else 16 * r.randint(1, 5),
        columns=columns,
        group=group,
        square=square,
        dtype=r.choice(("bfloat16", "float16", "float32")),
        has_gate=has_gate,
        has_bias=r.random() < 0.5,
        has_weights=pieces > 0 and r.random() < 0.7,
        weighs_first=r.random() < 0.5,
        scales_first=r.random() < 0.3,
        walks_groups=r.random() < 0.6,
        in_turns=in_turns,
        is_apart=r.random() < 0.5,
        is_swapped=r.random() < 0.5,
        gap=0 if in_turns else 32 * r.choice((0, 0, 0, 1)),
        shift=r.choice((0, 0, 1, 3, 6)),
        tile=1 << r.randint(0, 4),
        tile_rows=8 if is_short else 16,
        stages=r.randint(1, 6),
        warps=r.choice((1, 2, 4, 8)),
        blocks=r.choice((1, 2, 3, 5, 100)),
    )
