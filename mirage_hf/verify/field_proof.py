"""Proof: the kernels of a µGraph, executed piece by piece in a finite field, equal its program on random inputs.

Program and kernels are shrunk to a few elements per axis, every grid and loop axis still cut in two pieces and every axis
that is dealt out in parts in two parts, so that accumulators, rescaling and partial results are exercised. The error bound is
that of the shrunk identity. It speaks for other sizes unless the identity needs an axis to be as short (four sums over one
axis multiplied together satisfy relations on three elements that they do not on four) or names the shrunk size as a number;
one more trial, on axes of five to nine elements, loops in three pieces, is there to refuse such.

What the bound rests on (statement and proof: docs/proofs.md): let f − g, with denominators cleared, be a sum of
terms C(x)·E^(n·b(y)) with polynomials C over Z_P and integer combinations n·b of functions b_1 … b_m that are independent
over Z_Q. Exponents are evaluated at more than m random points and exp takes a random combination of these values, so the
E^(b_l) are independent and uniform in the subgroup of order Q; then (Schwartz–Zippel, twice) a difference that is not
identically zero vanishes with probability at most D/P + (m + 1)·E/Q, however many exponentials it has. m and the integers n
are read off the exponents of the first trial. Opaque functions and maxima are random functions, so a maximum in an exponent
is one more variable: what is proven holds whatever the value of the maximum, so it holds for the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ragged import Bounds, bounds_of
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.ops import table
from mirage_hf.search.spec import expand
from mirage_hf.verify.error_bound import SPARE, Degrees, Exponents, independent, trial_bound
from mirage_hf.verify.evaluate import SmallGraph
from mirage_hf.verify.field import Element, FieldAlgebra, Redraw
from mirage_hf.verify.random_bounds import draw_all
from mirage_hf.verify.shrink import Classes, Misfit, shrink
from mirage_hf.verify.verdict import Accepted, Verdict

_SIZES = ((3, 4, 2, 3, 5), (2, 3, 2, 2, 3), (2,))
"""Sizes of shrunk axes, in turn; the next list where the first leads to too many exponentials."""
_LARGER = (6, 7, 5, 8, 9)
_MANY_EXPS = 96
"""More exponentials than this make a proof slow, so shorter axes are tried first."""
_MAX_COPIES = 256
WORST = 1e-6
"""A proof whose bound stays above this (and above the target asked for) is no proof."""
_MAX_TRIALS = 32
_MAX_REDRAWS = 16
_BOUNDS_TRIALS = 8
"""Trials at least where there are bounds, so that a single row meets each kind of bounds, and most more than once."""


@dataclass(frozen=True)
class Pair:
    """A program and its kernels at small sizes, and into how many pieces their loops are cut."""

    program: SmallGraph
    kernels: SmallGraph
    pieces: int

    def inputs(self) -> list[tuple[int, ...]]:
        return [self.program.dims[t.index] for t in self.program.graph.inputs]

    def bounds(self, rng: np.random.Generator, turn: int) -> dict[int, np.ndarray]:
        """Random bounds for the inputs that are bounds."""
        graph, dims = self.program.graph, self.program.dims

        def extent(b: Bounds) -> int:
            return (
                self.program.blocks[b.op].axis(b.axis).size
                if b.x is None
                else dims[b.x.index][b.dim]
            )

        return draw_all(
            graph,
            lambda n: dims[graph.inputs[n].index],
            extent,
            rng,
            turn,
            slots=lambda t: dims[t.index][-2],
        )

    @cached_property
    def degrees(self) -> Degrees:
        """What both sides count, executed as in a trial."""
        return self._counted[0]

    @cached_property
    def _counted(self) -> tuple[Degrees, list, list]:  # type: ignore[type-arg]
        degrees = Degrees()
        bounds = self.bounds(np.random.default_rng(0), 0)
        operands = [bounds.get(n, degrees.variable(dims)) for n, dims in enumerate(self.inputs())]
        return (
            degrees,
            self.program.run(operands, degrees, 1),
            self.kernels.run(operands, degrees, self.pieces, True),
        )

    def bound(self, exponents: Exponents) -> tuple[float, float]:
        """Of one trial, and that `exponents` is wrong."""
        degrees, want, got = self._counted
        return trial_bound(want, got, degrees, exponents)


@dataclass(frozen=True)
class ProofTrial:
    """One random evaluation of both sides: the outputs, and the exponents met."""

    want: list[Element]
    got: list[Element]
    algebra: FieldAlgebra

    def disagreement(self, number: int) -> Rejected | None:
        for k, (x, y) in enumerate(zip(self.want, self.got, strict=True)):
            if x.p.shape != y.p.shape:
                return Rejected(
                    f"output {k} has shape {y.p.shape}, the program's has {x.p.shape} (shrunk sizes)"
                )
            if (x.p != y.p).any():
                return Rejected(
                    f"output {k} differs from the program in {int((x.p != y.p).sum())} of {x.p.size} elements of trial {number}"
                )
        return None


def prove(
    ugraph: UGraph, *, trials: int = 4, seed: int = 0, target: float = 1e-9, pieces: int = 2
) -> Verdict:
    """Prove that every kernel of `ugraph` together computes its program, or say where it does not.

    Runs at least `trials` random evaluations, and more until the error bound is below `target`. Rejected when it is above
    both `target` and WORST after all of them.
    """
    if ugraph.kernels in (ugraph.program, library_ugraph(ugraph.program).kernels):
        return Accepted(0.0, "the program itself")
    if rejected := _interface(ugraph.program, ugraph.kernels):
        return rejected
    try:
        classes = Classes(expand(ugraph.program), expand(ugraph.kernels))
    except Misfit as e:
        return Rejected(str(e))
    most, unclear, exps = max(trials, _MAX_TRIALS), "", _has_exps(classes)
    bounds = bool(bounds_of(classes.program))
    trials = max(trials, _BOUNDS_TRIALS) if bounds else trials
    for number, sizes in enumerate(_SIZES):
        small = _pair(classes, sizes, 2, pieces)
        if isinstance(small, Rejected):
            return small
        checked = small
        if exps and small.degrees.exps > _MANY_EXPS and number + 1 < len(_SIZES):
            continue
        copies = min(small.degrees.exps, _MAX_COPIES) + SPARE if exps else 1
        first = _try(small, seed, 0, copies)
        if rejected := first if isinstance(first, Rejected) else first.disagreement(0):
            return rejected
        assert isinstance(first, ProofTrial)
        exponents = independent(first.algebra.exponents, copies)
        if isinstance(exponents, str):
            unclear = exponents
            continue
        copies = (
            copies if bounds else min(copies, exponents.rank + SPARE)
        )  # as many as later trials need
        exponents = replace(exponents, copies=copies)
        bound, wrong = small.bound(exponents)
        if bound**most + wrong <= max(target, WORST):
            break
        unclear = f"after {most} trials its error bound is {bound**most + wrong:.1e}, more than {WORST:.0e}"
    else:
        if target < 1:
            return Rejected(f"the proof would say nothing: {unclear}")
        bound, wrong = 1.0, 0.0  # whoever asks for no bound gets none
    larger = _pair(classes, _LARGER, 3, pieces + 1)
    if isinstance(larger, Rejected):
        return larger
    while bound**trials + wrong > target and trials < _MAX_TRIALS:
        trials += 1
    for trial in range(1, trials + 1):
        last = trial == trials
        result = _try(larger, seed, trial, 1, True) if last else _try(checked, seed, trial, copies)
        if rejected := result if isinstance(result, Rejected) else result.disagreement(trial):
            return rejected
        if bounds and exps and not last and target < 1:  # other bounds, other exponents
            assert isinstance(result, ProofTrial)
            exponents = independent(result.algebra.exponents, copies)
            if isinstance(exponents, str):
                return Rejected(f"the proof would say nothing: {exponents}")
            bound, wrong = map(max, (bound, wrong), checked.bound(exponents))
    if bound**trials + wrong > max(target, WORST) and target < 1:
        return Rejected(
            f"the proof would say nothing: after {trials} trials its error bound is {bound**trials + wrong:.1e}"
        )
    return Accepted(bound**trials + wrong, f"{trials} trials")


def _interface(program: KernelGraph, kernels: KernelGraph) -> Rejected | None:
    for what, mine, theirs in (
        ("input", kernels.inputs, program.inputs),
        ("output", kernels.outputs, program.outputs),
    ):
        if len(mine) != len(theirs):
            return Rejected(f"{len(mine)} {what}s, the program has {len(theirs)}")
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if (a.dims, a.dtype) != (b.dims, b.dtype) or (
                what == "input" and (a.strides, a.constant) != (b.strides, b.constant)
            ):
                return Rejected(
                    f"{what} {k} is {errors.shape(a.dims)} {table.dtype_name(a.dtype)}, the program's is "
                    f"{errors.shape(b.dims)} {table.dtype_name(b.dtype)}, or has other strides or is not constant in both"
                )
    return None


def _has_exps(classes: Classes) -> bool:
    ops = (*classes.program.ops, *classes.kernels.ops)
    return any(
        op.name == "exp"
        or (
            op.block is not None
            and (
                any(b.fn == "exp" for b in op.block.ops())
                or any(a.shift for st in op.block.stages for a in st.accumulators)
            )
        )
        for op in ops
    )


def _pair(classes: Classes, sizes: Sequence[int], parts: int, pieces: int) -> Pair | Rejected:
    small = shrink(classes, sizes, parts)
    return small if isinstance(small, Rejected) else Pair(*small, pieces)


def _try(
    small: Pair, seed: int, number: int, copies: int, whole_grid: bool = False
) -> ProofTrial | Rejected:
    """One random evaluation of both sides."""
    for draw in range(_MAX_REDRAWS):
        algebra = FieldAlgebra((seed % 2**64, number, draw), copies)
        operands: list[Any] = [algebra.random(dims) for dims in small.inputs()]
        for n, drawn in small.bounds(algebra.rng, number).items():
            operands[n] = drawn
        try:
            want = small.program.run(operands, algebra, 1)
            return ProofTrial(
                want, small.kernels.run(operands, algebra, small.pieces, whole_grid), algebra
            )
        except Redraw:
            continue
    return Rejected(
        f"a denominator was zero in {_MAX_REDRAWS} draws in a row: the program divides by zero"
    )
