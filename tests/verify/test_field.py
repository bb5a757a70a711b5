"""The finite fields of the proof: their laws, exponentials and opaque functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mirage_hf as mi
from mirage_hf.errors import Rejected
from mirage_hf.graph.block import (
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
)
from mirage_hf.verify.field import DivisionByZeroError, FieldAlgebra, P, Q
from mirage_hf.verify.field_proof import prove
from tests.helpers import mutants
from tests.helpers.verification import same


def is_prime(n: int) -> bool:
    """Return whether n is prime, by Miller–Rabin. It is exact below 3.3e24 with these bases."""
    d, r = n - 1, 0
    while d % 2 == 0:
        d, r = d // 2, r + 1
    for a in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41):
        x = pow(a, d, n)
        if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(r - 1)):
            return False
    return True


def test_the_primes():
    assert is_prime(P) and is_prime(Q) and P == 2 * Q + 1 and (P - 1) % Q == 0
    assert Q > 1 << 29 and P * P < 1 << 63  # products fit in int64


@pytest.mark.parametrize("seed", range(3))
def test_the_laws_of_a_field(seed):
    f = FieldAlgebra(seed)
    a, b, c = (f.random((64,)) for _ in range(3))
    zero, one = f.constant(0.0), f.constant(1.0)
    assert same(f.add(a, b), f.add(b, a)) and same(f.mul(a, b), f.mul(b, a))
    assert same(f.add(f.add(a, b), c), f.add(a, f.add(b, c))) and same(
        f.mul(f.mul(a, b), c), f.mul(a, f.mul(b, c))
    )
    assert same(f.mul(a, f.add(b, c)), f.add(f.mul(a, b), f.mul(a, c)))
    assert (
        same(f.add(a, zero), a)
        and same(f.mul(a, one), a)
        and same(f.add(f.sub(a, b), b), a)
        and same(f.mul(f.div(a, b), b), a)
    )
    assert same(f.constant(0.75), f.div(f.constant(3.0), f.constant(4.0))) and same(
        f.mul(f.constant(1 / 3), f.constant(3.0)), one
    )
    assert all(
        (x.p >= 0).all() and (x.p < P).all() and (x.q >= 0).all() and (x.q < Q).all()
        for x in (f.sub(a, b), f.mul(a, b), f.div(a, b))
    )


def test_exp_is_a_homomorphism_and_its_image_has_order_q():
    f = FieldAlgebra(1)
    a, b = f.random((64,)), f.random((64,))
    assert same(f.exp(f.add(a, b)), f.mul(f.exp(a), f.exp(b)))
    assert same(f.exp(f.sub(a, b)), f.div(f.exp(a), f.exp(b)))
    assert (f.exp(f.constant(0.0)).p == 1).all() and f.exp(a).q is None
    assert all(pow(int(x), Q, P) == 1 for x in f.exp(a).p) and f.w not in (0, 1)
    twice = f.exp(f.exp(a))  # it has no exponent in the field, so it is opaque
    assert not same(f.exp(f.add(f.exp(a), f.exp(b))), f.mul(twice, f.exp(f.exp(b))))


def test_opaque_functions_are_keyed_by_name_attributes_arguments_and_trial():
    f, g = FieldAlgebra(1), FieldAlgebra(2)
    x, y = f.random((200,)), f.random((200,))
    names = ["sqrt", "rsqrt", "tanh", "silu", "gelu", "gelu_tanh", "sigmoid", "relu"]
    values = [f.elementwise(n, [x], {}).p for n in names]
    values += [
        f.elementwise("clamp", [x], {"min": lo, "max": hi}).p
        for lo, hi in ((-1.0, 1.0), (-2.0, 1.0), (-1.0, 2.0))
    ]
    values += [
        f.elementwise(n, args, {}).p for n in ("max", "min", "pow") for args in ([x, y], [y, x])
    ]
    tables = ((1.0, 2.0), (1.0, 3.0), (1.0, 2.0, 3.0))
    values += [f.elementwise("lookup", [x], {"values": table}).p for table in tables]
    values += [
        f.elementwise("bits", args, {"count": count}).p
        for count in (2, 4)
        for args in ([x, y], [y, x], [x, 4.0])
    ]
    values += [g.elementwise("silu", [x], {}).p]
    for i, a in enumerate(values):
        assert (a == f.elementwise(names[i], [x], {}).p).all() if i < len(names) else True
        for b in values[:i]:
            assert (a != b).mean() > 0.9
    assert len(np.unique(values[0])) == 200


def test_long_names_and_attributes_are_all_of_the_key():
    f = FieldAlgebra(0)
    x = f.random((50,))
    long = "a_rather_long_name_of_an_op_that_somebody_may_register_one_day_"
    a, b = f._random_function(long + "1", (), [x]), f._random_function(long + "2", (), [x])
    c, d = (f._random_function("x" + long, (("alpha", v), ("beta", 1.0)), [x]) for v in (1.0, 2.0))
    assert not (a.p == b.p).any() and not (c.p == d.p).any()


def test_constants_that_are_not_small_rationals_are_random_and_differ():
    f = FieldAlgebra(3)
    a, b = f.constant(math.pi * 1e-30), f.constant(math.e * 1e-30)
    assert (
        same(a, f.constant(math.pi * 1e-30))
        and not same(a, b)
        and not same(a, FieldAlgebra(4).constant(math.pi * 1e-30))
    )


def test_a_maximum_may_be_taken_in_pieces():
    f = FieldAlgebra(5)
    x = f.random((3, 8))
    whole = f.reduce("max", x, 1)
    parts = f.accumulate(
        "max",
        f.reduce("max", f.cut(x, (slice(None), slice(0, 5))), 1),
        f.reduce("max", f.cut(x, (slice(None), slice(5, 8))), 1),
    )
    assert same(whole, parts) and not same(whole, f.reduce("sum", x, 1))


def test_a_value_that_has_an_exponential_somewhere_is_no_exponent() -> None:
    """So it is after parts are put together, in whichever order."""
    f = FieldAlgebra(0)
    plain, e = f.random((2, 3)), f.exp(f.random((2, 3)))
    for parts in ((plain, e), (e, plain)):
        assert f.join(parts, 0).q is None
        out = f.empty((4, 3))
        for n, part in enumerate(parts):
            f.put(out, (slice(2 * n, 2 * n + 2), slice(None)), part)
        assert out.q is None and (out.p == f.join(parts, 0).p).all()
    assert same(f.join([plain, plain], 1), f.spread(f.join([plain, plain], 1), (2, 6)))
    out = f.empty((4, 3))
    for n in range(2):
        f.put(out, (slice(2 * n, 2 * n + 2), slice(None)), plain)
    assert same(out, f.join([plain, plain], 0))


def test_maxima_that_are_put_together_are_maxima() -> None:
    """Joined with another value they are values like any other."""
    f = FieldAlgebra(0)
    x = f.random((4, 6))
    maxima, plain = f.reduce("max", x, 1), f.random((4, 1))
    whole = f.reduce("max", maxima, 0)
    out = f.empty((4, 1))
    for n in range(4):
        row = (slice(n, n + 1), slice(None))
        f.put(out, row, f.cut(maxima, row))
    assert same(f.reduce("max", out, 0), whole)
    halves = [f.cut(maxima, (slice(2 * n, 2 * n + 2), slice(None))) for n in range(2)]
    assert same(f.reduce("max", f.join(halves, 0), 0), whole)
    moved = f.spread(f.arrange(maxima, (1, 0), (1, 4, 1)), (1, 4, 1))
    assert same(f.arrange(f.reduce("max", moved, 1), range(3), (1, 1)), whole)
    for parts in ((maxima, plain), (plain, maxima)):
        out = f.empty((8, 1))
        for n, part in enumerate(parts):
            f.put(out, (slice(4 * n, 4 * n + 4), slice(None)), part)
        assert out.multiset is None and f.join(parts, 0).multiset is None


def test_masks_select_and_data_does_not() -> None:
    f = FieldAlgebra(0)
    x, y = f.random((2, 4)), f.random((2, 4))
    lo, hi = np.array([1, 0]).reshape(2, 1), np.array([3, 0]).reshape(2, 1)
    mask = f.bounds(lo, hi, (0, 1), (2, 1), 1, 4)
    assert mask.p.tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]
    assert mask.q is not None and (mask.q == mask.p[..., None]).all()
    chosen = f.elementwise("select", [mask, x, y], {})
    inside = mask.p == 1
    assert (chosen.p == np.where(inside, x.p, y.p)).all()
    assert (chosen.q == np.where(inside[..., None], x.q, y.q)).all()
    e = f.exp(x)
    for pair in ([e, y], [y, e]):
        assert f.elementwise("select", [mask, *pair], {}).q is None
    by_data = f.elementwise("select", [f.add(mask, f.constant(1.0)), x, y], {})
    assert (by_data.p[inside] != x.p[inside]).all() and (by_data.p[inside] != y.p[inside]).all()
    assert (by_data.p[~inside] == x.p[~inside]).all()  # 0 + 1 is a mask's 1


def test_ops_that_are_polynomials_are_computed() -> None:
    f = FieldAlgebra(0)
    x, y = f.random((2, 3)), f.random((2, 3))
    square = f.mul(x, x)
    for n, want in ((2.0, square), (3.0, f.mul(square, x)), (4.0, f.mul(square, square))):
        assert same(f.elementwise("pow", [x, n], {}), want)
    assert not same(f.elementwise("pow", [x, 5.0], {}), f.mul(f.mul(square, square), x))
    assert same(f.elementwise("square", [x], {}), square)
    assert same(f.add(f.elementwise("neg", [x], {}), x), f.full((2, 3), 0.0))
    assert same(f.elementwise("cast", [x], {"dtype": 0.0}), x)
    assert same(f.elementwise("sub", [2.0, x], {}), f.sub(f.constant(2.0), x))
    assert same(f.elementwise("ratio", [x, y], {}), f.elementwise("ratio", [x, y], {}))
    assert same(f.reduce("sum", x, 1), f.add(f.add(*columns(f, x)[:2]), columns(f, x)[2]))


def columns(f: FieldAlgebra, x):
    return [f.cut(x, (slice(None), slice(n, n + 1))) for n in range(x.p.shape[1])]


def test_running_sums_follow_their_maximum() -> None:
    """Σ e^(x − m) · e^(m − n) is Σ e^(x − n)."""
    f = FieldAlgebra(0, copies=4)
    x, m, n = f.random((2, 3)), f.random((2, 1)), f.random((2, 1))
    old, new = (f.reduce("sum", f.exp(f.sub(x, top)), 1) for top in (m, n))
    assert same(f.rescale(old, m, n), new) and f.shift(m) is m
    assert f.contract(x, x, 1) is None
    assert sum(len(rows) for rows in f.exponents) == 6 + 6 + 2


def test_a_zero_denominator_asks_for_other_inputs():
    f = FieldAlgebra(0)
    with pytest.raises(DivisionByZeroError):
        f.div(f.constant(1.0), f.constant(0.0))
    g = mi.new_kernel_graph()
    x = g.new_input((4, 8))
    g.div(x, g.sub(x, x))
    block = BlockGraph(
        (Axis("m", 4, Role.GRID), Axis("n", 8, Role.GRID)),
        (BlockInput("x", (0,), ("m", "n")),),
        (
            Stage(
                None,
                (
                    BlockOp("z", "sub", ("x", "x"), ("m", "n")),
                    BlockOp("o", "div", ("x", "z"), ("m", "n")),
                ),
            ),
        ),
        (BlockOutput("o", ("m", "n"), "float16"),),
    )
    verdict = prove(mutants.fuse(g, block))
    assert isinstance(verdict, Rejected) and "divides by zero" in verdict.reason
