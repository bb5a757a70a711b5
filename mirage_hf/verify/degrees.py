"""Degrees as an algebra: run program and kernels on the degrees of the values they compute.

A value is a quotient of sums of products of variables and exponentials. The error bound of a proof
needs two numbers of both sides: their degree, and the number of exponentials in one product.
`Degrees` is an algebra like any other, so partial results, shifts and rescaling are counted as they
are executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mirage_hf.ops import table
from mirage_hf.search.lowered_program import small_rational
from mirage_hf.verify.field import bounds_mask

_POLYNOMIAL = np.uint64(0)  # the denominator 1


@dataclass(eq=False)
class Degree:
    """The degrees of an array of quotients.

    `numerator` and `denominator` have one dim more than the array. Its two entries are the degree,
    and the largest number of exponentials in a product.

    Attributes:
        numerator: The degrees of the numerators.
        denominator: The degrees of the denominators.
        denominator_id: Equal numbers stand for equal denominators. 0 stands for 1.
    """

    numerator: np.ndarray
    denominator: np.ndarray
    denominator_id: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.denominator_id.shape

    @property
    def is_constant(self) -> bool:
        """True if no variable and no exponential is inside."""
        return not self.numerator.any() and not self.denominator.any()

    @property
    def may_be_exponent(self) -> bool:
        """True if no exponential is inside."""
        return not self.numerator[..., 1].any() and not self.denominator[..., 1].any()

    def largest(self) -> LargestDegree:
        """Return the largest entries of the array."""
        degree, exps = self.numerator.reshape(-1, 2).max(0)
        denominator_degree, denominator_exps = self.denominator.reshape(-1, 2).max(0)
        return LargestDegree(degree, exps, denominator_degree, denominator_exps)

    def map(
        self,
        view: Callable[[np.ndarray], np.ndarray],
        view_of_pairs: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Degree:
        """Apply a view to all arrays.

        Args:
            view: The view of `denominator_id`.
            view_of_pairs: The same view of the other arrays, which have one dim more at the end. If
                it is None, `view` fits all.
        """
        of_pairs = view_of_pairs or view
        return Degree(
            of_pairs(self.numerator), of_pairs(self.denominator), view(self.denominator_id)
        )


@dataclass(frozen=True)
class LargestDegree:
    """The largest degree and the largest number of exponentials of some quotients."""

    degree: float = 0.0
    exps: float = 0.0
    denominator_degree: float = 0.0
    denominator_exps: float = 0.0

    def or_larger(self, other: LargestDegree) -> LargestDegree:
        """Return the larger of each entry."""
        return LargestDegree(
            max(self.degree, other.degree),
            max(self.exps, other.exps),
            max(self.denominator_degree, other.denominator_degree),
            max(self.denominator_exps, other.denominator_exps),
        )


class Degrees:
    """An algebra that counts what the error bound needs while it runs.

    Attributes:
        exps: How often exp is applied.
        exponent: The largest argument of exp.
        applications: How often an opaque function is applied.
        opaque: The largest argument of an opaque function.
        conditions: How many conditions of `select` are computed from data.
        largest_condition: The largest of these conditions.
    """

    def __init__(self) -> None:
        self.exps = self.applications = self.conditions = 0
        self.exponent = self.opaque = self.largest_condition = LargestDegree()
        self._rng = np.random.default_rng(0)

    def variable(self, shape: Sequence[int]) -> Degree:
        """Return an array of variables."""
        return self._uniform(shape, (1.0, 0.0))

    @staticmethod
    def _uniform(shape: Sequence[int], numerator: tuple[float, float]) -> Degree:
        pairs = (*shape, 2)
        return Degree(
            np.broadcast_to(np.array(numerator), pairs),
            np.broadcast_to(np.zeros(2), pairs),
            np.full(tuple(shape), _POLYNOMIAL),
        )

    # -- views -------------------------------------------------------------------------------------

    def arrange(self, x: Degree, order: Sequence[int], shape: Sequence[int]) -> Degree:
        """Permute the dims by `order`, then reshape to `shape`."""
        return x.map(
            lambda a: a.transpose(tuple(order)).reshape(tuple(shape)),
            lambda a: a.transpose((*order, len(order))).reshape((*shape, 2)),
        )

    def spread(self, x: Degree, shape: Sequence[int]) -> Degree:
        """Repeat dims of size 1 until the array has this shape."""
        return x.map(
            lambda a: np.broadcast_to(a, tuple(shape)), lambda a: np.broadcast_to(a, (*shape, 2))
        )

    def join(self, xs: Sequence[Degree], dim: int) -> Degree:
        """Concatenate arrays along a dim."""
        return Degree(
            np.concatenate([x.numerator for x in xs], dim),
            np.concatenate([x.denominator for x in xs], dim),
            np.concatenate([x.denominator_id for x in xs], dim),
        )

    def cut(self, x: Degree, slices: tuple[slice, ...]) -> Degree:
        """Return the elements that `slices` names."""
        return x.map(lambda a: a[slices])

    def empty(self, shape: Sequence[int]) -> Degree:
        """Return an array whose elements are set by `put`."""
        pairs = (*shape, 2)
        return Degree(np.zeros(pairs), np.zeros(pairs), np.full(tuple(shape), _POLYNOMIAL))

    def full(self, shape: Sequence[int], value: float) -> Degree:
        """Return an array of one number."""
        return self.spread(self._constant(value), shape)

    def put(self, out: Degree, slices: tuple[slice, ...], x: Degree) -> None:
        """Set the elements that `slices` names."""
        out.numerator[slices] = x.numerator
        out.denominator[slices] = x.denominator
        out.denominator_id[slices] = x.denominator_id

    # -- arithmetic --------------------------------------------------------------------------------

    def elementwise(self, fn: str, args: Sequence[Any], attrs: Mapping[str, float]) -> Degree:
        """Apply an elementwise op of the table, with broadcasting. Numbers may be arguments."""
        if fn == "pow" and not isinstance(args[1], Degree) and float(args[1]) in (2.0, 3.0, 4.0):
            return self._power(args[0], int(args[1]))
        degrees = [a if isinstance(a, Degree) else self._constant(float(a)) for a in args]
        entry = table.lookup(fn)
        if entry.opaque:
            return self._opaque(degrees)
        if fn == "cast":
            return degrees[0]
        if fn == "select" and not degrees[0].is_constant:
            # The condition comes from data. Where it is 0 or 1, the value is one of the others.
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
        return entry.program(**attrs).evaluate(algebra, degrees, self._constant)

    def _constant(self, value: float) -> Degree:
        return self.variable(()) if small_rational(value) is None else self.empty(())

    @staticmethod
    def _power(x: Degree, n: int) -> Degree:
        return Degree(x.numerator * n, x.denominator * n, x.denominator_id * np.uint64(n))

    def add(self, a: Degree, b: Degree) -> Degree:
        """Return the degrees of a + b or a − b."""
        same = a.denominator_id == b.denominator_id
        over_common = np.maximum(a.numerator, b.numerator)
        over_both = np.maximum(a.numerator + b.denominator, b.numerator + a.denominator)
        numerator = np.where(same[..., None], over_common, over_both)
        denominator = np.where(same[..., None], a.denominator, a.denominator + b.denominator)
        ids = np.where(same, a.denominator_id, a.denominator_id + b.denominator_id)
        return Degree(numerator, denominator, ids)

    def _mul(self, a: Degree, b: Degree) -> Degree:
        return Degree(
            a.numerator + b.numerator,
            a.denominator + b.denominator,
            a.denominator_id + b.denominator_id,
        )

    def _div(self, a: Degree, b: Degree) -> Degree:
        fresh = self._rng.integers(1, 1 << 63, size=b.shape, dtype=np.uint64)
        ids = np.where(b.numerator.any(-1), fresh, _POLYNOMIAL)
        return self._mul(a, Degree(b.denominator, b.numerator, ids))

    def _select(self, condition: Degree, x: Degree, y: Degree) -> Degree:
        if not condition.is_constant:
            self.conditions += condition.denominator_id.size
            self.largest_condition = self.largest_condition.or_larger(condition.largest())
        either = self.add(x, y)
        return self.spread(either, np.broadcast_shapes(condition.shape, either.shape))

    def bounds(
        self,
        lo: np.ndarray,
        hi: np.ndarray,
        order: Sequence[int],
        shape: Sequence[int],
        dim: int,
        size: int,
    ) -> Degree:
        """Return the mask of bounds, which has no variables."""
        return self.empty(bounds_mask(lo, hi, order, shape, dim, size).shape)

    def take(self, x: Degree, index: np.ndarray, dim: int) -> Degree:
        """Return the elements that an index chooses along a dim."""
        return x.map(lambda a: a.take(index.clip(0, a.shape[dim] - 1), dim))

    def _exp(self, x: Degree) -> Degree:
        if not x.may_be_exponent:
            return self._opaque([x])
        self.exps += x.denominator_id.size
        self.exponent = self.exponent.or_larger(x.largest())
        return self._uniform(x.shape, (0.0, 1.0))

    def _opaque(self, args: Sequence[Degree]) -> Degree:
        for a in args:
            self.opaque = self.opaque.or_larger(a.largest())
        shape = np.broadcast_shapes(*(a.shape for a in args))
        self.applications += math.prod(shape)
        return self.variable(shape)

    # -- reductions --------------------------------------------------------------------------------

    def reduce(self, kind: str, x: Degree, dim: int) -> Degree:
        """Return the sum or the maximum over a dim, which stays with size 1."""
        if kind == "max":  # a random function of each argument, and one of their sum
            self._opaque([x])
            first = (*[slice(None)] * dim, slice(0, 1))
            return self._opaque([self.cut(x, first)])
        first_id = x.denominator_id.take([0], dim)
        same = (x.denominator_id == first_id).all(dim, keepdims=True)
        product = x.denominator.sum(dim, keepdims=True)
        over_common = x.numerator.max(dim, keepdims=True)
        over_product = (x.numerator - x.denominator).max(dim, keepdims=True) + product
        numerator = np.where(same[..., None], over_common, over_product)
        common = x.denominator.max(dim, keepdims=True)
        denominator = np.where(same[..., None], common, product)
        ids = np.where(same, first_id, x.denominator_id.sum(dim, keepdims=True))
        return Degree(numerator, denominator, ids)

    def accumulate(self, kind: str, total: Degree | None, x: Degree) -> Degree:
        """Add a tile of a loop to the sum or the maximum so far (None before the first tile)."""
        if total is None:
            return x
        return self._opaque([total, x]) if kind == "max" else self.add(total, x)

    def shift(self, maximum: Degree) -> Degree:
        """Return a running maximum as what a tile subtracts."""
        return maximum

    def rescale(self, total: Degree, old: Degree, new: Degree) -> Degree:
        """Return total · e^(old − new)."""
        return self._mul(total, self._exp(self.add(old, new)))

    def contract(self, a: Degree, b: Degree, dim: int) -> None:
        """Return None: there is no shortcut."""
        return
