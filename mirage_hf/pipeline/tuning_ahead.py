"""Tune several programs in turns: while the compiler works for one, another is measured.

All of it happens in the thread that asks for kernels, so nothing runs beside a measurement.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mirage_hf.errors import described
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.graph.kernel import KernelGraph
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

    def step(self) -> None:
        """Measure something."""
        assert self.tuning is not None
        self.tuning.step()

    def close(self) -> None:
        """Give up what is not measured."""
        if self.tuning is not None:
            self.tuning.close()


class _Wanted(threading.local):
    """What a thread will ask for. Each is in one of the first three, by name, until it is taken.

    Attributes:
        requests: The requests that have not begun, each with the name of its search.
        begun: The programs that are measured.
        given_up: What is to be measured in its own turn, because it failed or memory was short.
        taken: The program that `finish` is measuring, or None.
    """

    def __init__(self) -> None:
        self.requests: dict[str, tuple[str, Request]] = {}
        self.begun: dict[str, UnderWay] = {}
        self.given_up: dict[str, Outcome] = {}
        self.taken: UnderWay | None = None

    def under_way(self) -> list[UnderWay]:
        """Return the programs that are not measured to the end."""
        each = [*self.begun.values(), *filter(None, [self.taken])]
        return [program for program in each if not program.is_done]

    def give_up(self, name: str) -> None:
        """Free what the tuning of a program holds, and leave the program to its own turn."""
        under_way = self.begun.pop(name)
        self.given_up[name] = under_way.outcome
        under_way.close()

    def forget(self, name: str) -> None:
        """Drop a program, whatever was done for it."""
        self.requests.pop(name, None)
        self.given_up.pop(name, None)
        if (under_way := self.begun.pop(name, None)) is not None:
            under_way.close()


_wanted = _Wanted()


@contextlib.contextmanager
def tuning(requests: Sequence[Request]) -> Iterator[None]:
    """Tune the programs of requests in turns until the block ends, if they are to be measured.

    One begins as soon as a worker has searched for it and something else waits. So turns need
    workers that search (searching_ahead.py). `take` gives those that have begun. What nobody took
    is dropped.
    """
    measured = [r for r in requests if r.device is not None and not r.all_candidates]
    named = {_name_of(r): (searching_ahead.name_of(r), r) for r in measured}
    known = _wanted.requests.keys() | _wanted.begun.keys() | _wanted.given_up.keys()
    new = [name for name in named if name not in known]
    _wanted.requests |= {name: named[name] for name in new}
    try:
        yield
    finally:
        for name in new:
            _wanted.forget(name)


def take(request: Request) -> UnderWay | None:
    """Return what has begun for a request, or None. It does not begin by itself any more.

    The caller closes it.
    """
    if request.device is None or request.all_candidates:
        return None
    name = _name_of(request)
    _wanted.requests.pop(name, None)
    if name in _wanted.given_up:
        return begin(replace(_wanted.given_up.pop(name), request=request))
    under_way = _wanted.begun.pop(name, None)
    if under_way is None:
        return None
    return replace(under_way, outcome=replace(under_way.outcome, request=request))


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
        while _wanted.begun and not _has_memory(under_way.outcome.request.device):
            _wanted.give_up(next(reversed(_wanted.begun)))
        tune_others_until(lambda: not tuning.is_waiting)
        while tuning.result is None:
            tuning.step()
            tune_others_until(lambda: not tuning.is_waiting)
    finally:
        _wanted.taken = None
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

    If that fails, the program is left to its own turn, where the error may be raised again.
    """
    name = next((name for name, other in _wanted.begun.items() if other.can_go_on), None)
    if name is None:
        return _begin_another()
    try:
        _wanted.begun[name].step()
    except BaseException as e:
        _wanted.give_up(name)
        if not isinstance(e, Exception):
            raise
        _log.debug("a program is tuned in its own turn: %s", described(e))
    return True


def _begin_another() -> bool:
    """Begin with the next program that was searched, if there is room for another.

    Returns:
        Whether there was one.
    """
    own = 1  # the program that is measured, or that will be
    if own + len([x for x in _wanted.under_way() if x is not _wanted.taken]) >= AT_ONCE:
        return False
    searched = (
        name
        for name, (search, request) in _wanted.requests.items()
        if searching_ahead.has_answer(search) and _has_memory(request.device, request.program)
    )
    name = next(searched, None)
    if name is None:
        return False
    _, request = _wanted.requests.pop(name)
    try:
        if (verified := searching_ahead.take(request)) is not None:
            verified = verified.resized(request.program)
            _wanted.begun[name] = begin(schedule_candidates(request, verified, lambda: ()))
    except Exception as e:
        _log.debug("a program is searched in its own turn: %s", described(e))
    return True


def _name_of(request: Request) -> str:
    """Return a name for all that decides what is measured for a request."""
    return repr((searching_ahead.name_of(request), request.device, request.effort))


def _has_memory(device: torch.device | None, *more: KernelGraph) -> bool:
    """Return whether a GPU has memory for all programs that are under way, and for more."""
    if device is None or device.type != "cuda":
        return True
    programs = [*more, *(each.outcome.request.program for each in _wanted.under_way())]
    size = sum(stored_bytes(t) for program in programs for t in program.inputs)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached
    return free >= _FREE_FACTOR * size + _FREE_BYTES
