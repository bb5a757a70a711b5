"""Decoding attention on a GPU, compared with float64.

The programs have rotations, norms, new keys beside a cache, sinks and softcap.
"""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import OutOfResources

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.tune import space
from tests.codegen import test_rope, test_shifts

pytestmark = pytest.mark.gpu

SIZES = (
    (8, 4, 64, 4096),
    (8, 4, 128, 1000),
    (2, 7, 64, 300),
    (4, 1, 80, 129),
    (16, 8, 96, 513),
    (1, 4, 256, 77),
)
DECODING = {
    f"{heads}x{group} d{d} {keys} keys {kind} {dtype}": dict(
        heads=heads, group=group, d=d, keys=keys, dtype=dtype, **more
    )
    for heads, group, d, keys in SIZES
    for dtype in ("float16", "bfloat16")
    for kind, more in (
        ("plain", dict(rope=True)),
        ("normed", dict(rope=True, norm=True)),
        ("sink", dict(sink=True, new=2)),
        ("softcap", dict(softcap=30.0)),
    )
}


def run_all(g: KernelGraph, schedules: int = 6) -> list[str]:
    """Return what is wrong with the generated kernels, or nothing if they are right.

    The first µGraphs run, each with some schedules of the space.
    """
    wrong, ran = [], 0
    for f in test_shifts.found_of(g)[:4]:
        ranked = [space.schedules(op, limit=24) for op in place_kernels(f.ugraph)]
        for n in range(0, min(map(len, ranked)), max(1, min(map(len, ranked)) // schedules)):
            chosen = [r[n] for r in ranked]
            try:
                program = triton.generate(f.ugraph, chosen)
                module = compiler.load(program.source, program.digest)
            except errors.CodegenError:
                continue
            for scale in (1.0, 20.0):
                host = test_shifts.inputs_of(g, scale)
                inputs = [x.cuda() for x in host]
                want = run_kernel_graph(
                    g, [x.double() if x.is_floating_point() else x for x in host], torch.float64
                )
                try:
                    got = [y.cpu() for y in module.run(inputs)]
                except OutOfResources:  # a schedule may need more shared memory than there is
                    break
                error, torchs = (
                    test_shifts.error_of(got, want),
                    test_shifts.error_of([y.cpu() for y in run_kernel_graph(g, inputs)], want),
                )
                ran += 1
                # torch loses as much when it rotates large numbers and rounds them to 16 bits
                # before the product
                if not error < max(
                    4e-2 if g.inputs[0].dtype is torch.bfloat16 else 6e-3, 1.25 * torchs
                ):
                    wrong.append(
                        f"{[*map(str, chosen)]} scale {scale}: {error:.3g}, torch {torchs:.3g}"
                    )
    assert ran
    return wrong


@pytest.mark.parametrize("name", DECODING)
def test_decoding(name):
    assert not run_all(test_shifts.decoding(**DECODING[name]))


@pytest.mark.parametrize("name", test_rope.PROGRAMS | test_shifts.PROGRAMS)
def test_small_programs(name):
    g = (test_rope.PROGRAMS | test_shifts.PROGRAMS)[name]
    if name in test_shifts.PROGRAMS:
        assert not run_all(g)
        return
    host = test_rope.inputs_of(g)
    want = run_kernel_graph(
        g, [x.double() if x.is_floating_point() else x for x in host], torch.float64
    )
    for f in test_rope.found_of(g)[:3]:
        program = triton.generate(f.ugraph)
        got = [
            y.cpu()
            for y in compiler.load(program.source, program.digest).run([x.cuda() for x in host])
        ]
        assert test_shifts.error_of(got, want) < 6e-3
