"""Decide which µGraphs may run: prove each equal to its program, then check its rounding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.regroup import regrouped
from mirage_hf.search.scaled_codes import sums_groups_of_codes, with_scaled_codes
from mirage_hf.search.search_journal import RankedUGraph
from mirage_hf.search.search_report import RejectedCandidate
from mirage_hf.verify.divisors import new_divisor
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.interface import interface_differs
from mirage_hf.verify.numeric import NumericChecks, judge_by_torch
from mirage_hf.verify.verdict import Accepted, Verdict

#: Candidates that are kept for each kind of arithmetic, to be measured.
KEEP = 6

#: Candidates that are kept for each number of kernels, even if there are `KEEP` with other numbers.
#: Each must store something else between its kernels.
KEEP_OF_EACH_COUNT = 3

#: The kinds of arithmetic, as values of `Schedule.mma`: without and with tensor cores.
_ARITHMETIC = (False, True)


@dataclass(frozen=True)
class Candidate:
    """A µGraph that is proven to compute its program, and how its contractions may be computed.

    Attributes:
        ugraph: The program and its kernels.
        cost_us: The search's estimate in µs.
        error_bound: The probability that the proof is wrong is at most this.
        scalar: The verdict on its rounding with float32 multiply-adds.
        tensor_cores: The verdict with factors rounded to the run dtype, as tensor cores need them.
    """

    ugraph: UGraph
    cost_us: float
    error_bound: float
    scalar: Verdict
    tensor_cores: Verdict

    def allows(self, mma: bool) -> bool:
        """True if contractions may run on tensor cores (`mma`), or as multiply-adds."""
        return isinstance(self.tensor_cores if mma else self.scalar, Accepted)


@dataclass(frozen=True)
class Acceptance:
    """What `accept` decided.

    Attributes:
        candidates: The accepted µGraphs, in the search's order.
        rejected: The µGraphs that were examined and rejected, each with its reason.
        error_bound: The largest error bound of the candidates, or None if there are none.
        seconds: Wall time.
        first_seconds: Wall time until the first candidate was accepted, or -1.
        late: How many µGraphs were not examined because time was up.
    """

    candidates: tuple[Candidate, ...]
    rejected: tuple[RejectedCandidate, ...]
    error_bound: float | None
    seconds: float
    first_seconds: float = -1.0
    late: int = 0


def kind_of(ugraph: UGraph) -> tuple[object, ...]:
    """Return the axes of each tensor that the kernels of a µGraph store for later ones.

    Axes that number splits are left out, so a value and its partial results are one kind. A single
    kernel stores nothing for others. Its kind is the axis that it loops over, because some loops
    suit tensor cores only, and others multiply-adds only. If its blocks form clusters, the axis
    that they split is part of the kind.
    """
    if ugraph.num_kernels == 1:
        blocks = [op.block for op in ugraph.block_ops if op.block]
        loops = [a.name for block in blocks for a in block.named(Role.LOOP)]
        clusters = [block.axis_split_by(block.cluster.name) for block in blocks if block.cluster]
        return (*loops, *(("cluster", axis) for axis in clusters))
    return tuple(
        tuple(a for a in output.axes if a is not None and op.block.axis_split_by(a) is None)
        for op in ugraph.block_ops[:-1]
        if op.block
        for output in op.block.outputs
    )


def accept(
    ranked: Sequence[RankedUGraph],
    *,
    keep: int = KEEP,
    seed: int = 0,
    seconds: float = math.inf,
    on_candidate: Callable[[int, Verdict], Any] | None = None,
) -> Acceptance:
    """Prove and check µGraphs, best first, until enough of them may run.

    Candidates for multiply-adds and for tensor cores are counted apart. So forms for multiply-adds
    alone do not push out a form for tensor cores.

    Args:
        ranked: The search's results, best first.
        keep: How many candidates to keep for multiply-adds, and how many for tensor cores. If it is
            more than one, up to `KEEP_OF_EACH_COUNT` of each number of kernels are kept as well.
        seed: Seed of the proofs' random inputs.
        seconds: Stop after this time if there is a candidate.
        on_candidate: Called with each examined µGraph's place and verdict.

    Returns:
        The accepted and the rejected µGraphs.
    """
    start = time.perf_counter()
    selection = _Selection(keep)
    rejected: list[RejectedCandidate] = []
    checks = NumericChecks()
    first_seconds, late = -1.0, 0
    for number, r in enumerate(ranked):
        room = selection.room_for(r.ugraph)
        if not room:
            continue
        if selection.candidates and time.perf_counter() - start > seconds:
            late = len(ranked) - number
            break
        verdict = _why_refused(r.ugraph) or prove(r.ugraph, seed=seed)
        if isinstance(verdict, Accepted):
            candidate = _check_rounding(r.ugraph, verdict, r.cost_us, checks)
            if isinstance(candidate, Rejected):
                verdict = candidate
            else:
                if True in room and not candidate.allows(mma=True):
                    selection.candidates += _other_grouping(r, checks, seed)
                if any(candidate.allows(mma) for mma in room):
                    selection.candidates.append(candidate)
                    if True in room and not selection.sums_groups_of_codes():
                        selection.candidates += _with_scaled_codes(r, checks, seed)
                    if first_seconds < 0:
                        first_seconds = time.perf_counter() - start
        if isinstance(verdict, Rejected):
            rejected.append(RejectedCandidate(number, verdict.reason))
        if on_candidate:
            on_candidate(number, verdict)
    candidates = tuple(selection.candidates)
    bound = max((c.error_bound for c in candidates), default=None)
    elapsed = time.perf_counter() - start
    return Acceptance(candidates, tuple(rejected), bound, elapsed, first_seconds, late)


@dataclass
class _Selection:
    """The candidates that are kept so far."""

    keep: int
    candidates: list[Candidate] = field(default_factory=list)

    def room_for(self, ugraph: UGraph) -> set[bool]:
        """Return the kinds of arithmetic for which one more candidate like `ugraph` is wanted."""
        each = min(KEEP_OF_EACH_COUNT, self.keep - 1)
        room = set()
        for mma in _ARITHMETIC:
            if mma and not suits_tensor_cores(ugraph):
                continue
            allowed = [
                c.ugraph
                for c in self.candidates
                if c.allows(mma) and (not mma or suits_tensor_cores(c.ugraph))
            ]
            kinds = {kind_of(u) for u in allowed if u.num_kernels == ugraph.num_kernels}
            is_new_kind = len(kinds) < each and kind_of(ugraph) not in kinds
            if len(allowed) < self.keep or is_new_kind:
                room.add(mma)
        return room

    def sums_groups_of_codes(self) -> bool:
        """Return True if a kept candidate may sum several groups of codes in one product."""
        return any(c.allows(mma=True) and sums_groups_of_codes(c.ugraph) for c in self.candidates)


def suits_tensor_cores(ugraph: UGraph) -> bool:
    """Return True if a µGraph has a product that a tensor core could compute.

    The factors of such a product share no axis that a block holds whole, except the summed one. The
    others may run as multiply-adds only, whatever their rounding on tensor cores would be.
    """
    for block in (op.block for op in ugraph.block_ops if op.block):
        held = {a.name for a in block.named(Role.TILE) if block.split_size(a.name) > 1}
        for c in block.contractions.values():
            shared = {*block.carried[c.a]} & {*block.carried[c.b]} - {c.over}
            if not shared & held:
                return True
    return False


def _why_refused(ugraph: UGraph) -> Rejected | None:
    """Return why a µGraph may not run, whatever a proof says. One of a checkpoint may be edited."""
    return interface_differs(ugraph.program, ugraph.kernels) or new_divisor(ugraph)


def _check_rounding(
    ugraph: UGraph, proof: Accepted, cost_us: float, checks: NumericChecks
) -> Candidate | Rejected:
    """Return a proven µGraph as a candidate, or the reason if neither arithmetic may run it."""
    scalar, tensor_cores = (judge_by_torch(ugraph, checks, mma) for mma in _ARITHMETIC)
    if isinstance(scalar, Rejected) and isinstance(tensor_cores, Rejected):
        return scalar
    return Candidate(ugraph, cost_us, proof.bound, scalar, tensor_cores)


def _other_grouping(ranked: RankedUGraph, checks: NumericChecks, seed: int) -> list[Candidate]:
    """Return another grouping of the µGraph that tensor cores may run, if there is one.

    It serves a µGraph whose factors leave their range when they are rounded.
    """
    return _for_tensor_cores(regrouped(ranked.ugraph), ranked, checks, seed)


def _with_scaled_codes(ranked: RankedUGraph, checks: NumericChecks, seed: int) -> list[Candidate]:
    """Return the µGraph with scales in the factors that tensor cores multiply, if there is one."""
    return _for_tensor_cores(with_scaled_codes(ranked.ugraph), ranked, checks, seed)


def _for_tensor_cores(
    other: UGraph | None, ranked: RankedUGraph, checks: NumericChecks, seed: int
) -> list[Candidate]:
    """Return another form of a µGraph as a candidate if it is proven and tensor cores may run it.

    Args:
        other: The other form, or None.
        ranked: The µGraph.
        checks: Keeps references of numeric checks.
        seed: Seed of the proof's random inputs.
    """
    if other is None or new_divisor(other):
        return []
    proof = prove(other, seed=seed)
    if not isinstance(proof, Accepted):
        return []
    candidate = _check_rounding(other, proof, ranked.cost_us, checks)
    if isinstance(candidate, Rejected) or not candidate.allows(mma=True):
        return []
    return [candidate]


def examine(
    ugraph: UGraph, *, seed: int = 0, checks: NumericChecks | None = None
) -> Candidate | Rejected:
    """Prove that a µGraph computes its program, and check its divisors and its rounding.

    Args:
        ugraph: The program and its kernels.
        seed: Seed of the proof's random inputs.
        checks: Keeps references of numeric checks, so that µGraphs of one program share them.
    """
    if refused := _why_refused(ugraph):
        return refused
    proof = prove(ugraph, seed=seed)
    if isinstance(proof, Rejected):
        return proof
    if not ugraph.is_fused:
        return Candidate(ugraph, 0.0, proof.bound, proof, proof)
    return _check_rounding(ugraph, proof, 0.0, NumericChecks() if checks is None else checks)


def verify(program: KernelGraph, kernels: KernelGraph) -> Verdict:
    """Verify that `kernels` computes what `program` says.

    Equality is proven. Rounding is checked in the dtypes of the kernels, and what they divide by.

        >>> mi.verify(program, kernels)
        Accepted(bound=2.6e-31, detail='multiply-adds: largest error 1.00× eager's; …')

    Args:
        program: A tensor program.
        kernels: A kernel graph with customized ops on the same inputs.

    Returns:
        `Accepted` with the bound on the probability that the proof is wrong, or `Rejected` with the
        reason.

    Raises:
        GraphError: If an argument is not a kernel graph.
    """
    for what, graph in (("program", program), ("kernels", kernels)):
        if not isinstance(graph, KernelGraph):
            raise errors.GraphError(
                f"verify: {what} must be a graph made by mi.new_kernel_graph(), "
                f"it is {type(graph).__name__}"
            )
    candidate = examine(UGraph(program, kernels))
    if isinstance(candidate, Rejected):
        return candidate
    details = [
        f"{name}: {v.detail if isinstance(v, Accepted) else v.reason}"
        for name, v in (
            ("multiply-adds", candidate.scalar),
            ("tensor cores", candidate.tensor_cores),
        )
    ]
    return Accepted(candidate.error_bound, "; ".join(details))
