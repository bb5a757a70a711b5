"""Tuning in another process: what it stores, how it ends, and what is said of it.

The process is real, and its GPU timings are made up (tests/helpers/fake_tuner.py).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf.errors import Rejected
from mirage_hf.pipeline import background, background_tuner, resolver
from mirage_hf.pipeline.background import BackgroundTuning
from mirage_hf.pipeline.layer_choice import BlockToMake
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.store import user_store
from tests.helpers import fake_tuner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tuners share memory on Linux")
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MIRAGE_HF_THREADS", "2")
    monkeypatch.setenv("FAKE_TUNER", "{}")
    monkeypatch.setattr(background, "START", fake_tuner.START)
    monkeypatch.setattr(resolver, "can_measure", lambda device, backend: True)


def block(width: int) -> BlockToMake:
    graph = mi.new_kernel_graph()
    x, r = graph.new_input((1, 32)), graph.new_input((1, width))
    w = graph.new_input((32, width), strides=(1, 32))
    graph.mark_output(graph.add(graph.matmul(x, w), r))
    return BlockToMake(graph, "linear_residual")


class Puts:
    """Notes the kernels that are put in place."""

    def __init__(self) -> None:
        self.got: dict[BlockToMake, Resolved] = {}

    def __call__(self, new: Mapping[BlockToMake, Resolved]) -> int | Rejected:
        self.got |= new
        return len(new)


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BackgroundTuning]]:
    """Start a tuner with options for the fake one. Every tuner ends with the test."""
    started: list[BackgroundTuning] = []

    def start(*layers: list[BlockToMake], replace: Any = None, **what: Any) -> BackgroundTuning:
        monkeypatch.setenv("FAKE_TUNER", fake_tuner.asked(**what))
        tuning = BackgroundTuning(
            layers, device=CPU, backend="cpu", zoo=None, replace=replace or Puts()
        )
        tuning.start()
        started.append(tuning)
        return tuning

    yield start
    for tuning in started:
        tuning.stop()


@pytest.fixture(scope="module")
def tuned_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache that the fake tuner leaves for `block(48)`."""
    folder = tmp_path_factory.mktemp("tuned")
    with fake_tuner.tuning_into(folder):
        tuning = BackgroundTuning(
            [[block(48)]], device=CPU, backend="cpu", zoo=None, replace=Puts()
        )
        tuning.start()
        assert "1 of 1 kernels are tuned" in ended(tuning)
    return folder


@pytest.fixture
def replayed(tuner: Any, tuned_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a tuner of `block(48)` that leaves what the fake one left before."""
    monkeypatch.setenv("FAKE_TUNER_CACHE", str(tuned_cache))
    monkeypatch.setattr(background, "START", fake_tuner.REPLAY)
    return lambda replace: tuner([block(48)], replace=replace)


def ended(tuning: BackgroundTuning, seconds: float = 90.0) -> str:
    assert tuning.wait(seconds), tuning.status
    return tuning.status


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)


def is_measuring(tuning: BackgroundTuning) -> Callable[[], bool]:
    return lambda: "kernel" in tuning._now


# -- what it does ----------------------------------------------------------------------------------


def test_kernels_are_measured_stored_and_put_in_place_by_the_next_call(tuner):
    puts, first, second = Puts(), block(48), block(64)
    tuning = tuner([first, second], [second], replace=puts)
    status = ended(tuning)
    assert "is done: 2 of 2 kernels are tuned, 0 blocks run new ones, 2 wait for" in status
    assert not puts.got
    with tuning.call():
        assert puts.got.keys() == {first, second}
    assert "2 of 2 kernels are tuned, 2 blocks run new ones" in tuning.status
    for one, kernel in puts.got.items():
        assert kernel.is_measured and kernel.source == "cache"
        stored = user_store().get(kernel.entry.key)
        assert isinstance(stored, Entry) and stored.timings == kernel.entry.timings
        found = resolver.resolve(one.program, device=CPU, backend="cpu")
        assert found.source == "cache" and found.time_us == kernel.time_us


def test_kernels_are_not_put_in_place_within_a_call(replayed):
    puts = Puts()
    tuning = replayed(puts)
    ended(tuning)
    ready, tuning._ready = tuning._ready, {}
    with tuning.call():
        tuning._ready = ready  # as if it came now
        with tuning.call():  # of another thread, or of a streamer
            assert not puts.got
        tuning.forward_begins()
        assert not puts.got
    tuning.forward_begins()
    assert puts.got


def test_the_thread_that_puts_kernels_in_place_has_no_context_of_the_caller(replayed):
    seen = []

    def replace(new: Any) -> int:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        tuning.forward_begins()  # checks run the model's forward
        return 0

    tuning = replayed(replace)
    ended(tuning)
    with torch.no_grad(), torch.autocast("cpu"), tuning.call():
        pass
    assert seen == [(True, False)]


@pytest.mark.parametrize("outcome", [Rejected("off by 3"), RuntimeError("off by 3")])
def test_kernels_that_cannot_be_put_in_place_are_noted_with_the_reason(replayed, outcome):
    def replace(new: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    tuning = replayed(replace)
    ended(tuning)
    with tuning.call():
        pass
    assert "0 blocks run new ones; measured kernels were not put in place: " in tuning.status
    assert "off by 3" in tuning.status


def test_two_processes_that_tune_with_one_cache_share_the_work(tuner, tmp_path):
    log = tmp_path / "log"
    layers = [[block(width)] for width in (48, 64, 80, 96)]
    again = [[block(width)] for width in (48, 64, 80, 96)]
    first = tuner(*layers, log=str(log), seconds=0.2)
    second = tuner(*again, log=str(log), seconds=0.2)
    for tuning in (first, second):
        assert "is done: 4 of 4 kernels are tuned" in ended(tuning)
        with tuning.call():
            assert len(tuning._ready) == 0
        assert "4 blocks run new ones" in tuning.status
    measured = log.read_text().split()
    assert len(measured) == 4  # each kernel by one of them
    entries = [entry for _, entry in user_store().verify()]
    assert len(entries) == 4 and all(isinstance(entry, Entry) for entry in entries)


def test_a_job_keeps_blocks_and_those_for_long_caches():
    long = block(96)
    one = BlockToMake(block(48).program, "attention", block(40).program, True, long)
    tuning = BackgroundTuning(
        [[one], [one, block(64)]], device=CPU, backend="cpu", zoo="folder", replace=Puts()
    )
    tuning.turns = background.SharedTurns()
    job = json.loads(json.dumps(tuning._job()))
    os.close(tuning.turns.handle)
    read = background_tuner.blocks_of(job["blocks"])
    assert job["layers"] == [[0], [0, 2]] and job["zoo"] == ["folder"]
    assert read[0].for_long_caches is read[1] and read[2].for_long_caches is None
    for mine, theirs in zip(tuning.blocks, read, strict=True):
        assert str(mine.program) == str(theirs.program)
        assert (mine.pattern, mine.next_may_launch_early) == (
            theirs.pattern,
            theirs.next_may_launch_early,
        )
    assert str(read[0].like) == str(one.like)


def test_a_long_job_does_not_wait_for_the_tuner_to_start(tuner, monkeypatch):
    monkeypatch.setattr(background, "START", "import time; time.sleep(60)")
    began = time.monotonic()
    tuning = tuner(*([block(48 + n)] for n in range(256)))
    assert len(json.dumps(tuning._job())) > 1 << 16  # more than a pipe holds
    with tuning.call():
        pass
    tuning.stop()
    assert time.monotonic() - began < 20


# -- how it ends -----------------------------------------------------------------------------------


def test_a_tuner_that_is_killed_leaves_what_it_stored_and_is_reported(tuner, tmp_path):
    tuning = tuner([block(48)], [block(64)], seconds=1.0)
    wait_until(lambda: bool(tuning._ready))
    os.kill(tuning._process.pid, signal.SIGKILL)
    status = ended(tuning, 30)
    assert "ended early: it was killed by signal 9: 1 of 2 kernels are tuned" in status
    with tuning.call():
        pass
    assert "1 blocks run new ones" in tuning.status
    assert len(list(user_store().entries())) == 1


def test_a_tuner_that_fails_is_reported_with_its_reason(tuner):
    tuning = tuner([block(48)], crash=True)
    assert "ended early: RuntimeError: CUDA error: an illegal memory access" in ended(tuning)


def test_a_tuner_that_cannot_start_says_what_it_printed(tuner, monkeypatch):
    monkeypatch.setattr(background, "START", "raise SystemExit('no module here')")
    assert "it failed with exit code 1 (no module here)" in ended(tuner([block(48)]))


def test_a_machine_that_starts_no_process_is_reported_and_calls_go_on(tuner, monkeypatch):
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", refused)
    tuning = tuner([block(48)])
    assert "ended early: it could not be started (OSError: [Errno 12]" in tuning.status
    with tuning.call():
        tuning.forward_begins()


def test_a_full_disk_ends_the_tuner_with_the_reason(tuner):
    """The disk is full for entries after the first: their writes fail with ENOSPC."""
    puts = Puts()
    tuning = tuner([block(48)], [block(64)], [block(80)], replace=puts, full_disk_after=1)
    status = ended(tuning)
    assert "ended early: a tuned kernel could not be stored: " in status
    assert "cannot be written (No space left on device)" in status
    with tuning.call():
        pass
    assert len(puts.got) == 1 and "1 of 3 kernels are tuned, 1 blocks" in tuning.status
    assert [e for _, e in user_store().verify() if isinstance(e, Rejected)] == []


def test_ctrl_c_ends_the_tuner(tuner):
    """A terminal sends the signal to both processes, a notebook to its kernel only."""
    tuning = tuner([block(48)], seconds=60.0)
    wait_until(is_measuring(tuning))
    os.kill(tuning._process.pid, signal.SIGINT)
    assert "ended early: it was interrupted" in ended(tuning, 30)
    other = tuner([block(48)], seconds=60.0)
    with pytest.raises(KeyboardInterrupt), other.call():
        raise KeyboardInterrupt
    assert "ended early: it was interrupted" in ended(other, 30)


def test_the_tuner_ends_with_the_object_that_its_model_holds(tuner):
    tuning = BackgroundTuning([[block(48)]], device=CPU, backend="cpu", zoo=None, replace=Puts())
    tuning.start()
    process, weak = tuning._process, weakref.ref(tuning)
    del tuning
    gc.collect()
    assert weak() is None
    wait_until(lambda: process.poll() is not None, 30)


OWNER = """
import os, sys, time
import torch
from mirage_hf.pipeline import background, resolver
from tests.helpers import fake_tuner
from tests.pipeline.test_background import CPU, Puts, block

background.START = fake_tuner.START
tuning = background.BackgroundTuning(
    [[block(48)]], device=CPU, backend="cpu", zoo=None, replace=Puts()
)
tuning.start()
while "kernel" not in tuning._now:
    time.sleep(0.02)
print(tuning._process.pid, flush=True)
if "fork" in sys.argv and not os.fork():  # a fork holds the pipes of the tuner open
    time.sleep(20)
    os._exit(0)
if "end" in sys.argv:
    sys.stdin.readline()
else:
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "how",
    [
        "kill with a fork",
        *(pytest.param(how, marks=pytest.mark.thorough) for how in ("end", "kill", "terminate")),
    ],
)
def test_the_tuner_ends_with_its_process(how, monkeypatch):
    monkeypatch.setenv("FAKE_TUNER", fake_tuner.asked(seconds=60.0))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", OWNER, *how.split()]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None and owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert is_alive(pid)
    if how == "end":
        owner.stdin.close()
    elif how.startswith("kill"):
        owner.kill()
    elif how == "terminate":
        owner.terminate()
    owner.wait(20)
    wait_until(lambda: not is_alive(pid), 30)
