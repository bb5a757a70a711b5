"""The tuner: how candidates are ranked and chosen."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mirage_hf import errors, gpus
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.tune import layer, measure, space, tuner
from mirage_hf.tune.candidates import MEASURED
from mirage_hf.tune.neighbours import neighbours
from mirage_hf.tune.ranking import rank_by_estimate
from tests.helpers.schedule_cases import SPACES


def test_rank_gives_every_kernel_a_schedule():
    ranked = [c for c in rank_by_estimate([SPACES["split"]], per_graph=8) if not c.is_library]
    assert (
        ranked
        and all(len(c.schedules) == 2 for c in ranked)
        and len({c.schedules for c in ranked}) == len(ranked)
    )
    first = tuple(
        replace(space.default_schedule(op), trigger_early=op.next_may_launch_early)
        for op in place_kernels(SPACES["split"])
    )
    assert ranked[0].schedules == first and [s.trigger_early for s in first] == [True, False]


def test_rank_without_a_gpu_always_has_the_library_path():
    result = tuner.tune([SPACES["norm linear"]], device="cpu", per_graph=6)
    assert (
        not result.measured and not result.best.is_library and result.best_searched is result.best
    )
    assert [c.is_library for c in result.candidates].count(True) == 1 and len(
        result.candidates
    ) == 7
    assert result.to_dict()["library_us"] == result.library.us
    with pytest.raises(errors.CodegenError, match="no µGraph given"):
        tuner.tune([])


def test_steps_from_a_candidate_are_new_possible_and_permitted():
    for name, mma in (("16 rows", True), ("norm linear", False)):
        ugraph = SPACES[name]
        (op,) = place_kernels(ugraph)
        start = next(
            c
            for c in rank_by_estimate([ugraph], per_graph=8)
            if not c.is_library and c.schedules[0].mma == mma
        )
        only = [s for s in space.schedules(op) if s.mma == mma]
        found = neighbours([start, start], [start], gpus.H200, lambda op, device, only=only: only)
        schedules = [c.schedules[0] for c in found]
        assert (
            len(found) >= 8
            and len(set(schedules)) == len(schedules)
            and start.schedules[0] not in schedules
        )
        assert all(s.mma == mma for s in schedules) and all(plan_kernel(op, s) for s in schedules)
        assert {s.cooperating_blocks for s in schedules} > {
            start.schedules[0].cooperating_blocks
        } and 0 in {s.prefetch_steps for s in schedules}


def test_kernels_are_chosen_by_the_time_of_all_together(monkeypatch):
    """The kernels that are fastest alone are not the fastest together."""
    ugraph = SPACES["norm linear"]
    found = [
        replace(c, status=MEASURED)
        for c in rank_by_estimate([ugraph], per_graph=3)
        if not c.is_library
    ]
    us = {
        (0, 0): 10.0,
        (1, 0): 10.2,
        (0, 1): 10.5,
        (1, 1): 8.0,
        (2, 1): 9.5,
        (1, 2): 7.99,
        (2, 2): 9.9,
    }
    numbers = {triton.generate(c.ugraph, c.schedules).digest: n for n, c in enumerate(found)}
    monkeypatch.setattr(layer.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(measure, "run_of", lambda program, load: numbers[program.digest])
    monkeypatch.setattr(
        measure,
        "Layer",
        lambda programs, device: SimpleNamespace(
            time=lambda runs, replays, to_beat: measure.timing([us.get(tuple(runs), 11.0)], 1)
        ),
    )
    chosen, whole = layer.choose_for_layer([found, found], device="cuda")
    assert chosen == [found[1], found[1]] and whole.us == 8.0  # (1, 2) gains too little to count


def test_two_kernels_are_changed_together_after_changes_of_one():
    """Each change of one kernel helps. Then only one change of two neighbours does."""
    us = {(0, 0, 0): 10.0, (0, 0, 1): 9.0, (0, 1, 1): 8.0, (1, 1, 1): 7.0, (2, 2, 1): 5.0}

    def time(at, to_beat):
        return measure.timing([us.get(tuple(at), 11.0)], 1)

    search = layer._Descent(time, [3, 3, 2])
    search.run()
    assert search.chosen == (2, 2, 1) and search.best.us == 5.0


def test_a_candidate_that_was_slow_is_not_tried_in_the_next_sweep():
    """Number 1 of the second program gains. So all programs are gone through again."""
    us = {(0, 0): 10.0, (0, 1): 9.0, (1, 0): 10.1, (2, 0): 12.0, (1, 1): 9.1, (2, 1): 1.0}
    tried = []

    def time(at, to_beat):
        tried.append(tuple(at))
        return measure.timing([us[tuple(at)]], 1)

    search = layer._Descent(time, [3, 2])
    while search.sweep():
        pass
    assert search.chosen == (0, 1) and (1, 1) in tried and (2, 1) not in tried


def test_a_candidate_that_was_slow_is_tried_again_after_a_pair_was_changed():
    """The third program's other candidate is fast only beside the others' other candidates."""
    us = {(0, 0, 0): 10.0, (1, 1, 0): 8.0, (1, 1, 1): 7.0}

    def time(at, to_beat):
        return measure.timing([us.get(tuple(at), 11.0)], 1)

    search = layer._Descent(time, [2, 2, 2])
    search.run()
    assert search.chosen == (1, 1, 1)


def numbered_sets(count: int, indices: int) -> list[list[torch.Tensor]]:
    """Return sets of inputs with the same floats, and with so many different indices."""
    return [[torch.ones(2), torch.tensor([n % indices])] for n in range(count)]


@pytest.mark.parametrize("indices", [1, 5])
def test_results_of_equal_inputs_repeat(indices):
    def run(inputs):
        return [inputs[0] * inputs[1], inputs[0] / 0]

    assert tuner._repeats(run, numbered_sets(5, indices))


@pytest.mark.parametrize("count, indices", [(5, 1), (5, 5), (40, 1), (40, 3), (40, 40)])
def test_a_race_is_seen_in_any_set_of_inputs(count, indices):
    for at in range(count):
        sets, seen = numbered_sets(count, indices), set()

        def race(inputs, sets=sets, at=at, seen=seen):
            index = int(inputs[1])
            is_wrong = inputs is sets[at] and index in seen
            seen.add(index)
            return [inputs[0] + index + is_wrong]

        assert not tuner._repeats(race, sets)


def test_a_race_is_seen_in_a_cache_that_is_written():
    draws = iter(range(100))
    sets = [[torch.ones(2)] for _ in range(4)]

    def append(inputs):
        inputs[0].fill_(next(draws))
        return [inputs[0]]

    assert not tuner._repeats(append, sets)
