"""Kernels that stream codes of random layouts give the results of float64 on the CPU."""

from __future__ import annotations

import pytest

from mirage_hf.errors import CodegenError
from tests.helpers.streamed_graphs import random_hand

#: Random layouts are compiled so many at a time.
AT_ONCE = 12
SLOW_STARTS = (pytest.param(n * AT_ONCE, marks=pytest.mark.slow) for n in (2, 3, 4))


@pytest.mark.parametrize("first", [0, AT_ONCE, *SLOW_STARTS])
def test_random_layouts_give_the_results_of_float64(first, tmp_path):
    hands, kernels, refused = [], [], 0
    for seed in range(1000 * first, 1000 * first + 100):
        hand = random_hand(seed)
        try:
            kernels.append(hand.kernel(f"kernel_{len(hands)}"))
        except CodegenError:
            refused += 1
            continue
        hands.append(hand)
        if len(hands) == AT_ONCE:
            break
    assert len(hands) == AT_ONCE and refused < AT_ONCE
    source = "\n".join(k.source for k in kernels)
    for n, k in enumerate(kernels):
        source += f"\nstatic_assert(sizeof(kernel_{n}::Shared) == {k.shared});"
    for n, (hand, kernel) in enumerate(zip(hands, kernels, strict=True)):
        want = hand.exact()
        for order in (1, 2 + n):
            got = hand.run(kernel, f"kernel_{n}", order, tmp_path, source)
            assert not isinstance(got, str), f"{hand}: {got}"
            assert hand.error(got, want) <= 1, f"{hand}, order {order}"
