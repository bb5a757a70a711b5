"""A tuner process whose GPU timings are made up, for tests without a GPU.

Only what touches a GPU is replaced: whether kernels can be measured, the times of candidates, and
the choice by the time of a whole layer. The job, the search, the proof, the stores and the messages
are those of the real process. `FAKE_TUNER` says what happens while it measures, as JSON:

- `seconds`: how long the candidates of one program take,
- `full_disk_after`: how many entries can be stored before every write of one fails with ENOSPC,
- `library_us`: the time of the library path,
- `log`: a file that gets a line for each program that is measured,
- `crash`: true to end with an error.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mirage_hf.pipeline import background, background_tuner, choose, layer_choice, resolver
from mirage_hf.tune import tuner, turns
from mirage_hf.tune.candidates import MEASURED, ScheduledCandidate, TuneResult
from mirage_hf.tune.measure import Timing

#: At the priority of the tests, because a busy machine runs a process of low priority much later.
START = background.START.replace("mirage_hf.pipeline.background_tuner", "tests.helpers.fake_tuner")
START = START.replace("os.nice(19)", "os.nice(0)")

#: Starts a process that tunes nothing: it copies the cache of a tuner that has ended, and says that
#: all kernels are tuned. It is for tests of what the model does then, because it starts at once.
REPLAY = """
import json, os, shutil, sys
job = json.loads(sys.stdin.readline())
shutil.copytree(os.environ["FAKE_TUNER_CACHE"], os.environ["MIRAGE_HF_CACHE"], dirs_exist_ok=True)
print(json.dumps({"done": list(range(len(job["blocks"])))}), flush=True)
print(json.dumps({"end": ""}), flush=True)
"""

LIBRARY_US = 50.0


@contextmanager
def tuning_into(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Let the tuner be the fake one, and its cache this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIRAGE_HF_CACHE", str(folder))
        patch.setenv("MIRAGE_HF_THREADS", "2")
        patch.setenv("FAKE_TUNER", asked())
        patch.setattr(background, "START", START)
        yield patch


def asked(**what: Any) -> str:
    """Return a value of FAKE_TUNER."""
    return json.dumps(what)


def timing(us: float) -> Timing:
    return Timing(us, us, us, 24, 5)


def main() -> None:
    what = json.loads(os.environ.get("FAKE_TUNER", "{}"))
    resolver.can_measure = lambda device, backend: True

    class FakeTuning(tuner.Tuning):
        def __init__(self, ugraphs: Sequence[Any], **options: Any):
            super().__init__(ugraphs, **{**options, "device": "cpu"})

        def step(self) -> None:
            if what.get("crash"):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            super().step()
            if (ranked := self.result) is None:
                return
            if "log" in what:
                with open(what["log"], "a", encoding="utf-8") as log:
                    log.write(f"{os.getpid()}\n")
            turns.undisturbed(lambda: time.sleep(what.get("seconds", 0.0)))
            found = [measured(c, n) for n, c in enumerate(ranked.candidates)]
            self.result = TuneResult.of("a fake GPU", found)

    def measured(candidate: ScheduledCandidate, number: int) -> ScheduledCandidate:
        """The better the estimate, the slower: so another schedule wins than without tuning."""
        library_us = what.get("library_us", LIBRARY_US)
        us = library_us if candidate.is_library else 20.0 - 0.1 * number
        return replace(candidate, status=MEASURED, timing=timing(us))

    def first_of_each(choices: Sequence[Sequence[Any]], **_: Any) -> Any:
        return [found[0] for found in choices], timing(40.0)

    choose.Tuning = FakeTuning
    layer_choice.choose_for_layer = first_of_each
    if "full_disk_after" in what:
        fill_disk(what["full_disk_after"])
    background_tuner.main()


def fill_disk(after: int) -> None:
    """Let every write of an entry fail after so many entries, as on a full disk."""
    real, written = Path.write_text, 0

    def write_text(self: Path, *args: Any, **kwargs: Any) -> int:
        nonlocal written
        if self.parent.name == "new":
            written += self.name == "entry.json"
            if written > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return real(self, *args, **kwargs)

    Path.write_text = write_text  # type: ignore[method-assign]
