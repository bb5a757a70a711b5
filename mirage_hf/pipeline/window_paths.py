"""Choose how to compute each part of a program: paths of windows and library calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mirage_hf.search.cut import Window
from mirage_hf.search.search_journal import RankedUGraph
from mirage_hf.verify.accept import Candidate


@dataclass(frozen=True)
class Choice:
    """One way to compute a window: a µGraph, or library calls if it has none.

    Attributes:
        window: The window.
        us: The estimate in µs, with the views around the window.
        kernels: The number of kernels or library calls.
        candidate: The µGraph, if it is verified.
        unverified: The µGraph, if it is not verified yet.
    """

    window: Window
    us: float
    kernels: int
    candidate: Candidate | None = None
    unverified: RankedUGraph | None = None

    @property
    def is_library(self) -> bool:
        """True if library calls compute the window."""
        return self.candidate is None and self.unverified is None


#: A choice for every part of the program, in order.
Path = tuple[Choice, ...]

#: The weight of a choice. Weights of a path are added, and compared entry by entry.
Weight = Callable[[Choice], tuple[float, float, float]]


def by_time(choice: Choice) -> tuple[float, float, float]:
    """Weigh a choice by its estimate, then by its launches."""
    return choice.us, choice.kernels, 0.0


def by_launches(choice: Choice) -> tuple[float, float, float]:
    """Weigh a choice by its launches, then by library calls, whose estimates are the weakest."""
    return choice.kernels, choice.kernels if choice.is_library else 0.0, choice.us


def lightest_paths(
    choices: Iterable[Choice], num_units: int, weight: Weight, count: int
) -> list[Path]:
    """Return the lightest sequences of choices from the first unit to the last.

    Args:
        choices: The choices. Of equally light paths, those of earlier choices come first.
        num_units: The number of units of the program.
        weight: The weight of a choice.
        count: How many paths to return.
    """
    ending: list[list[Choice]] = [[] for _ in range(num_units + 1)]
    for choice in choices:
        ending[choice.window.stop].append(choice)
    start: tuple[float, ...] = (0.0, 0.0, 0.0)
    best: list[list[tuple[tuple[float, ...], Path]]] = [[(start, ())]]
    for here in ending[1:]:
        ways = [
            (tuple(map(operator.add, total, weight(choice))), (*path, choice))
            for choice in here
            for total, path in best[choice.window.start]
        ]
        # Sorting is stable, so equal weights come in the same order in every run.
        best.append(sorted(ways, key=lambda way: way[0])[:count])
    return [path for _, path in best[-1]]
