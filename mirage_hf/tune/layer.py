"""Choose one candidate for each program of a layer, by the time of the whole layer."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.tune import measure
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.measure import Timing
from mirage_hf.tune.turns import undisturbed

#: The most candidates of each program to try.
MOST_CANDIDATES = 16

#: Candidates that take longer than this many times the fastest one's time are not tried. A kernel
#: that is slower by itself may leave room for its neighbours. One that was chosen took 1.27 times
#: as long.
NEARLY = 1.35

#: The best candidates of each program that are tried together with those of its neighbour. The
#: chosen one is mostly among them, and is left out then.
MOST_OF_PAIRS = 3

#: The most times that all programs are gone through before pairs of neighbours are, and the most
#: times that pairs are.
MOST_SWEEPS = 3

#: Least relative gain of the whole layer that counts as better.
LEAST_GAIN = 0.002

#: Measuring a choice stops at this many times the best layer's time. A candidate that took longer
#: is not tried by itself again until a pair was changed.
SLOW = 1.02


def choose_for_layer(
    choices: Sequence[Sequence[ScheduledCandidate]], *, device: torch.device | str, replays: int = 7
) -> tuple[list[ScheduledCandidate], Timing]:
    """Choose one candidate of each program by the time of all programs run as one layer.

    The choice starts with the first candidate of each program. Then one candidate is changed at a
    time, as long as that helps. Then the best few of two neighbours are changed together, because
    their overlap matters as much as the time of either.

    Args:
        choices: Measured candidates of each program, best first, in the order in which the programs
            run.
        device: The GPU.
        replays: Replays of each timing.

    Returns:
        The chosen candidates, and the time of all programs.
    """
    with torch.cuda.device(device), torch.no_grad(), compiler.passing() as load:
        return _chosen(choices, device, replays, load)


def _chosen(
    choices: Sequence[Sequence[ScheduledCandidate]],
    device: torch.device | str,
    replays: int,
    load: compiler.Load,
) -> tuple[list[ScheduledCandidate], Timing]:
    """Choose as `choose_for_layer`. Functions are released before their sources are forgotten."""
    layer = measure.Layer([c[0].ugraph.program for c in choices], device)
    tried = [_worth_trying(found) for found in choices]
    runs = [[measure.run_of(c.generate(), load) for c in found] for found in tried]

    def time(at: Sequence[int], to_beat: float) -> Timing:
        chosen_runs = [run[k] for run, k in zip(runs, at, strict=True)]
        return undisturbed(partial(layer.time, chosen_runs, replays, to_beat))

    search = _Descent(time, [len(run) for run in runs])
    search.run()
    return [found[k] for found, k in zip(tried, search.chosen, strict=True)], search.best


class _Descent:
    """Changes one number of a choice at a time, or two, as long as its time gets shorter.

    Attributes:
        chosen: The candidate of each program, by number.
        best: The time of these.
    """

    def __init__(self, time: Callable[[Sequence[int], float], Timing], counts: Sequence[int]):
        """Start with the first candidate of each program.

        Args:
            time: Returns the time of a choice. It may stop early if it does not beat a time in µs.
            counts: How many candidates each program has.
        """
        self._time, self._counts = time, counts
        self.chosen = (0,) * len(counts)
        self.best = time(self.chosen, math.inf)
        #: The time with each candidate, divided by the best time when it was last tried by itself.
        #: 0: it was not tried yet.
        self._slowness = [[0.0] * count for count in counts]

    def run(self) -> None:
        """Change candidates until no change is better, or enough were tried."""
        for _ in range(MOST_SWEEPS):
            for _ in range(MOST_SWEEPS):
                if not self.sweep():
                    break
            if not self.sweep_pairs():
                break
            self._slowness = [[0.0] * count for count in self._counts]

    def sweep(self) -> bool:
        """Try each candidate of each program that may be the best.

        Returns:
            Whether one was better.
        """
        before = self.chosen
        for n, count in enumerate(self._counts):
            for k in range(count):
                if k == self.chosen[n]:
                    self._slowness[n][k] = 1.0
                elif self._slowness[n][k] <= SLOW:
                    best_us = self.best.us
                    self._slowness[n][k] = self._try({n: k}) / best_us
        return self.chosen != before

    def sweep_pairs(self) -> bool:
        """Try the best candidates of two neighbours together. Return whether a pair was better.

        The last program and the first are neighbours too, because layers repeat.
        """
        before, size = self.chosen, len(self._counts)
        best = [sorted(range(len(of)), key=of.__getitem__)[:MOST_OF_PAIRS] for of in self._slowness]
        for n in range(size if size > 2 else size - 1):
            other = (n + 1) % size
            for a, b in itertools.product(best[n], best[other]):
                if a != self.chosen[n] and b != self.chosen[other]:
                    self._try({n: a, other: b})
        return self.chosen != before

    def _try(self, changes: Mapping[int, int]) -> float:
        """Take some programs' other candidates if that is better. Return the time in µs."""
        other = tuple(changes.get(n, k) for n, k in enumerate(self.chosen))
        found = self._time(other, self.best.us * SLOW)
        if found.us > self.best.us * (1 - LEAST_GAIN):
            return found.us
        # Measure both again, so that one lucky reading decides nothing.
        self.best, again = self._time(self.chosen, math.inf), self._time(other, math.inf)
        if again.us < self.best.us * (1 - LEAST_GAIN):
            self.chosen, self.best = other, again
        return again.us


def _worth_trying(found: Sequence[ScheduledCandidate]) -> list[ScheduledCandidate]:
    """Return candidates that are not much slower than the fastest by themselves.

    If there are too many, the first of every µGraph and set of tiles come before others.
    """
    fastest_us = min(map(_alone_us, found))
    fast = [c for c in found if _alone_us(c) <= NEARLY * fastest_us]
    seen: Counter[Any] = Counter()
    earlier_alike: list[int] = []
    for c in fast:
        kind = id(c.ugraph.kernels), tuple(s.tiles for s in c.schedules)
        earlier_alike.append(seen[kind])
        seen[kind] += 1
    order = sorted(range(len(fast)), key=lambda n: earlier_alike[n])
    return [fast[n] for n in order[:MOST_CANDIDATES]]


def _alone_us(candidate: ScheduledCandidate) -> float:
    """Return the time of calls on their own, or the estimate."""
    return candidate.timing.us if candidate.timing else candidate.estimate_us
