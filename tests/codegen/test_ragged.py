"""Ragged axes: left padding, valid lengths and sliding windows in one attention graph.

Nothing outside the bounds may affect a result.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import cuda
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format, symbolic, text
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.block import BlockGraph, BlockInput
from mirage_hf.graph.bounds import bounds_of
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.execute_block import run_block_graph
from mirage_hf.graph.kernel import CUSTOMIZED, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.engine import search
from mirage_hf.search.search_journal import RankedUGraph
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify import case_inputs, evaluate, numeric, numeric_cases, random_bounds
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import reference_executor, triton_interpreter

SEARCH = SearchOptions(time_limit=20, threads=1)


def attention(heads=3, q=1, keys=24, d=8, bounds=None, dtype="float16") -> KernelGraph:
    g = mi.new_kernel_graph()
    sizes = {"q": (heads, q, d), "k": (heads, keys, d), "v": (heads, keys, d)}
    Q, K, V = (g.new_input(dims, dtype, name=name) for name, dims in sizes.items())
    lo, hi = (g.new_input(bounds or (heads, 1, 1), "int32", name=name) for name in ("lo", "hi"))
    scores = g.mul(g.matmul(Q, g.permute(K, (0, 2, 1))), d**-0.5)
    g.mark_output(g.matmul(g.softmax(scores, lo=lo, hi=hi), V))
    return g


def spelled_out(heads=3, q=1, keys=24, d=8) -> KernelGraph:
    """Build attention whose mask multiplies the values: Σ e^s·within(v), and Σ within(e^s)."""
    g = mi.new_kernel_graph()
    Q, K, V = (
        g.new_input(dims, name=name)
        for name, dims in (("q", (heads, q, d)), ("k", (heads, d, keys)), ("v", (heads, keys, d)))
    )
    lo, hi = (g.new_input((heads, 1, 1), "int32", name=name) for name in ("lo", "hi"))
    e = g.exp(g.matmul(Q, K))
    g.mark_output(
        g.ratio(g.matmul(e, g.within(V, lo, hi, dim=1)), g.reduction(g.within(e, lo, hi), 2))
    )
    return g


def masked_product(m=5, k=24, n=16) -> KernelGraph:
    """Build a product x·w without an exponential, in which each row sums over its own part of k."""
    g = mi.new_kernel_graph()
    x, w = g.new_input((m, k), name="x"), g.new_input((k, n), name="w")
    lo, hi = (g.new_input((m, 1), "int32", name=name) for name in ("lo", "hi"))
    g.mark_output(g.matmul(g.within(x, lo, hi), w))
    return g


PROGRAMS = {
    "decode": attention(),
    "prefill": attention(q=4, bounds=(3, 4, 1)),
    "one length": attention(bounds=(1, 1)),
    "windows of all heads": attention(q=4, bounds=(4, 1)),
    "spelled out": spelled_out(),
    "product": masked_product(),
}


def inputs_of(g: KernelGraph, seed: int = 0, nan: str = "") -> list[torch.Tensor]:
    """Return random inputs and bounds.

    The first row of bounds is partial, the second full, the third empty. With `nan`, the named
    input is NaN at keys that no row sees. Then the second row is empty, and the others are partial.
    """
    drawn = case_inputs.make_inputs(g, numeric_cases.Case("", outside=bool(nan)), seed)
    at = {t.name: n for n, t in enumerate(g.inputs)}
    if nan:
        lo, hi = drawn[at["lo"]], drawn[at["hi"]]
        hi.view(-1)[1:2] = lo.view(-1)[1:2]
        keys = drawn[at[nan]].shape[1]
        for h, x in enumerate(drawn[at[nan]]):
            mine = (t[h] if t.dim() == 3 and t.shape[0] > 1 else t for t in (lo, hi))
            low, high = (t.reshape(-1, 1) for t in mine)
            inside = ((torch.arange(keys) >= low) & (torch.arange(keys) < high)).any(0)
            x[~inside] = math.nan
    return drawn


def found_of(g: KernelGraph) -> list[RankedUGraph]:
    found, report = search(g, SEARCH)
    assert found, report
    return found


def block_of(u: UGraph) -> BlockGraph:
    block = u.block_ops[-1].block
    assert block is not None
    return block


# -- ops ------------------------------------------------------------------------------------------


def test_softmax_within_bounds():
    # torch adds up a row of another length in another order. So only some inputs are equal to
    # the last bit, for example those of this seed.
    x = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(0))
    lo, hi = (
        torch.tensor([2, 0, 5]).int().view(3, 1, 1),
        torch.tensor([7, 9, 5]).int().view(3, 1, 1),
    )
    x[0, :, 7:], x[0, :, 0], x[2] = math.nan, math.inf, math.nan
    g = mi.new_kernel_graph()
    g.mark_output(
        g.softmax(
            g.new_input(x.shape, "float32"),
            -1,
            *(g.new_input((3, 1, 1), "int32") for _ in range(2)),
        )
    )
    (y,) = run_kernel_graph(g, [x, lo, hi])
    assert torch.equal(y[0, :, 2:7], torch.softmax(x[0, :, 2:7], -1))
    assert torch.equal(y[1], torch.softmax(x[1], -1))
    assert not y[2].any() and not y[0, :, :2].any() and not y[0, :, 7:].any()


@pytest.mark.parametrize("dim, bounds", [(0, (1, 4)), (1, (3, 1)), (-1, (1,)), (1, (1, 1))])
def test_within_is_what_a_mask_says(dim, bounds):
    x, n = torch.randn(3, 4), (3, 4)[dim]
    lo, hi = torch.randint(0, n, bounds).int(), torch.randint(0, n + 1, bounds).int()
    g = mi.new_kernel_graph()
    g.mark_output(
        g.within(
            g.new_input(x.shape, "float32"),
            g.new_input(bounds, "int32"),
            g.new_input(bounds, "int32"),
            dim=dim,
        )
    )
    at = torch.arange(n).view((n, 1) if dim == 0 else (n,))
    assert torch.equal(run_kernel_graph(g, [x, lo, hi])[0], x * ((at >= lo) & (at < hi)))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda g, x, lo, hi, f: g.softmax(x, lo=lo), "softmax: a bound lo needs a bound hi"),
        (
            lambda g, x, lo, hi, f: g.within(x, lo, f),
            "within: bound t3 is float32; bounds are int32",
        ),
        (
            lambda g, x, lo, hi, f: g.within(x, lo, hi, dim=0),
            r"must be equal in shape.*size 1 at dim 0",
        ),
        (
            lambda g, x, lo, hi, f: g.softmax(x, dim=3, lo=lo, hi=hi),
            "softmax: dim 3 is out of range",
        ),
    ],
)
def test_wrong_bounds_are_errors(call, message):
    g = mi.new_kernel_graph()
    tensors = (
        g.new_input((3, 4), "float32"),
        g.new_input((3, 1), "int32"),
        g.new_input((3, 1), "int32"),
        g.new_input((3, 1), "float32"),
    )
    with pytest.raises(errors.GraphError, match=message):
        call(g, *tensors)


def test_block_inputs_are_checked():
    with pytest.raises(errors.GraphError, match="two tensors, lo and hi"):
        BlockInput("m", (0,), ("b",), bounds="k")
    u = found_of(attention())[0].ugraph
    op = u.block_ops[0]
    g = KernelGraph()
    wrong = [g.new_input(t.dims, "float32") for t in op.inputs]
    with pytest.raises(errors.DTypeError, match="holds bounds, which are int32"):
        g.customized(wrong, op.block)


# -- search, proof, numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_found_proven_and_right(name):
    g = PROGRAMS[name]
    found = found_of(g)
    for f in found:
        verdict = prove(f.ugraph)
        assert isinstance(verdict, Accepted) and verdict.bound < 1e-9, verdict
        kernels = f.ugraph.kernels
        assert str(text.parse_graph(str(kernels))) == str(kernels)
        assert (
            json_format.graph_from_dict(json.loads(json.dumps(json_format.graph_to_dict(kernels))))
            == kernels
        )
        for seed in range(2):
            inputs = inputs_of(g, seed)
            wide = [x.double() if x.is_floating_point() else x for x in inputs]
            (want,) = run_kernel_graph(g, wide, torch.float64)
            for got in (
                run_kernel_graph(kernels, wide, torch.float64)[0],
                reference_executor.run(kernels, wide)[0],
                reference_executor.run(g, wide)[0],
            ):
                assert float((got - want).abs().max()) < 1e-9
            (op,) = f.ugraph.block_ops if f.ugraph.num_kernels == 1 else (None,)
            if op is not None:
                operands = [
                    wide[g_inputs] for g_inputs in (kernels.inputs.index(t) for t in op.inputs)
                ]
                (got,) = run_block_graph(op.block, operands, TorchAlgebra(torch.float64), 3)
                assert float((got - want).abs().max()) < 1e-9
    one = next(f for f in found if f.ugraph.num_kernels == 1)
    assert any(i.bounds for i in block_of(one.ugraph).inputs)


def test_flash_attention_keeps_its_products():
    """The mask applies to the exponential, so its product with v stays a contraction.

    The maximum is over the keys within bounds.
    """
    found = found_of(attention(heads=8, q=64, keys=512, d=64))
    flash = next(
        f.ugraph
        for f in found
        if f.ugraph.num_kernels == 1
        and sum(s.loop is not None for s in block_of(f.ugraph).stages) == 1
        and any(a.shift for s in block_of(f.ugraph).stages for a in s.accumulators)
    )
    block = block_of(flash)
    mask = next(i.name for i in block.inputs if i.bounds)
    selects = [op for op in block.ops() if op.fn == "select"]
    assert (
        len(block.contractions) == 2
        and len(selects) == 2
        and all(op.args[0] == mask for op in selects)
    )
    assert any(op.fn == "ratio" for op in block.ops()) and not any(
        op.fn == "div" for op in block.ops()
    )


def test_split_keys_and_a_combining_kernel():
    g = attention(heads=2, keys=4096, d=16)
    split = next(
        f.ugraph
        for f in found_of(g)
        if f.ugraph.num_kernels == 2 and any(a.split_axis for a in f.ugraph.block_ops[0].block.axes)
    )
    assert isinstance(prove(split), Accepted)
    inputs = inputs_of(g, nan="k")
    (
        inputs[3].zero_(),
        inputs[4].copy_(torch.tensor([70, 0]).view(2, 1, 1)),
    )  # whole splits without a key, and a row without any key
    inputs[1].nan_to_num_(0.0)
    inputs[1][0, 70:], inputs[1][1] = math.nan, math.nan
    (want,) = run_kernel_graph(g, inputs, torch.float64)
    (got,) = run_kernel_graph(split.kernels, inputs)
    assert got.isfinite().all() and not got[1].any() and float((got - want).abs().max()) < 2e-3


@pytest.mark.parametrize("name", ["decode", "prefill", "one length"])
def test_nan_scores_out_of_bounds_leave_no_trace(name):
    g = PROGRAMS[name]
    searched = search_and_verify(g, SEARCH)
    assert searched.candidates and isinstance(searched.candidates[0].scalar, Accepted)
    inputs = inputs_of(g, nan="k")
    assert inputs[1].isnan().any()
    (want,) = run_kernel_graph(g, inputs, torch.float64)
    assert want.isfinite().all()
    for c in searched.candidates:
        (got,) = run_kernel_graph(c.ugraph.kernels, inputs)
        assert got.isfinite().all() and float((got - want).abs().max()) < 2e-3
    case = next(c for c, _ in numeric.NumericCheck(g).each() if c.outside)
    assert case.garbage == (1,)  # only in k, because NaN in v is in eager's result too


# -- mutants --------------------------------------------------------------------------------------


def with_block(u: UGraph, block: BlockGraph) -> UGraph:
    kernels = KernelGraph()
    new = {t.index: kernels.new_input(t.dims, t.dtype, t.strides, t.name) for t in u.kernels.inputs}
    for op in u.kernels.ops:
        assert op.name == CUSTOMIZED
        made = kernels.customized([new[t.index] for t in op.inputs], block)
        new |= {t.index: x for t, x in zip(op.outputs, made, strict=True)}
    kernels.mark_output(*(new[t.index] for t in u.kernels.outputs))
    return UGraph(u.program, kernels)


def one_kernel(name: str) -> UGraph:
    return next(f.ugraph for f in found_of(PROGRAMS[name]) if f.ugraph.num_kernels == 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_swapped_bounds_are_refused(name):
    u = one_kernel(name)
    block = block_of(u)
    inputs = tuple(replace(i, sources=i.sources[::-1]) if i.bounds else i for i in block.inputs)
    assert isinstance(prove(u), Accepted) and isinstance(
        prove(with_block(u, replace(block, inputs=inputs))), Rejected
    )


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("end, by", [(0, 1), (0, -1), (1, 1), (1, -1)])
def test_bounds_off_by_one_are_refused(monkeypatch, name, end, by):
    """The kernel reads lo or hi, which is one too large or too small."""
    u = one_kernel(name)

    def wrong(block, operands, *rest):
        at = next(i.sources[end] for i in block.inputs if i.bounds)
        return run_block_graph(
            block, [x + by if n == at else x for n, x in enumerate(operands)], *rest
        )

    monkeypatch.setattr(evaluate, "run_block_graph", wrong)
    assert isinstance(prove(u), Rejected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mask_that_is_dropped_is_refused(name):
    """The proof notices masks that take elements out of a sum.

    The numeric check notices masks that only take elements out of a maximum.
    """
    u = one_kernel(name)
    block = block_of(u)
    dropped = 0
    for s, stage in enumerate(block.stages):
        for n, op in enumerate(stage.body):
            if op.fn != "select":
                continue
            x = op.args[1]
            if not isinstance(x, str) or block.carried[x] != op.axes:
                continue
            body = (*stage.body[:n], replace(op, fn="mul", args=(x, 1.0)), *stage.body[n + 1 :])
            mutant = with_block(
                u,
                replace(
                    block,
                    stages=(*block.stages[:s], replace(stage, body=body), *block.stages[s + 1 :]),
                ),
            )
            if op.args[2] == 0.0:
                assert isinstance(prove(mutant), Rejected)
            else:
                assert isinstance(
                    numeric.judge_by_torch(mutant, numeric.NumericChecks(), False), Rejected
                )
            dropped += 1
    assert dropped or name == "product"


def test_a_ratio_is_needed_for_empty_rows():
    """Otherwise the sum of no weights is a divisor.

    The proof says that it divides by zero, or that rows differ.
    """
    u = one_kernel("decode")
    block = block_of(u)
    stages = tuple(
        replace(s, body=tuple(replace(op, fn="div") if op.fn == "ratio" else op for op in s.body))
        for s in block.stages
    )
    assert isinstance(prove(with_block(u, replace(block, stages=stages))), Rejected)


# -- draws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 40])
def test_draws_have_every_kind_of_row(size):
    lo, hi = random_bounds.draw(np.random.default_rng(0), size, 200, 0)
    assert (
        (lo >= 0).all()
        and (hi <= size).all()
        and (lo >= hi).any()
        and ((lo == 0) & (hi == size)).any()
    )
    if size > 2:
        assert (
            ((lo > 0) & (hi > lo)).any()
            and ((hi < size) & (hi > lo)).any()
            and ((lo > 0) & (hi > lo) & (hi < size)).any()
        )
        lo, hi = random_bounds.draw(np.random.default_rng(0), size, 50, 0, partial=True)
        assert (lo > 0).all() and (hi < size).all() and (hi > lo).all()
    assert [(b.lo, b.hi) for b in bounds_of(attention())] == [(3, 4)]


# -- symbolic dims, other stages ------------------------------------------------------------------


def test_bounds_of_a_symbolic_dim():
    g = attention(keys=mi.Dim("keys", max=24))
    searched = search_and_verify(g, SEARCH)
    for size in (1, 7, 24):
        small = symbolic.ugraph_at(searched.candidates[0].ugraph, {"keys": size})
        inputs = inputs_of(small.program)
        (want,) = run_kernel_graph(small.program, inputs, torch.float64)
        assert float((run_kernel_graph(small.kernels, inputs)[0] - want).abs().max()) < 2e-3


def test_superoptimize_on_the_cpu():
    g = attention()
    best = mi.superoptimize(g, backend="cpu")[0]
    inputs = inputs_of(g)
    assert (
        float((best(inputs=inputs)[0] - run_kernel_graph(g, inputs, torch.float64)[0]).abs().max())
        < 2e-3
    )


def test_cuda_says_that_it_has_no_bounds():
    u = one_kernel("decode")
    with pytest.raises(errors.CodegenError, match="holds bounds of axis"):
        cuda.program_source(u)


INTERPRETED = """
import json, sys
import torch
from tests.codegen.test_ragged import PROGRAMS, attention, found_of, inputs_of
from mirage_hf.codegen import compile as compiler, triton
from mirage_hf.graph.execute import run_kernel_graph

programs = PROGRAMS | {
    "split": attention(heads=2, keys=700, d=16),
    "tensor cores": attention(q=16, keys=70, d=16, bounds=(3, 16, 1)),
}
found = {}
for name, g in programs.items():
    worst, nans = 0.0, False
    inputs = inputs_of(
        g, nan="k" if "k" in [t.name for t in g.inputs] and name != "spelled out" else ""
    )
    (want,) = run_kernel_graph(g, inputs, torch.float64)
    for f in found_of(g)[:4]:
        program = triton.generate(f.ugraph)
        module = compiler.load(program.source, program.digest)
        (got,) = module.run(inputs)
        module.check("cpu")
        worst = max(worst, float((got - want).abs().max()))
        nans = nans or not bool(got.isfinite().all())
    found[name] = [worst, nans, float(want.abs().max())]
print(json.dumps(found))
"""


def test_triton_text_equals_torch():
    for name, (worst, nans, size) in triton_interpreter.run(INTERPRETED).items():
        assert not nans and worst < 2e-3 * max(size, 1.0), name
