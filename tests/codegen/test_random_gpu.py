"""Random kernels on a GPU: results of searches, and random block graphs without a search."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import OutOfResources

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.execute_block import run_block_graph
from mirage_hf.graph.ugraph import UGraph
from tests.helpers import random_block_graphs, random_searched_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(1000, 9000, 1000))
def test_what_is_found_for_random_programs(seed):
    """There are 320 µGraphs in all."""
    tried = [
        (name, random_searched_kernels.complaint(ugraph, schedules, "cuda"))
        for name, ugraph, schedules in random_searched_kernels.cases(40, seed)
    ]
    wrong = [t for t in tried if t[1]]
    assert not wrong, f"{len(wrong)} of 40:\n" + "\n".join(map(str, wrong[:5]))


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_random_block_graphs(seed):
    """There are 400 block graphs in all."""
    wrong = []
    for number, graph, schedule in random_block_graphs.random_cases(50, 20_000 + seed):
        block, inputs = graph.ops[0].block, random_block_graphs.random_inputs(graph, number)
        lengths = [
            1 + sum((d - 1) * s for d, s in zip(x.shape, x.stride(), strict=True)) for x in inputs
        ]
        there = [
            x.as_strided((n,), (1,)).cuda().as_strided(x.shape, x.stride())
            for x, n in zip(inputs, lengths, strict=True)
        ]
        program = triton.generate(UGraph(graph, graph), [schedule])
        try:
            ours = [y.cpu() for y in compiler.load(program.source, program.digest).run(there)]
        except OutOfResources:  # a random schedule may need more shared memory than there is
            continue
        except Exception as e:
            wrong.append((number, str(schedule), f"{type(e).__name__}: {e}"[-300:]))
            continue
        rounded = inputs[0].dtype if schedule.mma and inputs[0].dtype.itemsize == 2 else None
        for y, exact, plain in zip(
            ours,
            run_block_graph(block, inputs, TorchAlgebra(torch.float64), 2),
            run_block_graph(block, inputs, TorchAlgebra(torch.float32, rounded)),
            strict=True,
        ):
            allowed = 3 * random_block_graphs.relative_error(plain, exact) + (
                4e-3 if y.dtype is torch.float16 or schedule.mma else 1e-4
            )
            if not random_block_graphs.relative_error(y, exact) <= allowed:
                wrong.append(
                    (
                        number,
                        str(schedule),
                        f"{random_block_graphs.relative_error(y, exact):.3g}, {allowed:.3g} is "
                        "allowed",
                    )
                )
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(map(str, wrong[:5]))
