"""Mistakes of kernels with shifts, one each."""

from __future__ import annotations

from tests.helpers.streamed_graphs import Hand

#: Kernels to change. Outputs are float32, so that each digit counts.
SHIFT_KERNELS = {
    # shifts of the first product are column-major; the last chunk has two groups of four
    "shifts": Hand(
        codes="int4",
        rows=(64, 32),
        columns=640,
        group=64,
        dtype="float32",
        has_norm=True,
        has_gate=True,
        scales_first=False,
        tile=4,
        stages=3,
        blocks=2,
        shifts="groups",
        shift_columns=(0,),
    ),
    # a lane has two rows side by side; scales are row-major, and shifts column-major
    "shifts, 4 rows": Hand(
        rows=(96,),
        columns=640,
        group=64,
        dtype="float32",
        has_residual=True,
        tile=2,
        stages=3,
        blocks=2,
        batch=4,
        has_columns=True,
        tile_rows=16,
        shifts="sums",
        shift_columns=(0,),
    ),
}

ADDED = " + shift_0 * own_sum)"
SCALE = "to_float(reinterpret_cast<const float*>(shared.scales_0[i % 3])[g * 10 + unit * 64 / 64])"
IN_COLUMNS = "shifts_0[s])[u * 64 / 64 * 8 + g]"
IN_ROWS = "shifts_1[i % 3])[g * 10 + unit * 64 / 64]"
PART = "shifts1_ptr1 + (row_0 - 64) * 10"
OF_GROUPS = "(c * 4 + group) * (row_0 < 64 ? 64 : 32)"

#: Mistakes of a kernel with two products.
OF_ONE_ROW = [
    ("a shift is subtracted", ADDED, " - shift_0 * own_sum)"),
    ("no shift", ADDED, ")"),
    ("a shift that is not multiplied", ADDED, " + shift_0)"),
    ("the second product's shift", IN_COLUMNS, IN_ROWS),
    ("the first product's shift", " + shift_1 * own_sum)", ADDED),
    ("the scale multiplies the shift", f"(above * {SCALE}{ADDED}", f"(above{ADDED} * {SCALE}"),
    ("the sum of products is not scaled", f"(above * {SCALE}", "(above"),
    ("no step", f"{ADDED} * step", ADDED),
    (
        "a step of the product only",
        f"(above * {SCALE}{ADDED} * step",
        f"(above * {SCALE} * step{ADDED}",
    ),
    ("each lane of a row adds the shift", "t == 0 ? shared.unit_sums", "true ? shared.unit_sums"),
    ("sums of codes as bytes", "unit_sums[unit] * 32.0f", "unit_sums[unit] * 2.0f"),
    ("sums of digits as they are", "unit_sums[unit] * 32.0f", "unit_sums[unit]"),
    ("the sum of the first unit", "unit_sums[unit]", "unit_sums[0]"),
    ("the sum of a unit of the chunk", "unit_sums[unit]", "unit_sums[u]"),
    ("sums of half of a unit", "join_lanes<Sum, 8>(unit_sum)", "join_lanes<Sum, 4>(unit_sum)"),
    ("sums without a lane's other columns", "j < 8; ++j) unit_sum", "j < 4; ++j) unit_sum"),
    ("sums of units in one place", "shared.unit_sums[at / 64]", "shared.unit_sums[0]"),
    ("sums of columns that are not scaled", "fmaf(factor[j], up, 12", "fmaf(factor[j], 1.0f, 12"),
    ("the shift of the first row", IN_ROWS, "shifts_1[i % 3])[unit * 64 / 64]"),
    ("the shift of the next row", IN_ROWS, "shifts_1[i % 3])[(g ^ 1) * 10 + unit * 64 / 64]"),
    ("the shift of the first group", IN_ROWS, "shifts_1[i % 3])[g * 10]"),
    ("the shift of a group of the chunk", IN_ROWS, "shifts_1[i % 3])[g * 10 + u]"),
    ("scales for shifts", IN_ROWS, "scales_1[i % 3])[g * 10 + unit * 64 / 64]"),
    ("the shift of the first row of a group", IN_COLUMNS, "shifts_0[s])[u * 64 / 64 * 8]"),
    ("the shift of the chunk's first group", IN_COLUMNS, "shifts_0[s])[g]"),
    ("groups of a chunk that overlap", IN_COLUMNS, "shifts_0[s])[u * 64 / 64 * 4 + g]"),
    ("shifts of another chunk", IN_COLUMNS, "shifts_0[(s + 1) % 3])[u * 64 / 64 * 8 + g]"),
    ("row-major shifts", IN_COLUMNS, "shifts_0[s])[g * 4 + u]"),
    ("shifts of the first tile of a part", PART, "shifts1_ptr1"),
    ("shifts of the first part", PART, "shifts1_ptr0 + (row_0 - 64) * 10"),
    ("shifts of the first product", PART, "shifts0_ptr1 + (row_0 - 64) * 10"),
    ("shifts of the first tile", "shifts0_ptr0 + row_0 :", "shifts0_ptr0 :"),
    ("column-major shifts of the first chunk", OF_GROUPS, "group * (row_0 < 64 ? 64 : 32)"),
    ("column-major shifts as long as the first part", OF_GROUPS, "(c * 4 + group) * 64"),
    ("shifts of groups in one place", "shared.shifts_0[s] + group * 32", "shared.shifts_0[s]"),
    ("no bytes of row-major shifts", "(c == 0 ? 960 : 0)", "(c == 0 ? 640 : 0)"),
    ("bytes of row-major shifts in each chunk", "(c == 0 ? 960 : 0)", "(c == 0 ? 960 : 320)"),
    ("no bytes of column-major shifts", " + (c + 1 < chunks ? 128 : 64)", ""),
    ("bytes of four groups in each chunk", "(c + 1 < chunks ? 128 : 64)", "128"),
]

UPPER = "sums[1] * scale_0 + shift_0 * own_sum_1"
LOWER = "sums[2] * scale_1 + shift_1 * own_sum_0"
OWN_SUMS = "shared.unit_sums + unit * batch"
LOWER_SHIFT = "[u * 64 / 64 * 16 + (2 * g + 1)]"

#: Mistakes of a kernel with a batch and one product.
OF_BATCH = [
    ("a shift is subtracted", UPPER, UPPER.replace("+", "-")),
    ("no shift", UPPER, "sums[1] * scale_0"),
    ("the upper row's shift", LOWER, LOWER.replace("shift_1", "shift_0")),
    ("the sum of the other column", UPPER, UPPER.replace("own_sum_1", "own_sum_0")),
    ("the scale multiplies the shift", UPPER, "(sums[1] + shift_0 * own_sum_1) * scale_0"),
    ("the step of the other column", f"({UPPER}) * step_1", f"({UPPER}) * step_0"),
    ("no step", f"({LOWER}) * step_0", f"({LOWER})"),
    ("a step of the product only", f"({LOWER}) * step_0", LOWER.replace(" +", " * step_0 +")),
    ("sums of the first unit", OWN_SUMS, "shared.unit_sums"),
    ("sums of a unit of the chunk", OWN_SUMS, "shared.unit_sums + u * batch"),
    ("sums of rows in one place", "unit_sums[at / 64 * batch + b]", "unit_sums[at / 64 * batch]"),
    ("sums of units that overlap", "unit_sums[at / 64 * batch + b]", "unit_sums[at / 64 + b]"),
    ("sums of half of a unit", "join_lanes<Sum, 8>(unit_sum)", "join_lanes<Sum, 4>(unit_sum)"),
    (
        "sums that are not scaled",
        "unit_sum += to_float(from_float<half>(factor[j] * up))",
        "unit_sum += factor[j]",
    ),
    ("the shift of the upper row", LOWER_SHIFT, "[u * 64 / 64 * 16 + 2 * g]"),
    ("shifts of rows eight apart", LOWER_SHIFT, "[u * 64 / 64 * 16 + (g + 8)]"),
    ("the shift of the chunk's first group", LOWER_SHIFT, "[(2 * g + 1)]"),
    ("groups of a chunk that overlap", LOWER_SHIFT, "[u * 64 / 64 * 8 + (2 * g + 1)]"),
    ("shifts of another chunk", f"shifts_0[s]){LOWER_SHIFT}", f"shifts_0[0]){LOWER_SHIFT}"),
    ("shifts of the first tile", "shifts0_ptr + row_0", "shifts0_ptr"),
    ("shifts of the first chunk", "(c * 2 + group) * 96", "group * 96"),
    ("shifts of groups in one place", "shared.shifts_0[s] + group * 64", "shared.shifts_0[s]"),
    ("scales for shifts", "shifts0_ptr + row_0", "scales0_ptr + row_0"),
    ("no bytes of shifts", "(c == 0 ? 640 : 0) + 128", "(c == 0 ? 640 : 0)"),
    ("bytes of one group", "(c == 0 ? 640 : 0) + 128", "(c == 0 ? 640 : 0) + 64"),
    ("bytes of shifts by tile", "(c == 0 ? 640 : 0) + 128", "(c == 0 ? 768 : 0)"),
]

#: Mistakes by kernel: what they are, what is there once, and what is there instead.
OF_SHIFTS = {"shifts": OF_ONE_ROW, "shifts, 4 rows": OF_BATCH}
