"""Proofs over finite fields: equal µGraphs are accepted, different ones are not.

Every accepted proof has a small error bound.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
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
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.pipeline import search_and_verify as searching
from mirage_hf.search.engine import search
from mirage_hf.search.expand import expand
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify import (
    degrees,
    error_bound,
    field_proof,
    shrink,
    size_classes,
)
from mirage_hf.verify.accept import accept
from mirage_hf.verify.field import FieldAlgebra, Q
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import multi_kernel_ugraphs, mutants, programs, reference_executor, ugraphs
from tests.helpers.thorough import count
from tests.helpers.verification import SEARCH, rewired, same, verdicts


def extra() -> dict[str, KernelGraph]:
    """Return programs whose µGraphs have features that the listed ones lack.

    These are attributes, joins, several outputs, squares and maxima.
    """
    made = {}

    def program(name):
        made[name] = g = mi.new_kernel_graph()
        return g

    g = program("clamp")
    x, y = g.new_input((4, 6)), g.new_input((4, 6))
    g.mark_output(g.clamp(g.sub(x, y), min=-1.0, max=0.5), g.max(x, y))
    g = program("joined")
    x, ws, bs = (
        g.new_input((3, 8)),
        [g.new_input((n, 8)) for n in (6, 4, 6)],
        [g.new_input((1, n)) for n in (6, 4, 6)],
    )
    g.mark_output(
        g.add(g.matmul(g.rms_norm(x), g.permute(g.concat(ws, 0), (1, 0))), g.concat(bs, 1))
    )
    g = program("layer norm")
    x, a, b, w, r = (
        g.new_input((4, 6)),
        g.new_input((1, 6)),
        g.new_input((1, 6)),
        g.new_input((6, 6)),
        g.new_input((4, 6)),
    )
    g.add(g.matmul(g.layer_norm(x, a, b), w), r)
    g = program("squares")
    x, y = g.new_input((5, 5)), g.new_input((5, 5))
    g.mark_output(g.matmul(x, g.permute(x, (1, 0))), g.matmul(x, y))
    g = program("safe softmax")
    x = g.new_input((5, 7))
    g.softmax(g.sub(x, g.reduction(x, 1, "max")))
    g = program("powers")
    x, y = g.new_input((5, 7)), g.new_input((5, 1))
    g.mark_output(
        g.reduction(g.pow(g.square(x), 0.3), 1, "mean"), g.reduction(g.mul(x, y), 1, "max")
    )
    return made


@pytest.fixture(scope="module")
def found():
    """Return the candidates of every program at reduced sizes, by name."""
    all_programs = {n: programs.build(mi, n) for n in programs.PROGRAMS} | extra()
    return {name: [f.ugraph for f in search(g, SEARCH)[0]] for name, g in all_programs.items()}


def test_everything_found_is_proven(found):
    assert all(found.values())
    for name, candidates in found.items():
        for seed in range(count(2, 1)):
            for n, u in enumerate(candidates):
                assert isinstance(prove(u, seed=seed, target=1.0, trials=1), Accepted), (
                    name,
                    n,
                    seed,
                )


def test_originals_are_accepted_under_many_seeds(found):
    for name in (
        "rms_norm_linear",
        "lora_paper",
        "norm_gated_mlp",
        "joined",
        "squares",
        "ntrans",
        "clamp",
    ):
        assert all(
            isinstance(prove(found[name][0], seed=s, trials=1, target=1.0), Accepted)
            for s in range(20)
        ), name


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_hand_written_block_graphs_are_proven_in_any_number_of_pieces(pieces):
    for name, build in (ugraphs.ALL | multi_kernel_ugraphs.ALL).items():
        u = build()
        verdict = prove(u, pieces=pieces)
        assert isinstance(verdict, Accepted) and verdict.bound < 1e-18, (name, verdict)


def test_the_library_path_needs_no_proof():
    assert prove(library_ugraph(programs.build(mi, "mla_decode"))) == Accepted(
        0.0, "the program itself"
    )


def test_no_mutant_that_differs_is_accepted(found):
    counts, kinds, wrong = Counter(), Counter(), []
    for name, candidates in found.items():
        inputs = mutants.float64_inputs(candidates[0].program)
        want = mutants.reference(candidates[0].program, inputs)
        made = [m for u in candidates[:2] for m in mutants.mutants(u)]
        random.Random(0).shuffle(made)
        for m in made[: count(60, 30)]:
            far = mutants.distance(m.ugraph, inputs, want)
            verdict = prove(m.ugraph, trials=1, target=1.0)
            differs = "differs" if far > 1e-9 else "equal" if far < 1e-12 else "unclear"
            counts[differs, type(verdict).__name__] += 1
            kinds[m.kind] += differs == "differs"
            if differs == "differs" and isinstance(verdict, Accepted):
                wrong.append((name, m.kind, m.where, far))
    assert not wrong
    assert counts["differs", "Rejected"] >= count(600, 300)
    assert counts["equal", "Accepted"] > count(30, 15)
    assert counts["equal", "Rejected"] < 40  # equal only at these sizes: Σ 1 is the axis's size
    assert len(kinds) >= 16 and sum(n > 0 for n in kinds.values()) >= 14, kinds


class _LastPart(FieldAlgebra):
    def accumulate(self, kind, total, x):
        return x


class _FirstPart(FieldAlgebra):
    def accumulate(self, kind, total, x):
        return x if total is None else total


@pytest.mark.parametrize("broken", [_LastPart, _FirstPart])
def test_accumulators_are_exercised(monkeypatch, broken):
    """A kernel that keeps only one tile of its loop is rejected.

    Every loop runs in two tiles or more.
    """
    u = ugraphs.rms_norm_linear()
    assert isinstance(prove(u), Accepted)
    monkeypatch.setattr(field_proof, "FieldAlgebra", broken)
    assert isinstance(prove(u), Rejected)


def test_a_kernel_of_other_operands_is_refused():
    u = ugraphs.rms_norm_linear(rows=3, k=6, n=6)
    other = ugraphs.rms_norm_linear(rows=3, k=6, n=6, dtype="bfloat16")
    verdict = prove(UGraph(u.program, other.kernels))
    assert isinstance(verdict, Rejected) and "bfloat16" in verdict.reason
    transposed = ugraphs.rms_norm_linear(rows=3, k=6, n=6, transposed=True)
    assert isinstance(prove(UGraph(u.program, transposed.kernels)), Rejected)
    wider = ugraphs.rms_norm_linear(rows=3, k=6, n=8)
    assert isinstance(prove(UGraph(u.program, wider.kernels)), Rejected)
    block = u.block_ops[0].block
    wrong = replace(block, outputs=(replace(block.outputs[0], dtype="float32"),))
    verdict = prove(mutants.fuse(u.program, wrong))
    assert isinstance(verdict, Rejected) and "float32" in verdict.reason


def test_two_outputs_keep_their_order():
    u = ugraphs.softmax_rows(rows=3, n=1 + 4)
    assert isinstance(prove(u), Accepted)
    g = mi.new_kernel_graph()
    x = g.new_input((3, 4))
    g.mark_output(g.exp(x), g.silu(x))
    u = next(f.ugraph for f in search(g, SEARCH)[0] if f.ugraph.num_kernels == 1)
    block = u.block_ops[0].block
    assert isinstance(prove(mutants.fuse(g, replace(block, outputs=block.outputs[::-1]))), Rejected)


def test_several_kernels_are_proven_with_a_small_bound_under_many_seeds():
    for name, build in multi_kernel_ugraphs.ALL.items():
        u = build()
        verdict = prove(u)
        assert (
            isinstance(verdict, Accepted) and verdict.bound < 1e-18 and verdict.detail == "4 trials"
        ), (name, verdict)
        assert all(
            isinstance(prove(u, seed=s, trials=1, target=1.0), Accepted) for s in range(20)
        ), name


@pytest.mark.parametrize("parts", [2, 3, 5, 7, 16])
def test_any_number_of_parts_is_proven(parts):
    for build in (
        multi_kernel_ugraphs.split_k,
        multi_kernel_ugraphs.split_attention,
        multi_kernel_ugraphs.norm_in_two,
        multi_kernel_ugraphs.split_maximum,
    ):
        sizes = (
            {"keys": 64}
            if build is multi_kernel_ugraphs.split_attention
            else {"n": 64}
            if build is multi_kernel_ugraphs.split_maximum
            else {"k": 64}
        )
        assert isinstance(prove(build(parts=parts, **sizes)), Accepted), build.__name__


def test_reduced_sizes_have_two_splits_or_more_and_none_is_empty():
    u = multi_kernel_ugraphs.split_attention(keys=4096, d=128, parts=16)
    classes = size_classes.SizeClasses(expand(u.program), expand(u.kernels))
    for sizes, parts in ((field_proof._SIZES[0], 2), (field_proof._LARGER, 3)):
        _, kernels = shrink.shrink(classes, sizes, parts)
        first, second = kernels.blocks.values()
        assert first.axis("s").size == second.axis("s").size == parts and first.split_size("j") >= 2
        assert (
            first.axis("j").size
            == kernels.dims[kernels.graph.inputs[1].index][1]
            > (parts - 1) * first.split_size("j")
        )


def _by_hand(of, tensors=3):
    """Return a kernel graph with one block graph, in which each block has a row of every input."""
    g = mi.new_kernel_graph()
    xs = [g.new_input((8, 8), "float32") for _ in range(tensors)]
    b = mi.new_block_graph((8,))
    b.new_output(of(b, *(b.new_input(x, imap={"x": 0}) for x in xs)), omap={"x": 0})
    g.customized(xs, b)
    return g


def _program(of, tensors=3):
    g = mi.new_kernel_graph()
    of(g, *(g.new_input((8, 8), "float32") for _ in range(tensors)))
    return g


@pytest.mark.parametrize(
    "wrong",
    [
        lambda b, m, x, y: b.select(m, x, b.neg(y)),
        lambda b, m, x, y: b.select(m, y, x),
        lambda b, m, x, y: b.select(b.square(y), x, y),
        lambda b, m, x, y: b.add(x, b.mul(b.add(m, y), 0.0)),
    ],
    ids=["other side", "swapped", "other condition", "always the first"],
)
def test_a_select_by_data_differs_from_either_side(wrong):
    selects = _program(lambda g, m, x, y: g.select(m, x, y))
    assert isinstance(mi.verify(selects, _by_hand(lambda b, m, x, y: b.select(m, x, y))), Accepted)
    assert isinstance(prove(UGraph(selects, _by_hand(wrong))), Rejected)
    always = _program(lambda g, m, x, y: g.add(x, g.mul(g.add(m, y), 0.0)))
    assert isinstance(
        prove(UGraph(always, _by_hand(lambda b, m, x, y: b.select(m, x, y)))), Rejected
    )


@pytest.mark.parametrize("divisor", [lambda g, y: y, lambda g, y: g.reduction(y, 1)])
def test_a_quotient_differs_from_a_ratio_if_the_divisor_is_zero(divisor):
    ratio = _program(lambda g, x, y: g.ratio(x, divisor(g, y)), 2)
    assert isinstance(
        mi.verify(ratio, _by_hand(lambda b, x, y: b.ratio(x, divisor(b, y)), 2)), Accepted
    )
    verdict = mi.verify(ratio, _by_hand(lambda b, x, y: b.div(x, divisor(b, y)), 2))
    assert isinstance(verdict, Rejected) and re.search(
        "inf or NaN in output 0 on zero t[01] inputs", verdict.reason
    )


def test_outputs_in_another_order_dropped_or_doubled_are_refused():
    u = multi_kernel_ugraphs.norm_in_two()
    for outputs, reason in (
        ((1, 0), "differs"),
        ((0, 0), "differs"),
        ((0,), "1 outputs, the program has 2"),
        ((0, 1, 1), "3 outputs"),
    ):
        verdict = prove(rewired(u, outputs))
        assert isinstance(verdict, Rejected) and reason in verdict.reason, (outputs, verdict)


def test_operands_in_another_order_are_refused():
    assert isinstance(
        prove(rewired(multi_kernel_ugraphs.split_attention(), k0=(0, 2, 1))), Rejected
    )  # v as k
    assert isinstance(
        prove(rewired(multi_kernel_ugraphs.split_attention(), k1=(1, 0, 2))), Rejected
    )  # sums as maxima
    assert isinstance(
        prove(rewired(multi_kernel_ugraphs.library_between(), k0=(0, 2, 1))), Rejected
    )  # gate and up
    square = multi_kernel_ugraphs.split_k(rows=20, k=20, n=20, parts=4)
    assert isinstance(prove(square), Accepted) and isinstance(
        prove(rewired(square, k0=(1, 0))), Rejected
    )
    k, p = multi_kernel_ugraphs.split_k().kernels, multi_kernel_ugraphs.split_k(rows=4).program
    verdict = prove(UGraph(p, k))
    assert (
        isinstance(verdict, Rejected)
        and "input 0 of the kernels is float16 (3, 50)" in verdict.reason
    )


def test_a_part_left_out_or_counted_twice_is_refused():
    u = multi_kernel_ugraphs.split_k()
    first, second = (op.block for op in u.block_ops)
    partial = replace(
        second,
        stages=(
            Stage(
                "s",
                (BlockOp("twice", "add", ("part", "part"), ("m", "n", "s")),),
                (Accumulator("o", "twice", "sum", ("m", "n")),),
            ),
        ),
    )
    kernels, inputs = multi_kernel_ugraphs.started(u.program)
    assert isinstance(
        prove(
            multi_kernel_ugraphs.finished(
                u.program, kernels, kernels.customized(kernels.customized(inputs, first), partial)
            )
        ),
        Rejected,
    )
    kernels, inputs = multi_kernel_ugraphs.started(u.program)  # only the first part
    part = kernels.reshape(kernels.slice(*kernels.customized(inputs, first), 0, 0, 1), (3, 20))
    assert isinstance(
        prove(multi_kernel_ugraphs.finished(u.program, kernels, [kernels.cast(part, "float16")])),
        Rejected,
    )


def test_a_maximum_of_maxima_is_one_and_a_sum_of_maxima_is_not():
    u = multi_kernel_ugraphs.split_maximum()
    assert isinstance(prove(u), Accepted)
    first, second = (op.block for op in u.block_ops)
    stage = second.stages[0]
    summed = replace(
        second, stages=(replace(stage, body=(replace(stage.body[0], fn="sum"), *stage.body[1:])),)
    )
    kernels, inputs = multi_kernel_ugraphs.started(u.program)
    assert isinstance(
        prove(
            multi_kernel_ugraphs.finished(
                u.program, kernels, kernels.customized(kernels.customized(inputs, first), summed)
            )
        ),
        Rejected,
    )
    f = FieldAlgebra(0)
    x = f.random((2, 6))
    rows = f.reduce("max", x, 1)
    assert same(f.reduce("max", rows, 0), f.reduce("max", f.reduce("max", x, 0), 1))
    assert not same(f.reduce("max", rows, 0), f.reduce("sum", rows, 0))
    assert not same(
        f.reduce("max", f.add(rows, f.constant(0.0)), 0),
        f.reduce("max", f.add(rows, f.constant(1.0)), 0),
    )


def test_library_ops_between_kernels_are_evaluated():
    """Every library op is tried with a fused kernel after it.

    The same µGraph with another attribute is rejected.
    """

    def built(change):
        g = mi.new_kernel_graph()
        x, c, s = g.new_input((2, 6, 8)), g.new_input((1, 6, 8)), g.new_input((1, 6, 4))

        def body(k, x, c, s, change):
            start = 3 if change == "start" else 2
            y = k.rope(x, k.slice(c, 2, start, start + 4), s, interleaved=change == "interleaved")
            y = k.concat([y, k.exp(y)] if change != "concat" else [k.exp(y), y], 2)  # (2, 6, 16)
            y = (
                k.permute(k.reshape(y, (2, 2, 3, 16)), (0, 2, 1, 3))
                if change != "order"
                else k.reshape(y, (2, 3, 2, 16))
            )
            y = k.layer_norm(y, eps=1e-3 if change == "eps" else 1e-5)
            y = k.reduction(y, 2, "sum" if change == "kind" else "mean")  # (2, 3, 1, 16)
            return k.reshape(k.add(y, 0.5), (2, 3, 16))

        g.mark_output(g.silu(body(g, x, c, s, "")))
        axes = ("a", "b", "c")
        block = BlockGraph(
            tuple(Axis(a, n, Role.GRID) for a, n in zip(axes, (2, 3, 16), strict=True)),
            (BlockInput("x", (0,), axes),),
            (Stage(None, (BlockOp("o", "silu", ("x",), axes),)),),
            (BlockOutput("o", axes, "float16"),),
        )
        kernels, inputs = multi_kernel_ugraphs.started(g)
        return multi_kernel_ugraphs.finished(
            g, kernels, kernels.customized([body(kernels, *inputs, change)], block)
        )

    assert isinstance(prove(built("")), Accepted), prove(built(""))
    for change in ("interleaved", "start", "concat", "eps", "kind", "order"):
        verdict = prove(built(change))
        assert isinstance(verdict, Rejected), change


def test_small_graphs_evaluate_library_ops_as_torch_does():
    class Numbers(TorchAlgebra):
        def spread(self, x, shape):
            return x.expand(tuple(shape))

    g = mi.new_kernel_graph()
    x, w, c, s = (
        g.new_input((3, 6, 8)),
        g.new_input((8, 5)),
        g.new_input((1, 6, 4)),
        g.new_input((1, 6, 4)),
    )
    g.mark_output(
        g.rope(x, c, s),
        g.rope(x, c, s, interleaved=True),
        g.matmul(x, w),
        g.permute(x, (2, 0, 1)),
        g.reduction(x, 1, "max"),
        g.reduction(x, -1, "mean"),
        g.concat([x, x], 1),
        g.slice(x, 1, 2, 5),
        g.reshape(x, (18, 8)),
        g.softmax(x, 1),
        g.pow(x, 3.0),
    )
    e = expand(g)
    small = shrink.small_graph(
        classes := size_classes.SizeClasses(e, e), "program", classes.roots()
    )
    inputs = mutants.float64_inputs(g)
    for a, b in zip(
        small.run(inputs, Numbers(torch.float64), 1), reference_executor.run(g, inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_a_graph_that_cannot_be_shrunk_or_proven_says_why():
    g = mi.new_kernel_graph()
    cache, new, at = g.new_input((4, 8, 6)), g.new_input((4, 1, 6)), g.new_input((1,), "int64")
    g.mark_output(g.exp(g.cache_append(cache, new, at)))
    kernels, inputs = multi_kernel_ugraphs.started(g)
    axes = ("a", "b", "c")
    block = BlockGraph(
        tuple(Axis(a, n, Role.GRID) for a, n in zip(axes, (4, 8, 6), strict=True)),
        (BlockInput("x", (0,), axes),),
        (Stage(None, (BlockOp("o", "exp", ("x",), axes),)),),
        (BlockOutput("o", axes, "float16"),),
    )
    u = multi_kernel_ugraphs.finished(
        g, kernels, kernels.customized([kernels.cache_append(*inputs)], block)
    )
    assert isinstance(prove(u), Accepted)  # an append is proven, whichever kernel does it
    h = mi.new_kernel_graph()
    x = h.new_input((4, 6))
    h.mark_output(h.exp(h.reshape(x, (6, 4))))
    kernels, (x,) = multi_kernel_ugraphs.started(h)
    block = BlockGraph(
        (Axis("a", 6, Role.GRID), Axis("b", 4, Role.GRID)),
        (BlockInput("x", (0,), ("a", "b")),),
        (Stage(None, (BlockOp("o", "exp", ("x",), ("a", "b")),)),),
        (BlockOutput("o", ("a", "b"), "float16"),),
    )
    verdict = prove(
        multi_kernel_ugraphs.finished(
            h, kernels, kernels.customized([kernels.reshape(x, (6, 4))], block)
        )
    )
    assert isinstance(verdict, Rejected) and "reshape" in verdict.reason


def test_exponents_may_hold_the_values_of_opaque_functions():
    g = mi.new_kernel_graph()
    x = g.new_input((4, 6))
    y = g.tanh(x)
    g.mark_output(g.mul(g.exp(g.sub(x, y)), g.exp(y)))
    axes = ("m", "n")
    block = BlockGraph(
        (Axis("m", 4, Role.GRID), Axis("n", 6, Role.GRID)),
        (BlockInput("x", (0,), axes),),
        (Stage(None, (BlockOp("o", "exp", ("x",), axes),)),),
        (BlockOutput("o", axes, "float16"),),
    )
    assert isinstance(prove(ugraphs.fuse(g, block)), Accepted)


def test_the_error_bound_falls_with_trials_and_grows_with_the_program(found):
    u = found["rms_norm_linear"][0]
    bounds = [prove(u, trials=t, target=1.0).bound for t in (1, 2, 4, 8)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] < 1e-4 and bounds[-1] < 1e-30
    assert prove(u, trials=1, target=1e-20).bound < 1e-20  # as many trials as needed
    small, large = (one_trial(v) for v in (ugraphs.lora(), ugraphs.ntrans()))
    assert 0 < small < large <= 1


def one_trial(ugraph: UGraph) -> float:
    return prove(ugraph, trials=1, target=1.0).bound


def test_the_bound_counts_exps_and_opaque_arguments():
    def of(build):
        g = mi.new_kernel_graph()
        g.mark_output(build(g, g.new_input((4, 3))))
        return one_trial(search(g, SEARCH)[0][0].ugraph)

    plainly, opaque, exps = (
        of(lambda g, x: g.square(x)),
        of(lambda g, x: g.silu(x)),
        of(lambda g, x: g.softmax(x)),
    )
    deep = of(lambda g, x: g.silu(g.mul(g.square(x), g.square(x))))
    assert plainly < opaque < deep and plainly < exps < 1e-5


def test_opaque_functions_of_many_exponentials_are_proven():
    """The number of exponentials in an argument does not matter.

    They are independent, and count by their degree.
    """
    g = mi.new_kernel_graph()
    g.mark_output(g.silu(g.reduction(g.softmax(g.new_input((7, 6))), 0)))
    for f in search(g, SEARCH)[0]:
        verdict = prove(f.ugraph)
        assert isinstance(verdict, Accepted) and verdict.bound < 1e-9


def two_exponentials(c: float) -> UGraph:
    g = mi.new_kernel_graph()
    x = g.new_input((4, 6))
    g.mark_output(g.mul(g.exp(x), g.exp(g.mul(x, c))))
    axes = ("m", "n")
    block = BlockGraph(
        (Axis("m", 4, Role.GRID), Axis("n", 6, Role.GRID)),
        (BlockInput("x", (0,), axes),),
        (
            Stage(
                None,
                (
                    BlockOp("a", "exp", ("x",), axes),
                    BlockOp("cx", "mul", (c, "x"), axes),
                    BlockOp("b", "exp", ("cx",), axes),
                    BlockOp("o", "mul", ("b", "a"), axes),
                ),
            ),
        ),
        (BlockOutput("o", axes, "float16"),),
    )
    return ugraphs.fuse(g, block)


def test_a_proof_without_a_bound_is_refused():
    """e^x and e^(cx) are powers of one number.

    Unless c is a simple fraction, no bound survives their degree.
    """
    assert one_trial(two_exponentials(0.5)) < one_trial(two_exponentials(0.0625)) < 1e-5
    u = two_exponentials(0.123457)
    verdict = prove(u)
    assert isinstance(verdict, Rejected) and "small multiples" in verdict.reason
    assert prove(u, target=1.0).bound == 1.0  # without a wanted bound there is none


def test_every_accepted_bound_is_small(found):
    for name, candidates in found.items():
        assert all(prove(u).bound <= field_proof.WORST for u in candidates[:2]), name


def test_independent_exponents_are_found_with_their_relations():
    rng = np.random.default_rng(0)
    basis = rng.integers(Q, size=(5, 16))
    half = pow(2, -1, Q)
    rows = [
        basis,
        (basis[:1] - basis[1:2]) % Q,
        (basis[2:3] * half + 3 * basis[3:4]) % Q,
        basis[4:5] * 0,
    ]
    found = error_bound.independent(rows, 16)
    assert isinstance(found, error_bound.Exponents) and found.rank == 5
    assert found.weight in (4, 6, 8)  # b/2 + 3c, in terms of the two functions that came first
    assert error_bound.independent([], 16).rank == 0
    assert "too many" in error_bound.independent([rng.integers(Q, size=(13, 16))], 16).reason
    assert "small multiples" in error_bound.independent([basis, basis[:1] * 123457 % Q], 16).reason
    numerators, denominators = error_bound._rational(
        np.array([3, Q - 2, 7 * pow(9, -1, Q) % Q, 123456789, 0])
    )
    assert (
        numerators.tolist()[:3] == [3, -2, 7]
        and denominators.tolist() == [1, 1, 9, denominators[3], 1]
        and numerators[4] == 0
    )


def test_degrees_add_up_and_common_denominators_count_once():
    """Numerators and denominators as (degree, exponentials)."""
    d = degrees.Degrees()

    def quotients(x):
        pairs = np.stack([x.numerator, x.denominator], -2)
        return {tuple(map(tuple, pair)) for pair in pairs.reshape(-1, 2, 2).tolist()}

    a, b = d.variable((2, 3)), d.variable((2, 1))
    quotient = d.elementwise("div", [a, b], {})
    assert quotients(d.reduce("sum", quotient, 1)) == {((1, 0), (1, 0))}  # one b per row
    assert quotients(d.reduce("sum", quotient, 0)) == {((2, 0), (2, 0))}  # two denominators
    e = d.elementwise("exp", [quotient], {})
    assert d.exps == 6 and d.exponent == degrees.LargestDegree(1, 0, 1, 0)
    assert quotients(e) == {((0, 1), (0, 0))}
    softmax = d.elementwise("div", [e, d.reduce("sum", e, 1)], {})
    assert quotients(softmax) == {((0, 1), (0, 1))}
    assert quotients(d.reduce("sum", softmax, 0)) == {((0, 2), (0, 2))}
    assert quotients(d.rescale(e, quotient, quotient)) == {((0, 2), (0, 0))}


def test_an_identity_that_holds_only_on_short_axes_is_refused():
    """24 e4 = p1⁴ − 6 p1² p2 + 3 p2² + 8 p1 p3 − 6 p4 is 0 on three elements, not on four."""
    g = mi.new_kernel_graph()
    x = g.new_input((1, 32))
    p1, p2, p3, _ = (g.reduction(g.pow(x, float(n)) if n > 1 else x, 1) for n in (1, 2, 3, 4))
    g.mark_output(g.add(g.add(g.pow(p1, 4.0), g.mul(g.square(p2), 3.0)), g.mul(g.mul(p1, p3), 8.0)))
    block = BlockGraph(
        (Axis("k", 32, Role.LOOP),),
        (BlockInput("x", (0,), (None, "k")),),
        (
            Stage(
                "k",
                (
                    BlockOp("x2", "mul", ("x", "x"), ("k",)),
                    BlockOp("x4", "mul", ("x2", "x2"), ("k",)),
                ),
                (
                    Accumulator("p1", "x", "sum", ()),
                    Accumulator("p2", "x2", "sum", ()),
                    Accumulator("p4", "x4", "sum", ()),
                ),
            ),
            Stage(
                None,
                (
                    BlockOp("a", "mul", ("p1", "p1"), ()),
                    BlockOp("b", "mul", ("a", "p2"), ()),
                    BlockOp("c", "mul", ("b", 6.0), ()),
                    BlockOp("d", "mul", ("p4", 6.0), ()),
                    BlockOp("o", "add", ("c", "d"), ()),
                ),
            ),
        ),
        (BlockOutput("o", (None, None), "float16"),),
    )
    assert isinstance(prove(mutants.fuse(g, block)), Rejected)
    constant = mi.new_kernel_graph()  # Σ (x + y) = Σ x + 3 y holds for three elements
    x, y = constant.new_input((1, 32)), constant.new_input((1, 1))
    constant.mark_output(constant.reduction(constant.add(x, y), 1))
    for n in (2.0, 3.0, 4.0, 5.0):
        block = BlockGraph(
            (Axis("k", 32, Role.LOOP),),
            (BlockInput("x", (0,), (None, "k")), BlockInput("y", (1,), (None, None))),
            (
                Stage("k", (), (Accumulator("s", "x", "sum", ()),)),
                Stage(
                    None, (BlockOp("ny", "mul", ("y", n), ()), BlockOp("o", "add", ("s", "ny"), ()))
                ),
            ),
            (BlockOutput("o", (None, None), "float16"),),
        )
        assert isinstance(prove(mutants.fuse(constant, block)), Rejected), n


def test_keep_counts_candidates_for_each_way_to_round():
    g = programs.rms_norm_linear(mi, rows=16, k=256, n=64)
    found = search(g, SEARCH)[0]
    kept = accept(found, keep=1).candidates
    assert (
        any(c.allows(False) for c in kept)
        and any(c.allows(True) for c in kept)
        and len(kept) < len(found)
    )


def test_attention_is_found_with_its_maximum():
    g = programs.attention(mi, heads=2, q=1, keys=512, d=64)
    found, _ = search(g, SEARCH)
    accepted = accept(found)
    assert found and all(isinstance(prove(f.ugraph), Accepted) for f in found)
    assert accepted.candidates and not accepted.rejected
    assert all(
        isinstance(v, Accepted) for v in verdicts(ugraphs.attention(heads=2, q=3, keys=64, d=64))
    )


def test_time_ends_verification_once_there_is_a_candidate():
    found, _ = search(programs.build(mi, "lora_paper"), SEARCH)
    hurried = accept(found, seconds=0.0)
    assert len(hurried.candidates) == 1 and hurried.late == len(found) - 1
    assert accept(found).late == 0


def test_the_larger_of_two_sizes_is_searched_and_the_smaller_checked(monkeypatch):
    def linear(n: int):
        g = mi.new_kernel_graph()
        g.mark_output(g.matmul(g.new_input((2, 64)), g.new_input((64, n))))
        return g

    seen: dict[str, object] = {}
    found, accepted = searching.search, searching.accept
    monkeypatch.setattr(
        searching,
        "search",
        lambda g, *rest, **more: seen.update(searched=g.inputs[1].dims) or found(g, *rest, **more),
    )
    monkeypatch.setattr(
        searching,
        "accept",
        lambda f, **rest: (
            seen.update(checked=f[0].ugraph.program.inputs[1].dims) or accepted(f, **rest)
        ),
    )
    for program, like in ((linear(32), linear(256)), (linear(256), linear(32))):
        candidates = searching.search_and_verify(
            program, SearchOptions(time_limit=20, threads=1, max_width=1), like=like
        ).candidates
        assert candidates and all(c.ugraph.program is program for c in candidates)
        assert seen == {"searched": (64, 256), "checked": (64, 32)}
