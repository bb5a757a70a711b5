"""Cutting a program into windows: ranges of its ops, in an order that brings what may be one kernel together.

A *unit* is an op with the layout ops between it and the program's inputs (a concat of weights belongs to each matmul that
reads it). What the search cannot lower (cache_append, a concat of computed tensors …) is a unit that stands alone. Units are
ordered in phases, each as early as the ops that stand alone before it allow: the projections of q, k and v come together
although reshapes lie between them in the program. Inside a phase the order is depth first, operands of commutative ops by
structure and not as they were written. Windows lie between *boundaries*: where few computed tensors are live, between phases,
and around units that stand alone. Views at the edges of a window that the search cannot lower, or that others read too, are
left to torch, for which they are free: the window then reads, or writes, the tensor behind the view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from mirage_hf.errors import Rejected
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table
from mirage_hf.search.calls import VIEWS, copy_us
from mirage_hf.search.spec import expand, lower

MAX_OPS = 14
"""Ops of one window, composites written out, views not counted. At Llama-3.2-1B's sizes every such window of a Llama or Gemma
layer was searched to the end in 0.23 s or less on one core; two norms around a gated MLP (18 ops) took 1 to 20 s."""
MAX_LIVE = 2
"""Computed tensors that cross a boundary inside a phase: a residual and the value in hand. A gated product has three in between,
and a cut there never was the better one in the layers tried."""
_COMMUTATIVE = ("add", "mul", "max", "min")
_EFFECTS = ("cache_append",)
_DEPTH = 3
"""How many ops back operands are told apart: gate and up of an MLP differ in the first, projections in none (as written then)."""


@dataclass(frozen=True)
class Unit:
    """Ops that are never cut apart, the last one the op proper. `alone`: why no kernel of ours computes it, "" if one may."""

    ops: tuple[KernelOp, ...]
    alone: str = ""

    size: int = 0
    """Ops that compute, composites written out."""

    @property
    def is_view(self) -> bool:
        return all(op.name in VIEWS for op in self.ops)


@dataclass(frozen=True)
class Window:
    """Units [start, stop): views before, `graph` (None: nothing but views), views after. `reads` and `writes` are the program's
    tensors behind the graph's inputs and outputs, by index. `view_us`: what the views cost, where later ones must copy."""

    start: int
    stop: int
    before: tuple[KernelOp, ...]
    graph: KernelGraph | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    after: tuple[KernelOp, ...]
    view_us: float


@dataclass(frozen=True)
class Cut:
    """A program cut into units; `windows` holds every range that may be chosen, single units first."""

    program: KernelGraph
    units: tuple[Unit, ...]
    boundaries: tuple[int, ...]
    singles: tuple[Window, ...]
    windows: tuple[Window, ...]


def cut(program: KernelGraph) -> Cut:
    """Cut a program of any size and any ops."""
    return _Cutting(program).run()


def part(
    program: KernelGraph, ops: Sequence[KernelOp], writes: Sequence[int]
) -> tuple[KernelGraph, tuple[int, ...]]:
    """Some ops of a program as a graph of their own that returns the tensors `writes`, and the tensors that it reads, by index."""
    graph = KernelGraph()
    new: dict[int, DTensor] = {}
    made = {t.index for op in ops for t in op.outputs}
    reads = list(
        dict.fromkeys(
            x.index
            for op in ops
            for x in op.inputs
            if isinstance(x, DTensor) and x.index not in made
        )
    )
    known = {t.index: t for t in program.inputs} | {
        t.index: t for op in program.ops for t in op.outputs
    }
    for n in reads:
        t = known[n]
        new[n] = graph.input_like(t)
    for op in ops:
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        outputs = (
            graph.customized(args, op.block)
            if op.block
            else [graph.apply(op.name, args, dict(op.attrs))]
        )  # type: ignore[arg-type]
        new |= {t.index: y for t, y in zip(op.outputs, outputs, strict=True)}
    graph.mark_output(*(new[n] for n in writes))
    return graph, tuple(reads)


def _tensors(op: KernelOp) -> list[DTensor]:
    return [x for x in op.inputs if isinstance(x, DTensor)]


def _keeps_axes(op: KernelOp) -> bool:
    """Whether a view only permutes or drops dims of 1: the search takes such."""
    if op.name == "reshape":
        old, new = ([d for d in t.dims if d > 1] for t in (_tensors(op)[0], op.outputs[0]))
        return old == new
    return op.name == "permute"


@dataclass
class _Cutting:
    program: KernelGraph
    units: list[Unit] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)

    def run(self) -> Cut:
        self.made = {t.index: op for op in self.program.ops for t in op.outputs}
        self.outputs = {t.index for t in self.program.outputs}
        self.charges = self._charges()
        self._find_leaves()
        self._order()
        self.readers: dict[int, list[int]] = {}
        for n, u in enumerate(self.units):
            inside = {t.index for op in u.ops for t in op.outputs}
            for x in {x.index for op in u.ops for x in _tensors(op)} - inside:
                self.readers.setdefault(x, []).append(n)
        boundaries = self._boundaries()
        singles = tuple(self._window(n, n + 1) for n in range(len(self.units)))
        return Cut(
            self.program, tuple(self.units), boundaries, singles, tuple(self._windows(boundaries))
        )

    # -- units ------------------------------------------------------------------------------------------------------------

    def _find_leaves(self) -> None:
        """Layout ops between the program's inputs and the first op that computes; `attached` ones belong to their readers."""
        self.leaf: set[int] = set()
        self.attached: set[int] = set()
        source = {t.index for t in self.program.inputs}
        for op in self.program.ops:
            out = op.outputs[0].index
            if op.name in (*VIEWS, "concat") and all(x.index in source for x in _tensors(op)):
                self.leaf.add(out)
                source.add(out)
                chain = [*self._chain(op), op]
                if (op.name == "concat" or _keeps_axes(op)) and not isinstance(
                    lower(part(self.program, chain, [out])[0]), Rejected
                ):
                    self.attached.add(out)

    def _chain(self, op: KernelOp) -> list[KernelOp]:
        """The attached layout ops before an op."""
        found: list[KernelOp] = []
        for x in _tensors(op):
            if x.index in self.attached:
                found += [
                    o
                    for o in (*self._chain(self.made[x.index]), self.made[x.index])
                    if o not in found
                ]
        return found

    def _unit(self, op: KernelOp) -> Unit:
        ops = (*self._chain(op), op)
        if op.name == "concat" and op.outputs[0].index not in self.leaf:
            return Unit(ops, "concat of computed tensors ends a kernel")
        if op.block is not None:
            return Unit(ops, "it is a block graph already")
        graph, _ = part(self.program, ops, [op.outputs[0].index])
        spec = lower(graph)
        size = sum(o.name not in VIEWS for o in expand(graph).ops)
        return Unit(ops, spec.reason if isinstance(spec, Rejected) else "", size)

    def _order(self) -> None:
        """Reachable ops as units, in phases."""
        before = self._effect_order()
        shapes = self._shapes()
        done: dict[int, Unit] = {}  # by the op's first output
        units: dict[int, Unit] = {}  # the same, with those whose operands are not done yet
        phase: dict[int, int] = {}
        for root in (
            *(t.index for t in self.program.outputs),
            *(op.outputs[0].index for op in self.program.ops if op.name in _EFFECTS),
        ):
            stack = [(root, False)]
            while stack:
                at, ready = stack.pop()
                if at not in self.made or (first := self.made[at].outputs[0].index) in done:
                    continue
                op = self.made[at]
                unit = units.get(first) or self._unit(op)
                units[first] = unit
                inside = {t.index for o in unit.ops for t in o.outputs}
                needs = [x.index for o in unit.ops for x in _tensors(o) if x.index not in inside]
                if op.name in _COMMUTATIVE:
                    needs.sort(key=lambda x: shapes[x])
                needs += [
                    x for x in before.get(first, []) if x not in self.attached
                ]  # those are read with their readers
                if not ready:
                    stack.append((at, True))
                    stack += [(x, False) for x in reversed(needs)]
                    continue
                above = [phase[self.made[x].outputs[0].index] for x in needs if x in self.made]
                last = max(above, default=0)
                if first in self.leaf or (op.name in VIEWS and _keeps_axes(op)):
                    phase[first] = last
                else:  # even: ops that kernels may hold; odd: what stands alone
                    phase[first] = last + (last % 2 != bool(unit.alone))
                done[first] = unit
        ordered = sorted(done, key=lambda x: phase[x])  # stable: depth first inside a phase
        self.units, self.phases = [done[x] for x in ordered], [phase[x] for x in ordered]

    def _shapes(self) -> dict[int, str]:
        """Tensors by the ops just before them, operands of commutative ops in any order; the same in every layer of a model."""
        tensors = [*self.program.inputs, *(t for op in self.program.ops for t in op.outputs)]
        shapes = {t.index: f"{t.dims} {t.dtype}" for t in tensors}
        for _ in range(_DEPTH):
            above = dict(shapes)
            for op in self.program.ops:
                args = [above[x.index] if isinstance(x, DTensor) else repr(x) for x in op.inputs]
                text = f"{op.name}({', '.join(sorted(args) if op.name in _COMMUTATIVE else args)}) {op.attrs}"
                shapes |= {t.index: f"{text} {n}" for n, t in enumerate(op.outputs)}
        return shapes

    def _effect_order(self) -> dict[int, list[int]]:
        """What touches a buffer that is written in place stays on its side of the write."""
        buffer: dict[int, int] = {}
        touched: dict[int, list[tuple[int, bool]]] = {}
        before: dict[int, list[int]] = {}
        for op in self.program.ops:
            first = op.outputs[0].index
            roots = {buffer.get(x.index, x.index) for x in _tensors(op)}
            for root in sorted(roots):
                writes = (
                    op.name in _EFFECTS
                    and buffer.get(_tensors(op)[0].index, _tensors(op)[0].index) == root
                )
                before.setdefault(first, []).extend(
                    x for x, wrote in touched.get(root, []) if writes or wrote
                )
                touched.setdefault(root, []).append((first, writes))
            if op.name in (*VIEWS, *_EFFECTS):
                buffer[first] = buffer.get(_tensors(op)[0].index, _tensors(op)[0].index)
        written = {
            x for uses in touched.values() if any(wrote for _, wrote in uses) for x, _ in uses
        }
        return {x: before[x] for x in before if x in written and before[x]}

    # -- windows ----------------------------------------------------------------------------------------------------------

    def _boundaries(self) -> tuple[int, ...]:
        def edge(n: int) -> bool:
            return (
                0 <= n < len(self.units) and bool(self.units[n].alone) and not self.units[n].is_view
            )

        found = []
        for b in range(len(self.units) + 1):
            live = {
                self._behind(t.index)
                for u in self.units[:b]
                for op in u.ops
                for t in op.outputs
                if t.index not in self.attached
                and any(r >= b for r in self.readers.get(t.index, []))
            }
            live -= {t.index for t in self.program.inputs}
            ends = b in (0, len(self.units)) or self.phases[b - 1] != self.phases[b]
            if ends or edge(b - 1) or edge(b) or len(live) <= MAX_LIVE:
                found.append(b)
        return tuple(found)

    def _behind(self, index: int) -> int:
        """The tensor that a view shows."""
        while (op := self.made.get(index)) is not None and op.name in VIEWS:
            index = _tensors(op)[0].index
        return index

    def _windows(self, boundaries: Sequence[int]) -> Iterable[Window]:
        for n, i in enumerate(boundaries):
            for j in boundaries[n + 1 :]:
                inside = self.units[i:j]
                if (
                    any(u.alone and not u.is_view for u in inside)
                    or sum(u.size for u in inside) > MAX_OPS
                ):
                    break
                w = self._window(i, j)
                if (
                    w.graph is not None
                    and (w.stop - w.start == 1 or len(w.graph.ops) > 1)
                    and all(op.name not in VIEWS or _keeps_axes(op) for op in w.graph.ops)
                ):
                    yield w

    def _window(self, i: int, j: int) -> Window:
        ops = list(dict.fromkeys(op for u in self.units[i:j] for op in u.ops))
        made = {t.index for op in ops for t in op.outputs}
        own = {
            u.ops[-1].outputs[0].index for u in self.units[i:j]
        }  # attached layout ops are seen inside their unit only
        readers: dict[int, list[KernelOp]] = {}
        for op in ops:
            for x in _tensors(op):
                readers.setdefault(x.index, []).append(op)

        def outside(t: int) -> bool:
            return t in own and (
                t in self.outputs or any(not i <= r < j for r in self.readers.get(t, []))
            )

        leading: list[KernelOp] = []
        for op in ops:
            if op.name in VIEWS and all(
                x.index not in made or any(x is y.outputs[0] for y in leading) for x in _tensors(op)
            ):
                leading.append(op)
        before: list[KernelOp] = []
        for op in reversed(leading):
            out = op.outputs[0].index
            if (
                not _keeps_axes(op)
                or outside(out)
                or any(r in before for r in readers.get(out, []))
            ):
                before.insert(0, op)
        trailing: list[KernelOp] = []
        for op in reversed(ops):
            if (
                op.name in VIEWS
                and op not in leading
                and all(r in trailing for r in readers.get(op.outputs[0].index, []))
            ):
                trailing.insert(0, op)
        after: list[KernelOp] = []
        for op in trailing:
            behind = _tensors(op)[0].index
            if not _keeps_axes(op) or outside(behind) or self.made[behind] in after:
                after.append(op)
        core = [op for op in ops if op not in before and op not in after]
        produced = {t.index for op in core for t in op.outputs}
        writes = tuple(
            t.index
            for op in core
            for t in op.outputs
            if outside(t.index)
            or op.name in _EFFECTS
            or any(x.index == t.index for o in after for x in _tensors(o))
        )
        graph, reads = part(self.program, core, writes) if produced else (None, ())
        view_us = sum(self.charges.get(op.outputs[0].index, 0.0) for op in (*before, *after))
        return Window(i, j, tuple(before), graph, reads, writes, tuple(after), view_us)

    def _charges(self) -> dict[int, float]:
        """What a view costs as a library op because a reshape after it must copy. The permute is charged, not the reshape: a kernel
        that stores its result permuted saves the copy."""
        now = {t.index: t.strides for t in self.program.inputs}
        charges: dict[int, float] = {}
        for op in self.program.ops:
            out = op.outputs[0]
            if op.name not in VIEWS:
                now |= {t.index: t.strides for t in op.outputs}
                continue
            source = _tensors(op)[0]
            x = torch.empty_strided(source.dims, now[source.index], device="meta")
            y = table.lookup(op.name).oracle(x, **dict(op.attrs))
            now[out.index] = tuple(y.stride())
            if op.name == "reshape" and y is not x and not y._is_view():
                charged = (
                    source.index
                    if source.index in self.made and self.made[source.index].name in VIEWS
                    else out.index
                )
                charges[charged] = charges.get(charged, 0.0) + copy_us(out)
        return charges
