"""The numeric check: it judges range and rounding by those of stock torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import mirage_hf as mi
from mirage_hf.errors import Rejected
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
)
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.execute_block import run_block_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.patterns import ATTENTION
from mirage_hf.pipeline.choose import promising
from mirage_hf.search.engine import search
from mirage_hf.search.expand import expand
from mirage_hf.search.search_journal import RankedUGraph
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify import (
    case_inputs,
    narrow,
    numeric,
    numeric_cases,
)
from mirage_hf.verify.accept import accept, kind_of
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import coded_mutants, multi_kernel_ugraphs, mutants, programs, ugraphs
from tests.helpers.verification import SEARCH, rewired, verdicts


def walking(ugraphs_found, stages):
    return [
        u
        for u in ugraphs_found
        if sum(s.loop is not None for s in u.block_ops[0].block.stages) == stages
    ]


def multiplies(ugraph, *inputs):
    """Return whether some op is the product of these inputs."""
    block = ugraph.block_ops[0].block
    return any(set(op.args) == {block.inputs[n].name for n in inputs} for op in block.ops())


def test_a_product_that_overflows_before_the_division_is_replaced_by_another():
    """x·γ exceeds float16. torch divides first and stays in range.

    The form is accepted in float32 and rejected for tensor cores. γ·W stays in range.
    """
    g = programs.rms_norm_linear(mi, rows=16, k=256, n=64)
    accepted = accept(search(g, SEARCH)[0])
    alone = [c for c in accepted.candidates if c.ugraph.num_kernels == 1]
    one_pass = [c for c in alone if walking([c.ugraph], 1)]
    (early,) = (c for c in one_pass if multiplies(c.ugraph, 0, 1))
    assert (
        early.allows(False) and not early.allows(True) and "inf or NaN" in early.tensor_cores.reason
    )
    (late,) = (c for c in one_pass if multiplies(c.ugraph, 1, 2))
    assert late.allows(True)
    two_pass = [c for c in alone if walking([c.ugraph], 2)]
    assert any(c.allows(True) for c in two_pass)
    assert all(c.error_bound < 1e-9 for c in accepted.candidates)
    first = [
        kind_of(c.ugraph) for c in promising(accepted.candidates)[:5] if c.ugraph.num_kernels == 2
    ]
    assert {(("m",),), (("m", "k"),)} <= {*first} and len({*first}) == len(
        first
    )  # statistics, or scaled rows, kept in between


def test_bfloat16_has_the_range():
    g = programs.rms_norm_linear(mi, rows=16, k=256, n=64, dtype=mi.bfloat16)
    assert accept(search(g, SEARCH)[0]).candidates[0].allows(True)


def one_pass_variance(rows=8, n=256, dtype="float32") -> UGraph:
    """Return mean(x²) − mean(x)² in one walk, for a program that writes mean((x − mean)²)."""
    g = KernelGraph()
    x = g.new_input((rows, n), dtype, name="x")
    g.mark_output(g.reduction(g.square(g.sub(x, g.reduction(x, 1, "mean"))), 1, "mean"))
    block = BlockGraph(
        (Axis("m", rows, Role.GRID), Axis("k", n, Role.LOOP)),
        (BlockInput("x", (0,), ("m", "k")),),
        (
            Stage(
                "k",
                (BlockOp("x2", "mul", ("x", "x"), ("m", "k")),),
                (Accumulator("a", "x", "sum", ("m",)), Accumulator("b", "x2", "sum", ("m",))),
            ),
            Stage(
                None,
                (
                    BlockOp("ma", "mul", ("a", 1 / n), ("m",)),
                    BlockOp("mb", "mul", ("b", 1 / n), ("m",)),
                    BlockOp("sq", "mul", ("ma", "ma"), ("m",)),
                    BlockOp("o", "sub", ("mb", "sq"), ("m",)),
                ),
            ),
        ),
        (BlockOutput("o", ("m", None), dtype),),
    )
    return ugraphs.fuse(g, block)


def test_the_numeric_check_refuses_one_pass_variance(monkeypatch):
    monkeypatch.setattr(
        numeric,
        "cases",
        lambda dtype: (
            numeric_cases.Case("random"),
            numeric_cases.Case("mean far above spread", offset=1000.0),
        ),
    )
    u = one_pass_variance()
    inputs = mutants.float64_inputs(u.program)
    assert mutants.distance(u, inputs, mutants.reference(u.program, inputs)) < 1e-9
    scalar, _ = verdicts(u)
    assert isinstance(scalar, Rejected) and "mean far above spread" in scalar.reason
    two_pass = search(u.program, SEARCH)[0]
    assert any(isinstance(verdicts(f.ugraph)[0], Accepted) for f in two_pass)


CASES = numeric_cases.cases


def layer_norm_linear(rows, k, n=24, dtype="float32"):
    g = mi.new_kernel_graph()
    x, gamma = g.new_input((rows, k), dtype, name="x"), g.new_input((1, k), dtype, name="gamma")
    g.mark_output(g.matmul(g.layer_norm(x, gamma, eps=1e-5), g.new_input((k, n), dtype, name="w")))
    return g


@pytest.mark.parametrize("rows, k", [(1, 256), (3, 256), (3, 768)])
def test_a_float32_mean_may_round_as_float32_means_do(monkeypatch, rows, k):
    """F.layer_norm on a CPU computes the mean of constant rows exactly, and x.mean() does not.

    Families that write out their norm use x.mean(). The norm enlarges an error of one ulp 300-fold.
    With most seeds every kernel was rejected for it.
    """
    monkeypatch.setattr(
        numeric,
        "cases",
        lambda dtype: tuple(c for c in CASES(dtype) if c.constant_rows or c.offset),
    )
    g = layer_norm_linear(rows, k)
    alone = [f.ugraph for f in search(g, SEARCH)[0] if f.ugraph.num_kernels == 1]
    straight = [
        u for u in alone if (block := u.block_ops[0].block).outputs[0].value in block.contractions
    ]  # the product comes last
    assert straight
    for seed in range(6):
        check = numeric.NumericCheck(g, seed=seed)
        for graph in (expand(g), *(u.kernels for u in straight)):
            verdict = check.judge(lambda inputs, graph=graph: run_kernel_graph(graph, inputs))
            assert isinstance(verdict, Accepted), verdict


@pytest.mark.parametrize("dtype, by", [("float32", 1e-6), ("float32", -1e-6), ("bfloat16", 1e-5)])
def test_a_mean_that_no_float32_sum_gives_is_refused(dtype, by):
    """For 256 elements, a pairwise sum may lose 5e-7."""
    g = layer_norm_linear(3, 256, dtype=dtype)

    def run(inputs):
        x, gamma, w = (t.float() for t in inputs)
        y = x - x.double().mean(-1, keepdim=True).mul(1 + by).float()
        return [
            (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * gamma @ w).to(
                inputs[0].dtype
            )
        ]

    for seed in range(3):
        verdict = numeric.NumericCheck(g, seed=seed).judge(run)
        assert isinstance(verdict, Rejected) and "constant rows" in verdict.reason, verdict


def test_sums_in_the_run_dtype_are_refused():
    """A kernel that rounds partial results to float16 is worse than stock."""
    g = programs.rms_norm_linear(mi, rows=4, k=512, n=32, dtype=mi.bfloat16)
    u = search(g, SEARCH)[0][0].ugraph
    check = numeric.NumericCheck(g)

    class Rounding(TorchAlgebra):
        def accumulate(self, kind, total, x):
            return super().accumulate(kind, total, x).bfloat16().float()

    def run(algebra, inputs):
        return [y.bfloat16() for y in run_block_graph(u.block_ops[0].block, inputs, algebra, 64)]

    assert isinstance(
        check.judge(lambda inputs: run(TorchAlgebra(torch.float32), inputs)), Accepted
    )
    verdict = check.judge(lambda inputs: run(Rounding(torch.float32), inputs))
    assert isinstance(verdict, Rejected) and "eager" in verdict.reason


@pytest.mark.parametrize("kind", ["int4 words", "int8 floats"])
def test_rounded_products_with_codes_and_zero_points_that_cancel_are_refused(kind):
    """Σ x · code − zero · Σ x is far from the program if x is rounded in the first sum only."""
    coding = coded_mutants.coding(kind, 8, 256, 64, torch.bfloat16)
    program = coded_mutants.coded_linear([coding], 4, norm=True).graph
    candidates = accept(search(program, SearchOptions(threads=1))[0]).candidates
    refused = [c.tensor_cores for c in candidates if not c.allows(mma=True)]
    assert any("on codes near zero points inputs" in verdict.reason for verdict in refused)
    assert any(c.allows(mma=True) and c.ugraph.num_kernels == 1 for c in candidates)


def test_the_cases_stay_inside_the_dtype():
    g = mi.new_kernel_graph()
    g.matmul(g.new_input((64, 256)), g.new_input((256, 32)))
    for case in numeric_cases.cases(torch.float16):
        x, w = case_inputs.make_inputs(g, case)
        assert bool(torch.isfinite(x).all() and torch.isfinite(w).all())
        assert case.name != "nearly the largest" or float(x.abs().max()) > 30000
    assert {c.name for c in numeric_cases.cases(torch.bfloat16)} >= {
        "random",
        "large",
        "tiny",
        "constant rows",
        "mean far above spread",
    }


def test_narrowing_keeps_the_program():
    for name, sizes in (
        ("rms_norm_linear", {}),
        ("gated_mlp", {}),
        ("lora_paper", {}),
        ("attention_decode", {}),
    ):
        g = programs.PROGRAMS[name][0](mi, **(programs.PROGRAMS[name][1] | sizes))
        u = search(g, SEARCH)[0][0].ugraph
        small = narrow.narrowed(u)
        assert small is not None and isinstance(prove(small), Accepted)
        assert max(math.prod(t.dims) for t in small.program.inputs) < max(
            math.prod(t.dims) for t in g.inputs
        )
        assert small.block_ops[0].block.stages == u.block_ops[0].block.stages
    joined = narrow.narrowed(ugraphs.qkv(rows=3, k=32, sizes=(400, 300, 8)))
    assert (
        joined is not None
        and [t.dims[0] for t in joined.program.inputs[1:]] == [16, 16, 8]
        and isinstance(prove(joined), Accepted)
    )
    g = mi.new_kernel_graph()
    x = g.new_input((300, 16))
    g.matmul(x, g.permute(x, (1, 0)))
    for f in search(g, SEARCH)[0]:
        small = narrow.narrowed(f.ugraph)
        assert small is None or isinstance(prove(small), Accepted)


@pytest.mark.parametrize("name", ["rms_norm_linear", "attention_decode"])
def test_cases_share_unchanged_inputs_and_draw_the_same_numbers_as_alone(name):
    g = programs.build(mi, name)
    draws = case_inputs.CaseInputs(g, seed=3)
    every = [
        *numeric_cases.cases(torch.float16),
        numeric_cases.Case("grown", grown=(0, 1), by=3.0, sign=-1),
        numeric_cases.Case("random"),
    ]
    drawn = [draws.of(case) for case in every]
    for case, inputs in zip(every, drawn, strict=True):
        alone = case_inputs.make_inputs(g, case, seed=3)
        assert all(
            torch.equal(x, y) and x.stride() == y.stride()
            for x, y in zip(inputs, alone, strict=True)
        ), case
    assert len({inputs[-1].data_ptr() for inputs in drawn}) == 1 and len(
        {inputs[0].data_ptr() for inputs in drawn}
    ) == len(every)


def test_no_case_writes_into_shared_inputs():
    """Rows have their own slots, and other slots if their bounds differ.

    Other cases would read data that was left there.
    """
    sizes = dict(
        kv_heads=1,
        group=2,
        head_dim=16,
        scale=0.25,
        norm="rms",
        eps=1e-6,
        dtype=torch.float16,
        queries=2,
    )
    g = ATTENTION.block(**sizes).program(2, slots=24)
    check = numeric.NumericCheck(g)
    for case, inputs in [*check.each()]:
        alone = case_inputs.make_inputs(g, case)
        assert all(
            torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(inputs, alone, strict=True)
        ), case
    for _ in range(2):
        assert isinstance(
            check.judge(lambda inputs: run_kernel_graph(g, inputs, as_on_gpu=True)), Accepted
        )


def test_several_kernels_hold_their_numbers_and_round_their_partial_results():
    for name, build in multi_kernel_ugraphs.ALL.items():
        assert all(isinstance(v, Accepted) for v in verdicts(build())), name
    split = multi_kernel_ugraphs.split_k(k=4096, parts=64)
    first, second = (op.block for op in split.block_ops)
    rounded = replace(first, outputs=(replace(first.outputs[0], dtype="bfloat16"),))
    kernels, inputs = multi_kernel_ugraphs.started(split.program)
    u = multi_kernel_ugraphs.finished(
        split.program, kernels, kernels.customized(kernels.customized(inputs, rounded), second)
    )
    assert isinstance(prove(u), Accepted)  # the numeric check judges rounding
    assert all(isinstance(v, Rejected) and "eager" in v.reason for v in verdicts(u)), verdicts(u)


def test_huge_scores_ask_for_the_maximum_wherever_their_size_comes_from():
    """q/k norm removes the scale of q and k, so the norms' weights make the scores large."""
    for name in ("attention_decode", "qk_norm_attention"):
        g = programs.build(mi, name)
        check = numeric.NumericCheck(g)
        scaled = [case for case, _ in check.each() if case.scores]
        assert len(scaled) == 2 and {c.sign for c in scaled} == {1, -1}
        assert {c.grown for c in scaled} == ({(0, 1)} if name == "attention_decode" else {(3, 4)})
        for case in scaled:
            (args,) = run_kernel_graph(
                case_inputs.exponents(g), case_inputs.make_inputs(g, case), torch.float64
            )
            assert 1e3 < float(args.abs().max()) < 7e4
        for f in search(g, SEARCH)[0]:
            bounded = any(
                a.kind == "max"
                for op in f.ugraph.block_ops
                for st in op.block.stages
                for a in st.accumulators
            )
            bounded |= any(o.fn == "max" for op in f.ugraph.block_ops for o in op.block.ops())
            assert bounded
    g = mi.new_kernel_graph()
    g.matmul(g.new_input((4, 8)), g.new_input((8, 4)))
    assert not any(case.scores for case, _ in numeric.NumericCheck(g).each())


def test_the_numeric_check_refuses_a_sum_that_follows_no_maximum():
    """exp(s) is summed next to exp(s − m).

    After the division both are equal as functions, but exp(s) is out of range for large scores.
    """
    for u in (multi_kernel_ugraphs.flash(), multi_kernel_ugraphs.split_attention()):
        judge = mutants.Judge(u.program)
        lost = [
            m
            for m in mutants.mutants(u)
            if judge(m.ugraph) == "range only" and isinstance(prove(m.ugraph), Accepted)
        ]
        assert all(isinstance(v, Rejected) for m in lost for v in verdicts(m.ugraph)), [
            m.kind for m in lost
        ]


def test_narrowing_reaches_all_kernels():
    for u in (
        multi_kernel_ugraphs.split_attention(64, 1, 4096, 128, 16),
        multi_kernel_ugraphs.split_k(16, 4096, 4096, 8),
        multi_kernel_ugraphs.norm_in_two(16, 4096, 4096, 4),
        multi_kernel_ugraphs.library_between(8, 4096, 4096),
        multi_kernel_ugraphs.split_maximum(4096, 4096, 16),
    ):
        small = narrow.narrowed(u)
        assert small is not None and isinstance(prove(small), Accepted)
        assert sum(math.prod(t.dims) for t in small.program.inputs) < sum(
            math.prod(t.dims) for t in u.program.inputs
        )
        for a, b in zip(u.block_ops, small.block_ops, strict=True):
            assert a.block.stages == b.block.stages
            kept = [
                x.name
                for x in a.block.axes
                if x.split_axis or a.block.axis_split_by(x.name) or x.role is Role.LOOP
            ]
            assert all(a.block.axis(n).size == b.block.axis(n).size for n in kept)
    assert narrow.narrowed(library_ugraph(programs.build(mi, "lora_paper"))) is None


def test_accept_keeps_the_order_of_alternatives():
    u, v = multi_kernel_ugraphs.split_attention(), multi_kernel_ugraphs.flash(keys=50)
    wrong = rewired(multi_kernel_ugraphs.split_attention(), k0=(0, 2, 1))
    accepted = accept(
        [RankedUGraph(wrong, 1.0, 1), RankedUGraph(u, 2.0, 1), RankedUGraph(v, 3.0, 1)]
    )
    assert [c.ugraph for c in accepted.candidates] == [u, v] and [
        c.cost_us for c in accepted.candidates
    ] == [2.0, 3.0]
    assert [r.candidate for r in accepted.rejected] == [0] and "differs" in accepted.rejected[
        0
    ].reason
    assert accepted.error_bound < 1e-18


def test_a_kernel_is_judged_on_inputs_of_the_programs_strides():
    """Views of packed rows have gaps, and their strides are constants of a kernel."""
    g = mi.new_kernel_graph()
    x = g.new_input((3, 2, 8), strides=(40, 8, 1))
    g.mark_output(g.mul(x, 2.0))
    seen = []
    verdict = numeric.NumericCheck(g).judge(
        lambda inputs: seen.append(inputs[0].stride()) or [inputs[0] * 2]
    )
    assert isinstance(verdict, Accepted) and set(seen) == {(40, 8, 1)}


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_numbers_of_programs_with_whole_numbers_among_their_outputs(dtype):
    """Some are computed, and one is an input that is an output.

    The tuner once rejected every candidate of such programs with a TypeError.
    """
    g = mi.new_kernel_graph()
    x, whole = g.new_input((8, 16)), g.new_input((4,), dtype)
    y = g.cast(g.square(x), dtype)
    g.mark_output(whole, y, g.rms_norm(x))
    check = numeric.NumericCheck(g)
    assert isinstance(check.judge(lambda inputs: run_kernel_graph(g, inputs)), Accepted)
    for wrong in range(3):
        verdict = check.judge(
            lambda inputs, k=wrong: [
                z + 2 * (n == k) for n, z in enumerate(run_kernel_graph(g, inputs))
            ]
        )
        assert isinstance(verdict, Rejected) and f"output {wrong} on" in verdict.reason


def test_kernels_beside_whole_numbers_are_verified():
    graphs = []
    for written in (False, True):
        g = mi.new_kernel_graph()
        x, whole = g.new_input((8, 16)), g.new_input((4,), "int32")
        if written:
            bg = mi.new_block_graph(grid_dim=(4,))
            bg.new_output(bg.square(bg.new_input(x, imap={"x": 0})), omap={"x": 0})
        g.mark_output(whole, *g.customized([x], bg)) if written else g.mark_output(
            whole, g.square(x)
        )
        graphs.append(g)
    assert isinstance(mi.verify(*graphs), Accepted)
