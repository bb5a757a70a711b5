"""From found to trusted: every candidate is proven, then checked by numbers; what is refused says why."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import Found, SearchOptions, Steps, search
from mirage_hf.search.report import Refusal, SearchReport
from mirage_hf.verify.fingerprint import prove
from mirage_hf.verify.numeric import NumericCheck, judge_on_cpu
from mirage_hf.verify.verdict import Accepted, Refused, Verdict


@dataclass(frozen=True)
class Candidate:
    """A µGraph that equals its program. `scalar` and `tensor_cores` say whether its rounding may run when contractions are
    float32 multiply-adds, and when their factors are rounded to the run dtype."""

    ugraph: UGraph
    cost_us: float
    error_bound: float
    scalar: Verdict
    tensor_cores: Verdict

    def allows(self, mma: bool) -> bool:
        return isinstance(self.tensor_cores if mma else self.scalar, Accepted)


@dataclass(frozen=True)
class Acceptance:
    """Candidates in the search's order, refusals with reasons, the worst error bound, and seconds spent."""

    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]
    error_bound: float | None
    seconds: float


def accept(found: Iterable[Found], *, keep: int = 6, seed: int = 0,
           on_candidate: Callable[[int, Verdict], Any] | None = None) -> Acceptance:
    """Prove and check candidates, best first, until `keep` may run on multiply-adds and `keep` on tensor cores.

    One that adds to neither is left out, so the forms that only multiply-adds may run do not push out a range-safe one.
    """
    start = time.perf_counter()
    kept: list[Candidate] = []
    refused: list[Refusal] = []
    checks: dict[object, NumericCheck] = {}
    for number, f in enumerate(found):
        room = {mma: sum(c.allows(mma) for c in kept) < keep for mma in (False, True)}
        if not any(room.values()):
            break
        proof = prove(f.ugraph, seed=seed)
        verdict: Verdict = proof
        if isinstance(proof, Accepted):
            scalar, cores = (judge_on_cpu(f.ugraph, checks, mma) for mma in (False, True))
            if isinstance(scalar, Refused) and isinstance(cores, Refused):
                verdict = scalar
            else:
                candidate = Candidate(f.ugraph, f.cost_us, proof.bound, scalar, cores)
                if any(room[mma] and candidate.allows(mma) for mma in room):
                    kept.append(candidate)
        if isinstance(verdict, Refused):
            refused.append(Refusal(number, verdict.reason))
        if on_candidate:
            on_candidate(number, verdict)
    bound = max((c.error_bound for c in kept), default=None)
    return Acceptance(tuple(kept), tuple(refused), bound, time.perf_counter() - start)


Progress = Callable[[str, Any], "bool | None"]
"""Called as progress(stage, detail): ("search", Counters), ("verify", Verdict), ("tune", (done, total, what)). A true result
stops a search."""


@dataclass(frozen=True)
class Searched:
    """Candidates that may run, best estimate first, and the report."""

    candidates: tuple[Candidate, ...]
    report: SearchReport

    def ugraphs(self) -> tuple[UGraph, ...]:
        return tuple(c.ugraph for c in self.candidates)


def search_and_verify(program: KernelGraph, options: SearchOptions, progress: Progress | None = None, *, seed: int = 0,
                      steps: Steps | None = None) -> Searched:
    """Search `program` and keep the candidates that are proven and whose numbers hold. Steps that `steps` has are not made again."""
    say = progress or (lambda stage, detail: None)
    found, report = search(program, options, lambda counters: say("search", counters), steps)
    accepted = accept(found, seed=seed, on_candidate=lambda number, verdict: say("verify", verdict))
    return Searched(accepted.candidates, replace(report, found=len(accepted.candidates), refused=accepted.refused,
                                                 error_bound=accepted.error_bound, proof_seconds=accepted.seconds))
