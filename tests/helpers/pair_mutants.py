"""Mistakes of kernels whose bytes hold codes of two rows, one each."""

from __future__ import annotations

from tests.helpers.streamed_graphs import Hand

#: Kernels to change.
PAIR_KERNELS = {
    # the last chunk has one unit of two
    "pairs of rows, gate and up": Hand(
        rows=(48,),
        columns=320,
        group=64,
        dtype="float32",
        has_norm=True,
        has_gate=True,
        scales_first=False,
        tile=2,
        stages=3,
        blocks=2,
        has_zeros=True,
        has_row_pairs=True,
    ),
    "pairs of rows, 3 rows": Hand(
        codes="int4",
        rows=(64,),
        columns=256,
        group=64,
        dtype="float16",
        has_residual=True,
        tile=2,
        batch=3,
        has_row_pairs=True,
    ),
}

LOADED = "u * 64 + t * 16"
SCALES = "scales0_ptr + 120LL + row_0 / 2 * 5"
SCALE = "to_float(reinterpret_cast<const float*>(shared.scales_0[i % 3])[(g + 8) * 5 + "
ZERO = "to_float(reinterpret_cast<const float*>(shared.zeros_1[i % 3])[(g + 8) * 5 + "
FIRST = "upper_codes(words_0.w[0], 0x80808080u), upper_codes(words_0.w[0] << 4, 0x80808080u)"

TURNED = "upper_codes(words_0.w[0] << 4, 0x80808080u), upper_codes(words_0.w[0], 0x80808080u)"

#: Mistakes of a kernel with two products.
OF_PRODUCTS = [
    ("rows of codes as far apart as rows", "first = row_0 / 2;", "first = row_0;"),
    ("codes of the first tile", "first = row_0 / 2;", "first = 0;"),
    ("bytes of as many rows", "&shared.full[s], 16 * size", "&shared.full[s], 32 * size"),
    ("products in one place", "codes[s][(8 + r) * pitch]", "codes[s][r * pitch]"),
    ("codes of the other product", "codes1_ptr + row * row_bytes", "codes0_ptr + row * row_bytes"),
    ("the first product again", "(codes + 8 * pitch)", "(codes)"),
    ("units that overlap", LOADED, "u * 32 + t * 16"),
    ("lanes that overlap", LOADED, "u * 64 + t * 8"),
    ("codes of the first lane", LOADED, "u * 64"),
    ("halves of bytes in the other order", FIRST, TURNED),
    ("upper codes for both rows", FIRST, FIRST.replace(" << 4", "")),
    ("lower codes for both rows", FIRST, FIRST.replace("w[0], ", "w[0] << 4, ", 1)),
    ("digits in the order of words", "factor[4 * h + j]", "factor[2 * j + h]"),
    ("scales of the first half", SCALES, "scales0_ptr + row_0 / 2 * 5"),
    ("scales of other rows", SCALES, "scales0_ptr + 120LL + row_0 * 5"),
    ("scales of the first tile", SCALES, "scales0_ptr + 120LL"),
    ("halves of scales in one place", "scales_0[i % 3] + 160", "scales_0[i % 3] + 0"),
    ("zero points of the scales", "zeros1_ptr + 120LL", "scales1_ptr + 120LL"),
    ("zero points of the first half", "zeros1_ptr + 120LL", "zeros1_ptr + 0LL"),
    ("the scale of the upper codes", SCALE, SCALE.replace("(g + 8)", "g")),
    ("the scale of the next row", SCALE, SCALE.replace("(g + 8)", "((g ^ 1) + 8)")),
    ("the zero point of the upper codes", ZERO, ZERO.replace("(g + 8)", "g")),
    ("sums half after half", "[2 * g + 1] = lower_of_0", "[g + 8] = lower_of_0"),
    ("sums of the other half", "[2 * g + 16] = upper_of_1", "[2 * g + 16] = lower_of_1"),
    ("sums of the first product", "own_row + 16]", "own_row]"),
    ("rows half after half", "at_n = row % 2;", "at_n = row / 24;"),
    ("rows of both halves", "at_o = row / 2;", "at_o = row % 24;"),
]

LEFT = "halves_of_4_bits(upper_of_both(words_0.w[0], words_0.w[1]), 0x88888888u)"
ORDER = "factor[j % 4 * 2 + j / 4]"

#: Mistakes of a kernel with a batch.
OF_BATCH = [
    ("rows of codes as far apart as rows", "first = row_0 / 2;", "first = row_0;"),
    (
        "bytes of as many rows",
        "&shared.full[s], 8 * chunk_bytes",
        "&shared.full[s], 16 * chunk_bytes",
    ),
    ("units that overlap", LOADED, "u * 32 + t * 16"),
    ("lower codes of upper rows", LEFT, LEFT.replace("upper", "lower")),
    ("words in the other order", LEFT, LEFT.replace("w[0], words_0.w[1]", "w[1], words_0.w[0]")),
    ("one word twice", LEFT, LEFT.replace("words_0.w[1]", "words_0.w[0]")),
    ("unsigned codes", LEFT, LEFT.replace("0x88888888u", "0u")),
    ("columns in order", ORDER, "factor[j]"),
    ("columns of words in turns", ORDER, "factor[j / 2 + j % 2 * 4]"),
    ("even and odd columns", ORDER, "factor[j % 4 * 2 + 1 - j / 4]"),
    ("scales of the first half", "scales0_ptr + 128LL", "scales0_ptr + 0LL"),
    ("halves of scales in one place", "scales_0[i % 3] + 64", "scales_0[i % 3] + 0"),
    (
        "sums half after half",
        "[(2 * g + 1) * batch + 2 * t] = lower_0",
        "[(g + 8) * batch + 2 * t] = lower_0",
    ),
    ("rows half after half", "at_n = row % 2;", "at_n = row / 32;"),
]

#: Mistakes by kernel: what they are, what is there once, and what is there instead.
OF_PAIRS = {"pairs of rows, gate and up": OF_PRODUCTS, "pairs of rows, 3 rows": OF_BATCH}
