"""Run a recording with kernels in place of some of its ops."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.trace.cached_attention import CachedAttention, find_attention
from mirage_hf.trace.dense_experts import with_chosen_experts
from mirage_hf.trace.experts import find_experts
from mirage_hf.trace.groups import Group, groups_of
from mirage_hf.trace.order import ancestors, dependencies, effects
from mirage_hf.trace.program import GroupProgram, program_of
from mirage_hf.trace.record import Held, Input, Node, Recording, TraceError, Value
from mirage_hf.trace.regions import Region, find_regions
from mirage_hf.trace.router import with_routers
from mirage_hf.trace.short_convolution import with_short_convolutions
from mirage_hf.trace.sizes import Sizes, at_size, fixed_shape
from mirage_hf.trace.terms import Term, Terms
from mirage_hf.trace.whole_writes import without_whole_writes

#: Runs a program on its inputs. Outputs may be given: `run(inputs, out)`.
Run = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class RegionRun:
    """What runs a region.

    Attributes:
        run: Runs its program.
        is_in_place: Whether the next state may be written over the state that it updates.
        takes_outputs: Whether it may be given a tensor to write the next state into.
    """

    run: Run
    is_in_place: bool = False
    takes_outputs: bool = False


@dataclass(eq=False)
class Unit:
    """What runs as one: a torch op, a group by its kernel, or attention by its kernel.

    Attributes:
        nodes: The numbers of its nodes.
        node: The torch op, None for a group.
        program: The group's program.
        run: Runs it.
        attention: The attention of a layer, with its appends.
        region: Nodes without products.
    """

    nodes: tuple[int, ...]
    node: Node | None = None
    program: GroupProgram | None = None
    run: Run | None = None
    attention: CachedAttention | None = None
    region: Region | None = None


class StepPlan:
    """The groups of a recording, and how they and the other ops run.

    Attributes:
        recording: The recording.
        terms: Its terms.
        programs: The program of each group that has one.
        reasons: Why other groups have none.
        regions: The regions that have a program.
        attentions: The attention of each layer that a kernel may run.
    """

    def __init__(self, recording: Recording, rows: int):
        recording = with_short_convolutions(without_whole_writes(recording))
        recording = with_routers(with_chosen_experts(recording, rows), rows)
        self.recording, self.rows = recording, rows
        self.terms = Terms(recording, rows)
        self._before, self._effects = dependencies(recording), effects(recording)
        needed_before = ancestors(self._before)
        self.groups = groups_of(self.terms.all(), needed_before)
        self.programs: dict[Group, GroupProgram] = {}
        self.reasons: dict[Group, str] = {}
        for group in self.groups:
            program = program_of(group)
            if isinstance(program, str):
                self.reasons[group] = program
            else:
                self.programs[group] = program
        self.attentions = find_attention(recording, rows)
        others = [{term.node for term in group.terms} for group in self.programs]
        others += [{*one.appends, one.node} for one in self.attentions]
        needed = {t.source for p in self.programs.values() for t in p.inputs if t.source}
        taken = {n for nodes in others for n in nodes}
        experts = find_experts(recording, needed_before, taken)
        needed |= {x.source for region in experts for x in region.inputs}
        others += [{*region.nodes} for region in experts]
        self.regions = experts + find_regions(recording, needed_before, others, needed)
        self.units: list[Unit] = []
        self._over_cache: dict[CachedAttention, Callable[[int], Callable[..., Tensor]]] = {}

    # -- which units run, in which order

    def schedule(
        self,
        kernels: Mapping[Group, Run],
        attention: Mapping[CachedAttention, Callable[[int], Callable[..., Tensor]]] | None = None,
        regions: Mapping[Region, RegionRun] | None = None,
    ) -> None:
        """Order the groups that have a kernel and the torch ops that are needed besides.

        Args:
            kernels: What runs the program of a group.
            attention: By the slots of its cache, what runs the attention of a layer on the heads
                of q, k and v, RoPE's tables, the cached keys and values, bounds, and norms.
            regions: What runs a region.
        """
        self._region_runs = _with_makers(dict(regions or {}))
        self._over_cache = dict(attention or {})
        nodes = self.recording.nodes
        by_group = {group: self._unit_of(group, run) for group, run in kernels.items()}
        maker: dict[Any, Unit] = {}
        for group, unit in by_group.items():
            for term, _, _ in self.programs[group].results:
                maker[term] = unit
                if term in self.terms.made:
                    maker[self.terms.made[term]] = unit
        by_node: dict[int, Unit] = {}
        for one in self._over_cache:
            numbers = (*one.appends, one.node)
            by_node |= dict.fromkeys(numbers, Unit(numbers, attention=one))
        for region in self._region_runs:
            unit = Unit(region.nodes, region=region)
            maker |= dict.fromkeys((result.value for result in region.results), unit)
            if region.write is not None:
                by_node[region.write] = unit
        needs: dict[Unit, set[Unit]] = {}
        waiting: list[Unit] = []

        def need(key: Value | Term) -> Unit | None:
            unit = maker.get(key)
            if unit is None and isinstance(key, Term):
                made = self._source(key)
                return need(made) if isinstance(made, Value) else None
            if unit is None:
                assert isinstance(key, Value)
                unit = by_node.get(key.node)
                if unit is None:
                    unit = by_node[key.node] = Unit((key.node,), nodes[key.node])
            if unit not in needs:
                needs[unit] = set()
                waiting.append(unit)
            return unit

        for number, node in enumerate(nodes):
            if node.written:
                need(Value(number))
        while waiting:
            unit = waiting.pop()
            keys: list[Value | Term] = []
            if unit.program is not None:
                keys += [t for t in unit.program.inputs if t.weight is None]
                keys += [
                    t.weight.source
                    for t in unit.program.inputs
                    if t.weight is not None and isinstance(t.weight.source, Value)
                ]
            else:
                keys += self._reads(unit)
            needs[unit] |= {u for key in keys if (u := need(key)) is not None}
        self._add_effects(needs, by_node)
        self.units = _ordered(needs)

    def regions_to_run(self) -> list[Region]:
        """Return the regions whose nodes are scheduled as torch ops."""
        left = {unit.nodes[0] for unit in self.units if unit.node is not None}
        return [region for region in self.regions if left.issuperset(region.nodes)]

    def _unit_of(self, group: Group, run: Run) -> Unit:
        numbers = tuple(sorted({t.node for t in group.terms}))
        return Unit(numbers, program=self.programs[group], run=run)

    def _source(self, term: Term) -> Any:
        """Return the recorded tensor that holds what a term stands for."""
        return self.terms.made[term] if term.is_op else term.source

    def _add_effects(self, needs: dict[Unit, set[Unit]], by_node: dict[int, Unit]) -> None:
        """Keep writes in order with what touches the same memory."""
        by_node = {number: unit for number, unit in by_node.items() if unit in needs}
        for number, unit in by_node.items():
            # what made the operands of an append is inside its unit, or is needed anyway
            is_kernel = unit.attention is not None or unit.region is not None
            before = self._effects[number] if is_kernel else self._before[number]
            needs[unit] |= {by_node[n] for n in before if n in by_node} - {unit}

    # -- running

    def bind(self, inputs: Mapping[str, Tensor], sizes: Sizes) -> Callable[[], None]:
        """Return a function that runs the units on these inputs, at these sizes.

        Args:
            inputs: The tensors that the recording names.
            sizes: What each `Size` is taken at.
        """
        made: dict[Any, Tensor] = {}
        read = {key for unit in self.units for key in self._reads(unit)}
        actions = []
        for unit in self.units:
            if unit.attention is not None:
                action, is_constant = self._attention_action(unit.attention, inputs, read), False
            elif unit.region is not None:
                action, is_constant = self._region_action(unit.region, inputs), False
            elif unit.node is not None:
                action, is_constant = self._op_action(unit, inputs, sizes)
            else:
                action, is_constant = self._kernel_action(unit, inputs), False
            if is_constant:
                action(made)
            else:
                actions.append((unit, action))
        last: dict[Any, int] = {}
        for position, (unit, _) in enumerate(actions):
            for key in (*self._results(unit), *self._reads(unit)):
                last[key] = position
        kept = set(made)
        dropped: list[list[Any]] = [[] for _ in actions]
        for key, position in last.items():
            if key not in kept:
                dropped[position].append(key)
        steps = [(action, drop) for (_, action), drop in zip(actions, dropped, strict=True)]

        def run() -> None:
            tensors = dict(made)
            for action, drop in steps:
                action(tensors)
                for key in drop:
                    tensors.pop(key, None)

        return run

    def _reads(self, unit: Unit) -> list[Any]:
        if unit.node is not None:
            return [x for x in unit.node.operands if isinstance(x, Value)]
        if (one := unit.attention) is not None:
            read = (one.q.rows, one.k.rows, one.v.rows, one.q.cos, one.q.sin)
            return [x for x in read if isinstance(x, Value)]
        if unit.region is not None:
            return [x.source for x in unit.region.inputs if isinstance(x.source, Value)]
        assert unit.program is not None
        keys: list[Any] = []
        for term in unit.program.inputs:
            if term.weight is not None:
                keys.append(term.weight.source)
            else:
                keys += [term, self._source(term)] if not self._is_part(term) else [term]
        return [key for key in keys if isinstance(key, (Value, Term))]

    def _results(self, unit: Unit) -> list[Any]:
        """Return what a group makes: it may be dropped at once, if nothing reads it."""
        if unit.region is not None:
            return [result.value for result in unit.region.results]
        if unit.program is None:
            return []
        terms = [term for term, _, _ in unit.program.results]
        return [*terms, *(self.terms.made[t] for t in terms if t in self.terms.made)]

    def _is_part(self, term: Term) -> bool:
        return term.is_op and term not in self.terms.made

    def _op_action(
        self, unit: Unit, inputs: Mapping[str, Tensor], sizes: Sizes
    ) -> tuple[Callable[[dict[Any, Tensor]], None], bool]:
        """Return what runs a torch op, and whether it gives the same at every step."""
        (number,), node = unit.nodes, unit.node
        assert node is not None
        args, kwargs = at_size(node.args, sizes), at_size(node.kwargs, sizes)
        op = node.op
        if node.name in ("aten.view", "aten._unsafe_view"):
            op = torch.ops.aten.reshape.default
        is_constant = number in self.terms.constant
        outputs = [Value(number, n) for n in range(len(node.outputs))]

        def action(tensors: dict[Any, Tensor]) -> None:
            given = [_given(x, tensors, inputs) for x in args]
            options = {name: _given(x, tensors, inputs) for name, x in kwargs.items()}
            result = op(*given, **options)
            results = result if isinstance(result, (tuple, list)) else [result]
            for key, value in zip(outputs, results, strict=True):
                tensors[key] = value

        return action, is_constant

    def _attention_action(
        self, one: CachedAttention, inputs: Mapping[str, Tensor], read: Collection[Any]
    ) -> Callable[[dict[Any, Tensor]], None]:
        """Return what runs attention over a layer's cache, appends included.

        Args:
            one: The attention.
            inputs: The tensors that the recording names.
            read: What other units read, such as the keys of the layer.
        """
        rows, kv_heads, d = self.rows, one.k.heads, one.head_dim
        widths = [x.heads * d for x in (one.q, one.k, one.v)]
        keys, values = inputs[f"keys.{one.layer}"], inputs[f"values.{one.layer}"]
        run = self._over_cache[one](keys.shape[2])
        norms = [x.norm.weight.detach()[None] for x in (one.q, one.k) if x.norm is not None]
        tables = [x for x in (one.q.cos, one.q.sin) if x is not None]
        out, memory = Value(one.node), (keys, values)
        appended = [(Value(n), x) for n, x in zip(one.appends, memory, strict=True)]
        appended = [(key, x) for key, x in appended if key in read]

        def action(tensors: dict[Any, Tensor]) -> None:
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

    def _region_action(
        self, region: Region, inputs: Mapping[str, Tensor]
    ) -> Callable[[dict[Any, Tensor]], None]:
        """Return what runs a region. It updates its state in place if its kernel can."""
        runs, outputs = self._region_runs[region], region.graph.outputs
        target = None if region.target is None else inputs[region.target.name]
        # only a contiguous state is the same memory in the form that the program has
        moves = region.state != region.target
        may_write = runs.takes_outputs if moves else runs.is_in_place
        is_in_place = target is not None and may_write and target.is_contiguous()

        def given(source: Any, tensors: dict[Any, Tensor]) -> Tensor:
            if isinstance(source, Value):
                return tensors[source]
            return inputs[source.name] if isinstance(source, Input) else source.tensor.detach()

        def action(tensors: dict[Any, Tensor]) -> None:
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

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a step reads. Experts that several rows chose count once."""
        products = (p for group in self.groups for p in group.products)
        return sum(map(weight_bytes, products)) + sum(region.reads for region in self.regions)

    @property
    def by_kernels(self) -> tuple[CachedAttention, ...]:
        """The attention that kernels run."""
        return tuple(self._over_cache)

    def reads_masks(self) -> bool:
        """Return whether a torch op reads a mask."""
        return any(
            isinstance(x, Input) and x.name.startswith(("mask.", "ring_slot."))
            for unit in self.units
            if unit.node is not None
            for x in unit.node.operands
        )

    def _kernel_action(
        self, unit: Unit, inputs: Mapping[str, Tensor]
    ) -> Callable[[dict[Any, Tensor]], None]:
        program, run = unit.program, unit.run
        assert program is not None and run is not None
        readers = [self._reader(term, inputs) for term in program.inputs]
        writers = [self._writer(*result) for result in program.results]

        def action(tensors: dict[Any, Tensor]) -> None:
            results = run([read(tensors) for read in readers])
            for write in writers:
                write(results, tensors)

        return action

    def _reader(
        self, term: Term, inputs: Mapping[str, Tensor]
    ) -> Callable[[dict[Any, Tensor]], Tensor]:
        """Return what gives a program's operand."""
        if term.weight is not None:
            weight = term.weight

            def read_weight(tensors: dict[Any, Tensor]) -> Tensor:
                x = (
                    weight.source.tensor
                    if isinstance(weight.source, Held)
                    else tensors[weight.source]
                )
                if len(weight.shape) == 2 and weight.shape[0] == 1 and x.dim() != 2:
                    x = x.reshape(1, -1)
                if weight.columns is not None:
                    x = x[..., slice(*weight.columns)]
                return x.detach()

            return read_weight
        source = None if self._is_part(term) else self._source(term)
        dims = term.dims

        def read(tensors: dict[Any, Tensor]) -> Tensor:
            if term in tensors:
                return tensors[term].contiguous()  # it may be columns of a wider result
            x = inputs[source.name] if isinstance(source, Input) else tensors[source]
            return x.reshape(dims).contiguous()

        return read

    def _writer(
        self, term: Term, output: int, columns: tuple[int, int]
    ) -> Callable[[list[Tensor], dict[Any, Tensor]], None]:
        """Return what keeps a result, as a program's operand and as the tensor that torch made."""
        made = self.terms.made.get(term)
        shape = () if made is None else tuple(fixed_shape(self.recording.meta(made)) or ())

        def write(results: list[Tensor], tensors: dict[Any, Tensor]) -> None:
            y = results[output]
            if columns != (0, y.shape[1]):
                y = y[:, slice(*columns)]
            tensors[term] = y
            if made is not None:
                tensors[made] = y.unflatten(0, shape[:-1])

        return write


def weight_bytes(product: Term) -> int:
    """Return the bytes that a product's weight has in memory."""
    term = product.operands[1]
    if term.weight.codes:
        return sum(c.tensor.nbytes for c in term.weight.codes)
    rows, columns = term.dims
    return rows * columns * product.dtype.itemsize  # type: ignore[no-any-return]


def _with_makers(runs: dict[Region, RegionRun]) -> dict[Region, RegionRun]:
    """Leave out regions that read what no op gives and no other region makes."""
    made = {result.value for region in runs for result in region.results}
    return {
        region: run
        for region, run in runs.items()
        if all(x.source in made for x in region.inputs if x.is_between)
    }


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
