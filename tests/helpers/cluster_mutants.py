"""Structural mutants of block graphs with clusters, most of them wrong.

A mutant is a draft: the parts of a block graph, which may not fit together. `built` works out again
which axes each value carries, as a writer of such a graph would, and lets the checks of block
graphs judge the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from mirage_hf import errors
from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
)
from tests.helpers.mutants import OTHER


@dataclass(frozen=True)
class Draft:
    """The parts of a block graph."""

    axes: tuple[Axis, ...]
    inputs: tuple[BlockInput, ...]
    stages: tuple[Stage, ...]
    outputs: tuple[BlockOutput, ...]

    def built(self) -> BlockGraph:
        """Return the block graph.

        Raises:
            GraphError: If the parts do not fit together.
        """
        stages, carried = [], {i.name: set(i.carried) for i in self.inputs}
        for stage in self.stages:
            stages.append(self._carrying(stage, carried))
        return BlockGraph(self.axes, self.inputs, tuple(stages), self.outputs)

    def _carrying(self, stage: Stage, carried: dict[str, set[str]]) -> Stage:
        """Return a stage with the axes of its values, and add them to `carried`."""
        for a in stage.accumulators:
            if a.kind == "max" and a.arg in carried:
                carried[a.out] = self._reduced(carried[a.arg], stage.loop)
        body = []
        for op in stage.body:
            axes = {x for a in op.args if isinstance(a, str) for x in carried.get(a, ())}
            carried[op.out] = axes if op.over is None else self._reduced(axes, op.over)
            body.append(replace(op, axes=self._sorted(carried[op.out])))
            for a in stage.accumulators:
                if a.kind == "max" and a.arg == op.out:
                    carried[a.out] = self._reduced(carried[op.out], stage.loop)
        accumulators = []
        for a in stage.accumulators:
            carried[a.out] = self._reduced(carried.get(a.arg, set()), stage.loop)
            accumulators.append(replace(a, axes=self._sorted(carried[a.out])))
        return replace(stage, body=tuple(body), accumulators=tuple(accumulators))

    def _reduced(self, axes: set[str], over: str | None) -> set[str]:
        number = next((a.split_axis for a in self.axes if a.name == over), None)
        return axes - {over} | ({number} if number else set())

    def _sorted(self, names: set[str]) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes if a.name in names)

    def with_op(self, s: int, n: int, *ops: BlockOp) -> Draft:
        """Return the draft with other ops in the place of one."""
        body = self.stages[s].body
        return self.with_stage(s, body=(*body[:n], *ops, *body[n + 1 :]))

    def with_stage(self, s: int, **changes) -> Draft:
        """Return the draft with a changed stage."""
        stage = replace(self.stages[s], **changes)
        return replace(self, stages=(*self.stages[:s], stage, *self.stages[s + 1 :]))

    def renamed(self, old: str, new: str) -> Draft:
        """Let all readers of `old` read `new`."""

        def swap(a):
            return new if a == old else a

        stages = tuple(
            replace(
                s,
                body=tuple(replace(op, args=tuple(map(swap, op.args))) for op in s.body),
                accumulators=tuple(
                    replace(a, arg=swap(a.arg), shift=swap(a.shift)) for a in s.accumulators
                ),
            )
            for s in self.stages
        )
        outputs = tuple(replace(o, value=swap(o.value)) for o in self.outputs)
        return replace(self, stages=stages, outputs=outputs)


#: A kind of mutant, where it is, and the draft. Making it may raise a GraphError.
Change = tuple[str, str, Callable[[], Draft]]


def draft_of(block: BlockGraph) -> Draft:
    """Return the parts of a block graph."""
    return Draft(block.axes, block.inputs, block.stages, block.outputs)


def changes(d: Draft) -> Iterator[Change]:
    """Yield every structural change of a draft."""
    yield from _axis_changes(d)
    for s, stage in enumerate(d.stages):
        for n, op in enumerate(stage.body):
            is_exchange = op.over in {a.name for a in d.axes if a.role is Role.CLUSTER}
            yield from _exchange_changes(d, s, n, op) if is_exchange else ()
            yield from _op_changes(d, s, n, op)
        for n, acc in enumerate(stage.accumulators):
            yield from _accumulator_changes(d, s, n, acc)
        yield from _missing_exchanges(d, s, stage)
    for s in range(len(d.stages) - 1):
        order = (*d.stages[:s], d.stages[s + 1], d.stages[s], *d.stages[s + 2 :])
        yield "stages swapped", str(s), lambda order=order: replace(d, stages=order)
    for s in range(len(d.stages)):
        fewer = d.stages[:s] + d.stages[s + 1 :]
        yield "stage dropped", str(s), lambda fewer=fewer: replace(d, stages=fewer)
    yield from _input_changes(d)
    yield from _output_changes(d)


def _axis_changes(d: Draft) -> Iterator[Change]:
    for n, a in enumerate(d.axes):

        def put(changed: Axis, n=n) -> Draft:
            return replace(d, axes=(*d.axes[:n], changed, *d.axes[n + 1 :]))

        for role in Role:
            if role is not a.role:
                yield (
                    f"role {a.role.value} to {role.value}",
                    a.name,
                    lambda a=a, put=put, role=role: put(replace(a, role=role)),
                )
        for other in (None, *(b.name for b in d.axes)):
            if other != a.split_axis:
                yield (
                    "split dropped" if other is None else "split by another axis",
                    f"{a.name} {other}",
                    lambda a=a, put=put, other=other: put(replace(a, split_axis=other)),
                )
        if a.role is Role.CLUSTER:
            for size in (1, 2, 3, 5, 8, 9, 16):
                if size != a.size:
                    yield (
                        "cluster size",
                        f"{a.name} {size}",
                        lambda a=a, put=put, size=size: put(replace(a, size=size)),
                    )


def _exchange_changes(d: Draft, s: int, n: int, op: BlockOp) -> Iterator[Change]:
    """Yield changes of a reduction among the blocks of a cluster."""
    part = str(op.args[0])
    body = d.stages[s].body
    without = d.with_op(s, n)
    yield "exchange dropped", op.out, lambda: without.renamed(op.out, part)
    yield (
        "exchange twice",
        op.out,
        lambda: d.with_op(
            s, n, replace(op, out=op.out + "_once"), replace(op, args=(op.out + "_once",))
        ),
    )
    for fn in ("add", "max", "mul"):
        again = replace(op, out=op.out + "_once")
        mixed = BlockOp(op.out + "_mixed", fn, (part, again.out), ())
        last = replace(op, args=(mixed.out,))
        yield (
            "total and part exchanged",
            f"{op.out} {fn}",
            lambda again=again, mixed=mixed, last=last: d.with_op(s, n, again, mixed, last),
        )
    for axis in d.axes:
        if axis.name != op.over:
            over = axis.name
            yield (
                "exchange over another axis",
                f"{op.out} {over}",
                lambda over=over: d.with_op(s, n, replace(op, over=over)),
            )
    other = "max" if op.fn == "sum" else "sum"
    yield "exchange by another op", op.out, lambda: d.with_op(s, n, replace(op, fn=other))
    yield (
        "exchange made elementwise",
        op.out,
        lambda: d.with_op(s, n, replace(op, fn="neg", over=None)),
    )
    for t, stage in enumerate(d.stages):
        if t != s:
            moved = without.with_stage(t, body=(*stage.body, op))
            yield "exchange in another stage", f"{op.out} {t}", lambda moved=moved: moved
    for m in range(len(body)):
        if m != n:
            rest = [b for b in body if b is not op]
            rest.insert(m, op)
            yield (
                "exchange at another place",
                f"{op.out} {m}",
                lambda rest=rest: d.with_stage(s, body=tuple(rest)),
            )
    for t, stage in enumerate(d.stages):
        for m, reader in enumerate(stage.body):
            if op.out in reader.args:
                args = tuple(part if a == op.out else a for a in reader.args)
                yield (
                    "part read for total",
                    f"{reader.out} {op.out}",
                    lambda t=t, m=m, reader=reader, args=args: d.with_op(
                        t, m, replace(reader, args=args)
                    ),
                )
    for m, o in enumerate(d.outputs):
        for k in range(len(o.axes) + 1):
            outputs = list(d.outputs)
            axes = (*o.axes[:k], str(op.over), *o.axes[k:])
            outputs[m] = replace(o, axes=axes)
            yield (
                "output with the cluster axis",
                f"{o.value} {k}",
                lambda outputs=outputs: replace(d, outputs=tuple(outputs)),
            )
            outputs = [*outputs]
            outputs[m] = replace(o, value=part, axes=axes)
            yield (
                "part stored",
                f"{part} {k}",
                lambda outputs=outputs: replace(d, outputs=tuple(outputs)),
            )


def _missing_exchanges(d: Draft, s: int, stage: Stage) -> Iterator[Change]:
    """Yield reductions over the cluster that the graph does not have."""
    cluster = next((a.name for a in d.axes if a.role is Role.CLUSTER), None)
    for n, op in enumerate(stage.body):
        for fn in ("sum", "max") if cluster else ():
            raw = replace(op, out=op.out + "_raw")
            extra = BlockOp(op.out, fn, (raw.out,), (), (), cluster)
            yield (
                "exchange added",
                f"{op.out} {fn}",
                lambda n=n, raw=raw, extra=extra: d.with_op(s, n, raw, extra),
            )


def _values(d: Draft) -> list[str]:
    names = [i.name for i in d.inputs]
    for stage in d.stages:
        names += [op.out for op in stage.body] + [a.out for a in stage.accumulators]
    return names


def _op_changes(d: Draft, s: int, n: int, op: BlockOp) -> Iterator[Change]:
    for fn in OTHER.get(op.fn, ()):
        yield (
            "another op",
            f"{op.out} {fn}",
            lambda fn=fn: d.with_op(s, n, replace(op, fn=fn)),
        )
    for k, arg in enumerate(op.args):
        if isinstance(arg, str):
            for value in _values(d):
                if value != arg:
                    args = (*op.args[:k], value, *op.args[k + 1 :])
                    yield (
                        "reads another value",
                        f"{op.out} {arg} {value}",
                        lambda args=args: d.with_op(s, n, replace(op, args=args)),
                    )
        else:
            args = (*op.args[:k], arg * 1.25 + 0.5, *op.args[k + 1 :])
            yield (
                "another number",
                op.out,
                lambda args=args: d.with_op(s, n, replace(op, args=args)),
            )
    if op.over is not None:
        for axis in (None, *(a.name for a in d.axes)):
            if axis != op.over:
                yield (
                    "reduces over another axis",
                    f"{op.out} {axis}",
                    lambda axis=axis: d.with_op(s, n, replace(op, over=axis)),
                )
    elif len(op.args) == 2:
        turned = replace(op, args=op.args[::-1])
        yield "operands swapped", op.out, lambda: d.with_op(s, n, turned)
    first = next((a for a in op.args if isinstance(a, str)), None)
    if first is not None:
        yield "op dropped", op.out, lambda: d.with_op(s, n).renamed(op.out, first)
    twice = BlockOp(op.out + "_twice", "add", (op.out, op.out), ())
    doubled = d.renamed(op.out, twice.out)
    yield "doubled", op.out, lambda: doubled.with_op(s, n, doubled.stages[s].body[n], twice)


def _accumulator_changes(d: Draft, s: int, n: int, acc: Accumulator) -> Iterator[Change]:
    def put(*changed: Accumulator) -> Draft:
        accs = d.stages[s].accumulators
        return d.with_stage(s, accumulators=(*accs[:n], *changed, *accs[n + 1 :]))

    other = "max" if acc.kind == "sum" else "sum"
    yield "accumulates by another op", acc.out, lambda: put(replace(acc, kind=other))
    yield "accumulator dropped", acc.out, lambda: put().renamed(acc.out, acc.arg)
    if acc.shift is not None:
        yield "shift dropped", acc.out, lambda: put(replace(acc, shift=None))
    for value in _values(d):
        if value != acc.arg:
            yield (
                "accumulates another value",
                f"{acc.out} {value}",
                lambda value=value: put(replace(acc, arg=value)),
            )


def _input_changes(d: Draft) -> Iterator[Change]:
    for n, i in enumerate(d.inputs):

        def put(changed: BlockInput, n=n) -> Draft:
            return replace(d, inputs=(*d.inputs[:n], changed, *d.inputs[n + 1 :]))

        for k in range(len(i.axes)):
            for a in (None, *(a.name for a in d.axes)):
                if a != i.axes[k]:
                    axes = (*i.axes[:k], a, *i.axes[k + 1 :])
                    yield (
                        "input along another axis",
                        f"{i.name} {k} {a}",
                        lambda i=i, put=put, axes=axes: put(replace(i, axes=axes)),
                    )
        for j, k in combinations(range(len(i.axes)), 2):
            order = list(i.axes)
            order[j], order[k] = order[k], order[j]
            yield (
                "input transposed",
                i.name,
                lambda i=i, put=put, order=order: put(replace(i, axes=tuple(order))),
            )
        for other in d.inputs:
            if other.sources != i.sources:
                yield (
                    "input of another operand",
                    f"{i.name} {other.name}",
                    lambda i=i, put=put, other=other: put(replace(i, sources=other.sources)),
                )


def _output_changes(d: Draft) -> Iterator[Change]:
    for n, o in enumerate(d.outputs):

        def put(changed: BlockOutput, n=n) -> Draft:
            return replace(d, outputs=(*d.outputs[:n], changed, *d.outputs[n + 1 :]))

        for value in _values(d):
            if value != o.value:
                yield (
                    "stores another value",
                    f"{o.value} {value}",
                    lambda o=o, put=put, value=value: put(replace(o, value=value)),
                )
        for k in range(len(o.axes)):
            for a in (None, *(a.name for a in d.axes)):
                if a != o.axes[k]:
                    axes = (*o.axes[:k], a, *o.axes[k + 1 :])
                    yield (
                        "stores along another axis",
                        f"{o.value} {k} {a}",
                        lambda o=o, put=put, axes=axes: put(replace(o, axes=axes)),
                    )


def attempt(make: Callable[[], Draft]) -> BlockGraph | None:
    """Return the block graph of a change, None if the checks of block graphs refuse it."""
    try:
        return make().built()
    except errors.GraphError:
        return None
