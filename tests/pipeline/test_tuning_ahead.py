"""Several programs are tuned in turns: one is measured while the compiler works for another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from mirage_hf.errors import CodegenError
from mirage_hf.pipeline import choose, searching_ahead, tuning_ahead
from mirage_hf.pipeline.find_outcome import NewOutcome, find_outcome
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.resolver import kernel_request
from mirage_hf.pipeline.results import NoResults
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.pipeline.search_worker import SearchAnswer
from mirage_hf.tune import tuner
from mirage_hf.tune.candidates import TuneResult
from tests.helpers import kernel_cases

#: Steps of the tuning of a program. The compiler works before each.
STEPS = 3

#: How often programs of so many columns look until the compiler is done. Others look twice.
LOOKS = {64: 40}


class Compiler:
    """A compiler that is done with a program after so many looks at it."""

    def __init__(self, looks: int):
        self._looks = looks

    @property
    def is_waiting(self) -> bool:
        self._looks -= 1
        return self._looks >= 0


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Let programs be tuned without a GPU. Return what was done: what, and for how many columns."""
    done: list[tuple[str, Any]] = []

    class FakeTuning(tuner.Tuning):
        def __init__(self, ugraphs: Sequence[Any], **options: Any):
            super().__init__(ugraphs, **{**options, "device": "cpu"})
            self.name = ugraphs[0].program.outputs[0].dims[-1]
            self._steps = self._slowly(self._estimated())

        def _slowly(self, steps: Any) -> Any:
            done.append(("begin", self.name))
            for n in range(STEPS):
                yield Compiler(LOOKS.get(self.name, 2))
                done.append((f"step {n}", self.name))
                if self.name in broken and n == 1:
                    raise RuntimeError("CUDA error: out of memory")
            done.append(("end", self.name))
            return (yield from steps)

        def finish(self) -> TuneResult:
            raise AssertionError("it is finished in turns")

        def close(self) -> None:
            done.append(("close", self.name))
            super().close()

    broken: set[int] = set()
    monkeypatch.setattr(choose, "Tuning", FakeTuning)
    monkeypatch.setattr(tuning_ahead, "_has_memory", lambda device, *more: True)
    monkeypatch.setattr(searching_ahead, "_begun", {})
    monkeypatch.setattr(tuning_ahead, "_wanted", tuning_ahead._Wanted())
    monkeypatch.setattr(FakeTuning, "broken", broken, raising=False)
    yield done


def request_of(columns: int) -> Request:
    program = kernel_cases.rms_norm_linear(1, 256, columns).program
    device = torch.device("cuda", 0)
    return kernel_request(program, target="sm_90", device=device)


def answered(requests: Sequence[Request]) -> None:
    """Let workers have searched for requests."""
    for request in requests:
        search = searching_ahead._Search(searching_ahead._task(request))
        assert search.begins()
        verified = search_and_verify(request.program, request.options, keep=1)
        search.answer = Future()
        search.answer.set_result(SearchAnswer(verified, {}))
        searching_ahead._begun[searching_ahead.name_of(request)] = search


def outcome_of(request: Request) -> Any:
    found = find_outcome(request, NoResults())
    assert isinstance(found, NewOutcome)
    return found.outcome


def test_other_programs_are_measured_while_the_compiler_works(
    log: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_ahead, "AT_ONCE", 3)
    requests = [request_of(n) for n in (64, 128, 192, 320)]
    answered(requests)
    with tuning_ahead.tuning(requests):
        first = outcome_of(requests[0])
        assert first.request.program is requests[0].program
        under_way = itertools.accumulate({"begin": 1, "end": -1}.get(what, 0) for what, _ in log)
        assert max(under_way) == 3
        assert log.index(("step 0", 128)) < log.index(("step 2", 64))
        second, third, fourth = map(outcome_of, requests[1:])
    for request, outcome in zip(requests, (first, second, third, fourth), strict=True):
        assert outcome.request.program is request.program
        assert outcome.tuned.candidates[0].ugraph.program is request.program
    steps = [each for each in log if each[0].startswith("step")]
    assert len(steps) == len(set(steps)) == 4 * STEPS  # nothing was measured twice
    assert not tuning_ahead._wanted.begun and not tuning_ahead._wanted.requests


def test_others_are_measured_while_a_worker_searches(log: list[tuple[str, Any]]) -> None:
    first, second = request_of(64), request_of(128)
    answered([first, second])
    search = searching_ahead._begun[searching_ahead.name_of(first)]
    answer = search.answer.result()

    class Late(Future[Any]):
        """It is done as soon as the other program was measured to the end."""

        def done(self) -> bool:
            if (f"step {STEPS - 1}", 128) in log and not super().done():
                self.set_result(answer)
            return super().done()

        def result(self, timeout: float | None = None) -> Any:
            return super().result(timeout or 60)

    search.answer = Late()
    with tuning_ahead.tuning([first, second]):
        assert outcome_of(first).tuned is not None
        assert log.index((f"step {STEPS - 1}", 128)) < log.index(("begin", 64))
        assert outcome_of(second).tuned is not None


def test_what_nobody_takes_is_dropped(log: list[tuple[str, Any]]) -> None:
    requests = [request_of(n) for n in (64, 128)]
    answered(requests)
    with tuning_ahead.tuning(requests):
        outcome_of(requests[0])
        assert ("begin", 128) in log and ("close", 128) not in log
    assert ("close", 128) in log
    assert not tuning_ahead._wanted.begun and not tuning_ahead._wanted.requests


def test_a_program_that_fails_fails_in_its_own_turn(
    log: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request_of(n) for n in (64, 128)]
    answered(requests)
    choose.Tuning.broken.add(128)  # type: ignore[attr-defined]
    with tuning_ahead.tuning(requests):
        assert outcome_of(requests[0]).tuned is not None
        with pytest.raises(RuntimeError, match="out of memory"):
            outcome_of(requests[1])
    assert log.count(("begin", 128)) == 2


def test_others_give_way_if_memory_is_short(
    log: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second and third program have begun when the first one's turn comes."""
    requests = [request_of(n) for n in (64, 128, 192)]
    answered(requests[1:])
    with tuning_ahead.tuning(requests):
        tuning_ahead.tune_others_until(lambda: ("step 0", 192) in log)
        monkeypatch.setattr(
            tuning_ahead, "_has_memory", lambda device, *more: not more and not others()
        )
        answered(requests[:1])
        assert outcome_of(requests[0]).tuned is not None
        assert [what for what, name in log if name == 64][:1] == ["begin"]
        closed = [name for what, name in log if what == "close"]
        assert closed[:2] == [192, 128] and not tuning_ahead._wanted.begun
        monkeypatch.setattr(tuning_ahead, "_has_memory", lambda device, *more: True)
        for request in requests[1:]:
            outcome = outcome_of(request)
            assert outcome.tuned is not None and outcome.request is request
    assert log.count(("begin", 128)) == log.count(("begin", 192)) == 2


def others() -> bool:
    return bool(tuning_ahead._wanted.begun)


def test_an_interrupt_while_another_is_measured_ends_both(
    log: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request_of(n) for n in (64, 128)]
    answered(requests)
    step = choose.Tuning.step

    def interrupted(tuning: Any) -> None:
        if tuning.name == 128 and ("step 0", 128) in log:
            raise KeyboardInterrupt
        step(tuning)

    monkeypatch.setattr(choose.Tuning, "step", interrupted)
    with tuning_ahead.tuning(requests):
        with pytest.raises(KeyboardInterrupt):
            outcome_of(requests[0])
        assert {("close", 64), ("close", 128)} <= set(log)
        assert not tuning_ahead._wanted.begun and tuning_ahead._wanted.taken is None


def test_the_outcome_is_that_of_the_request_that_takes_it(log: list[tuple[str, Any]]) -> None:
    requests = [request_of(n) for n in (64, 128)]
    answered(requests)
    with tuning_ahead.tuning(requests):
        outcome_of(requests[0])
        again = replace(requests[1], pattern="another")
        assert outcome_of(again).request is again


def test_a_tuning_that_ended_early_says_so() -> None:
    tuning = tuner.Tuning([kernel_cases.rms_norm_linear(1, 256, 64)], device="cpu")
    tuning.close()
    with pytest.raises(CodegenError, match="ended early"):
        tuning.finish()
