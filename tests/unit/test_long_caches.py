"""Attention over long caches: loops in parts that share what is within bounds, partial results added up in pieces, no spilled registers."""
from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.plan import placed, plan
from mirage_hf.graph import symbolic
from mirage_hf.graph.block import Role
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.kernels import cut_to
from mirage_hf.patterns import attention
from mirage_hf.search.append import apart
from mirage_hf.search.engine import SearchOptions, search
from mirage_hf.tune import space
from mirage_hf.tune.cost import H200, estimate

LONG = 131072


def program(slots: int, d: int = 16, rows: int = 1, kv_heads: int = 2, group: int = 4, dtype: torch.dtype = torch.float16):
    return attention.build(rows, kv_heads, group, d, d ** -0.5, "", 1e-6, dtype, slots)


@functools.cache
def searched(d: int, **sizes: int) -> list[UGraph]:
    """What is found at a short cache, cheapest first."""
    taken = apart(program(256, d, **sizes))
    assert taken is not None
    return [taken.join(f.ugraph) for f in search(taken.graph, SearchOptions(time_limit=20, threads=1, max_width=1))[0]]


def found(d: int, kernels: int, **sizes: int) -> UGraph:
    """The first µGraph of one kernel, or of two of which the second combines parts."""
    return next(u for u in searched(d, **sizes) if u.num_kernels == kernels and (kernels == 1 or walks_in_parts(u)))


def walks_in_parts(u: UGraph) -> bool:
    return any(a.role is Role.LOOP and a.parts for a in u.block_ops[0].block.axes)


def spilled(ptx: str, sm: int) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, as ptxas tells."""
    from triton.backends.nvidia.compiler import get_ptxas
    told = subprocess.run([get_ptxas(sm).path, "-v", f"--gpu-name=sm_{sm}{'a' * (sm >= 90)}", "-o", os.devnull, "-"], input=ptx, text=True,
                          capture_output=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
    assert registers and spills, told
    return int(registers[1]), int(spills[1])


@pytest.mark.parametrize(("d", "kernels", "sm"), [(128, 2, 90), (256, 1, 80)])
def test_nothing_is_spilled_for_the_longest_caches(d, kernels, sm, tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    u = found(d, kernels)
    tuned = symbolic.for_program(u, program(attention.LONG_SLOTS, d))
    schedules = [next((s for s in space.schedules(op) if s.mma), space.default_schedule(op)) for op in placed(tuned)]
    ugraph, cut = cut_to(tuned, schedules, program(LONG, d))
    for kernel in compiler.ahead_of_time(triton.generate(ugraph, cut), sm):
        assert spilled(kernel.ptx, sm)[1] == 0, (kernel.kernel, [*map(str, cut)])


def test_a_longer_cache_gets_longer_parts_and_no_more_of_them():
    u = found(128, 2)
    tuned = symbolic.for_program(u, program(attention.LONG_SLOTS, 128))
    ugraph, cut = cut_to(tuned, [space.default_schedule(op) for op in placed(tuned)], program(LONG, 128))
    short, long = (x.block_ops[0].block for x in (tuned, ugraph))
    loop = short.named(Role.LOOP)[0]
    assert long.axis(loop.parts).size == short.axis(loop.parts).size and long.part(loop.name) == LONG // short.axis(loop.parts).size
    p = plan(placed(ugraph)[0], cut[0])
    assert p.walks and p.dealt and not plan(ugraph.block_ops[0], cut[0]).dealt  # who else reads the parts is known of the whole only


INTERPRETED = """
import json, torch
import test_append, test_long_caches as t
from mirage_hf.codegen import compile as compiler, plan, triton
from mirage_hf.tune import space
from mirage_hf.tune.cost import H200, estimate

wrong = []
plan.GATHERED_PER_THREAD = 0  # one part at a time
for kernels, split in ((1, 4), (2, 2)):
    u = t.small(kernels)
    schedules = t.walking(u, split)
    run = compiler.load(*(lambda p: (p.source, p.digest))(triton.generate(u, schedules))).run
    for lo, slot in ((3, 60), (0, 0)):
        inputs = test_append.inputs_of(u.program, lo, slot)
        want = test_append.exact(u.program, [x.clone() for x in inputs])
        for y, z in zip(run(inputs), want):
            far = float((y.double() - z).abs().max())
            if not far < 6e-3:
                wrong.append([kernels, split, lo, slot, far])
print(json.dumps(wrong))
"""


def small(kernels: int) -> UGraph:
    u = symbolic.for_program(found(16, kernels, rows=2, kv_heads=1, group=3), program(152, rows=2, kv_heads=1, group=3))
    return u if kernels == 1 else symbolic.with_parts(u, u.block_ops[0].block.named(Role.LOOP)[0].parts, 3)


def walking(u: UGraph, split: int):
    """Schedules whose loop takes steps of 16, shared by so many blocks."""
    first, *others = placed(u)
    s = next(s for s in space.schedules(first) if s.mma)
    loop = first.block.named(Role.LOOP)[0].name
    return [replace(s, tiles=tuple((dict(s.tiles) | {loop: 16}).items()), split=split, num_warps=1), *map(space.default_schedule, others)]


def test_parts_share_what_is_within_bounds_and_are_added_up_in_pieces(tmp_path):
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "MIRAGE_HF_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_a_loop_that_was_held_whole_is_pipelined_and_fits_into_shared_memory_where_it_is_walked():
    tuned = symbolic.for_program(found(128, 2), program(attention.LONG_SLOTS, 128))
    first, second = placed(tuned)
    loop = first.block.named(Role.LOOP)[0].name
    s = next(s for s in space.schedules(first) if s.mma)
    whole = replace(s, tiles=tuple((dict(s.tiles) | {loop: first.block.part(loop)}).items()), num_stages=6, num_warps=8, split=1)
    assert not plan(first, whole).walks
    ugraph, (cut, _) = cut_to(tuned, [whole, space.default_schedule(second)], program(LONG, 128))
    p = plan(placed(ugraph)[0], cut)
    assert p.walks and cut.num_stages == space.PIPELINED and estimate(p).shared <= H200.shared_bytes
