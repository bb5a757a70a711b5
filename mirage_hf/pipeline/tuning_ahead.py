"""Tune several programs in turns: while the compiler works for one, another is measured.

All of it happens in the thread that asks for kernels, so nothing runs beside a measurement.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mirage_hf.errors import described
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.pipeline import searching_ahead
from mirage_hf.pipeline.choose import schedule_candidates, tuning_of, with_times
from mirage_hf.pipeline.outcome import Outcome
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.windows import ProgressCallback
from mirage_hf.tune.tuner import Tuning

#: The most programs that are tuned at once. Each keeps its inputs on the GPU.
AT_ONCE = 4

#: Another program begins only if the GPU has so many times the bytes of the inputs of all programs
#: free, and so many bytes more. Checks hold weights in float64: four times their bytes in 16 bits.
_FREE_FACTOR, _FREE_BYTES = 8, 1 << 30

#: Seconds between looks at the compiler while all programs wait for it.
_LOOK_SECONDS = 1e-3

_log = logging.getLogger("mirage_hf")


@dataclass(frozen=True, eq=False)
class UnderWay:
    """A program whose candidates are being measured.

    Attributes:
        outcome: Its candidates with schedules.
        tuning: Measures them. None if nothing is to be measured.
    """

    outcome: Outcome
    tuning: Tuning | None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to measure."""
        return self.tuning is None or self.tuning.result is not None

    @property
    def can_go_on(self) -> bool:
        """Whether something can be measured now."""
        return self.tuning is not None and not self.is_done and not self.tuning.is_waiting


class _Wanted(threading.local):
    """What a thread will ask for.

    Attributes:
        requests: The requests that nobody has taken and that have not begun, by name.
        begun: The programs that nobody has taken.
        taken: The program that `finish` measures, if it does.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.begun: dict[str, UnderWay] = {}
        self.taken: UnderWay | None = None

    def under_way(self) -> list[UnderWay]:
        """Return the programs that are not measured to the end."""
        each = [*self.begun.values(), *filter(None, [self.taken])]
        return [program for program in each if not program.is_done]


_wanted = _Wanted()


@contextlib.contextmanager
def tuning(requests: Sequence[Request]) -> Iterator[None]:
    """Tune the programs of requests in turns until the block ends, if they are to be measured.

    One begins as soon as a worker has searched for it and something else waits. `take` gives those
    that have begun. What nobody took is dropped.
    """
    measured = [r for r in requests if r.device is not None and not r.all_candidates]
    named = {_name_of(r): r for r in measured}
    new = named.keys() - _wanted.requests.keys() - _wanted.begun.keys()
    _wanted.requests |= {name: named[name] for name in named if name in new}
    try:
        yield
    finally:
        for name in new:
            _wanted.requests.pop(name, None)
            if (dropped := _wanted.begun.pop(name, None)) is not None:
                _close(dropped)


def take(request: Request) -> UnderWay | None:
    """Return what has begun for a request, or None. It does not begin by itself any more."""
    if request.device is None or request.all_candidates:
        return None
    name = _name_of(request)
    _wanted.requests.pop(name, None)
    return _wanted.begun.pop(name, None)


def begin(outcome: Outcome) -> UnderWay:
    """Return an outcome with its candidates to be measured."""
    return UnderWay(outcome, tuning_of(outcome))


def finish(under_way: UnderWay, progress: ProgressCallback | None = None) -> Outcome:
    """Return an outcome with its measured candidates. Others are tuned while the compiler works."""
    tuning = under_way.tuning
    if tuning is None:
        return under_way.outcome
    if progress is not None:
        tuning.progress = lambda *detail: progress("tune", detail)
    _wanted.taken = under_way
    try:
        tune_others_until(lambda: not tuning.is_waiting)
        while tuning.result is None:
            tuning.step()
            tune_others_until(lambda: not tuning.is_waiting)
    finally:
        _wanted.taken = None
        _close(under_way)
    return with_times(under_way.outcome, tuning.result)


def tune_others_until(is_over: Callable[[], bool]) -> None:
    """Tune other programs until the condition holds, or until no other is under way."""
    while not is_over():
        if _step():
            continue
        if all(other is _wanted.taken for other in _wanted.under_way()):
            return
        time.sleep(_LOOK_SECONDS)


def _step() -> bool:
    """Do something for another program. Return whether there was something to do.

    If that fails, the program is left to its own turn, which will raise the error again.
    """
    name = next((name for name, other in _wanted.begun.items() if other.can_go_on), None)
    if name is None and (name := _next_to_begin()) is None:
        return False
    try:
        if name in _wanted.requests:
            _begin(name)
        else:
            tuning = _wanted.begun[name].tuning
            assert tuning is not None
            tuning.step()
    except Exception as e:
        _log.debug("a program is tuned in its own turn: %s", described(e))
        if (failed := _wanted.begun.pop(name, None)) is not None:
            _close(failed)
    return True


def _next_to_begin() -> str | None:
    """Return the name of the next program that was searched, if another may begin."""
    if len(_wanted.under_way()) >= AT_ONCE:
        return None
    for name, request in _wanted.requests.items():
        if searching_ahead.has_answer(request) and _has_memory_for(request):
            return name
    return None


def _begin(name: str) -> None:
    request = _wanted.requests.pop(name)
    if (verified := searching_ahead.take(request)) is not None:
        verified = verified.resized(request.program)
        _wanted.begun[name] = begin(schedule_candidates(request, verified, lambda: ()))


def _name_of(request: Request) -> str:
    """Return a name for all that decides what is measured for a request."""
    return repr((searching_ahead.name_of(request), request.device, request.effort))


def _has_memory_for(request: Request) -> bool:
    device = request.device
    programs = [request.program, *(each.outcome.request.program for each in _wanted.under_way())]
    size = sum(stored_bytes(t) for program in programs for t in program.inputs)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached
    return free >= _FREE_FACTOR * size + _FREE_BYTES


def _close(under_way: UnderWay) -> None:
    if under_way.tuning is not None:
        under_way.tuning.close()
