"""Run generated programs through Triton's interpreter, for the tests of their text.

The script prints one JSON object. For each case it has the error of each output and the error
allowed, or the exception.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.block import Role
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.execute_block import run_block_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.tune import space
from tests.helpers import kernel_cases


def run(
    ugraph: UGraph, schedules: Sequence[Schedule], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    program = triton.generate(ugraph, schedules)
    return compiler.load(program.source, program.digest).run(inputs)


def compare(ugraph: UGraph, schedules: Sequence[Schedule]) -> dict:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.empty_strided(t.dims, t.strides, dtype=t.dtype).normal_(generator=generator)
        for t in ugraph.program.inputs
    ]
    try:
        ours = run(ugraph, schedules, inputs)
    except Exception as e:  # reported by the test that reads this
        return {"raised": f"{type(e).__name__}: {e}"[-2000:]}
    executed = (
        run_block_graph(ugraph.block_ops[0].block, inputs, TorchAlgebra(torch.float64), 2)
        if len(schedules) == 1
        else run_kernel_graph(ugraph.kernels, inputs, torch.float64)
    )
    found = []
    for y, exact, stock, same in zip(
        ours,
        run_kernel_graph(ugraph.program, inputs, torch.float64),
        run_kernel_graph(ugraph.program, inputs),
        executed,
        strict=True,
    ):
        ulp = torch.finfo(y.dtype).eps * exact.abs().max().item()
        allowed = 1.25 * (stock.double() - exact).abs().max().item() + ulp
        error, from_block = ((y.double() - z).abs().max().item() for z in (exact, same))
        found.append({"error": error, "from_block": from_block, "allowed": allowed})
    return {"outputs": found}


def shared_unevenly(ugraph: UGraph) -> list[Schedule]:
    """Return schedules of a kernel whose blocks get unequal parts of a loop.

    One for each kind of product, number of blocks, and tile of the loop.
    """
    (op,) = ugraph.block_ops
    (loop,) = op.block.named(Role.LOOP)
    found = {}
    for s in space.schedules(op):
        if -(-loop.size // s.tiles[loop.name]) % s.cooperating_blocks:
            found.setdefault((s.mma, s.cooperating_blocks, s.tiles[loop.name]), s)
    return [*found.values()]


HARD = [
    0.0,
    -0.0,
    1e-30,
    -1e-6,
    1e-3,
    0.1,
    -0.24,
    0.26,
    0.5,
    -1.0,
    1.5,
    2.0,
    -3.0,
    4.0,
    9.7,
    -20.0,
    45.0,
    88.0,
    -88.0,
    100.0,
    -104.0,
    700.0,
    -1e4,
    6e4,
    1e9,
    -1e30,
    1e38,
    math.inf,
    -math.inf,
    math.nan,
]


def elementwise(fn: str) -> dict:
    """Run an op on hard numbers, in pairs if it has two operands.

    Return the worst relative error, and where finiteness or NaN differ from torch.
    """
    row = table.lookup(fn)
    attrs = {
        "clamp": {"min": -1.5, "max": 2.5},
        "cast": {"dtype": "float32"},
        "lookup": {"values": (0.5, -1.5, 0.0, 2.0)},
        "bits": {"count": 2},
    }.get(fn, {})
    x = torch.tensor(HARD)
    args = (
        [x]
        if row.arity[0] == 1
        else [a.reshape(-1).contiguous() for a in torch.meshgrid(x, x, indexing="ij")]
    )
    args += [args[0].flip(0)] * (row.arity[0] - 2)
    tile = 1024
    ours = run(
        kernel_cases.elementwise(fn, len(args[0]), attrs, len(args)),
        [Schedule({"m": tile})],
        args,
    )[0]
    want = row.oracle(*args, **attrs)
    ordinary = want.isfinite() & (want.abs() > 1e-30)
    relative = ((ours - row.oracle(*(a.double() for a in args), **attrs)) / want)[ordinary].abs()
    unequal = (ours != want) & ~ordinary & ~want.isnan() & (want.abs() > 1e-30)
    differs = ((ours.isnan() != want.isnan()) | unequal).nonzero().flatten().tolist()
    worst = int(relative.argmax()) if len(relative) else 0
    at = [float(a[ordinary][worst]) for a in args]
    return {
        "relative": float(relative.max()) if len(relative) else 0.0,
        "at": at,
        "differs": [
            [float(a[i]) for a in args] + [float(ours[i]), float(want[i])] for i in differs[:6]
        ],
    }


def hard_numbers() -> dict:
    """Compare attention and softmax with running maxima with torch in float32 and float64."""
    shape = dict(heads=2, q=3, keys=75, d=32)
    whole = dict(h=1, m=16, s=16, d=32)
    tiles = dict(h=1, m=4, p=4, d=32)
    attention = {
        "online": (1, [Schedule(whole | {"m": 4})]),
        "online mma": (1, [Schedule(whole, mma=True)]),
        "split": (
            4,
            [
                Schedule(whole | {"m": 4, "p": 1, "s": 8}),
                Schedule(tiles),
            ],
        ),
        "split mma": (
            4,
            [
                Schedule(whole | {"p": 1}, mma=True),
                Schedule(tiles | {"p": 2}),
            ],
        ),
    }
    softmax = [
        Schedule({"m": 2, "p": 1, "n": 8}),
        Schedule({"m": 2, "p": 1, "n": 8, "t": 4}),
    ]
    found = {}
    for name in ("huge scores", "masked tiles", "masked rows", "infinite", "one NaN"):
        for kind, (parts, schedules) in attention.items():
            dtype = torch.float16 if "mma" in kind else torch.float32
            ugraph = kernel_cases.online_attention(
                **shape, parts=parts, dtype=dtype, bias=True, scaling=1.0
            )
            found[f"{kind}: {name}"] = _judge(
                ugraph, schedules, kernel_cases.attention_inputs(name, dtype, **shape)
            )
        row = [kernel_cases.attention_inputs(name, torch.float32, **shape)[3][0].contiguous()]
        found[f"softmax: {name}"] = _judge(
            kernel_cases.split_softmax(3, 75, 4, torch.float32), softmax, row
        )
    return found


def _judge(ugraph: UGraph, schedules: Sequence[Schedule], inputs: list[torch.Tensor]) -> dict:
    try:
        (ours,) = run(ugraph, schedules, inputs)
    except Exception as e:  # reported by the test that reads this
        return {"raised": f"{type(e).__name__}: {e}"[-2000:]}
    (exact,) = run_kernel_graph(ugraph.program, inputs, torch.float64)
    (single,) = run_kernel_graph(ugraph.program, [x.float() for x in inputs], torch.float32)
    there = exact.isfinite()
    scale = exact[there].abs().max().item() * torch.finfo(ours.dtype).eps
    error, stock = ((y.double() - exact)[there].abs().max().item() for y in (ours, single))
    return {
        "same_finite": torch.equal(ours.isfinite(), there),
        "error": error,
        "allowed": 2 * stock + 4 * scale,
    }


def powers() -> dict:
    """Return the largest relative error of x ** n and n ** x for numbers n."""
    found = {}
    for what, of in {
        "x ** 1.5": lambda g, x: g.pow(x, 1.5),
        "2 ** x": lambda g, x: g.pow(2.0, x),
        "x ** 0": lambda g, x: g.pow(x, 0),
        "sum ** -2.5": lambda g, x: g.pow(g.reduction(x, 1), -2.5),
    }.items():
        g, x = KernelGraph(), torch.rand(3, 20) + 0.1
        of(g, g.new_input((3, 20), "float32"))
        (exact,) = run_kernel_graph(g, [x], torch.float64)
        ugraph = next(u for u in g.superoptimize(backend="cpu") if u.is_fused)
        found[what] = ((run(ugraph, ugraph.schedules, [x])[0] - exact) / exact).abs().max().item()
    return found


def nan_of_maxima() -> dict:
    """Tell which rows of softmax are NaN if one row has a NaN.

    The row is held whole, walked, or walked with a lazy maximum.
    """
    x = torch.randn(3, 100, dtype=torch.float16)
    x[1, 40] = math.nan
    kinds = {
        "tile": (False, dict(m=2, n=128), True),
        "loop": (True, dict(m=2, n=16), False),
        "lazy loop": (True, dict(m=2, n=16), True),
    }
    return {
        kind: run(kernel_cases.row_maximum(walk), [Schedule(tiles, reduce_after_loop=lazy)], [x])[0]
        .isnan()
        .flatten()
        .tolist()
        for kind, (walk, tiles, lazy) in kinds.items()
    }


def main() -> None:
    results = {
        c.name: compare(c.ugraph, c.schedules) for c in kernel_cases.cases() if c.interpreted
    }
    tuned = {
        "norm linear": kernel_cases.rms_norm_linear(3, 100, 37),
        "gated mlp": kernel_cases.gated_mlp(1, 128, 48),
        "lora": kernel_cases.lora(2, 96, 40, 8),
        "softmax": kernel_cases.softmax(5, 300),
        "joined": kernel_cases.norm_qkv(1, 96, (32, 16, 16)),
        "batched": kernel_cases.batched_matmul(2, 3, 40, 24),
    }
    for name, ugraph in tuned.items():
        for n, schedule in enumerate(space.schedules(ugraph.block_ops[0], limit=6)):
            results[f"space: {name} {n}"] = compare(ugraph, [schedule]) | {
                "schedule": str(schedule)
            }
    linear = kernel_cases.rms_norm_linear(1, 800, 96)
    for n, schedule in enumerate(shared_unevenly(linear)):
        results[f"uneven: {n}"] = compare(linear, [schedule]) | {"schedule": str(schedule)}
    ops = {fn: elementwise(fn) for fn, row in table.OPS.items() if row.kind == "elementwise"}
    print(
        json.dumps(
            {
                "cases": results,
                "ops": ops,
                "hard": hard_numbers(),
                "nan": nan_of_maxima(),
                "powers": powers(),
            }
        )
    )
