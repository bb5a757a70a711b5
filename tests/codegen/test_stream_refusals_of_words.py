"""Column-major words that no kernel can stream are refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mirage_hf.codegen.streams import layout as layouts
from mirage_hf.codegen.streams.finding import streamed_products
from tests.helpers.rebuilt_graphs import IN_WORDS, rebuilt, refusal
from tests.helpers.streamed_graphs import Hand

NO_ORDER = "the codes of codes0 lie neither row after row, nor as in GPTQ, AWQ"


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
    assert NO_ORDER.replace("codes0", "codes1") in text


@pytest.mark.parametrize("codes", ["uint8", "int8", "float8_e4m3fn"])
def test_words_hold_codes_of_4_bits(codes):
    assert NO_WORDS in refusal(lambda: streamed_products(replace(COLUMNS, codes=codes).op))


@pytest.mark.parametrize("batch", [1, 2])
def test_codes_of_tables_are_not_column_major(batch):
    hand = replace(COLUMNS, table="e2m1", batch=batch)
    assert "codes of a table lie as in GPTQ, AWQ" in refusal(lambda: streamed_products(hand.op))


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


#: Words that hold codes of eight rows, with zero points that are floats.
FLOAT_ZEROS = replace(IN_WORDS, zeros_in_words=False)
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


def test_zero_points_in_words_of_rows_have_no_gaps():
    """Rows of a word are not one code apart, but one copy brings whole words."""
    divided = layouts.stream_layout(IN_WORDS.op, IN_WORDS.schedule)
    assert not any(divided.is_spaced(n) for n, _ in enumerate(divided.products.grouped))


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
    assert "codes of a table lie as in GPTQ, AWQ" in refusal(lambda: streamed_products(hand.op))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rows": (16,)}, "rows of codes are no multiple of 32"),
        ({"rows": (48,)}, "rows of codes are no multiple of 32"),
        ({"rows": (24,), "has_gate": True}, "rows of codes are no multiple of 32"),
        ({"rows": (64, 40)}, "rows of codes are no multiple of 32"),
        ({"columns": 96, "group": 32}, "96 columns in groups of 32 do not fit"),
        ({"columns": 192, "group": 48}, "groups of 48 do not fit"),
        ({"batch": 17}, "the other factor has 17 rows, more than 16"),
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
@pytest.mark.parametrize("strides", [(3, 192), (2, 136), (1, 72), (1, 128), (8, 1)], ids=str)
def test_column_major_scales_have_gaps_of_one_at_most(has_columns, strides):
    hand = replace(COLUMNS, has_columns=has_columns)
    strides = (*strides, *(1,) * (len(hand.op.operands[2].dims) - 2))
    op = rebuilt(hand, strides={"scales00": strides})
    assert NO_PLACE in refusal(lambda: streamed_products(op))
    for fits in ((1, 64), (2, 128)):
        strides = (*fits, *strides[2:])
        assert streamed_products(rebuilt(hand, strides={"scales00": strides})).products


def test_scales_of_blocks_of_rows_are_not_column_major():
    shape = {"rows": (128,), "square": 64, "columns": 512, "group": 128}
    hand = Hand(codes="float8_e4m3fn", scales_first=False, scale_columns=(0,), **shape)
    text = refusal(lambda: streamed_products(hand.op))
    assert "scaled0 is mul of codes in a way that it does not compute" in text
