"""The kernel graph of a plan while its kernels are emitted, and the values that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mirage_hf import _core
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.ops import table
from mirage_hf.search.core_program import CORE_OPS
from mirage_hf.search.lowered_program import LoweredProgram, Term

#: The core's name of a value: the variant's node that computes it, and a pass. If a later pass over
#: a loop computes the node again, it is the number of that pass. Otherwise it is 0.
ValueName = tuple[int, int]


def node_of(value: ValueName) -> int:
    """Return the node of the variant that computes a value."""
    return value[0]


@dataclass(frozen=True)
class StoredValue:
    """A value that a kernel stores in device memory for later kernels.

    Attributes:
        mantissa: The tensor of the value, or of its mantissa.
        axes: The axis of each dim of `mantissa`.
        shift: The tensor of its shift, or None.
        shift_axes: The axis of each dim of `shift`.
        origin: The nodes that the shift is a bound of, as in `Shift.origin`.
    """

    mantissa: DTensor
    axes: tuple[str | None, ...]
    shift: DTensor | None = None
    shift_axes: tuple[str | None, ...] = ()
    origin: tuple[object, ...] = ()


class EmittedPlan:
    """The kernel graph of a plan, one kernel after the other.

    With `scaled`, exponentials that a division cancels are kept in range.
    """

    def __init__(
        self,
        plan: _core.Candidate,
        lowered: LoweredProgram,
        functions: Sequence[Term],
        program: KernelGraph,
        scaled: bool,
    ):
        self.plan, self.lowered, self.functions = plan, lowered, functions
        self.program, self.scaled = program, scaled
        self.axes = list(lowered.sizes)
        self.division = "ratio" if lowered.ratios else "div"
        self.num_kernels = len(plan.kernels)
        self.kernels = KernelGraph()
        inputs = [self.kernels.input_like(t) for t in program.inputs]
        #: The program's inputs as kernels read them. If a reshape of the program splits a dim, this
        #: is a view of the input.
        self.inputs = list(map(self._viewed, range(len(inputs)), inputs))
        #: Values in device memory.
        self.stored: dict[ValueName, StoredValue] = {}
        #: The program's outputs that kernels have stored, by number.
        self.results: dict[int, DTensor] = {}
        #: Nodes that are computed from an exponential.
        self.of_exponential: set[int] = set()

    def _viewed(self, number: int, t: DTensor) -> DTensor:
        """Return an input of the kernels, viewed with the dims that the lowered program reads."""
        for read in self.lowered.inputs:
            if read.sources == (number,) and read.bounds is None and read.dims != t.dims:
                return self.kernels.reshape(t, read.dims)
        return t

    def finish(self) -> KernelGraph:
        """Mark the outputs, in the program's dims, and return the kernels."""
        for number, wanted in enumerate(self.program.outputs):
            stored = self.results[number]
            if stored.dims != wanted.dims:
                stored = self.kernels.reshape(stored, wanted.dims)
            self.kernels.mark_output(stored)
        return self.kernels

    def layout(self, value: ValueName, axes: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Return the order of dims and the dtype of a value that later kernels read.

        The dims that later kernels sum over come last. If later kernels multiply the value with a
        16-bit input, it has the input's dtype. Codes count as inputs of the program's 16-bit dtype.
        All other values are float32.
        """
        summed: set[str] = set()
        sources: set[int] = set()
        for kernel in self.plan.kernels:
            leaves = {leaf.value: leaf for leaf in kernel.leaves}
            if value in leaves and leaves[value].node < 0:
                ops = [op for stage in kernel.stages for op in (*stage.body, *stage.accumulators)]
                summed |= {self.axes[op.axis] for op in ops if op.op == CORE_OPS["sum"]}
                sources |= self._multiplied_inputs(value, ops, leaves)
        order = sorted(axes, key=lambda a: (a in summed, list(axes).index(a)))
        dtypes = {self._dtype_of(s) for s in sources if self.lowered.inputs[s].bounds is None}
        return tuple(order), dtypes.pop() if len(dtypes) == 1 else "float32"

    def _multiplied_inputs(
        self,
        value: ValueName,
        ops: Sequence[_core.FoundOp],
        leaves: dict[ValueName, _core.FoundLeaf],
    ) -> set[int]:
        """Return the inputs that a kernel multiplies with a stored value."""
        factors = {
            a
            for op in ops
            if op.op == CORE_OPS["mul"] and value in op.args
            for a in op.args
            if a != value
        }
        nodes = [leaves[a].node for a in factors if a in leaves and leaves[a].node >= 0]
        terms = [self.lowered.terms[node] for node in nodes]
        return {term.source for term in terms if term.op == "input"}

    def _dtype_of(self, source: int) -> str:
        first = self.lowered.inputs[source].sources[0]
        dtype = self.program.inputs[first].dtype
        if dtype in table.CODE_DTYPES:
            floats = {t.dtype for t in self.program.inputs} & {*table.COMPUTE_DTYPES}
            halves = [d for d in floats if d.itemsize == 2]
            dtype = halves[0] if len(halves) == 1 else torch.float32
        return table.dtype_name(dtype)
