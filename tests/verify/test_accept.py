"""Which µGraphs are accepted, decision by decision.

Proofs and checks of rounding are stubs here. They have tests of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import mirage_hf as mi
from mirage_hf.errors import GraphError, Rejected
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.search.search_journal import RankedUGraph
from mirage_hf.search.search_report import RejectedCandidate
from mirage_hf.verify import accept as accepting
from mirage_hf.verify.accept import Candidate, accept, examine, kind_of
from mirage_hf.verify.numeric import NumericChecks
from mirage_hf.verify.verdict import Accepted
from tests.helpers import multi_kernel_ugraphs, mutants, ugraphs

YES, NO = Accepted(detail="close"), Rejected("far off")


def stub(number: int, num_kernels: int = 1, kind: str = "a", **more: Any) -> Any:
    """Stand for a µGraph with given verdicts, number of kernels and kind."""
    given = dict(proof=Accepted(number * 1e-12), scalar=YES, tensor_cores=YES, other=None)
    given |= dict(suits=True, sums_groups=False, scaled=None)
    facts = dict(number=number, num_kernels=num_kernels, kind=(kind,))
    facts |= dict(program=SimpleNamespace(), kernels=SimpleNamespace())
    return SimpleNamespace(**(facts | given | more))


def ranked(*stubs: Any) -> list[RankedUGraph]:
    return [RankedUGraph(u, 10.0 + u.number, 1) for u in stubs]


def numbers(acceptance: accepting.Acceptance) -> list[int]:
    return [c.ugraph.number for c in acceptance.candidates]


class Clock:
    """Seconds that pass only while something is proven."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let stubs say what is decided about them. Their proofs take ten seconds.

    Real µGraphs are proven and checked as ever.
    """
    clock = Clock()
    monkeypatch.setattr(accepting, "time", clock)

    def prove(ugraph: Any, seed: int) -> Any:
        clock.now += 10
        return ugraph.proof

    answers: dict[str, Callable[..., Any]] = {
        "prove": prove,
        "interface_differs": lambda program, kernels: None,
        "new_divisor": lambda ugraph: None,
        "kind_of": lambda ugraph: ugraph.kind,
        "suits_tensor_cores": lambda ugraph: ugraph.suits,
        "regrouped": lambda ugraph: ugraph.other,
        "sums_groups_of_codes": lambda ugraph: ugraph.sums_groups,
        "with_scaled_codes": lambda ugraph: ugraph.scaled,
        "judge_by_torch": lambda ugraph, checks, mma: ugraph.tensor_cores if mma else ugraph.scalar,
    }
    for name, answer in answers.items():
        real = getattr(accepting, name)

        def either(ugraph: Any, *args: Any, _a: Any = answer, _real: Any = real, **kwargs: Any):
            ask = _a if isinstance(ugraph, SimpleNamespace) else _real
            return ask(ugraph, *args, **kwargs)

        monkeypatch.setattr(accepting, name, either)
    return clock


# -- a list of µGraphs ----------------------------------------------------------------------------


def test_proven_and_checked_forms_are_kept_in_order_and_others_have_their_reason() -> None:
    seen: list[tuple[int, Any]] = []
    found = ranked(
        stub(0, proof=Rejected("differs")),
        stub(1),
        stub(2, scalar=NO, tensor_cores=Rejected("overflows")),
        stub(3, tensor_cores=NO),
        stub(4, scalar=NO),
    )
    result = accept(found, on_candidate=lambda number, verdict: seen.append((number, verdict)))
    assert numbers(result) == [1, 3, 4]
    assert result.rejected == (RejectedCandidate(0, "differs"), RejectedCandidate(2, "far off"))
    assert [c.cost_us for c in result.candidates] == [11.0, 13.0, 14.0]
    assert [(c.allows(False), c.allows(True)) for c in result.candidates] == [
        (True, True),
        (True, False),
        (False, True),
    ]
    assert result.error_bound == max(c.error_bound for c in result.candidates) == 4e-12
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4]
    assert [type(verdict) for _, verdict in seen] == [Rejected, Accepted, Rejected] + 2 * [Accepted]


def test_nothing_accepted_has_no_bound_and_no_first_time() -> None:
    result = accept(ranked(stub(0, proof=NO)))
    assert (result.candidates, result.error_bound) == ((), None)
    assert (result.first_seconds, result.seconds, result.late) == (-1.0, 10.0, 0)


def test_nothing_is_late_unless_something_was_left_out() -> None:
    assert accepting.Acceptance((), (), None, 1.0).late == 0


def test_the_seed_reaches_every_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(accepting, "prove", lambda u, seed: seeds.append(seed) or u.proof)
    accept(ranked(stub(0, tensor_cores=NO, other=stub(1)), stub(2)), seed=7)
    accept(ranked(stub(0)))
    assert seeds == [7, 7, 7, 0]


@pytest.mark.parametrize("seconds, kept, late", [(9.0, 1, 3), (10.0, 2, 2), (25.0, 3, 1)])
def test_no_proof_begins_after_the_time_is_up(seconds: float, kept: int, late: int) -> None:
    result = accept(ranked(*(stub(n) for n in range(4))), seconds=seconds)
    assert (len(result.candidates), result.late) == (kept, late)
    assert (result.first_seconds, result.seconds) == (10.0, 10.0 * kept)


def test_time_is_given_until_there_is_a_candidate() -> None:
    found = [stub(n, proof=NO) for n in range(3)]
    result = accept(ranked(*found, stub(3), stub(4)), seconds=5.0)
    assert (numbers(result), result.late, result.first_seconds) == ([3], 1, 40.0)


def test_a_skipped_form_is_neither_proven_nor_late() -> None:
    seen: list[int] = []
    found = ranked(*(stub(n) for n in range(3)))
    result = accept(found, keep=1, on_candidate=lambda number, _: seen.append(number))
    assert (numbers(result), seen, result.late, result.seconds) == ([0], [0], 0, 10.0)


@pytest.mark.parametrize("keep", [1, 2, 6])
def test_so_many_of_one_kind_are_kept_for_each_arithmetic(keep: int) -> None:
    only_scalar = [stub(n, tensor_cores=NO) for n in range(8)]
    both = [stub(n) for n in range(8, 20)]
    result = accept(ranked(*only_scalar, *both), keep=keep)
    assert numbers(result) == [*range(keep), *range(8, 8 + keep)]


def test_what_only_multiply_adds_may_run_is_not_kept_for_tensor_cores() -> None:
    """There is room for tensor cores only, so a form that they may not run is of no use."""
    result = accept(ranked(stub(0, tensor_cores=NO), stub(1, tensor_cores=NO), stub(2)), keep=1)
    assert numbers(result) == [0, 2]
    assert result.rejected == ()


@pytest.mark.parametrize("keep, more", [(1, 0), (2, 1), (3, 2), (4, 3), (6, 3)])
def test_some_of_each_number_of_kernels_are_kept_if_they_store_different_things(
    keep: int, more: int
) -> None:
    full = [stub(n) for n in range(keep)]
    two_kernels = [stub(keep + n, 2, kind="abcde"[n]) for n in range(5)]
    result = accept(ranked(*full, *two_kernels), keep=keep)
    assert numbers(result) == list(range(keep + more))


def test_no_second_form_of_a_kind_is_kept_beyond_the_number() -> None:
    full = [stub(n) for n in range(6)]
    more = [stub(6, 2), stub(7, 2), stub(8, 2, "b"), stub(9, 3)]
    assert numbers(accept(ranked(*full, *more))) == [*range(6), 6, 8, 9]


# -- another grouping -----------------------------------------------------------------------------


def test_a_form_that_tensor_cores_may_run_is_kept_before_the_one_that_they_may_not() -> None:
    other = stub(50, scalar=NO)
    result = accept(ranked(stub(0, tensor_cores=NO, other=other)))
    assert numbers(result) == [50, 0]
    assert result.candidates[0].cost_us == 10.0 and result.candidates[0].allows(True)


@pytest.mark.parametrize(
    "other",
    [
        None,
        stub(50, proof=NO),
        stub(50, scalar=NO, tensor_cores=NO),
        stub(50, tensor_cores=NO),
    ],
    ids=["none", "not proven", "bad rounding", "only multiply-adds"],
)
def test_another_grouping_must_be_proven_and_fit_for_tensor_cores(other: Any) -> None:
    assert numbers(accept(ranked(stub(0, tensor_cores=NO, other=other)))) == [0]


def test_another_grouping_is_looked_for_only_if_tensor_cores_need_one() -> None:
    assert numbers(accept(ranked(stub(0, other=stub(50))))) == [0]
    found = ranked(stub(0), stub(1, tensor_cores=NO, kind="b", other=stub(50)))
    assert numbers(accept(found, keep=1)) == [0]


# -- kinds ----------------------------------------------------------------------------------------


def test_a_kind_is_the_axes_that_kernels_store_for_each_other() -> None:
    """Neither numbers of splits nor dims of size 1 count, nor what the last kernel stores.

    The kind of a single kernel is its loop.
    """
    split = multi_kernel_ugraphs.split_k()
    assert kind_of(split) == (("m", "n"),)
    assert kind_of(multi_kernel_ugraphs.norm_in_two()) == (("m",),)
    assert kind_of(multi_kernel_ugraphs.flash()) == ("j",)
    first, second = (op.block for op in split.block_ops)
    first = replace(first, outputs=(replace(first.outputs[0], axes=("s", "m", "n", None)),))
    second = replace(second, inputs=(replace(second.inputs[0], axes=("s", "m", "n", None)),))
    kernels, inputs = multi_kernel_ugraphs.started(split.program)
    made = kernels.customized(kernels.customized(inputs, first), second)
    assert kind_of(multi_kernel_ugraphs.finished(split.program, kernels, made)) == (("m", "n"),)


# -- one µGraph -----------------------------------------------------------------------------------


def fused(**more: Any) -> Any:
    """Stand for a µGraph that somebody wrote."""
    facts = dict(program=None, kernels=None, is_fused=True)
    return stub(0, **(facts | more))


@pytest.fixture
def same_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "interface_differs", lambda program, kernels: None)


@pytest.mark.usefixtures("same_interface")
def test_one_ugraph_is_proven_and_its_rounding_checked() -> None:
    proof = Accepted(1e-12)
    candidate = examine(fused(proof=proof))
    assert isinstance(candidate, Candidate)
    assert (candidate.cost_us, candidate.error_bound) == (0.0, 1e-12)
    assert (candidate.scalar, candidate.tensor_cores) == (YES, YES)
    assert examine(fused(proof=NO)) is NO
    assert examine(fused(scalar=Rejected("scalar"), tensor_cores=NO)) == Rejected("scalar")


@pytest.mark.usefixtures("same_interface")
def test_the_library_path_rounds_as_the_program_does() -> None:
    """Nothing is compared, because the program is the reference."""
    proof = Accepted(1e-12, "the program itself")
    candidate = examine(fused(is_fused=False, proof=proof, scalar=NO, tensor_cores=NO))
    assert isinstance(candidate, Candidate)
    assert (candidate.cost_us, candidate.error_bound) == (0.0, 1e-12)
    assert candidate.scalar is candidate.tensor_cores is proof


@pytest.mark.usefixtures("same_interface")
def test_references_of_numeric_checks_can_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        accepting, "judge_by_torch", lambda u, checks, mma: seen.append(checks) or YES
    )
    shared = NumericChecks()
    examine(fused(), checks=shared)
    examine(fused())
    assert all(checks is shared for checks in seen[:2])
    assert all(checks is not shared for checks in seen[2:]) and len(seen) == 4


def test_kernels_with_another_interface_are_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(*_: Any, **__: Any) -> None:
        raise AssertionError("not asked for")

    monkeypatch.setattr(accepting, "prove", prove)
    u = ugraphs.rms_norm_linear(rows=3, k=6, n=6)
    other = ugraphs.rms_norm_linear(rows=3, k=6, n=8)
    verdict = examine(replace(u, kernels=other.kernels))
    assert isinstance(verdict, Rejected) and "(6, 8)" in verdict.reason


# -- mi.verify ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, "x * x", ugraphs.rms_norm_linear()])
def test_only_kernel_graphs_can_be_verified(bad: Any) -> None:
    g = mi.new_kernel_graph()
    kind = type(bad).__name__
    with pytest.raises(GraphError, match=f"program must be a graph .*, it is {kind}"):
        mi.verify(bad, g)
    with pytest.raises(GraphError, match=f"kernels must be a graph .*, it is {kind}"):
        mi.verify(g, bad)


@pytest.mark.parametrize(
    "scalar, tensor_cores, detail",
    [
        (YES, YES, "multiply-adds: close; tensor cores: close"),
        (YES, NO, "multiply-adds: close; tensor cores: far off"),
        (NO, YES, "multiply-adds: far off; tensor cores: close"),
    ],
)
def test_a_verdict_says_what_each_arithmetic_may_do(
    scalar: Any, tensor_cores: Any, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    u = ugraphs.rms_norm_linear(rows=3, k=6, n=6)
    candidate = Candidate(u, 0.0, 1e-12, scalar, tensor_cores)
    monkeypatch.setattr(accepting, "examine", lambda ugraph: candidate)
    assert mi.verify(u.program, u.kernels) == Accepted(1e-12, detail)
    monkeypatch.setattr(accepting, "examine", lambda ugraph: NO)
    assert mi.verify(u.program, u.kernels) is NO


@pytest.mark.parametrize("build", [ugraphs.rms_norm_linear, multi_kernel_ugraphs.flash])
def test_hand_written_kernels_and_the_library_path_are_verified(
    build: Callable[..., Any],
) -> None:
    u = build()
    verdict = mi.verify(u.program, u.kernels)
    assert isinstance(verdict, Accepted) and 0 < verdict.bound < 1e-18
    library = library_ugraph(u.program)
    assert mi.verify(u.program, library.kernels).bound == 0.0
    wrong = next(m for m in mutants.mutants(u) if m.kind == "doubled accumulator")
    assert isinstance(mi.verify(u.program, wrong.ugraph.kernels), Rejected)


def test_forms_for_multiply_adds_alone_do_not_count_as_forms_for_tensor_cores() -> None:
    alone = [stub(n, suits=False) for n in range(4)]
    assert numbers(accept(ranked(*alone, stub(4), stub(5)), keep=2)) == [0, 1, 4, 5]


def test_a_form_with_scaled_codes_is_kept_once():
    """It follows the form that it is made of. Later forms need none."""
    scaled = [stub(10 + n, sums_groups=True) for n in range(3)]
    acceptance = accept(ranked(*(stub(n, scaled=scaled[n]) for n in range(3))))
    assert numbers(acceptance) == [0, 10, 1, 2]


def test_no_form_with_scaled_codes_is_made_if_the_search_found_one_before():
    acceptance = accept(ranked(stub(0, sums_groups=True), stub(1, scaled=stub(11))))
    assert numbers(acceptance) == [0, 1]


@pytest.mark.parametrize("why", [dict(proof=NO), dict(tensor_cores=NO)])
def test_a_form_with_scaled_codes_must_be_proven_and_fit_for_tensor_cores(why):
    acceptance = accept(ranked(stub(0, scaled=stub(10, sums_groups=True, **why))))
    assert numbers(acceptance) == [0]
