"""The rule of the numeric check, number by number, and how kernels are run for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf import float32_products
from mirage_hf.errors import Rejected
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify import numeric, slices
from mirage_hf.verify.numeric import (
    Errors,
    FloatConstants,
    NumericCheck,
    _CaseData,
    measure,
    run_kernels,
)
from mirage_hf.verify.numeric_cases import Case, cases
from mirage_hf.verify.verdict import Accepted
from tests.helpers import multi_kernel_ugraphs, ugraphs

ULP = torch.finfo(torch.float32).eps
RANDOM = Case("random")


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, scale", [("max", 8.0), ("rms", 4.0)])
@pytest.mark.parametrize(
    "dtype, ulp",
    [(torch.float32, ULP), (torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7), (torch.int32, 0)],
)
def test_an_error_may_be_a_quarter_and_one_ulp_of_the_scale_larger(
    kind: str, scale: float, dtype: torch.dtype, ulp: float
) -> None:
    eager = Errors(max=0.5, rms=0.5, scale=8.0, rms_scale=4.0)
    most = 1.25 * 0.5 + ulp * scale
    assert replace(eager, **{kind: most}).is_within(eager, dtype)
    assert not replace(eager, **{kind: most * (1 + 1e-9)}).is_within(eager, dtype)


def test_results_that_should_be_zero_may_be_a_denormal() -> None:
    eager = Errors(0.0, 0.0, scale=1.0, rms_scale=0.0)
    smallest = ULP * torch.finfo(torch.float32).tiny
    assert replace(eager, rms=smallest).is_within(eager, torch.float32)
    assert not replace(eager, rms=2 * smallest).is_within(eager, torch.float32)


def test_errors_are_measured_where_results_count() -> None:
    reference = torch.tensor([3.0, -4.0, 100.0], dtype=torch.float64)
    got, where = torch.tensor([3.0, -4.5, math.inf]), torch.tensor([True, True, False])
    errors = measure(got, reference, where)
    wanted = Errors(0.5, math.sqrt(0.25 / 2), 4.0, math.sqrt(25 / 2))
    assert astuple(errors) == pytest.approx(astuple(wanted), rel=1e-12)
    assert measure(got, reference, where & False) == Errors(0.0, 0.0, 0.0, 0.0)


def test_the_larger_of_each_error_keeps_the_scales() -> None:
    a, b = Errors(1.0, 4.0, 5.0, 6.0), Errors(2.0, 3.0, 7.0, 8.0)
    assert a.or_larger(b) == Errors(2.0, 4.0, 5.0, 6.0)
    assert b.or_larger(a) == Errors(2.0, 4.0, 7.0, 8.0)


# -- one case -------------------------------------------------------------------------------------


def doubled(dtype: str = "float32", outputs: int = 1, elements: int = 2) -> Any:
    g = mi.new_kernel_graph()
    x = g.new_input((1, elements), dtype)
    g.mark_output(*(g.mul(x, 2.0) for _ in range(outputs)))
    return g


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NumericCheck]:
    """Return a check whose cases have these references and results of eager."""

    def made(*data: tuple[Case, Any, Any], outputs: int = 1) -> NumericCheck:
        monkeypatch.setattr(numeric, "cases", lambda dtype: tuple(case for case, _, _ in data))
        monkeypatch.setattr(numeric, "_DRAWS", 1)
        made = NumericCheck(doubled(outputs=outputs))
        for case, reference, eager in data:
            wide = [torch.tensor(reference, dtype=torch.float64)] * outputs
            seen = [torch.tensor(eager)] * outputs
            where = [torch.isfinite(y) for y in seen]
            made._data[case] = _CaseData([torch.zeros(1, 2)], wide, seen, where)
        return made

    return made


def returning(*results: Sequence[float]) -> Callable[[Any], list[torch.Tensor]]:
    return lambda inputs: [torch.tensor(r) for r in results]


def test_the_verdict_says_how_large_the_error_is_beside_eagers(check: Any) -> None:
    judged = check((RANDOM, [1.0, 2.0], [1.125, 2.0])).judge
    assert judged(returning([1.125, 2.0])).detail == "largest error 1.00× eager's"
    assert judged(returning([1.15, 2.0])).detail == "largest error 1.20× eager's"
    assert judged(returning([1.0625, 2.0])).detail == "largest error 0.50× eager's"
    assert judged(returning([1.0, 2.0])) == Accepted(0.0, "largest error 0.00× eager's")
    assert judged(returning([1.1875, 2.0])) == Rejected(
        "numbers: output 0 on random inputs: max error 0.188 (eager 0.125), RMS 0.133 "
        "(eager 0.0884), scale 2"
    )


def test_the_worst_case_and_output_count(check: Any) -> None:
    data = [(Case(name), [1.0, 2.0], [1.125, 2.0]) for name in ("one", "two", "three")]
    results = iter([[1.125, 2.0], [1.0, 2.0], [1.15, 2.0], [1.0, 2.0], [1.0, 2.0], [1.0625, 2.0]])
    judged = check(*data, outputs=2).judge
    verdict = judged(lambda inputs: [torch.tensor(next(results)) for _ in range(2)])
    assert verdict == Accepted(0.0, "largest error 1.20× eager's")
    verdict = judged(returning([1.0, 2.0], [1.5, 2.0]))
    assert isinstance(verdict, Rejected) and "output 1 on one inputs" in verdict.reason


def test_an_exact_eager_has_no_ratio(check: Any) -> None:
    judged = check((RANDOM, [1.0, 2.0], [1.0, 2.0])).judge
    assert judged(returning([1.0 + ULP, 2.0])) == Accepted(0.0, "largest error 0.00× eager's")


def test_results_are_finite_where_those_of_eager_are(check: Any) -> None:
    judged = check((RANDOM, [1.0, 2.0], [1.0, math.inf])).judge
    for anything in (math.inf, math.nan, 0.0):
        assert isinstance(judged(returning([1.0, anything])), Accepted)
    for bad in (math.inf, math.nan):
        assert judged(returning([bad, math.inf])) == Rejected(
            "numbers: inf or NaN in output 0 on random inputs where torch eager has none"
        )


def test_only_the_range_counts_in_some_cases(check: Any) -> None:
    case = Case("huge", range_only=True)
    judged = check((case, [1.0, 2.0], [1.0, 2.0])).judge
    assert judged(returning([-5.0, 99.0])) == Accepted(0.0, "largest error 0.00× eager's")
    assert isinstance(judged(returning([-5.0, math.nan])), Rejected)


@pytest.mark.parametrize("dtype, largest", [("float16", 65504.0), ("float32", 3.4028235e38)])
def test_results_near_the_largest_number_may_overflow(
    dtype: str, largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numeric, "cases", lambda dtype: (RANDOM,))
    check = NumericCheck(doubled(dtype))
    x = torch.tensor([[0.975, 0.985]], dtype=torch.float64) * largest / 2
    monkeypatch.setattr(check._inputs, "of", lambda case: [x.to(getattr(torch, dtype))])
    y = x.to(getattr(torch, dtype)) * 2
    assert isinstance(check.judge(lambda _: [y * torch.tensor([1.0, math.inf])]), Accepted)
    verdict = check.judge(lambda _: [y * torch.tensor([math.inf, 1.0])])
    assert isinstance(verdict, Rejected) and "inf or NaN" in verdict.reason


def test_a_candidate_may_write_into_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    check = NumericCheck(doubled())

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        y = inputs[0] * 2
        inputs[0].fill_(math.nan)
        return [y]

    assert all(isinstance(check.judge(run), Accepted) for _ in range(2))


# -- the cases of a program -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtypes, judged_as",
    [
        (["float16"], torch.float16),
        (["bfloat16", "float16"], torch.bfloat16),
        (["int32", "float16"], torch.float16),
        (["int32"], torch.float32),
    ],
)
def test_the_first_floating_output_says_which_cases_there_are(
    dtypes: list[str], judged_as: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    monkeypatch.setattr(numeric, "cases", lambda dtype: seen.append(dtype) or ())
    g = mi.new_kernel_graph()
    g.mark_output(*(g.new_input((2, 3), dtype) for dtype in dtypes))
    assert not [*NumericCheck(g).each()] and seen == [judged_as]


def names(g: Any) -> list[str]:
    return [case.name for case, _ in NumericCheck(g).each()]


USUAL = ["random", "large", "tiny", "constant rows", "mean far above spread"]


def test_programs_have_the_cases_that_apply_to_them() -> None:
    g = doubled("bfloat16")
    assert names(g) == USUAL
    assert names(doubled("float16")) == [*USUAL, "nearly the largest"]
    g = mi.new_kernel_graph()
    x, lo, hi = g.new_input((4, 9)), *(g.new_input((4, 1), "int32") for _ in range(2))
    g.mark_output(g.softmax(g.mul(g.within(x, lo, hi, 1), 3.0)))
    scores = ["huge positive scores", "huge negative scores"]
    assert names(g) == [*USUAL, *scores, "NaN out of bounds", "nearly the largest"]


def test_every_divisor_of_a_ratio_is_zero_once() -> None:
    g = mi.new_kernel_graph()
    x, whole, y = g.new_input((4, 9)), g.new_input((4,), "int32"), g.new_input((4, 9), name="y")
    g.mark_output(g.ratio(x, y), whole)
    found = [(case, inputs) for case, inputs in NumericCheck(g).each() if case.zero is not None]
    assert [(case.name, case.zero) for case, _ in found] == [(f"zero {x.name}", 0), ("zero y", 2)]
    for case, inputs in found:
        assert [n for n in (0, 2) if not inputs[n].any()] == [case.zero]


def test_what_torch_computes_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    run = slices.run_kernel_graph
    monkeypatch.setattr(
        slices, "run_kernel_graph", lambda *args, **kwargs: runs.append(1) or run(*args, **kwargs)
    )
    fits: list[Any] = []
    monkeypatch.setattr(numeric, "with_scores", lambda inputs, case: fits.append(case) or case)
    check = NumericCheck(doubled())
    for _ in range(3):
        assert isinstance(check.judge(lambda inputs: [inputs[0] * 2]), Accepted)
        assert len(runs) == 2 * len(check._data) and len(fits) == 2  # float64 and eager; two signs
    assert len(check._eager_errors) == len(USUAL)


def test_outputs_that_are_many_bytes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    check, kept = NumericCheck(doubled()), 40
    monkeypatch.setattr(numeric, "_KEPT_BYTES", kept)
    for _ in range(3):
        assert isinstance(check.judge(lambda inputs: [inputs[0] * 2]), Accepted)
        assert 0 < sum(data.nbytes for data in check._data.values()) <= kept
    assert len(check._eager_errors) == len(USUAL)


def test_outputs_of_one_case_that_are_too_many_bytes_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = NumericCheck(doubled())
    monkeypatch.setattr(numeric, "_KEPT_BYTES", 1)
    for _ in range(2):
        assert isinstance(check.judge(lambda inputs: [inputs[0] * 2]), Accepted)
        assert not check._data
    assert isinstance(check.judge(lambda inputs: [inputs[0] * 3]), Rejected)


def test_errors_of_many_elements_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    reference = torch.randn(7, 11, generator=draw, dtype=torch.float64)
    got = (reference + 0.1 * torch.randn(7, 11, generator=draw)).float()
    where = torch.rand(7, 11, generator=draw) < 0.5
    where.view(-1)[20:40] = False
    whole = measure(got, reference, where)
    eager = got.masked_fill(reference > 1, math.inf)
    compared = numeric._compared(eager, reference)
    assert torch.equal(compared, reference <= 1)
    monkeypatch.setattr(numeric, "_AT_ONCE", 10)
    assert torch.equal(numeric._compared(eager, reference), compared)
    assert numeric._count(where) == int(where.sum())
    parts = measure(got, reference, where)
    assert (parts.max, parts.scale) == (whole.max, whole.scale)
    assert (parts.rms, parts.rms_scale) == pytest.approx((whole.rms, whole.rms_scale), rel=1e-12)


# -- several draws --------------------------------------------------------------------------------


def off_by(*ulps: float) -> tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], list[Any]]:
    """Return a candidate whose first number is off by so many ulps in each draw, and its inputs."""
    seen: list[torch.Tensor] = []

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        y = inputs[0] * 2
        y[0, 0] *= 1 + ulps[len(seen) % len(ulps)] * ULP
        seen.append(inputs[0])
        return [y]

    return run, seen


@pytest.fixture
def eager_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let eager be off by 10 ulps in the first number. Only random inputs are drawn."""
    run = slices.SlicedRun.eager

    def eager(self: Any, inputs: Any) -> list[torch.Tensor]:
        (y,) = run(self, inputs)
        y[0, 0] *= 1 + 10 * ULP
        return [y]

    monkeypatch.setattr(slices.SlicedRun, "eager", eager)
    monkeypatch.setattr(numeric, "cases", lambda dtype: (RANDOM,))


@pytest.mark.usefixtures("eager_is_off")
def test_a_candidate_that_is_unlucky_in_one_draw_of_few_numbers_is_accepted() -> None:
    check = NumericCheck(doubled())
    run, seen = off_by(15, *[5] * 15)
    assert isinstance(check.judge(run), Accepted)
    assert len({tuple(x[0].tolist()) for x in seen}) == len(seen) == 16
    run, again = off_by(15, *[5] * 15)
    assert isinstance(check.judge(run), Accepted)
    assert torch.equal(torch.cat(seen), torch.cat(again))


@pytest.mark.usefixtures("eager_is_off")
@pytest.mark.parametrize("ulps, draws", [((18,), 16), ((18, 10), 16), ((25,), 1)])
def test_more_draws_do_not_help_a_candidate_that_is_worse(
    ulps: tuple[float, ...], draws: int
) -> None:
    run, seen = off_by(*ulps)
    verdict = NumericCheck(doubled()).judge(run)
    assert isinstance(verdict, Rejected) and "max error" in verdict.reason
    assert len(seen) == draws


@pytest.mark.usefixtures("eager_is_off")
def test_infinity_in_a_further_draw_counts() -> None:
    run, seen = off_by(18, 5, math.inf)
    verdict = NumericCheck(doubled()).judge(run)
    assert isinstance(verdict, Rejected) and "inf or NaN" in verdict.reason and len(seen) == 3


@pytest.mark.usefixtures("eager_is_off")
def test_outputs_of_many_elements_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numeric, "_ENOUGH", 2)
    run, seen = off_by(18, 5)
    assert isinstance(NumericCheck(doubled()).judge(run), Rejected) and len(seen) == 1


@pytest.mark.usefixtures("eager_is_off")
def test_the_bytes_of_all_draws_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numeric, "_DRAWN_BYTES", 3 * 8)
    run, seen = off_by(18, 5)
    assert isinstance(NumericCheck(doubled()).judge(run), Rejected) and len(seen) == 3


# -- sums that cancel -----------------------------------------------------------------------------


def summed(kind: str, n: int, dim: int = 1) -> Any:
    g = mi.new_kernel_graph()
    x = g.new_input((64, n) if dim == 1 else (n, 64), "float32")
    g.mark_output(g.reduction(x, dim, kind), g.mul(x, 2.0))
    return g


def sums_of(check: NumericCheck) -> list[numeric.Errors]:
    case = cases(torch.float32)[3]
    return check._sums(case, check._inputs_of(case))


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize("n, dim, ulps", [(256, 1, 4.0), (256, 0, 4.0), (2, 1, 0.5)])
def test_a_sum_may_be_off_by_half_an_ulp_for_each_doubling_of_its_length(
    kind: str, n: int, dim: int, ulps: float
) -> None:
    check, case = NumericCheck(summed(kind, n, dim)), cases(torch.float32)[3]
    sums, rest = sums_of(check)
    scale = float(check._run_torch(case).reference[0].abs().max())
    assert sums.max == pytest.approx(scale * ulps * ULP, rel=1e-3) and sums.scale == scale
    assert rest.max == 0.0 and sums_of(check) is check._sum_errors[case]


def test_a_maximum_is_never_off() -> None:
    check = NumericCheck(summed("max", 256))
    assert sums_of(check)[0].max == 0.0


def test_sums_are_off_to_both_sides() -> None:
    """Otherwise a common factor would cancel in a quotient of two sums."""
    g = mi.new_kernel_graph()
    x = g.new_input((64, 256), "float32")
    mean = g.reduction(x, 1, "mean")
    g.mark_output(g.div(mean, g.reduction(g.mul(x, 3.0), 1, "mean")))
    (errors,) = sums_of(NumericCheck(g))
    assert errors.max == pytest.approx(2 * 4 * ULP / 3, rel=1e-3)


@pytest.mark.parametrize("case", [Case("constant rows", constant_rows=True), Case("far", offset=1)])
def test_where_a_mean_cancels_an_error_may_be_that_of_sums(
    check: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumericCheck, "_sums", lambda *_: [Errors(0.25, 0.25, 0.0, 0.0)])
    for cancelling in (True, False):
        of_case = case if cancelling else RANDOM
        judged = check((of_case, [1.0, 2.0], [1.125, 2.0])).judge
        assert isinstance(judged(returning([1.3125, 2.0])), Accepted) is cancelling
        assert isinstance(judged(returning([1.375, 2.0])), Rejected)


# -- running kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tensor_cores_round_factors_to_the_16_bits_of_their_inputs(dtype: str) -> None:
    u = ugraphs.rms_norm_linear(dtype=dtype)
    x, gamma, w = inputs = [t * 1.1 for t in ugraphs.random_inputs(u.program)]
    scale = torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6)
    for tensor_cores in (False, True):
        factor = x.float() * gamma.float()
        if tensor_cores:
            factor = factor.to(x.dtype).float()
        want = factor @ w.float() * scale
        (got,) = run_kernels(u.kernels, inputs, tensor_cores)
        assert got.dtype == x.dtype
        torch.testing.assert_close(got, want.to(x.dtype), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize(
    "dtype, rounds", [("float16", True), ("bfloat16", True), ("float32", False)]
)
def test_rounded_factors_show_in_results(dtype: str, rounds: bool) -> None:
    u = ugraphs.rms_norm_linear(dtype=dtype)
    inputs = ugraphs.random_inputs(u.program)
    (exact,), (rounded,) = (run_kernels(u.kernels, inputs, mma) for mma in (False, True))
    assert torch.equal(exact, rounded) is not rounds


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_inputs_beside_others_do_not_keep_factors_exact(dtype: str) -> None:
    """The last kernel reads x in 16 bits and partial sums of its squares in float32."""
    u = multi_kernel_ugraphs.norm_in_two(dtype=dtype)
    inputs = ugraphs.random_inputs(u.program)
    (exact, _), (rounded, _) = (run_kernels(u.kernels, inputs, mma) for mma in (False, True))
    assert not torch.equal(exact, rounded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_constants_in_float32_give_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors that are rounded already need not be rounded, in whatever kernel they are read."""
    g = KernelGraph()
    x = g.new_input((3, 64), dtype)
    gamma, w = (g.new_input(d, dtype, constant=True) for d in ((1, 64), (64, 48)))
    g.mark_output(g.matmul(g.rms_norm(x, gamma), w))
    inputs = ugraphs.random_inputs(g)
    found = [candidate.ugraph for candidate in search(g, SearchOptions())[0]]
    assert {u.num_kernels for u in found} >= {1, 2}
    constants = FloatConstants()
    for u in found:
        kept = [run_kernels(u.kernels, inputs, mma, constants) for mma in (False, True)]
        with monkeypatch.context() as patch:
            patch.setattr(TorchAlgebra, "_is_exact", lambda *_: False)
            plain = [run_kernels(u.kernels, inputs, mma) for mma in (False, True)]
        for ours, theirs in zip(kept, plain, strict=True):
            assert torch.equal(ours[0], theirs[0])


def test_constants_in_float32_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numeric, "_KEPT_FLOATS", 64)
    constants, x, large = FloatConstants(), torch.ones(8).half(), torch.ones(32).half()
    assert constants.of(x) is constants.of(x) and constants.of(x).dtype == torch.float32
    assert constants.of(large) is large, "it would take too much memory"
    for n in range(9):
        assert constants.of(torch.full((8,), n).half()).tolist() == [n] * 8


def test_partial_results_are_stored_in_their_own_dtype() -> None:
    """A kernel of float32 partial results rounds no factors, and libraries run in between."""
    u = multi_kernel_ugraphs.norm_in_two()
    inputs = ugraphs.random_inputs(u.program)
    x, gamma, w, _ = (t.double() for t in inputs)
    want = x * gamma * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) @ w
    for tensor_cores in (False, True):
        y, _ = run_kernels(u.kernels, inputs, tensor_cores)
        torch.testing.assert_close(y.double(), want, rtol=2e-3, atol=1e-2)


# -- candidates -----------------------------------------------------------------------------------


def test_candidates_of_one_program_share_a_reference() -> None:
    checks = numeric.NumericChecks()
    flash = multi_kernel_ugraphs.flash(keys=24)
    split = multi_kernel_ugraphs.split_attention(keys=24)
    for u, count in ((flash, 1), (split, 1), (multi_kernel_ugraphs.split_k(), 2)):
        for tensor_cores in (False, True):
            assert isinstance(numeric.judge_by_torch(u, checks, tensor_cores), Accepted)
        assert len(checks.made) == count


def test_candidates_are_judged_at_narrow_sizes_if_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    narrowed = numeric.narrowed
    u = ugraphs.rms_norm_linear(n=400)
    for stub in (narrowed, lambda ugraph: None):
        monkeypatch.setattr(numeric, "narrowed", stub)
        checks = numeric.NumericChecks()
        assert isinstance(numeric.judge_by_torch(u, checks, False), Accepted)
        seen += [check.program.inputs[2].dims for check in checks.made.values()]
    assert seen == [(64, 32), (64, 400)]


def test_tensor_cores_are_judged_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    run = numeric.run_kernels
    monkeypatch.setattr(
        numeric, "run_kernels", lambda k, i, mma, c: asked.append(mma) or run(k, i, mma, c)
    )
    u = ugraphs.rms_norm_linear()
    for tensor_cores in (False, True):
        asked.clear()
        numeric.judge_by_torch(u, numeric.NumericChecks(), tensor_cores)
        assert set(asked) == {tensor_cores}


def test_large_programs_are_checked_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with a tensor of 4 Mi elements are, unless float32 products may be rounded to TF32."""
    monkeypatch.setattr(numeric, "NumericCheck", lambda program, device: device)
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    small, large = (doubled(elements=n) for n in (100, 1 << 22))
    on_both, on_cpu = numeric.NumericChecks(gpu), numeric.NumericChecks()
    assert [on_both.of(g) for g in (small, large)] == [cpu, gpu]
    assert on_cpu.of(large) == cpu
    monkeypatch.setattr(float32_products, "are_exact", lambda: False)
    assert numeric.NumericChecks(gpu).of(large) == cpu


def test_a_check_that_does_not_fit_on_the_gpu_runs_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def judged(ugraph: UGraph, check: Any, tensor_cores: bool) -> Accepted:
        ran.append(check.type)
        if check.type == "cuda":
            raise torch.OutOfMemoryError
        return Accepted()

    monkeypatch.setattr(numeric, "NumericCheck", lambda program, device: device)
    monkeypatch.setattr(numeric, "_judged", judged)
    monkeypatch.setattr(numeric, "_LARGE", 1)
    checks = numeric.NumericChecks(torch.device("cuda"))
    u = ugraphs.rms_norm_linear()
    assert all(isinstance(numeric.judge_by_torch(u, checks, False), Accepted) for _ in range(2))
    assert ran == ["cuda", "cpu", "cpu"]


def test_without_a_gpu_a_lack_of_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(numeric, "_judged", judged)
    with pytest.raises(torch.OutOfMemoryError):
        numeric.judge_by_torch(ugraphs.rms_norm_linear(), numeric.NumericChecks(), False)


def test_autocast_of_the_caller_makes_no_difference() -> None:
    u = ugraphs.rms_norm_linear(k=256)
    want = numeric.judge_by_torch(u, numeric.NumericChecks(), False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert numeric.judge_by_torch(u, numeric.NumericChecks(), False) == want


def test_overlapping_checks_leave_the_number_of_threads_as_it_was() -> None:
    """Torch keeps the number for new threads, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    entered, may_leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with numeric._few_threads():
            entered.set()
            may_leave.wait(60)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    try:
        with numeric._few_threads():
            thread.start()
            assert entered.wait(60) and torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        may_leave.set()
        thread.join()
        new = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        new.start()
        new.join()
        assert seen == [3, 3]
    finally:
        torch.set_num_threads(before)
