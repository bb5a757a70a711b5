"""From found to trusted: every candidate is proven, then checked by numbers; what is refused says why."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.search.engine import RankedUGraph
from mirage_hf.search.regroup import regrouped
from mirage_hf.search.search_report import RejectedCandidate
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.numeric import NumericCheck, judge_on_cpu
from mirage_hf.verify.verdict import Accepted, Verdict


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
    """Candidates in the search's order, refusals with reasons, the worst error bound, seconds spent, and those to the first candidate
    (-1: none); how many were left because time was up."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[RejectedCandidate, ...]
    error_bound: float | None
    seconds: float
    first_seconds: float = -1.0
    late: int = 0


EACH = 3
"""Candidates of each number of kernels that are checked although there are enough of other numbers, each of a kind of its own."""


def kind_of(ugraph: UGraph) -> tuple[object, ...]:
    """What the kernels of a µGraph keep in device memory for each other: the axes of each tensor, whether whole or in parts."""
    return tuple(
        tuple(a for a in o.axes if a is not None and op.block.axis_split_by(a) is None)
        for op in ugraph.block_ops[:-1]
        if op.block
        for o in op.block.outputs
    )


KEEP = 6
"""Candidates that are kept to be measured."""


def accept(
    found: Sequence[RankedUGraph],
    *,
    keep: int = KEEP,
    seed: int = 0,
    seconds: float = math.inf,
    on_candidate: Callable[[int, Verdict], Any] | None = None,
) -> Acceptance:
    """Prove and check candidates, best first, until `keep` may run on multiply-adds and `keep` on tensor cores, or `seconds` are
    over and there is one; where more than one is kept, of each number of kernels as many as `EACH`, which keep different things in
    between, while there is time.

    One that adds to neither is left out, so the forms that only multiply-adds may run do not push out a range-safe one.
    """
    start, first = time.perf_counter(), -1.0
    kept: list[Candidate] = []
    refused: list[RejectedCandidate] = []
    checks: dict[object, NumericCheck] = {}
    late, each = 0, min(EACH, keep - 1)
    for number, f in enumerate(found):
        kinds = {
            mma: {
                kind_of(c.ugraph)
                for c in kept
                if c.ugraph.num_kernels == f.ugraph.num_kernels and c.allows(mma)
            }
            for mma in (False, True)
        }
        room = {
            mma: sum(c.allows(mma) for c in kept) < keep
            or (len(kinds[mma]) < each and kind_of(f.ugraph) not in kinds[mma])
            for mma in (False, True)
        }
        if not any(room.values()):
            continue
        if kept and time.perf_counter() - start > seconds:
            late = len(found) - number
            break
        proof = prove(f.ugraph, seed=seed)
        verdict: Verdict = proof
        if isinstance(proof, Accepted):
            scalar, cores = (judge_on_cpu(f.ugraph, checks, mma) for mma in (False, True))
            if isinstance(scalar, Rejected) and isinstance(cores, Rejected):
                verdict = scalar
            else:
                candidate = Candidate(f.ugraph, f.cost_us, proof.bound, scalar, cores)
                if isinstance(cores, Rejected) and room[True]:
                    kept += _other_grouping(f, checks, seed)
                if any(room[mma] and candidate.allows(mma) for mma in room):
                    kept.append(candidate)
                    first = first if first >= 0 else time.perf_counter() - start
        if isinstance(verdict, Rejected):
            refused.append(RejectedCandidate(number, verdict.reason))
        if on_candidate:
            on_candidate(number, verdict)
    bound = max((c.error_bound for c in kept), default=None)
    return Acceptance(tuple(kept), tuple(refused), bound, time.perf_counter() - start, first, late)


def _other_grouping(
    f: RankedUGraph, checks: dict[object, NumericCheck], seed: int
) -> list[Candidate]:
    """What tensor cores may run instead of a form whose rounded factors leave their range, if there is such a form."""
    other = regrouped(f.ugraph)
    proof = prove(other, seed=seed) if other is not None else Rejected("nothing to regroup")
    if other is None or isinstance(proof, Rejected):
        return []
    scalar, cores = (judge_on_cpu(other, checks, mma) for mma in (False, True))
    return (
        [Candidate(other, f.cost_us, proof.bound, scalar, cores)]
        if isinstance(cores, Accepted)
        else []
    )


def examine(
    ugraph: UGraph, *, seed: int = 0, checks: dict[object, NumericCheck] | None = None
) -> Candidate | Rejected:
    """Prove that a µGraph equals its program and check its numbers, whoever wrote it.

    Args:
        ugraph: The µGraph.
        seed: The seed of the proof's random inputs.
        checks: Keeps the references of numeric checks among µGraphs of one program.
    """
    for what, mine, theirs in (
        ("inputs", ugraph.kernels.inputs, ugraph.program.inputs),
        ("outputs", ugraph.kernels.outputs, ugraph.program.outputs),
    ):
        if len(mine) != len(theirs):
            return Rejected(f"the kernels have {len(mine)} {what}, the program has {len(theirs)}")
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if (a.dims, a.dtype, a.strides, a.constant) != (b.dims, b.dtype, b.strides, b.constant):
                return Rejected(
                    f"{what[:-1]} {k} of the kernels is {_layout(a)}, the program's is {_layout(b)}"
                )
    proof = prove(ugraph, seed=seed)
    if isinstance(proof, Rejected):
        return proof
    if not ugraph.is_fused:
        return Candidate(ugraph, 0.0, proof.bound, proof, proof)
    checks = {} if checks is None else checks
    scalar, cores = (judge_on_cpu(ugraph, checks, mma) for mma in (False, True))
    if isinstance(scalar, Rejected) and isinstance(cores, Rejected):
        return scalar
    return Candidate(ugraph, 0.0, proof.bound, scalar, cores)


def _layout(t: DTensor) -> str:
    return f"{table.dtype_name(t.dtype)} {errors.shape(t.dims)} with strides {errors.shape(t.strides)}{', constant' if t.constant else ''}"


def verify(program: KernelGraph, kernels: KernelGraph) -> Verdict:
    """Whether `kernels`, a kernel graph with customized ops, computes what `program` says: proven, and its numbers checked.

    Returns Accepted with the bound on the chance that the proof is wrong, or Rejected with the reason. Errors: GraphError for what
    are not kernel graphs.
    """
    for what, graph in (("program", program), ("kernels", kernels)):
        if not isinstance(graph, KernelGraph):
            raise errors.GraphError(
                f"verify: {what} must be a graph made by mi.new_kernel_graph(), it is {type(graph).__name__}"
            )
    found = examine(UGraph(program, kernels))
    if isinstance(found, Rejected):
        return found
    details = [
        f"{how}: {v.detail if isinstance(v, Accepted) else v.reason}"
        for how, v in (("multiply-adds", found.scalar), ("tensor cores", found.tensor_cores))
    ]
    return Accepted(found.error_bound, "; ".join(details))
