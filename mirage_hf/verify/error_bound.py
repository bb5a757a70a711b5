"""The probability that one trial of a proof accepts functions that differ.

Let f ≠ g be the values of program and kernels at one element of an output. They are formal
expressions in variables, exponentials and values of opaque functions. Let

- D be the degree of f − g with denominators cleared,
- E the largest number of exponentials in a product of it,
- m the number of linearly independent exponents b₁ … bₘ,
- N the largest sum of coefficient magnitudes, if every exponent is written as a combination of the
  b with integer coefficients,
- d the degree of a linear combination of the b, with denominators cleared,
- r > m the number of copies, which are the points at which exponents are evaluated.

If applications of opaque functions to different arguments get different values, a trial finds f = g
with probability at most

    D/P + (m + 1)·E·N/Q + C(r, r−m+1)·(d/Q)^(r−m+1).

Two of k applications of opaque functions get the same value with probability at most k²/2 · (1/P +
s). Here s is the same sum for two arguments.

D, E and d come from `degrees`. m and N come from the exponents of a trial (`independent`). Their
rank at r points is m, except with a probability of C(r, r−m)·(d/Q)^(r−m). That probability is added
to the bound. docs/proofs.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mirage_hf.errors import Rejected
from mirage_hf.verify.degrees import Degree, Degrees
from mirage_hf.verify.field import P, Q

#: Copies beyond the number of independent exponents. With four of them, the rank is wrong with a
#: probability of about (d/Q)^4. That is below 1e-20 for the degrees that occur.
SPARE = 4

#: Numerators and denominators of coefficients between exponents stay below this.
_LARGEST_FRACTION = 1 << 13

#: The largest sum of a combination's coefficients that is still counted exactly.
_LARGEST_WEIGHT = 1 << 40


@dataclass(frozen=True)
class Exponents:
    """How the exponents of a trial depend on each other.

    Attributes:
        rank: m, the number of independent ones.
        weight: N. Each exponent is a combination of the independent ones with integer coefficients
            whose magnitudes add up to at most this.
        copies: r, the number of points at which they were evaluated.
    """

    rank: int = 0
    weight: int = 0
    copies: int = 1


def independent(rows: Sequence[np.ndarray], copies: int) -> Exponents | Rejected:
    """Find how the exponents of a trial depend on each other.

    Args:
        rows: Arrays with one row for each exponent and one column for each copy.
        copies: The number of columns.

    Returns:
        What was found, or why it is unclear.
    """
    if not rows:
        return Exponents(copies=copies)
    points = np.unique(
        np.concatenate(rows), axis=0
    ).T.copy()  # rows are copies, columns are exponents
    rank, reduced = _row_reduced(points)
    if rank > copies - SPARE:
        return Rejected(
            f"its {rank} or more independent exponents are too many for {copies} points"
        )
    numerators, denominators = _rational(reduced[:rank])
    no_small_multiples = Rejected("its exponents are no small multiples of each other")
    if (denominators == 0).any():
        return no_small_multiples
    weight = 0.0
    if rank:
        common = np.lcm.reduce(denominators, axis=1, keepdims=True)
        weight = np.abs(numerators * (common / denominators)).sum(0).max()
    if not weight < _LARGEST_WEIGHT:
        return no_small_multiples
    return Exponents(rank, math.ceil(weight), copies)


def _row_reduced(points: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the rank of a matrix mod Q, and its reduced row echelon form."""
    rank = 0
    for column in range(points.shape[1]):
        if rank == len(points):
            break
        nonzero = np.nonzero(points[rank:, column])[0]
        if not len(nonzero):
            continue
        pivot = rank + int(nonzero[0])
        points[[rank, pivot]] = points[[pivot, rank]]
        points[rank] = points[rank] * pow(int(points[rank, column]), -1, Q) % Q
        factors = points[:, column].copy()
        factors[rank] = 0
        products = factors[:, None] * points[rank]
        products %= Q
        points -= products
        np.add(points, Q, out=points, where=points < 0)  # quicker than another %
        rank += 1
    return rank, points


def _rational(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return residues mod Q as small fractions, by Euclid's algorithm stopped halfway.

    Returns:
        Numerators and denominators. A denominator of 0 says that there is no such fraction.
    """
    a, b = np.full_like(x, Q), x.copy()
    s, t = np.zeros_like(x), np.ones_like(x)
    while (go_on := b >= _LARGEST_FRACTION).any():
        quotient = np.where(go_on, a // np.maximum(b, 1), 0)
        a, b = np.where(go_on, b, a), np.where(go_on, a - quotient * b, b)
        s, t = np.where(go_on, t, s), np.where(go_on, s - quotient * t, t)
    numerators, denominators = b * np.sign(t), np.abs(t)
    return numerators, np.where(denominators < _LARGEST_FRACTION, denominators, 0)


@dataclass(frozen=True)
class TrialBound:
    """The error bound of a trial.

    Attributes:
        accepts_wrongly: The probability that it accepts outputs that differ is at most this.
        exponents_wrong: The probability that the rank of the exponents was found wrongly is at most
            this. It counts once for all trials that share them.
    """

    accepts_wrongly: float
    exponents_wrong: float

    def after(self, trials: int) -> float:
        """Return the error bound of several trials."""
        return self.accepts_wrongly**trials + self.exponents_wrong

    def or_larger(self, other: TrialBound) -> TrialBound:
        """Return the larger of each probability."""
        return TrialBound(
            max(self.accepts_wrongly, other.accepts_wrongly),
            max(self.exponents_wrong, other.exponents_wrong),
        )


def trial_bound(
    want: Sequence[Degree], got: Sequence[Degree], degrees: Degrees, exponents: Exponents
) -> TrialBound:
    """Return the error bound of one trial.

    Args:
        want: The degrees of the program's outputs.
        got: The degrees of the kernels' outputs.
        degrees: What was counted while both were run.
        exponents: How the exponents depend on each other.
    """
    difference = degrees.add(_largest_of(want, 0), _largest_of(got, 1)).largest()
    chance = _coincide(difference.degree, difference.exps, exponents)
    # Two applications of opaque functions get the same value by chance.
    pair = degrees.opaque
    meet = 1 / P + _coincide(
        pair.degree + pair.denominator_degree, pair.exps + pair.denominator_exps, exponents
    )
    count = degrees.applications
    chance += count * (count - 1) / 2 * meet
    # A condition of select is zero by chance, although it is not the zero function.
    condition = degrees.largest_condition
    chance += degrees.conditions * _coincide(condition.degree, condition.exps, exponents)
    if not degrees.exps:
        return TrialBound(min(float(chance), 1.0), 0.0)
    # A linear combination of exponents, cleared of its denominators, is zero at one more point.
    exponent = degrees.exponent
    at_one_point = (exponent.degree + (exponents.rank + 1) * exponent.denominator_degree) / Q
    spare = exponents.copies - exponents.rank
    wrong = math.comb(exponents.copies, spare) * at_one_point**spare
    chance += math.comb(exponents.copies, spare + 1) * at_one_point ** (spare + 1)
    return TrialBound(min(float(chance), 1.0), min(float(wrong), 1.0))


def _coincide(degree: float, exps: float, exponents: Exponents) -> float:
    """Return the probability that two different functions have the same value."""
    return degree / P + (exponents.rank + 1) * exps * exponents.weight / Q


def _largest_of(outputs: Sequence[Degree], denominator_id: int) -> Degree:
    """Return the largest degree of each output, all over one denominator."""
    largest = [x.largest() for x in outputs]
    return Degree(
        np.array([(x.degree, x.exps) for x in largest]),
        np.array([(x.denominator_degree, x.denominator_exps) for x in largest]),
        np.full(len(largest), denominator_id, dtype=np.uint64),
    )
