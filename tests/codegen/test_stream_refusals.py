"""Block graphs and schedules that no kernel can stream are refused with a reason.

Graphs that are nearly refused are accepted, and their kernels give the results of float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mirage_hf.codegen import cuda_text
from mirage_hf.codegen.placement import Append, PlacedOp, place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.streams import layout as layouts
from mirage_hf.codegen.streams.finding import streamed_products
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.codegen.streams.products import ZEROS
from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
)
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.strided import flat
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.dtypes import E2M1
from mirage_hf.ops.table import as_dtype
from mirage_hf.tune.measure import random_inputs
from tests.helpers.cuda_on_cpu import CXX, ORDERS, run_kernel
from tests.helpers.rebuilt_graphs import (
    op_of,
    placed,
    rebuilt,
    rebuilt_graph,
    refusal,
    with_axis,
    with_body,
    with_input,
)
from tests.helpers.streamed_graphs import Hand

NO_ORDER = "the codes of codes0 lie neither row after row, nor as in GPTQ, AWQ"


def test_codes_have_to_lie_row_after_row():
    hand = Hand(codes="int8")
    wide = rebuilt(hand, strides={"codes00": (320, 64, 1)})
    assert NO_ORDER in refusal(lambda: streamed_products(wide))
    turned = rebuilt(hand, strides={"codes00": (64, 4096, 1)})
    assert NO_ORDER in refusal(lambda: streamed_products(turned))


def test_activations_have_to_lie_side_by_side():
    op = rebuilt(Hand(), strides={"x0": (512, 128, 1)})
    assert "x does not have all columns side by side" in refusal(lambda: streamed_products(op))


@pytest.mark.parametrize(("codes", "zero"), [("uint4", 7.0), ("int4", 8.0), ("uint8", 127.0)])
def test_the_zero_point_has_to_be_the_middle(codes, zero):
    hand = Hand(codes=codes)
    if codes == "int4":
        product = op_of(hand, "product0")
        centered = BlockOp("centered0", "sub", ("codes0", zero), product.axes)
        first = hand.op.block.stages[0]
        body = (centered, *first.body)
        body = tuple(
            replace(op, args=("centered0", *op.args[1:])) if op.out == "product0" else op
            for op in body
        )
        block = hand.op.block
        block = replace(block, stages=(replace(first, body=body), *block.stages[1:]))
    else:
        old = op_of(hand, "centered0")
        block = with_body(hand, centered0=replace(old, args=("codes0", zero)))
    text = refusal(lambda: streamed_products(rebuilt(hand, block)))
    assert f"subtracts {zero} from codes, not {ZEROS[as_dtype(codes)]}" in text


def test_codes_have_to_be_multiplied_with_one_value():
    hand = Hand(has_gate=True, has_norm=True, scales_first=False)
    old = op_of(hand, "product1")
    block = with_body(hand, product1=replace(old, args=("centered1", "x")))
    text = refusal(lambda: streamed_products(rebuilt(hand, block)))
    assert "multiplied with different values" in text


def test_there_may_be_two_products():
    hand = Hand(codes="int8", group=0, has_gate=True)
    block = hand.op.block
    first, second = block.stages
    third = replace(op_of(hand, "product1"), out="product2", args=("codes1", "x"))
    body = (*first.body, third)
    sums = (*first.accumulators, Accumulator("plain2", "product2", "sum", ("n",)))
    end = second.body[-1]
    more = BlockOp("all", "add", (end.args[0], "plain2"), ("n",))
    after = (*second.body[:-1], more, replace(end, args=("all", 1.0)))
    block = replace(block, stages=(Stage("k", body, sums), Stage(None, after)))
    text = refusal(lambda: streamed_products(rebuilt(hand, block)))
    assert "3 products with codes" in text


@pytest.mark.parametrize(
    ("hand", "why"),
    [
        (Hand(rows=(40,)), "no multiple of 16"),
        (Hand(rows=(20,), has_gate=True), "no multiple of 8"),
        (Hand(rows=(64, 24)), "no multiple of 16"),
        (Hand(codes="int8", group=48, columns=192), "groups of 48 do not fit"),
        (Hand(codes="uint4", group=16), "groups of 16 do not fit"),
        (Hand(codes="int8", group=0, columns=352), "352 columns"),
        (
            Hand(codes="float8_e4m3fn", rows=(128,), square=128, group=128, scales_first=False),
            "no multiple of 16 bytes",
        ),
    ],
    ids=str,
)
def test_sizes_have_to_fit(hand, why):
    assert why in refusal(lambda: streamed_products(hand.op))


def test_no_axis_may_be_split():
    hand = Hand(codes="int8", group=0)
    block = hand.op.block
    split = replace(block.axis("k"), split_axis="s")
    axes = (block.axis("n"), Axis("s", 2, Role.GRID), split)
    body = block.stages[0].body
    sums = (Accumulator("plain0", "product0", "sum", ("n", "s")),)
    ends = (Stage("k", body, sums),)
    partial_sums = (BlockOutput("plain0", ("s", "n"), "float32"),)
    block = replace(block, axes=axes, stages=ends, outputs=partial_sums)
    text = refusal(lambda: streamed_products(rebuilt(hand, block)))
    assert "an axis is split" in text


def test_nothing_is_appended_to_a_cache():
    op = Hand().op
    for changed in replace(op, appends=(Append(0, 0, 8),)), replace(op, caches=frozenset({0})):
        assert "appends to a cache" in refusal(lambda op=changed: streamed_products(op))


def test_codes_and_scales_have_to_be_constant():
    g = KernelGraph()
    hand = Hand()
    tensors = [g.new_input(t.dims, t.dtype, name=t.name) for t in hand.op.operands]
    g.mark_output(*g.customized(tensors, hand.op.block))
    (op,) = place_kernels(UGraph(g, g))
    assert "may change" in refusal(lambda: streamed_products(op))


def test_the_loop_adds_up_and_nothing_else():
    hand = Hand(has_norm=True)
    block = hand.op.block
    first = block.stages[0]
    sums = tuple(
        replace(a, kind="max") if a.out == "squares_over_r" else a for a in first.accumulators
    )
    block = replace(block, stages=(replace(first, accumulators=sums), *block.stages[1:]))
    assert "no plain sum" in refusal(lambda: streamed_products(rebuilt(hand, block)))


@pytest.mark.parametrize("square", [8, 24])
def test_a_tile_of_rows_has_one_row_of_scales(square):
    rows = (2 * square if square > 8 else 64,)
    shape = {"rows": rows, "square": square, "columns": 512, "group": 128}
    hand = Hand(codes="float8_e4m3fn", scales_first=False, **shape)
    refusal(lambda: streamed_products(hand.op))


def test_the_loop_has_no_maximum_of_inner_columns():
    hand = Hand()
    block = hand.op.block
    first, second = block.stages
    most = BlockOp("most", "max", ("x",), ("k",), over="r")
    sums = (*first.accumulators, Accumulator("total", "most", "sum", ()))
    end = replace(second.body[-1], args=("sum0", "total"))
    after = replace(second, body=(*second.body[:-1], end))
    block = replace(block, stages=(Stage("k", (*first.body, most), sums), after))
    refusal(lambda: streamed_products(rebuilt(hand, block)))


def test_a_block_has_1024_threads_at_most():
    hand = Hand(warps=32)
    refusal(hand.kernel)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batch": 1}, "has tiles of 16 along n"),
        ({"tile_rows": 64}, "has tiles of 16 along n"),
        ({"rows": (64, 16)}, "has tiles of 16 along n"),
        ({"has_gate": True}, "has tiles of 8 along n"),
        ({"codes": "float8_e4m3fn", "square": 16}, "has tiles of 1 along n, 16 along o"),
        ({"codes": "float8_e4m3fn", "square": 48, "rows": (96,)}, "tiles would cross them"),
    ],
    ids=str,
)
def test_sizes_of_two_sets_of_rows_have_to_fit(changes, why):
    two = Hand(batch=4, tile_rows=32)
    assert layouts.stream_layout(two.op, two.schedule).sets == 2
    other = replace(two, **changes)
    text = refusal(lambda: layouts.stream_layout(other.op, other.schedule))
    assert why in text, text


def test_a_schedule_has_to_fit():
    hand = Hand()
    op, schedule = hand.op, hand.schedule
    wrong_rows = schedule.changed(tiles={**schedule.tiles, "n": 32})
    text = refusal(lambda: layouts.stream_layout(op, wrong_rows))
    assert "has tiles of 16 along n" in text
    missing = schedule.changed(tiles={"n": 16, "k": 1})
    assert "tiles are given for" in refusal(lambda: layouts.stream_layout(op, missing))
    rows = Hand(codes="int8", group=0)
    short = rows.schedule.changed(tiles={"n": 16, "k": 16})
    text = refusal(lambda: layouts.stream_layout(rows.op, short))
    assert "chunks of 16 columns are no multiple" in text
    deep = schedule.changed(num_stages=64, tiles={**schedule.tiles, "k": 4})
    large = Hand(columns=65536, rows=(64,))
    large_schedule = deep.changed(tiles={**schedule.tiles, "k": 1024})
    text = refusal(lambda: write_stream_kernel(large.op, large_schedule, "kernel"))
    assert "bytes of shared memory, a block has" in text


def test_persistent_blocks_belong_to_ops_with_codes():
    hand = Hand()
    without = hand.schedule.changed(persistent_blocks=0)
    text = refusal(lambda: cuda_text.plan_kernel(hand.op, without, "kernel"))
    assert "kernels that read codes have persistent blocks" in text
    g = KernelGraph()
    x = g.new_input((16, 64), "float16")
    axes = (Axis("m", 16, Role.GRID), Axis("k", 64, Role.LOOP))
    block = BlockGraph(
        axes,
        (BlockInput("x", (0,), ("m", "k")),),
        (Stage("k", (), (Accumulator("sum", "x", "sum", ("m",)),)),),
        (BlockOutput("sum", ("m",), "float16"),),
    )
    g.mark_output(*g.customized([x], block))
    (op,) = place_kernels(UGraph(g, g))
    schedule = Schedule({"m": 16, "k": 64}, cuda=True, persistent_blocks=4)
    text = refusal(lambda: cuda_text.plan_kernel(op, schedule, "kernel"))
    assert "others have none" in text
    shares = hand.schedule.changed(cooperating_blocks=2)
    assert cuda_text.plan_kernel(hand.op, shares, "kernel").is_clustered
    for schedule in (shares.changed(mma=True), shares.changed(persistent_blocks=0)):
        text = refusal(lambda schedule=schedule: cuda_text.plan_kernel(hand.op, schedule, "kernel"))
        assert "no cooperating blocks unless they stream codes" in text
        assert "leave mma and cooperating_blocks out" in text


def test_columns_have_to_be_in_the_order_of_the_codes():
    hand = Hand(columns=64 * 64, group=64)
    op, block = hand.op, hand.op.block
    (x,) = (i for i in block.inputs if i.name == "x")
    turned = replace(x, axes=tuple("r" if a == "k" else "k" if a == "r" else a for a in x.axes))
    inputs = tuple(turned if i.name == "x" else i for i in block.inputs)
    text = refusal(lambda: streamed_products(rebuilt(hand, replace(block, inputs=inputs))))
    assert "x does not have all columns side by side" in text
    assert streamed_products(op)


@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_codes_are_multiplied_with_no_result_of_a_reduction(reduction):
    hand = Hand()
    block = hand.op.block
    first, *rest = block.stages
    most = BlockOp("most", reduction, ("x",), ("k",), over="r")
    shared = BlockOp("shared", "div", ("x", "most"), ("k", "r"))
    body = tuple(
        replace(o, args=tuple("shared" if a == "x" else a for a in o.args)) for o in first.body
    )
    block = replace(block, stages=(replace(first, body=(most, shared, *body)), *rest))
    refusal(lambda: streamed_products(rebuilt(hand, block)))


@pytest.mark.parametrize("name", ["row", "t", "stores", "columns", "warp", "sum_1", "own_tile"])
def test_values_may_have_names_that_the_text_uses(name):
    hand = Hand(has_residual=True)
    block = hand.op.block

    def named(a):
        return name if a == "residual" else a

    inputs = tuple(replace(i, name=named(i.name)) for i in block.inputs)
    stages = tuple(
        replace(s, body=tuple(replace(o, args=tuple(map(named, o.args))) for o in s.body))
        for s in block.stages
    )
    op = rebuilt(hand, replace(block, inputs=inputs, stages=stages))
    text = write_stream_kernel(op, hand.schedule, "kernel").source
    assert f"const float {name}_ = " in text and f"const float {name} = " not in text


def test_a_batch_has_16_rows_at_most():
    assert streamed_products(Hand(batch=16).op).batch_size == 16
    text = refusal(lambda: streamed_products(Hand(batch=17).op))
    assert "the other factor has 17 rows, more than 16" in text


#: Schedules whose blocks cannot share columns.
UNSHARED = [
    (
        Hand(columns=1024, sharers=16, blocks=32),
        "16 cooperating blocks, but a cluster has 8 blocks at most",
    ),
    (Hand(columns=320, sharers=2), "shares of 320 columns would be no multiples of 64"),
    (
        Hand(columns=704, group=32, sharers=4, blocks=4),
        "shares of 704 columns would be no multiple",
    ),
    (Hand(codes="int8", columns=448, group=0, tile=64, sharers=2), "be no multiples of 64"),
    (Hand(columns=384, group=128, sharers=2), "shares of 192 columns would cut groups of 128"),
    (Hand(columns=256, group=256, sharers=4, blocks=4), "shares of 64 columns would cut groups"),
    (Hand(columns=512, sharers=4), "4 cooperating blocks, but there are fewer blocks; give fewer"),
]


@pytest.mark.parametrize(("hand", "why"), UNSHARED, ids=str)
def test_blocks_share_columns_that_fit(hand, why):
    assert why in refusal(lambda: layouts.stream_layout(hand.op, hand.schedule))
    assert why in refusal(hand.kernel)
    alone = replace(hand, sharers=1)
    assert layouts.stream_layout(alone.op, alone.schedule).share == hand.columns


@pytest.mark.parametrize(
    ("hand", "share"),
    [
        (Hand(columns=512, sharers=8, blocks=8), 64),
        (Hand(codes="int8", columns=384, group=0, tile=64, sharers=2), 192),
        (Hand(columns=384, group=192, tile=1, sharers=2), 192),
        (Hand(columns=512, group=32, sharers=4, blocks=4), 128),
    ],
    ids=str,
)
def test_shares_that_nearly_do_not_fit_are_accepted(hand, share):
    divided = layouts.stream_layout(hand.op, hand.schedule)
    assert divided.share == share
    assert divided.blocks % hand.sharers == 0 < divided.walkers
    assert hand.kernel().is_clustered


@pytest.mark.parametrize(("blocks", "walkers"), [(2, 1), (3, 1), (7, 3), (8, 4), (100, 4)])
def test_blocks_that_fill_no_cluster_are_left_out(blocks, walkers):
    hand = Hand(rows=(64,), columns=512, sharers=2, blocks=blocks)  # four tiles
    divided = layouts.stream_layout(hand.op, hand.schedule)
    assert (divided.walkers, divided.blocks) == (walkers, 2 * walkers)
    assert hand.kernel().grid == 2 * walkers


def test_a_batch_is_one_axis():
    hand = Hand(columns=256, group=64)
    dims = {"x0": (2, 1, 4, 64)}
    one = rebuilt(hand, with_axis(hand, Axis("l", 2, Role.GRID)), dims=dims)
    assert streamed_products(one).batch == "l"
    hand = replace(hand, batch=3)
    two = rebuilt(hand, with_axis(hand, Axis("l", 2, Role.GRID)), dims={"x0": (2, 3, 4, 64)})
    text = refusal(lambda: streamed_products(two))
    assert "other axes than the rows and columns of the codes, and a batch" in text


def test_rows_of_a_batch_belong_to_the_grid():
    hand = Hand(batch=2)
    axes = tuple(replace(a, role=Role.TILE) if a.name == "m" else a for a in hand.op.block.axes)
    op = rebuilt(hand, replace(hand.op.block, axes=axes))
    text = refusal(lambda: streamed_products(op))
    assert "other axes than the rows and columns of the codes, and a batch" in text


@pytest.mark.parametrize(("dtype", "gap"), [("bfloat16", 4), ("float16", 12), ("float32", 2)])
def test_rows_of_a_batch_begin_at_multiples_of_16_bytes(dtype, gap):
    hand = Hand(batch=2, dtype=dtype)
    odd = rebuilt(hand, strides={"x0": (256 + gap, 64, 1)})
    text = refusal(lambda: streamed_products(odd))
    assert "the rows of x do not begin at multiples of 16 bytes" in text
    even = rebuilt(hand, strides={"x0": (256 + 2 * gap, 64, 1)})
    assert streamed_products(even).batch_stride("x") == 256 + 2 * gap


def test_outputs_have_the_batch():
    hand = Hand(batch=2, has_residual=True)
    block = with_input(hand, "residual", (None, "n"))
    first, second = block.stages
    alone = BlockOp("alone", "mul", ("residual", 2.0), ("n",))
    stages = (first, replace(second, body=(*second.body, alone)))
    outputs = (*block.outputs, BlockOutput("alone", ("n",), hand.dtype))
    block = replace(block, stages=stages, outputs=outputs)
    op = rebuilt(hand, block, dims={"residual0": (1, 64)})
    text = refusal(lambda: streamed_products(op))
    assert "output alone does not have the rows of the codes" in text


#: Graphs of a batch that are accepted: `hand`, and what is changed in its graph.
ACCEPTED = {
    "an input of the loop that changes and has no batch": (
        Hand(batch=3, has_norm=True),
        lambda hand: {"changing": ("gamma0",)},
    ),
    "an input of the loop that is constant and has the batch": (
        Hand(batch=3, has_norm=True),
        lambda hand: {
            "block": with_input(hand, "gamma", ("m", "k", "r")),
            "dims": {"gamma0": (3, 4, 64)},
        },
    ),
    "a residual without the batch": (
        Hand(batch=3, has_residual=True, rows=(32, 16)),
        lambda hand: {
            "block": with_input(hand, "residual", (None, "n")),
            "dims": {"residual0": (1, 48)},
        },
    ),
    "an output whose rows come before the batch": (
        Hand(batch=5, codes="int8", group=0, tile=64),
        lambda hand: {
            "block": replace(hand.op.block, outputs=(BlockOutput("y", ("n", "m"), hand.dtype),))
        },
    ),
    "an output whose batch is in the middle": (
        Hand(
            batch=2,
            codes="float8_e4m3fn",
            rows=(128,),
            square=64,
            columns=512,
            group=128,
            scales_first=False,
        ),
        lambda hand: {
            "block": replace(
                hand.op.block, outputs=(BlockOutput("y", ("n", "m", "o"), hand.dtype),)
            )
        },
    ),
    "rows of x with gaps": (
        Hand(batch=4, codes="int4"),
        lambda hand: {"strides": {"x0": (264, 64, 1)}},
    ),
}


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")
@pytest.mark.parametrize("name", ACCEPTED)
def test_other_graphs_of_a_batch_give_the_results_of_float64(name, tmp_path):
    hand, changes = ACCEPTED[name]
    graph = rebuilt_graph(hand, **changes(hand))
    kernel = write_stream_kernel(placed(graph), hand.schedule, "kernel")
    inputs = random_inputs(graph, "cpu")
    (want,) = run_kernel_graph(graph, inputs, torch.float64)
    for order in ORDERS:
        got = torch.full(want.shape, torch.nan, dtype=as_dtype(hand.dtype))
        sizes = kernel.grid, kernel.threads, kernel.shared
        tensors = [*(flat(x) for x in inputs), got]
        assert run_kernel(kernel.source, "kernel", *sizes, tensors, order, tmp_path) == ""
        assert hand.error(got, want) <= 1


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")
def test_a_batch_may_have_one_row(tmp_path):
    hand = Hand(has_norm=True, has_residual=True)
    block = with_axis(hand, Axis("l", 1, Role.GRID))
    graph = rebuilt_graph(hand, block, dims={"x0": (1, 1, 4, 64)})
    schedule = hand.schedule.changed(tiles={**hand.schedule.tiles, "l": 1})
    kernel = write_stream_kernel(placed(graph), schedule, "kernel")
    inputs = random_inputs(graph, "cpu")
    (want,) = run_kernel_graph(graph, inputs, torch.float64)
    got = torch.full(want.shape, torch.nan, dtype=as_dtype(hand.dtype))
    sizes = kernel.grid, kernel.threads, kernel.shared
    assert run_kernel(kernel.source, "kernel", *sizes, [*inputs, got], 0, tmp_path) == ""
    assert hand.error(got, want) <= 1


def linear_with(
    *ops: BlockOp,
    codes: str = "uint4",
    scale: str = "bfloat16",
    groups: int = 4,
    more: tuple[str, ...] = (),
    scale_strides: tuple[int, ...] | None = None,
) -> PlacedOp:
    """Return a linear whose loop has other ops: the sum of `p` over the columns.

    Args:
        ops: The ops. They read `x`, the codes `c`, scales `s` and other inputs.
        codes: The dtype of the codes.
        scale: The dtype of the scales.
        groups: How many groups of 64 columns there are.
        more: Other inputs: "u" has one element for each row, and "c1" holds codes.
        scale_strides: The strides of the scales. None: they lie row after row.
    """
    whole = 64, groups, 64
    dims = {"x": (1, groups, 64), "s": (64, groups, 1), "u": (64, 1, 1), "c": whole, "c1": whole}
    axes = {
        "x": (None, "k", "r"),
        "s": ("n", "k", None),
        "u": ("n", None, None),
    }
    names = ("x", "c", "s", *more)
    g = KernelGraph()
    tensors, inputs = [], []
    for n, name in enumerate(names):
        dtype = {"s": scale, "c": codes}.get(name[0], "bfloat16")
        strides = scale_strides if name == "s" else None
        tensors.append(g.new_input(dims[name], dtype, strides, name=name, constant=name != "x"))
        inputs.append(BlockInput(name, (n,), axes.get(name, ("n", "k", "r"))))
    sums = [op.out for op in ops if op.out.startswith("p")]
    loop = Stage("k", ops, tuple(Accumulator(f"o_{p}", p, "sum", ("n", "r")) for p in sums))
    ends = [BlockOp(f"y_{p}", "sum", (f"o_{p}",), ("n",), over="r") for p in sums]
    ends.append(BlockOp("y", "mul", (f"y_{sums[0]}", f"y_{sums[-1]}"), ("n",)))
    block = BlockGraph(
        (Axis("n", 64, Role.GRID), Axis("k", groups, Role.LOOP), Axis("r", 64, Role.TILE)),
        tuple(inputs),
        (loop, Stage(None, tuple(ends))),
        (BlockOutput("y", ("n",), "float32"),),
    )
    g.mark_output(*g.customized(tensors, block))
    return placed(g)


EVERY = ("n", "k", "r")
CENTRED = BlockOp("z", "sub", ("c", 8.0), EVERY)


def test_no_factor_is_left_out() -> None:
    """A scale times x times a value of rows is no product of a scale and columns."""
    op = linear_with(
        CENTRED,
        BlockOp("xs", "mul", ("x", "s"), EVERY),
        BlockOp("xsu", "mul", ("xs", "u"), EVERY),
        BlockOp("p", "mul", ("z", "xsu"), EVERY),
        more=("u",),
    )
    assert "p is mul of codes in a way" in refusal(lambda: streamed_products(op))


def test_products_have_each_factor_equally_often() -> None:
    op = linear_with(
        CENTRED,
        BlockOp("z1", "sub", ("c1", 8.0), EVERY),
        BlockOp("p", "mul", ("z", "x"), EVERY),
        BlockOp("q", "mul", ("z1", "x"), EVERY),
        BlockOp("p1", "mul", ("q", "x"), EVERY),
        more=("c1",),
    )
    assert "multiplied with different values" in refusal(lambda: streamed_products(op))


@pytest.mark.parametrize("codes", ["int4", "uint8", "int8", "uint4"])
def test_codes_of_4_bit_floats_are_unsigned_and_packed(codes: str) -> None:
    op = linear_with(
        BlockOp("z", "lookup", ("c",), EVERY, attrs=(("values", E2M1),)),
        BlockOp("p", "mul", ("z", "x"), EVERY),
        codes=codes,
    )
    if codes == "uint4":
        assert streamed_products(op).values == E2M1
    else:
        assert f"looks up codes of torch.{codes}" in refusal(lambda: streamed_products(op))


@pytest.mark.parametrize(("rows", "groups"), [(16, 3), (8, 4), (8, 3)])
def test_scales_of_a_tile_have_to_be_multiples_of_16_bytes(rows: int, groups: int) -> None:
    op = linear_with(
        CENTRED,
        BlockOp("xs", "mul", ("x", "s"), EVERY),
        BlockOp("p", "mul", ("z", "xs"), EVERY),
        groups=groups,
        scale="float8_e8m0fnu",
    )
    tiles = {"n": rows, "k": 1, "r": 64}
    schedule = Schedule(tiles, num_stages=2, num_warps=2, persistent_blocks=3, cuda=True)
    if rows * groups % 16:
        assert "multiple of 16 bytes" in refusal(lambda: layouts.stream_layout(op, schedule))
    else:
        assert layouts.stream_layout(op, schedule).rows == rows


@pytest.mark.parametrize(("rows", "groups"), [(16, 1), (8, 1), (8, 2)])
def test_scales_of_a_group_have_to_be_multiples_of_16_bytes(rows: int, groups: int) -> None:
    """If scales are column-major, a copy brings those of one group of a tile."""
    op = linear_with(
        CENTRED,
        BlockOp("xs", "mul", ("x", "s"), EVERY),
        BlockOp("p", "mul", ("z", "xs"), EVERY),
        scale="float8_e8m0fnu",
        scale_strides=(1, 64, 1),
    )
    tiles = {"n": rows, "k": groups, "r": 64}
    schedule = Schedule(tiles, num_stages=2, num_warps=2, persistent_blocks=3, cuda=True)
    if rows % 16:
        assert "multiple of 16 bytes" in refusal(lambda: layouts.stream_layout(op, schedule))
    else:
        assert layouts.stream_layout(op, schedule).scale_bytes(0) == 16
