"""The error bound of a trial: degrees of both sides, by running them on degrees, and the exponents they really have.

The theorem and its proof are in docs/proofs.md. `Degrees` is an algebra like any other, so whatever is
executed piece by piece (several kernels, shifts, rescaling) is counted as it is executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mirage_hf.ops import table
from mirage_hf.search.spec import small_rational
from mirage_hf.verify.field import P, Q, mask

SPARE = 4
"""Copies beyond the number of independent exponents: the certificate errs with a probability of about (d/Q)^SPARE."""
_SMALL_MULTIPLE = 1 << 13


@dataclass(eq=False)
class Degree:
    """An array of quotients of sums of products. `n`, with a last dim of four: degree of numerator and denominator, and how
    many exponentials a product of either has at most. `den` tells denominators apart: 0 is 1, equal ones are equal."""

    n: np.ndarray
    den: np.ndarray

    @property
    def q(self) -> bool:
        """Whether no exponential is inside, so that it may be an exponent."""
        return not self.n[..., 2:].any()


class Degrees:
    """Counts what the bound needs: exponentials and opaque functions applied, and the largest arguments of each."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.exps = self.applications = 0
        self.exponent, self.opaque = np.zeros(4), np.zeros(4)
        self.tests, self.tested = (
            0,
            np.zeros(4),
        )  # conditions of select that are no masks, and the largest of them

    def variable(self, shape: Sequence[int]) -> Degree:
        return Degree(
            np.broadcast_to(np.array([1.0, 0, 0, 0]), (*shape, 4)),
            np.zeros(tuple(shape), dtype=np.uint64),
        )

    # -- views ------------------------------------------------------------------------------------------------------------

    def arrange(self, x: Degree, order: Sequence[int], shape: Sequence[int]) -> Degree:
        return Degree(
            x.n.transpose((*order, len(order))).reshape((*shape, 4)),
            x.den.transpose(tuple(order)).reshape(tuple(shape)),
        )

    def spread(self, x: Degree, shape: Sequence[int]) -> Degree:
        return Degree(np.broadcast_to(x.n, (*shape, 4)), np.broadcast_to(x.den, tuple(shape)))

    def join(self, xs: Sequence[Degree], dim: int) -> Degree:
        return Degree(
            np.concatenate([x.n for x in xs], dim), np.concatenate([x.den for x in xs], dim)
        )

    def cut(self, x: Degree, slices: tuple[slice, ...]) -> Degree:
        return Degree(x.n[slices], x.den[slices])

    def empty(self, shape: Sequence[int]) -> Degree:
        return Degree(np.zeros((*shape, 4)), np.zeros(tuple(shape), dtype=np.uint64))

    def full(self, shape: Sequence[int], value: float) -> Degree:
        return self.spread(self._constant(value), shape)

    def put(self, out: Degree, slices: tuple[slice, ...], x: Degree) -> None:
        out.n[slices], out.den[slices] = x.n, x.den

    # -- arithmetic ---------------------------------------------------------------------------------------------------------

    def elementwise(self, fn: str, args: Sequence[Any], attrs: Mapping[str, float]) -> Degree:
        if fn == "pow" and not isinstance(args[1], Degree) and float(args[1]) in (2.0, 3.0, 4.0):
            return Degree(args[0].n * float(args[1]), args[0].den * np.uint64(args[1]))
        degrees = [a if isinstance(a, Degree) else self._constant(float(a)) for a in args]
        row = table.lookup(fn)
        if row.opaque:
            return self._opaque(degrees)
        if fn == "cast":
            return degrees[0]
        if (
            fn == "select" and degrees[0].n.any()
        ):  # by data: where that is a mask as well, one of the two
            return self.add(self._opaque(degrees), self.add(*degrees[1:]))
        algebra: dict[str, Callable[..., Degree]] = {
            "add": self.add,
            "sub": self.add,
            "mul": self._mul,
            "div": self._div,
            "exp": self._exp,
            "neg": lambda x: x,
            "select": self._select,
        }
        return row.program(**attrs).evaluate(algebra, degrees, self._constant)

    def _constant(self, value: float) -> Degree:
        return self.variable(()) if small_rational(value) is None else self.empty(())

    def add(self, a: Degree, b: Degree) -> Degree:
        (an, ad), (bn, bd) = ((x.n[..., ::2], x.n[..., 1::2]) for x in (a, b))
        same = a.den == b.den
        num = np.where(same[..., None], np.maximum(an, bn), np.maximum(an + bd, bn + ad))
        den = np.where(same[..., None], np.broadcast_to(ad, num.shape), ad + bd)
        return Degree(
            np.stack([num, den], -1).reshape((*same.shape, 4)), np.where(same, a.den, a.den + b.den)
        )

    def _mul(self, a: Degree, b: Degree) -> Degree:
        return Degree(a.n + b.n, a.den + b.den)

    def _select(self, m: Degree, x: Degree, y: Degree) -> Degree:
        if m.n.any():
            self.tests += m.den.size
            self.tested = np.maximum(self.tested, _largest(m.n))
        both = self.add(x, y)
        shape = np.broadcast_shapes(m.den.shape, both.den.shape)
        return self.spread(both, shape)

    def bounds(
        self,
        lo: np.ndarray,
        hi: np.ndarray,
        order: Sequence[int],
        shape: Sequence[int],
        dim: int,
        size: int,
    ) -> Degree:
        return self.empty(mask(lo, hi, order, shape, dim, size).shape)

    def _div(self, a: Degree, b: Degree) -> Degree:
        fresh = self.rng.integers(1, 1 << 63, size=b.den.shape, dtype=np.uint64)
        return self._mul(
            a, Degree(b.n[..., [1, 0, 3, 2]], np.where(b.n[..., ::2].any(-1), fresh, np.uint64(0)))
        )

    def _exp(self, x: Degree) -> Degree:
        if not x.q:
            return self._opaque([x])
        self.exps += x.den.size
        self.exponent = np.maximum(self.exponent, _largest(x.n))
        return Degree(np.broadcast_to(np.array([0, 0, 1.0, 0]), x.n.shape), np.zeros_like(x.den))

    def _opaque(self, args: Sequence[Degree]) -> Degree:
        for a in args:
            self.opaque = np.maximum(self.opaque, _largest(a.n))
        shape = np.broadcast_shapes(*(a.den.shape for a in args))
        self.applications += math.prod(shape)
        return self.variable(shape)

    def reduce(self, kind: str, x: Degree, dim: int) -> Degree:
        if kind == "max":  # a random function of each argument, and one of their sum
            self._opaque([x])
            return self._opaque([self.cut(x, (*[slice(None)] * dim, slice(0, 1)))])
        num, den = x.n[..., ::2], x.n[..., 1::2]
        same = (x.den == x.den.take([0], dim)).all(dim, keepdims=True)
        every = den.sum(dim, keepdims=True)
        num = np.where(
            same[..., None],
            num.max(dim, keepdims=True),
            (num - den).max(dim, keepdims=True) + every,
        )
        den = np.where(same[..., None], den.max(dim, keepdims=True), every)
        return Degree(
            np.stack([num, den], -1).reshape((*same.shape, 4)),
            np.where(same, x.den.take([0], dim), x.den.sum(dim, keepdims=True)),
        )

    def accumulate(self, kind: str, total: Degree | None, x: Degree) -> Degree:
        if total is None:
            return x
        return self._opaque([total, x]) if kind == "max" else self.add(total, x)

    def shift(self, maximum: Degree) -> Degree:
        return maximum

    def rescale(self, total: Degree, old: Degree, new: Degree) -> Degree:
        return self._mul(total, self._exp(self.add(old, new)))

    def contract(self, a: Degree, b: Degree, dim: int) -> None:
        return None


def _largest(n: np.ndarray) -> np.ndarray:
    return n.reshape(-1, 4).max(0)


# -- exponents ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exponents:
    """What the exponents of a trial turned out to be: integer combinations of `rank` independent ones, with coefficients
    whose magnitudes add up to `weight` at most, as seen at `copies` random points."""

    rank: int = 0
    weight: int = 0
    copies: int = 1

    def __str__(self) -> str:
        return f"{self.rank} independent exponents"


def independent(rows: Sequence[np.ndarray], copies: int) -> Exponents | str:
    """Find the independent ones among the exponents of a trial (a row each, a column per copy), or say why it is unclear."""
    if not rows:
        return Exponents(copies=copies)
    points = np.unique(np.concatenate(rows), axis=0).T.copy()  # row: a copy; column: an exponent
    rank, pivots = 0, []
    for column in range(points.shape[1]):
        if rank == len(points):
            break
        found = np.nonzero(points[rank:, column])[0]
        if not len(found):
            continue
        top = rank + int(found[0])
        points[[rank, top]] = points[[top, rank]]
        points[rank] = points[rank] * pow(int(points[rank, column]), -1, Q) % Q
        factors = points[:, column].copy()
        factors[rank] = 0
        points = (points - factors[:, None] * points[rank] % Q) % Q
        pivots.append(column)
        rank += 1
    if rank > copies - SPARE:
        return f"its {rank} or more independent exponents are too many for {copies} points"
    numerators, denominators = _rational(points[:rank])
    if (denominators == 0).any():
        return "its exponents are no small multiples of each other"
    scale = np.lcm.reduce(denominators, axis=1, keepdims=True) if rank else denominators
    weight = np.abs(numerators * (scale / denominators)).sum(0).max() if rank else 0.0
    if not weight < 1 << 40:
        return "its exponents are no small multiples of each other"
    return Exponents(rank, math.ceil(weight), copies)


def _rational(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numerator and denominator, both small, of each residue mod Q; a denominator of 0 where there is no such fraction."""
    a, b = np.full_like(x, Q), x.copy()
    s, t = np.zeros_like(x), np.ones_like(x)
    while (go := b >= _SMALL_MULTIPLE).any():  # Euclid's algorithm, stopped halfway
        quotient = np.where(go, a // np.maximum(b, 1), 0)
        a, b = np.where(go, b, a), np.where(go, a - quotient * b, b)
        s, t = np.where(go, t, s), np.where(go, s - quotient * t, t)
    numerators, denominators = b * np.sign(t), np.abs(t)
    return numerators, np.where(denominators < _SMALL_MULTIPLE, denominators, 0)


# -- the bound ----------------------------------------------------------------------------------------------------------------


def _differ(degree: float, exps: float, e: Exponents) -> float:
    """The chance that two different functions, of these degrees together, have the same value."""
    return degree / P + (e.rank + 1) * exps * e.weight / Q


def trial_bound(
    want: Sequence[Degree], got: Sequence[Degree], degrees: Degrees, e: Exponents
) -> tuple[float, float]:
    """The chance that a trial accepts outputs that differ, and the chance that `e`, seen once, is not the truth."""
    compared = degrees.add(
        Degree(np.stack([_largest(f.n) for f in want]), np.zeros(len(want), dtype=np.uint64)),
        Degree(np.stack([_largest(g.n) for g in got]), np.ones(len(got), dtype=np.uint64)),
    )
    num, exps = compared.n[:, 0].max(), compared.n[:, 2].max()
    pair = degrees.opaque
    m = degrees.applications
    chance = _differ(num, exps, e) + m * (m - 1) / 2 * (
        1 / P + _differ(pair[0] + pair[1], pair[2] + pair[3], e)
    )
    # what is not zero, but is by chance where it decides between two values
    chance += degrees.tests * _differ(degrees.tested[0], degrees.tested[2], e)
    # a linear combination of exponents, cleared of its denominators, is zero at one more point
    degree = degrees.exponent[0] + (e.rank + 1) * degrees.exponent[1]
    spare = e.copies - e.rank
    wrong = math.comb(e.copies, spare) * (degree / Q) ** spare if degrees.exps else 0.0
    short = math.comb(e.copies, spare + 1) * (degree / Q) ** (spare + 1) if degrees.exps else 0.0
    return min(float(chance + short), 1.0), min(float(wrong), 1.0)
