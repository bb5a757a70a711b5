"""Choose the step ops that a step needs, and order them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from mirage_hf.trace.cached_attention import CachedAttention
from mirage_hf.trace.record import Recording, TraceError, Value
from mirage_hf.trace.regions import Region
from mirage_hf.trace.step_ops import Key, StepOp, kernel_results, reads, source_of
from mirage_hf.trace.term import Term
from mirage_hf.trace.terms import Terms


class Scheduler:
    """Chooses and orders the step ops of a recording.

    A tensor is made by the kernel that gives it, if there is one, or else by its torch op. Only
    step ops that a write of the recording needs, directly or not, are scheduled.
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
        self._by_result: dict[Key, StepOp] = {}
        self._by_node: dict[int, StepOp] = {}
        self._needs: dict[StepOp, set[StepOp]] = {}
        self._waiting: list[StepOp] = []

    def schedule(
        self,
        groups: Iterable[StepOp],
        attentions: Iterable[CachedAttention],
        regions: Iterable[Region],
    ) -> list[StepOp]:
        """Return the step ops in an order in which they can run.

        Args:
            groups: The step ops of groups that have a kernel.
            attentions: The attention that has a kernel.
            regions: The regions that have a kernel.

        Raises:
            TraceError: Kernels would have to wait for each other.
        """
        for step_op in groups:
            self._by_result |= dict.fromkeys(kernel_results(step_op, self._terms), step_op)
        for one in attentions:
            numbers = (*one.appends, one.node)
            self._by_node |= dict.fromkeys(numbers, StepOp(numbers, attention=one))
        for region in regions:
            step_op = StepOp(region.nodes, region=region)
            self._by_result |= dict.fromkeys(kernel_results(step_op, self._terms), step_op)
            if region.write is not None:
                self._by_node[region.write] = step_op
        for number, node in enumerate(self._recording.nodes):
            if node.written:
                self._need(Value(number))
        while self._waiting:
            step_op = self._waiting.pop()
            needed = map(self._need, self._operands(step_op))
            self._needs[step_op] |= {other for other in needed if other is not None}
        self._add_effects()
        return _ordered(self._needs)

    def _need(self, key: Key) -> StepOp | None:
        """Return the step op that makes a tensor, and schedule it. None for inputs."""
        step_op = self._by_result.get(key)
        if step_op is None and isinstance(key, Term):
            made = source_of(key, self._terms)
            return self._need(made) if isinstance(made, Value) else None
        if step_op is None:
            assert isinstance(key, Value)
            step_op = self._by_node.get(key.node)
            if step_op is None:
                step_op = StepOp((key.node,), self._recording.nodes[key.node])
                self._by_node[key.node] = step_op
        if step_op not in self._needs:
            self._needs[step_op] = set()
            self._waiting.append(step_op)
        return step_op

    def _operands(self, step_op: StepOp) -> list[Key]:
        """Return what a step op reads: a term, or else the tensor that torch would make."""
        if step_op.program is None:
            return reads(step_op, self._terms)
        inputs = step_op.program.inputs
        sources = [t.weight.source for t in inputs if t.weight is not None]
        return [
            *(t for t in inputs if t.weight is None),
            *(x for x in sources if isinstance(x, Value)),
        ]

    def _add_effects(self) -> None:
        """Keep writes in order with what touches the same memory."""
        by_node = {
            number: step_op for number, step_op in self._by_node.items() if step_op in self._needs
        }
        for number, step_op in by_node.items():
            # what made the operands of an append is inside its step op, or is needed anyway
            is_kernel = step_op.attention is not None or step_op.region is not None
            before = self._effects[number] if is_kernel else self._before[number]
            self._needs[step_op] |= {by_node[n] for n in before if n in by_node} - {step_op}


def _ordered(needs: dict[StepOp, set[StepOp]]) -> list[StepOp]:
    """Return the step ops so that each comes after those that it needs, in the recorded order."""
    users: dict[StepOp, list[StepOp]] = {step_op: [] for step_op in needs}
    missing = {step_op: len(others) for step_op, others in needs.items()}
    for step_op, others in needs.items():
        for other in others:
            users[other].append(step_op)
    ready = [(max(u.nodes), n, u) for n, u in enumerate(needs) if not missing[u]]
    heapq.heapify(ready)
    count = len(needs)
    order: list[StepOp] = []
    while ready:
        *_, step_op = heapq.heappop(ready)
        order.append(step_op)
        for user in users[step_op]:
            missing[user] -= 1
            if not missing[user]:
                count += 1
                heapq.heappush(ready, (max(user.nodes), count, user))
    if len(order) < len(needs):
        raise TraceError("its kernels would have to wait for each other")
    return order
