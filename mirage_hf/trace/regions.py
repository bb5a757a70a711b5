"""Find ops without products that become one program: updates of states, norms, and what is left.

A recurrence reads its state, computes the next state and a result, and writes the state back. All
ops on tensors as large as the state become one program, with the sums that make the result, so that
the state is read and written once.

Around any other sum, such as that of a norm, the elementwise ops before and after it join. So do
elementwise ops that are left, if there are enough of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    is_view,
    may_be_written,
)
from mirage_hf.trace.order import run_together
from mirage_hf.trace.record import Held, Input, Recording, Value
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.terms import elementwise_row

#: How many ops a region may have. A search of 24 took minutes.
MOST_OPS = 14

#: How many ops a region has at least. For fewer, torch launches hardly more.
FEWEST_OPS = 3

_REDUCTIONS = ("aten.sum", "aten.mean", "aten.bmm")


@dataclass(frozen=True, eq=False)
class Operand:
    """How an input of a program is made from a recorded tensor.

    Attributes:
        source: The recorded tensor.
        shape: Its shape with dims split into axes.
        order: The order of these axes in the program.
        dims: The shape of the program's input.
    """

    source: Tensorlike
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dims: tuple[int, ...]

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
        return y.reshape(self.once).expand(self.full).reshape(self.shape)


@dataclass(eq=False)
class Region:
    """Nodes that one program computes. If they update a state, it is the first input and output.

    Attributes:
        state: The state, or None.
        nodes: The numbers of the nodes that the program computes, and of the state's write.
        graph: The program.
        inputs: Its inputs, in order.
        results: Its outputs, in order, without the state.
    """

    state: Input | None
    nodes: tuple[int, ...]
    graph: KernelGraph
    inputs: list[Operand]
    results: list[Result]

    @property
    def kind(self) -> str:
        """What the region is, for reports."""
        if self.state is not None:
            return f"state {self.state.name.rpartition('.')[0]}"
        has_sum = any(op.name == "reduction" for op in self.graph.ops)
        return "norm" if has_sum else "elementwise"

    @property
    def write(self) -> int | None:
        """The number of the node that writes the state."""
        return None if self.state is None else self.nodes[-1]


def find_regions(
    recording: Recording, ancestors: Sequence[int], others: Sequence[Collection[int]]
) -> list[Region]:
    """Return the regions of a recording.

    Args:
        recording: The recording.
        ancestors: For each node those that must run before it (`order.ancestors`).
        others: For each other unit that runs as one the numbers of its nodes.
    """
    finder = _Finder(recording, ancestors)
    found: list[Region] = []
    for nodes in others:
        finder.take(nodes)

    def add(members: set[int] | None, write: int | None = None) -> None:
        if members is None or finder.needs_itself(members):
            return
        try:
            found.append(_Writer(recording, finder, members, write).write())
        except UnfitError:
            return
        finder.take(members)

    updates = {number: finder.members_of_update(number) for number in finder.writes()}
    reserved = set().union(*(members for members in updates.values() if members))
    finder.taken |= reserved
    for number in finder.sums():
        if finder.may_join(number):
            add(finder.members_around(number))
    finder.taken -= reserved
    for number, members in updates.items():
        if members is not None:
            finder.add_what_leads(members)
            add(members, number)
    for number in finder.elementwise():
        if finder.may_join(number):
            add(finder.members_around(number))
    return found


class _Finder:
    """Chooses the nodes of each region."""

    def __init__(self, recording: Recording, ancestors: Sequence[int]):
        self.recording, self.nodes = recording, recording.nodes
        self.ancestors = [*ancestors]
        self.taken: set[int] = set()
        self.changing = recording.changing
        self._readers: dict[Tensorlike, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for x in node.operands:
                if not isinstance(x, Held):
                    self._readers.setdefault(x, []).append(number)

    def take(self, nodes: Collection[int]) -> None:
        """Note that some nodes run as one, and are in no other region."""
        self.taken.update(nodes)
        run_together(self.ancestors, nodes)

    def needs_itself(self, members: Collection[int]) -> bool:
        """Return whether something that members read must run after one of them."""
        bits = sum(1 << n for n in members)
        read = {maker for n in members for maker in self.makers(n)} - set(members)
        return any(self.ancestors[maker] & bits for maker in read)

    def depends_on(self, x: Tensorlike | None, members: Collection[int]) -> bool:
        """Return whether a tensor is made from what some nodes make."""
        bits = sum(1 << n for n in members)
        return isinstance(x, Value) and bool((self.ancestors[x.node] | 1 << x.node) & bits)

    def writes(self) -> Iterator[int]:
        """Iterate over the nodes that are a state's only write."""
        for number, node in enumerate(self.nodes):
            if node.name != "aten.copy_" or len(node.args) != 2:
                continue
            state, value = node.args
            if not isinstance(state, Input) or not isinstance(value, Value):
                continue
            meta = self.recording.meta(state)
            storage = meta.storage
            writers = sum(storage in n.written for n in self.nodes)
            if writers == 1 and meta.dtype.is_floating_point and fixed_shape(meta) is not None:
                yield number

    def readers(self, x: Tensorlike) -> Iterator[int]:
        """Iterate over the nodes that read a tensor, or a view of it. Views are left out."""
        for number in self._readers.get(x, ()):
            if is_view(self.recording, self.nodes[number]):
                for output, meta in enumerate(self.nodes[number].outputs):
                    if meta is not None:
                        yield from self.readers(Value(number, output))
            else:
                yield number

    def as_read(self, x: Value) -> Value:
        """Return the float that a tensor is cast to before all else, or the tensor itself."""
        readers = self._readers.get(x, [])
        if len(readers) != 1 or self.nodes[readers[0]].name != "aten._to_copy":
            return x
        cast = Value(readers[0])
        before, after = self.recording.meta(x), self.recording.meta(cast)
        same = fixed_shape(before) == fixed_shape(after) and after.dtype.is_floating_point
        return cast if same else x

    def makers(self, number: int) -> list[int]:
        """Return the nodes whose results a node reads, through views."""
        found: dict[int, None] = {}
        waiting = [x.node for x in self.nodes[number].operands if isinstance(x, Value)]
        while waiting:
            maker = waiting.pop()
            if is_view(self.recording, self.nodes[maker]):
                operands = self.nodes[maker].operands
                waiting += [x.node for x in operands if isinstance(x, Value)]
            else:
                found[maker] = None
        return [*found]

    def size(self, number: int) -> int:
        """Return the number of elements that a node makes, 0 if it grows with the cache."""
        meta = self.nodes[number].outputs[0]
        shape = None if meta is None else fixed_shape(meta)
        return 0 if shape is None else math.prod(shape)

    def may_join(self, number: int) -> bool:
        node = self.nodes[number]
        meta = node.outputs[0]
        return (
            number not in self.taken
            and may_be_written(node)
            and not node.written
            and meta is not None
            and meta.dtype.is_floating_point
            and meta.storage not in self.changing
            and fixed_shape(meta) is not None
        )

    def members_of_update(self, write: int) -> set[int] | None:
        """Return the nodes of an update, None if it is not computed from the state."""
        state = self.nodes[write].args[0]
        shape = fixed_shape(self.recording.meta(state))
        assert shape is not None
        size = math.prod(shape)
        first_readers = [n for n in self.readers(state) if n != write]
        if not first_readers or any(n > write for n in first_readers):
            return None
        members = self._core(write, size, first_readers)
        if members is None:
            return None
        self._add_what_follows(members, size)
        return members

    def sums(self) -> Iterator[int]:
        """Iterate over the sums and means."""
        for number, node in enumerate(self.nodes):
            if node.name in ("aten.sum", "aten.mean"):
                yield number

    def elementwise(self) -> Iterator[int]:
        """Iterate over the elementwise ops."""
        for number, node in enumerate(self.nodes):
            if elementwise_row(node) is not None:
                yield number

    def members_around(self, number: int) -> set[int] | None:
        """Return an op with the elementwise ops around it, None if they are few."""
        members = {number}
        self.add_what_leads(members)
        self._add_what_follows(members)
        self.add_what_leads(members)
        return members if len(members) >= FEWEST_OPS else None

    def _core(self, write: int, size: int, first_readers: list[int]) -> set[int] | None:
        """Return what computes the next state on tensors of its size, and from such tensors."""
        reads = sum(1 << n for n in set(first_readers))
        members: set[int] = set()
        waiting = self.makers(write)
        while waiting:
            number = waiting.pop()
            from_state = bool((self.ancestors[number] | 1 << number) & reads)
            if number in members or not (from_state or self.size(number) >= size):
                continue
            if not self.may_join(number):
                if from_state:
                    return None
                continue
            members.add(number)
            waiting += self.makers(number)
        return members if members.issuperset(first_readers) else None

    def _add_what_follows(self, members: set[int], size: int | None = None) -> None:
        """Add elementwise ops that follow.

        Args:
            members: The nodes so far.
            size: Sums over tensors of so many elements join too, None if no sum does.
        """
        waiting = sorted(members)
        bits = sum(1 << n for n in members)
        while waiting and len(members) < MOST_OPS:
            number = waiting.pop(0)
            for user in sorted(set(self.readers(Value(number)))):
                if user in members or not self.may_join(user) or len(members) == MOST_OPS:
                    continue
                makers = self.makers(user)
                large = [m for m in makers if m in members and size and self.size(m) >= size]
                if self.nodes[user].name in _REDUCTIONS and not large:
                    continue
                if size and self.size(user) < size and self._only_sums_read(user):
                    continue  # it belongs to the region around that sum
                # what it reads must not depend on the region, except through members
                if any(m not in members and self.ancestors[m] & bits for m in makers):
                    continue
                members.add(user)
                bits |= 1 << user
                waiting = sorted({*waiting, user})

    def _only_sums_read(self, number: int) -> bool:
        """Return whether nothing but sums reads what a node makes."""
        readers = [*self.readers(Value(number))]
        return bool(readers) and all(self.nodes[n].name in _REDUCTIONS for n in readers)

    def add_what_leads(self, members: set[int]) -> None:
        """Add elementwise ops that make operands, if only the region reads what they make."""
        waiting = sorted({m for n in members for m in self.makers(n)} - members)
        while waiting and len(members) < MOST_OPS:
            number = waiting.pop()
            if self.nodes[number].name in _REDUCTIONS or not self.may_join(number):
                continue
            if members.issuperset(self.readers(Value(number))):
                members.add(number)
                waiting = sorted({*waiting, *self.makers(number)} - members)


class _Writer:
    """Writes a region as a program."""

    def __init__(self, recording: Recording, finder: _Finder, members: set[int], write: int | None):
        self.recording, self.finder = recording, finder
        self.members, self.number = members, write
        self.state: Input | None = None
        self.new: Value | None = None
        if write is not None:
            self.state, self.new = recording.nodes[write].args
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
        return Region(self.state, nodes, self.graph, inputs, shaped)

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
                value = self.finder.as_read(Value(number))
                found.append((value, self.labels.of(value)))
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
        for tensor in needed:
            atoms = atoms_of(tensor.own)
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
