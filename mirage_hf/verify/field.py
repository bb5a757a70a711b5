"""Two finite fields as an algebra: evaluate a program exactly, on random elements of Z_P × Z_Q.

P and Q are primes with P = 2Q + 1. An element is

- a residue mod P, and
- until it depends on an exponential, residues mod Q at several independent random points. These are
  its *copies*. They are what an exponent needs.

The operations:

- exp(a) = w^(z·a). Here w has order Q in Z_P^*, and z is a random vector with one entry per copy.
  It is a homomorphism, so e^(a+b) = e^a · e^b holds exactly. With at least as many copies as there
  are independent exponents, the exponentials of independent exponents are independent.
- An opaque function is a keyed random function of its argument's residue mod P. Opaque are sqrt,
  tanh, and exp of a value that depends on an exponential, among others.
- A maximum over an axis is a random function of the multiset of its arguments. So it may be taken
  in pieces, and a maximum of maxima is a maximum.
- If the condition of `select` is neither 0 nor 1, it comes from data and not from bounds. Then
  `select` is a random function of its three arguments. A random condition is never 0, so otherwise
  one side would never be taken.
- A constant that is no small rational is random.

Every trial draws new keys. `field_proof` says what follows if two functions agree.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mirage_hf.ops import table
from mirage_hf.search.lowered_program import small_rational

# The squares of Z_P form its subgroup of order Q. Products of two elements fit in int64.
Q = 1073741789
P = 2 * Q + 1

#: The odd constant that splitmix64 adds between its words: 2^64 divided by the golden ratio.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

#: exp looks up powers of w by the four bytes of the exponent.
_BYTES = 4

_fraction = functools.lru_cache(4096)(small_rational)


class DivisionByZeroError(Exception):
    """A denominator was zero, so these random inputs prove nothing. Draw others."""


@dataclass(eq=False)
class Element:
    """An array of field elements. Only `FieldAlgebra.put` changes one.

    Attributes:
        p: Residues mod P.
        q: Residues mod Q with a last dim of copies, or None once the value depends on an
            exponential.
        multiset: For a maximum over an axis, the sum that stands for the multiset of its arguments.
    """

    p: np.ndarray
    q: np.ndarray | None
    multiset: np.ndarray | None = None

    def map(
        self,
        view: Callable[[np.ndarray], np.ndarray],
        view_of_copies: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Element:
        """Apply a view to all arrays.

        Args:
            view: The view of `p` and `multiset`.
            view_of_copies: The same view of `q`, which has one dim more at the end. If it is None,
                `view` fits both.
        """
        return Element(
            view(self.p),
            None if self.q is None else (view_of_copies or view)(self.q),
            None if self.multiset is None else view(self.multiset),
        )


def bounds_mask(
    lo: np.ndarray,
    hi: np.ndarray,
    order: Sequence[int],
    shape: Sequence[int],
    dim: int,
    size: int,
) -> np.ndarray:
    """Return a mask of the elements with lo ≤ index < hi along a dim of `size` elements.

    lo and hi are first permuted by `order` and reshaped to `shape`.
    """
    lo, hi = (x.transpose(tuple(order)).reshape(tuple(shape)) for x in (lo, hi))
    index = np.arange(size).reshape(-1, *[1] * (len(shape) - 1 - dim))
    return np.asarray((index >= lo) & (index < hi))


class FieldAlgebra:
    """The algebra of one trial: its keys, its w and z, its random constants.

    It implements `graph.execute.Algebra`, so whatever runs on numbers runs on it.

    Args:
        seed: Equal seeds give equal trials.
        copies: How many points mod Q an element is evaluated at.
    """

    def __init__(self, seed: int | tuple[int, ...], copies: int = 1):
        self.rng = np.random.default_rng(seed)
        self._keys = [np.uint64(self.rng.integers(1 << 63)) for _ in range(3)]
        base = np.array([int(self.rng.integers(2, P - 1))])
        self.w = int(_power(base, 2, P)[0])  # every square except 0 and 1 has order Q
        self._z = self.rng.integers(Q, size=copies, dtype=np.int64)
        self._copy_keys = _mix(np.arange(1, copies + 1, dtype=np.uint64) * _GOLDEN)
        #: The arguments of exp so far: a row for each, a column for each copy.
        self.exponents: list[np.ndarray] = []

    @property
    def copies(self) -> int:
        """The number of points mod Q at which elements are evaluated."""
        return len(self._z)

    def random(self, shape: Sequence[int]) -> Element:
        """Return an array of fresh variables."""
        p = self.rng.integers(P, size=tuple(shape), dtype=np.int64)
        return Element(p, self.rng.integers(Q, size=(*shape, self.copies), dtype=np.int64))

    # -- views -------------------------------------------------------------------------------------

    def arrange(self, x: Element, order: Sequence[int], shape: Sequence[int]) -> Element:
        """Permute the dims by `order`, then reshape to `shape`."""
        return x.map(
            lambda a: a.transpose(tuple(order)).reshape(tuple(shape)),
            lambda a: a.transpose((*order, len(order))).reshape((*shape, self.copies)),
        )

    def spread(self, x: Element, shape: Sequence[int]) -> Element:
        """Repeat dims of size 1 until the array has this shape."""
        return x.map(
            lambda a: np.broadcast_to(a, tuple(shape)),
            lambda a: np.broadcast_to(a, (*shape, self.copies)),
        )

    def join(self, xs: Sequence[Element], dim: int) -> Element:
        """Concatenate arrays along a dim."""

        def joined(arrays: list[np.ndarray | None]) -> np.ndarray | None:
            there = [a for a in arrays if a is not None]
            return np.concatenate(there, dim) if len(there) == len(arrays) else None

        p = np.concatenate([x.p for x in xs], dim)
        return Element(p, joined([x.q for x in xs]), joined([x.multiset for x in xs]))

    def cut(self, x: Element, slices: tuple[slice, ...]) -> Element:
        """Return the elements that `slices` names."""
        return x.map(lambda a: a[slices])

    def empty(self, shape: Sequence[int]) -> Element:
        """Return an array whose elements are set by `put`."""
        unset = np.full((*shape, self.copies + 2), -1, dtype=np.int64)
        return Element(unset[..., 0], unset[..., 2:], unset[..., 1])

    def full(self, shape: Sequence[int], value: float) -> Element:
        """Return an array of one number."""
        return self.spread(self.constant(value), shape)

    def put(self, out: Element, slices: tuple[slice, ...], x: Element) -> None:
        """Set the elements that `slices` names."""
        out.p[slices] = x.p
        if out.q is not None and x.q is not None:
            out.q[slices] = x.q
        else:
            out.q = None
        if out.multiset is not None and x.multiset is not None:
            out.multiset[slices] = x.multiset
        else:
            out.multiset = None

    # -- arithmetic --------------------------------------------------------------------------------

    def constant(self, value: float) -> Element:
        """Return a number as an element: a small fraction, or else a random element."""
        f = _fraction(value)
        if f is None:
            return self._random_function("constant", (), [Element(np.array(hash(value) % P), None)])
        mod_p = f.numerator * pow(f.denominator, -1, P) % P
        mod_q = f.numerator * pow(f.denominator, -1, Q) % Q
        return Element(np.array(mod_p), np.full(self.copies, mod_q, dtype=np.int64))

    def elementwise(self, fn: str, args: Sequence[Any], attrs: Mapping[str, float]) -> Element:
        """Apply an elementwise op of the table, with broadcasting. Numbers may be arguments."""
        if fn == "pow" and not isinstance(args[1], Element) and float(args[1]) in (2.0, 3.0, 4.0):
            return functools.reduce(self.mul, [args[0]] * int(args[1]))
        elements = [a if isinstance(a, Element) else self.constant(float(a)) for a in args]
        entry = table.lookup(fn)
        if entry.opaque:
            return self._random_function(fn, tuple(sorted(attrs.items())), elements)
        if fn == "cast":
            return elements[0]
        if fn == "select":
            return self._select_by_anything(*elements)
        algebra: dict[str, Callable[..., Element]] = {
            "add": self.add,
            "sub": self.sub,
            "mul": self.mul,
            "div": self.div,
            "exp": self.exp,
            "neg": lambda x: self.sub(self.constant(0.0), x),
            "select": self.select,
        }
        return entry.program(**attrs).evaluate(algebra, elements, self.constant)

    @staticmethod
    def _binary(f: Any, a: Element, b: Element) -> Element:
        q = None if a.q is None or b.q is None else f(a.q, b.q) % Q
        return Element(f(a.p, b.p) % P, q)

    def add(self, a: Element, b: Element) -> Element:
        """Return a + b."""
        return self._binary(np.add, a, b)

    def sub(self, a: Element, b: Element) -> Element:
        """Return a − b."""
        return self._binary(np.subtract, a, b)

    def mul(self, a: Element, b: Element) -> Element:
        """Return a · b."""
        return self._binary(np.multiply, a, b)

    def div(self, a: Element, b: Element) -> Element:
        """Return a / b. Raises DivisionByZeroError if b is 0 somewhere."""
        if (b.p == 0).any() or (b.q is not None and (b.q == 0).any()):
            raise DivisionByZeroError
        inverse = Element(_power(b.p, P - 2, P), None if b.q is None else _power(b.q, Q - 2, Q))
        return self.mul(a, inverse)

    @staticmethod
    def select(condition: Element, x: Element, y: Element) -> Element:
        """Return y where the condition is 0, else x."""
        taken = condition.p != 0
        q = None if x.q is None or y.q is None else np.where(taken[..., None], x.q, y.q)
        return Element(np.where(taken, x.p, y.p), q)

    def _select_by_anything(self, condition: Element, x: Element, y: Element) -> Element:
        chosen = self.select(condition, x, y)
        is_mask = condition.p >> 1 == 0  # 0 or 1
        if is_mask.all():
            return chosen
        other = self._random_function("select", (), [condition, x, y])
        return self.select(Element(is_mask, None), chosen, other)

    def bounds(
        self,
        lo: np.ndarray,
        hi: np.ndarray,
        order: Sequence[int],
        shape: Sequence[int],
        dim: int,
        size: int,
    ) -> Element:
        """Return 1 inside the bounds and 0 outside.

        The mask has no variables, so each draw of bounds is an identity of its own.
        """
        inside = bounds_mask(lo, hi, order, shape, dim, size).astype(np.int64)
        return Element(inside, np.broadcast_to(inside[..., None], (*inside.shape, self.copies)))

    def take(self, x: Element, index: np.ndarray, dim: int) -> Element:
        """Return the elements that an index chooses along a dim. Those out of range are 0.

        The index has no variables, so each draw of an index is an identity of its own.
        """
        taken = x.map(lambda a: a.take(index.clip(0, a.shape[dim] - 1), dim))
        inside = (index >= 0) & (index < x.p.shape[dim])
        if inside.all():
            return taken
        mask = inside.reshape(*inside.shape, *[1] * (x.p.ndim - 1 - dim)).astype(np.int64)
        return self.mul(taken, Element(mask, np.broadcast_to(mask[..., None], (*mask.shape, 1))))

    def exp(self, x: Element) -> Element:
        """Return w^(z·x), or a random function of x if x depends on an exponential."""
        if x.q is None:  # it depends on an exponential, so it cannot be an exponent
            return Element(self._random_function("exp", (), [x]).p, None)
        self.exponents.append(x.q.reshape(-1, self.copies))
        exponent = (x.q * self._z % Q).sum(-1) % Q
        power = self._powers_of_w[0][exponent & 255]
        for k in range(1, _BYTES):
            power = power * self._powers_of_w[k][exponent >> 8 * k & 255] % P
        return Element(power, None)

    @functools.cached_property
    def _powers_of_w(self) -> list[np.ndarray]:
        """w^(n · 256^k) for every byte n, one array for each k."""
        tables, step = [], self.w
        for _ in range(_BYTES):
            powers = np.ones(1, dtype=np.int64)
            for _ in range(8):
                powers = np.concatenate([powers, powers * step % P])
                step = step * step % P
            tables.append(powers)
        return tables

    def _random_function(
        self, name: str, attrs: tuple[tuple[str, float], ...], args: Sequence[Element]
    ) -> Element:
        """Return a random function of the arguments' residues mod P.

        Each value is a fresh variable, so it has residues mod Q of its own.
        """
        digest = hashlib.blake2b(repr((name, attrs)).encode(), digest_size=8).digest()
        name_key = np.uint64(int.from_bytes(digest, "little"))
        shape = np.broadcast_shapes(*(a.p.shape for a in args))
        with np.errstate(over="ignore"):
            state = np.full(shape, _mix(self._keys[0] ^ name_key), dtype=np.uint64)
            for a in args:
                state = _mix(state + a.p.astype(np.uint64) * _GOLDEN + self._keys[1])
            copies = _mix((state ^ self._keys[2])[..., None] + self._copy_keys)
        p = (state % np.uint64(P)).astype(np.int64)
        return Element(p, (copies % np.uint64(Q)).astype(np.int64))

    # -- reductions --------------------------------------------------------------------------------

    def reduce(self, kind: str, x: Element, dim: int) -> Element:
        """Return the sum or the maximum over a dim, which stays with size 1."""
        if kind == "max":
            multiset = x.multiset
            if multiset is None:
                multiset = self._random_function("argument of a maximum", (), [x]).p
            return self._maximum(multiset.sum(dim, keepdims=True) % P)
        p = x.p.sum(dim, keepdims=True) % P
        return Element(p, None if x.q is None else x.q.sum(dim, keepdims=True) % Q)

    def _maximum(self, multiset: np.ndarray) -> Element:
        value = self._random_function("max of an axis", (), [Element(multiset, None)])
        return Element(value.p, value.q, multiset)

    def accumulate(self, kind: str, total: Element | None, x: Element) -> Element:
        """Add a tile of a loop to the sum or the maximum so far (None before the first tile)."""
        if total is None:
            return x
        if kind == "max" and total.multiset is not None and x.multiset is not None:
            return self._maximum((total.multiset + x.multiset) % P)
        return self.add(total, x)

    def shift(self, maximum: Element) -> Element:
        """Return a running maximum as what a tile subtracts."""
        return maximum

    def rescale(self, total: Element, old: Element, new: Element) -> Element:
        """Return total · e^(old − new)."""
        return self.mul(total, self.exp(self.sub(old, new)))

    def contract(self, a: Element, b: Element, dim: int) -> None:
        """Return None: products of 31 bits do not fit a library's matmul, and axes are short."""
        return


def _power(base: np.ndarray, exponent: int, modulus: int) -> np.ndarray:
    power = np.ones(base.shape, dtype=np.int64)
    while exponent:
        if exponent & 1:
            power = power * base % modulus
        base = base * base % modulus
        exponent >>= 1
    return power


_Words = TypeVar("_Words", np.ndarray, np.uint64)


def _mix(x: _Words) -> _Words:
    """Apply splitmix64's finaliser: a bijection of 64-bit words that looks random."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
