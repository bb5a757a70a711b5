"""Turn one kernel of a plan into a block graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mirage_hf import _core
from mirage_hf.graph.block import Axis, BlockOutput, Padding, Role, Rotation, Taken
from mirage_hf.graph.kernel import DTensor
from mirage_hf.search.block_writer import BlockWriter, EmissionFormError
from mirage_hf.search.core_program import CORE_OPS, CORE_ROLES
from mirage_hf.search.emitted_plan import EmittedPlan, StoredValue, ValueName, node_of
from mirage_hf.search.lowered_program import LoweredInput, Term
from mirage_hf.search.scaled_value import ScaledArithmetic, ScaledValue, Shift

OP_NAMES = {core: name for name, core in CORE_OPS.items()}
_ROLES = {core: role for role, core in CORE_ROLES.items()}
_ROLE_ORDER = {Role.GRID: 0, Role.CLUSTER: 1, Role.TILE: 2, Role.LOOP: 3}


class EmissionError(Exception):
    """An error: a plan has no block graphs in any form."""


@dataclass(frozen=True)
class _PartialResults:
    """Partial results, one for each split of an axis, that nothing has combined yet."""

    value: ScaledValue
    axis: str
    kind: str


class KernelEmitter:
    """Turns one kernel of a plan into a block graph.

    Raises:
        EmissionFormError: If the kernel has no block graph in the form that is tried.
        EmissionError: If it has none in any form.
    """

    def __init__(self, plan: EmittedPlan, kernel: _core.FoundKernel):
        self.plan, self.kernel = plan, kernel
        axes = _KernelAxes(plan, kernel)
        self.axes = axes
        # The only kernel of a µGraph reads the program's inputs in the program's order.
        operands = plan.inputs if plan.num_kernels == 1 else []
        self.writer = BlockWriter(axes.ordered, axes.loop, operands)
        self.scaled = ScaledArithmetic(self.writer, plan.division)
        #: The values that were computed or read so far.
        self.values: dict[ValueName, ScaledValue] = {}
        #: Partial results that nothing has read yet.
        self.partial_results: dict[ValueName, _PartialResults] = {}
        #: Combined partial results that are stored in the first pass over the loop.
        self.in_first_pass: dict[ValueName, ScaledValue] = {}

    def emit(self) -> None:
        """Add the kernel to the plan's kernel graph."""
        for leaf in self.kernel.leaves:  # a leaf: what the kernel reads
            self._read(leaf)
        self._write_stages()
        outputs = _KernelOutputs(self)
        # Outputs of the program come first, in their order. Then come values that later kernels
        # read (output < 0).
        for output in sorted(self.kernel.outputs, key=lambda o: (o.output < 0, o.output)):
            outputs.store(output)
        self.writer.end_stage(loops=False)
        block = self.writer.graph(outputs.blocks)
        tensors = self.plan.kernels.customized(self.writer.operands, block)
        outputs.publish(tensors)

    def _write_stages(self) -> None:
        whole = self._whole_outputs()
        for stage, following in pairwise((*self.kernel.stages, None)):
            loops = stage.loop >= 0
            for op in stage.body:
                x = self._made(op, self._compute(op))
                if op.out in whole and not x.is_plain and op.out not in self.partial_results:
                    # A value that changes along the loop must be stored in this stage.
                    self.values[op.out] = ScaledValue(self.scaled.plain(x))
            for op in stage.accumulators:
                value = self.value(op.args[0])
                self._made(op, self.scaled.accumulate(OP_NAMES[op.op], value))
                if node_of(op.args[0]) in self.plan.of_exponential:
                    self.plan.of_exponential.add(node_of(op.out))
            if loops:
                self._combine_for_outputs(whole)
                self.writer.end_stage(loops=True)
            self._add_up_in_cluster()
            if not loops or (following is not None and following.loop >= 0):
                self.writer.end_stage(loops=False)

    def _made(self, op: _core.FoundOp, x: ScaledValue) -> ScaledValue:
        """Note the value of an op: the block's part of it, if a cluster splits what it reduces."""
        reduces = OP_NAMES[op.op] in ("sum", "max")
        if self.kernel.clustered and reduces and op.axis == self.kernel.split:
            axis = str(self.axes.split_axis)
            self.partial_results[op.out] = _PartialResults(x, axis, OP_NAMES[op.op])
        else:
            self.values[op.out] = x
        return x

    def _add_up_in_cluster(self) -> None:
        """Combine what the blocks of a cluster hold, in a stage that runs once."""
        for name, waiting in list(self.partial_results.items()):
            if self._is_of_cluster(waiting):
                self.value(name)

    def _is_of_cluster(self, results: _PartialResults) -> bool:
        return self.kernel.clustered and results.axis == self.axes.split_axis

    def _whole_outputs(self) -> set[ValueName]:
        """Return the values that are outputs of the program."""
        return {output.value for output in self.kernel.outputs if output.output >= 0}

    def _combine_for_outputs(self, whole: set[ValueName]) -> None:
        """Combine partial results that change along the loop and are stored in its first pass."""
        waiting = {name for name, p in self.partial_results.items() if not self._is_of_cluster(p)}
        for name in sorted(whole & waiting - self.in_first_pass.keys()):
            x = self.value(name)
            if self.writer.loop in self.scaled.axes_of(x):
                self.in_first_pass[name] = ScaledValue(self.scaled.plain(x))

    # -- reading -----------------------------------------------------------------------------------

    def value(self, name: ValueName) -> ScaledValue:
        """Return a value of the kernel, its partial results combined."""
        waiting = self.partial_results.get(name)
        if waiting is None:
            return self.values[name]
        if waiting.kind == "sum":
            combined = self.scaled.sum(waiting.value, waiting.axis)
        else:
            plain = self.scaled.plain(waiting.value)
            combined = ScaledValue(self.writer.op("max", (plain,), over=waiting.axis))
        if self.writer.loop in self.scaled.axes_of(combined):
            return combined  # it is local to a tile of the loop, so each pass combines it again
        self.values[name] = combined
        del self.partial_results[name]
        return combined

    def _read(self, leaf: _core.FoundLeaf) -> None:
        if leaf.node < 0:
            self._read_stored(leaf)
            return
        term = self.plan.lowered.terms[leaf.node]
        if term.op != "input":
            # A constant, or a maximum that cancels out of every output. The core reads it as 0,
            # which is also the value of its term.
            self.values[leaf.value] = ScaledValue(term.value)
            return
        source = self.plan.lowered.inputs[term.source]
        name = self._input_name(term, source)
        if source.bounds is not None:
            self.values[leaf.value] = self._read_mask(name, term, source)
        else:
            self.values[leaf.value] = self._read_input(name, term, source)

    def _read_stored(self, leaf: _core.FoundLeaf) -> None:
        """Read what an earlier kernel stored: a mantissa, and its shift if it has one."""
        stored = self.plan.stored[leaf.value]
        axes = self.axes.here(stored.axes, stored.mantissa)
        x = ScaledValue(self.writer.load(stored.mantissa.name, [stored.mantissa], axes))
        if stored.shift is not None:
            name = self._shift_name(stored, stored.shift)
            x = replace(x, plus=(Shift(name, stored.origin, True),))
        if leaf.partial < 0:
            self.values[leaf.value] = x
            return
        kind = OP_NAMES[leaf.combine]
        self.partial_results[leaf.value] = _PartialResults(x, str(axes[0]), kind)

    def _shift_name(self, stored: StoredValue, shift: DTensor) -> str:
        """Return the block input for a stored shift, which several mantissas may share."""
        for name, tensor in self.writer.tensor_behind.items():
            if tensor is shift:
                return name
        return self.writer.load(shift.name, [shift], self.axes.here(stored.shift_axes, shift))

    def _input_name(self, term: Term, source: LoweredInput) -> str:
        base = "_".join(self.plan.program.inputs[s].name for s in source.sources)
        terms = self.plan.lowered.terms
        reads = sum(t.op == "input" and t.source == term.source for t in terms)
        if reads == 1:
            return base
        count = self.writer.num_inputs
        return f"{base}_{term.index[0] or count}_{count}"

    def _read_mask(self, name: str, term: Term, source: LoweredInput) -> ScaledValue:
        assert source.bounds is not None
        lo, hi = (self.plan.inputs[s] for s in source.sources)
        own = [None if d == source.bounds else axis for d, axis in enumerate(term.index)]
        own = own[len(own) - len(lo.dims) :]
        bounds = term.index[source.bounds]
        mask = self.writer.load(name, [lo, hi], tuple(own), bounds=bounds)
        self.scaled.mask_origin[mask] = ("within", term.source, term.index)
        return ScaledValue(1.0, masks=(mask,))

    def _read_input(self, name: str, term: Term, source: LoweredInput) -> ScaledValue:
        several = len(source.sources) > 1
        axes, taken = term.index, None
        if source.taken is not None:
            dim, number, of_index = source.taken
            after_index = dim + len(of_index)
            axes = (*axes[:dim], None, *axes[after_index:])
            index = self.writer.operand(self.plan.inputs[number])
            taken = Taken(dim, source.dims[dim], index, term.index[dim:after_index])
        joined = axes[source.joined] if several and source.joined is not None else None
        rotation = padding = None
        if source.rotation is not None:
            dim, how, width = source.rotation
            rotation = Rotation(str(axes[dim]), how, width)
        if source.padding is not None:
            dim, after = source.padding
            padding = Padding(str(axes[dim]), source.dims[dim], after)
        value = self.writer.load(
            name,
            [self.plan.inputs[s] for s in source.sources],
            axes,
            joined=joined,
            sizes=source.sizes if several else (),
            rotation=rotation,
            padding=padding,
            taken=taken,
        )
        return ScaledValue(value)

    # -- computing ---------------------------------------------------------------------------------

    def _compute(self, op: _core.FoundOp) -> ScaledValue:
        name = OP_NAMES[op.op]
        args = [self.value(a) for a in op.args]
        # An exponential of an exponential is opaque to proofs, so it is not split into a shift.
        nested = any(node_of(a) in self.plan.of_exponential for a in op.args)
        if name == "exp" or nested:
            self.plan.of_exponential.add(node_of(op.out))
        if name == "exp" and self.plan.scaled and not nested:
            return self._exponential(op, args[0])
        if name == "sum":
            return self.scaled.sum(args[0], self.plan.axes[op.axis])
        if name in ("mul", "div", "add", "sub") and not all(x.is_plain for x in args):
            a, b = args
            if name == "mul":
                return self.scaled.product(a, b)
            if name == "div":
                return self.scaled.quotient(a, b)
            return self.scaled.add(name, a, b)
        plain = tuple(self.scaled.plain(x) for x in args)
        if name == "max":
            return ScaledValue(self.writer.op("max", plain, over=self.plan.axes[op.axis]))
        if name == "opaque":
            function = self.plan.functions[op.symbol]
            return ScaledValue(self.writer.op(function.fn, plain, function.attrs))
        return ScaledValue(self.writer.op(self.plan.division if name == "div" else name, plain))

    def _exponential(self, op: _core.FoundOp, arg: ScaledValue) -> ScaledValue:
        """Return e^arg as the mantissa 1 with the shift `arg`."""
        exponent = self.scaled.plain(arg)
        if isinstance(exponent, float):
            raise EmissionFormError("exp of a number")
        return ScaledValue(1.0, (Shift(exponent, (node_of(op.args[0]),)),))


class _KernelAxes:
    """The axes of a kernel: those of the program in use, and those that number splits."""

    def __init__(self, plan: EmittedPlan, kernel: _core.FoundKernel):
        used = {name: kernel.roles[i] for i, name in enumerate(plan.axes) if kernel.axes >> i & 1}
        sizes = plan.lowered.sizes
        axes = {name: Axis(name, sizes[name], _ROLES[role]) for name, role in used.items()}
        #: The axis that the kernel loops over.
        self.loop = next((name for name, role in used.items() if role == _core.Role.loop), None)
        #: The axis that numbers the splits of another axis of this kernel.
        self.split_axis: str | None = None
        if kernel.split >= 0:
            whole = plan.axes[kernel.split]
            self.split_axis = _fresh_axis(f"{whole}_split", axes)
            role = Role.CLUSTER if kernel.clustered else Role.GRID
            axes[self.split_axis] = Axis(self.split_axis, kernel.num_splits, role)
            axes[whole] = replace(axes[whole], split_axis=self.split_axis)
        #: This kernel's names for the split axes of stored partial results, by the stored name and
        #: size.
        self._combined: dict[tuple[str, int], str] = {}
        for leaf in kernel.leaves:
            if leaf.partial >= 0:
                stored = plan.stored[leaf.value]
                there = (str(stored.axes[0]), stored.mantissa.dims[0])
                if there not in self._combined:
                    name = self._combined[there] = _fresh_axis(there[0], axes)
                    axes[name] = Axis(name, there[1], Role.TILE)
        self._of_outputs = [a for output in plan.lowered.outputs for a in output.index if a]
        self._of_program = plan.axes
        #: The axes, ordered by role, then as in the program's outputs, then as in the program.
        self.ordered = tuple(sorted(axes.values(), key=self._rank))

    def _rank(self, axis: Axis) -> tuple[int, int, int]:
        of_outputs, of_program = self._of_outputs, self._of_program
        output = of_outputs.index(axis.name) if axis.name in of_outputs else len(of_outputs)
        program = of_program.index(axis.name) if axis.name in of_program else -1
        return _ROLE_ORDER[axis.role], output, program

    def here(self, axes: tuple[str | None, ...], tensor: DTensor) -> tuple[str | None, ...]:
        """Return the axes of a stored tensor as this kernel calls them."""
        pairs = zip(axes, tensor.dims, strict=True)
        return tuple(self._combined.get((str(axis), size), axis) for axis, size in pairs)


def _fresh_axis(name: str, axes: Iterable[str]) -> str:
    while name in axes:
        name += "_"
    return name


@dataclass(frozen=True)
class _Place:
    """The outputs in which a kernel stores a value: its mantissa and its shift, if it has one."""

    mantissa: int
    shift: int | None = None
    origin: tuple[object, ...] = ()


class _KernelOutputs:
    """The outputs of a kernel: outputs of the program, and values for later kernels."""

    def __init__(self, emitter: KernelEmitter):
        self.emitter, self.plan = emitter, emitter.plan
        self.writer, self.scaled = emitter.writer, emitter.scaled
        #: Pairs of a block output and the number of the program's output that it is, or -1.
        self._outputs: list[tuple[BlockOutput, int]] = []
        #: Where each value is stored that later kernels read.
        self._places: dict[ValueName, _Place] = {}

    @property
    def blocks(self) -> list[BlockOutput]:
        return [output for output, _ in self._outputs]

    def store(self, output: _core.FoundOutput) -> None:
        x = self.emitter.in_first_pass.get(output.value)
        if x is None:
            x = self.emitter.value(output.value)
        if output.output >= 0:
            result = self.plan.lowered.outputs[output.output]
            plain = self.scaled.plain(x)
            at = self._add(plain, result.index, result.dtype, output.output)
            self._places[output.stored] = _Place(at)
        else:
            self._places[output.stored] = self._store_for_later(output.stored, x)

    def _store_for_later(self, value: ValueName, x: ScaledValue) -> _Place:
        """Store a value that later kernels read: its mantissa, and its shift if it has one."""
        if self.scaled.is_at_most_one(x):
            x = ScaledValue(self.scaled.plain(x))
        x = self.scaled.with_masks_applied(x)
        carried = self.writer.carried[x.mantissa] if isinstance(x.mantissa, str) else ()
        split = self.emitter.axes.split_axis
        order, dtype = self.plan.layout(value, [a for a in carried if a != split])
        if not x.is_plain or split in carried:
            dtype = "float32"
        at = self._add(x.mantissa, (*_leading(split, carried), *order), dtype)
        if x.is_plain:
            return _Place(at)
        shift = self.scaled.exponent(x)
        carried = self.writer.carried[shift.name]
        grid = [a.name for a in self.writer.axes if a.role is Role.GRID]
        if any(axis not in carried for axis in grid):
            raise EmissionError("blocks that share a shift would all store it")
        axes = (*_leading(split, carried), *(a for a in order if a in carried))
        return _Place(at, self._add(shift.name, axes, "float32"), shift.origin)

    def _add(
        self,
        value: str | float,
        axes: tuple[str | None, ...],
        dtype: str,
        program_output: int = -1,
    ) -> int:
        """Add a block output and return its number."""
        stored = sorted(a for a in axes if a)
        if not self.writer.is_computed(value) or sorted(self.writer.carried[str(value)]) != stored:
            raise EmissionFormError(
                "a kernel would store an input, a number, or a value that repeats along an axis"
            )
        output = (BlockOutput(str(value), axes or (None,), dtype), program_output)
        if output not in self._outputs:
            self._outputs.append(output)
        return self._outputs.index(output)

    def publish(self, tensors: Sequence[DTensor]) -> None:
        """Tell the plan which tensors hold its outputs and the values for later kernels."""
        for (_, program_output), tensor in zip(self._outputs, tensors, strict=True):
            if program_output >= 0:
                self.plan.results[program_output] = tensor
        for value, place in self._places.items():
            stored = StoredValue(tensors[place.mantissa], self._outputs[place.mantissa][0].axes)
            if place.shift is not None:
                stored = replace(
                    stored,
                    shift=tensors[place.shift],
                    shift_axes=self._outputs[place.shift][0].axes,
                    origin=place.origin,
                )
            # Later kernels read partial results as such, even if another kernel has combined them.
            self.plan.stored.setdefault(value, stored)


def _leading(split: str | None, carried: Sequence[str]) -> tuple[str, ...]:
    """Return the split axis if a value carries it. It is the first dim of the value's tensor."""
    return (split,) if split is not None and split in carried else ()
