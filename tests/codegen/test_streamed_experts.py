"""Kernels that stream the codes of chosen experts, on the CPU: right results for any routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.cuda_kernel import CudaKernel
from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.streams.finding import streamed_products
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.codegen.streams.layout import stream_layout
from mirage_hf.codegen.streams.products import Products
from mirage_hf.errors import CodegenError
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.numeric import measure
from tests.helpers import coded_experts
from tests.helpers.cuda_on_cpu import CXX, ORDERS, run_kernel
from tests.helpers.streamed_graphs import tiles_of

needs_compiler = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")


@dataclass(frozen=True)
class Case:
    """One of the two programs of experts, with a schedule."""

    kind: str
    part: int
    sizes: tuple[int, int]
    tile: int
    stages: int = 2
    warps: int = 2
    blocks: int = 3
    rows: int = 0  # of a tile

    @cached_property
    def region(self) -> Any:
        """The program and what its inputs are."""
        module, _ = MODULES[self.kind](self.sizes)
        plan = coded_experts.plan_of(module, self.inputs)
        return [r for r in plan.regions if r.kind == "experts"][self.part]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """What the experts are called with."""
        x, index, weights = coded_experts.routing(1, self.sizes[0])
        return {"x": x.bfloat16(), "index": index, "weights": weights.bfloat16()}

    @property
    def op(self) -> PlacedOp:
        """The kernel's op."""
        return place_kernels(self.ugraph)[0]

    @cached_property
    def ugraph(self) -> UGraph:
        """The first µGraph whose only kernel can stream the codes."""
        for found in search(self.region.graph, SearchOptions(threads=1))[0]:
            ops = place_kernels(found.ugraph)
            if len(ops) == 1:
                try:
                    stream_layout(ops[0], self.schedule_for(streamed_products(ops[0])))
                except CodegenError:
                    continue
                return found.ugraph
        raise AssertionError(f"no candidate of {self} can stream its codes")

    @property
    def products(self) -> Products:
        """What the kernel computes."""
        return streamed_products(self.op)

    def schedule_for(self, products: Products) -> Schedule:
        """Return the schedule of a kernel."""
        return Schedule(
            tiles_of(products, self.tile) | self.tiles_of_rows(products),
            cuda=True,
            num_stages=self.stages,
            num_warps=self.warps,
            persistent_blocks=self.blocks,
        )

    def tiles_of_rows(self, products: Products) -> dict[str, int]:
        """Return the tile of rows, if the case has one of its own."""
        return {products.rows[-1]: self.rows} if self.rows else {}

    @cached_property
    def kernel(self) -> CudaKernel:
        """The kernel."""
        return write_stream_kernel(self.op, self.schedule_for(self.products), "kernel")

    @cached_property
    def operands(self) -> list[Tensor]:
        """The operands: views of the parameters, and random activations."""
        torch.manual_seed(0)
        return coded_experts.operands_of(self.region, self.inputs)

    def run(self, operands: Sequence[Tensor], order: int, folder: Path) -> Tensor:
        """Return the kernel's output."""
        graph, kernels, block = self.region.graph, self.ugraph.kernels, self.op.block
        number = {t.index: n for n, t in enumerate(kernels.inputs)}
        for o in kernels.ops:
            if o.inputs[0].index in number and o.block is None:  # a view
                number[o.outputs[0].index] = number[o.inputs[0].index]
        read = [s for i in block.inputs for s in i.sources]
        read.append(self.products.taken.index)
        tensors = [operands[number[self.op.operands[s].index]] for s in read]
        output = torch.full(graph.outputs[0].dims, torch.nan, dtype=graph.outputs[0].dtype)
        kernel = self.kernel
        sizes = kernel.grid, kernel.threads, kernel.shared
        failure = run_kernel(kernel.source, "kernel", *sizes, [*tensors, output], order, folder)
        assert not failure, failure
        return output


MODULES = {
    "MXFP4": lambda sizes: coded_experts.mxfp4(sizes=sizes),
    "float8": lambda sizes: coded_experts.fp8(sizes=sizes),
}

CASES = {
    "MXFP4, first": Case("MXFP4", 0, (128, 64), tile=4, stages=3),
    "MXFP4, second": Case("MXFP4", 1, (64, 192), tile=8),
    "MXFP4, first, chunks that end early": Case("MXFP4", 0, (192, 48), tile=4, warps=4),
    "MXFP4, second, several chunks": Case("MXFP4", 1, (64, 1152), tile=16, stages=4, blocks=5),
    "MXFP4, first, whole tiles": Case("MXFP4", 0, (320, 48), tile=16, warps=4),
    "MXFP4, second, whole tiles": Case("MXFP4", 1, (64, 1088), tile=64, blocks=2),
    "MXFP4, second, tiles of 8 rows": Case("MXFP4", 1, (96, 1088), tile=64, rows=8),
    "MXFP4, second, parts of 8 rows": Case("MXFP4", 1, (96, 1152), tile=16, rows=8, warps=4),
    "MXFP4, first, two teams": Case("MXFP4", 0, (320, 48), tile=16, warps=8, blocks=2),
    "MXFP4, second, two teams": Case("MXFP4", 1, (96, 1088), tile=64, stages=4, warps=8, rows=8),
    "float8, first": Case("float8", 0, (128, 64), tile=4),
    "float8, second": Case("float8", 1, (64, 192), tile=8, stages=3, blocks=2),
}

#: The experts of a token, of six. Numbers beyond 5 and below 0 are of none.
ROUTINGS = {
    "two": (4, 1),
    "one twice": (3, 3),
    "the first and the last": (5, 0),
    "one and none": (2, 6),
    "none and one": (-1, 2),
    "none": (6, 6),
}


@cache
def case_of(name: str) -> Case:
    return CASES[name]


def with_index(case: Case, index: tuple[int, ...]) -> list[Tensor]:
    """Return the operands of a case with other experts."""
    graph = case.region.graph
    changed = torch.tensor([index])
    pairs = zip(graph.inputs, case.operands, strict=True)
    return [changed if t.dtype is torch.int64 else x for t, x in pairs]


def with_zeros(operands: list[Tensor]) -> list[Tensor]:
    """Return operands that give the same on a CPU: the last expert is 0, in place of none."""
    last = coded_experts.EXPERTS - 1
    is_missing = any(
        x.dtype is torch.int64 and not 0 <= e <= last for x in operands[:1] for e in x[0]
    )
    found = []
    for x in operands:
        if x.dtype is torch.int64:
            found.append(x.where((x >= 0) & (x <= last), torch.tensor(last)))
        elif x.shape[0] > last and is_missing:
            zeros = torch.arange(last + 1).view(-1, *[1] * (x.dim() - 1)) == last
            bits = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
            found.append(bits.masked_fill(zeros, 0).view(x.dtype))
        else:
            found.append(x)
    return found


def in_place(x: Tensor) -> Tensor:
    """Return a tensor on the GPU that lies in its storage where it lies on the CPU."""
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).cuda()
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def alone(x: Tensor) -> Tensor:
    """Return a copy with the same strides, in a storage of its own."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def is_right(case: Case, operands: list[Tensor], got: Tensor) -> bool:
    """Return whether a result is as close to float64 as torch's."""
    graph = case.region.graph
    (eager,), (exact,) = (run_kernel_graph(graph, operands, d) for d in (None, torch.float64))
    where = torch.ones_like(exact, dtype=torch.bool)
    if not got.isfinite().all():
        return False
    return measure(got, exact, where).is_within(measure(eager, exact, where), got.dtype)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_results_are_as_close_to_float64_as_torch(name, tmp_path):
    case = case_of(name)
    for order in ORDERS:
        assert is_right(case, case.operands, case.run(case.operands, order, tmp_path)), order


@needs_compiler
@pytest.mark.parametrize("name", ["MXFP4, first", "MXFP4, first, whole tiles", "float8, first"])
def test_gate_and_up_may_lie_anywhere(name, tmp_path):
    """The parameter has their rows in turns, or one after the other.

    Here they are apart, and in the other order: each takes the other's place.
    """
    case = case_of(name)
    operands = case.operands
    shapes = [(x.shape, x.stride(), x.dtype) for x in operands]
    partner = {
        n: m for n, s in enumerate(shapes) for m, t in enumerate(shapes) if n != m and s == t
    }
    swapped = [operands[partner.get(n, n)] for n in range(len(operands))]
    assert len(partner) >= 4  # codes and scales
    for changed in [alone(x) for x in operands], swapped:
        for order in ORDERS[:2]:
            assert is_right(case, changed, case.run(changed, order, tmp_path)), order


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_gpu_are_as_close_to_float64_as_torch(name):
    case = case_of(name)
    program = triton.generate(case.ugraph, [case.schedule_for(case.products)])
    run = compiler.load(program.source, program.digest).run
    for index in ROUTINGS.values():
        operands = with_index(case, index)
        on_gpu = [in_place(x) for x in operands]
        assert is_right(case, with_zeros(operands), run(on_gpu)[0].cpu()), index


@needs_compiler
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "name",
    [
        "MXFP4, first",
        "MXFP4, second",
        "MXFP4, first, two teams",
        "MXFP4, second, two teams",
        "float8, second",
    ],
)
def test_any_experts_may_be_chosen(name, routing, tmp_path):
    case = case_of(name)
    index = ROUTINGS[routing]
    operands = with_index(case, index)
    reference = with_zeros(operands)
    for order in ORDERS[:2]:
        assert is_right(case, reference, case.run(operands, order, tmp_path)), order
