"""Runs generated programs through Triton's interpreter; the tests start it as a process of its own, once.

Prints one JSON object: for each case the error of each output, the error allowed, or what was raised.
"""
from __future__ import annotations

import json
import math
import os

os.environ["TRITON_INTERPRET"] = "1"

import blocks
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.execute import TorchAlgebra, run_block_graph, run_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.tune import space


def run(ugraph: UGraph, schedule: Schedule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    program = triton.generate(ugraph, [schedule])
    return compiler.load(program.source, program.digest).run(inputs)


def compare(ugraph: UGraph, schedule: Schedule) -> dict:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.empty_strided(t.dims, t.strides, dtype=t.dtype).normal_(generator=generator) for t in ugraph.program.inputs]
    try:
        ours = run(ugraph, schedule, inputs)
    except Exception as e:  # reported by the test that reads this
        return {"raised": f"{type(e).__name__}: {e}"[-2000:]}
    block = ugraph.block_ops[0].block
    executed = run_block_graph(block, inputs, TorchAlgebra(torch.float64), 2)
    found = []
    for y, exact, stock, same in zip(ours, run_kernel_graph(ugraph.program, inputs, torch.float64),
                                     run_kernel_graph(ugraph.program, inputs), executed, strict=True):
        ulp = torch.finfo(y.dtype).eps * exact.abs().max().item()
        allowed = 1.25 * (stock.double() - exact).abs().max().item() + ulp
        error, from_block = ((y.double() - z).abs().max().item() for z in (exact, same))
        found.append({"error": error, "from_block": from_block, "allowed": allowed})
    return {"outputs": found}


HARD = [0.0, -0.0, 1e-30, -1e-6, 1e-3, 0.1, -0.24, 0.26, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 9.7, -20.0, 45.0, 88.0, -88.0, 100.0, -104.0,
        700.0, -1e4, 6e4, 1e9, -1e30, 1e38, math.inf, -math.inf, math.nan]


def elementwise(fn: str) -> dict:
    """Each op on hard numbers, in pairs for two operands: the worst relative error, and where finiteness or NaN differ."""
    row = table.lookup(fn)
    attrs = {"min": -1.5, "max": 2.5} if fn == "clamp" else {"dtype": "float32"} if fn == "cast" else {}
    x = torch.tensor(HARD)
    args = [x] if row.arity[0] == 1 else [a.reshape(-1).contiguous() for a in torch.meshgrid(x, x, indexing="ij")]
    tile = 1024
    ours = run(blocks.elementwise(fn, len(args[0]), attrs, len(args)), Schedule((("m", tile),)), args)[0]
    want = row.oracle(*args, **attrs)
    ordinary = want.isfinite() & (want.abs() > 1e-30)
    relative = ((ours - row.oracle(*(a.double() for a in args), **attrs)) / want)[ordinary].abs()
    unequal = (ours != want) & ~ordinary & ~want.isnan() & (want.abs() > 1e-30)
    differs = ((ours.isnan() != want.isnan()) | unequal).nonzero().flatten().tolist()
    worst = int(relative.argmax()) if len(relative) else 0
    at = [float(a[ordinary][worst]) for a in args]
    return {"relative": float(relative.max()) if len(relative) else 0.0, "at": at,
            "differs": [[float(a[i]) for a in args] + [float(ours[i]), float(want[i])] for i in differs[:6]]}


def main() -> None:
    torch.set_num_threads(1)
    results = {c.name: compare(c.ugraph, c.schedule) for c in blocks.cases() if c.interpreted}
    tuned = {"norm linear": blocks.rms_norm_linear(3, 100, 37), "gated mlp": blocks.gated_mlp(1, 128, 48),
             "lora": blocks.lora(2, 96, 40, 8), "softmax": blocks.softmax(5, 300), "joined": blocks.norm_qkv(1, 96, (32, 16, 16)),
             "batched": blocks.batched_matmul(2, 3, 40, 24)}
    for name, ugraph in tuned.items():
        for n, schedule in enumerate(space.schedules(ugraph.block_ops[0], limit=6)):
            results[f"space: {name} {n}"] = compare(ugraph, schedule) | {"schedule": str(schedule)}
    ops = {fn: elementwise(fn) for fn, row in table.OPS.items() if row.kind == "elementwise"}
    print(json.dumps({"cases": results, "ops": ops}))


if __name__ == "__main__":
    main()
