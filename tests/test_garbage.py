"""Garbage is not collected while a CUDA graph is captured."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mirage_hf.decode import graphs
from mirage_hf.garbage import no_garbage_collection, sparing_old_objects
from mirage_hf.tune import measure


@pytest.fixture
def eager() -> Iterator[None]:
    """Let the collector run after almost every object that is made."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


class Holder:
    """An object that refers to itself, so that only the collector frees what it holds."""

    def __init__(self, held: Any = None) -> None:
        self.itself, self.held = self, held


def make_objects() -> None:
    for _ in range(2000):
        Holder()


@pytest.mark.usefixtures("eager")
def test_garbage_stays_until_the_last_block_ends() -> None:
    entered, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with no_garbage_collection():
            entered.set()
            may_end.wait(10)

    thread = threading.Thread(target=other, daemon=True)
    with no_garbage_collection():
        thread.start()
        entered.wait()
    garbage = weakref.ref(Holder())
    make_objects()
    assert garbage() is not None
    may_end.set()
    thread.join()
    make_objects()
    assert garbage() is None


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), no_garbage_collection():
        raise ValueError("inside")
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("which", ["tuner", "decoding"])
def test_a_capture_survives_graphs_that_are_garbage(which: str) -> None:
    """Seen in the tuner: the capture failed because the collector freed another graph."""
    x = torch.ones(8, device="cuda")
    spare: list[Any] = []

    def run(*_: Any) -> None:
        x.mul_(2)
        if spare and torch.cuda.is_current_stream_capturing():
            Holder(spare.pop())
        make_objects()

    def capture() -> Any:
        if which == "tuner":
            return measure.capture(run, [()], 1)  # its graph records its events
        return SimpleNamespace(graph=graphs.capture(run, x.device, None)[0])

    spare += [capture() for _ in range(3)]
    captured = capture()
    x.fill_(1)
    captured.graph.replay()
    assert x.tolist() == [2.0] * 8 and len(spare) == 2


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """The tests' own process may have frozen objects."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    (gc.freeze if was_frozen else gc.unfreeze)()


@pytest.mark.usefixtures("nothing_frozen")
def test_objects_that_exist_are_spared_until_the_last_block_ends() -> None:
    with sparing_old_objects():
        count = gc.get_freeze_count()
        assert count > 1000
        with sparing_old_objects():
            assert gc.get_freeze_count() > count // 2  # some may die meanwhile
        assert gc.get_freeze_count() > count // 2
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_objects_that_the_caller_froze_stay_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with sparing_old_objects():
        assert gc.get_freeze_count() > count // 2  # some may die meanwhile
    assert gc.get_freeze_count() > count // 2
