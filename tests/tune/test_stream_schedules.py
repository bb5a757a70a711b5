"""Ops that have schedules of kernels that stream codes, and the order of these schedules."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from mirage_hf import errors, gpus
from mirage_hf.codegen import cuda_text, triton
from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.schedule import next_power_of_two
from mirage_hf.codegen.streams.finding import streamed_products
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.codegen.streams.layout import stream_layout
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune import space, stream_schedules
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.cuda_schedules import estimate_cuda
from mirage_hf.tune.neighbours import neighbours
from mirage_hf.tune.refit import refit
from mirage_hf.tune.stream_schedules import MOST, SHARERS, estimated_stream_us
from tests.helpers import kernel_cases
from tests.helpers.streamed_experts import Experts
from tests.helpers.streamed_graphs import CASES, Case, Hand, streamed

#: Block graphs with codes, by name.
HANDS = {
    "int4": Hand(rows=(4096,), columns=4096, group=128),
    "int4, norm and gate": Hand(
        rows=(14336,), columns=4096, group=64, has_norm=True, has_gate=True
    ),
    "int8": Hand(codes="int8", rows=(4096,), columns=14336, group=0, has_residual=True),
    "int8, few columns": Hand(codes="int8", rows=(256,), columns=448, group=0),
    "float8": Hand(
        codes="float8_e4m3fn",
        rows=(4096, 1024, 1024),
        columns=4096,
        group=128,
        square=128,
        has_norm=True,
        scales_first=False,
    ),
}


@pytest.fixture
def streaming(monkeypatch):
    """Make this machine one that can compile such kernels."""
    monkeypatch.setattr(stream_schedules, "can_stream", lambda: True)
    monkeypatch.setattr(space, "_known", {})


def listed(op: PlacedOp, device: gpus.Device = gpus.H200):
    return stream_schedules.stream_schedules(op, device)


def test_nothing_is_listed_without_cuda_bindings(monkeypatch):
    monkeypatch.setattr(space, "_known", {})
    monkeypatch.setattr(stream_schedules, "can_stream", lambda: False)
    op = HANDS["int4"].op
    assert listed(op) == [] and not any(s.cuda for s in space.with_streams(op))


def test_cuda_bindings_decide_whether_kernels_can_be_compiled(monkeypatch):
    for missing in "", "cuda.bindings is missing":
        monkeypatch.setattr(cuda_text, "missing_tools", lambda missing=missing: missing)
        assert stream_schedules.can_stream() == (not missing)


@pytest.mark.usefixtures("streaming")
def test_nothing_is_listed_for_gpus_before_hopper():
    op = HANDS["int4"].op
    assert listed(op)
    for sm in 80, 86, 89:
        assert listed(op, replace(gpus.H200, sm=sm)) == []


@pytest.mark.usefixtures("streaming")
def test_nothing_is_listed_for_ops_that_no_such_kernel_computes():
    for op in place_kernels(kernel_cases.rms_norm_linear(1, 256, 256)):
        assert listed(op) == []
    assert listed(Hand(rows=(40,)).op) == []  # no multiple of 16 rows


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("name", HANDS)
def test_nothing_is_listed_for_float32_activations(name):
    """Kernels that stream codes keep 22 bits of a factor, and torch keeps 24."""
    op = replace(HANDS[name], dtype="float32").op
    products = streamed_products(op)  # such a kernel could be written
    assert products.tensor("x").dtype is torch.float32
    assert listed(op) == [] and not any(s.cuda for s in space.with_streams(op))
    assert listed(replace(HANDS[name], dtype="float16").op)


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("name", HANDS)
def test_each_schedule_can_be_written(name):
    op = HANDS[name].op
    found = listed(op)
    # there are fewer of later ones, whose tiles have half of the rows or are shared
    assert 0 < len(found) <= MOST + MOST // 2 * (2 * len(SHARERS) - 1)
    assert len({s for s, _ in found}) == len(found)
    estimates = [us for _, us in found]
    assert estimates == sorted(estimates) and estimates[0] > 0
    for schedule, us in found:
        sharers = schedule.cooperating_blocks
        assert schedule.cuda and schedule.persistent_blocks == gpus.H200.sms // sharers * sharers
        write_stream_kernel(op, schedule, "kernel")
        assert estimated_stream_us(stream_layout(op, schedule)) == us


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("name", HANDS)
def test_schedules_are_listed_for_each_number_of_sharers_that_fits(name):
    hand = HANDS[name]
    rows = streamed_products(hand.op).rows
    kinds = Counter((s.cooperating_blocks, *(s.tiles[a] for a in rows)) for s, _ in listed(hand.op))
    fitting = {n for n in SHARERS if hand.columns % (64 * n) == 0}
    assert {sharers for sharers, *_ in kinds} == fitting and 1 in fitting
    # most schedules have whole tiles that are not shared
    (most, count), *others = kinds.most_common()
    assert most[0] == 1 and count <= MOST
    assert all(n <= MOST // 2 for _, n in others)


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize(("sms", "blocks"), [(132, 132), (131, 130), (3, 2)])
def test_blocks_that_share_columns_fill_whole_clusters(sms, blocks):
    found = listed(HANDS["int4"].op, replace(gpus.H200, sms=sms))
    assert {s.persistent_blocks for s, _ in found if s.cooperating_blocks == 2} == {blocks}
    assert {s.persistent_blocks for s, _ in found if s.cooperating_blocks == 1} == {sms}


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("kind", [{}, {"chosen": 0, "pieces": 2}])
def test_no_blocks_share_columns_of_experts(kind):
    experts = Experts(dtype="bfloat16", rows=1024, columns=1024, **kind)
    found = listed(experts.op)
    assert found and {s.cooperating_blocks for s, _ in found} == {1}


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize(("rows", "columns"), [(4096, 14336), (14336, 4096)])
def test_blocks_share_columns_of_a_wide_linear_with_16_rows(rows, columns):
    """Of few rows of x, each block computes all digits in less time than sums are exchanged."""
    for batch, shares in ((1, False), (16, True)):
        hand = Hand(codes="int4", rows=(rows,), columns=columns, group=128, batch=batch)
        found = listed(hand.op)
        best = min(us for s, us in found if s.cooperating_blocks == 2)
        alone = min(us for s, us in found if s.cooperating_blocks == 1)
        assert (best < alone) == shares
        assert (found[0][0].cooperating_blocks > 1) == shares


def estimate(hand: Hand) -> float:
    return estimated_stream_us(stream_layout(hand.op, hand.schedule))


#: A kernel whose ring is deep enough to fill the memory system, with rows for each SM.
DEEP = Hand(
    codes="int8",
    rows=(16 * 132 * 2,),
    columns=8192,
    group=0,
    tile=4096,
    stages=3,
    blocks=132,
    warps=8,
)


def test_the_estimate_grows_with_bytes():
    times = [
        estimate(replace(DEEP, rows=(rows,))) for rows in (16 * 132, 16 * 132 * 2, 16 * 132 * 4)
    ]
    assert times == sorted(times)
    # twice the rows take about twice the time of the copies
    assert times[2] - times[1] == pytest.approx(2 * (times[1] - times[0]), rel=0.05)
    read = 16 * 132 * 4 * 8192
    assert times[2] > 1e6 * read / gpus.H200.bandwidth


def test_the_estimate_grows_if_the_ring_is_too_shallow():
    times = [estimate(replace(DEEP, tile=1024, stages=stages)) for stages in (1, 2, 3, 6)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[2]


def test_the_estimate_grows_if_blocks_walk_different_numbers_of_tiles():
    even = estimate(DEEP)
    uneven = estimate(replace(DEEP, rows=(16 * (132 * 2 + 1),)))
    assert uneven > 1.3 * even


def of_three_rows(hand: Hand) -> float:
    """Return by how much the estimate grows with three more rows of x."""
    return estimate(replace(hand, batch=5)) - estimate(replace(hand, batch=2))


def test_blocks_that_share_columns_compute_digits_of_their_share():
    hand = replace(DEEP, columns=4096, tile=512)
    assert of_three_rows(replace(hand, sharers=2)) < 0.8 * of_three_rows(hand)


def test_the_estimate_of_blocks_that_share_columns_counts_warps_with_nothing_to_do():
    """A warp computes 256 columns of a row of x at a time, so short shares leave warps idle."""
    times = []
    for warps in (8, 7):  # that have columns of a row
        # one tile for each cluster, so warps load little from shared memory
        hand = replace(DEEP, rows=(16 * 66,), columns=2 * 256 * warps, tile=512, sharers=2, batch=5)
        divided = stream_layout(hand.op, hand.schedule)
        assert (divided.rounds, divided.row_warps) == (1, 8)
        times.append(of_three_rows(hand))
    assert times[1] > 0.95 * times[0]


def test_a_ring_that_does_not_fit_has_no_estimate():
    hand = replace(DEEP, tile=4096, stages=8)
    with pytest.raises(errors.CodegenError, match="bytes of shared memory"):
        estimate(hand)


# -- with the other generator ----------------------------------------------------------------------


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("name", ["int4", "int8", "float8"])
def test_schedules_of_both_generators_take_turns(name):
    op = HANDS[name].op
    found = space.with_streams(op)
    streams = [s for s, _ in listed(op)]
    assert [s for s in found if s.cuda] == streams
    others = [s for s in found if not s.cuda]
    assert others and len(set(found)) == len(found)
    kinds = [s.cuda for s in found[: 2 * len(streams)]]
    assert kinds == [kinds[0], not kinds[0]] * (len(kinds) // 2)


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("us", [0.0, 1e9])
def test_the_generator_of_the_lower_estimate_comes_first(us, monkeypatch):
    op = HANDS["int4"].op
    streams = [(s, us) for s, _ in listed(op)]
    monkeypatch.setattr(space, "stream_schedules", lambda op, device: streams)
    found = space.with_streams(op)
    assert found[0].cuda == (us == 0.0)
    assert found[1].cuda == (us != 0.0)


@pytest.mark.usefixtures("streaming")
def test_generated_programs_hold_the_helpers_once():
    case: Case = CASES["int8, residual"]
    ugraph, op, _ = streamed(case)
    assert ugraph.num_kernels == 1
    schedule = listed(op)[0][0]
    program = triton.generate(ugraph, [schedule])
    assert program.source.count("void copy_bytes(") == 1
    assert program.source.count("void multiply_digits(") == 1
    assert program.source.count("CUDA_HELPERS = ") == 1
    for text in "import triton", "@triton", "tl.":
        assert text not in program.source


@pytest.mark.usefixtures("streaming")
def test_programs_of_several_kernels_hold_the_helpers_once():
    hand = Hand(codes="int8", rows=(256,), columns=256, group=0)
    g = hand.graph
    graph = type(g)()
    tensors = [graph.input_like(t) for t in g.inputs]
    names = [f"more_{t.name}" for t in g.inputs]
    (first,) = graph.customized(tensors, hand.op.block)
    more = [
        graph.new_input(t.dims, t.dtype, name=name, constant=t.constant)
        for t, name in zip(g.inputs[1:], names[1:], strict=True)
    ]
    (second,) = graph.customized([first, *more], hand.op.block)
    graph.mark_output(second)
    ugraph = UGraph(graph, graph)
    schedules = [listed(op)[0][0] for op in place_kernels(ugraph)]
    source = triton.generate(ugraph, schedules).source
    assert source.count("void copy_bytes(") == 1
    assert source.count("__global__") == 2


@pytest.mark.usefixtures("streaming")
def test_files_without_such_kernels_have_no_such_helpers():
    ugraph, op, _ = streamed(CASES["int8, residual"])
    schedule = next(s for s in space.schedules(op, limit=10**6) if not s.cuda)
    assert "copy_bytes" not in triton.generate(ugraph, [schedule]).source


@pytest.mark.usefixtures("streaming")
def test_streams_are_listed_only_where_they_are_asked_for():
    op = HANDS["int4"].op
    assert not any(s.cuda for s in space.schedules(op, limit=10**6))
    assert not space.default_schedule(op).cuda


@pytest.mark.parametrize(
    "old, new", [(4, 8), (8, 4), (4, 3), (2, 5), (4, 1), (1, 4), (8, 12), (16, 3), (1, 12)]
)
def test_a_schedule_is_refitted_to_another_batch(old, new):
    tuned = Hand(rows=(4096,), columns=4096, group=128, has_norm=True, batch=old, blocks=132)
    other = replace(tuned, batch=new)
    # an op of one row has no such axis: relatives have the same axes, and one of them one row
    ops = [_with_batch(hand) for hand in (tuned, other)]
    schedule = replace(tuned, tile=32, stages=3, warps=8).schedule
    if old == 1:
        schedule = schedule.changed(tiles={**schedule.tiles, "m": 1})
    refitted = refit(schedule, *ops)
    write_stream_kernel(ops[1], refitted, "kernel")
    expected = {**schedule.tiles, "m": next_power_of_two(new)}
    assert dict(refitted.tiles) == expected and refitted.num_stages == 3


@pytest.mark.parametrize("sharers", [1, 2, 4])
def test_a_refitted_schedule_keeps_its_sharers(sharers):
    """They share a tile's columns, so they do not depend on how many chunks it has."""
    tuned = replace(HANDS["int4"], sharers=sharers, blocks=132, tile=32, stages=3, warps=8)
    for columns in (4096, 1024):
        other = replace(tuned, columns=columns, rows=(8192,))
        refitted = refit(tuned.schedule, tuned.op, other.op)
        assert refitted.cooperating_blocks == sharers
        assert stream_layout(other.op, refitted).sharers == sharers


def test_steps_from_a_schedule_change_its_sharers():
    """No step gives shares that do not fit, or more blocks than a cluster has."""
    for hand, sharers, others in (
        (HANDS["int4"], 1, {2}),
        (HANDS["int4"], 2, {1, 4}),
        (HANDS["int4"], 8, {4}),
        (HANDS["int8, few columns"], 1, set()),
    ):
        start = replace(hand, sharers=sharers, blocks=132, tile=32 if hand.group else 64)
        ugraph = UGraph(start.graph, start.graph)
        us = estimate(start)
        candidate = ScheduledCandidate(ugraph, (start.schedule,), us)
        found = neighbours([candidate], [candidate], gpus.H200, lambda op, device: [])
        schedules = [c.schedules[0] for c in found]
        assert schedules and {s.cooperating_blocks for s in schedules} - {sharers} == others
        for schedule in schedules:
            write_stream_kernel(start.op, schedule, "kernel")


COLUMNS = Hand(rows=(4096,), columns=4096, group=128, has_columns=True, scale_columns=(0,), tile=8)


@pytest.mark.usefixtures("streaming")
def test_tiles_of_column_major_words_have_16_or_32_rows():
    for hand, rows in ((COLUMNS, {16, 32}), (replace(COLUMNS, rows=(4112,)), {16})):
        found = listed(hand.op)
        assert {schedule.tiles["n"] for schedule, _ in found} == rows
        for schedule, _ in found:
            write_stream_kernel(hand.op, schedule, "kernel")


@pytest.mark.parametrize(
    "hand, rows", [(COLUMNS, 32), (COLUMNS, 16), (HANDS["int4"], 16), (HANDS["int4"], 8)]
)
def test_a_refitted_schedule_keeps_the_rows_of_its_tiles(hand, rows):
    tuned, other = (replace(hand, tile_rows=rows, rows=(n,)) for n in (4096, 8192))
    assert refit(tuned.schedule, tuned.op, other.op).tiles["n"] == rows


def _with_batch(hand: Hand) -> PlacedOp:
    """Return the op of a block graph with an axis of the batch, which may have one row."""
    if hand.batch > 1:
        return hand.op
    several = replace(hand, batch=2)
    axes = tuple(replace(a, size=1) if a.name == "m" else a for a in several.op.block.axes)
    g = KernelGraph()
    tensors = [
        g.new_input(
            (1, *t.dims[1:]) if t.name in ("x0", "residual0") else t.dims,
            t.dtype,
            name=t.name,
            constant=t.constant,
        )
        for t in several.graph.inputs
    ]
    g.mark_output(*g.customized(tensors, replace(several.op.block, axes=axes)))
    return place_kernels(UGraph(g, g))[0]


def test_a_batch_needs_registers_for_the_rows_that_are_loaded_together():
    one, four = (
        estimate_cuda(hand.op, hand.schedule, gpus.H200).registers
        for hand in (
            Hand(rows=(4096,), columns=4096, group=128, tile=32, warps=8, blocks=132),
            Hand(rows=(4096,), columns=4096, group=128, tile=32, warps=8, blocks=132, batch=4),
        )
    )
    assert four == one + 3 * 4 * 2  # a thread has two loads of 16 bytes for each row
