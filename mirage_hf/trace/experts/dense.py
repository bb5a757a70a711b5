"""Read products with all experts as products with the chosen ones.

Some mixtures (Llama 4) multiply every token by every expert, and scale the inputs of experts that a
token did not choose by 0. Their functions give 0 for 0, so these experts add nothing.
`with_chosen_experts` puts the op `mirage_hf::experts` in the place of the products, which reads the
weights of chosen experts only.

    scores = f(scatter(full(-inf), index, values))          where f(-inf) = 0
    y = sum over experts of bmm(gate(bmm(repeat(x) * scores, first)), second)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mirage_hf.trace.experts.form import ExpertsForm, Linear
from mirage_hf.trace.experts.op import MOST_TOKENS, number_of_form
from mirage_hf.trace.record import Held, Input, Meta, Node, Readers, Recording, Value, readers_of
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.torch_ops import SAME_TENSOR, elementwise_op

_MINUS_INFINITY = float("-inf")


def with_chosen_experts(recording: Recording, rows: int) -> Recording:
    """Return a recording in which such products are one op each.

    The nodes keep their numbers. Nothing reads those that the op replaces.

    Args:
        recording: The recording.
        rows: The rows of a step. For more than kernels take, nothing changes.
    """
    if rows > MOST_TOKENS:
        return recording
    nodes, forms = [*recording.nodes], [*recording.forms]
    reader = _Reader(recording, rows)
    for number, node in enumerate(recording.nodes):
        if node.name == "aten.bmm" and isinstance(node.args[1], Held):
            try:
                forms.append(reader.replace(nodes, number))
            except _OtherFormError:
                continue
    return replace(recording, nodes=nodes, forms=tuple(forms))


class _OtherFormError(Exception):
    """A product that is not one of all experts."""


def _check(holds: Any) -> None:
    if not holds:
        raise _OtherFormError


class _Reader:
    """Reads the products of one recording."""

    def __init__(self, recording: Recording, rows: int):
        self.recording, self.rows = recording, rows
        self.readers: Readers = readers_of(recording.nodes)

    def replace(self, nodes: list[Node], first: int) -> ExpertsForm:
        """Put the op in the place of all that follows from the first product with all experts.

        Raises:
            _OtherFormError: They are of another form.
        """
        x, turns = self._scaled_inputs(first)
        function, scatter = self._function_of_scores(turns)
        base, dim, index, values = self._node(scatter).args
        _check(dim in (1, -1) and isinstance(values, Value) and self._fills(base, scatter))
        metas = [self.recording.meta(t) for t in (x, index, values)]
        _check(not self.recording.changing.intersection(meta.storage for meta in metas))
        _check(not self._node(scatter).kwargs)
        experts = self._shape(Value(scatter))[1]
        between, second = self._until_second(first)
        weights = [self._node(n).args[1].tensor for n in (first, second)]
        _check(all(w.dim() == 3 and w.is_contiguous() and len(w) == experts for w in weights))
        _check({w.dtype for w in weights} == {self.recording.meta(x).dtype})
        total = self._sum_over_experts(second)
        chain = [self._node(n) for n in function]
        minus_infinity = torch.full(
            (1, 1), _MINUS_INFINITY, dtype=self.recording.meta(values).dtype
        )
        _check(bool((_replayed(chain, scatter, function, minus_infinity) == 0).all()))
        between_nodes = [self._node(n) for n in between]

        def gate(y: Tensor) -> Tensor:
            return _replayed(between_nodes, first, between, y.unsqueeze(0)).squeeze(0)

        width = weights[0].shape[2]
        nothing = torch.zeros(1, width, dtype=weights[0].dtype)
        _check(_is_zero(lambda: gate(nothing)))
        linears = [Linear((w,), None, w.shape[2], w.shape[1], is_transposed=True) for w in weights]
        form = ExpertsForm(linears[0], linears[1], gate, scales_inputs=True)
        self._put(nodes, (scatter, *function), values)
        held = [self._node(n).args[1] for n in (first, second)]
        args = x, index, Value(function[-1]), held, number_of_form(form)
        op, node = torch.ops.mirage_hf.experts.default, self._node(total)
        nodes[total] = Node(op, args, {}, node.outputs, node.where)
        return form

    def _put(self, nodes: list[Node], numbers: Sequence[int], values: Value) -> None:
        """Let the functions of all scores be those of the chosen ones."""
        given, shape = values, self.recording.meta(values).shape
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        for n in numbers:
            node = nodes[n]
            is_scatter = n == numbers[0]
            outputs: list[Meta | None] = [
                replace(meta, shape=shape, strides=strides) for meta in node.outputs if meta
            ]
            if is_scatter:
                alias = torch.ops.aten.alias.default
                nodes[n] = Node(alias, (given,), {}, [self.recording.meta(values)], node.where)
            else:
                nodes[n] = Node(node.op, node.args, node.kwargs, outputs, node.where)

    # -- the parts of the form

    def _scaled_inputs(self, first: int) -> tuple[Any, int]:
        """Return the rows, and the node that turns the scores by which their copies are scaled."""
        product = self._source(self._node(first).args[0])
        _check(self._name(product) == "aten.mul" and len(self._shape(product)) == 2)
        repeated, scales = map(self._source, self._node(product.node).args)
        if self._name(repeated) != "aten.repeat":
            repeated, scales = scales, repeated
        _check(self._name(repeated) == "aten.repeat" and isinstance(scales, Value))
        x, times = self._node(repeated.node).args
        _check(isinstance(x, (Value, Input)) and len(times) == 2 and times[1] == 1)
        _check(self._name(scales) in ("aten.transpose", "aten.t"))
        scores, *dims = self._node(scales.node).args
        _check(dims in ([], [0, 1], [1, 0]) and isinstance(scores, Value))
        rows, experts = self._shape(x), times[0]
        _check(rows[:1] == (self.rows,) and self._shape(scores) == (self.rows, experts))
        _check(self._shape(product) == (experts * self.rows, rows[1]))
        return x, scales.node

    def _function_of_scores(self, reader: int) -> tuple[list[int], int]:
        """Return the nodes of the function of scores that a node reads, and the scatter before it.

        Each node is read by the next one only.
        """
        function: list[int] = []
        while True:
            scores = self._node(reader).args[0]
            _check(isinstance(scores, Value) and self.readers.get(scores) == [reader])
            node, reader = self._node(scores.node), scores.node
            if node.name in ("aten.scatter_", "aten.scatter"):
                _check(function)
                return function, reader
            is_plain = node.name in SAME_TENSOR or elementwise_op(node) is not None
            _check(is_plain and len(node.operands) == 1 and not node.written)
            _check(self._shape(scores) == self._shape(node.args[0]))
            function.insert(0, reader)

    def _fills(self, base: Any, scatter: int) -> bool:
        """Return whether a tensor is −∞ everywhere before the scatter, which alone reads it."""
        reader = scatter
        while isinstance(base, Value) and self.readers.get(base) == [reader]:
            node, reader = self._node(base.node), base.node
            if node.name == "aten.full_like":
                return bool(node.args[1] == _MINUS_INFINITY)
            if node.name not in SAME_TENSOR:
                return False
            base = node.args[0]
        return False

    def _until_second(self, first: int) -> tuple[list[int], int]:
        """Return the nodes of the function between the two products, and the second product."""
        made, between = {first}, list[int]()
        for number in range(first + 1, len(self.recording.nodes)):
            node = self._node(number)
            read = {x.node for x in node.operands if isinstance(x, Value)}
            if not read & made:
                continue
            if node.name == "aten.bmm":
                _check(between and node.args[0] == Value(between[-1]))
                _check(isinstance(node.args[1], Held))
                self._check_unread(made, {*between, number})
                return between, number
            _check(read <= made and not node.written and len(between) < MOST_TOKENS)
            _check(not any(isinstance(x, Held) for x in node.operands))
            made.add(number)
            between.append(number)
        raise _OtherFormError

    def _check_unread(self, made: set[int], known: set[int]) -> None:
        for number in made:
            for output in range(len(self._node(number).outputs)):
                _check(known.issuperset(self.readers.get(Value(number, output), [])))

    def _sum_over_experts(self, second: int) -> int:
        """Return the node that sums over experts."""
        value = Value(second)
        while True:
            users = self.readers.get(value, [])
            _check(len(users) == 1)
            node, value = self._node(users[0]), Value(users[0])
            if node.name == "aten.sum":
                _check(tuple(node.args[1:]) in (([0],), ([0], False)) and not node.kwargs)
                shape = self._shape(node.args[0])
                _check(len(shape) == 3 and shape[1] == self.rows)
                return users[0]
            _check(node.name in SAME_TENSOR and not node.written)

    def _node(self, number: int) -> Node:
        return self.recording.nodes[number]

    def _name(self, x: Any) -> str:
        return self._node(x.node).name if isinstance(x, Value) else ""

    def _shape(self, x: Any) -> tuple[int, ...]:
        return tuple(fixed_shape(self.recording.meta(x)) or ())

    def _source(self, x: Any) -> Any:
        """Return the tensor whose elements another one has in the same order."""
        while isinstance(x, Value) and self._name(x) in SAME_TENSOR:
            node = self._node(x.node)
            if math.prod(self._shape(x)) != math.prod(self._shape(node.args[0])):
                break
            x = node.args[0]
        return x


def _is_zero(function: Callable[[], Tensor]) -> bool:
    """Return whether a function gives 0. It may not run for other shapes than the recorded ones."""
    try:
        return not bool(function().count_nonzero())
    except (RuntimeError, IndexError):
        return False


def _replayed(nodes: Sequence[Node], given: int, numbers: Sequence[int], x: Tensor) -> Tensor:
    """Run the nodes of a function of one tensor.

    Args:
        nodes: The nodes.
        given: The node whose result the function takes.
        numbers: The numbers of the nodes.
        x: What it is given.
    """
    made: dict[Any, Tensor] = {Value(given): x}

    def named(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)([named(each) for each in value])
        return made[value] if isinstance(value, Value) else value

    for number, node in zip(numbers, nodes, strict=True):
        kwargs = {name: named(v) for name, v in node.kwargs.items() if name != "device"}
        result = node.op(*map(named, node.args), **kwargs)
        results = result if isinstance(result, (tuple, list)) else [result]
        made |= {Value(number, k): y for k, y in enumerate(results)}
    return made[Value(numbers[-1])]
