"""Block graphs with shifts that no kernel can stream are refused with a reason.

Other graphs with shifts are accepted, and their kernels give the results of float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mirage_hf.codegen.streams.finding import streamed_products
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.graph.block import BlockGraph, BlockOp
from mirage_hf.graph.execute import run_kernel_graph
from tests.helpers.cuda_on_cpu import CXX, ORDERS
from tests.helpers.rebuilt_graphs import (
    IN_WORDS,
    IN_WORDS_AXES,
    op_of,
    placed,
    rebuilt,
    rebuilt_graph,
    refusal,
    with_input,
)
from tests.helpers.streamed_graphs import SHIFTS, Hand

EVERY = ("n", "k", "r")


def exchanged(hand: Hand, outputs: tuple[str, ...] = (), **ops: tuple[BlockOp, ...]) -> BlockGraph:
    """Return the block graph of `hand` with other ops.

    Args:
        hand: A block graph that fits.
        outputs: Further outputs.
        **ops: What takes the place of an op, by its result.
    """
    block = hand.op.block
    stages = tuple(
        replace(stage, body=tuple(new for op in stage.body for new in ops.get(op.out, (op,))))
        for stage in block.stages
    )
    more = tuple(replace(block.outputs[0], value=value) for value in outputs)
    return replace(block, stages=stages, outputs=(*block.outputs, *more))


def of_rows(out: str, fn: str, *args: str | float) -> BlockOp:
    """Return an op of the rows."""
    return BlockOp(out, fn, args, ("n",))


def of_every(out: str, fn: str, *args: str | float) -> BlockOp:
    """Return an op of the rows and the columns."""
    return BlockOp(out, fn, args, EVERY)


def of_columns(out: str, fn: str, *args: str | float) -> BlockOp:
    """Return an op of the columns."""
    return BlockOp(out, fn, args, ("k", "r"))


#: Shifts that are added to scaled codes, to products, to sums of groups, and to sums.
OF_CODES, OF_PRODUCTS, OF_GROUPS, OF_SUMS = (
    Hand(codes="int4", dtype="float32", shifts=form) for form in SHIFTS
)
GATED, GATED_SUMS = replace(OF_CODES, has_gate=True), replace(OF_SUMS, has_gate=True)
TWICE = of_rows("twice", "mul", "sum0", 2.0)
SUM = op_of(OF_SUMS, "shifted0")
PART = "reads a value that is a part of another sum"
NO_ADD = "is add of codes in a way that it does not compute"
EARLY = "reads a sum before it ends"
NOT_ALL = "zero points or shifts are not those of all codes"

#: Graphs with shifts that are refused: a graph, what is changed in it, and why.
REFUSED_SHIFTS = {
    "zero points, too": (
        OF_CODES,
        {
            "scaled0": (
                of_every("less", "sub", "codes0", "shifts0"),
                of_every("scaled0", "mul", "less", "scales0"),
            )
        },
        "sum0 subtracts zero points, and adds shifts",
    ),
    "no scale": (OF_CODES, {"weight0": (of_every("weight0", "add", "codes0", "shifts0"),)}, NO_ADD),
    "a scale after the shift": (
        OF_CODES,
        {
            "weight0": (
                of_every("shifted", "add", "codes0", "shifts0"),
                of_every("weight0", "mul", "shifted", "scales0"),
            )
        },
        NO_ADD,
    ),
    "another scale after the shift": (
        OF_CODES,
        {
            "product0": (
                of_every("xs", "mul", "x", "scales0"),
                of_every("product0", "mul", "weight0", "xs"),
            )
        },
        "product0 is mul of codes",
    ),
    "two shifts": (
        OF_CODES,
        {
            "weight0": (
                of_every("once", "add", "scaled0", "shifts0"),
                of_every("weight0", "add", "once", "shifts0"),
            )
        },
        NO_ADD,
    ),
    "a shift that is subtracted": (
        OF_CODES,
        {"weight0": (of_every("weight0", "sub", "scaled0", "shifts0"),)},
        "weight0 is sub of codes",
    ),
    "scaled codes that are read again": (
        OF_CODES,
        {
            "product0": (
                of_every("more", "add", "weight0", "scaled0"),
                of_every("product0", "mul", "more", "x"),
            )
        },
        PART,
    ),
    "a product without columns of the shift": (
        OF_PRODUCTS,
        {"shifted0": (of_every("shifted0", "add", "product0", "shifts0"),)},
        NO_ADD,
    ),
    "the square of columns": (
        OF_PRODUCTS,
        {"shift0": (of_columns("xx", "mul", "x", "x"), of_every("shift0", "mul", "xx", "shifts0"))},
        NO_ADD,
    ),
    "scaled columns": (
        OF_PRODUCTS,
        {"shift0": (of_every("shift0", "mul", "scaled0", "shifts0"),)},
        NO_ADD,
    ),
    "a product that is squared": (
        OF_PRODUCTS,
        {
            "shifted0": (
                of_every("square", "mul", "product0", "product0"),
                of_every("shifted0", "add", "square", "shift0"),
            )
        },
        "square is mul of codes",
    ),
    "columns without the weight of a norm": (
        replace(OF_PRODUCTS, has_norm=True),
        {"shift0": (of_every("shift0", "mul", "x", "shifts0"),)},
        NO_ADD,
    ),
    "the sum of a group for each column": (
        replace(OF_GROUPS, scales_first=True),
        {
            "product0_over_r": (
                of_every("all", "add", "product0", "shift0"),
                BlockOp("product0_over_r", "sum", ("all",), ("n", "k"), over="r"),
            ),
            "shift0": (),
            "x_over_r": (
                BlockOp("x_over_r", "sum", ("x",), ("k",), over="r"),
                BlockOp("shift0", "mul", ("x_over_r", "shifts0"), ("n", "k")),
            ),
            "shifted0": (BlockOp("shifted0", "mul", ("product0_over_r", 1.0), ("n", "k")),),
        },
        NO_ADD,
    ),
    "the factor of a norm before the shift": (
        replace(OF_SUMS, has_norm=True),
        {
            "shifted0": (),
            "normed0": (
                of_rows("early", "mul", "sum0", "rms"),
                of_rows("normed0", "add", "early", "shift_sum0"),
            ),
        },
        EARLY,
    ),
    "a sum that is read earlier": (
        OF_SUMS,
        {"shifted0": (TWICE, SUM), "y": (of_rows("y", "mul", "shifted0", "twice"),)},
        "sum0 is a part of shifted0, and other values read it",
    ),
    "a sum that is read again": (
        OF_SUMS,
        {"y": (TWICE, of_rows("y", "mul", "shifted0", "twice"))},
        f"twice {PART}",
    ),
    "a sum of shifts that is read earlier": (
        OF_SUMS,
        {"shifted0": (replace(TWICE, args=("shift_sum0", 2.0)), SUM)},
        f"twice {EARLY}",
    ),
    "a sum of shifts that is read again": (
        OF_SUMS,
        {"y": (of_rows("y", "mul", "shifted0", "shift_sum0"),)},
        f"y {PART}",
    ),
    "a sum of shifts that is added twice": (
        OF_SUMS,
        {"shifted0": (SUM, of_rows("more", "add", "shifted0", "shift_sum0"))},
        f"more {PART}",
    ),
    "a sum of shifts that is squared": (
        OF_SUMS,
        {
            "shifted0": (
                of_rows("square", "mul", "shift_sum0", "shift_sum0"),
                of_rows("shifted0", "add", "sum0", "square"),
            )
        },
        f"square {EARLY}",
    ),
    "a sum that is an output": (OF_SUMS, {"outputs": ("sum0",)}, "sum0 is a part of a sum"),
    "a sum that an output is computed from": (
        OF_SUMS,
        {"shifted0": (TWICE, SUM), "outputs": ("twice",)},
        "sum0 is a part of shifted0",
    ),
    "a sum of shifts that is an output": (
        OF_SUMS,
        {"outputs": ("shift_sum0",)},
        "shift_sum0 is a part of a sum",
    ),
    "one product of two": (
        GATED_SUMS,
        {"shifted1": (of_rows("shifted1", "mul", "sum1", 1.0),)},
        NOT_ALL,
    ),
    "zero points of the other product": (
        GATED,
        {
            "scaled1": (
                of_every("less", "sub", "codes1", "shifts1"),
                of_every("scaled1", "mul", "less", "scales1"),
            ),
            "weight1": (),
            "product1": (of_every("product1", "mul", "scaled1", "x"),),
        },
        NOT_ALL,
    ),
    "a table": (replace(OF_CODES, codes="uint4", table="e2m1"), {}, "codes are floats and have"),
    "float8": (replace(OF_SUMS, codes="float8_e4m3fn"), {}, "codes are floats and have"),
    "packed shifts": (
        IN_WORDS,
        {
            "centered0": (BlockOp("centered0", "sub", ("codes0", 8.0), IN_WORDS_AXES),),
            "product0": (
                BlockOp("scaled", "mul", ("centered0", "scaled0"), IN_WORDS_AXES),
                BlockOp("shift", "mul", ("zeros0", "x"), IN_WORDS_AXES),
                BlockOp("product0", "add", ("scaled", "shift"), IN_WORDS_AXES),
            ),
        },
        "shifts are codes",
    ),
}


@pytest.mark.parametrize("name", REFUSED_SHIFTS)
def test_shifts_are_refused_if_no_kernel_adds_them(name: str) -> None:
    hand, changes, why = REFUSED_SHIFTS[name]
    op = rebuilt(hand, exchanged(hand, **changes))
    assert why in refusal(lambda: streamed_products(op))


@pytest.mark.parametrize("hand", [OF_CODES, OF_PRODUCTS, OF_GROUPS, OF_SUMS], ids=SHIFTS)
def test_shifts_are_constant_and_lie_without_gaps(hand: Hand) -> None:
    assert streamed_products(rebuilt(hand, strides={"shifts00": (1, 64, 1)})).has_offsets
    for changes in (
        {"changing": ("shifts00",)},
        {"strides": {"shifts00": (8, 1, 1)}},
        {"strides": {"shifts00": (1, 72, 1)}},
    ):
        refusal(lambda changes=changes: streamed_products(rebuilt(hand, **changes)))


def test_shifts_of_codes_have_the_rows_and_the_groups():
    for axes, dims in ((("n", None, None), (64, 1, 1)), ((None, "k", None), (1, 4, 1))):
        block = with_input(OF_CODES, "shifts0", axes)
        op = rebuilt(OF_CODES, block, dims={"shifts00": dims})
        assert NO_ADD in refusal(lambda op=op: streamed_products(op))


def with_scales_for_shifts(hand: Hand) -> BlockGraph:
    """Return the block graph of `hand` with its scales as shifts, too."""
    return exchanged(hand, weight0=(of_every("weight0", "add", "scaled0", "scales0"),))


#: Graphs with shifts that are accepted: `hand`, and what is changed in its graph.
ACCEPTED_SHIFTS = {
    "scales that are shifts, too": (OF_CODES, with_scales_for_shifts),
    "the shifts of the other product": (
        GATED,
        lambda hand: exchanged(hand, weight1=(of_every("weight1", "add", "shifts0", "scaled1"),)),
    ),
    "sums that are squared": (
        OF_SUMS,
        lambda hand: exchanged(hand, y=(of_rows("y", "mul", "shifted0", "shifted0"),)),
    ),
    "a shift that nothing adds": (
        OF_SUMS,
        lambda hand: exchanged(hand, shifted0=(of_rows("shifted0", "add", "sum0", "sum0"),)),
    ),
    "scales of blocks, and shifts of rows": (
        Hand(
            codes="int8",
            rows=(128,),
            square=64,
            columns=512,
            group=128,
            dtype="float32",
            scales_first=False,
            shifts="groups",
        ),
        lambda hand: hand.op.block,
    ),
}


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")
@pytest.mark.parametrize("name", ACCEPTED_SHIFTS)
def test_other_graphs_with_shifts_give_the_results_of_float64(name: str, tmp_path) -> None:
    hand, changed = ACCEPTED_SHIFTS[name]
    graph = rebuilt_graph(hand, changed(hand))
    kernel = write_stream_kernel(placed(graph), hand.schedule, "kernel")
    (want,) = run_kernel_graph(graph, hand.inputs, torch.float64)
    for order in ORDERS:
        got = hand.run(kernel, "kernel", order, tmp_path)
        assert not isinstance(got, str), got
        assert hand.error(got, want) <= (2 if "squared" in name else 1)
