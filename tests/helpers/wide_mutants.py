"""Mistakes of kernels whose other factor has more than eight rows, one each."""

from __future__ import annotations

from tests.helpers.streamed_graphs import Hand

#: Kernels to change. Threads compute the other factor in several steps.
WIDE_KERNELS = {
    "int4, 16 rows": Hand(
        codes="int4",
        rows=(96,),
        columns=512,
        group=128,
        dtype="float32",
        has_norm=True,
        has_residual=True,
        scales_first=False,
        blocks=2,
        warps=4,
        batch=16,
    ),
    "zero points, 13 rows": Hand(
        rows=(48,),
        columns=512,
        group=64,
        dtype="float32",
        has_gate=True,
        scales_first=False,
        tile=2,
        stages=3,
        blocks=2,
        batch=13,
        has_zeros=True,
    ),
    # a warp multiplies two sets of 16 rows
    "columns, 12 rows": Hand(
        rows=(64,),
        columns=512,
        group=64,
        dtype="float32",
        tile=2,
        stages=3,
        blocks=1,
        batch=12,
        has_columns=True,
        scale_columns=(0,),
    ),
    # the same, and both share loads of x
    "two sets, 12 rows": Hand(
        rows=(96,),
        columns=512,
        group=128,
        dtype="float32",
        tile=2,
        stages=3,
        blocks=2,
        batch=12,
        tile_rows=32,
    ),
    "two sets of two products": Hand(
        rows=(64,),
        columns=512,
        group=128,
        dtype="float32",
        has_gate=True,
        scales_first=False,
        tile=2,
        stages=3,
        blocks=2,
        batch=5,
        has_zeros=True,
        tile_rows=16,
    ),
}

OWN = "own_1 = g + 8 < batch ? g + 8 : 0"
COLUMNS = [
    f"own_column_{n} = {c} < batch ? {c} : 0"
    for n, c in enumerate(("2 * t", "2 * t + 1", "2 * t + 8", "2 * t + 9"))
]
FIRST_SUMS = (
    "multiply_halves(more, left.w[0], right.w[0], left.w[1], right.w[1], x_1.w[0], x_1.w[1]);"
)
LAST_SUMS = (
    "multiply_halves(more, left.w[2], right.w[2], left.w[3], right.w[3], x_1.w[2], x_1.w[3]);"
)
MORE = "float more[4] = {0.0f, 0.0f, 0.0f, 0.0f};"
STORED = "if (2 * t + 9 < batch)"
SAME = "auto& sums_1 = sums_0;"

#: Mistakes of any kernel: what they are, what is there once, and what is there instead.
COMMON = [
    ("the second eight rows are the first ones", OWN, "own_1 = own_0"),
    ("the ninth row for all", OWN, "own_1 = 8"),
    ("every second row", OWN, "own_1 = g + 8 < batch ? (g & 6) + 8 : 0"),
    ("the first columns are the second ones", COLUMNS[0], "own_column_0 = 2 * t + 1"),
    ("the second columns are the first ones", COLUMNS[1], "own_column_1 = 2 * t"),
    ("the third columns are the first ones", COLUMNS[2], "own_column_2 = own_column_0"),
    ("the third columns are the fourth ones", COLUMNS[2], COLUMNS[2].replace("+ 8", "+ 9")),
    ("the fourth columns are the second ones", COLUMNS[3], "own_column_3 = own_column_1"),
    ("the fourth columns are the third ones", COLUMNS[3], "own_column_3 = own_column_2"),
    ("no sums of the first words", FIRST_SUMS, ""),
    ("no sums of the last words", LAST_SUMS, ""),
    ("sums of the first words for the last ones", "x_1.w[2], x_1.w[3]", "x_1.w[0], x_1.w[1]"),
    ("the second eight rows enter the first sums", FIRST_SUMS, FIRST_SUMS.replace("more", "sums")),
    ("the first eight rows enter the second sums", "x_1.w[0], x_1.w[1]", "x_0.w[0], x_0.w[1]"),
    ("all sums in one place", MORE, "auto& more = sums;"),
    ("third sums are not stored", "if (2 * t + 8 < batch)", "if (false)"),
    ("fourth sums are not stored", STORED, "if (false)"),
    ("fourth sums of one lane are not stored", STORED, "if (2 * t + 9 < batch && t > 0)"),
    ("third sums as first ones", "batch + 2 * t + 8] = ", "batch + 2 * t] = "),
    ("fourth sums as third ones", "batch + 2 * t + 9] = ", "batch + 2 * t + 8] = "),
    ("sums of the rows are read too early", "meet<2>(threads);", ""),
    ("no more than eight rows are stored", "% batch;", "% 8;"),
]

#: Mistakes of kernels with one set of rows.
OF_ONE_SET = [
    ("third sums of upper rows", "upper_2 += (more[0]", "upper_2 += (sums[0]"),
    ("fourth sums of upper rows", "upper_3 += (more[1]", "upper_3 += (more[0]"),
    ("third sums of lower rows", "lower_2 += (more[2]", "lower_2 += (more[0]"),
    ("fourth sums of lower rows", "lower_3 += (more[3]", "lower_3 += (sums[3]"),
    ("the step of first columns", "(step_2 * scale_0)", "(step_0 * scale_0)"),
    ("the step of third columns", "(step_3 * scale_1)", "(step_2 * scale_1)"),
    ("third sums of lower rows are upper ones", "t + 8] = lower_2", "t + 8] = upper_2"),
    ("fourth sums of upper rows are third ones", "t + 9] = upper_3", "t + 9] = upper_2"),
]


#: Mistakes of kernels with two sets of rows that share loads.
OF_TWO_SETS = [
    ("upper rows of one set", "halves_of_4_bits(a_1.", "halves_of_4_bits(a_0."),
    ("lower rows of one set", "halves_of_4_bits(b_1.", "halves_of_4_bits(b_0."),
    ("lower rows are the upper ones", "halves_of_4_bits(b_0.", "halves_of_4_bits(a_0."),
    ("both sets have the same sums", "float sums_1[4] = {0.0f, 0.0f, 0.0f, 0.0f};", SAME),
    (
        "products of the second set enter the first",
        "multiply_halves(sums_1,",
        "multiply_halves(sums_0,",
    ),
    (
        "no products of the second set",
        "multiply_halves(sums_1,",
        "if (false) multiply_halves(sums_1,",
    ),
    ("the first piece of x for all", "(factor + piece * ", "(factor + 0 * "),
    ("one row of x", " + own_0 * 64", ""),
    ("sums of the second set are not kept", "_of_1_0 += ", "_of_1_0 = "),
    ("sums of the first set for both", "= upper_of_1_1;", "= upper_of_0_1;"),
    ("lower sums of the second set for both", "= lower_of_0_0;", "= lower_of_1_0;"),
]


def plain(mistake: tuple[str, str, str]) -> tuple[str, str, str]:
    """Return a mistake of a kernel without zero points."""
    what, before, after = mistake
    return what, before.replace("+= (", "+= "), after.replace("+= (", "+= ")


#: Mistakes by kernel: what they are, what is there once, and what is there instead.
OF_WIDE = {
    "int4, 16 rows": [
        *COMMON,
        *map(plain, OF_ONE_SET),
        ("loads of the first eight rows", "(b_0 + m) * 512LL", "m * 512LL"),
        ("the first eight rows twice", "const int b = b_0 + m;", "const int b = m;"),
        ("no rows after the first eight", "b_0 += 8", "b_0 += 16"),
        ("squares of the first eight rows", "sums[0 * batch + b][w]", "sums[0 * batch + b % 8][w]"),
        ("the residual of the first eight rows", "residual_at(at_m, ", "residual_at(at_m % 8, "),
    ],
    "zero points, 13 rows": [
        *COMMON,
        *OF_ONE_SET,
        ("rows beyond the batch", "if (2 * t + 9 < batch)", "if (2 * t + 9 < batch || g < 4)"),
        ("sums of the first columns of x", "unit_sums[own_column_2]", "unit_sums[own_column_0]"),
        ("sums of the third columns of x", "unit_sums[own_column_3]", "unit_sums[own_column_2]"),
        ("zero points of the first columns", "zero_0 * own_sum_2", "zero_0 * own_sum_0"),
        ("zero points of the second columns", "zero_1 * own_sum_3", "zero_1 * own_sum_1"),
    ],
    "columns, 12 rows": [
        *COMMON,
        ("third sums of the second set", "upper_of_1_2 += more[0]", "upper_of_1_2 += sums[0]"),
        ("fourth sums of the second set", "lower_of_1_3 += more[3]", "lower_of_1_3 += more[2]"),
        ("third sums of the first set", "t + 8] = upper_of_1_2", "t + 8] = upper_of_0_2"),
        ("fourth sums of the first set", "t + 9] = lower_of_1_3", "t + 9] = lower_of_0_3"),
        ("the step of the other set's columns", "(step_3 * scale_1)", "(step_1 * scale_1)"),
    ],
    "two sets, 12 rows": [
        *OF_TWO_SETS,
        ("the second eight rows are the first ones", OWN, "own_1 = own_0"),
        ("lower rows of the other set", "(codes + 8 * pitch)", "(codes + 24 * pitch)"),
        ("upper rows of the second set", "(codes + 16 * pitch)", "(codes + 8 * pitch)"),
        ("third sums of the second set", "upper_of_1_2 += more_1[0]", "upper_of_1_2 += more_0[0]"),
        ("fourth sums of the second set", "_of_1_3 += more_1[3]", "_of_1_3 += more_1[2]"),
        ("scales of the first set", "[(g + 24) * 4", "[(g + 8) * 4"),
        ("scales of upper rows", "[(g + 8) * 4", "[g * 4"),
        ("tiles of 16 rows are copied", "r < 32; ++r", "r < 16; ++r"),
        ("half of the scales", "row_0 * 4, 512", "row_0 * 4, 256"),
        ("tiles begin every 16 rows", "i * blocks) * 32;", "i * blocks) * 16;"),
        ("results of 16 rows", "e / 32 % batch", "e / 16 % batch"),
    ],
    "two sets of two products": [
        *OF_TWO_SETS,
        ("lower rows of the first product", "(codes + 16 * pitch)", "(codes)"),
        ("upper rows of the first set", "(codes + 8 * pitch)", "(codes)"),
        ("sums of the products change places", "(g + 16) * batch", "(g + 8) * batch"),
        ("scales of the first set", "scales_0[i % 3])[(g + 8)", "scales_0[i % 3])[g"),
        ("zero points of the first set", "zeros_1[i % 3])[(g + 8)", "zeros_1[i % 3])[g"),
        ("rows of the second product", "codes[s][(16 + r)", "codes[s][(8 + r)"),
        ("zero points of the other columns", "zero_1 * own_sum_1", "zero_1 * own_sum_0"),
    ],
}
