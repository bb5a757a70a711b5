"""Computed values as Triton text: elementwise ops, reductions, tensor-core products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from mirage_hf.codegen import triton_math
from mirage_hf.codegen.plan import stages
from mirage_hf.codegen.plan.layout import Dot, runs_of
from mirage_hf.codegen.plan.small_codes import SMALL
from mirage_hf.codegen.triton_loads import as_float32, is_byte
from mirage_hf.codegen.triton_math import Expr
from mirage_hf.codegen.triton_prefetches import PrefetchWriter
from mirage_hf.codegen.triton_tiles import triton_dtype
from mirage_hf.graph.block import Accumulator, BlockOp, Stage
from mirage_hf.graph.coded import is_exponent
from mirage_hf.ops.dtypes import CODE_DTYPES

#: The value that a reduction takes for elements that do not count.
NEUTRAL = {"sum": "0.0", "max": 'float("-inf")'}

_WARP = 32


class ValueWriter(PrefetchWriter):
    """Writes the code that computes on tiles in registers."""

    #: The running maxima of the current stage: maxima that its body reads while they grow.
    running: Mapping[str, Accumulator]

    # -- ops --------------------------------------------------------------------------------------

    def body(self, stage: Stage, body: Sequence[BlockOp]) -> None:
        """Write ops in order, and each running maximum before the first op that reads it."""
        maxima = stages.running_maxima(stage)
        for op in body:
            for acc in [maxima.pop(str(a)) for a in op.args if a in maxima]:
                for _ in self.each_lane(acc.out):
                    self._running_maximum(acc)
            self.op(op)

    def op(self, op: BlockOp) -> None:
        """Write an op, each lane once."""
        if op.out in self.layout.unformed_products:
            return
        for _ in self.each_lane(op.out):
            if self.is_new(op.out):
                self.line(f"{self.value[op.out]} = {self._op_text(op)}")

    def _op_text(self, op: BlockOp) -> str:
        dot = self.layout.dots.get(op.out)
        if dot is not None:
            return self.dot(dot)
        if op.over is not None:
            is_small = op.out in self.layout.small_codes.sums
            return self._reduced_op(op) + (f" * {1 / SMALL!r}" if is_small else "")
        if op.out in self.layout.decoded:
            return self.wide(str(op.args[0]))
        dims = self.layout.value_dims(op.out)
        if op.out in self.layout.code_factors:
            return self._code_difference(op)
        is_half = op.out in self.layout.half_products
        read = self._half if is_half else self.stored if op.fn == "bits" else self.wide
        arguments = [
            Expr(self.spread(read(a), self.layout.value_dims(a), dims))
            if isinstance(a, str)
            else triton_math.constant(a)
            for a in op.args
        ]
        write = triton_math.elementwise
        if op.out in self._written_as_multiply_add:
            write = triton_math.exact_product
        return write(op.fn, arguments, dict(op.attrs)).text

    def _code_difference(self, op: BlockOp) -> str:
        """Return codes minus their zero points, in the 16-bit dtype of the factor. It is exact."""
        dims = self.layout.value_dims(op.out)
        codes, zeros = map(str, op.args)
        dtype = triton_dtype(self.layout.code_factors[op.out])
        left = self.spread(self.stored(codes), self.layout.value_dims(codes), dims)
        right = self.spread(f"{self.wide(zeros)}.to({dtype})", self.layout.value_dims(zeros), dims)
        return f"{left} - {right}"

    def stored(self, value: str) -> str:
        """Return the name of a value as the kernel holds it. An input is loaded first.

        A running maximum of the current stage has another name while it grows.
        """
        if value in self.running:
            return f"{self.value[value]}_now"
        if value in self.tiling.inputs:
            self.load(self.tiling.inputs[value])
        return self.value[value]

    def _half(self, value: str) -> str:
        """Return a value in the 16-bit dtype of a product of two inputs."""
        name = self.stored(value)
        i = self.tiling.inputs.get(value)
        is_power = i is not None and is_exponent(self.tiling.dtype(i))
        return f"e8m0_as_bfloat16({name})" if is_power else name

    def wide(self, value: str) -> str:
        """Return the name of a value in float32."""
        name = self.stored(value)
        if value not in self.layout.kept_as_stored:
            return name
        if self.tiling.dtype(self.tiling.inputs[value]) is torch.float32:
            return name
        if self.is_new(value, "wide"):
            is_asynchronous = value in self.pipelining.read_asynchronously
            source = self._second_name(value) if is_asynchronous else name
            converted = as_float32(source, self.tiling.dtype(self.tiling.inputs[value]))
            self.line(f"{name}_f32 = {converted}")
        return f"{name}_f32"

    def _second_name(self, value: str) -> str:
        """Return the name of the second load of a factor of an asynchronous product."""
        name = f"{self.value[value]}_again"
        if self.is_new(value, "again"):
            self.line(f"{name} = {self.second_load(self.tiling.inputs[value])}")
        return name

    # -- accumulators -----------------------------------------------------------------------------

    def _dims_in_loop(self, stage: Stage, acc: Accumulator) -> tuple[str, ...]:
        """Return the dims of an accumulator inside its loop."""
        if self._accumulates_runs(stage, acc):
            loop = str(self.tiling.loop)
            dims = self.layout.value_dims(acc.arg)
            return (*(a for a in dims if a != loop), runs_of(loop))
        if self.plan.is_reduced_after_loop(acc):
            return self.layout.value_dims(acc.arg)
        return (*self.layout.value_dims(acc.out), *self._runs(acc.arg))

    def _accumulates_runs(self, stage: Stage, acc: Accumulator) -> bool:
        """Return True if each thread adds up the runs of codes of all steps on its own."""
        loop = str(self.tiling.loop)
        return (
            acc.kind == "sum"
            and bool(self.layout.byte_words)
            and self.plan.is_reduced_after_loop(acc)
            and len(self.layout.value_dims(acc.arg)) > 1
            and self._is_added_in_runs(acc.arg, loop)
            and self._threads_hold_runs(loop)
        )

    def _runs(self, value: str) -> list[str]:
        """Return the dim of a value that numbers runs of codes, if it has one."""
        over = self.layout.partial_sums.get(value)
        return [] if over is None else [runs_of(over)]

    def start_accumulator(self, stage: Stage, acc: Accumulator) -> None:
        """Define an accumulator before its loop."""
        dims = self._dims_in_loop(stage, acc)
        shape = ", ".join(str(self.layout.dim_size(a)) for a in dims)
        if acc.kind == "sum":
            self.line(f"{self.value[acc.out]} = tl.zeros([{shape}], tl.float32)")
            return
        floor = self.loop_bounds.floor(acc, self.trimmed.name) if self.trimmed is not None else None
        least = NEUTRAL["max"] if floor is None else repr(floor)
        self.line(f"{self.value[acc.out]} = tl.full([{shape}], {least}, tl.float32)")

    def accumulate(self, stage: Stage, acc: Accumulator) -> None:
        """Add a loop step to an accumulator."""
        name, loop = self.value[acc.out], str(self.tiling.loop)
        self.is_new(acc.out)
        before = name
        if acc.shift is not None:
            dims = self.layout.value_dims(acc.shift), self.layout.value_dims(acc.out)
            before = f"{name} * {self.spread(f'{self.value[acc.shift]}_scale', *dims)}"
        if acc.out in self.layout.dots:
            self.line(f"{name} = {self.dot(self.layout.dots[acc.out], before)}")
            return
        if self.plan.is_reduced_after_loop(acc):
            step = self._inside(self.wide(acc.arg), acc.arg, loop, acc.kind)
            if self._accumulates_runs(stage, acc):
                step = self._sum_of_runs(step, self.layout.value_dims(acc.arg), loop)
        else:
            step = self.reduced(acc.kind, acc.arg, loop)
        if acc.kind != "sum":
            self.line(f"{name} = {maximum(name, step)}")
        elif acc.shift is None:
            self.line(f"{name} += {step}")
        else:
            self.line(f"{name} = {before} + {step}")

    def reduce_after_loop(self, stage: Stage, acc: Accumulator) -> None:
        """Reduce an accumulator that stayed spread over the loop tile, or over runs of codes."""
        spread = self._runs(acc.arg)
        if self._accumulates_runs(stage, acc):
            spread = [runs_of(str(self.tiling.loop))]
        elif self.plan.is_reduced_after_loop(acc):
            spread = [str(self.tiling.loop), *spread]
        if not spread:
            return
        for _ in self.each_lane(acc.out):
            name, dims = self.value[acc.out], self._dims_in_loop(stage, acc)
            self.line(f"{name} = {self._total(acc.kind, name, dims, spread)}")

    def _total(self, kind: str, text: str, dims: Sequence[str], over: Sequence[str]) -> str:
        """Return the sum or maximum over some dims, the last dim first.

        Threads of one warp share the last dim, so fewer numbers are left for other warps.
        """
        for a in sorted(over, key=dims.index, reverse=True):
            text = reduction(kind, text, dims.index(a))
            dims = [x for x in dims if x != a]
        return text

    def accumulate_whole(self, acc: Accumulator) -> None:
        """Compute an accumulator whose loop axis is held whole: one reduction."""
        if not self.is_new(acc.out):
            return  # a maximum that the body read
        dot = self.layout.dots.get(acc.out)
        loop = str(self.tiling.loop)
        text = self.dot(dot) if dot else self.whole(acc.kind, acc.arg, loop)
        self.line(f"{self.value[acc.out]} = {text}")

    def _running_maximum(self, acc: Accumulator) -> None:
        """Let a running maximum grow by this tile.

        The tile's values are shifted by `_now`, and earlier sums are multiplied by `_scale`. As
        long as only -inf was seen, the shift is 0, because -inf - -inf would be NaN.
        """
        name = self.value[acc.out]
        step = self.reduced("max", acc.arg, str(self.tiling.loop))
        self.is_new(acc.out)
        if self.tiling.is_looped:
            self.line(f"{name}_next = {maximum(name, step)}")
            self.line(f'{name}_now = tl.where({name}_next == float("-inf"), 0.0, {name}_next)')
            self.line(f"{name}_scale = tl.exp({name} - {name}_now)")
            self.line(f"{name} = {name}_next")
        else:
            self.line(f"{name} = {step}")
            self.line(f'{name}_now = tl.where({name} == float("-inf"), 0.0, {name})')

    # -- reductions -------------------------------------------------------------------------------

    def _reduced_op(self, op: BlockOp) -> str:
        """Return an op's sum or maximum. A partial sum is that of each run of codes."""
        value, over = str(op.args[0]), str(op.over)
        if op.out not in self.layout.partial_sums:
            return self.whole(op.fn, value, over)
        return self._sum_of_runs(self.wide(value), self.layout.value_dims(value), over)

    def whole(self, kind: str, value: str, axis: str) -> str:
        """Return the sum or maximum over one axis, and over the runs of a partial sum."""
        dims, runs = self.layout.value_dims(value), self._runs(value)
        if not runs:
            return self.reduced(kind, value, axis)
        over = [axis, *runs] if axis in dims else runs
        return self._total(kind, self._inside(self.wide(value), value, axis, kind), dims, over)

    def _sum_of_runs(self, text: str, dims: Sequence[str], axis: str) -> str:
        """Return the sum of each run of codes along an axis, which becomes a dim of runs."""
        length = self.layout.run_lengths[axis]
        at = dims.index(axis)
        shape = [self.layout.dim_size(a) for a in dims]
        shape[at : at + 1] = [shape[at] // length, length]
        summed = f"tl.sum(tl.reshape({text}, {shape}), axis={at + 1})"
        if at + 1 == len(dims):
            return summed
        order = [*range(at), *range(at + 1, len(dims)), at]
        return f"tl.permute({summed}, {order})"

    def reduced(self, kind: str, value: str, axis: str) -> str:
        """Return the sum or maximum of a value over one axis."""
        dims = self.layout.value_dims(value)
        text = self._inside(self.wide(value), value, axis, kind)
        if axis not in dims:
            return text
        if kind == "sum" and self._is_added_in_runs(value, axis):
            inner = dims[: dims.index(axis)] + dims[dims.index(axis) + 1 :]
            return reduction(kind, self._sum_of_runs(text, dims, axis), len(inner))
        is_product = value not in self._written_as_multiply_add
        if kind == "sum" and is_product and self._may_be_fused(value, axis):
            text = f"rounded({text})"
        return reduction(kind, text, dims.index(axis))

    def _inside(self, text: str, value: str, axis: str, kind: str) -> str:
        """Return `text` with the neutral element where `axis` reaches past its end."""
        is_neutral = kind == "sum" and self.masks.is_zero_padded(value, axis)
        if not self.masks.needed(axis) or is_neutral:
            return text
        condition = self.within(axis, self.layout.value_dims(value))
        return f"tl.where({condition}, {text}, {NEUTRAL[kind]})"

    def _is_added_in_runs(self, value: str, axis: str) -> bool:
        """Return True if each thread first adds the runs of codes that it holds."""
        length = self.layout.run_lengths.get(axis)
        return length is not None and not self._runs(value) and self.tiling.tile(axis) > length

    def _threads_hold_runs(self, axis: str) -> bool:
        """Return True if tiles of codes have at least one run along an axis for each thread."""
        length = self.layout.run_lengths[axis]
        coded = [i for i in self.block.inputs if self.tiling.dtype(i) in CODE_DTYPES]
        least = min(self.tiling.numel(self.block.input_axes(i)) for i in coded if axis in i.axes)
        return least >= length * _WARP * self.plan.schedule.num_warps

    def _may_be_fused(self, value: str, axis: str) -> bool:
        """Return True if the compiler may fuse a product with the first addition of its sum.

        That matters only if the first addition is between threads. With a longer tile each thread
        first adds several of its own elements. See "rounded" in triton_math.py.
        """
        in_runs = axis in self.layout.run_lengths and not self._runs(value)
        if in_runs and self._threads_hold_runs(axis):
            return False
        threads = _WARP * self.plan.schedule.num_warps
        return self._may_end_in_a_product(value) and self.tiling.tile(axis) <= threads

    def _may_end_in_a_product(self, value: str | float) -> bool:
        op = self.tiling.ops.get(str(value))
        if op is None:
            return value in self._single_elements
        if op.fn == "select":  # the compiler may move the addition into either side
            return any(self._may_end_in_a_product(a) for a in op.args[1:])
        calls = ("exp", "sqrt", "rsqrt")
        return op.over is not None or triton_math.last(op.fn, dict(op.attrs)) not in calls

    @cached_property
    def _single_elements(self) -> frozenset[str]:
        """Accumulators over one element, which equal that element."""
        if self.tiling.is_looped:
            return frozenset()
        return frozenset(
            a.out
            for s in self.block.stages
            for a in s.accumulators
            if self.tiling.loop not in self.layout.value_dims(a.arg)
        )

    @cached_property
    def _written_as_multiply_add(self) -> frozenset[str]:
        """Products that only sums read, written as multiply-adds of 0.

        So the compiler cannot fuse a product with the addition, and threads that compute the same
        sum round alike. This takes one instruction, and `rounded` would take two more. The product
        -0 becomes 0, which does not change a sum.
        """
        loop = str(self.tiling.loop)
        ops = self.tiling.ops
        sums = [(str(op.args[0]), op.over) for op in ops.values() if op.over and op.fn == "sum"]
        for s in self.block.stages:
            for a in s.accumulators:
                is_reduced_after_loop = self.tiling.is_looped and self.plan.is_reduced_after_loop(a)
                if a.kind == "sum" and not is_reduced_after_loop:
                    sums.append((a.arg, loop))
        products = {
            x
            for x, op in ops.items()
            if op.over is None and triton_math.last(op.fn, dict(op.attrs)) == "mul"
        } - self._read_by_others()
        return frozenset(
            x
            for x, axis in sums
            if x in products and axis in self.layout.value_dims(x) and self._may_be_fused(x, axis)
        )

    def _read_by_others(self) -> set[str]:
        """Return the values that something other than a sum reads, or that are never written."""
        others = {*self.layout.unformed_products, *self.layout.half_products}
        others |= {o.value for o in self.block.outputs}
        for op in self.tiling.ops.values():
            if op.over is None or op.fn != "sum":
                others |= {str(a) for a in op.args}
        others |= {a.arg for s in self.block.stages for a in s.accumulators if a.kind != "sum"}
        return others

    # -- tensor-core products ---------------------------------------------------------------------

    def dot(self, dot: Dot, start: str | None = None) -> str:
        """Return a product on tensor cores, added to `start` if given."""
        left = self._factor(dot.left, dot, dot.left_transposed)
        right = self._factor(dot.right, dot, dot.right_transposed)
        shape = [self.tiling.tile(a) for a in self.layout.value_dims(dot.contraction.out)]
        has_column_alone = len(self.layout.value_dims(dot.right)) == 1
        if len(shape) == 2 and not has_column_alone:
            return f"tl.dot({', '.join([left, right, start] if start else [left, right])})"
        # The compiler's layouts would not settle if the product started from a reshaped sum.
        text = f"tl.reshape(tl.dot({left}, {right}), {shape})"
        return f"{start} + {text}" if start else text

    def _factor(self, value: str, dot: Dot, transposed: bool) -> str:
        """Return a factor of a tensor-core product, in its dtype and with two dims."""
        over, dtype = dot.contraction.over, dot.dtype
        text = self.stored(value)
        is_asynchronous = value in self.pipelining.read_asynchronously
        if is_asynchronous and not self.pipelining.reads_as_stored(dot, value):
            text = self._second_name(value)
        is_half = value in self.layout.half_products or value in self.layout.code_factors
        stored = dtype if is_half else torch.float32
        if value in self.layout.kept_as_stored:
            stored = self.tiling.dtype(self.tiling.inputs[value])
        text = self._inside(text, value, over, "sum")
        if dot.groups is not None and value not in self.layout.scaled_factors:
            # Past the last group this factor is 0. Codes times scales are finite there, so they
            # need no mask.
            text = self._inside(text, value, dot.groups, "sum")
        if is_byte(stored):
            text, stored = as_float32(text, stored), torch.float32
        if stored is torch.float8_e4m3fn and dtype is torch.bfloat16:
            # The instruction that makes a bfloat16 of a half runs at an eighth of the rate.
            text, stored = f"{text}.to(tl.float16).to(tl.float32)", torch.float32
        text = text if stored is dtype else f"{text}.to({triton_dtype(dtype)})"
        if len(self.layout.value_dims(value)) == 1:
            return f"{text}[:, None]"  # a vector is one column
        if dot.groups is not None:
            text = self.groups_in_code_order(text, self.layout.value_dims(value), dot)
        if len(self.layout.value_dims(value)) > 2:
            is_left = value == dot.left
            free = self.layout.rows(dot) if is_left else self.layout.columns(dot)
            summed = self.tiling.numel(dot.summed)
            summed_first = transposed == is_left
            shape = [summed, free] if summed_first else [free, summed]
            text = f"tl.reshape({text}, {shape})"
            is_permuted = dot.groups is not None and over in self.layout.code_ordered
            text = text if is_left or is_permuted else f"materialized({text})"
        return f"tl.trans({text})" if transposed else text


def reduction(kind: str, text: str, axis: int) -> str:
    """Return the sum or maximum along a dim. `tl.max` drops NaN, torch does not."""
    if kind == "sum":
        return f"tl.sum({text}, axis={axis})"
    return f"tl.reduce({text}, {axis}, larger)"


def maximum(x: str, y: str) -> str:
    """Return the larger of two values, NaN if one is."""
    return f"tl.maximum({x}, {y}, propagate_nan=tl.PropagateNan.ALL)"
