"""The error bound of a trial, term by term, and how exponents depend on each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mirage_hf.errors import Rejected
from mirage_hf.verify import error_bound
from mirage_hf.verify.degrees import Degree, Degrees, LargestDegree
from mirage_hf.verify.error_bound import Exponents, TrialBound, independent, trial_bound
from mirage_hf.verify.field import P, Q

NO_EXPONENTS = Exponents()


def power(d: Degrees, n: int, shape: tuple[int, ...] = ()) -> Degree:
    """Return values of degree `n`, 2 to 4."""
    return d.elementwise("pow", [d.variable(shape), float(n)], {})


def near(value: float) -> Any:
    """Compare to nearly the last bit, so that no term is lost beside a larger one."""
    return pytest.approx(value, rel=1e-12, abs=0)


# -- the bound of a trial -------------------------------------------------------------------------


def test_polynomials_coincide_by_their_degree() -> None:
    d = Degrees()
    for want, got in ((3, 2), (2, 3)):
        bound = trial_bound([power(d, want)], [power(d, got)], d, NO_EXPONENTS)
        assert (bound.accepts_wrongly, bound.exponents_wrong) == (near(3 / P), 0.0)


def test_the_worst_output_counts() -> None:
    d = Degrees()
    outputs = [power(d, 2, (3,)), power(d, 4, (2,)), power(d, 3)]
    bound = trial_bound(outputs, [d.variable(())] * 3, d, NO_EXPONENTS)
    assert bound.accepts_wrongly == near(4 / P)


def test_quotients_are_compared_over_both_denominators() -> None:
    """x/y^4 = x²/z³ is x·z³ = x²·y^4, although both sides may look alike."""
    d = Degrees()
    want = d.elementwise("div", [d.variable(()), power(d, 4)], {})
    got = d.elementwise("div", [power(d, 2), power(d, 3)], {})
    for a, b in ((want, got), (got, want)):
        assert trial_bound([a], [b], d, NO_EXPONENTS).accepts_wrongly == near(6 / P)
    assert trial_bound([want], [want], d, NO_EXPONENTS).accepts_wrongly == near(5 / P)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_two_opaque_values_may_meet(count: int) -> None:
    """Their arguments x²/y are equal if x²·w = z²·y, of degree 3; or their values are."""
    d = Degrees()
    argument = d.elementwise("div", [power(d, 2, (count,)), d.variable((count,))], {})
    value = d.elementwise("silu", [argument], {})
    pairs = count * (count - 1) / 2
    bound = trial_bound([value], [value], d, NO_EXPONENTS)
    assert bound.accepts_wrongly == near(1 / P + pairs * (1 / P + 3 / P))


def test_every_tested_divisor_may_be_zero_by_chance() -> None:
    """A ratio selects twice by its divisor."""
    d = Degrees()
    value = d.elementwise("ratio", [d.variable((5,)), power(d, 3, (5,))], {})
    bound = trial_bound([value], [value], d, NO_EXPONENTS)
    one = trial_bound([value], [value], Degrees(), NO_EXPONENTS).accepts_wrongly
    assert bound.accepts_wrongly == near(one + 2 * 5 * 3 / P)


def exponential(d: Degrees) -> Degree:
    """Return e^(x²/y): the exponent's degree is 2 over 1."""
    exponent = d.elementwise("div", [power(d, 2), d.variable(())], {})
    return d.elementwise("exp", [exponent], {})


@pytest.mark.parametrize("rank, copies", [(2, 2), (2, 3), (0, 1), (3, 4)])
def test_exponentials_count_by_the_relations_between_exponents(rank: int, copies: int) -> None:
    d = Degrees()
    value = exponential(d)
    bound = trial_bound([value], [value], d, Exponents(rank, 7, copies))
    at_one_point = (2 + (rank + 1) * 1) / Q
    spare = copies - rank
    assert bound.accepts_wrongly == near(
        (rank + 1) * 1 * 7 / Q + math.comb(copies, spare + 1) * at_one_point ** (spare + 1)
    )
    wrong = math.comb(copies, spare) * at_one_point**spare
    assert bound.exponents_wrong == near(min(wrong, 1.0))


def test_opaque_arguments_and_tested_divisors_count_their_exponentials() -> None:
    d = Degrees()
    e = exponential(d)
    argument = d.elementwise("div", [e, d.elementwise("mul", [e, e], {})], {})
    value = d.elementwise("tanh", [argument], {})
    bound = trial_bound([value], [value], d, Exponents(1, 7, 12))
    assert bound.accepts_wrongly == near(1 / P)  # one application meets no other
    other = d.elementwise("tanh", [d.variable(())], {})
    bound = trial_bound([value], [other], d, Exponents(1, 7, 12))
    three_exponentials = 1 / P + 2 * 3 * 7 / Q
    assert bound.accepts_wrongly == near(1 / P + 1 / P + three_exponentials)
    d.elementwise("ratio", [e, e], {})
    bound = trial_bound([value], [other], d, Exponents(1, 7, 12))
    assert bound.accepts_wrongly == near(1 / P + 1 / P + three_exponentials + 2 * (2 * 7 / Q))


def test_a_bound_is_a_probability() -> None:
    d = Degrees()
    value = exponential(d)
    bound = trial_bound([value], [value], d, Exponents(5, Q, 5))
    assert bound == TrialBound(1.0, 1.0)
    d.exps = 0
    assert trial_bound([value], [value], d, Exponents(5, Q, 5)) == TrialBound(1.0, 0.0)


def test_trials_multiply_and_the_exponents_are_wrong_once() -> None:
    bound = TrialBound(1e-3, 1e-20)
    assert bound.after(1) == near(1e-3) and bound.after(4) == near(1e-12 + 1e-20)
    assert TrialBound(0.5, 0.25).after(3) == 0.375


def test_the_larger_of_two_bounds_is_so_in_each_part() -> None:
    a, b = TrialBound(0.5, 0.125), TrialBound(0.25, 0.75)
    assert a.or_larger(b) == b.or_larger(a) == TrialBound(0.5, 0.75)


# -- exponents ------------------------------------------------------------------------------------

COPIES = 9


def exponents(*first: int) -> np.ndarray:
    """Return independent exponents, which begin with these numbers at the first copy."""
    rest = np.random.default_rng(0).integers(Q, size=(len(first), COPIES - 1))
    return np.column_stack([np.array(first), rest])


def over(x: np.ndarray, divisor: int) -> np.ndarray:
    return x * pow(divisor, -1, Q) % Q


def test_no_exponents_have_no_relations() -> None:
    assert independent([], 3) == Exponents(rank=0, weight=0, copies=3)
    assert independent([np.zeros((2, COPIES), dtype=np.int64)], COPIES) == Exponents(0, 0, COPIES)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_independent_exponents_are_their_own_combinations(count: int) -> None:
    rows = exponents(*range(1, count + 1))
    assert independent([rows[:1], rows], COPIES) == Exponents(count, 1, COPIES)


def test_a_rank_needs_spare_copies() -> None:
    """Exponents at too few points look independent, or dependent by chance."""
    assert isinstance(independent([exponents(1, 2, 3, 4, 5)], COPIES), Exponents)
    verdict = independent([exponents(1, 2, 3, 4, 5, 6)], COPIES)
    assert isinstance(verdict, Rejected) and "6 or more" in verdict.reason
    assert f"{COPIES} points" in verdict.reason


def test_the_weight_is_that_of_the_heaviest_combination() -> None:
    """b − 2c and −3c, of b and c: the first has weight 3, as has the second."""
    b, c = exponents(1, 2)
    assert independent([np.array([b, c, (b - 2 * c) % Q])], COPIES) == Exponents(2, 3, COPIES)
    rows = np.array([b, c, (b - 2 * c) % Q, -4 * c % Q])
    assert independent([rows], COPIES) == Exponents(2, 4, COPIES)


def test_a_basis_is_fine_enough_for_every_exponent() -> None:
    """b, b/4 and b/6 are multiples of b/12."""
    (b,) = exponents(1)
    found = independent([np.array([b, over(b, 4), over(b, 6)])], COPIES)
    assert found == Exponents(1, 12, COPIES)
    b, c = exponents(1, 2)  # b, c and (b + 3c)/2 of b/2 and c/2
    half = over((b + 3 * c) % Q, 2)
    assert independent([np.array([b, c, half])], COPIES) == Exponents(2, 4, COPIES)


@pytest.mark.parametrize("factor, fits", [(8191, True), (8192, False)])
def test_multiples_must_be_small(factor: int, fits: bool) -> None:
    (b,) = exponents(1)
    for rows in ([b, b * factor % Q], [b, over(b, factor)], [b, -b * factor % Q]):
        found = independent([np.array(rows)], COPIES)
        if fits:
            assert found == Exponents(1, factor, COPIES)
        else:
            assert isinstance(found, Rejected) and "no small multiples" in found.reason


def test_weights_must_be_counted_exactly() -> None:
    """Four primes as denominators have a common one that is too large."""
    (b,) = exponents(1)
    primes = (8191, 8179, 8171, 8167)
    rows = [b, *(over(b, p) for p in primes)]
    assert independent([np.array(rows[:4])], COPIES) == Exponents(1, 8191 * 8179 * 8171, COPIES)
    found = independent([np.array(rows)], COPIES)
    assert isinstance(found, Rejected) and "no small multiples" in found.reason


def test_row_reduction_finds_the_rank_and_the_pivots() -> None:
    rng = np.random.default_rng(1)
    basis, combined = rng.integers(Q, size=(3, 6)), rng.integers(Q, size=(5, 3))
    basis[0, 0] = 0
    combined[0] = 1, 0, 0  # so the first pivot lies below
    matrix = sum(combined[:, k : k + 1] * basis[k] % Q for k in range(3)) % Q
    rank, reduced = error_bound._row_reduced(matrix.copy())
    assert rank == 3
    for row in range(rank):
        pivot = int(np.nonzero(reduced[row])[0][0])
        assert reduced[row, pivot] == 1 and np.count_nonzero(reduced[:, pivot]) == 1
    assert not reduced[rank:].any()


def test_a_pivot_may_be_the_only_number_of_its_column() -> None:
    rank, reduced = error_bound._row_reduced(np.array([[0, 5, 10], [3, 0, 6]]))
    assert rank == 2 and reduced.tolist() == [[1, 0, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    "numerator, denominator",
    [(0, 1), (1, 1), (-1, 1), (8191, 1), (-8191, 1), (1, 8191), (-5, 7), (8191, 8190)],
)
def test_small_fractions_are_recovered(numerator: int, denominator: int) -> None:
    residue = numerator * pow(denominator, -1, Q) % Q
    found = error_bound._rational(np.array([residue, 1, residue]))
    assert [x.tolist() for x in found] == [[numerator, 1, numerator], [denominator, 1, denominator]]


def test_other_residues_are_no_small_fractions() -> None:
    residues = np.array([8192, 123456789, pow(8192, -1, Q), Q // 2])
    _, denominators = error_bound._rational(residues)
    assert denominators.tolist()[0] == 0 and denominators.tolist()[2] == 0


# -- degrees --------------------------------------------------------------------------------------


def test_the_largest_of_each_kind() -> None:
    a, b = LargestDegree(1, 5, 2, 6), LargestDegree(3, 4, 1, 7)
    assert a.or_larger(b) == b.or_larger(a) == LargestDegree(3, 5, 2, 7)
    d = Degrees()
    quotient = d.elementwise("div", [power(d, 3), exponential(d)], {})
    values = d.join([d.arrange(quotient, (), (1,)), d.arrange(exponential(d), (), (1,))], 0)
    assert values.largest() == LargestDegree(3, 1, 0, 1)


def test_exponents_are_counted_with_their_largest_degree() -> None:
    d = Degrees()
    d.elementwise("exp", [power(d, 3, (2, 5))], {})
    exponential(d)
    assert d.exps == 11 and d.exponent == LargestDegree(3, 0, 1, 0)
    assert d.applications == 0


def test_an_exponential_of_an_exponential_is_opaque() -> None:
    d = Degrees()
    e = exponential(d)
    for argument in (e, d.elementwise("div", [d.variable(()), e], {})):
        before = d.applications
        again = d.elementwise("exp", [argument], {})
        assert d.exps == 1 and d.applications == before + 1
        assert again.largest() == LargestDegree(1, 0, 0, 0)


def test_the_denominators_of_a_power_are_those_of_equal_powers() -> None:
    d = Degrees()
    quotient = d.elementwise("div", [d.variable((1,)), d.variable((1,))], {})
    cube = d.elementwise("pow", [quotient, 3.0], {})
    product = d.elementwise("mul", [quotient, d.elementwise("square", [quotient], {})], {})
    assert cube.largest() == product.largest() == LargestDegree(3, 0, 3, 0)
    assert d.add(cube, product).largest() == LargestDegree(3, 0, 3, 0)
    other = d.elementwise("div", [d.variable((1,)), d.variable((1,))], {})
    assert d.add(cube, other).largest() == LargestDegree(4, 0, 4, 0)


def test_a_polynomial_factor_keeps_the_denominator() -> None:
    d = Degrees()
    quotient = d.elementwise("div", [d.variable((1,)), d.variable((1,))], {})
    product = d.elementwise("mul", [quotient, d.variable((1,))], {})
    assert d.add(product, quotient).largest() == LargestDegree(2, 0, 1, 0)
    again = d.elementwise("div", [product, d.empty((1,))], {})  # by a number
    assert d.add(again, quotient).largest() == LargestDegree(2, 0, 1, 0)


def test_sums_in_another_order_have_one_denominator() -> None:
    d = Degrees()
    a, b = (d.elementwise("div", [d.variable((1,)), d.variable((1,))], {}) for _ in range(2))
    ab, ba = d.add(a, b), d.add(b, a)
    assert ab.largest() == LargestDegree(2, 0, 2, 0) == d.add(ab, ba).largest()
    product = d.elementwise("mul", [b, a], {})
    assert d.add(ab, product).largest() == LargestDegree(2, 0, 2, 0)


def test_a_condition_is_data_if_a_variable_is_above_or_below_the_line() -> None:
    d = Degrees()
    x, one = d.variable((2,)), d.empty((2,))
    for count, condition in enumerate([x, d.elementwise("div", [one, x], {})], 1):
        d.elementwise("select", [condition, x, x], {})
        assert d.applications == 2 * count
    d.elementwise("select", [one, x, x], {})
    assert d.applications == 4
