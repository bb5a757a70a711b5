"""The kernel that ends a decoding step of caches that lie in rings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mirage_hf.codegen.kernel_launch import KernelLaunch, launch
from mirage_hf.codegen.optional_triton import tl, triton
from mirage_hf.codegen.schedule import next_power_of_two
from mirage_hf.decode.control import Control
from mirage_hf.decode.kernels.sizes import check_tensor
from mirage_hf.decode.rings import Ring

#: Numbers that a block copies: 16 bytes a thread of 16-bit numbers.
MAX_BLOCK = 1024


@triton.jit
def ring_kernel(
    length_ptr,
    lowest_ptr,
    alive_ptr,
    first_ptr,
    second_ptr,
    overlaps: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    SLABS: tl.constexpr,
    SLAB_BLOCKS: tl.constexpr,
    SPARE: tl.constexpr,
    SLOTS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute slab[layer, row, :, n mod SPARE] = slab[layer, row, :, SPARE].

    This is done for rows with n = length − lowest[row] ≥ SPARE, if any row is alive.

    There are two slabs (layers, ROWS, heads, SLOTS, DIM), of keys and of values. The first
    SLAB_BLOCKS blocks work on the first slab, the others on the second.

    References: `Ring`, whose `turn` does the same with torch.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    length = tl.load(length_ptr)
    alive = any_alive(alive_ptr, ROWS, ROWS_TILE)
    if part < SLAB_BLOCKS:
        _move_newest(
            first_ptr,
            part,
            lowest_ptr,
            length,
            alive,
            ROWS,
            SPARE,
            SLOTS,
            DIM,
            WIDTH,
            BLOCK,
            BLOCKS,
        )
    elif SLABS > 1:
        _move_newest(
            second_ptr,
            part - SLAB_BLOCKS,
            lowest_ptr,
            length,
            alive,
            ROWS,
            SPARE,
            SLOTS,
            DIM,
            WIDTH,
            BLOCK,
            BLOCKS,
        )


@triton.jit
def _move_newest(
    slab_ptr,
    part,
    lowest_ptr,
    length,
    alive,
    ROWS: tl.constexpr,
    SPARE: tl.constexpr,
    SLOTS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Move a block of one row's and layer's numbers from the spare slot to its place."""
    layer_row = part // BLOCKS
    n = part % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    token = length - tl.load(lowest_ptr + layer_row % ROWS)
    if alive & (token >= SPARE):
        head_slots = n // DIM * SLOTS
        spare_ptr = (
            slab_ptr
            + layer_row.to(tl.int64) * (WIDTH * SLOTS)
            + (head_slots + SPARE) * DIM
            + n % DIM
        )
        newest = tl.load(spare_ptr, mask=n < WIDTH)
        tl.store(spare_ptr + (token % SPARE - SPARE) * DIM, newest, mask=n < WIDTH)


@triton.jit
def any_alive(alive_ptr, ROWS: tl.constexpr, ROWS_TILE: tl.constexpr):
    """Return whether any of ROWS rows is alive."""
    m = tl.arange(0, ROWS_TILE)
    alive = tl.load(alive_ptr + m, mask=m < ROWS, other=0)
    return tl.max(alive.to(tl.int32), axis=0) != 0


@lru_cache(maxsize=256)
def ring_launch(ring: Ring, shape: tuple[int, ...], slabs: int) -> KernelLaunch:
    """Return the launch for one or two slabs of a shape (layers, batch, heads, slots, dim)."""
    layers, batch, heads, slots, dim = shape
    width = heads * dim
    block = min(MAX_BLOCK, next_power_of_two(width))
    blocks = -(-width // block)
    slab_blocks = layers * batch * blocks
    constants = {
        "ROWS": batch,
        "ROWS_TILE": next_power_of_two(batch),
        "SLABS": slabs,
        "SLAB_BLOCKS": slab_blocks,
        "SPARE": ring.spare,
        "SLOTS": slots,
        "DIM": dim,
        "WIDTH": width,
        "BLOCK": block,
        "BLOCKS": blocks,
    }
    return KernelLaunch(ring_kernel, slabs * slab_blocks, constants)


def turn_rings(control: Control, slabs: Sequence[tuple[Ring, Tensor]], *, by_kernel: bool) -> None:
    """End a step of caches that lie in rings as `Ring.turn` does. Keys and values take one launch.

    Args:
        control: State of the call, before it moves on.
        slabs: Rings and their memory (layers, batch, heads, slots, dim), contiguous.
        by_kernel: Launch the kernel, otherwise run torch.

    Raises:
        InputError: A tensor does not fit.
    """
    if not by_kernel:
        for ring, slab in slabs:
            ring.turn(slab, control)
        return
    batch, device = control.ids.shape[0], control.ids.device
    alike: defaultdict[tuple[Ring, tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)
    for n, (ring, slab) in enumerate(slabs):
        layers, _, heads, _, dim = slab.shape
        shape: tuple[int, ...] = (layers, batch, heads, ring.slots, dim)
        check_tensor(f"slabs[{n}]", slab, shape, slab.dtype, device)
        alike[ring, shape, slab.dtype].append(slab)
    state = [control.length, control.lowest, control.alive.view(torch.uint8)]
    for (ring, shape, _), memory in alike.items():
        for first in range(0, len(memory), 2):
            pair = memory[first : first + 2]
            launch(ring_launch(ring, shape, len(pair)), [*state, pair[0], pair[-1]])
