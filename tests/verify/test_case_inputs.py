"""The inputs of numeric cases, and how cases are fitted to what a program computes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf.graph import coded
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.verify import case_inputs
from mirage_hf.verify.case_inputs import (
    CaseInputs,
    bounded_dims,
    copied,
    exponents,
    make_inputs,
    with_garbage,
    with_scores,
)
from mirage_hf.verify.numeric import NumericCheck
from mirage_hf.verify.numeric_cases import Case, cases
from tests.helpers import coded_mutants, ugraphs

RANDOM = Case("random")


def three(dtype: str = "float32") -> KernelGraph:
    """Return a program of activations, a whole number, a weight and a vector."""
    g = mi.new_kernel_graph()
    g.new_input((8, 64), dtype)
    g.new_input((4,), "int64")
    g.new_input((64, 400), dtype)
    g.new_input((1, 400), dtype)
    return g


def ragged() -> tuple[KernelGraph, DTensor, DTensor, list[DTensor]]:
    g = mi.new_kernel_graph()
    x, y = g.new_input((6, 9), "float32"), g.new_input((6, 9), "float32")
    return g, x, y, [g.new_input((6, 1), "int32") for _ in range(2)]


# -- one case -------------------------------------------------------------------------------------


def test_activations_are_normal_and_products_keep_their_size() -> None:
    x, whole, w, bias = make_inputs(three(), RANDOM)
    assert whole.dtype == torch.int64 and not whole.any()
    for drawn, spread in ((x, 1.0), (w, 1 / 20), (bias, 1.0)):
        assert float(drawn.std()) == pytest.approx(spread, rel=0.1)
        assert abs(float(drawn.mean())) < 0.2 * spread
    assert float((x @ w).std()) == pytest.approx(8 / 20, rel=0.1)


def test_a_case_changes_the_first_input_only() -> None:
    x, _, w, bias = make_inputs(three(), RANDOM)
    for case, want in (
        (Case("larger", factor=3.0), x * 3),
        (Case("far", offset=7.0), x + 7),
        (Case("both", factor=3.0, offset=7.0), x * 3 + 7),
        (Case("rows", constant_rows=True), x[:, :1].expand(8, 64)),
        (Case("far rows", constant_rows=True, offset=7.0), x[:, :1].expand(8, 64) + 7),
        (Case("none", zero=0), 0 * x),
    ):
        first, _, *others = make_inputs(three(), case)
        torch.testing.assert_close(first, want)
        assert all(torch.equal(a, b) for a, b in zip(others, (w, bias), strict=True))


@pytest.mark.parametrize("position", [2, 3])
def test_any_input_may_be_zero(position: int) -> None:
    inputs = make_inputs(three(), Case("zero", zero=position))
    zeros = [n for n, x in enumerate(inputs) if not x.any()]
    assert zeros == [1, position]


def test_seeds_draw_different_numbers() -> None:
    a, b, c = (make_inputs(three(), RANDOM, seed)[0] for seed in (0, 1, 0))
    assert torch.equal(a, c) and not torch.equal(a, b)


def test_no_input_leaves_its_dtype() -> None:
    for case in (Case("large", factor=1e6), Case("far", offset=-1e6)):
        x = make_inputs(three("float16"), case)[0]
        assert bool(torch.isfinite(x).all()) and float(x.abs().max()) == 65504
    case = Case("grown", grown=(0, 1), sign=1, by=1e7)
    x, _, w, _ = make_inputs(three("float16"), case)
    assert float(x.max()) == float(w.max()) == 65504 and float(w.min()) >= 0


@pytest.mark.parametrize("sign", [1, -1])
def test_grown_inputs_are_positive_except_the_last(sign: int) -> None:
    x, _, w, bias = make_inputs(three(), RANDOM)
    case = Case("grown", grown=(0, 1), sign=sign, by=5.0)
    a, _, b, c = make_inputs(three(), case)
    torch.testing.assert_close(a, x.abs() * 5)
    torch.testing.assert_close(b, w.abs() * sign * 5)
    assert torch.equal(c, bias)
    assert torch.equal(make_inputs(three(), Case("positive", grown=(0,), sign=1))[0], x.abs())
    a, _, b, c = make_inputs(three(), replace(case, grown=(2,)))
    torch.testing.assert_close(c, bias.abs() * sign * 5)
    assert torch.equal(a, x) and torch.equal(b, w)


def test_inputs_have_the_strides_of_the_program() -> None:
    g = mi.new_kernel_graph()
    g.new_input((3, 4), strides=(1, 3))
    g.new_input((2, 4), "int32", strides=(8, 1))
    inputs = make_inputs(g, RANDOM)
    assert [x.stride() for x in inputs] == [(1, 3), (8, 1)]
    assert [x.stride() for x in copied(inputs)] == [(1, 3), (8, 1)]
    assert copied(inputs)[0].data_ptr() != inputs[0].data_ptr()


def test_inputs_that_no_case_changes_are_shared() -> None:
    draws = CaseInputs(three())
    first = draws.of(RANDOM)
    for case, shared in (
        (Case("larger", factor=3.0), [2, 3]),
        (Case("grown", grown=(0, 1), sign=1), [3]),
        (Case("zero", zero=3), [2]),
        (Case("garbage", garbage=(2,)), [3]),
    ):
        inputs = draws.of(replace(case))
        same = [n for n in (0, 2, 3) if inputs[n].data_ptr() == first[n].data_ptr()]
        assert same == shared, case


# -- bounds ---------------------------------------------------------------------------------------


def test_bounds_are_drawn_as_in_proofs() -> None:
    g, x, _, bounds = ragged()
    g.mark_output(g.within(x, *bounds, 1))
    _, _, lo, hi = make_inputs(g, RANDOM, seed=-3)
    assert lo.shape == hi.shape == (6, 1) and lo.dtype == hi.dtype == torch.int32
    inside = (hi - lo).clamp(min=0).reshape(-1).tolist()
    assert inside[1] == 9 and inside[2] == 0 and int(lo.min()) >= 0 and int(hi.max()) == 9


def test_garbage_lies_where_no_row_reaches() -> None:
    g, x, _, bounds = ragged()
    g.mark_output(g.within(x, *bounds, 1))
    case = Case("garbage", garbage=(0,), outside=True)
    values, other, lo, hi = make_inputs(g, case)
    first, last = int(lo.min()), int(hi.max())
    assert 0 < first < last < 9
    assert bool(values[:, :first].isnan().all() and values[:, last:].isnan().all())
    assert not bool(values[:, first:last].isnan().any() or other.isnan().any())


def test_the_bounded_dims_of_an_input() -> None:
    g, x, y, bounds = ragged()
    w = g.new_input((4, 6), "float32")
    g.mark_output(g.matmul(w, g.add(g.within(x, *bounds, 1), y)))
    for position, dims in ((0, [1]), (1, [1]), (2, []), (4, [])):
        assert [d for _, d in bounded_dims(g, position)] == dims
    ((found, _),) = bounded_dims(g, 1)
    assert (found.lo, found.hi, found.x) == (2, 3, x)


@pytest.mark.parametrize(
    "build, harmless",
    [
        (lambda g, x, y, b: g.within(x, *b, 1), (0,)),
        (lambda g, x, y, b: g.add(g.within(x, *b, 1), y), (0,)),
        (lambda g, x, y, b: g.within(g.add(x, y), *b, 1), (0, 1)),
        (lambda g, x, y, b: g.add(g.within(g.mul(x, 2.0), *b, 1), x), None),
        (lambda g, x, y, b: g.add(x, y), None),
    ],
    ids=["selected", "one of two", "both", "read beside", "no bounds"],
)
def test_garbage_is_put_where_it_leaves_no_trace(build: Any, harmless: Any) -> None:
    g, x, y, bounds = ragged()
    g.mark_output(build(g, x, y, bounds))
    found = with_garbage(CaseInputs(g), Case("NaN", outside=True))
    assert found == (harmless and Case("NaN", outside=True, garbage=harmless))


def test_a_program_that_cannot_be_resized_has_no_garbage() -> None:
    g, x, y, bounds = ragged()
    g.mark_output(g.within(x, *bounds, 1), g.reshape(y, (9, 6)))
    assert with_garbage(CaseInputs(g), Case("NaN", outside=True)) is None


# -- arguments of exp -----------------------------------------------------------------------------


def test_the_arguments_of_exp_are_a_program_of_their_own() -> None:
    g = mi.new_kernel_graph()
    x, y = g.new_input((4, 6), "float32"), g.new_input((4, 6), "float32")
    a = g.mul(x, 3.0)
    g.mark_output(g.softmax(g.add(g.exp(a), y)))
    part = exponents(g)
    assert part is not None and len(part.outputs) == 2 and len(part.inputs) == 2
    assert [op.name for op in part.ops] == ["mul", "exp", "add", "softmax"]
    assert [t.index for t in part.outputs] == [part.ops[n].outputs[0].index for n in (0, 2)]
    assert exponents(ugraphs.rms_norm_linear().program) is None
    assert exponents(ugraphs.softmax_rows().kernels) is None  # a kernel hides them


def exp_of(build: Any, dtype: str = "float32", inputs: int = 2) -> KernelGraph:
    g = mi.new_kernel_graph()
    g.mark_output(g.exp(build(g, *(g.new_input((4, 6), dtype) for _ in range(inputs)))))
    return g


def largest(g: KernelGraph, case: Case) -> float:
    part = exponents(g)
    assert part is not None
    (args,) = case_inputs.run_kernel_graph(part, make_inputs(g, case), torch.float64)
    return float(args.abs().max())


SCORES = Case("huge", scores=3e4, sign=-1)


@pytest.mark.parametrize(
    "build, grown",
    [
        (lambda g, x, y: g.mul(x, y), (0, 1)),
        (lambda g, x, y: g.mul(x, 2.0), (0, 1)),
        (lambda g, x, y: g.mul(g.square(x), y), (0, 1)),
        (lambda g, x, y: g.mul(g.rms_norm(x), y), (0, 1)),
    ],
    ids=["product", "one input", "cube", "norm with a weight"],
)
def test_scores_are_as_large_as_asked_for(build: Any, grown: tuple[int, ...]) -> None:
    g = exp_of(build)
    case = with_scores(CaseInputs(g), SCORES)
    assert (
        case is not None
        and case.grown == grown
        and case == replace(SCORES, grown=grown, by=case.by)
    )
    assert largest(g, case) == pytest.approx(3e4, rel=1e-3)


def test_the_inputs_whose_scale_counts_are_found_if_the_first_do_not() -> None:
    """Two norms take the scale of the first two inputs away."""
    g = exp_of(
        lambda g, x, y, z, v: g.mul(g.mul(g.rms_norm(x), g.rms_norm(y)), g.mul(z, v)), inputs=4
    )
    case = with_scores(CaseInputs(g), SCORES)
    assert case is not None and case.grown == (2, 3)
    assert largest(g, case) == pytest.approx(3e4, rel=1e-3)


def test_no_scores_without_an_input_that_makes_them_grow() -> None:
    assert with_scores(CaseInputs(exp_of(lambda g, x, y: g.tanh(g.mul(x, 1e3)))), SCORES) is None
    assert with_scores(CaseInputs(three()), SCORES) is None
    assert with_scores(CaseInputs(exp_of(lambda g, x, y: g.mul(x, 0.0))), SCORES) is None
    assert with_scores(CaseInputs(exp_of(lambda g, x, y: g.div(y, g.mul(x, 0.0)))), SCORES) is None


def test_scores_stay_where_eager_does_not_overflow() -> None:
    """x² leaves float16, although the argument of exp, a tenth of it, would not."""
    g = exp_of(lambda g, x, y: g.mul(g.square(x), 0.1), "float16")
    case = with_scores(CaseInputs(g), SCORES)
    assert case is not None
    reached = largest(g, case)
    assert 0.6 * 6550.4 < reached <= 6551
    inputs = make_inputs(g, replace(case, by=case.by / 0.8))
    (y,) = case_inputs.run_kernel_graph(exponents(g), inputs)
    assert math.isinf(float(y.abs().max()))


def test_scores_that_overflow_at_any_size_are_left_out() -> None:
    g = exp_of(lambda g, x, y: g.mul(g.mul(g.square(g.square(x)), 3e4), 1e-9), "float16")
    assert with_scores(CaseInputs(g), SCORES) is None


# -- cases ----------------------------------------------------------------------------------------


def test_codes_lie_near_their_zero_points() -> None:
    case = next(case for case in cases(torch.float16) if case.near_zero_points)
    for kind, middle, reach in (("int4", 8, 1), ("int8 floats", 128, 8), ("int8 bytes", 0, 8)):
        program = coded_mutants.coded_linear([coded_mutants.coding(kind, 16, 64, 32)], 2)
        made = CaseInputs(program.graph)
        near, usual = made.of(case), made.of(RANDOM)
        for t, role, x, y in zip(program.graph.inputs, program.roles, near, usual, strict=True):
            if role in ("codes", "zeros"):
                x, y = coded.unpacked(t, x), coded.unpacked(t, y)
                assert 0 < float((x.double() - middle).abs().max()) <= reach
                assert float((y.double() - middle).abs().max()) > reach
            else:
                assert torch.equal(x, y)


def test_only_programs_of_whole_codes_have_codes_near_zero_points() -> None:
    for kind, has in (("int4", True), ("fp8", False)):
        coding = coded_mutants.coding(kind, 16, 64)
        program = coded_mutants.coded_linear([coding], 2).graph
        assert any(case.near_zero_points for case, _ in NumericCheck(program).each()) is has


def test_means_cancel_on_constant_rows_and_far_from_zero() -> None:
    cancelling = [case.name for case in cases(torch.bfloat16) if case.cancels]
    assert cancelling == ["constant rows", "mean far above spread"]
    assert Case("x", offset=-1.0).cancels and not Case("x", factor=5.0, zero=0).cancels


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_cases_of_a_dtype(dtype: torch.dtype) -> None:
    """Inputs are as large as the dtype has room for, and only the range counts near its end."""
    by_name = {case.name: case for case in cases(dtype)}
    is_half = dtype == torch.float16
    assert by_name["random"] == RANDOM and by_name["random"].factor == 1.0
    assert by_name["large"].factor == (300.0 if is_half else 1e4) and by_name["tiny"].factor < 0.01
    assert ("nearly the largest" in by_name) is is_half
    only_range = {name for name, case in by_name.items() if case.range_only}
    scores = {"huge positive scores", "huge negative scores"}
    assert only_range == scores | ({"nearly the largest"} if is_half else set())
    assert {case.name for case in by_name.values() if case.scores} == scores
    assert by_name["huge positive scores"].sign == -by_name["huge negative scores"].sign == 1
    assert [name for name, case in by_name.items() if case.outside] == ["NaN out of bounds"]
