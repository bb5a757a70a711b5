"""The trials of a proof: how many, at which sizes, in which pieces, and which bound is enough."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mirage_hf as mi
from mirage_hf.errors import Rejected
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.verify import evaluate, field_proof
from mirage_hf.verify.error_bound import SPARE, TrialBound
from mirage_hf.verify.field import DivisionByZeroError, Element, FieldAlgebra
from mirage_hf.verify.field_proof import Pair, ProofTrial, prove
from mirage_hf.verify.shrink import shrink
from mirage_hf.verify.size_classes import SizeClasses
from mirage_hf.verify.verdict import Accepted
from tests.helpers import multi_kernel_ugraphs, ugraphs

FIRST, LARGER = field_proof._SIZES[0], field_proof._LARGER


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every trial that is begun: the seed, its number, the draw, and its copies."""
    seen: list[tuple[int, ...]] = []

    class Seen(FieldAlgebra):
        def __init__(self, seed: tuple[int, ...], copies: int = 1):
            super().__init__(seed, copies)
            seen.append((*seed, copies))

    monkeypatch.setattr(field_proof, "FieldAlgebra", Seen)
    return seen


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every list of sizes that a proof tries, with the size of splits."""
    seen: list[tuple[Any, ...]] = []

    def recorded(classes: SizeClasses, sizes: Any, split_size: int) -> Any:
        seen.append((sizes, split_size))
        return shrink(classes, sizes, split_size)

    monkeypatch.setattr(field_proof, "shrink", recorded)
    return seen


def bounded_by(monkeypatch: pytest.MonkeyPatch, *chances: float) -> None:
    """Let each trial accept wrongly with these probabilities, the last for all others."""
    left = list(chances)

    def bound(self: Pair, exponents: Any) -> TrialBound:
        return TrialBound(left.pop(0) if len(left) > 1 else left[0], 0.0)

    monkeypatch.setattr(Pair, "bound", bound)


def two_ways(
    build: Callable[[KernelGraph, DTensor, DTensor, Any], DTensor], ragged: bool = True
) -> UGraph:
    """Return a program of two inputs, and kernels that add the second one from the other side."""
    graphs = []
    for is_program in (True, False):
        g = mi.new_kernel_graph()
        x, y = g.new_input((4, 6)), g.new_input((4, 6))
        bounds = [g.new_input((4, 1), "int32") for _ in range(2)] if ragged else []
        z = build(g, x, y, bounds)
        g.mark_output(g.add(z, y) if is_program else g.add(y, z))
        graphs.append(g)
    return UGraph(*graphs)


def ragged_sum() -> UGraph:
    return two_ways(lambda g, x, y, bounds: g.within(x, *bounds, 1))


def ragged_exps() -> UGraph:
    return two_ways(lambda g, x, y, bounds: g.within(g.exp(x), *bounds, 1))


# -- how many -------------------------------------------------------------------------------------


def test_each_trial_has_random_numbers_of_its_own(trials: list[tuple[int, ...]]) -> None:
    """The last trial, on larger sizes, comes beside those that are asked for."""
    assert prove(ugraphs.rms_norm_linear()).detail == "4 trials"
    assert trials == [(0, number, 0, 1) for number in range(5)]
    trials.clear()
    assert prove(ugraphs.rms_norm_linear(), trials=6, seed=9).detail == "6 trials"
    assert trials == [(9, number, 0, 1) for number in range(7)]


@pytest.mark.parametrize(
    "seed, drawn_from",
    [(-1, 2**64 - 1), (1, 1), (129, 129), (2**64 - 1, 2**64 - 1), (2**64 + 5, 5)],
)
def test_any_whole_number_is_a_seed(
    seed: int, drawn_from: int, trials: list[tuple[int, ...]]
) -> None:
    assert isinstance(prove(ugraphs.rms_norm_linear(), seed=seed), Accepted)
    assert {t[0] for t in trials} == {drawn_from}


@pytest.mark.parametrize("asked, done", [(1, 8), (8, 8), (10, 10)])
def test_bounds_are_drawn_eight_times_at_least(
    asked: int, done: int, trials: list[tuple[int, ...]]
) -> None:
    verdict = prove(ragged_sum(), trials=asked)
    assert isinstance(verdict, Accepted) and verdict.detail == f"{done} trials"
    assert [t[1] for t in trials] == list(range(done + 1))


@pytest.mark.parametrize(
    "chance, target, done",
    [
        (0.5, 1e-9, 30),
        (0.5, 0.5**10, 10),
        (0.5, 0.5**4, 4),
        (0.6, 1e-9, 32),
        (1e-3, 1e-9, 4),
        (0.999, 1.0, 4),
        (0.999, 0.97, 31),
    ],
)
def test_trials_are_added_until_the_bound_is_small(
    chance: float, target: float, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded_by(monkeypatch, chance)
    verdict = prove(ugraphs.rms_norm_linear(), target=target)
    assert verdict == Accepted(chance**done, f"{done} trials")


def test_who_asks_for_many_trials_gets_them_and_their_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounded_by(monkeypatch, 0.7)
    u = ugraphs.rms_norm_linear()
    assert prove(u, trials=50) == Accepted(0.7**50, "50 trials")
    verdict = prove(u)
    assert isinstance(verdict, Rejected)
    assert "after 32 trials its error bound is 1.1e-05, more than 1e-06" in verdict.reason


def test_a_bound_above_the_worst_is_enough_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounded_by(monkeypatch, 0.9)
    u = ugraphs.rms_norm_linear()
    assert prove(u, target=0.1) == Accepted(0.9**22, "22 trials")
    assert isinstance(prove(u, target=0.01), Rejected)
    assert prove(u, target=1.0) == Accepted(0.9**4, "4 trials")


# -- zero denominators ----------------------------------------------------------------------------


@pytest.mark.parametrize("failures, is_proven", [(1, True), (15, True), (16, False)])
def test_other_numbers_are_drawn_if_a_denominator_is_zero(
    failures: int, is_proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, int]] = []

    class Failing(FieldAlgebra):
        def __init__(self, seed: tuple[int, ...], copies: int = 1):
            super().__init__(seed, copies)
            self.number, self.draw = seed[1:]
            drawn.append((self.number, self.draw))

        def elementwise(self, *args: Any) -> Any:
            if self.number == 1 and self.draw < failures:
                raise DivisionByZeroError
            return super().elementwise(*args)

    monkeypatch.setattr(field_proof, "FieldAlgebra", Failing)
    verdict = prove(ugraphs.rms_norm_linear())
    if is_proven:
        draws = [(1, draw) for draw in range(failures + 1)]
        assert drawn == [(0, 0), *draws, (2, 0), (3, 0), (4, 0)]
        assert isinstance(verdict, Accepted)
    else:
        assert isinstance(verdict, Rejected) and "16 draws in a row" in verdict.reason


# -- sizes and pieces -----------------------------------------------------------------------------


def test_small_sizes_come_first_and_larger_ones_last(sizes: list[tuple[Any, ...]]) -> None:
    assert isinstance(prove(multi_kernel_ugraphs.split_k()), Accepted)
    assert sizes == [(FIRST, 2), (LARGER, 3)]


@pytest.mark.parametrize("at", [0, 1])
def test_sizes_that_cannot_be_are_a_rejection(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def recorded(*args: Any) -> Any:
        tried.append(args)
        return Rejected("it cannot be shrunk") if len(tried) > at else shrink(*args)

    monkeypatch.setattr(field_proof, "shrink", recorded)
    assert prove(ugraphs.rms_norm_linear()) == Rejected("it cannot be shrunk")
    assert len(tried) == at + 1


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_axes_are_taken_in_pieces_and_the_grid_once_in_one(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On larger sizes loops have one piece more, and the grid is one piece, which is quicker."""
    cuts: list[dict[str, int]] = []
    run = evaluate.run_block_graph

    def recorded(block: Any, args: Any, algebra: Any, pieces: Any) -> Any:
        if isinstance(algebra, FieldAlgebra):
            cuts.append(pieces)
        return run(block, args, algebra, pieces)

    monkeypatch.setattr(evaluate, "run_block_graph", recorded)
    assert isinstance(prove(ugraphs.rms_norm_linear(), pieces=pieces), Accepted)
    usual, last = dict.fromkeys("mnk", pieces), {"m": 1, "n": 1, "k": pieces + 1}
    assert cuts == [usual] * 4 + [last]


# -- exponentials ---------------------------------------------------------------------------------


def test_copies_are_those_that_the_rank_asks_for(trials: list[tuple[int, ...]]) -> None:
    """The first trial has a copy for every exponential, because the rank is not known yet."""
    assert isinstance(prove(ugraphs.softmax_rows()), Accepted)
    exps, rank = 48, 3 * 4  # each element of the small input is an exponent, four times
    assert [t[3] for t in trials] == [exps + SPARE, *[rank + SPARE] * 3, 1]


@pytest.mark.parametrize("most, first", [(13, 13), (12, 12), (1000, 48)])
def test_the_first_trial_has_a_limited_number_of_copies(
    most: int, first: int, trials: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field_proof, "_MAX_COPIES", most)
    assert isinstance(prove(ugraphs.softmax_rows()), Accepted)
    assert trials[0][3] == first + SPARE


def test_shorter_axes_are_tried_if_copies_are_too_few(
    sizes: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field_proof, "_MAX_COPIES", 11)
    verdict = prove(ugraphs.softmax_rows())
    assert isinstance(verdict, Accepted) and 0 < verdict.bound < 1e-18
    assert sizes == [(FIRST, 2), (field_proof._SIZES[1], 2), (LARGER, 3)]


def test_shorter_axes_are_tried_before_many_exponentials(
    sizes: list[tuple[Any, ...]], trials: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    u = ugraphs.softmax_rows()
    monkeypatch.setattr(field_proof, "_MANY_EXPS", 48)  # as many as there are
    assert isinstance(prove(u), Accepted) and [s for s, _ in sizes] == [FIRST, LARGER]
    for most, tried in ((47, field_proof._SIZES[:2]), (0, field_proof._SIZES)):
        sizes.clear(), trials.clear()
        monkeypatch.setattr(field_proof, "_MANY_EXPS", most)
        verdict = prove(u)
        assert isinstance(verdict, Accepted) and 0 < verdict.bound < 1e-18
        assert [s for s, _ in sizes] == [*tried, LARGER]
        assert [t[1] for t in trials] == list(range(5))


def test_exponents_that_stay_unclear_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_proof, "independent", lambda *_: Rejected("they are unclear"))
    u = ugraphs.softmax_rows()
    assert prove(u) == Rejected("the proof would say nothing: they are unclear")
    assert prove(u, target=1.0) == Accepted(1.0, "4 trials")


# -- exponentials and bounds ----------------------------------------------------------------------


def test_each_draw_of_bounds_has_relations_of_its_own(
    trials: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So all trials have the copies of the first, and the worst bound counts."""
    bounded_by(monkeypatch, 0.05, 0.05, 0.15, 0.05)
    assert prove(ragged_exps()) == Accepted(0.15**8, "8 trials")
    assert len({t[3] for t in trials[:-1]}) == 1 and trials[-1][3] == 1
    bounded_by(monkeypatch, 0.05, 0.05, 0.3, 0.05)
    verdict = prove(ragged_exps())
    assert isinstance(verdict, Rejected)
    assert "after 8 trials its error bound is 6.6e-05" in verdict.reason
    bounded_by(monkeypatch, 0.05, 0.05, 0.3, 0.05)
    assert isinstance(prove(ragged_exps(), target=1.0), Accepted)


def test_without_exponentials_draws_of_bounds_have_one_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounded_by(monkeypatch, 0.05, 0.9)
    assert prove(ragged_sum()) == Accepted(0.05**8, "8 trials")


def test_unclear_relations_of_a_later_draw_prove_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    independent = field_proof.independent

    def unclear_later(rows: Any, copies: int) -> Any:
        asked.append(copies)
        return independent(rows, copies) if len(asked) < 4 else Rejected("they are unclear")

    monkeypatch.setattr(field_proof, "independent", unclear_later)
    u = ragged_exps()
    assert prove(u) == Rejected("the proof would say nothing: they are unclear")
    assert len(asked) == 4
    asked.clear()
    assert isinstance(prove(u, target=1.0), Accepted) and len(asked) == 1
    asked.clear()
    assert isinstance(prove(ragged_sum()), Accepted) and len(asked) == 1


def test_exponentials_are_seen_in_programs_and_in_kernels() -> None:
    def has(program: Any, kernels: Any) -> bool:
        return field_proof._has_exps(SimpleNamespace(program=program, kernels=kernels))

    without, softmax = ugraphs.rms_norm_linear(), ugraphs.softmax_rows()
    exp = mi.new_kernel_graph()
    exp.exp(exp.new_input((3, 4)))
    assert not has(without.program, without.kernels)
    assert has(exp, without.kernels) and has(without.program, softmax.kernels)
    shifted = SimpleNamespace(accumulators=(SimpleNamespace(shift="m"),))
    block = SimpleNamespace(stages=(shifted,), ops=lambda: ())
    rescaled = SimpleNamespace(block=block, name="customized")
    assert has(without.program, SimpleNamespace(ops=(rescaled,)))


# -- one trial ------------------------------------------------------------------------------------


def outputs(*arrays: Any) -> list[Element]:
    return [Element(np.array(a), None) for a in arrays]


def trial(want: list[Element], got: list[Element]) -> ProofTrial:
    return ProofTrial(want, got, FieldAlgebra(0))


def test_equal_outputs_agree() -> None:
    assert trial(outputs([1, 2], [3]), outputs([1, 2], [3])).disagreement(0) is None


def test_a_disagreement_says_where() -> None:
    want = outputs([1, 2], [[3, 4, 5], [6, 7, 8]])
    got = outputs([1, 2], [[3, 0, 5], [6, 7, 0]])
    reason = "output 1 differs from the program in 2 of 6 elements of trial 7"
    assert trial(want, got).disagreement(7) == Rejected(reason)


def test_outputs_of_another_shape_disagree_even_if_all_their_elements_are_equal() -> None:
    verdict = trial(outputs([[1], [1]]), outputs([1])).disagreement(0)
    assert isinstance(verdict, Rejected)
    assert "output 0 has shape (1,), the program's has (2, 1)" in verdict.reason


def test_positions_of_appends_fit_the_small_caches() -> None:
    g = mi.new_kernel_graph()
    cache, rows = g.new_input((4, 16, 6)), g.new_input((4, 2, 6))
    g.mark_output(g.cache_append(cache, rows, g.new_input((1,), "int64")))
    pair = Pair(*shrink(SizeClasses(g, g), FIRST, 2), 2)  # type: ignore[misc]
    dims = pair.inputs()
    slots, added = dims[0][1], dims[1][1]
    assert slots > added and dims[2] == (1,)
    seen = {int(pair.bounds(np.random.default_rng(seed), 0)[2][0]) for seed in range(50)}
    assert seen == set(range(slots - added + 1))


def test_bounds_are_drawn_for_the_small_axis() -> None:
    u = ragged_sum()
    pair = Pair(*shrink(SizeClasses(u.program, u.kernels), FIRST, 2), 2)  # type: ignore[misc]
    rows, size = pair.inputs()[0]
    drawn = [pair.bounds(np.random.default_rng(0), kind) for kind in range(5)]
    assert all(set(d) == {2, 3} and d[2].shape == (rows, 1) for d in drawn)
    assert drawn[1][2][0] == 0 and drawn[1][3][0] == size  # all elements
    assert max(int(d[3].max()) for d in drawn) == size
