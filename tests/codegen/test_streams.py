"""Kernels that stream codes, run on the CPU with several orders of threads and copies."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch

from mirage_hf.codegen import cuda_text
from mirage_hf.codegen.cuda_kernel import CudaKernel
from mirage_hf.codegen.placement import Append, PlacedOp, place_kernels
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.codegen.streams import layout as layouts
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.codegen.streams.products import ZEROS, Products, streamed_products
from mirage_hf.errors import CodegenError
from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
)
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.table import as_dtype
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.measure import random_inputs
from mirage_hf.tune.tuner import check_compiled
from mirage_hf.verify.numeric import NumericCheck, Rejected, measure
from scripts import bench_codes
from tests.helpers import coded_programs
from tests.helpers.cuda_on_cpu import ORDERS, run_kernel


@dataclass(frozen=True)
class Case:
    """A block of a decoder layer with codes, and a schedule."""

    weights: str
    block: str
    hidden: int = 256
    width: int = 512
    group: int = 128
    tile: int = 1
    stages: int = 2
    warps: int = 2
    blocks: int = 3

    @property
    def program(self) -> KernelGraph:
        """The block as a program of one row."""
        sizes = argparse.Namespace(
            hidden=self.hidden, keys=128, width=self.width, group=self.group, weights=self.weights
        )
        return bench_codes.BLOCKS[self.block](1, sizes)


def signed_linear(columns: int, width: int, group: int) -> KernelGraph:
    """Return x · Wᵀ for W = code · scale, with int4 codes in groups of columns."""
    g = KernelGraph()
    x = g.new_input((1, width), "bfloat16", name="x")
    dims = columns, width // group, group
    codes = g.new_input(dims, "int4", name="codes", constant=True)
    scales = g.new_input((*dims[:2], 1), "bfloat16", name="scales", constant=True)
    w = g.mul(g.cast(codes, "bfloat16"), scales)
    g.mark_output(g.matmul(x, g.permute(g.reshape(w, (columns, width)), (1, 0))))
    return g


def shifted_linear(columns: int, width: int) -> KernelGraph:
    """Return x · Wᵀ for W = (code − 128) · scale, with uint8 codes and a scale for each row."""
    g = KernelGraph()
    x = g.new_input((1, width), "bfloat16", name="x")
    codes = g.new_input((columns, width), "uint8", name="codes", constant=True)
    scales = g.new_input((columns, 1), "bfloat16", name="scales", constant=True)
    w = g.mul(g.sub(g.cast(codes, "bfloat16"), 128.0), scales)
    g.mark_output(g.matmul(x, g.permute(w, (1, 0))))
    return g


#: Linears that no benchmark has, by name.
LINEARS = {
    "int4": lambda: signed_linear(64, 448, 64),
    "uint8": lambda: shifted_linear(64, 320),
    "float16": lambda: coded_programs.int4_linear(1, 64, 960, 64, norm=True),
    "float16, int8": lambda: coded_programs.int8_linear(1, 64, 448, norm=True),
    "float16, float8": lambda: coded_programs.fp8_linear(1, 256, 512),
}


@dataclass(frozen=True)
class Linear(Case):
    """One of LINEARS: `weights` is its name."""

    block: str = ""

    @property
    def program(self) -> KernelGraph:
        """The linear."""
        return LINEARS[self.weights]()


CASES = {
    "int4, norm and joined linears": Case("int4", "qkv"),
    "int4, gate and up": Case("int4", "gate_up", tile=2, stages=1, warps=4),
    "int4, residual, chunks that end early": Case("int4", "down", width=640, tile=2, stages=3),
    "int4, groups of 32": Case("int4", "output", group=32, tile=4),
    "int4, groups of 64": Case("int4", "gate_up", group=64, tile=2),
    "int4, columns that do not fill warps": Case("int4", "down", width=384, warps=4),
    "int8, gate and up": Case("int8", "gate_up", tile=128, blocks=5),
    "int8, residual": Case("int8", "down", tile=128, width=448, stages=3),
    "float8, gate and up": Case("fp8", "gate_up", hidden=512, width=256, tile=2),
    "float8, norm and joined linears": Case("fp8", "qkv", hidden=512, warps=4),
    "float8, residual": Case("fp8", "down", stages=3),
    "int4, 320 columns in groups of 32": Case("int4", "gate_up", hidden=320, group=32, width=64),
    "int4, 448 columns in groups of 64": Case("int4", "qkv", hidden=448, group=64, tile=2),
    "int4, 960 columns in groups of 64": Case("int4", "down", width=960, group=64, tile=4),
    "int4, 960 columns in groups of 32": Case("int4", "output", hidden=960, group=32, tile=8),
    "int8, 320 columns": Case("int8", "qkv", hidden=320, tile=64),
    "int8, 960 columns": Case("int8", "gate_up", hidden=960, width=64, tile=256),
    "float8, 1536 columns": Case("fp8", "down", width=1536, tile=8),
    "signed int4": Linear("int4", warps=4),
    "uint8 with zero 128": Linear("uint8", tile=128, stages=3),
    "int4, float16": Linear("float16", tile=4),
    "int8, float16": Linear("float16, int8", tile=128),
    "float8, float16": Linear("float16, float8", tile=2),
}


@cache
def streamed(case: Case) -> tuple[UGraph, PlacedOp, Products]:
    """Return the first µGraph whose only kernel can stream its codes."""
    options = SearchOptions(time_limit=20)
    for c in search_and_verify(case.program, options, keep=12).candidates:
        ops = place_kernels(c.ugraph)
        if len(ops) == 1 and c.allows(False):
            try:
                return c.ugraph, ops[0], streamed_products(ops[0])
            except CodegenError:
                continue
    raise AssertionError(f"no candidate of {case} can stream its codes")


def schedule_of(case: Case, found: Products, **changes: int) -> Schedule:
    tiles = dict.fromkeys(found.rows, 1) | {found.rows[-1]: found.rows_of_each}
    tiles |= {found.columns[0]: case.tile}
    if len(found.columns) > 1:
        tiles[found.columns[1]] = next_power_of_two(found.group)
    given = {"num_stages": case.stages, "num_warps": case.warps, "persistent_blocks": case.blocks}
    return Schedule(tiles, cuda=True, **(given | changes))


def kernel_of(case: Case, **changes: int) -> CudaKernel:
    _, op, found = streamed(case)
    return write_stream_kernel(op, schedule_of(case, found, **changes), "kernel")


def runner(case: Case, kernel: CudaKernel, order: int, folder: Path):
    """Return a function that runs a kernel as the numeric check calls it."""
    ugraph, op, _ = streamed(case)
    of_input = {t.index: n for n, t in enumerate(ugraph.kernels.inputs)}
    views = {o.outputs[0].index: o.inputs[0].index for o in ugraph.kernels.ops if o.block is None}

    def place(t: DTensor) -> int:
        index = t.index
        while index not in of_input:
            index = views[index]
        return of_input[index]

    read = [op.operands[s] for i in op.block.inputs for s in i.sources]

    def run(inputs: Sequence[torch.Tensor], out=None) -> list[torch.Tensor]:
        outputs = [torch.full(t.dims, torch.nan, dtype=t.dtype) for t in op.outputs]
        tensors = [inputs[place(t)].contiguous() for t in read] + outputs
        failure = run_kernel(
            kernel.source,
            "kernel",
            kernel.grid,
            kernel.threads,
            kernel.shared,
            tensors,
            order,
            folder,
        )
        assert not failure, failure
        return [y.view(t.dims) for y, t in zip(outputs, ugraph.program.outputs, strict=True)]

    return run


@pytest.mark.parametrize("name", CASES)
def test_results_are_as_close_to_float64_as_torch(name, tmp_path):
    case = CASES[name]
    kernel = kernel_of(case)
    check = NumericCheck(case.program, torch.device("cpu"))
    for order in ORDERS[:2]:
        verdict = check.judge(runner(case, kernel, order, tmp_path))
        assert not isinstance(verdict, Rejected), f"order {order}: {verdict}"


#: Changes of the first activations, by name. Values are float32. They are rounded afterwards.
SPREADS = {
    "one element is 2^20 times the others": lambda x: x.index_put(
        (torch.tensor(0), torch.tensor(5)), torch.tensor(2.0**20)
    ),
    "one element of each 256 is 2^20 times the others": lambda x: torch.where(
        torch.arange(x.shape[-1]) % 256 == 255, x * 2.0**20, x
    ),
    "half of the columns are 2^20 times the others": lambda x: torch.where(
        torch.arange(x.shape[-1]) < x.shape[-1] // 2, x * 2.0**20, x
    ),
    "powers of two of alternating sign": lambda x: torch.exp2(x.round()) * x.sign(),
    "one below a power of two": lambda x: x.sign() * (2 - 2.0**-7),
    "zeros": torch.zeros_like,
    "negative zeros": lambda x: -torch.zeros_like(x),
    "subnormal": lambda x: x * 2.0**-130,
    "tiny": lambda x: x * 2.0**-100,
    "large": lambda x: x * 2.0**40,
}
#: What is put at a few places of the first activations.
SPECIAL = {"inf": [math.inf], "-inf": [-math.inf], "NaN": [math.nan], "both": [math.inf, -math.inf]}
EXTREME = (
    "int4, 448 columns in groups of 64",
    "int4, 960 columns in groups of 64",
    "int8, gate and up",
    "int8, residual",
    "float8, norm and joined linears",
    "float8, residual",
)


@cache
def checked(name: str) -> NumericCheck:
    return NumericCheck(CASES[name].program, torch.device("cpu"))


def results_of(name: str, changed, order: int, folder: Path):
    """Return a kernel's output, eager's and that of float64, with other first activations."""
    case = CASES[name]
    _, inputs = next(checked(name).each())
    x = changed(inputs[0].float()).to(inputs[0].dtype)
    inputs = [x, *inputs[1:]]
    (got,) = runner(case, kernel_of(case), order, folder)(inputs)
    (eager,) = run_kernel_graph(case.program, inputs)
    (exact,) = run_kernel_graph(case.program, inputs, torch.float64)
    return got, eager, exact


@pytest.mark.parametrize("name", EXTREME)
def test_activations_of_any_spread_give_results_as_close_as_torch(name, tmp_path):
    for spread, changed in SPREADS.items():
        got, eager, exact = results_of(name, changed, 0, tmp_path)
        where = eager.isfinite()
        assert got[where].isfinite().all(), spread
        errors, allowed = measure(got, exact, where), measure(eager, exact, where)
        if spread == "subnormal":  # a power of two below 2^-117 is 0
            assert errors.max < 2.0**-100
            continue
        assert errors.is_within(allowed, got.dtype), f"{spread}: {errors}, {allowed}"


@pytest.mark.parametrize("name", EXTREME)
def test_infinities_and_nan_never_give_finite_results(name, tmp_path):
    for special, values in SPECIAL.items():
        for at in 0, 255, -1:

            def changed(x, values=values, at=at):
                x = x.clone()
                for n, value in enumerate(values):
                    x[0, at - n] = value
                return x

            got, _, exact = results_of(name, changed, 0, tmp_path)
            assert not got[~exact.isfinite()].isfinite().any(), (special, at)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_gpu_are_as_close_to_float64_as_torch(name):
    case = replace(CASES[name], hidden=4096, width=14336, blocks=132)
    if case.weights == "int8":
        case = replace(case, tile=2048)
    ugraph, _, found = streamed(case)
    for stages, warps in (2, 4), (3, 8):
        schedule = schedule_of(case, found, num_stages=stages, num_warps=warps)
        verdict = check_compiled(ugraph, [schedule], torch.device("cuda"))
        assert not isinstance(verdict, Rejected), verdict


# -- block graphs by hand --------------------------------------------------------------------------


@dataclass(frozen=True)
class Hand:
    """A block graph that is built directly, with a schedule.

    Attributes:
        codes: The dtype of the codes.
        rows: How many rows each part of a weight has.
        columns: How many columns the codes have.
        group: How many columns share a scale. 0: each row has one scale.
        square: How many rows share a scale. 0: each row has its own.
        dtype: The dtype of activations, scales and outputs.
        has_norm: Whether x is multiplied with gamma, and the results are divided by the RMS of x.
        has_gate: Whether two products share x. The result is silu(first) · second.
        has_residual: Whether a residual is added.
        scales_first: Whether scales multiply x. Otherwise they multiply the sum of each group.
        tile: Tile along the outer columns.
        stages: Chunks of the ring.
        warps: Warps that multiply.
        blocks: Thread blocks.
    """

    codes: str = "uint4"
    rows: tuple[int, ...] = (64,)
    columns: int = 256
    group: int = 64
    square: int = 0
    dtype: str = "bfloat16"
    has_norm: bool = False
    has_gate: bool = False
    has_residual: bool = False
    scales_first: bool = True
    tile: int = 1
    stages: int = 2
    warps: int = 2
    blocks: int = 3

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes of rows."""
        return ("n", "o") if self.square else ("n",)

    @property
    def column_axes(self) -> tuple[str, ...]:
        """The summed axes."""
        return ("k", "r") if self.group else ("k",)

    @property
    def column_dims(self) -> tuple[int, ...]:
        """The sizes of the summed axes."""
        return (self.columns // self.group, self.group) if self.group else (self.columns,)

    def row_dims(self, rows: int) -> tuple[int, ...]:
        """Return the sizes of the axes of this many rows."""
        return (rows // self.square, self.square) if self.square else (rows,)

    @cached_property
    def graph(self) -> KernelGraph:
        """A kernel graph whose only op is the block graph."""
        g = KernelGraph()
        tensors: list[DTensor] = []
        inputs: list[BlockInput] = []

        def add(name, dims, axes, dtype, constant, parts=1):
            first = len(tensors)
            for n in range(parts):
                own = dims if parts == 1 else (self.row_dims(self.rows[n])[0], *dims[1:])
                tensors.append(g.new_input(own, dtype, name=f"{name}{n}", constant=constant))
            joined, sizes = None, ()
            if parts > 1:
                joined, sizes = "n", tuple(t.dims[0] for t in tensors[first:])
            sources = tuple(range(first, first + parts))
            inputs.append(BlockInput(name, sources, axes, joined, sizes))

        column_axes, column_dims = self.column_axes, self.column_dims
        row_axes, row_dims = self.row_axes, self.row_dims(sum(self.rows))
        add("x", (1, *column_dims), (None, *column_axes), self.dtype, False)
        if self.has_norm:
            add("gamma", (1, *column_dims), (None, *column_axes), self.dtype, True)
        for p in self.products:
            dims, axes = (*row_dims, *column_dims), (*row_axes, *column_axes)
            add(f"codes{p}", dims, axes, self.codes, True, len(self.rows))
            if self.group:
                shared = (row_dims[0], 1) if self.square else row_dims
                axes = ("n", None) if self.square else row_axes
                parts = len(self.rows)
                dims, axes = (*shared, column_dims[0], 1), (*axes, "k", None)
                add(f"scales{p}", dims, axes, self.scale_dtype, True, parts)
            else:
                add(f"scales{p}", row_dims, row_axes, self.dtype, True)
        if self.has_residual:
            add("residual", (1, *row_dims), (None, *row_axes), self.dtype, False)
        output = BlockOutput("y", (None, *row_axes), self.dtype)
        axes = [Axis(a, n, Role.GRID) for a, n in zip(row_axes, row_dims, strict=True)]
        roles = (Role.LOOP, Role.TILE)
        axes += [
            Axis(a, n, role)
            for a, n, role in zip(column_axes, column_dims, roles[: len(column_axes)], strict=True)
        ]
        g.mark_output(
            *g.customized(
                tensors, BlockGraph(tuple(axes), tuple(inputs), self.block_stages, (output,))
            )
        )
        return g

    @property
    def products(self) -> range:
        """The numbers of the products."""
        return range(2 if self.has_gate else 1)

    @property
    def scale_dtype(self) -> str:
        """The dtype of scales of groups."""
        return "float32" if self.square else self.dtype

    @property
    def block_stages(self) -> tuple[Stage, ...]:
        """The loop over the columns, and what comes after it."""
        columns, rows = self.column_axes, self.row_axes
        body, sums, after = [], [], []

        def op(to, out, fn, *args, axes, over=None):
            to.append(BlockOp(out, fn, args, axes, over=over))
            return out

        def summed(out, value, axes):
            """Add a sum over all columns of a value that has the axes and the columns."""
            if not self.group:
                sums.append(Accumulator(out, value, "sum", axes))
                return
            sums.append(Accumulator(f"{out}_open", value, "sum", (*axes, "r")))
            op(after, out, "sum", f"{out}_open", axes=axes, over="r")

        other = "x"
        if self.has_norm:
            other = op(body, "weighted", "mul", "x", "gamma", axes=columns)
            summed("squares", op(body, "square", "mul", "x", "x", axes=columns), ())
            op(after, "mean", "mul", "squares", 1 / self.columns, axes=())
            op(after, "more", "add", "mean", 1e-6, axes=())
            op(after, "rms", "rsqrt", "more", axes=())
        results = []
        for p in self.products:
            codes, scales, everything = f"codes{p}", f"scales{p}", (*rows, *columns)
            if zero := ZEROS[as_dtype(self.codes)]:
                codes = op(body, f"centered{p}", "sub", codes, zero, axes=everything)
            result = f"sum{p}"
            scale_axes = ("n", "k") if self.square else (*rows, "k")
            if not self.group:
                value = op(body, f"product{p}", "mul", codes, other, axes=everything)
                summed(f"plain{p}", value, rows)
                op(after, result, "mul", f"plain{p}", scales, axes=rows)
            elif self.scales_first:
                axes = tuple(a for a in everything if a in scale_axes or a in columns)
                scaled = op(body, f"scaled{p}", "mul", other, scales, axes=axes)
                value = op(body, f"product{p}", "mul", codes, scaled, axes=everything)
                summed(result, value, rows)
            else:
                value = op(body, f"product{p}", "mul", codes, other, axes=everything)
                total = op(body, f"total{p}", "sum", value, axes=(*rows, "k"), over="r")
                scaled = op(body, f"scaled{p}", "mul", total, scales, axes=(*rows, "k"))
                sums.append(Accumulator(result, scaled, "sum", rows))
            if self.has_norm:
                result = op(after, f"normed{p}", "mul", result, "rms", axes=rows)
            results.append(result)
        if self.has_gate:
            gate = op(after, "gate", "silu", results[0], axes=rows)
            results = [op(after, "gated", "mul", gate, results[1], axes=rows)]
        if self.has_residual:
            results = [op(after, "added", "add", results[0], "residual", axes=rows)]
        op(after, "y", "mul", results[0], 1.0, axes=rows)
        return Stage("k", tuple(body), tuple(sums)), Stage(None, tuple(after))

    @cached_property
    def op(self) -> PlacedOp:
        """The op as it runs."""
        return place_kernels(UGraph(self.graph, self.graph))[0]

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        tiles = dict.fromkeys(self.row_axes, 1) | {self.row_axes[-1]: 8 if self.has_gate else 16}
        tiles |= {"k": self.tile} | ({"r": next_power_of_two(self.group)} if self.group else {})
        return Schedule(
            tiles,
            num_stages=self.stages,
            num_warps=self.warps,
            persistent_blocks=self.blocks,
            cuda=True,
        )

    def kernel(self, name: str = "kernel") -> CudaKernel:
        """Return the kernel in namespace `name`."""
        return write_stream_kernel(self.op, self.schedule, name)

    @cached_property
    def inputs(self) -> list[torch.Tensor]:
        """Random inputs. The products are about 1."""
        sizes = {"uint4": 5.0, "int4": 5.0, "uint8": 74.0, "int8": 74.0, "float8_e4m3fn": 100.0}
        size = sizes[self.codes] * self.columns**0.5
        tensors = zip(self.graph.inputs, random_inputs(self.graph, "cpu"), strict=True)
        return [x / size if t.name.startswith("scales") else x for t, x in tensors]

    def run(self, kernel, name, order, folder, source="", inputs=None):
        """Return the output of a kernel, or what went wrong.

        Args:
            kernel: The kernel.
            name: Its namespace.
            order: The order of threads and copies.
            folder: Where kernels are compiled.
            source: The text of this and other kernels. Empty: that of the kernel.
            inputs: The inputs. None: random ones.
        """
        output = torch.full(self.graph.outputs[0].dims, math.nan, dtype=as_dtype(self.dtype))
        tensors = [*(self.inputs if inputs is None else inputs), output]
        sizes = kernel.grid, kernel.threads, kernel.shared
        failure = run_kernel(source or kernel.source, name, *sizes, tensors, order, folder)
        return failure or output

    def exact(self, inputs=None) -> torch.Tensor:
        """Return the result in float64."""
        inputs = self.inputs if inputs is None else inputs
        return run_kernel_graph(self.graph, inputs, torch.float64)[0]

    def error(self, got: torch.Tensor, want: torch.Tensor) -> float:
        """Return the largest error as a multiple of what rounding explains."""
        largest = float(want.abs().max())
        # x in 22 bits; halves hold 11 bits of x · gamma
        bits = 9 if as_dtype(self.codes).is_floating_point else 18
        allowed = torch.finfo(got.dtype).eps * want.abs() + largest * 2.0**-bits
        allowed = 4 * allowed if self.has_gate else allowed  # the errors of both factors add up
        return float(((got.double() - want).abs() / allowed).nan_to_num(math.inf).max())


# -- random layouts --------------------------------------------------------------------------------


def random_hand(seed: int) -> Hand:
    """Return a random block graph and schedule that fit together."""
    r = random.Random(seed)
    codes = r.choice(("uint4", "int4", "uint8", "int8", "float8_e4m3fn"))
    dtype = r.choice(("bfloat16", "bfloat16", "float16", "float32"))
    has_gate = r.random() < 0.35
    shape = {"codes": codes, "dtype": dtype, "has_gate": has_gate}
    if codes == "float8_e4m3fn" and r.random() < 0.7:
        square = r.choice((16, 32, 48, 64))
        rows = tuple(square * r.randint(1, 3) for _ in range(r.choice((1, 1, 2, 3))))
        group = r.choice((32, 64, 128))
        columns = group * 4 * r.randint(1, 4)
        shape |= {"square": square, "scales_first": False}
    else:
        rows = tuple(16 * r.randint(1, 5) for _ in range(r.choice((1, 1, 2, 3))))
        group = r.choice((32, 64, 96, 128, 160, 192, 256))
        if r.random() < (0.1 if codes in ("uint4", "int4") else 0.5):
            group = 0
        columns = group * r.randint(1, 12) if group else 64 * r.randint(1, 20)
        shape |= {"scales_first": r.random() < 0.5}
    columns += columns % 64
    if group and columns % group:
        columns = 2 * group * r.randint(1, 6)
    tile = 1 << r.randint(0, 3) if group else 1 << r.randint(6, 10)
    return Hand(
        **shape,
        rows=rows,
        columns=columns,
        group=group,
        has_norm=r.random() < 0.5,
        has_residual=r.random() < 0.4,
        tile=tile,
        stages=r.randint(1, 6),
        warps=r.choice((1, 2, 4, 8)),
        blocks=r.choice((1, 2, 3, 5, 7, 100)),
    )


#: Random layouts are compiled so many at a time.
AT_ONCE = 12
SLOW_STARTS = (pytest.param(n * AT_ONCE, marks=pytest.mark.slow) for n in (2, 3, 4))


@pytest.mark.parametrize("first", [0, AT_ONCE, *SLOW_STARTS])
def test_random_layouts_give_the_results_of_float64(first, tmp_path):
    hands, kernels, refused = [], [], 0
    for seed in range(1000 * first, 1000 * first + 100):
        hand = random_hand(seed)
        try:
            kernels.append(hand.kernel(f"kernel_{len(hands)}"))
        except CodegenError:
            refused += 1
            continue
        hands.append(hand)
        if len(hands) == AT_ONCE:
            break
    assert len(hands) == AT_ONCE and refused < AT_ONCE
    source = "\n".join(k.source for k in kernels)
    for n, k in enumerate(kernels):
        source += f"\nstatic_assert(sizeof(kernel_{n}::Shared) == {k.shared});"
    for n, (hand, kernel) in enumerate(zip(hands, kernels, strict=True)):
        want = hand.exact()
        for order in (1, 2 + n):
            got = hand.run(kernel, f"kernel_{n}", order, tmp_path, source)
            assert not isinstance(got, str), f"{hand}: {got}"
            assert hand.error(got, want) <= 1, f"{hand}, order {order}"


# -- refusals --------------------------------------------------------------------------------------


def refusal(call) -> str:
    """Return the text of the error that a call raises."""
    with pytest.raises(CodegenError) as raised:
        call()
    return str(raised.value)


def rebuilt(hand: Hand, block: BlockGraph | None = None, strides=None) -> PlacedOp:
    """Return the op of another block graph with the operands of `hand`.

    Args:
        hand: A block graph that fits.
        block: The other block graph. None: that of `hand`.
        strides: Strides of operands, by name. Others lie row after row.
    """
    g = KernelGraph()
    old = hand.op
    tensors = [
        g.new_input(t.dims, t.dtype, (strides or {}).get(t.name), name=t.name, constant=t.constant)
        for t in old.operands
    ]
    g.mark_output(*g.customized(tensors, block or old.block))
    return place_kernels(UGraph(g, g))[0]


def with_body(hand: Hand, **ops: BlockOp) -> BlockGraph:
    """Return the block graph of `hand` with other ops in its loop, by their results."""
    block = hand.op.block
    first = block.stages[0]
    body = tuple(ops.get(op.out, op) for op in first.body)
    return replace(block, stages=(replace(first, body=body), *block.stages[1:]))


def op_of(hand: Hand, out: str) -> BlockOp:
    """Return the op that computes a value."""
    return hand.op.block.ops_by_name[out]


def test_codes_have_to_lie_row_after_row():
    hand = Hand(codes="int8")
    wide = rebuilt(hand, strides={"codes00": (320, 64, 1)})
    assert "do not lie row after row" in refusal(lambda: streamed_products(wide))
    turned = rebuilt(hand, strides={"codes00": (64, 4096, 1)})
    assert "do not lie row after row" in refusal(lambda: streamed_products(turned))


def test_activations_have_to_lie_side_by_side():
    op = rebuilt(Hand(), strides={"x0": (512, 128, 1)})
    assert "x does not have all columns side by side" in refusal(lambda: streamed_products(op))


@pytest.mark.parametrize(("codes", "zero"), [("uint4", 7.0), ("int4", 8.0), ("uint8", 127.0)])
def test_the_zero_point_has_to_be_the_middle(codes, zero):
    hand = Hand(codes=codes)
    if codes == "int4":
        product = op_of(hand, "product0")
        centered = BlockOp("centered0", "sub", ("codes0", zero), product.axes)
        first = hand.op.block.stages[0]
        body = (centered, *first.body)
        body = tuple(
            replace(op, args=("centered0", *op.args[1:])) if op.out == "product0" else op
            for op in body
        )
        block = hand.op.block
        block = replace(block, stages=(replace(first, body=body), *block.stages[1:]))
    else:
        old = op_of(hand, "centered0")
        block = with_body(hand, centered0=replace(old, args=("codes0", zero)))
    text = refusal(lambda: streamed_products(rebuilt(hand, block)))
    assert f"subtracts {zero} from codes, not {ZEROS[as_dtype(codes)]}" in text


def test_codes_have_to_be_multiplied_with_one_value():
    hand = Hand(has_gate=True, has_norm=True, scales_first=False)
    old = op_of(hand, "product1")
    block = with_body(hand, product1=replace(old, args=("centered1", "x")))
    text = refusal(lambda: streamed_products(rebuilt(hand, block)))
    assert "multiplied with different values" in text


def test_there_may_be_two_products():
    hand = Hand(codes="int8", group=0, has_gate=True)
    block = hand.op.block
    first, second = block.stages
    third = replace(op_of(hand, "product1"), out="product2", args=("codes1", "x"))
    body = (*first.body, third)
    sums = (*first.accumulators, Accumulator("plain2", "product2", "sum", ("n",)))
    end = second.body[-1]
    more = BlockOp("all", "add", (end.args[0], "plain2"), ("n",))
    after = (*second.body[:-1], more, replace(end, args=("all", 1.0)))
    block = replace(block, stages=(Stage("k", body, sums), Stage(None, after)))
    text = refusal(lambda: streamed_products(rebuilt(hand, block)))
    assert "3 products with codes" in text


@pytest.mark.parametrize(
    ("hand", "why"),
    [
        (Hand(rows=(40,)), "no multiple of 16"),
        (Hand(rows=(20,), has_gate=True), "no multiple of 8"),
        (Hand(rows=(64, 24)), "no multiple of 16"),
        (Hand(codes="int8", group=48, columns=192), "groups of 48 do not fit"),
        (Hand(codes="uint4", group=16), "groups of 16 do not fit"),
        (Hand(codes="int8", group=0, columns=352), "352 columns"),
        (
            Hand(codes="float8_e4m3fn", rows=(128,), square=128, group=128, scales_first=False),
            "no multiple of 16 bytes",
        ),
    ],
    ids=str,
)
def test_sizes_have_to_fit(hand, why):
    assert why in refusal(lambda: streamed_products(hand.op))


def test_no_axis_may_be_split():
    hand = Hand(codes="int8", group=0)
    block = hand.op.block
    split = replace(block.axis("k"), split_axis="s")
    axes = (block.axis("n"), Axis("s", 2, Role.GRID), split)
    body = block.stages[0].body
    sums = (Accumulator("plain0", "product0", "sum", ("n", "s")),)
    ends = (Stage("k", body, sums),)
    partial_sums = (BlockOutput("plain0", ("s", "n"), "float32"),)
    block = replace(block, axes=axes, stages=ends, outputs=partial_sums)
    text = refusal(lambda: streamed_products(rebuilt(hand, block)))
    assert "other axes" in text


def test_nothing_is_appended_to_a_cache():
    op = Hand().op
    for changed in replace(op, appends=(Append(0, 0, 8),)), replace(op, caches=frozenset({0})):
        assert "appends to a cache" in refusal(lambda op=changed: streamed_products(op))


def test_codes_and_scales_have_to_be_constant():
    g = KernelGraph()
    hand = Hand()
    tensors = [g.new_input(t.dims, t.dtype, name=t.name) for t in hand.op.operands]
    g.mark_output(*g.customized(tensors, hand.op.block))
    (op,) = place_kernels(UGraph(g, g))
    assert "may change" in refusal(lambda: streamed_products(op))


def test_the_loop_adds_up_and_nothing_else():
    hand = Hand(has_norm=True)
    block = hand.op.block
    first = block.stages[0]
    sums = tuple(
        replace(a, kind="max") if a.out == "squares_open" else a for a in first.accumulators
    )
    block = replace(block, stages=(replace(first, accumulators=sums), *block.stages[1:]))
    assert "no plain sum" in refusal(lambda: streamed_products(rebuilt(hand, block)))


@pytest.mark.parametrize("square", [8, 24])
def test_a_tile_of_rows_has_one_row_of_scales(square):
    rows = (2 * square if square > 8 else 64,)
    shape = {"rows": rows, "square": square, "columns": 512, "group": 128}
    hand = Hand(codes="float8_e4m3fn", scales_first=False, **shape)
    refusal(lambda: streamed_products(hand.op))


def test_the_loop_has_no_maximum_of_inner_columns():
    hand = Hand()
    block = hand.op.block
    first, second = block.stages
    most = BlockOp("most", "max", ("x",), ("k",), over="r")
    sums = (*first.accumulators, Accumulator("total", "most", "sum", ()))
    end = replace(second.body[-1], args=("sum0", "total"))
    after = replace(second, body=(*second.body[:-1], end))
    block = replace(block, stages=(Stage("k", (*first.body, most), sums), after))
    refusal(lambda: streamed_products(rebuilt(hand, block)))


def test_a_block_has_1024_threads_at_most():
    hand = Hand(warps=32)
    refusal(hand.kernel)


def test_a_schedule_has_to_fit():
    hand = Hand()
    op, schedule = hand.op, hand.schedule
    wrong_rows = schedule.changed(tiles={**schedule.tiles, "n": 32})
    text = refusal(lambda: layouts.stream_layout(op, wrong_rows))
    assert "has tiles of 16 along n" in text
    missing = schedule.changed(tiles={"n": 16, "k": 1})
    assert "tiles are given for" in refusal(lambda: layouts.stream_layout(op, missing))
    rows = Hand(codes="int8", group=0)
    short = rows.schedule.changed(tiles={"n": 16, "k": 16})
    text = refusal(lambda: layouts.stream_layout(rows.op, short))
    assert "chunks of 16 columns are no multiple" in text
    deep = schedule.changed(num_stages=64, tiles={**schedule.tiles, "k": 4})
    large = Hand(columns=65536, rows=(64,))
    large_schedule = deep.changed(tiles={**schedule.tiles, "k": 1024})
    text = refusal(lambda: write_stream_kernel(large.op, large_schedule, "kernel"))
    assert "bytes of shared memory, a block has" in text


def test_persistent_blocks_belong_to_ops_with_codes():
    hand = Hand()
    without = hand.schedule.changed(persistent_blocks=0)
    text = refusal(lambda: cuda_text.plan_kernel(hand.op, without, "kernel"))
    assert "kernels that read codes have persistent blocks" in text
    g = KernelGraph()
    x = g.new_input((16, 64), "float16")
    axes = (Axis("m", 16, Role.GRID), Axis("k", 64, Role.LOOP))
    block = BlockGraph(
        axes,
        (BlockInput("x", (0,), ("m", "k")),),
        (Stage("k", (), (Accumulator("sum", "x", "sum", ("m",)),)),),
        (BlockOutput("sum", ("m",), "float16"),),
    )
    g.mark_output(*g.customized([x], block))
    (op,) = place_kernels(UGraph(g, g))
    schedule = Schedule({"m": 16, "k": 64}, cuda=True, persistent_blocks=4)
    text = refusal(lambda: cuda_text.plan_kernel(op, schedule, "kernel"))
    assert "others have none" in text
    tensor_cores = hand.schedule.changed(mma=True)
    text = refusal(lambda: cuda_text.plan_kernel(hand.op, tensor_cores, "kernel"))
    assert "leave mma and cooperating_blocks out" in text
