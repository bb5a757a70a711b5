"""Schedules, the space of schedules, the cost model and the tuner, without a GPU."""

import contextlib
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mirage_hf import errors, gpus
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.plan.stages import running_maxima
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph import symbolic
from mirage_hf.graph.kernel import new_kernel_graph
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.tune import cost, space, tuner
from mirage_hf.tune.launch_restriction import LaunchRestriction
from mirage_hf.verify.verdict import Accepted
from tests.helpers import kernel_cases
from tests.helpers.thorough import THOROUGH

DEVICES = (gpus.H200, gpus.A100, gpus.RTX_4090) if THOROUGH else (gpus.H200, gpus.RTX_4090)


def test_round_trip_and_order_of_tiles():
    s = Schedule({"n": 8, "k": 256, "m": 1}, mma=True, num_warps=8)
    assert Schedule.from_dict(s.to_dict()) == s
    assert s == Schedule({"m": 1, "k": 256, "n": 8}, mma=True, num_warps=8)
    assert s.to_dict()["tiles"] == {"k": 256, "m": 1, "n": 8}


@pytest.mark.parametrize(
    "bad, says",
    [
        (
            dict(tiles={"n": 12}),
            "n is 12; tiles, num_warps, cooperating_blocks and prefetch_steps must be powers of "
            "two",
        ),
        (dict(tiles={"n": 8}, num_warps=3), "num_warps is 3"),
        (dict(tiles={"n": 8}, num_stages=0), "num_stages is 0"),
    ],
)
def test_impossible_schedules_say_why(bad, says):
    with pytest.raises(errors.CodegenError, match=says):
        Schedule(**bad)


def test_unknown_field_of_a_stored_schedule():
    with pytest.raises(errors.FormatError, match="unknown field 'color'"):
        Schedule.from_dict({"tiles": {"n": 8}, "color": "red"})


def test_a_schedule_for_another_block_graph_is_refused():
    op = kernel_cases.rms_norm_linear().block_ops[0]
    with pytest.raises(
        errors.CodegenError,
        match=r"tiles are given for \['n'\], the block graph's axes are \['k', 'm', 'n'\]",
    ):
        plan_kernel(op, Schedule({"n": 8}))


def test_a_tile_axis_is_held_whole():
    op = kernel_cases.softmax(walk=False).block_ops[0]
    with pytest.raises(
        errors.CodegenError,
        match="tile axis n of size 100 must be held whole; its tile is 64, give 128",
    ):
        plan_kernel(op, Schedule({"m": 1, "n": 64}))


def test_a_grid_axis_that_no_output_carries_is_refused():
    b = kernel_cases.Block({"m": 4, "n": 8})
    b.load("x", "mn", 0), b.load("s", "m", 1)
    b.store(b.stage().op("y", "neg", "s"), "m", kernel_cases.torch.float16)
    g = kernel_cases.new_kernel_graph()
    g.new_input((4, 8), name="x"), g.new_input((4,), name="s")
    op = kernel_cases.ugraph(g, b).block_ops[0]
    with pytest.raises(errors.CodegenError, match="output y does not carry the grid axis n"):
        space.schedules(op)
    with pytest.raises(errors.CodegenError, match="output y does not carry the grid axis n"):
        triton.generate(kernel_cases.ugraph(g, b))


SPACES = {
    "norm linear": kernel_cases.rms_norm_linear(1, 4096, 4096),
    "3 rows": kernel_cases.rms_norm_linear(3, 896, 37),
    "16 rows": kernel_cases.rms_norm_linear(16, 4096, 4096),
    "lora": kernel_cases.lora(1, 4096, 4096),
    "softmax": kernel_cases.softmax(64, 4096),
    "ntrans": kernel_cases.ntrans(16, 4096),
    "batched": kernel_cases.batched_matmul(),
    "attention": kernel_cases.attention_row(64, 1, 4096, 128),
    "online": kernel_cases.online_attention(32, 300, 300, 128),
    "split": kernel_cases.online_attention(8, 4, 5000, 128, 8),
    "split matmul": kernel_cases.split_matmul(16, 4096, 1024, 4),
    "split softmax": kernel_cases.split_softmax(4, 100000, 8),
}


@pytest.mark.parametrize("name", SPACES)
def test_the_space_keeps_to_its_budgets(name):
    for op, device in itertools.product(place_kernels(SPACES[name]), DEVICES):
        found = space.schedules(op, device, limit=10**6)
        assert found and len(set(found)) == len(found)
        for s in found:
            estimate = cost.estimate(plan_kernel(op, s), device)
            assert (
                estimate.registers <= space.REGISTER_BUDGET
                and estimate.shared <= device.shared_bytes
            )
        assert (
            space.schedules(op, device, limit=5) == found[:5]
            and space.default_schedule(op, device) == found[0]
        )


@pytest.mark.parametrize("name", ["online", "split", "split matmul"])
def test_the_estimate_of_shared_memory_is_not_exceeded(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    op = place_kernels(SPACES[name])[0]
    for device in DEVICES:
        ranked = [s for s in space.schedules(op, device) if s.mma]
        greedy = max(ranked, key=lambda s: cost.estimate(plan_kernel(op, s), device).shared)
        rest = [space.default_schedule(o, device) for o in place_kernels(SPACES[name])[1:]]
        kernel = compiler.ahead_of_time(triton.generate(SPACES[name], [greedy, *rest]), device.sm)[
            0
        ]
        assert (
            kernel.shared
            <= cost.estimate(plan_kernel(op, greedy), device).shared
            <= device.shared_bytes
        )


def test_tiles_of_parts():
    ugraph = kernel_cases.split_matmul(3, 100, 37, 3, held=True)
    first, _ = ugraph.block_ops
    assert all(dict(s.tiles)["k"] == 64 and dict(s.tiles)["p"] == 1 for s in space.schedules(first))
    planned = plan_kernel(first, Schedule({"m": 1, "p": 1, "n": 8, "k": 64}))
    assert (
        planned.tiling.trips("k") == 1
        and planned.grid == 3 * 3 * 5
        and planned.masks.passes_split("k")
        and planned.masks.split_passes_axis("k")
        and planned.masks.largest_index("k") == 68 + 63
    )
    with pytest.raises(
        errors.CodegenError,
        match="k of size 100, of which a block has 34, must be held whole; its tile is 32, give 64",
    ):
        plan_kernel(first, Schedule({"m": 1, "p": 1, "n": 8, "k": 32}))
    with pytest.raises(
        errors.CodegenError,
        match="p numbers the splits of k, and a block has one of them; its tile is 4, give 1",
    ):
        plan_kernel(first, Schedule({"m": 1, "p": 4, "n": 8, "k": 64}))


def test_estimates_count_parts():
    """More parts: more blocks, shorter loops, more partial results to write."""
    few, many = (
        kernel_cases.online_attention(8, 1, 4096, 128, parts).block_ops[0] for parts in (4, 16)
    )
    s = Schedule({"h": 1, "m": 1, "p": 1, "s": 64, "d": 128})
    assert (
        plan_kernel(few, s).tiling.trips("s") == 4 * plan_kernel(many, s).tiling.trips("s") == 16
        and 4 * plan_kernel(few, s).grid == plan_kernel(many, s).grid == 128
    )
    one, other = cost.estimate(plan_kernel(few, s)), cost.estimate(plan_kernel(many, s))
    assert other.us < one.us and other.bytes - one.bytes == 12 * 8 * (128 + 2) * 4
    assert plan_kernel(few, s).tiling.is_streamed(few.block.inputs[1]) and not plan_kernel(
        few, s
    ).tiling.is_streamed(few.block.inputs[0])


def test_shifted_sums_and_their_maxima_are_not_lazy():
    op = kernel_cases.online_attention(2, 4, 100, 32).block_ops[0]
    planned = plan_kernel(op, Schedule({"h": 1, "m": 4, "s": 32, "d": 32}, reduce_after_loop=True))
    stage = op.block.stages[0]
    assert not any(planned.is_reduced_after_loop(stage, a) for a in stage.accumulators) and set(
        running_maxima(stage)
    ) == {"top"}


def test_a_kernel_reads_a_view_by_the_strides_that_torch_gives_it():
    ugraph = kernel_cases.split_matmul(3, 100, 37, 3, view=True)
    assert place_kernels(ugraph)[1].inputs[0].strides == (37, 3 * 37, 1) and place_kernels(ugraph)[
        1
    ].inputs[0].dims == (3, 3, 37)


def test_rank_gives_every_kernel_a_schedule():
    ranked = [c for c in tuner.rank([SPACES["split"]], per_graph=8) if not c.is_library]
    assert (
        ranked
        and all(len(c.schedules) == 2 for c in ranked)
        and len({c.schedules for c in ranked}) == len(ranked)
    )
    first = tuple(
        replace(space.default_schedule(op), trigger_early=op.next_may_launch_early)
        for op in place_kernels(SPACES["split"])
    )
    assert ranked[0].schedules == first and [s.trigger_early for s in first] == [True, False]


def test_restrictions_count_parts_as_blocks():
    op = kernel_cases.online_attention(8, 1, 4096, 128, 4).block_ops[0]
    kept = LaunchRestriction.of([(8, 4)], [(128,)], [16]).schedules(op)
    assert kept and all(
        plan_kernel(op, s).grid == 32 and plan_kernel(op, s).tiling.trips("s") == 16 for s in kept
    )
    assert not LaunchRestriction.of([(8, 2)], None, None).schedules(op)


def test_measured_winners_rank_high():
    """FACTS: 8 rows of W, 1024 of K, 4 warps won for one row of 4096 to 4096.

    16 rows want tensor cores.
    """
    first = space.schedules(SPACES["norm linear"].block_ops[0], limit=4)
    assert Schedule({"m": 1, "n": 8, "k": 1024}, num_warps=4, prefetch_steps=1) in first
    assert all(s.mma for s in space.schedules(SPACES["16 rows"].block_ops[0], limit=10))


MEASURED = {  # k, n, warps, stages, split: µs of RMSNorm + Linear 4096 to 6144 of 16 rows in one kernel, γ times the weights, on an H200
    (256, 64, 4, 4, 1): 21.3,
    (128, 64, 4, 4, 1): 21.4,
    (64, 64, 4, 11, 1): 34.5,
    (128, 128, 8, 4, 2): 21.4,
    (64, 128, 8, 12, 2): 27.2,
    (256, 32, 2, 3, 2): 30.0,
}


def test_kernels_whose_steps_are_long_are_expected_to_be_slow():
    """By bytes alone all of them would take 15 µs, and be tried before the two kernels that do."""
    g = new_kernel_graph()
    g.new_input((16, 4096), torch.float16)
    g.new_input((1, 4096), torch.float16, constant=True)
    g.new_input((4096, 6144), torch.float16, (1, 4096), constant=True)
    b = kernel_cases.Block({"m": 16, "n": 6144}, {"k": 4096})
    for name, axes, source in (("x", "mk", 0), ("gamma", "1k", 1), ("w", "kn", 2)):
        b.load(name, axes, source)
    loop = b.stage(loop=True)
    loop.accumulate("squares", loop.op("square", "mul", "x", "x"))
    loop.accumulate("sums", loop.op("product", "mul", "x", loop.op("scaled", "mul", "gamma", "w")))
    end = b.stage()
    b.store(
        end.op("y", "mul", "sums", kernel_cases.scale(end, "squares", 4096)), "mn", torch.float16
    )
    (op,) = kernel_cases.ugraph(g, b).block_ops
    expected = {
        c: cost.estimate(
            plan_kernel(
                op,
                Schedule(
                    {"m": 16, "n": n, "k": k},
                    mma=True,
                    num_warps=w,
                    num_stages=s,
                    cooperating_blocks=p,
                ),
            )
        ).us
        for c in MEASURED
        for k, n, w, s, p in (c,)
    }
    assert all(abs(expected[c] / us - 1) < 0.25 for c, us in MEASURED.items()), [
        (c, expected[c], us) for c, us in MEASURED.items()
    ]


def test_scores_by_multiply_adds_and_products_held_whole_are_expected_to_be_slow():
    """Measured on an H200.

    Attention of 4 rows over 4096 keys by multiply-adds took 6 to 13 times as long as on tensor
    cores. Products that hold 2048 × 32 weights in the registers of 4 warps took 112 µs instead of
    6.
    """
    (op,) = place_kernels(kernel_cases.online_attention(64, 4, 4096, 64))
    tiles = dict(h=1, s=64, d=64)
    by_hand, cores = (
        cost.estimate(
            plan_kernel(op, Schedule(tiles | {"m": m}, mma, num_warps=8, num_stages=3))
        ).us
        for m, mma in ((4, False), (8, True))
    )
    assert by_hand > 3 * cores, (by_hand, cores)
    (op,) = place_kernels(kernel_cases.rms_norm_linear(8, 2048, 3072))
    whole, walked = (
        cost.estimate(
            plan_kernel(op, Schedule({"m": 8, "n": 32, "k": k}, True, num_stages=3))
        ).registers
        for k in (2048, 256)
    )
    assert walked < space.REGISTER_BUDGET < 2 * space.REGISTER_BUDGET < whole
    assert all(
        s.num_stages == 1 for s in space.schedules(op, limit=10**6) if s.tiles["k"] == 2048
    )  # the same kernel for all of them


def test_rank_without_a_gpu_always_has_the_library_path():
    result = tuner.tune([SPACES["norm linear"]], device="cpu", per_graph=6)
    assert (
        not result.measured and not result.best.is_library and result.best_searched is result.best
    )
    assert [c.is_library for c in result.candidates].count(True) == 1 and len(
        result.candidates
    ) == 7
    assert result.to_dict()["library_us"] == result.library.us
    with pytest.raises(errors.CodegenError, match="no µGraph given"):
        tuner.tune([])


def test_a_kernel_whose_results_differ_from_call_to_call_is_refused(monkeypatch):
    """A race that the one check before timing missed."""
    ugraph = SPACES["norm linear"]
    candidate = next(c for c in tuner.rank([ugraph], per_graph=1) if not c.is_library)
    calls = [0]

    def steady(inputs):
        return [torch.full((2, 3), float("nan"), dtype=torch.float16)]

    def racy(inputs):
        calls[0] += 1
        return [torch.full((2, 3), float(calls[0] == 7), dtype=torch.float16)]

    monkeypatch.setattr(
        tuner.measure, "time_run", lambda run, sets, replays, worth: tuner.measure.timing([1.0], 1)
    )
    check = SimpleNamespace(judge=lambda run: Accepted())
    for run, status in ((steady, tuner.MEASURED), (racy, tuner.REFUSED)):
        monkeypatch.setattr(
            tuner.compiler, "load", lambda source, digest, run=run: SimpleNamespace(run=run)
        )
        tried = tuner._try(
            candidate, SimpleNamespace(source="", digest=""), [], check, [[], []], 1, math.inf
        )
        assert tried.status == status and ("race" in tried.reason) == (status == tuner.REFUSED)


@pytest.mark.parametrize("worth, replays", [(math.inf, 15), (5.0, 15), (4.0, 3), (3.0, 3)])
def test_what_is_slow_is_not_replayed_to_the_end(worth, replays, monkeypatch):
    """Of the two replays that warm up one was fast enough to be worth more."""
    samples = iter([4.5, 4.0, *[9.0] * 15])
    monkeypatch.setattr(tuner.measure.torch.cuda, "synchronize", lambda: None)
    event = SimpleNamespace(elapsed_time=lambda end: next(samples) * 1e-3)
    captured = tuner.measure.Captured(SimpleNamespace(replay=lambda: None), 1, event, None, None)
    assert captured.times(15, worth) == pytest.approx([9.0] * replays)


@pytest.mark.parametrize("us, replays", [(10.0, 15), (100.0, 9), (300.0, 5), (5000.0, 5)])
def test_long_calls_are_replayed_less_often(us, replays, monkeypatch):
    monkeypatch.setattr(tuner.measure.torch.cuda, "synchronize", lambda: None)
    event = SimpleNamespace(elapsed_time=lambda end: 10 * us * 1e-3)
    captured = tuner.measure.Captured(SimpleNamespace(replay=lambda: None), 10, event, None, None)
    assert len(captured.times(15)) == replays


def test_steps_from_a_candidate_are_new_possible_and_permitted():
    for name, mma in (("16 rows", True), ("norm linear", False)):
        ugraph = SPACES[name]
        (op,) = place_kernels(ugraph)
        start = next(
            c
            for c in tuner.rank([ugraph], per_graph=8)
            if not c.is_library and c.schedules[0].mma == mma
        )
        only = [s for s in space.schedules(op) if s.mma == mma]
        found = tuner._around(
            [start, start], [start], gpus.H200, lambda op, device, only=only: only
        )
        schedules = [c.schedules[0] for c in found]
        assert (
            len(found) > 8
            and len(set(schedules)) == len(schedules)
            and start.schedules[0] not in schedules
        )
        assert all(s.mma == mma for s in schedules) and all(plan_kernel(op, s) for s in schedules)
        assert {s.cooperating_blocks for s in schedules} > {
            start.schedules[0].cooperating_blocks
        } and 0 in {s.prefetch_steps for s in schedules}


def test_a_chain_links_through_inputs_whose_elements_share_a_place(monkeypatch):
    """The link between kernels writes the memory of such an input once and not beyond it."""
    g = new_kernel_graph()
    g.mark_output(g.exp(g.new_input((4, 8), "float32", strides=(0, 1))))
    linked = []
    monkeypatch.setattr(
        tuner.measure,
        "_link",
        lambda size, x, y: lambda inputs, out: linked.append((size, [t.shape for t in inputs])),
    )

    def time_run(run, sets, replays):
        run(sets[0])
        return tuner.measure.timing([1.0], 1)

    monkeypatch.setattr(tuner.measure, "time_run", time_run)
    chain = tuner.measure.Chain(g, [tuner.measure.random_inputs(g, "cpu")])
    assert chain.time(lambda inputs: [inputs[0].exp()]) is not None
    assert linked == [(8, [(8,), (1,)])] * 2


def test_kernels_are_chosen_by_the_time_of_all_together(monkeypatch):
    """The fastest of each alone are not the fastest together."""
    ugraph = SPACES["norm linear"]
    found = [
        replace(c, status=tuner.MEASURED)
        for c in tuner.rank([ugraph], per_graph=3)
        if not c.is_library
    ]
    us = {
        (0, 0): 10.0,
        (1, 0): 10.2,
        (0, 1): 10.5,
        (1, 1): 8.0,
        (2, 1): 9.5,
        (1, 2): 7.99,
        (2, 2): 9.9,
    }
    numbers = {triton.generate(c.ugraph, c.schedules).digest: n for n, c in enumerate(found)}
    monkeypatch.setattr(tuner.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tuner, "run_of", lambda program: numbers[program.digest])
    monkeypatch.setattr(
        tuner.measure,
        "Layer",
        lambda programs, device: SimpleNamespace(
            time=lambda runs, replays, worth: tuner.measure.timing([us.get(tuple(runs), 11.0)], 1)
        ),
    )
    chosen, layer = tuner.together([found, found], device="cuda")
    assert chosen == [found[1], found[1]] and layer.us == 8.0  # (1, 2) gains less than what counts


@pytest.mark.parametrize(
    "schedule, k, says",
    [
        (dict(cooperating_blocks=8), 128, "4 steps of the loop cannot be shared by 8 blocks"),
        (dict(cooperating_blocks=2), 512, "exactly one stage must loop"),
        (dict(cooperating_blocks=3), 64, "powers of two"),
        (dict(prefetch_steps=-1), 64, "powers of two"),
    ],
)
def test_loops_that_cannot_be_shared_say_why(schedule, k, says):
    with pytest.raises(errors.CodegenError, match=says):
        plan_kernel(
            place_kernels(kernel_cases.rms_norm_linear(1, 512, 64))[0],
            Schedule({"m": 1, "n": 8, "k": k}, **schedule),
        )


def test_a_loop_of_other_length_is_shared_by_fewer_blocks():
    """A schedule for a long loop, cut to shorter ones.

    As many blocks as there can be with none without work.
    """
    chosen = Schedule({"m": 1, "n": 64, "k": 128}, cooperating_blocks=16)
    shared = {}
    for k in (8192, 5000, 1100, 1024, 300, 129, 128, 40):
        u = kernel_cases.rms_norm_linear(1, k, 256)
        (op,) = u.block_ops
        schedule = space.fitted(chosen, op.block)
        plan_kernel(op, schedule)
        triton.generate(u, [schedule])
        shared[k] = schedule.cooperating_blocks
        if 1 < 2 * schedule.cooperating_blocks <= 16:
            with pytest.raises(errors.CodegenError, match=r"cannot be shared|must loop"):
                plan_kernel(
                    op, replace(schedule, cooperating_blocks=2 * schedule.cooperating_blocks)
                )
    assert shared == {8192: 16, 5000: 8, 1100: 2, 1024: 8, 300: 2, 129: 2, 128: 1, 40: 1}


def test_outputs_may_be_written_over_what_only_their_block_reads():
    residual = kernel_cases.rms_norm_linear(1, 512, 64, residual=True)
    assert triton.generate(residual, [Schedule({"m": 1, "n": 8, "k": 512})]).in_place == ((0, 3),)
    assert triton.generate(
        residual, [Schedule({"m": 1, "n": 8, "k": 128}, cooperating_blocks=2)]
    ).in_place == ((0, 3),)
    square = kernel_cases.rms_norm_linear(
        1, 64, 64
    )  # x has the output's shape, but every block reads all of it
    assert triton.generate(square, [Schedule({"m": 1, "n": 8, "k": 64})]).in_place == ()


def test_given_outputs_are_written():
    """The text of `run`: given tensors stand in for new ones.

    What library calls return is copied into them.
    """
    source = triton.generate(
        kernel_cases.rms_norm_linear(1, 512, 64), [Schedule({"m": 1, "n": 8, "k": 512})]
    ).source
    assert "if out is None else out[0]" in source and "copy_" not in source
    library = library_ugraph(kernel_cases.rms_norm_linear(1, 512, 64).program)
    assert "return [out[0].copy_(" in triton.generate(library).source


def test_kinds_that_hold_in_a_ugraph_hold_in_those_with_such_block_graphs_in_any_number_of_parts():
    split = kernel_cases.split_matmul(8, 1024, 256, 4)
    block = split.block_ops[0].block
    axis = next(a for a in block.axes if block.axis_split_by(a.name))
    other = symbolic.with_num_splits(split, axis.name, axis.size // 2)
    assert other.block_ops[0].block != split.block_ops[0].block
    assert {s.mma for s in space.schedules(place_kernels(other)[0])} == {False, True}
    for kinds, want in (([{False}], {False}), ([{False}, {True}], {False, True}), ([set()], set())):
        allowed = space.permitted((split, may) for may in kinds)
        assert [
            {s.mma for s in allowed(place_kernels(u)[0], gpus.H200)} for u in (split, other)
        ] == [
            want,
            want,
        ]
    assert [
        s and s.mma
        for s in (space.chosen(place_kernels(split)[0], may) for may in ({True}, {False}, ()))
    ] == [True, False, None]
