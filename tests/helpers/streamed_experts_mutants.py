"""Mistakes of kernels that stream the codes of chosen experts, one each.

These changes compute the same, so they are not here:

- `lie_together = false`, or only one of its two comparisons. The rows are then copied one by one.
- Rows of both products in another order, if each row is copied by itself.
- Lanes hold a fourth digit of x, or the products count a fourth one. Each alone multiplies by 0.
- Numbers of experts from -1 to -2^31 without the check. They are negative in 32 bits, too.
- The last chunk of a row, copied as if it were whole. Nothing reads the rest.
- One team multiplies all tiles. Or the teams take other tiles, as long as each keeps its stages.
- The ring of scales has one slot less, and each tile has one chunk. Then there is a spare slot.
- The codes of the upper rows for the lower ones in tiles of 8 rows. Nothing reads the lower sums.
- The size of the scales of one product for those of the other. They are equal if both begin alike.
- The expert of another piece in the loop of the products, if both exist. Only the copies differ.

No emulation on the CPU notices that `__threadfence_block` is missing: it has one view of memory.
"""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.stream_mutants import Mutant
from tests.helpers.streamed_experts import Experts

#: Kernels to change. Some experts are missing. Outputs are float32, so that each digit counts.
KERNELS = {
    # one copy for a whole tile; the digits are held in registers
    "turns": Experts(
        experts=6,
        index=(5, 1 - 2**32, 0),
        chosen=3,
        rows=48,
        columns=320,
        tile=16,
        has_gate=True,
        has_bias=True,
        in_turns=True,
        shift=10,
        warps=4,
        blocks=2,
    ),
    "turns, chunks": Experts(
        experts=6,
        index=(1, 6, 4),
        chosen=3,
        rows=24,
        columns=192,
        has_gate=True,
        in_turns=True,
        shift=3,
        stages=3,
    ),
    "pieces": Experts(
        experts=6,
        index=(3, 2**32 + 1, 5),
        chosen=0,
        pieces=3,
        rows=64,
        columns=192,
        tile=8,
        has_bias=True,
        has_weights=True,
        scales_first=True,
        shift=5,
    ),
    "8 rows": Experts(
        experts=6,
        index=(4, 1),
        chosen=0,
        pieces=2,
        rows=48,
        columns=576,
        tile=8,
        tile_rows=8,
        has_bias=True,
        shift=2,
        warps=4,
    ),
    "8 rows, whole tiles": Experts(
        experts=5,
        index=(1 - 2**32, 4, 2),
        chosen=0,
        pieces=3,
        rows=48,
        columns=320,
        tile=16,
        tile_rows=8,
        has_weights=True,
        shift=7,
        stages=3,
    ),
    "float8": Experts(
        codes="float8_e4m3fn",
        scales="float32",
        experts=5,
        index=(4, 5, 1),
        chosen=3,
        rows=64,
        square=32,
        has_gate=True,
        shift=1,
    ),
    "float8, pieces": Experts(
        codes="float8_e4m3fn",
        scales="float32",
        experts=5,
        index=(4, 2 - 2**32, 1),
        chosen=0,
        pieces=3,
        rows=64,
        square=32,
        columns=192,
        tile=8,
        has_weights=True,
        weighs_first=True,
        stages=3,
        blocks=2,
    ),
    # the index has rows and pieces; one group in an instruction
    "both": Experts(
        codes="int4",
        scales="bfloat16",
        experts=5,
        index=(4, 0, 2, 5),
        pieces=2,
        columns=256,
        group=64,
        tile=2,
        has_bias=True,
        gap=32,
        shift=1,
    ),
    "teams": Experts(
        experts=6,
        index=(5, 1, 6, 0),
        chosen=4,
        rows=48,
        columns=320,
        tile=16,
        warps=8,
        blocks=2,
    ),
    "teams, pieces": Experts(
        experts=6,
        index=(5, 1, 6),
        chosen=0,
        pieces=3,
        rows=64,
        columns=320,
        tile=16,
        stages=4,
        warps=8,
        blocks=2,
    ),
}


def variants(name: str) -> list[Experts]:
    """Return a kernel's inputs: rows that lie in turns lie in either order, and apart, too.

    If teams share the pieces of tiles, a missing expert changes which team has which.
    """
    e = KERNELS[name]
    if name == "teams, pieces":
        return [e, replace(e, index=(5, 1, 3))]
    if not e.in_turns:
        return [e]
    orders = [e, replace(e, is_swapped=True)]
    return [replace(o, is_apart=is_apart) for is_apart in (False, True) for o in orders]


BOUND = "expert >= 0 && expert < "
WAIT = "wait_for_previous_kernel();\n"
READ_INDEX = f"{WAIT}    for (int e = lane;"
READ_X = f"  {WAIT}  launch_next_kernel();"
MISSING = "(expert < 0 ? 0 : chunks); ++c, ++n) {\n"
FULL = "wait_for_phase(&shared.full[s], (n / stages) & 1);"
EMPTY = "if (n >= stages) wait_for_phase(&shared.empty[s], (n / stages - 1) & 1);"
ZEROS = "if (lane < 4) shared.zeros[lane] = 0;"
LESS = "(__int_as_float(sums[0]) - __int_as_float(less[0]))"
MORE = "(__int_as_float(sums[0]) + __int_as_float(less[0]) - 25165824.0f)"
LAST_UNIT = "warp + k * warps < 4 ? warp + k * warps : 4"
SCALES_OF_LANE = "((g % 2 == 0) != is_swapped ? shared.scales_0"
RESULT_ROW = "own_row * 2 + (is_swapped ? 1 : 0)"
COPIED_ROW = "2 * r + (is_swapped ? 1 : 0)"
NO_BIAS = "expert < 0 ? (const float*)nullptr : "
LOWEST_DIGIT = "worth_0 = t % 2 ? 1.0f : 65536.0f"
EXPERT_OF_COPY = ";\n          const unsigned long long begin_0"
TOGETHER = "lie_together = codes0_ptr + row_bytes == codes1_ptr || codes1_ptr + row_bytes =="
SWAPPED = "is_swapped = codes1_ptr < codes0_ptr"

#: Mistakes of any kernel: what they are, what is there, and what is there instead.
COMMON = [
    ("the index is read too early", READ_INDEX, "for (int e = lane;"),
    ("x is read too early", READ_X, "  launch_next_kernel();"),
    ("the first expert for all", "index_ptr[e]", "index_ptr[0]"),
    ("missing experts are the first", " : -1;", " : 0;"),
    ("lanes read the index before it is there", "__syncwarp();\n    announce<1>", "announce<1>"),
    ("no scales are copied", "if (c == 0) {", "if (c == 1) {"),
    ("a ring of scales of one slot", "(n / chunks) % ", "0 * "),
]

#: Mistakes of kernels with an index that has numbers of more than 32 bits.
OF_LONG_NUMBERS = [("numbers of 32 bits", "const long long expert =", "const int expert =")]

#: Mistakes of kernels with an index that has numbers below 0, or of experts after the last one.
OF_BOUNDS = {
    "turns": [("numbers below 0", BOUND, "expert < ")],
    "8 rows, whole tiles": [("numbers below 0", BOUND, "expert < ")],
    "float8, pieces": [("numbers below 0", BOUND, "expert < ")],
    "turns, chunks": [("one expert too many", f"{BOUND}6", "expert >= 0 && expert <= 6")],
    "pieces": [("numbers too large", f"{BOUND}6", "expert >= 0")],
    "float8": [("one expert too many", f"{BOUND}5", "expert >= 0 && expert <= 5")],
    "both": [("numbers too large", f"{BOUND}5", "expert >= 0")],
    "teams": [("one expert too many", f"{BOUND}6", "expert >= 0 && expert <= 6")],
}

#: Mistakes of products of 4-bit floats, two groups at a time.
OF_PAIRS = [
    ("codes with a sign count twice", LESS, LESS.replace("less[0]", "sums[0]")),
    ("codes with a sign are added", LESS, MORE),
    ("codes with a sign count nothing", LESS, "(__int_as_float(sums[0]) - 12582912.0f)"),
    ("one sign less", "a_0 ^ 0x8888u", "a_0 ^ 0x0888u"),
    ("no sign in the second half", "a_3 ^ 0x8888u", "a_3"),
    ("the first half of a word twice", "a_1 = a.w[0] >> 16", "a_1 = a.w[0]"),
    ("other codes of a word", "a_3 = a.w[1] >> 16", "a_3 = a.w[1] >> 12"),
    ("the first word twice", "a_2 = a.w[1]", "a_2 = a.w[0]"),
    ("codes in the other order", "x.w[0], x.w[1]", "x.w[1], x.w[0]"),
    ("digits in the order of integers", "factor[4 * h + j]", "factor[2 * j + h]"),
    ("codes of the other lane", "u * 32 + t * 8", "u * 32 + (t ^ 1) * 8"),
    ("groups of the wrong lanes", "g / 4 == t / 2", "g / 4 == t % 2"),
    ("groups in the other order", "g / 4 == t / 2", "g / 4 != t / 2"),
    ("digits of both groups", "g / 4 == t / 2 && ", ""),
    ("two digits", "g % 4 < 3", "g % 4 < 2"),
    (
        "digits in place of zeros",
        "<const unsigned char*>(shared.zeros)",
        "<const unsigned char*>(&shared)",
    ),
    ("no zeros", ZEROS, ""),
    ("too few zeros", ZEROS, ZEROS.replace("lane < 4", "lane < 3")),
    ("digits of the first unit", "held_step = holds ? 192 : 0", "held_step = 0"),
    ("digits of the first lane", "g % 4 * 64 + t * 16", "g % 4 * 64"),
    ("digits of other lanes", "g % 4 * 64 + t * 16", "g % 4 * 64 + t % 2 * 16"),
    ("the first digit for all", "g % 4 * 64 + t * 16", "t * 16"),
    ("no lowest digit", LOWEST_DIGIT, LOWEST_DIGIT.replace("1.0f", "0.0f")),
    ("sums of one group", "upper += __shfl_xor_sync(0xffffffffu, upper, 2);", ""),
    ("sums of one digit", "upper += __shfl_xor_sync(0xffffffffu, upper, 1);", ""),
    ("the scale of the first group", " / 32 + t / 2]", " / 32]"),
    ("the scale of the other group", " / 32 + t / 2]", " / 32 + (1 - t / 2)]"),
    ("a scale for each lane", " / 32 + t / 2]", " / 32 + t]"),
    ("the step of the first columns", "unsigned(unit) / 4", "unsigned(0 * unit)"),
    ("steps of 128 columns", "unsigned(unit) / 4", "min(unsigned(unit) / 2, 1u)"),
]

#: Mistakes of kernels whose rows may lie in turns.
OF_TURNS = [
    ("results of the other product", RESULT_ROW, RESULT_ROW.replace("1 : 0", "0 : 1")),
    ("sums as if in order", RESULT_ROW, "own_row * 2"),
    ("scales of the other product", SCALES_OF_LANE, SCALES_OF_LANE.replace("!=", "==")),
    ("scales as if in order", SCALES_OF_LANE, "(g % 2 == 0 ? shared.scales_0"),
    ("scales of upper rows", "g / 2 * ", "g / 4 * "),
    ("scales of the first product twice", "shared.scales_1[(n", "shared.scales_0[(n"),
    ("the other shift of the scales", "+ first_1)", "+ first_1 + 1)"),
    ("rows as if in order", COPIED_ROW, "2 * r"),
    ("rows of the other product", COPIED_ROW, COPIED_ROW.replace("1 : 0", "0 : 1")),
    ("rows of half the tile", "row = first + r;", "row = first + r / 2;"),
]

#: Mistakes of one kernel.
OF_ONE = {
    "turns": [
        ("the first product lies first", SWAPPED, "is_swapped = false"),
        ("the second product lies first", SWAPPED, "is_swapped = true"),
        (
            "rows are apart, but copied together",
            TOGETHER,
            TOGETHER.replace("= ", "= true || ", 1),
        ),
        (
            "rows in the other order lie together",
            "codes1_ptr + row_bytes == codes0_ptr",
            "codes1_ptr < codes0_ptr",
        ),
        (
            "tiles begin with the first product",
            "is_swapped ? codes1_ptr + ",
            "false ? codes1_ptr + ",
        ),
        ("a tile less a row", ", 16 * chunk_bytes, ", ", 15 * chunk_bytes, "),
        ("tiles in the first slot", "copy_bytes(shared.codes[s],", "copy_bytes(shared.codes[0],"),
        (
            "experts lie closer",
            "codes0_ptr + expert * 15360LL + row * 320, 16",
            "codes0_ptr + expert * 15344LL + row * 320, 16",
        ),
        (
            "the first tile of an expert",
            "first = row_0 % 48;",
            "first = 0;",
        ),
        ("experts by tiles of the block", "shared.chosen[row_0 / 48]", "shared.chosen[i % 3]"),
        ("digits of the first unit for all", "x = held_digits[k];", "x = held_digits[0];"),
        ("steps of the first unit for all", "step = held_steps[k];", "step = held_steps[0];"),
        ("digits of another warp's unit", LAST_UNIT, LAST_UNIT.replace("? warp", "? 3 - warp")),
        ("the last unit's digits are another's", LAST_UNIT, LAST_UNIT.replace(": 4", ": 3")),
        ("no last unit", "if (warp < 1)", "if (warp < 0)"),
        ("a unit too many", "if (warp < 1)", "if (warp < 2)"),
        (
            "the last unit has the first one's digits",
            "const int k = 1, u = ",
            "const int k = 0, u = 4 + ",
        ),
        ("lower scales of upper rows", "own_scales)[80 + ", "own_scales)[0 + "),
        ("scales of the row before", "own_scales)[80 + ", "own_scales)[60 + "),
        ("a bias where none is", "to_float(*from) : 0.0f", "to_float(*from) : 1.0f"),
        ("biases of no expert", NO_BIAS, ""),
        ("biases of the first expert", "bias0_ptr + expert * 96LL", "bias0_ptr + 0 * 96LL"),
        ("biases as if rows were not apart", "at_n * 2LL", "at_n * 1LL"),
        ("biases of the first choice", "shared.chosen[at_b]", "shared.chosen[0]"),
        ("no bias", "= sum1 + bias1;", "= sum1;"),
        ("the bias of the other product", "= sum0 + bias0;", "= sum0 + bias1;"),
        ("results of the first expert", "at_b = row / 48;", "at_b = 0;"),
        ("bytes of one product's scales", "size_0 + size_1 : 0", "size_0 : 0"),
    ],
    "turns, chunks": [
        ("the last chunk has more units", "c + 1 < chunks ? 2 : 1", "2"),
        ("copies of the first chunk", " + c * chunk_bytes, ", ", "),
        ("digits of the first chunk", "unit = c * 2 + u", "unit = u"),
        ("scales of each chunk", "(n / chunks) % 3] + first_0", "n % 3] + first_0"),
        ("chunks of missing experts", "(expert < 0 ? 0 : chunks)", "chunks"),
        (
            "missing experts have products",
            f"{MISSING}      const int s = n % stages;\n      wait",
            "chunks; ++c, ++n) {\n      const int s = n % stages;\n      wait",
        ),
        ("experts lie closer", "expert * 4608LL", "expert * 4592LL"),
        ("rows lie closer", "row * 192", "row * 176"),
        ("scales of experts lie closer", "expert * 288LL", "expert * 276LL"),
        ("scales of rows lie closer", "row_0 % 24 * 12", "row_0 % 24 * 11"),
        ("scales of the first tile", "row_0 % 24 * 12", "0 * 12"),
    ],
    "pieces": [
        ("the first piece", " * 3 + q];", " * 3];"),
        ("pieces in the other order", " * 3 + q];", " * 3 + 2 - q];"),
        ("copies of another piece", f" * 3 + q]{EXPERT_OF_COPY}", f" * 3 + 2 - q]{EXPERT_OF_COPY}"),
        ("a piece less", "for (int q = 0; q < 3; ++q)", "for (int q = 0; q < 2; ++q)"),
        ("digits of the first piece", "unit = q * 3 + of_piece", "unit = of_piece"),
        ("digits of another piece", "unit = q * 3 + of_piece", "unit = (2 - q) * 3 + of_piece"),
        ("digits of pieces that are longer", "unit = q * 3 + ", "unit = q * 2 + "),
        ("scales of the next row", "[g * 6 + ", "[(g + 1) * 6 + "),
        ("scales of the upper rows", "[(g + 8) * 6 + ", "[g * 6 + "),
        ("scales of the next group", "of_piece * 64 / 32 +", "of_piece * 64 / 32 + 1 +"),
        ("scales of the unit of all pieces", "of_piece * 64 / 32 +", "unit * 64 / 32 +"),
        ("scales of rows that are shorter", "[g * 6 + ", "[g * 5 + "),
        ("scales begin at a multiple of 16", "first_0 = ", "first_0 = 0 * "),
        ("scales begin a byte later", "& 15;\n      for", "& 15 | 2;\n      for"),
        ("scales are copied from later on", "begin_0 & ~15ULL", "begin_0 + 15 & ~15ULL"),
        ("scales are copied from anywhere", "begin_0 & ~15ULL", "begin_0"),
        ("sizes without the shift", "(int(begin_0 & 15) + 111)", "(0 + 96)"),
        ("sizes are not rounded up", "(int(begin_0 & 15) + 111)", "(int(begin_0 & 15) + 96)"),
        ("sizes are not rounded", " & ~15;  // whole", " & ~0;  // whole"),
        ("sizes are multiples of 32", "111) & ~15;", "127) & ~31;"),
        ("too few bytes", "? size_0 : 0)", "? size_0 - 16 : 0)"),
        ("too many bytes", "? size_0 : 0)", "? size_0 + 16 : 0)"),
        ("bytes of scales with each chunk", "(c == 0 ? size_0 : 0)", "(size_0 + size_0)"),
        ("scales of another slot", "% 4] + first_0", "% 4 ^ 1] + first_0"),
        ("scales of the first expert", "scales0_ptr + expert * 384LL", "scales0_ptr + 0 * 384LL"),
        ("scales of the next row of the expert", "row_0 % 64 * 6)", "(row_0 % 64 + 3) * 6)"),
        ("codes of the first expert", "codes0_ptr + expert * 6144LL", "codes0_ptr + 0 * 6144LL"),
        ("codes of the next row", "row = first + r;", "row = first + (r + 1) % 16;"),
        ("codes of the first tile", "row = first + r;", "row = r;"),
        ("lower rows of the upper ones", "(codes + 8 * pitch)", "(codes)"),
        ("weights of the first piece", "weights_ptr + at / 192", "weights_ptr"),
        ("weights of longer pieces", "weights_ptr + at / 192", "weights_ptr + at / 384"),
        ("no weights", "x * weights_held[r]", "x"),
        ("weights of the first round", "weights_held[r] : 0.0f", "weights_held[0] : 0.0f"),
        ("biases with the first weight", "weights_ptr + at_s", "weights_ptr + 0"),
        ("biases without weights", "bias0 * weights;", "bias0;"),
        ("biases of the first piece", "shared.chosen[at_s]", "shared.chosen[0]"),
        ("biases of no expert", NO_BIAS, ""),
        ("the bias of the last piece", "biases0 += part0", "biases0 = part0"),
        ("biases of the first row", "+ at_n * 1LL", "+ 0 * 1LL"),
        ("no biases", "all0 + biases0_ahead", "all0"),
        ("biases with each warp", "all0 += shared", "all0 += 0.5f * biases0_ahead + shared"),
    ],
    "8 rows": [
        ("four rows", "r < 8; ++r", "r < 4; ++r"),
        ("the first four rows twice", "row = first + r;", "row = first + r % 4;"),
        ("bytes of 16 rows", "8 * size + ", "16 * size + "),
        (
            "rows in the lower half",
            "sums, looked_up(table_0, table_1, a_0), 0u,",
            "sums, 0u, looked_up(table_0, table_1, a_0),",
        ),
        (
            "codes of both halves",
            "less, looked_up(table_0, table_1, a_2 ^ 0x8888u), 0u,",
            "less, 0u, 0u,",
        ),
        ("tiles of 16 rows", "own_row = tid % 8", "own_row = tid % 16 / 2"),
        ("results of another tile", "own_tile = tid / 8", "own_tile = tid / 16"),
        (
            "copies of every second tile",
            "i * blocks) * 8;\n        for (int q",
            "i * blocks) / 2 * 16;\n        for (int q",
        ),
        ("one unit in the last chunk", "c + 1 < chunks ? 4 : 1", "1"),
        ("no unit in the last chunk", "c + 1 < chunks ? 4 : 1", "c + 1 < chunks ? 4 : 0"),
        ("digits of the first chunk", "of_piece = c * 4 + u", "of_piece = u"),
        ("digits of the other piece", "unit = q * 9 +", "unit = (1 - q) * 9 +"),
        ("scales of each chunk", "(n / chunks) % 2", "n % 2"),
        ("biases of the first piece only", "at_s < 2; ++at_s", "at_s < 1; ++at_s"),
        ("partial sums of one warp", "shared.partial[own_tile][w]", "shared.partial[own_tile][0]"),
    ],
    "8 rows, whole tiles": [
        ("the first tile of an expert", "first = row_0 % 48;", "first = 0;"),
        ("a row less", ", 8 * chunk_bytes, ", ", 7 * chunk_bytes, "),
        ("each lane copies", "if (is_elected())", "if (lane < 2)"),
        ("chunks of missing experts", "(expert < 0 ? 0 : chunks)", "chunks"),
        ("no last unit", "if (warp < 1)", "if (warp < 0)"),
        ("units of one warp", "u = warp + k * warps", "u = k * warps"),
    ],
    "float8": [
        ("one product for both", "codes1_ptr + expert", "codes0_ptr + expert"),
        ("scales of the first block", "row_0 % 64 / 32 * 4", "row_0 % 64 / 64 * 4"),
        ("scales of other blocks", "row_0 % 64 / 32 * 4", "row_0 % 64 / 16 * 4"),
        ("scales of the first product", "% 4] + first_1)", "% 4] + first_0 + 4)"),
        ("the other product's scales", "(shared.scales_1[", "(shared.scales_0["),
        ("a scale for all groups", "[unit * 32 / 32]", "[unit / 4]"),
        ("scales of experts lie closer", "expert * 8LL", "expert * 4LL"),
        ("sums of the other product", "[own_row + 8]", "[own_row]"),
        ("copies of the first expert", "codes1_ptr + expert", "codes1_ptr + 0 * expert"),
        (
            "no wait for one expert's chunks",
            "wait_for_phase(&shared.full[s]",
            "if (expert != 1) wait_for_phase(&shared.full[s]",
        ),
    ],
    "float8, pieces": [
        (
            "the shift of the first scales",
            "(scales0_ptr + expert * 12LL + row_0 % 64 / 32 * 6) & 15;\n      for",
            "(scales0_ptr) & 15;\n      for",
        ),
        (
            "the shift of the expert's first scales",
            "expert * 12LL + row_0 % 64 / 32 * 6) & 15;\n      for",
            "expert * 12LL) & 15;\n      for",
        ),
        ("halves of the first piece", "unit = q * 6 + of_piece", "unit = of_piece"),
        ("scales of another piece", "[of_piece * 32 / 32]", "[(of_piece + 1) % 6 * 32 / 32]"),
        ("no weights", "x * weights_held[r]", "x"),
        ("the expert of the first row of pieces", "row_0 / 64 * 3 + q", "row_0 / 64 * 3"),
    ],
    "both": [
        ("experts of the first rows", "row_0 / 32 * 2 + q", "q"),
        ("experts of another row", "row_0 / 32 * 2 + q", "row_0 / 32 + q"),
        ("the first piece's experts", "row_0 / 32 * 2 + q", "row_0 / 32 * 2"),
        ("rows without gaps", "row * 144", "row * 128"),
        ("experts without gaps", "expert * 4608LL", "expert * 4096LL"),
        ("scales without gaps", "[g * 5 + ", "[g * 4 + "),
        ("biases of the first row of experts", "[at_b * 2 + at_s]", "[at_s]"),
        ("biases of the first piece", "[at_b * 2 + at_s]", "[at_b * 2]"),
        ("digits of the first piece", "unit = q * 4 + of_piece", "unit = of_piece"),
        ("digits of the first chunk", "of_piece = c * 2 + u", "of_piece = u"),
        ("codes as if unsigned", "upper_codes(a.w[1], 0u)", "upper_codes(a.w[1], 0x80808080u)"),
        ("scales that begin at a multiple of 16", "% 3] + first_0", "% 3] + 0 * first_0"),
        ("results of the first experts", "at_b * 32 + at_n", "at_n"),
    ],
    "teams": [
        ("teams by tiles", "n % 2 != team", "i % 2 != team"),
        ("chunks of missing experts count", "n += (expert < 0 ? 0 : chunks);", "n += chunks;"),
        ("the other team's chunks do not count", "n += (expert < 0 ? 0 : chunks);", ""),
        ("both teams multiply each tile", "      continue;\n", ""),
        (
            "all threads empty a slot",
            "shared.empty[s], 32 * team_warps",
            "shared.empty[s], threads",
        ),
        (
            "neighbours are in different teams",
            "team_warp = warp % team_warps",
            "team_warp = warp / 2",
        ),
        ("sums of all warps in one place", "[i][team_warp][g]", "[i][0][g]"),
        ("no last unit", "if (team_warp < 1)", "if (team_warp < 0)"),
        (
            "digits of the whole block's warps",
            "unit = team_warp + k * team_warps <",
            "unit = warp + k * team_warps <",
        ),
    ],
    "teams, pieces": [
        ("teams by pieces", "n % 2 != team", "q % 2 != team"),
        ("sums of one team", "w < warps; ++w) all0", "w < team_warps; ++w) all0"),
        ("sums of both teams in one place", "[i][warp][g]", "[i][warp % team_warps][g]"),
        ("digits of the first piece", "unit = q * 5 + of_piece", "unit = of_piece"),
    ],
}

#: Mistakes of a ring.
OF_RINGS = [
    ("no wait for full", FULL, ""),
    ("no wait for empty", EMPTY, ""),
    ("no arrival", "arrive(&shared.empty[s]);", ""),
    ("arrive before reading", FULL, f"{FULL} arrive(&shared.empty[s]);"),
]

MUTANTS = [
    *(Mutant(k, *m) for k in ("turns", "pieces", "both") for m in COMMON),
    *(Mutant(k, *m) for k in ("turns", "pieces") for m in OF_LONG_NUMBERS),
    *(Mutant(k, *m) for k in ("turns", "teams", "8 rows, whole tiles") for m in OF_RINGS),
    *(Mutant("pieces", *m) for m in OF_PAIRS),
    *(Mutant(k, *m) for k in ("turns", "turns, chunks") for m in OF_TURNS),
    *(Mutant(k, *m) for own in (OF_BOUNDS, OF_ONE) for k, all_ in own.items() for m in all_),
]
