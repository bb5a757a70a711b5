"""Finite fields as an algebra: exact proofs of equality by random evaluation over Z_p × Z_q.

An element is its value in Z_p and, as long as it may still become an exponent, its values at several independent points
("copies") in Z_q. q divides p − 1, so exp(x) = g^(z·x), with g of order q and a random vector z, is a homomorphism from Z_q
into Z_p that satisfies e^(a+b) = e^a e^b exactly; with as many copies as there are independent exponents, exponentials of
independent exponents are independent (see docs/proofs.md). Opaque functions are keyed random functions, a
maximum over an axis is a random function of the multiset of its arguments (so it may be taken in pieces, and a maximum of
maxima is a maximum), constants that are not small rationals are random, and every trial draws new keys. `select` by a condition
that is neither 0 nor 1, so by data and not by bounds, is a random function too: no random element would ever take its other side.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mirage_hf.ops import table
from mirage_hf.search.spec import small_rational

Q = 1073741789
P = 2 * Q + 1
"""Primes with P = 2Q + 1: the squares of Z_P form its subgroup of order Q, and products of two elements fit in int64."""


class Redraw(Exception):
    """A denominator was zero: the inputs say nothing, draw others."""


@dataclass(eq=False)
class Element:
    """An array of field elements: residues mod P; residues mod Q with a last dim of copies, or None once the value depends
    on an exp; for a maximum over an axis, the sum that stands for the multiset of its arguments. Only `put` changes one."""

    p: np.ndarray
    q: np.ndarray | None
    peak: np.ndarray | None = None

    def map(
        self,
        f: Callable[[np.ndarray], np.ndarray],
        on_q: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Element:
        """Apply a view to all arrays; `on_q` is the same view of one that has a dim more at the end."""
        return Element(
            f(self.p),
            None if self.q is None else (on_q or f)(self.q),
            None if self.peak is None else f(self.peak),
        )


def _power(base: np.ndarray, exponent: int, modulus: int) -> np.ndarray:
    out = np.ones(base.shape, dtype=np.int64)
    while exponent:
        if exponent & 1:
            out = out * base % modulus
        base = base * base % modulus
        exponent >>= 1
    return out


_fraction = functools.lru_cache(4096)(small_rational)

_Words = TypeVar("_Words", np.ndarray, np.uint64)


def _mix(x: _Words) -> _Words:
    """splitmix64's finaliser: a bijection of 64-bit words that looks random."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def mask(
    lo: np.ndarray, hi: np.ndarray, order: Sequence[int], shape: Sequence[int], dim: int, size: int
) -> np.ndarray:
    """Where lo ≤ index along `dim` < hi."""
    lo, hi = (x.transpose(tuple(order)).reshape(tuple(shape)) for x in (lo, hi))
    at = np.arange(size).reshape(-1, *[1] * (len(shape) - 1 - dim))
    return np.asarray((at >= lo) & (at < hi))


class FieldAlgebra:
    """The algebra of one trial: its keys, its w, its random constants. Deterministic for a seed."""

    def __init__(self, seed: int | tuple[int, ...], copies: int = 1):
        self.rng = np.random.default_rng(seed)
        self.keys = [np.uint64(self.rng.integers(1 << 63)) for _ in range(3)]
        self.w = int(
            _power(np.array([int(self.rng.integers(2, P - 1))]), 2, P)[0]
        )  # a square other than 0 and 1 generates
        self.z = self.rng.integers(Q, size=copies, dtype=np.int64)
        self.lanes = _mix(np.arange(1, copies + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        self.exponents: list[np.ndarray] = []
        """Arguments of exp so far, one row each, a column per copy."""

    @property
    def copies(self) -> int:
        return len(self.z)

    def random(self, shape: Sequence[int]) -> Element:
        p = self.rng.integers(P, size=tuple(shape), dtype=np.int64)
        return Element(p, self.rng.integers(Q, size=(*shape, self.copies), dtype=np.int64))

    # -- views ------------------------------------------------------------------------------------------------------------

    def arrange(self, x: Element, order: Sequence[int], shape: Sequence[int]) -> Element:
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
        q = (
            None
            if any(x.q is None for x in xs)
            else np.concatenate([x.q for x in xs if x.q is not None], dim)
        )
        peak = (
            None
            if any(x.peak is None for x in xs)
            else np.concatenate([x.peak for x in xs if x.peak is not None], dim)
        )
        return Element(np.concatenate([x.p for x in xs], dim), q, peak)

    def cut(self, x: Element, slices: tuple[slice, ...]) -> Element:
        return x.map(lambda a: a[slices])

    def empty(self, shape: Sequence[int]) -> Element:
        never = np.full((*shape, self.copies + 2), -1, dtype=np.int64)
        return Element(never[..., 0], never[..., 2:], never[..., 1])

    def full(self, shape: Sequence[int], value: float) -> Element:
        return self.spread(self.constant(value), shape)

    def put(self, out: Element, slices: tuple[slice, ...], x: Element) -> None:
        out.p[slices] = x.p
        if out.q is not None and x.q is not None:
            out.q[slices] = x.q
        else:
            out.q = None
        if out.peak is not None and x.peak is not None:
            out.peak[slices] = x.peak
        else:
            out.peak = None

    # -- arithmetic ---------------------------------------------------------------------------------------------------------

    def constant(self, value: float) -> Element:
        f = _fraction(value)
        if f is None:
            return self._hash("constant", (), [Element(np.array(hash(value) % P), None)])
        return Element(
            np.array(f.numerator * pow(f.denominator, -1, P) % P),
            np.full(self.copies, f.numerator * pow(f.denominator, -1, Q) % Q, dtype=np.int64),
        )

    def elementwise(self, fn: str, args: Sequence[Any], attrs: Mapping[str, float]) -> Element:
        if fn == "pow" and not isinstance(args[1], Element) and float(args[1]) in (2.0, 3.0, 4.0):
            return functools.reduce(self.mul, [args[0]] * int(args[1]))
        elements = [a if isinstance(a, Element) else self.constant(float(a)) for a in args]
        row = table.lookup(fn)
        if row.opaque:
            return self._hash(fn, tuple(sorted(attrs.items())), elements)
        if fn == "cast":
            return elements[0]
        if fn == "select":
            chosen, known = self.select(*elements), elements[0].p >> 1 == 0
            return (
                chosen
                if known.all()
                else self.select(Element(known, None), chosen, self._hash(fn, (), elements))
            )
        algebra: dict[str, Callable[..., Element]] = {
            "add": self.add,
            "sub": self.sub,
            "mul": self.mul,
            "div": self.div,
            "exp": self.exp,
            "neg": lambda x: self.sub(self.constant(0.0), x),
            "select": self.select,
        }
        return row.program(**attrs).evaluate(algebra, elements, self.constant)

    @staticmethod
    def _binary(f: Any, a: Element, b: Element) -> Element:
        q = None if a.q is None or b.q is None else f(a.q, b.q) % Q
        return Element(f(a.p, b.p) % P, q)

    def add(self, a: Element, b: Element) -> Element:
        return self._binary(np.add, a, b)

    def sub(self, a: Element, b: Element) -> Element:
        return self._binary(np.subtract, a, b)

    def mul(self, a: Element, b: Element) -> Element:
        return self._binary(np.multiply, a, b)

    def div(self, a: Element, b: Element) -> Element:
        if (b.p == 0).any() or (b.q is not None and (b.q == 0).any()):
            raise Redraw
        inverse = Element(_power(b.p, P - 2, P), None if b.q is None else _power(b.q, Q - 2, Q))
        return self.mul(a, inverse)

    @staticmethod
    def select(m: Element, x: Element, y: Element) -> Element:
        inside = m.p != 0
        q = None if x.q is None or y.q is None else np.where(inside[..., None], x.q, y.q)
        return Element(np.where(inside, x.p, y.p), q)

    def bounds(
        self,
        lo: np.ndarray,
        hi: np.ndarray,
        order: Sequence[int],
        shape: Sequence[int],
        dim: int,
        size: int,
    ) -> Element:
        """1 inside and 0 outside: no variables, so each draw of bounds is an identity of its own."""
        inside = mask(lo, hi, order, shape, dim, size).astype(np.int64)
        return Element(inside, np.broadcast_to(inside[..., None], (*inside.shape, self.copies)))

    def exp(self, x: Element) -> Element:
        if x.q is None:  # exp of something that depends on an exp has no exponent here
            return Element(self._hash("exp", (), [x]).p, None)
        self.exponents.append(x.q.reshape(-1, self.copies))
        exponent = (x.q * self.z % Q).sum(-1) % Q
        out = self._powers_of_w[0][exponent & 255]
        for k in (1, 2, 3):
            out = out * self._powers_of_w[k][exponent >> 8 * k & 255] % P
        return Element(out, None)

    @functools.cached_property
    def _powers_of_w(self) -> list[np.ndarray]:
        """w^(n · 256^k) for n < 256, a row per k."""
        rows, step = [], self.w
        for _ in range(4):
            row = np.ones(1, dtype=np.int64)
            for _ in range(8):
                row, step = np.concatenate([row, row * step % P]), step * step % P
            rows.append(row)
        return rows

    def _hash(
        self, fn: str, attrs: tuple[tuple[str, float], ...], args: Sequence[Element]
    ) -> Element:
        """A random function of the arguments' residues mod P: one fresh variable, so with residues mod Q of its own."""
        name = np.uint64(
            int.from_bytes(
                hashlib.blake2b(repr((fn, attrs)).encode(), digest_size=8).digest(), "little"
            )
        )
        shape = np.broadcast_shapes(*(a.p.shape for a in args))
        with np.errstate(over="ignore"):
            state = np.full(shape, _mix(self.keys[0] ^ name), dtype=np.uint64)
            for a in args:
                state = _mix(
                    state + a.p.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self.keys[1]
                )
            lanes = _mix((state ^ self.keys[2])[..., None] + self.lanes)
        return Element(
            (state % np.uint64(P)).astype(np.int64), (lanes % np.uint64(Q)).astype(np.int64)
        )

    def reduce(self, kind: str, x: Element, dim: int) -> Element:
        if kind == "max":
            terms = self._hash("argument of a maximum", (), [x]).p if x.peak is None else x.peak
            return self._maximum(terms.sum(dim, keepdims=True) % P)
        return Element(
            x.p.sum(dim, keepdims=True) % P,
            None if x.q is None else x.q.sum(dim, keepdims=True) % Q,
        )

    def _maximum(self, peak: np.ndarray) -> Element:
        value = self._hash("max of an axis", (), [Element(peak, None)])
        return Element(value.p, value.q, peak)

    def accumulate(self, kind: str, total: Element | None, x: Element) -> Element:
        if total is None:
            return x
        if kind == "max" and total.peak is not None and x.peak is not None:
            return self._maximum((total.peak + x.peak) % P)
        return self.add(total, x)

    def shift(self, maximum: Element) -> Element:
        return maximum

    def rescale(self, total: Element, old: Element, new: Element) -> Element:
        return self.mul(total, self.exp(self.sub(old, new)))

    def contract(self, a: Element, b: Element, dim: int) -> None:
        return None  # 31-bit products do not fit a library's matmul; proofs run on small axes
