"""Kernels that decode containers: their numbers through Triton's interpreter, and for sm_90."""

from __future__ import annotations

import json

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.formats import awq, bitsandbytes, gguf, gptq, hqq, torchao_int4
from mirage_hf.formats import compressed_tensors_fp4 as fp4
from mirage_hf.formats.coding import Coding
from mirage_hf.formats.parts import in_parts
from mirage_hf.formats.stored import Split
from mirage_hf.gpus import H200
from mirage_hf.graph.block import Role
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.swap.coded_forward import decoding_program
from mirage_hf.tune import cost
from mirage_hf.tune.measure import random_inputs
from mirage_hf.tune.space import schedules, smallest
from tests.helpers import coded_modules, coded_programs
from tests.helpers.thorough import count
from tests.helpers.triton_interpreter import run

pytest.importorskip("triton")


def codings(
    rows: int, columns: int, group: int, block: int, dtype: torch.dtype = torch.float16
) -> dict[str, Coding]:
    """Return a coding of each kind that readers give."""
    u4, u8, i8, f8 = torch.uint4, torch.uint8, torch.int8, torch.float8_e4m3fn
    whole, groups = Split(rows, columns), Split(rows, columns, group=group)
    words_of_4 = Split(rows, columns, 8, group)
    words_of_8 = Split(rows, columns, 4, group)
    blocks = Split(rows, columns, block, block)

    def coding(split: Split, codes: torch.dtype, scales, zeros=None, zero: float = 0.0) -> Coding:
        return Coding(rows, columns, dtype, split.codes(codes), scales, zeros, zero)

    packed_4 = words_of_4.packed_along_rows(u4, 8)
    packed_8 = words_of_8.packed_along_rows(u8, 4)
    f32, wide = torch.float32, max(columns, 128)
    return {
        "int4 groups": coding(groups, u4, groups.per_row(dtype), zero=8.0),
        "int4 zero points in words": coding(words_of_4, u4, words_of_4.per_row(dtype), packed_4),
        "int4 rows": coding(whole, u4, whole.per_row(dtype), zero=8.0),
        "uint8 zero points in words": coding(words_of_8, u8, words_of_8.per_row(dtype), packed_8),
        "uint8 float zero points": coding(groups, u8, groups.per_row(dtype), groups.per_row(dtype)),
        "int8 rows": coding(whole, i8, whole.per_row(f32)),
        "int8 groups": coding(groups, i8, groups.per_row(f32), groups.per_row(i8)),
        "fp8 blocks": coding(blocks, f8, blocks.per_block(f32)),
        "fp8 one scale": coding(whole, f8, whole.per_tensor(f32)),
        "GPTQ": gptq.coding_of(rows, columns, group, u4, dtype, dtype, 8),
        "GPTQ zero points": gptq.coding_of(rows, columns, group, u4, dtype, dtype, None),
        "GPTQ int8": gptq.coding_of(rows, columns, group, u8, dtype, dtype, 128),
        "GPTQ act-order": gptq.coding_of(rows, columns, group, u4, dtype, dtype, 8, torch.int32),
        "GPTQ act-order, zero points": gptq.coding_of(
            rows, columns, group, u4, dtype, dtype, None, torch.int32
        ),
        "GPTQ act-order int8": gptq.coding_of(
            rows, columns, group, u8, dtype, dtype, None, torch.int32
        ),
        "AWQ": awq.coding_of(rows, columns, group, dtype, dtype, 8),
        "AWQ zero points": awq.coding_of(rows, columns, group, dtype, dtype, None),
        "HQQ int4": coding_of_halves(groups, dtype),
        "torchao int4": torchao_int4.coding_of_rows(rows, columns, group, dtype, False),
        "torchao int4, shifts": torchao_int4.coding_of_rows(rows, columns, group, dtype, True),
        "torchao tiles": torchao_int4.coding_of_tiles(rows, wide, wide, group, dtype),
        "NF4": bitsandbytes.coding_of(rows, columns, group, dtype, bitsandbytes.TABLES["nf4"]),
        "FP4": bitsandbytes.coding_of(rows, columns, group, dtype, bitsandbytes.TABLES["fp4"]),
        "NVFP4": fp4._coding(groups, dtype, fp4.FORMATS["nvfp4-pack-quantized"]),
        "Q8_0": gguf.coding_of(8, rows, columns, dtype),
        "Q4_K": gguf.coding_of(12, rows, 256, torch.bfloat16),
        "Q5_K": gguf.coding_of(13, rows, 256, torch.bfloat16),
        "Q6_K": gguf.coding_of(14, rows, 256, torch.bfloat16),
        "MXFP4": fp4._coding(groups, dtype, fp4.FORMATS["mxfp4-pack-quantized"]),
    }


def coding_of_halves(split: Split, dtype: torch.dtype) -> Coding:
    """Return the coding of HQQ with 4 bits."""
    codes, values = hqq._halves(split, dtype)
    return Coding(split.rows, split.columns, dtype, codes, values, values)


NAMES = tuple(codings(32, 64, 32, 32))

#: Kinds of which weights of different rows are joined. Either strides depend on the rows, or each
#: weight has a divisor of its own.
JOINED = ("GPTQ", "GPTQ zero points", "AWQ", "AWQ zero points", "NVFP4", "MXFP4", "Q4_K", "Q6_K")

#: Kinds of which a part of a weight is decoded. In all but the last, tensors of a part have gaps,
#: where the rows of other parts lie.
PARTED = ("GPTQ zero points", "GPTQ act-order, zero points", "AWQ zero points", "Q6_K")

#: The rows of the programs that are interpreted, and whether RMSNorm comes first.
ROWS = ((1, False), (2, True), (16, False))

#: Kinds whose kernels have no products on tensor cores.
NO_TENSOR_CORES = (
    "GPTQ",
    "GPTQ zero points",
    "GPTQ int8",
    "GPTQ act-order",
    "GPTQ act-order, zero points",
    "GPTQ act-order int8",
    "torchao tiles",
    "NF4",
    "FP4",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)


def main() -> None:
    """Print the errors of kernels as JSON."""
    results = {}
    for name, coding in codings(32, 64, 32, 32).items():
        for rows, norm in ROWS:
            program = coded_modules.linear(coding, rows, norm)
            results[f"{name}, {rows} rows"] = coded_programs.errors_of(program, count(3, 1))
        results[f"{name}, decoded"] = coded_programs.errors_of(decoding_program(coding), 1)
    for name in PARTED:
        results[f"{name}, part"] = errors_of_last_part(codings(64, 64, 32, 16)[name])
    for name in ("int8 rows", "fp8 one scale"):
        coding = codings(32, 64, 32, 32, torch.bfloat16)[name]
        program = coded_modules.linear(coding, 16, False)
        results[f"{name}, bfloat16"] = coded_programs.errors_of(program, 1)
    for name in JOINED:
        parts = [codings(n, 64, 32, 16)[name] for n in (64, 32, 32)]
        program = coded_modules.joined(parts, 1, True)
        results[f"{name}, joined"] = coded_programs.errors_of(program, count(3, 1))
    print(json.dumps(results))


def errors_of_last_part(coding: Coding) -> list[tuple[bool, float, float]]:
    """Decode the last of two parts of a weight by kernels that read views of the whole weight.

    Returns:
        What `coded_programs.errors_of` returns.
    """
    whole = decoding_program(coding)
    tensors = random_inputs(whole, "cpu")
    if coding.order:
        tensors[-1].copy_(torch.arange(tensors[-1].numel()).view_as(tensors[-1]) % 2)
    size = coding.rows * coding.columns * coding.dtype.itemsize
    _, last = in_parts(coding, size // 2)
    exact, eager = (
        run_kernel_graph(whole, tensors, *dtype)[0][-last.coding.rows :]
        for dtype in ((torch.float64,), ())
    )
    views, errors = last.tensors(tensors), []
    (ranked, *_), _ = search(decoding_program(last.coding), SearchOptions(threads=1))
    (op,) = place_kernels(ranked.ugraph)
    for schedule in schedules(op, limit=2):
        program = triton.generate(ranked.ugraph, [schedule])
        ours = compiler.load(program.source, program.digest).run(views)[0]
        both = [float((y.double() - exact).abs().max() / exact.abs().max()) for y in (ours, eager)]
        errors.append((schedule.mma, *both))
    return errors


@pytest.fixture(scope="module")
def interpreted() -> dict:
    """Return what Triton's interpreter computed."""
    return run("from tests.formats import test_kernels; test_kernels.main()")


@pytest.mark.parametrize("rows", [rows for rows, _ in ROWS])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_as_close_to_float64_as_torch(interpreted, name, rows):
    errors = interpreted[f"{name}, {rows} rows"]
    assert errors
    for mma, error, eager in errors:
        assert error <= 1.25 * eager + 1e-3, (mma, error, eager)


@pytest.mark.parametrize("name", ["int8 rows", "fp8 one scale"])
def test_bytes_become_factors_of_tensor_cores_in_bfloat16(interpreted, name):
    errors = interpreted[f"{name}, bfloat16"]
    assert any(mma for mma, _, _ in errors)
    for mma, error, eager in errors:
        assert error <= 1.25 * eager + 1e-3, (mma, error, eager)


@pytest.mark.parametrize("name", NAMES)
def test_decoded_weights_are_as_close_to_float64_as_torch(interpreted, name):
    errors = interpreted[f"{name}, decoded"]
    assert errors
    for _, error, eager in errors:
        assert error <= 1.25 * eager + 1e-3, (error, eager)


@pytest.mark.parametrize("name", PARTED)
def test_decoded_parts_are_as_close_to_float64_as_torch(interpreted, name):
    errors = interpreted[f"{name}, part"]
    assert errors
    for _, error, eager in errors:
        assert error <= 1.25 * eager + 1e-3, (error, eager)


@pytest.mark.parametrize(
    ("name", "columns"),
    [*((name, 4096) for name in NAMES), ("int4 rows", 13696), ("int4 rows", 2880)],
)
def test_a_weight_is_decoded_in_little_more_than_its_bytes_take(name, columns):
    coding = codings(14336, columns, 64, 64, torch.bfloat16)[name]
    found, _ = search(decoding_program(coding), SearchOptions(threads=1))
    (op,) = place_kernels(found[0].ugraph)
    estimate = cost.estimate(plan_kernel(op, schedules(op, limit=1)[0]))
    fixed = 1.5 * (H200.launch_us + H200.latency_us)
    # the estimate counts the two bytes between blocks of Q8_0 as a gap, and a tile of whole words
    # has 64 of 2880 columns
    most = 2.2 if name == "Q8_0" or columns == 2880 else 1.6
    assert estimate.us - fixed < most * 1e6 * estimate.bytes / H200.bandwidth


@pytest.mark.parametrize("name", JOINED)
def test_weights_of_different_rows_are_joined(interpreted, name):
    errors = interpreted[f"{name}, joined"]
    assert errors
    for mma, error, eager in errors:
        assert error <= 1.25 * eager + 1e-3, (mma, error, eager)


def block_ops(coding: Coding, rows: int):
    """Yield a µGraph of one kernel and its op."""
    found, _ = search(coded_modules.linear(coding, rows, False), SearchOptions(threads=1))
    for ranked in found:
        ops = place_kernels(ranked.ugraph)
        if ranked.ugraph.num_kernels == 1 and len(ops) == 1:
            yield ranked.ugraph, ops[0]


@pytest.mark.parametrize(
    "name, rows",
    [
        pytest.param(name, rows, marks=[pytest.mark.thorough] if (n + m) % 2 else [])
        for n, name in enumerate(NAMES)
        for m, rows in enumerate((1, 16))
    ],
)
def test_kernels_compile_for_a_gpu(name, rows):
    coding = codings(1024, 1024, 128, 128, torch.bfloat16)[name]
    for ugraph, op in block_ops(coding, rows):
        mma = rows > 1 and name not in NO_TENSOR_CORES
        listed = [s for s in schedules(op) if s.mma == mma]
        if listed:
            program = triton.generate(ugraph, listed[:1])
            assert compiler.ahead_of_time(program, 90)
            return
    raise AssertionError("no µGraph has such a schedule")


def test_tiles_along_packed_zero_points_are_whole_words():
    coding = codings(1024, 1024, 128, 128)["int4 zero points in words"]
    for _, op in list(block_ops(coding, 1))[:3]:
        for schedule in (*schedules(op), smallest(op)):
            assert schedule.tiles[word_axis(op)] == 8


def word_axis(op) -> str:
    """Return the axis of the eight zero points of a word."""
    return next(a.name for a in op.block.axes if a.size == 8 and a.role is Role.GRID)
