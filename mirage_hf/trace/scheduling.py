"""Choose the units that a step needs, and order them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from mirage_hf.trace.cached_attention import CachedAttention
from mirage_hf.trace.record import Recording, TraceError, Value
from mirage_hf.trace.regions import Region
from mirage_hf.trace.term import Term
from mirage_hf.trace.terms import Terms
from mirage_hf.trace.units import Key, Unit, kernel_results, reads, source_of


class Scheduler:
    """Chooses and orders the units of a recording.

    A tensor is made by the kernel that gives it, if there is one, or else by its torch op. Only
    units that a write of the recording needs, directly or not, are scheduled.
    """

    def __init__(
        self,
        recording: Recording,
        terms: Terms,
        before: Sequence[set[int]],
        effects: Sequence[set[int]],
    ):
        """Keep what is known of the recording.

        Args:
            recording: The recording.
            terms: Its terms.
            before: For each node those that must run before it (`order.dependencies`).
            effects: The same without those that only make its operands (`order.effects`).
        """
        self._recording, self._terms = recording, terms
        self._before, self._effects = before, effects
        self._by_result: dict[Key, Unit] = {}
        self._by_node: dict[int, Unit] = {}
        self._needs: dict[Unit, set[Unit]] = {}
        self._waiting: list[Unit] = []

    def schedule(
        self,
        groups: Iterable[Unit],
        attentions: Iterable[CachedAttention],
        regions: Iterable[Region],
    ) -> list[Unit]:
        """Return the units in an order in which they can run.

        Args:
            groups: The units of groups that have a kernel.
            attentions: The attention that has a kernel.
            regions: The regions that have a kernel.

        Raises:
            TraceError: Kernels would have to wait for each other.
        """
        for unit in groups:
            self._by_result |= dict.fromkeys(kernel_results(unit, self._terms), unit)
        for one in attentions:
            numbers = (*one.appends, one.node)
            self._by_node |= dict.fromkeys(numbers, Unit(numbers, attention=one))
        for region in regions:
            unit = Unit(region.nodes, region=region)
            self._by_result |= dict.fromkeys(kernel_results(unit, self._terms), unit)
            if region.write is not None:
                self._by_node[region.write] = unit
        for number, node in enumerate(self._recording.nodes):
            if node.written:
                self._need(Value(number))
        while self._waiting:
            unit = self._waiting.pop()
            needed = map(self._need, self._operands(unit))
            self._needs[unit] |= {other for other in needed if other is not None}
        self._add_effects()
        return _ordered(self._needs)

    def _need(self, key: Key) -> Unit | None:
        """Return the unit that makes a tensor, and schedule it. None for inputs."""
        unit = self._by_result.get(key)
        if unit is None and isinstance(key, Term):
            made = source_of(key, self._terms)
            return self._need(made) if isinstance(made, Value) else None
        if unit is None:
            assert isinstance(key, Value)
            unit = self._by_node.get(key.node)
            if unit is None:
                unit = Unit((key.node,), self._recording.nodes[key.node])
                self._by_node[key.node] = unit
        if unit not in self._needs:
            self._needs[unit] = set()
            self._waiting.append(unit)
        return unit

    def _operands(self, unit: Unit) -> list[Key]:
        """Return what a unit reads: a term, or else the tensor that torch would make."""
        if unit.program is None:
            return reads(unit, self._terms)
        inputs = unit.program.inputs
        sources = [t.weight.source for t in inputs if t.weight is not None]
        return [
            *(t for t in inputs if t.weight is None),
            *(x for x in sources if isinstance(x, Value)),
        ]

    def _add_effects(self) -> None:
        """Keep writes in order with what touches the same memory."""
        by_node = {number: unit for number, unit in self._by_node.items() if unit in self._needs}
        for number, unit in by_node.items():
            # what made the operands of an append is inside its unit, or is needed anyway
            is_kernel = unit.attention is not None or unit.region is not None
            before = self._effects[number] if is_kernel else self._before[number]
            self._needs[unit] |= {by_node[n] for n in before if n in by_node} - {unit}


def _ordered(needs: dict[Unit, set[Unit]]) -> list[Unit]:
    """Return the units so that each comes after those that it needs, in the recorded order."""
    users: dict[Unit, list[Unit]] = {unit: [] for unit in needs}
    missing = {unit: len(others) for unit, others in needs.items()}
    for unit, others in needs.items():
        for other in others:
            users[other].append(unit)
    ready = [(max(u.nodes), n, u) for n, u in enumerate(needs) if not missing[u]]
    heapq.heapify(ready)
    count = len(needs)
    order: list[Unit] = []
    while ready:
        *_, unit = heapq.heappop(ready)
        order.append(unit)
        for user in users[unit]:
            missing[user] -= 1
            if not missing[user]:
                count += 1
                heapq.heappush(ready, (max(user.nodes), count, user))
    if len(order) < len(needs):
        raise TraceError("its kernels would have to wait for each other")
    return order
