"""Which recorded nodes must run before which others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mirage_hf.trace.record import Recording, Value


def dependencies(recording: Recording) -> list[set[int]]:
    """Return for each node the nodes that must run before it.

    These made its operands, or wrote memory that it touches, or read memory that it writes.
    """
    before = effects(recording)
    for node, needs in zip(recording.nodes, before, strict=True):
        needs.update(x.node for x in node.operands if isinstance(x, Value))
    return before


def effects(recording: Recording) -> list[set[int]]:
    """Return for each node those that wrote memory that it touches, or read memory it writes."""
    changing = recording.changing
    last_writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    before: list[set[int]] = []
    for number, node in enumerate(recording.nodes):
        needs: set[int] = set()
        touched = {recording.meta(x).storage for x in node.operands} & changing
        touched |= {meta.storage for meta in node.outputs if meta is not None} & changing
        for storage in touched:
            if storage in last_writer:
                needs.add(last_writer[storage])
            if storage in node.written:
                needs.update(readers.pop(storage, ()))
                last_writer[storage] = number
            else:
                readers.setdefault(storage, []).append(number)
        needs.discard(number)
        before.append(needs)
    return before


def needed_nodes(recording: Recording) -> set[int]:
    """Return the nodes that write into memory, and those whose results these need."""
    nodes = recording.nodes
    waiting = [number for number, node in enumerate(nodes) if node.written]
    needed = set(waiting)
    while waiting:
        made = {x.node for x in nodes[waiting.pop()].operands if isinstance(x, Value)}
        waiting += made - needed
        needed |= made
    return needed


def ancestors(before: Sequence[Collection[int]]) -> list[int]:
    """Return for each node the set of all nodes that must run before it, as the bits of an int."""
    closed: list[int] = []
    for needs in before:
        bits = 0
        for n in needs:
            bits |= closed[n] | 1 << n
        closed.append(bits)
    return closed


class Order:
    """What must run before what, while more and more nodes are found to run as one.

    Attributes:
        needed: For each node the set of all nodes that must run before it, as the bits of an int.
    """

    def __init__(self, before: Sequence[Collection[int]]):
        """Begin with nodes that run one by one.

        Args:
            before: For each node those that must run before it, as `dependencies` returns them.
        """
        self.needed = ancestors(before)
        self._after: list[list[int]] = [[] for _ in before]
        for number, needs in enumerate(before):
            for n in needs:
                self._after[n].append(number)

    def run_together(self, nodes: Iterable[int]) -> None:
        """Note that some nodes run as one: what needs one of them needs all, and what they need."""
        members = set(nodes)
        own = needed = 0
        for n in members:
            own |= 1 << n
            needed |= self.needed[n]
        # What needs all of them has all that they need, and so has what runs after it.
        changed, waiting = set(members), [*members]
        while waiting:
            for number in self._after[waiting.pop()]:
                if number not in changed and self.needed[number] & own != own:
                    changed.add(number)
                    waiting.append(number)
        for number in changed:
            self.needed[number] |= own | needed
        if len(members) > 1:
            for n in members:
                self._after[n] += members - {n}
