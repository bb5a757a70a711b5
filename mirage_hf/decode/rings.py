"""Slots of a cache: how many there are, and how sliding layers share them in rings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mirage_hf.decode.control import Control

#: Capacities are multiples of it.
GRAIN = 256


def bucket(slots: int) -> int:
    """Round a number of cache slots up to a capacity.

    Capacities are multiples of GRAIN, and from 2048 on of 1/8 of the power of two below. Few
    capacities mean few captures, and at most 1/8 of a long cache is read in vain.
    """
    grain = max(GRAIN, (1 << (max(slots, 1).bit_length() - 1)) // 8)
    return -(-slots // grain) * grain


@dataclass(frozen=True)
class Ring:
    """How a sliding layer's keys and values lie in about as many slots as its window has.

    Token n of a row, counted without its left padding, lies in slot n mod (window − 1). So does the
    padding before it, until a token takes its slot. So a step sees the keys of slots [0, n), or of
    all slots, in any order. Attention kernels need not know about rings.

    The key of token n goes to the first slot after the slots that the step sees. For n ≥ window − 1
    this is the spare slot, window − 1. The step ends by moving that key over the oldest one
    (`turn`). A step that finds no row alive writes the spare slot only.

    Attributes:
        window: Keys that a query sees, its own included.
        slots: Slots of the memory, at least `window`.
    """

    window: int
    slots: int

    @property
    def length(self) -> int:
        """How many tokens the ring keeps. Token n lies in slot n mod `length`."""
        return self.window - 1

    @property
    def spare(self) -> int:
        """The slot after the kept tokens, which no token keeps."""
        return self.length

    def slot(self, control: Control) -> Tensor:
        """Return the slot (batch, 1) of a step's key.

        The step sees the slots before it, and its own.
        """
        token = control.length - control.lowest
        no_row_alive = ~control.alive.any()
        return token.clamp_max(self.spare).masked_fill(no_row_alive, self.spare)

    def turn(self, slab: Tensor, control: Control) -> None:
        """End a step for a slab (layers, batch, heads, slots, dim), before `control` moves on."""
        token = control.length - control.lowest[:, 0]
        nothing_moves = ~control.alive.any() | (token < self.length)
        target = (token % self.length).masked_fill(nothing_moves, self.spare)
        newest = slab[:, :, :, self.spare : self.window].clone()
        slab.scatter_(3, target.view(1, -1, 1, 1, 1).expand_as(newest), newest)

    def positions(self, length: int | Tensor, lowest: Tensor) -> Tensor:
        """Return which slot of a text lies in each slot of the ring (batch, window − 1).

        Args:
            length: Slots of the text, left padding included.
            lowest: (batch, 1): left padding.

        Returns:
            Slots of the text. They are below 0 for slots of the ring that hold nothing.
        """
        last = length - 1 - lowest
        slots = torch.arange(self.length, device=lowest.device)
        return lowest + last - (last - slots) % self.length

    def fill(self, memory: Tensor, states: Tensor, length: int) -> None:
        """Store the states that a text without padding leaves in the ring.

        Args:
            memory: The ring's (batch, heads, slots, dim).
            states: (batch, heads, n, dim) of the text's last n slots.
            length: Slots of the text.
        """
        if length <= self.length:
            memory[:, :, :length].copy_(states)
            return
        kept, first = states[:, :, -self.length :], length % self.length
        memory[:, :, first : self.length].copy_(kept[:, :, : self.length - first])
        memory[:, :, :first].copy_(kept[:, :, self.length - first :])

    def read(self, memory: Tensor, length: int, lowest: Tensor | None) -> Tensor:
        """Return the states of a text of `length` slots that the window keeps, in their order."""
        first = max(length - self.length, 0)
        if lowest is not None:
            slots = torch.arange(first, length, device=memory.device)
            return gather_slots(memory, (slots - lowest) % self.length)
        if not first:
            return memory[:, :, :length]
        oldest = length % self.length
        return torch.cat([memory[:, :, oldest : self.length], memory[:, :, :oldest]], 2)


#: For each layer, the ring that its cache lies in, if it lies in one.
Rings = tuple[Ring | None, ...]


def rings_of(windows: Sequence[int | None], capacity: int) -> tuple[Ring | None, ...]:
    """Return each layer's ring in a block. None if a ring would not save memory.

    Args:
        windows: For each layer the window that its cache slides over, None if it keeps all keys.
        capacity: Slots of the block.
    """
    return tuple(
        Ring(window, bucket(window))
        if window is not None and window > 1 and bucket(window) < capacity
        else None
        for window in windows
    )


def gather_slots(states: Tensor, slots: Tensor) -> Tensor:
    """Return the slots (batch, n) of states (batch, heads, slots, dim)."""
    index = slots[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)


def rings_variants(
    windows: Sequence[int | None],
) -> list[tuple[Rings, tuple[int | None, ...], tuple[int, int]]]:
    """Return the rings that a model's layers may lie in: none, and those of long caches.

    Each choice comes with the windows that give these rings, and with two capacities that do.
    """
    none = (None,) * len(windows)
    variants: list[tuple[Rings, tuple[int | None, ...], tuple[int, int]]] = [
        (none, none, (2 * GRAIN, 3 * GRAIN))
    ]
    lengths = [w for w in windows if w is not None]
    if lengths:
        sizes = bucket(max(lengths) + 2 * GRAIN), bucket(max(lengths) + 8 * GRAIN)
        rings, others = (tuple(rings_of(tuple(windows), size)) for size in sizes)
        if rings == others:
            variants.append((rings, tuple(windows), sizes))
    return variants
