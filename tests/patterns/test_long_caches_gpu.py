"""Decoding attention on a GPU at the limits of its range, compared with float64.

Caches have one key to 128k, batches up to 64 rows, head dims are 64 to 256.
"""

from __future__ import annotations

import functools

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.graph import symbolic
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.patterns import attention
from mirage_hf.pipeline.resize import cut_to
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import space
from mirage_hf.verify.case_inputs import copied
from tests.helpers.tolerances import as_close_as

pytestmark = pytest.mark.gpu

CASES = {
    "128k keys, d 128": (1, 8, 4, 128, 131072, torch.bfloat16),
    "128k keys, d 64, 2 sequences": (2, 2, 4, 64, 131072, torch.float16),
    "128k keys, d 256": (1, 1, 4, 256, 131072, torch.bfloat16),
    "32k keys, 8 sequences": (8, 2, 4, 128, 32768, torch.bfloat16),
    "64 sequences": (64, 2, 4, 64, 4096, torch.bfloat16),
    "64 sequences, 16 queries a key": (64, 1, 16, 128, 2048, torch.float16),
    "d 80": (2, 2, 4, 80, 5000, torch.bfloat16),
    "d 80, float16": (2, 2, 1, 80, 1030, torch.float16),
    "d 96": (2, 2, 2, 96, 3001, torch.float16),
    "d 192": (1, 2, 4, 192, 8192, torch.bfloat16),
    "d 256": (3, 1, 1, 256, 1000, torch.float16),
    "one key": (1, 2, 4, 128, 2, torch.bfloat16),
}
"""Sequences, heads of keys, queries of each, head dim, slots, dtype."""


@functools.cache
def found(name: str) -> list[UGraph]:
    """Return µGraphs of one kernel, and of two that combine splits.

    They are searched for a short cache, and resized to the length at which long caches are tuned.
    """
    searched = search_and_verify(
        program(name, attention.REFERENCE_SLOTS), SearchOptions(time_limit=20)
    )
    resized = [
        symbolic.for_program(c.ugraph, program(name, attention.LONG_SLOTS))
        for c in searched.candidates
    ]
    first = {u.num_kernels: u for u in reversed(resized) if not space.obstacle(u.block_ops)}
    return [first[n] for n in (1, 2) if n in first]


def program(name: str, slots: int | None = None):
    rows, kv_heads, group, d, longest, dtype = CASES[name]
    return attention.build(rows, kv_heads, group, d, d**-0.5, "", 1e-6, dtype, slots or longest)


def inputs_of(g, lo: int, slot: int) -> list[torch.Tensor]:
    """Return random inputs. Every second sequence is one key shorter if possible.

    Cosine and sine belong to real angles.
    """
    generator = torch.Generator("cuda").manual_seed(7)
    inputs = {}
    for t in g.inputs:
        x = torch.empty_strided(t.dims, t.strides, dtype=t.dtype, device="cuda")
        inputs[t.name] = (
            x.normal_(generator=generator)
            if t.dtype.is_floating_point
            else x.fill_(lo if t.name == "lo" else slot)
        )
    inputs["slot"][1::2] -= int(slot > lo)
    angles = inputs["cos"].float()
    inputs["cos"].copy_(angles.cos())
    inputs["sin"].copy_(angles.sin())
    return list(inputs.values())


def schedules_of(u: UGraph):
    """Return the best schedule of each kind, and some that rank lower."""
    ranked = [space.schedules(op, limit=24) for op in place_kernels(u)]
    for n in {
        0,
        *(next((n for n, s in enumerate(ranked[0]) if s.mma == mma), 0) for mma in (False, True)),
        7,
        13,
    }:
        yield [r[min(n, len(r) - 1)] for r in ranked]


@pytest.mark.parametrize("name", CASES)
def test_attention_is_right_at_the_edges(name):
    g, slots, ran = program(name), CASES[name][4], []
    runs = {}
    for u in found(name):
        for schedules in schedules_of(u):
            ugraph, cut = cut_to(u, schedules, g)
            p = triton.generate(ugraph, cut)
            runs["; ".join(map(str, cut))] = compiler.load(p.source, p.digest).run
    for lo, slot in {(0, slots - 1), (0, slots // 3), (slots // 2, slots - 1), (0, 1), (0, 0)}:
        inputs = inputs_of(g, lo, slot)
        exact = run_kernel_graph(
            g, [x.double() if x.is_floating_point() else x for x in inputs], torch.float64
        )
        stock = run_kernel_graph(g, copied(inputs))
        for how, run in runs.items():
            as_close_as(
                run(copied(inputs)),
                stock,
                exact,
                f"{name}: bounds [{lo}, {slot}) of {slots} slots, seed 7, {how}",
            )
            ran.append(how)
    assert len(ran) >= 10
