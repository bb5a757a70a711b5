"""A planned block graph as the text of one Triton kernel: offsets, early loads, then stage by stage."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mirage_hf.codegen import triton_math
from mirage_hf.codegen.plan import KernelPlan, stages
from mirage_hf.codegen.plan.layout import Dot
from mirage_hf.codegen.triton_math import Expr
from mirage_hf.codegen.triton_tiles import Tiles, triton_dtype
from mirage_hf.graph.block import Accumulator, BlockInput, BlockOp, Role, Stage

EARLY_ELEMENTS_PER_THREAD = 8
"""Inputs outside the loop up to this size are loaded before it, so that the loop hides their latency."""

HELD_ELEMENTS_PER_THREAD = 64
"""Elements of constants that a kernel without a loop holds while it waits for the launches ahead."""

NEUTRAL = {"sum": "0.0", "max": 'float("-inf")'}


@dataclass(frozen=True)
class KernelText:
    """One kernel: its source, the helpers it calls, and for each pointer argument the operand or output it points to."""

    name: str
    source: str
    helpers: tuple[str, ...]
    arguments: tuple[tuple[str, int], ...]
    """(pointer name, position among the op's operands, outputs counted after them)."""
    scratch: int
    """Floats of scratch memory; where there are any, its pointer and that of a counter per tile follow."""
    counters: int


def write_kernel(plan: KernelPlan, name: str) -> KernelText:
    """Write the kernel of a plan. Errors: CodegenError."""
    return _Writer(plan, name).write()


class _Writer(Tiles):
    """Writes the text of one kernel, top to bottom."""

    running: Mapping[str, Accumulator]
    """The maxima that the stage at hand reads while they grow."""

    def write(self) -> KernelText:
        self._offsets()
        for i in self.block.inputs:
            if self._is_selected(i) and self.block.role(i.joined) is Role.GRID:  # type: ignore[arg-type]
                self._select(i)
        early = self._early()
        for i in early:
            if self.tiling.is_constant(i):
                self._load(i)
        self._settled()
        self._wait()
        for i in self._bounds_of_loops():
            self._load_bounds(i)
        for i in (*early, *self._whole()):
            self._load(i)
        for number, stage in self.plan.stages:
            self.running = stages.running_maxima(stage)
            self._stage(number, stage)
        self.running = {}
        if self.tiling.may_overwrite_inputs:
            self.line(
                "tl.debug_barrier()  # outputs may be written over inputs, which some threads read for others"
            )
        for o, pointer in zip(self.block.outputs, self.out_pointers, strict=True):
            if self.tiling.loop not in o.axes or not self.tiling.is_looped:
                for _ in self._lanes(o.value):
                    self._store(o, pointer, self._wide(o.value))
        body = "\n".join(self.lines)
        arguments = [a for a, _ in self.arguments] + (
            ["scratch_ptr", "counters_ptr"] if self.cooperation.shared_accumulators else []
        )
        source = f"@triton.jit\ndef {self.name}({', '.join(arguments)}, overlaps: tl.constexpr):\n{body}\n"
        helpers = tuple(h for h in triton_math.HELPERS if re.search(rf"(?<![\w.]){h}[(),]", body))
        counters = self.tiling.num_tiles if self.cooperation.shared_accumulators else 0
        return KernelText(
            self.name,
            source,
            helpers,
            tuple(self.arguments),
            self.cooperation.scratch,
            counters,
        )

    # -- before the launches ahead are done -----------------------------------------------------------------------------------

    def _early(self) -> list[BlockInput]:
        """Small inputs that a loop does not walk, so that it hides their latency; without a loop, constants, as many as fit."""
        threads, found, room = (
            32 * self.plan.schedule.num_warps,
            [],
            float(HELD_ELEMENTS_PER_THREAD),
        )
        for i in self.block.inputs:
            each = self.tiling.numel(self.block.input_axes(i)) / threads
            if self.tiling.is_looped:
                if self.tiling.loop not in i.carried and each <= EARLY_ELEMENTS_PER_THREAD:
                    found.append(i)
            elif self.tiling.is_constant(i) and each <= room:
                room -= each
                found.append(i)
        return found

    def _settled(self) -> None:
        """Read bounds and positions that may be read before the wait, so that what lies in between them can be asked for."""
        for i in self.block.inputs:
            if i.bounds is not None and self.plan.op.readable_before_wait.issuperset(i.sources):
                self._load_bounds(i)
        for o, pointer in zip(self.block.outputs, self.out_pointers, strict=True):
            append = self.tiling.append_of(o)
            if (
                append is None
                or append.position not in self.plan.op.readable_before_wait
                or self.layout.unrolled in self.block.carried[o.value]
            ):
                continue
            if self.tiling.loop is None or o.axes[0] != self.tiling.loop:
                self._load_slot(o, pointer, append)
        first = next(
            (
                i
                for i in self._bounds_of_loops()
                if self.plan.op.readable_before_wait.issuperset(i.sources)
            ),
            None,
        )
        if first is not None:
            self._trim(first)

    def _bounds_of_loops(self) -> list[BlockInput]:
        """Bounds that say where a loop begins, so that it can begin at once."""
        return [i for s in self.block.stages if (i := self.loop_bounds.trimming(s)) is not None]

    def _whole(self) -> list[BlockInput]:
        """Without a loop, what is not constant, as far as it fits: so that nothing waits for a load that could have begun before."""
        found: list[BlockInput] = []
        if self.tiling.is_looped or self.tiling.loop is None:
            return found
        room = float(HELD_ELEMENTS_PER_THREAD) * 2
        for i in self.block.inputs:
            each = self.tiling.numel(self.block.input_axes(i)) / (32 * self.plan.schedule.num_warps)
            if i.bounds is None and not self.tiling.is_constant(i) and each <= room:
                room -= each
                found.append(i)
        return found

    def _wait(self) -> None:
        """Ask for the first tiles of what lies ready, then wait for the launches ahead, whose results everything else may be."""
        plan, asked, begin = self.plan, list[str](), "tl.extra.cuda.gdc_launch_dependents()"
        unknown = (
            plan.loop_bounds.are_split and self.trimmed is None
        )  # where this block's share begins is known with the bounds, after the wait
        if plan.schedule.prefetch_steps and plan.tiling.loop and not unknown:
            ready = [
                i
                for i in self.block.inputs
                if plan.tiling.loop in i.axes
                and plan.tiling.prefetchable(i)
                and (plan.tiling.is_looped or not plan.tiling.is_constant(i))
            ]
            asked = [line for i in ready for line in self._prefetch(i)]
        wait = [*asked, "tl.extra.cuda.gdc_wait()"]
        early = f"{begin}  # the next kernel, which asks for constants only before it waits"
        self.lines_if("overlaps", [early, *wait] if plan.triggers_early else [*wait, begin])

    # -- stages ---------------------------------------------------------------------------------------------------------------

    def _stage(self, number: int, stage: Stage) -> None:
        self.line()
        sums = ", ".join(f"{a.out} = {a.kind} of {a.arg}" for a in stage.accumulators)
        self.line(
            f"# stage {number}"
            + (f": over {stage.loop}" + (f", {sums}" if sums else "") if stage.loop else "")
        )
        if stage.loop and self.tiling.is_looped:
            self._walk(stage, stage.loop)
            return
        self._body(stage, stage.body)
        for acc in stage.accumulators:
            for _ in self._lanes(acc.out):
                self._whole_accumulator(acc)

    def _walk(self, stage: Stage, loop: str) -> None:
        """A stage that walks its loop: what is the same in every step, the loop, and what becomes of its sums."""
        plan, fixed = self.plan, stages.loop_invariant(stage)
        for op in fixed:
            self._op(op)
        read = stages.values_read(stage)
        inputs = sorted(
            (i for i in self.block.inputs if i.name in read),
            key=lambda i: -plan.tiling.numel(self.block.input_axes(i)),
        )
        for i in inputs:
            if loop not in i.carried:
                self._load(i)
            elif i.bounds is not None:
                self._load_bounds(i)
        self._trim(plan.loop_bounds.trimming(stage))
        for acc in stage.accumulators:
            for _ in self._lanes(acc.out):
                self._start(stage, acc)
        again = [
            i for i in inputs if i.name in plan.pipelining.loaded_twice and len(i.sources) == 1
        ]
        small = [i for i in inputs if i.name in plan.pipelining.loaded_ahead]
        self._load_ahead([*again, *small], first=True)
        self._for(loop)
        self.indent += 1
        self._step(stage, loop, inputs, again, small, [op for op in stage.body if op not in fixed])
        self.indent -= 1
        for acc in stage.accumulators:
            for _ in self._lanes(acc.out) if plan.is_reduced_after_loop(stage, acc) else ():
                name, dims = self.value[acc.out], self._running_dims(stage, acc)
                self.line(f"{name} = {self._reduce(acc.kind, name, dims.index(loop))}")
        self.have = {h for h in self.have if loop not in self.block.carried[h[1]]}
        self.trimmed = None
        if plan.schedule.cooperating_blocks > 1:
            self._combine(stage)

    def _for(self, loop: str) -> None:
        """The line that a loop begins with: over what is within its bounds, this block's share, or its part."""
        axis, tile = self.axis[loop], self.tiling.tile(loop)
        length = self.block.split_size(loop)
        if self.plan.schedule.cooperating_blocks > 1:
            length = self.cooperation.steps_per_block * tile
        ends = f"0, {length}, {tile}"
        if self.trimmed is not None:
            ends = f"0, {axis}_last - {axis}_first, {tile}"
        num_stages = self.plan.schedule.num_stages
        steps = f"tl.range({ends}, num_stages={num_stages})" if num_stages > 1 else f"range({ends})"
        self.line(f"for {axis}{'_step' if self._loop_starts() else '0'} in {steps}:")

    def _step(
        self,
        stage: Stage,
        loop: str,
        inputs: Sequence[BlockInput],
        again: Sequence[BlockInput],
        small: Sequence[BlockInput],
        body: Sequence[BlockOp],
    ) -> None:
        """One step of a loop. `again`, `small`: the inputs whose next tiles are loaded a step ahead (see `_load_ahead`)."""
        axis, tile, before = self.axis[loop], self.tiling.tile(loop), self._loop_starts()
        if before:
            self.line(f"{axis}0 = {' + '.join(before)} + {axis}_step")
        self.line(f"{axis} = {axis}0 + tl.arange(0, {tile})" if tile > 1 else f"{axis} = {axis}0")
        self._bound(loop)
        for i in small:
            self._first(i.name)
            self.line(f"{self.value[i.name]} = {self.value[i.name]}_next")
        self._load_ahead(small, first=False)
        for i in inputs:
            self._load(i)
        self.have |= {("again", i.name, None) for i in again}
        self._body(stage, body)
        for acc in stage.accumulators:
            if acc.out not in stages.running_maxima(stage):
                for _ in self._lanes(acc.out):
                    self._accumulate(stage, acc)
        for o, pointer in zip(self.block.outputs, self.out_pointers, strict=True):
            if loop in o.axes and any(op.out == o.value for op in stage.body):
                for _ in self._lanes(o.value):
                    self._store(o, pointer, self._wide(o.value))
        self._load_ahead(again, first=False)

    def _trim(self, i: BlockInput | None) -> None:
        """Where this block's way along the loop begins and ends: of what is within the bounds of some row its part, or its share."""
        if i is self.trimmed or i is None:
            self.trimmed = i
            return
        self.trimmed = i
        plan, loop = self.plan, str(self.tiling.loop)
        axis, tile, dims = self.axis[loop], plan.tiling.tile(loop), plan.layout.dims(i.axes)  # type: ignore[arg-type]
        lows, highs = [], []
        for _ in self._lanes(i.name):
            lo, hi = (f"{self.value[i.name]}_{end}" for end in ("lo", "hi"))
            if dims or (
                plan.layout.unrolled and plan.layout.unrolled in i.axes
            ):  # rows without any, those past the end among them, do not count
                lo, hi = (
                    f"tl.where({lo} < {hi}, {lo}, {self.block.axis(loop).size})",
                    f"tl.where({lo} < {hi}, {hi}, 0)",
                )
            for _ in dims:
                lo, hi = f"tl.min({lo}, axis=0)", f"tl.max({hi}, axis=0)"
            lows.append(lo)
            highs.append(hi)
        self.line(f"{axis}_first = {_extreme('minimum', lows)} // {tile} * {tile}")
        self.line(f"{axis}_last = {_extreme('maximum', highs)}")
        parts, split = plan.tiling.split_axis(loop), plan.schedule.cooperating_blocks
        if parts and not plan.loop_bounds.are_split:
            self.line(f"{axis}_first = tl.maximum({axis}_first, {axis}_start)")
            self.line(
                f"{axis}_last = tl.minimum({axis}_last, {axis}_start + {self.block.split_size(loop)})"
            )
        self.line(f"{axis}_first = tl.maximum({axis}_first, 0)")
        self.line(f"{axis}_last = tl.minimum({axis}_last, {self.block.axis(loop).size})")
        shares = split * (
            self.block.axis(parts).size if parts and plan.loop_bounds.are_split else 1
        )
        if shares > 1:
            mine = "part" if split > 1 else ""
            if parts and plan.loop_bounds.are_split:
                mine = f"({self.axis[parts]} * {split} + part)" if split > 1 else self.axis[parts]
            self.line(
                f"{axis}_share = tl.cdiv(tl.maximum({axis}_last - {axis}_first, 0), {shares * tile}) * {tile}"
            )
            self.line(f"{axis}_first += {mine} * {axis}_share")
            self.line(f"{axis}_last = tl.minimum({axis}_last, {axis}_first + {axis}_share)")

    def _combine(self, stage: Stage) -> None:
        """Store this block's part of each accumulator; the last block of the tile to be done adds up the parts, always in the
        same order, and does the rest of the kernel."""
        split, floats, maxima = (
            self.plan.schedule.cooperating_blocks,
            self.cooperation.partial_floats,
            stages.running_maxima(stage),
        )
        accumulators = sorted(stage.accumulators, key=lambda a: a.out not in maxima)
        sizes = [self.tiling.numel(self.block.carried[a.out]) for a in accumulators]
        begins = dict(
            zip((a.out for a in accumulators), itertools.accumulate(sizes, initial=0), strict=False)
        )
        self.line()
        self.line(
            f"# {split} blocks have a part of these sums each; the last of them to be done adds up what all of them stored"
        )
        for acc in accumulators:
            for _ in self._lanes(acc.out):
                place, mask = self._partial(acc, f"tl.program_id(0) * {floats}", begins[acc.out])
                self.line(f"tl.store({place}, {self.value[acc.out]}{mask})")
        self.line("tl.debug_barrier()  # all threads have stored before one of them says so")
        self.line('arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")')
        self.line(f"if arrived == {split - 1}:")
        self.indent += 1
        self.line("tl.store(counters_ptr + tile, 0)  # for the next launch")
        for acc in accumulators:
            for _ in self._lanes(acc.out):
                self._gather(acc, begins, acc.out in maxima)

    def _gather(self, acc: Accumulator, begins: Mapping[str, int], running: bool) -> None:
        """What all blocks of the tile stored of an accumulator as one value; `running`: a maximum that sums are shifted by. `begins`: where
        each accumulator begins among a block's partial results.

        Part by part, so that no thread needs what another has: as one dim more to be summed over, the parts lay in several warps, and
        adding up 32 of them took 70 µs. Loads come in groups, so that their latencies are waited for together; many parts in a loop.
        """
        name, dims, split = (
            self.value[acc.out],
            self.layout.value_dims(acc.out),
            self.plan.schedule.cooperating_blocks,
        )
        shift = next((a for a in self.cooperation.shared_accumulators if a.out == acc.shift), None)
        together, looped = self.cooperation.gathered(acc), self.cooperation.gathers_in_loop
        if looped:
            self.line(
                f"{name}_few = tl.full([{', '.join(str(self.cooperation.counted(a)) for a in dims)}], {NEUTRAL[acc.kind]}, tl.float32)"
            )
            self.line(f"for some in range(0, {split}, {together}):")
            self.indent += 1
        for first in (0,) if looped else range(0, split, together):
            for n in range(first, first + together):
                self.line(f"{name}_each{n} = {self._part_of(acc, begins, n, looped)}")
            if looped and shift is not None:
                for n in range(together):
                    self._weigh(shift, n, self._part_of(shift, begins, n, looped))
            for n in range(first, first + together):
                each = f"{name}_each{n}"
                if shift is not None:
                    each += f" * {self._spread(f'{self.value[shift.out]}_each{n}', self.layout.value_dims(shift.out), dims)}"
                if n == 0 and not looped:
                    self.line(f"{name}_few = {each}")
                else:
                    self.line(
                        f"{name}_few = "
                        + (
                            f"{name}_few + {each}"
                            if acc.kind == "sum"
                            else _maximum(f"{name}_few", each)
                        )
                    )
        self.indent -= looped
        if running:
            self.line(f'{name}_now = tl.where({name}_few == float("-inf"), 0.0, {name}_few)')
            for n in range(0 if looped else split):
                self._weigh(acc, n, f"{name}_each{n}")
        self.line(f"{name} = {self._filled_up(f'{name}_few', dims)}")

    def _weigh(self, shift: Accumulator, n: int, own: str) -> None:
        """What sums of part n, whose maximum is `own`, are multiplied by."""
        name = self.value[shift.out]
        self.line(f"{name}_each{n} = tl.exp({own} - {name}_now)")

    def _part_of(self, acc: Accumulator, begins: Mapping[str, int], part: int, looped: bool) -> str:
        """A load of what block `part` of the tile stored of an accumulator, without rows that only fill up its tile; `looped`: of the
        blocks from `some` on."""
        base = f"(tile * {self.plan.schedule.cooperating_blocks} + {'some + ' if looped else ''}{part}) * {self.cooperation.partial_floats}"
        few = {a: self.cooperation.counted(a) for a in self.layout.value_dims(acc.out)}
        place, _ = self._partial(acc, base, begins[acc.out], few)
        mask = []
        for a, n in few.items():
            if n == self.tiling.tile(a):
                mask += self._mask([a], tuple(few))
            elif n > self.block.axis(a).size:
                mask.append(
                    self._spread(
                        f"(tl.arange(0, {n}) < {self.block.axis(a).size})", [a], tuple(few)
                    )
                )
        arguments = [
            place,
            *([f"mask={' & '.join(mask)}", "other=0.0"] if mask else []),
            'cache_modifier=".cg"',
        ]
        return f"tl.load({', '.join(arguments)})"

    def _filled_up(self, text: str, dims: Sequence[str]) -> str:
        """A value without rows that only fill up its tile, with them: copies of the others, as nothing counts there."""
        few = [self.cooperation.counted(a) for a in dims]
        times = [self.tiling.tile(a) // n for a, n in zip(dims, few, strict=True)]
        if all(t == 1 for t in times):
            return text
        at = ", ".join(x for t in times for x in (["None"] if t > 1 else []) + [":"])
        shape = ", ".join(
            str(x) for t, n in zip(times, few, strict=True) for x in ([t] if t > 1 else []) + [n]
        )
        return f"tl.reshape(tl.broadcast_to({text}[{at}], [{shape}]), [{', '.join(str(self.tiling.tile(a)) for a in dims)}])"

    def _partial(
        self, acc: Accumulator, base: str, start: int, few: Mapping[str, int] | None = None
    ) -> tuple[str, str]:
        """Where an accumulator's partial results are: row-major from `base` + `start`, in lane after lane; and the mask of those that
        count. `few`: how many elements along each axis, if not all."""
        dims = self.layout.value_dims(acc.out)
        step = self.tiling.numel(dims)
        if self.lane is not None and self.layout.unrolled in self.block.carried[acc.out]:
            start += self.lane * step
        terms = [f"scratch_ptr + {base}", *([str(start)] if start else [])]
        for a in dims:
            step //= self.tiling.tile(a)
            index = self._spread(
                f"tl.arange(0, {few[a] if few else self.tiling.tile(a)})", [a], dims
            )
            terms.append(index if step == 1 else f"{index} * {step}")
        mask = self._mask(dims, dims)
        return " + ".join(terms), f", mask={' & '.join(mask)}" if mask else ""

    def _body(self, stage: Stage, body: Sequence[BlockOp]) -> None:
        """Ops in order, each maximum of the stage where it is first read."""
        maxima = stages.running_maxima(stage)
        for op in body:
            for acc in [maxima.pop(a) for a in op.args if a in maxima]:
                for _ in self._lanes(acc.out):
                    self._running_maximum(acc)
            self._op(op)

    def _running_maximum(self, acc: Accumulator) -> None:
        """Let a maximum grow by this tile: `_now` is what the tile's values are shifted by, `_scale` what earlier sums are
        multiplied by. As long as nothing but -inf was seen the shift is 0, so that no -inf - -inf makes a NaN."""
        name, part = self.value[acc.out], self._reduced("max", acc.arg, str(self.tiling.loop))
        self._first(acc.out)
        if self.tiling.is_looped:
            self.line(f"{name}_next = {_maximum(name, part)}")
            self.line(f'{name}_now = tl.where({name}_next == float("-inf"), 0.0, {name}_next)')
            self.line(f"{name}_scale = tl.exp({name} - {name}_now)")
            self.line(f"{name} = {name}_next")
        else:
            self.line(f"{name} = {part}")
            self.line(f'{name}_now = tl.where({name} == float("-inf"), 0.0, {name})')

    def _op(self, op: BlockOp) -> None:
        for _ in self._lanes(op.out) if op.out not in self.layout.unformed_products else ():
            if self._first(op.out):
                self._op_here(op)

    def _op_here(self, op: BlockOp) -> None:
        dot = self.layout.dots.get(op.out)
        if dot is not None:
            text = self._dot(dot)
        elif op.over is not None:
            text = self._reduced(op.fn, str(op.args[0]), op.over)
        else:
            dims, read = (
                self.layout.value_dims(op.out),
                self._value if op.out in self.layout.half_products else self._wide,
            )
            args = [
                Expr(self._spread(read(a), self.layout.value_dims(a), dims))
                if isinstance(a, str)
                else triton_math.constant(a)
                for a in op.args
            ]
            write = triton_math.exact_product if op.out in self.exact else triton_math.elementwise
            text = write(op.fn, args, dict(op.attrs)).text
        self.line(f"{self.value[op.out]} = {text}")

    def _value(self, value: str) -> str:
        """The name of a value, loading it first if it is an input; a maximum that the stage at hand reads is the running one."""
        if value in self.running:
            return f"{self.value[value]}_now"
        if value in self.tiling.inputs:
            self._load(self.tiling.inputs[value])
        return self.value[value]

    def _wide(self, value: str) -> str:
        """The name of a value in float32."""
        name = self._value(value)
        if (
            value not in self.layout.kept_as_stored
            or self.tiling.dtype(self.tiling.inputs[value]) is torch.float32
        ):
            return name
        if self._first(value, "wide"):
            self.line(
                f"{name}_f32 = {self._again(value) if value in self.pipelining.read_asynchronously else name}.to(tl.float32)"
            )
        return f"{name}_f32"

    def _again(self, value: str) -> str:
        """The name of the other load of a factor of an asynchronous product."""
        name = f"{self.value[value]}_again"
        if self._first(value, "again"):
            self.line(f"{name} = {self._read_again(self.tiling.inputs[value])}")
        return name

    def _load_ahead(self, ahead: Sequence[BlockInput], first: bool) -> None:
        """Loads for the step to come, of factors that other code reads too (see `_read_again`) and of what is too small to be copied
        (`KernelPlan.read_ahead`). Triton copies ahead only what else products read, and these latencies would be waited for in every step."""
        loop = str(self.tiling.loop)
        axis, tile = self.axis[loop], self.tiling.tile(loop)
        start = " + ".join(self._loop_starts()) or "0"
        if not ahead or not (first or self.cooperation.steps_per_block > 1):
            return
        self.line(
            f"{axis}_next = {f'{start} + tl.arange(0, {tile})' if first else f'{axis} + {tile}'}"
        )
        self._bound(loop, f"{axis}_next")
        if not self.masks.needed(loop):
            self.line(f"{axis}_next_in = {axis}_next < {self.block.axis(loop).size}")
        for i in ahead:
            load = self._read(i, self.pointers[i.name][0], 0, policy="evict_last", ahead=True)
            if i.name in self.pipelining.loaded_twice:
                self.line(f"{self.value[i.name]}_again = {load}")
            else:
                wide = (
                    ".to(tl.float32)"
                    if i.name not in self.layout.kept_as_stored
                    and self.tiling.dtype(i) is not torch.float32
                    else ""
                )
                self.line(f"{self.value[i.name]}_next = {load}{wide}")

    # -- reductions -------------------------------------------------------------------------------------------------------------

    def _inside(self, text: str, value: str, axis: str, kind: str) -> str:
        """`text` with the neutral element where `axis` reaches past its end."""
        dims = self.layout.value_dims(value)
        if not self.masks.needed(axis) or (
            kind == "sum" and self.masks.is_zero_padded(value, axis)
        ):
            return text
        return f"tl.where({self._within(axis, dims)}, {text}, {NEUTRAL[kind]})"

    def _reduced(self, kind: str, value: str, axis: str) -> str:
        dims = self.layout.value_dims(value)
        text = self._inside(self._wide(value), value, axis, kind)
        if axis not in dims:
            return text
        if kind == "sum" and value not in self.exact and self._is_fused(value, axis):
            text = f"rounded({text})"
        return self._reduce(kind, text, dims.index(axis))

    def _is_fused(self, value: str, axis: str) -> bool:
        """Whether the compiler might fuse a product with the first addition of a sum along `axis`, in which threads already add up each
        other's numbers: with a longer tile each has several of its own to add up before. (See "rounded" in triton_math.py.)"""
        return (
            self._may_end_in_a_product(value)
            and self.tiling.tile(axis) <= 32 * self.plan.schedule.num_warps
        )

    def _may_end_in_a_product(self, value: str | float) -> bool:
        op = self.ops.get(str(value))
        if op is None:
            return value in self.alone
        if op.fn == "select":  # the compiler may take the addition to either side
            return any(self._may_end_in_a_product(a) for a in op.args[1:])
        return op.over is not None or triton_math.last(op.fn, dict(op.attrs)) not in (
            "exp",
            "sqrt",
            "rsqrt",
        )

    @cached_property
    def ops(self) -> Mapping[str, BlockOp]:
        return {op.out: op for op in self.block.ops()}

    @cached_property
    def alone(self) -> frozenset[str]:
        """Accumulators of one element, which are what they would add up."""
        return frozenset(
            a.out
            for s in self.block.stages
            for a in s.accumulators
            if not self.tiling.is_looped and self.tiling.loop not in self.layout.value_dims(a.arg)
        )

    @cached_property
    def exact(self) -> frozenset[str]:
        """Products of which that holds and that only sums read, to which -0 and 0 are one: multiply-adds of 0 from the start, which are one
        instruction where `rounded` takes two more."""
        plan, loop = self.plan, str(self.tiling.loop)
        sums = [
            (str(op.args[0]), op.over)
            for op in self.ops.values()
            if op.over is not None and op.fn == "sum"
        ]
        sums += [
            (a.arg, loop)
            for s in self.block.stages
            for a in s.accumulators
            if a.kind == "sum" and not (plan.tiling.is_looped and plan.is_reduced_after_loop(s, a))
        ]
        others = {
            *plan.layout.unformed_products,
            *plan.layout.half_products,
            *(o.value for o in self.block.outputs),
        }
        others |= {
            str(a) for op in self.ops.values() if op.over is None or op.fn != "sum" for a in op.args
        }
        others |= {a.arg for s in self.block.stages for a in s.accumulators if a.kind != "sum"}
        of = {
            x
            for x, op in self.ops.items()
            if op.over is None and triton_math.last(op.fn, dict(op.attrs)) == "mul"
        } - others
        return frozenset(
            x
            for x, axis in sums
            if x in of and axis in plan.layout.value_dims(x) and self._is_fused(x, axis)
        )

    def _reduce(self, kind: str, text: str, axis: int) -> str:
        # tl.max drops NaN, torch does not
        return (
            f"tl.sum({text}, axis={axis})"
            if kind == "sum"
            else f"tl.reduce({text}, {axis}, larger)"
        )

    def _factor(self, value: str, dot: Dot, transposed: bool) -> str:
        """A side of a tensor-core product."""
        over, dtype = dot.contraction.over, dot.dtype
        text = self._value(value)
        if value in self.pipelining.read_asynchronously and not self.pipelining.reads_as_stored(
            dot, value
        ):
            text = self._again(value)
        stored = dtype if value in self.layout.half_products else torch.float32
        stored = (
            self.tiling.dtype(self.tiling.inputs[value]) if value in self.tiling.inputs else stored
        )
        if self.masks.needed(over) and not self.masks.is_zero_padded(value, over):
            text = self._inside(text, value, over, "sum")
        text = text if stored is dtype else f"{text}.to({triton_dtype(dtype)})"
        if len(self.layout.value_dims(value)) > 2:
            free, k = (
                (self.layout.rows(dot) if value == dot.left else self.layout.columns(dot)),
                self.tiling.tile(over),
            )
            front = transposed == (value == dot.left)  # the summed axis
            text = (
                f"tl.reshape({text}, [{k}, {free}])"
                if front
                else f"tl.reshape({text}, [{free}, {k}])"
            )
            text = f"apart({text})" if value == dot.right else text
        return f"tl.trans({text})" if transposed else text

    def _dot(self, dot: Dot, start: str | None = None) -> str:
        arguments = [
            self._factor(dot.left, dot, dot.left_transposed),
            self._factor(dot.right, dot, dot.right_transposed),
        ]
        shape = [self.tiling.tile(a) for a in self.layout.value_dims(dot.contraction.out)]
        flat = len(shape) == 2
        if flat:
            return f"tl.dot({', '.join([*arguments, start] if start else arguments)})"
        text = f"tl.reshape(tl.dot({', '.join(arguments)}), {shape})"
        return (
            f"{start} + {text}" if start else text
        )  # reshaped to start from, a sum makes the compiler's layouts go in circles

    def _running_dims(self, stage: Stage, acc: Accumulator) -> tuple[str, ...]:
        """The dims of an accumulator inside its loop."""
        return self.layout.value_dims(
            acc.arg if self.plan.is_reduced_after_loop(stage, acc) else acc.out
        )

    def _start(self, stage: Stage, acc: Accumulator) -> None:
        shape = ", ".join(str(self.tiling.tile(a)) for a in self._running_dims(stage, acc))
        floor = self.loop_bounds.floor(acc, self.trimmed.name) if self.trimmed is not None else None
        least = NEUTRAL["max"] if floor is None else repr(floor)
        text = (
            f"tl.zeros([{shape}], tl.float32)"
            if acc.kind == "sum"
            else f"tl.full([{shape}], {least}, tl.float32)"
        )
        self.line(f"{self.value[acc.out]} = {text}")

    def _accumulate(self, stage: Stage, acc: Accumulator) -> None:
        name, loop = self.value[acc.out], str(self.tiling.loop)
        self._first(acc.out)
        before = name
        if acc.shift is not None:
            scale = self._spread(
                f"{self.value[acc.shift]}_scale",
                self.layout.value_dims(acc.shift),
                self.layout.value_dims(acc.out),
            )
            before = f"{name} * {scale}"
        if acc.out in self.layout.dots:
            self.line(f"{name} = {self._dot(self.layout.dots[acc.out], before)}")
            return
        lazy = self.plan.is_reduced_after_loop(stage, acc)
        part = (
            self._inside(self._wide(acc.arg), acc.arg, loop, acc.kind)
            if lazy
            else self._reduced(acc.kind, acc.arg, loop)
        )
        if acc.kind == "sum":
            self.line(f"{name} += {part}" if acc.shift is None else f"{name} = {before} + {part}")
        else:
            self.line(f"{name} = {_maximum(name, part)}")

    def _whole_accumulator(self, acc: Accumulator) -> None:
        """An accumulator whose loop axis is held whole: one reduction."""
        if not self._first(acc.out):
            return  # a maximum that the body read
        dot = self.layout.dots.get(acc.out)
        self.line(
            f"{self.value[acc.out]} = {self._dot(dot) if dot else self._reduced(acc.kind, acc.arg, str(self.tiling.loop))}"
        )


def _extreme(which: str, values: Sequence[str]) -> str:
    """The smallest or largest of some numbers."""
    return (
        values[0]
        if len(values) == 1
        else f"tl.{which}({_extreme(which, values[:-1])}, {values[-1]})"
    )


def _maximum(x: str, y: str) -> str:
    return f"tl.maximum({x}, {y}, propagate_nan=tl.PropagateNan.ALL)"
