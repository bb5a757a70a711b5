"""Schedules: their text, their errors, and the kernels that they give."""

from dataclasses import replace

import pytest

from mirage_hf import errors
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.tune import space
from mirage_hf.tune.refit import clip
from tests.helpers import kernel_cases


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


def test_a_kernel_reads_a_view_by_the_strides_that_torch_gives_it():
    ugraph = kernel_cases.split_matmul(3, 100, 37, 3, view=True)
    assert place_kernels(ugraph)[1].inputs[0].strides == (37, 3 * 37, 1) and place_kernels(ugraph)[
        1
    ].inputs[0].dims == (3, 3, 37)


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
    """A schedule for a long loop is resized to shorter ones.

    As many blocks share the loop as can have work.
    """
    chosen = Schedule({"m": 1, "n": 64, "k": 128}, cooperating_blocks=16)
    shared = {}
    for k in (8192, 5000, 1100, 1024, 300, 129, 128, 40):
        u = kernel_cases.rms_norm_linear(1, k, 256)
        (op,) = u.block_ops
        schedule = clip(chosen, op.block)
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
    """The text of `run` writes into given tensors instead of new ones.

    Results of library calls are copied into them.
    """
    source = triton.generate(
        kernel_cases.rms_norm_linear(1, 512, 64), [Schedule({"m": 1, "n": 8, "k": 512})]
    ).source
    assert "if out is None else out[0]" in source and "copy_" not in source
    library = library_ugraph(kernel_cases.rms_norm_linear(1, 512, 64).program)
    assert "return [out[0].copy_(" in triton.generate(library).source


@pytest.mark.parametrize(
    "schedule, text",
    [
        (Schedule({}), "Schedule(tiles={})"),
        (Schedule({"n": 8}), "Schedule(tiles={'n': 8})"),
        (
            Schedule({"n": 8, "k": 128, "m": 1}, num_warps=1, num_stages=3),
            "Schedule(tiles={'k': 128, 'm': 1, 'n': 8}, num_warps=1, num_stages=3)",
        ),
        (
            Schedule({"m": 64, "n": 64, "k": 32}, mma=True, weights_first=False, evict_first=False),
            "Schedule(tiles={'k': 32, 'm': 64, 'n': 64}, mma=True, weights_first=False, "
            "evict_first=False)",
        ),
        (
            Schedule(
                {"m": 1, "n": 8, "k": 256},
                reduce_after_loop=False,
                cooperating_blocks=4,
                prefetch_steps=2,
                trigger_early=True,
            ),
            "Schedule(tiles={'k': 256, 'm': 1, 'n': 8}, reduce_after_loop=False, "
            "cooperating_blocks=4, prefetch_steps=2, trigger_early=True)",
        ),
    ],
)
def test_a_schedule_prints_as_python_that_makes_it_again(schedule, text):
    assert repr(schedule) == text
    assert eval(repr(schedule), {"Schedule": Schedule}) == schedule
