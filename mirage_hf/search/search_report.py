"""What a search did and why it stopped."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Counters:
    """Counts of one search, over all widths; pruned values, states, kernels and plans by rule; seconds of wall time.

    values: distinct values kept; derivations: ways to compute them; examined: derivations tried, of which outside_goal and
    cancelling were pruned; expansions: states of the search over derivations, dominated: those pruned; variants: algebraic
    variants found; kernels: sets of outputs with one role per axis evaluated, of which illegal; plans: ways to cut variants into
    kernels, cost_pruned: those given up; forms: most normal forms held at a time; candidates: plans kept, best_us: the cheapest
    by the cost model (-1: none); width: the last one searched to the end.
    """

    values: int = 0
    derivations: int = 0
    examined: int = 0
    outside_goal: int = 0
    cancelling: int = 0
    expansions: int = 0
    dominated: int = 0
    variants: int = 0
    kernels: int = 0
    illegal: int = 0
    plans: int = 0
    cost_pruned: int = 0
    forms: int = 0
    candidates: int = 0
    best_us: float = -1.0
    width: int = 0
    seconds: float = 0.0
    first_seconds: float = -1.0

    def __add__(self, other: Counters) -> Counters:
        """The counts of this search followed by another."""
        total = {
            name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__
        }
        total |= {
            name: max(getattr(self, name), getattr(other, name)) for name in ("forms", "width")
        }
        first = self.seconds + other.first_seconds if other.first_seconds >= 0 else -1.0
        best = min((us for us in (self.best_us, other.best_us) if us >= 0), default=-1.0)
        return Counters(
            **total
            | {
                "first_seconds": self.first_seconds if self.first_seconds >= 0 else first,
                "best_us": best,
            }
        )


@dataclass(frozen=True)
class RejectedCandidate:
    """A candidate that was found and not kept: its place in the ranking and why."""

    candidate: int
    reason: str


@dataclass(frozen=True)
class SearchReport:
    """Counters, why the search stopped ("exhausted" at `counters.width`, "time", "values", "memory", "expansions", "interrupted",
    "not lowerable", "loaded"), which candidates were refused, the bound on the probability of a wrong proof, and the seconds from the
    start until a first candidate for the whole program was proven and its numbers checked (-1: none)."""

    counters: Counters
    stop: str
    reason: str = ""
    found: int = 0
    rejected: tuple[RejectedCandidate, ...] = ()
    error_bound: float | None = None
    proof_seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())
    first_accepted_seconds: float = -1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        c = self.counters
        width = f" at width {c.width}" if self.stop == "exhausted" else ""
        reason = f" ({self.reason})" if self.reason else ""
        first = f", first kernel after {c.first_seconds:.3f} s" if c.first_seconds >= 0 else ""
        values_cut = f"(outside every goal {c.outside_goal}, cancelling {c.cancelling})"
        lines = [
            f"stopped: {self.stop}{width}{reason}",
            f"search: {c.seconds:.3f} s{first}",
            f"values: {c.values} kept of {c.examined} examined {values_cut}, {c.derivations} derivations",
            f"variants: {c.variants} from {c.expansions} states (dominated {c.dominated})",
            f"plans: {c.plans} (cut by cost {c.cost_pruned}) of {c.kernels} kernels evaluated (illegal {c.illegal})",
            f"candidates: {self.found} kept, {len(self.rejected)} rejected",
        ]
        if self.error_bound is not None:
            lines.append(
                f"proof: chance of a wrong acceptance at most {self.error_bound:.1e}, {self.proof_seconds:.3f} s"
            )
        lines += [f"rejected candidate {r.candidate}: {r.reason}" for r in self.rejected]
        return "\n".join([*lines, *self.notes])
