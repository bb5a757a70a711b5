"""Mistakes of kernels whose words hold codes of eight rows, one each."""

from __future__ import annotations

from tests.helpers.streamed_graphs import Hand

#: Kernels to change. Outputs are float32, so that each digit counts.
ROW_KERNELS = {
    # columns of two products lie one after another in a slot; the last chunk has one unit of two
    "rows in words, teams": Hand(
        rows=(192,),
        columns=320,
        group=64,
        dtype="float32",
        has_norm=True,
        has_gate=True,
        tile=2,
        stages=4,
        warps=4,
        blocks=1,
        has_rows_in_words=True,
        scale_columns=(0, 1),
        has_zeros=True,
        zeros_in_words=True,
    ),
    # tiles of 32 rows, whose lanes have half of a word's rows; scales are row-major
    "rows in words, 4 rows": Hand(
        rows=(96, 160),
        columns=640,
        group=128,
        dtype="float32",
        has_residual=True,
        scales_first=False,
        tile=2,
        stages=3,
        blocks=2,
        batch=4,
        has_rows_in_words=True,
        tile_rows=32,
        has_zeros=True,
        zeros_in_words=True,
    ),
}

COPIED = "arrive_when_copied(&shared.full[s]);"
COPIERS = "start_barrier(&shared.full[s], 33)"
LANES = "vector = lane % 4, place = lane / 4"
FIRST = "(c * 128 + place % 4 * 8 + place / 4)"
LAST = "(place + 24) % 4 * 8 + (place + 24) / 4"
OTHER_PRODUCT = "vector / 2 * 128 * pitch"
OF_BOTH = "(c + 1 < chunks ? 1152 : 576)"
LANE_CODES = "(u * 64 + t) * pitch + g * 4"
SECOND = "codes + (1 * 128 + 32) * pitch"

#: Mistakes of a kernel with two products and two teams of warps.
OF_TEAMS = [
    ("31 lanes and the one that expects arrive", COPIERS, COPIERS.replace("33", "32")),
    ("one more lane arrives", COPIERS, COPIERS.replace("33", "34")),
    ("no arrival for copies", COPIED, ""),
    ("arrivals before the copies", COPIED, "arrive(&shared.full[s]);"),
    ("arrivals at another slot", COPIED, COPIED.replace("[s]", "[(s + 1) % stages]")),
    ("all lanes expect bytes", "if (is_elected()) {", "{"),
    ("bytes of the last chunk for all", OF_BOTH, "576"),
    ("bytes of scales only", OF_BOTH, "(c + 1 < chunks ? 1024 : 512)"),
    ("vectors of other lanes", LANES, "vector = lane / 8, place = lane % 8 / 2"),
    ("vectors of the first product", LANES, "vector = lane % 2, place = lane / 4"),
    ("all lanes copy one column", LANES, "vector = lane % 4, place = 0"),
    ("products in the other order", "lane % 4 < 2 ? codes0", "lane % 4 >= 2 ? codes0"),
    ("one product for both", "codes1_ptr + row_0 / 2", "codes0_ptr + row_0 / 2"),
    ("columns as long as a tile", "lane % 4 < 2 ? 192 / 2 : 192 / 2", "64 / 2"),
    ("shorter columns of the other product", "192 / 2 : 192 / 2", "192 / 2 : 128 / 2"),
    ("codes of the first tile", "codes0_ptr + row_0 / 2", "codes0_ptr"),
    ("half as many rows before a tile", "codes1_ptr + row_0 / 2", "codes1_ptr + row_0 / 4"),
    (
        "the first rows of a tile twice",
        "+ vector % 2 * 16;\n        unsigned",
        ";\n        unsigned",
    ),
    ("rows in one place", "place * pitch + vector % 2 * 16", "place * pitch"),
    ("products in one place", f" + {OTHER_PRODUCT}", ""),
    ("the other product within the first", OTHER_PRODUCT, "vector / 2 * 64 * pitch"),
    ("the last chunk as long as a unit", OTHER_PRODUCT, "vector / 2 * 2 * size * pitch"),
    ("copies of the same chunk", FIRST, FIRST.replace("c * 128 + ", "")),
    ("shorter chunks", FIRST, FIRST.replace("128", "64")),
    ("the first columns in memory's order", FIRST, "(c * 128 + place)"),
    ("lanes in the other order", FIRST, "(c * 128 + (3 - place % 4) * 8 + place / 4)"),
    ("columns of two lanes", FIRST, "(c * 128 + place % 2 * 8 + place / 4)"),
    ("columns of one lane", FIRST, "(c * 128 + place / 4)"),
    ("the last columns in memory's order", LAST, "(place + 24)"),
    ("the last columns as the first", LAST, "place % 4 * 8 + place / 4"),
    (
        "other columns of lanes",
        "(place + 8) % 4 * 8 + (place + 8) / 4",
        "place % 4 * 8 + place / 4",
    ),
    ("columns that overwrite each other", "to + (w + 16) * pitch", "to + (w + 8) * pitch"),
    ("the second columns twice", "pitch, from_16 + w", "pitch, from_8 + w"),
    ("the first 32 columns again", "from_24 + w * word_step", "from_24"),
    ("half of the columns", "w < 2 * size", "w < size"),
    ("every other 32 columns", "w += 32)", "w += 64)"),
    ("a size of the last chunk for all", "chunks ? chunk_bytes : 32", "chunks ? 32 : 32"),
    ("zero points of the first chunk", "row_0 / 2 + (c * 2 + group)", "row_0 / 2 + (group)"),
    ("zero points of half a group", "(c * 2 + group) * 192 / 2", "(c * 2 + group) * 192 / 4"),
    ("zero points of the first tile", "zeros0_ptr + row_0 / 2", "zeros0_ptr"),
    ("zero points of the other product", "zeros1_ptr + row_0", "zeros0_ptr + row_0"),
    ("zero points of groups in one place", "shared.zeros_1[s] + group * 32", "shared.zeros_1[s]"),
    ("zero points that overlap", "zeros_0[s] + group * 32", "zeros_0[s] + group * 16"),
    ("scales of the first group", "row_0 + (c * 2 + group) * 192, 256", "row_0 + c * 2 * 192, 256"),
    ("scales of the first tile", "scales1_ptr + row_0 +", "scales1_ptr +"),
    ("lanes of a row in the other order", LANE_CODES, "(u * 64 + 3 - t) * pitch + g * 4"),
    ("units that overlap", LANE_CODES, "(u * 32 + t) * pitch + g * 4"),
    ("words of the first rows", LANE_CODES, "(u * 64 + t) * pitch"),
    ("words of the next rows", LANE_CODES, "(u * 64 + t) * pitch + (g ^ 1) * 4"),
    ("columns side by side for a lane", "codes, 4 * pitch, 0", "codes, pitch, 0"),
    ("the first columns of a unit twice", "codes + (32) * pitch", "codes"),
    ("the second columns of the other product", SECOND, "codes + (32) * pitch"),
    ("the first columns of the other product", SECOND, "codes + (1 * 128 + 0) * pitch"),
    ("codes of the wrong product", "codes + (1 * 128 + 0) * pitch", "codes"),
    ("the other row of a pair", "codes(words_0_0.w[1] << 4", "codes(words_0_0.w[0] << 4"),
    ("rows of another set", "codes(words_1_0.w[6]", "codes(words_1_0.w[2]"),
    ("words of the other product", "codes(words_0_1.w[7]", "codes(words_0_0.w[7]"),
    ("words of other columns", "codes(words_1_1.w[5]", "codes(words_0_1.w[5]"),
    ("zero points in the order of rows", "(8 * g + 1) % 8 / 2 * 4 + (8 * g + 1) % 2 * 16", "4"),
    ("the zero point of an even row", "(8 * g + 3) % 2 * 16", "0"),
    ("the zero point of row 0", "(8 * g + 6) % 8 / 2 * 4", "0"),
    ("odd rows in the next byte", "(8 * g + 5) % 2 * 16", "(8 * g + 5) % 2 * 8"),
    ("words of zero points of the first rows", "* 8 + (8 * g + 2) / 8]", "* 8]"),
    ("words of zero points of the next rows", "* 8 + (8 * g + 4) / 8]", "* 8 + (g ^ 1)]"),
    ("zero points of the first unit", "zeros_1[s])[u * 64 / 64 * 8 + 8", "zeros_1[s])[8"),
    ("wider zero points", "(8 * g + 3) % 2 * 16) & 15)", "(8 * g + 3) % 2 * 16) & 31)"),
    ("another middle of codes", "& 15) - 8.0f", "& 15) - 7.0f"),
    ("scales of the first unit", "u * 64 / 64 * 64 + (8 * g + 1)", "0 * 64 + (8 * g + 1)"),
    ("scales of another row", "64 / 64 * 64 + (8 * g + 2)", "64 / 64 * 64 + (8 * g + 4)"),
    ("scales of rows eight apart", "64 / 64 * 64 + (8 * g + 3)", "64 / 64 * 64 + (g + 24)"),
    ("columns lane after lane", "at / 8 % 4 * 16 + at % 64 / 32 * 8", "at % 64"),
    ("both teams multiply", "if (n % 2 != team) continue;", ""),
    ("both teams arrive", "&shared.empty[s], 32 * team_warps", "&shared.empty[s], threads"),
    ("rows of a set in the other order", "[8 * g + 1] = lower_of_0", "[8 * g + 1] = upper_of_0"),
    ("rows of the other product", "[8 * g + 64] = upper_of_4", "[8 * g + 64] = upper_of_0"),
    ("rows of sets eight apart", "[8 * g + 71] = lower_of_7", "[g + 120] = lower_of_7"),
    ("sums of the other product", "[own_row + 64]", "[own_row]"),
    ("the two rows of an axis", "row % 2;", "1 - row % 2;"),
]

OWN_CODES = "(u * 128 + t) * pitch + g / 2 * 4"
ZERO_PART = "zeros0_ptr1 + (row_0 - 96) / 2"

#: Mistakes of a kernel with a batch, and tiles of 32 rows.
OF_BATCH = [
    ("31 lanes and the one that expects arrive", COPIERS, COPIERS.replace("33", "32")),
    ("no arrival for copies", COPIED, ""),
    ("arrivals before the copies", COPIED, "arrive(&shared.full[s]);"),
    ("bytes of scales in each chunk", "(c == 0 ? 640 : 0)", "640"),
    ("no bytes of zero points", "(c + 1 < chunks ? 32 : 16)", "0"),
    ("bytes of one group", "(c + 1 < chunks ? 32 : 16)", "16"),
    ("two lanes copy a column", "place = lane / 1", "place = lane / 2"),
    ("columns of the first part", "word_step = (row_0 < 96 ? 96 : 160) / 2", "word_step = 96 / 2"),
    ("codes of the first tiles", "codes0_ptr1 + (row_0 - 96) / 2", "codes0_ptr1 + row_0 % 64 / 2"),
    ("codes as if parts were one", "codes0_ptr1 + (row_0 - 96) / 2", "codes0_ptr1"),
    ("columns in memory's order", "(c * 256 + place % 4 * 8 + place / 4)", "(c * 256 + place)"),
    ("copies of the same chunk", "(c * 256 + place", "(place"),
    ("half of the columns", "w < 2 * size", "w < size"),
    ("zero points of the first tile of a part", ZERO_PART, "zeros0_ptr1"),
    ("zero points of the first tiles", ZERO_PART, "zeros0_ptr1 + row_0 % 64 / 2"),
    ("zero points as long as the first part", "group) * (row_0 < 96 ? 96 : 160)", "group) * 96"),
    ("zero points of the first chunk", "(c * 2 + group) *", "group *"),
    ("zero points of groups in one place", "zeros_0[s] + group * 16", "zeros_0[s]"),
    ("zero points by tile", "copy_bytes(shared.zeros_0[s]", "copy_bytes(shared.zeros_0[i % 3]"),
    ("scales of the first tile of a part", "scales0_ptr1 + (row_0 - 96) * 5", "scales0_ptr1"),
    ("scales in each chunk", "if (c == 0) {", "if (c < 2) {"),
    ("the first four rows for all", "codes, 4 * pitch, g % 2", "codes, 4 * pitch, 0"),
    (
        "four rows in the other order",
        "(96) * pitch, 4 * pitch, g % 2",
        "(96) * pitch, 4 * pitch, 1 - g % 2",
    ),
    ("words of four rows", OWN_CODES, "(u * 128 + t) * pitch + g % 4 * 4"),
    ("words of the first eight rows", OWN_CODES, "(u * 128 + t) * pitch"),
    ("lanes of a row in the other order", OWN_CODES, "(u * 128 + 3 - t) * pitch + g / 2 * 4"),
    ("units that overlap", OWN_CODES, "(u * 64 + t) * pitch + g / 2 * 4"),
    ("the second columns twice", "codes + (64) * pitch", "codes + (32) * pitch"),
    ("columns of four lanes", "codes + (32) * pitch, 4 * pitch", "codes + (32) * pitch, 1 * pitch"),
    (
        "the first row of a pair twice",
        "right = halves_of_4_bits(words_2_0.w[1]",
        "right = halves_of_4_bits(words_2_0.w[0]",
    ),
    (
        "rows of the other set",
        "left = halves_of_4_bits(words_3_0.w[2]",
        "left = halves_of_4_bits(words_3_0.w[0]",
    ),
    (
        "words of the other piece",
        "left = halves_of_4_bits(words_1_0",
        "left = halves_of_4_bits(words_0_0",
    ),
    ("zero points of the first four rows", "(4 * g + 1) % 8 / 2 * 4", "(4 * g + 1) % 4 / 2 * 4"),
    ("the zero point of an even row", "(4 * g + 3) % 2 * 16", "0"),
    ("odd rows in the next code", "(4 * g + 1) % 2 * 16", "(4 * g + 1) % 2 * 4"),
    ("a word of zero points for four rows", "* 4 + (4 * g + 2) / 8]", "* 4 + g % 4]"),
    ("zero points of the first unit", "zeros_0[s])[u * 128 / 128 * 4 + 4", "zeros_0[s])[4"),
    ("the zero point of the other row", "sums[3] - zero_1", "sums[3] - zero_0"),
    ("sums of the other column", "sums[1] - zero_0 * own_sum_1", "sums[1] - zero_0 * own_sum_0"),
    ("the scale of the upper row", "[(4 * g + 1) * 5", "[4 * g * 5"),
    ("the scale of rows eight apart", "[(4 * g + 3) * 5", "[(g + 24) * 5"),
    ("the scale of the first group", "(4 * g + 2) * 5 + unit * 128 / 128", "(4 * g + 2) * 5"),
    ("columns lane after lane", "at / 8 % 4 * 32 + at % 128 / 32 * 8", "at % 128"),
    ("pieces in the other order", "place % 32 / 8 * 256", "(3 - place % 32 / 8) * 256"),
    ("rows eight apart", "[(4 * g + 1) * batch + 2 * t] = ", "[(g + 8) * batch + 2 * t] = "),
    ("the residual of another row", "* 256 + at_n * 8 + at_o * 2 + at_p; }", "* 256 + at_n * 8; }"),
]

#: Mistakes by kernel: what they are, what is there once, and what is there instead.
OF_ROWS = {"rows in words, teams": OF_TEAMS, "rows in words, 4 rows": OF_BATCH}
