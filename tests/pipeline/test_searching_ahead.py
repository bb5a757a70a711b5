"""Searches of several programs at once, in worker processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf.codegen import workers
from mirage_hf.errors import SearchError
from mirage_hf.graph.block import Role
from mirage_hf.pipeline import find_outcome, resolver, searching_ahead
from mirage_hf.pipeline.choose import schedule_candidates
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.reuse import search_to_keep
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.pipeline.search_worker import SearchAnswer
from mirage_hf.tune import space
from tests.helpers import programs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    monkeypatch.setenv("MIRAGE_HF_THREADS", str(searching_ahead.THREADS_FROM))
    monkeypatch.setattr(searching_ahead, "MOST_PROCESSES", 2)


@pytest.fixture(autouse=True, scope="module")
def _close_workers() -> Iterator[None]:
    """End the workers after the last test. They start once, and hold nothing of a search."""
    yield
    for pool in workers._shared.values():
        pool.close()


def graphs() -> list[mi.KernelGraph]:
    return [programs.rms_norm_linear(mi, rows=1, k=256, n=n) for n in (96, 160, 224)]


def requests(target: str = "sm_90") -> list[Request]:
    return [resolver.kernel_request(g, target=target, tune="never") for g in graphs()]


def wait_until_asked(wanted: Sequence[Request]) -> None:
    """Wait until workers have begun the searches, or have failed to."""
    for request in wanted:
        search = searching_ahead._begun[searching_ahead.name_of(request)]
        until = time.monotonic() + 60
        while not (search._is_taken.locked() or search.answer.done()):
            assert time.monotonic() < until, "no worker was ready"
            time.sleep(0.01)


def test_workers_find_and_rank_what_this_process_would(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests()
    own = []
    for request in wanted:
        verified = search_and_verify(request.program, request.options, keep=request.keep)
        own.append(schedule_candidates(request, verified, lambda: ()).ugraphs[0])
    space._known.clear()

    def nothing_is_left_to_rank(*_: Any) -> Any:
        raise AssertionError("a schedule was ranked here")

    monkeypatch.setattr(space, "_costs", nothing_is_left_to_rank)
    with searching_ahead.searching(wanted):
        for request, ugraph in zip(wanted, own, strict=True):
            wait_until_asked([request])
            found = searching_ahead.take(request)
            assert found is not None
            outcome = schedule_candidates(request, found.resized(request.program), lambda: ())
            best = outcome.ugraphs[0]
            assert str(best.kernels) == str(ugraph.kernels)
            assert best.schedules == ugraph.schedules
            assert best.program is request.program
            assert searching_ahead.take(request) is None, "it was taken"


def test_a_search_that_no_worker_has_begun_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that forks workers takes seconds to start."""
    begin, may_start = workers.ForkServer.fork, threading.Event()

    def begin_later(server: workers.ForkServer) -> Any:
        may_start.wait(60)
        return begin(server)

    monkeypatch.setattr(workers, "_shared", {})
    monkeypatch.setattr(workers.ForkServer, "fork", begin_later)
    first, second, third = requests()
    with searching_ahead.searching([first, second, third]):
        assert searching_ahead.take(first) is None
        may_start.set()
        wait_until_asked([second, third])
        assert searching_ahead.take(third) is not None
        assert searching_ahead.take(second) is not None
    for pool in workers._shared.values():
        pool.close()


@pytest.mark.parametrize("is_done", [False, True])
def test_the_caller_works_while_a_worker_still_searches(is_done: bool) -> None:
    request = requests()[0]
    search = searching_ahead._Search(searching_ahead._task(request))
    assert search.begins()  # a worker
    searching_ahead._begun[searching_ahead.name_of(request)] = search
    worked = []

    def work() -> None:
        worked.append(True)
        search.answer.set_result(None)

    if is_done:
        search.answer.set_result(None)
    assert searching_ahead.take(request, work) is None
    assert bool(worked) != is_done


def test_a_search_that_is_known_is_not_waited_for() -> None:
    """To do it here takes less than a second."""
    request = requests()[0]
    verified = search_and_verify(request.program, request.options, keep=request.keep)
    known = search_to_keep(schedule_candidates(request, verified, lambda: ()))
    assert known is not None
    answer = SearchAnswer(verified, {})
    for is_done in (False, True):
        search = searching_ahead._Search(replace(searching_ahead._task(request), known=known))
        assert search.begins()  # a worker
        if is_done:
            search.answer.set_result(answer)
        searching_ahead._begun[searching_ahead.name_of(request)] = search
        assert searching_ahead.take(request) is (verified if is_done else None)


def test_a_search_that_another_thread_is_taking_stays_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The block ends between the two steps of `take`. No worker will answer any more."""
    may_start = threading.Event()
    monkeypatch.setattr(workers, "_shared", {})
    monkeypatch.setattr(workers.ForkServer, "fork", lambda _: may_start.wait(60) and None)
    wanted = requests()
    with searching_ahead.searching(wanted):
        taken = searching_ahead._begun.pop(searching_ahead.name_of(wanted[0]))
    assert taken.begins(), "it would wait for an answer"
    may_start.set()


def test_what_nobody_takes_is_dropped() -> None:
    wanted = requests()
    with searching_ahead.searching(wanted):
        pass
    assert not searching_ahead._begun
    assert searching_ahead.take(wanted[0]) is None


def test_a_block_within_another_begins_no_search_again() -> None:
    outer, both, inner = requests()
    third = replace(inner, seed=1)
    with searching_ahead.searching([outer, both]):
        begun = dict(searching_ahead._begun)
        with searching_ahead.searching([both, inner, third]):
            assert len(searching_ahead._begun) == 4
            assert begun.items() <= searching_ahead._begun.items()
        assert searching_ahead._begun == begun
        wait_until_asked([both])
        assert searching_ahead.take(both) is not None


@pytest.mark.parametrize("threads, count", [(2, 3), (4, 1)])
def test_few_threads_or_programs_start_no_process(
    threads: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRAGE_HF_THREADS", str(threads))
    with searching_ahead.searching(requests()[:count]):
        assert not searching_ahead._begun


@pytest.mark.parametrize("how", ["cannot start", "dies"])
def test_this_process_searches_if_a_worker(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = workers.ForkServer.fork

    def fail(server: workers.ForkServer) -> Any:
        if how == "cannot start":
            raise OSError("no processes here")
        worker = begin(server)
        os.kill(worker.pid, signal.SIGKILL)
        return worker

    monkeypatch.setattr(workers, "_shared", {})
    monkeypatch.setattr(workers.ForkServer, "fork", fail)
    finder = resolver.KernelFinder(CPU)
    with finder.searching((g, {}) for g in graphs()):
        assert len(searching_ahead._begun) == 3
        assert all(finder.resolve(g).runs_kernel for g in graphs())
    for pool in workers._shared.values():
        pool.close()


def test_an_error_of_a_search_is_left_to_this_process() -> None:
    good, other, bad = requests()
    roles = (("no axis of it", Role.LOOP),)
    bad = replace(bad, options=replace(bad.options, roles=roles))
    with searching_ahead.searching([bad, good, other]):
        wait_until_asked([bad, good])
        assert searching_ahead.take(bad) is None
        assert searching_ahead.take(good) is not None, "the worker goes on"
    with pytest.raises(SearchError, match="no axis of it"):
        search_and_verify(bad.program, bad.options)


def test_stored_kernels_are_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = resolver.KernelFinder(CPU)
    first, *others = graphs()
    finder.resolve(first)
    monkeypatch.setattr(find_outcome, "search_and_verify", None)  # workers find the others
    with finder.searching((g, {}) for g in [first, *others]):
        assert len(searching_ahead._begun) == 2
        wait_until_asked([finder.request(g) for g in others])
        assert [finder.resolve(g).source for g in graphs()] == ["cache", "searched", "searched"]


@pytest.mark.parametrize("threads", [1, searching_ahead.THREADS_FROM])
def test_the_process_that_forks_workers_starts_before_a_search(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRAGE_HF_THREADS", str(threads))
    monkeypatch.setattr(workers, "_shared", {})
    with searching_ahead.ready_to_search():
        servers = [pool._server for pool in workers._shared.values()]
        assert [server._process is not None for server in servers] == [True] * (threads > 1)
    for pool in workers._shared.values():
        pool.close()
