"""Choose the ops of a recording that become one program without products (regions.py)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from mirage_hf.ops.dtypes import COMPUTE_DTYPES
from mirage_hf.trace.axes import Tensorlike, is_view, may_be_written
from mirage_hf.trace.order import Order
from mirage_hf.trace.record import Held, Input, Recording, Value
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.torch_ops import elementwise_op

#: How many ops a region may have. A search of 17 took 2.5 s, one of 24 minutes.
MOST_OPS = 18

#: How many ops a region has at least. For fewer, torch launches hardly more.
FEWEST_OPS = 3

_REDUCTIONS = ("aten.sum", "aten.mean", "aten.bmm")


class RegionFinder:
    """Chooses the nodes of each region."""

    def __init__(
        self,
        recording: Recording,
        before: Sequence[Collection[int]],
        needed: Collection[Tensorlike] = (),
    ):
        self.recording, self.nodes = recording, recording.nodes
        self.needed = set(needed)
        self.order = Order(before)
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
        self.order.run_together(nodes)

    def needs_itself(self, members: Collection[int]) -> bool:
        """Return whether something that members read must run after one of them."""
        bits = sum(1 << n for n in members)
        read = {maker for n in members for maker in self.makers(n)} - set(members)
        return any(self.order.needed[maker] & bits for maker in read)

    def depends_on(self, x: Tensorlike | None, members: Collection[int]) -> bool:
        """Return whether a tensor is made from what some nodes make."""
        bits = sum(1 << n for n in members)
        return isinstance(x, Value) and bool((self.order.needed[x.node] | 1 << x.node) & bits)

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

    def as_read(self, x: Value, members: Collection[int]) -> list[Value]:
        """Return a tensor as nodes outside the region read it: as made, after a cast, or both."""
        readers = [n for n in self._readers.get(x, []) if n not in members]
        casts = [n for n in readers if self._is_cast(n, x)]
        if len(casts) != 1:
            return [x]
        (cast,) = casts
        is_alone = len(readers) == 1 and x not in self.needed
        return [Value(cast)] if is_alone else [x, Value(cast)]

    def _is_cast(self, number: int, x: Value) -> bool:
        """Return whether a node casts a tensor to a dtype that programs have."""
        if self.nodes[number].name != "aten._to_copy":
            return False
        before, after = self.recording.meta(x), self.recording.meta(Value(number))
        return fixed_shape(before) == fixed_shape(after) and after.dtype in COMPUTE_DTYPES

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
        """Return whether a node may be in a region."""
        node = self.nodes[number]
        meta = node.outputs[0]
        return (
            number not in self.taken
            and may_be_written(node)
            and not node.written
            and meta is not None
            and meta.dtype in COMPUTE_DTYPES
            and meta.storage not in self.changing
            and fixed_shape(meta) is not None
        )

    def members_of_update(self, write: int) -> set[int] | None:
        """Return the nodes of an update, None if it is not computed from the state."""
        state = self.recording.before(self.nodes[write].args[0])
        meta = self.recording.meta(state)
        shape = fixed_shape(meta)
        assert shape is not None
        size = math.prod(shape)
        # what writes the state before is no reader
        first_readers = [
            n for n in self.readers(state) if meta.storage not in self.nodes[n].written
        ]
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
            if elementwise_op(node) is not None:
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
            from_state = bool((self.order.needed[number] | 1 << number) & reads)
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
                if any(m not in members and self.order.needed[m] & bits for m in makers):
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
