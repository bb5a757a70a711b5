"""Attention over long caches.

Splits share the keys within bounds, partial results are added in pieces, and no registers spill.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from dataclasses import replace

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.errors import CodegenError
from mirage_hf.gpus import H200
from mirage_hf.graph import symbolic
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import new_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.patterns import attention
from mirage_hf.patterns.masked_attention import MASKED_ATTENTION
from mirage_hf.pipeline.resize import cut_to
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.split_appends import split_appends
from mirage_hf.tune import ranking, space
from mirage_hf.tune.cost import estimate
from mirage_hf.tune.refit import PIPELINED
from tests.helpers import triton_interpreter

LONG = 131072


def program(
    slots: int,
    d: int = 16,
    rows: int = 1,
    kv_heads: int = 2,
    group: int = 4,
    dtype: torch.dtype = torch.float16,
):
    return attention.build(rows, kv_heads, group, d, d**-0.5, "", 1e-6, dtype, slots)


@functools.cache
def searched(d: int, **sizes: int) -> list[UGraph]:
    """Return the µGraphs found for a short cache, cheapest first."""
    taken = split_appends(program(256, d, **sizes))
    assert taken is not None
    return [
        taken.join(f.ugraph)
        for f in search(taken.graph, SearchOptions(time_limit=20, threads=1, max_width=1))[0]
    ]


def found(d: int, kernels: int, **sizes: int) -> UGraph:
    """Return the first µGraph of one kernel, or of two kernels.

    Of two kernels, the second combines partial results.
    """
    return next(
        u
        for u in searched(d, **sizes)
        if u.num_kernels == kernels and (kernels == 1 or walks_in_parts(u))
    )


def walks_in_parts(u: UGraph) -> bool:
    return any(a.role is Role.LOOP and a.split_axis for a in u.block_ops[0].block.axes)


def spilled(ptx: str, sm: int) -> tuple[int, int]:
    """Return the registers of a thread and the bytes that it spills, as ptxas reports them."""
    from triton.backends.nvidia.compiler import get_ptxas

    told = subprocess.run(
        [get_ptxas(sm).path, "-v", f"--gpu-name=sm_{sm}{'a' * (sm >= 90)}", "-o", os.devnull, "-"],
        input=ptx,
        text=True,
        capture_output=True,
        check=True,
    ).stderr
    registers, spills = (
        re.search(r"Used (\d+) registers", told),
        re.search(r"(\d+) bytes spill stores", told),
    )
    assert registers and spills, told
    return int(registers[1]), int(spills[1])


@pytest.mark.parametrize(("d", "kernels", "sm"), [(128, 2, 90), (256, 1, 80)])
def test_nothing_is_spilled_for_the_longest_caches(d, kernels, sm, tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    u = found(d, kernels)
    tuned = symbolic.for_program(u, program(attention.LONG_SLOTS, d))
    schedules = [
        next((s for s in space.schedules(op) if s.mma), space.default_schedule(op))
        for op in place_kernels(tuned)
    ]
    ugraph, cut = cut_to(tuned, schedules, program(LONG, d))
    for kernel in compiler.ahead_of_time(triton.generate(ugraph, cut), sm):
        assert spilled(kernel.ptx, sm)[1] == 0, (kernel.kernel, [*map(str, cut)])


def test_a_longer_cache_gets_longer_parts_and_no_more_of_them():
    u = found(128, 2)
    tuned = symbolic.for_program(u, program(attention.LONG_SLOTS, 128))
    ugraph, cut = cut_to(
        tuned, [space.default_schedule(op) for op in place_kernels(tuned)], program(LONG, 128)
    )
    short, long = (x.block_ops[0].block for x in (tuned, ugraph))
    loop = short.named(Role.LOOP)[0]
    assert (
        long.axis(loop.split_axis).size == short.axis(loop.split_axis).size
        and long.split_size(loop.name) == LONG // short.axis(loop.split_axis).size
    )
    p = plan_kernel(place_kernels(ugraph)[0], cut[0])
    assert (
        p.tiling.is_looped
        and p.loop_bounds.are_split
        and not plan_kernel(ugraph.block_ops[0], cut[0]).loop_bounds.are_split
    )  # only the whole µGraph shows which other kernels read the partial results


INTERPRETED = """
import json, torch
from tests.codegen import test_append
from tests.patterns import test_long_caches as t
from mirage_hf.codegen import compile as compiler, triton
from mirage_hf.codegen.plan import cooperation

wrong, before = [], (cooperation.GATHERED_PER_THREAD, cooperation.MOST_UNLOOPED_BLOCKS)
for case in t.CASES:
    cooperation.GATHERED_PER_THREAD, cooperation.MOST_UNLOOPED_BLOCKS = (
        case["gathered"],
        case["straight"],
    )
    u, schedules = t.walking(**case)
    program = triton.generate(u, schedules)
    run = compiler.load(program.source, program.digest).run
    for lo, slot in ((3, 60), (0, 1), (0, 0)):
        inputs = test_append.inputs_of(u.program, lo, slot)
        want = test_append.exact(u.program, [x.clone() for x in inputs])
        for n, (y, z) in enumerate(zip(run(inputs), want)):
            far = float((y.double() - z).abs().max())
            if not far < 6e-3:
                wrong.append([case, lo, slot, n, far, *map(str, schedules)])
cooperation.GATHERED_PER_THREAD, cooperation.MOST_UNLOOPED_BLOCKS = before
print(json.dumps(wrong))
"""

CASES = [
    dict(kernels=1, cooperating_blocks=4, mma=True, group=3, d=16, gathered=0, straight=2),
    dict(kernels=2, cooperating_blocks=2, mma=True, group=3, d=16, gathered=64, straight=2),
    dict(kernels=1, cooperating_blocks=4, mma=False, group=2, d=10, gathered=64, straight=2),
    dict(kernels=1, cooperating_blocks=2, mma=False, group=1, d=10, gathered=0, straight=16),
]
"""gathered: partial results that a thread holds at a time; 0: those of one block. straight.

Blocks that are added up without a loop.
"""


def walking(kernels: int, cooperating_blocks: int, mma: bool, group: int, d: int, **_: int):
    """Return attention of two sequences to caches of 152 slots, with schedules.

    Their loops take short steps and are shared by `cooperating_blocks` blocks.
    """
    sizes = dict(rows=2, kv_heads=1, group=group)
    u = symbolic.for_program(found(d, kernels, **sizes), program(152, d, **sizes))
    if kernels == 2:
        u = symbolic.with_num_splits(u, str(u.block_ops[0].block.named(Role.LOOP)[0].split_axis), 3)
    first, *others = place_kernels(u)
    s = next(s for s in space.schedules(first) if s.mma == mma)
    loop = first.block.named(Role.LOOP)[0].name
    s = replace(
        s,
        tiles=dict(s.tiles) | {loop: 16 if mma else 8},
        cooperating_blocks=cooperating_blocks,
        num_warps=1,
        weights_first=False,
    )
    return u, [s, *map(space.default_schedule, others)]


def test_parts_share_what_is_within_bounds_and_are_added_up_in_pieces():
    assert triton_interpreter.run(INTERPRETED) == []


def test_a_loop_that_was_held_whole_is_pipelined_and_fits_into_shared_memory_where_it_is_walked():
    tuned = symbolic.for_program(found(128, 2), program(attention.LONG_SLOTS, 128))
    first, second = place_kernels(tuned)
    loop = first.block.named(Role.LOOP)[0].name
    s = next(s for s in space.schedules(first) if s.mma)
    whole = replace(
        s,
        tiles=dict(s.tiles) | {loop: first.block.split_size(loop)},
        num_stages=6,
        num_warps=8,
        cooperating_blocks=1,
    )
    assert not plan_kernel(first, whole).tiling.is_looped
    ugraph, (cut, _) = cut_to(tuned, [whole, space.default_schedule(second)], program(LONG, 128))
    p = plan_kernel(place_kernels(ugraph)[0], cut)
    assert (
        p.tiling.is_looped
        and cut.num_stages == PIPELINED
        and estimate(p).shared <= H200.shared_bytes
    )


def test_more_blocks_share_a_longer_loop_but_not_one_as_long_as_it_was(monkeypatch):
    monkeypatch.setattr(
        "mirage_hf.codegen.plan.pipelining.WGMMA_TAKES_8_COLUMNS", False
    )  # with it, other tiles would fit into shared memory
    tuned = symbolic.for_program(
        found(128, 1, kv_heads=8), program(attention.LONG_SLOTS, 128, kv_heads=8)
    )
    (op,) = place_kernels(tuned)
    s = next(s for s in space.schedules(op) if s.mma)
    s = replace(
        s, tiles=dict(s.tiles) | {op.block.named(Role.LOOP)[0].name: 64}, cooperating_blocks=16
    )
    splits = {
        slots: cut_to(tuned, [s], program(slots, 128, kv_heads=8))[1][0].cooperating_blocks
        for slots in (64, 2048, attention.LONG_SLOTS, LONG)
    }
    assert splits == {64: 1, 2048: 16, attention.LONG_SLOTS: 16, LONG: 64}


def test_a_schedule_that_is_none_for_a_short_cache_gives_way_to_one_of_its_kind():
    tuned = symbolic.for_program(found(128, 1), program(attention.LONG_SLOTS, 128))
    (op,) = place_kernels(tuned)
    s = next(s for s in space.schedules(op) if s.mma and s.weights_first)
    for slots in (2, 40):
        ugraph, (cut,) = cut_to(tuned, [s], program(slots, 128))
        assert (
            cut.mma
            and plan_kernel(place_kernels(ugraph)[0], cut).layout.dots
            and triton.generate(ugraph, [cut])
        )


def test_keys_are_not_prefetched_before_a_block_s_share_is_known():
    """Bounds say where a block's share of keys begins, and may not be read before the wait."""
    g = new_kernel_graph()
    q, k = (
        g.new_input((2, 4, 64), "float16"),
        g.new_input((2, 64, 1024), "float16", (65536, 1, 64), constant=True),
    )
    v = g.new_input((2, 1024, 64), "float16", constant=True)
    lo, hi = (g.new_input((2, 1, 1), "int32") for _ in range(2))
    g.mark_output(g.matmul(g.softmax(g.mul(g.matmul(q, k), 0.125), -1, lo, hi), v))
    for f in search(g, SearchOptions(time_limit=20, threads=1, max_width=1))[0]:
        for n, op in enumerate(place_kernels(f.ugraph)):
            s = next(
                (
                    s
                    for s in space.schedules(op)
                    if s.prefetch_steps
                    and plan_kernel(op, s).tiling.is_looped
                    and plan_kernel(op, s).loop_bounds.are_split
                ),
                None,
            )
            if s is not None:
                schedules = [
                    s if m == n else space.default_schedule(o)
                    for m, o in enumerate(place_kernels(f.ugraph))
                ]
                assert compiler.ahead_of_time(triton.generate(f.ugraph, schedules), 90)
                return
    pytest.fail("no kernel deals out what is within bounds")


def test_the_tuner_begins_with_schedules_that_prefetch_caches():
    tuned = symbolic.for_program(found(128, 1), program(attention.LONG_SLOTS, 128))
    first = next(ranking._scheduled(tuned, H200, space.schedules, False))
    assert all(s.prefetch_steps for s in first.schedules), first.schedules


def test_heads_and_queries_share_the_rows_of_a_product():
    """Heads and queries are grid axes on one side of a product.

    Together they have as many rows as tensor cores need.
    """
    g = new_kernel_graph()
    q, k, v = (
        g.new_input(dims, "float16")
        for dims in ((8, 4, 4, 128), (8, 1, 4096, 128), (8, 1, 4096, 128))
    )
    g.mark_output(g.matmul(g.softmax(g.mul(g.matmul(q, g.permute(k, (0, 1, 3, 2))), 0.125)), v))
    best = search(g, SearchOptions(time_limit=20, threads=1, max_width=1))[0][0].ugraph
    op = place_kernels(best)[0]
    side = [a.name for a in op.block.axes if a.size == 4]
    assert len(side) == 2 and all(op.block.role(a) is Role.GRID for a in side)
    s = next(s for s in space.schedules(op) if s.mma)
    assert [s.tiles[a] for a in side] == [4, 4] and len(plan_kernel(op, s).layout.dots) == 2


def test_keys_held_whole_are_not_cut_to_more_than_shared_memory_holds():
    """Masked attention tuned at 256 slots serves up to 1,023 slots.

    The cost model's first kernel holds all keys in a tile, which takes 290 KiB there.
    """
    block = MASKED_ATTENTION.block(
        kv_heads=2,
        group=3,
        head_dim=64,
        value_dim=128,
        dtype=torch.bfloat16,
        sinks=False,
        scale=0.125,
        softcap=None,
    )
    whole = search(
        block.program(3, slots=256), SearchOptions(time_limit=20, threads=1, max_width=1)
    )[0][0].ugraph
    schedules = [next(s for s in space.schedules(op) if s.mma) for op in place_kernels(whole)]
    with pytest.raises(CodegenError, match="bytes of shared memory"):
        cut_to(whole, schedules, block.program(3, slots=1023))
    ugraph, cut = cut_to(whole, schedules, block.program(3, slots=400))
    assert all(
        estimate(plan_kernel(op, s)).shared <= H200.shared_bytes
        for op, s in zip(place_kernels(ugraph), cut, strict=True)
    )
