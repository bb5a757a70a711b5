"""A planned block graph as the text of one Triton kernel: offsets, early loads, then stage by stage."""
from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mirage_hf.codegen import triton_math
from mirage_hf.codegen.plan import Dot, Plan
from mirage_hf.codegen.triton_math import Expr
from mirage_hf.graph.block import Accumulator, BlockInput, BlockOp, BlockOutput, Role, Stage

EARLY_ELEMENTS_PER_THREAD = 8
"""Inputs outside the loop up to this size are loaded before it, so that the loop hides their latency."""

NEUTRAL = {"sum": "0.0", "max": 'float("-inf")'}
_RESERVED = frozenset({"tl", "triton", "torch", "pid", "run", "program", "range", "float", *triton_math.HELPERS})


@dataclass(frozen=True)
class KernelText:
    """One kernel: its source, the helpers it calls, and for each pointer argument the operand or output it points to."""

    name: str
    source: str
    helpers: tuple[str, ...]
    arguments: tuple[tuple[str, int], ...]
    """(pointer name, position among the op's operands, outputs counted after them)."""


def triton_dtype(dtype: torch.dtype) -> str:
    return "tl." + str(dtype).removeprefix("torch.")


def write_kernel(plan: Plan, name: str) -> KernelText:
    """Write the kernel of a plan. Errors: CodegenError."""
    return _Writer(plan, name).write()


class _Writer:
    def __init__(self, plan: Plan, name: str):
        self.plan, self.block, self.name = plan, plan.block, name
        self.lines: list[str] = []
        self.indent = 1
        self.have: set[str] = set()  # values already written, and ("wide", value) for their float32 copies
        self.taken = set(_RESERVED)
        self.axis = {a.name: self._identifier(a.name, ("", "0", "_in")) for a in self.block.axes}
        values = [*self.plan.input, *(op.out for op in self.block.ops()), *(a.out for s in self.block.stages for a in s.accumulators)]
        self.value = {v: self._identifier(v, ("", "_ptr", "_f32", "_again", "_at")) for v in values}
        self.arguments: list[tuple[str, int]] = []
        self.pointers: dict[str, list[str]] = {}
        for i in self.block.inputs:
            self.pointers[i.name] = [f"{self.value[i.name]}_ptr" if len(i.sources) == 1 else f"{self.value[i.name]}{k}_ptr"
                                     for k in range(len(i.sources))]
            self.arguments += zip(self.pointers[i.name], i.sources, strict=True)
        self.out_pointers = []
        for n, o in enumerate(self.block.outputs):
            taken = {a for a, _ in self.arguments}
            pointer = next(p for p in (f"{self.value[o.value]}_ptr", f"{self.value[o.value]}_out_ptr", f"out{n}_ptr") if p not in taken)
            self.out_pointers.append(pointer)
            self.arguments.append((pointer, len(self.plan.operands) + n))

    def _identifier(self, name: str, suffixes: Sequence[str]) -> str:
        base = re.sub(r"\W", "_", name)
        base = base if base.isidentifier() and not keyword.iskeyword(base) else f"v_{base}"
        while any(base + s in self.taken for s in suffixes):
            base += "_"
        self.taken |= {base + s for s in suffixes}
        return base

    def line(self, text: str = "") -> None:
        self.lines.append(("    " * self.indent + text) if text else "")

    def write(self) -> KernelText:
        self._offsets()
        for i in self.block.inputs:
            if self._is_selected(i) and self.block.role(i.joined) is Role.GRID:  # type: ignore[arg-type]
                self._select(i)
        early = [i for i in self.block.inputs if self.plan.walks and self.plan.loop not in i.axes
                 and self.plan.numel(self.block.input_axes(i)) <= EARLY_ELEMENTS_PER_THREAD * 32 * self.plan.schedule.num_warps]
        for i in early:
            self._load(i)
        for number, stage in enumerate(self.block.stages):
            self._stage(number, stage)
        for o, pointer in zip(self.block.outputs, self.out_pointers, strict=True):
            if self.plan.loop not in o.axes or not self.plan.walks:
                self._store(o, pointer)
        body = "\n".join(self.lines)
        arguments = ", ".join(a for a, _ in self.arguments)
        source = f"@triton.jit\ndef {self.name}({arguments}):\n{body}\n"
        helpers = tuple(h for h in triton_math.HELPERS if re.search(rf"(?<![\w.]){h}\(", body))
        return KernelText(self.name, source, helpers, tuple(self.arguments))

    # -- axes ---------------------------------------------------------------------------------------------------------------

    def _offsets(self) -> None:
        """Where this block stands on each axis that it does not walk."""
        cut = [a for a in self.block.named(Role.GRID) if self.plan.trips(a.name) > 1]
        before = 1
        if len(cut) > 1:
            self.line("pid = tl.program_id(0)")
        for a in self.block.axes:
            tile, trips, var = self.plan.tile(a.name), self.plan.trips(a.name), self.axis[a.name]
            if a.role is Role.LOOP and self.plan.walks:
                continue
            start = None
            if a in cut:
                start = "tl.program_id(0)" if len(cut) == 1 else f"pid // {before}" if before > 1 else "pid"
                if a is not cut[-1]:
                    start = f"({start}) % {trips}" if before > 1 else f"{start} % {trips}"
                before *= trips
            if tile == 1:
                if start is not None:
                    self.line(f"{var} = {start}  # {a.size} of them")
                continue
            if start is not None:
                self.line(f"{var}0 = {f'({start})' if ' ' in start else start} * {tile}")
                self.line(f"{var} = {var}0 + tl.arange(0, {tile})  # {a.size} in tiles of {tile}")
            else:
                self.line(f"{var} = tl.arange(0, {tile})  # all {a.size}")
            self._bound(a.name)

    def _bound(self, axis: str) -> None:
        if self.plan.ragged(axis):
            self.line(f"{self.axis[axis]}_in = {self.axis[axis]} < {self.block.axis(axis).size}")

    def _spread(self, text: str, dims: Sequence[str], onto: Sequence[str]) -> str:
        """`text` with dims `dims`, indexed so that it broadcasts against a tensor with dims `onto`."""
        if not dims or tuple(dims) == tuple(onto):
            return text
        return f"{text}[{', '.join(':' if a in dims else 'None' for a in onto)}]"

    def _mask(self, axes: Sequence[str], onto: Sequence[str]) -> list[str]:
        return [self._spread(f"{self.axis[a]}_in", (a,), onto) for a in onto if a in axes and self.plan.ragged(a)]

    # -- loads and stores -----------------------------------------------------------------------------------------------------

    def _address(self, pointer: str, axes: Sequence[str | None], strides: Sequence[int], dims: Sequence[str],
                 shift: tuple[str | None, str] = (None, "")) -> str:
        """Pointer arithmetic for a tile; `shift` names a joined axis and what its coordinate is called here."""
        far = sum((self.plan.trips(a) * self.plan.tile(a) - 1) * s for a, s in zip(axes, strides, strict=True) if a) >= 2 ** 31
        terms = [pointer]
        for a, stride in zip(axes, strides, strict=True):
            if a is None or (self.plan.tile(a) == 1 and (stride == 0 or self.plan.trips(a) == 1)):
                continue
            at = shift[1] if a == shift[0] else self.axis[a]
            term = self._spread(at, (a,) if self.plan.tile(a) > 1 else (), dims)
            term += ".to(tl.int64)" if far else ""
            terms.append(term if stride == 1 else f"{term} * {stride}")
        return " + ".join(terms)

    def _read(self, i: BlockInput, pointer: str, source: int, extra_mask: str | None = None,
              shift: tuple[str | None, str] = (None, ""), policy: str | None = None) -> str:
        axes = self.block.input_axes(i)
        dims = self.plan.dims(axes)
        arguments = [self._address(pointer, i.axes, self.plan.operands[i.sources[source]].strides, dims, shift)]
        mask = self._mask(axes, dims) + ([extra_mask] if extra_mask else [])
        if mask:
            arguments += [f"mask={' & '.join(mask)}", "other=0.0" if self.plan.dtype(i).is_floating_point else "other=0"]
        if policy is None and self.plan.schedule.evict_first and self.plan.loop and self.plan.loop in i.axes and self.plan.is_streamed(i):
            policy = "evict_first"
        if policy is not None:
            arguments.append(f'eviction_policy="{policy}"')
        return f"tl.load({', '.join(arguments)})"

    def _is_selected(self, i: BlockInput) -> bool:
        return len(i.sources) > 1 and self.plan.whole_sources(i)

    def _select(self, i: BlockInput) -> None:
        """Choose the source that this tile lies in."""
        value, axis = self.value[i.name], self.axis[i.joined]  # type: ignore[index]
        start = f"{axis}0" if self.plan.tile(i.joined) > 1 else axis  # type: ignore[arg-type]
        self.line(f"# {i.name} lies end to end along {i.joined} in {len(i.sources)} tensors; this tile is in one of them")
        low = 0
        for k, (size, pointer) in enumerate(zip(i.sizes, self.pointers[i.name], strict=True)):
            last = k == len(i.sizes) - 1
            self.line("else:" if last else f"{'el' if k else ''}if {start} < {low + size}:")
            self.line(f"    {value}_ptr = {pointer}")
            self.line(f"    {value}_at = {axis} - {low}" if low else f"    {value}_at = {axis}")
            low += size

    def _load(self, i: BlockInput) -> None:
        if i.name in self.have:
            return
        self.have.add(i.name)
        value, dtype = self.value[i.name], self.plan.dtype(i)
        wide = ".to(tl.float32)" if dtype is not torch.float32 and i.name not in self.plan.native else ""
        if len(i.sources) == 1:
            self.line(f"{value} = {self._read(i, self.pointers[i.name][0], 0)}{wide}")
        elif self._is_selected(i):
            if self.block.role(i.joined) is Role.LOOP:  # type: ignore[arg-type]
                self._select(i)
            self.line(f"{value} = {self._read(i, f'{value}_ptr', 0, shift=(i.joined, f'{value}_at'))}{wide}")
        else:
            self._load_parts(i, value)
            if wide:
                self.line(f"{value} = {value}{wide}")

    def _load_parts(self, i: BlockInput, value: str) -> None:
        """A tile may reach over several sources: each gives its elements and 0 elsewhere."""
        axis = self.axis[i.joined]  # type: ignore[index]
        dims = self.plan.dims(self.block.input_axes(i))
        low = 0
        self.line(f"# {i.name} lies end to end along {i.joined} in {len(i.sources)} tensors; each gives its own elements")
        for k, (size, pointer) in enumerate(zip(i.sizes, self.pointers[i.name], strict=True)):
            inside = [f"({axis} >= {low})"] if k else []
            inside += [f"({axis} < {low + size})"] if k < len(i.sizes) - 1 else []
            condition = f"({' & '.join(inside)})" if len(inside) > 1 else inside[0]
            mask = self._spread(condition, (i.joined,) if self.plan.tile(i.joined) > 1 else (), dims)  # type: ignore[arg-type]
            self.line(f"{value} {'+=' if k else '='} {self._read(i, pointer, k, mask, (i.joined, f'({axis} - {low})' if low else axis))}")
            low += size

    def _store(self, o: BlockOutput, pointer: str) -> None:
        tensor = self.plan.outputs[self.block.outputs.index(o)]
        dims = self.plan.value_dims(o.value)
        arguments = [self._address(pointer, o.axes, tensor.strides, dims), f"{self._wide(o.value)}.to({triton_dtype(tensor.dtype)})"]
        mask = self._mask([a for a in o.axes if a], dims)
        if mask:
            arguments.append(f"mask={' & '.join(mask)}")
        self.line(f"tl.store({', '.join(arguments)})")

    # -- stages ---------------------------------------------------------------------------------------------------------------

    def _stage(self, number: int, stage: Stage) -> None:
        plan, loop = self.plan, stage.loop
        self.line()
        sums = ", ".join(f"{a.out} = {a.kind} of {a.arg}" for a in stage.accumulators)
        self.line(f"# stage {number}" + (f": over {loop}" + (f", {sums}" if sums else "") if loop else ""))
        if not (loop and plan.walks):
            for op in stage.body:
                self._op(op)
            for acc in stage.accumulators:
                self._whole_accumulator(acc)
            return
        fixed = [op for op in stage.body if loop not in self.block.carried[op.out]]
        for op in fixed:
            self._op(op)
        inputs = sorted(self._read_in(stage), key=lambda i: -plan.numel(self.block.input_axes(i)))
        for i in inputs:
            if loop not in i.axes:
                self._load(i)
        for acc in stage.accumulators:
            self._start(acc)
        axis, size, tile = self.axis[loop], self.block.axis(loop).size, plan.tile(loop)
        stages = plan.schedule.num_stages
        walk = f"tl.range(0, {size}, {tile}, num_stages={stages})" if stages > 1 else f"range(0, {size}, {tile})"
        self.line(f"for {axis}0 in {walk}:")
        self.indent += 1
        self.line(f"{axis} = {axis}0 + tl.arange(0, {tile})" if tile > 1 else f"{axis} = {axis}0")
        self._bound(loop)
        for i in inputs:
            self._load(i)
        for op in stage.body:
            if op not in fixed:
                self._op(op)
        for acc in stage.accumulators:
            self._accumulate(acc)
        for o, pointer in zip(self.block.outputs, self.out_pointers, strict=True):
            if loop in o.axes and any(op.out == o.value for op in stage.body):
                self._store(o, pointer)
        self.indent -= 1
        for acc in stage.accumulators:
            if self._is_lazy(acc):
                dims = self._running_dims(acc)
                self.line(f"{self.value[acc.out]} = tl.{acc.kind}({self.value[acc.out]}, axis={dims.index(loop)})")
        self.have = {h for h in self.have if loop not in self.block.carried[h.removeprefix("wide ").removeprefix("again ")]}

    def _read_in(self, stage: Stage) -> list[BlockInput]:
        """The inputs that a stage's loop reads."""
        read = {a for op in stage.body for a in op.args} | {a.arg for a in stage.accumulators}
        return [i for i in self.block.inputs if i.name in read]

    def _op(self, op: BlockOp) -> None:
        if op.out in self.plan.skipped or op.out in self.have:
            return
        self.have.add(op.out)
        dot = self.plan.dots.get(op.out)
        if dot is not None:
            text = self._dot(dot)
        elif op.over is not None:
            text = self._reduced(op.fn, str(op.args[0]), op.over)
        else:
            dims = self.plan.value_dims(op.out)
            args = [Expr(self._spread(self._wide(a), self.plan.value_dims(a), dims)) if isinstance(a, str) else triton_math.constant(a)
                    for a in op.args]
            text = triton_math.elementwise(op.fn, args, dict(op.attrs)).text
        self.line(f"{self.value[op.out]} = {text}")

    def _value(self, value: str) -> str:
        """The name of a value, loading it first if it is an input."""
        if value in self.plan.input:
            self._load(self.plan.input[value])
        return self.value[value]

    def _wide(self, value: str) -> str:
        """The name of a value in float32."""
        name = self._value(value)
        if value not in self.plan.native or self.plan.dtype(self.plan.input[value]) is torch.float32:
            return name
        if f"wide {value}" not in self.have:
            self.have.add(f"wide {value}")
            again = self._read_again(self.plan.input[value]) if value in self.plan.read_asynchronously else name
            self.line(f"{name}_f32 = {again}.to(tl.float32)")
        return f"{name}_f32"

    def _read_again(self, i: BlockInput) -> str:
        """A load of its own for whatever else reads a factor of an asynchronous product.

        Triton (3.6) counts the buffers of a load that other code reads too as if no product read it asynchronously; the next
        copy then overwrites a tile that the product still reads: a race, seen as wrong sums on an H200. Another eviction
        policy keeps the compiler from joining the two loads again.
        """
        if len(i.sources) == 1:
            return self._read(i, self.pointers[i.name][0], 0, policy="evict_last")
        value = self.value[i.name]
        return self._read(i, f"{value}_ptr", 0, shift=(i.joined, f"{value}_at"), policy="evict_last")

    # -- reductions -------------------------------------------------------------------------------------------------------------

    def _inside(self, text: str, value: str, axis: str, kind: str) -> str:
        """`text` with the neutral element where `axis` reaches past its end."""
        dims = self.plan.value_dims(value)
        if not self.plan.ragged(axis) or (kind == "sum" and self.plan.zero_padded(value, axis)):
            return text
        return f"tl.where({self._spread(f'{self.axis[axis]}_in', (axis,), dims)}, {text}, {NEUTRAL[kind]})"

    def _reduced(self, kind: str, value: str, axis: str) -> str:
        dims = self.plan.value_dims(value)
        text = self._inside(self._wide(value), value, axis, kind)
        return f"tl.{kind}({text}, axis={dims.index(axis)})" if axis in dims else text

    def _factor(self, value: str, dot: Dot, transposed: bool) -> str:
        """A side of a tensor-core product."""
        over, dtype = dot.contraction.over, dot.dtype
        text = self._value(value)
        if value in self.plan.read_asynchronously and not self.plan.reads_as_stored(dot, value):
            if f"again {value}" not in self.have:
                self.have.add(f"again {value}")
                self.line(f"{text}_again = {self._read_again(self.plan.input[value])}")
            text = f"{text}_again"
        stored = self.plan.dtype(self.plan.input[value]) if value in self.plan.input else torch.float32
        if self.plan.ragged(over) and not self.plan.zero_padded(value, over):
            text = self._inside(text, value, over, "sum")
        text = text if stored is dtype else f"{text}.to({triton_dtype(dtype)})"
        return f"tl.trans({text})" if transposed else text

    def _dot(self, dot: Dot, start: str | None = None) -> str:
        arguments = [self._factor(dot.left, dot, dot.left_transposed), self._factor(dot.right, dot, dot.right_transposed)]
        arguments += [start] if start else []
        return f"tl.dot({', '.join(arguments)})"

    def _is_lazy(self, acc: Accumulator) -> bool:
        return self.plan.schedule.lazy and acc.out not in self.plan.dots and self.plan.loop in self.plan.value_dims(acc.arg)

    def _running_dims(self, acc: Accumulator) -> tuple[str, ...]:
        """The dims of an accumulator inside its loop."""
        return self.plan.value_dims(acc.arg if self._is_lazy(acc) else acc.out)

    def _start(self, acc: Accumulator) -> None:
        shape = ", ".join(str(self.plan.tile(a)) for a in self._running_dims(acc))
        text = f"tl.zeros([{shape}], tl.float32)" if acc.kind == "sum" else f"tl.full([{shape}], {NEUTRAL['max']}, tl.float32)"
        self.line(f"{self.value[acc.out]} = {text}")

    def _accumulate(self, acc: Accumulator) -> None:
        name, loop = self.value[acc.out], str(self.plan.loop)
        self.have.add(acc.out)
        if acc.out in self.plan.dots:
            self.line(f"{name} = {self._dot(self.plan.dots[acc.out], name)}")
            return
        part = self._inside(self._wide(acc.arg), acc.arg, loop, acc.kind) if self._is_lazy(acc) else self._reduced(acc.kind, acc.arg, loop)
        self.line(f"{name} += {part}" if acc.kind == "sum" else f"{name} = tl.maximum({name}, {part})")

    def _whole_accumulator(self, acc: Accumulator) -> None:
        """An accumulator whose loop axis is held whole: one reduction."""
        self.have.add(acc.out)
        dot = self.plan.dots.get(acc.out)
        self.line(f"{self.value[acc.out]} = {self._dot(dot) if dot else self._reduced(acc.kind, acc.arg, str(self.plan.loop))}")
