"""Kernels that stream codes, run on the CPU with several orders of threads and copies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from mirage_hf.codegen.cuda_kernel import CudaKernel
from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.codegen.streams.products import Products, streamed_products
from mirage_hf.errors import CodegenError
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.tuner import check_compiled
from mirage_hf.verify.numeric import NumericCheck, Rejected
from scripts import bench_codes
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
        tiles[found.columns[1]] = found.group
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
