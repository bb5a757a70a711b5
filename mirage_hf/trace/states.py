"""Find the updates of states, and write each as a tensor program.

A recurrence reads its state, computes the next state and a result, and writes the state back. All
ops on tensors as large as the state become one program, with the sums that make the result, so that
the state is read and written once. Small ops around them join if nothing else reads what they make.
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
from mirage_hf.trace.record import Held, Input, Recording, Value
from mirage_hf.trace.sizes import fixed_shape

#: How many ops an update may have. The search takes seconds for more.
MOST_OPS = 24


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
        axes: The sizes of its axes, in the program's order.
        order: The order of the axes in the tensor.
        shape: Its shape.
    """

    value: Value
    axes: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, y: Tensor) -> Tensor:
        """Return the tensor as torch made it."""
        return y.reshape(self.axes).permute(self.order).reshape(self.shape)


@dataclass(eq=False)
class StateUpdate:
    """The update of a state as a program. Its first input and its first output are the state.

    Attributes:
        state: The state.
        nodes: The numbers of the nodes that the program computes, and of the write.
        graph: The program.
        inputs: Its inputs, in order.
        results: Its outputs after the first, in order.
    """

    state: Input
    nodes: tuple[int, ...]
    graph: KernelGraph
    inputs: list[Operand]
    results: list[Result]

    @property
    def write(self) -> int:
        """The number of the node that writes the state."""
        return self.nodes[-1]


def find_updates(
    recording: Recording, ancestors: Sequence[int], taken: Collection[int]
) -> list[StateUpdate]:
    """Return the updates of states that can be written as programs.

    Args:
        recording: The recording.
        ancestors: For each node those that must run before it (`order.ancestors`).
        taken: The numbers of nodes that other programs compute.
    """
    finder = _Finder(recording, ancestors, taken)
    found = []
    for number in finder.writes():
        members = finder.members_of(number)
        if members is None:
            continue
        try:
            found.append(_Writer(recording, finder, number, members).write())
        except UnfitError:
            continue
        finder.taken.update(members)
    return found


class _Finder:
    """Chooses the nodes of each update."""

    def __init__(self, recording: Recording, ancestors: Sequence[int], taken: Collection[int]):
        self.recording, self.nodes, self.ancestors = recording, recording.nodes, ancestors
        self.taken = set(taken)
        self.changing = {s for node in self.nodes for s in node.written}
        self._readers: dict[Tensorlike, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for x in node.operands():
                if not isinstance(x, Held):
                    self._readers.setdefault(x, []).append(number)

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
            if is_view(self.nodes[number]):
                for output, meta in enumerate(self.nodes[number].outputs):
                    if meta is not None:
                        yield from self.readers(Value(number, output))
            else:
                yield number

    def makers(self, number: int) -> list[int]:
        """Return the nodes whose results a node reads, through views."""
        found: dict[int, None] = {}
        waiting = [x.node for x in self.nodes[number].operands() if isinstance(x, Value)]
        while waiting:
            maker = waiting.pop()
            if is_view(self.nodes[maker]):
                operands = self.nodes[maker].operands()
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

    def members_of(self, write: int) -> set[int] | None:
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
        self._add_what_leads(members)
        return members

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

    def _add_what_follows(self, members: set[int], size: int) -> None:
        """Add sums over tensors of the state's size, and elementwise ops that follow them."""
        waiting = sorted(members)
        bits = sum(1 << n for n in members)
        while waiting and len(members) < MOST_OPS:
            number = waiting.pop(0)
            for user in sorted(set(self.readers(Value(number)))):
                if user in members or not self.may_join(user):
                    continue
                makers = self.makers(user)
                reduces = self.nodes[user].name in ("aten.sum", "aten.mean", "aten.bmm")
                if reduces and not any(self.size(m) >= size and m in members for m in makers):
                    continue
                # what it reads must not depend on the update, except through members
                if any(m not in members and self.ancestors[m] & bits for m in makers):
                    continue
                members.add(user)
                bits |= 1 << user
                waiting = sorted({*waiting, user})

    def _add_what_leads(self, members: set[int]) -> None:
        """Add ops that make operands, if only the update reads what they make."""
        waiting = sorted({m for n in members for m in self.makers(n)} - members)
        while waiting and len(members) < MOST_OPS:
            number = waiting.pop()
            if self.may_join(number) and members.issuperset(self.readers(Value(number))):
                members.add(number)
                waiting = sorted({*waiting, *self.makers(number)} - members)


class _Writer:
    """Writes an update as a program."""

    def __init__(self, recording: Recording, finder: _Finder, write: int, members: set[int]):
        self.recording, self.finder = recording, finder
        self.number, self.members = write, members
        state = recording.nodes[write].args[0]
        self.labels = Labels(recording, members, state)
        self.graph = new_kernel_graph()
        self.made: dict[AxisTensor, DTensor] = {}

    def write(self) -> StateUpdate:
        """Return the update.

        Raises:
            UnfitError: It cannot be written as a program.
        """
        state, value = self.recording.nodes[self.number].args
        labelled = self.labels.of(state)
        for number in sorted(self.members):
            self.labels.of(Value(number))
        written = self.labels.of(value)
        for a, b in zip(labelled.dims, written.dims, strict=True):
            align(a, b)
        results = self._results(value)
        used = self._used([written, *(x for _, x in results)])
        self._merge(used, [labelled, *(x for _, x in results)])
        inputs = [self._input(labelled.tensor)]
        for tensor in used:
            if tensor.source is not None and tensor is not labelled.tensor:
                inputs.append(self._input(tensor))
        for tensor in used:
            if tensor.source is None:
                self._compute(tensor)
        outputs = [
            self._as_result(labelled, written, self.recording.meta(state).dtype),
            *(self._as_result(x, x, self.recording.meta(v).dtype) for v, x in results),
        ]
        self.graph.mark_output(*outputs)
        nodes = (*sorted(self.members), self.number)
        shaped = [self._result(v, x) for v, x in results]
        return StateUpdate(state, nodes, self.graph, inputs, shaped)

    def _results(self, written: Value) -> list[tuple[Value, Labelled]]:
        """Return the members' results that other nodes read."""
        own = {*self.members, self.number}
        found = []
        for number in sorted(self.members):
            readers = set(self.finder.readers(Value(number)))
            if not readers <= own:
                found.append((Value(number), self.labels.of(Value(number))))
        for _, x in found:
            if set(atoms_of(x.tensor.own)) != set(_atoms(x)):
                raise UnfitError("a result repeats along an axis")
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

    def _merge(self, used: Sequence[AxisTensor], results: Sequence[Labelled]) -> None:
        """Choose the program's dims: the axes in order, those merged that are always together."""
        order = dict.fromkeys(_atoms(results[0]))
        for tensor in used:
            order |= dict.fromkeys(atoms_of(tensor.own))
        carried = [set(atoms_of(tensor.own)) for tensor in used]
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

    def _as_result(self, place: Labelled, x: Labelled, dtype: torch.dtype) -> DTensor:
        """Return the output for a result. It must vary along all axes of its place."""
        if x.tensor.source is not None or set(atoms_of(x.tensor.own)) != set(_atoms(place)):
            raise UnfitError("a result repeats along an axis")
        return self._cast(self.made[x.tensor], dtype)

    def _result(self, value: Value, x: Labelled) -> Result:
        atoms = _atoms(x)
        order = self._order(atoms)
        shape = fixed_shape(self.recording.meta(value))
        assert shape is not None
        back = tuple(order.index(n) for n in range(len(atoms)))
        return Result(value, tuple(atoms[n].size for n in order), back, tuple(shape))


def _atoms(x: Labelled) -> list[Axis]:
    return atoms_of(axis for group in x.dims for axis in group)
