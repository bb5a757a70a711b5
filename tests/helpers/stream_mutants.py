"""Mistakes of kernels that stream codes, one each.

No emulation on the CPU notices these mistakes, so they are not here:

- `arrive` at the next slot of the ring. The warp that copies then waits longer than it has to, and
  waits for the same chunks.
- The last chunk of a row is copied as if it were whole. The slot has room, and nothing reads the
  rest. Only a copy beyond the end of the memory would be noticed, on a GPU.
- No `publish_barriers`. The emulation has one view of memory.
- `sums[3]` for `sums[2]` in products of halves with one row. All columns of the right factor are
  equal.
- A stride of warps along units that is too long, if each warp has one unit.
- `own_0 = g` for a batch of fewer than 8 rows. The sums in columns beyond the batch are then
  others, and nothing stores them. The same holds for `own_1`, and `own_column_0` to
  `own_column_3`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.helpers.column_mutants import COLUMN_KERNELS, OF_COLUMNS
from tests.helpers.lane_mutants import LANE_KERNELS, OF_LANES
from tests.helpers.pair_mutants import OF_PAIRS, PAIR_KERNELS
from tests.helpers.row_mutants import OF_ROWS, ROW_KERNELS
from tests.helpers.share_mutants import OF_SHARES, SHARE_KERNELS
from tests.helpers.shift_mutants import OF_SHIFTS, SHIFT_KERNELS
from tests.helpers.streamed_graphs import Hand
from tests.helpers.wide_mutants import OF_WIDE, WIDE_KERNELS

#: Kernels to change. Each block walks several tiles, and a tile has several chunks, so the ring is
#: filled several times. Outputs are float32, so that each digit counts.
KERNELS = {
    "int4": Hand(
        rows=(96,),
        columns=512,
        group=128,
        dtype="float32",
        has_norm=True,
        has_gate=True,
        scales_first=False,
        blocks=2,
        warps=4,
    ),
    "int8": Hand(
        codes="int8",
        rows=(96,),
        columns=448,
        group=0,
        dtype="float32",
        tile=128,
        stages=3,
        blocks=1,
    ),
    "uint8": Hand(
        codes="uint8", rows=(48, 32), columns=512, group=64, dtype="float32", tile=2, blocks=2
    ),
    "float8": Hand(
        codes="float8_e4m3fn",
        rows=(128, 64),
        columns=512,
        group=128,
        square=64,
        dtype="float32",
        has_residual=True,
        scales_first=False,
        blocks=2,
    ),
    "int4, one chunk": Hand(
        rows=(96,), columns=256, group=64, tile=4, stages=3, blocks=1, warps=2, dtype="float32"
    ),
    "table": Hand(
        rows=(96,),
        columns=512,
        group=64,
        dtype="float32",
        has_norm=True,
        tile=2,
        blocks=2,
        table="14 bits",
        is_turned=True,
    ),
    "table, 2 rows": Hand(
        rows=(96,),
        columns=512,
        group=64,
        dtype="float32",
        blocks=2,
        batch=2,
        table="14 bits",
        is_turned=True,
    ),
    "int4, turned": Hand(rows=(96,), columns=512, dtype="float32", blocks=2, is_turned=True),
    "int4, turned, 2 rows": Hand(
        rows=(96,), columns=512, dtype="float32", blocks=2, batch=2, is_turned=True
    ),
    # two teams of warps; while the ring is filled, one chunk is under way
    "int4, teams": Hand(
        rows=(160,), columns=256, group=128, tile=2, stages=4, blocks=1, warps=8, dtype="float32"
    ),
    "int4, 4 rows": Hand(
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
        batch=4,
    ),
    "int8, 3 rows": Hand(
        codes="int8",
        rows=(96,),
        columns=448,
        group=0,
        dtype="float32",
        tile=128,
        stages=3,
        blocks=1,
        batch=3,
    ),
    # threads compute the other factor in two steps, of four rows each
    "float8, 8 rows": Hand(
        codes="float8_e4m3fn",
        rows=(64, 64),
        columns=1024,
        group=128,
        square=64,
        dtype="float32",
        has_gate=True,
        scales_first=False,
        blocks=4,
        batch=8,
    ),
    # a block walks one tile more than there are slots of scales
    "int4, spans": Hand(
        rows=(80,),
        columns=1280,
        group=128,
        dtype="float32",
        has_norm=True,
        scales_first=False,
        tile=2,
        blocks=1,
    ),
    "int8, spans of 2 rows": Hand(
        codes="int8",
        rows=(96,),
        columns=832,
        group=0,
        dtype="float32",
        has_norm=True,
        tile=128,
        stages=3,
        blocks=2,
        batch=2,
    ),
    **COLUMN_KERNELS,
    **ROW_KERNELS,
    **SHIFT_KERNELS,
    **LANE_KERNELS,
    **PAIR_KERNELS,
    **SHARE_KERNELS,
    **WIDE_KERNELS,
}

#: Chunks that a span of a kernel has. The last span has fewer. Other kernels have one span.
SPAN_CHUNKS = {"int4, spans": 2, "int8, spans of 2 rows": 3, "shares, spans": 2}


@dataclass(frozen=True)
class Mutant:
    """A mistake: what a kernel of `KERNELS` has once, and what is there instead."""

    kernel: str
    what: str
    before: str
    after: str


FULL = "wait_for_phase(&shared.full[s], (n / stages) & 1);"
EMPTY = "if (n >= stages) wait_for_phase(&shared.empty[s], (n / stages - 1) & 1);"
ARRIVE = "arrive(&shared.empty[s]);"
FIRST_CHUNKS = "if (n >= 1 && n < stages) wait_for_phase(&shared.full[n - 1], 0);"
BYTES = "expect_bytes(&shared.full[s], 16 * "
FROM = " + c * chunk_bytes, "
FACTOR_KEPT = "if (span > 0) meet<2>(threads);"
LATER_READY = "else meet<2>(threads);"
LAST_SPAN = "(span < 2 ? 2 : 1)"
PRODUCTS = "// of rows g and g + 8\n      for (int c = 0; c < "
SLOT = "scales_0[(span * mine + i) % 4]"
LAST_CHUNK = "(span * 3 + c) + 1 < chunks ?"
OTHER_ROW = "(span ? shared.partial[i][warp][g * batch + 2 * t + 1]"
FIRST_SQUARES = "squares += shared.sums[0 * batch]"
WITHOUT_ZERO = "(b.w[2 * piece], b.w[2 * piece + 1], 0u)"


def kept(place: str) -> str:
    """Return the text that adds what earlier spans have stored."""
    return f" + (span ? shared.{place} : 0.0f)"


OWN = "own_0 = g < batch ? g : 0"
FIRST = "own_column_0 = 2 * t < batch ? 2 * t : 0"
SECOND = "own_column_1 = 2 * t + 1 < batch ? 2 * t + 1 : 0"
FACTOR_READY = "meet<1>(threads + 32);"
SUMS_READY = "meet<2>(threads);"
STEP = "const float step = shared.steps[unit * "
LOW_DIGITS = "digits[2][h] = pick_bytes(low_0, low_1, 0x5410)"
TILE_ROW = "const long long row_0 = (int(blockIdx.x) + i * blocks) * "

#: Mistakes of any kernel: what they are, what is there once, and what is there instead.
COMMON = [
    ("no wait for full", FULL, ""),
    ("no wait for empty", EMPTY, ""),
    ("the other parity of full", FULL, FULL.replace("(n / stages)", "(n / stages + 1)")),
    ("the other parity of empty", EMPTY, EMPTY.replace("stages - 1", "stages")),
    ("full waits for the first phase only", FULL, "wait_for_phase(&shared.full[s], 0);"),
    ("wait for another slot", FULL, FULL.replace("full[s]", "full[(s + 1) % stages]")),
    ("the first wait for empty is too late", EMPTY, EMPTY.replace("n >= stages", "n > stages")),
    ("arrive before reading", FULL, f"{FULL} {ARRIVE}"),
    ("no arrival", ARRIVE, ""),
    ("one lane arrives", ARRIVE, f"if (lane == 0) {ARRIVE}"),
    ("too few arrivals of empty", "&shared.empty[s], threads", "&shared.empty[s], threads - 32"),
    ("too many arrivals of empty", "&shared.empty[s], threads", "&shared.empty[s], threads + 32"),
    ("too few bytes", BYTES, "expect_bytes(&shared.full[s], -16 + 16 * "),
    ("too many bytes", BYTES, "expect_bytes(&shared.full[s], 16 + 16 * "),
    ("copies of the same tile", TILE_ROW, TILE_ROW.replace(" + i * blocks", "")),
    ("the factor is read too early", FACTOR_READY, "announce<1>(threads + 32);"),
    ("the barriers are used too early", "announce<1>(threads + 32);", ""),
]

#: Mistakes of kernels whose barriers expect other arrivals and bytes.
OF_RING = [m for m in COMMON if m[1] not in (BYTES, "&shared.empty[s], threads")]


def units_from_the_first(kernel: str) -> tuple[str, str, str]:
    """Return a mistake. The loop over units is unrolled if all chunks have as many."""
    if kernel in RAGGED:
        return "units from the first", "int u = warp;", "int u = 0;"
    if kernel == "int4":  # a chunk has one unit
        return "no unit", "if (warp < 1)", "if (warp < 0)"
    return "units from the first", "u = warp + k * warps", "u = k * warps"


#: Mistakes of kernels with one span.
OF_ONE_SPAN = [
    ("copy of another chunk", FROM, " + (chunks - 1 - c) * chunk_bytes, "),
    ("copies of the same chunk", FROM, ", "),
    ("the sums are read too early", SUMS_READY, ""),
]

#: Mistakes of kernels whose other factor has one row.
OF_ONE_ROW = [
    (
        "partial sums of one warp",
        "shared.partial[own_tile][w][own_row]",
        "shared.partial[own_tile][0][own_row]",
    ),
    (
        "partial sums of another tile",
        "shared.partial[own_tile][w][own_row]",
        "shared.partial[0][w][own_row]",
    ),
    ("a warp more", "[i][warp][g] = upper", "[i][(warp + 1) % warps][g] = lower"),
    ("rows in the other order", "[warp][g + 8] = lower", "[warp][15 - g] = lower"),
    ("the step of the first columns", STEP, "const float step = shared.steps[0 * "),
]

#: Mistakes of kernels whose factor is stored as digits.
OF_DIGITS = [
    ("no lowest digit", "t == 1 ? 1.0f", "t == 1 ? 0.0f"),
    ("a middle digit worth too much", "t == 0 ? 256.0f", "t == 0 ? 257.0f"),
    ("the highest digit twice", "(g < 3 ? g : 0)", "(g < 2 ? g : 0)"),
    ("sums of one lane", "upper += __shfl_xor_sync(0xffffffffu, upper, 1);", ""),
    ("sums of another lane", "__shfl_xor_sync(0xffffffffu, lower, 1)", "lower"),
    ("digits without signs", f"{LOW_DIGITS} ^ 0x80808080u", LOW_DIGITS),
    ("digits in another order", LOW_DIGITS, LOW_DIGITS.replace("0x5410", "0x4510")),
    ("digits of other bytes", LOW_DIGITS, LOW_DIGITS.replace("0x5410", "0x7632")),
    ("sums from another number", "{0x4b400000, ", "{0x4b400001, "),
    ("another offset", "12599360.0f", "12582912.0f"),
]

#: Mistakes of kernels whose other factor has several rows.
OF_BATCH = [
    ("the first row for all", OWN, "own_0 = 0"),
    ("rows in the other order", OWN, "own_0 = g < batch ? batch - 1 - g : 0"),
    ("the first column is the second", FIRST, "own_column_0 = 2 * t + 1 < batch ? 2 * t + 1 : 0"),
    ("the first columns are neighbours", FIRST, "own_column_0 = t < batch ? t : 0"),
    ("the second column is the first", SECOND, "own_column_1 = 2 * t < batch ? 2 * t : 0"),
    ("the step of the first row", "steps[own_column_0]", "steps[0]"),
    ("the step of another column", "steps[own_column_1]", "steps[own_column_0]"),
    ("steps that are stored without rows", "/ 256 * batch + b]", "/ 256 * batch]"),
    ("steps that are stored by row", "/ 256 * batch + b]", "/ 256 + b]"),
    ("steps that are read by row", "/ 256 * batch;", "/ 256;"),
    ("upper sums of the second column", "upper_0 += sums[0]", "upper_0 += sums[1]"),
    ("upper sums of the first column", "upper_1 += sums[1]", "upper_1 += sums[0]"),
    ("lower sums of the second column", "lower_0 += sums[2]", "lower_0 += sums[3]"),
    ("lower sums of the first column", "lower_1 += sums[3]", "lower_1 += sums[2]"),
    ("upper sums for lower ones", "lower_1 += sums[3]", "lower_1 += sums[1]"),
    ("upper rows are neighbours", "[g * batch + 2 * t] = upper_0", "[g * batch + t] = upper_0"),
    ("second rows as first", "[g * batch + 2 * t + 1] = upper_1", "[g * batch + 2 * t] = upper_1"),
    (
        "lower rows in the other order",
        "[(g + 8) * batch + 2 * t] = lower_0",
        "[(15 - g) * batch + 2 * t] = lower_0",
    ),
    (
        "lower rows without the batch",
        "[(g + 8) * batch + 2 * t + 1] = lower_1",
        "[g + 8 * batch + 2 * t + 1] = lower_1",
    ),
    ("no second rows", "if (2 * t + 1 < batch)", "if (false)"),
    ("partial sums by row", "[own_row * batch + b]", "[own_row + 16 * b]"),
    ("partial sums of the first row", "[own_row * batch + b]", "[own_row * batch]"),
    ("partial sums of the first tile", "shared.partial[own_tile]", "shared.partial[0]"),
    ("results of other rows", "at_m = b;", "at_m = batch - 1 - b;"),
    ("results of the first row", "at_m = b;", "at_m = 0;"),
    ("each row from the first loads", "(x_held[m][r])", "(x_held[0][r])"),
    ("loads of the first row", "(b_0 + m) * ", "b_0 * "),
    ("rows that overwrite each other", " + b * 64 + ", " + "),
    ("rows that are too close", " + own_0 * 64", " + own_0 * 16"),
    ("pieces of the first columns", "(factor + piece * ", "(factor + 0 * "),
    ("pieces in the other order", "(factor + piece * ", "(factor + (piece ^ 1) * "),
    ("the first words in the other order", "x_0.w[0], x_0.w[1]", "x_0.w[1], x_0.w[0]"),
    ("the same words twice", "x_0.w[2], x_0.w[3]", "x_0.w[0], x_0.w[1]"),
    (
        "lower codes for upper ones",
        "left.w[0], right.w[0], left.w[1], right.w[1]",
        "right.w[0], left.w[0], right.w[1], left.w[1]",
    ),
    (
        "codes of later columns first",
        "left.w[2], right.w[2], left.w[3], right.w[3]",
        "left.w[3], right.w[3], left.w[2], right.w[2]",
    ),
    ("upper codes twice", "(b.w[", "(a.w["),
    ("a smaller factor", "unsigned(268 - scaled)", "unsigned(267 - scaled)"),
    ("the factor is read too early", FACTOR_READY, "announce<1>(threads + 32);"),
    ("the sums are read too early", SUMS_READY, ""),
]

#: Mistakes of a kernel whose codes are looked up.
OF_TABLE = [
    ("entries of the other half", "a_0 ^ 0x8888u", "a_0"),
    ("negative entries that count more", "multiply_digits(less, ", "multiply_digits(sums, "),
    ("lower bytes that count more", "multiply_digits(low_less, ", "multiply_digits(low_sums, "),
    ("positive entries that count less", "multiply_digits(sums, ", "multiply_digits(less, "),
    ("lower bytes worth too much", "128.0f", "129.0f"),
    ("no lower bytes", "128.0f, (__int_as_float(low_sums[0]) - ", "128.0f, 0.0f * ("),
    ("lower bytes of another column", "low_less[3]))", "low_less[2]))"),
    ("one more in a positive entry", "0x4601007fu;", "0x4601017fu;"),
    ("one less in a negative entry", "0x60001a01u;", "0x60001901u;"),
    ("one more in a lower byte", "0x0001004du;", "0x0001014du;"),
    ("words of a half in the other order", "table_0, table_1, ", "table_1, table_0, "),
    ("a word of the table is missing", "shared.table[3] = ", "shared.table[2] = "),
    ("codes of upper rows for lower ones", "table_5, b_1)", "table_5, a_1)"),
    ("codes at other bits", "a.w[1] >> 16", "a.w[1] >> 12"),
    ("codes of another word", "b_2 = b.w[1]", "b_2 = b.w[0]"),
    ("codes of a byte in the other order", "(4 * h + j) ^ 1", "4 * h + j"),
    ("digits of another word", "b_3), x.w[2], x.w[3]);", "b_3), x.w[3], x.w[2]);"),
    ("a unit that is too large", "t == 0 ? 0.015625f", "t == 0 ? 0.0158f"),
    ("no unit of the lowest digit", "t == 1 ? 6.103515625e-05f", "t == 1 ? 1.0f"),
]

#: Mistakes of one kernel.
OF_ONE = [
    (
        "int4",
        "no zero point",
        "upper_codes(a.w[0] << 4, 0x80808080u)",
        "upper_codes(a.w[0] << 4, 0u)",
    ),
    (
        "int4",
        "even and odd codes",
        "upper_codes(a.w[1] << 4, 0x80808080u), upper_codes(b.w[1] << 4, 0x80808080u), "
        "upper_codes(a.w[1], 0x80808080u), upper_codes(b.w[1], 0x80808080u)",
        "upper_codes(a.w[1], 0x80808080u), upper_codes(b.w[1], 0x80808080u), "
        "upper_codes(a.w[1] << 4, 0x80808080u), upper_codes(b.w[1] << 4, 0x80808080u)",
    ),
    ("int4", "the codes of a word twice", "upper_codes(b.w[3], ", "upper_codes(b.w[2], "),
    ("int4", "other digits", "y.w[2], y.w[3]", "y.w[3], y.w[2]"),
    ("int4", "elements in another order", "factor[2 * j + h]", "factor[4 * h + j]"),
    (
        "int4",
        "the scale of the next group",
        "(shared.scales_0[i % 2])[g * 4 + unit * 128 / 128]",
        "(shared.scales_0[i % 2])[g * 4 + (unit * 128 / 128 + 1) % 4]",
    ),
    (
        "int4",
        "the scale of another product",
        "(shared.scales_1[i % 2])[g * 4",
        "(shared.scales_0[i % 2])[g * 4",
    ),
    (
        "int4",
        "the scale of another row",
        "(shared.scales_1[i % 2])[g * 4",
        "(shared.scales_1[i % 2])[(g ^ 1) * 4",
    ),
    ("int4", "one product for both", "codes1_ptr + row", "codes0_ptr + row"),
    (
        "int4",
        "sums of the other product",
        "shared.partial[own_tile][w][own_row + 8]",
        "shared.partial[own_tile][w][own_row]",
    ),
    ("int4", "the sum of squares of one warp", "shared.sums[0][w]", "shared.sums[0][0]"),
    ("int4", "the sum of squares of one lane", "sum_0 = join_lanes<Sum, 32>(sum_0);", ""),
    ("int8", "a size of the last chunk for all", "c + 1 < chunks ? chunk_bytes : 64", "64"),
    ("int8", "the last chunk has more units", "c + 1 < chunks ? 2 : 1", "2"),
    ("int8", "rows of eight lower ones", "codes + 8 * pitch", "codes + 7 * pitch"),
    ("int8", "words in another order", "a.w[2], b.w[2]", "b.w[2], a.w[2]"),
    ("int8", "columns beyond the end", "at < columns ? x : 0.0f", "x + 1.0f"),
    ("uint8", "no zero point", "a.w[0] ^ 0x80808080u", "a.w[0]"),
    ("uint8", "no zero point of the last word", "b.w[3] ^ 0x80808080u", "b.w[3]"),
    ("uint8", "rows of the first part", "(row - 48) * row_bytes", "row % 32 * row_bytes"),
    ("uint8", "rows of the other part", "row < 48 ?", "row < 32 ?"),
    ("uint8", "scales of the other part", "row_0 < 48 ?", "row_0 < 32 ?"),
    (
        "float8",
        "the first codes twice",
        "halves_of_float8(a.w[2 * piece], a.w[2 * piece + 1])",
        "halves_of_float8(a.w[2 * piece], a.w[2 * piece])",
    ),
    ("float8", "other columns", "x_0.w[2], x_0.w[3]", "x_0.w[0], x_0.w[1]"),
    ("float8", "pieces of the first columns", "(factor + piece * ", "(factor + 0 * "),
    ("float8", "scales of the first block", "row_0 / 64 * 4", "row_0 / 128 * 4"),
    ("float8", "the sum of lower rows", "lower += sums[2]", "lower += sums[0]"),
    ("int4, one chunk", "a part of the units", "k < 2; ++k", "k < 1; ++k"),
    (
        "float8",
        "the residual of another row",
        "residual_ptr + at_n * 64 + at_o",
        "residual_ptr + at_o",
    ),
    ("int4, one chunk", "a ring of scales that is too short", "scales_0[i % 5]", "scales_0[i % 2]"),
    (
        "int4, teams",
        "the first chunk is not awaited",
        FIRST_CHUNKS,
        FIRST_CHUNKS.replace("n - 1", "n"),
    ),
    (
        "int4, teams",
        "a team arrives for both",
        "&shared.empty[s], 32 * team_warps",
        "&shared.empty[s], threads",
    ),
    ("int4, teams", "both teams multiply", "if (n % 2 != team) {", "if (false) {"),
    (
        "int4, teams",
        "sums of two warps in one place",
        "[team_warp][g] = upper",
        "[team_warp / 2][g] = upper",
    ),
    ("int4, teams", "sums of fewer warps", "w < team_warps; ++w) sum", "w < 1; ++w) sum"),
    ("int4, teams", "units of the first warp", "u = team_warp + k", "u = k"),
    *(("table", *m) for m in OF_TABLE),
    ("table, 2 rows", "codes of a byte in the other order", "factor[j ^ 1]", "factor[j]"),
    (
        "table, 2 rows",
        "lower rows for upper ones",
        "left = halves_of_table(a",
        "left = halves_of_table(b",
    ),
    ("table, 2 rows", "no unit", " * 0.031248092651367188f", ""),
    (
        "table, 2 rows",
        "lower bytes of another half",
        "table_6, table_7",
        "table_4, table_5",
    ),
    ("int4, turned", "codes in the other order", "(2 * j + h) ^ 1", "2 * j + h"),
    ("int4, turned", "codes of the other word", "(2 * j + h) ^ 1", "(2 * j + h) ^ 4"),
    ("int4, turned, 2 rows", "codes in the other order", "4) ^ 1]", "4)]"),
    (
        "int4, one chunk",
        "scales of another tile",
        "copy_bytes(shared.scales_0[i % 5]",
        "copy_bytes(shared.scales_0[(i + 1) % 5]",
    ),
]

#: Mistakes of one kernel whose other factor has several rows.
OF_ONE_BATCH = {
    "int4, 4 rows": [
        ("no zero point", "(a.w[1 * piece], 0x88888888u)", "(a.w[1 * piece], 0u)"),
        ("halves in the order of columns", "factor[j / 2 + j % 2 * 4]", "factor[j]"),
        ("halves in other pairs", "factor[j / 2 + j % 2 * 4]", "factor[j / 4 + j % 4 * 2]"),
        ("pieces that overwrite each other", "at % 32 / 8 * 256", "at % 32 / 8 * 64"),
        ("lanes in the other order", "at % 128 / 32 * 16", "(3 - at % 128 / 32) * 16"),
        ("codes of another piece", "(a.w[1 * piece]", "(a.w[1 * (piece ^ 1)]"),
        ("rows beyond the batch", "if (2 * t < batch)", "if (2 * t < batch || g < 4)"),
        ("elements row after row", "b = e / 16 % batch", "b = e % batch"),
        ("elements of other rows", "own_row = e % 16", "own_row = e / 4 % 16"),
        ("the scale of upper rows", "[(g + 8) * 4 + unit", "[g * 4 + unit"),
        ("a scale for both halves", "(step_0 * scale_1)", "(step_0 * scale_0)"),
        ("a step for both columns", "(step_1 * scale_1)", "(step_0 * scale_1)"),
        ("squares of the first row", "squares += shared.sums[0 * batch + b]", FIRST_SQUARES),
        ("squares of one warp", "shared.sums[0 * batch + b][w]", "shared.sums[0 * batch + b][0]"),
        (
            "squares that overwrite each other",
            "shared.sums[0 * batch + b][warp]",
            "shared.sums[0 * batch][warp]",
        ),
        ("the last square of a thread", "sum_0 += square;", "sum_0 = square;"),
        ("the residual of the first row", "residual_ptr + at_m * 96", "residual_ptr + 0 * 96"),
    ],
    "int8, 3 rows": [
        ("no zero point", "(b.w[2 * piece], b.w[2 * piece + 1], 0x80808080u)", WITHOUT_ZERO),
        (
            "words in the other order",
            "a.w[2 * piece], a.w[2 * piece + 1]",
            "a.w[2 * piece + 1], a.w[2 * piece]",
        ),
        ("halves in other pairs", "factor[j] * up", "factor[j / 2 + j % 2 * 4] * up"),
        ("pieces that overwrite each other", "at % 16 / 8 * 192", "at % 16 / 8 * 64"),
        ("rows beyond the batch", "if (2 * t + 1 < batch)", "if (2 * t + 1 < batch || g < 4)"),
        ("a size of the last chunk for all", "c + 1 < chunks ? chunk_bytes : 64", "64"),
        ("the last chunk has more units", "c + 1 < chunks ? 2 : 1", "2"),
        ("a step for both columns", "sums[1] * step_1", "sums[1] * step_0"),
    ],
    "float8, 8 rows": [
        (
            "words in the other order",
            "b.w[2 * piece], b.w[2 * piece + 1]",
            "b.w[2 * piece + 1], b.w[2 * piece]",
        ),
        ("pieces in the other order", "at % 16 / 8 * 512", "(1 - at % 16 / 8) * 512"),
        ("loads of the first four rows", "(b_0 + m) * ", "m * "),
        ("the first four rows twice", "const int b = b_0 + m;", "const int b = m;"),
        ("no rows after the first four", "b_0 += 4", "b_0 += 8"),
        ("the scale of the other product", "shared.scales_1[i % 2])[", "shared.scales_0[i % 2])["),
        ("a scale for both products", "(step_1 * scale_1)", "(step_1 * scale_0)"),
        ("sums of the other product", "[(own_row + 8) * batch + b]", "[own_row * batch + b]"),
        (
            "sums of another row",
            "[(own_row + 8) * batch + b]",
            "[(own_row + 8) * batch + (b ^ 1)]",
        ),
    ],
}

#: Mistakes of kernels whose other factor has several spans of columns.
OF_SPANS = [
    ("the factor is overwritten too early", FACTOR_KEPT, ""),
    ("the factor of later spans is read too early", LATER_READY, ""),
    (
        "the factor of the second span is read too early",
        LATER_READY,
        f"else if (span > 1) {SUMS_READY}",
    ),
    ("the barriers are used too early", f"if (span == 0) {FACTOR_READY} else", ""),
    ("the sums of all spans are read too early", f"}}\n  {SUMS_READY}", "}"),
    (
        "slots from the first in each span",
        "for (int i = 0; i < mine",
        "n = 0; for (int i = 0; i < mine",
    ),
    ("gamma of the first span", "gamma_ptr + span * ", "gamma_ptr + 0 * "),
    ("x of the first span", "x_ptr + span * ", "x_ptr + 0 * "),
    ("sums start with what is in memory", "(span ? ", "(true ? "),
    ("sums of the last two spans", "(span ? ", "(span > 1 ? "),
    ("copies of the first span", "row_bytes + (span * ", "row_bytes + (0 * "),
    ("copies of the same chunk", "+ c) * chunk_bytes", ") * chunk_bytes"),
]

#: Mistakes of one kernel whose other factor has several spans of columns.
OF_ONE_WITH_SPANS = {
    "int4, spans": [
        ("the second span is short, too", LAST_SPAN, "(span < 1 ? 2 : 1)"),
        ("the last span is long in products", PRODUCTS + LAST_SPAN, f"{PRODUCTS}2"),
        ("the last span has no products", PRODUCTS + LAST_SPAN, f"{PRODUCTS}(span < 2 ? 2 : 0)"),
        ("the second span ends early", "span < 2 ? 512 : 256", "span < 1 ? 512 : 256"),
        ("the last span ends early", "span < 2 ? 512 : 256", "span < 2 ? 512 : 128"),
        ("upper sums of the last span", kept("partial[i][warp][g]"), ""),
        ("lower sums of the last span", kept("partial[i][warp][g + 8]"), ""),
        ("upper sums of earlier spans twice", "upper + (span ? ", "upper + (span ? 2.0f * "),
        ("squares of the last span", kept("sums[0][warp]"), ""),
        ("scales of the first span", "(span * 512 + unit * 128)", "(0 * 512 + unit * 128)"),
        ("slots of scales by tile", SLOT, "scales_0[i % 4]"),
        ("scales are read from the tile's slot", f"(shared.{SLOT})", "(shared.scales_0[i % 4])"),
        ("a ring of scales that is too short", SLOT, "scales_0[0]"),
        ("scales of the first span only", "if (c == 0) {", "if (c == 0 && span == 0) {"),
    ],
    "int8, spans of 2 rows": [
        (
            "the last chunk of each span is small",
            f"{LAST_CHUNK} chunk_bytes",
            "c < 2 ? chunk_bytes",
        ),
        ("the last chunk of each span has fewer units", f"{LAST_CHUNK} 2", "c < 2 ? 2"),
        ("rows as long as a span", "(b_0 + m) * 832LL", "(b_0 + m) * 384LL"),
        ("upper sums of the last span", kept("partial[i][warp][g * batch + 2 * t]"), ""),
        ("lower sums of the last span", kept("partial[i][warp][(g + 8) * batch + 2 * t + 1]"), ""),
        ("sums of the other row", "(span ? shared.partial[i][warp][g * batch + 2 * t]", OTHER_ROW),
        ("squares of the last span", kept("sums[0 * batch + b][warp]"), ""),
        (
            "squares of the first row",
            "(span ? shared.sums[0 * batch + b]",
            "(span ? shared.sums[0]",
        ),
    ],
}

#: Kernels by what they have. The last chunk of a tile has fewer units in those that are ragged.
ONE_ROW = ("int4", "int8", "uint8", "float8")
BATCHES = ("int4, 4 rows", "int8, 3 rows", "float8, 8 rows")
RAGGED = ("int8", "int8, spans of 2 rows")
SPANS = ("int4, spans", "int8, spans of 2 rows")
TEAMS = ("columns, teams", "rows in words, teams", "lanes, teams")
OF_ORDERS = OF_COLUMNS | OF_ROWS | OF_SHIFTS | OF_LANES | OF_PAIRS | OF_SHARES | OF_WIDE
OF_KERNELS = OF_ONE_BATCH | OF_ONE_WITH_SPANS | OF_ORDERS
MUTANTS = [
    *(Mutant(k, *m) for k in (*ONE_ROW, *SPANS) for m in COMMON),
    *(Mutant(k, *m) for k in TEAMS for m in OF_RING),
    *(Mutant(k, *units_from_the_first(k)) for k in (*ONE_ROW, *SPANS)),
    *(Mutant(k, *m) for k in ONE_ROW for m in OF_ONE_SPAN),
    *(Mutant(k, *m) for k in (*ONE_ROW, "int4, spans") for m in OF_ONE_ROW),
    *(Mutant(k, *m) for k in ("int4", "int8", "uint8") for m in OF_DIGITS),
    *(Mutant(k, *m) for k in BATCHES for m in OF_BATCH),
    *(Mutant(k, *m) for k in SPANS for m in OF_SPANS),
    *(Mutant(*m) for m in OF_ONE),
    *(Mutant(k, *m) for k, own in OF_KERNELS.items() for m in own),
]
