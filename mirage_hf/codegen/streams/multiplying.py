"""Write the products of codes and the other factor on tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from mirage_hf.codegen.streams import tables
from mirage_hf.codegen.streams.factor import FactorWriter
from mirage_hf.codegen.streams.layout import DIGITS, SHARED_COLUMNS
from mirage_hf.codegen.streams.products import ZEROS
from mirage_hf.codegen.streams.tables import TableBytes
from mirage_hf.graph.coded import is_exponent, is_packed
from mirage_hf.ops.dtypes import CODES_PER_WORD

#: The bits of 1.5 · 2²³. Counting from these, a sum of integers is the mantissa of a float.
_MAGIC = 0x4B400000

#: The most units of a chunk for which a warp's loop over them is unrolled.
MOST_UNROLLED = 12


class ProductWriter(FactorWriter):
    """Writes the loop over the tiles of a block, whose chunks the copying warp brings."""

    def multiply(self) -> None:
        """Write the loop over the block's tiles."""
        layout = self.layout
        self.put("const int g = lane / 4, t = lane % 4;")
        if layout.batch > 1:
            read = [f"own_{n} = {self.row_or_0('g', 8 * n)}" for n in range(layout.eights)]
            summed = [
                f"own_column_{n} = {self.row_or_0('2 * t', self.column_of_sum(n))}"
                for n in range(layout.lane_sums)
            ]
            self.put(
                "// the rows of the batch that a lane reads, and those of its columns of sums",
                f"const int {', '.join(read)};",
                f"const int {', '.join(summed)};",
            )
        if layout.teams > 1:
            self.put("const int team = warp / team_warps, team_warp = warp % team_warps;")
        self.prepare_lanes()
        with self.scope(f"for (int i = 0{'' if self.has_spans else ', n = 0'}; i < mine; ++i)"):
            totals = ", ".join(f"{name} = 0.0f" for name in self.totals())
            sets = [(n, half) for n in range(layout.sets) for half in range(1 + self.has_lower)]
            *others, last = (self.row_text(n, half) for n, half in sets)
            rows = f"rows {', '.join(others)} and {last}" if others else f"row {last}"
            self.put(f"float {totals};  // of {rows}")
            spaced = [n for n in range(len(self.found.grouped)) if self.layout.is_spaced(n)]
            if self.has_index or spaced:
                self.put(
                    f"const int row_0 = ({self.walker} + i * {self.walkers}) * "
                    f"{self.layout.tile_rows};"
                )
            for n in spaced:
                address = f"reinterpret_cast<unsigned long long>({self.first_of_tile(n)})"
                self.put(f"const int first_{n} = int({address} & 15);")
            with self.each_piece():
                self.multiply_chunks()
            self.join_lanes()
            self.store_totals()

    def column_of_sum(self, number: int) -> int:
        """Return how many columns a lane's sum lies after its first one, in all instructions."""
        return number // 2 * 8 + number % 2

    def of_columns(self, names: Sequence[str], array: str) -> str:
        """Return the text of constants with an array's elements of a lane's columns of sums."""
        return ", ".join(f"{name} = {array}[own_column_{n}]" for n, name in enumerate(names))

    def row_or_0(self, row: str, more: int) -> str:
        """Return the text of a row of the batch, or of row 0 if there is no such row."""
        row = f"{row} + {more}" if more else row
        return f"{row} < batch ? {row} : 0"

    def load_table(self) -> None:
        """Write how a lane loads the bytes of a table.

        As constants they would be moved to a register before each lookup.
        """
        for n in range(len(self.layout.table_words)):
            self.put(f"const unsigned table_{n} = shared.table[{n}];")

    def prepare_lanes(self) -> None:
        """Write what a lane knows before the first tile."""
        self.load_table()
        if not self.layout.is_in_halves:
            self.put(
                "// what the digits of the lane's two columns are worth",
                f"const float worth_0 = t == 0 ? {self.worth(0)} : "
                f"t == 1 ? {self.worth(2)} : 0.0f, worth_1 = t == 0 ? {self.worth(1)} : 0.0f;",
            )

    def worth(self, digit: int) -> str:
        """Return what a digit is worth, times what a unit of a table is."""
        table = self.layout.table
        return f"{65536.0 / 256**digit * (table.factor if table else 1.0)}f"

    def join_lanes(self) -> None:
        """Write how the lanes of a row add up their sums of a tile."""
        if not self.layout.is_in_halves:
            for total in self.totals():
                self.put(f"{total} += __shfl_xor_sync(0xffffffffu, {total}, 1);")

    def multiply_chunks(self) -> None:
        """Write the loop over the chunks of a tile, of those of a span, or of those of a piece."""
        layout = self.layout
        chunks = "chunks"
        if self.has_spans:
            chunks = self.of_span(layout.span_chunks, layout.last_span_chunks)
        if self.has_index:
            chunks = "(expert < 0 ? 0 : chunks)"
            for n, p in enumerate(self.found.products):
                if p.scale is not None:
                    self.put(f"const int first_{n} = {self.scale_shift(n)};")
        teams = self.layout.teams
        if teams > 1 and self.layout.chunks == 1:
            with self.scope(f"if (n % {teams} != team)"):
                self.put(f"n += {chunks};", "continue;")
        with self.scope(f"for (int c = 0; c < {chunks}; ++c, ++n)"):
            if teams > 1 and self.layout.chunks > 1:
                self.put(f"if (n % {teams} != team) continue;")
            self.put(
                "const int s = n % stages;",
                "wait_for_phase(&shared.full[s], (n / stages) & 1);",
            )
            if layout.is_in_turns:
                self.scales_in_turns()
            self.multiply_units()
            self.put("arrive(&shared.empty[s]);")

    @property
    def own_warp(self) -> tuple[str, str]:
        """The texts of a warp's number among those that share a chunk, and of how many they are."""
        return ("team_warp", "team_warps") if self.layout.teams > 1 else ("warp", "warps")

    @property
    def units(self) -> int:
        """Units of a chunk. The last one may have fewer."""
        return self.layout.chunk // self.layout.unit

    @property
    def most_units(self) -> int:
        """The most units of a chunk that a warp multiplies."""
        return -(-self.units // self.layout.team_warps)

    def multiply_units(self) -> None:
        """Write the products of a warp's units of a chunk.

        If all chunks have as many units, and a warp has few of them, the loop is unrolled, so that
        loads of several units are under way at once.
        """
        layout, units = self.layout, self.units
        warp, warps = self.own_warp
        if layout.last_chunk == layout.chunk and self.most_units <= MOST_UNROLLED:
            whole, rest = divmod(units, layout.team_warps)
            if whole:
                self.put("#pragma unroll")
                with self.scope(f"for (int k = 0; k < {whole}; ++k)"):
                    self.put(f"const int u = {warp} + k * {warps};")
                    self.multiply_unit(units)
            if rest:
                with self.scope(f"if ({warp} < {rest})"):
                    self.put(f"const int k = {whole}, u = {warp} + k * {warps};")
                    self.multiply_unit(units)
            return
        count, last = str(units), layout.last_chunk // layout.unit
        if last != units:
            self.put(f"const int units = {self.chunk_number} + 1 < chunks ? {units} : {last};")
            count = "units"
        self.put("#pragma unroll 4")
        with self.scope(f"for (int u = {warp}; u < {count}; u += {warps})"):
            self.multiply_unit(units)

    def totals(self) -> list[str]:
        """Return the names of a lane's sums of a tile."""
        return [name for n in range(self.layout.sets) for name in self.totals_of(n)]

    def totals_of(self, number: int) -> list[str]:
        """Return the names of a lane's sums of a set of rows: of its upper and its lower half."""
        halves = ["upper", "lower"][: 1 + self.has_lower]
        if self.layout.sets > 1:
            halves = [f"{h}_of_{number}" for h in halves]
        if self.layout.batch == 1:
            return halves
        return [f"{h}_{n}" for h in halves for n in range(self.layout.lane_sums)]

    def row_text(self, number: int, half: int, of_product: bool = False) -> str:
        """Return the row of a tile that a lane has in the upper or the lower half of a set.

        If words are column-major, a lane has rows side by side.

        Args:
            number: The number of the set.
            half: 0 for the upper half, 1 for the lower one.
            of_product: Whether to count the rows of its product only.
        """
        if self.found.row_pair is not None:
            # scales lie half after half, and sums row after row
            if of_product:
                return f"g + {8 * half}" if half else "g"
            at = self.layout.tile_rows * number + half
            return f"2 * g + {at}" if at else "2 * g"
        if not self.found.is_column_major:
            at = self.row_of_set(number, half, of_product)
            return f"g + {at}" if at else "g"
        count = self.layout.lane_rows
        vector, word = divmod(2 * number + half, count)
        at = 8 * count * vector + word
        if of_product:
            at %= self.layout.tile_rows
        return f"{count} * g + {at}" if at else f"{count} * g"

    def row_of_set(self, number: int, half: int, of_product: bool = False) -> int:
        """Return the first row of half of a set, among a tile's rows. Codes are row-major."""
        if len(self.found.products) == 1:
            return 16 * number + 8 * half
        return 8 * number + (0 if of_product else self.layout.tile_rows * half)

    def product_of(self, number: int, half: int) -> int:
        """Return the number of the product that half of a set of rows belongs to."""
        if self.found.row_pair is not None:
            return number
        if self.found.is_column_major:
            return 16 * number // self.layout.tile_rows
        return half if len(self.found.products) > 1 else 0

    def store_totals(self) -> None:
        """Write how a lane stores its sums of a tile."""
        place, batch = f"shared.partial[i][{self.summing_warp}]", self.layout.batch
        count = self.layout.lane_sums
        for number_of_sum in range(count):
            column = self.column_of_sum(number_of_sum)
            at = f"2 * t{f' + {column}' if column else ''}"
            with self.scope(f"if ({at} < batch)" if batch > 1 else "if (t == 0)"):
                for number in range(self.layout.sets):
                    totals = self.totals_of(number)[number_of_sum::count]
                    for half, total in enumerate(totals):
                        row = self.row_text(number, half)
                        if batch > 1:
                            row = (
                                f"({row}) * batch + {at}" if " " in row else f"{row} * batch + {at}"
                            )
                        self.put(self.add_to(f"{place}[{row}]", total))

    def multiply_unit(self, units: int) -> None:
        """Write the products of a unit."""
        layout = self.layout
        columns, steps = layout.lane_columns, ["step"]
        self.load_codes(units)
        if not layout.is_in_halves:
            row = min(columns, 16)
            self.put(
                f"const unsigned char* digits = shared.factor + unit * {DIGITS * layout.unit} + "
                f"(g < {DIGITS} ? g : 0) * {4 * row} + t * {row};",
                f"const auto x = *reinterpret_cast<const Words<{row // 4}>*>(digits);",
            )
            if columns > 16:
                self.put(
                    "const auto y = *reinterpret_cast<const Words<4>*>"
                    f"(digits + {4 * row * DIGITS});"
                )
        at = f"unit * {layout.unit} / {SHARED_COLUMNS}"
        if layout.batch == 1:
            step_texts = [f"const float step = shared.steps[{at}];"]
        else:
            steps = [f"step_{n}" for n in range(layout.lane_sums)]
            step_texts = [
                f"const float* steps = shared.steps + {at} * batch;",
                f"const float {self.of_columns(steps, 'steps')};",
            ]
        if self.found.has_offsets:
            step_texts += self.unit_sum_texts()
        if layout.sets > 1:
            self.put(*step_texts)
        if self.shares_loads:
            self.half_products(range(layout.sets))
        for number in range(layout.sets):
            with self.scope("") if layout.sets > 1 else nullcontext():
                halves = self.set_products(number)
                if layout.sets == 1:
                    self.put(*step_texts)
                self.add_set(number, halves, steps)

    def set_products(self, number: int) -> list[list[str]]:
        """Write the products of a unit's codes in a set of rows.

        Returns:
            The texts of the upper and the lower sums, one for each column.
        """
        if self.layout.is_in_halves:
            if not self.shares_loads:
                self.half_products([number])
            return [
                [f"{name}[{n}]" for name in self.names_of_sums(number) for n in (half, half + 1)]
                for half in (0, 2)
            ]
        sums = self.all_digit_products(self.layout.lane_bytes // 4, number)
        for n, name in ((0, "above"), (2, "below"))[: 1 + self.has_lower]:
            self.put(f"const float {name} = {sums[n]} * worth_0 + {sums[n + 1]} * worth_1;")
        return [["above"], ["below"]][: 1 + self.has_lower]

    def add_set(self, number: int, halves: Sequence[Sequence[str]], steps: Sequence[str]) -> None:
        """Write how the sums of a unit are added to those of a tile.

        Args:
            number: The number of the set of rows.
            halves: The texts of its upper and lower sums.
            steps: The texts of what they count, for each column.
        """
        per_half = len(steps)
        own = ["own_sum"] if per_half == 1 else [f"own_sum_{n}" for n in range(per_half)]
        for half, results in enumerate(halves):
            product = self.found.products[self.product_of(number, half)]
            if product.zero is not None:
                results = self.less_zeros(number, half, results, own)
            scale = self.scale_text(number, half)
            if scale and per_half > 1:
                self.put(f"const float scale_{half} = {scale};")
                scale = f"scale_{half}"
            if product.shift is not None:
                shift = self.offset_text(number, half)
                self.put(f"const float shift_{half} = {shift};")
                results = [
                    f"({x} * {scale} + shift_{half} * {sum_})"
                    for x, sum_ in zip(results[:per_half], own, strict=True)
                ]
                scale = ""
            totals = self.totals_of(number)[half * per_half : (half + 1) * per_half]
            for total, result, own_step in zip(totals, results[:per_half], steps, strict=True):
                factor = f"({own_step} * {scale})" if scale else own_step
                self.put(f"{total} += {result} * {factor};")

    def unit_sum_texts(self) -> list[str]:
        """Return the texts of the sums of a unit's columns, as lanes have sums of products."""
        if self.layout.batch > 1:
            names = [f"own_sum_{n}" for n in range(self.layout.lane_sums)]
            return [
                "const float* unit_sums = shared.unit_sums + unit * batch;",
                f"const float {self.of_columns(names, 'unit_sums')};",
            ]
        factor = 32.0 if self.found.bits == 4 else 2.0  # digits were shifted, and codes times 16
        return [f"const float own_sum = t == 0 ? shared.unit_sums[unit] * {factor}f : 0.0f;"]

    def less_zeros(
        self, number: int, half: int, results: Sequence[str], sums: Sequence[str]
    ) -> list[str]:
        """Write the zero point of half of a set of rows. Return the sums less its products.

        The codes of the sums are less the middle of their range already.

        Args:
            number: The number of the set of rows.
            half: 0 for the upper half, 1 for the lower one.
            results: The texts of the sums of products.
            sums: The names of the sums of columns.
        """
        zero = self.offset_text(number, half)
        self.put(f"const float zero_{half} = {zero} - {ZEROS[self.found.dtype]}f;")
        return [
            f"({x} - zero_{half} * {own})"
            for x, own in zip(results[: len(sums)], sums, strict=True)
        ]

    def offset_text(self, number: int, half: int) -> str:
        """Return the zero point or the shift of a unit in half of a set of rows, as a float."""
        of_offsets = len(self.found.products) + self.product_of(number, half)
        offset = self.grouped_element(of_offsets, self.layout_row(number, half))
        return offset if offset.startswith("float(") else f"to_float({offset})"

    def load_codes(self, units: int) -> None:
        """Write the loads of a lane's codes of unit `u` of a chunk, and the unit's number."""
        layout, found = self.layout, self.found
        words = layout.lane_bytes // 4
        first = f"c * {units} + u" if layout.chunks > 1 else "u"
        if found.num_pieces > 1:
            self.put(f"const int of_piece = {first};")
            first = f"q * {found.piece_columns // layout.unit} + of_piece"
        self.put(f"const int unit = {first};")
        if found.has_rows_in_words:
            self.load_rows(words)
            return
        if found.is_column_major:
            self.load_columns(words)
            return
        if found.row_pair is not None:
            self.load_pairs_of_rows(words)
            return
        if found.is_in_lanes:
            self.put(
                "const unsigned char* codes = shared.codes[s] + u * 512 + lane * 16;",
                "const auto a = *reinterpret_cast<const Words<4>*>(codes);",
            )
            if self.has_lower:
                self.put("const auto b = *reinterpret_cast<const Words<4>*>(codes + 8 * pitch);")
            return
        self.put(
            "const unsigned char* codes = shared.codes[s] + g * pitch + "
            f"u * {4 * layout.lane_bytes} + t * {layout.lane_bytes};",
        )
        for number in range(layout.sets):
            for half, row in enumerate("ab"[: 1 + self.has_lower]):
                begin = self.row_of_set(number, half)
                at = f"codes + {begin} * pitch" if begin else "codes"
                self.put(
                    f"const auto {self.words_name(row, number)} = "
                    f"*reinterpret_cast<const Words<{words}>*>({at});"
                )

    def words_name(self, row: str, number: int) -> str:
        """Return the name of a lane's row-major words of its row "a" or "b" in a set."""
        return f"{row}_{number}" if self.layout.sets > 1 else row

    def load_pairs_of_rows(self, count: int) -> None:
        """Write the loads of a lane's words of a unit if two rows share bytes.

        Args:
            count: How many words a lane has.
        """
        self.put(
            "const unsigned char* codes = shared.codes[s] + g * pitch + "
            f"u * {16 * count} + t * {4 * count};"
        )
        for number in range(len(self.found.products)):
            at = f"codes + {8 * number} * pitch" if number else "codes"
            self.put(f"const auto words_{number} = *reinterpret_cast<const Words<{count}>*>({at});")

    def load_columns(self, count: int) -> None:
        """Write the loads of a lane's words of a unit if they are column-major.

        Args:
            count: How many words of each row a lane has.
        """
        layout = self.layout
        of_lane = layout.lane_rows
        loads = layout.rows // (8 * of_lane)
        vectors = 8 * of_lane * 4 // 16  # of the rows that one load of a warp has
        shared_by = 4 // of_lane  # lanes that load parts of one vector
        vector, part = f"(g / {shared_by})", f" + g % {shared_by} * {4 * of_lane}"
        if shared_by == 1:
            vector, part = "g", ""
        self.put(
            f"const unsigned char* codes = shared.codes[s] + (u * {4 * count} + t) * pitch;",
        )
        for load in range(loads):
            own = f"({load * vectors} + {vector})" if load else vector
            self.put(f"const int place_{load} = ({own} ^ {self.swapped('t')}) * 16{part};")
            for j in range(count):
                self.put(
                    f"const auto words_{j}_{load} = *reinterpret_cast<const Words<{of_lane}>*>"
                    f"(codes + {4 * j} * pitch + place_{load});"
                )

    def load_rows(self, count: int) -> None:
        """Write how a lane loads words that hold codes of eight rows, and makes words of its rows.

        Args:
            count: How many words of each row a lane has.
        """
        layout = self.layout
        own, which = ("g", "0") if layout.lane_rows == 8 else ("g / 2", "g % 2")
        self.put(
            f"const unsigned char* codes = shared.codes[s] + (u * {32 * count} + t) * pitch + "
            f"{own} * 4;"
        )
        for number in range(len(self.found.products)):
            for j in range(count):
                begin = f"{number} * {layout.chunk} + {32 * j}" if number else f"{32 * j}"
                at = f"codes + ({begin}) * pitch" if j or number else "codes"
                self.put(
                    f"const auto words_{j}_{number} = words_of_rows<{layout.lane_rows}>"
                    f"({at}, 4 * pitch, {which});"
                )

    def word_text(self, row: str, j: int, number: int) -> str:
        """Return the text of a lane's word `j` of its row "a" or "b" in a set of rows.

        If two rows share bytes, it holds codes of both.
        """
        if self.found.row_pair is not None:
            return f"words_{number}.w[{j}]"
        if not self.found.is_column_major:
            return f"{row}.w[{j}]"
        load, word = divmod(2 * number + (row == "b"), self.layout.lane_rows)
        return f"words_{j}_{load}.w[{word}]"

    def all_digit_products(self, words: int, number: int = 0) -> list[str]:
        """Write the products of a set's codes and digits, and return the sums as floats."""
        if self.layout.table is not None:
            return self.table_products(words, self.layout.table)
        self.put(f"int sums[4] = {{{', '.join([hex(_MAGIC)] * 4)}}};")
        self.digit_products(words, number)
        self.put("const float magic = 12582912.0f;")
        return [f"(__int_as_float(sums[{n}]) - magic)" for n in range(4)]

    @property
    def shares_loads(self) -> bool:
        """Whether the sets of a tile are multiplied together, so that they share loads."""
        found = self.found
        return self.layout.sets > 1 and not found.is_column_major and found.row_pair is None

    def half_products(self, numbers: Sequence[int]) -> None:
        """Write the products of some sets' codes and the other factor, as halves."""
        layout = self.layout
        convert = {4: "halves_of_4_bits", 8: "halves_of_8_bits"}[self.found.bits]
        flipped = ", 0u"
        if self.is_signed:
            flipped = ", 0x88888888u" if self.found.bits == 4 else ", 0x80808080u"
        if self.found.dtype.is_floating_point:
            convert, flipped = "halves_of_float8", ""
        if self.layout.halves is not None:
            every = [w for plane in self.layout.halves.planes for w in self.words_of(plane)]
            convert, flipped = "halves_of_table", f", {', '.join(every)}"
        self.put(
            f"const unsigned char* factor = shared.factor + unit * {2 * layout.unit * layout.batch}"
            " + t * 16;",
            *(
                f"float {name}[4] = {{0.0f, 0.0f, 0.0f, 0.0f}};"
                for number in numbers
                for name in self.names_of_sums(number)
            ),
        )
        heads, each = [f"for (int piece = 0; piece < {layout.pieces}; ++piece)"], ["piece"]
        if self.found.is_column_major or self.found.row_pair is not None:
            each = [str(n) for n in range(layout.pieces)]
            heads = [""] * layout.pieces
        else:
            self.put("#pragma unroll")
        for head, piece in zip(heads, each, strict=True):
            with self.scope(head):
                self.load_piece(piece)
                for number in numbers:
                    with self.scope("") if self.shares_loads else nullcontext():
                        self.piece_products(number, piece, convert, flipped)

    def names_of_sums(self, number: int) -> tuple[str, ...]:
        """Return the names of a lane's sums of a unit: of the first eight rows, and of the next."""
        names = ("sums", "more")[: self.layout.eights]
        return tuple(f"{name}_{number}" for name in names) if self.shares_loads else names

    @property
    def others(self) -> list[str]:
        """The names of a lane's columns of the other factor: of the first eight rows, and so on."""
        return [f"x_{n}" for n in range(self.layout.eights)]

    def load_piece(self, piece: str) -> None:
        """Write the loads of a lane's eight columns of the other factor."""
        for n, other in enumerate(self.others):
            own = f" + own_{n} * 64" if self.layout.batch > 1 else ""
            self.put(
                f"const auto {other} = *reinterpret_cast<const Words<4>*>(factor + {piece} * "
                f"{64 * self.layout.batch}{own});"
            )

    def piece_products(self, number: int, piece: str, convert: str, flipped: str) -> None:
        """Write the products of eight columns of each lane in a set of rows.

        Args:
            number: The number of the set.
            piece: The text of the number of the columns in a unit.
            convert: The function that turns codes into halves.
            flipped: The text of its further arguments.
        """
        words = self.found.bits // 4
        for name, row in (("left", "a"), ("right", "b")):
            if self.found.row_pair is not None:
                both = "upper_of_both" if row == "a" else "lower_of_both"
                first, second = (self.word_text(row, 2 * int(piece) + n, number) for n in (0, 1))
                loaded = [f"{both}({first}, {second})"]
            elif self.found.is_column_major:
                loaded = [self.word_text(row, int(piece), number)]
            else:
                own_words = self.words_name(row, number)
                loaded = [
                    f"{own_words}.w[{words} * {piece}{f' + {n}' if n else ''}]"
                    for n in range(words)
                ]
            self.put(f"const auto {name} = {convert}({', '.join(loaded)}{flipped});")
        for n in (0, 2):
            codes = [f"{name}.w[{n + k}]" for k in (0, 1) for name in ("left", "right")]
            self.put(
                *(
                    f"multiply_halves({sums}, {', '.join(codes)}, {x}.w[{n}], {x}.w[{n + 1}]);"
                    for sums, x in zip(self.names_of_sums(number), self.others, strict=True)
                )
            )

    @property
    def has_lower(self) -> bool:
        """Whether tiles have rows in the lower half of an instruction's rows."""
        return self.layout.rows > 8

    def rows_of_codes(self, texts: Sequence[str]) -> list[str]:
        """Return the codes of the upper and the lower rows, in the order of the instruction."""
        return [t.format(w) if w == "a" or self.has_lower else "0u" for t in texts for w in "ab"]

    def digit_products(self, words: int, number: int) -> None:
        """Write the products of a set's codes and digits, as signed bytes."""
        if self.found.row_pair is not None:
            flipped = "0u" if self.is_signed else "0x80808080u"
            for j in range(0, words, 2):
                codes = [
                    f"upper_codes({self.word_text(row, k, number)}{shift}, {flipped})"
                    for k in (j, j + 1)
                    for row, shift in (("a", ""), ("b", " << 4"))
                ]
                self.put(f"multiply_digits(sums, {', '.join(codes)}, x.w[{j}], x.w[{j + 1}]);")
            return
        if self.found.bits == 4:
            flipped = "0u" if self.is_signed else "0x80808080u"
            for j in range(words):
                x, at = ("x", 2 * j) if j < 2 else ("y", 2 * j - 4)
                codes = [
                    f"upper_codes({self.word_text(row, j, number)}{shift}, {flipped})"
                    if row == "a" or self.has_lower
                    else "0u"
                    for shift in (" << 4", "")
                    for row in "ab"
                ]
                self.put(
                    f"multiply_digits(sums, {', '.join(codes)}, {x}.w[{at}], {x}.w[{at + 1}]);"
                )
            return
        flip = "" if self.is_signed else " ^ 0x80808080u"
        for j in range(0, words, 2):
            codes = self.rows_of_codes([f"{{}}.w[{k}]{flip}" for k in (j, j + 1)])
            self.put(f"multiply_digits(sums, {', '.join(codes)}, x.w[{j}], x.w[{j + 1}]);")

    def words_of(self, plane: Sequence[int]) -> list[str]:
        """Return the names of the words that hold the bytes of a table."""
        return [f"table_{self.layout.table_words.index(word)}" for word in tables.words(plane)]

    def table_products(self, words: int, table: TableBytes) -> list[str]:
        """Write the products of codes of a table and digits, and return the sums as floats."""
        names = [("sums", "less"), ("low_sums", "low_less")][: len(table.planes)]
        every = ", ".join(f"{name}[4]" for pair in names for name in pair)
        self.put(f"int {every};  // `less` of negative entries, `low` of lower bytes")
        for j in range(words):
            x, at = ("x", 2 * j) if j < 2 else ("y", 2 * j - 4)
            for row in "ab" if self.has_lower else "a":
                self.put(
                    f"const unsigned {row}_{2 * j} = {row}.w[{j}], "
                    f"{row}_{2 * j + 1} = {row}.w[{j}] >> 16;"
                )
            for plane, pair in enumerate(names):
                for half, flips in enumerate(("", " ^ 0x8888u")):
                    low, high = self.words_of(table.planes[plane])[2 * half : 2 * half + 2]
                    codes = self.rows_of_codes(
                        [f"looked_up({low}, {high}, {{}}_{k}{flips})" for k in (2 * j, 2 * j + 1)]
                    )
                    multiply = "multiply" if j else "first"
                    self.put(
                        f"{multiply}_digits({pair[half == table.negative]}, {', '.join(codes)}, "
                        f"{x}.w[{at}], {x}.w[{at + 1}]);"
                    )
        of_planes = [
            [f"(__int_as_float({more}[{n}]) - __int_as_float({less}[{n}]))" for n in range(4)]
            for more, less in names
        ]
        if len(names) == 1:
            return of_planes[0]
        return [f"fmaf({high}, 128.0f, {low})" for high, low in zip(*of_planes, strict=True)]

    def scale_text(self, number: int, half: int) -> str:
        """Return the scale of a unit's products in half of a set of rows; empty if there is none.

        Args:
            number: The number of the set.
            half: 0 for the upper half, 1 for the lower one.
        """
        of_product = self.product_of(number, half)
        product, found = self.found.products[of_product], self.found
        if product.scale is None:
            return ""
        if self.layout.is_in_turns:
            at = self.group_text()
            if half and found.is_of_rows(product.scale):
                at = f"{4 * found.row_stride(product.scale)} + {at}"
            element = f"reinterpret_cast<const {self.ctype(product.scale)}*>(own_scales)[{at}]"
            return self.decoded_scale(product.scale, element)
        element = self.grouped_element(of_product, self.layout_row(number, half))
        return self.decoded_scale(product.scale, element)

    def layout_row(self, number: int, half: int) -> str:
        """Return a lane's row of half of a set of rows, among the tile's rows of its product."""
        row = self.row_text(number, half, of_product=True)
        return f"({row})" if "+" in row else row

    def grouped_element(self, number: int, row: str) -> str:
        """Return the scale or the zero point of a unit in a row.

        Args:
            number: The number of the scales or offsets in `Products.grouped`.
            row: The text of the row among the tile's rows of the product.
        """
        layout, found = self.layout, self.found
        _, name = found.grouped[number]
        assert name is not None
        slot, group, groups = self.scale_slot(number), self.group_text(), found.num_groups
        if layout.scale_rows(name) == 1:
            row = "0"
        if self.has_index:
            groups = found.row_stride(name)
            slot += f" + first_{number}"
        per_word = CODES_PER_WORD if is_packed(found.tensor(name).dtype) else 1
        place = f"{row} / {per_word}" if per_word > 1 else row
        if layout.comes_with_chunks(number):
            group = self.group_at(f"u * {layout.unit}")
            group = f"({group})" if "+" in group else group
            if layout.is_spaced(number):
                step, size = found.row_step(name), layout.spaced_slot_bytes(number)
                slot = f"{slot} + {group} * {size} + first_{number}"
                at = f"{place} * {step}"
            else:
                at = f"{group} * {layout.tile_rows // per_word} + {place}"
        else:
            at = f"{place} * {groups} + {group}" if row != "0" else group
        if per_word > 1:
            word = f"reinterpret_cast<const unsigned*>({slot})[{at}]"
            bit = f"{row} % {per_word} * 4"
            if found.has_rows_in_words:
                bit = f"({row} % 8 / 2 * 4 + {row} % 2 * 16)"
            return f"float({word} >> {bit} & 15)"
        return f"reinterpret_cast<const {self.ctype(name)}*>({slot})[{at}]"

    def group_text(self) -> str:
        """Return the number of a unit's group among those of a row of scales."""
        found, unit = self.found, self.layout.unit
        first = f"unit * {unit}"
        before = f"span * {self.layout.span} + " if self.has_spans else ""
        before += self.before_share(self.layout.share, "") + " + " * (self.layout.sharers > 1)
        if before:
            first = f"({before}{first})"
        if found.num_pieces > 1:
            first = f"of_piece * {unit}"
        return self.group_at(first)

    def group_at(self, column: str) -> str:
        """Return the number of a lane's group, given the text of its unit's first column."""
        return f"{column} / {self.found.group}"

    def scales_in_turns(self) -> None:
        """Write where the scales of a lane's upper row lie, if two products take turns."""
        first = self.found.products[0]
        if first.scale is None:
            return
        row = ""
        if self.found.is_of_rows(first.scale):
            size = self.found.tensor(first.scale).dtype.itemsize
            row = f" + g / 2 * {self.found.row_stride(first.scale) * size}"
        slots = [f"{self.scale_slot(n)} + first_{n}" for n in (0, 1)]
        self.put(
            f"const unsigned char* own_scales = ((g % 2 == 0) != is_swapped ? {slots[0]} : "
            f"{slots[1]}){row};"
        )

    def decoded_scale(self, scale: str, element: str) -> str:
        """Return the number that an element of a scale stands for."""
        if not is_exponent(self.found.tensor(scale).dtype):
            return f"to_float({element})"
        return f"{self.power_of_two}({element})"

    @property
    def power_of_two(self) -> str:
        """The function that decodes scales which are powers of two."""
        return "power_of_two_or_nan"
