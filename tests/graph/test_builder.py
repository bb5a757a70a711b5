"""Block graphs written by hand.

The tests cover the tiles, results that do not depend on how the work is cut, and errors.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph.block import BlockGraph, Role
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.text import parse_graph
from mirage_hf.ops import table
from mirage_hf.search.engine import search
from mirage_hf.search.lowering import lower
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.field_proof import prove
from tests.helpers import ugraphs


def linear(rows=16, k=256, n=64, grid=(8,), trips=4, eps=1e-6, dtype=mi.float16):
    """Return RMSNorm + Linear as a program, and as a kernel that divides after the product."""
    g = mi.new_kernel_graph()
    X, W = g.new_input((rows, k), dtype, name="X"), g.new_input((k, n), dtype, name="W")
    g.matmul(g.rms_norm(X), W)
    kernels = mi.new_kernel_graph()
    X, W = kernels.new_input((rows, k), dtype, name="X"), kernels.new_input((k, n), dtype, name="W")
    bg = mi.new_block_graph(grid_dim=grid, forloop_range=trips)
    x, w = bg.new_input(X, imap={"x": None}, fmap=1), bg.new_input(W, imap={"x": 1}, fmap=0)
    assert x.dims == (rows, k // trips) and w.dims == (k // trips, n // grid[0])
    y, s = bg.accum(bg.matmul(x, w)), bg.accum(bg.reduction(bg.square(x), 1))
    bg.new_output(bg.mul(y, bg.rsqrt(bg.add(bg.mul(s, 1 / k), eps))), omap={"x": 1})
    kernels.customized([X, W], bg)
    return g, kernels, bg


def attention(heads=2, rows=16, keys=64, d=32, trips=8, dtype=mi.float32):
    """Return online softmax, whose sums are relative to a running maximum."""
    g, kernels = mi.new_kernel_graph(), mi.new_kernel_graph()
    shapes = {"Q": (heads, rows, d), "K": (heads, keys, d), "V": (heads, keys, d)}
    q, k, v = (g.new_input(dims, dtype, name=name) for name, dims in shapes.items())
    g.mark_output(g.matmul(g.softmax(g.matmul(q, g.permute(k, (0, 2, 1)))), v))
    q, k, v = (kernels.new_input(dims, dtype, name=name) for name, dims in shapes.items())
    bg = mi.new_block_graph((heads, rows // 8), trips)
    qt, kt, vt = (
        bg.new_input(q, {"x": 0, "y": 1}),
        bg.new_input(k, (0, -1, -1), 1),
        bg.new_input(v, (0, None), 1),
    )
    s = bg.matmul(qt, bg.permute(kt, (0, 2, 1)))
    m = bg.accum_max(bg.reduction(s, 2, "max"))
    e = bg.exp(bg.sub(s, m))
    total, out = bg.accum(bg.reduction(e, 2), shift=m), bg.accum(bg.matmul(e, vt), shift=m)
    bg.new_output(bg.div(out, total), {"x": 0, "y": 1})
    kernels.customized([q, k, v], bg)
    return g, kernels


def split_k(rows=16, k=512, n=64, parts=4, trips=8):
    """Return a kernel with a partial sum for each part of k, and a kernel that adds these."""
    g, kernels = mi.new_kernel_graph(), mi.new_kernel_graph()
    g.matmul(g.new_input((rows, k), name="X"), g.new_input((k, n), name="W"))
    X, W = kernels.new_input((rows, k), name="X"), kernels.new_input((k, n), name="W")
    bg = mi.new_block_graph((parts, 8), trips)
    x, w = bg.new_input(X, {"x": 1}, 1), bg.new_input(W, {"x": 0, "y": 1}, 0)
    bg.new_output(bg.accum(bg.matmul(x, w)), {"y": 1}, dtype="float32")
    (partial,) = kernels.customized([X, W], bg)
    assert partial.dims == (parts, rows, n) and partial.dtype == mi.float32
    add = mi.new_block_graph((8,))
    p = add.new_input(partial, {"x": 2})
    summed = add.reduction(p, 0)
    add.new_output(summed, {"x": 2}, "float16")
    kernels.reshape(kernels.customized([partial], add)[0], (rows, n))
    return g, kernels


def distance(program, kernels, seed=0):
    inputs = ugraphs.random_inputs(program, seed)
    want, got = (run_kernel_graph(graph, inputs, torch.float64) for graph in (program, kernels))
    assert [y.shape for y in want] == [y.shape for y in got]
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1))
        for a, b in zip(got, want, strict=True)
    )


def only_block(graph) -> BlockGraph:
    (block,) = (op.block for op in graph.ops)
    return block


# -- what tiles become ----------------------------------------------------------------------------


def test_tiles_become_axes_with_roles():
    _, kernels, _ = linear()
    block = only_block(kernels)
    assert {a.name: (a.size, a.role) for a in block.axes} == {
        "n": (64, Role.GRID),
        "m": (16, Role.TILE),
        "k": (256, Role.LOOP),
    }
    assert "%W = load 1 [k, n]  # imap {n→1}, fmap {k→0}" in str(
        kernels
    ) and "store %v6 [m, n] float16  # omap {n→1}" in str(kernels)
    assert len(block.contractions) == 1 and parse_graph(str(kernels)) == kernels


def test_a_hand_written_kernel_is_proven_runs_and_compiles(tmp_path):
    g, kernels, _ = linear()
    verdict = mi.verify(g, kernels)
    assert (
        isinstance(verdict, mi.Accepted)
        and 0 < verdict.bound < 1e-9
        and "tensor cores" in verdict.detail
    )
    u = mi.ugraph(g, kernels)
    inputs = ugraphs.random_inputs(g)
    want, got = run_kernel_graph(g, inputs, torch.float64)[0], u(inputs)[0]
    assert got.dtype == torch.float16 and (got - want).abs().max() < 2e-2 * want.abs().max()
    source = u.generate_triton_program(tmp_path / "k.py").read_text()
    assert (
        compile(source, "k.py", "exec")
        and "__global__" in u.generate_cuda_program(tmp_path / "k.cu").read_text()
    )
    assert "<svg" in u.visualize(tmp_path / "k.svg").read_text()
    u.to_json(tmp_path / "u.json")
    assert mi.load_ugraph(tmp_path / "u.json") == u


def test_the_counts_become_tiles_where_asked(tmp_path):
    g, kernels, bg = linear(grid=(4,), trips=8)
    assert bg.schedule() == {"n": 16, "m": 16, "k": 32}
    u = mi.ugraph(g, kernels, [bg.schedule()])
    assert dict(u.schedules[0].tiles) == bg.schedule()
    assert "launch(mirage_0, 4, " in u.generate_triton_program(tmp_path / "k.py").read_text()
    odd = linear(n=48, grid=(4,))[2]
    with pytest.raises(
        errors.GraphError, match="12 elements of axis n in a block are not a power of two"
    ):
        odd.schedule()
    with pytest.raises(errors.CodegenError, match="2 tiles for 1 customized"):
        mi.ugraph(g, kernels, [bg.schedule()] * 2)
    with pytest.raises(
        errors.CodegenError, match=r"no kernel has the tiles .*leave tiles to the cost model"
    ):
        mi.ugraph(g, kernels, [{"n": 16, "m": 2, "k": 32}])
    for wrong in ([3], [{"n": "a"}], [{"n": 16.0}], 3):
        with pytest.raises(errors.CodegenError, match=r"tiles is .*; give a list of one mapping"):
            mi.ugraph(g, kernels, wrong)


def test_tiles_are_shown_in_a_line():
    bg = mi.new_block_graph(grid_dim=(2,), forloop_range=4)
    x = bg.new_input(mi.new_kernel_graph().new_input((8, 16), name="x"), imap={"x": 0}, fmap=1)
    assert repr(x) == "<STensor: %x (4, 4)>" and repr(bg.accum(bg.exp(x))).endswith(" (4, 4)>")
    assert repr(bg) == "<BlockGraphBuilder: grid_dim (2,), forloop_range 4, 1 inputs, 0 outputs>"
    with pytest.raises(
        errors.GraphError, match=r"softmax: dim <STensor: %x \(4, 4\)> is out of range"
    ):
        bg.softmax(x, x)


def test_a_kernel_that_differs_is_refused_with_the_reason():
    g, kernels, _ = linear(eps=1e-5)
    assert isinstance(mi.verify(g, kernels), mi.Rejected)
    with pytest.raises(
        errors.VerificationError, match="not accepted for the program: output 0 differs"
    ):
        mi.ugraph(g, kernels)
    other = linear(rows=8)[1]
    assert (
        "input 0 of the kernels is float16 (16, 256)"
        in mi.verify(linear(rows=8)[0], kernels).reason
    )
    assert "(8, 256) with strides" in mi.verify(g, other).reason
    g.mark_output(g.exp(g.outputs[0]))
    g.mark_output(g.inputs[0])
    assert "the kernels have 1 outputs" in mi.verify(g, kernels).reason
    with pytest.raises(
        errors.GraphError,
        match=r"program must be a graph made by mi.new_kernel_graph\(\), it is int",
    ):
        mi.verify(3, kernels)
    with pytest.raises(errors.GraphError, match="kernels must be a graph"):
        mi.ugraph(g, only_block(kernels))
    assert isinstance(mi.verify(g, g), mi.Accepted)


def test_online_softmax():
    g, kernels = attention()
    block = only_block(kernels)
    assert [(a.kind, a.shift is not None) for a in block.stages[0].accumulators] == [
        ("max", False),
        ("sum", True),
        ("sum", True),
    ]
    assert distance(g, kernels) < 1e-12
    large = [x * 40 for x in ugraphs.random_inputs(g)]
    assert torch.isfinite(run_kernel_graph(kernels, large)[0]).all()


def test_online_softmax_is_accepted():
    assert isinstance(mi.verify(*attention()), mi.Accepted)


def test_a_grid_dim_that_no_output_names_is_a_split():
    g, kernels = split_k()
    first, second = (op.block for op in kernels.ops if op.block)
    k = next(a for a in first.axes if a.split_axis)
    assert (k.size, k.role, first.axis(k.split_axis).size) == (512, Role.LOOP, 4) and not any(
        a.split_axis for a in second.axes
    )
    assert "imap {k_split→1, n→φ}, fmap {k→1}" in str(kernels) and "omap {k_split→0, n→2}" in str(
        kernels
    )
    assert distance(g, kernels) < 1e-12


def test_split_k_is_accepted_and_compiles(tmp_path):
    g, kernels = split_k()
    assert isinstance(mi.verify(g, kernels), mi.Accepted)
    u = mi.ugraph(g, kernels)
    assert u.num_kernels == 2 and len(u.schedules) == 2
    source = u.generate_triton_program(tmp_path / "k.py").read_text()
    assert source.count("@triton.jit") == 2 and compile(source, "k.py", "exec")
    inputs = ugraphs.random_inputs(g)
    assert torch.allclose(
        u(inputs)[0].double(), run_kernel_graph(g, inputs, torch.float64)[0], atol=0.1
    )


def test_partial_results_may_fill_a_dim_of_size_1():
    g = mi.new_kernel_graph()
    X = g.new_input((8, 64))
    bg = mi.new_block_graph(4)
    bg.new_output(bg.reduction(bg.new_input(X, {"x": 1}), 1), {"x": 1}, "float32")
    (y,) = g.customized([X], bg)
    x = ugraphs.random_inputs(g)
    assert y.dims == (8, 4) and torch.allclose(
        run_kernel_graph(g, x)[0], x[0].float().view(8, 4, 16).sum(2), atol=1e-4
    )


@pytest.mark.parametrize(
    "grid, trips",
    [((1,), 1), ((2,), 1), ((1,), 4), ((64,), 64), ((8, 1, 1), 32), ([16], 2)],
    ids=str,
)
def test_numbers_do_not_depend_on_the_counts(grid, trips):
    g, kernels, _ = linear(grid=tuple(grid), trips=trips)
    assert distance(g, kernels) < 1e-12 and isinstance(prove(mi.UGraph(g, kernels)), mi.Accepted)


def test_three_grid_dims_and_composites_in_a_block():
    g, kernels = mi.new_kernel_graph(), mi.new_kernel_graph()
    for graph in (g, kernels):
        graph.new_input((2, 4, 8, 16), "float32", name="x")
        graph.new_input((1, 16), "float32", name="w")
    x, w = g.inputs
    g.mark_output(
        g.softmax(x),
        g.rms_norm(x, w),
        g.layer_norm(x, w, w),
        g.reduction(x, 3, "mean"),
        g.softmax(x, 2),
    )
    bg = mi.new_block_graph((2, 4, 8))
    cut, weight = {"x": 0, "y": 1, "z": 2}, bg.new_input(kernels.inputs[1])
    x = bg.new_input(kernels.inputs[0], cut)
    assert x.dims == (1, 1, 1, 16)
    for y in (
        bg.softmax(x),
        bg.rms_norm(x, weight),
        bg.layer_norm(x, weight, weight),
        bg.reduction(x, 3, "mean"),
    ):
        bg.new_output(y, cut)
    rows = mi.new_block_graph((2, 4, 4))
    rows.new_output(
        rows.softmax(rows.new_input(kernels.inputs[0], {"x": 0, "y": 1, "z": 3}), 2),
        {"x": 0, "y": 1, "z": 3},
    )
    kernels.mark_output(
        *kernels.customized(kernels.inputs, bg), *kernels.customized([kernels.inputs[0]], rows)
    )
    assert distance(g, kernels) < 1e-12


@pytest.mark.parametrize("name", [n for n, row in table.OPS.items() if row.kind == "elementwise"])
def test_every_elementwise_op(name):
    attrs = {
        "cast": {"dtype": "float32"},
        "clamp": {"min": -0.25, "max": 0.5},
        "lookup": {"values": (0.5, -1.5, 2.0)},
        "bits": {"count": 2},
    }.get(name, {})
    g = mi.new_kernel_graph()
    X, Y = g.new_input((4, 8), "float32"), g.new_input((1, 8), "float32")
    bg = mi.new_block_graph((2, 2))
    x, y = bg.new_input(X, {"x": 0, "y": 1}), bg.new_input(Y, {"y": 1})
    positive = bg.add(bg.square(x), 0.5)
    out = getattr(bg, name)(positive, *[y] * (table.OPS[name].arity[0] - 1), **attrs)
    bg.new_output(out, {"x": 0, "y": 1})
    (z,) = g.customized([X, Y], bg)
    p = g.add(g.square(X), 0.5)
    g.mark_output(z, g.apply(name, [p, *[Y] * (table.OPS[name].arity[0] - 1)], attrs))
    ours, theirs = run_kernel_graph(g, ugraphs.random_inputs(g), torch.float64)
    assert torch.allclose(ours, theirs, equal_nan=True) and name in dir(bg)


def test_numbers_take_either_side():
    g = mi.new_kernel_graph()
    X = g.new_input((4, 8), "float32")
    bg = mi.new_block_graph()
    bg.new_output(bg.sub(1.0, bg.div(2, bg.new_input(X))))
    g.mark_output(*g.customized([X], bg), g.sub(1.0, g.div(2, X)))
    a, b = run_kernel_graph(g, ugraphs.random_inputs(g), torch.float64)
    assert torch.equal(a, b)


def test_linear_ops_may_follow_the_product_of_a_trip():
    """In the paper, accumulation comes last.

    Sums of one trip may be scaled and added first, and tiles may be accumulated before they are
    summed.
    """
    g, kernels = mi.new_kernel_graph(), mi.new_kernel_graph()
    for graph in (g, kernels):
        graph.new_input((16, 64), "float32", name="x")
        graph.new_input((64, 32), "float32", name="w")
        graph.new_input((16, 1), "float32", name="s")
    x, w, s = g.inputs
    g.mark_output(
        g.neg(g.add(g.mul(g.matmul(x, w), s), g.div(g.matmul(g.exp(x), w), 3.0))),
        g.reduction(x, 1),
        g.reduction(x, 1, "max"),
    )
    bg = mi.new_block_graph((4,), 8)
    x, w, s = (
        bg.new_input(kernels.inputs[0], fmap=1),
        bg.new_input(kernels.inputs[1], {"x": 1}, 0),
        bg.new_input(kernels.inputs[2]),
    )
    both = bg.neg(bg.add(bg.mul(bg.matmul(x, w), s), bg.div(bg.matmul(bg.exp(x), w), 3.0)))
    bg.new_output(bg.accum(both), {"x": 1})
    sums = mi.new_block_graph((16,), 8)
    xs = sums.new_input(kernels.inputs[0], {"x": 0}, 1)
    sums.new_output(sums.reduction(sums.accum(xs), 1), {"x": 0})
    sums.new_output(sums.reduction(sums.permute(sums.accum_max(xs), (0, 1)), 1, "max"), {"x": 0})
    kernels.mark_output(
        *kernels.customized(kernels.inputs, bg), *kernels.customized([kernels.inputs[0]], sums)
    )
    assert distance(g, kernels) < 1e-12


def test_a_running_maximum_is_read_in_the_loop_and_after_it():
    g = mi.new_kernel_graph()
    X = g.new_input((4, 64), "float32")
    bg = mi.new_block_graph((4,), 8)
    x = bg.new_input(X, {"x": 0}, 1)
    m = bg.reduction(bg.accum_max(x), 1, "max")
    total = bg.accum(bg.reduction(bg.exp(bg.add(x, bg.neg(m))), 1), shift=m)
    bg.new_output(bg.sub(0.0, bg.neg(m)), {"x": 0})
    bg.new_output(total, {"x": 0})
    top, summed = g.customized([X], bg)
    g.mark_output(
        top,
        summed,
        g.reduction(X, 1, "max"),
        g.reduction(g.exp(g.sub(X, g.reduction(X, 1, "max"))), 1),
    )
    a, b, want_a, want_b = run_kernel_graph(g, ugraphs.random_inputs(g), torch.float64)
    assert torch.equal(a, want_a) and torch.allclose(b, want_b)


def test_operands_are_found_by_tensor_or_by_place():
    bg = linear()[2]
    kernels = mi.new_kernel_graph()
    W, X = kernels.new_input((256, 64)), kernels.new_input((16, 256))
    assert only_block_of(kernels.customized([X, W], bg), kernels).inputs[0].sources == (
        0,
    )  # other inputs, in the order of their new_input
    mine = mi.new_block_graph((8,))
    w, x = mine.new_input(W, {"x": 1}), mine.new_input(X)
    mine.new_output(mine.matmul(x, w), {"x": 1})
    block = only_block_of(kernels.customized([X, W], mine), kernels)
    assert {i.name: i.sources for i in block.inputs} == {x.name: (0,), w.name: (1,)}
    assert mine.build() == mine.build([W, X]) != block
    with pytest.raises(
        errors.GraphError, match="reads t0, t1; 1 operands are given that are not those"
    ):
        kernels.customized([X], mine)
    with pytest.raises(
        errors.GraphError,
        match=r"customized: expected a block graph, got int; make one with mi.new_block_graph",
    ):
        kernels.customized([X], 3)


def only_block_of(made, graph) -> BlockGraph:
    return next(op.block for op in graph.ops if made[0] in op.outputs)


def test_a_tensor_may_be_loaded_twice():
    g, kernels = mi.new_kernel_graph(), mi.new_kernel_graph()
    X = g.new_input((16, 32), "float32")
    g.matmul(X, g.permute(X, (1, 0)))
    X = kernels.new_input((16, 32), "float32")
    bg = mi.new_block_graph((4, 2), 4)
    a, b = bg.new_input(X, {"x": 0}, 1), bg.new_input(X, {"y": 0}, 1)
    bg.new_output(bg.accum(bg.matmul(a, bg.permute(b, (1, 0)))), {"x": 0, "y": 1})
    kernels.customized([X], bg)
    assert isinstance(prove(mi.UGraph(g, kernels)), mi.Accepted)


# -- what is refused ------------------------------------------------------------------------------


def X16(graph=None):
    return (graph or mi.new_kernel_graph()).new_input((16, 64), name="X")


def W64():
    return mi.new_kernel_graph().new_input((64, 32), name="W")


def block(grid=(2,), trips=4):
    return mi.new_block_graph(grid, trips)


def walked(bg):
    return bg.new_input(X16(), None, 1)


def late(bg):
    x = walked(bg)
    return bg.div(x, bg.accum(bg.reduction(x, 1)))


def store(bg, t, omap=None):
    bg.new_output(t, omap)
    return bg.build()


REFUSED = {
    r"grid_dim \(0,\) is not one to three positive": lambda: mi.new_block_graph((0,)),
    r"grid_dim \(1, 2, 3, 4\)": lambda: mi.new_block_graph((1, 2, 3, 4)),
    r"grid_dim 'ab'": lambda: mi.new_block_graph("ab"),
    r"forloop_range 0 is not a positive": lambda: mi.new_block_graph((2,), 0),
    r"forloop_range True": lambda: mi.new_block_graph((2,), True),
    r"expected a tensor of a kernel graph, got int": lambda: block().new_input(3),
    r"dim 0 of size 16 is not divisible by grid dim x of 3; choose": lambda: block((3,)).new_input(
        X16(), {"x": 0}
    ),
    r"dim 1 of size 64 is not divisible by 3 trips": lambda: block((2,), 3).new_input(
        X16(), {"x": 0}, 1
    ),
    r"dim 1 of size 64 is not divisible by grid dim x of 16 × 8 trips": lambda: block(
        (16,), 8
    ).new_input(X16(), {"x": 1}, 1),
    r"imap \{'y': 0\} names a grid dim that is not there; grid_dim \(2\) has x": lambda: (
        block().new_input(X16(), {"y": 0})
    ),
    r"imap \(0, 1\) names a grid dim": lambda: block().new_input(X16(), (0, 1)),
    r"imap 'x' is neither a dict": lambda: block().new_input(X16(), "x"),
    r"grid dims x and y both cut dim 0": lambda: block((2, 2)).new_input(X16(), {"x": 0, "y": 0}),
    r"imap names dim 2; use 0 to 1": lambda: block().new_input(X16(), {"x": 2}),
    r"imap names dim -2": lambda: block().new_input(X16(), {"x": -2}),
    r"imap names dim True": lambda: block().new_input(X16(), {"x": True}),
    r"fmap: dim 2 is out of range": lambda: block().new_input(X16(), None, 2),
    r"changes from trip to trip; store what is accumulated": lambda: store(
        bg := block(), bg.exp(bg.new_input(X16(), {"x": 0}, 1)), {"x": 0}
    ),
    r"div: reads %X \(16, 16\) after its loop, together with the accumulated %acc": lambda: late(
        block()
    ),
    r"the loop walks dim 1 of X \(size 64.*and dim 1 of W \(size 32": lambda: (
        walked(bg := block()),
        bg.new_input(W64(), None, 1),
    ),
    r"grid dim x cuts dim 0 of X \(size 16.*and dim 0 of W \(size "
    r"64.*have a grid dim each": lambda: (
        (bg := block()).new_input(X16(), {"x": 0}) and bg.new_input(W64(), {"x": 0})
    ),
    r"exp: %v\d \(16, 16\) is the sum over one trip of the loop "
    r"only; accumulate it first \(accum\)": lambda: (bg := block()).exp(
        bg.matmul(walked(bg), bg.new_input(W64(), {"x": 1}, 0))
    ),
    r"matmul: %X \(16, 1\) is the max over one trip.*accum_max": lambda: (bg := block((1,))).matmul(
        bg.reduction(walked(bg), 1, "max"), bg.new_input(mi.new_kernel_graph().new_input((1, 8)))
    ),
    r"omap must say so \('x': 1\)": lambda: store(
        bg := block(), bg.accum(bg.matmul(walked(bg), bg.new_input(W64(), {"x": 1}, 0))), {"x": 0}
    ),
    r"cuts nothing that it is made of": lambda: store(
        bg := block((2,), 1), bg.new_input(X16()), {"x": 0}
    ),
    r"one result per block of grid dim x has no room in dim 0 of size 16": lambda: store(
        bg := block((2,), 1), bg.reduction(bg.new_input(X16(), {"x": 1}), 1), {"x": 0}
    ),
    r"grid dim x of 2 cuts no input": lambda: store(
        bg := block(), bg.accum(bg.reduction(walked(bg), 1))
    ),
    r"the loop of 4 trips walks no input": lambda: store(bg := block((1,)), bg.new_input(X16())),
    r"there is no output; name one with new_output": lambda: block((1,), 1).build(),
    r"still has the walked dim 1; first reduce it: reduction\(x, 1, 'sum'\)": lambda: store(
        bg := block((1,)), bg.accum(walked(bg))
    ),
    r"exp: %acc\d \(16, 16\) was accumulated tile by tile": lambda: (bg := block((1,))).exp(
        bg.accum(walked(bg))
    ),
    r"shift %X \(16, 16\) is not a running maximum": lambda: (bg := block((1,))).accum(
        x := walked(bg), shift=x
    ),
    r"depends on the running maximum %acc\d, its shift must be that one": lambda: (
        bg := block((1,))
    ).accum(bg.exp(bg.sub(x := walked(bg), bg.accum_max(bg.reduction(x, 1, "max"))))),
    r"depends on the running maximum none": lambda: (bg := block((1,))).accum(
        x := walked(bg), shift=bg.accum_max(bg.reduction(x, 1, "max"))
    ),
    r"depends on two running maxima": lambda: (bg := block((1,))).sub(
        bg.sub(x := walked(bg), bg.accum_max(bg.reduction(x, 1, "max"))),
        bg.accum_max(bg.reduction(bg.neg(x), 1, "max")),
    ),
    r"is the same in every trip of the loop": lambda: (bg := block((1,))).accum(
        bg.new_input(W64())
    ),
    r"softmax: dim 1 of X is whole in every block and walked by "
    r"the loop; spell it out with accum_max": lambda: (bg := block((1,))).softmax(walked(bg)),
    r"a mean over dim 1 of X, which is whole in every block and "
    r"walked by the loop, would depend": lambda: (bg := block((1,))).rms_norm(walked(bg)),
    r"a mean over dim 1 of X, which is cut by grid dim x": lambda: (bg := block()).reduction(
        bg.new_input(X16(), {"x": 1}), 1, "mean"
    ),
    r"unknown kind 'min'": lambda: (bg := block()).reduction(walked(bg), 1, "min"),
    r"a block graph has no reshape; apply it in the kernel graph": lambda: block().reshape,
    r"unknown op 'relux' \(did you mean relu": lambda: block().relux,
    r"matmul: grid dim x cuts two dims of the result .*diagonal": lambda: (
        bg := block((4,), 1)
    ).matmul(
        bg.new_input(X16(g := mi.new_kernel_graph()), {"x": 0}),
        bg.permute(bg.new_input(g.inputs[0], {"x": 0}), (1, 0)),
    ),
    r"matmul: the same input has two dims of the result .*load the tensor a second time": lambda: (
        bg := block((1,), 1)
    ).matmul(x := bg.new_input(X16()), bg.permute(x, (1, 0))),
    r"matmul: inner sizes differ": lambda: (bg := block((1,), 1)).matmul(
        x := bg.new_input(X16()), x
    ),
    r"matmul: needs matrices": lambda: (bg := block((1,), 1)).matmul(
        x := bg.new_input(mi.new_kernel_graph().new_input((4,))), x
    ),
    r"add: shapes \(16, 64\) and \(64, 32\) do not broadcast": lambda: (bg := block((1,), 1)).add(
        bg.new_input(X16()), bg.new_input(W64())
    ),
    r"needs a tile of this block graph, got numbers alone": lambda: block().add(1, 2),
    r"add: takes 2 operands, got 1": lambda: (bg := block()).add(walked(bg)),
    r"got DTensor; make one with bg.new_input": lambda: block().exp(X16()),
    r"belongs to another block graph": lambda: block().exp(walked(block())),
    r"unsupported dtype 'int3'": lambda: (bg := block((1,), 1)).new_output(
        bg.new_input(X16()), dtype="int3"
    ),
    r"is not an order of 2 dims": lambda: (bg := block()).permute(walked(bg), (0, 0)),
}


@pytest.mark.parametrize("says", REFUSED, ids=lambda s: re.sub(r"\W+", " ", s)[:40])
def test_errors_say_what_and_the_way_out(says):
    with pytest.raises(errors.GraphError, match=says):
        REFUSED[says]()


def test_an_axis_cut_in_one_input_and_whole_in_another():
    g = mi.new_kernel_graph()
    bg = mi.new_block_graph((4, 2))
    x, w = (
        bg.new_input(g.new_input((8, 16), name="X"), {"x": 1}),
        bg.new_input(g.new_input((4, 8), name="W"), {"y": 1}),
    )
    with pytest.raises(
        errors.GraphError,
        match=r"matmul: %X \(8, 4\) and %W \(4, 4\): dim 1 of X "
        r"\(size 16, cut by grid dim x\) meets dim 0 of W "
        r"\(size 4, whole in every block\); what meets must be cut alike",
    ):
        bg.matmul(x, w)


# -- programs with kernels in them ----------------------------------------------------------------


def test_a_program_with_a_kernel_in_it_is_searched_as_if_spelled_out():
    g, kernels, _ = linear(rows=4)
    kernels.mul(kernels.outputs[0], 2.0)
    g.mul(g.outputs[0], 2.0)
    result = mi.superoptimize(kernels, backend="cpu", cache=False, max_kernels=2)
    assert result[0].num_kernels == 1 and result[-1].num_kernels == 2
    assert distance(g, result[0].kernels) < 1e-12


@pytest.mark.parametrize(
    "made",
    [
        lambda: attention()[1],
        lambda: split_k()[1],
        lambda: ugraphs.qkv().kernels,
        lambda: ugraphs.softmax_rows().kernels,
        lambda: ugraphs.ntrans().kernels,
        lambda: ugraphs.lora().kernels,
        lambda: linear(rows=1)[1],
    ],
)
def test_kernels_are_lowered_as_what_they_compute(made):
    kernels = made()
    spec = lower(kernels)
    assert not isinstance(spec, Rejected) and all(t.op != "partial" for t in spec.terms)
    found, report = search(kernels, SearchOptions(time_limit=10, threads=1))
    assert found, report
    ones = [f for f in found if f.ugraph.num_kernels == 1]
    assert not ones or distance(kernels, ones[0].ugraph.kernels) < 1e-9


def test_partial_results_that_are_not_just_summed_are_not_lowered():
    _, kernels = split_k()
    partial = kernels.ops[0].outputs[0]
    for use in (
        lambda: kernels.reduction(partial, 0, "max"),
        lambda: kernels.reduction(kernels.square(partial), 0),
        lambda: partial,
    ):
        kernels.mark_output(use())
        spec = lower(kernels)
        assert (
            isinstance(spec, Rejected)
            and "over each split of axis k, and they are not combined by a sum" in spec.reason
        )
        kernels._marked.clear()


# -- documentation --------------------------------------------------------------------------------


def test_a_proven_ugraph_does_not_change_with_the_graphs_it_was_made_from():
    program, kernels = mi.new_kernel_graph(), mi.new_kernel_graph()
    program.square(program.new_input((8, 16), mi.float32))
    X = kernels.new_input((8, 16), mi.float32)
    bg = mi.new_block_graph(grid_dim=(4,))
    bg.new_output(bg.square(bg.new_input(X, imap={"x": 0})), omap={"x": 0})
    (y,) = kernels.customized([X], bg)
    ugraph, x = mi.ugraph(program, kernels), torch.randn(8, 16)
    program.exp(program.outputs[0])
    kernels.exp(y)
    assert torch.equal(ugraph([x])[0], x * x) and len(ugraph.program.ops) == 1


def test_the_documented_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "block-graphs.md").read_text(encoding="utf-8")
    scope: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(code, scope)
    assert math.prod(scope["y"].shape) > 0
