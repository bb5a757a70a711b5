"""The candidates of a program, with what measuring gave, and the result of tuning them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune.measure import Timing

#: The status of a candidate: estimated only, measured, measured but slower than what is worth a
#: check, or rejected with a reason.
RANKED, MEASURED, TOO_SLOW, REJECTED = "ranked", "measured", "too slow", "rejected"


@dataclass(frozen=True)
class ScheduledCandidate:
    """A µGraph with a schedule for each of its block graphs, estimated and perhaps measured.

    Attributes:
        ugraph: The µGraph.
        schedules: One per block graph.
        estimate_us: The cost model's estimate.
        status: "ranked" (estimated only), "measured", "too slow" (measured, but its numbers
            were not checked), or "rejected".
        reason: Why it was rejected: it does not compile, or its numbers are wrong.
        timing: The time of calls on their own.
        chain: The time in a chain of dependent kernels, measured for the fastest only.
        next_may_launch_early: A promise about what is launched next, see `place_kernels`.
    """

    ugraph: UGraph
    schedules: tuple[Schedule, ...]
    estimate_us: float
    status: str = RANKED
    reason: str = ""
    timing: Timing | None = None
    chain: Timing | None = None
    next_may_launch_early: bool = False

    def placed(self) -> tuple[PlacedOp, ...]:
        """Return the kernels as they run."""
        return place_kernels(self.ugraph, self.next_may_launch_early)

    def generate(self) -> triton.GeneratedProgram:
        """Generate the candidate's kernels."""
        return triton.generate(
            self.ugraph, self.schedules, next_may_launch_early=self.next_may_launch_early
        )

    def rejected(self, reason: str) -> ScheduledCandidate:
        """Return the candidate as rejected for this reason."""
        return replace(self, status=REJECTED, reason=reason)

    @property
    def us(self) -> float:
        """The best known time: in a chain, alone, or the estimate."""
        best = self.chain or self.timing
        return best.us if best is not None else self.estimate_us

    @property
    def is_library(self) -> bool:
        """Whether this is the library path."""
        return not self.ugraph.is_fused

    def to_dict(self) -> dict[str, Any]:
        """Return the candidate as plain data."""
        times = {}
        for prefix, timing in (("", self.timing), ("chain_", self.chain)):
            if timing is not None:
                times[f"{prefix}us"] = timing.us
                times[f"{prefix}low"] = timing.low
                times[f"{prefix}high"] = timing.high
        return {
            "kernels": self.ugraph.num_kernels,
            "schedules": [s.to_dict() for s in self.schedules],
            "status": self.status,
            "reason": self.reason,
            "estimate_us": round(self.estimate_us, 3),
            **times,
        }


@dataclass(frozen=True)
class TuneResult:
    """What was tried for one program on one device: times in µs, or estimates without a GPU.

    Attributes:
        device: The GPU's name.
        best: The fastest candidate.
        best_searched: The fastest with a generated kernel, kept even if the library is faster. None
            if all were rejected.
        library: The library path.
        candidates: All candidates, best first.
    """

    device: str
    best: ScheduledCandidate
    best_searched: ScheduledCandidate | None
    library: ScheduledCandidate
    candidates: tuple[ScheduledCandidate, ...]

    @staticmethod
    def of(device: str, candidates: Sequence[ScheduledCandidate]) -> TuneResult:
        """Sort candidates and name the best ones.

        Measured candidates come first, those in a chain before others. Then come those that were
        estimated only, then slow and rejected ones.
        """
        order = {MEASURED: 0, RANKED: 1, TOO_SLOW: 2, REJECTED: 3}
        ranked = tuple(sorted(candidates, key=lambda c: (order[c.status], c.chain is None, c.us)))
        usable = [c for c in ranked if c.status in (MEASURED, RANKED)]
        library = next(c for c in ranked if c.is_library)
        searched = next((c for c in usable if not c.is_library), None)
        return TuneResult(device, usable[0] if usable else library, searched, library, ranked)

    @property
    def measured(self) -> bool:
        """Whether anything was measured."""
        return self.best.timing is not None

    @property
    def searched(self) -> tuple[ScheduledCandidate, ...]:
        """Measured candidates with generated kernels."""
        return tuple(c for c in self.candidates if c.status == MEASURED and not c.is_library)

    def ugraphs(self) -> tuple[UGraph, ...]:
        """Return every µGraph once, with its best schedules, best first.

        A µGraph is left out if all its candidates were too slow or rejected.
        """
        best: dict[int, UGraph] = {}
        for c in self.candidates:
            if c.status in (TOO_SLOW, REJECTED) or id(c.ugraph.kernels) in best:
                continue
            scheduled = replace(c.ugraph, schedules=c.schedules) if c.schedules else c.ugraph
            best[id(c.ugraph.kernels)] = scheduled
        return tuple(best.values())

    def program(self) -> triton.GeneratedProgram:
        """Return the generated program of the fastest candidate."""
        return self.best.generate()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "device": self.device,
            "best_us": self.best.us,
            "best_is_library": self.best.is_library,
            "library_us": self.library.us,
            "searched_us": self.best_searched.us if self.best_searched else None,
            "candidates": [c.to_dict() for c in self.candidates],
        }


def fastest(candidates: Sequence[ScheduledCandidate], count: int) -> list[ScheduledCandidate]:
    """Return the fastest candidates that were measured and have generated kernels."""
    searched = [c for c in candidates if c.status == MEASURED and not c.is_library]
    return sorted(searched, key=lambda c: c.us)[:count]
