"""Mutants of block graphs: small changes, most of them wrong, each valid as a block graph."""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from mirage_hf.errors import GraphError
from mirage_hf.graph.block import BlockGraph, BlockOp, Role
from mirage_hf.graph.execute import TorchAlgebra, run_block_graph, run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph

OTHER = {"add": ("sub", "mul"), "sub": ("add", "div"), "mul": ("div", "add"), "div": ("mul", "sub"), "exp": ("square", "sigmoid"),
         "rsqrt": ("sqrt",), "sqrt": ("rsqrt",), "silu": ("gelu", "sigmoid"), "max": ("min", "add"), "square": ("exp",), "sum": ("max",)}


@dataclass(frozen=True)
class Mutant:
    kind: str
    where: str
    ugraph: UGraph


def fuse(program: KernelGraph, block: BlockGraph) -> UGraph:
    """The µGraph that runs `block` as the only kernel of `program`."""
    kernels = KernelGraph()
    made = kernels.customized([kernels.new_input(t.dims, t.dtype, t.strides, t.name) for t in program.inputs], block)
    kernels.mark_output(*made)
    return UGraph(program, kernels)


def mutants(ugraph: UGraph) -> Iterator[Mutant]:
    """Every mutant of a µGraph of one block graph that is a block graph itself."""
    block = ugraph.block_ops[0].block
    assert block is not None
    seen = {block}
    for kind, where, make in _changes(block):
        try:
            changed = make()
            if changed not in seen:
                seen.add(changed)
                yield Mutant(kind, where, fuse(ugraph.program, changed))
        except GraphError:
            continue  # not a block graph, or not one for these operands


def _with_op(block: BlockGraph, s: int, n: int, *ops: BlockOp) -> BlockGraph:
    body = block.stages[s].body
    return _with_stage(block, s, body=(*body[:n], *ops, *body[n + 1:]))


def _with_stage(block: BlockGraph, s: int, **changes) -> BlockGraph:
    return replace(block, stages=(*block.stages[:s], replace(block.stages[s], **changes), *block.stages[s + 1:]))


def _renamed(block: BlockGraph, old: str, new: str) -> BlockGraph:
    """Everything that reads `old` reads `new`."""
    def swap(a):
        return new if a == old else a
    stages = tuple(replace(s, body=tuple(replace(op, args=tuple(swap(a) for a in op.args)) for op in s.body),
                           accumulators=tuple(replace(a, arg=swap(a.arg)) for a in s.accumulators)) for s in block.stages)
    return replace(block, stages=stages, outputs=tuple(replace(o, value=swap(o.value)) for o in block.outputs))


def _changes(block: BlockGraph):
    carried, sizes = block.carried, {a.name: a.size for a in block.axes}
    for s, stage in enumerate(block.stages):
        for n, op in enumerate(stage.body):
            yield from _op_changes(block, s, n, op, carried)
        for n, acc in enumerate(stage.accumulators):
            def put(changed, s=s, n=n):
                accs = block.stages[s].accumulators
                return _with_stage(block, s, accumulators=(*accs[:n], changed, *accs[n + 1:]))
            kind = "max" if acc.kind == "sum" else "sum"
            yield "wrong accumulator", acc.out, lambda acc=acc, put=put, kind=kind: put(replace(acc, kind=kind))
            for v, axes in carried.items():
                if v != acc.arg and axes == carried[acc.arg]:
                    yield "accumulates another value", acc.out, lambda acc=acc, put=put, v=v: put(replace(acc, arg=v))
            for other in carried:
                if other != acc.out and carried[other] == acc.axes:
                    yield "accumulator dropped", acc.out, lambda acc=acc, other=other: _renamed(block, acc.out, other)
    for n, i in enumerate(block.inputs):
        def load(changed, n=n):
            return replace(block, inputs=(*block.inputs[:n], changed, *block.inputs[n + 1:]))
        named = [d for d, a in enumerate(i.axes) if a]
        for d, e in combinations(named, 2):
            axes = list(i.axes)
            axes[d], axes[e] = axes[e], axes[d]
            yield "transposed input", i.name, lambda i=i, load=load, axes=axes: load(replace(i, axes=tuple(axes)))
        for d in named:
            for a in sizes:
                if a not in i.axes and sizes[a] == sizes[i.axes[d]]:
                    axes = (*i.axes[:d], a, *i.axes[d + 1:])
                    yield "wrong dim", i.name, lambda i=i, load=load, axes=axes: load(replace(i, axes=axes))
        for x, y in combinations(range(len(i.sources)), 2):
            sources = list(i.sources)
            sources[x], sources[y] = sources[y], sources[x]
            yield "joined in another order", i.name, lambda i=i, load=load, sources=sources: load(replace(i, sources=tuple(sources)))
        for other in block.inputs[n + 1:]:
            if len(other.sources) == len(i.sources):
                def exchange(i=i, other=other):
                    new = {i.name: replace(i, sources=other.sources), other.name: replace(other, sources=i.sources)}
                    return replace(block, inputs=tuple(new.get(x.name, x) for x in block.inputs))
                yield "swapped inputs", f"{i.name} {other.name}", exchange
            if carried[other.name] == carried[i.name]:
                yield "reads another input", i.name, lambda i=i, other=other: _renamed(block, i.name, other.name)
    for n, o in enumerate(block.outputs):
        def store(changed, n=n):
            return replace(block, outputs=(*block.outputs[:n], changed, *block.outputs[n + 1:]))
        named = [d for d, a in enumerate(o.axes) if a]
        for d, e in combinations(named, 2):
            axes = list(o.axes)
            axes[d], axes[e] = axes[e], axes[d]
            yield "transposed output", o.value, lambda o=o, store=store, axes=axes: store(replace(o, axes=tuple(axes)))
        for v, axes in carried.items():
            if v != o.value and sorted(axes) == sorted(carried[o.value]):
                yield "stores another value", o.value, lambda o=o, store=store, v=v: store(replace(o, value=v))
        for m in range(n + 1, len(block.outputs)):
            def permute(n=n, m=m):
                outs = list(block.outputs)
                outs[n], outs[m] = outs[m], outs[n]
                return replace(block, outputs=tuple(outs))
            yield "permuted outputs", o.value, permute
    for n, a in enumerate(block.axes):
        for role in Role:
            if role is not a.role:
                axes = (*block.axes[:n], replace(a, role=role), *block.axes[n + 1:])
                yield "wrong role", a.name, lambda axes=axes: replace(block, axes=axes)


def _op_changes(block: BlockGraph, s: int, n: int, op: BlockOp, carried):
    def put(*ops: BlockOp) -> BlockGraph:
        return _with_op(block, s, n, *ops)
    if len(op.args) == 2:
        yield "swapped operands", op.out, lambda: put(replace(op, args=op.args[::-1]))
    for fn in OTHER.get(op.fn, ()):
        yield "wrong op", f"{op.out} {fn}", lambda fn=fn: put(replace(op, fn=fn))
    for k, a in enumerate(op.args):
        def arg(x, k=k):
            return put(replace(op, args=(*op.args[:k], x, *op.args[k + 1:])))
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
            yield "sum over the wrong axis", op.out, lambda axis=axis, axes=axes: put(replace(op, over=axis, axes=axes))
    for name, value in op.attrs:
        if isinstance(value, float) and math.isfinite(value):
            attrs = tuple((m, v + 0.5 if m == name else v) for m, v in op.attrs)
            yield "changed attribute", f"{op.out} {name}", lambda attrs=attrs: put(replace(op, attrs=attrs))


# -- the judge ------------------------------------------------------------------------------------------------------------

def float64_inputs(program: KernelGraph, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.dims, generator=generator, dtype=torch.float64) for t in program.inputs]


def reference(program: KernelGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return run_kernel_graph(program, [x.clone() for x in inputs], torch.float64)


def distance(ugraph: UGraph, inputs: list[torch.Tensor], want: list[torch.Tensor], pieces: int = 1) -> float:
    """Largest error of a block graph in float64 relative to the output's scale; inf where it is not finite or of another shape."""
    got = run_block_graph(ugraph.block_ops[0].block, inputs, TorchAlgebra(torch.float64), pieces)
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or not bool(torch.isfinite(a).all()):
            return math.inf
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)))
    return worst


