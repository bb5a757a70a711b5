"""The units of a program: ops that no window cuts apart, in an order that suits windows.

A unit is an op with the layout ops between it and the program's inputs. A concat of weights belongs
to each matmul that reads it. An op that the search cannot lower, such as a concat of computed
tensors, is a unit that stands alone.

Units are ordered in phases. Each unit is in the earliest phase that the units standing alone before
it allow. So the projections of q, k and v come together although reshapes lie between them in the
program. Inside a phase the order is depth first. Operands of commutative ops are visited in the
order of their structure, not as they were written.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirage_hf.errors import Rejected
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.search.dim_classes import tensors_of
from mirage_hf.search.expand import expand
from mirage_hf.search.library_cost import VIEWS
from mirage_hf.search.lowering import lower
from mirage_hf.search.subprogram import subprogram, tensors_by_index

#: Ops that write into their first operand.
EFFECTS = ("cache_append",)

_COMMUTATIVE = ("add", "mul", "max", "min")

#: The number of ops before an operand that its structure includes. Gate and up of an MLP differ in
#: the first op. Projections differ in none, and keep the order in which they were written.
_DEPTH = 3


@dataclass(frozen=True)
class Unit:
    """Ops that no window cuts apart: one op, and the layout ops before it.

    Attributes:
        ops: The layout ops, then the op that they belong to.
        alone: Why no generated kernel computes the op, or "" if one may.
        size: The number of ops that compute, with composites written out.
    """

    ops: tuple[KernelOp, ...]
    alone: str = ""
    size: int = 0

    @property
    def is_view(self) -> bool:
        """True if every op of the unit is a view."""
        return all(op.name in VIEWS for op in self.ops)


@dataclass(frozen=True)
class OrderedUnits:
    """The units of a program in the order in which windows take them.

    Attributes:
        units: The units.
        phases: The phase of each unit. Even phases hold units that kernels may compute, odd ones
            those that stand alone.
        attached: Outputs of layout ops that belong to each unit that reads them, by index.
    """

    units: tuple[Unit, ...]
    phases: tuple[int, ...]
    attached: frozenset[int]


def order_units(program: KernelGraph) -> OrderedUnits:
    """Return the units that the program's outputs and effects need."""
    return _UnitOrder(program).run()


def keeps_axes(view: KernelOp) -> bool:
    """Return True if the search lowers a view: it permutes dims, or adds or drops dims of 1."""
    if view.name == "reshape":
        (x,) = tensors_of(view)
        return [d for d in x.dims if d > 1] == [d for d in view.outputs[0].dims if d > 1]
    return view.name == "permute"


class _UnitOrder:
    def __init__(self, program: KernelGraph):
        self.program = program
        self.made = {t.index: op for op in program.ops for t in op.outputs}
        self.tensors = tensors_by_index(program)
        #: Layout ops between the program's inputs and the first op that computes, by their output.
        self.leaves: set[int] = set()
        #: The leaves that the search can lower together with their reader.
        self.attached: set[int] = set()
        self._find_leaves()
        self.before = _effect_order(program)
        self.structure = _structure(program)
        # The keys are the first outputs of units' ops.
        self._units: dict[int, Unit] = {}
        self._phases: dict[int, int] = {}

    def run(self) -> OrderedUnits:
        for t in self.program.outputs:
            self._visit(t.index)
        for op in self.program.ops:
            if op.name in EFFECTS:
                self._visit(op.outputs[0].index)
        phases = self._phases
        ordered = sorted(phases, key=lambda first: phases[first])  # stable inside a phase
        return OrderedUnits(
            tuple(self._units[first] for first in ordered),
            tuple(phases[first] for first in ordered),
            frozenset(self.attached),
        )

    def _visit(self, root: int) -> None:
        """Give a phase to the unit of a tensor, and before that to the units it needs."""
        stack = [(root, False)]
        while stack:
            tensor, needs_are_done = stack.pop()
            op = self.made.get(tensor)
            if op is None or op.outputs[0].index in self._phases:
                continue
            needs = self._needs(op)
            if needs_are_done:
                self._phases[op.outputs[0].index] = self._phase(op, needs)
            else:
                stack.append((tensor, True))
                stack += [(t, False) for t in reversed(needs)]

    def _needs(self, op: KernelOp) -> list[int]:
        """Return the tensors that an op's unit needs, and those it must wait for."""
        unit = self._unit(op)
        inside = {t.index for o in unit.ops for t in o.outputs}
        needs = [x.index for o in unit.ops for x in tensors_of(o) if x.index not in inside]
        if op.name in _COMMUTATIVE:
            needs.sort(key=lambda t: self.structure[t])
        before = self.before.get(op.outputs[0].index, [])
        return needs + [t for t in before if t not in self.attached]

    def _phase(self, op: KernelOp, needs: list[int]) -> int:
        above = [self._phases[self.made[t].outputs[0].index] for t in needs if t in self.made]
        last = max(above, default=0)
        is_view = op.name in VIEWS and keeps_axes(op)
        if op.outputs[0].index in self.leaves or is_view:
            return last
        stands_alone = bool(self._unit(op).alone)
        return last + (last % 2 != stands_alone)

    def _unit(self, op: KernelOp) -> Unit:
        first = op.outputs[0].index
        if first not in self._units:
            self._units[first] = self._make_unit(op)
        return self._units[first]

    def _make_unit(self, op: KernelOp) -> Unit:
        ops = (*self._attached_before(op), op)
        if op.name == "concat" and op.outputs[0].index not in self.leaves:
            return Unit(ops, "concat of computed tensors ends a kernel")
        if op.block is not None:
            return Unit(ops, "it is a block graph already")
        graph, _ = subprogram(self.program, ops, [op.outputs[0].index], self.tensors)
        lowered = lower(graph)
        size = sum(o.name not in VIEWS for o in expand(graph).ops)
        return Unit(ops, lowered.reason if isinstance(lowered, Rejected) else "", size)

    def _find_leaves(self) -> None:
        sources = {t.index for t in self.program.inputs}
        for op in self.program.ops:
            is_layout = op.name in (*VIEWS, "concat", "take")
            if not is_layout or any(x.index not in sources for x in tensors_of(op)):
                continue
            out = op.outputs[0].index
            self.leaves.add(out)
            sources.add(out)
            if op.name in ("concat", "take") or keeps_axes(op):
                chain = [*self._attached_before(op), op]
                graph, _ = subprogram(self.program, chain, [out], self.tensors)
                if not isinstance(lower(graph), Rejected):
                    self.attached.add(out)

    def _attached_before(self, op: KernelOp) -> list[KernelOp]:
        """Return the attached layout ops that an op reads, in an order in which they can run."""
        found: list[KernelOp] = []
        for x in tensors_of(op):
            if x.index in self.attached:
                maker = self.made[x.index]
                found += [o for o in (*self._attached_before(maker), maker) if o not in found]
        return found


def _structure(program: KernelGraph) -> dict[int, str]:
    """Describe every tensor by the ops just before it.

    The description does not depend on the order of a commutative op's operands. It is the same in
    every layer of a model.
    """
    tensors = [*program.inputs, *(t for op in program.ops for t in op.outputs)]
    texts = {t.index: f"{t.dims} {t.dtype}" for t in tensors}
    for _ in range(_DEPTH):
        above = dict(texts)
        for op in program.ops:
            args = [above[x.index] if isinstance(x, DTensor) else repr(x) for x in op.inputs]
            if op.name in _COMMUTATIVE:
                args.sort()
            text = f"{op.name}({', '.join(args)}) {op.attrs}"
            texts |= {t.index: f"{text} {n}" for n, t in enumerate(op.outputs)}
    return texts


def _effect_order(program: KernelGraph) -> dict[int, list[int]]:
    """Return the ops that must come before each op, so that no read moves across a write in place.

    Ops are given by their first outputs.
    """
    buffers: dict[int, int] = {}  # the tensor whose memory a view or a written tensor shares
    uses: dict[int, list[tuple[int, bool]]] = {}  # by buffer: the op, and whether it writes
    before: dict[int, list[int]] = {}
    for op in program.ops:
        first, tensors = op.outputs[0].index, tensors_of(op)
        read = [buffers.get(x.index, x.index) for x in tensors]
        for buffer in sorted(set(read)):
            writes = op.name in EFFECTS and read[0] == buffer
            earlier = uses.setdefault(buffer, [])
            before.setdefault(first, []).extend(o for o, wrote in earlier if writes or wrote)
            earlier.append((first, writes))
        if op.name in (*VIEWS, *EFFECTS):
            buffers[first] = read[0]
    of_written = {
        op for users in uses.values() if any(wrote for _, wrote in users) for op, _ in users
    }
    return {op: needed for op, needed in before.items() if op in of_written and needed}
