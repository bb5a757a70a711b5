"""Kernels that append rows to caches in place, and loops that visit only slots within bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import pipelining, plan_kernel
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.codegen.triton_kernel import write_kernel
from mirage_hf.errors import Rejected
from mirage_hf.gpus import H200
from mirage_hf.graph import effects, json_writer, symbolic
from mirage_hf.graph.block import Axis, BlockGraph, BlockInput, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.split_appends import split_appends
from mirage_hf.tune import space
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.cost import estimate
from mirage_hf.tune.neighbours import neighbours
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.codegen import test_overlap
from tests.helpers import reference_executor, triton_interpreter, ugraphs
from tests.helpers.thorough import THOROUGH, count


def attention(
    b=2, heads=2, group=3, slots=40, new=1, d=16, rope=True, norm=False, dtype="float16"
) -> KernelGraph:
    """Build attention of a decoding step that appends its keys and values.

    Queries attend to the old keys within [lo, slot), and to the new ones.
    """
    g = mi.new_kernel_graph()
    q = g.new_input((b, heads, group * new, d), dtype, name="q")
    k, v = (
        g.new_input((b, heads, new, d), dtype, name=name) for name in ("new_keys", "new_values")
    )
    keys, values = (
        g.new_input((b, heads, slots, d), dtype, name=name) for name in ("keys", "values")
    )
    lo, slot = (g.new_input((b, 1, 1, 1), "int32", name=name) for name in ("lo", "slot"))
    if norm:
        q, k = (
            g.rms_norm(x, g.new_input((1, d), dtype, name=name, constant=True))
            for x, name in ((q, "qw"), (k, "kw"))
        )
    if rope:
        cos, sin = (g.new_input((b, 1, 1, d), dtype, name=name) for name in ("cos", "sin"))
        q, k = (g.rope(x, cos, sin) for x in (q, k))
    old, fresh = (g.exp(g.mul(g.matmul(q, g.permute(x, (0, 1, 3, 2))), d**-0.5)) for x in (keys, k))
    old = g.within(old, lo, slot, dim=3)
    y = g.div(
        g.add(g.matmul(old, values), g.matmul(fresh, v)),
        g.add(g.reduction(old, 3), g.reduction(fresh, 3)),
    )
    g.mark_output(y, g.cache_append(keys, k, slot), g.cache_append(values, v, slot))
    return g


PROGRAMS = {
    "rotated": attention(),
    "plain": attention(rope=False, b=1, slots=33),
    "normed, 3 new": attention(norm=True, new=3, group=1),
    "one head": attention(heads=1, group=4, d=32),
}
#: "one head" is "rotated" with other sizes.
NAMES = [
    pytest.param(name, marks=pytest.mark.thorough) if name == "one head" else name
    for name in PROGRAMS
]
FEW_SLOTS = attention(b=1, slots=8)
LARGE = attention(1, 8, 4, slots=1024, d=64, norm=True, dtype="bfloat16")
LENGTHS = ((0, 0), (0, 1), (3, 17), (5, 5), (0, 37), (36, 37))


def inputs_of(g: KernelGraph, lo: int, slot: int, seed: int = 0) -> list[torch.Tensor]:
    """Return random inputs.

    Row 0 of the batch has these bounds. The others end one slot earlier if possible.
    """
    torch.manual_seed(seed)
    inputs = ugraphs.random_inputs(g)
    for t, x in zip(g.inputs, inputs, strict=True):
        if t.name in ("lo", "slot"):
            x.fill_(lo if t.name == "lo" else slot)
            x[1:] -= int(slot > lo) if t.name == "slot" else 0
    return inputs


FOUND: dict[int, Any] = {}


def searched(g: KernelGraph):
    """Return the result of a search. Programs of this file are searched once."""
    if (found := FOUND.get(id(g))) is None:
        options = SearchOptions(time_limit=20, threads=1, max_candidates=count(24, 6))
        found = search_and_verify(g, options)
        assert found.candidates, found.report
        if any(g is each for each in (*PROGRAMS.values(), FEW_SLOTS, LARGE)):
            FOUND[id(g)] = found
    return found


def exact(g: KernelGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return run_kernel_graph(
        g, [x.double() if x.is_floating_point() else x for x in inputs], torch.float64
    )


@pytest.mark.parametrize("name", NAMES)
def test_one_kernel_computes_attends_and_appends(name):
    g = PROGRAMS[name]
    candidates = searched(g).candidates
    best = min(candidates, key=lambda c: c.ugraph.num_kernels)
    assert best.ugraph.num_kernels == 1 and len(effects.stored(best.ugraph.kernels)) == 2
    for c in candidates[:3]:
        assert c.error_bound < 1e-9
        for lo, slot in (
            (0, 0),
            (2, 9),
            (0, min(t.dims[-2] for t in g.inputs if t.name == "keys") - 3),
        ):
            inputs = [x.double() if x.is_floating_point() else x for x in inputs_of(g, lo, slot)]
            want = exact(g, [x.clone() for x in inputs])
            got = run_kernel_graph(c.ugraph.kernels, [x.clone() for x in inputs], torch.float64)
            independent = reference_executor.run(c.ugraph.kernels, [x.clone() for x in inputs])
            for y, z, x in zip(got, independent, want, strict=True):
                assert torch.allclose(y, x, atol=1e-9) and torch.allclose(z, x, atol=1e-9)


def test_proof_refuses_another_slot_and_other_rows():
    g = FEW_SLOTS
    u = min(searched(g).candidates, key=lambda c: c.ugraph.num_kernels).ugraph
    assert isinstance(prove(u), Accepted)
    for wrong in ("swapped", "lo", "stale"):
        kernels = KernelGraph()
        new = {t.index: kernels.input_like(t) for t in u.kernels.inputs}
        appended = []
        for op in u.kernels.ops:
            args = [new[x.index] for x in op.inputs]
            if op.block is not None:
                new |= {
                    t.index: y
                    for t, y in zip(op.outputs, kernels.customized(args, op.block), strict=True)
                }
                continue
            appended.append(args)
        (keys, k, slot), (values, v, _) = appended
        at = next(t for t in kernels.inputs if t.name == "lo") if wrong == "lo" else slot
        rows = (v, k) if wrong == "swapped" else (k, v)
        raw = next(t for t in kernels.inputs if t.name == "new_keys")
        rows = (raw, v) if wrong == "stale" else rows
        y = new[u.kernels.outputs[0].index]
        kernels.mark_output(
            y, kernels.cache_append(keys, rows[0], at), kernels.cache_append(values, rows[1], at)
        )
        assert isinstance(prove(UGraph(g, kernels)), Rejected), wrong


def _unbounded(g, q, keys, k, v, lo, slot):
    return g.matmul(q, g.permute(keys, (0, 1, 3, 2)))


def _bounded_elsewhere(g, q, keys, k, v, lo, slot):
    return g.within(
        g.matmul(q, g.permute(keys, (0, 1, 3, 2))),
        lo,
        g.new_input((2, 1, 1, 1), "int32", name="other"),
        dim=3,
    )


def _summed_first(g, q, keys, k, v, lo, slot):
    return g.within(g.exp(g.reduction(keys, 2)), lo, slot, dim=2)


def _values_unmasked(g, q, keys, k, v, lo, slot):
    return g.matmul(g.exp(v), keys)


def _softmax_of_zeros(g, q, keys, k, v, lo, slot):
    return g.matmul(g.softmax(g.within(v, lo, slot, dim=3), 2), keys)


@pytest.mark.parametrize(
    "build",
    [_unbounded, _bounded_elsewhere, _summed_first, _values_unmasked, _softmax_of_zeros],
    ids=lambda f: f.__name__.strip("_"),
)
def test_caches_that_are_read_where_they_are_written_stay_apart(build):
    g = mi.new_kernel_graph()
    q, k = (g.new_input((2, 2, 1, 16), name=name) for name in ("q", "k"))
    keys, v = g.new_input((2, 2, 12, 16), name="keys"), g.new_input((2, 2, 3, 12), name="v")
    lo, slot = (g.new_input((2, 1, 1, 1), "int32", name=name) for name in ("lo", "slot"))
    y = build(g, q, keys, k, v, lo, slot)
    g.mark_output(y, g.cache_append(keys, g.exp(k), slot))
    assert split_appends(g) is None
    for c in searched(g).candidates[:2]:
        assert sum(op.name == "cache_append" for op in c.ugraph.kernels.ops) == 1


def _reading(masked: bool) -> UGraph:
    """Return a hand-written kernel that sums the rows of a cache.

    The sum is within bounds, or over all rows while bounds are an unused input.
    """
    g = mi.new_kernel_graph()
    cache, row = g.new_input((2, 8, 16), name="cache"), g.new_input((2, 1, 16), name="row")
    lo, slot = (g.new_input((2, 1, 1), "int32", name=name) for name in ("lo", "slot"))
    given = [cache, row, lo, slot]
    axes = (Axis("b", 2, Role.GRID), Axis("d", 16, Role.TILE), Axis("r", 8, Role.TILE))
    inputs = (
        BlockInput("x", (0,), ("b", "r", "d")),
        BlockInput("new", (1,), ("b", None, "d")),
        BlockInput("m", (2, 3), ("b", None, None), bounds="r"),
    )
    body = (
        BlockOp("s", "select", ("m", "x", 0.0), ("b", "d", "r"))
        if masked
        else BlockOp("s", "mul", ("x", 1.0), ("b", "d", "r")),
        BlockOp("n", "sum", ("m",), ("b",), over="r"),
        BlockOp("t", "sum", ("s",), ("b", "d"), over="r"),
        BlockOp("y", "add", ("t", "n"), ("b", "d")),
        BlockOp("e", "exp", ("new",), ("b", "d")),
    )
    outputs = tuple(BlockOutput(name, ("b", None, "d"), "float16") for name in "ye")
    block = BlockGraph(axes, inputs, (Stage(None, body),), outputs)
    y, e = g.customized(given, block)
    g.mark_output(y, g.cache_append(cache, e, slot))
    return UGraph(g, g)


def test_a_hand_written_kernel_stores_only_where_its_bounds_are_between():
    assert len(effects.stored(_reading(masked=True).kernels)) == 1
    assert not effects.stored(_reading(masked=False).kernels)


def test_two_appends_to_one_cache_stay_in_order():
    g = mi.new_kernel_graph()
    cache, rows = (
        g.new_input((2, 2, 12, 16), name="cache"),
        [g.new_input((2, 2, 1, 16), name=n) for n in "ab"],
    )
    slots = [g.new_input((2, 1, 1, 1), "int32", name=n) for n in ("first", "second")]
    g.mark_output(*(g.cache_append(cache, g.exp(r), s) for r, s in zip(rows, slots, strict=True)))
    assert split_appends(g) is None


def test_a_maximum_of_what_is_within_bounds_walks_the_whole_axis():
    """Outside of the bounds the value is 0, which is not low enough for a maximum to begin with."""
    g = mi.new_kernel_graph()
    x = g.new_input((2, 3, 40), "float32", name="x")
    lo, hi = (g.new_input((2, 3, 1), "int32", name=name) for name in ("lo", "hi"))
    g.mark_output(g.reduction(g.within(x, lo, hi, dim=2), 2, kind="max"))
    for c in searched(g).candidates:
        for op in place_kernels(c.ugraph):
            for s in space.schedules(op)[:8]:
                assert not any(
                    plan_kernel(op, s).loop_bounds.trimming(stage) for stage in op.block.stages
                )


def test_capacity_reached_is_an_error_on_a_cpu():
    u = searched(FEW_SLOTS).candidates[0].ugraph
    with pytest.raises(errors.InputError, match="slots 8 to 8 are outside a cache of 8 slots"):
        run_kernel_graph(u.kernels, inputs_of(FEW_SLOTS, 0, 8))


def schedules_of(u: UGraph) -> list[tuple[Schedule, ...]]:
    """Return schedules of many kinds.

    They have both kinds of product, loops in several steps, and loops cut among blocks or not.
    """
    ops = place_kernels(u)
    found = []
    for mma in (False, True):
        for split in (1, 2, 4):
            chosen = []
            for op in ops:
                ranked = [s for s in space.schedules(op) if s.mma == mma] or space.schedules(op)
                loop = next((a.name for a in op.block.axes if a.role == "loop"), None)
                s = ranked[0]
                if loop is not None:
                    s = replace(
                        s,
                        tiles=dict(s.tiles) | {loop: 16 if mma else 8},
                        num_stages=2,
                        cooperating_blocks=split,
                    )
                chosen.append(s)
            try:
                triton.generate(u, chosen)
            except errors.CodegenError:
                continue
            found.append(tuple(chosen))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_loops_visit_only_what_is_within_bounds(name):
    u = min(searched(PROGRAMS[name]).candidates, key=lambda c: c.ugraph.num_kernels).ugraph
    chosen = schedules_of(u)
    assert any(s.cooperating_blocks > 1 for schedules in chosen for s in schedules)
    for schedules in chosen:
        for op, s in zip(place_kernels(u), schedules, strict=True):
            p = plan_kernel(op, s)
            assert (
                any(p.loop_bounds.trimming(stage) for stage in op.block.stages)
                or not p.tiling.is_looped
            )
        assert "_first" in triton.generate(u, schedules).source


INTERPRETED = """
import json, torch
from tests.codegen import test_append as t
from tests.helpers.thorough import THOROUGH
from mirage_hf.codegen import compile as compiler, triton
from mirage_hf.graph import json_reader

wrong = []
for name, found in FOUND.items():
    g = t.PROGRAMS[name]
    for u in [json_reader.ugraph_from_dict(found)]:
        slots, rows = (
            next(x.dims[2] for x in g.inputs if x.name == n) for n in ("keys", "new_keys")
        )
        for schedules in t.schedules_of(u):
            program = triton.generate(u, schedules)
            run = compiler.load(program.source, program.digest).run
            for lo, slot in t.LENGTHS[name == "rotated" :: 2]:
                if slot + rows > slots:
                    continue
                inputs = t.inputs_of(g, lo, slot)
                want = t.exact(g, [x.clone() for x in inputs])
                # Nobody may see what the slots held before they are written.
                for before in (0.0, 100.0)[not THOROUGH :]:
                    given = [x.clone() for x in inputs]
                    for n, x in enumerate(g.inputs):
                        if x.name in ("keys", "values"):
                            given[n][0, :, slot : slot + rows] = before
                    got = run(given)
                    if (
                        got[1].data_ptr()
                        != given[[x.name for x in g.inputs].index("keys")].data_ptr()
                    ):
                        wrong.append([name, "not in place"])
                    for n, (y, z) in enumerate(zip(got, want)):
                        far = float((y.double() - z).abs().max())
                        if not far < 6e-3:
                            wrong.append([name, str(schedules[0]), lo, slot, n, far])
            if slots - rows >= 0:  # no room: nothing is written
                inputs = t.inputs_of(g, 0, slots)
                caches = [n for n, x in enumerate(g.inputs) if x.name in ("keys", "values")]
                kept = [inputs[n][:1].clone() for n in caches]
                run(inputs)
                if rows == 1 and any(
                    not torch.equal(inputs[n][:1], x) for n, x in zip(caches, kept)
                ):
                    wrong.append([name, "written outside"])
print(json.dumps(wrong))
"""


def test_triton_text_equals_torch():
    found = {
        name: min(searched(g).candidates, key=lambda c: c.ugraph.num_kernels).ugraph
        for name, g in PROGRAMS.items()
        if THOROUGH or name != "one head"
    }
    dicts = {name: json_writer.ugraph_to_dict(u) for name, u in found.items()}
    given = f"import json\nFOUND = json.loads({json.dumps(dicts)!r})\n"
    assert triton_interpreter.run(given + INTERPRETED) == []


@pytest.mark.parametrize("early", [False, True])
def test_only_constants_are_read_early_and_caches_only_prefetched_unless_asked_for(
    early, tmp_path, monkeypatch
):
    """The PTX of kernels that may begin before earlier launches are done shows this."""
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    tried = 0
    for c in searched(LARGE).candidates[:3]:
        ops = place_kernels(c.ugraph)
        schedules = [early_schedule(op, load_cached_early=early) for op in ops]
        kernels = compiler.ahead_of_time(triton.generate(c.ugraph, schedules), 90)
        for op, s, kernel in zip(ops, schedules, kernels, strict=True):
            p = plan_kernel(op, s)
            arguments = write_kernel(p, "k").arguments
            constant = {
                n
                for n, (_, at) in enumerate(arguments)
                if at < len(op.inputs) and op.inputs[at].constant
            }
            settled, caches = (
                {n for n, (_, at) in enumerate(arguments) if at in these}
                for these in (op.readable_before_wait, op.caches)
            )
            seen = test_overlap.touched(kernel.ptx)
            assert [what for what, _ in seen].count(test_overlap.WAIT) == 1
            before = seen[: [what for what, _ in seen].index(test_overlap.WAIT)]
            for what, of in before:
                may_read = settled | caches if s.load_cached_early else settled
                assert of and of <= constant | (
                    caches | settled if what.startswith("prefetch") else may_read
                ), (what, of)
                assert what.startswith(("ld", "prefetch", "cp.async")), what
            loaded = {n for what, of in before if what.startswith("ld") for n in of & caches}
            assert loaded == (caches if s.load_cached_early else set())
            assert (
                loaded
                or not s.prefetch_steps
                or any(what.startswith("prefetch") and of & caches for what, of in seen)
            )
            tried += s.load_cached_early
    assert tried or not early


def early_schedule(op: KernelOp, *, load_cached_early: bool) -> Schedule:
    """Return the first schedule that prefetches, and loads rows of caches early or does not."""
    found = (
        s
        for s in space.schedules(op, limit=1000)
        if s.prefetch_steps and s.load_cached_early == load_cached_early
    )
    return next(found, space.default_schedule(op))


def test_tuning_tries_rows_of_caches_before_and_after_the_wait():
    u = next(c.ugraph for c in searched(LARGE).candidates if c.ugraph.num_kernels == 2)
    first, second = place_kernels(u)
    asked = {s.load_cached_early for s in space.schedules(first, limit=1000)}
    assert asked == {False, True}
    assert not any(s.load_cached_early for s in space.schedules(second, limit=1000))
    early = early_schedule(first, load_cached_early=True)
    schedules = replace(early, load_cached_early=False), space.default_schedule(second)
    start = ScheduledCandidate(u, schedules, 1.0)
    assert estimate(plan_kernel(first, early)).us < estimate(plan_kernel(first, schedules[0])).us
    near = neighbours([start], [start], H200, space.schedules)
    assert early in {c.schedules[0] for c in near}
    tiles = dict(early.tiles)
    looped = replace(schedules[0], tiles=tiles | {"r": tiles["r"] // 4})  # of four trips
    start = ScheduledCandidate(u, (looped, schedules[1]), 1.0)
    near = neighbours([start], [start], H200, space.schedules)
    assert not any(c.schedules[0].load_cached_early for c in near)


@pytest.mark.parametrize("newer", [False, True])
def test_every_triton_gets_attention_that_loads_a_whole_cache_early(newer, monkeypatch):
    """Newer versions of Triton read 8 columns asynchronously, which such kernels cannot have.

    Queries that are padded to 16 rows are read by other instructions.
    """
    monkeypatch.setattr(pipelining, "WGMMA_TAKES_8_COLUMNS", newer)
    monkeypatch.setattr(space, "_known", {})  # what is listed depends on the version
    sizes = {"b": 1, "heads": 8, "group": 4, "d": 64, "norm": True, "dtype": "bfloat16"}
    u = next(c.ugraph for c in searched(LARGE).candidates if c.ugraph.num_kernels == 1)
    (op,) = place_kernels(symbolic.for_program(u, attention(slots=256, **sizes)))
    early = [s for s in space.schedules(op) if s.mma and s.load_cached_early]
    queries = {(s.tiles["m"], s.weights_first) for s in early if s.tiles["r"] == 256}
    assert queries == ({(16, False)} if newer else {(8, True), (16, False)})
    # of equal estimates, those with fewer padded queries come first
    assert early[0].weights_first is not newer


@pytest.mark.parametrize(("warps", "loaded"), [(2, False), (8, True)])
def test_cached_rows_that_registers_do_not_hold_are_not_loaded_early(warps, loaded):
    """A thread of 64 has 512 elements of keys and values, and one of 256 has 128."""
    sizes = {"b": 1, "heads": 8, "group": 4, "d": 64, "norm": True, "dtype": "bfloat16"}
    u = next(c.ugraph for c in searched(LARGE).candidates if c.ugraph.num_kernels == 1)
    (op,) = place_kernels(symbolic.for_program(u, attention(slots=256, **sizes)))
    assert op.block is not None
    tiles = {a.name: 1 if a.role is Role.GRID else next_power_of_two(a.size) for a in op.block.axes}
    schedule = Schedule(tiles, mma=True, num_warps=warps, prefetch_steps=1, load_cached_early=True)
    source = write_kernel(plan_kernel(op, schedule), "k").source
    before = source[: source.index("gdc_wait")]
    for name in ("keys", "values"):
        assert (f" {name} = tl.load({name}_ptr" in before) == loaded
        assert (f"prefetch({name}_ptr" in before) != loaded


def test_a_kernel_triggers_early_only_if_the_next_one_reads_no_bounds_early():
    """Bounds and positions are read early after the launch before has waited.

    Otherwise the launch before that one might still write them.
    """
    first, second = place_kernels(test_overlap.CASES["squares, then linear"].ugraph)
    assert first.next_may_launch_early and not second.next_may_launch_early
    for c in searched(LARGE).candidates:
        ops = place_kernels(c.ugraph)
        assert [op.next_may_launch_early for op in ops] == [
            n + 1 < len(ops) and not ops[n + 1].readable_before_wait for n in range(len(ops))
        ]
        for op in ops:
            s = replace(space.default_schedule(op), trigger_early=True)
            source = write_kernel(plan_kernel(op, s), "k").source
            assert (
                source.index("gdc_launch_dependents") < source.index("gdc_wait")
            ) == op.next_may_launch_early


@pytest.mark.parametrize("sm", [pytest.param(80, marks=pytest.mark.thorough), 90])
def test_compiles_ahead_of_time(sm, tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    u = min(searched(LARGE).candidates, key=lambda c: c.ugraph.num_kernels).ugraph
    for kernel in compiler.ahead_of_time(triton.generate(u), sm):
        assert kernel.asm["cubin"]
