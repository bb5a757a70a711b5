"""Kernels that stream codes with one mistake each: the emulation on the CPU notices it.

These mistakes cannot be noticed, so they are not here:

- `arrive` at the next slot of the ring. The warp that copies then waits longer than it has to, and
  waits for the same chunks.
- The last chunk of a row is copied as if it were whole. The slot has room, and nothing reads the
  rest. Only a copy beyond the end of the memory would be noticed, on a GPU.
- No `__syncwarp` between `expect_bytes` and the copies. The phase cannot end before the arrival.
- No `publish_barriers`. The emulation has one view of memory.
- `sums[3]` for `sums[2]` in products of halves. All columns of the right factor are equal.
- A stride of warps along units that is too long, if each warp has one unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from tests.helpers.cuda_on_cpu import CXX, ORDERS
from tests.helpers.streamed_graphs import Hand

pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")

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
}


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
BYTES = "expect_bytes(&shared.full[s], 16 * "
FROM = "from + c * chunk_bytes"
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
    ("copy of another chunk", FROM, "from + (chunks - 1 - c) * chunk_bytes"),
    ("copies of the same chunk", FROM, "from"),
    ("copies of the same tile", TILE_ROW, TILE_ROW.replace(" + i * blocks", "")),
    ("the factor is read too early", FACTOR_READY, "announce<1>(threads + 32);"),
    ("the barriers are used too early", "announce<1>(threads + 32);", ""),
    ("the sums are read too early", SUMS_READY, ""),
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
    ("units from the first", "int u = warp;", "int u = 0;"),
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
    ("int4", "one product for both", "lane < 8 ? codes0_ptr", "lane < 0 ? codes0_ptr"),
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
        "the lower codes twice",
        "halves_of_float8(a.w[1] >> 16)",
        "halves_of_float8(a.w[1])",
    ),
    ("float8", "other columns", "y.w[0], y.w[1]", "x.w[0], x.w[1]"),
    ("float8", "scales of the first block", "row_0 / 64 * 4", "row_0 / 128 * 4"),
    ("float8", "the sum of lower rows", "lower += sums[2]", "lower += sums[0]"),
    ("int4, one chunk", "a part of the units", "u += warps", "u += 2 * warps"),
    (
        "float8",
        "the residual of another row",
        "residual_ptr + at_n * 64 + at_o",
        "residual_ptr + at_o",
    ),
    ("int4, one chunk", "a ring of scales that is too short", "scales_0[i % 5]", "scales_0[i % 2]"),
    (
        "int4, one chunk",
        "scales of another tile",
        "copy_bytes(shared.scales_0[i % 5]",
        "copy_bytes(shared.scales_0[(i + 1) % 5]",
    ),
]

MUTANTS = [
    *(Mutant(k, *m) for k in ("int4", "int8", "uint8", "float8") for m in COMMON),
    *(Mutant(k, *m) for k in ("int4", "int8", "uint8") for m in OF_DIGITS),
    *(Mutant(*m) for m in OF_ONE),
]


def changed(text: str, m: Mutant) -> str:
    """Return the text of a kernel with a mistake. It occurs in every place that has `before`."""
    assert m.before in text, f"{m.kernel} has no {m.before!r}"
    return text.replace(m.before, m.after)


@cache
def texts(kernel: str) -> str:
    """Return the text of a kernel and of its mutants, each in its namespace."""
    hand = KERNELS[kernel]
    parts = [hand.kernel().source]
    for n, m in enumerate(MUTANTS):
        if m.kernel == kernel:
            parts.append(changed(hand.kernel(f"mutant_{n}").source, m))
    return "\n".join(parts)


def outcome(kernel: str, name: str, order: int, folder) -> str:
    """Return what happens in an order: an error, "right" or "wrong"."""
    hand = KERNELS[kernel]
    got = hand.run(hand.kernel(), name, order, folder, texts(kernel))
    if isinstance(got, str):
        return got
    return "right" if hand.error(got, hand.exact()) <= 1 else "wrong"


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_without_a_mistake_are_right_in_each_order(kernel, tmp_path):
    for order in range(8):
        assert outcome(kernel, "kernel", order, tmp_path) == "right"


@pytest.mark.parametrize(
    "n", range(len(MUTANTS)), ids=lambda n: f"{MUTANTS[n].kernel}: {MUTANTS[n].what}"
)
def test_a_mistake_is_noticed_in_some_order(n, tmp_path):
    kernel = MUTANTS[n].kernel
    orders = (*ORDERS, *range(4, 9))
    assert any(outcome(kernel, f"mutant_{n}", order, tmp_path) != "right" for order in orders)
