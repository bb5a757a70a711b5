"""Thresholds found by radix search, and sums of exponentials.

Triton's interpreter and plain Python agree.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from mirage_hf import errors
from mirage_hf.decode.kernels import radix_threshold
from tests.helpers import triton_interpreter
from tests.helpers.decode_states import assert_compiles_and_waits


def place(x: float) -> float:
    """Return the sort key of a float32: NaN is above all other values."""
    return math.inf if math.isnan(x) else math.atan(x) if math.isfinite(x) else math.copysign(2, x)


def stays_by_hand(
    order: list[float], weights: list[float], rest: float, keep: int, lowest_index_first: bool
) -> list[bool]:
    places = [place(x) for x in order]
    at = sorted(range(len(order)), key=lambda n: (-places[n], n if lowest_index_first else -n))
    behind = list(itertools.accumulate(weights[n] for n in reversed(at)))[
        ::-1
    ]  # exact, because weights are whole numbers
    stays, first = [False] * len(order), 0
    for rank, n in enumerate(at):
        first = first if places[at[first]] == places[n] else rank  # only scores that tie
        whole = lowest_index_first or math.isnan(behind[first])
        stays[n] = rank < keep or not behind[first if whole else rank] <= rest
    return stays


def random_order(rng: random.Random, vocab: int) -> list[float]:
    """Return random scores of many kinds.

    They are plain, few-valued, all equal, of one sign or tiny, or hold infinities or NaN.
    """
    x = [rng.gauss(0, 3) for _ in range(vocab)]
    match rng.randrange(8):
        case 0:
            x = [float(round(v)) for v in x]
        case 1:
            x = [rng.choice((0.0, -0.0, 3.5))] * vocab
        case 2:
            x = [-abs(v) - 1e-30 for v in x]
        case 3:
            x = [v * 1e-42 for v in x]
        case 4:
            x = [v if rng.random() < 0.4 else -math.inf for v in x]
        case 5:
            x[rng.randrange(vocab)] = math.inf
        case 6:
            x = [float(round(v)) if rng.random() < 0.9 else math.nan for v in x]
    return torch.tensor(x).tolist()  # rounded to float32


def wrong_thresholds(
    shapes: list[tuple[int, int]], seed: int, device: torch.device | str = "cpu"
) -> list[str]:
    """Return what is wrong with the thresholds found for random rows.

    Weights are small whole numbers, so their sums are exact and often equal to the threshold.
    """
    rng, wrong = random.Random(seed), []
    for batch, vocab in shapes:
        orders = [random_order(rng, vocab) for _ in range(batch)]
        by_value = {str(v + 0.0): float(rng.randrange(4)) for row in orders for v in row} | {
            "-inf": 0.0
        }
        weights = [[by_value[str(v + 0.0)] for v in row] for row in orders]
        if rng.random() < 0.3:
            weights[0][rng.randrange(vocab)] = math.nan
        if rng.random() < 0.1:  # as in softmax
            weights[0] = [math.nan] * vocab
        total = sum(by_value[str(v + 0.0)] for v in orders[-1])
        rest, keep = (
            rng.choice((0.0, float(rng.randrange(int(total) + 1)), total)),
            rng.choice((1, 1, 2, vocab // 2 + 1, vocab + 5)),
        )
        x, w = torch.tensor(orders, device=device), torch.tensor(weights, device=device)
        k = torch.tensor([keep], device=device)
        got = radix_threshold.kth_greatest(x, k)[:, 0].tolist()
        want = [
            sorted(row, key=place)[vocab - keep] if keep <= vocab else -math.inf for row in orders
        ]
        case = f"{batch} rows of {vocab}, keep {keep}, rest {rest}, seed {seed}"
        wrong += (
            []
            if str(got).replace("-0.0", "0.0") == str(want).replace("-0.0", "0.0")
            else [f"kth: {case}: {got}, not {want}"]
        )
        both = (
            torch.tensor(orders, device=device),
            torch.tensor(orders, dtype=torch.float64, device=device),
        )
        top, total = radix_threshold.softmax_totals(both[0])
        want = (
            both[1].amax(-1, keepdim=True),
            (both[1] - both[1].amax(-1, keepdim=True)).exp().sum(-1, keepdim=True),
        )
        for name, y, z in (("greatest", top, want[0]), ("total", total, want[1])):
            same = torch.isclose(y.double(), z, rtol=1e-6, atol=0, equal_nan=True)
            # if all are -inf nothing is summed, and beside a NaN the maximum is not defined
            wrong += (
                []
                if (same | want[1].isnan()).all()
                else [f"{name}: {case}: {y.tolist()}, not {z.tolist()}"]
            )
        lost = want[1].isnan() & ~both[1].isneginf().all(-1, keepdim=True)
        wrong += [] if torch.equal(total.isnan(), lost) else [f"NaN: {case}: {total}"]
        for firsts in (False, True):
            scores = torch.arange(float(batch * vocab), device=device).view(batch, vocab)
            out = radix_threshold.mask_scores(
                scores,
                x,
                w,
                torch.tensor([rest], device=device),
                k,
                -1.5,
                lowest_index_first=firsts,
            )
            stays = torch.tensor(
                [
                    stays_by_hand(o, v, rest, keep, firsts)
                    for o, v in zip(orders, weights, strict=True)
                ],
                device=device,
            )
            bad = (out != torch.where(stays, scores, -1.5)).nonzero().tolist()
            wrong += (
                [f"cut, firsts={firsts}: {case}: {len(bad)} wrong, first at {bad[:3]}"]
                if bad
                else []
            )
    return wrong


SHAPES = [(2, 97), (1, 1025)]


INTERPRETED = """
import json
from tests.decode.kernels import test_radix_threshold as t
print(json.dumps(t.wrong_thresholds(t.SHAPES, seed=8)))
"""


def test_kernels_do_as_by_hand():
    assert triton_interpreter.run(INTERPRETED) == []


@pytest.mark.parametrize("flag", [False, True])
def test_compiles_and_waits_before_it_reads(flag):
    pytest.importorskip("triton")
    float32, int64, int32 = torch.float32, torch.int64, torch.int32
    found = [int64, int64, int32, float32, float32]
    assert_compiles_and_waits(
        radix_threshold.radix_round_launch(1, 128256, flag), [float32, float32, float32, *found]
    )
    assert_compiles_and_waits(
        radix_threshold.mask_launch(3, 50257, -math.inf, flag),
        [float32, float32, float32, float32, *found],
    )


def test_totals_compile_and_wait_before_they_read():
    pytest.importorskip("triton")
    float32, int32 = torch.float32, torch.int32
    assert_compiles_and_waits(
        radix_threshold.softmax_totals_launch(2, 1 << 20),
        [float32, float32, float32, int32, float32, float32],
    )


def test_wrong_tensors_are_refused():
    x, k = torch.zeros(2, 9), torch.ones(1, dtype=torch.long)
    for bad in (torch.zeros(9, 2).T, torch.zeros(2, 9).half(), torch.zeros(9), torch.zeros(129, 9)):
        with pytest.raises(errors.InputError, match="ranking is"):
            radix_threshold.kth_greatest(bad, k)
    with pytest.raises(errors.InputError, match="keep is"):
        radix_threshold.kth_greatest(x, k.int())
    with pytest.raises(errors.InputError, match="removable is"):
        radix_threshold.mask_scores(x, x, x, torch.zeros(2), k, 0.0, lowest_index_first=False)
    with pytest.raises(errors.InputError, match="weights is"):
        radix_threshold.mask_scores(
            x, x, torch.zeros(2, 8), torch.zeros(1), k, 0.0, lowest_index_first=False
        )
