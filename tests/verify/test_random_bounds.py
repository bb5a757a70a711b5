"""Random bounds of ragged axes, and positions of appends: every kind is drawn, none is outside."""

from __future__ import annotations

import numpy as np
import pytest

import mirage_hf as mi
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.verify.random_bounds import draw, draw_all

SEEDS = range(20)


def drawn(
    size: int, rows: int = 1, first: int = 0, seed: int = 0, partial: bool = False
) -> list[tuple[int, int]]:
    lo, hi = draw(np.random.default_rng(seed), size, rows, first, partial)
    assert lo.dtype == hi.dtype == np.int64 and len(lo) == len(hi) == rows
    return list(zip(lo.tolist(), hi.tolist(), strict=True))


def kind_of(lo: int, hi: int, size: int) -> str:
    if lo >= hi:
        return "none"
    ends = (lo > 0, hi < size)
    return {(False, False): "all", (True, False): "last", (False, True): "first"}.get(ends, "some")


@pytest.mark.parametrize("size", [3, 4, 9])
@pytest.mark.parametrize("first", [0, 1, 4, 5, 8])
def test_rows_take_turns_among_five_kinds(size: int, first: int) -> None:
    kinds = ("some", "all", "none", "last", "first")
    for seed in SEEDS:
        for row, (lo, hi) in enumerate(drawn(size, 10, first, seed)):
            assert 0 <= lo <= size and 0 <= hi <= size
            kind = kinds[(row + first) % 5]
            if kind == "some":  # these may end at the axis's end
                assert 0 < lo < hi <= size
            else:
                assert kind_of(lo, hi, size) == kind


def test_elements_that_are_left_out_vary() -> None:
    """Each place is drawn: the first and the last element alone, and all except one."""
    seen = {(row, pair) for s in range(200) for row, pair in enumerate(drawn(4, 5, seed=s))}
    assert {pair for row, pair in seen if row == 0} == {(1, 2), (1, 3), (2, 3), (3, 4)}
    assert {pair for row, pair in seen if row == 1} == {(0, 4)}
    assert {pair for row, pair in seen if row == 3} == {(1, 4), (2, 4), (3, 4)}
    assert {pair for row, pair in seen if row == 4} == {(0, 1), (0, 2), (0, 3)}


def test_empty_rows_have_equal_bounds_or_bounds_the_wrong_way() -> None:
    empty = {drawn(4, first=2, seed=s)[0] for s in range(200)}
    assert all(lo >= hi for lo, hi in empty)
    assert any(lo == hi for lo, hi in empty) and any(lo > hi for lo, hi in empty)


@pytest.mark.parametrize(
    "size, kinds",
    [
        (2, ["first", "all", "none", "last", "first"]),
        (1, ["all", "all", "none", "all", "all"]),
    ],
)
def test_short_axes_have_the_kinds_that_they_can_have(size: int, kinds: list[str]) -> None:
    for seed in SEEDS:
        pairs = drawn(size, 5, seed=seed)
        assert [kind_of(lo, hi, size) for lo, hi in pairs] == kinds, pairs
        assert all(0 <= bound <= size for pair in pairs for bound in pair)


def test_partial_bounds_leave_out_both_ends_in_every_row() -> None:
    """NaN are put there, so each row must have an element that is not one."""
    for size in (3, 4, 9):
        pairs = {p for seed in range(200) for p in drawn(size, 5, 3, seed, partial=True)}
        assert pairs and all(0 < lo < hi < size for lo, hi in pairs)
        if size == 4:
            assert pairs == {(1, 2), (1, 3), (2, 3)}
    assert drawn(3, 4, partial=True) == [(1, 2)] * 4
    assert drawn(2, 4, partial=True) == [(0, 1)] * 4 == drawn(1, 4, partial=True)


# -- programs -------------------------------------------------------------------------------------


def ragged(rows: int = 6, n: int = 5) -> KernelGraph:
    """Return a program of two ragged axes, whose second has the bounds' rows in another shape."""
    g = mi.new_kernel_graph()
    x, y = g.new_input((rows, n)), g.new_input((2, 3, 7))
    lo, hi = g.new_input((rows, 1), "int32"), g.new_input((rows, 1), "int32")
    low, high = g.new_input((2, 3, 1), "int32"), g.new_input((2, 3, 1), "int32")
    g.mark_output(g.within(x, lo, hi, 1), g.within(y, low, high, 2))
    return g


def all_of(g: KernelGraph, first: int = 0, partial: bool = False) -> dict[int, np.ndarray]:
    return draw_all(
        g,
        lambda n: g.inputs[n].dims,
        lambda b: b.x.dims[b.dim],
        np.random.default_rng(0),
        first,
        partial,
    )


def test_every_bound_has_its_own_shape_and_axis() -> None:
    found = all_of(ragged())
    assert {n: x.shape for n, x in found.items()} == {
        2: (6, 1),
        3: (6, 1),
        4: (2, 3, 1),
        5: (2, 3, 1),
    }
    assert found[3].max() == 5 and found[5].max() == 7


def test_the_second_axis_begins_with_the_next_kind() -> None:
    for first in range(5):
        found = all_of(ragged(), first)
        rng = np.random.default_rng(0)
        for (lo, hi), size, number in (((2, 3), 5, 0), ((4, 5), 7, 1)):
            want = draw(rng, size, 6, first + number)
            for n, bound in zip((lo, hi), want, strict=True):
                assert found[n].reshape(-1).tolist() == bound.tolist()


def test_partial_bounds_are_those_of_every_axis() -> None:
    found = all_of(ragged(), partial=True)
    for lo, hi, size in ((2, 3, 5), (4, 5, 7)):
        assert ((found[lo] > 0) & (found[lo] < found[hi]) & (found[hi] < size)).all()


def test_axes_that_share_a_bound_have_one_draw_of_it() -> None:
    g = mi.new_kernel_graph()
    x, y = g.new_input((6, 5)), g.new_input((6, 5))
    lo, hi, other = (g.new_input((6, 1), "int32") for _ in range(3))
    g.mark_output(g.within(x, lo, hi, 1), g.within(y, lo, other, 1))
    found = all_of(g)
    first = draw(np.random.default_rng(0), 5, 6, 0)
    assert found[2].reshape(-1).tolist() == first[0].tolist()
    assert found[3].reshape(-1).tolist() == first[1].tolist()
    assert set(found) == {2, 3, 4}


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("each", [True, False], ids=["a position each", "one position"])
def test_appended_rows_fit_into_their_cache(rows: int, each: bool) -> None:
    g = mi.new_kernel_graph()
    cache, new = g.new_input((16, 8, 6)), g.new_input((16, rows, 6))
    at = g.new_input((16,) if each else (1,), "int64")
    g.mark_output(g.cache_append(cache, new, at))
    seen = set()
    for seed in range(100):
        (found,) = draw_all(
            g, lambda n: g.inputs[n].dims, lambda b: 0, np.random.default_rng(seed), 0
        ).values()
        assert found.shape == at.dims
        seen |= {*found.reshape(-1).tolist()}
    assert seen == set(range(8 - rows + 1))


def test_positions_fit_the_small_sizes() -> None:
    g = mi.new_kernel_graph()
    cache, new, at = g.new_input((4, 8, 6)), g.new_input((4, 3, 6)), g.new_input((1,), "int64")
    g.mark_output(g.cache_append(cache, new, at))
    small = {cache.index: 4, new.index: 2}
    seen = set()
    for seed in range(50):
        rng = np.random.default_rng(seed)
        found = draw_all(g, lambda n: (1,), lambda b: 0, rng, 0, slots=lambda t: small[t.index])
        seen |= {*found[2].tolist()}
    assert seen == {0, 1, 2}


def test_a_bound_that_is_a_position_too_leaves_room_for_the_rows() -> None:
    """A row sees the slots before its position, and its new rows come after them."""
    g = mi.new_kernel_graph()
    cache, new = g.new_input((5, 8, 6)), g.new_input((5, 3, 6))
    zero, at = g.new_input((5, 1, 1), "int32"), g.new_input((5, 1, 1), "int32")
    g.mark_output(g.within(cache, zero, at, 1), g.cache_append(cache, new, at))
    found = all_of(g)
    low, high = draw(np.random.default_rng(0), 8, 5, 0)
    assert high.max() > 5
    assert found[3].reshape(-1).tolist() == np.minimum(high, 5).tolist()
    assert found[2].reshape(-1).tolist() == low.tolist()
