"""Kernels that scale 4-bit floats (e2m1), or integers, by powers of two before they sum them.

Tensor cores sum several groups in one product.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

import mirage_hf as mi
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.dtypes import E2M1
from tests.helpers.coded_programs import _Exact
from tests.helpers.scaled_programs import mutant_errors, scaled_form, scaled_schedules

#: Codes of a group.
GROUP = 32

#: The experts of programs, and which one each block of rows takes. The last one does not exist.
EXPERTS, TAKEN = 3, (2, 0, 1, 2)


def mxfp4_linear(
    rows: int,
    columns: int,
    width: int,
    *,
    norm: bool = False,
    integers: bool = False,
    dtype: str = "bfloat16",
) -> KernelGraph:
    """Return x · Wᵀ for W = e2m1(code) · 2^(byte − 127), in groups of 32 columns.

    With `integers`, W is (code − 8) · 2^(byte − 127).
    """
    g = mi.new_graph()
    groups = width // GROUP
    x = g.new_input((rows, width), dtype, name="x")
    if norm:
        x = g.rms_norm(x, g.new_input((1, width), dtype, name="weight", constant=True))
    codes = g.new_input((columns, groups, GROUP), "uint4", name="codes", constant=True)
    scales = g.new_input((columns, groups, 1), "float8_e8m0fnu", name="scales", constant=True)
    numbers = g.cast(codes, "float32")
    numbers = g.sub(numbers, 8.0) if integers else g.lookup(numbers, values=E2M1)
    w = g.cast(g.mul(numbers, g.cast(scales, "float32")), dtype)
    g.mark_output(g.matmul(x, g.permute(g.reshape(w, (columns, width)), (1, 0))))
    return g


def mxfp4_experts(rows: int, columns: int, width: int) -> KernelGraph:
    """Return the same for blocks of rows that take the weights of an expert each, by an index."""
    g = mi.new_graph()
    groups, blocks = width // GROUP, len(TAKEN)
    index = g.new_input((blocks, 1), "int64", name="index")
    x = g.new_input((blocks, 1, rows, width), "bfloat16", name="x")
    codes = g.new_input((EXPERTS, columns, groups, GROUP), "uint4", name="codes", constant=True)
    dims = (EXPERTS, columns, groups, 1)
    scales = g.new_input(dims, "float8_e8m0fnu", name="scales", constant=True)
    numbers = g.lookup(g.take(g.cast(codes, "float32"), index, dim=0), values=E2M1)
    w = g.cast(g.mul(numbers, g.take(g.cast(scales, "float32"), index, dim=0)), "bfloat16")
    w = g.permute(g.reshape(w, (blocks, 1, columns, width)), (0, 1, 3, 2))
    g.mark_output(g.matmul(x, w))
    return g


#: Programs by name. Five and eleven groups are no multiple of a step of two or four.
PROGRAMS = {
    "16 rows": lambda: mxfp4_linear(16, 32, 256),
    "16 rows, norm": lambda: mxfp4_linear(16, 32, 256, norm=True),
    "3 rows": lambda: mxfp4_linear(3, 32, 256),
    "16 rows, five groups": lambda: mxfp4_linear(16, 32, 160),
    "32 rows, eleven groups": lambda: mxfp4_linear(32, 48, 352),
    "16 rows, integers": lambda: mxfp4_linear(16, 32, 256, integers=True),
    "experts": lambda: mxfp4_experts(16, 32, 160),
}


def errors_of(g: KernelGraph) -> list[tuple[int, bool, int, float, float]]:
    """Return (groups a step, weights first, stages, error, eager's error) of kernels."""
    exact, ugraph = _Exact(g), scaled_form(g)
    results = []
    for s in dict.fromkeys(scaled_schedules(ugraph)):
        program = triton.generate(ugraph, [s])
        assert "_pairs(tl" in program.source and "e8m0_as_bfloat16(" in program.source
        error = exact.error_of(program)
        results.append((s.tiles["k"], s.weights_first, s.num_stages, error, exact.allowed))
    return results


def one_hot_schedule(ugraph: UGraph, groups: int) -> Schedule:
    """Return a schedule that sums so many groups in a step."""
    (op,) = place_kernels(ugraph)
    assert op.block is not None
    tiles = {a.name: {"k": groups, "m": 16, "n": 16}.get(a.name, a.size) for a in op.block.axes}
    return Schedule(tiles, mma=True, num_warps=1, num_stages=3)


#: Numbers of the bytes of scales whose products with all codes are finite: up to 2^125.
FINITE = 253


def wrong_weights(steps: Sequence[int] = (2, 4)) -> list[list[int]]:
    """Return what kernels decode wrongly, as [groups a step, scale, code].

    Row number e of x has a 1 at code number e of one group, so the outputs are weights. Column n of
    the weights has the scale 2^(n − 127). The codes of each group are all codes, in another order.
    Weights are compared with float64, because torch's product makes subnormal factors 0.
    """
    groups = 4
    g = mxfp4_linear(16, 256, groups * GROUP)
    ugraph = scaled_form(g)
    codes = (torch.arange(GROUP) + torch.arange(groups)[:, None]) % 16
    words = (codes.view(groups, 4, 8) << torch.arange(0, 32, 4)).sum(-1)
    words = words.to(torch.int32).expand(256, groups, 4).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).repeat(1, groups, 1)
    wrong = []
    for step, half, group in ((s, h, k) for s in steps for h in (0, 16) for k in range(groups)):
        x = torch.zeros(16, groups, GROUP, dtype=torch.bfloat16)
        x[:, group, half : half + 16] = torch.eye(16)
        program = triton.generate(ugraph, [one_hot_schedule(ugraph, step)])
        inputs = {"x": x.view(16, -1), "codes": words, "scales": scales}
        given = [inputs[t.name] for t in g.inputs]
        ours = compiler.load(program.source, program.digest).run(given)[0]
        wanted = run_kernel_graph(g, given, torch.float64)[0]
        same = ours.double() == wanted
        same[:, FINITE:255] = True  # products of other rows are 0 · inf
        same[:, 255] = ours[:, 255].isnan()
        at = (~same).nonzero().tolist()
        wrong += [[step, n, int(codes[group, half + m])] for m, n in at]
    return wrong


#: Changes of the text of a kernel, by name: what is replaced, and by what.
CHANGES = {
    "no scale": (" * e8m0_as_bfloat16(scales)[:, :, None]", " * 1.0"),
    "the scale of the next group": ("* 8 + k_next[None, :]", "* 8 + (k_next[None, :] + 1) % 8"),
    "another bias": ("* 2.0**126", "* 2.0**125"),
    "no sign": ("pair & 0x81C081C0", "pair & 0x01C001C0"),
    "no mantissa": ("pair & 0x81C081C0", "pair & 0x81808180"),
    "the first nibble instead of the second": (") * 0x0104", ") * 0x0040"),
    "scales twice as large": ("(x.to(tl.int16) << 7)", "((x.to(tl.int16) + 1) << 7)"),
}


def instructions_of() -> tuple[UGraph, Schedule, int, int]:
    """Return a kernel of experts, its schedule, its steps, and the codes of each thread."""
    width, columns, groups, warps = 2880, 128, 4, 4
    ugraph = scaled_form(mxfp4_experts(16, 2880, width))
    (op,) = place_kernels(ugraph)
    assert op.block is not None
    sizes = {"b": 1, "k": groups, "m": 16, "n": columns}
    tiles = {a.name: sizes.get(a.name, a.size) for a in op.block.axes}
    schedule = Schedule(tiles, mma=True, num_warps=warps, num_stages=3)
    steps = -(-width // (groups * GROUP))
    return ugraph, schedule, steps, columns * width // (32 * warps)


def main() -> None:
    """Print the errors of all programs and mutants as JSON."""
    errors: dict[str, object] = {name: errors_of(make()) for name, make in PROGRAMS.items()}
    errors["wrong weights"] = wrong_weights()
    print(json.dumps(errors | {"mutants": mutant_errors(PROGRAMS["16 rows"](), CHANGES)}))
