"""Write the products of two short groups of columns at a time.

An instruction has eight columns. The digits of one group take the first three, and those of the
other one the fifth to seventh. Two of the four lanes of a row load codes of each group. A lane has
zeros as digits of the other group.
"""

from __future__ import annotations

from mirage_hf.codegen.streams.layout import DIGITS, SHARED_COLUMNS
from mirage_hf.codegen.streams.multiplying import MOST_UNROLLED, ProductWriter


class PairWriter(ProductWriter):
    """Writes products of pairs of groups if a unit has two. Otherwise writes those of one group."""

    @property
    def has_pairs(self) -> bool:
        """Whether a unit has two groups."""
        return self.layout.groups_of_unit > 1

    @property
    def holds_digits(self) -> bool:
        """Whether a warp multiplies the same units of each tile, and holds their digits."""
        layout = self.layout
        whole = layout.chunks == self.found.num_pieces == layout.spans == 1
        return whole and self.most_units <= MOST_UNROLLED

    def prepare_lanes(self) -> None:
        """Write what a lane knows before the first tile."""
        if not self.has_pairs:
            super().prepare_lanes()
            return
        self.load_table()
        self.put(
            "// a lane has digits of the group that its columns belong to, or zeros",
            f"const bool holds = g / 4 == t / 2 && g % 4 < {DIGITS};",
            "const unsigned char* held = holds ? shared.factor + g % 4 * 64 + t * 16 : "
            "reinterpret_cast<const unsigned char*>(shared.zeros);",
            f"const int held_step = holds ? {DIGITS * self.layout.unit} : 0;",
        )
        if self.holds_digits:
            self.put(f"Words<4> held_digits[{self.most_units}];")
            self.put(f"float held_steps[{self.most_units}];", "#pragma unroll")
            with self.scope(f"for (int k = 0; k < {self.most_units}; ++k)"):
                last, (warp, warps) = self.units - 1, self.own_warp
                at = f"{warp} + k * {warps}"
                self.put(
                    f"const int unit = {at} < {last} ? {at} : {last};",
                    "held_digits[k] = *reinterpret_cast<const Words<4>*>(held + unit * held_step);",
                    f"held_steps[k] = shared.steps[{self.step_number}];",
                )

    @property
    def step_number(self) -> str:
        """The number of the power of two of a unit's digits."""
        return f"unsigned(unit) / {SHARED_COLUMNS // self.layout.unit}"

    def totals(self) -> list[str]:
        """Return the names of a lane's sums, one for each column of each half of the rows."""
        if not self.has_pairs:
            return super().totals()
        halves = ("upper", "lower")[: 1 + self.has_lower]
        return [f"{h}_{n}" for h in halves for n in (0, 1)]

    def multiply_unit(self, units: int) -> None:
        """Write the products of a unit."""
        if not self.has_pairs:
            super().multiply_unit(units)
            return
        self.load_codes(units)
        if self.holds_digits:
            self.put("const auto x = held_digits[k];", "const float step = held_steps[k];")
        else:
            self.put(
                "const auto x = *reinterpret_cast<const Words<4>*>(held + unit * held_step);",
                f"const float step = shared.steps[{self.step_number}];",
            )
        sums = self.all_digit_products(self.layout.lane_bytes // 4)
        for half in range(1 + self.has_lower):
            scale = self.scale_text(0, half)
            self.put(f"const float scale_{half} = {f'step * {scale}' if scale else 'step'};")
            totals = self.totals()[2 * half : 2 * half + 2]
            for total, result in zip(totals, sums[2 * half :], strict=False):
                self.put(f"{total} += {result} * scale_{half};")

    def group_at(self, column: str) -> str:
        """Return the number of a lane's group, given the text of its unit's first column."""
        group = super().group_at(column)
        return f"{group} + t / 2" if self.has_pairs else group

    @property
    def power_of_two(self) -> str:
        """The function that decodes scales which are powers of two."""
        return "power_of_two" if self.has_pairs else super().power_of_two

    def join_lanes(self) -> None:
        """Write how the lanes of a row add up their sums of a tile."""
        if not self.has_pairs:
            super().join_lanes()
            return
        self.put(
            "// what the digits of the lane's two columns are worth",
            f"const float worth_0 = t % 2 ? {self.worth(2)} : {self.worth(0)}, "
            f"worth_1 = t % 2 ? 0.0f : {self.worth(1)};",
        )
        for half in ("upper", "lower")[: 1 + self.has_lower]:
            self.put(f"float {half} = {half}_0 * worth_0 + {half}_1 * worth_1;")
            for step in (1, 2):
                self.put(f"{half} += __shfl_xor_sync(0xffffffffu, {half}, {step});")
