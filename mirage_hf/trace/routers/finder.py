"""Find the routers of a recording, and put the op `mirage_hf::route` in their place.

A router is up to thirty torch ops on small tensors. It begins as all ops around a choice that a
kernel could take. Ops that cannot stay are removed until the others are a router.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from mirage_hf.trace.record import (
    Held,
    Input,
    Meta,
    Node,
    Readers,
    Recording,
    Value,
    readers_of,
    renamed,
)
from mirage_hf.trace.routers.op import number_of
from mirage_hf.trace.routers.steps import Form, Local, Router, Step
from mirage_hf.trace.routers.text import can_be_step, router_text
from mirage_hf.trace.routers.tiles import UnwrittenError
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.torch_ops import SAME_TENSOR

#: The ops that choose by the greatest scores.
CHOICES = ("aten.topk", "aten.max")

#: The most elements that a tensor of a router has for each row.
MOST_ELEMENTS = 2048


def with_routers(recording: Recording, rows: int) -> Recording:
    """Return a recording in which each router is one op.

    The nodes keep their numbers. Nothing reads those that the op replaces.

    Args:
        recording: The recording.
        rows: The rows of a step.
    """
    finder = _Finder(recording, rows)
    nodes = [*recording.nodes]
    names: dict[Value, Value] = {}
    for number, node in enumerate(recording.nodes):
        if node.name not in CHOICES or nodes[number] is not node:
            continue
        found = finder.find(number)
        if found is not None:
            _replace(nodes, found)
            names |= {x: Value(found.place, n) for n, x in enumerate(found.results)}
    return replace(recording, nodes=[renamed(node, names) for node in nodes])


@dataclass(frozen=True)
class _Found:
    """A router in a recording.

    Attributes:
        nodes: The numbers of its nodes, in order.
        place: The node in whose place the op runs.
        router: The router.
        inputs: What it reads.
        results: What other nodes read of it.
        metas: What is known of these.
    """

    nodes: tuple[int, ...]
    place: int
    router: Router
    inputs: tuple[Any, ...]
    results: tuple[Value, ...]
    metas: tuple[Any, ...]


class _Finder:
    """Finds the routers of a recording."""

    def __init__(self, recording: Recording, rows: int):
        self.recording, self.rows = recording, rows
        self.readers: Readers = readers_of(recording.nodes)
        metas = [*recording.inputs.values(), *recording.held.values()]
        #: The storages that no node makes.
        self.given = {meta.storage for meta in metas}
        #: By storage: the nodes that touch it.
        self.touching: dict[int, list[int]] = {}
        for number, node in enumerate(recording.nodes):
            touched = {recording.meta(x).storage for x in node.operands}
            touched |= {meta.storage for meta in node.outputs if meta is not None}
            for storage in touched:
                self.touching.setdefault(storage, []).append(number)
        self.weights = self._views_of_weights()

    def find(self, topk: int) -> _Found | None:
        """Return the router that a top-k belongs to."""
        nodes = self._around(topk)
        while nodes:
            found = self._as_router(nodes)
            if isinstance(found, _Found):
                return found
            nodes = self._connected(topk, nodes - found) if found else set()
        return None

    def _around(self, topk: int) -> set[int]:
        """Return the nodes that a kernel could take, and that a top-k is connected with."""
        return self._connected(topk, self._may_be_taken)

    @cached_property
    def _may_be_taken(self) -> set[int]:
        """The nodes that a kernel could take."""
        return {n for n in range(len(self.recording.nodes)) if self._may_take(n)}

    def _connected(self, topk: int, may: set[int]) -> set[int]:
        """Return the nodes of a set that are connected with a top-k through nodes of the set."""
        if topk not in may:
            return set()
        found, waiting = {topk}, [topk]
        while waiting:
            for n in self._beside(waiting.pop()):
                if n in may and n not in found:
                    found.add(n)
                    waiting.append(n)
        return found

    def _beside(self, number: int) -> Iterable[int]:
        node = self.recording.nodes[number]
        yield from (x.node for x in node.operands if isinstance(x, Value))
        for output in range(len(node.outputs)):
            yield from self.readers.get(Value(number, output), [])

    def _may_take(self, number: int) -> bool:
        """Return whether a node computes rows of few numbers, by an op that kernels know."""
        node = self.recording.nodes[number]
        if number in self.weights:
            return True
        if not can_be_step(node) or not all(self._is_small(meta) for meta in node.outputs):
            return False
        rows = [x for x in node.operands if not self._is_weight(x)]
        return bool(rows) and all(self._is_small(self.recording.meta(x)) for x in rows)

    def _views_of_weights(self) -> set[int]:
        """Return the nodes that are views of weights with one row."""
        found: set[int] = set()
        for number, node in enumerate(self.recording.nodes):
            if node.name not in SAME_TENSOR or not can_be_step(node):
                continue
            of_weight = isinstance(node.args[0], Held) or (
                isinstance(node.args[0], Value) and node.args[0].node in found
            )
            if of_weight and len(node.operands) == 1 and all(map(_has_one_row, node.outputs)):
                found.add(number)
        return found

    def _is_weight(self, x: Value | Input | Held) -> bool:
        """Return whether a tensor is a weight with one row, which all rows share."""
        if isinstance(x, Value):
            return x.node in self.weights
        return isinstance(x, Held) and _has_one_row(self.recording.meta(x))

    def _is_small(self, meta: Any) -> bool:
        shape = None if meta is None else fixed_shape(meta)
        if not shape or shape[0] != self.rows:
            return False
        return math.prod(shape) <= self.rows * MOST_ELEMENTS

    def _as_router(self, members: set[int]) -> _Found | set[int]:
        """Return some nodes as a router, or the nodes without which they could be one."""
        recording = self.recording
        numbers = sorted(members)
        if wrong := self._wrong_writes(members):
            return wrong
        steps = _Steps([(number, recording.nodes[number]) for number in numbers])
        results, readers = self._read_outside(numbers, members)
        after = max((x.node for x in steps.inputs if isinstance(x, Value)), default=-1)
        place = next((n for n in numbers if n > after), None)
        if place is None or not results:
            return members
        if early := {n for n in readers if n <= place}:
            # leave out the nodes whose results are read before the op would run
            return {x.node for n in early for x in recording.nodes[n].operands if x in results}
        router = Router(
            self.rows,
            tuple(_form(recording.meta(x)) for x in steps.inputs),
            tuple(isinstance(x, Held) for x in steps.inputs),
            tuple(steps.steps),
            tuple(steps.names[x] for x in results),
        )
        try:
            router_text(router)
        except UnwrittenError as error:
            return members if error.step is None else {numbers[error.step]}
        metas = tuple(_made_anew(recording.meta(x)) for x in results)
        return _Found(tuple(numbers), place, router, tuple(steps.inputs), tuple(results), metas)

    def _wrong_writes(self, members: set[int]) -> set[int]:
        """Return the nodes that touch memory which nodes outside of the router write.

        Return, too, those that write what was there before, or what is read by its older name.
        """
        nodes, meta = self.recording.nodes, self.recording.meta
        wrong = set()
        for number in members:
            node = nodes[number]
            touched = {meta(x).storage for x in node.operands}
            touched |= {m.storage for m in node.outputs if m is not None}
            for storage in touched & self.recording.changing:
                touching = self.touching[storage]
                if storage in self.given or not members.issuperset(
                    n for n in touching if storage in nodes[n].written
                ):
                    wrong.add(number)
        for number in members - wrong:
            for storage in nodes[number].written:
                before = [n for n in self.touching[storage] if n < number]
                later = [x for n in self.touching[storage] if n > number for x in nodes[n].operands]
                old = [
                    x
                    for x in later
                    if meta(x).storage == storage and isinstance(x, Value) and x.node < number
                ]
                if old or not members.issuperset(before):
                    wrong.add(number)
        return wrong

    def _read_outside(
        self, numbers: Sequence[int], members: set[int]
    ) -> tuple[list[Value], list[int]]:
        """Return the values that other nodes read, and these nodes."""
        results: list[Value] = []
        found: set[int] = set()
        for number in numbers:
            for output in range(len(self.recording.nodes[number].outputs)):
                others = set(self.readers.get(Value(number, output), [])) - members
                if others:
                    results.append(Value(number, output))
                    found |= others
        return results, sorted(found)


class _Steps:
    """Nodes as the steps of a router.

    Attributes:
        steps: The steps.
        inputs: The tensors that no step makes, in order.
        names: The name of each tensor in the router. Held tensors are known by their ids.
    """

    def __init__(self, nodes: Iterable[tuple[int, Node]]):
        self.steps: list[Step] = []
        self.inputs: list[Value | Input | Held] = []
        self.names: dict[Any, Local] = {}
        for number, node in nodes:
            kwargs = tuple((name, self._local(x)) for name, x in node.kwargs.items())
            forms = tuple(_form(meta) for meta in node.outputs)
            args = tuple(map(self._local, node.args))
            outputs = [Value(number, k) for k in range(len(forms))]
            self.names |= {x: Local(len(self.steps), k) for k, x in enumerate(outputs)}
            self.steps.append(Step(node.op, args, kwargs, forms))

    def _local(self, x: Any) -> Any:
        """Return an argument with the names of tensors in their place."""
        if not isinstance(x, (Value, Input, Held)):
            return tuple(map(self._local, x)) if isinstance(x, (tuple, list)) else x
        key = id(x.tensor) if isinstance(x, Held) else x
        if key not in self.names:
            self.names[key] = Local(-1, len(self.inputs))
            self.inputs.append(x)
        return self.names[key]


def _has_one_row(meta: Any) -> bool:
    shape = None if meta is None else fixed_shape(meta)
    if shape is None or math.prod(shape) > MOST_ELEMENTS:
        return False
    return math.prod(shape) == (shape[-1] if shape else 1)


def _form(meta: Any) -> Form:
    return Form(tuple(fixed_shape(meta) or ()), meta.dtype)


def _made_anew(meta: Meta) -> Meta:
    """Return what is known of a tensor that is stored row by row."""
    shape = meta.shape
    return replace(meta, strides=tuple(math.prod(shape[n + 1 :]) for n in range(len(shape))))


def _replace(nodes: list[Node], found: _Found) -> None:
    """Put the op in the place of a router."""
    where = nodes[found.place].where
    for n in found.nodes:  # nothing reads or runs these
        unused = torch.ops.aten.empty.memory_format
        nodes[n] = Node(unused, ([0],), {}, nodes[n].outputs, nodes[n].where)
    args = [*found.inputs], number_of(found.router)
    nodes[found.place] = Node(torch.ops.mirage_hf.route.default, args, {}, [*found.metas], where)
