"""Choose one candidate for each program of a layer, by the time of the whole layer."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.tune import measure
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.measure import Timing
from mirage_hf.tune.turns import undisturbed

#: The most candidates of each program to try. With 8, two layers took as long as with 5, and the
#: choice three times as long. With 3, they were up to 7% slower.
MOST_CANDIDATES = 5

#: The most times that all pairs of neighbours are gone through.
MOST_SWEEPS = 2

#: Least relative gain of the whole layer that counts as better.
LEAST_GAIN = 0.002

#: Measuring a choice stops at this many times the best layer's time.
SLOW = 1.02


def choose_for_layer(
    choices: Sequence[Sequence[ScheduledCandidate]], *, device: torch.device | str, replays: int = 7
) -> tuple[list[ScheduledCandidate], Timing]:
    """Choose one candidate of each program by the time of all programs run as one layer.

    The choice starts with the first candidate of each program. Then the candidates of two
    neighbours are changed at a time, as long as that helps. Two at a time, because their overlap
    matters as much as the time of either.

    Args:
        choices: Measured candidates of each program, best first, in the order in which the programs
            run.
        device: The GPU.
        replays: Replays of each timing.

    Returns:
        The chosen candidates, and the time of all programs.
    """
    with torch.cuda.device(device), torch.no_grad(), compiler.passing():
        layer = measure.Layer([c[0].ugraph.program for c in choices], device)
        tried = [_diverse(found) for found in choices]
        runs = [[measure.run_of(c.generate()) for c in found] for found in tried]

        def time(at: Sequence[int], to_beat: float = math.inf) -> Timing:
            chosen_runs = [run[k] for run, k in zip(runs, at, strict=True)]
            return undisturbed(partial(layer.time, chosen_runs, replays, to_beat))

        chosen = (0,) * len(choices)
        best = time(chosen)
        for _ in range(MOST_SWEEPS):
            before = chosen
            for pair, both in _pair_choices([len(run) for run in runs]):
                other = _with_pair(chosen, pair, both)
                if other == chosen:
                    continue
                if time(other, best.us * SLOW).us > best.us * (1 - LEAST_GAIN):
                    continue
                # Measure both again, so that one lucky reading decides nothing.
                best, again = time(chosen), time(other)
                if again.us < best.us * (1 - LEAST_GAIN):
                    chosen, best = other, again
            if chosen == before:
                break
        return [found[k] for found, k in zip(tried, chosen, strict=True)], best


def _pair_choices(counts: Sequence[int]) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """Yield two neighbours, by position, and a candidate of each, by number.

    The last program and the first are neighbours too, because layers repeat.
    """
    for n in range(len(counts) if len(counts) > 2 else 1):
        pair = n, (n + 1) % len(counts)
        for both in itertools.product(*(range(counts[p]) for p in pair)):
            yield pair, both


def _with_pair(chosen: Sequence[int], pair: Sequence[int], both: Sequence[int]) -> tuple[int, ...]:
    """Return the chosen numbers with those of two programs replaced."""
    other = list(chosen)
    for position, number in zip(pair, both, strict=True):
        other[position] = number
    return tuple(other)


def _diverse(found: Sequence[ScheduledCandidate]) -> list[ScheduledCandidate]:
    """Return the first of every µGraph and set of tiles, then others.

    Tiles affect neighbours most.
    """
    seen: Counter[Any] = Counter()
    earlier_alike: list[int] = []
    for c in found:
        kind = id(c.ugraph.kernels), tuple(s.tiles for s in c.schedules)
        earlier_alike.append(seen[kind])
        seen[kind] += 1
    order = sorted(range(len(found)), key=lambda n: earlier_alike[n])
    return [found[n] for n in order[:MOST_CANDIDATES]]
