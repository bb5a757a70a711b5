"""How a kernel that streams codes divides its work, and how it lies in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from mirage_hf import errors
from mirage_hf.codegen.cuda_kernel import SHARED_MOST
from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.codegen.streams.finding import streamed_products
from mirage_hf.codegen.streams.products import ROWS, Product, Products
from mirage_hf.codegen.streams.tables import (
    TableBytes,
    TableHalves,
    table_bytes,
    table_halves,
    words,
)
from mirage_hf.graph.block_parts import MAX_CLUSTER
from mirage_hf.graph.coded import is_packed
from mirage_hf.ops.dtypes import CODES_PER_WORD

#: Columns of a row of the other factor that a thread computes at a time.
VECTOR = 8

#: Bytes of a word of codes, and of what a lane copies at a time if words are column-major.
WORD_BYTES, VECTOR_BYTES = 4, 16

#: Columns of a row of the other factor that share a power of two: those of a warp.
SHARED_COLUMNS = 32 * VECTOR

#: Digits of a number: 8 bits each, so 22 bits of a column's value are kept.
DIGITS = 3

#: The most loads of 16 bytes of the other factor that a thread has under way, with up to 8 warps.
#: With more warps a thread has half of the registers.
_MOST_LOADS = 16

#: The most warps that compute, a power of two. One more copies, and a block has at most 32 warps.
MOST_WARPS = 16

#: Bytes of codes that a block requests at least before the first of them arrive. While many more
#: are under way, loads of the other factor wait behind them.
_FIRST_BYTES = 48 << 10

#: The most words of codes that a lane holds at a time if words hold codes of eight rows.
_MOST_HELD = 32

#: What the columns of a share are a multiple of, so that copies begin at multiples of 16 bytes.
_SHARED_BY = 64

#: The fewest warps of a team, and the most teams, if blocks share no columns.
_LEAST_WARPS, _MOST_TEAMS = 4, 4

#: Slots of a ring of scales besides those of tiles that are under way.
_MORE_SLOTS = 2


@dataclass(frozen=True)
class StreamLayout:
    """A schedule's choices for one kernel.

    A *tile* is the rows that a warp multiplies at a time, with all columns. It may have several
    *sets* of rows, those of an instruction each. It passes through the ring in *chunks* of
    columns, one for each stage. The warps share the columns of a chunk in *units*: the columns that
    the four lanes of a row load at once. If the blocks of a cluster walk the same tiles, each has a
    *share* of the columns. If the other factor does not fit beside the ring, the block walks its
    tiles once for each *span* of columns. An *offset* is a zero point or a shift.

    Attributes:
        products: What the kernel computes.
        schedule: The schedule.
    """

    products: Products
    schedule: Schedule

    @property
    def blocks(self) -> int:
        """Thread blocks. Each walks tiles."""
        most = min(self.schedule.persistent_blocks, self.tiles * self.sharers)
        return most // self.sharers * self.sharers

    @property
    def sharers(self) -> int:
        """Blocks of a cluster, which share the columns of each tile."""
        return self.schedule.cooperating_blocks

    @property
    def walkers(self) -> int:
        """How many clusters walk tiles, or blocks that share no columns."""
        return self.blocks // self.sharers

    @property
    def share(self) -> int:
        """Columns of a block."""
        return self.products.num_columns // self.sharers

    @property
    def piece_share(self) -> int:
        """Columns that a block has of each piece."""
        return self.products.piece_columns // self.sharers

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return self.products.num_rows // self.tile_rows

    @property
    def tile_rows(self) -> int:
        """Rows of each product that a tile has."""
        return math.prod(self.schedule.tiles[a] for a in self.products.rows)

    @property
    def rows(self) -> int:
        """Rows of codes that a tile has, those of all products."""
        return self.tile_rows * len(self.products.products)

    @property
    def stored_rows(self) -> int:
        """Rows of codes that a tile has in memory. Two rows may share bytes."""
        return self.rows // (1 if self.products.row_pair is None else 2)

    @property
    def is_in_turns(self) -> bool:
        """Whether the rows of two products may lie in turns in memory.

        A tile has them in this order, too: the first row of one, the first row of the other, and so
        on.
        """
        found = self.products
        if len(found.products) < 2 or found.taken is None:
            return False
        strides = {
            (found.row_stride(p.codes), found.chosen_stride(p.codes)) for p in found.products
        }
        has_gaps = found.row_stride(found.products[0].codes) == 2 * found.piece_columns
        return has_gaps and len(strides) == len({*map(self._kind_of_scales, found.products)}) == 1

    def _kind_of_scales(self, p: Product) -> object:
        """Return what products whose rows lie in turns have in common."""
        found = self.products
        if p.scale is None:
            return None
        return found.row_stride(p.scale), found.tensor(p.scale).dtype, found.is_of_rows(p.scale)

    @property
    def has_whole_tiles(self) -> bool:
        """Whether a tile may lie in memory as it lies in shared memory, so one copy brings it."""
        found, whole = self.products, self.products.row_bytes
        if found.is_column_major:
            return False
        per_row = 1 + (found.row_pair is not None)  # codes of a column
        strides = {
            found.row_stride(p.codes) // per_row * found.column_bits // 8 for p in found.products
        }
        return (
            self.chunks == self.sharers == 1
            and self.pitch == whole
            and (self.is_in_turns or (len(found.products) == 1 and strides == {whole}))
        )

    @property
    def most_tiles(self) -> int:
        """The most tiles that a block walks."""
        return -(-self.tiles // self.walkers)

    @property
    def warps(self) -> int:
        """Warps that compute. One more copies."""
        return self.schedule.num_warps

    @property
    def teams(self) -> int:
        """Teams of warps that multiply chunks in turns, if these are whole tiles.

        While one team adds up its sums and waits, the others multiply. Each stage of the ring
        belongs to one team, because a warp must wait for every phase of a barrier: parities repeat.

        If words are column-major, or lie as lanes load them, chunks may be parts of tiles. There
        are so many teams that all warps of one have units. Scales that come with the first chunk
        allow no teams, because the other teams do not wait for that chunk. If the blocks of a
        cluster share columns, a whole share is small, and a team may be one warp.
        """
        least, most = _LEAST_WARPS, _MOST_TEAMS
        if self.chunks > 1:
            found = self.products
            if not (found.is_column_major or found.is_in_lanes) or self.has_scales_of_tiles:
                return 1
            least, most = 1, min(most, self.warps * self.unit // self.chunk)
        elif self.sharers > 1:
            least, most = 1, self.warps
        every = (n for n in (16, 8, 4, 2) if self.stages % n == 0 and self.warps >= n * least)
        return next((n for n in every if n <= most), 1)

    @property
    def team_warps(self) -> int:
        """Warps of a team."""
        return self.warps // self.teams

    @property
    def summing_warps(self) -> int:
        """Warps that have sums of one tile: a team, or all if teams share its chunks."""
        is_shared = self.products.num_pieces > 1 or self.chunks > 1
        return self.warps if is_shared else self.team_warps

    @property
    def stages(self) -> int:
        """Chunks that the ring holds."""
        return self.schedule.num_stages

    @property
    def first_chunks(self) -> int:
        """Chunks that are requested at once when the kernel starts.

        Until the ring is full, each further one is requested when one has arrived.
        """
        return -(-_FIRST_BYTES // (self.stored_rows * self.chunk_bytes))

    @cached_property
    def chunk(self) -> int:
        """Columns of a chunk. The last one may have fewer."""
        p = self.products
        return min(self.piece_share, self.schedule.tiles[p.own_columns[0]] * p.inner_columns)

    @property
    def chunks(self) -> int:
        """Chunks of a block's share of a tile, or of each piece of it."""
        return -(-self.piece_share // self.chunk)

    @property
    def last_chunk(self) -> int:
        """Columns of the last chunk of a block's share of a tile, or of each piece of it."""
        return self.piece_share - (self.chunks - 1) * self.chunk

    @cached_property
    def span_chunks(self) -> int:
        """Chunks of a span: all, or so many that shared memory holds their other factor.

        If an index chooses experts, there is one span.
        """
        if self.products.taken is not None:
            return self.chunks
        for spans in range(1, self.chunks + 1):
            count = -(-self.chunks // spans)
            if self.bytes_with_spans_of(count) <= SHARED_MOST:
                return count
        return 1

    @property
    def spans(self) -> int:
        """Spans of columns."""
        return -(-self.chunks // self.span_chunks)

    @property
    def last_span_chunks(self) -> int:
        """Chunks of the last span."""
        return self.chunks - (self.spans - 1) * self.span_chunks

    @property
    def span(self) -> int:
        """Columns of a span. The last one may have fewer."""
        return self.share if self.spans == 1 else self.span_chunks * self.chunk

    @property
    def last_span(self) -> int:
        """Columns of the last span."""
        return self.share - (self.spans - 1) * self.span

    @property
    def rounds(self) -> int:
        """How often a thread computes its columns of a row of the other factor."""
        return -(-self.span // (32 * VECTOR * self.row_warps))

    @property
    def row_warps(self) -> int:
        """Warps that compute one row of the other factor. The others compute other rows."""
        return self.warps // self.row_teams

    @property
    def row_teams(self) -> int:
        """Teams of warps that compute rows of the other factor, if the blocks share columns.

        A share has few columns, so all warps together would have too little of one row.
        """
        if self.sharers == 1:
            return 1
        needed = -(-self.share // SHARED_COLUMNS)
        every = (n for n in (16, 8, 4, 2) if self.batch % n == 0 and self.warps >= n * needed)
        return next(every, 1)

    def rows_at_once(self, loads: int) -> int:
        """Return how many rows of the batch a thread loads before it computes.

        Args:
            loads: Loads of 16 bytes for one row.
        """
        most = _MOST_LOADS if self.warps <= 8 else _MOST_LOADS // 2
        rows = self.batch // self.row_teams
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        return max((n for n in divisors if n * loads <= most), default=1)

    @cached_property
    def lane_bytes(self) -> int:
        """Bytes of a row of codes that a lane loads at a time. Four lanes share a row.

        Raises:
            CodegenError: The chunks of the schedule cannot be divided so.
        """
        p = self.products
        span = p.group * self.groups_of_unit if p.is_grouped else self.piece_share
        for count in (16, 8, 4):
            unit = 4 * count * 8 // p.column_bits
            fits = not (span % unit or self.chunk % unit or self.last_chunk % unit)
            if p.is_in_lanes:
                fits &= count == VECTOR_BYTES
            if p.has_rows_in_words:
                fits &= self.rows // 8 * count // WORD_BYTES <= _MOST_HELD
            if fits and count >= p.column_bits:
                return count
        raise errors.CodegenError(
            f"{self.schedule}: chunks of {self.chunk} columns are no multiple of what four lanes "
            "load; give another tile"
        )

    @property
    def groups_of_unit(self) -> int:
        """How many groups of columns share a unit: 2 if groups are short.

        An instruction has eight columns. The digits of one group take the first three, and those of
        the other one the fifth to seventh. Two of the four lanes of a row load codes of each group,
        and the digits of other lanes are 0.
        """
        sizes = self.products.group, self.chunk % 64, self.last_chunk % 64
        found = self.products
        is_single = self.is_in_halves or found.is_column_major or found.has_offsets
        is_single |= found.row_pair is not None
        return 2 if sizes == (32, 0, 0) and not is_single else 1

    @property
    def lane_columns(self) -> int:
        """Columns of a unit that belong to one lane."""
        return self.lane_bytes * 8 // self.products.column_bits

    @property
    def unit(self) -> int:
        """Columns of a unit."""
        return 4 * self.lane_columns

    @property
    def is_in_halves(self) -> bool:
        """Whether products are of halves. Otherwise they are of signed bytes.

        An instruction has eight columns. The digits of one row take three. As halves, each row
        takes one.
        """
        return not is_of_digits(self.products)

    @property
    def table(self) -> TableBytes | None:
        """The table that codes of products of signed bytes are looked up in, if there is one."""
        values = self.products.values
        return table_bytes(values) if values and not self.is_in_halves else None

    @property
    def halves(self) -> TableHalves | None:
        """The table that codes of products of halves are looked up in, if there is one."""
        values = self.products.values
        return table_halves(values) if values and self.is_in_halves else None

    @property
    def table_words(self) -> tuple[int, ...]:
        """The bytes of the table as words, each once."""
        table = self.table or self.halves
        planes = table.planes if table else ()
        return tuple(dict.fromkeys(word for plane in planes for word in words(plane)))

    @property
    def sets(self) -> int:
        """Sets of rows that a warp multiplies one after another: those of an instruction each."""
        return max(1, self.rows // ROWS)

    @property
    def vectors(self) -> int:
        """Vectors of 16 bytes in a row of words of a chunk, if words are column-major."""
        codes = self.rows if self.products.has_rows_in_words else self.rows * CODES_PER_WORD
        return codes // 2 // VECTOR_BYTES

    @property
    def lane_rows(self) -> int:
        """Rows side by side that a lane has, if words are column-major."""
        most = 8 if self.products.has_rows_in_words else VECTOR_BYTES // WORD_BYTES
        return min(most, self.tile_rows // 8)

    @property
    def batch(self) -> int:
        """Rows of the other factor."""
        return self.products.batch_size

    @property
    def eights(self) -> int:
        """How often the columns of an instruction hold eight rows of the other factor."""
        return -(-self.batch // 8)

    @property
    def lane_sums(self) -> int:
        """Sums that a lane has of a row of codes: two of each instruction, but one of one row."""
        return 1 if self.batch == 1 else 2 * self.eights

    @property
    def pieces(self) -> int:
        """Pieces of a unit: 8 columns of each lane."""
        return self.lane_columns // 8

    # -- shared memory ----------------------------------------------------------------------------

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row of a chunk."""
        return self.chunk * self.products.column_bits // 8

    @property
    def stage_bytes(self) -> int:
        """Bytes of a chunk in shared memory."""
        has_pitch = not (self.products.is_column_major or self.products.is_in_lanes)
        return self.stored_rows * (self.pitch if has_pitch else self.chunk_bytes)

    @property
    def pitch(self) -> int:
        """Bytes from a row of a chunk to the next one. The lanes of a load meet different banks.

        If words are column-major, these are rows of words, and vectors of 16 bytes are swapped. If
        words hold codes of eight rows, they are columns of a product. If words lie as lanes load
        them, a unit of eight rows is followed by the next unit.
        """
        if self.products.is_in_lanes:
            return self.chunk_bytes
        if self.products.has_rows_in_words:
            return self.tile_rows // 2
        if self.products.is_column_major:
            return self.rows * WORD_BYTES
        return self.chunk_bytes + (4 * self.lane_bytes - self.chunk_bytes) % 128

    def comes_with_chunks(self, number: int) -> bool:
        """Return whether scales or offsets come with each chunk of a tile.

        Otherwise those of all columns come with the first chunk.

        Args:
            number: Their number in `Products.grouped`.
        """
        _, name = self.products.grouped[number]
        return name is not None and self.products.is_in_columns(name)

    @property
    def has_scales_of_tiles(self) -> bool:
        """Whether some scales or offsets of a tile come with its first chunk."""
        held = (n for n, (_, name) in enumerate(self.products.grouped) if name is not None)
        return not all(map(self.comes_with_chunks, held))

    def scale_slots(self, number: int) -> int:
        """Return for how many tiles or chunks scales or offsets are held."""
        return self._scale_slots(number, self.span_chunks)

    def _scale_slots(self, number: int, span_chunks: int) -> int:
        if self.comes_with_chunks(number):
            return self.stages
        return self.stages // (self.chunks % span_chunks or span_chunks) + _MORE_SLOTS

    def scale_bytes(self, number: int, columns: int = 0) -> int:
        """Return the bytes of the scales or offsets of a tile.

        Args:
            number: Their number in `Products.grouped`.
            columns: The columns of the tile. 0: those of a chunk if they come with it, or all.
        """
        (_, name), found = self.products.grouped[number], self.products
        if name is None:
            return 0
        whole = self.chunk if self.comes_with_chunks(number) else found.piece_columns
        groups = max(1, (columns or whole) // found.group)
        dtype = found.tensor(name).dtype
        if is_packed(dtype):
            return self.scale_rows(name) * groups // 2
        if self.is_spaced(number):
            return groups * self.spaced_slot_bytes(number)
        if found.taken is None:
            return self.scale_rows(name) * groups * dtype.itemsize
        # what lies from the first row to the last, at any address
        return ((self.scale_rows(name) - 1) * found.row_stride(name) + groups) * dtype.itemsize

    def is_spaced(self, number: int) -> bool:
        """Return whether scales or offsets of rows have gaps, as if two kinds take turns.

        Lanes copy what lies from the first row to the last. It may begin at any address.
        """
        _, name = self.products.grouped[number]
        return name is not None and self.products.row_step(name) > 1

    def spaced_bytes(self, number: int) -> int:
        """Return the bytes from a group's first scale or offset to the end of its last one."""
        _, name = self.products.grouped[number]
        assert name is not None
        size = self.products.tensor(name).dtype.itemsize
        return ((self.tile_rows - 1) * self.products.row_step(name) + 1) * size

    def spaced_slot_bytes(self, number: int) -> int:
        """Return the bytes of shared memory that hold those of a group, wherever they begin."""
        _, name = self.products.grouped[number]
        assert name is not None
        most = VECTOR_BYTES - self.products.tensor(name).dtype.itemsize  # bytes before the first
        return -(-(most + self.spaced_bytes(number)) // VECTOR_BYTES) * VECTOR_BYTES

    def is_cut(self, number: int) -> bool:
        """Return whether a copy of scales or offsets is no multiple of 16 bytes."""
        columns = self.products.group if self.comes_with_chunks(number) else 0
        return self.scale_bytes(number, columns) % VECTOR_BYTES != 0

    def scale_rows(self, name: str) -> int:
        """Return how many rows of scales or offsets there are for the rows of a tile."""
        return self.tile_rows if self.products.is_of_rows(name) else 1

    def scale_slot_bytes(self, number: int) -> int:
        """Return the bytes of shared memory that hold scales or offsets of a tile."""
        size = self.scale_bytes(number)
        # copies begin and end at multiples of 16 bytes
        return size if self.products.taken is None or not size else -(-(size + 15) // 16) * 16

    @property
    def num_unit_sums(self) -> int:
        """How many sums of the columns of a unit are held: those that offsets multiply."""
        return -(-self.span // self.unit) * self.batch if self.products.has_offsets else 0

    @property
    def other_bytes(self) -> int:
        """Bytes of the other factor: halves, or digits."""
        return self._other_bytes(self.span)

    def _other_bytes(self, span: int) -> int:
        columns = -(-span // self.unit) * self.unit
        return columns * self.batch * (2 if self.is_in_halves else DIGITS)

    @property
    def num_steps(self) -> int:
        """How many powers of two the other factor has."""
        return -(-self.span // SHARED_COLUMNS) * self.batch

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block. The kernel's struct has this size."""
        return self.bytes_with_spans_of(self.span_chunks)

    def bytes_with_spans_of(self, span_chunks: int) -> int:
        """Return the bytes of shared memory of a block whose spans have so many chunks."""
        found = self.products
        span = min(self.share, span_chunks * self.chunk * found.num_pieces)
        slots = sum(
            self._scale_slots(n, span_chunks) * self.scale_slot_bytes(n)
            for n in range(len(self.products.grouped))
        )
        steps = 4 * -(-span // SHARED_COLUMNS) * self.batch
        partial = 4 * self.most_tiles * self.summing_warps * self.rows * self.batch
        sums = 4 * self.row_warps * len(self.products.sums) * self.batch
        size = self.stages * self.stage_bytes
        choices = [4 * found.num_choices] if found.taken else []
        zeros = [16] if self.groups_of_unit > 1 else []
        table = [4 * len(self.table_words)] if self.table_words else []
        units = -(-span // self.unit) * self.batch
        unit_sums = [4 * units] if found.has_offsets else []
        parts = slots, self._other_bytes(span), steps, partial, sums, *choices, *zeros, *table
        parts = (*parts, *unit_sums)
        for part in parts:
            size = -(-size // 16) * 16 + part
        size = -(-size // 8) * 8 + 2 * 8 * self.stages
        return -(-size // 128) * 128


def is_of_digits(products: Products) -> bool:
    """Return whether products are of signed bytes: codes, and digits of the other factor."""
    return products.dtype is not torch.float8_e4m3fn and products.batch_size == 1


def other_rows(products: Products) -> tuple[int, ...]:
    """Return how many rows of each product a tile may have, other than `rows_of_each`.

    If the other factor has several rows, tiles may have two sets. A warp then loads these rows from
    shared memory once for both.
    """
    if products.is_column_major:
        return (products.least_rows,)
    if products.row_pair is not None:
        return ()
    if is_of_digits(products):
        return (ROWS // 2,)
    rows = 2 * products.rows_of_each
    every = [n for p in products.products for n in products.source_rows(p.codes)]
    has_sets = products.batch_size > 1 and products.taken is None and not products.is_in_lanes
    return (rows,) if has_sets and not any(n % rows for n in every) else ()


def tiled_rows(products: Products, rows: int) -> dict[str, int]:
    """Return the tiles along the rows of codes, so that a tile has so many of each product."""
    tiles, left = dict.fromkeys(products.rows, 1), rows
    for axis in reversed(products.own_rows):
        tiles[axis] = min(left, products.block.axis(axis).size)
        left //= tiles[axis]
    return tiles


def tiles_of_rows(products: Products) -> dict[str, int]:
    """Return the tiles that schedules have along the rows of codes and the batch."""
    tiles = tiled_rows(products, products.rows_of_each)
    if products.batch is not None:
        tiles[products.batch] = next_power_of_two(products.batch_size)
    return tiles


def stream_layout(op: PlacedOp, schedule: Schedule) -> StreamLayout:
    """Return how a schedule divides the work of a placed op.

    Raises:
        CodegenError: The op has no kernel that streams codes, or the schedule does not fit.
    """
    products = streamed_products(op)
    block = products.block
    schedule.check(block)
    if schedule.persistent_blocks < 1 or schedule.num_warps > MOST_WARPS:
        raise errors.CodegenError(
            f"{schedule}: a kernel that streams codes has persistent blocks, of at most "
            f"{MOST_WARPS} warps that compute"
        )
    tiles, rows = tiles_of_rows(products), products.rows_of_each
    for count in other_rows(products):
        others = tiled_rows(products, count)
        if all(schedule.tiles[a] == n for a, n in others.items()):
            tiles, rows = tiles | others, count
    if any(schedule.tiles[a] != n for a, n in tiles.items()):
        raise errors.CodegenError(
            f"{schedule}: a kernel that streams codes has tiles of "
            f"{', '.join(f'{n} along {a}' for a, n in tiles.items())}"
        )
    if any(n % rows for p in products.products for n in products.source_rows(p.codes)):
        raise errors.CodegenError(
            f"{schedule}: rows of codes are no multiple of {rows}; "
            f"give tiles of {products.least_rows} rows"
        )
    layout = StreamLayout(products, schedule)
    if layout.sharers > 1:
        _check_shares(layout)
    layout.lane_bytes  # noqa: B018 — raises if nothing fits
    shared = [name for _, name in products.grouped if name and not products.is_of_rows(name)]
    if shared and (inner := block.axis(products.rows[-1]).size) % rows:
        raise errors.CodegenError(
            f"{schedule}: blocks of {inner} rows share scales, and tiles would cross them; "
            f"give tiles of {products.rows_of_each} rows"
        )
    if products.taken is None and any(map(layout.is_cut, range(len(products.grouped)))):
        raise errors.CodegenError(
            f"{schedule}: the scales of a tile are no multiple of 16 bytes; "
            f"give tiles of {products.rows_of_each} rows"
        )
    return layout


def _check_shares(layout: StreamLayout) -> None:
    """Check that the blocks of a cluster can share the columns of tiles.

    Raises:
        CodegenError: They cannot.
    """
    found, count = layout.products, layout.sharers
    why = ""
    if count > MAX_CLUSTER:
        why = f"a cluster has {MAX_CLUSTER} blocks at most"
    elif found.taken is not None:
        why = "an index chooses the codes, so blocks share no columns"
    elif found.num_columns % (count * _SHARED_BY):
        why = f"shares of {found.num_columns} columns would be no multiples of {_SHARED_BY}"
    elif found.is_grouped and layout.share % found.group:
        why = f"shares of {layout.share} columns would cut groups of {found.group}"
    elif layout.schedule.persistent_blocks < count:
        why = "there are fewer blocks"
    if why:
        raise errors.CodegenError(
            f"{layout.schedule}: {count} cooperating blocks, but {why}; give fewer"
        )
