"""Cooperating blocks: how the last block adds the partial results of all blocks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from mirage_hf.codegen.plan import stages
from mirage_hf.codegen.triton_values import NEUTRAL, ValueWriter, maximum
from mirage_hf.graph.block import Accumulator, Stage


class CombineWriter(ValueWriter):
    """Writes the code after a loop that several blocks share."""

    def combine(self, stage: Stage) -> None:
        """Store this block's partial results, and let only the last block to finish go on.

        The last block adds the partial results of all blocks, always in the same order.
        """
        blocks, floats = self.plan.schedule.cooperating_blocks, self.cooperation.partial_floats
        maxima = stages.running_maxima(stage)
        accumulators = sorted(stage.accumulators, key=lambda a: a.out not in maxima)
        starts = self._starts(accumulators)
        self.line()
        self.line(
            f"# {blocks} cooperating blocks hold partial results of these sums; "
            "the last one to finish adds all of them"
        )
        for acc in accumulators:
            for _ in self.each_lane(acc.out):
                base = f"tl.program_id(0) * {floats}"
                place, mask = self._partial(acc, base, starts[acc.out])
                self.line(f"tl.store({place}, {self.value[acc.out]}{mask})")
        self.line("tl.debug_barrier()  # all threads have stored before one of them says so")
        self.line('arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")')
        self.line(f"if arrived == {blocks - 1}:")
        self.indent += 1
        self.line("tl.store(counters_ptr + tile, 0)  # for the next launch")
        for acc in accumulators:
            for _ in self.each_lane(acc.out):
                self._gather(acc, starts, acc.out in maxima)

    def _starts(self, accumulators: Sequence[Accumulator]) -> dict[str, int]:
        """Return where each accumulator begins among a block's partial results."""
        sizes = [self.tiling.numel(self.block.carried[a.out]) for a in accumulators]
        starts = itertools.accumulate(sizes, initial=0)
        return dict(zip((a.out for a in accumulators), starts, strict=False))

    def _gather(self, acc: Accumulator, starts: Mapping[str, int], is_running: bool) -> None:
        """Combine the partial results that all blocks of the tile stored for an accumulator.

        They are added block by block, so that no thread needs what another thread has. When the
        blocks were one more dim to sum over, the partial results lay in several warps, and adding
        32 of them took 70 µs. Loads come in groups, so that their latencies overlap. Many blocks
        take a loop.

        Args:
            acc: The accumulator.
            starts: Where each accumulator begins among a block's partial results.
            is_running: True for a maximum that sums are relative to (online softmax).
        """
        name, dims = self.value[acc.out], self.layout.value_dims(acc.out)
        blocks = self.plan.schedule.cooperating_blocks
        together, looped = self.cooperation.gathered(acc), self.cooperation.gathers_in_loop
        if looped:
            shape = ", ".join(str(self.cooperation.counted(a)) for a in dims)
            self.line(f"{name}_few = tl.full([{shape}], {NEUTRAL[acc.kind]}, tl.float32)")
            self.line(f"for some in range(0, {blocks}, {together}):")
            self.indent += 1
        for first in (0,) if looped else range(0, blocks, together):
            self._gather_group(acc, starts, range(first, first + together), looped)
        self.indent -= looped
        if is_running:
            self.line(f'{name}_now = tl.where({name}_few == float("-inf"), 0.0, {name}_few)')
            for n in range(0 if looped else blocks):
                self._weigh(acc, n, f"{name}_each{n}")
        self.line(f"{name} = {self._padded(f'{name}_few', dims)}")

    def _gather_group(
        self, acc: Accumulator, starts: Mapping[str, int], group: range, looped: bool
    ) -> None:
        """Load the partial results of a group of blocks, then add them."""
        name, dims = self.value[acc.out], self.layout.value_dims(acc.out)
        shift = next((a for a in self.cooperation.shared_accumulators if a.out == acc.shift), None)
        for n in group:
            self.line(f"{name}_each{n} = {self._load_partial(acc, starts, n, looped)}")
        if looped and shift is not None:
            for n in group:
                self._weigh(shift, n, self._load_partial(shift, starts, n, looped))
        for n in group:
            each = f"{name}_each{n}"
            if shift is not None:
                weight = f"{self.value[shift.out]}_each{n}"
                each += f" * {self.spread(weight, self.layout.value_dims(shift.out), dims)}"
            if n == 0 and not looped:
                combined = each
            elif acc.kind == "sum":
                combined = f"{name}_few + {each}"
            else:
                combined = maximum(f"{name}_few", each)
            self.line(f"{name}_few = {combined}")

    def _weigh(self, shift: Accumulator, n: int, own: str) -> None:
        """Define the factor that rescales the sums of block `n`. `own`: the block's maximum."""
        name = self.value[shift.out]
        self.line(f"{name}_each{n} = tl.exp({own} - {name}_now)")

    def _load_partial(
        self, acc: Accumulator, starts: Mapping[str, int], n: int, looped: bool
    ) -> str:
        """Return a load of one block's partial results, without rows that only pad its tile.

        Args:
            acc: The accumulator.
            starts: Where each accumulator begins among a block's partial results.
            n: The number of the block. If `looped`, it counts from the variable `some` on.
            looped: True inside the loop over groups of blocks.
        """
        number = f"{'some + ' if looped else ''}{n}"
        blocks = self.plan.schedule.cooperating_blocks
        base = f"(tile * {blocks} + {number}) * {self.cooperation.partial_floats}"
        counted = {a: self.cooperation.counted(a) for a in self.layout.value_dims(acc.out)}
        place, _ = self._partial(acc, base, starts[acc.out], counted)
        dims, mask = tuple(counted), list[str]()
        for a, count in counted.items():
            size = self.block.axis(a).size
            if count == self.tiling.tile(a):
                mask += self.mask([a], dims)
            elif count > size:
                mask.append(self.spread(f"(tl.arange(0, {count}) < {size})", [a], dims))
        arguments = [place, *([f"mask={' & '.join(mask)}", "other=0.0"] if mask else [])]
        return f'tl.load({", ".join(arguments)}, cache_modifier=".cg")'

    def _padded(self, text: str, dims: Sequence[str]) -> str:
        """Return a gathered value padded to its whole tile with copies of its elements."""
        counted = [self.cooperation.counted(a) for a in dims]
        copies = [self.tiling.tile(a) // n for a, n in zip(dims, counted, strict=True)]
        if all(c == 1 for c in copies):
            return text
        indices, shape = list[str](), list[str]()
        for c, n in zip(copies, counted, strict=True):
            if c > 1:
                indices.append("None")
                shape.append(str(c))
            indices.append(":")
            shape.append(str(n))
        spread = f"tl.broadcast_to({text}[{', '.join(indices)}], [{', '.join(shape)}])"
        return f"tl.reshape({spread}, [{', '.join(str(self.tiling.tile(a)) for a in dims)}])"

    def _partial(
        self, acc: Accumulator, base: str, start: int, counted: Mapping[str, int] | None = None
    ) -> tuple[str, str]:
        """Return the addresses of an accumulator's partial results, and their mask.

        The partial results are row-major from `base` + `start`, one lane after another.

        Args:
            acc: The accumulator.
            base: Where the block's partial results begin.
            start: Where the accumulator begins among them.
            counted: How many elements along each axis to read, if not all.
        """
        dims = self.layout.value_dims(acc.out)
        step = self.tiling.numel(dims)
        if self.lane is not None and self.layout.unrolled in self.block.carried[acc.out]:
            start += self.lane * step
        terms = [f"scratch_ptr + {base}", *([str(start)] if start else [])]
        for a in dims:
            step //= self.tiling.tile(a)
            count = counted[a] if counted else self.tiling.tile(a)
            index = self.spread(f"tl.arange(0, {count})", [a], dims)
            terms.append(index if step == 1 else f"{index} * {step}")
        mask = self.mask(dims, dims)
        return " + ".join(terms), f", mask={' & '.join(mask)}" if mask else ""
