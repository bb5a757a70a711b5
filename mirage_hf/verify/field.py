"""Finite fields as an algebra: exact proofs of equality by random evaluation over Z_p × Z_q.

An element is a pair: its value in Z_p, and in Z_q as long as it may still become an exponent; q divides p − 1, so
exp(x) = w^x with w of order q is a homomorphism from Z_q into Z_p that satisfies e^(a+b) = e^a e^b exactly. Opaque
functions are keyed random functions, a maximum over an axis is a sum of keyed random values (so it may be taken in
pieces), constants that are not small rationals are random, and every trial draws new keys.
"""
from __future__ import annotations

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


@dataclass(frozen=True)
class Element:
    """An array of field elements: residues mod P, and mod Q or None once the value depends on an exp."""

    p: np.ndarray
    q: np.ndarray | None

    def map(self, f: Any) -> Element:
        return Element(f(self.p), None if self.q is None else f(self.q))


def _power(base: np.ndarray, exponent: np.ndarray | int, modulus: int) -> np.ndarray:
    exponent = np.broadcast_to(np.asarray(exponent, dtype=np.int64), np.broadcast_shapes(base.shape, np.shape(exponent))).copy()
    base = np.broadcast_to(base, exponent.shape) % modulus
    out = np.ones(exponent.shape, dtype=np.int64)
    while exponent.any():
        out = np.where(exponent & 1 == 1, out * base % modulus, out)
        base = base * base % modulus
        exponent >>= 1
    return out


_Words = TypeVar("_Words", np.ndarray, np.uint64)


def _mix(x: _Words) -> _Words:
    """splitmix64's finaliser: a bijection of 64-bit words that looks random."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


class FieldAlgebra:
    """The algebra of one trial: its keys, its w, its random constants. Deterministic for a seed."""

    def __init__(self, seed: int | tuple[int, ...]):
        self.rng = np.random.default_rng(seed)
        self.keys = [np.uint64(self.rng.integers(1 << 63)) for _ in range(3)]
        self.w = int(_power(np.array([int(self.rng.integers(2, P - 1))]), 2, P)[0])  # a square other than 0 and 1 generates

    def random(self, shape: Sequence[int]) -> Element:
        return Element(self.rng.integers(P, size=tuple(shape), dtype=np.int64), self.rng.integers(Q, size=tuple(shape), dtype=np.int64))

    # -- views ------------------------------------------------------------------------------------------------------------

    def arrange(self, x: Element, order: Sequence[int], shape: Sequence[int]) -> Element:
        return x.map(lambda a: a.transpose(tuple(order)).reshape(tuple(shape)))

    def join(self, xs: Sequence[Element], dim: int) -> Element:
        q = None if any(x.q is None for x in xs) else np.concatenate([x.q for x in xs if x.q is not None], dim)
        return Element(np.concatenate([x.p for x in xs], dim), q)

    def cut(self, x: Element, slices: tuple[slice, ...]) -> Element:
        return x.map(lambda a: a[slices])

    def empty(self, shape: Sequence[int]) -> Element:
        return Element(np.full(tuple(shape), -1, dtype=np.int64), None)

    def put(self, out: Element, slices: tuple[slice, ...], x: Element) -> None:
        out.p[slices] = x.p

    # -- arithmetic ---------------------------------------------------------------------------------------------------------

    def constant(self, value: float) -> Element:
        f = small_rational(value)
        if f is None:
            return self._hash("constant", (), [Element(np.array(hash(value) % P), np.array(hash(value) % Q))])
        return Element(np.array(f.numerator * pow(f.denominator, -1, P) % P), np.array(f.numerator * pow(f.denominator, -1, Q) % Q))

    def elementwise(self, fn: str, args: Sequence[Any], attrs: Mapping[str, float]) -> Element:
        elements = [a if isinstance(a, Element) else self.constant(float(a)) for a in args]
        row = table.lookup(fn)
        if row.opaque:
            return self._hash(fn, tuple(sorted(attrs.items())), elements)
        if fn == "cast":
            return elements[0]
        algebra: dict[str, Callable[..., Element]] = {
            "add": self.add, "sub": self.sub, "mul": self.mul, "div": self.div, "exp": self.exp,
            "neg": lambda x: self.sub(self.constant(0.0), x)}
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

    def exp(self, x: Element) -> Element:
        if x.q is None:  # exp of something that depends on an exp has no exponent here
            return self._hash("exp", (), [x])
        return Element(_power(np.array(self.w), x.q, P), None)

    def _hash(self, fn: str, attrs: tuple[tuple[str, float], ...], args: Sequence[Element]) -> Element:
        name = np.uint64(int.from_bytes(hashlib.blake2b(repr((fn, attrs)).encode(), digest_size=8).digest(), "little"))
        shape = np.broadcast_shapes(*(a.p.shape for a in args))
        with np.errstate(over="ignore"):
            state = np.full(shape, _mix(self.keys[0] ^ name), dtype=np.uint64)
            for a in args:
                state = _mix(state + a.p.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self.keys[1])
                if a.q is not None:
                    state = _mix(state ^ (a.q.astype(np.uint64) + self.keys[2]))
        whole = all(a.q is not None for a in args)
        p = (state % np.uint64(P)).astype(np.int64)
        return Element(p, (_mix(state ^ self.keys[2]) % np.uint64(Q)).astype(np.int64) if whole else None)

    def reduce(self, kind: str, x: Element, dim: int) -> Element:
        if kind == "max":
            x = self._hash("max of an axis", (), [x])
        return Element(x.p.sum(dim, keepdims=True) % P, None if x.q is None else x.q.sum(dim, keepdims=True) % Q)

    def accumulate(self, kind: str, total: Element | None, x: Element) -> Element:
        return x if total is None else self.add(total, x)

    def rescale(self, total: Element, old: Element, new: Element) -> Element:
        return self.mul(total, self.exp(self.sub(old, new)))

    def contract(self, a: Element, b: Element, dim: int) -> None:
        return None  # 31-bit products do not fit a library's matmul; proofs run on small axes
