"""Proofs and numbers: the field is a field, what is equal is accepted, what differs is not, and rounding is judged as stock's."""
# ruff: noqa: E501
from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import mutants
import numpy as np
import programs
import pytest
import torch
import ugraphs

import mirage_hf as mi
from mirage_hf.graph.block import Accumulator, Axis, BlockGraph, BlockInput, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.execute import run_block_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.search.engine import SearchOptions, search
from mirage_hf.search.spec import lower
from mirage_hf.verify import fingerprint, numeric
from mirage_hf.verify.accept import accept
from mirage_hf.verify.field import Element, FieldAlgebra, P, Q, Redraw
from mirage_hf.verify.fingerprint import error_bound, prove
from mirage_hf.verify.verdict import Accepted, Refused

SEARCH = SearchOptions(time_limit=2, threads=1)


# -- the field ------------------------------------------------------------------------------------------------------------

def is_prime(n: int) -> bool:
    """Miller–Rabin, exact below 3.3e24 with these bases."""
    d, r = n - 1, 0
    while d % 2 == 0:
        d, r = d // 2, r + 1
    for a in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41):
        x = pow(a, d, n)
        if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(r - 1)):
            return False
    return True


def test_the_primes():
    assert is_prime(P) and is_prime(Q) and P == 2 * Q + 1 and (P - 1) % Q == 0
    assert Q > 1 << 29 and P * P < 1 << 63  # products fit in int64


def same(a: Element, b: Element) -> bool:
    return bool((a.p == b.p).all()) and (a.q is None) == (b.q is None) and (a.q is None or bool((a.q == b.q).all()))


@pytest.mark.parametrize("seed", range(3))
def test_the_laws_of_a_field(seed):
    f = FieldAlgebra(seed)
    a, b, c = (f.random((64,)) for _ in range(3))
    zero, one = f.constant(0.0), f.constant(1.0)
    assert same(f.add(a, b), f.add(b, a)) and same(f.mul(a, b), f.mul(b, a))
    assert same(f.add(f.add(a, b), c), f.add(a, f.add(b, c))) and same(f.mul(f.mul(a, b), c), f.mul(a, f.mul(b, c)))
    assert same(f.mul(a, f.add(b, c)), f.add(f.mul(a, b), f.mul(a, c)))
    assert same(f.add(a, zero), a) and same(f.mul(a, one), a) and same(f.add(f.sub(a, b), b), a) and same(f.mul(f.div(a, b), b), a)
    assert same(f.constant(0.75), f.div(f.constant(3.0), f.constant(4.0))) and same(f.mul(f.constant(1 / 3), f.constant(3.0)), one)
    assert all((x.p >= 0).all() and (x.p < P).all() and (x.q >= 0).all() and (x.q < Q).all() for x in (f.sub(a, b), f.mul(a, b), f.div(a, b)))


def test_exp_is_a_homomorphism_and_its_image_has_order_q():
    f = FieldAlgebra(1)
    a, b = f.random((64,)), f.random((64,))
    assert same(f.exp(f.add(a, b)), f.mul(f.exp(a), f.exp(b)))
    assert same(f.exp(f.sub(a, b)), f.div(f.exp(a), f.exp(b)))
    assert (f.exp(f.constant(0.0)).p == 1).all() and f.exp(a).q is None
    assert all(pow(int(x), Q, P) == 1 for x in f.exp(a).p) and f.w not in (0, 1)
    twice = f.exp(f.exp(a))  # has no exponent in the field: opaque
    assert not same(f.exp(f.add(f.exp(a), f.exp(b))), f.mul(twice, f.exp(f.exp(b))))


def test_opaque_functions_are_keyed_by_name_attributes_arguments_and_trial():
    f, g = FieldAlgebra(1), FieldAlgebra(2)
    x, y = f.random((200,)), f.random((200,))
    names = ["sqrt", "rsqrt", "tanh", "silu", "gelu", "gelu_tanh", "sigmoid", "relu"]
    values = [f.elementwise(n, [x], {}).p for n in names]
    values += [f.elementwise("clamp", [x], {"min": lo, "max": hi}).p for lo, hi in ((-1.0, 1.0), (-2.0, 1.0), (-1.0, 2.0))]
    values += [f.elementwise(n, args, {}).p for n in ("max", "min", "pow") for args in ([x, y], [y, x])]
    values += [g.elementwise("silu", [x], {}).p]
    for i, a in enumerate(values):
        assert (a == f.elementwise(names[i], [x], {}).p).all() if i < len(names) else True
        for b in values[:i]:
            assert (a != b).mean() > 0.9
    assert len(np.unique(values[0])) == 200


def test_long_names_and_attributes_are_all_of_the_key():
    f = FieldAlgebra(0)
    x = f.random((50,))
    long = "a_rather_long_name_of_an_op_that_somebody_may_register_one_day_"
    a, b = f._hash(long + "1", (), [x]), f._hash(long + "2", (), [x])
    c, d = (f._hash("x" + long, (("alpha", v), ("beta", 1.0)), [x]) for v in (1.0, 2.0))
    assert not (a.p == b.p).any() and not (c.p == d.p).any()


def test_constants_that_are_not_small_rationals_are_random_and_differ():
    f = FieldAlgebra(3)
    a, b = f.constant(math.pi * 1e-30), f.constant(math.e * 1e-30)
    assert same(a, f.constant(math.pi * 1e-30)) and not same(a, b) and not same(a, FieldAlgebra(4).constant(math.pi * 1e-30))


def test_a_maximum_may_be_taken_in_pieces():
    f = FieldAlgebra(5)
    x = f.random((3, 8))
    whole = f.reduce("max", x, 1)
    parts = f.accumulate("max", f.reduce("max", f.cut(x, (slice(None), slice(0, 5))), 1), f.reduce("max", f.cut(x, (slice(None), slice(5, 8))), 1))
    assert same(whole, parts) and not same(whole, f.reduce("sum", x, 1))


def test_a_zero_denominator_asks_for_other_inputs():
    f = FieldAlgebra(0)
    with pytest.raises(Redraw):
        f.div(f.constant(1.0), f.constant(0.0))
    g = mi.new_kernel_graph()
    x = g.new_input((4, 8))
    g.div(x, g.sub(x, x))
    block = BlockGraph((Axis("m", 4, Role.GRID), Axis("n", 8, Role.GRID)), (BlockInput("x", (0,), ("m", "n")),),
                       (Stage(None, (BlockOp("z", "sub", ("x", "x"), ("m", "n")), BlockOp("o", "div", ("x", "z"), ("m", "n")))),),
                       (BlockOutput("o", ("m", "n"), "float16"),))
    verdict = prove(mutants.fuse(g, block))
    assert isinstance(verdict, Refused) and "divides by zero" in verdict.reason


# -- what is equal is accepted ------------------------------------------------------------------------------------------------

def extra() -> dict[str, KernelGraph]:
    """Programs whose µGraphs have what the listed ones lack: attributes, joins, several outputs, squares, maxima."""
    made = {}

    def program(name):
        made[name] = g = mi.new_kernel_graph()
        return g

    g = program("clamp")
    x, y = g.new_input((4, 6)), g.new_input((4, 6))
    g.mark_output(g.clamp(g.sub(x, y), min=-1.0, max=0.5), g.max(x, y))
    g = program("joined")
    x, ws, bs = g.new_input((3, 8)), [g.new_input((n, 8)) for n in (6, 4, 6)], [g.new_input((1, n)) for n in (6, 4, 6)]
    g.mark_output(g.add(g.matmul(g.rms_norm(x), g.permute(g.concat(ws, 0), (1, 0))), g.concat(bs, 1)))
    g = program("layer norm")
    x, a, b, w, r = g.new_input((4, 6)), g.new_input((1, 6)), g.new_input((1, 6)), g.new_input((6, 6)), g.new_input((4, 6))
    g.add(g.matmul(g.layer_norm(x, a, b), w), r)
    g = program("squares")
    x, y = g.new_input((5, 5)), g.new_input((5, 5))
    g.mark_output(g.matmul(x, g.permute(x, (1, 0))), g.matmul(x, y))
    g = program("safe softmax")
    x = g.new_input((5, 7))
    g.softmax(g.sub(x, g.reduction(x, 1, "max")))
    g = program("powers")
    x, y = g.new_input((5, 7)), g.new_input((5, 1))
    g.mark_output(g.reduction(g.pow(g.square(x), 0.3), 1, "mean"), g.reduction(g.mul(x, y), 1, "max"))
    return made


@pytest.fixture(scope="module")
def found():
    """Candidates of every program at reduced sizes, by name."""
    all_programs = {n: programs.build(mi, n) for n in programs.PROGRAMS} | extra()
    return {name: [f.ugraph for f in search(g, SEARCH)[0]] for name, g in all_programs.items()}


def test_everything_found_is_proven(found):
    assert all(found.values())
    for name, candidates in found.items():
        for seed in range(2):
            for n, u in enumerate(candidates):
                assert isinstance(prove(u, seed=seed, target=1.0, trials=1), Accepted), (name, n, seed)


def test_originals_are_accepted_under_many_seeds(found):
    for name in ("rms_norm_linear", "lora_paper", "norm_gated_mlp", "joined", "squares", "ntrans", "clamp"):
        assert all(isinstance(prove(found[name][0], seed=s, trials=1, target=1.0), Accepted) for s in range(20)), name


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_hand_written_block_graphs_are_proven_in_any_number_of_pieces(pieces):
    for name, build in ugraphs.ALL.items():
        u = build()
        verdict = prove(u, pieces=pieces)
        assert isinstance(verdict, Refused if len(u.kernels.ops) > 1 else Accepted), (name, verdict)


def test_the_library_path_needs_no_proof():
    assert prove(library_ugraph(programs.build(mi, "mla_decode"))) == Accepted(0.0, "the program itself")


# -- what differs is not ------------------------------------------------------------------------------------------------------

def test_no_mutant_that_differs_is_accepted(found):
    counts, kinds, wrong = Counter(), Counter(), []
    for name, candidates in found.items():
        inputs = mutants.float64_inputs(candidates[0].program)
        want = mutants.reference(candidates[0].program, inputs)
        made = [m for u in candidates[:2] for m in mutants.mutants(u)]
        random.Random(0).shuffle(made)
        for m in made[:110]:
            far = mutants.distance(m.ugraph, inputs, want)
            verdict = prove(m.ugraph, trials=1, target=1.0)
            differs = "differs" if far > 1e-9 else "equal" if far < 1e-12 else "unclear"
            counts[differs, type(verdict).__name__] += 1
            kinds[m.kind] += differs == "differs"
            if differs == "differs" and isinstance(verdict, Accepted):
                wrong.append((name, m.kind, m.where, far))
    assert not wrong
    assert counts["differs", "Refused"] >= 1000 and counts["equal", "Accepted"] > 50
    assert counts["equal", "Refused"] < 40  # equal only at these sizes: Σ 1 is the axis's size
    assert len(kinds) >= 16 and sum(n > 0 for n in kinds.values()) >= 14, kinds


class _LastPart(FieldAlgebra):
    def accumulate(self, kind, total, x):
        return x


class _FirstPart(FieldAlgebra):
    def accumulate(self, kind, total, x):
        return x if total is None else total


@pytest.mark.parametrize("broken", [_LastPart, _FirstPart])
def test_accumulators_are_exercised(monkeypatch, broken):
    """A kernel that keeps one tile of its loop only is refused: every loop runs in two tiles or more."""
    u = ugraphs.rms_norm_linear()
    assert isinstance(prove(u), Accepted)
    monkeypatch.setattr(fingerprint, "FieldAlgebra", broken)
    assert isinstance(prove(u), Refused)


def test_a_kernel_of_other_operands_is_refused():
    u = ugraphs.rms_norm_linear(rows=3, k=6, n=6)
    other = ugraphs.rms_norm_linear(rows=3, k=6, n=6, dtype="bfloat16")
    verdict = prove(UGraph(u.program, other.kernels))
    assert isinstance(verdict, Refused) and "bfloat16" in verdict.reason
    transposed = ugraphs.rms_norm_linear(rows=3, k=6, n=6, transposed=True)
    assert isinstance(prove(UGraph(u.program, transposed.kernels)), Refused)
    wider = ugraphs.rms_norm_linear(rows=3, k=6, n=8)
    assert isinstance(prove(UGraph(u.program, wider.kernels)), Refused)
    block = u.block_ops[0].block
    wrong = replace(block, outputs=(replace(block.outputs[0], dtype="float32"),))
    verdict = prove(mutants.fuse(u.program, wrong))
    assert isinstance(verdict, Refused) and "float32" in verdict.reason


def test_two_outputs_keep_their_order():
    u = ugraphs.softmax_rows(rows=3, n=1 + 4)
    assert isinstance(prove(u), Accepted)
    g = mi.new_kernel_graph()
    x = g.new_input((3, 4))
    g.mark_output(g.exp(x), g.silu(x))
    u, = (f.ugraph for f in search(g, SEARCH)[0])
    block = u.block_ops[0].block
    assert isinstance(prove(mutants.fuse(g, replace(block, outputs=block.outputs[::-1]))), Refused)


# -- the bound ------------------------------------------------------------------------------------------------------------------

def test_the_error_bound_falls_with_trials_and_grows_with_the_program(found):
    u = found["rms_norm_linear"][0]
    bounds = [prove(u, trials=t, target=1.0).bound for t in (1, 2, 4, 8)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] < 1e-4 and bounds[-1] < 1e-30
    assert prove(u, trials=1, target=1e-20).bound < 1e-20  # as many trials as it takes
    small, large = (error_bound(lower(v.program), v.block_ops[0].block) for v in (ugraphs.lora(), ugraphs.ntrans()))
    assert 0 < small < large <= 1


def test_the_bound_counts_exps_and_opaque_arguments():
    def bound(build):
        g = mi.new_kernel_graph()
        g.mark_output(build(g, g.new_input((4, 3))))
        f = search(g, SEARCH)[0][0].ugraph
        return error_bound(lower(g), f.block_ops[0].block)
    plain, opaque, exps = bound(lambda g, x: g.square(x)), bound(lambda g, x: g.silu(x)), bound(lambda g, x: g.softmax(x))
    deep = bound(lambda g, x: g.silu(g.mul(g.square(x), g.square(x))))
    assert plain < opaque < deep < exps


def test_a_proof_that_would_say_nothing_is_refused():
    """Arguments of an opaque function that hold exponentials may coincide in so many ways that the bound is 1 in every trial."""
    g = mi.new_kernel_graph()
    g.mark_output(g.silu(g.reduction(g.softmax(g.new_input((7, 6))), 0)))
    found = [f.ugraph for f in search(g, SEARCH)[0]]
    assert found
    for u in found:
        verdict = prove(u)
        assert isinstance(verdict, Refused) and "error bound" in verdict.reason
        assert prove(u, target=1.0).bound == 1.0  # who asks for no bound gets none
    assert not accept(search(g, SEARCH)[0]).candidates


def test_every_accepted_bound_is_small(found):
    for name, candidates in found.items():
        assert all(prove(u).bound <= fingerprint.WORST for u in candidates[:2]), name


def test_exponents_that_are_quotients_and_arguments_of_unlike_sizes_count_in_full():
    size = fingerprint._Size
    opaque = fingerprint._Opaque()
    quotient = fingerprint._combine("exp", [size(1, 1)], opaque)
    assert fingerprint._combine("mul", [quotient, quotient], opaque).exponent == 4  # a/b + c/d = (ad + cb) / bd
    for arg in (size(num=5), size(den=5)):
        opaque.apply([arg])
    assert opaque.chance >= fingerprint._comparison(size(num=5), size(den=5))


def test_what_holds_only_on_short_axes_is_refused():
    """24 e4 = p1⁴ − 6 p1² p2 + 3 p2² + 8 p1 p3 − 6 p4 is 0 on three elements, not on four."""
    g = mi.new_kernel_graph()
    x = g.new_input((1, 32))
    p1, p2, p3, _ = (g.reduction(g.pow(x, float(n)) if n > 1 else x, 1) for n in (1, 2, 3, 4))
    g.mark_output(g.add(g.add(g.pow(p1, 4.0), g.mul(g.square(p2), 3.0)), g.mul(g.mul(p1, p3), 8.0)))
    block = BlockGraph(
        (Axis("k", 32, Role.LOOP),), (BlockInput("x", (0,), (None, "k")),),
        (Stage("k", (BlockOp("x2", "mul", ("x", "x"), ("k",)), BlockOp("x4", "mul", ("x2", "x2"), ("k",))),
               (Accumulator("p1", "x", "sum", ()), Accumulator("p2", "x2", "sum", ()), Accumulator("p4", "x4", "sum", ()))),
         Stage(None, (BlockOp("a", "mul", ("p1", "p1"), ()), BlockOp("b", "mul", ("a", "p2"), ()), BlockOp("c", "mul", ("b", 6.0), ()),
                      BlockOp("d", "mul", ("p4", 6.0), ()), BlockOp("o", "add", ("c", "d"), ())))),
        (BlockOutput("o", (None, None), "float16"),))
    assert isinstance(prove(mutants.fuse(g, block)), Refused)
    constant = mi.new_kernel_graph()  # Σ (x + y) = Σ x + 3 y holds for three elements
    x, y = constant.new_input((1, 32)), constant.new_input((1, 1))
    constant.mark_output(constant.reduction(constant.add(x, y), 1))
    for n in (2.0, 3.0, 4.0, 5.0):
        block = BlockGraph(
            (Axis("k", 32, Role.LOOP),), (BlockInput("x", (0,), (None, "k")), BlockInput("y", (1,), (None, None))),
            (Stage("k", (), (Accumulator("s", "x", "sum", ()),)),
             Stage(None, (BlockOp("ny", "mul", ("y", n), ()), BlockOp("o", "add", ("s", "ny"), ())))),
            (BlockOutput("o", (None, None), "float16"),))
        assert isinstance(prove(mutants.fuse(constant, block)), Refused), n


# -- numbers --------------------------------------------------------------------------------------------------------------------

def verdicts(ugraph):
    checks = {}
    return tuple(numeric.judge_on_cpu(ugraph, checks, mma) for mma in (False, True))


def walking(ugraphs_found, stages):
    return [u for u in ugraphs_found if sum(s.loop is not None for s in u.block_ops[0].block.stages) == stages]


def test_a_product_that_overflows_before_the_division_is_refused_and_a_two_pass_form_takes_its_place():
    """x·γ leaves float16 where torch, which divides first, does not: fine in float32, refused for tensor cores."""
    g = programs.rms_norm_linear(mi, rows=16, k=256, n=64)
    accepted = accept(search(g, SEARCH)[0])
    one_pass = next(c for c in accepted.candidates if walking([c.ugraph], 1))
    assert one_pass.allows(False) and not one_pass.allows(True) and "inf or NaN" in one_pass.tensor_cores.reason
    two_pass = [c for c in accepted.candidates if walking([c.ugraph], 2)]
    assert any(c.allows(True) for c in two_pass)
    assert all(c.error_bound < 1e-9 for c in accepted.candidates)


def test_bfloat16_has_the_range():
    g = programs.rms_norm_linear(mi, rows=16, k=256, n=64, dtype=mi.bfloat16)
    assert accept(search(g, SEARCH)[0]).candidates[0].allows(True)


def test_keep_counts_both_ways_to_round():
    g = programs.rms_norm_linear(mi, rows=16, k=256, n=64)
    found = search(g, SEARCH)[0]
    kept = accept(found, keep=1).candidates
    assert any(c.allows(False) for c in kept) and any(c.allows(True) for c in kept) and len(kept) < len(found)


def test_attention_without_its_maximum_is_refused_on_large_scores():
    g = programs.attention(mi, heads=2, q=1, keys=512, d=64)
    found, _ = search(g, SEARCH)
    accepted = accept(found)
    assert found and all(isinstance(prove(f.ugraph), Accepted) for f in found)  # equal as functions
    assert not accepted.candidates and all("inf or NaN" in r.reason and "large" in r.reason for r in accepted.refused)
    assert all(isinstance(v, Accepted) for v in verdicts(ugraphs.attention(heads=2, q=3, keys=64, d=64)))


def one_pass_variance(rows=8, n=256, dtype="float32") -> UGraph:
    """mean(x²) − mean(x)² in one walk, for a program that writes mean((x − mean)²)."""
    g = KernelGraph()
    x = g.new_input((rows, n), dtype, name="x")
    g.mark_output(g.reduction(g.square(g.sub(x, g.reduction(x, 1, "mean"))), 1, "mean"))
    block = BlockGraph(
        (Axis("m", rows, Role.GRID), Axis("k", n, Role.LOOP)), (BlockInput("x", (0,), ("m", "k")),),
        (Stage("k", (BlockOp("x2", "mul", ("x", "x"), ("m", "k")),), (Accumulator("a", "x", "sum", ("m",)), Accumulator("b", "x2", "sum", ("m",)))),
         Stage(None, (BlockOp("ma", "mul", ("a", 1 / n), ("m",)), BlockOp("mb", "mul", ("b", 1 / n), ("m",)),
                      BlockOp("sq", "mul", ("ma", "ma"), ("m",)), BlockOp("o", "sub", ("mb", "sq"), ("m",))))),
        (BlockOutput("o", ("m", None), dtype),))
    return ugraphs.fuse(g, block)


def test_one_pass_variance_is_refused_by_its_numbers(monkeypatch):
    monkeypatch.setattr(numeric, "cases", lambda dtype: (numeric.Case("random"), numeric.Case("mean far above spread", offset=1000.0)))
    u = one_pass_variance()
    inputs = mutants.float64_inputs(u.program)
    assert mutants.distance(u, inputs, mutants.reference(u.program, inputs)) < 1e-9
    scalar, _ = verdicts(u)
    assert isinstance(scalar, Refused) and "mean far above spread" in scalar.reason
    two_pass = search(u.program, SEARCH)[0]
    assert any(isinstance(verdicts(f.ugraph)[0], Accepted) for f in two_pass)


def test_sums_in_the_run_dtype_are_refused():
    """A kernel that rounds its partial results to float16 is worse than stock, and the check says by how much."""
    g = programs.rms_norm_linear(mi, rows=4, k=512, n=32, dtype=mi.bfloat16)
    u = search(g, SEARCH)[0][0].ugraph
    check = numeric.NumericCheck(g)

    class Rounding(numeric.TorchAlgebra):
        def accumulate(self, kind, total, x):
            return super().accumulate(kind, total, x).bfloat16().float()

    def run(algebra, inputs):
        return [y.bfloat16() for y in run_block_graph(u.block_ops[0].block, inputs, algebra, 64)]
    assert isinstance(check.judge(lambda inputs: run(numeric.TorchAlgebra(torch.float32), inputs)), Accepted)
    verdict = check.judge(lambda inputs: run(Rounding(torch.float32), inputs))
    assert isinstance(verdict, Refused) and "eager" in verdict.reason


def test_the_cases_stay_inside_the_dtype():
    g = mi.new_kernel_graph()
    g.matmul(g.new_input((64, 256)), g.new_input((256, 32)))
    for case in numeric.cases(torch.float16):
        x, w = numeric.make_inputs(g, case)
        assert bool(torch.isfinite(x).all() and torch.isfinite(w).all())
        assert case.name != "nearly the largest" or float(x.abs().max()) > 30000
    assert {c.name for c in numeric.cases(torch.bfloat16)} >= {"random", "large", "tiny", "constant rows", "mean far above spread"}


def test_narrowing_keeps_the_program():
    for name, sizes in (("rms_norm_linear", {}), ("gated_mlp", {}), ("lora_paper", {}), ("attention_decode", {})):
        g = programs.PROGRAMS[name][0](mi, **(programs.PROGRAMS[name][1] | sizes))
        u = search(g, SEARCH)[0][0].ugraph
        small = numeric.narrowed(u)
        assert small is not None and isinstance(prove(small), Accepted)
        assert max(math.prod(t.dims) for t in small.program.inputs) < max(math.prod(t.dims) for t in g.inputs)
        assert small.block_ops[0].block.stages == u.block_ops[0].block.stages
    joined = numeric.narrowed(ugraphs.qkv(rows=3, k=32, sizes=(400, 300, 8)))
    assert joined is not None and [t.dims[0] for t in joined.program.inputs[1:]] == [96, 96, 8] and isinstance(prove(joined), Accepted)
    g = mi.new_kernel_graph()
    x = g.new_input((300, 16))
    g.matmul(x, g.permute(x, (1, 0)))
    for f in search(g, SEARCH)[0]:
        small = numeric.narrowed(f.ugraph)
        assert small is None or isinstance(prove(small), Accepted)
