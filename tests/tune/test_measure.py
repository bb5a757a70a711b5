"""Measuring kernels: replays, chains, and results that differ from call to call."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.errors import CodegenError, Rejected
from mirage_hf.graph.kernel import new_kernel_graph
from mirage_hf.tune import measure, tuner
from mirage_hf.tune.candidates import MEASURED, REJECTED, TOO_SLOW
from mirage_hf.tune.ranking import rank_by_estimate
from mirage_hf.verify.verdict import Accepted
from tests.helpers.schedule_cases import SPACES


def bench_with(check, checks_slow, run=None, checks_last=False):
    """Return the means to try candidates, with a numeric check of the test's own."""
    return tuner._Bench(
        sm=90,
        check=check,
        sets=[[], []],
        chain=None,
        replays=1,
        checks_slow=checks_slow,
        checks_last=checks_last,
        progress=lambda done, total, what: None,
        load=lambda source, digest: SimpleNamespace(run=run),
    )


def measured(bench, *args):
    """Return what a bench measures, without a wait for the compiler."""
    steps = bench.measure(*args)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_a_kernel_whose_results_differ_from_call_to_call_is_rejected(monkeypatch):
    """The single check before timing missed the race."""
    ugraph = SPACES["norm linear"]
    candidate = next(c for c in rank_by_estimate([ugraph], per_graph=1) if not c.is_library)
    calls = [0]

    def steady(inputs):
        return [torch.full((2, 3), float("nan"), dtype=torch.float16)]

    def racy(inputs):
        calls[0] += 1
        return [torch.full((2, 3), float(calls[0] == 7), dtype=torch.float16)]

    monkeypatch.setattr(
        measure, "time_run", lambda run, sets, replays, to_beat: measure.timing([1.0], 1)
    )
    for run, status in ((steady, MEASURED), (racy, REJECTED)):
        bench = bench_with(SimpleNamespace(judge=lambda run: Accepted()), True, run)
        program = SimpleNamespace(source="", digest="")
        tried = bench.try_one(candidate, program, None, math.inf)
        assert tried.status == status and ("race" in tried.reason) == (status == REJECTED)


@pytest.mark.parametrize("checks_slow", [True, False])
@pytest.mark.parametrize(
    "us, streams, is_slow",
    [(1.0, 0, False), (1.05, 0, False), (1.1, 0, True), (1.3, 132, False), (1.4, 132, True)],
)
def test_only_a_candidate_that_may_be_chosen_is_checked(
    us, streams, is_slow, checks_slow, monkeypatch
):
    ranked = rank_by_estimate([SPACES["norm linear"]], per_graph=1)
    candidate = next(c for c in ranked if not c.is_library)
    schedules = tuple(
        s.changed(persistent_blocks=streams, cuda=streams > 0) for s in candidate.schedules
    )
    candidate = replace(candidate, schedules=schedules)
    checked = []
    monkeypatch.setattr(
        measure, "time_run", lambda run, sets, replays, to_beat: measure.timing([us], 1)
    )
    check = SimpleNamespace(judge=lambda run: checked.append(run) or Rejected("wrong"))
    program = SimpleNamespace(source="", digest="")
    bench = bench_with(check, checks_slow, lambda inputs: [])
    tried = bench.try_one(candidate, program, None, 1.0)
    is_checked = checks_slow or not is_slow
    assert bool(checked) == is_checked
    assert tried.status == (REJECTED if is_checked else TOO_SLOW)


@pytest.mark.parametrize(
    "are_right, statuses",
    [
        ((True, True, True), (TOO_SLOW, MEASURED, TOO_SLOW)),
        ((True, False, True), (MEASURED, REJECTED, TOO_SLOW)),
        ((False, False, True), (REJECTED, REJECTED, MEASURED)),
        ((False, False, False), (REJECTED, REJECTED, REJECTED)),
    ],
    ids=["the fastest", "the second", "the slowest", "none"],
)
def test_candidates_are_checked_from_the_fastest_on_until_one_is_right(
    are_right, statuses, monkeypatch
):
    ranked = rank_by_estimate([SPACES["norm linear"]], per_graph=3)
    searched = [c for c in ranked if not c.is_library][:3]
    times = iter((2.0, 1.0, 3.0))
    monkeypatch.setattr(
        measure, "time_run", lambda run, sets, replays, to_beat: measure.timing([next(times)], 1)
    )
    runs = {c.generate().digest: (lambda inputs: []) for c in searched}
    right = {id(run): ok for run, ok in zip(runs.values(), are_right, strict=True)}
    check = SimpleNamespace(judge=lambda run: Accepted() if right[id(run)] else Rejected("wrong"))
    bench = replace(
        bench_with(check, False, checks_last=True),
        load=lambda source, digest: SimpleNamespace(run=runs[digest]),
    )
    tried, best_us = [], math.inf
    for c in searched:
        tried.append(bench.try_one(c, c.generate(), None, best_us))
        best_us = min(best_us, tried[-1].us)
    assert {c.status for c in tried} == {MEASURED}  # nothing is checked yet
    assert tuple(c.status for c in bench.with_one_checked(tried)) == statuses


@pytest.mark.parametrize(
    "times, patience, known_us, tried",
    [
        ([5.0, 4.0, 4.5, 4.5, 3.0], 2, math.inf, 4),
        ([5.0, 4.0, 4.5, 4.5, 3.0], 3, math.inf, 5),
        ([5.0, 4.0, 4.5, 4.5, 3.0], 0, math.inf, 5),
        ([5.0, 4.0, 4.5, 4.5, 3.0], 2, 1.0, 2),
        ([None, None, None, 4.0, 4.5, 4.5, 4.5], 2, math.inf, 6),
    ],
    ids=["ends", "gain in time", "never ends", "no gain over the known", "all rejected at first"],
)
def test_a_round_ends_after_candidates_without_a_gain(
    times, patience, known_us, tried, monkeypatch
):
    """The library is measured in any case, and first. Rejected candidates end no round alone."""
    ranked = rank_by_estimate([SPACES["norm linear"]], per_graph=len(times))
    searched = [c for c in ranked if not c.is_library][: len(times)]
    us_of = dict(zip(map(id, searched), times, strict=True))

    def try_one(self, candidate, program, outcome, fast_us):
        us = us_of.get(id(candidate), 9.0)
        if us is None:
            return candidate.rejected("wrong")
        return replace(candidate, status=MEASURED, timing=measure.timing([us], 1))

    monkeypatch.setattr(tuner._Bench, "try_one", try_one)
    monkeypatch.setattr(compiler, "ahead_of_time", lambda program, sm, load: [])
    library = [c for c in ranked if c.is_library]
    found = measured(bench_with(None, False), [*searched, *library], patience, known_us)
    assert [c.is_library for c in found] == [True] + [False] * tried


def test_a_candidate_that_cannot_be_written_is_rejected_alone(monkeypatch):
    ranked = rank_by_estimate([SPACES["norm linear"]], per_graph=2)
    library, broken, good = sorted(ranked, key=lambda c: not c.is_library)[:3]
    generate = type(broken).generate

    def written(self):
        if self is broken:
            raise CodegenError("its tile is too large\nin two lines")
        return generate(self)

    try_compiled = tuner._Bench.try_one

    def try_one(self, candidate, program, outcome, fast_us):
        if program is None:
            return try_compiled(self, candidate, program, outcome, fast_us)
        assert program.source == generate(candidate).source
        return replace(candidate, status=MEASURED, timing=measure.timing([4.0], 1))

    monkeypatch.setattr(type(broken), "generate", written)
    monkeypatch.setattr(tuner._Bench, "try_one", try_one)
    monkeypatch.setattr(compiler, "ahead_of_time", lambda program, sm, load: [])
    found = measured(bench_with(None, False), [good, broken, library], 0)
    assert {c.schedules: (c.status, c.reason) for c in found} == {
        broken.schedules: (REJECTED, "its tile is too large"),
        library.schedules: (MEASURED, ""),
        good.schedules: (MEASURED, ""),
    }


@pytest.mark.parametrize("to_beat, replays", [(math.inf, 15), (5.0, 15), (4.0, 3), (3.0, 3)])
def test_a_slow_candidate_is_not_replayed_to_the_end(to_beat, replays, monkeypatch):
    """One of the two warm-up replays was fast enough, so the candidate is replayed more."""
    samples = iter([4.5, 4.0, *[9.0] * 15])
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    event = SimpleNamespace(elapsed_time=lambda end: next(samples) * 1e-3)
    captured = measure.Captured(SimpleNamespace(replay=lambda: None), 1, event, None, None)
    assert captured.times(15, to_beat) == pytest.approx([9.0] * replays)


@pytest.mark.parametrize("us, replays", [(10.0, 15), (100.0, 9), (300.0, 5), (5000.0, 5)])
def test_long_calls_are_replayed_less_often(us, replays, monkeypatch):
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    event = SimpleNamespace(elapsed_time=lambda end: 10 * us * 1e-3)
    captured = measure.Captured(SimpleNamespace(replay=lambda: None), 10, event, None, None)
    assert len(captured.times(15)) == replays


def test_a_chain_links_through_inputs_whose_elements_share_a_place(monkeypatch):
    """Elements of such an input share memory.

    The link between kernels writes this memory once, and nothing beyond it.
    """
    g = new_kernel_graph()
    g.mark_output(g.exp(g.new_input((4, 8), "float32", strides=(0, 1))))
    linked = []
    monkeypatch.setattr(
        measure,
        "_link",
        lambda size, x, y: lambda inputs, out: linked.append((size, [t.shape for t in inputs])),
    )

    def time_run(run, sets, replays):
        run(sets[0])
        return measure.timing([1.0], 1)

    monkeypatch.setattr(measure, "time_run", time_run)
    chain = measure.Chain(g, [measure.random_inputs(g, "cpu")])
    assert chain.time(lambda inputs: [inputs[0].exp()]) is not None
    assert linked == [(8, [(8,), (1,)])] * 2
