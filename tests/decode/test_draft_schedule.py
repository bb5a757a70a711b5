"""The schedule of drafts against simulated calls, whose drafts are right by a chosen chance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from mirage_hf.decode.draft_schedule import (
    FIRST_PAUSE,
    STEPS_BEFORE_GIVING_UP,
    Acceptance,
    DraftSchedule,
)

TOKENS = 256
CALLS = 60
#: By tokens of a step: its time. A model alone, one with an assistant, and one whose time grows
#: nearly as fast as the tokens.
COSTS = {
    "alone": {1: 1.0, 4: 1.1, 8: 1.2},
    "assisted": {1: 1.0, 4: 1.9, 8: 2.8},
    "steep": {1: 1.0, 4: 3.0, 8: 5.0},
}
#: The most that bad drafts may cost, as a multiple of a call without drafts.
LIMITS = {"alone": 1.05, "assisted": 1.05, "steep": 1.1}


@dataclass(frozen=True)
class Simulated:
    """A simulated call.

    Attributes:
        time: The time of its steps, in steps of one token.
        steps: How many steps took how many tokens, by tokens.
    """

    time: float
    steps: Counter[int]


def simulate(
    schedule: DraftSchedule,
    costs: dict[int, float],
    chance: Callable[[int], float],
    seed: int = 0,
    late: int = 2,
    tokens: int = TOKENS,
) -> Simulated:
    """Return what a call of one row takes.

    Args:
        schedule: What chooses the tokens of a step.
        costs: The time of a step, by its tokens.
        chance: The chance that a draft is right, if so many tokens are known.
        seed: Seed of the drafts.
        late: How many steps run ahead of what the schedule knows.
        tokens: The tokens of the call.
    """
    rng, known, time, steps = random.Random(seed), 1, 0.0, Counter[int]()
    unread: list[tuple[int, tuple[int, int]]] = []
    while known < tokens:
        width, taken = schedule.next(), 0
        while taken < width - 1 and rng.random() < chance(known):
            taken += 1
        known += 1 + taken
        time += costs[width]
        steps[width] += 1
        unread.append((width, (width - 1, taken)))
        if len(unread) > late:
            of_step, row = unread.pop(0)
            schedule.observe(of_step, [row])
    return Simulated(time, steps)


def mean_time(make: Callable[[], DraftSchedule], costs: dict[int, float], **options: Any) -> float:
    calls = [simulate(make(), costs, seed=seed, **options) for seed in range(CALLS)]
    return sum(call.time for call in calls) / CALLS


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
def test_cheap_drafts_cost_little_more_than_the_best_number(
    acceptance: float, resumes: bool, late: int
) -> None:
    costs = {1: 1.0, 4: 1.1}
    options: dict[str, Any] = {"chance": lambda _: acceptance, "late": late}
    constant = [mean_time(lambda n=n: DraftSchedule({n: 1.0}, 7), costs, **options) for n in costs]
    time = mean_time(lambda: DraftSchedule(costs, 7, resumes), costs, **options)
    assert time < 1.03 * min(constant)
    assert time < 1.02 * TOKENS
    if acceptance > 0:
        assert time < 0.85 * TOKENS  # drafts that pay are used


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("acceptance", [0.0, 0.15, 0.3])
def test_bad_drafts_cost_little(acceptance: float, name: str, resumes: bool) -> None:
    costs = COSTS[name]
    time = mean_time(lambda: DraftSchedule(costs, 7, resumes), costs, chance=lambda _: acceptance)
    assert time < LIMITS[name] * (TOKENS - 1)


@pytest.mark.parametrize("name", COSTS)
def test_good_drafts_are_used_at_once(name: str) -> None:
    costs = COSTS[name]
    call = simulate(DraftSchedule(costs, 7), costs, lambda _: 1.0)
    assert call.steps == {8: -(-(TOKENS - 1) // 8)}


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    costs = COSTS["assisted"]
    schedule = DraftSchedule(costs, 7)
    call = simulate(schedule, costs, lambda known: 0.95 * (known > 512), tokens=1024)
    assert call.time < 0.8 * 1024
    # an assistant that was given up is not asked again
    schedule = DraftSchedule(costs, 7, resumes=False)
    call = simulate(schedule, costs, lambda known: 0.95 * (known > 512), tokens=1024)
    assert call.steps[1] > 990 and call.steps[4] + call.steps[8] >= STEPS_BEFORE_GIVING_UP


def test_a_source_that_was_given_up_stays_so() -> None:
    """Steps that were enqueued before may be reported later, with good drafts."""
    schedule = DraftSchedule({1: 1.0, 4: 1.8}, 3, resumes=False)
    while schedule.next() > 1:
        schedule.observe(4, [(3, 0)])
    for _ in range(20):
        schedule.observe(4, [(3, 3)])
        assert schedule.next() == 1


def test_a_step_gives_no_more_than_there_are_drafts() -> None:
    costs = {1: 1.0, 4: 1.1, 8: 1.2}
    for most, wanted in ((7, 8), (3, 4), (1, 4)):
        schedule = DraftSchedule(costs, most)
        for _ in range(20):
            width = schedule.next()
            schedule.observe(width, [(min(most, width - 1),) * 2])
        assert schedule.next() == wanted


def test_pauses_between_probes_grow() -> None:
    schedule = DraftSchedule({1: 1.0, 4: 1.8}, 3)
    widths = []
    for _ in range(400):
        widths.append(schedule.next())
        schedule.observe(widths[-1], [(widths[-1] - 1, 0)])
    probes = [n for n, width in enumerate(widths) if width > 1]
    begin = widths.index(1)
    pauses = [b - a - 1 for a, b in pairwise(probes) if a >= begin - 1]
    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert max(pauses) <= 80  # a probe then costs one percent


def test_texts_without_drafts_are_not_verified() -> None:
    """Prompt lookup finds nothing. Then no draft is wrong, but steps are longer."""
    schedule = DraftSchedule({1: 1.0, 4: 1.1}, 3)
    for _ in range(40):
        schedule.observe(schedule.next(), [(0, 0), (0, 0)])
    assert schedule.next() == 1


def test_rows_count_together() -> None:
    schedule = DraftSchedule({1: 1.0, 8: 2.0}, 7)
    for _ in range(20):
        schedule.observe(schedule.next(), [(7, 7), (7, 0), (7, 7)])
    assert schedule.next() == 8
    schedule.observe(8, [])  # a step that found no row alive
    assert schedule.next() == 8


def test_one_number_is_constant() -> None:
    schedule = DraftSchedule({8: 1.3}, 7)
    call = simulate(schedule, {8: 1.3}, lambda _: 0.0)
    assert call.steps == {8: TOKENS - 1}


def test_acceptance_that_goes_on_is_used_by_the_next_call() -> None:
    costs, acceptance = COSTS["assisted"], Acceptance()
    first = simulate(DraftSchedule(costs, 7, False, acceptance), costs, lambda _: 0.0)
    acceptance.forget_half()
    second = simulate(DraftSchedule(costs, 7, False, acceptance), costs, lambda _: 0.0)
    assert second.time < first.time
    for _ in range(2000):  # calls without drafts
        acceptance.forget_half()
    assert acceptance == Acceptance()


def test_the_estimate_needs_no_number_in_long_calls() -> None:
    acceptance = Acceptance()
    for _ in range(20_000):
        acceptance.add([(0, 0)], 0.5)
    assert acceptance.tokens_after(7) == pytest.approx(1.0)
    for _ in range(20_000):
        acceptance.add([(7, 7)], 0.5)
    assert acceptance.tokens_after(7) == pytest.approx(8.0)
