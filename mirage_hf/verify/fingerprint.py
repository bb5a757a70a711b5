"""Proof: a µGraph's block graph, executed piece by piece in a finite field, equals its program on random inputs.

Sizes do not matter to an identity over named axes, so both are shrunk to a few elements per axis, each axis still cut in
two pieces so that accumulators are exercised. What the error bound rests on (details: docs/architecture.md, Proofs):

Let f − g, with denominators cleared, be Σ_i C_i(x)·E^(Q_i(y)), i < K, with polynomials C_i of degree at most D over Z_P,
different exponents Q_i of degree at most d over Z_Q, x and y the independent residues of the inputs and E = w a uniformly
drawn generator of the subgroup of order Q. If it is not identically zero, then (Schwartz–Zippel over Z_Q) two exponents
coincide with probability at most K(K−1)/2·d/Q; (Schwartz–Zippel over Z_P) all C_i(x) vanish with probability at most D/P;
otherwise w is a root of a sum of K powers. Multiplying all exponents by a common t permutes the subgroup, and by
Dirichlet's theorem on simultaneous approximation some t brings them within Q^(1−1/(K−1)) of each other, so at most
2·Q^(1−1/(K−1)) of the Q − 1 generators are roots. Opaque functions are random functions: they add the chance that two
different arguments among their m applications coincide, at most m²/2 times the bound of one comparison without exp.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mirage_hf.graph.block import Axis, BlockGraph
from mirage_hf.graph.execute import run_block_graph
from mirage_hf.graph.kernel import CUSTOMIZED, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.search.spec import NotLowerable, Spec, lower
from mirage_hf.verify.field import Element, FieldAlgebra, P, Q, Redraw
from mirage_hf.verify.verdict import Accepted, Refused, Verdict

_SMALL = (3, 4, 2, 3, 5)
_PARTS = (2, 3, 2, 4)
"""Sizes of shrunk axes, in turn, and of the parts of a joined axis."""
_MAX_TRIALS = 32
_MAX_REDRAWS = 16


def prove(ugraph: UGraph, *, trials: int = 4, seed: int = 0, target: float = 1e-9, pieces: int = 2) -> Verdict:
    """Prove that every kernel of `ugraph` together computes its program, or say where it does not.

    Runs at least `trials` random evaluations, and more until the error bound is below `target`.
    """
    if ugraph.kernels == ugraph.program:
        return Accepted(0.0, "the program itself")
    if len(ugraph.kernels.ops) != 1 or ugraph.kernels.ops[0].name != CUSTOMIZED:
        return Refused("only µGraphs of one block graph can be proven in this version")
    op = ugraph.kernels.ops[0]
    block = op.block
    assert block is not None
    spec = lower(ugraph.program)
    if isinstance(spec, NotLowerable):
        return Refused(f"the program cannot be lowered: {spec.reason}")
    inputs = [t.index for t in ugraph.kernels.inputs]
    if [getattr(x, "index", None) for x in op.inputs] != inputs or [t.index for t in ugraph.kernels.outputs] != [t.index for t in op.outputs]:
        return Refused("the kernel's operands are not the program's inputs and outputs in order")
    if len(spec.outputs) != len(block.outputs):
        return Refused(f"{len(block.outputs)} outputs, the program has {len(spec.outputs)}")
    small = _shrink(spec, block, ugraph.program)
    if isinstance(small, Refused):
        return small
    bound = error_bound(small.spec, small.block)
    while bound ** trials > target and trials < _MAX_TRIALS:
        trials += 1
    for trial in range(trials):
        for draw in range(_MAX_REDRAWS):
            algebra = FieldAlgebra(hash((seed, trial, draw)) & 0x7FFFFFFF)
            operands = [algebra.random(dims) for dims in small.input_dims]
            try:
                want = evaluate_spec(small.spec, operands, algebra)
                got = run_block_graph(small.block, operands, algebra, pieces)
                break
            except Redraw:
                continue
        else:
            return Refused(f"a denominator was zero in {_MAX_REDRAWS} draws in a row: the program divides by zero")
        for k, (a, b) in enumerate(zip(want, got, strict=True)):
            if a.p.shape != b.p.shape:
                return Refused(f"output {k} has shape {b.p.shape}, the program's has {a.p.shape} (shrunk sizes)")
            if (a.p != b.p).any():
                return Refused(f"output {k} differs from the program in {int((a.p != b.p).sum())} of {a.p.size} elements of trial {trial}")
    return Accepted(bound ** trials, f"{trials} trials")


def evaluate_spec(spec: Spec, operands: list[Element], algebra: FieldAlgebra) -> list[Element]:
    """Evaluate a lowered program; arrays have one dim per axis of the spec, then outputs in their own dims."""
    names = list(spec.sizes)
    values: list[Element] = []
    for t in spec.terms:
        args = [values[a] for a in t.args]
        if t.op == "input":
            i = spec.inputs[t.source]
            present = sorted((names.index(a), d) for d, a in enumerate(t.index) if a)
            order = [d for _, d in present] + [d for d, a in enumerate(t.index) if a is None]
            parts = []
            for k, source in enumerate(i.sources):
                shape = [1] * len(names)
                for n, d in present:
                    shape[n] = i.sizes[k] if d == i.joined else spec.sizes[names[n]]
                parts.append(algebra.arrange(operands[source], order, shape))
            values.append(parts[0] if i.joined is None else algebra.join(parts, names.index(t.index[i.joined] or "")))
        elif t.op == "constant":
            values.append(algebra.elementwise("cast", [algebra.constant(t.value).map(lambda a: a.reshape([1] * len(names)))], {}))
        elif t.op in ("sum", "max"):
            values.append(algebra.reduce(t.op, args[0], names.index(t.axis)))
        else:
            values.append(algebra.elementwise(t.fn if t.op == "opaque" else t.op, args, dict(t.attrs)))
    outs = []
    for term, index, _ in spec.outputs:
        shape = [spec.sizes[a] if a in index else 1 for a in names]
        full = values[term].map(lambda x, s=shape: np.broadcast_to(x, s))
        present = [names.index(a) for a in index if a]
        order = present + [d for d in range(len(names)) if d not in present]
        outs.append(algebra.arrange(full, order, [spec.sizes[a] if a else 1 for a in index]))
    return outs


# -- shrinking ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Small:
    spec: Spec
    block: BlockGraph
    input_dims: tuple[tuple[int, ...], ...]


def _shrink(spec: Spec, block: BlockGraph, program: KernelGraph) -> _Small | Refused:
    """Give every axis a few elements, the same to whatever dims it meets in the program and in the block graph."""
    parent: dict[object, object] = {}

    def find(x: object) -> object:
        while parent.setdefault(x, x) != x:
            x = parent[x]
        return x

    original = {("spec", a): n for a, n in spec.sizes.items()} | {("block", a.name): a.size for a in block.axes}
    parts: dict[tuple[int, int], int] = {}  # (source, dim) that is part k of a joined axis
    for i, index, side in [*((spec.inputs[t.source], t.index, "spec") for t in spec.terms if t.op == "input"),
                           *((b, b.axes, "block") for b in block.inputs)]:
        joined = i.joined if side == "spec" else (i.axes.index(i.joined) if i.joined else None)  # type: ignore[union-attr]
        for k, source in enumerate(i.sources):
            if len(index) != len(program.inputs[source].dims):
                return Refused(f"an input of {len(index)} dims reads a tensor of {len(program.inputs[source].dims)}")
            for d, a in enumerate(index):
                if d == joined:
                    parts[source, d] = k
                    original["in", source, d] = i.sizes[k]
                elif a is not None:
                    parent[find((side, a))] = find(("in", source, d))
    for k, ((_, index, _), o) in enumerate(zip(spec.outputs, block.outputs, strict=True)):
        for side, axes in (("spec", index), ("block", o.axes)):
            for d, a in enumerate(axes):
                if a is not None:
                    parent[find((side, a))] = find(("out", k, d))
    groups: dict[object, set[int]] = {}
    joined_size: dict[object, int] = {}
    for key, n in original.items():
        if key[0] != "in":
            groups.setdefault(find(key), set()).add(n)
    for root, sizes in groups.items():
        if len(sizes) > 1:
            return Refused(f"axes of sizes {sorted(sizes)} meet in one dim")
    for t in spec.terms:
        if t.op == "input" and spec.inputs[t.source].joined is not None:
            i = spec.inputs[t.source]
            total = sum(_PARTS[k % len(_PARTS)] for k in range(len(i.sources)))
            if joined_size.setdefault(find(("spec", t.index[i.joined])), total) != total:
                return Refused("inputs joined from different numbers of parts share an axis")
    small = {root: joined_size.get(root, min(_SMALL[n % len(_SMALL)], *sizes)) for n, (root, sizes) in enumerate(groups.items())}

    def size(side: str, axis: str) -> int:
        return small[find((side, axis))]

    dims = []
    for source, t in enumerate(program.inputs):
        dims.append(tuple(1 if n == 1 else _PARTS[parts[source, d] % len(_PARTS)] if (source, d) in parts
                          else small.get(find(("in", source, d)), n) for d, n in enumerate(t.dims)))
    part_sizes = lambda n: tuple(_PARTS[k % len(_PARTS)] for k in range(n))  # noqa: E731
    new_spec = replace(
        spec, sizes={a: size("spec", a) for a in spec.sizes},
        inputs=tuple(replace(i, dims=(), sizes=part_sizes(len(i.sources)) if i.joined is not None else ()) for i in spec.inputs))
    new_block = BlockGraph(
        tuple(Axis(a.name, size("block", a.name), a.role) for a in block.axes),
        tuple(replace(i, sizes=part_sizes(len(i.sources)) if i.joined else ()) for i in block.inputs), block.stages, block.outputs)
    return _Small(new_spec, new_block, tuple(dims))


# -- the bound ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Size:
    """Of a quotient of sums of products: degrees of numerator and denominator, how many different exponentials each holds,
    and the degree of the exponents."""

    num: int = 0
    den: int = 0
    num_exps: int = 1
    den_exps: int = 1
    exponent: int = 0


def _combine(fn: str, args: list[_Size], count: list[int]) -> _Size:
    top = max((a.exponent for a in args), default=0)
    if fn in ("add", "sub"):
        a, b = args
        return _Size(max(a.num + b.den, b.num + a.den), a.den + b.den, a.num_exps * b.den_exps + b.num_exps * a.den_exps, a.den_exps * b.den_exps, top)
    if fn == "mul":
        a, b = args
        return _Size(a.num + b.num, a.den + b.den, a.num_exps * b.num_exps, a.den_exps * b.den_exps, top)
    if fn == "div":
        a, b = args
        return _Size(a.num + b.den, a.den + b.num, a.num_exps * b.den_exps, a.den_exps * b.num_exps, top)
    if fn == "neg":
        return args[0]
    if fn == "exp" and args[0].num_exps * args[0].den_exps == 1 and args[0].exponent == 0:
        return _Size(0, 0, 1, 1, args[0].num + args[0].den)
    count[0] += 1
    return _Size(1, 0, 1, 1, 0)


def _apply(fn: str, args: list[_Size], attrs: Mapping[str, float], count: list[int]) -> _Size:
    row = table.lookup(fn)
    if row.opaque:
        return _combine("opaque", args, count)
    algebra = {name: (lambda *a, _n=name: _combine(_n, list(a), count)) for name in ("add", "sub", "mul", "div", "neg", "exp")}
    return row.program(**attrs).evaluate(algebra, args, lambda _: _Size())


def _sum(x: _Size, n: int, den_carries: bool) -> _Size:
    if not den_carries:
        return replace(x, num_exps=min(x.num_exps * n, 10 ** 9) if x.exponent else x.num_exps)
    return _Size(x.num + (n - 1) * x.den, n * x.den, n * x.num_exps * x.den_exps ** (n - 1), x.den_exps ** n, x.exponent)


def error_bound(spec: Spec, block: BlockGraph) -> float:
    """The chance that one trial accepts a block graph that differs from the program (see the module's theorem)."""
    count = [0]
    f: list[_Size] = []
    dens: list[set[str]] = []  # axes that a term's denominator carries
    for t in spec.terms:
        args = [f[a] for a in t.args]
        carried = set().union(*(dens[a] for a in t.args)) if t.args else set()
        if t.op == "input":
            f.append(_Size(1))
        elif t.op == "constant":
            f.append(_Size())
        elif t.op in ("sum", "max"):
            f.append(_sum(args[0], spec.sizes[t.axis], t.axis in carried))
            carried = carried - {t.axis}
        else:
            f.append(_apply(t.fn if t.op == "opaque" else t.op, args, dict(t.attrs), count))
            carried |= set(spec.terms[t.args[1]].axes) if t.op == "div" else set()
        dens.append(carried if f[-1].den else set())
    g: dict[str, _Size] = {i.name: _Size(1) for i in block.inputs}
    g_dens: dict[str, set[str]] = {i.name: set() for i in block.inputs}
    for stage in block.stages:
        for op in stage.body:
            names = [a for a in op.args if isinstance(a, str)]
            args = [g[a] if isinstance(a, str) else _Size() for a in op.args]
            carried = set().union(*(g_dens[a] for a in names)) if names else set()
            if op.over:
                g[op.out] = _sum(args[0], block.axis(op.over).size, op.over in carried)
                carried = carried - {op.over}
            else:
                g[op.out] = _apply(op.fn, args, dict(op.attrs), count)
                carried |= set(block.carried[str(op.args[1])]) if op.fn == "div" and isinstance(op.args[1], str) else set()
            g_dens[op.out] = carried if g[op.out].den else set()
        for acc in stage.accumulators:
            assert stage.loop is not None
            g[acc.out] = _sum(g[acc.arg], block.axis(stage.loop).size, stage.loop in g_dens[acc.arg])
            g_dens[acc.out] = g_dens[acc.arg] - {stage.loop}
    worst = 0.0
    for (term, _, _), o in zip(spec.outputs, block.outputs, strict=True):
        a, b = f[term], g[o.value]
        degree = max(a.num + b.den, b.num + a.den)
        one = degree / P
        exps = a.num_exps * b.den_exps + b.num_exps * a.den_exps
        exponent = max(a.exponent, b.exponent)
        chance = one
        if exponent:
            chance += exps * (exps - 1) / 2 * exponent / Q + 2 * float(Q) ** (-1.0 / (exps - 1))
        applications = count[0] * max(1, int(np.prod([a.size for a in block.axes])))
        chance += applications ** 2 / 2 * degree / P if count[0] else 0.0
        worst = max(worst, chance)
    return min(worst, 1.0)

