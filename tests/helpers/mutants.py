"""Mutants of µGraphs: small changes of block graphs and kernel graphs, most of them wrong.

Every mutant is a valid µGraph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import torch

from mirage_hf.errors import GraphError, MirageError
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.block import Axis, BlockGraph, BlockInput, BlockOp, Role
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.execute_block import run_block_graph
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from tests.helpers import reference_executor

OTHER = {
    "add": ("sub", "mul"),
    "sub": ("add", "div"),
    "mul": ("div", "add"),
    "div": ("mul", "sub"),
    "exp": ("square", "sigmoid"),
    "rsqrt": ("sqrt",),
    "sqrt": ("rsqrt",),
    "silu": ("gelu", "sigmoid"),
    "max": ("min", "add"),
    "square": ("exp",),
    "sum": ("max",),
}


@dataclass(frozen=True)
class Mutant:
    kind: str
    where: str
    ugraph: UGraph


def fuse(program: KernelGraph, block: BlockGraph) -> UGraph:
    """Return the µGraph that runs `block` as the only kernel of `program`."""
    kernels = KernelGraph()
    made = kernels.customized([kernels.input_like(t) for t in program.inputs], block)
    kernels.mark_output(*made)
    return UGraph(program, kernels)


def mutants(ugraph: UGraph) -> Iterator[Mutant]:
    """Yield every valid mutant of a µGraph.

    Changes of its block graphs, then of its kernel graph.
    """
    kernels = ugraph.kernels
    for number, op in enumerate(kernels.ops):
        if op.block is None:
            continue
        seen = {op.block}
        for kind, where, make in _changes(op.block):
            try:
                changed = make()
                if changed not in seen:
                    seen.add(changed)
                    where = where if len(ugraph.block_ops) == 1 else f"kernel {number}: {where}"
                    yield Mutant(
                        kind,
                        where,
                        UGraph(
                            ugraph.program, _with_ops(kernels, {number: replace(op, block=changed)})
                        ),
                    )
            except GraphError:
                continue  # not a block graph, or not one for these operands
    yield from _kernel_mutants(ugraph)


def _with_ops(
    kernels: KernelGraph, changed: dict[int, KernelOp], outputs: Sequence[DTensor] | None = None
) -> KernelGraph:
    """Return the kernel graph with other ops at some places, and other outputs.

    Raises:
        GraphError: the ops do not fit together.
        DTypeError: the dtypes do not.
    """
    made = KernelGraph()
    new = {t.index: made.input_like(t) for t in kernels.inputs}
    for number, op in enumerate(kernels.ops):
        op = changed.get(number, op)
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        outs = (
            made.customized(args, op.block)
            if op.block is not None
            else [made.apply(op.name, args, dict(op.attrs))]
        )
        new |= {t.index: y for t, y in zip(kernels.ops[number].outputs, outs, strict=True)}
    made.mark_output(*(new[t.index] for t in (kernels.outputs if outputs is None else outputs)))
    return made


def _with_a_part_twice(kernels: KernelGraph, partial: DTensor, dim: int) -> KernelGraph:
    """Put the first split of a partial result in the place of the last."""
    made = KernelGraph()
    new = {t.index: made.input_like(t) for t in kernels.inputs}
    for op in kernels.ops:
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        outs = (
            made.customized(args, op.block)
            if op.block is not None
            else [made.apply(op.name, args, dict(op.attrs))]
        )
        new |= {t.index: y for t, y in zip(op.outputs, outs, strict=True)}
        if partial in op.outputs:
            t = new[partial.index]
            new[partial.index] = made.concat(
                [made.slice(t, dim, 0, t.dims[dim] - 1), made.slice(t, dim, 0, 1)], dim
            )
    made.mark_output(*(new[t.index] for t in kernels.outputs))
    return made


def _kernel_mutants(ugraph: UGraph) -> Iterator[Mutant]:
    """Yield mutants of a kernel graph.

    Operands are swapped or replaced, library ops changed, outputs permuted, dropped or doubled.
    """
    kernels = ugraph.kernels
    for kind, where, changed, outputs in _kernel_changes(kernels):
        try:
            made = _with_ops(kernels, changed, outputs)
        except (MirageError, KeyError):
            continue
        if made != kernels:
            yield Mutant(kind, where, UGraph(ugraph.program, made))
    for number, op in enumerate(kernels.ops):
        for t, o in zip(op.outputs, op.block.outputs if op.block is not None else (), strict=False):
            for d, a in enumerate(o.axes):
                if (
                    a is not None
                    and op.block.axis_split_by(a) is not None
                    and t.dims[d] > 1
                    and t not in kernels.outputs
                ):
                    made = _with_a_part_twice(kernels, t, d)
                    yield Mutant(
                        "a part counted twice",
                        f"kernel {number}: {o.value}",
                        UGraph(ugraph.program, made),
                    )


def _kernel_changes(kernels: KernelGraph):
    known: list[DTensor] = list(kernels.inputs)
    for number, op in enumerate(kernels.ops):

        def put(number=number, op=op, **changes):
            return {number: replace(op, **changes)}

        tensors = [(k, x) for k, x in enumerate(op.inputs) if isinstance(x, DTensor)]
        for (k, x), (j, y) in combinations(tensors, 2):
            inputs = list(op.inputs)
            inputs[k], inputs[j] = y, x
            yield (
                "swapped operands of a kernel",
                f"kernel {number}: {k} {j}",
                put(inputs=tuple(inputs)),
                None,
            )
        for k, x in tensors:
            for other in known:
                if other.index != x.index and (other.dims, other.dtype) == (x.dims, x.dtype):
                    inputs = (*op.inputs[:k], other, *op.inputs[k + 1 :])
                    yield (
                        "another operand of a kernel",
                        f"kernel {number}: {k} {other.name}",
                        put(inputs=inputs),
                        None,
                    )
        for fn in OTHER.get(op.name, ()) if op.block is None else ():
            yield "another library op", f"kernel {number}: {fn}", put(name=fn), None
        for name, value in op.attrs:
            others: list[object] = []
            if name == "kind":
                others = [v for v in ("sum", "mean", "max") if v != value]
            elif name == "eps":
                others = [value * 100, value + 1e-3]
            elif name == "dim":
                others = list(range(len(op.outputs[0].dims)))
            elif name == "order":
                others = [o for o in permutations(range(len(value))) if o != tuple(value)]
            for v in others:
                attrs = tuple((n, v if n == name else w) for n, w in op.attrs)
                yield (
                    "another attribute of a library op",
                    f"kernel {number}: {name} {v}",
                    put(attrs=attrs),
                    None,
                )
        known += op.outputs
    outs = list(kernels.outputs)
    for k, j in combinations(range(len(outs)), 2):
        permuted = list(outs)
        permuted[k], permuted[j] = outs[j], outs[k]
        yield "permuted outputs of the µGraph", f"{k} {j}", {}, permuted
        yield (
            "doubled output of the µGraph",
            f"{k} {j}",
            {},
            [outs[k] if n == j else t for n, t in enumerate(outs)],
        )
    for k, t in enumerate(outs):
        yield "dropped output of the µGraph", str(k), {}, outs[:k] + outs[k + 1 :]
        yield "one output too many", str(k), {}, [*outs, t]
        for other in known:
            if other.index != t.index and (other.dims, other.dtype) == (t.dims, t.dtype):
                yield (
                    "another output of the µGraph",
                    f"{k} {other.name}",
                    {},
                    [*outs[:k], other, *outs[k + 1 :]],
                )


def _with_op(block: BlockGraph, s: int, n: int, *ops: BlockOp) -> BlockGraph:
    body = block.stages[s].body
    return _with_stage(block, s, body=(*body[:n], *ops, *body[n + 1 :]))


def _with_stage(block: BlockGraph, s: int, **changes) -> BlockGraph:
    return replace(
        block,
        stages=(*block.stages[:s], replace(block.stages[s], **changes), *block.stages[s + 1 :]),
    )


def _renamed(block: BlockGraph, old: str, new: str) -> BlockGraph:
    """Let all readers of `old` read `new`."""

    def swap(a):
        return new if a == old else a

    if any(a.shift == old for s in block.stages for a in s.accumulators):
        raise GraphError(f"{old} is a shift")
    stages = tuple(
        replace(
            s,
            body=tuple(replace(op, args=tuple(swap(a) for a in op.args)) for op in s.body),
            accumulators=tuple(replace(a, arg=swap(a.arg)) for a in s.accumulators),
        )
        for s in block.stages
    )
    return replace(
        block, stages=stages, outputs=tuple(replace(o, value=swap(o.value)) for o in block.outputs)
    )


def _unshifted(block: BlockGraph, s: int, n: int) -> BlockGraph:
    """Let one sum follow no maximum. What it adds is then not shifted like what the others add."""
    stage = block.stages[s]
    acc = stage.accumulators[n]
    made = {op.out: op for op in stage.body}
    body: list[BlockOp] = []
    new: dict[str, str] = {}

    def copy(name: str) -> str:
        op = made.get(name)
        if name in new or op is None:
            return new.get(name, name)
        if acc.shift in op.args and op.fn == "sub":
            new[name] = copy(str(op.args[0]))
        else:
            args = tuple(copy(a) if isinstance(a, str) else a for a in op.args)
            if args == op.args:
                return name
            new[name] = name + "_raw"
            number = next((a.split_axis for a in block.axes if a.name == stage.loop), None)
            body.append(
                replace(op, out=new[name], args=args, axes=tuple(a for a in op.axes if a != number))
            )
        return new[name]

    arg = copy(acc.arg)
    accs = (
        *stage.accumulators[:n],
        replace(acc, arg=arg, shift=None),
        *stage.accumulators[n + 1 :],
    )
    return _with_stage(block, s, body=(*stage.body, *body), accumulators=accs)


def _recarried(block: BlockGraph, axes: tuple[Axis, ...]) -> BlockGraph:
    """Return the block graph over other axes, with the axes of all values worked out again."""
    order = [a.name for a in axes]
    number = {a.name: a.split_axis for a in axes}
    carried = {i.name: set(block.input_axes(i)) for i in block.inputs}

    def sort(names) -> tuple[str, ...]:
        return tuple(sorted(names, key=order.index))

    def reduced(names, over):
        return names - {over} | ({number[over]} if number[over] else set())

    stages = []
    for st in block.stages:
        for a in st.accumulators:
            if a.kind == "max" and a.arg in carried:
                carried[a.out] = reduced(carried[a.arg], st.loop)
        body = []
        for op in st.body:
            found = set().union(*(carried.get(a, set()) for a in op.args if isinstance(a, str)))
            carried[op.out] = reduced(found, op.over) if op.over else found
            body.append(replace(op, axes=sort(carried[op.out])))
            for a in st.accumulators:
                if a.kind == "max" and a.arg == op.out:
                    carried[a.out] = reduced(carried[op.out], st.loop)
        for a in st.accumulators:
            carried[a.out] = reduced(carried[a.arg], st.loop)
        stages.append(
            replace(
                st,
                body=tuple(body),
                accumulators=tuple(replace(a, axes=sort(carried[a.out])) for a in st.accumulators),
            )
        )
    return replace(block, axes=axes, stages=tuple(stages))


def _changes(block: BlockGraph):
    carried, sizes = block.carried, {a.name: a.size for a in block.axes}
    for s, stage in enumerate(block.stages):
        for n, op in enumerate(stage.body):
            yield from _op_changes(block, s, n, op, carried)
        for n, acc in enumerate(stage.accumulators):

            def put(changed, s=s, n=n):
                accs = block.stages[s].accumulators
                return _with_stage(block, s, accumulators=(*accs[:n], changed, *accs[n + 1 :]))

            kind = "max" if acc.kind == "sum" else "sum"
            yield (
                "wrong accumulator",
                acc.out,
                lambda acc=acc, put=put, kind=kind: put(replace(acc, kind=kind)),
            )
            for v, axes in carried.items():
                if v != acc.arg and axes == carried[acc.arg]:
                    kind = (
                        "maximum of another value"
                        if acc.kind == "max"
                        else "accumulates another value"
                    )
                    yield (
                        kind,
                        f"{acc.out} {v}",
                        lambda acc=acc, put=put, v=v: put(replace(acc, arg=v)),
                    )
            if acc.shift is not None:
                yield (
                    "shift dropped",
                    acc.out,
                    lambda acc=acc, put=put: put(replace(acc, shift=None)),
                )
                for other in stage.accumulators:
                    if other.kind == "max" and other.out != acc.shift:
                        yield (
                            "another shift",
                            acc.out,
                            lambda acc=acc, put=put, other=other: put(
                                replace(acc, shift=other.out)
                            ),
                        )
                yield "not rescaled", acc.out, lambda s=s, n=n: _unshifted(block, s, n)
            if acc.kind == "sum":

                def doubled(acc=acc, s=s, n=n):
                    accs = block.stages[s].accumulators
                    twice = BlockOp(acc.arg + "_twice", "add", (acc.arg, acc.arg), carried[acc.arg])
                    return _with_stage(
                        block,
                        s,
                        body=(*block.stages[s].body, twice),
                        accumulators=(*accs[:n], replace(acc, arg=twice.out), *accs[n + 1 :]),
                    )

                yield "doubled accumulator", acc.out, doubled
            for other in carried:
                if other != acc.out and carried[other] == acc.axes:
                    yield (
                        "accumulator dropped",
                        acc.out,
                        lambda acc=acc, other=other: _renamed(block, acc.out, other),
                    )
    for n, i in enumerate(block.inputs):

        def load(changed, n=n):
            return replace(block, inputs=(*block.inputs[:n], changed, *block.inputs[n + 1 :]))

        named = [d for d, a in enumerate(i.axes) if a]
        for d, e in combinations(named, 2):
            axes = list(i.axes)
            axes[d], axes[e] = axes[e], axes[d]
            yield (
                "transposed input",
                i.name,
                lambda i=i, load=load, axes=axes: load(replace(i, axes=tuple(axes))),
            )
        for d in named:
            for a in sizes:
                if a not in i.axes and sizes[a] == sizes[i.axes[d]]:
                    axes = (*i.axes[:d], a, *i.axes[d + 1 :])
                    yield (
                        "wrong dim",
                        i.name,
                        lambda i=i, load=load, axes=axes: load(replace(i, axes=axes)),
                    )
        for kind, changed in _index_changes(i, sizes):
            yield kind, i.name, lambda load=load, changed=changed: load(changed)
        for x, y in combinations(range(len(i.sources)), 2):
            sources = list(i.sources)
            sources[x], sources[y] = sources[y], sources[x]
            yield (
                "joined in another order",
                i.name,
                lambda i=i, load=load, sources=sources: load(replace(i, sources=tuple(sources))),
            )
        for other in block.inputs[n + 1 :]:
            if len(other.sources) == len(i.sources):

                def exchange(i=i, other=other):
                    new = {
                        i.name: replace(i, sources=other.sources),
                        other.name: replace(other, sources=i.sources),
                    }
                    return replace(block, inputs=tuple(new.get(x.name, x) for x in block.inputs))

                yield "swapped inputs", f"{i.name} {other.name}", exchange
            if carried[other.name] == carried[i.name]:
                yield (
                    "reads another input",
                    i.name,
                    lambda i=i, other=other: _renamed(block, i.name, other.name),
                )
    for n, o in enumerate(block.outputs):

        def store(changed, n=n):
            return replace(block, outputs=(*block.outputs[:n], changed, *block.outputs[n + 1 :]))

        named = [d for d, a in enumerate(o.axes) if a]
        for d, e in combinations(named, 2):
            axes = list(o.axes)
            axes[d], axes[e] = axes[e], axes[d]
            yield (
                "transposed output",
                o.value,
                lambda o=o, store=store, axes=axes: store(replace(o, axes=tuple(axes))),
            )
        for v, axes in carried.items():
            if v != o.value and sorted(axes) == sorted(carried[o.value]):
                yield (
                    "stores another value",
                    o.value,
                    lambda o=o, store=store, v=v: store(replace(o, value=v)),
                )
        for m in range(n + 1, len(block.outputs)):

            def permute(n=n, m=m):
                outs = list(block.outputs)
                outs[n], outs[m] = outs[m], outs[n]
                return replace(block, outputs=tuple(outs))

            yield "permuted outputs", o.value, permute
    for n, a in enumerate(block.axes):
        for parts in {None, *(b.name for b in block.axes if b.role is Role.GRID)} - {a.split_axis}:
            axes = (*block.axes[:n], replace(a, split_axis=parts), *block.axes[n + 1 :])
            yield (
                "parts dropped" if parts is None else "dealt out in parts",
                a.name,
                lambda axes=axes: _recarried(block, axes),
            )
        for role in Role:
            if role is not a.role:
                axes = (*block.axes[:n], replace(a, role=role), *block.axes[n + 1 :])
                yield "wrong role", a.name, lambda axes=axes: replace(block, axes=axes)


def _index_changes(i: BlockInput, sizes: dict[str, int]) -> Iterator[tuple[str, BlockInput]]:
    """Yield an input with other elements chosen: by another index, along other axes or dims."""
    taken = i.taken
    if taken is None:
        return
    for d, e in combinations(range(len(taken.axes)), 2):
        axes = list(taken.axes)
        axes[d], axes[e] = axes[e], axes[d]
        yield "transposed index", replace(i, taken=replace(taken, axes=tuple(axes)))
    for d, own in enumerate(taken.axes):
        for a in sizes:
            if own is not None and a not in i.carried and sizes[a] == sizes[own]:
                axes = (*taken.axes[:d], a, *taken.axes[d + 1 :])
                yield "index along another axis", replace(i, taken=replace(taken, axes=axes))
    for d, own in enumerate(i.axes):
        if own is not None:
            axes = list(i.axes)
            axes[d], axes[taken.dim] = None, own
            changed = replace(taken, dim=d, size=sizes[own])
            yield "index chooses along another dim", replace(i, axes=tuple(axes), taken=changed)
    for operand in range(8):
        if operand != taken.index:
            yield "another index", replace(i, taken=replace(taken, index=operand))


def _op_changes(block: BlockGraph, s: int, n: int, op: BlockOp, carried):
    def put(*ops: BlockOp) -> BlockGraph:
        return _with_op(block, s, n, *ops)

    if len(op.args) == 2:
        yield "swapped operands", op.out, lambda: put(replace(op, args=op.args[::-1]))
    for fn in OTHER.get(op.fn, ()):
        yield "wrong op", f"{op.out} {fn}", lambda fn=fn: put(replace(op, fn=fn))
    for k, a in enumerate(op.args):

        def arg(x, k=k):
            return put(replace(op, args=(*op.args[:k], x, *op.args[k + 1 :])))

        if not isinstance(a, str):
            for x in (a * 1.01, -a, a * 10 if a else 1.0, a + 0.125):
                yield "changed constant", f"{op.out} {a} {x}", lambda x=x, arg=arg: arg(x)
            continue
        for v, axes in carried.items():
            if v not in (a, op.out) and axes == carried[a]:
                yield "wrong value", f"{op.out} {v}", lambda v=v, arg=arg: arg(v)
        if carried[a] == op.axes:
            yield "dropped op", op.out, lambda a=a: _renamed(block, op.out, a)
        if op.over is None:

            def doubled(a=a):
                first = replace(op, out=op.out + "_once")
                return put(first, BlockOp(op.out, "mul", (first.out, a), op.axes))

            yield "duplicated factor", f"{op.out} {a}", doubled
    if op.over is not None:
        for axis in carried[str(op.args[0])]:
            axes = tuple(a for a in carried[str(op.args[0])] if a != axis)
            yield (
                "sum over the wrong axis",
                op.out,
                lambda axis=axis, axes=axes: put(replace(op, over=axis, axes=axes)),
            )
    for name, value in op.attrs:
        if isinstance(value, float) and math.isfinite(value):
            attrs = tuple((m, v + 0.5 if m == name else v) for m, v in op.attrs)
            yield (
                "changed attribute",
                f"{op.out} {name}",
                lambda attrs=attrs: put(replace(op, attrs=attrs)),
            )


# -- the judge ------------------------------------------------------------------------------------

#: Relative float64 errors: functions differ above the first, and are equal below the second.
DIFFERS, EQUAL = 1e-9, 1e-11


def float64_inputs(program: KernelGraph, seed: int = 0, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t.dims, generator=generator, dtype=torch.float64) * scale
        for t in program.inputs
    ]


def reference(program: KernelGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return reference_executor.run(program, inputs)


def distance(
    ugraph: UGraph, inputs: list[torch.Tensor], want: list[torch.Tensor], pieces: int = 0
) -> float:
    """Return the largest float64 error of a µGraph, relative to the scale of the output.

    It is inf if the outputs have other shapes. Both sides may be NaN. Block graphs are run by the
    reference executor of these tests, or by the package in `pieces`.
    """

    def piecewise(block, operands):
        return run_block_graph(block, operands, TorchAlgebra(torch.float64), pieces)

    got = reference_executor.run(ugraph.kernels, inputs, run_block=piecewise if pieces else None)
    if [x.shape for x in got] != [x.shape for x in want]:
        return math.inf
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        fine = torch.isfinite(b)
        if not bool(torch.isfinite(a)[fine].all()) or bool(
            (torch.isnan(a) != torch.isnan(b)).any()
        ):
            return math.inf
        worst = max(
            worst,
            float((a - b)[fine].abs().max() / b[fine].abs().max().clamp_min(1e-30))
            if bool(fine.any())
            else 0.0,
        )
    return worst


class Judge:
    """Classify mutants of a program's µGraphs.

    A mutant is "differs", "equal", "unclear" or "range only". "Range only" means that it is the
    same function, but gives inf or NaN in float32 on large inputs. The program is finite there in
    its own dtype.
    """

    def __init__(self, program: KernelGraph, seeds: Sequence[int] = (0, 1, 2)):
        self.program = program
        self.inputs = [float64_inputs(program, seed) for seed in seeds]
        self.want = [reference(program, x) for x in self.inputs]
        self.large = [
            [
                x.to(t.dtype).double()
                for x, t in zip(float64_inputs(program, 7, scale), program.inputs, strict=True)
            ]
            for scale in (3.0, 10.0, 30.0, 100.0)
        ]
        self.finite = [self._finite(x) for x in self.large]

    def __call__(self, ugraph: UGraph) -> str:
        if [t.dtype for t in ugraph.kernels.outputs] != [t.dtype for t in self.program.outputs]:
            return "differs"
        far = 0.0
        for x, want in zip(self.inputs, self.want, strict=True):
            far = max(far, distance(ugraph, x, want))
            if far > DIFFERS:
                return "differs"
        if far > EQUAL:
            return "unclear"
        for x, finite in zip(self.large, self.finite, strict=True):
            got = reference_executor.run(ugraph.kernels, x, torch.float32)
            if any(
                bool((b & ~torch.isfinite(a.to(t.dtype))).any())
                for a, b, t in zip(got, finite, self.program.outputs, strict=True)
            ):
                return "range only"
        return "equal"

    def _finite(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        eager = run_kernel_graph(
            self.program, [x.to(t.dtype) for x, t in zip(inputs, self.program.inputs, strict=True)]
        )
        return [
            torch.isfinite(e) & (w.abs() < 0.98 * torch.finfo(e.dtype).max)
            for e, w in zip(eager, reference_executor.run(self.program, inputs), strict=True)
        ]
