"""List schedules of CUDA kernels that stream codes, best estimate first, and estimate their times.

The estimate counts bytes and the bytes that are under way. Copies do not hide what lies before and
after them, nor the other factor, nor loads of several rows of it from shared memory. The numbers
are fitted to times on H200s: of 147 kernels that the tuner chose, and of 80 others for 16 rows of
int4 and NF4.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import torch

from mirage_hf import errors
from mirage_hf.codegen import cuda_text
from mirage_hf.codegen.cuda_kernel import SHARED_MOST
from mirage_hf.codegen.placement import PlacedOp, placed
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.codegen.streams.finding import reads_codes, streamed_products
from mirage_hf.codegen.streams.layout import (
    SHARED_COLUMNS,
    StreamLayout,
    is_of_digits,
    other_rows,
    stream_layout,
    tiled_rows,
    tiles_of_rows,
)
from mirage_hf.codegen.streams.products import ROWS, Products
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.kernel import KernelOp
from mirage_hf.tune.traffic import read_bytes

#: Bytes of a row of a chunk to try, chunks that the ring holds, and warps that compute.
_CHUNK_BYTES = (512, 1024, 2048, 4096)
_STAGES = (2, 3, 4, 5, 6, 8, 12)
_WARPS = (4, 8, 16)

#: Blocks of a cluster that share the columns of a tile, to try. Clusters of two fill all
#: multiprocessors of an H200. Those of four fill 120 of 132, and were hardly ever faster.
SHARERS = (1, 2)

#: The same for kernels whose index chooses experts. They copy nothing before the previous kernel
#: ends, so a larger ring helps little. With eight stages, which fill the multiprocessor, a step of
#: gpt-oss took 4 µs a layer more than its kernels do by themselves. With four it took no more.
_CHOSEN_STAGES = (2, 3, 4)

#: The compute capability from which on threads can wait for copies of many bytes.
LEAST_SM = 90

#: The most schedules of an op. There are half as many besides whose tiles have half of the rows, or
#: are shared by as many blocks.
MOST = 24

#: µs from the request of a chunk to its end while memory is busy.
_COPY_US = 1.4

#: By how much the GPU must be busier with tiles of half as many rows for these to be tried.
_MORE_EVEN = 1.15

#: Instructions of a lane for a code that is looked up in two bytes of a table, as signed bytes and
#: as halves. Other codes take so few that copies take longer.
_AS_BYTES, _AS_HALVES = 5.3, 8.0

#: µs before a block begins to compute and after it ends, and more of them for one row and a table.
_ENDS_US, _TABLE_US = 1.29, 0.72

#: µs more that a cluster takes to begin and to exchange sums.
_SHARING_US = 1.35

#: µs that a warp takes to add its sums of a tile to those of the span before, for each row of the
#: other factor.
_SPAN_US = 0.0033

#: µs that a warp takes to compute 1,024 columns of one row of the other factor, that a block takes
#: to compute as many elements of several rows, and that a thread waits if it loads rows once more.
_DIGITS_US, _HALVES_US, _AGAIN_US = 0.2, 0.031, 0.78

#: How much longer than the loads alone the warps take to load rows of the other factor.
_LOADING = 1.32


def can_stream() -> bool:
    """Return whether such kernels can be compiled and launched here."""
    return not cuda_text.missing_tools()


def stream_schedules(op: KernelOp, device: Device = H200) -> list[tuple[Schedule, float]]:
    """Return schedules of kernels that stream the codes of an op, with their estimates in µs.

    The best come first. There are none if the op has no such kernel.
    """
    op = placed(op)
    if device.sm < LEAST_SM or not reads_codes(op) or not can_stream():
        return []
    return list(_listed(op, device))


@lru_cache(maxsize=512)
def _listed(op: PlacedOp, device: Device) -> tuple[tuple[Schedule, float], ...]:
    """Return what `stream_schedules` lists."""
    try:
        products = streamed_products(op)
    except errors.CodegenError:
        return ()
    if any(products.tensor(v).dtype is torch.float32 for v in products.read_columns):
        return ()  # digits have 22 bits, halves 11, and torch's products of float32 have 24
    every_sharers = SHARERS if products.taken is None else (1,)
    best = []
    for number, (sharers, rows) in enumerate(
        itertools.product(every_sharers, _rows_of_tiles(products, device))
    ):
        found = []
        for schedule in _space(products, device, rows, sharers):
            try:
                layout = stream_layout(op, schedule)
                found.append((estimated_stream_us(layout, device), layout.shared_bytes, schedule))
            except errors.CodegenError:
                continue
        best += sorted(found, key=_order)[: MOST // 2 if number else MOST]
    return tuple((schedule, us) for us, _, schedule in sorted(best, key=_order))


def _order(found: tuple[float, int, Schedule]) -> tuple[float, int, str]:
    """Return what estimates are sorted by. Of equal ones, less shared memory comes first."""
    us, shared_bytes, schedule = found
    return us, shared_bytes, repr(schedule)


def _space(products: Products, device: Device, rows: int, sharers: int) -> Iterator[Schedule]:
    """Yield schedules to estimate, whose tiles have so many rows, and so many blocks each."""
    inner, tiles = products.inner_columns, tiles_of_rows(products)
    if products.piece is not None:
        tiles[products.piece] = next_power_of_two(products.num_pieces)
    for axis in products.own_columns[1:]:
        tiles[axis] = next_power_of_two(products.block.axis(axis).size)
    row = next_power_of_two(products.row_bytes)
    # tiles of column-major words have more rows, so their chunks have fewer columns
    more = max(1, rows * len(products.products) // ROWS)
    lengths = dict.fromkeys(min(n // more, row) for n in _CHUNK_BYTES)
    every_stages = _STAGES if products.taken is None else _CHOSEN_STAGES
    blocks = device.sms // sharers * sharers
    for length, stages, warps in itertools.product(lengths, every_stages, _WARPS):
        columns = length * 8 // products.column_bits
        if columns % inner == 0:
            count = next_power_of_two(columns // inner)
            yield Schedule(
                tiles | tiled_rows(products, rows) | {products.own_columns[0]: count},
                num_warps=warps,
                num_stages=stages,
                cuda=True,
                cooperating_blocks=sharers,
                persistent_blocks=blocks,
            )


def _read(op: PlacedOp) -> int:
    """Return the bytes that a kernel reads, each counted once."""
    assert op.block is not None
    read: dict[int, int] = {}
    for i in op.block.inputs:
        for s in i.sources:
            index = op.operands[s].index
            read[index] = max(read.get(index, 0), read_bytes(i, op.operands, s))
    return sum(read.values())


def _rows_of_tiles(products: Products, device: Device) -> tuple[int, ...]:
    """Return the rows of a tile to try.

    For one row of the other factor, half as many are tried if blocks have more even work then.
    """
    whole, others = products.rows_of_each, other_rows(products)
    if products.is_column_major or not is_of_digits(products):
        return (whole, *others)
    if len(products.products) > 1 or not others:
        return (whole,)

    def share(rows: int) -> float:
        tiles = products.num_rows // rows
        blocks = min(device.sms, tiles)
        return tiles / (-(-tiles // blocks) * device.sms)

    return (whole, whole // 2) if share(whole // 2) > _MORE_EVEN * share(whole) else (whole,)


def estimated_stream_us(layout: StreamLayout, device: Device = H200) -> float:
    """Return the estimated time of a dependent launch in µs.

    Raises:
        CodegenError: A block needs more shared memory than there is.
    """
    if layout.shared_bytes > min(SHARED_MOST, device.shared_bytes):
        raise errors.CodegenError(
            f"{layout.schedule} needs {layout.shared_bytes} bytes of shared memory"
        )
    op = layout.products.op
    read = _read(op)
    uneven = layout.most_tiles * layout.walkers / layout.tiles
    in_a_block = layout.stages * layout.stored_rows * layout.chunk_bytes
    under_way = in_a_block * min(layout.blocks, device.sms)
    later = min(device.bandwidth, 1e6 * under_way / _COPY_US)
    pieces = layout.products.num_pieces
    in_first = min(1.0, layout.stages / (layout.most_tiles * layout.chunks * pieces))
    copy_us = 1e6 * read * uneven * (in_first / device.bandwidth + (1 - in_first) / later)
    codes = layout.products.num_rows * layout.products.num_columns * len(layout.products.products)
    decode_us = 1e6 * codes * uneven * _instructions_of_code(layout) / device.lane_rate
    sums = layout.most_tiles * layout.summing_warps * layout.batch
    between_us = _SPAN_US * (layout.spans - 1) * sums
    ends_us = _ENDS_US + _SHARING_US * (layout.sharers > 1)
    return ends_us + between_us + _factor_us(layout, device) + max(copy_us, decode_us)


def _factor_us(layout: StreamLayout, device: Device) -> float:
    """Return the µs that a block takes to compute the other factor, and to load several rows of it.

    For each tile, warps load all rows of a share, two bytes for each element. Copies hide little of
    that, because the ring is short. A multiprocessor loads a byte in the time of a lane's
    instruction.
    """
    products, share = layout.products, layout.share
    if layout.batch == 1:
        return _DIGITS_US * share / 1024 / layout.warps + _TABLE_US * bool(layout.table)
    loads_us = 1e6 * 2 * layout.batch * share * layout.most_tiles * device.sms / device.lane_rate
    if layout.sharers > 1:  # some warps may have nothing to do
        share = layout.rounds * layout.row_warps * SHARED_COLUMNS
    computed_us = _HALVES_US * layout.batch * share / 1024
    own = [v for v in products.read_columns if products.batch_stride(v)]
    at_once = layout.rows_at_once(layout.rounds * max(1, len(own)))
    again = layout.batch // layout.row_teams // at_once - 1
    return _LOADING * loads_us + computed_us + _AGAIN_US * again * layout.spans


def _instructions_of_code(layout: StreamLayout) -> float:
    """Return the instructions of a lane for a code that is looked up in two bytes. Otherwise 0."""
    if layout.halves is not None:
        return _AS_HALVES
    return _AS_BYTES if layout.table is not None and len(layout.table.planes) > 1 else 0.0
