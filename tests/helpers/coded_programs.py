"""Linears whose weights are codes with scales, as quantized checkpoints store them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import mirage_hf as mi
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.generated_program import GeneratedProgram
from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.errors import CodegenError
from mirage_hf.graph.block import Role
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.measure import random_inputs
from mirage_hf.tune.space import schedules


def int4_linear(
    rows: int,
    columns: int,
    width: int,
    group: int,
    *,
    zeros: bool = False,
    norm: bool = False,
    dtype: str = "float16",
) -> KernelGraph:
    """Return x · Wᵀ for W = (code − 8) · scale, or (code − zero) · scale, in groups of columns."""
    g = mi.new_graph()
    groups = width // group
    x = g.new_input((rows, width), dtype, name="x")
    codes = g.new_input((columns, groups, group), "uint4", name="codes", constant=True)
    scales = g.new_input((columns, groups, 1), dtype, name="scales", constant=True)
    zero: Any = 8.0
    if zeros:
        zero = g.cast(
            g.new_input((columns, groups, 1), "uint8", name="zeros", constant=True), dtype
        )
    if norm:
        x = g.rms_norm(x, g.new_input((1, width), dtype, name="weight", constant=True))
    w = g.mul(g.sub(g.cast(codes, dtype), zero), scales)
    g.mark_output(g.matmul(x, g.permute(g.reshape(w, (columns, width)), (1, 0))))
    return g


def int4_rows(rows: int, columns: int, width: int) -> KernelGraph:
    """Return x · Wᵀ for W = (code − 8) · scale, with one scale for each row of W."""
    g = mi.new_graph()
    x = g.new_input((rows, width), "float16", name="x")
    codes = g.new_input((columns, width), "uint4", name="codes", constant=True)
    scales = g.new_input((columns, 1), "float16", name="scales", constant=True)
    w = g.mul(g.sub(g.cast(codes, "float16"), 8.0), scales)
    g.mark_output(g.matmul(x, g.permute(w, (1, 0))))
    return g


def int4_joined(rows: int, widths: tuple[int, ...], width: int, group: int) -> KernelGraph:
    """Return RMSNorm and linears of one input side by side, as q, k and v are."""
    g = mi.new_graph()
    x = g.new_input((rows, width), name="x")
    normed = g.rms_norm(x, g.new_input((1, width), name="weight", constant=True))
    weights = []
    for n in widths:
        codes = g.new_input((n, width // group, group), "uint4", constant=True)
        scales = g.new_input((n, width // group, 1), constant=True)
        w = g.mul(g.sub(g.cast(codes, "float16"), 8.0), scales)
        weights.append(g.permute(g.reshape(w, (n, width)), (1, 0)))
    g.mark_output(g.matmul(normed, g.concat(weights, 1)))
    return g


def fp8_linear(rows: int, columns: int, width: int, block: int = 128) -> KernelGraph:
    """Return x · Wᵀ for W in float8 with a float32 scale for each square block."""
    g = mi.new_graph()
    x = g.new_input((rows, width), "float16", name="x")
    dims = (columns // block, block, width // block, block)
    codes = g.new_input(dims, "float8_e4m3fn", name="codes", constant=True)
    scale_dims = (dims[0], 1, dims[2], 1)
    scales = g.new_input(scale_dims, "float32", name="scales", constant=True)
    w = g.cast(g.mul(g.cast(codes, "float32"), scales), "float16")
    g.mark_output(g.matmul(x, g.permute(g.reshape(w, (columns, width)), (1, 0))))
    return g


def int8_linear(
    rows: int, columns: int, width: int, *, norm: bool = False, dtype: str = "int8"
) -> KernelGraph:
    """Return x · Wᵀ for W in integers of 8 bits with a scale for each row of W."""
    g = mi.new_graph()
    x = g.new_input((rows, width), "float16", name="x")
    if norm:
        x = g.rms_norm(x, g.new_input((1, width), "float16", name="weight", constant=True))
    codes = g.new_input((columns, width), dtype, name="codes", constant=True)
    scales = g.new_input((columns, 1), "float16", name="scales", constant=True)
    w = g.mul(g.cast(codes, "float16"), scales)
    g.mark_output(g.matmul(x, g.permute(w, (1, 0))))
    return g


def int8_joined(rows: int, widths: tuple[int, ...], width: int) -> KernelGraph:
    """Return RMSNorm and linears of int8 of one input side by side."""
    g = mi.new_graph()
    x = g.new_input((rows, width), "float16", name="x")
    normed = g.rms_norm(x, g.new_input((1, width), "float16", name="weight", constant=True))
    weights = []
    for n in widths:
        codes = g.new_input((n, width), "int8", constant=True)
        scales = g.new_input((n, 1), "float16", constant=True)
        weights.append(g.permute(g.mul(g.cast(codes, "float16"), scales), (1, 0)))
    g.mark_output(g.matmul(normed, g.concat(weights, 1)))
    return g


#: Programs that the interpreter runs, by name.
CASES = {
    "int4, 1 row": lambda: int4_linear(1, 16, 256, 64),
    "int4, 3 rows, zero points": lambda: int4_linear(3, 16, 128, 32, zeros=True),
    "int4, norm before": lambda: int4_linear(2, 16, 128, 32, norm=True),
    "int4, four runs in a group": lambda: int4_linear(1, 16, 512, 128),
    "int4, three linears joined": lambda: int4_joined(1, (32, 16, 16), 256, 128),
    "int4, 16 rows": lambda: int4_linear(16, 32, 64, 32),
    "int8": lambda: int8_linear(2, 16, 128),
    "fp8 blocks": lambda: fp8_linear(2, 32, 64, 16),
    "fp8 blocks, 16 rows": lambda: fp8_linear(16, 32, 64, 16),
}


def _single_kernels(g: KernelGraph) -> Iterator[tuple[UGraph, PlacedOp]]:
    """Yield the µGraphs of a search that are one kernel, with that kernel."""
    found, _ = search(g, SearchOptions(threads=1))
    for ranked in found:
        ops = place_kernels(ranked.ugraph)
        if len(ops) == ranked.ugraph.num_kernels == 1:
            yield ranked.ugraph, ops[0]


class _Exact:
    """The exact result of a program on random inputs, and errors relative to its largest element.

    Attributes:
        allowed: Eager's error.
    """

    def __init__(self, g: KernelGraph):
        """Run a program."""
        self._graph, inputs = g, random_inputs(g, "cpu")
        self._result = run_kernel_graph(g, inputs, torch.float64)[0]
        self.allowed = self._error(run_kernel_graph(g, inputs)[0])

    def _error(self, y: torch.Tensor) -> float:
        return float((y.double() - self._result).abs().max() / self._result.abs().max())

    def error_of(self, program: GeneratedProgram) -> float:
        """Return the error of a generated program."""
        run = compiler.load(program.source, program.digest).run
        return self._error(run(random_inputs(self._graph, "cpu"))[0])


def errors_of(g: KernelGraph, ugraphs: int = 3) -> list[tuple[bool, float, float]]:
    """Return (tensor cores, error, eager's error) of kernels of a program, for a few schedules.

    Args:
        g: The program.
        ugraphs: How many µGraphs to try at most.
    """
    exact = _Exact(g)
    found, _ = search(g, SearchOptions(threads=1))
    results = []
    for ranked in [r for r in found if r.ugraph.num_kernels == 1][:ugraphs]:
        ops = place_kernels(ranked.ugraph)
        if len(ops) > 1:
            continue
        for schedule in _few(schedules(ops[0])):
            try:
                program = triton.generate(ranked.ugraph, [schedule])
            except CodegenError:
                continue
            results.append((schedule.mma, exact.error_of(program), exact.allowed))
    return results


def _few(choices: Any) -> list[Schedule]:
    """Return a schedule of multiply-adds, and two on tensor cores: staged, and held ahead."""
    staged = [s for s in choices if s.mma and s.num_stages > 1]
    held = [s for s in choices if s.mma and s.num_stages == 1]
    return [s for s in choices if not s.mma][:1] + staged[:1] + held[:1]


def errors_along_words(rows: int) -> list[tuple[int, int, float, float]]:
    """Return (stages, blocks, error, eager's error) of kernels that walk the codes of words."""
    g = int4_rows(rows, 32, 256)
    exact = _Exact(g)
    found, _ = search(g, SearchOptions(threads=1))
    ugraph = next(r.ugraph for r in found if r.ugraph.num_kernels == 1)
    axes = ugraph.block_ops[0].block.axes
    tiles = {a.name: 64 if a.size == 256 else 16 if a.size >= 16 else 8 for a in axes}
    results = []
    for stages, blocks in ((1, 1), (1, 2), (3, 1), (3, 2)):
        schedule = Schedule(
            tiles, mma=True, num_warps=1, num_stages=stages, cooperating_blocks=blocks
        )
        program = triton.generate(ugraph, [schedule])
        assert "uint4_pairs(tl" in program.source
        results.append((stages, blocks, exact.error_of(program), exact.allowed))
    return results


#: Programs whose loops over groups take several steps in each trip, by name. "seven groups" has
#: shares of two blocks that are not equally long.
TRIPS = {
    "eight groups": lambda: int4_linear(1, 32, 512, 64),
    "eight groups, norm before": lambda: int4_linear(1, 32, 512, 64, norm=True),
    "eight groups, zero points, 16 rows": lambda: int4_linear(16, 32, 512, 64, zeros=True),
    "eight groups, bfloat16": lambda: int4_linear(1, 32, 512, 64, dtype="bfloat16"),
    "seven groups": lambda: int4_linear(2, 16, 448, 64, norm=True),
    "nine groups": lambda: int4_linear(1, 16, 576, 64),
    "three linears joined": lambda: int4_joined(1, (32, 16, 16), 512, 64),
}


def holding_words(g: KernelGraph) -> tuple[UGraph, Schedule]:
    """Return the first µGraph that can hold words ahead on tensor cores, and such a schedule.

    Raises:
        AssertionError: There is none.
    """
    for ugraph, op in _single_kernels(g):
        for schedule in schedules(op):
            one = replace(schedule, num_stages=1, num_warps=1, cooperating_blocks=1)
            if one.mma and plan_kernel(op, one).pipelining.holds_words_ahead:
                return ugraph, replace(one, prefetch_steps=0)
    raise AssertionError("no µGraph holds words ahead")


def errors_in_trips(g: KernelGraph) -> list[tuple[int, int, float, float]]:
    """Return (steps of a trip, blocks, error, eager's error) of kernels with trips of some steps.

    Trips that do not divide the steps of a block are left out.
    """
    exact = _Exact(g)
    ugraph, one = holding_words(g)
    results = []
    for steps, blocks in itertools.product((1, 2, 3, 4, 7, 8), (1, 2, 4)):
        schedule = replace(one, steps_per_trip=steps, cooperating_blocks=blocks)
        try:
            program = triton.generate(ugraph, [schedule])
        except CodegenError:
            continue
        results.append((steps, blocks, exact.error_of(program), exact.allowed))
    return results


#: Steps of a loop over words of bytes.
STEPS = 8

#: Programs whose multiply-adds take words of four codes, by name.
BYTES = {
    "int8": lambda: int8_linear(1, 32, 512),
    "int8, 3 rows, norm before": lambda: int8_linear(3, 16, 512, norm=True),
    "uint8": lambda: int8_linear(1, 16, 512, dtype="uint8"),
    "float8 blocks": lambda: fp8_linear(2, 32, 256, 32),
    "int8, three linears joined": lambda: int8_joined(1, (32, 16, 16), 512),
}


def errors_of_bytes(g: KernelGraph) -> list[tuple[int, int, int, float, float]]:
    """Return (stages, steps of a trip, blocks, error, eager's error) of loops over words of bytes.

    Those of two stages hold the words of later steps.
    """
    exact = _Exact(g)
    ugraph, one = walking_bytes(g)
    results = []
    for stages, steps, blocks in itertools.product((1, 2, 3), (1, 2, 4), (1, 2)):
        for lazy in (True, False) if steps == blocks == 1 else (True,):
            schedule = replace(
                one,
                num_stages=stages,
                steps_per_trip=steps,
                cooperating_blocks=blocks,
                reduce_after_loop=lazy,
            )
            try:
                program = triton.generate(ugraph, [schedule])
            except CodegenError:
                continue
            assert "_words_as_float32(" in program.source
            error = exact.error_of(program)
            results.append((stages, steps, blocks, error, exact.allowed))
    return results


def walking_bytes(g: KernelGraph) -> tuple[UGraph, Schedule]:
    """Return the first µGraph that can hold words of bytes ahead, and such a schedule.

    Raises:
        AssertionError: There is none.
    """
    for ugraph, op in _single_kernels(g):
        assert op.block is not None
        tiles = {a.name: next_power_of_two(a.size) for a in op.block.axes}
        tiles |= {a.name: min(tiles[a.name], 16) for a in op.block.named(Role.GRID)}
        tiles |= {a.name: a.size // STEPS for a in op.block.named(Role.LOOP)}
        one = Schedule(tiles, num_warps=1, num_stages=2)
        plan = plan_kernel(op, one)
        if plan.pipelining.holds_words_ahead and plan.cooperation.steps_per_block == STEPS:
            return ugraph, one
    raise AssertionError("no µGraph holds words ahead")


def every_byte(dtype: str) -> list[float]:
    """Return what a kernel converts each byte to that codes of a dtype have. NaN is given as -1."""
    g = mi.new_graph()
    x = g.new_input((1, 512), "float32", name="x")
    codes = g.new_input((256, 512), dtype, name="codes", constant=True)
    g.mark_output(g.matmul(x, g.permute(g.cast(codes, "float32"), (1, 0))))
    ugraph, schedule = walking_bytes(g)
    program = triton.generate(ugraph, [schedule])
    assert "_words_as_float32(" in program.source
    every = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 512)
    x_of_one = torch.zeros(1, 512)
    x_of_one[0, 511] = 1.0
    bytes_ = every.view(getattr(torch, dtype))
    if dtype == "float8_e4m3fn":  # NaN only where it is multiplied by 1
        every[:, :511] = 0
    (y,) = compiler.load(program.source, program.digest).run([x_of_one, bytes_])
    return torch.where(y.isnan(), -1.0, y)[0].tolist()


def powers_of_two() -> KernelGraph:
    """Return a program that converts 256 bytes to the powers of two that they stand for."""
    g = mi.new_graph()
    x = g.new_input((1, 256), "float32", name="x")
    powers = g.new_input((1, 256), "float8_e8m0fnu", name="powers", constant=True)
    g.mark_output(g.mul(g.cast(powers, "float32"), x))
    return g


def converted_powers() -> list[float]:
    """Return what a kernel converts each byte to. NaN is given as -1."""
    g = powers_of_two()
    ugraph = search(g, SearchOptions(threads=1))[0][0].ugraph
    schedule = next(iter(schedules(place_kernels(ugraph)[0])))
    program = triton.generate(ugraph, [schedule])
    inputs = [torch.ones(1, 256), torch.arange(256).to(torch.uint8)[None]]
    (y,) = compiler.load(program.source, program.digest).run(inputs)
    return torch.where(y.isnan(), -1.0, y)[0].tolist()


def main() -> None:
    """Print the errors of all cases as JSON."""
    errors: dict[str, Any] = {name: errors_of(make()) for name, make in CASES.items()}
    errors["powers of two"] = converted_powers()
    errors |= {f"bytes: {name}": errors_of_bytes(make()) for name, make in BYTES.items()}
    errors |= {f"every {d}": every_byte(d) for d in ("int8", "uint8", "float8_e4m3fn")}
    errors |= {f"trips: {name}": errors_in_trips(make()) for name, make in TRIPS.items()}
    errors |= {f"along words, {rows} rows": errors_along_words(rows) for rows in (1, 16)}
    print(json.dumps(errors))
