"""Words that lie as lanes load them, scales with gaps, and pairs of rows that no kernel streams.

Graphs that are nearly refused are accepted, and their kernels give the results of float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mirage_hf.codegen.streams import layout as layouts
from mirage_hf.codegen.streams.finding import streamed_products
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.graph.execute import run_kernel_graph
from tests.helpers.cuda_on_cpu import CXX
from tests.helpers.rebuilt_graphs import placed, rebuilt, rebuilt_graph, refusal
from tests.helpers.streamed_graphs import Hand

#: 64 rows of two groups of 128 columns. Dims of codes are rows / 8 and 8, groups, the words of a
#: lane, the codes of half a word, the lanes of a row, and the halves of a word.
TILES = Hand(
    group=128,
    dtype="float32",
    scale_columns=(0,),
    shifts="codes",
    shift_columns=(0,),
    has_lanes=True,
    scale_gaps=True,
)
#: The same with two units in each of three groups. There is one more dim after that of groups.
LONG_GROUPS = replace(TILES, columns=768, group=256)
#: The strides of the codes of each. The first one is that of eight rows.
STRIDES, LONG_STRIDES = (2048, 128, 1024, 8, 1, 32, 4), (6144, 128, 2048, 1024, 8, 1, 32, 4)

NO_ORDER = "the codes of codes0 lie neither row after row, nor as in GPTQ, AWQ"
#: What is said if the inner axes are not those of tiles.
NO_LANES = "the codes have no rows, or more than two axes of columns"
NO_PLACE = "of codes in a way that it does not compute"


@pytest.mark.parametrize(
    ("hand", "strides", "why"),
    [
        (TILES, STRIDES, ""),
        (TILES, (4096, *STRIDES[1:]), ""),  # columns that nothing reads
        (TILES, (2056, *STRIDES[1:]), NO_ORDER),  # a gap that is no whole tile
        (TILES, (1024, 128, 8192, 8, 1, 32, 4), NO_ORDER),  # groups around rows
        (TILES, (4096, 128, 2048, 8, 1, 32, 4), NO_ORDER),  # a gap after each group
        (TILES, (2048, 128, 1024, 8, 2, 32, 1), NO_LANES),  # halves of a word in turns
        (TILES, (2048, 128, 1024, 32, 1, 8, 4), NO_LANES),  # words around lanes
        (TILES, (2048, 32, 1024, 8, 1, 256, 4), NO_LANES),  # rows within lanes
        (TILES, (2048, 256, 1024, 8, 1, 32, 4), NO_LANES),  # a gap after each row
        (LONG_GROUPS, LONG_STRIDES, ""),
        (LONG_GROUPS, (6144, 128, 1024, 3072, 8, 1, 32, 4), NO_ORDER),  # groups within units
        (LONG_GROUPS, (8192, 128, 3072, 1024, 8, 1, 32, 4), NO_ORDER),  # a gap after each group
    ],
    ids=lambda x: "" if isinstance(x, Hand) else str(x),
)
def test_words_of_lanes_have_to_lie_as_in_tiles(hand: Hand, strides: tuple, why: str) -> None:
    op = rebuilt(hand, strides={"codes00": strides})
    if why:
        assert why in refusal(lambda: streamed_products(op))
    else:
        assert streamed_products(op).lanes == ("r", "s", "t", "u")


def test_all_codes_lie_in_tiles_if_some_do() -> None:
    other = (2048, 128, 1024, 32, 1, 8, 4)
    joined = replace(TILES, rows=(64, 32))
    op = rebuilt(joined, strides={"codes01": other})
    assert NO_ORDER in refusal(lambda: streamed_products(op))
    gated = replace(TILES, has_gate=True, scale_columns=(0, 1), shift_columns=(0, 1))
    op = rebuilt(gated, strides={"codes10": other})
    assert NO_ORDER.replace("codes0", "codes1") in refusal(lambda: streamed_products(op))


def test_parts_in_tiles_have_rows_of_one_length() -> None:
    joined = replace(TILES, rows=(64, 32))
    assert streamed_products(joined.op).is_in_lanes
    op = rebuilt(joined, strides={"codes01": (4096, *STRIDES[1:])})
    text = refusal(lambda: streamed_products(op))
    assert "the parts of codes0 have rows of different lengths" in text


@pytest.mark.parametrize("codes", ["uint8", "int8", "float8_e4m3fn"])
def test_tiles_hold_codes_of_4_bits(codes: str) -> None:
    assert NO_LANES in refusal(lambda: streamed_products(replace(TILES, codes=codes).op))


@pytest.mark.parametrize("batch", [1, 2])
def test_codes_of_tables_do_not_lie_in_tiles(batch: int) -> None:
    hand = replace(TILES, table="e2m1", batch=batch, shifts="")
    assert "codes of a table lie as in GPTQ, AWQ" in refusal(lambda: streamed_products(hand.op))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rows": (24,)}, "rows of codes are no multiple of 16"),
        ({"rows": (64, 24)}, "rows of codes are no multiple of 16"),
        ({"batch": 17}, "the other factor has 17 rows, more than 16"),
    ],
    ids=str,
)
def test_sizes_of_tiles_have_to_fit(changes: dict, why: str) -> None:
    assert why in refusal(lambda: streamed_products(replace(TILES, **changes).op))


def test_tiles_of_a_batch_have_16_rows() -> None:
    few = replace(TILES, tile_rows=8)
    assert layouts.stream_layout(few.op, few.schedule).tile_rows == 8
    several = replace(few, batch=2)
    text = refusal(lambda: layouts.stream_layout(several.op, several.schedule))
    assert "has tiles of 2 along n, 8 along o" in text


#: Strides of scales, and whether kernels read scales that lie so. Dims are rows / 8 and 8, groups
#: of columns, and the columns of a group.
SCALE_STRIDES = {
    "gaps of one": ((16, 2, 128, 1, 1, 1, 1), True),
    "no gaps": ((8, 1, 64, 1, 1, 1, 1), True),
    "row after row": ((16, 2, 1, 1, 1, 1, 1), True),
    "gaps of two": ((24, 3, 192, 1, 1, 1, 1), False),
    "a gap after each group": ((16, 2, 136, 1, 1, 1, 1), False),
    "a gap after eight rows": ((24, 2, 192, 1, 1, 1, 1), False),
    "groups within rows": ((32, 4, 2, 1, 1, 1, 1), False),
    "rows in another order": ((2, 16, 128, 1, 1, 1, 1), False),
}


@pytest.mark.parametrize("name", ["scales00", "shifts00"])
@pytest.mark.parametrize("kind", SCALE_STRIDES)
def test_scales_and_shifts_have_gaps_of_one_at_most(kind: str, name: str) -> None:
    strides, fits = SCALE_STRIDES[kind]
    op = rebuilt(TILES, strides={name: strides})
    if fits:
        assert streamed_products(op).is_in_lanes
    else:
        assert NO_PLACE in refusal(lambda: streamed_products(op))


def test_parts_have_equal_gaps() -> None:
    joined = replace(TILES, rows=(64, 32))
    op = rebuilt(joined, strides={"scales01": (8, 1, 32, 1, 1, 1, 1)})
    assert NO_PLACE in refusal(lambda: streamed_products(op))


@pytest.mark.parametrize("name", ["scales0", "shifts0"])
def test_scales_of_one_group_have_no_gaps(name: str) -> None:
    hand = replace(TILES, columns=128)
    other = "shifts00" if name == "scales0" else "scales00"
    plain = {other: (8, 1, 64, 1, 1, 1, 1)}
    text = refusal(lambda: streamed_products(rebuilt(hand, strides=plain)))
    assert f"the rows of {name} have gaps" in text
    assert streamed_products(replace(hand, scale_gaps=False).op).is_in_lanes


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")
@pytest.mark.parametrize("batch", [1, 3])
def test_rows_of_two_products_may_have_different_lengths(batch: int, tmp_path) -> None:
    both = (0, 1)
    hand = replace(
        TILES, has_gate=True, scale_columns=both, shift_columns=both, batch=batch, scale_gaps=False
    )
    graph = rebuilt_graph(hand, strides={"codes10": (5120, *STRIDES[1:])})
    kernel = write_stream_kernel(placed(graph), hand.schedule, "kernel")
    inputs = list(hand.inputs)
    at = [x.name for x in graph.inputs].index("codes10")
    inputs[at] = replace(hand, padding=384).inputs[at]
    (want,) = run_kernel_graph(graph, inputs, torch.float64)
    for order in range(2):
        got = hand.run(kernel, "kernel", order, tmp_path, inputs=inputs)
        assert not isinstance(got, str), got
        assert hand.error(got, want) <= 1


PAIRS = Hand(rows=(32,), columns=256, group=64, has_row_pairs=True)


def test_pairs_of_rows_are_not_joined():
    block = PAIRS.op.block
    inputs = tuple(
        replace(i, sources=i.sources * 2, joined="o", sizes=(8, 8)) if i.name == "codes0" else i
        for i in block.inputs
    )
    op = rebuilt(
        PAIRS,
        replace(block, inputs=inputs),
        dims={"codes00": (2, 8, 4, 64)},
        strides={"codes00": (-1, 512, 128, 2)},
    )
    assert "codes0 is joined along o" in refusal(lambda: streamed_products(op))


@pytest.mark.parametrize(
    ("strides", "is_right"),
    [
        ((-1, 512, 128, 2), True),
        ((-1, 1024, 128, 2), False),  # a gap after each row
        ((-1, 128, 2048, 2), False),  # groups around rows
        ((-1, 2, 1024, 32), False),  # rows side by side
    ],
)
def test_pairs_of_rows_lie_row_after_row(strides, is_right):
    op = rebuilt(PAIRS, strides={"codes00": strides})
    if is_right:
        assert streamed_products(op).row_pair == "n"
    else:
        assert "nor as in GPTQ, AWQ, HQQ" in refusal(lambda: streamed_products(op))


def test_codes_of_a_table_are_no_pairs_of_rows():
    hand = replace(PAIRS, table="nf4")
    why = "codes of a table lie as in GPTQ, AWQ, HQQ"
    assert why in refusal(lambda: streamed_products(hand.op))


def test_a_tile_has_all_rows_of_pairs():
    schedule = PAIRS.schedule.changed(tiles=dict(PAIRS.schedule.tiles) | {"o": 4})
    assert "8 along o" in refusal(lambda: layouts.stream_layout(PAIRS.op, schedule))
