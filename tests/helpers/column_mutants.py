"""Mistakes of kernels whose words of codes are column-major, one each.

No emulation on the CPU notices these mistakes, so they are not here:

- No `wait_for_own_copies`. A block of the emulation ends after its copies.
- The bytes of scales are expected before the lanes arrive. The order of arrivals does not matter.
- `n % 2 == team` for `n % 2 != team`. The teams then change places.
"""

from __future__ import annotations

from tests.helpers.streamed_graphs import Hand

#: Kernels to change. Outputs are float32, so that each digit counts.
COLUMN_KERNELS = {
    # two tiles of 32 rows fill 256 bytes of a row of words; the last chunk has one unit of two
    "columns, teams": Hand(
        rows=(96,),
        columns=640,
        group=128,
        dtype="float32",
        has_norm=True,
        has_gate=True,
        tile=2,
        stages=4,
        warps=4,
        blocks=1,
        has_columns=True,
        scale_columns=(0, 1),
    ),
    # tiles of 16 rows fill 64 bytes of a row of words
    "columns, 4 rows": Hand(
        rows=(48, 80),
        columns=640,
        group=64,
        dtype="float32",
        has_residual=True,
        scales_first=False,
        tile=4,
        stages=3,
        blocks=2,
        batch=4,
        has_columns=True,
        scale_columns=(0,),
        tile_rows=16,
    ),
    # a chunk has four rows of words, and the lanes could copy eight; scales are row-major
    "columns, groups of 32": Hand(
        codes="int4",
        rows=(96,),
        columns=192,
        group=32,
        dtype="float32",
        stages=3,
        warps=1,
        blocks=2,
        has_columns=True,
        tile_rows=16,
    ),
}

COPIED = "arrive_when_copied(&shared.full[s]);"
COPIERS = "start_barrier(&shared.full[s], 33)"
LANES = "vector = lane % 16, word = lane / 16"
CHUNK_ROW = "(c * (chunk_bytes / 4) + word) * word_step"
ELECTED = "if (is_elected()) {"
WORDS = "w < size / 4; "

#: Mistakes of a kernel with two products and two teams of warps.
OF_TEAMS = [
    ("31 lanes and the one that expects arrive", COPIERS, COPIERS.replace("33", "32")),
    ("one more lane arrives", COPIERS, COPIERS.replace("33", "34")),
    ("only one lane arrives", COPIERS, COPIERS.replace("33", "2")),
    ("no arrival for copies", COPIED, ""),
    ("arrivals before the copies", COPIED, "arrive(&shared.full[s]);"),
    ("arrivals at another slot", COPIED, COPIED.replace("[s]", "[(s + 1) % stages]")),
    ("the lane that expects does not arrive", COPIED, f"if (!is_elected()) {COPIED}"),
    ("all lanes expect bytes", ELECTED, "{"),
    ("no lane expects bytes", ELECTED, "if (false) {"),
    ("bytes of the last chunk for all", "(c + 1 < chunks ? 512 : 256)", "256"),
    ("bytes of a whole chunk for all", "(c + 1 < chunks ? 512 : 256)", "512"),
    ("bytes of one product", "(c + 1 < chunks ? 512 : 256)", "(c + 1 < chunks ? 256 : 128)"),
    ("bytes of codes, too", "(c + 1 < chunks ? 512 : 256)", "size * 64 + (c < 2 ? 512 : 256)"),
    ("vectors of other lanes", LANES, "vector = lane / 2, word = lane % 2"),
    ("vectors of the first product", LANES, "vector = lane % 8, word = lane / 16"),
    ("all lanes copy one row of words", LANES, "vector = lane % 16, word = 0"),
    ("products in the other order", "(lane % 16 < 8 ? codes0", "(lane % 16 >= 8 ? codes0"),
    ("one product for both", "row_0 * 4 : codes1_ptr", "row_0 * 4 : codes0_ptr"),
    ("a part of the other product", "(lane % 16 < 8 ? codes0", "(lane % 16 < 10 ? codes0"),
    ("rows of words as long as a tile", "lane % 16 < 8 ? 96 * 4 : 96 * 4", "32 * 4"),
    ("shorter rows of words of the other product", "96 * 4 : 96 * 4", "96 * 4 : 64 * 4"),
    ("codes of the first tile", "codes0_ptr + row_0 * 4", "codes0_ptr"),
    ("half as many rows before a tile", "codes1_ptr + row_0 * 4", "codes1_ptr + row_0 * 2"),
    ("the first rows of a tile twice", "vector % 8 * 16", "vector % 4 * 16"),
    ("copies of the same chunk", CHUNK_ROW, "word * word_step"),
    ("shorter chunks", CHUNK_ROW, CHUNK_ROW.replace("/ 4", "/ 8")),
    ("the same row of words for all lanes", CHUNK_ROW, CHUNK_ROW.replace(" + word", "")),
    ("the first rows are not swapped", "(vector ^ ((word) & 3) * 2)", "vector"),
    ("later rows are swapped as the first", "((word + 2) & 3) * 2", "((word) & 3) * 2"),
    ("rows are swapped by one vector", "((word) & 3) * 2", "((word) & 3) * 1"),
    ("lanes read what is not swapped", "(g ^ (t & 3) * 2)", "g"),
    ("lanes read two rows as not swapped", "(g ^ (t & 3) * 2)", "(g ^ (t & 1) * 2)"),
    ("lanes read later vectors as not swapped", "((8 + g) ^ (t & 3) * 2)", "(8 + g)"),
    ("lanes read the swap of the next row", "((8 + g) ^ (t & 3)", "((8 + g) ^ (t + 1 & 3)"),
    ("rows of words that overwrite each other", "(word + 2) * pitch", "(word) * pitch"),
    ("rows of words in the other order", "to_0 + w * pitch", "to_0 + (w ^ 4) * pitch"),
    ("the first rows of words twice", "from + (w + 2)", "from + (w + 0)"),
    ("half of the rows of words", WORDS, "w < size / 8; "),
    ("every other row of words", f"{WORDS}w += 4", f"{WORDS}w += 8"),
    ("a size of the last chunk for all", "chunks ? chunk_bytes : 64", "chunks ? 64 : 64"),
    ("scales of the first chunk", "row_0 + (c * 2 + group)", "row_0 + (group)"),
    ("scales of a chunk of one group", "row_0 + (c * 2 + group)", "row_0 + (c + group)"),
    ("scales as if tiles were apart", "(c * 2 + group) * 96", "(c * 2 + group) * 32"),
    ("scales of the first group", "(c * 2 + group) * 96", "(c * 2) * 96"),
    ("scales of the first tile", "scales1_ptr + row_0 +", "scales1_ptr +"),
    ("scales of the other product", "scales1_ptr + row_0 +", "scales0_ptr + row_0 +"),
    (
        "scales in the place of the others",
        "copy_bytes(shared.scales_1",
        "copy_bytes(shared.scales_0",
    ),
    ("groups in one place", "shared.scales_0[s] + group * 128", "shared.scales_0[s]"),
    ("groups that overlap", "shared.scales_1[s] + group * 128", "shared.scales_1[s] + group * 64"),
    (
        "a slot of scales by tile",
        "copy_bytes(shared.scales_0[s]",
        "copy_bytes(shared.scales_0[i % 4]",
    ),
    ("scales of the first unit", "u * 128 / 128 * 32 + ", "0 * 32 + "),
    ("scales of another row", "* 32 + (4 * g + 1)", "* 32 + (4 * g + 2)"),
    ("scales of the next row", "* 32 + 4 * g]", "* 32 + (4 * g + 1)]"),
    ("scales of rows eight apart", "* 32 + (4 * g + 3)", "* 32 + (g + 24)"),
    (
        "the first product's scales for the second",
        "(shared.scales_1[s])[u * 128 / 128 * 32 + (4 * g + 2)]",
        "(shared.scales_0[s])[u * 128 / 128 * 32 + (4 * g + 2)]",
    ),
    (
        "the second product's scales for the first",
        "(shared.scales_0[s])[u * 128 / 128 * 32 + 4 * g]",
        "(shared.scales_1[s])[u * 128 / 128 * 32 + 4 * g]",
    ),
    ("columns lane after lane", "at / 8 % 4 * 32 + at % 128 / 32 * 8", "at % 128"),
    ("lanes in the other order", "at / 8 % 4 * 32", "(3 - at / 8 % 4) * 32"),
    ("columns of two lanes in one place", "at / 8 % 4 * 32", "at / 8 % 2 * 32"),
    ("columns of two words in one place", "at % 128 / 32 * 8", "at % 64 / 32 * 8"),
    ("words in the other order", "at % 128 / 32 * 8", "(at % 128 / 32 ^ 1) * 8"),
    ("halves of a unit in the other order", "place % 32 / 16 * 192", "(1 - place % 32 / 16) * 192"),
    ("both teams multiply", "if (n % 2 != team) continue;", ""),
    ("teams change within a tile only", "(n % 2 != team)", "(c % 2 != team)"),
    ("no team multiplies later chunks", "(n % 2 != team)", "(n % 2 != team || c > 1)"),
    ("warps of a team in turns", "team = warp / team_warps", "team = warp % team_warps"),
    ("both teams arrive", "&shared.empty[s], 32 * team_warps", "&shared.empty[s], threads"),
    ("half a team arrives", "&shared.empty[s], 32 * team_warps", "&shared.empty[s], 32"),
    ("units of the first warp", "int u = team_warp;", "int u = 0;"),
    ("units of one warp", "u < units; u += team_warps", "u < 1; u += team_warps"),
    ("units of a whole chunk in the last", "c + 1 < chunks ? 2 : 1;", "2;"),
    ("digits of the first chunk", "unit = c * 2 + u", "unit = u"),
    ("sums of two warps in one place", "shared.partial[i][warp]", "shared.partial[i][team_warp]"),
    ("sums of one team", "w < warps; ++w) sum0", "w < team_warps; ++w) sum0"),
    ("sums of the other product", "[own_row + 32]", "[own_row]"),
    ("sums of other rows", "[own_row + 32]", "[32 + (own_row ^ 1)]"),
    ("the first chunk is not awaited", "&shared.full[n - 1], 0", "&shared.full[n], 0"),
    ("rows of the first set", "[4 * g + 2] = upper_of_1", "[4 * g] = upper_of_1"),
    ("rows of a set in the other order", "[4 * g + 1] = lower_of_0", "[4 * g + 1] = upper_of_0"),
    ("rows of sets eight apart", "[4 * g + 35] = lower_of_3", "[g + 56] = lower_of_3"),
    ("rows of the other product", "[4 * g + 32] = upper_of_2", "[4 * g + 32] = upper_of_0"),
    ("a row between two sets", "lower_of_2 += below", "lower_of_3 += below"),
    ("the first word of a vector twice", "words_0_0.w[1]", "words_0_0.w[0]"),
    ("words of the other set", "words_1_0.w[2]", "words_1_0.w[0]"),
    ("low codes of another word", "words_2_1.w[3] << 4", "words_2_1.w[2] << 4"),
    ("words of the other product", "codes(words_3_1.w[0]", "codes(words_3_0.w[0]"),
    ("words of other columns", "codes(words_1_1.w[1]", "codes(words_2_1.w[1]"),
    ("words side by side for a lane", "codes + 4 * pitch + place_0", "codes + 1 * pitch + place_0"),
    ("the second word twice", "codes + 8 * pitch + place_1", "codes + 4 * pitch + place_1"),
    ("lanes of a row in the other order", "(u * 16 + t) * pitch", "(u * 16 + 3 - t) * pitch"),
    ("units that overlap", "(u * 16 + t) * pitch", "(u * 8 + t) * pitch"),
]

#: Mistakes of a kernel with a batch, and tiles of 16 rows.
OF_COLUMN_BATCH = [
    ("31 lanes and the one that expects arrive", COPIERS, COPIERS.replace("33", "32")),
    ("no arrival for copies", COPIED, ""),
    ("arrivals before the copies", COPIED, "arrive(&shared.full[s]);"),
    ("bytes of the last chunk for all", "(c + 1 < chunks ? 256 : 128)", "128"),
    ("bytes of one group", "(c + 1 < chunks ? 256 : 128)", "64"),
    ("vectors of other lanes", "vector = lane % 4, word = lane / 4", "vector = 0, word = lane / 4"),
    ("rows of words of the first part", "word_step = (row_0 < 48 ? 48 : 80)", "word_step = 48"),
    ("codes of the first part", "(row_0 - 48) * 4", "(row_0 - 48) % 32 * 4"),
    ("codes as if parts were one", "codes0_ptr1 + (row_0 - 48) * 4", "codes0_ptr1"),
    ("no vector is swapped", "(vector ^ ((word) & 2))", "vector"),
    ("vectors are swapped for odd rows", "^ ((word) & 2)", "^ (((word) & 1) * 2)"),
    ("lanes read what is not swapped", "((g / 2) ^ (t & 2))", "(g / 2)"),
    ("lanes read the swap of odd rows", "^ (t & 2)", "^ (t % 2 * 2)"),
    ("lanes read one half of a vector", " + g % 2 * 8", ""),
    ("lanes read halves in the other order", "g % 2 * 8", "(1 - g % 2) * 8"),
    ("half of the rows of words", f"{WORDS}w += 8", f"{WORDS}w += 16"),
    ("scales as in the first part", "group) * (row_0 < 48 ? 48 : 80)", "group) * 48"),
    ("scales of the first chunk", "(c * 4 + group)", "(group)"),
    ("groups in one place", " + group * 64, (row_0", ", (row_0"),
    ("the scale of upper rows", "16 + (2 * g + 1)", "16 + 2 * g"),
    ("scales of rows eight apart", "16 + (2 * g + 1)", "16 + (g + 8)"),
    ("scales of the first unit", "u * 64 / 64 * 16 + 2", "0 * 16 + 2"),
    ("columns lane after lane", "at / 8 % 4 * 16 + at % 64 / 32 * 8", "at % 64"),
    ("lanes in the other order", "at / 8 % 4 * 16", "(3 - at / 8 % 4) * 16"),
    ("columns of two words in one place", "at % 64 / 32 * 8", "0"),
    ("pieces in the other order", "place % 16 / 8 * 256", "(1 - place % 16 / 8) * 256"),
    ("pieces that overwrite each other", "place % 16 / 8 * 256", "place % 16 / 8 * 64"),
    ("the first piece twice", "factor + 1 * 256", "factor + 0 * 256"),
    (
        "the first word twice",
        "right = halves_of_4_bits(words_0_0.w[1]",
        "right = halves_of_4_bits(words_0_0.w[0]",
    ),
    (
        "words of the other piece",
        "left = halves_of_4_bits(words_1_0",
        "left = halves_of_4_bits(words_0_0",
    ),
    ("rows eight apart", "[(2 * g + 1) * batch + 2 * t] = ", "[(g + 8) * batch + 2 * t] = "),
    (
        "a row twice",
        "[(2 * g + 1) * batch + 2 * t + 1] = lower_1",
        "[(2 * g) * batch + 2 * t + 1] = lower_1",
    ),
    ("the other row", "lower_0 += sums[2]", "lower_0 += sums[0]"),
]

#: Mistakes of a kernel whose chunks have fewer words than the lanes copy.
OF_SHORT_CHUNKS = [
    ("half of the rows of words", "if (word + w < chunk_bytes / 4)", "if (word + w < 2)"),
    ("all lanes copy the first rows of words", "word = lane / 4;", "word = lane / 4 % 2;"),
    ("bytes of scales in each chunk", "(c == 0 ? 384 : 0)", "384"),
    ("scales in each chunk", "if (c == 0) {", "if (c < 2) {"),
    ("scales of the first tile", "scales0_ptr + row_0 * 6", "scales0_ptr"),
    ("the scale of upper rows", "(2 * g + 1) * 6", "2 * g * 6"),
    ("the scale of rows eight apart", "(2 * g + 1) * 6", "(g + 8) * 6"),
    ("the scale of the first group", " + unit * 32 / 32", ""),
    ("columns lane after lane", "at / 8 % 4 * 8", "(at / 8 + 1) % 4 * 8"),
    ("the first word twice", "words_0_0.w[1] << 4", "words_0_0.w[0] << 4"),
    ("lanes read what is not swapped", "((g / 2) ^ (t & 2))", "(g / 2)"),
    ("rows in the other order", "[2 * g + 1] = lower", "[15 - 2 * g] = lower"),
]

#: Mistakes by kernel: what they are, what is there once, and what is there instead.
OF_COLUMNS = {
    "columns, teams": OF_TEAMS,
    "columns, 4 rows": OF_COLUMN_BATCH,
    "columns, groups of 32": OF_SHORT_CHUNKS,
}
