"""The cache pool: blocks of memory, each leased to one `generate` call at a time."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence

import torch

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.rings import rings_of

#: Blocks kept between calls. One more pushes out the one that was idle longest.
KEEP_IDLE = 4
#: Idle blocks may keep one part in so many of a GPU's memory. Beyond that the longest idle are
#: freed, except the last call's.
IDLE_SHARE = 4


def most_idle(device: torch.device) -> float:
    """Return how many bytes of a device's memory idle blocks may keep."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory / IDLE_SHARE


class CachePool:
    """Blocks of cache memory, kept between calls, each leased to one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[CacheBlock] = []
        # weak: Ctrl-C may come between a lease and its end, and the block must not outlive its call
        self._leased: weakref.WeakSet[CacheBlock] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Bytes of device memory in all blocks, leased and idle."""
        with self._lock:
            return sum(block.bytes for block in (*self._idle, *self._leased))

    @property
    def blocks(self) -> Sequence[tuple[int, int]]:
        """(batch, capacity) of every block, leased ones first."""
        with self._lock:
            return [(b.batch, b.capacity) for b in (*self._leased, *self._idle)]

    def lease(
        self,
        batch: int,
        capacity: int,
        windows: tuple[int | None, ...],
        device: torch.device,
        axes: int = 0,
        source_slots: int = 0,
    ) -> CacheBlock:
        """Return a block that no other call uses until `give_back`.

        Its memory appears as the prefill fills it.
        """
        block = self._take_idle(batch, capacity, windows, device, axes, source_slots)
        if block is None:
            block = CacheBlock(batch, capacity, windows, device, axes, source_slots)
            with self._lock:
                self._leased.add(block)
        block.make_room = self.drop_idle
        if block.done is not None:
            torch.cuda.current_stream(device).wait_event(block.done)
        return block

    def _take_idle(
        self,
        batch: int,
        capacity: int,
        windows: tuple[int | None, ...],
        device: torch.device,
        axes: int,
        source_slots: int,
    ) -> CacheBlock | None:
        wanted = batch, capacity, rings_of(windows, capacity), device, axes, source_slots
        with self._lock:
            for block in reversed(self._idle):
                has = block.batch, block.capacity, block.rings, block.device, block.axes
                if (*has, block.source_slots) == wanted:
                    self._idle.remove(block)
                    block.windows = windows
                    self._leased.add(block)
                    return block
        return None

    def give_back(self, block: CacheBlock, used: int) -> None:
        """End a lease; the first `used` slots may have been written."""
        block.dirty = max(block.dirty, used)
        block.begin(None)
        # an idle block that knew the pool would keep both alive after their model is gone
        block.make_room = CacheBlock.make_room
        if block.device.type == "cuda":
            block.done = torch.cuda.Event()
            block.done.record(torch.cuda.current_stream(block.device))
        with self._lock:
            self._leased.remove(block)
            if not block.stale:
                self._idle.append(block)
            dropped = [block] if block.stale else self._surplus()
        for each in dropped:
            each.drop_memory()

    def _surplus(self) -> list[CacheBlock]:
        """Take out the idle blocks that are not kept, the longest idle first.

        The block of the last call is kept whatever its size. The next call is likely to be alike,
        and without the block it would capture its graphs again.
        """
        kept: list[CacheBlock] = []
        dropped: list[CacheBlock] = []
        room = {block.device: most_idle(block.device) for block in self._idle}
        for block in reversed(self._idle):
            if not kept or (len(kept) < KEEP_IDLE and block.bytes <= room[block.device]):
                kept.append(block)
                room[block.device] -= block.bytes
            else:
                dropped.append(block)
        self._idle = kept[::-1]
        return dropped

    def drop_idle(self) -> None:
        """Free every idle block and its graphs now."""
        with self._lock:
            idle, self._idle = self._idle, []
        for block in idle:
            block.drop_memory()

    def release(self) -> None:
        """Free idle blocks and their graphs now, and leased ones when their calls end."""
        with self._lock:
            for block in self._leased:
                block.stale = True
        self.drop_idle()
