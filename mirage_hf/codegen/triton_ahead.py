"""Loads of later loop steps into registers as Triton text."""

from __future__ import annotations

from collections.abc import Sequence

from mirage_hf.codegen.triton_loads import LoadWriter
from mirage_hf.codegen.triton_tiles import Ahead
from mirage_hf.graph.block import BlockInput


class AheadWriter(LoadWriter):
    """Writes loads of tiles that a later loop step reads."""

    def load_ahead(self, inputs: Sequence[BlockInput], first: bool) -> None:
        """Load inputs one loop step ahead.

        Some are factors of asynchronous products that other code reads too (`second_load`). Others
        are too small for an asynchronous copy (`Pipelining.loaded_ahead`). Triton copies an input
        ahead only if nothing except products reads it, so each step would wait for these loads.

        Args:
            inputs: The inputs.
            first: True before the loop, False at the end of a step.
        """
        if not inputs or not (first or self.cooperation.steps_per_block > 1):
            return
        loop = str(self.tiling.loop)
        axis, tile = self.axis[loop], self.tiling.tile(loop)
        start = self._start_of_loop()
        first_at = f"{start} + tl.arange(0, {tile})" if tile > 1 else start
        at = first_at if first else f"{axis} + {tile}"
        self.line(f"{axis}_next = {at}")
        self.bound(loop, f"{axis}_next")
        if self.pipelining.holds_words_ahead:
            inside = f"{axis}_next < {start} + {self.share(loop)}"
            if self.masks.needed(loop):
                inside = f"{axis}_next_in & ({inside})"
            self.line(f"{axis}_next_in = {inside}")
        elif not self.masks.needed(loop):
            self.line(f"{axis}_next_in = {axis}_next < {self.block.axis(loop).size}")
        for i in inputs:
            self._load_ahead(i, Ahead(f"{axis}_next", f"{axis}_next_in"), "next")

    def _load_ahead(self, i: BlockInput, ahead: Ahead, name: str) -> None:
        """Load an input for a later loop step. `name` ends the name of what is loaded."""
        for _ in self.each_lane(i.name):
            self._load_lane_ahead(i, ahead, name)

    def _load_lane_ahead(self, i: BlockInput, ahead: Ahead, name: str) -> None:
        value = self.value[i.name]
        pointer, shift = self.selected_source(i)
        if self.holds_words(i):
            words = self.load_words(i, pointer, self.policy(i), shift, ahead)
            self.line(f"{value}_words_{name} = {words}")
            return
        # A policy takes three instructions for each load.
        policy = "evict_last" if self.layout.mma or i.name in self.pipelining.loaded_twice else None
        load = self.read(i, pointer, shift=shift, policy=policy, ahead=ahead)
        if i.name in self.pipelining.loaded_twice:
            self.line(f"{value}_again = {load}")
        elif not self.layout.mma:  # it takes fewer registers as it is stored
            self.line(f"{value}_{name} = {load}")
        else:
            self.line(f"{value}_{name} = {self.to_float32(i, load)}")

    def take_loaded(self, i: BlockInput, name: str) -> None:
        """Let a step use what was loaded for it. `name` is that of `_load_ahead`."""
        for _ in self.each_lane(i.name):
            value, what = self.value[i.name], ""
            if self.holds_words(i):
                value, what = f"{value}_words", "words"
            self.is_new(i.name, what)
            loaded = f"{value}_{name}"
            if not (what or self.layout.mma):
                loaded = self.to_float32(i, loaded)
            self.line(f"{value} = {loaded}")

    # -- trips of several steps -------------------------------------------------------------------

    def load_first_trip(self, inputs: Sequence[BlockInput]) -> None:
        """Load what the steps of the first trip read."""
        if inputs:
            self._load_steps(inputs, range(self.pipelining.steps_per_trip), first=True)

    def load_next_trip(self, inputs: Sequence[BlockInput], steps: range) -> None:
        """Load what some steps of the next trip read."""
        if inputs and not self.pipelining.takes_one_trip:
            self._load_steps(inputs, steps, first=False)

    def _load_steps(self, inputs: Sequence[BlockInput], steps: range, first: bool) -> None:
        """Load what some steps of a trip read, one input after the other.

        Args:
            inputs: The inputs.
            steps: The steps.
            first: True for the first trip, False for the one after the current trip.
        """
        loop = str(self.tiling.loop)
        axis, tile = self.axis[loop], self.tiling.tile(loop)
        length = self.pipelining.steps_per_trip * tile
        start, follows = [*self.loop_starts()], ""
        if not first:
            follows = f"{axis}_follows"
            self.line(f"{follows} = {axis}_trip < {self.share(loop) - length}")
            start.append(f"{axis}_trip")
        loads = []
        for n in steps:
            at = f"{axis}_next{n}"
            offset = n * tile if first else length + n * tile
            terms = start + ([str(offset)] if offset or not start else [])
            begins = f"({' + '.join(terms)})" if len(terms) > 1 else terms[0]
            terms += [f"tl.arange(0, {tile})"] if tile > 1 else []
            self.line(f"{at} = {' + '.join(terms)}")
            self.bound(loop, at)
            inside = f"{at}_in" if self.masks.needed(loop) else ""
            loads.append((n, Ahead(at, inside, follows, begins)))
        for i in inputs:
            for n, ahead in loads:
                self._load_ahead(i, ahead, f"next{n}")

    # -- where a block begins and ends ------------------------------------------------------------

    def _start_of_loop(self) -> str:
        return " + ".join(self.loop_starts()) or "0"

    def share(self, loop: str) -> int:
        """Return the elements of the loop axis that a block visits."""
        if self.plan.schedule.cooperating_blocks > 1:
            return self.cooperation.steps_per_block * self.tiling.tile(loop)
        return self.block.split_size(loop)
