"""Turns of a model's calls and a tuner: who waits for whom, and for how long.

Both sides are threads here. In use they are processes that share the same memory.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from mirage_hf.tune import turns
from mirage_hf.tune.turns import MOST_REPEATS, SHARE, SharedTurns

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a file")


@pytest.fixture
def shared() -> Iterator[tuple[SharedTurns, SharedTurns]]:
    """The same turns as the model and as the tuner see them."""
    model = SharedTurns()
    yield model, SharedTurns(model.handle)
    os.close(model.handle)


def test_without_a_tuner_a_measurement_runs_at_once_and_once():
    asked = []
    assert turns.undisturbed(lambda: asked.append(1) or "result") == "result"
    assert asked == [1]


def test_the_tuner_measures_in_a_turn_of_its_own_while_the_process_shares_them(shared):
    _, tuner = shared
    with turns.sharing(tuner):
        assert turns._turns is tuner and turns.undisturbed(lambda: 3) == 3
    assert turns._turns is None


def test_the_tuner_waits_until_the_call_under_way_has_ended(shared):
    model, tuner = shared
    model.begin_call()
    ended: list[float] = []
    measured: list[float] = []
    worker = threading.Thread(
        target=tuner.undisturbed, args=(lambda: measured.append(time.monotonic()),)
    )
    worker.start()
    time.sleep(0.1)
    assert not measured
    ended.append(time.monotonic())
    model.end_call()
    worker.join(5)
    assert len(measured) == 1 and measured[0] > ended[0]


def test_the_tuner_waits_after_a_forward_whose_end_is_not_seen(shared, monkeypatch):
    monkeypatch.setattr(turns, "_FORWARD_SECONDS", 0.2)
    model, tuner = shared
    began = time.monotonic()
    model.note_forward()
    tuner.undisturbed(lambda: None)
    assert time.monotonic() - began >= 0.2


def test_a_measurement_that_a_call_disturbed_is_repeated(shared):
    model, tuner = shared
    results = []

    def measure() -> int:
        if len(results) < 2:  # a call begins and ends meanwhile
            model.begin_call()
            model.end_call()
        results.append(len(results))
        return results[-1]

    assert tuner.undisturbed(measure) == 2


def test_a_measurement_that_every_call_disturbs_ends(shared):
    model, tuner = shared
    results = []

    def measure() -> int:
        model.note_forward()
        results.append(len(results))
        return results[-1]

    assert tuner.undisturbed(measure) == MOST_REPEATS


def test_calls_in_close_order_let_the_tuner_measure_for_a_small_share_of_their_time(shared):
    model, tuner = shared
    stop, measured = threading.Event(), []

    def tune() -> None:
        while not stop.is_set():
            tuner.undisturbed(lambda: time.sleep(0.002))
            measured.append(1)

    worker = threading.Thread(target=tune, daemon=True)
    worker.start()
    busy = 0.0
    began = time.monotonic()
    while time.monotonic() - began < 3.0:
        model.begin_call()
        call_began = time.monotonic()
        time.sleep(0.03)
        busy += time.monotonic() - call_began
        model.end_call()
    waited = model._waited
    stop.set()
    worker.join(5)
    assert measured
    # a look may last much longer than asked for on a busy machine
    assert 0 < waited <= SHARE * busy + 0.2


def test_a_first_call_does_not_wait_for_the_tuner(shared):
    model, tuner = shared
    goes_on = threading.Event()
    worker = threading.Thread(target=tuner.undisturbed, args=(goes_on.wait,), daemon=True)
    worker.start()
    while model._fields[turns._TUNER] != turns._Tuner.MEASURES:
        time.sleep(0.001)
    model.begin_call()
    assert model._waited == 0.0
    model.end_call()
    goes_on.set()


def test_a_tuner_that_died_while_it_measured_is_not_waited_for(shared):
    model, _ = shared
    model._fields[turns._TUNER] = turns._Tuner.MEASURES
    model._busy = 1000.0
    model.tuner_has_ended()
    model.begin_call()
    assert model._waited == 0.0


def test_calls_of_several_threads_count_until_the_last_has_ended(shared):
    model, _ = shared
    model.begin_call()
    model.begin_call()
    model.end_call()
    assert model.calls == 1 == model._fields[turns._UNDER_WAY]
    model.end_call()
    assert model.calls == 0 == model._fields[turns._UNDER_WAY]
