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
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.codegen.streams.products import ZEROS, streamed_products
from mirage_hf.errors import CodegenError
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
from tests.helpers.streamed_graphs import SHIFTS, Hand


def refusal(call) -> str:
    """Return the text of the error that a call raises."""
    with pytest.raises(CodegenError) as raised:
        call()
    return str(raised.value)


def rebuilt_graph(
    hand: Hand, block: BlockGraph | None = None, strides=None, dims=None, changing=()
) -> KernelGraph:
    """Return a kernel graph of another block graph with the operands of `hand`.

    Args:
        hand: A block graph that fits.
        block: The other block graph. None: that of `hand`.
        strides: Strides of operands, by name. Others are those of `hand`, unless dims change.
        dims: Dims of operands, by name. Others are those of `hand`.
        changing: Names of operands that are not constant. Others are as in `hand`.
    """
    g = KernelGraph()
    old = hand.op
    strides, dims = strides or {}, dims or {}
    tensors = [
        g.new_input(
            dims.get(t.name, t.dims),
            t.dtype,
            strides.get(t.name, None if t.name in dims else t.strides),
            name=t.name,
            constant=t.constant and t.name not in changing,
        )
        for t in old.operands
    ]
    g.mark_output(*g.customized(tensors, block or old.block))
    return g


def placed(graph: KernelGraph) -> PlacedOp:
    """Return the only op of a kernel graph."""
    return place_kernels(UGraph(graph, graph))[0]


def rebuilt(hand: Hand, block: BlockGraph | None = None, **changes) -> PlacedOp:
    """Return the op of `rebuilt_graph`."""
    return placed(rebuilt_graph(hand, block, **changes))


def with_input(hand: Hand, name: str, axes: tuple[str | None, ...]) -> BlockGraph:
    """Return the block graph of `hand` with an input that has other axes."""
    block = hand.op.block
    inputs = tuple(replace(i, axes=axes) if i.name == name else i for i in block.inputs)
    return replace(block, inputs=inputs)


def with_axis(hand: Hand, axis: Axis) -> BlockGraph:
    """Return the block graph of `hand` with one more axis, which x and all that it enters have."""
    block = hand.op.block
    entered, stages = {"x"}, []

    def widened(part, read):
        """Return an op or an accumulator, with the axis if what it reads has it."""
        if not entered & {*read}:
            return part
        entered.add(part.out)
        return replace(part, axes=(axis.name, *part.axes))

    for stage in block.stages:
        body = tuple(widened(op, op.args) for op in stage.body)
        sums = tuple(widened(a, (a.arg,)) for a in stage.accumulators)
        stages.append(replace(stage, body=body, accumulators=sums))
    inputs = tuple(
        replace(i, axes=(axis.name, *i.axes)) if i.name == "x" else i for i in block.inputs
    )
    outputs = tuple(replace(o, axes=(axis.name, *o.axes)) for o in block.outputs)
    axes = (axis, *block.axes)
    return replace(block, axes=axes, inputs=inputs, stages=tuple(stages), outputs=outputs)


def with_body(hand: Hand, **ops: BlockOp) -> BlockGraph:
    """Return the block graph of `hand` with other ops in its loop, by their results."""
    block = hand.op.block
    first = block.stages[0]
    body = tuple(ops.get(op.out, op) for op in first.body)
    return replace(block, stages=(replace(first, body=body), *block.stages[1:]))


def op_of(hand: Hand, out: str) -> BlockOp:
    """Return the op that computes a value."""
    return hand.op.block.ops_by_name[out]


NO_ORDER = "the codes of codes0 lie neither row after row nor as in GPTQ or AWQ"


def test_codes_have_to_lie_row_after_row():
    hand = Hand(codes="int8")
    wide = rebuilt(hand, strides={"codes00": (320, 64, 1)})
    assert NO_ORDER in refusal(lambda: streamed_products(wide))
    turned = rebuilt(hand, strides={"codes00": (64, 4096, 1)})
    assert NO_ORDER in refusal(lambda: streamed_products(turned))


#: 64 rows whose words of codes are column-major. Dims are rows, groups, words and codes of a word.
COLUMNS = Hand(has_columns=True, scale_columns=(0,))
#: The same without groups. Dims are rows, words and codes of a word.
ONE_SCALE = Hand(has_columns=True, group=0)
#: What is said if the innermost axis does not fill words that are column-major.
NO_WORDS = "more than two axes of columns"


@pytest.mark.parametrize(
    ("hand", "strides", "why"),
    [
        (COLUMNS, (8, 4096, 512, 1), ""),
        (COLUMNS, (16, 8192, 1024, 1), NO_WORDS),  # a gap after each word
        (COLUMNS, (8, 4608, 576, 1), NO_ORDER),  # a gap after each row of words
        (COLUMNS, (8, 4608, 512, 1), NO_ORDER),  # a gap after each group
        (COLUMNS, (8, 512, 2048, 1), NO_ORDER),  # groups within words
        (COLUMNS, (1, 4096, 512, 64), NO_WORDS),  # rows within words
        (COLUMNS, (256, 64, 8, 1), NO_WORDS),  # row after row, with an axis too many
        (ONE_SCALE, (8, 512, 1), ""),
        (ONE_SCALE, (16, 1024, 1), NO_ORDER),
        (ONE_SCALE, (8, 576, 1), NO_ORDER),
        (ONE_SCALE, (1, 512, 64), NO_ORDER),
    ],
    ids=lambda x: "" if isinstance(x, Hand) else str(x),
)
def test_words_of_codes_have_to_lie_without_gaps(hand, strides, why):
    op = rebuilt(hand, strides={"codes00": strides})
    if why:
        assert why in refusal(lambda: streamed_products(op))
    else:
        assert streamed_products(op).is_column_major


def test_all_codes_are_column_major_if_some_are():
    joined = replace(COLUMNS, rows=(64, 32))
    op = rebuilt(joined, strides={"codes01": (256, 64, 8, 1)})
    assert NO_ORDER in refusal(lambda: streamed_products(op))
    gated = replace(COLUMNS, has_gate=True, scale_columns=(0, 1))
    op = rebuilt(gated, strides={"codes10": (256, 64, 8, 1)})
    text = refusal(lambda: streamed_products(op))
    assert "the codes of codes1 lie neither row after row nor as in GPTQ or AWQ" in text


@pytest.mark.parametrize("codes", ["uint8", "int8", "float8_e4m3fn"])
def test_words_hold_codes_of_4_bits(codes):
    assert NO_WORDS in refusal(lambda: streamed_products(replace(COLUMNS, codes=codes).op))


@pytest.mark.parametrize("batch", [1, 2])
def test_codes_of_tables_are_not_column_major(batch):
    hand = replace(COLUMNS, table="e2m1", batch=batch)
    assert "codes of a table lie as in GPTQ or AWQ" in refusal(lambda: streamed_products(hand.op))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rows": (40,)}, "rows of codes are no multiple of 16"),
        ({"rows": (24,), "has_gate": True}, "rows of codes are no multiple of 16"),
        ({"rows": (64, 24)}, "rows of codes are no multiple of 16"),
        ({"columns": 96, "group": 32}, "96 columns in groups of 32 do not fit"),
        ({"columns": 192, "group": 48}, "groups of 48 do not fit"),
    ],
    ids=str,
)
def test_sizes_of_column_major_codes_have_to_fit(changes, why):
    assert why in refusal(lambda: streamed_products(replace(COLUMNS, **changes).op))


@pytest.mark.parametrize("rows", [(48,), (64, 16)])
def test_tiles_of_column_major_codes_have_16_or_32_rows(rows):
    hand = replace(COLUMNS, rows=rows)
    text = refusal(lambda: layouts.stream_layout(hand.op, hand.schedule))
    assert "rows of codes are no multiple of 32; give tiles of 16 rows" in text
    small = replace(hand, tile_rows=16)
    assert layouts.stream_layout(small.op, small.schedule).tile_rows == 16
    for tile_rows in (8, 64):
        other = replace(hand, tile_rows=tile_rows)
        text = refusal(lambda hand=other: layouts.stream_layout(hand.op, hand.schedule))
        assert "has tiles of 32 along n" in text


def test_chunks_of_column_major_codes_are_multiples_of_units():
    short = replace(ONE_SCALE, tile=16)
    text = refusal(lambda: layouts.stream_layout(short.op, short.schedule))
    assert "chunks of 16 columns are no multiple of what four lanes load" in text


#: 64 rows whose words hold codes of eight rows. Dims of codes are rows / 8, 4 and 2, then groups
#: and their columns. Those of scales and zero points are the same, with one column of each group.
IN_WORDS = Hand(has_rows_in_words=True, scale_columns=(0,), has_zeros=True, zeros_in_words=True)
#: The same with zero points that are floats.
FLOAT_ZEROS = replace(IN_WORDS, zeros_in_words=False)
#: The axes of its codes.
IN_WORDS_AXES = ("n", "o", "p", "k", "r")
NO_PLACE = "of codes in a way that it does not compute"


@pytest.mark.parametrize(
    ("strides", "why"),
    [
        ((8, 1, 4, 4096, 64), ""),
        ((8, 2, 1, 4096, 64), NO_ORDER),  # rows of a word in their order
        ((1, 16, 8, 4096, 64), NO_ORDER),  # eight rows in a row of words
        ((1, 32, 8, 4096, 64), NO_ORDER),
        ((8, 1, 4, 4608, 72), NO_ORDER),  # a gap after each column
        ((8, 1, 4, 4608, 64), NO_ORDER),  # a gap after each group
        ((8, 1, 4, 64, 256), NO_ORDER),  # groups within columns
        ((2048, 1, 4, 512, 8), NO_ORDER),  # words of eight rows lie column after column
        ((2048, 512, 256, 64, 1), NO_PLACE),  # row after row, but zero points do not
    ],
    ids=str,
)
def test_words_of_rows_have_to_lie_as_in_awq(strides, why):
    op = rebuilt(IN_WORDS, strides={"codes00": strides})
    if why:
        assert why in refusal(lambda: streamed_products(op))
    else:
        assert streamed_products(op).word_rows == ("o", "p")


@pytest.mark.parametrize(
    ("hand", "name", "strides", "fits"),
    [
        (IN_WORDS, "zeros00", (8, 1, 4, 64, 1), True),
        (IN_WORDS, "zeros00", (8, 2, 1, 64, 1), False),  # in the order of rows
        (IN_WORDS, "zeros00", (32, 1, 4, 8, 1), False),  # groups within rows
        (IN_WORDS, "zeros00", (32, 4, 16, 1, 1), False),  # groups within words
        (IN_WORDS, "zeros00", (8, 1, 4, 72, 1), False),  # gaps
        (FLOAT_ZEROS, "zeros00", (8, 2, 1, 64, 1), True),
        (FLOAT_ZEROS, "zeros00", (32, 8, 4, 1, 1), True),
        (FLOAT_ZEROS, "zeros00", (8, 1, 4, 64, 1), False),  # in the order of words
        (IN_WORDS, "scales00", (8, 2, 1, 64, 1), True),
        (IN_WORDS, "scales00", (32, 8, 4, 1, 1), True),
        (IN_WORDS, "scales00", (8, 1, 4, 64, 1), False),
        (IN_WORDS, "scales00", (8, 2, 1, 72, 1), False),
    ],
    ids=lambda x: "" if isinstance(x, Hand) else str(x),
)
def test_scales_and_zero_points_of_words_of_rows_have_an_order(hand, name, strides, fits):
    op = rebuilt(hand, strides={name: strides})
    if fits:
        assert streamed_products(op).has_rows_in_words
    else:
        assert NO_PLACE in refusal(lambda: streamed_products(op))


def test_zero_points_in_words_of_rows_do_not_change():
    op = rebuilt(IN_WORDS, changing=("zeros00",))
    assert NO_PLACE in refusal(lambda: streamed_products(op))


def test_zero_points_in_words_of_rows_need_such_codes():
    joined = replace(IN_WORDS, rows=(64, 32))
    op = rebuilt(joined, strides={"zeros01": (8, 2, 1, 32, 1)})
    assert NO_PLACE in refusal(lambda: streamed_products(op))
    plain = replace(IN_WORDS, has_zeros=False, zeros_in_words=False)
    op = rebuilt(plain, strides={"codes00": (2048, 512, 256, 64, 1)})
    assert not streamed_products(op).has_rows_in_words


def test_all_codes_lie_in_words_of_rows_if_some_do():
    in_rows = (2048, 512, 256, 64, 1)
    joined = rebuilt(replace(IN_WORDS, rows=(64, 32)), strides={"codes01": in_rows})
    assert NO_ORDER in refusal(lambda: streamed_products(joined))
    gated = replace(IN_WORDS, has_gate=True, scale_columns=(0, 1))
    for name in ("codes00", "codes10"):
        op = rebuilt(gated, strides={name: in_rows})
        assert "the codes of codes1 lie neither" in refusal(lambda op=op: streamed_products(op))


@pytest.mark.parametrize("codes", ["uint8", "int8", "float8_e4m3fn"])
def test_words_of_rows_hold_codes_of_4_bits(codes):
    hand = replace(FLOAT_ZEROS, codes=codes)
    assert NO_ORDER in refusal(lambda: streamed_products(hand.op))


def test_words_of_rows_may_hold_signed_codes():
    signed = replace(IN_WORDS, codes="int4")
    assert streamed_products(signed.op).has_rows_in_words
    op = rebuilt(signed, changing=("scales00",))
    assert NO_PLACE in refusal(lambda: streamed_products(op))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_codes_of_tables_do_not_lie_in_words_of_rows(has_zeros, batch):
    zeros = {"has_zeros": has_zeros, "zeros_in_words": has_zeros}
    hand = replace(IN_WORDS, table="e2m1", batch=batch, **zeros)
    assert "codes of a table lie as in GPTQ or AWQ" in refusal(lambda: streamed_products(hand.op))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rows": (16,)}, "rows of codes are no multiple of 32"),
        ({"rows": (48,)}, "rows of codes are no multiple of 32"),
        ({"rows": (24,), "has_gate": True}, "rows of codes are no multiple of 32"),
        ({"rows": (64, 40)}, "rows of codes are no multiple of 32"),
        ({"columns": 96, "group": 32}, "96 columns in groups of 32 do not fit"),
        ({"columns": 192, "group": 48}, "groups of 48 do not fit"),
        ({"batch": 9}, "the other factor has 9 rows, more than 8"),
    ],
    ids=str,
)
def test_sizes_of_words_of_rows_have_to_fit(changes, why):
    assert why in refusal(lambda: streamed_products(replace(IN_WORDS, **changes).op))


@pytest.mark.parametrize("rows", [(96,), (64, 32)])
def test_tiles_of_words_of_rows_have_32_or_64_rows(rows):
    hand = replace(IN_WORDS, rows=rows)
    text = refusal(lambda: layouts.stream_layout(hand.op, hand.schedule))
    assert "rows of codes are no multiple of 64; give tiles of 32 rows" in text
    small = replace(hand, tile_rows=32)
    assert layouts.stream_layout(small.op, small.schedule).tile_rows == 32
    for tile_rows in (8, 16, 128):
        other = replace(hand, tile_rows=tile_rows)
        text = refusal(lambda hand=other: layouts.stream_layout(hand.op, hand.schedule))
        assert "has tiles of 8 along n, 4 along o, 2 along p" in text


def test_tiles_of_words_of_rows_have_whole_words():
    """Tiles of 64 rows that halve the words of more of them are refused."""
    hand = replace(IN_WORDS, rows=(128,))
    tiles = {**hand.schedule.tiles, "n": 16, "o": 2}
    text = refusal(lambda: layouts.stream_layout(hand.op, hand.schedule.changed(tiles=tiles)))
    assert "has tiles of 8 along n, 4 along o, 2 along p" in text


def test_chunks_of_words_of_rows_are_multiples_of_units():
    hand = replace(IN_WORDS, group=0, scale_columns=(), tile=16)
    text = refusal(lambda: layouts.stream_layout(hand.op, hand.schedule))
    assert "chunks of 16 columns are no multiple of what four lanes load" in text
    longer = replace(hand, tile=32)
    assert layouts.stream_layout(longer.op, longer.schedule).unit == 32


@pytest.mark.parametrize("has_columns", [False, True])
@pytest.mark.parametrize("strides", [(2, 128), (1, 72), (1, 128), (8, 1)], ids=str)
def test_column_major_scales_have_no_gaps(has_columns, strides):
    hand = replace(COLUMNS, has_columns=has_columns)
    strides = (*strides, *(1,) * (len(hand.op.operands[2].dims) - 2))
    op = rebuilt(hand, strides={"scales00": strides})
    assert "of codes in a way that it does not compute" in refusal(lambda: streamed_products(op))


def test_scales_of_blocks_of_rows_are_not_column_major():
    shape = {"rows": (128,), "square": 64, "columns": 512, "group": 128}
    hand = Hand(codes="float8_e4m3fn", scales_first=False, scale_columns=(0,), **shape)
    text = refusal(lambda: streamed_products(hand.op))
    assert "scaled0 is mul of codes in a way that it does not compute" in text


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
    tensor_cores = hand.schedule.changed(mma=True)
    text = refusal(lambda: cuda_text.plan_kernel(hand.op, tensor_cores, "kernel"))
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


def test_a_batch_has_8_rows_at_most():
    assert streamed_products(Hand(batch=8).op).batch_size == 8
    text = refusal(lambda: streamed_products(Hand(batch=9).op))
    assert "the other factor has 9 rows, more than 8" in text


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
