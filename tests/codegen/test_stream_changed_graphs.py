"""Block graphs with zero points or shifts that are changed at random are refused, or understood.

`Products` says what a kernel computes: its products, its other sums, and the ops after them. That
has to be what the block graph computes. Nothing is compiled, so many graphs are tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.streams.finding import streamed_products
from mirage_hf.codegen.streams.products import ZEROS, Products
from mirage_hf.errors import CodegenError, MirageError
from mirage_hf.graph.block import Accumulator, BlockGraph, BlockOp, Stage
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from tests.helpers.streamed_graphs import SHIFTS, Hand

#: All axes. Values have a dim for each of them, of size 1 if they do not carry it.
AXES = "m", "n", "k", "r"
#: How many graphs a test changes.
COUNT = 3000
OPS: dict[str, Callable[..., torch.Tensor]] = {
    "mul": torch.mul,
    "add": torch.add,
    "sub": torch.sub,
    "silu": torch.nn.functional.silu,
    "rsqrt": lambda x: (x.abs() + 1e-3) ** -0.5,  # the same for any sign
}
Values = Mapping[str, torch.Tensor]


def applied(op: BlockOp, args: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the result of an op."""
    if op.over is not None:
        return args[0].sum(AXES.index(op.over), keepdim=True)
    return OPS[op.fn](*args)


def value_of(block: BlockGraph, name: str | float, known: Values) -> torch.Tensor:
    """Return a value that elementwise ops compute from known ones, as a kernel does."""
    if not isinstance(name, str):
        return torch.tensor(float(name), dtype=torch.float64)
    if name in known:
        return known[name]
    op = block.ops_by_name[name]
    assert op.over is None, f"{name} reduces a value, and is not known"
    return applied(op, [value_of(block, a, known) for a in op.args])


def computed(found: Products, inputs: Values) -> list[torch.Tensor]:
    """Return what a kernel computes."""
    block, summed = found.block, tuple(map(AXES.index, found.columns))
    others = torch.stack([value_of(block, name, inputs) for name in found.other])
    known = {n: x for n, x in inputs.items() if not {*found.columns} & {*block.carried[n]}}
    for p in found.products:
        weight = inputs[p.codes] - (ZEROS[found.dtype] if p.zero is None else inputs[p.zero])
        weight = weight if p.scale is None else weight * inputs[p.scale]
        weight = weight if p.shift is None else weight + inputs[p.shift]
        known[p.out] = (weight * others.prod(0)).sum(summed, keepdim=True)
    for out, value in found.sums:
        known[out] = value_of(block, value, inputs).sum(summed, keepdim=True)
    return [value_of(block, o.value, known) for o in block.outputs]


def expected(block: BlockGraph, inputs: Values) -> list[torch.Tensor]:
    """Return what a block graph computes, op by op."""
    known = dict(inputs)
    for stage in block.stages:
        for op in stage.body:
            args = [value_of(block, a, known) for a in op.args]
            known[op.out] = applied(op, args)
        for a in stage.accumulators:
            assert stage.loop is not None
            known[a.out] = known[a.arg].sum(AXES.index(stage.loop), keepdim=True)
    return [known[o.value] for o in block.outputs]


def with_axes(block: BlockGraph, bodies: Sequence[Sequence[BlockOp]], sums) -> BlockGraph:
    """Return a block graph with other ops and sums, whose axes are those of what they read."""
    carried = {i.name: {*i.axes} - {None} for i in block.inputs}
    stages = []
    for stage, body, own_sums in zip(block.stages, bodies, (sums, ()), strict=True):
        ops = []
        for op in body:
            axes = {a for name in op.args if isinstance(name, str) for a in carried[name]}
            carried[op.out] = axes - {op.over}
            ops.append(replace(op, axes=tuple(a for a in AXES if a in carried[op.out])))
        accumulators = []
        for s in own_sums:
            carried[s.out] = carried[s.arg] - {stage.loop}
            axes = tuple(a for a in AXES if a in carried[s.out])
            accumulators.append(replace(s, axes=axes))
        stages.append(Stage(stage.loop, tuple(ops), tuple(accumulators)))
    return replace(block, stages=tuple(stages))


def changed(block: BlockGraph, r: random.Random) -> BlockGraph:
    """Return a block graph with one to four changes. Not each of them gives a valid graph."""
    bodies = [list(stage.body) for stage in block.stages]
    sums, outputs = list(block.stages[0].accumulators), list(block.outputs)
    names = [i.name for i in block.inputs]
    of_rows = [i.name for i in block.inputs if not {"k", "r"} & {*i.axes}]

    def readable(after: int, at: int) -> list[str]:
        """Return what an op may read, given its stage and its place. Results are there twice."""
        before = [op.out for op in bodies[after][:at]] * 2
        return of_rows + [s.out for s in sums] * 2 + before if after else names + before

    def insert(after: int, number: int) -> None:
        """Insert an op, which a later one reads in place of an argument, or beside it."""
        body = bodies[after]
        at = r.randrange(len(body))
        read, out = readable(after, at), f"new_{number}"
        if not read:
            return
        new = BlockOp(out, r.choice(("mul", "mul", "add", "sub")), (r.choice(read),), ())
        new = replace(new, args=(*new.args, r.choice([*read, 2.0])))
        body.insert(
            at, replace(new, fn="sum", args=new.args[:1], over="r") if r.random() < 0.2 else new
        )
        later = r.randrange(at + 1, len(body))
        args = list(body[later].args)
        n = r.randrange(len(args))
        if r.random() < 0.5 and isinstance(args[n], str):
            both = r.sample((args[n], out), 2)
            body.insert(
                later, BlockOp(f"both_{number}", r.choice(("mul", "add", "sub")), (*both,), ())
            )
            later, out = later + 1, f"both_{number}"
        args[n] = out
        body[later] = replace(body[later], args=tuple(args))

    for number in range(r.choice((1, 1, 2, 2, 3, 4))):
        after = r.randrange(2)
        body = bodies[after]
        kind = r.choice(
            ("insert", "insert", "insert", "read", "read", "fn", "swap", "sum", "output")
        )
        at = r.randrange(len(body))
        op = body[at]
        if kind == "insert":
            insert(after, number)
        elif kind == "read" and (read := readable(after, at)):
            args = list(op.args)
            args[r.randrange(len(args))] = r.choice(read)
            body[at] = replace(op, args=tuple(args))
        elif kind == "fn" and len(op.args) == 2:
            body[at] = replace(op, fn=r.choice(("mul", "add", "sub")))
        elif kind == "swap":
            body[at] = replace(op, args=op.args[::-1])
        elif kind == "sum":
            own = Accumulator(f"sum_{number}", r.choice(readable(0, len(bodies[0]))), "sum", ())
            sums.append(own)
        elif kind == "output":
            outputs.append(replace(outputs[0], value=r.choice(readable(1, len(bodies[1])))))
    return replace(with_axes(block, bodies, sums), outputs=tuple(outputs))


def random_graph(r: random.Random) -> Hand:
    """Return a small block graph with zero points or shifts."""
    has_zeros = r.random() < 0.25
    return Hand(
        codes=r.choice(("int4", "uint4", "int8")),
        rows=(16,),
        columns=128,
        group=64,
        dtype="float32",
        has_norm=r.random() < 0.3,
        has_gate=r.random() < 0.35,
        has_residual=r.random() < 0.2,
        scales_first=r.random() < 0.5,
        batch=r.choice((1, 1, 2)),
        has_zeros=has_zeros,
        shifts="" if has_zeros else r.choice(SHIFTS),
    )


def found_in(hand: Hand, block: BlockGraph) -> Products | None:
    """Return what a kernel computes for a block graph. None: there is no kernel."""
    g = KernelGraph()
    tensors = [
        g.new_input(t.dims, t.dtype, t.strides, name=t.name, constant=t.constant)
        for t in hand.graph.inputs
    ]
    g.mark_output(*g.customized(tensors, block))
    try:
        return streamed_products(place_kernels(UGraph(g, g))[0])
    except CodegenError:
        return None


def random_values(block: BlockGraph, seed: int) -> dict[str, torch.Tensor]:
    """Return random inputs with a dim for each axis."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {a.name: a.size for a in block.axes}
    dims = {i.name: [sizes[a] if a in i.axes else 1 for a in AXES] for i in block.inputs}
    return {
        name: torch.randn(own, generator=generator, dtype=torch.float64)
        for name, own in dims.items()
    }


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_changed_graphs_are_refused_or_understood(first):
    accepted = refused = 0
    for seed in range(first * COUNT, (first + 1) * COUNT):
        r = random.Random(seed)
        hand = random_graph(r)
        try:
            block = changed(hand.op.block, r)
            found = found_in(hand, block)
        except (MirageError, KeyError):  # the change gives no valid graph
            continue
        if found is None:
            refused += 1
            continue
        accepted += 1
        inputs = random_values(block, seed)
        for got, want in zip(computed(found, inputs), expected(block, inputs), strict=True):
            assert torch.allclose(got.expand_as(want), want, rtol=1e-6, atol=1e-8), seed
    assert accepted > COUNT / 8 and refused > COUNT / 8
