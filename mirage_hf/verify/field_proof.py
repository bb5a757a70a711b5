"""Prove that the kernels of a µGraph compute its program, by evaluating both over finite fields.

**What is done.** Program and kernels are shrunk to a few elements per axis. Both are evaluated on
random elements of Z_P × Z_Q (see `field`), and every output is compared exactly. The kernels are
executed as they would run. Every grid and loop axis has two pieces, and every split axis two
splits, so accumulators, rescaling and partial results are exercised. Each block of a cluster sees
its own part, and the others' only through reductions over the cluster axis.

**What follows.** Suppose an output of the shrunk kernels is another function than the program's.
Then all trials find it equal with a probability of at most `Accepted.bound`. `error_bound` states
the theorem. The bound holds for any number of exponentials. It also holds for any value of a
maximum, because opaque functions and maxima are random functions.

**What is assumed.** The bound speaks about the shrunk sizes. Three things can make other sizes
behave differently, and each is met separately:

- An identity may hold only on short axes. For example, products of four sums over one axis satisfy
  relations on three elements that fail on four. One more trial on axes of five to nine elements,
  with loops in three pieces, rejects such µGraphs.
- A program may name a size as a number, such as 1/n of a mean. Numbers stay those of the full
  sizes.
- Bounds of ragged axes are data, so each draw of bounds is an identity of its own. At least eight
  draws are tried. They have partial, full and empty rows, and rows with only one end cut.
- An index is data, too. At least eight draws are tried: of random numbers, of different ones, and
  of one number alone.

**What is not proven.** Two things: rounding, and that the shift of an online softmax is the true
maximum. The identity holds for any shift. `numeric` checks both: a wrong shift overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mirage_hf.errors import Rejected
from mirage_hf.graph.bounds import Bounds, bounds_of
from mirage_hf.graph.indices import indices_of
from mirage_hf.graph.kernel import KernelOp
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.search.expand import expand
from mirage_hf.verify.degrees import Degree, Degrees
from mirage_hf.verify.error_bound import SPARE, Exponents, TrialBound, independent, trial_bound
from mirage_hf.verify.evaluate import SmallGraph
from mirage_hf.verify.field import DivisionByZeroError, Element, FieldAlgebra
from mirage_hf.verify.interface import interface_differs
from mirage_hf.verify.random_bounds import draw_all
from mirage_hf.verify.shrink import shrink
from mirage_hf.verify.size_classes import SizeClasses
from mirage_hf.verify.size_relations import ResizeError
from mirage_hf.verify.verdict import Accepted, Verdict

#: Sizes of shrunk axes, used in turn. The next tuple is tried if one leads to more than
#: `_MANY_EXPS` exponentials, or if the relations of its exponents stay unclear.
_SIZES = ((3, 4, 2, 3, 5), (2, 3, 2, 2, 3), (2,))

#: Sizes of the one trial on longer axes.
_LARGER = (6, 7, 5, 8, 9)

#: More exponentials than this make a proof slow, so shorter axes are tried first.
_MANY_EXPS = 96

_MAX_COPIES = 256

#: A proof whose bound stays above this, and above the target asked for, is no proof.
WORST = 1e-6

_MAX_TRIALS = 32
_MAX_REDRAWS = 16

#: The least number of trials if there are bounds. A single row then meets each of the five kinds of
#: bounds, and most of them more than once.
_BOUNDS_TRIALS = 8

#: With a target of at least this, a proof needs no error bound.
_ANY_BOUND = 1.0


def prove(
    ugraph: UGraph, *, trials: int = 4, seed: int = 0, target: float = 1e-9, pieces: int = 2
) -> Verdict:
    """Prove that all kernels of `ugraph` together compute its program.

    Args:
        ugraph: The program and its kernels.
        trials: The least number of random evaluations.
        seed: Equal seeds give equal evaluations.
        target: Trials are added until the error bound is below this. With 1 or more the bound may
            be anything.
        pieces: How many pieces each grid and loop axis is executed in.

    Returns:
        `Accepted` with the error bound, or `Rejected` with where the two differ or why the proof
        would say nothing.
    """
    if ugraph.kernels in (ugraph.program, library_ugraph(ugraph.program).kernels):
        return Accepted(0.0, "the program itself")
    if differs := interface_differs(ugraph.program, ugraph.kernels, output_strides=False):
        return differs
    try:
        classes = SizeClasses(expand(ugraph.program), expand(ugraph.kernels))
    except ResizeError as e:
        return Rejected(str(e))
    return _FieldProof(classes, trials, seed, target, pieces).run()


class _FieldProof:
    """The trials of one proof."""

    def __init__(self, classes: SizeClasses, trials: int, seed: int, target: float, pieces: int):
        self.classes, self.seed, self.target, self.pieces = classes, seed, target, pieces
        self.has_exps = _has_exps(classes)
        self.has_bounds = bool(bounds_of(classes.program) or indices_of(classes.program))
        self.trials = max(trials, _BOUNDS_TRIALS) if self.has_bounds else trials
        self.most_trials = max(trials, _MAX_TRIALS)

    def run(self) -> Verdict:
        start = self._start()
        if isinstance(start, Rejected):
            return start
        larger = self._shrink(_LARGER, 3, self.pieces + 1)
        if isinstance(larger, Rejected):
            return larger
        trials = self.trials
        while start.bound.after(trials) > self.target and trials < _MAX_TRIALS:
            trials += 1
        bound = start.bound
        for number in range(1, trials):
            trial = self._try(start.pair, number, start.copies)
            if isinstance(trial, Rejected):
                return trial
            if self.has_bounds and self.has_exps and self.target < _ANY_BOUND:
                # Other bounds have other exponents.
                exponents = independent(trial.algebra.exponents, start.copies)
                if isinstance(exponents, Rejected):
                    return _no_proof(exponents.reason)
                bound = bound.or_larger(start.pair.bound(exponents))
        last = self._try(larger, trials, copies=1, whole_grid=True)
        if isinstance(last, Rejected):
            return last
        error = bound.after(trials)
        if error > max(self.target, WORST) and self.target < _ANY_BOUND:
            return _no_proof(f"after {trials} trials its error bound is {error:.1e}")
        return Accepted(error, f"{trials} trials")

    def _start(self) -> _Start | Rejected:
        """Find sizes at which a first trial succeeds and the error bound can become small."""
        unclear = ""
        for number, sizes in enumerate(_SIZES):
            pair = self._shrink(sizes, 2, self.pieces)
            if isinstance(pair, Rejected):
                return pair
            is_last = number + 1 == len(_SIZES)
            if self.has_exps and pair.degrees.exps > _MANY_EXPS and not is_last:
                continue
            copies = 1
            if self.has_exps:
                copies = min(pair.degrees.exps, _MAX_COPIES) + SPARE
            first = self._try(pair, 0, copies)
            if isinstance(first, Rejected):
                return first
            exponents = independent(first.algebra.exponents, copies)
            if isinstance(exponents, Rejected):
                unclear = exponents.reason
                continue
            if not self.has_bounds:  # later trials need no more copies than the rank asks for
                copies = min(copies, exponents.rank + SPARE)
            bound = pair.bound(replace(exponents, copies=copies))
            error = bound.after(self.most_trials)
            if error <= max(self.target, WORST):
                return _Start(pair, copies, bound)
            unclear = (
                f"after {self.most_trials} trials its error bound is {error:.1e}, "
                f"more than {WORST:.0e}"
            )
        if self.target < _ANY_BOUND:
            return _no_proof(unclear)
        assert isinstance(pair, Pair)
        return _Start(pair, copies, TrialBound(1.0, 0.0))

    def _shrink(self, sizes: Sequence[int], split_size: int, pieces: int) -> Pair | Rejected:
        small = shrink(self.classes, sizes, split_size)
        return small if isinstance(small, Rejected) else Pair(*small, pieces)

    def _try(
        self, pair: Pair, number: int, copies: int, whole_grid: bool = False
    ) -> ProofTrial | Rejected:
        """Evaluate both sides at random, and return the trial if they agree."""
        for draw in range(_MAX_REDRAWS):
            algebra = FieldAlgebra((self.seed % 2**64, number, draw), copies)
            operands: list[Any] = [algebra.random(dims) for dims in pair.inputs()]
            for n, drawn in pair.bounds(algebra.rng, number).items():
                operands[n] = drawn
            try:
                want = pair.program.run(operands, algebra, 1)
                got = pair.kernels.run(operands, algebra, pair.pieces, whole_grid)
            except DivisionByZeroError:
                continue
            trial = ProofTrial(want, got, algebra)
            return trial.disagreement(number) or trial
        return Rejected(
            f"a denominator was zero in {_MAX_REDRAWS} draws in a row: the program divides by zero"
        )


@dataclass(frozen=True)
class Pair:
    """A program and its kernels at small sizes.

    Attributes:
        program: The program.
        kernels: The kernels.
        pieces: How many pieces each loop axis of the kernels is executed in.
    """

    program: SmallGraph
    kernels: SmallGraph
    pieces: int

    def inputs(self) -> list[tuple[int, ...]]:
        """Return the small dims of the inputs."""
        return [self.program.dims[t.index] for t in self.program.graph.inputs]

    def bounds(self, rng: np.random.Generator, first: int) -> dict[int, np.ndarray]:
        """Draw the inputs that are bounds, positions or indices, by number (see `draw_all`)."""
        dims, blocks = self.program.dims, self.program.blocks

        def extent(b: Bounds) -> int:
            return blocks[b.op].axis(b.axis).size if b.x is None else dims[b.x.index][b.dim]

        inputs = self.inputs()
        return draw_all(
            self.program.graph,
            lambda n: inputs[n],
            extent,
            rng,
            first,
            slots=lambda t: dims[t.index][-2],
            choices=lambda t, dim: dims[t.index][dim],
        )

    @cached_property
    def degrees(self) -> Degrees:
        """The counts of both sides, from executing them on degrees as in a trial."""
        return self._counted[0]

    @cached_property
    def _counted(self) -> tuple[Degrees, list[Degree], list[Degree]]:
        degrees = Degrees()
        bounds = self.bounds(np.random.default_rng(0), 0)
        operands = [bounds.get(n, degrees.variable(dims)) for n, dims in enumerate(self.inputs())]
        want = self.program.run(operands, degrees, 1)
        got = self.kernels.run(operands, degrees, self.pieces, True)
        return degrees, want, got

    def bound(self, exponents: Exponents) -> TrialBound:
        """Return the error bound of a trial with these relations among its exponents."""
        degrees, want, got = self._counted
        return trial_bound(want, got, degrees, exponents)


@dataclass(frozen=True)
class ProofTrial:
    """One random evaluation of both sides.

    Attributes:
        want: The program's outputs.
        got: The kernels' outputs.
        algebra: The algebra, with the exponents it met.
    """

    want: list[Element]
    got: list[Element]
    algebra: FieldAlgebra

    def disagreement(self, number: int) -> Rejected | None:
        """Return where the outputs differ, or None; `number` is the trial's, for the reason."""
        for k, (want, got) in enumerate(zip(self.want, self.got, strict=True)):
            if want.p.shape != got.p.shape:
                return Rejected(
                    f"output {k} has shape {got.p.shape}, the program's has {want.p.shape} (shrunk "
                    "sizes)"
                )
            differ = int((want.p != got.p).sum())
            if differ:
                return Rejected(
                    f"output {k} differs from the program in {differ} of {want.p.size} elements "
                    f"of trial {number}"
                )
        return None


@dataclass(frozen=True)
class _Start:
    """The sizes that a proof settled on, the copies its trials need, and the bound of each."""

    pair: Pair
    copies: int
    bound: TrialBound


def _no_proof(why: str) -> Rejected:
    return Rejected(f"the proof would say nothing: {why}")


def _has_exps(classes: SizeClasses) -> bool:
    return any(_op_has_exps(op) for op in (*classes.program.ops, *classes.kernels.ops))


def _op_has_exps(op: KernelOp) -> bool:
    if op.block is None:
        return op.name == "exp"
    rescales = any(acc.shift for stage in op.block.stages for acc in stage.accumulators)
    return rescales or any(b.fn == "exp" for b in op.block.ops())
