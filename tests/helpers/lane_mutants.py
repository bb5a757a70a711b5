"""Mistakes of kernels whose words lie as lanes load them, one each.

No emulation on the CPU notices these mistakes, so they are not here:

- No `wait_for_own_copies`. A block of the emulation ends after its copies.
- A vector of scales or shifts that nothing reads is copied, too. A slot has room for it.
- A last vector that is missing, if the scales begin at a multiple of 16 bytes.
"""

from __future__ import annotations

from tests.helpers.streamed_graphs import Hand

#: Kernels to change. Scales and shifts with gaps begin at different addresses, and there is NaN in
#: the gaps.
LANE_KERNELS = {
    # a tile has eight rows of each product; the last chunk has one unit of two
    "lanes, teams": Hand(
        rows=(48, 24),
        columns=640,
        group=128,
        dtype="float32",
        has_norm=True,
        has_gate=True,
        scales_first=False,
        tile=2,
        stages=2,
        warps=4,
        blocks=1,
        scale_columns=(0, 1),
        shifts="groups",
        shift_columns=(0, 1),
        has_lanes=True,
        padding=128,
        scale_gaps=True,
    ),
    # a tile has two times eight rows, and a group has two units
    "lanes, 3 rows": Hand(
        codes="int4",
        rows=(48, 32),
        columns=1280,
        group=256,
        dtype="float16",
        has_residual=True,
        tile=2,
        stages=3,
        blocks=2,
        batch=3,
        scale_columns=(0,),
        shifts="sums",
        shift_columns=(0,),
        has_lanes=True,
        padding=512,
        scale_gaps=True,
    ),
    # a tile has eight rows, and scales have no gaps
    "lanes, 8 rows of codes": Hand(
        rows=(48,),
        columns=768,
        group=128,
        dtype="float32",
        tile=2,
        stages=3,
        blocks=2,
        scale_columns=(0,),
        tile_rows=8,
        has_lanes=True,
        padding=256,
    ),
}

COPIED = "arrive_when_copied(&shared.full[s]);"
COPIERS = "start_barrier(&shared.full[s], 33)"
ELECTED = "if (is_elected()) {"
PAIRS = "at / 32 * 32 + at / 8 % 4 * 2"
LANE = "u * 512 + lane * 16"
DIGIT = "factor[j % 2 * 4 + 2 * h + j / 2]"
PLACE = "at / 8 % 4 * 32 + at % 128 / 32 * 8"
CHUNK = " + c * chunk_bytes * 8, size * 8"
PART = "codes0_ptr1 + (row_0 - 48) / 8 * 3072"
GROUP = "(c * 2 + group) * (row_0 < 48 ? 48 : 24) * 8LL"
SCALE = "(shared.scales_0[s] + u * 128 / 128 * 80 + first_0)[g * 2]"
SHIFT = "(shared.shifts_1[s] + u * 128 / 128 * 80 + first_3)[g * 2]"
SCALES_COPIED = "if (byte < first_1 + 60) copy_vector(shared.scales_1[s] + group * 80 + byte, "
SHIFTS_COPIED = "begin_3 - first_3 + at + byte"
FIRST = "const int first_0 = int(reinterpret_cast<unsigned long long>("
OWN_FIRST = "    " + FIRST + "(row_0 < 48"

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
    ("bytes of eight rows", "&shared.full[s], 16 * size", "&shared.full[s], 8 * size"),
    ("bytes of scales, too", "&shared.full[s], 16 * size", "&shared.full[s], 16 * size + 160"),
    ("a size of the last chunk for all", "chunks ? chunk_bytes : 64", "chunks ? 64 : 64"),
    ("codes of the first chunk", CHUNK, ", size * 8"),
    ("chunks of one row", CHUNK, " + c * chunk_bytes, size * 8"),
    ("one row of each chunk", "size * 8, &shared", "size, &shared"),
    ("codes of the first rows", "codes1_ptr0 + row_0 / 8 * 3072", "codes1_ptr0"),
    ("rows without padding", PART, PART.replace("3072", "2560")),
    ("rows as long in codes", PART, PART.replace("3072", "6144")),
    ("the second of eight rows", PART, PART.replace("/ 8 * 3072", "* 64")),
    ("codes as if parts were one", PART, "codes0_ptr1 + row_0 / 8 * 3072"),
    ("codes of the first part", "codes1_ptr1 + (row_0", "codes1_ptr0 + (row_0"),
    ("codes of the other product", "codes1_ptr0 + row_0", "codes0_ptr0 + row_0"),
    ("products in one place", "shared.codes[s] + 8 * pitch, (row", "shared.codes[s] + 0, (row"),
    ("the other product within the first", "+ 8 * pitch, (row_0", "+ 4 * pitch, (row_0"),
    ("words of the first unit", LANE, "lane * 16"),
    ("units that overlap", LANE, "u * 256 + lane * 16"),
    ("units of a row", LANE, "u * 64 + g * pitch + t * 16"),
    ("words of one row", LANE, "u * 512 + t * 16"),
    ("lanes of a row in the other order", LANE, "u * 512 + (lane ^ 3) * 16"),
    ("rows in the other order", LANE, "u * 512 + (lane ^ 28) * 16"),
    ("lanes that overlap", LANE, "u * 512 + lane * 8"),
    ("rows of the first product", "(codes + 8 * pitch)", "(codes)"),
    ("rows within the first product", "(codes + 8 * pitch)", "(codes + 4 * pitch)"),
    ("lower halves of the next word", "upper_codes(a.w[1] << 4", "upper_codes(a.w[2] << 4"),
    ("words in another order", "upper_codes(b.w[3], ", "upper_codes(b.w[2], "),
    ("digits of other words", "y.w[2], y.w[3]", "y.w[3], y.w[2]"),
    ("digits row after row", DIGIT, "factor[2 * j + h]"),
    ("digits in the order of other words", DIGIT, "factor[4 * h + j]"),
    ("halves in the other order", DIGIT, "factor[(1 - j % 2) * 4 + 2 * h + j / 2]"),
    ("codes of a half in the other order", DIGIT, "factor[j % 2 * 4 + 2 * (1 - h) + j / 2]"),
    ("even and odd codes", DIGIT, "factor[j % 2 * 4 + 2 * h + (1 - j / 2)]"),
    ("columns side by side", "x_ptr + " + PAIRS, "x_ptr + at"),
    ("columns of the first lane", "x_ptr + " + PAIRS, "x_ptr + at / 32 * 32"),
    ("columns of other lanes", "x_ptr + " + PAIRS, "x_ptr + at / 32 * 32 + (6 - at / 8 % 4 * 2)"),
    ("columns of two lanes", "gamma_ptr + " + PAIRS, "gamma_ptr + at / 32 * 32 + at / 8 % 2 * 2"),
    ("columns of the first unit", "gamma_ptr + " + PAIRS, "gamma_ptr + at / 8 % 4 * 2"),
    ("one column for a pair", "x_ptr + " + PAIRS, "x_ptr + at / 32 * 32 + at / 8 % 4"),
    ("the first two pairs twice", f"x_ptr + {PAIRS} + 16", f"x_ptr + {PAIRS}"),
    ("pairs side by side", f"gamma_ptr + {PAIRS} + 16", f"gamma_ptr + {PAIRS} + 4"),
    ("columns lane after lane", PLACE, "at % 128"),
    ("lanes of columns in the other order", PLACE, f"(3 - at / 8 % 4) * 32 + {PLACE[18:]}"),
    ("columns of two words in one place", PLACE, f"{PLACE[:18]}at % 64 / 32 * 8"),
    ("words of columns in the other order", PLACE, f"{PLACE[:18]}(at % 128 / 32 ^ 1) * 8"),
    ("halves of a unit in one place", "place % 32 / 16 * 192", "0"),
    ("sums of half of a unit", "join_lanes<Sum, 16>(unit_sum)", "join_lanes<Sum, 8>(unit_sum)"),
    ("sums of four columns", "j < 8; ++j) unit_sum", "j < 4; ++j) unit_sum"),
    ("the sum of the first unit", "unit_sums[unit]", "unit_sums[0]"),
    ("half of the vectors", "? 2 : 1) * 5; e += 32", "? 2 : 1) * 4; e += 32"),
    ("vectors of the last chunk for all", "(c + 1 < chunks ? 2 : 1) * 5", "1 * 5"),
    ("vectors of one lane", "for (int e = lane;", "if (lane == 0) for (int e = lane;"),
    ("lanes without vectors", "for (int e = lane;", "if (lane > 1) for (int e = lane;"),
    ("the same group for all lanes", "group = e / 5", "group = 0"),
    ("groups of four vectors", "group = e / 5", "group = e / 4"),
    ("the first vector for all lanes", "byte = e % 5 * 16", "byte = 0"),
    ("no last vector", SCALES_COPIED, SCALES_COPIED.replace("first_1 + 60", "49")),
    (
        "no vector that the address begins within",
        SCALES_COPIED,
        "if (byte < 60 - first_1)" + SCALES_COPIED[24:],
    ),
    ("groups in one place", SCALES_COPIED, SCALES_COPIED.replace(" + group * 80", "")),
    ("groups that overlap", SCALES_COPIED, SCALES_COPIED.replace("80", "64")),
    ("scales where shifts belong", "copy_vector(shared.shifts_0", "copy_vector(shared.scales_0"),
    ("shifts of the other product", SHIFTS_COPIED, "begin_2 - first_3 + at + byte"),
    ("scales for shifts", SHIFTS_COPIED, "begin_1 - first_3 + at + byte"),
    ("the first byte of other shifts", SHIFTS_COPIED, "begin_3 - first_2 + at + byte"),
    ("vectors at any address", SHIFTS_COPIED, "begin_3 + at + byte"),
    ("shifts of the first group", SHIFTS_COPIED, "begin_3 - first_3 + byte"),
    ("the first vector of shifts", SHIFTS_COPIED, "begin_3 - first_3 + at"),
    ("scales of the first chunk", GROUP, GROUP.replace("c * 2 + ", "")),
    ("scales of a chunk of one group", GROUP, GROUP.replace("c * 2", "c")),
    ("groups of the first part", GROUP, GROUP.replace("(row_0 < 48 ? 48 : 24)", "48")),
    ("groups without gaps", GROUP, GROUP.replace("8LL", "4LL")),
    ("scales of rows without gaps", "scales0_ptr0 + row_0 * 2", "scales0_ptr0 + row_0"),
    ("scales of the first tile", "scales1_ptr1 + (row_0 - 48) * 2", "scales1_ptr1"),
    ("scales as if parts were one", "(row_0 - 48) * 2", "row_0 * 2"),
    ("shifts of the first part", "shifts0_ptr1 +", "shifts0_ptr0 +"),
    ("shifts of the first product", "shifts1_ptr0 +", "shifts0_ptr0 +"),
    ("the first byte of the other scales", SCALE, SCALE.replace("first_0", "first_1")),
    ("the first byte of the shifts", SCALE, SCALE.replace("first_0", "first_2")),
    ("scales from the first byte of a vector", SCALE, SCALE.replace(" + first_0", "")),
    ("scales of rows side by side", SCALE, SCALE.replace("g * 2", "g")),
    ("scales in the gaps", SCALE, SCALE.replace("g * 2", "g * 2 + 1")),
    ("scales of the first row", SCALE, SCALE.replace("g * 2", "0")),
    ("scales of the first group of a chunk", SCALE, SCALE.replace("u * 128 / 128 * 80 + ", "")),
    ("scales of a group of the tile", SCALE, SCALE.replace("u * 128", "unit * 128")),
    ("scales of shorter groups", SCALE, SCALE.replace("80", "64")),
    ("the shift of the first product", SHIFT, SHIFT.replace("shifts_1", "shifts_0")),
    ("the first byte of the scales", SHIFT, SHIFT.replace("first_3", "first_1")),
    ("the shift of rows side by side", SHIFT, SHIFT.replace("g * 2", "g")),
    ("the shift of another slot", SHIFT, SHIFT.replace("[s]", "[(s + 1) % stages]")),
    ("the first byte of the first tile", OWN_FIRST, OWN_FIRST.replace("row_0 <", "0 * row_0 <")),
    ("both teams multiply", "if (n % 2 != team) continue;", ""),
    ("both teams arrive", "&shared.empty[s], 32 * team_warps", "&shared.empty[s], threads"),
    ("sums of one team", "w < warps; ++w) sum0", "w < team_warps; ++w) sum0"),
    ("sums of two teams in one place", "shared.partial[i][warp]", "shared.partial[i][team_warp]"),
    ("the row of an axis", "at_o = row % 8", "at_o = 7 - row % 8"),
]

NEXT_ROWS = "codes0_ptr0 + (row_0 + 8) / 8 * 7168"
PIECE = "place % 32 / 8 * 192"
LOWER = "(shared.scales_0[s] + u * 128 / 256 * 80 + first_0)[(g + 8) * 2]"
LOWER_SHIFT = "(shared.shifts_0[s] + u * 128 / 256 * 80 + first_1)[(g + 8) * 2]"

#: Mistakes of a kernel with a batch, and tiles of 16 rows.
OF_BATCH = [
    ("31 lanes and the one that expects arrive", COPIERS, COPIERS.replace("33", "32")),
    ("no arrival for copies", COPIED, ""),
    ("arrivals before the copies", COPIED, "arrive(&shared.full[s]);"),
    ("all lanes expect bytes", ELECTED, "{"),
    ("bytes of eight rows", "&shared.full[s], 16 * size", "&shared.full[s], 8 * size"),
    ("codes of the first chunk", CHUNK, ", size * 8"),
    ("the first eight rows twice", NEXT_ROWS, NEXT_ROWS.replace("(row_0 + 8)", "row_0")),
    ("rows without padding", NEXT_ROWS, NEXT_ROWS.replace("7168", "5120")),
    ("the last eight rows of the first part", "(row_0 + 8) < 48 ?", "(row_0 + 8) < 64 ?"),
    (
        "eight rows of the first part",
        "((row_0 + 8) - 48) / 8 * 7168",
        "(row_0 + 8) % 32 / 8 * 7168",
    ),
    ("eight rows in one place", "+ 8 * pitch, ((row_0 + 8)", "+ 0 * pitch, ((row_0 + 8)"),
    ("words of the first unit", LANE, "lane * 16"),
    ("units that overlap", LANE, "u * 256 + lane * 16"),
    ("lanes of a row in the other order", LANE, "u * 512 + (lane ^ 3) * 16"),
    ("the first eight rows again", "(codes + 8 * pitch)", "(codes)"),
    ("rows of the next unit", "(codes + 8 * pitch)", "(codes + 512)"),
    ("codes of another piece", "(a.w[1 * piece]", "(a.w[1 * (piece ^ 1)]"),
    ("unsigned codes", "b.w[1 * piece], 0x88888888u", "b.w[1 * piece], 0u"),
    ("halves in the order of rows", "factor[j] * up);", "factor[j / 2 + j % 2 * 4] * up);"),
    ("even and odd halves", "factor[j] * up);", "factor[j ^ 1] * up);"),
    ("halves of words in the other order", "factor[j] * up);", "factor[j ^ 4] * up);"),
    ("columns side by side", PAIRS, "at"),
    ("columns of the first lane", PAIRS, "at / 32 * 32"),
    ("columns of other lanes", PAIRS, "at / 32 * 32 + (6 - at / 8 % 4 * 2)"),
    ("columns of the first row", "(b_0 + m) * 1280LL", "b_0 * 1280LL"),
    ("columns lane after lane", PLACE, "at % 128"),
    ("words of columns in the other order", PLACE, f"{PLACE[:18]}(at % 128 / 32 ^ 1) * 8"),
    ("pieces in the other order", PIECE, "(3 - place % 32 / 8) * 192"),
    ("pieces that overwrite each other", PIECE, "place % 32 / 8 * 64"),
    ("sums of half of a unit", "join_lanes<Sum, 16>(unit_sum)", "join_lanes<Sum, 8>(unit_sum)"),
    ("vectors of the last chunk for all", "(c + 1 < chunks ? 2 : 1) * 5", "1 * 5"),
    ("lanes without vectors", "for (int e = lane;", "if (lane > 1) for (int e = lane;"),
    ("vectors of eight rows", "first_0 + 62", "first_0 + 30"),
    ("scales of the first chunk", "(c * 2 + group)", "group"),
    ("scales of units", "(c * 2 + group)", "(c * 4 + group)"),
    ("groups of the first part", "(row_0 < 48 ? 48 : 32) * 4LL", "48 * 4LL"),
    ("groups without gaps", "48 : 32) * 4LL", "48 : 32) * 2LL"),
    ("shifts of the first tile", "shifts0_ptr0 + row_0 * 2", "shifts0_ptr0"),
    ("scales of rows without gaps", "scales0_ptr0 + row_0 * 2", "scales0_ptr0 + row_0"),
    ("the scale of upper rows", LOWER, LOWER.replace("(g + 8)", "g")),
    ("scales of rows side by side", LOWER, LOWER.replace("(g + 8) * 2", "(g + 8)")),
    ("a scale for each unit", LOWER, LOWER.replace("u * 128 / 256", "u * 128 / 128")),
    ("scales of the first group", LOWER, LOWER.replace("u * 128 / 256 * 80 + ", "")),
    ("the first byte of the shifts", LOWER, LOWER.replace("first_0", "first_1")),
    ("the first byte of the scales", LOWER_SHIFT, LOWER_SHIFT.replace("first_1", "first_0")),
    ("the shift of upper rows", LOWER_SHIFT, LOWER_SHIFT.replace("(g + 8)", "g")),
    ("scales for shifts", "begin_1 - first_1 + at", "begin_0 - first_1 + at"),
]

#: Mistakes of a kernel without gaps between scales, and tiles of eight rows.
OF_FEW_ROWS = [
    ("bytes of 16 rows", "&shared.full[s], 8 * chunk_bytes", "&shared.full[s], 16 * chunk_bytes"),
    ("no bytes of scales", "8 * chunk_bytes + 64", "8 * chunk_bytes"),
    ("rows without padding", "row_0 / 8 * 4096", "row_0 / 8 * 3072"),
    ("half of the rows", "row_0 / 8 * 4096", "row_0 / 16 * 4096"),
    ("codes of the first chunk", " + c * chunk_bytes * 8", ""),
    ("words of one row", LANE, "u * 512 + t * 16"),
    ("the next rows", "[warp][g] = upper", "[warp][g ^ 1] = upper"),
    ("scales in gaps", "[s])[u * 128 / 128 * 8 + g]", "[s])[u * 128 / 128 * 8 + g / 2 * 2]"),
    ("scales of the first group", "[s])[u * 128 / 128 * 8 + g]", "[s])[g]"),
    ("groups of scales in one place", "shared.scales_0[s] + group * 32", "shared.scales_0[s]"),
    ("columns side by side", PAIRS, "at"),
    ("digits row after row", DIGIT, "factor[2 * j + h]"),
]

#: Mistakes by kernel: what they are, what is there once, and what is there instead.
OF_LANES = {
    "lanes, teams": OF_TEAMS,
    "lanes, 3 rows": OF_BATCH,
    "lanes, 8 rows of codes": OF_FEW_ROWS,
}
