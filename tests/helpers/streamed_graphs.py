"""Build block graphs with codes, with schedules of kernels that stream the codes."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch

from mirage_hf.codegen.cuda_kernel import CudaKernel
from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.codegen.streams.finding import streamed_products
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.codegen.streams.layout import tiled_rows, tiles_of_rows
from mirage_hf.codegen.streams.products import ZEROS, Products
from mirage_hf.errors import CodegenError
from mirage_hf.formats import awq, gptq, hqq, torchao_int4
from mirage_hf.formats.bitsandbytes import TABLES
from mirage_hf.formats.coding import Coding, write_joined
from mirage_hf.formats.stored import Split
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
from mirage_hf.graph.strided import reach
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.dtypes import CODES_PER_WORD, E2M1
from mirage_hf.ops.table import as_dtype
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.measure import random_inputs
from mirage_hf.verify.accept import accept
from scripts import bench_codes
from tests.helpers import coded_programs
from tests.helpers.cuda_on_cpu import run_kernel
from tests.helpers.small_float_programs import mxfp4_linear


@dataclass(frozen=True)
class Case:
    """A block of a decoder layer with codes, and a schedule.

    Attributes:
        tile_rows: Rows of each product that a tile has. 0: those of one set.
    """

    weights: str
    block: str
    hidden: int = 256
    width: int = 512
    group: int = 128
    tile: int = 1
    stages: int = 2
    warps: int = 2
    blocks: int = 3
    batch: int = 1
    sharers: int = 1
    tile_rows: int = 0

    @property
    def program(self) -> KernelGraph:
        """The block as a program."""
        sizes = argparse.Namespace(
            hidden=self.hidden, keys=128, width=self.width, group=self.group, weights=self.weights
        )
        return bench_codes.BLOCKS[self.block](self.batch, sizes)


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


def gptq_coding(rows: int, columns: int, group: int, zero: int | None = 8) -> Coding:
    """Return a weight of GPTQ. `zero` is what all zero points are, None if they differ."""
    half = torch.float16
    return gptq.coding_of(rows, columns, group, torch.uint4, half, torch.bfloat16, zero)


def awq_coding(rows: int, columns: int, group: int, zero: int | None = None) -> Coding:
    """Return a weight of AWQ. `zero` is what all zero points are, None if they differ."""
    return awq.coding_of(rows, columns, group, torch.float16, torch.bfloat16, zero)


def packed_coding(rows: int, columns: int, group: int) -> Coding:
    """Return a weight of compressed-tensors with zero points, which are packed along the rows."""
    split, dtype = Split(rows, columns, 8, group), torch.bfloat16
    zeros = split.packed_along_rows(torch.uint4, 8)
    return Coding(rows, columns, dtype, split.codes(torch.uint4), split.per_row(dtype), zeros)


def float_coding(rows: int, columns: int, group: int, code: torch.dtype = torch.uint4) -> Coding:
    """Return a weight whose zero points are floats, as those of HQQ."""
    split, dtype = Split(rows, columns, 1, group), torch.bfloat16
    per_row = split.per_row(dtype)
    return Coding(rows, columns, dtype, split.codes(code), per_row, per_row)


def shifted_coding(rows: int, columns: int, group: int) -> Coding:
    """Return a weight of torchao in rows of signed codes, with shifts."""
    return torchao_int4.coding_of_rows(rows, columns, group, torch.bfloat16, shifts=True)


def tile_coding(rows: int, columns: int, group: int) -> Coding:
    """Return a weight of torchao in tiles, with 256 columns that only fill up the last tiles."""
    return torchao_int4.coding_of_tiles(rows, columns, columns + 256, group, torch.bfloat16)


def hqq_coding(rows: int, columns: int, group: int) -> Coding:
    """Return a weight of HQQ with 4 bits. A byte holds codes of two rows."""
    return hqq.coding_of(rows, columns, group, 4, torch.bfloat16)


#: Codings by name.
HAND_CODINGS: dict[str, Callable[[int, int, int], Coding]] = {
    "GPTQ": gptq_coding,
    "GPTQ, zero points": partial(gptq_coding, zero=None),
    "AWQ": awq_coding,
    "AWQ, no zero points": partial(awq_coding, zero=8),
    "packed zero points": packed_coding,
    "float zero points": float_coding,
    "int8, float zero points": partial(float_coding, code=torch.uint8),
    "shifts": shifted_coding,
    "tiles": tile_coding,
    "HQQ": hqq_coding,
}


def coded_linear(
    coding: str,
    rows: int,
    columns: int,
    group: int = 128,
    others: tuple[int, ...] = (),
    norm: bool = False,
    batch: int = 1,
) -> KernelGraph:
    """Return x · Wᵀ, or RMSNorm(x) · Wᵀ, for a weight in codes, or several side by side."""
    g = KernelGraph()
    x = g.new_input((batch, columns), "bfloat16", name="x")
    if norm:
        x = g.rms_norm(x, g.new_input((1, columns), "bfloat16", constant=True), 1e-6)
    codings = [HAND_CODINGS[coding](n, columns, group) for n in (rows, *others)]
    g.mark_output(g.matmul(x, write_joined(codings, g)[1]))
    return g


def coded_gate(
    coding: str, rows: int, columns: int, group: int = 128, batch: int = 1
) -> KernelGraph:
    """Return silu(y · Vᵀ) · (y · Wᵀ) for y = RMSNorm(x) and weights in codes."""
    g = KernelGraph()
    x = g.new_input((batch, columns), "bfloat16", name="x")
    x = g.rms_norm(x, g.new_input((1, columns), "bfloat16", constant=True), 1e-6)
    coded = HAND_CODINGS[coding](rows, columns, group)
    gate, up = (g.matmul(x, coded.write(g)[1]) for _ in range(2))
    g.mark_output(g.mul(g.silu(gate), up))
    return g


#: Linears that no benchmark has, by name.
LINEARS = {
    "int4": lambda: signed_linear(64, 448, 64),
    "uint8": lambda: shifted_linear(64, 320),
    "float16": lambda: coded_programs.int4_linear(1, 64, 960, 64, norm=True),
    "float16, int8": lambda: coded_programs.int8_linear(1, 64, 448, norm=True),
    "float16, float8": lambda: coded_programs.fp8_linear(1, 256, 512),
    "MXFP4": lambda: mxfp4_linear(1, 64, 512),
    "MXFP4, 3 rows": lambda: mxfp4_linear(3, 64, 512),
    "GPTQ": lambda: coded_linear("GPTQ", 64, 512),
    "GPTQ, norm and joined linears": lambda: coded_linear("GPTQ", 64, 512, 128, (32,), True),
    "GPTQ, gate and up": lambda: coded_gate("GPTQ", 96, 256),
    "GPTQ, 4 rows": lambda: coded_linear("GPTQ", 96, 384, norm=True, batch=4),
    "GPTQ, gate and up, 8 rows": lambda: coded_gate("GPTQ", 64, 512, batch=8),
    "GPTQ, zero points": lambda: coded_linear("GPTQ, zero points", 64, 512, 128, (32,), True),
    "GPTQ, zero points, apart": lambda: coded_linear("GPTQ, zero points", 96, 384),
    "GPTQ, zero points, 3 rows": lambda: coded_gate("GPTQ, zero points", 64, 256, batch=3),
    "AWQ": lambda: coded_linear("AWQ", 128, 512),
    "AWQ, norm and joined linears": lambda: coded_linear("AWQ", 64, 512, 128, (64, 128), True),
    "AWQ, gate and up": lambda: coded_gate("AWQ", 128, 512),
    "AWQ, gate and up, 8 rows": lambda: coded_gate("AWQ", 192, 512, batch=8),
    "AWQ, no zero points": lambda: coded_linear("AWQ, no zero points", 192, 384, 64),
    "AWQ, 3 rows": lambda: coded_linear("AWQ, no zero points", 64, 320, 64, (64,), True, 3),
    "packed zero points": lambda: coded_linear("packed zero points", 64, 512, 128, (32,), True),
    "packed zero points, gate and up": lambda: coded_gate("packed zero points", 64, 512),
    "packed zero points, 4 rows": lambda: coded_linear("packed zero points", 64, 512, batch=4),
    "float zero points, groups of 32": lambda: coded_linear("float zero points", 64, 320, 32),
    "int8, float zero points": lambda: coded_linear("int8, float zero points", 64, 512, 512),
    "shifts, norm and joined linears": lambda: coded_linear("shifts", 64, 512, 128, (32,), True),
    "shifts": lambda: coded_linear("shifts", 64, 320, 32),
    "shifts, gate and up": lambda: coded_gate("shifts", 64, 512, 64),
    "shifts, 3 rows": lambda: coded_linear("shifts", 64, 512, batch=3),
    "shifts, gate and up, 8 rows": lambda: coded_gate("shifts", 64, 256, batch=8),
    "tiles": lambda: coded_linear("tiles", 64, 512),
    "tiles, norm and joined linears": lambda: coded_linear("tiles", 64, 640, 128, (32,), True),
    "tiles, gate and up": lambda: coded_gate("tiles", 48, 512, 256),
    "tiles, 3 rows": lambda: coded_linear("tiles", 64, 512, 128, (16,), True, 3),
    "tiles, gate and up, 8 rows": lambda: coded_gate("tiles", 64, 384, batch=8),
    "HQQ": lambda: coded_linear("HQQ", 64, 512, 64),
    "HQQ, norm": lambda: coded_linear("HQQ", 48, 640, 64, (), True),
    "HQQ, gate and up": lambda: coded_gate("HQQ", 64, 512),
    "HQQ, 3 rows": lambda: coded_linear("HQQ", 64, 512, 64, (), True, 3),
    "HQQ, gate and up, 8 rows": lambda: coded_gate("HQQ", 32, 384, 64, 8),
    "GPTQ, zero points, 12 rows": lambda: coded_gate("GPTQ, zero points", 64, 256, batch=12),
    "AWQ, 16 rows": lambda: coded_linear("AWQ", 64, 512, 128, (64,), True, 16),
    "tiles, gate and up, 16 rows": lambda: coded_gate("tiles", 48, 512, 256, 16),
    "HQQ, 16 rows": lambda: coded_linear("HQQ", 64, 512, 64, (), True, 16),
    "powers of two": lambda: mxfp4_linear(1, 64, 512, norm=True, integers=True),
}


@dataclass(frozen=True)
class Linear(Case):
    """One of LINEARS: `weights` is its name."""

    block: str = ""

    @property
    def program(self) -> KernelGraph:
        """The linear."""
        return LINEARS[self.weights]()


#: Cases in which blocks of a cluster share columns.
CASES_OF_SHARERS: dict[str, Case] = {
    "int4, norm and joined linears": Case("int4", "qkv", sharers=2, warps=4, stages=4),
    "int4, gate and up": Case("int4", "gate_up", hidden=512, width=256, sharers=4, stages=2),
    "int4, residual, chunks that end early": Case("int4", "down", width=768, tile=2, sharers=2),
    "int4, groups of 32": Case("int4", "output", group=32, tile=2, sharers=2),
    "int8, residual, 5 rows": Case("int8", "down", tile=128, width=512, sharers=4, batch=5),
    "float8, norm and joined linears": Case("fp8", "qkv", hidden=512, sharers=2, warps=4),
    "NF4, gate and up": Case("nf4", "gate_up", hidden=512, width=256, sharers=4, tile=2),
    "int4, gate and up, 16 rows": Case(
        "int4", "gate_up", hidden=512, width=256, sharers=2, warps=4, stages=4, tile=2, batch=16
    ),
    "int4, norm and joined linears, 8 rows": Case(
        "int4", "qkv", hidden=512, sharers=4, warps=4, stages=4, tile=1, batch=8
    ),
    "NF4, residual, 16 rows": Case("nf4", "down", sharers=2, warps=4, batch=16),
    "NF4, norm and joined linears, two sets": Case(
        "nf4", "qkv", hidden=512, sharers=2, warps=4, batch=16, tile_rows=32
    ),
    "float8, residual, two sets": Case("fp8", "down", sharers=2, batch=8, tile_rows=32),
    "GPTQ, zero points": Linear("GPTQ, zero points", tile=1, warps=4, sharers=2),
    "AWQ, gate and up, 8 rows": Linear("AWQ, gate and up, 8 rows", tile=1, sharers=4, stages=3),
    "packed zero points, 4 rows": Linear("packed zero points, 4 rows", tile=2, sharers=2),
    "shifts, gate and up": Linear("shifts, gate and up", tile=4, sharers=2),
    "tiles, 3 rows": Linear("tiles, 3 rows", tile=1, stages=3, sharers=4),
    "HQQ, norm": Linear("HQQ, norm", tile=1, stages=4, warps=4, sharers=2),
}

CASES = {
    "int4, norm and joined linears": Case("int4", "qkv"),
    "int4, gate and up": Case("int4", "gate_up", tile=2, stages=1, warps=4),
    "int4, residual, chunks that end early": Case("int4", "down", width=640, tile=2, stages=3),
    "int4, gate and up, two sets": Case("int4", "gate_up", tile=2, warps=4, batch=4, tile_rows=16),
    "int8, residual, two sets": Case("int8", "down", tile=128, batch=5, tile_rows=32),
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
    "MXFP4, pairs of groups": Linear("MXFP4", tile=4),
    "MXFP4, single groups": Linear("MXFP4", tile=1, stages=3),
    "int4, powers of two": Linear("powers of two", tile=1),
    "GPTQ": Linear("GPTQ", tile=2, stages=3),
    "GPTQ, norm and joined linears": Linear("GPTQ, norm and joined linears", tile=1, warps=4),
    "GPTQ, gate and up": Linear("GPTQ, gate and up", tile=1),
    "GPTQ, 4 rows": Linear("GPTQ, 4 rows", tile=1, stages=3),
    "GPTQ, gate and up, 8 rows": Linear("GPTQ, gate and up, 8 rows", tile=2, stages=3),
    "GPTQ, zero points": Linear("GPTQ, zero points", tile=1, warps=4),
    "GPTQ, zero points, apart": Linear("GPTQ, zero points, apart", tile=2, stages=3),
    "GPTQ, zero points, 3 rows": Linear("GPTQ, zero points, 3 rows", tile=1, stages=3),
    "AWQ": Linear("AWQ", tile=2, stages=3),
    "AWQ, norm and joined linears": Linear("AWQ, norm and joined linears", tile=1, warps=4),
    "AWQ, gate and up": Linear("AWQ, gate and up", tile=1, stages=3),
    "AWQ, gate and up, 8 rows": Linear("AWQ, gate and up, 8 rows", tile=2),
    "AWQ, no zero points": Linear("AWQ, no zero points", tile=4),
    "AWQ, 3 rows": Linear("AWQ, 3 rows", tile=2, stages=3),
    "packed zero points": Linear("packed zero points", tile=2, stages=3),
    "packed zero points, gate and up": Linear("packed zero points, gate and up", tile=1),
    "packed zero points, 4 rows": Linear("packed zero points, 4 rows", tile=2),
    "float zero points, groups of 32": Linear("float zero points, groups of 32", tile=2),
    "int8, float zero points": Linear("int8, float zero points", tile=128),
    "shifts, norm and joined linears": Linear("shifts, norm and joined linears", tile=2, warps=4),
    "shifts": Linear("shifts", tile=2, stages=3),
    "shifts, gate and up": Linear("shifts, gate and up", tile=4),
    "shifts, 3 rows": Linear("shifts, 3 rows", tile=2, stages=3),
    "shifts, gate and up, 8 rows": Linear("shifts, gate and up, 8 rows", tile=1, stages=3),
    "tiles": Linear("tiles", tile=2, stages=3),
    "tiles, norm and joined linears": Linear("tiles, norm and joined linears", tile=2, warps=4),
    "tiles, gate and up": Linear("tiles, gate and up", tile=1, stages=4, warps=4),
    "tiles, 3 rows": Linear("tiles, 3 rows", tile=1, stages=3),
    "tiles, gate and up, 8 rows": Linear("tiles, gate and up, 8 rows", tile=4),
    "HQQ": Linear("HQQ", tile=2, stages=3),
    "HQQ, norm": Linear("HQQ, norm", tile=4, stages=3, warps=4),
    "HQQ, gate and up": Linear("HQQ, gate and up", tile=1, warps=4),
    "HQQ, 3 rows": Linear("HQQ, 3 rows", tile=2, stages=3),
    "HQQ, gate and up, 8 rows": Linear("HQQ, gate and up, 8 rows", tile=1, stages=4, warps=8),
    "NF4, norm and joined linears": Case("nf4", "qkv", warps=4),
    "NF4, gate and up": Case("nf4", "gate_up", tile=2, stages=3),
    "NF4, residual": Case("nf4", "down", width=640, tile=2),
    "int4, norm and joined linears, 4 rows": Case("int4", "qkv", batch=4),
    "int4, gate and up, 8 rows": Case("int4", "gate_up", tile=2, stages=1, warps=4, batch=8),
    "int4, residual, 3 rows": Case("int4", "down", width=640, tile=2, stages=3, batch=3),
    "NF4, gate and up, 4 rows": Case("nf4", "gate_up", tile=2, stages=3, batch=4),
    "NF4, residual, 8 rows": Case("nf4", "down", width=640, tile=2, batch=8),
    "MXFP4, 3 rows": Linear("MXFP4, 3 rows", tile=4),
    "int4, groups of 32, 2 rows": Case("int4", "output", group=32, tile=4, batch=2),
    "int8, gate and up, 4 rows": Case("int8", "gate_up", tile=128, blocks=5, batch=4),
    "int8, residual, 5 rows": Case("int8", "down", tile=128, width=448, stages=3, batch=5),
    "float8, gate and up, 2 rows": Case("fp8", "gate_up", hidden=512, width=256, tile=2, batch=2),
    "float8, residual, 8 rows": Case("fp8", "down", stages=3, batch=8),
    "int4, gate and up, 16 rows": Case("int4", "gate_up", tile=2, warps=4, batch=16),
    "int4, residual, 11 rows": Case("int4", "down", width=640, tile=2, stages=3, batch=11),
    "NF4, norm and joined linears, 16 rows": Case("nf4", "qkv", tile=2, warps=4, batch=16),
    "int8, gate and up, 9 rows": Case("int8", "gate_up", tile=128, blocks=5, batch=9),
    "float8, residual, 16 rows": Case("fp8", "down", stages=3, batch=16),
    "GPTQ, zero points, 12 rows": Linear("GPTQ, zero points, 12 rows", tile=1, stages=4, warps=4),
    "AWQ, 16 rows": Linear("AWQ, 16 rows", tile=2, stages=3),
    "tiles, gate and up, 16 rows": Linear("tiles, gate and up, 16 rows", tile=1, stages=4),
    "HQQ, 16 rows": Linear("HQQ, 16 rows", tile=2, stages=3),
    **{f"{name}, by a cluster": replace(c, blocks=9) for name, c in CASES_OF_SHARERS.items()},
}


def as_streamed(ugraph: UGraph) -> tuple[UGraph, PlacedOp, Products] | None:
    """Return a µGraph, its only kernel, and the products that stream their codes, or None."""
    ops = place_kernels(ugraph)
    if len(ops) != 1:
        return None
    try:
        return ugraph, ops[0], streamed_products(ops[0])
    except CodegenError:
        return None


@cache
def streamed(case: Case) -> tuple[UGraph, PlacedOp, Products]:
    """Return the best accepted µGraph of a search whose only kernel can stream its codes."""
    ranked, _ = search(case.program, SearchOptions(time_limit=20))
    for r in ranked:
        accepted = accept([r]).candidates if as_streamed(r.ugraph) else ()
        for c in accepted:  # the µGraph, or another form of it
            if c.allows(False) and (found := as_streamed(c.ugraph)):
                return found
    raise AssertionError(f"no candidate of {case} can stream its codes")


def tiles_of(found: Products, tile: int) -> dict[str, int]:
    """Return the tiles of a schedule, with this one along the outer columns of codes."""
    tiles = tiles_of_rows(found) | {found.own_columns[0]: tile}
    if found.piece is not None:
        tiles[found.piece] = next_power_of_two(found.num_pieces)
    sizes = {a: found.block.axis(a).size for a in found.own_columns[1:]}
    return tiles | {a: next_power_of_two(n) for a, n in sizes.items()}


def schedule_of(case: Case, found: Products, **changes: int) -> Schedule:
    """Return the schedule of a case, with other values of `changes`."""
    tiles = tiles_of(found, case.tile)
    if case.tile_rows:
        tiles |= tiled_rows(found, case.tile_rows)
    given = {"num_stages": case.stages, "num_warps": case.warps, "persistent_blocks": case.blocks}
    given["cooperating_blocks"] = case.sharers
    return Schedule(tiles, cuda=True, **(given | changes))


#: Tables of 16 entries by name. In bytes of 7 bits, those of bitsandbytes are not exact.
HAND_TABLES = {
    **TABLES,
    "e2m1": E2M1,
    "14 bits": tuple(
        n / 2**14
        for n in (0, 300, 129, 5000, 16383, 127, 128, 9001)
        + (-77, -16000, -1, -8192, -255, -3333, 0, -12345)
    ),
}


#: What shifts are added to: scaled codes, their products with columns, sums of groups, or sums of
#: all columns. `Hand.scales_first` tells how those of the last three are scaled.
SHIFTS = "codes", "columns", "groups", "sums"


#: The sizes and strides of the axes that number 128 columns of a row in torchao's tiles: the words
#: of a lane, the codes of half a word, the lanes of a row, and the halves of a word.
LANES = ((4, 8), (4, 1), (4, 32), (2, 4))
#: Columns of a tile, and the codes of its eight rows.
LANE_COLUMNS, LANE_CODES = 128, 1024


def strides_of(dims: Sequence[int], order: Sequence[int], step: int = 1) -> tuple[int, ...]:
    """Return strides without gaps, or with `step` elements from one to the next.

    `order` names dims from the outermost to the innermost.
    """
    strides = [1] * len(dims)
    for d in reversed(order):
        strides[d] = step
        step *= dims[d]
    return tuple(strides)


def has_gaps(x: torch.Tensor) -> bool:
    """Return whether no two elements of a tensor lie side by side."""
    return min((s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1), default=1) > 1


def among_nan(x: torch.Tensor, number: int) -> torch.Tensor:
    """Return a tensor with gaps in memory of its own, with NaN in the gaps and around it.

    Its first element lies at a place that depends on a number, most often no multiple of 16 bytes.
    """
    first, size = number % 8, reach(x.shape, x.stride())
    memory = x.new_full((first + size + 8,), math.nan)
    return memory.as_strided(x.shape, x.stride(), first).copy_(x)


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
        batch: Rows of x.
        table: The name of a table in HAND_TABLES that codes are looked up in. Empty: there is none.
        is_turned: Whether the first of two codes is in the high half of a byte.
        has_columns: Whether words of codes of successive rows lie side by side, as those of GPTQ.
        has_rows_in_words: Whether a word has codes of eight rows of a column, as those of AWQ.
        scale_columns: The products whose scales of successive rows lie side by side.
        tile_rows: Rows of each product that a tile has. 0: the most.
        has_zeros: Whether there is a zero point for each scale.
        zeros_in_words: Whether zero points lie in words as those of AWQ. Otherwise they are floats.
        shifts: What shifts are added to: one of SHIFTS. Empty: there are no shifts.
        shift_columns: The products whose shifts of successive rows lie side by side.
        has_lanes: Whether words lie as lanes load them, as those of torchao's tiles.
        padding: Columns that follow those of each row, if words lie so. Nothing reads them.
        scale_gaps: Whether scales, zero points and shifts that lie side by side have gaps of one.
            The inputs have NaN in the gaps, and begin at any address.
        has_row_pairs: Whether a byte holds codes of two rows, as those of HQQ.
        sharers: Blocks of a cluster that share the columns of each tile.
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
    batch: int = 1
    table: str = ""
    is_turned: bool = False
    has_columns: bool = False
    has_rows_in_words: bool = False
    scale_columns: tuple[int, ...] = ()
    tile_rows: int = 0
    has_zeros: bool = False
    zeros_in_words: bool = False
    shifts: str = ""
    shift_columns: tuple[int, ...] = ()
    has_lanes: bool = False
    padding: int = 0
    scale_gaps: bool = False
    has_row_pairs: bool = False
    sharers: int = 1

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axis of rows of x, if there are several."""
        return ("m",) if self.batch > 1 else ()

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes of rows."""
        if self.has_rows_in_words:
            return ("n", "o", "p")
        has_two = self.square or self.has_lanes or self.has_row_pairs
        return ("n", "o") if has_two else ("n",)

    @property
    def column_axes(self) -> tuple[str, ...]:
        """The summed axes."""
        if self.has_lanes:
            return ("k", *("b",) * (self.group > LANE_COLUMNS), "r", "s", "t", "u")
        return ("k", "r")[: 1 + bool(self.group)] + ("s",) * len(self.inner_dims)

    @property
    def column_dims(self) -> tuple[int, ...]:
        """The sizes of the summed axes."""
        inner = self.inner_dims
        if self.has_lanes:
            blocks = self.group // LANE_COLUMNS
            return (self.columns // self.group, *(blocks,) * (blocks > 1), *inner)
        dims = (self.columns // self.group, self.group) if self.group else (self.columns,)
        return (*dims[:-1], dims[-1] // math.prod(inner), *inner)

    @property
    def inner_dims(self) -> tuple[int, ...]:
        """The sizes of the axes of the codes of a byte, a word or a tile, if there are any."""
        if self.has_lanes:
            return tuple(size for size, _ in LANES)
        return (CODES_PER_WORD,) if self.has_columns else (2,) * self.is_turned

    def row_dims(self, rows: int) -> tuple[int, ...]:
        """Return the sizes of the axes of this many rows."""
        if self.has_rows_in_words:
            return (rows // CODES_PER_WORD, 4, 2)
        if self.has_lanes:
            return (rows // 8, 8)
        if self.has_row_pairs:
            return (2, rows // 2)
        return (rows // self.square, self.square) if self.square else (rows,)

    def column_major(self, dims: int, in_words: bool = False) -> tuple[int, ...]:
        """Return the order of dims, the outermost first, if those of rows are the innermost ones.

        Args:
            dims: How many dims there are. Those of rows are the first ones.
            in_words: Whether the last two dims of rows number the codes of a word.
        """
        of_rows = range(len(self.row_axes))
        return (*range(len(of_rows), dims), *((0, 2, 1) if in_words else of_rows))

    @property
    def code_order(self) -> tuple[int, ...] | None:
        """The order of the dims of codes, the outermost first. None: row after row."""
        dims = len(self.row_axes) + len(self.column_axes)
        if self.has_columns:
            return (*range(1, dims - 1), 0, dims - 1)
        return self.column_major(dims, True) if self.has_rows_in_words else None

    @property
    def code_strides(self) -> tuple[int, ...]:
        """The strides of codes whose words lie as lanes load them, or whose bytes have two rows."""
        if self.has_row_pairs:
            dims = (self.row_dims(self.rows[0])[1], *self.column_dims)
            return (-1, *strides_of(dims, range(len(dims)), 2))
        blocks = self.group // LANE_COLUMNS
        outer = (blocks * LANE_CODES, *(LANE_CODES,) * (blocks > 1))
        return ((self.columns + self.padding) * 8, 128, *outer, *(stride for _, stride in LANES))

    @cached_property
    def graph(self) -> KernelGraph:
        """A kernel graph whose only op is the block graph."""
        g = KernelGraph()
        tensors: list[DTensor] = []
        inputs: list[BlockInput] = []

        def add(
            name,
            dims,
            axes,
            dtype,
            constant,
            parts=1,
            turned=False,
            order=None,
            step=1,
            strides=None,
        ):
            first = len(tensors)
            for n in range(parts):
                own = dims if parts == 1 else (self.row_dims(self.rows[n])[0], *dims[1:])
                steps = strides or strides_of(own, order or range(len(own)), step)
                if turned:
                    steps = (*steps[:-1], -1)
                tensors.append(g.new_input(own, dtype, steps, name=f"{name}{n}", constant=constant))
            joined, sizes = None, ()
            if parts > 1:
                joined, sizes = "n", tuple(t.dims[0] for t in tensors[first:])
            sources = tuple(range(first, first + parts))
            inputs.append(BlockInput(name, sources, axes, joined, sizes))

        column_axes, column_dims = self.column_axes, self.column_dims
        row_axes, row_dims = self.row_axes, self.row_dims(sum(self.rows))
        of_batch = "m" if self.batch > 1 else None
        add("x", (self.batch, *column_dims), (of_batch, *column_axes), self.dtype, False)
        if self.has_norm:
            add("gamma", (1, *column_dims), (None, *column_axes), self.dtype, True)
        for p in self.products:
            dims, axes = (*row_dims, *column_dims), (*row_axes, *column_axes)
            parts, step = len(self.rows), 2 if self.scale_gaps and p in self.scale_columns else 1
            order, turned = self.code_order, self.is_turned
            strides = self.code_strides if self.has_lanes or self.has_row_pairs else None
            add(f"codes{p}", dims, axes, self.codes, True, parts, turned, order, strides=strides)
            shared = (row_dims[0], 1) if self.square else row_dims
            axes = ("n", None) if self.square else row_axes
            of_groups = column_dims[:1] if self.group else ()
            ones = len(column_dims) - len(of_groups)
            dims = (*shared, *of_groups, *ones * (1,))
            axes = (*axes, *("k",) * len(of_groups), *ones * (None,))
            order = self.column_major(len(dims)) if p in self.scale_columns else None
            if self.group:
                add(f"scales{p}", dims, axes, self.scale_dtype, True, parts, order=order, step=step)
            else:
                add(f"scales{p}", row_dims, row_axes, self.dtype, True)
            if self.has_zeros:
                dtype = "uint4" if self.zeros_in_words else self.dtype
                if self.zeros_in_words:
                    order, step = self.column_major(len(dims), True), 1
                add(f"zeros{p}", dims, axes, dtype, True, parts, order=order, step=step)
            if self.shifts:
                order = self.column_major(len(dims)) if p in self.shift_columns else None
                step = 2 if self.scale_gaps and p in self.shift_columns else 1
                shape = (*row_dims, *of_groups, *ones * (1,)), (*row_axes, "k", *ones * (None,))
                add(f"shifts{p}", *shape, self.dtype, True, parts, order=order, step=step)
        if self.has_residual:
            add("residual", (self.batch, *row_dims), (of_batch, *row_axes), self.dtype, False)
        output = BlockOutput("y", (of_batch, *row_axes), self.dtype)
        axes = [Axis(a, self.batch, Role.GRID) for a in self.batch_axes]
        axes += [Axis(a, n, Role.GRID) for a, n in zip(row_axes, row_dims, strict=True)]
        roles = (Role.LOOP, *(Role.TILE,) * len(column_axes[1:]))
        axes += [
            Axis(a, n, role) for a, n, role in zip(column_axes, column_dims, roles, strict=True)
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
        columns, rows, batch = self.column_axes, self.row_axes, self.batch_axes
        body, sums, after = [], [], []

        def op(to, out, fn, *args, axes, over=None):
            to.append(BlockOp(out, fn, args, axes, over=over))
            return out

        def summed(out, value, axes):
            """Add a sum over all columns of a value that has the axes and the columns."""
            inner = columns[1:]
            names = [out, *(f"{out}_over_{a}" for a in inner)]
            sums.append(Accumulator(names[-1], value, "sum", (*axes, *inner)))
            for n in reversed(range(len(inner))):
                op(after, names[n], "sum", names[n + 1], axes=(*axes, *inner[:n]), over=inner[n])

        other = "x"
        if self.has_norm:
            other = op(body, "weighted", "mul", "x", "gamma", axes=(*batch, *columns))
            summed("squares", op(body, "square", "mul", "x", "x", axes=(*batch, *columns)), batch)
            op(after, "mean", "mul", "squares", 1 / self.columns, axes=batch)
            op(after, "mean_with_eps", "add", "mean", 1e-6, axes=batch)
            op(after, "rms", "rsqrt", "mean_with_eps", axes=batch)
        result_axes = (*batch, *rows)
        results = []

        def over_group(value, axes):
            """Return the sum of a value over the columns of each group."""
            for a in reversed(columns[1:]):
                own = (*axes, *columns[: columns.index(a)])
                value = op(body, f"{value}_over_{a}", "sum", value, axes=own, over=a)
            return value

        of_groups = over_group(other, batch) if self.shifts == "groups" else ""
        for p in self.products:
            codes, scales, everything = f"codes{p}", f"scales{p}", (*batch, *rows, *columns)
            shifts = f"shifts{p}"
            if self.table:
                attrs = (("values", HAND_TABLES[self.table]),)
                body.append(
                    BlockOp(f"entry{p}", "lookup", (codes,), (*rows, *columns), attrs=attrs)
                )
                codes = f"entry{p}"
            elif self.has_zeros:
                zeros = f"zeros{p}"
                codes = op(body, f"centered{p}", "sub", codes, zeros, axes=(*rows, *columns))
            elif zero := ZEROS[as_dtype(self.codes)]:
                codes = op(body, f"centered{p}", "sub", codes, zero, axes=(*rows, *columns))
            result = f"sum{p}"
            scale_axes = ("n", "k") if self.square else (*rows, "k")
            if not self.group:
                value = op(body, f"product{p}", "mul", codes, other, axes=everything)
                summed(f"plain{p}", value, result_axes)
                op(after, result, "mul", f"plain{p}", scales, axes=result_axes)
            elif self.shifts == "codes":
                scaled = op(body, f"scaled{p}", "mul", codes, scales, axes=(*rows, *columns))
                weight = op(body, f"weight{p}", "add", scaled, shifts, axes=(*rows, *columns))
                value = op(body, f"product{p}", "mul", weight, other, axes=everything)
                summed(result, value, result_axes)
            elif self.scales_first:
                axes = tuple(a for a in everything if a in (*scale_axes, *columns, *batch))
                scaled = op(body, f"scaled{p}", "mul", other, scales, axes=axes)
                value = op(body, f"product{p}", "mul", codes, scaled, axes=everything)
                if self.shifts == "columns":
                    shift = op(body, f"shift{p}", "mul", shifts, other, axes=everything)
                    value = op(body, f"shifted{p}", "add", shift, value, axes=everything)
                if self.shifts == "groups":
                    value = over_group(value, result_axes)
                    shift = op(
                        body, f"shift{p}", "mul", of_groups, shifts, axes=(*result_axes, "k")
                    )
                    value = op(body, f"shifted{p}", "add", value, shift, axes=(*result_axes, "k"))
                    sums.append(Accumulator(result, value, "sum", result_axes))
                else:
                    summed(result, value, result_axes)
            else:
                value = op(body, f"product{p}", "mul", codes, other, axes=everything)
                total = over_group(value, result_axes)
                value = op(body, f"scaled{p}", "mul", total, scales, axes=(*result_axes, "k"))
                if self.shifts == "groups":
                    shift = op(
                        body, f"shift{p}", "mul", shifts, of_groups, axes=(*result_axes, "k")
                    )
                    value = op(body, f"shifted{p}", "add", value, shift, axes=(*result_axes, "k"))
                sums.append(Accumulator(result, value, "sum", result_axes))
            if self.shifts == "sums":
                shift = op(body, f"shift{p}", "mul", other, shifts, axes=everything)
                summed(f"shift_sum{p}", shift, result_axes)
                args = result, f"shift_sum{p}"
                result = op(after, f"shifted{p}", "add", *args, axes=result_axes)
            if self.has_norm:
                result = op(after, f"normed{p}", "mul", result, "rms", axes=result_axes)
            results.append(result)
        if self.has_gate:
            gate = op(after, "gate", "silu", results[0], axes=result_axes)
            results = [op(after, "gated", "mul", gate, results[1], axes=result_axes)]
        if self.has_residual:
            results = [op(after, "added", "add", results[0], "residual", axes=result_axes)]
        op(after, "y", "mul", results[0], 1.0, axes=result_axes)
        return Stage("k", tuple(body), tuple(sums)), Stage(None, tuple(after))

    @cached_property
    def op(self) -> PlacedOp:
        """The op as it runs."""
        return place_kernels(UGraph(self.graph, self.graph))[0]

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        most = 32 if self.has_columns else 16 // len(self.products)
        tiles = dict.fromkeys(self.row_axes, 1) | {self.row_axes[-1]: self.tile_rows or most}
        if self.has_row_pairs:
            tiles = {"n": 2, "o": 8}
        if self.has_rows_in_words or self.has_lanes:
            most = 64 if self.has_rows_in_words else most
            tiles = dict(zip(self.row_axes, self.row_dims(self.tile_rows or most), strict=True))
        tiles |= {a: next_power_of_two(self.batch) for a in self.batch_axes}
        first, *inner = zip(self.column_axes, self.column_dims, strict=True)
        tiles |= {first[0]: self.tile // (1 if self.group else math.prod(self.inner_dims))}
        tiles |= {a: next_power_of_two(n) for a, n in inner}
        return Schedule(
            tiles,
            num_stages=self.stages,
            num_warps=self.warps,
            cooperating_blocks=self.sharers,
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
        size = (0.5 if self.table else sizes[self.codes]) * self.columns**0.5
        tensors = zip(self.graph.inputs, random_inputs(self.graph, "cpu"), strict=True)
        by = {"scales": 1 / size, "zeros": 4.0, "shifts": self.columns**-0.5}
        if self.zeros_in_words:
            by.pop("zeros")
        kinds = [(t.name.rstrip("0123456789"), x) for t, x in tensors]
        inputs = [x.mul_(by[kind]) if kind in by else x for kind, x in kinds]
        if not self.scale_gaps:
            return inputs
        return [
            among_nan(x, n) if kind in by and has_gaps(x) else x
            for n, ((kind, _), x) in enumerate(zip(kinds, inputs, strict=True))
        ]

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
        in_halves = as_dtype(self.codes).is_floating_point or self.batch > 1
        bits = 9 if in_halves else 13 if self.table in TABLES else 18
        allowed = torch.finfo(got.dtype).eps * want.abs() + largest * 2.0**-bits
        allowed = 4 * allowed if self.has_gate else allowed  # the errors of both factors add up
        return float(((got.double() - want).abs() / allowed).nan_to_num(math.inf).max())


def varied(hand: Hand, seed: int) -> Hand:
    """Return a block graph that may have more than eight rows of x, and blocks that share columns.

    Shares have to fit the columns and their groups. Other choices stay as they are.
    """
    r = random.Random(f"wider {seed}")
    if hand.batch > 1 and r.random() < 0.4:
        hand = replace(hand, batch=r.choice((9, 11, 12, 13, 14, 16, 16)))
    least = math.lcm(64, hand.group or 1)  # columns of a share
    sharers = r.choice([n for n in (1, 2, 4) if hand.columns % (least * n) == 0])
    return replace(hand, sharers=sharers, blocks=hand.blocks * sharers + r.randrange(sharers))


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
    hand = Hand(
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
        batch=r.choice((1, 1, 2, 3, 4, 5, 7, 8)),
    )
    if codes == "uint4" and r.random() < 0.7:
        hand = replace(hand, table=r.choice(sorted(HAND_TABLES)), is_turned=r.random() < 0.7)
    else:
        hand = replace(hand, is_turned=codes in ("uint4", "int4") and r.random() < 0.4)
    return varied(hand, seed)


def random_column_hand(seed: int) -> Hand:
    """Return a random block graph and schedule with column-major codes, scales or both."""
    r = random.Random(seed)
    has_columns = r.random() < 0.75
    has_gate = r.random() < 0.4
    every = ("uint4", "int4") if has_columns else ("uint4", "int4", "uint8", "int8")
    codes = r.choice((*every, *(() if has_columns else ("float8_e4m3fn",))))
    group = r.choice((32, 64, 64, 128, 128, 192, 0 if has_columns else 32))
    columns = group * 2 * r.randint(1, 6) if group else 64 * r.randint(1, 16)
    products = (0, 1) if has_gate else (0,)
    scale_columns = products if not has_columns or r.random() < 0.7 else r.choice(((), (0,)))
    tile = 1 << r.randint(0, 3) if group else 1 << r.randint(6, 9)
    most = 32 if has_columns else 16 // len(products)
    tile_rows = r.choice((most, 16)) if has_columns else most
    may_have_zeros = bool(group) and codes != "float8_e4m3fn"
    hand = Hand(
        codes=codes,
        dtype=r.choice(("bfloat16", "float16", "float32")),
        rows=tuple(tile_rows * r.randint(1, 4) for _ in range(r.choice((1, 1, 2, 3)))),
        columns=columns,
        group=group,
        has_norm=r.random() < 0.5,
        has_gate=has_gate,
        has_residual=r.random() < 0.4,
        scales_first=r.random() < 0.5,
        tile=tile,
        stages=r.choice((1, 2, 3, 4, 4, 6)),
        warps=r.choice((1, 2, 4, 8)),
        blocks=r.choice((1, 2, 3, 5)),
        batch=r.choice((1, 1, 2, 3, 5, 8)),
        is_turned=not has_columns and codes in ("uint4", "int4") and r.random() < 0.4,
        has_columns=has_columns,
        scale_columns=scale_columns if group else (),
        tile_rows=tile_rows,
        has_zeros=may_have_zeros and random.Random(~seed).random() < 0.4,
    )
    return varied(hand, seed)


def random_row_hand(seed: int) -> Hand:
    """Return a random block graph and schedule whose words hold codes of eight rows."""
    r = random.Random(seed)
    has_gate = r.random() < 0.4
    group = r.choice((32, 64, 64, 128, 128, 192, 0))
    every = (2, 4, 6, 8, 10) if group % 64 else (1, 1, 2, 3, 5, 8, 12)
    columns = group * r.choice(every) if group else 64 * r.randint(1, 16)
    tile = 1 << r.randint(0, 1 if has_gate else 2) if group else 1 << r.randint(5, 9)
    tile_rows = r.choice((64, 32))
    products = (0, 1) if has_gate else (0,)
    has_zeros = r.random() < 0.7
    hand = Hand(
        codes=r.choice(("uint4", "uint4", "int4")),
        dtype=r.choice(("bfloat16", "float16", "float32")),
        rows=tuple(tile_rows * r.randint(1, 3) for _ in range(r.choice((1, 1, 2, 3)))),
        columns=columns,
        group=group,
        has_norm=r.random() < 0.5,
        has_gate=has_gate,
        has_residual=r.random() < 0.4,
        scales_first=r.random() < 0.5,
        tile=tile,
        stages=r.choice((1, 2, 3, 4, 4, 6)),
        warps=r.choice((1, 2, 4, 8)),
        blocks=r.choice((1, 2, 3, 5)),
        batch=r.choice((1, 1, 2, 3, 5, 8)),
        has_rows_in_words=True,
        scale_columns=r.choice((products, products, (), (0,))) if group else (),
        tile_rows=tile_rows,
        has_zeros=has_zeros,
        zeros_in_words=has_zeros and r.random() < 0.7,
    )
    return varied(hand, seed)


def random_lane_hand(seed: int) -> Hand:
    """Return a random block graph and schedule whose words lie as lanes load them."""
    r = random.Random(seed)
    has_gate = r.random() < 0.4
    products = (0, 1) if has_gate else (0,)
    group = r.choice((128, 128, 128, 256, 384))
    batch = r.choice((1, 1, 1, 2, 3, 5, 8))
    least = 8 if has_gate else 16
    shifts = r.choice(("", *SHIFTS, *SHIFTS))
    scale_gaps = r.random() < 0.7
    most = 8 if group == 128 else 5  # groups
    hand = Hand(
        codes=r.choice(("uint4", "uint4", "int4")),
        dtype=r.choice(("bfloat16", "float16", "float32")),
        rows=tuple(least * r.randint(1, 4) for _ in range(r.choice((1, 1, 2, 3)))),
        columns=group * r.randint(2 if scale_gaps else 1, most),
        group=group,
        has_norm=r.random() < 0.5,
        has_gate=has_gate,
        has_residual=r.random() < 0.4,
        scales_first=r.random() < 0.5 or shifts == "columns",
        tile=1 << r.randint(0, 2),
        stages=r.choice((1, 2, 3, 4, 4, 6)),
        warps=r.choice((1, 2, 4, 8)),
        blocks=r.choice((1, 2, 3, 5)),
        batch=batch,
        scale_columns=r.choice((products, products, products, (), (0,))),
        tile_rows=least if has_gate or batch > 1 else r.choice((8, 16)),
        has_zeros=not shifts and r.random() < 0.5,
        shifts=shifts,
        shift_columns=r.choice((products, products, products, (), (0,))),
        has_lanes=True,
        padding=r.choice((0, 0, 128, 512)),
        scale_gaps=scale_gaps,
    )
    return varied(hand, seed)


def random_pair_hand(seed: int) -> Hand:
    """Return a random block graph and schedule whose bytes hold codes of two rows."""
    r = random.Random(700 + seed)
    group = r.choice((0, 32, 64, 64, 128, 192))
    shifts = r.choice(("", "", *SHIFTS)) if group else ""
    hand = Hand(
        codes=r.choice(("uint4", "uint4", "int4")),
        dtype=r.choice(("bfloat16", "float16", "float32")),
        rows=(16 * r.randint(1, 5),),
        columns=max(64, group) * r.randint(1, 10 if group < 128 else 5),
        group=group,
        has_norm=r.random() < 0.5,
        has_gate=r.random() < 0.5,
        has_residual=r.random() < 0.4,
        scales_first=r.random() < 0.5 or shifts == "columns",
        tile=1 << r.randint(0, 2) if group else 1 << r.randint(6, 8),
        stages=r.choice((1, 2, 3, 4, 4, 6)),
        warps=r.choice((1, 2, 4, 8)),
        blocks=r.choice((1, 2, 3, 5)),
        batch=r.choice((1, 1, 1, 2, 3, 5, 8)),
        has_zeros=bool(group) and not shifts and r.random() < 0.6,
        shifts=shifts,
        has_row_pairs=True,
    )
    return varied(hand, seed)


def random_gap_hand(seed: int) -> Hand:
    """Return a random block graph and schedule with gaps between scales, and codes in any order."""
    r = random.Random(900 + seed)
    draw = (random_column_hand, random_row_hand, random_shift_hand)[seed % 3]
    while True:
        hand = draw(r.randrange(10**6))
        if not hand.group or hand.columns == hand.group:
            continue
        products = tuple(hand.products)
        return replace(
            hand,
            scale_gaps=True,
            scale_columns=r.choice((products, (0,))),
            shift_columns=r.choice((products, (), (0,))),
        )


def random_shift_hand(seed: int) -> Hand:
    """Return a random block graph and schedule with shifts, and codes in any order."""
    r = random.Random(500 + seed)
    draw = (random_hand, random_column_hand, random_row_hand)[seed % 3]
    while True:
        hand = draw(r.randrange(10**6))
        hand = replace(hand, table="", has_zeros=False, zeros_in_words=False)
        if not hand.group or hand.square or hand.codes == "float8_e4m3fn":
            continue
        shifts = r.choice(SHIFTS)
        products = tuple(hand.products)
        return replace(
            hand,
            shifts=shifts,
            scales_first=hand.scales_first or shifts == "columns",
            shift_columns=r.choice((products, products, (), (0,))),
        )
