"""Cut a program into windows: ranges of its units that are searched as programs of their own.

Windows lie between *boundaries*. There is a boundary where few computed tensors are live, between
two phases, and next to a unit that stands alone (see `units`). Some views at the edges of a window
are left to torch: those that the search cannot lower, or that others read too. Torch makes them for
free, and the window reads or writes the tensor behind the view.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mirage_hf.gpus import H200, Device
from mirage_hf.graph.kernel import KernelGraph, KernelOp
from mirage_hf.ops import table
from mirage_hf.search.dim_classes import tensors_of
from mirage_hf.search.library_cost import VIEWS, copy_us
from mirage_hf.search.subprogram import subprogram, tensors_by_index
from mirage_hf.search.units import EFFECTS, Unit, keeps_axes, order_units

#: The most ops of one window, with composites written out and without views. At the sizes of
#: Llama-3.2-1B, one core searched each such window of a Llama or Gemma layer in 0.23 s or less. Two
#: norms around a gated MLP have 18 ops and took 1 to 20 s.
MAX_OPS = 14

#: The most computed tensors that cross a boundary inside a phase: a residual and the current value.
#: Inside a gated product there are three. A cut there was never better in the layers tried.
MAX_LIVE = 2


@dataclass(frozen=True)
class Window:
    """The units [start, stop) as a program of their own, with views before and after it.

    Attributes:
        start: The first unit.
        stop: The unit after the last one.
        before: Views that torch makes before the window.
        graph: What the window computes, or None if it holds nothing but views.
        reads: The program's tensors that the graph's inputs are, by index.
        writes: The program's tensors that the graph's outputs are, by index.
        after: Views that torch makes after the window.
        view_us: The cost of the views in µs, which is that of copies by later reshapes.
    """

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
    """A program cut into units and windows.

    Attributes:
        program: The program.
        units: Its units, in order.
        boundaries: The numbers of the units before which a window may begin or end.
        singles: One window for each unit. Library calls compute them.
        windows: Every range of units that may be searched.
        is_whole: False if time was up before all windows were made.
    """

    program: KernelGraph
    units: tuple[Unit, ...]
    boundaries: tuple[int, ...]
    singles: tuple[Window, ...]
    windows: tuple[Window, ...]
    is_whole: bool = True


def cut(program: KernelGraph, device: Device = H200, deadline: float = math.inf) -> Cut:
    """Cut a program of any size and any ops.

    Args:
        program: The program.
        device: The GPU that copies are estimated for.
        deadline: The time of `time.perf_counter` from which on no further window is made.
    """
    return _Cutter(program, device).run(deadline)


class _Cutter:
    def __init__(self, program: KernelGraph, device: Device):
        self.program = program
        self.made = {t.index: op for op in program.ops for t in op.outputs}
        self.outputs = {t.index for t in program.outputs}
        self.tensors = tensors_by_index(program)
        ordered = order_units(program)
        self.units, self.phases, self.attached = ordered.units, ordered.phases, ordered.attached
        self.view_costs = _view_costs(program, device)
        #: The units that read each tensor from outside themselves, by index of the tensor.
        self.readers: dict[int, list[int]] = {}
        for n, unit in enumerate(self.units):
            made = {t.index for op in unit.ops for t in op.outputs}
            for t in {x.index for op in unit.ops for x in tensors_of(op)} - made:
                self.readers.setdefault(t, []).append(n)

    def run(self, deadline: float) -> Cut:
        boundaries = tuple(b for b in range(len(self.units) + 1) if self._is_boundary(b))
        singles = tuple(self._window(n, n + 1) for n in range(len(self.units)))
        windows = []
        is_whole = True
        for window in self._windows(boundaries):
            windows.append(window)
            if time.perf_counter() >= deadline:
                is_whole = False
                break
        windows.sort(key=lambda w: (w.start, w.stop))
        return Cut(self.program, self.units, boundaries, singles, tuple(windows), is_whole)

    # -- boundaries --------------------------------------------------------------------------------

    def _is_boundary(self, b: int) -> bool:
        if b in (0, len(self.units)) or self.phases[b - 1] != self.phases[b]:
            return True
        next_to_alone = self._stands_alone(b - 1) or self._stands_alone(b)
        return next_to_alone or self._num_live(b) <= MAX_LIVE

    def _stands_alone(self, n: int) -> bool:
        return bool(self.units[n].alone) and not self.units[n].is_view

    def _num_live(self, b: int) -> int:
        """Count the computed tensors that units before `b` make and units from `b` on read."""
        return self._live_counts[b]

    @cached_property
    def _live_counts(self) -> Counter[int]:
        """The number of live tensors at each place between units."""
        inputs = {t.index for t in self.program.inputs}
        places: dict[int, set[int]] = {}
        for n, unit in enumerate(self.units):
            for t in (t for op in unit.ops for t in op.outputs if t.index not in self.attached):
                last = max(self.readers.get(t.index, []), default=n)
                tensor = self._behind_views(t.index)
                if tensor not in inputs:
                    places.setdefault(tensor, set()).update(range(n + 1, last + 1))
        return Counter(b for live_at in places.values() for b in live_at)

    def _behind_views(self, tensor: int) -> int:
        while (op := self.made.get(tensor)) is not None and op.name in VIEWS:
            tensor = tensors_of(op)[0].index
        return tensor

    # -- windows -----------------------------------------------------------------------------------

    def _windows(self, boundaries: Sequence[int]) -> Iterator[Window]:
        """Yield the windows, the shortest first."""
        starts = list(range(len(boundaries) - 1))
        length = 1
        while starts:
            longer = []
            for n in starts:
                start, stop = boundaries[n], boundaries[n + length]
                inside = self.units[start:stop]
                if any(unit.alone and not unit.is_view for unit in inside):
                    continue
                if sum(unit.size for unit in inside) > MAX_OPS:
                    continue
                longer.append(n)
                window = self._window(start, stop)
                if _may_be_searched(window):
                    yield window
            length += 1
            starts = [n for n in longer if n + length < len(boundaries)]

    def _window(self, start: int, stop: int) -> Window:
        inside = _UnitRange(self, start, stop)
        before, after = inside.views_before(), inside.views_after()
        core = [op for op in inside.ops if op not in before and op not in after]
        read_after = {x.index for op in after for x in tensors_of(op)}
        writes = tuple(
            t.index
            for op in core
            for t in op.outputs
            if inside.is_needed_outside(t.index) or op.name in EFFECTS or t.index in read_after
        )
        graph, reads = subprogram(self.program, core, writes, self.tensors) if core else (None, ())
        view_us = sum(self.view_costs.get(op.outputs[0].index, 0.0) for op in (*before, *after))
        return Window(start, stop, tuple(before), graph, reads, writes, tuple(after), view_us)


def _may_be_searched(window: Window) -> bool:
    if window.graph is None:
        return False
    ops = window.graph.ops
    is_single = window.stop - window.start == 1
    return (is_single or len(ops) > 1) and all(op.name not in VIEWS or keeps_axes(op) for op in ops)


class _UnitRange:
    """The ops of the units [start, stop)."""

    def __init__(self, cutter: _Cutter, start: int, stop: int):
        self.cutter, self.start, self.stop = cutter, start, stop
        units = cutter.units[start:stop]
        self.ops = list(dict.fromkeys(op for unit in units for op in unit.ops))
        #: The tensors that other units can read. Only their own unit reads attached layout ops.
        self._visible = {unit.ops[-1].outputs[0].index for unit in units}
        self._readers: dict[int, list[KernelOp]] = {}
        for op in self.ops:
            for x in tensors_of(op):
                self._readers.setdefault(x.index, []).append(op)
        self._leading = self._leading_views()

    def is_needed_outside(self, tensor: int) -> bool:
        if tensor not in self._visible:
            return False
        readers = self.cutter.readers.get(tensor, [])
        return tensor in self.cutter.outputs or any(
            not self.start <= reader < self.stop for reader in readers
        )

    def _leading_views(self) -> list[KernelOp]:
        """Return the views that read only tensors from outside the window, or other such views."""
        made = {t.index for op in self.ops for t in op.outputs}
        leading: list[KernelOp] = []
        available: set[int] = set()
        for op in self.ops:
            if op.name in VIEWS and all(
                x.index not in made or x.index in available for x in tensors_of(op)
            ):
                leading.append(op)
                available.add(op.outputs[0].index)
        return leading

    def views_before(self) -> list[KernelOp]:
        """Return the leading views that torch makes."""
        before: list[KernelOp] = []
        for op in reversed(self._leading):
            out = op.outputs[0].index
            feeds_another = any(reader in before for reader in self._readers.get(out, []))
            if not keeps_axes(op) or self.is_needed_outside(out) or feeds_another:
                before.insert(0, op)
        return before

    def views_after(self) -> list[KernelOp]:
        """Return the views at the end of the window that torch makes."""
        trailing: list[KernelOp] = []
        for op in reversed(self.ops):
            if op.name not in VIEWS or op in self._leading:
                continue
            if all(r in trailing for r in self._readers.get(op.outputs[0].index, [])):
                trailing.insert(0, op)
        after: list[KernelOp] = []
        for op in trailing:
            source = tensors_of(op)[0].index
            continues_another = self.cutter.made[source] in after
            if not keeps_axes(op) or self.is_needed_outside(source) or continues_another:
                after.append(op)
        return after


def _view_costs(program: KernelGraph, device: Device) -> dict[int, float]:
    """Return the cost in µs of each view that makes a reshape after it copy, by the view's output.

    The copy counts as the cost of the permute before the reshape. A kernel that stores its result
    permuted saves it.
    """
    made = {t.index: op for op in program.ops for t in op.outputs}
    strides = {t.index: t.strides for t in program.inputs}
    costs: dict[int, float] = {}
    for op in program.ops:
        out = op.outputs[0]
        if op.name not in VIEWS:
            strides |= {t.index: t.strides for t in op.outputs}
            continue
        source = tensors_of(op)[0]
        x = torch.empty_strided(source.dims, strides[source.index], device="meta")
        y = table.lookup(op.name).oracle(x, **dict(op.attrs))
        strides[out.index] = tuple(y.stride())
        if op.name == "reshape" and y is not x and not y._is_view():
            maker = made.get(source.index)
            charged = source.index if maker is not None and maker.name in VIEWS else out.index
            costs[charged] = costs.get(charged, 0.0) + copy_us(out, device)
    return costs
