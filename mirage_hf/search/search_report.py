"""The report of a search: what it did, and why it stopped."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from mirage_hf.search import counter_labels


class StopReason(str, Enum):
    """Why a search stopped.

    A member compares equal to its text and prints as it: `report.stop == "time"`.
    """

    #: Everything within `max_width` was searched. `Counters.width` is the last width.
    EXHAUSTED = "exhausted"
    #: The time limit was hit. The limit is `SearchOptions.time_limit`, in seconds.
    TIME = "time"
    #: The core kept as many distinct values as it may.
    VALUES = "values"
    #: The core held `SearchOptions.max_forms` normal forms.
    MEMORY = "memory"
    #: The search for algebraic variants visited as many states as it may.
    EXPANSIONS = "expansions"
    #: The exact fractions of the program's constants do not fit into 64 bits.
    CONSTANTS_OVERFLOW = "constants overflow"
    #: The progress callback returned true, or the user pressed Ctrl-C.
    INTERRUPTED = "interrupted"
    #: The program has an op that cannot be part of a fused kernel. `SearchReport.reason` names it.
    NOT_LOWERABLE = "not lowerable"
    #: Nothing was searched. The result was read from a checkpoint or from the cache.
    LOADED = "loaded"

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


@dataclass(frozen=True)
class Counters:
    """Counts of one search, summed over all widths unless a field says otherwise.

    The search first derives values, the distinct intermediate results of the program's algebra. It
    combines them into variants, the complete ways to compute the program. It then cuts variants
    into kernels, which gives plans.
    """

    #: Distinct values that were kept.
    values: int = 0
    #: Ways to compute the kept values.
    derivations: int = 0
    #: Derivations that were tried.
    examined: int = 0
    #: Tried derivations that were pruned because their value cannot be part of any goal.
    outside_goal: int = 0
    #: Tried derivations that were pruned because they compute something and cancel it again.
    cancelling: int = 0
    #: States visited while derivations were combined into variants.
    expansions: int = 0
    #: States that were pruned because another one does the same at lower cost.
    dominated: int = 0
    #: Algebraic variants of the program that were found.
    variants: int = 0
    #: Kernels that were evaluated: a set of outputs with one role for each axis.
    kernels: int = 0
    #: Evaluated kernels that break a rule of block graphs.
    illegal: int = 0
    #: Ways to cut variants into kernels.
    plans: int = 0
    #: Plans that were given up because they cost more than those already kept.
    cost_pruned: int = 0
    #: The largest number of normal forms held at one time, over all widths.
    forms: int = 0
    #: Plans that were kept.
    candidates: int = 0
    #: The cost model's estimate for the cheapest plan in µs, or -1 if there is none.
    best_us: float = -1.0
    #: The last width that was searched to the end, or 0.
    width: int = 0
    #: Wall time.
    seconds: float = 0.0
    #: Wall time until the first plan was kept, or -1 if none was.
    first_seconds: float = -1.0

    def __add__(self, other: Counters) -> Counters:
        """Return the counters of this search followed by `other`."""
        total = {name: getattr(self, name) + getattr(other, name) for name in _FIELDS}
        for name in ("forms", "width"):
            total[name] = max(getattr(self, name), getattr(other, name))
        estimates = [us for us in (self.best_us, other.best_us) if us >= 0]
        total["best_us"] = min(estimates, default=-1.0)
        total["first_seconds"] = self.first_seconds
        if self.first_seconds < 0 <= other.first_seconds:
            total["first_seconds"] = self.seconds + other.first_seconds
        return Counters(**total)


_FIELDS = tuple(Counters.__dataclass_fields__)


@dataclass(frozen=True)
class RejectedCandidate:
    """A µGraph that the search returned and that its proof or its numbers rejected.

    Attributes:
        candidate: Its place in the search's ranking, from 0.
        reason: Which check failed, and by how much.
    """

    candidate: int
    reason: str


@dataclass(frozen=True)
class SearchReport:
    """What a search tried, what verification rejected, and why the search stopped.

    `print(report)` shows all of it. `report.to_dict()` returns it as plain data.

        >>> result = graph.superoptimize()
        >>> result.report.stop
        <StopReason.EXHAUSTED: 'exhausted'>
        >>> [r.reason for r in result.report.rejected]
        ['numbers: inf or NaN in output 0 on large inputs where torch eager has none']
    """

    #: Counts of what was derived, pruned and kept.
    counters: Counters
    #: Why the search stopped.
    stop: StopReason
    #: More about why it stopped, or why nothing was found; empty if there is nothing to add.
    reason: str = ""
    #: The number of candidates that verification accepted.
    found: int = 0
    #: The candidates that verification rejected, each with its reason.
    rejected: tuple[RejectedCandidate, ...] = ()
    #: The largest error bound among the accepted candidates' proofs, or None if none was accepted.
    error_bound: float | None = None
    #: Wall time spent on proofs and numeric checks.
    proof_seconds: float = 0.0
    #: Remarks on single parts of the search, one sentence each.
    notes: tuple[str, ...] = ()
    #: Wall time from the start until a first candidate for the whole program was accepted, or -1.
    first_accepted_seconds: float = -1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as nested dicts, lists, texts and numbers."""
        return asdict(self) | {"stop": str(self.stop)}

    def __str__(self) -> str:
        c = self.counters
        width = ""
        if self.stop is StopReason.EXHAUSTED:
            width = f" at width {c.width}, products of up to {c.width} monomials"
        reason = f" ({self.reason})" if self.reason else ""
        first = f", first kernel after {c.first_seconds:.3f} s" if c.first_seconds >= 0 else ""
        outside, cancelling, dominated, illegal, too_dear = (
            counter_labels.labelled(c, name)
            for name in ("outside_goal", "cancelling", "dominated", "illegal", "cost_pruned")
        )
        lines = [
            f"stopped: {self.stop}{width}{reason}",
            f"search: {c.seconds:.3f} s{first}",
            f"values: {c.values} kept of {c.examined} examined, by {c.derivations} derivations",
            f"variants: {c.variants} from {c.expansions} states",
            f"plans: {c.plans} of {c.kernels} kernels evaluated",
            f"pruned: {outside}, {cancelling}, {dominated}, {illegal}, {too_dear}",
            f"candidates: {self.found} kept, {len(self.rejected)} rejected",
        ]
        if self.error_bound is not None:
            lines.append(f"proof: chance of a wrong acceptance at most {self.error_bound:.1e}")
            lines.append(f"proofs and numeric checks: {self.proof_seconds:.3f} s")
        lines += [f"rejected candidate {r.candidate}: {r.reason}" for r in self.rejected]
        return "\n".join([*lines, *self.notes])
