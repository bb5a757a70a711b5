"""Find ops without products that become one program: updates of states, norms, and what is left.

A recurrence reads its state, computes the next state and a result, and writes the state back. All
ops on tensors as large as the state become one program, with the sums that make the result, so that
the state is read and written once.

Around any other sum, such as that of a norm, the elementwise ops before and after it join. So do
elementwise ops that are left, if there are enough of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mirage_hf.errors import GraphError
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.trace.axes import (
    Axis,
    AxisTensor,
    Labelled,
    Labels,
    Tensorlike,
    UnfitError,
    align,
    atoms_of,
)
from mirage_hf.trace.record import Held, Input, Recording, Value
from mirage_hf.trace.region_finder import RegionFinder
from mirage_hf.trace.sizes import fixed_shape


@dataclass(frozen=True, eq=False)
class Operand:
    """How an input of a program is made from a recorded tensor.

    Attributes:
        source: The recorded tensor.
        shape: Its shape with dims split into axes.
        order: The order of these axes in the program.
        dims: The shape of the program's input.
        is_between: Whether only another region's program gives the tensor, and no recorded op.
    """

    source: Tensorlike
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dims: tuple[int, ...]
    is_between: bool = False

    def of(self, x: Tensor) -> Tensor:
        """Return the program's input."""
        return x.reshape(self.shape).permute(self.order).reshape(self.dims).contiguous()


@dataclass(frozen=True, eq=False)
class Result:
    """How a recorded tensor is made from an output of a program.

    Attributes:
        value: The recorded tensor.
        axes: The sizes of the output's axes, in the program's order.
        order: The order of these axes in the tensor.
        once: The sizes of all axes of the tensor, 1 where its elements repeat.
        full: The sizes of all axes of the tensor.
        shape: Its shape.
    """

    value: Value
    axes: tuple[int, ...]
    order: tuple[int, ...]
    once: tuple[int, ...]
    full: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, y: Tensor) -> Tensor:
        """Return the tensor as torch made it."""
        y = y.reshape(self.axes).permute(self.order)
        if self.once == self.full:
            return y.reshape(self.shape)
        return y.reshape(self.once).expand(self.full).reshape(self.shape).contiguous()


@dataclass(eq=False)
class Region:
    """Nodes that one program computes. If they update a state, it is the first input and output.

    Attributes:
        state: The state that it reads, or None.
        target: Where it writes the next state.
        nodes: The numbers of the nodes that the program computes, and of the state's write.
        graph: The program.
        inputs: Its inputs, in order.
        results: Its outputs, in order, without the state.
        reads: Bytes of weights that it reads.
    """

    state: Input | None
    nodes: tuple[int, ...]
    graph: KernelGraph
    inputs: list[Operand]
    results: list[Result]
    reads: int = 0
    target: Input | None = None

    @property
    def kind(self) -> str:
        """What the region is, for reports."""
        if self.state is not None:
            return f"state {self.state.name.partition('@')[0].rpartition('.')[0]}"
        if self.reads:
            return "experts"
        has_sum = any(op.name == "reduction" for op in self.graph.ops)
        return "norm" if has_sum else "elementwise"

    @property
    def write(self) -> int | None:
        """The number of the node that writes the state."""
        return None if self.state is None else self.nodes[-1]


def find_regions(
    recording: Recording,
    before: Sequence[Collection[int]],
    others: Sequence[Collection[int]],
    needed: Collection[Tensorlike] = (),
) -> list[Region]:
    """Return the regions of a recording.

    Args:
        recording: The recording.
        before: For each node those that must run before it (`order.dependencies`).
        others: For each other step op the numbers of its nodes.
        needed: Tensors that other step ops read as they were made, before casts.
    """
    finder = RegionFinder(recording, before, needed)
    found: list[Region] = []
    for nodes in others:
        finder.take(nodes)

    def add(members: set[int] | None, write: int | None = None) -> None:
        if members is None or finder.needs_itself(members):
            return
        try:
            found.append(_Writer(recording, finder, members, write).write())
        except (UnfitError, GraphError):
            return
        finder.take(members)

    def add_around(numbers: Iterable[int]) -> None:
        for number in numbers:
            if finder.may_join(number):
                add(finder.members_around(number))

    updates: dict[int, set[int]] = {}
    for number in finder.writes():
        if (members := finder.members_of_update(number)) is not None:
            updates[number] = members
            finder.taken |= members  # no other region takes them meanwhile
    add_around(finder.sums())
    for number, members in updates.items():
        finder.taken -= members
        finder.add_what_leads(members)
        add(members, number)
    add_around((*finder.sums(), *finder.elementwise()))
    return found


class _Writer:
    """Writes a region as a program."""

    def __init__(
        self, recording: Recording, finder: RegionFinder, members: set[int], write: int | None
    ):
        self.recording, self.finder = recording, finder
        self.members, self.number = members, write
        self.state: Input | None = None
        self.target: Input | None = None
        self.new: Value | None = None
        if write is not None:
            self.target, self.new = recording.nodes[write].args
            self.state = recording.before(self.target)
        self.labels = Labels(recording, members, self.state)
        self.graph = new_kernel_graph()
        self.made: dict[AxisTensor, DTensor] = {}

    def write(self) -> Region:
        """Return the region.

        Raises:
            UnfitError: It cannot be written as a program.
        """
        # pairs of where a result goes and what it is
        places = [] if self.state is None else [self._next_state()]
        for number in sorted(self.members):
            self.labels.of(Value(number))
        results = self._results()
        if self.state is None and not results:
            raise UnfitError("nothing reads what it makes")
        places += [(x, x) for _, x in results]
        used = self._used([x for _, x in places])
        self._merge(used, places[0][0])
        given = [tensor for tensor in used if tensor.source is not None]
        if any(self.finder.depends_on(tensor.source, self.members) for tensor in given):
            raise UnfitError("an operand is a part of a result")
        given.sort(key=lambda tensor: tensor.source != self.state)  # the state comes first
        inputs = [self._input(tensor) for tensor in given]
        for tensor in used:
            if tensor.source is None:
                self._compute(tensor)
        recorded: list[Tensorlike] = [] if self.state is None else [self.state]
        dtypes = [self.recording.meta(x).dtype for x in [*recorded, *(v for v, _ in results)]]
        outputs = [self._output(*pair, dtype) for pair, dtype in zip(places, dtypes, strict=True)]
        self.graph.mark_output(*outputs)
        nodes = (*sorted(self.members), *([] if self.number is None else [self.number]))
        shaped = [self._result(value, x) for value, x in results]
        return Region(self.state, nodes, self.graph, inputs, shaped, target=self.target)

    def _next_state(self) -> tuple[Labelled, Labelled]:
        """Return the axes of the state and of what is written over it."""
        assert self.state is not None and self.new is not None
        state, new = self.labels.of(self.state), self.labels.of(self.new)
        for a, b in zip(state.dims, new.dims, strict=True):
            align(a, b)
        return state, new

    def _results(self) -> list[tuple[Value, Labelled]]:
        """Return the members' results that other nodes read."""
        own = {*self.members, self.number}
        found = []
        for number in sorted(self.members):
            readers = set(self.finder.readers(Value(number)))
            if not readers <= own:
                values = self.finder.as_read(Value(number), self.members)
                found += [(value, self.labels.of(value)) for value in values]
        return found

    def _used(self, results: Sequence[Labelled]) -> list[AxisTensor]:
        """Return the tensors that results need, in the order in which they were found."""
        needed: set[AxisTensor] = set()
        waiting = [x.tensor for x in results]
        while waiting:
            tensor = waiting.pop()
            if tensor not in needed:
                needed.add(tensor)
                waiting += [x for x in tensor.operands if isinstance(x, AxisTensor)]
        labelled = [_atoms(x) for x in self.labels.known.values()]
        for atoms in [*labelled, *(atoms_of(tensor.own) for tensor in needed)]:
            if len(set(atoms)) < len(atoms):
                raise UnfitError("a tensor has one axis twice")
        return [tensor for tensor in self.labels.tensors if tensor in needed]

    # -- dims of the program -----------------------------------------------------------------------

    def _merge(self, used: Sequence[AxisTensor], first: Labelled) -> None:
        """Choose the program's dims: the axes in order, those merged that are always together."""
        order = dict.fromkeys(_atoms(first))
        for tensor in used:
            order |= dict.fromkeys(atoms_of(tensor.own))
        carried = [set(atoms_of(tensor.own)) for tensor in used]
        order = {axis: None for axis in order if any(axis in c for c in carried)}
        reduced = {atom for tensor in used for atom in atoms_of(tensor.over)}
        self.groups: list[list[Axis]] = []
        for axis in order:
            last = self.groups[-1][-1] if self.groups else None
            together = last is not None and all((axis in c) == (last in c) for c in carried)
            if together and (axis in reduced) == (last in reduced):
                self.groups[-1].append(axis)
            else:
                self.groups.append([axis])
        self.place = {axis: n for n, axis in enumerate(order)}
        if not order:
            raise UnfitError("its tensors have one element each")

    def _dims(self, tensor: AxisTensor) -> tuple[int, ...]:
        own = set(atoms_of(tensor.own))
        return tuple(
            math.prod(axis.size for axis in group) if group[0] in own else 1
            for group in self.groups
        )

    def _order(self, atoms: Sequence[Axis]) -> tuple[int, ...]:
        """Return how axes are permuted to come in the program's order."""
        return tuple(sorted(range(len(atoms)), key=lambda n: self.place[atoms[n]]))

    # -- writing -----------------------------------------------------------------------------------

    def _input(self, tensor: AxisTensor) -> Operand:
        source, dims = tensor.source, self._dims(tensor)
        assert source is not None
        meta = self.recording.meta(source)
        atoms = atoms_of(tensor.own)
        given = self.graph.new_input(dims, meta.dtype, constant=isinstance(source, Held))
        self.made[tensor] = self._cast(given, torch.float32)
        return Operand(source, tuple(axis.size for axis in atoms), self._order(atoms), dims)

    def _cast(self, x: DTensor, dtype: torch.dtype) -> DTensor:
        return x if x.dtype == dtype else self.graph.cast(x, dtype)

    def _compute(self, tensor: AxisTensor) -> None:
        operands = [self.made[x] if isinstance(x, AxisTensor) else x for x in tensor.operands]
        if tensor.op != "reduction":
            self.made[tensor] = self.graph.apply(tensor.op, operands, tensor.attrs)
            return
        (x,) = operands
        over = set(atoms_of(tensor.over))
        for dim, group in enumerate(self.groups):
            if group[0] in over:
                x = self.graph.apply("reduction", [x], {"dim": dim, **tensor.attrs})
        self.made[tensor] = x

    def _output(self, place: Labelled, x: Labelled, dtype: torch.dtype) -> DTensor:
        """Return the output for a result. A state must vary along all its axes."""
        repeats = set(atoms_of(x.tensor.own)) != set(_atoms(place))
        if x.tensor.source is not None or (repeats and place is not x):
            raise UnfitError("a state repeats along an axis, or a result is an operand")
        return self._cast(self.made[x.tensor], dtype)

    def _result(self, value: Value, x: Labelled) -> Result:
        own = set(atoms_of(x.tensor.own))
        atoms = [axis for axis in _atoms(x) if axis in own]
        order = self._order(atoms)
        shape = fixed_shape(self.recording.meta(value))
        assert shape is not None
        return Result(
            value,
            axes=tuple(atoms[n].size for n in order),
            order=tuple(order.index(n) for n in range(len(atoms))),
            once=tuple(axis.size if axis in own else 1 for axis in _atoms(x)),
            full=tuple(axis.size for axis in _atoms(x)),
            shape=tuple(shape),
        )


def _atoms(x: Labelled) -> list[Axis]:
    return atoms_of(axis for group in x.dims for axis in group)
