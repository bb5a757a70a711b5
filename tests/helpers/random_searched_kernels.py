"""Generated kernels of the µGraphs that the search finds for random programs.

Tests run them on a GPU or through Triton's interpreter.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import space
from mirage_hf.verify.accept import Candidate, accept
from tests.helpers import random_block_graphs, triton_interpreter
from tests.search.test_fusable_dags import dag

SEARCH = SearchOptions(time_limit=0.6, threads=1, max_candidates=4, max_cuts=2, max_kernels=3)


#: Most steps (blocks times loop steps) of one kernel in the interpreter, about 1 ms each.
STEPS = 4000


def cases(
    count: int, seed: int, steps: float = math.inf
) -> Iterator[tuple[str, UGraph, tuple[Schedule, ...]]]:
    """Yield `count` found µGraphs with random schedules among the best of the space.

    Loops are shared among blocks if possible. A µGraph is left out if a kernel takes more than
    `steps` steps.
    """
    found, number = 0, seed
    while found < count:
        r = random.Random(number)
        program = dag(r)
        for k, c in enumerate(accept(search(program, SEARCH)[0], keep=4).candidates):
            if found < count and not space.obstacle(c.ugraph.block_ops):
                schedules = tuple(_schedule(op, c, r) for op in place_kernels(c.ugraph))
                if all(
                    c.allows(s.mma) and _steps(op, s) <= steps
                    for op, s in zip(place_kernels(c.ugraph), schedules, strict=True)
                ):
                    yield f"{number}.{k}", c.ugraph, schedules
                    found += 1
        number += 1


def _schedule(op, c: Candidate, r: random.Random) -> Schedule:
    chosen = r.choice(
        [s for s in space.schedules(op, limit=24) if c.allows(s.mma)]
        or space.schedules(op, limit=1)
    )
    for split in r.sample((2, 4), 2):
        try:
            return plan_kernel(op, replace(chosen, cooperating_blocks=split)).schedule
        except errors.CodegenError:
            continue
    return chosen


def _steps(op: KernelOp, schedule: Schedule) -> int:
    p = plan_kernel(op, schedule)
    return p.grid * sum(p.tiling.trips(s.loop) if s.loop else 1 for s in p.tiling.block.stages)


def inputs_of(program: KernelGraph, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = [max(t.dims[0], 1) ** -0.5 if t.dims[0] > 16 else 1.0 for t in program.inputs]
    return [
        (torch.randn(t.dims, generator=generator) * s).to(t.dtype).to(device)
        for t, s in zip(program.inputs, scales, strict=True)
    ]


def complaint(ugraph: UGraph, schedules: tuple[Schedule, ...], device: str) -> str:
    """Return what is wrong with the results of the generated kernels, or an empty text."""
    inputs = inputs_of(ugraph.program, device)
    try:
        program = triton.generate(ugraph, schedules)
        ours = compiler.load(program.source, program.digest).run(inputs)
    except Exception as e:
        return f"{[*map(str, schedules)]}: {type(e).__name__}: {e}"[-800:]
    exact = run_kernel_graph(ugraph.kernels, inputs, torch.float64)
    plain, rounded = (run_kernel_graph(graph, inputs) for graph in (ugraph.program, ugraph.kernels))
    for y, z, p, q in zip(ours, exact, plain, rounded, strict=True):
        z = torch.where(z.abs() < 6e4, z, torch.inf)  # beyond float16
        allowed = (
            3
            * max(
                random_block_graphs.relative_error(p, z), random_block_graphs.relative_error(q, z)
            )
            + 1e-2
        )
        if not random_block_graphs.relative_error(y, z) <= allowed:
            error = f"relative error {random_block_graphs.relative_error(y, z):.3g}"
            return f"{[*map(str, schedules)]}: {error}, {allowed:.3g} is allowed"
    return ""


def main(count: int, seed: int) -> None:
    tried = [
        (
            name,
            complaint(ugraph, schedules, "cpu"),
            any(s.cooperating_blocks > 1 for s in schedules),
            any(s.mma for s in schedules),
        )
        for name, ugraph, schedules in cases(count, seed, STEPS)
    ]
    print(
        json.dumps(
            {
                "ran": len(tried),
                "with_splits": sum(t[2] for t in tried),
                "with_dots": sum(t[3] for t in tried),
                "wrong": [t[:2] for t in tried if t[1]],
            }
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    triton_interpreter.quicken()
    main(int(sys.argv[1]), int(sys.argv[2]))
