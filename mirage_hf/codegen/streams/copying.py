"""Write the warp that copies codes and scales through the ring in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from mirage_hf.codegen.streams.layout import VECTOR_BYTES
from mirage_hf.codegen.streams.pairs import PairWriter
from mirage_hf.codegen.streams.products import Product
from mirage_hf.codegen.streams.writer import FACTOR_READY
from mirage_hf.graph.coded import is_packed
from mirage_hf.ops.dtypes import CODES_PER_WORD


class CopyWriter(PairWriter):
    """Writes what comes first in the kernel, and the warp that copies."""

    @property
    def lanes_copy(self) -> bool:
        """Whether all lanes of the warp copy: words, or scales with gaps between rows."""
        every = range(len(self.found.grouped))
        return self.found.is_column_major or any(map(self.layout.is_spaced, every))

    def start(self) -> None:
        """Write what comes first, and the warp that copies."""
        self.put(
            "extern __shared__ __align__(128) unsigned char memory[];",
            "Shared& shared = *reinterpret_cast<Shared*>(memory);",
            "const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;",
        )
        if self.layout.sharers > 1:
            self.put(
                "// the number of the cluster, and which share of the columns this block has",
                "const int walker = int(blockIdx.x) / sharers, share = int(blockIdx.x) % sharers;",
            )
        self.put(
            "// tiles of this block",
            f"const int mine = (tiles - {self.walker} + {self.walkers} - 1) / {self.walkers};",
        )
        if self.early:
            self.put("launch_next_kernel();")
        if self.layout.is_in_turns:
            first, second = self.pointers_of_codes()
            self.put(
                f"const bool is_swapped = {second} < {first};  // which product's rows come first"
            )
        with self.scope("if (warp == warps)"):
            with self.scope("if (lane == 0)"):
                # whoever says how many bytes will come, and each lane that copies words or scales
                arrivals = 1 + 32 * self.lanes_copy
                self.put(
                    f"for (int s = 0; s < stages; ++s) start_barrier(&shared.full[s], {arrivals});"
                )
                readers = "threads" if self.layout.teams == 1 else "32 * team_warps"
                self.put(
                    f"for (int s = 0; s < stages; ++s) start_barrier(&shared.empty[s], {readers});"
                )
                self.put("publish_barriers();")
            if self.found.taken is not None:
                self.put("wait_for_previous_kernel();")
                with self.scope(f"for (int e = lane; e < {self.found.num_choices}; e += 32)"):
                    self.put(
                        "const long long expert = index_ptr[e];",
                        f"shared.chosen[e] = expert >= 0 && expert < {self.found.taken.size} ? "
                        "int(expert) : -1;",
                    )
            if self.layout.groups_of_unit > 1:
                self.put("if (lane < 4) shared.zeros[lane] = 0;")
            words = self.layout.table_words
            if words:
                with self.scope("if (lane == 0)"):
                    self.put(*(f"shared.table[{n}] = 0x{w:08x}u;" for n, w in enumerate(words)))
            if self.has_index or self.layout.groups_of_unit > 1 or words:
                self.put("__threadfence_block();")
            self.put("__syncwarp();", f"announce<{FACTOR_READY}>(threads + 32);")
            if self.layout.has_whole_tiles and self.layout.is_in_turns:
                first, second = self.pointers_of_codes()
                self.put(
                    f"const bool lie_together = {first} + row_bytes == {second} || "
                    f"{second} + row_bytes == {first};"
                )
            if self.lanes_copy:
                self.copy_tiles()
                self.put("wait_for_own_copies();")
            else:
                with self.scope("if (is_elected())"):
                    self.copy_tiles()
            self.put("return;")

    def pointers_of_codes(self) -> list[str]:
        """Return the names of pointers to the codes of products that have one source each."""
        return [self.pointer(self.inputs[p.codes], 0) for p in self.found.products]

    def each_span(self) -> AbstractContextManager[None]:
        """Write the loop over spans, if there are several."""
        if not self.has_spans:
            return nullcontext()
        return self.scope(f"for (int span = 0; span < {self.layout.spans}; ++span)")

    def copy_tiles(self) -> None:
        """Write the loop of the warp that copies."""
        if self.has_spans:
            self.put("int n = 0;")
        with self.each_span():
            self.copy_span()

    def copy_span(self) -> None:
        """Write how the chunks of all tiles are copied."""
        with self.scope(f"for (int i = 0{'' if self.has_spans else ', n = 0'}; i < mine; ++i)"):
            self.put(
                f"const long long row_0 = ({self.walker} + i * {self.walkers}) * "
                f"{self.layout.tile_rows};"
            )
            with self.each_piece():
                self.copy_chunks()

    def copy_chunks(self) -> None:
        """Write how the chunks of a tile are copied, or those of a piece of it."""
        layout = self.layout
        whole, last = layout.chunk_bytes, layout.last_chunk * self.found.column_bits // 8
        every = [n for n, (_, name) in enumerate(self.found.grouped) if name is not None]
        spaced = [n for n in every if layout.is_spaced(n)]
        of_chunks = [n for n in every if layout.comes_with_chunks(n) and n not in spaced]
        scaled = [n for n in every if not layout.comes_with_chunks(n)]
        scales = str(sum(layout.scale_bytes(n) for n in scaled)) if scaled else ""
        chunks = "chunks"
        if self.has_spans:
            chunks = self.of_span(layout.span_chunks, layout.last_span_chunks)
        if self.has_index:
            chunks = "(expert < 0 ? 0 : chunks)"
            for n in scaled:
                self.put(
                    f"const unsigned long long begin_{n} = {self.scale_begin(n)};",
                    f"const int size_{n} = (int(begin_{n} & 15) + {layout.scale_bytes(n) + 15}) & "
                    "~15;  // whole units of 16 bytes",
                )
            scales = " + ".join(f"size_{n}" for n in scaled)
        for n in spaced:
            self.put(
                f"const auto* begin_{n} = reinterpret_cast<const unsigned char*>"
                f"({self.first_of_tile(n)});",
                f"const int first_{n} = int(reinterpret_cast<unsigned long long>(begin_{n}) & 15);",
            )
        with self.scope(f"for (int c = 0; c < {chunks}; ++c, ++n)"):
            self.put(
                "const int s = n % stages;",
                "if (n >= stages) wait_for_phase(&shared.empty[s], (n / stages - 1) & 1);",
            )
            if layout.first_chunks < layout.stages:
                first = layout.first_chunks
                self.put(
                    f"if (n >= {first} && n < stages) wait_for_phase(&shared.full[n - {first}], 0);"
                )
            size = "chunk_bytes"
            if last != whole:
                self.put(
                    f"const int size = {self.chunk_number} + 1 < chunks ? chunk_bytes : {last};"
                )
                size = "size"
            more = [f"(c == 0 ? {scales} : 0)"] if scales else []
            if of_chunks:
                sizes = [
                    sum(layout.scale_bytes(n, columns) for n in of_chunks)
                    for columns in (layout.chunk, layout.last_chunk)
                ]
                of_last = f"({self.chunk_number} + 1 < chunks ? {sizes[0]} : {sizes[1]})"
                more.append(of_last if sizes[0] != sizes[1] else str(sizes[0]))
            if self.found.is_column_major:
                if self.found.has_rows_in_words:
                    self.copy_columns(size)
                else:
                    self.copy_words(size)
                self.finish_copies_of_lanes(spaced)
                with self.scope("if (is_elected())"):
                    self.put(f"expect_bytes(&shared.full[s], {' + '.join(more) or 0});")
                    self.copy_all_scales(scaled, of_chunks)
                return
            total = " + ".join([f"{layout.stored_rows} * {size}", *more])
            with self.scope("if (is_elected())") if spaced else nullcontext():
                self.put(f"expect_bytes(&shared.full[s], {total});")
                self.copy_rows(size)
                self.copy_all_scales(scaled, of_chunks)
            if spaced:
                self.finish_copies_of_lanes(spaced)

    def copy_words(self, size: str) -> None:
        """Write how the lanes copy the words of a chunk, which are column-major, by vectors.

        In shared memory the vectors of a row of words are swapped, so that the lanes of a load meet
        different banks.

        Args:
            size: The text of the bytes of a row of codes in the chunk.
        """
        layout = self.layout
        vectors, first = layout.vectors, f"{self.chunk_number} * (chunk_bytes / 4)"
        first += self.before_share(layout.piece_share // CODES_PER_WORD)
        at_once = 32 // vectors  # rows of words that the lanes copy at a time
        self.begin_vectors("word")
        self.put(f"from += ({first} + word) * word_step;")
        # rows of words that are four apart are swapped alike
        starts = range(0, max(at_once, 4), at_once)
        for k in starts:
            more = f" + {k}" if k else ""
            self.put(
                f"unsigned char* to_{k} = shared.codes[s] + (word{more}) * pitch + "
                f"(vector ^ {self.swapped(f'(word{more})')}) * 16;"
            )
        count = max(at_once, 4)
        self.put("#pragma unroll 8")
        with self.scope(f"for (int w = 0; w < {size} / 4; w += {count})"):
            is_inside = "" if layout.unit // 8 % count == 0 else f"if (word + w < {size} / 4) "
            for k in starts:
                self.put(
                    f"{is_inside}copy_vector(to_{k} + w * pitch, from + (w + {k}) * word_step);"
                )

    def copy_columns(self, size: str) -> None:
        """Write how the lanes copy the columns of a chunk, whose words hold codes of eight rows.

        In shared memory, those of the four lanes of a row take turns, so that they meet different
        banks: column 8 t + n of 32 lies at place 4 n + t.

        Args:
            size: The text of the bytes of a row of codes in the chunk.
        """
        layout = self.layout
        of_each, at_once = layout.vectors // len(self.found.products), 32 // layout.vectors
        self.begin_vectors("place")
        first = f"{self.chunk_number} * {layout.chunk}{self.before_share(layout.piece_share)}"
        to = "shared.codes[s] + place * pitch"
        if of_each > 1:
            to += f" + vector % {of_each} * 16"
        if len(self.found.products) > 1:
            to += f" + vector / {of_each} * {layout.chunk} * pitch"
        self.put(f"unsigned char* to = {to};")
        starts = range(0, 32, at_once)
        for k in starts:
            place = f"(place + {k})" if k else "place"
            self.put(
                f"const unsigned char* from_{k} = from + "
                f"({first} + {place} % 4 * 8 + {place} / 4) * word_step;"
            )
        self.put("#pragma unroll 4")
        with self.scope(f"for (int w = 0; w < 2 * {size}; w += 32)"):
            for k in starts:
                at = f"(w + {k})" if k else "w"
                self.put(f"copy_vector(to + {at} * pitch, from_{k} + w * word_step);")

    def begin_vectors(self, row: str) -> None:
        """Write which vector of a row of words a lane copies, and where the tile's first one lies.

        Args:
            row: A name for the number of the lane's row of words.
        """
        vectors, products = self.layout.vectors, self.found.products
        of_each = vectors // len(products)
        addresses, steps = zip(*map(self.column_of, products), strict=True)
        of_product = f"lane % {vectors} < {of_each} ? {{0}} : {{1}}"
        if len(products) == 1:
            of_product = "{0}"
        self.put(
            f"const int vector = lane % {vectors}, {row} = lane / {vectors};",
            f"const long long word_step = {of_product.format(*steps)};",
            f"const unsigned char* from = ({of_product.format(*addresses)}) + vector % {of_each} * "
            "16;",
        )

    def column_of(self, product: Product) -> tuple[str, str]:
        """Return where a tile's words of a product begin, and the bytes of a row of words."""
        i, rows = self.inputs[product.codes], self.found.source_rows(product.codes)
        of_row = "/ 2" if self.found.has_rows_in_words else "* 4"  # bytes
        address = self._of_source(i, rows, "row_0", lambda at: f" + {at} {of_row}")
        return address, f"{self.rows_of_source(rows)} {of_row}"

    def rows_of_source(self, rows: Sequence[int]) -> str:
        """Return the text of how many rows the source of a tile has."""
        text, start = str(rows[-1]), sum(rows[:-1])
        for count in reversed(rows[:-1]):
            text = f"row_0 < {start} ? {count} : {text}"
            start -= count
        return f"({text})" if len(rows) > 1 else text

    def copy_all_scales(self, scaled: Sequence[int], of_chunks: Sequence[int]) -> None:
        """Write the copies of scales.

        Args:
            scaled: The products whose scales of a tile come with its first chunk.
            of_chunks: Those whose scales come with each chunk.
        """
        if scaled:
            with self.scope("if (c == 0)"):
                self.copy_scales(scaled)
        for n in of_chunks:
            self.copy_scales_of_chunk(n)

    def copy_rows(self, size: str) -> None:
        """Write the copies of a chunk's rows: one for each, or one for all if they lie together."""
        layout, found, rows = self.layout, self.found, self.layout.stored_rows
        if found.is_in_lanes:
            self.copy_eight_rows(size)
            return
        own, of_each = "row_0", rows // len(found.products)
        if self.has_index:
            own = f"row_0 % {found.num_own_rows}"
        if found.row_pair is not None:
            own = "row_0 / 2"
        self.put(f"const long long first = {own};")
        addresses = [self.row_of(p) for p in found.products]
        if layout.has_whole_tiles:
            head, address = "", addresses[0]
            if layout.is_in_turns:
                head = "if (lie_together)"
                address = f"is_swapped ? {addresses[1]} : {addresses[0]}"
            with self.scope(head):
                self.put(
                    "const long long row = first;",
                    f"copy_bytes(shared.codes[s], {address}, {rows} * {size}, &shared.full[s]);",
                )
            if not layout.is_in_turns:
                return
        at = f" + {self.chunk_number} * chunk_bytes"
        at += self.before_share(layout.piece_share * found.column_bits // 8)
        with self.scope("else") if layout.has_whole_tiles else nullcontext():
            self.put("#pragma unroll")
            with self.scope(f"for (int r = 0; r < {of_each}; ++r)"):
                self.put("const long long row = first + r;")
                for n, address in enumerate(addresses):
                    to = f"({n * of_each} + r)" if n else "r"
                    if layout.is_in_turns:
                        to = f"(2 * r + (is_swapped ? {1 - n} : {n}))"
                    self.put(
                        f"copy_bytes(&shared.codes[s][{to} * pitch], {address}{at}, {size}, "
                        "&shared.full[s]);"
                    )

    def copy_eight_rows(self, size: str) -> None:
        """Write the copies of a chunk whose words lie as lanes load them: one for eight rows."""
        layout, found = self.layout, self.found
        share = self.before_share(layout.piece_share * found.column_bits)  # eight rows
        for n, p in enumerate(found.products):
            step = found.eight_rows_stride(p.codes) // 2

            def address(at: str, step: int = step) -> str:
                return f" + {at} / 8 * {step}"

            for eight in range(layout.tile_rows // 8):
                row = f"(row_0 + {8 * eight})" if eight else "row_0"
                i, to = self.inputs[p.codes], n * layout.tile_rows + 8 * eight
                begin = self._of_source(i, found.source_rows(p.codes), row, address)
                self.put(
                    f"copy_bytes(shared.codes[s] + {to} * pitch, {begin} + "
                    f"{self.chunk_number} * chunk_bytes * 8{share}, {size} * 8, &shared.full[s]);"
                )

    def row_of(self, product: Product) -> str:
        """Return the address of a row of a product's codes."""
        i, found = self.inputs[product.codes], self.found
        if self.has_index:
            strides = found.chosen_stride(product.codes), found.row_stride(product.codes)
            expert, row = (n * found.bits // 8 for n in strides)
            return f"{self.pointer(i, 0)} + expert * {expert}LL + row * {row}"
        return self._of_source(
            i, found.source_rows(product.codes), "row", lambda at: f" + {at} * row_bytes"
        )

    def copy_scales(self, scaled: Sequence[int]) -> None:
        """Write the copies of a tile's scales."""
        for n in scaled:
            if self.has_index:
                self.put(
                    f"copy_bytes({self.scale_slot(n)}, "
                    f"reinterpret_cast<const void*>(begin_{n} & ~15ULL), size_{n}, "
                    "&shared.full[s]);"
                )
                continue
            p, name = self.found.grouped[n]
            assert name is not None
            i, size = self.inputs[name], self.layout.scale_bytes(n)
            if self.found.row_pair is not None:
                self.copy_scales_of_pairs(n, size)
                continue
            of_row, shared_by = self.found.num_groups, 1
            if self.layout.scale_rows(name) == 1:
                shared_by = self.block.axis(self.found.rows[-1]).size
            if is_packed(self.found.tensor(name).dtype):
                of_row, shared_by = 4 * of_row, CODES_PER_WORD  # words, by bytes

            def address(at: str, shared_by: int = shared_by, of_row: int = of_row) -> str:
                index = f"{at} / {shared_by}" if shared_by > 1 else at
                return f" + {index} * {of_row}"

            text = self._of_source(i, self.found.source_rows(p.codes), "row_0", address)
            self.put(f"copy_bytes({self.scale_slot(n)}, {text}, {size}, &shared.full[s]);")

    def copy_scales_of_pairs(self, number: int, size: int) -> None:
        """Write the copies of a tile's scales, where the codes of two rows share bytes.

        Args:
            number: Their number in `Products.grouped`.
            size: The bytes of all.
        """
        _, name = self.found.grouped[number]
        assert name is not None
        i, t = self.inputs[name], self.found.tensor(name)
        pair = t.strides[i.axes.index(self.found.row_pair)]
        for half, to in enumerate(("", f" + {size // 2}")):
            begin = f" + {pair}LL" if half else ""
            self.put(
                f"copy_bytes({self.scale_slot(number)}{to}, {self.pointer(i, 0)}{begin} + "
                f"row_0 / 2 * {self.found.num_groups}, {size // 2}, &shared.full[s]);"
            )

    def finish_copies_of_lanes(self, spaced: Sequence[int]) -> None:
        """Write how the lanes copy scales or offsets with gaps, and that they have no more copies.

        There are many, and a bulk copy of a few bytes takes as long as one of many.

        Args:
            spaced: Their numbers in `Products.grouped`.
        """
        for n in spaced:
            self.copy_spaced(n)
        self.put("arrive_when_copied(&shared.full[s]);")

    def copy_spaced(self, number: int) -> None:
        """Write how the lanes copy a chunk's scales or offsets, which have gaps between rows."""
        layout, (p, name) = self.layout, self.found.grouped[number]
        assert name is not None
        rows, slot = self.found.source_rows(p.codes), layout.spaced_slot_bytes(number)
        of_row = self.found.row_step(name) * self.found.tensor(name).dtype.itemsize
        vectors = slot // VECTOR_BYTES
        self.put("#pragma unroll 4")
        with self.scope(f"for (int e = lane; e < {self.groups_of_chunk()} * {vectors}; e += 32)"):
            self.put(
                f"const int group = e / {vectors}, byte = e % {vectors} * 16;",
                f"const long long at = ({self.chunk_number} * "
                f"{layout.chunk // self.found.group} + group"
                f"{self.before_share(layout.piece_share // self.found.group)}) * "
                f"{self.rows_of_source(rows)} * {of_row}LL;",
                f"if (byte < first_{number} + {layout.spaced_bytes(number)}) "
                f"copy_vector({self.scale_slot(number)} + group * {slot} + byte, "
                f"begin_{number} - first_{number} + at + byte);",
            )

    def groups_of_chunk(self) -> str:
        """Return the text of how many groups of columns a chunk has."""
        layout, group = self.layout, self.found.group
        whole, last = layout.chunk // group, layout.last_chunk // group
        if last == whole:
            return f"{whole}"
        return f"({self.chunk_number} + 1 < chunks ? {whole} : {last})"

    def copy_scales_of_chunk(self, number: int) -> None:
        """Write the copies of a chunk's scales, where those of successive rows lie side by side."""
        layout, (p, name) = self.layout, self.found.grouped[number]
        assert name is not None
        rows, whole = self.found.source_rows(p.codes), layout.chunk // self.found.group
        size = layout.scale_bytes(number) // whole
        of_word = "/ 2" if is_packed(self.found.tensor(name).dtype) else ""  # bytes of rows
        with self.scope(f"for (int group = 0; group < {self.groups_of_chunk()}; ++group)"):
            group = f"group{self.before_share(layout.piece_share // self.found.group)}"
            at = (
                f"({self.chunk_number} * {whole} + {group}) * {self.rows_of_source(rows)} {of_word}"
            )
            self.put(
                f"copy_bytes({self.scale_slot(number)} + group * {size}, "
                f"{self.first_of_tile(number)} + {at.rstrip()}, {size}, &shared.full[s]);"
            )
