"""Write a planned block graph as the text of one Triton kernel.

From top to bottom, a kernel has its offsets, early loads and prefetches, the grid dependency wait,
the stages, and the stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirage_hf.codegen import triton_math
from mirage_hf.codegen.plan import KernelPlan, stages
from mirage_hf.codegen.triton_combine import CombineWriter
from mirage_hf.graph.block import BlockInput, BlockOp, Role, Stage

#: Inputs that the loop does not change are loaded before it if they have at most this size. Then
#: the loop hides their latency.
EARLY_ELEMENTS_PER_THREAD = 8

#: Elements of constants that a kernel without a loop holds during its grid dependency wait.
HELD_ELEMENTS_PER_THREAD = 64

_WARP = 32
_LAUNCH_NEXT = "tl.extra.cuda.gdc_launch_dependents()"


@dataclass(frozen=True)
class KernelText:
    """The text of one kernel, and what a launch of it needs."""

    name: str
    source: str
    #: Names of the helper functions that it calls.
    helpers: tuple[str, ...]
    #: Pairs (pointer name, position). Positions count the op's operands, then its outputs.
    arguments: tuple[tuple[str, int], ...]
    #: Floats of scratch memory. If there are any, its pointer and that of the counters follow.
    scratch: int
    #: Counters of arrived blocks, one per tile.
    counters: int


def write_kernel(plan: KernelPlan, name: str) -> KernelText:
    """Write the kernel of a plan.

    Raises:
        CodegenError: If it cannot be written.
    """
    return _KernelWriter(plan, name).write()


class _KernelWriter(CombineWriter):
    """Writes the text of one kernel, top to bottom."""

    def write(self) -> KernelText:
        self.offsets()
        self.hold_tables()
        for i in self.block.inputs:
            if self.is_selected(i) and self.block.role(str(i.joined)) is Role.GRID:
                self.select(i)
        early = self._early_inputs()
        for i in early:
            if self.tiling.is_constant(i) and self.holds_words(i):
                self.hold_words(i)
            elif self.tiling.is_constant(i):
                self.load(i)
        self._load_first_words()
        self._load_readable_before_wait()
        self._wait()
        for i in self._loop_bounds():
            self.load_bounds(i)
        for i in self.block.inputs:
            if not self.tiling.has_index_in_loop(i):
                self.load_index(i)
        for i in (*early, *self._whole_inputs()):
            if not self.holds_words(i):  # codes are decoded where they are needed
                self.load(i)
        for number, stage in self.plan.stages:
            self.running = stages.running_maxima(stage)
            self._stage(number, stage)
        self.running = {}
        self._store_outputs()
        return self._text()

    def _store_outputs(self) -> None:
        if self.tiling.may_overwrite_inputs:
            self.line(
                "tl.debug_barrier()"
                "  # outputs may be written over inputs, which some threads read for others"
            )
        for o, pointer in zip(self.block.outputs, self.out_pointers, strict=True):
            if self.tiling.loop not in o.axes or not self.tiling.is_looped:
                for _ in self.each_lane(o.value):
                    self.store(o, pointer, self.wide(o.value))

    def _text(self) -> KernelText:
        body = "\n".join(self.lines)
        names = [name for name, _ in self.arguments]
        shares_loop = bool(self.cooperation.shared_accumulators)
        if shares_loop:
            names += ["scratch_ptr", "counters_ptr"]
        parameters = ", ".join([*names, "overlaps: tl.constexpr"])
        source = f"@triton.jit\ndef {self.name}({parameters}):\n{body}\n"
        called = triton_math.helpers_of(body)
        return KernelText(
            self.name,
            source,
            called,
            tuple(self.arguments),
            self.cooperation.scratch,
            self.tiling.num_tiles if shares_loop else 0,
        )

    # -- before the grid dependency wait ----------------------------------------------------------

    def _registers_per_thread(self, i: BlockInput) -> float:
        """Return the registers that a thread needs to hold its elements, or words, of an input."""
        threads = _WARP * self.plan.schedule.num_warps
        return self.tiling.numel(self.block.input_axes(i)) / threads / self.codes_per_word(i)

    def _early_inputs(self) -> list[BlockInput]:
        """Return the inputs to load early, so that other work hides their latency.

        With a loop they are the small inputs that the loop does not change. Without a loop they
        are as many constants as fit.
        """
        early, room = [], float(HELD_ELEMENTS_PER_THREAD)
        for i in self.block.inputs:
            elements = self._registers_per_thread(i)
            if self.tiling.is_looped:
                is_fixed = self.tiling.loop not in i.carried
                if is_fixed and elements <= EARLY_ELEMENTS_PER_THREAD:
                    early.append(i)
            elif self.tiling.is_constant(i) and elements <= room:
                room -= elements
                early.append(i)
        return early

    def _load_first_words(self) -> None:
        """Load what the first loop step reads of constants, if words are held one step ahead."""
        stage = next((s for s in self.block.stages if s.loop), None)
        if stage is None or not self.pipelining.holds_words_ahead:
            return
        read = stage.reads
        ahead = self.pipelining.loaded_ahead.intersection(read)
        constants = [i for i in self.block.inputs if i.name in ahead and self.tiling.is_constant(i)]
        if self.pipelining.walks_trips:
            self.load_first_trip(constants)
        else:
            self.load_ahead(constants, first=True)
        self.first_words = frozenset(i.name for i in constants)

    def _load_readable_before_wait(self) -> None:
        """Load bounds, positions and indices that may be read before the wait.

        Then the tiles within the bounds, and those that an index chooses, can be prefetched.
        """
        readable = self.plan.op.readable_before_wait
        for i in self.block.inputs:
            is_early = i.taken is not None and i.taken.index in readable
            if is_early and not self.tiling.has_index_in_loop(i):
                self.load_index(i)
            if i.bounds is not None and readable.issuperset(i.sources):
                self.load_bounds(i)
        for o, pointer in zip(self.block.outputs, self.out_pointers, strict=True):
            append = self.tiling.append_of(o)
            if append is None or append.position not in readable:
                continue
            has_lanes = self.layout.unrolled in self.block.carried[o.value]
            is_in_loop = self.tiling.loop is not None and o.axes[0] == self.tiling.loop
            if not has_lanes and not is_in_loop:
                self.load_slot(o, pointer, append)
        bounds = (i for i in self._loop_bounds() if readable.issuperset(i.sources))
        first = next(bounds, None)
        if first is not None:
            self._trim(first)

    def _loop_bounds(self) -> list[BlockInput]:
        """Return the bounds that decide where a loop begins."""
        bounds = [self.loop_bounds.trimming(s) for s in self.block.stages]
        return [i for i in bounds if i is not None]

    def _whole_inputs(self) -> list[BlockInput]:
        """Return the inputs to load before the first stage if the loop has one trip.

        These are the inputs that are not constant, up to a budget of registers. Loading them
        together overlaps their latencies.
        """
        if self.tiling.is_looped or self.tiling.loop is None:
            return []
        whole, room = [], float(HELD_ELEMENTS_PER_THREAD) * 2
        for i in self.block.inputs:
            elements = self._registers_per_thread(i)
            if i.bounds is None and not self.tiling.is_constant(i) and elements <= room:
                room -= elements
                whole.append(i)
        return whole

    def _wait(self) -> None:
        """Load or prefetch tiles that allow it, then wait for earlier launches."""
        loaded = self.plan.cached_before_wait
        if loaded:
            self.line("# the previous launch does not write these rows")
        for i in loaded:
            self.load(i)
        prefetched = [i for i in self._prefetched_inputs() if i not in loaded]
        prefetches = [line for i in prefetched for line in self.prefetch(i)]
        wait = [*prefetches, "tl.extra.cuda.gdc_wait()"]
        if self.plan.triggers_early:
            comment = "  # the next kernel reads only constants before its own wait"
            self.lines_if("overlaps", [_LAUNCH_NEXT + comment, *wait])
        else:
            self.lines_if("overlaps", [*wait, _LAUNCH_NEXT])

    def _prefetched_inputs(self) -> list[BlockInput]:
        loop = self.tiling.loop
        # This block's share of the bounds is known only once the bounds are, after the wait.
        is_start_unknown = self.loop_bounds.are_split and self.trimmed is None
        if not self.plan.schedule.prefetch_steps or not loop or is_start_unknown:
            return []
        return [
            i
            for i in self.block.inputs
            if loop in i.axes
            and self.tiling.prefetchable(i)
            and (self.tiling.is_looped or not self.tiling.is_constant(i))
        ]

    # -- stages -----------------------------------------------------------------------------------

    def _stage(self, number: int, stage: Stage) -> None:
        title = f"# stage {number}"
        if stage.loop:
            sums = [f", {a.out} = {a.kind} of {a.arg}" for a in stage.accumulators]
            title += f": over {stage.loop}" + "".join(sums)
        self.line()
        self.line(title)
        if stage.loop and self.tiling.is_looped:
            self._loop(stage, stage.loop)
            return
        self.body(stage, stage.body)
        for acc in stage.accumulators:
            for _ in self.each_lane(acc.out):
                self.accumulate_whole(acc)

    def _loop(self, stage: Stage, loop: str) -> None:
        """Write a loop of several steps.

        Values that are the same in every step come before it. What accumulators still have to
        reduce comes after it.
        """
        invariant = stages.loop_invariant(stage)
        for op in invariant:
            self.op(op)
        read = stage.reads
        inputs = sorted(
            (i for i in self.block.inputs if i.name in read),
            key=lambda i: -self.tiling.numel(self.block.input_axes(i)),
        )
        for i in inputs:
            if loop not in i.carried:
                self.load(i)
            elif i.bounds is not None:
                self.load_bounds(i)
        self._trim(self.loop_bounds.trimming(stage))
        for acc in stage.accumulators:
            for _ in self.each_lane(acc.out):
                self.start_accumulator(stage, acc)
        twice, small = self._loaded_a_step_ahead(inputs)
        left = [i for i in small if i.name not in self.first_words]
        self.first_words = frozenset()
        body = [op for op in stage.body if op not in invariant]
        if self.pipelining.walks_trips:
            self.load_first_trip(left)
            self.line(self._trip_head(loop))
            self.indent += 1
            self._trip(stage, loop, inputs, body)
        else:
            self.load_ahead([*twice, *left], first=True)
            self.line(self._loop_head(stage, loop))
            self.indent += 1
            self._step(stage, loop, inputs, body)
        self.indent -= 1
        for acc in stage.accumulators:
            self.reduce_after_loop(stage, acc)
        self.written = {w for w in self.written if loop not in self.block.carried.get(w[1], ())}
        self.forget_indices_of_loop()
        self.trimmed = None
        if self.plan.schedule.cooperating_blocks > 1:
            self.combine(stage)

    def _loaded_a_step_ahead(
        self, inputs: Sequence[BlockInput]
    ) -> tuple[list[BlockInput], list[BlockInput]]:
        """Return the inputs to load one step ahead: those loaded twice, and the small ones."""
        pipelining = self.pipelining
        twice = [i for i in inputs if i.name in pipelining.loaded_twice and len(i.sources) == 1]
        return twice, [i for i in inputs if i.name in pipelining.loaded_ahead]

    def _loop_head(self, stage: Stage, loop: str) -> str:
        """Return the first line of a loop. It runs over this block's share, inside the bounds.

        It takes no step if an index chooses nothing, where tensor cores multiply blocks of rows.
        """
        axis, tile = self.axis[loop], self.tiling.tile(loop)
        length = self.block.split_size(loop)
        if self.plan.schedule.cooperating_blocks > 1:
            length = self.cooperation.steps_per_block * tile
        ends = f"0, {length}, {tile}"
        indices = self.loop_bounds.skipped_without(stage) if self.layout.dots else []
        if indices:
            chosen = " & ".join(x for i in indices for x in self.taken_inside(i, []))
            ends = f"0, tl.where({chosen}, {length}, 0), {tile}"
        if self.trimmed is not None:
            ends = f"0, {axis}_last - {axis}_first, {tile}"
        num_stages = self.plan.schedule.num_stages
        steps = f"tl.range({ends}, num_stages={num_stages})" if num_stages > 1 else f"range({ends})"
        return f"for {axis}{'_step' if self.loop_starts() else '0'} in {steps}:"

    def _step(
        self, stage: Stage, loop: str, inputs: Sequence[BlockInput], body: Sequence[BlockOp]
    ) -> None:
        """Write one step of a loop."""
        axis, tile, starts = self.axis[loop], self.tiling.tile(loop), self.loop_starts()
        twice, small = self._loaded_a_step_ahead(inputs)
        if starts:
            self.line(f"{axis}0 = {' + '.join(starts)} + {axis}_step")
        self.line(f"{axis} = {axis}0 + tl.arange(0, {tile})" if tile > 1 else f"{axis} = {axis}0")
        self.bound(loop)
        for i in small:
            self.take_loaded(i, "next")
        self.load_ahead(small, first=False)
        for i in inputs:
            self.load(i)
        self.written |= {("again", i.name, None) for i in twice}
        self._compute_step(stage, loop, body)
        self.load_ahead(twice, first=False)

    def _compute_step(self, stage: Stage, loop: str, body: Sequence[BlockOp]) -> None:
        """Write what a step computes, adds up and stores."""
        self.body(stage, body)
        maxima = stages.running_maxima(stage)
        for acc in stage.accumulators:
            if acc.out not in maxima:
                for _ in self.each_lane(acc.out):
                    self.accumulate(stage, acc)
        for o, pointer in zip(self.block.outputs, self.out_pointers, strict=True):
            if loop in o.axes and any(op.out == o.value for op in stage.body):
                for _ in self.each_lane(o.value):
                    self.store(o, pointer, self.wide(o.value))

    def _trip_head(self, loop: str) -> str:
        """Return the first line of a loop whose trips take several steps each."""
        axis, length = self.axis[loop], self.pipelining.steps_per_trip * self.tiling.tile(loop)
        ends = f"0, {self.share(loop)}, {length}"
        steps = f"range({ends})"
        if self.plan.schedule.num_stages > 1:  # this loop holds its loads itself
            steps = f"tl.range({ends}, num_stages=1)"
        return f"for {axis}_trip in {steps}:"

    def _trip(
        self, stage: Stage, loop: str, inputs: Sequence[BlockInput], body: Sequence[BlockOp]
    ) -> None:
        """Write one trip of a loop: several steps, with loads for the next trip between them."""
        axis, tile, starts = self.axis[loop], self.tiling.tile(loop), self.loop_starts()
        _, ahead = self._loaded_a_step_ahead(inputs)
        written = set(self.written)
        # A step that is alone in its trip loads the next one before it computes.
        is_alone = self.pipelining.steps_per_trip == 1
        for steps in self.pipelining.loaded_together:
            for n in steps:
                self.written = set(written)
                self.forget_indices_of_loop()
                self.line(f"# step {n} of this trip")
                terms = [*starts, f"{axis}_trip", *([str(n * tile)] if n else [])]
                self.line(f"{axis}0 = {' + '.join(terms)}")
                at = f"{axis}0 + tl.arange(0, {tile})" if tile > 1 else f"{axis}0"
                self.line(f"{axis} = {at}")
                self.bound(loop)
                for i in ahead:
                    self.take_loaded(i, f"next{n}")
                if is_alone:
                    self.load_next_trip(ahead, steps)
                for i in inputs:
                    self.load(i)
                self._compute_step(stage, loop, body)
            if not is_alone:
                self.load_next_trip(ahead, steps)

    # -- loops that only visit what is within their bounds ----------------------------------------

    def _trim(self, i: BlockInput | None) -> None:
        """Define where this block's loop begins and ends: its share of what is inside the bounds.

        Args:
            i: The bounds, or None if the loop visits its whole axis.
        """
        was_trimmed = i is self.trimmed
        self.trimmed = i
        if was_trimmed or i is None:
            return
        loop = str(self.tiling.loop)
        axis, tile, size = self.axis[loop], self.tiling.tile(loop), self.block.axis(loop).size
        lows, highs = self._extreme_bounds(i, size)
        self.line(f"{axis}_first = {_extreme('minimum', lows)} // {tile} * {tile}")
        self.line(f"{axis}_last = {_extreme('maximum', highs)}")
        split_axis = self.tiling.split_axis(loop)
        if split_axis and not self.loop_bounds.are_split:
            end = f"{axis}_start + {self.block.split_size(loop)}"
            self.line(f"{axis}_first = tl.maximum({axis}_first, {axis}_start)")
            self.line(f"{axis}_last = tl.minimum({axis}_last, {end})")
        self.line(f"{axis}_first = tl.maximum({axis}_first, 0)")
        self.line(f"{axis}_last = tl.minimum({axis}_last, {size})")
        self._take_share(axis, tile, split_axis if self.loop_bounds.are_split else None)

    def _extreme_bounds(self, i: BlockInput, size: int) -> tuple[list[str], list[str]]:
        """Return the least lower bound and the greatest upper bound of a tile's rows, per lane."""
        dims = self.layout.dims([a for a in i.axes if a])
        is_unrolled = bool(self.layout.unrolled) and self.layout.unrolled in i.axes
        lows, highs = [], []
        for _ in self.each_lane(i.name):
            lo, hi = (f"{self.value[i.name]}_{end}" for end in ("lo", "hi"))
            if dims or is_unrolled:  # empty rows, like those past the end, do not count
                lo, hi = (
                    f"tl.where({lo} < {hi}, {lo}, {size})",
                    f"tl.where({lo} < {hi}, {hi}, 0)",
                )
            for _ in dims:
                lo, hi = f"tl.min({lo}, axis=0)", f"tl.max({hi}, axis=0)"
            lows.append(lo)
            highs.append(hi)
        return lows, highs

    def _take_share(self, axis: str, tile: int, split_axis: str | None) -> None:
        """Cut what is inside the bounds into equal shares, and take this block's share."""
        blocks = self.plan.schedule.cooperating_blocks
        shares = blocks * (self.block.axis(split_axis).size if split_axis else 1)
        if shares == 1:
            return
        mine = "part"
        if split_axis:
            split = self.axis[split_axis]
            mine = f"({split} * {blocks} + part)" if blocks > 1 else split
        length = f"tl.maximum({axis}_last - {axis}_first, 0)"
        self.line(f"{axis}_share = tl.cdiv({length}, {shares * tile}) * {tile}")
        self.line(f"{axis}_first += {mine} * {axis}_share")
        self.line(f"{axis}_last = tl.minimum({axis}_last, {axis}_first + {axis}_share)")


def _extreme(which: str, values: Sequence[str]) -> str:
    """Return the smallest or largest of some numbers."""
    if len(values) == 1:
        return values[0]
    return f"tl.{which}({_extreme(which, values[:-1])}, {values[-1]})"
