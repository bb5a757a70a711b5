"""Write how threads compute the other factor and store it in shared memory."""

from __future__ import annotations

from contextlib import AbstractContextManager

from mirage_hf.codegen.cuda_nests import Nest
from mirage_hf.codegen.streams.layout import DIGITS, SHARED_COLUMNS, VECTOR
from mirage_hf.codegen.streams.writer import COMPUTED, FACTOR_READY, StreamWriter

#: What is added to an element before its bits are taken: the magic number and 0x4040. The bits are
#: then shifted by one place, so 128 is added to each of the lower digits, and no digit is negative.
_DIGIT_OFFSET = "12599360.0f"


class FactorWriter(StreamWriter):
    """Writes the other factor, as digits or as halves, and the sums over its columns."""

    def hold_inputs(self) -> None:
        """Write the wait for the previous kernel, and the loads that are before it or follow it."""
        shared, own = self.inputs_by_row()
        if self.has_row_teams:
            self.put(
                "// which warps compute a row of what codes are multiplied with",
                "const int row_team = warp / row_warps, row_warp = warp % row_warps;",
                "constexpr int row_threads = 32 * row_warps;",
                "const int row_tid = tid % row_threads;",
            )
        if not self.has_spans:
            for v in shared:
                self.hold(v)
        self.put("wait_for_previous_kernel();")
        if not self.early:
            self.put("launch_next_kernel();")
        if not self.has_spans and self.layout.batch == 1:
            for v in own:
                self.hold(v)

    def compute_factor(self) -> None:
        """Write how the threads that compute bring the other factor into shared memory.

        If it has several spans, this is one of them.
        """
        shared, own = self.inputs_by_row()
        if self.has_spans:
            size = self.of_span(self.layout.span, self.layout.last_span)
            self.put(
                f"const int size = {size};  // columns of the span",
                f"if (span > 0) meet<{COMPUTED}>(threads);",
            )
            for v in shared:
                self.hold(v)
        if self.layout.batch == 1:
            if self.has_spans:
                for v in own:
                    self.hold(v)
            self.factor_of_row()
        else:
            loads = sum(self.layout.rounds * self.width(v) for v in own)
            at_once = self.layout.rows_at_once(loads)
            step = f"{at_once} * row_teams" if self.has_row_teams else f"{at_once}"
            self.put("#pragma unroll")
            with self.scope(f"for (int b_0 = 0; b_0 < batch; b_0 += {step})"):
                for v in own:
                    self.hold(v, at_once)
                with self.rounds("m", at_once):
                    self.put(f"const int b = {self.held_row};")
                    self.factor_of_row(frozenset(own))
        ready = f"meet<{FACTOR_READY}>(threads + 32);"
        if self.has_spans:
            ready = f"if (span == 0) {ready} else meet<{COMPUTED}>(threads);"
        self.put(ready)

    @property
    def has_row_teams(self) -> bool:
        """Whether teams of warps compute different rows at the same time."""
        return self.layout.row_teams > 1

    @property
    def held_row(self) -> str:
        """The row of the batch that a thread holds as its row `m`."""
        return "b_0 + m * row_teams + row_team" if self.has_row_teams else "b_0 + m"

    @property
    def own_place(self) -> tuple[str, str]:
        """The texts of a thread's number among those that compute a row, and of their number."""
        return ("row_tid", "row_threads") if self.has_row_teams else ("tid", "threads")

    def inputs_by_row(self) -> tuple[list[str], list[str]]:
        """Return the inputs that a thread loads once before the wait, and the others."""
        found = self.found
        shared = [
            v for v in found.read_columns if self.is_constant(v) and not found.batch_stride(v)
        ]
        return shared, [v for v in found.read_columns if v not in shared]

    @property
    def end_of_columns(self) -> str:
        """The end of the columns that are computed."""
        return "size" if self.has_spans else "columns"

    def ends_within(self, count: int) -> bool:
        """Return whether columns do not end at a multiple of `count`."""
        return any(n % count for n in (self.layout.span, self.layout.last_span))

    @property
    def is_partial(self) -> bool:
        """Whether some threads compute nothing in the last round."""
        count = self.layout.rounds * VECTOR * 32 * self.layout.row_warps
        return any(n != count for n in (self.layout.span, self.layout.last_span))

    def factor_of_row(self, own: frozenset[str] = frozenset()) -> None:
        """Write how the warps compute a row of the other factor, and its sums.

        Args:
            own: Inputs that were loaded for several rows. Row `m` is used.
        """
        for n in range(len(self.found.sums)):
            self.put(f"float sum_{n} = 0.0f;")
        with self.rounds("r", self.layout.rounds):
            self.put(self.column_text())
            if self.is_partial:
                with self.scope(f"if (at - lane * {VECTOR} < {self.end_of_columns})"):
                    self.factor_of(own)
            else:
                self.factor_of(own)
        for n in range(len(self.found.sums)):
            row = f"{n} * batch + b" if self.layout.batch > 1 else str(n)
            warp = "row_warp" if self.has_row_teams else "warp"
            self.put(
                f"sum_{n} = join_lanes<Sum, 32>(sum_{n});",
                f"if (lane == 0) {self.add_to(f'shared.sums[{row}][{warp}]', f'sum_{n}')}",
            )

    def column_text(self) -> str:
        """Return how a thread's first column of round `r` is found."""
        own, count = self.own_place
        return f"const int at = (r * {count} + {own}) * {VECTOR};"

    def is_constant(self, value: str) -> bool:
        """Return whether an input does not change while kernels run."""
        return all(self.operands[s].constant for s in self.inputs[value].sources)

    def rounds(self, index: str, count: int) -> AbstractContextManager[None]:
        """Write an unrolled loop."""
        self.put("#pragma unroll")
        return self.scope(f"for (int {index} = 0; {index} < {count}; ++{index})")

    def width(self, value: str) -> int:
        """Return how many loads of 16 bytes give 8 elements of an input."""
        return 2 if self.operands[self.inputs[value].sources[0]].dtype.itemsize == 4 else 1

    def hold(self, value: str, rows: int = 0) -> None:
        """Write the loads of a thread's elements of an input, or of so many rows of the batch."""
        of_rows = f"[{rows}]" if rows else ""
        held = f"{self.var(value)}_held{of_rows}[{self.layout.rounds}]"
        of_pieces = self.found.is_of_pieces(value)
        self.put(f"float {held};" if of_pieces else f"uint4 {held}[{self.width(value)}];")
        if rows:
            with self.rounds("m", rows), self.rounds("r", self.layout.rounds):
                self.load(value, of_batch=True)
        else:
            with self.rounds("r", self.layout.rounds):
                self.load(value)

    def load(self, value: str, of_batch: bool = False) -> None:
        """Write the loads of 8 elements of an input, of row `m` if it has the batch."""
        load = "load_constant" if self.is_constant(value) else "load_plain"
        pointer = self.pointer(self.inputs[value], 0)
        self.put(self.column_text())
        pointer += self.before_share(self.layout.share)
        if self.has_spans:
            pointer += f" + span * {self.layout.span}"
        if of_batch and (stride := self.found.batch_stride(value)):
            pointer += f" + ({self.held_row}) * {stride}LL"
        if self.found.is_of_pieces(value):
            self.load_of_piece(value, pointer, of_batch)
            return
        first, step = "at", 4
        if self.found.is_in_lanes:
            load, first, step = f"{load.removesuffix('_plain')}_pairs", self.first_of_pairs, 16
        for n in range(self.width(value)):
            held = f"{self.var(value)}_held{'[m]' if of_batch else ''}[r][{n}]"
            more = f" + {step * n}" if n else ""
            text = f"{load}({pointer} + {first}{more})"
            if self.is_partial:
                text = f"at < {self.end_of_columns} ? {text} : uint4{{0, 0, 0, 0}}"
            self.put(f"{held} = {text};")

    @property
    def first_of_pairs(self) -> str:
        """The first of a thread's columns if words lie as lanes load them.

        The others follow by pairs, eight columns apart. The four lanes of a row take turns.
        """
        return "at / 32 * 32 + at / 8 % 4 * 2"

    def load_of_piece(self, value: str, pointer: str, of_batch: bool) -> None:
        """Write the load of the element that the piece of a thread's columns has."""
        at = f"at / {self.found.piece_columns}"
        if (stride := self.piece_stride(value)) != 1:
            at += f" * {stride}"
        text = f"to_float(*({pointer} + {at}))"
        if self.is_partial:
            text = f"at < {self.end_of_columns} ? {text} : 0.0f"
        self.put(f"{self.var(value)}_held{'[m]' if of_batch else ''}[r] = {text};")

    def piece_stride(self, value: str) -> int:
        """Return the elements between pieces of an input that has one for each piece."""
        i, t = self.inputs[value], self.found.tensor(value)
        return next(
            s for a, s in zip(i.axes, t.strides, strict=True) if a and a == self.found.piece
        )

    def factor_of(self, own: frozenset[str]) -> None:
        """Write how a warp computes 256 columns of the other factor, and stores them."""
        is_ragged, names = self.ends_within(SHARED_COLUMNS), self.found.read_columns
        of_pieces = [v for v in names if self.found.is_of_pieces(v)]
        names = tuple(v for v in names if v not in of_pieces)
        for v in names:
            self.put(
                f"const auto& {self.var(v)}_v = reinterpret_cast<const {self.ctype(v)}"
                f"(&)[{VECTOR}]>({self.var(v)}_held{'[m]' if v in own else ''}[r]);"
            )
        self.put(f"float factor[{VECTOR}], largest = 0.0f;", "#pragma unroll")
        with self.scope(f"for (int j = 0; j < {VECTOR}; ++j)"):
            nest = Nest((), None, 1)
            for v in names:
                self.put(f"const float {self.var(v)} = to_float({self.var(v)}_v[j]);")
                nest.known[v] = self.var(v)
            for v in of_pieces:
                nest.known[v] = f"{self.var(v)}_held{'[m]' if v in own else ''}[r]"
            other = " * ".join(self.ref(nest, v) for v in self.found.other)
            inside = f"at < {self.end_of_columns} ? {{}} : 0.0f" if is_ragged else "{}"
            self.put(f"factor[j] = {inside.format(other)};")
            for n, (_, value) in enumerate(self.found.sums):
                self.put(f"sum_{n} += {inside.format(self.ref(nest, value))};")
            self.put("largest = maximum(largest, fabsf(factor[j]));")
        self.put(
            "// a power of two that makes the largest of 256 columns fill its digits",
            "const int exponent = int(largest_in_warp(__float_as_uint(largest)) >> 23);",
        )
        bits = 14 if self.layout.is_in_halves else 20
        least = 26  # so that what the digits count is no subnormal number
        self.put(
            f"const int scaled = exponent < {least} ? {least} : exponent;",
            f"const float up = __uint_as_float(unsigned({127 + bits + 127} - scaled) << 23);",
        )
        # As bytes, codes of 4 bits are in the upper half, which is times 16, unless they are looked
        # up. Digits were shifted.
        table = self.layout.table
        times = table.shift if table else 4 * (self.found.bits == 4)
        down = bits if self.layout.is_in_halves else bits + 1 + times
        unit = f" * {self.layout.halves.unit}f" if self.layout.halves else ""
        step = f"at / {SHARED_COLUMNS}"
        step += " * batch + b" if self.layout.batch > 1 else ""
        self.put(
            f"if (lane == 0) shared.steps[{step}] = "
            "__uint_as_float(exponent == 255 ? 0x7fc00000u : "
            f"unsigned(scaled - {down}) << 23){unit};"
        )
        if self.found.has_offsets:
            self.add_unit(is_ragged)
        if is_ragged:
            with self.scope(f"if (at < {self.end_of_columns})"):
                self.store_factor()
        else:
            self.store_factor()

    def add_unit(self, is_ragged: bool) -> None:
        """Write how the lanes that compute a unit add up its columns, as they are stored.

        Args:
            is_ragged: Whether some lanes have no columns.
        """
        unit, element = self.layout.unit, "to_float(from_float<half>(factor[j] * up))"
        if not self.layout.is_in_halves:
            element = f"fmaf(factor[j], up, {_DIGIT_OFFSET}) - {_DIGIT_OFFSET}"
        step = f"at / {unit}" + (" * batch + b" if self.layout.batch > 1 else "")
        is_inside = f" && at < {self.end_of_columns}" if is_ragged else ""
        self.put(
            "float unit_sum = 0.0f;",
            "#pragma unroll",
            f"for (int j = 0; j < {VECTOR}; ++j) unit_sum += {element};",
            f"unit_sum = join_lanes<Sum, {unit // VECTOR}>(unit_sum);",
            f"if (at % {unit} == 0{is_inside}) shared.unit_sums[{step}] = unit_sum;",
        )

    def store_factor(self) -> None:
        """Write how a thread stores its columns of the other factor."""
        if self.layout.is_in_halves:
            self.store_halves()
            return
        unit, columns = self.layout.unit, self.layout.lane_columns
        row = min(columns, 16)
        is_packed = self.found.column_bits == 4 and not self.found.values
        self.put("unsigned digits[3][2];", "#pragma unroll")
        with self.scope("for (int h = 0; h < 2; ++h)"):
            self.put("unsigned bits[4];", "#pragma unroll")
            which = self.in_byte("2 * j + h" if is_packed else "4 * h + j")
            if self.found.is_in_lanes:  # a code of the upper half follows that of the lower one
                which = "j % 2 * 4 + 2 * h + j / 2"
            self.put(
                f"for (int j = 0; j < 4; ++j) bits[j] = __float_as_uint(fmaf(factor[{which}], up, "
                f"{_DIGIT_OFFSET})) << 1;",
                "const unsigned low_0 = pick_bytes(bits[0], bits[1], 0x5140), "
                "low_1 = pick_bytes(bits[2], bits[3], 0x5140);",
                "const unsigned high_0 = pick_bytes(bits[0], bits[1], 0x0062), "
                "high_1 = pick_bytes(bits[2], bits[3], 0x0062);",
                "digits[0][h] = pick_bytes(high_0, high_1, 0x5410) ^ 0x80808080u;",
                "digits[1][h] = pick_bytes(low_0, low_1, 0x7632) ^ 0x80808080u;",
                "digits[2][h] = pick_bytes(low_0, low_1, 0x5410) ^ 0x80808080u;",
            )
        at = self.place_of_columns()
        half = f" + {at} % {columns} / 16 * {4 * row * DIGITS}" if columns > 16 else ""
        self.put(
            f"unsigned char* to = shared.factor + at / {unit} * {DIGITS * unit}{half} + "
            f"{at} % {unit} / {columns} * {row} + {at} % {row};",
            "#pragma unroll",
            f"for (int d = 0; d < {DIGITS}; ++d) *reinterpret_cast<Words<2>*>(to + d * {4 * row})"
            " = Words<2>{digits[d][0], digits[d][1]};",
        )

    def place_of_columns(self) -> str:
        """Return the name of the place of a thread's columns in a unit, lane after lane.

        If words are column-major, or lie as lanes load them, lanes take turns: each has the columns
        of every fourth word.
        """
        if not (self.found.is_column_major or self.found.is_in_lanes):
            return "at"
        unit, columns = self.layout.unit, self.layout.lane_columns
        self.put(f"const int place = at / 8 % 4 * {columns} + at % {unit} / 32 * 8;")
        return "place"

    def in_byte(self, code: str) -> str:
        """Return the column of a code, given its place among the codes of a word."""
        if self.found.pair is None:
            return code
        return f"{code} ^ 1" if code.isidentifier() else f"({code}) ^ 1"

    def store_halves(self) -> None:
        """Write how a thread stores 8 columns of a row as halves.

        Their order is that of the halves that codes become. For each piece of 8 columns of each
        lane, the rows of the batch follow each other.
        """
        unit, columns, batch = self.layout.unit, self.layout.lane_columns, self.layout.batch
        which = "j / 2 + j % 2 * 4" if self.found.bits == 4 and not self.found.values else "j"
        which = "j" if self.found.is_in_lanes else self.in_byte(which)
        if self.found.row_pair is not None:  # even columns of eight, then odd ones
            which = "j % 4 * 2 + j / 4"
        at = self.place_of_columns()
        piece = f" + {at} % {columns} / 8 * {64 * batch}" if columns > 8 else ""
        row = " + b * 64" if batch > 1 else ""
        self.put(
            "alignas(16) half halves[8];",
            "#pragma unroll",
            f"for (int j = 0; j < 8; ++j) halves[j] = from_float<half>(factor[{which}] * up);",
            f"unsigned char* to = shared.factor + at / {unit} * {2 * unit * batch}{piece}{row} + "
            f"{at} % {unit} / {columns} * 16;",
            "*reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(halves);",
        )
