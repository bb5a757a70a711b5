"""Bind step ops to tensors: what runs each of them, and when its results can be dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mirage_hf.trace.cached_attention import CachedAttention
from mirage_hf.trace.record import Held, Input, Node, Recording, Value
from mirage_hf.trace.regions import Region
from mirage_hf.trace.sizes import Sizes, at_size, fixed_shape
from mirage_hf.trace.step_ops import (
    AttentionOfSlots,
    Key,
    RegionRun,
    StepOp,
    is_unmade,
    kernel_results,
    reads,
    source_of,
)
from mirage_hf.trace.term import Term
from mirage_hf.trace.terms import Terms

#: The tensors of a running step. An action adds the results of its step op.
Tensors = dict[Any, Tensor]
Action = Callable[[Tensors], None]


class Binding:
    """Step ops bound to the inputs of a step, at some sizes."""

    def __init__(
        self,
        recording: Recording,
        terms: Terms,
        attention: Mapping[CachedAttention, AttentionOfSlots],
        regions: Mapping[Region, RegionRun],
        inputs: MutableMapping[str, Tensor],
        sizes: Sizes,
        replaced: Collection[str] = (),
    ):
        """Keep what the step ops are bound to.

        Args:
            recording: The recording.
            terms: Its terms.
            attention: What runs the attention of a layer.
            regions: What runs a region.
            inputs: The tensors that the recording names.
            sizes: What each `Size` is taken at.
            replaced: Inputs whose tensor is replaced by the one that is copied over all of it.
        """
        self._replaced = replaced
        self.recording, self.terms, self.rows = recording, terms, terms.rows
        self._attention, self._regions = attention, regions
        self.inputs, self.sizes = inputs, sizes

    def run_op(self, step_op: StepOp, tensors: Tensors) -> None:
        """Run one torch op, and add its results."""
        self._op_action(step_op)(tensors)

    def bind(
        self, step_ops: Sequence[StepOp], given: Mapping[Value, Tensor] = MappingProxyType({})
    ) -> Callable[[], None]:
        """Return a function that runs the step ops in order.

        Args:
            step_ops: The step ops.
            given: Tensors that none of them makes. They keep their addresses.
        """
        constants: Tensors = dict(given)
        read = {key for step_op in step_ops for key in reads(step_op, self.terms)}
        actions: list[tuple[StepOp, Action]] = []
        for step_op in step_ops:
            action = self._action(step_op, read)
            if step_op.node is not None and step_op.nodes[0] in self.terms.constant:
                action(constants)  # it gives the same at every step
            else:
                actions.append((step_op, action))
        dropped = self._dropped([step_op for step_op, _ in actions], constants)
        steps = [(action, keys) for (_, action), keys in zip(actions, dropped, strict=True)]

        def run() -> None:
            tensors = dict(constants)
            for action, keys in steps:
                action(tensors)
                for key in keys:
                    tensors.pop(key, None)

        return run

    def _dropped(self, step_ops: Sequence[StepOp], kept: Collection[Any]) -> list[list[Key]]:
        """Return for each step op the tensors that no later step op reads."""
        last: dict[Key, int] = {}
        for position, step_op in enumerate(step_ops):
            for key in (*kernel_results(step_op, self.terms), *reads(step_op, self.terms)):
                last[key] = position
        dropped: list[list[Key]] = [[] for _ in step_ops]
        for key, position in last.items():
            if key not in kept:
                dropped[position].append(key)
        return dropped

    def _action(self, step_op: StepOp, read: Collection[Any]) -> Action:
        if step_op.attention is not None:
            return self._attention_action(step_op.attention, read)
        if step_op.region is not None:
            return self._region_action(step_op.region)
        if step_op.node is not None:
            return self._op_action(step_op)
        return self._kernel_action(step_op)

    def _op_action(self, step_op: StepOp) -> Action:
        """Return what runs a torch op."""
        (number,), node, inputs = step_op.nodes, step_op.node, self.inputs
        assert node is not None
        args, kwargs = at_size(node.args, self.sizes), at_size(node.kwargs, self.sizes)
        op = node.op
        if node.name in ("aten.view", "aten._unsafe_view"):
            op = torch.ops.aten.reshape.default
        outputs = [Value(number, n) for n in range(len(node.outputs))]
        if (pair := self._replacement(node)) is not None:
            name, source = pair

            def replace(tensors: Tensors) -> None:
                x = tensors[source]
                inputs[name] = tensors[outputs[0]] = x.contiguous()  # it may be columns of another

            return replace

        def action(tensors: Tensors) -> None:
            given = [_given(x, tensors, inputs) for x in args]
            options = {name: _given(x, tensors, inputs) for name, x in kwargs.items()}
            result = op(*given, **options)
            results = result if isinstance(result, (tuple, list)) else [result]
            for key, value in zip(outputs, results, strict=True):
                tensors[key] = value

        return action

    def _replacement(self, node: Node) -> tuple[str, Value] | None:
        """Return the input that a copy may replace, and by what. None for other ops."""
        if node.name != "aten.copy_" or len(node.args) != 2:
            return None
        target, source = node.args
        if not isinstance(target, Input) or not isinstance(source, Value):
            return None
        before, after = (self.recording.meta(x) for x in (target, source))
        shape = fixed_shape(after)
        is_like = before.dtype == after.dtype and shape is not None and shape == fixed_shape(before)
        return (target.name, source) if is_like and target.name in self._replaced else None

    def _attention_action(self, one: CachedAttention, read: Collection[Any]) -> Action:
        """Return what runs attention over a layer's cache, appends included.

        Args:
            one: The attention.
            read: What step ops read, such as the keys of the layer.
        """
        inputs = self.inputs
        rows, kv_heads, d = self.rows, one.k.heads, one.head_dim
        widths = [x.heads * d for x in (one.q, one.k, one.v)]
        keys, values = inputs[f"keys.{one.layer}"], inputs[f"values.{one.layer}"]
        run = self._attention[one](keys.shape[2])
        norms = [x.norm.weight.detach()[None] for x in (one.q, one.k) if x.norm is not None]
        tables = [x for x in (one.q.cos, one.q.sin) if x is not None]
        out, memory = Value(one.node), (keys, values)
        appended = [(Value(n), x) for n, x in zip(one.appends, memory, strict=True)]
        appended = [(key, x) for key, x in appended if key in read]

        def action(tensors: Tensors) -> None:
            given = [tensors[x.rows].reshape(rows, -1) for x in (one.q, one.k, one.v)]
            given = [x if x.stride(1) == 1 else x.contiguous() for x in given]
            if rows > 1 and any(x.stride() != (sum(widths), 1) for x in given):
                given = list(torch.cat(given, 1).split(widths, 1))
            packed = [x.unflatten(1, (kv_heads, -1, d)) for x in given]
            of_rope = [
                (inputs[x.name] if isinstance(x, Input) else tensors[x]).reshape(rows, -1)
                for x in tables
            ]
            bounds = [inputs[f"{name}.{one.layer}"] for name in one.bounds]
            y = run(packed, of_rope, memory, bounds, norms)
            tensors[out] = y.reshape(rows, one.q.heads, 1, d)
            for key, x in appended:
                tensors[key] = x

        return action

    def _region_action(self, region: Region) -> Action:
        """Return what runs a region. It updates its state in place if its kernel can."""
        inputs = self.inputs
        runs, outputs = self._regions[region], region.graph.outputs
        target = None if region.target is None else inputs[region.target.name]
        # only a contiguous state is the same memory in the form that the program has
        moves = region.state != region.target
        may_write = runs.takes_outputs if moves else runs.is_in_place
        is_in_place = target is not None and may_write and target.is_contiguous()

        def given(source: Any, tensors: Tensors) -> Tensor:
            if isinstance(source, Value):
                return tensors[source]
            return inputs[source.name] if isinstance(source, Input) else source.tensor.detach()

        def action(tensors: Tensors) -> None:
            operands = [x.of(given(x.source, tensors)) for x in region.inputs]
            if is_in_place:
                assert target is not None
                others = [target.new_empty(t.dims, dtype=t.dtype) for t in outputs[1:]]
                results = runs.run(operands, [target.view(outputs[0].dims), *others])[1:]
            else:
                results = runs.run(operands)
                if target is not None:
                    target.copy_(results[0].reshape(target.shape))
                    results = results[1:]
            for result, y in zip(region.results, results, strict=True):
                tensors[result.value] = result.of(y)

        return action

    def _kernel_action(self, step_op: StepOp) -> Action:
        """Return what runs the program of a group."""
        program, run = step_op.program, step_op.run
        assert program is not None and run is not None
        readers = [self._reader(term) for term in program.inputs]
        writers = [self._writer(*result) for result in program.results]

        def action(tensors: Tensors) -> None:
            results = run([read(tensors) for read in readers])
            for write in writers:
                write(results, tensors)

        return action

    def _reader(self, term: Term) -> Callable[[Tensors], Tensor]:
        """Return what gives a program's operand."""
        if (weight := term.weight) is not None:

            def read_weight(tensors: Tensors) -> Tensor:
                source = weight.source
                x = source.tensor if isinstance(source, Held) else tensors[source]
                x = x.t() if weight.is_transposed else x
                if len(weight.shape) == 2 and weight.shape[0] == 1 and x.dim() != 2:
                    x = x.reshape(1, -1)
                if weight.columns is not None:
                    x = x[..., slice(*weight.columns)]
                return x.detach()

            return read_weight
        source = None if is_unmade(term, self.terms) else source_of(term, self.terms)
        dims, inputs = term.dims, self.inputs

        def read(tensors: Tensors) -> Tensor:
            if term in tensors:
                return tensors[term].contiguous()  # it may be columns of a wider result
            x = inputs[source.name] if isinstance(source, Input) else tensors[source]
            return x.reshape(dims).contiguous()

        return read

    def _writer(
        self, term: Term, output: int, columns: tuple[int, int]
    ) -> Callable[[list[Tensor], Tensors], None]:
        """Return what keeps a result, as a program's operand and as the tensor that torch made."""
        made = self.terms.made.get(term)
        shape = () if made is None else tuple(fixed_shape(self.recording.meta(made)) or ())

        def write(results: list[Tensor], tensors: Tensors) -> None:
            y = results[output]
            if columns != (0, y.shape[1]):
                y = y[:, slice(*columns)]
            tensors[term] = y
            if made is not None:
                tensors[made] = y.unflatten(0, shape[:-1])

        return write


def _given(x: Any, tensors: Mapping[Any, Tensor], inputs: Mapping[str, Tensor]) -> Any:
    """Return an argument of a recorded op with tensors in place of their names."""
    if isinstance(x, Value):
        return tensors[x]
    if isinstance(x, Input):
        return inputs[x.name]
    if isinstance(x, Held):
        return x.tensor
    if isinstance(x, (tuple, list)):
        return type(x)([_given(each, tensors, inputs) for each in x])
    return x
