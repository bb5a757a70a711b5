"""Proof: a µGraph's block graph, executed piece by piece in a finite field, equals its program on random inputs.

Both are shrunk to a few elements per axis, each axis still cut in two pieces so that accumulators are exercised. The error
bound is that of the shrunk identity. It speaks for other sizes unless the identity needs an axis to be as short (four sums
over one axis multiplied together satisfy relations on three elements that they do not on four) or names the shrunk size as
a number; one more trial, on axes of five to nine elements, is there to refuse such. What the bound rests on (details:
docs/architecture.md, Proofs):

Let f − g, with denominators cleared, be Σ_i C_i(x)·E^(Q_i(y)), i < K, with polynomials C_i of degree at most D over Z_P,
different exponents Q_i whose differences have degree at most d over Z_Q, x and y the independent residues of the inputs and
E = w a uniformly drawn generator of the subgroup of order Q. If it is not identically zero, then (Schwartz–Zippel over Z_Q) two exponents
coincide with probability at most K(K−1)/2·d/Q; (Schwartz–Zippel over Z_P) all C_i(x) vanish with probability at most D/P;
otherwise w is a root of a sum of K powers. Multiplying all exponents by a common t permutes the subgroup, and by
Dirichlet's theorem on simultaneous approximation some t brings them within Q^(1−1/(K−1)) of each other, so at most
2·Q^(1−1/(K−1)) of the Q − 1 generators are roots. Opaque functions are random functions: they add the chance that two
different arguments among their m applications coincide, at most m²/2 times the bound of one comparison of arguments.

Many exponentials make a trial's bound 1, and then no number of trials says anything: such a proof is tried once more on
axes of two elements, which hold fewer, and refused where the bound stays above `WORST`.
"""
from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

import numpy as np

from mirage_hf import errors
from mirage_hf.graph.block import Axis, BlockGraph, BlockInput
from mirage_hf.graph.execute import run_block_graph
from mirage_hf.graph.kernel import CUSTOMIZED, KernelGraph
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.ops import table
from mirage_hf.search.spec import NotLowerable, Spec, SpecInput, lower, small_rational
from mirage_hf.verify.field import Element, FieldAlgebra, P, Q, Redraw
from mirage_hf.verify.verdict import Accepted, Refused, Verdict

_SMALL = (3, 4, 2, 3, 5)
"""Sizes of shrunk axes, in turn; a joined axis is as long as its parts."""
_SMALLEST = (2,)
_LARGER = (6, 7, 5, 8, 9)
WORST = 1e-6
"""A proof whose bound stays above this (and above the target asked for) is no proof."""
_MAX_TRIALS = 32
_MAX_REDRAWS = 16


def prove(ugraph: UGraph, *, trials: int = 4, seed: int = 0, target: float = 1e-9, pieces: int = 2) -> Verdict:
    """Prove that every kernel of `ugraph` together computes its program, or say where it does not.

    Runs at least `trials` random evaluations, and more until the error bound is below `target`. Refused when it is above
    both `target` and WORST after all of them.
    """
    if ugraph.kernels in (ugraph.program, library_ugraph(ugraph.program).kernels):
        return Accepted(0.0, "the program itself")
    if len(ugraph.kernels.ops) != 1 or ugraph.kernels.ops[0].name != CUSTOMIZED:
        return Refused("only µGraphs of one block graph can be proven in this version")
    op = ugraph.kernels.ops[0]
    block = op.block
    assert block is not None
    spec = lower(ugraph.program)
    if isinstance(spec, NotLowerable):
        return Refused(f"the program cannot be lowered: {spec.reason}")
    inputs, outputs = [t.index for t in ugraph.kernels.inputs], [t.index for t in ugraph.kernels.outputs]
    if [getattr(x, "index", None) for x in op.inputs] != inputs or [t.index for t in op.outputs] != outputs:
        return Refused("the kernel's operands are not the program's inputs and outputs in order")
    for what, mine, theirs in (("input", ugraph.kernels.inputs, ugraph.program.inputs),
                               ("output", ugraph.kernels.outputs, ugraph.program.outputs)):
        for k, (a, b) in enumerate(zip(mine, theirs, strict=False)):  # their numbers are compared below
            if (a.dims, a.dtype) != (b.dims, b.dtype) or (what == "input" and a.strides != b.strides):
                return Refused(f"{what} {k} is {errors.shape(a.dims)} {table.dtype_name(a.dtype)}, the program's is "
                               f"{errors.shape(b.dims)} {table.dtype_name(b.dtype)}, or has other strides")
    if len(spec.outputs) != len(block.outputs):
        return Refused(f"{len(block.outputs)} outputs, the program has {len(spec.outputs)}")
    most, worst = max(trials, _MAX_TRIALS), max(target, WORST)
    for small_sizes in (_SMALL, _SMALLEST):
        small, larger = (_shrink(spec, block, ugraph.program, few) for few in (small_sizes, _LARGER))
        if isinstance(small, Refused):
            return small
        if isinstance(larger, Refused):
            return larger
        bound = error_bound(small.spec, small.block)
        if bound ** most <= worst:
            break
    else:
        return Refused(f"the proof would say nothing: after {most} trials its error bound is {bound ** most:.1e}, more than {worst:.0e}; "
                       "the kernel has too many exponentials for it")
    while bound ** trials > target and trials < _MAX_TRIALS:
        trials += 1
    for trial in range(trials + 1):
        if refused := _try(small if trial < trials else larger, seed, trial, pieces):
            return refused
    return Accepted(bound ** trials, f"{trials} trials")


def _try(small: _Small, seed: int, trial: int, pieces: int) -> Refused | None:
    """One random evaluation of both sides."""
    for draw in range(_MAX_REDRAWS):
        algebra = FieldAlgebra((seed % 2**64, trial, draw))
        operands = [algebra.random(dims) for dims in small.input_dims]
        try:
            want = evaluate_spec(small.spec, operands, algebra)
            got = run_block_graph(small.block, operands, algebra, pieces)
            break
        except Redraw:
            continue
    else:
        return Refused(f"a denominator was zero in {_MAX_REDRAWS} draws in a row: the program divides by zero")
    for k, (x, y) in enumerate(zip(want, got, strict=True)):
        if x.p.shape != y.p.shape:
            return Refused(f"output {k} has shape {y.p.shape}, the program's has {x.p.shape} (shrunk sizes)")
        if (x.p != y.p).any():
            return Refused(f"output {k} differs from the program in {int((x.p != y.p).sum())} of {x.p.size} elements of trial {trial}")
    return None


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
        indexed = [names.index(a) for a in index if a]
        order = indexed + [d for d in range(len(names)) if d not in indexed]
        outs.append(algebra.arrange(full, order, [spec.sizes[a] if a else 1 for a in index]))
    return outs


# -- shrinking ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Small:
    spec: Spec
    block: BlockGraph
    input_dims: tuple[tuple[int, ...], ...]


def _shrink(spec: Spec, block: BlockGraph, program: KernelGraph, few: tuple[int, ...]) -> _Small | Refused:
    """Give every axis a few elements (`few` in turn), the same to whatever dims it meets in the program and in the block graph."""
    parent: dict[object, object] = {}

    def find(x: object) -> object:
        while parent.setdefault(x, x) != x:
            x = parent[x]
        return x

    original: dict[object, int] = {("spec", a): n for a, n in spec.sizes.items()}
    original.update({("block", a.name): a.size for a in block.axes})
    joins: list[tuple[object, tuple[object, ...], tuple[int, ...]]] = []  # an axis, the dims that lie end to end along it, their sizes
    reads: list[tuple[SpecInput | BlockInput, tuple[str | None, ...], str]] = []
    reads += [(spec.inputs[t.source], t.index, "spec") for t in spec.terms if t.op == "input"]
    reads += [(b, b.axes, "block") for b in block.inputs]
    for i, index, side in reads:
        joined = i.joined if isinstance(i, SpecInput) else i.axes.index(i.joined) if i.joined else None
        for source in i.sources:
            if len(index) != len(program.inputs[source].dims):
                return Refused(f"an input of {len(index)} dims reads a tensor of {len(program.inputs[source].dims)}")
            for d, a in enumerate(index):
                original["in", source, d] = program.inputs[source].dims[d]
                if a is not None and (d != joined or len(i.sources) == 1):
                    parent[find((side, a))] = find(("in", source, d))
        if joined is not None and len(i.sources) > 1:
            joins.append(((side, index[joined]), tuple(("in", s, joined) for s in i.sources), tuple(i.sizes)))
    for k, ((_, index, _), o) in enumerate(zip(spec.outputs, block.outputs, strict=True)):
        for side, axes in (("spec", index), ("block", o.axes)):
            for d, a in enumerate(axes):
                if a is not None:
                    parent[find((side, a))] = find(("out", k, d))
    for _ in joins:  # what lies at the same place of the same axis has the same size, and equal lists are the same axis
        for (x, left, left_sizes), (y, right, right_sizes) in itertools.combinations(joins, 2):
            same_parts = [find(p) for p in left] == [find(p) for p in right]
            if left_sizes == right_sizes and (find(x) == find(y) or same_parts):
                for p, q in ((x, y), *zip(left, right, strict=True)):
                    parent[find(p)] = find(q)
    groups: dict[object, set[int]] = {}
    for key, n in original.items():
        groups.setdefault(find(key), set()).add(n)
    for sizes in groups.values():
        if len(sizes) > 1:
            return Refused(f"axes of sizes {sorted(sizes)} meet in one dim")
    whole = {find(axis) for axis, _, _ in joins}
    small = {root: min(few[n % len(few)], *sizes) for n, (root, sizes) in enumerate(groups.items()) if root not in whole}
    for _ in joins:
        for axis, sources, _ in joins:
            if all(find(p) in small for p in sources):
                total = sum(small[find(p)] for p in sources)
                if small.setdefault(find(axis), total) != total:
                    return Refused("inputs joined from different parts share an axis")
    if not whole <= small.keys():
        return Refused("inputs are joined along each other's axes")

    def size(key: object) -> int:
        return small[find(key)]

    def parts(i: SpecInput | BlockInput, d: int | None) -> tuple[int, ...]:
        return tuple(size(("in", s, d)) for s in i.sources)

    read = {("in", s, d) for t in spec.terms if t.op == "input" for s in spec.inputs[t.source].sources for d, a in enumerate(t.index) if a}
    read |= {("in", s, d) for i in block.inputs for s in i.sources for d, a in enumerate(i.axes) if a}
    dims = [tuple(size(("in", source, d)) if ("in", source, d) in read else 1 for d in range(len(t.dims)))
            for source, t in enumerate(program.inputs)]
    new_spec = replace(
        spec, sizes={a: size(("spec", a)) for a in spec.sizes},
        inputs=tuple(replace(i, dims=(), sizes=parts(i, i.joined) if i.joined is not None else ()) for i in spec.inputs))
    new_block = BlockGraph(
        tuple(Axis(a.name, size(("block", a.name)), a.role) for a in block.axes),
        tuple(replace(i, sizes=parts(i, i.axes.index(i.joined)) if i.joined else ()) for i in block.inputs), block.stages, block.outputs)
    return _Small(new_spec, new_block, tuple(dims))


# -- the bound ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Size:
    """Of a quotient of sums of products: degrees of numerator and denominator, how many different exponentials each holds,
    and the degree of the exponents as quotients (of numerator and denominator together)."""

    num: int = 0
    den: int = 0
    num_exps: int = 1
    den_exps: int = 1
    exponent: int = 0


@dataclass
class _Opaque:
    """Applications of opaque functions seen so far, and a size that none of their arguments exceeds."""

    applications: int = 0
    largest: _Size = _Size()

    def apply(self, args: list[_Size]) -> _Size:
        self.applications += 1
        self.largest = _Size(*(max(sizes) for sizes in zip(*map(astuple, (self.largest, *args)), strict=True)))
        return _Size(1)

    @property
    def chance(self) -> float:
        """Of two different arguments being equal."""
        return _comparison(self.largest, self.largest)


def _comparison(a: _Size, b: _Size) -> float:
    """The chance that two different functions of these sizes have the same value."""
    exps = a.num_exps * b.den_exps + b.num_exps * a.den_exps
    exponent = 2 * (a.exponent + b.exponent)  # of the difference of two exponents, each of this degree at most
    chance = max(a.num + b.den, b.num + a.den) / P
    if exponent and exps > 1:
        chance += exps * (exps - 1) / 2 * exponent / Q + 2 * float(Q) ** (-1.0 / (exps - 1))
    return min(chance, 1.0)


def _combine(fn: str, args: list[_Size], opaque: _Opaque) -> _Size:
    top = sum(a.exponent for a in args)  # exponents may be quotients, so degrees add up where exponentials are multiplied
    if fn in ("add", "sub"):
        a, b = args
        exps = a.num_exps * b.den_exps + b.num_exps * a.den_exps
        return _Size(max(a.num + b.den, b.num + a.den), a.den + b.den, exps, a.den_exps * b.den_exps, top)
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
    return opaque.apply(args)


def _apply(fn: str, args: list[_Size], attrs: Mapping[str, float], opaque: _Opaque) -> _Size:
    row = table.lookup(fn)
    if row.opaque:
        return opaque.apply(args)
    algebra = {name: (lambda *a, _n=name: _combine(_n, list(a), opaque)) for name in ("add", "sub", "mul", "div", "neg", "exp")}
    return row.program(**attrs).evaluate(algebra, args, lambda _: _Size())


def _reduce(kind: str, x: _Size, n: int, den_carries: bool, opaque: _Opaque) -> _Size:
    if kind == "max":
        return opaque.apply([x])  # a sum of random values
    if not den_carries:
        return replace(x, num_exps=min(x.num_exps * n, 10 ** 9) if x.exponent else x.num_exps)
    return _Size(x.num + (n - 1) * x.den, n * x.den, n * x.num_exps * x.den_exps ** (n - 1), x.den_exps ** n, n * x.exponent)


def error_bound(spec: Spec, block: BlockGraph) -> float:
    """The chance that one trial accepts a block graph that differs from the program (see the module's theorem)."""
    opaque = _Opaque()
    f: list[_Size] = []
    dens: list[set[str]] = []  # axes that a term's denominator carries
    for t in spec.terms:
        args = [f[a] for a in t.args]
        carried = set().union(*(dens[a] for a in t.args)) if t.args else set()
        if t.op == "input":
            f.append(_Size(1))
        elif t.op == "constant":
            f.append(_Size() if small_rational(t.value) is not None else _Size(1))
        elif t.op in ("sum", "max"):
            f.append(_reduce(t.op, args[0], spec.sizes[t.axis], t.axis in carried, opaque))
            carried = carried - {t.axis}
        else:
            f.append(_apply(t.fn if t.op == "opaque" else t.op, args, dict(t.attrs), opaque))
            carried |= set(spec.terms[t.args[1]].axes) if t.op == "div" else set()
        dens.append(carried if f[-1].den else set())
    g: dict[str, _Size] = {i.name: _Size(1) for i in block.inputs}
    g_dens: dict[str, set[str]] = {i.name: set() for i in block.inputs}
    for stage in block.stages:
        for op in stage.body:
            names = [a for a in op.args if isinstance(a, str)]
            args = [g[a] if isinstance(a, str) else _Size() if small_rational(a) is not None else _Size(1) for a in op.args]
            carried = set().union(*(g_dens[a] for a in names)) if names else set()
            if op.over:
                g[op.out] = _reduce(op.fn, args[0], block.axis(op.over).size, op.over in carried, opaque)
                carried = carried - {op.over}
            else:
                g[op.out] = _apply(op.fn, args, dict(op.attrs), opaque)
                carried |= set(block.carried[str(op.args[1])]) if op.fn == "div" and isinstance(op.args[1], str) else set()
            g_dens[op.out] = carried if g[op.out].den else set()
        for acc in stage.accumulators:
            assert stage.loop is not None
            g[acc.out] = _reduce(acc.kind, g[acc.arg], block.axis(stage.loop).size, stage.loop in g_dens[acc.arg], opaque)
            g_dens[acc.out] = g_dens[acc.arg] - {stage.loop}
    worst = 0.0
    for (term, _, _), o in zip(spec.outputs, block.outputs, strict=True):
        a, b = f[term], g[o.value]
        elements = max(int(np.prod([a.size for a in block.axes])), int(np.prod(list(spec.sizes.values()))))
        applications = opaque.applications * elements
        worst = max(worst, _comparison(a, b) + applications ** 2 / 2 * opaque.chance)
    return min(worst, 1.0)
