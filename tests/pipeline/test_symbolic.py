"""Symbolic dims: one search serves every size, with the same kernels and no new proof."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import triton
from mirage_hf.graph import json_format, symbolic, text
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.pipeline import find_outcome, superoptimizer
from mirage_hf.search.engine import search
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted

pytestmark = pytest.mark.usefixtures("remembered_verdicts")


def norm_linear(tokens=None, k=256, n=96) -> KernelGraph:
    g = mi.new_kernel_graph()
    x, gamma, w = (
        g.new_input((tokens or mi.Dim("tokens", max=16), k)),
        g.new_input((1, k)),
        g.new_input((k, n)),
    )
    g.mark_output(g.matmul(g.rms_norm(x, gamma), w))
    return g


def attention(heads=2, d=32) -> KernelGraph:
    g = mi.new_kernel_graph()
    keys = mi.Dim("keys", max=4096)
    q, k, v = (
        g.new_input((heads, 1, d)),
        g.new_input((heads, d, keys)),
        g.new_input((heads, keys, d)),
    )
    g.mark_output(g.matmul(g.softmax(g.matmul(q, k)), v))
    return g


def inputs_of(graph: KernelGraph) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [(torch.randn(t.dims) / max(t.dims[-1], 1) ** 0.25).half() for t in graph.inputs]


def test_a_dim_is_its_maximum_with_a_name():
    d = mi.Dim("tokens", max=16)
    assert d == 16 and d + 1 == 17 and d.name == "tokens" and str((d,)) == "(16,)"
    for again in (copy.deepcopy(d), pickle.loads(pickle.dumps(d))):
        assert again == 16 and again.name == "tokens"
    for name, most in (("", 4), ("a b", 4), ("n", 1), ("n", True), ("n", 2.5)):
        with pytest.raises(errors.GraphError, match="Dim"):
            mi.Dim(name, max=most)


def test_text_and_json_keep_dims():
    g = norm_linear()
    assert "(tokens<=16, 256)" in str(g)
    for again in (
        text.parse_graph(str(g)),
        json_format.graph_from_dict(json_format.graph_to_dict(g)),
    ):
        assert again == g and symbolic.dims_of(again) == {"tokens": 16}
    assert json_format.graph_to_dict(g) != json_format.graph_to_dict(norm_linear(tokens=16))
    with pytest.raises(errors.FormatError, match="line 1"):
        text.parse_graph("%x = input float16 (n<=1, 4)\nreturn %x")


def test_results_of_programs_with_dims_are_kept_and_loaded(tmp_path, monkeypatch):
    """A checkpoint and the user's cache store the axes of block graphs with their dims."""
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    for kept in (dict(checkpoint=tmp_path / "checkpoint.json"), {}):
        superoptimizer._memory.clear()
        first = mi.superoptimize(norm_linear(k=32, n=16), backend="cpu", **kept)
        superoptimizer._memory.clear()
        again = mi.superoptimize(norm_linear(k=32, n=16), backend="cpu", **kept)
        assert again.report.stop == "loaded" and list(again) == list(first)
        assert [str(u) for u in again.at(tokens=3)] == [str(u) for u in first.at(tokens=3)]
    superoptimizer._memory.clear()
    loaded = json_format.ugraph_from_dict(json_format.ugraph_to_dict(first[0]))
    assert all(
        isinstance(op.block.axes[k].size, type(a.size))
        for op, other in zip(loaded.block_ops, first[0].block_ops, strict=True)
        for k, a in enumerate(other.block.axes)
    )


@pytest.mark.parametrize(
    "build, sizes",
    [
        (norm_linear, [{"tokens": n} for n in (1, 2, 3, 16)]),
        (attention, [{"keys": n} for n in (1, 2, 77, 1000, 4096)]),
    ],
)
def test_whatever_is_found_holds_at_every_size(build, sizes):
    found, _ = search(build())
    assert {f.ugraph.num_kernels for f in found} >= {1, 2}
    for f in found[:6]:
        assert isinstance(prove(f.ugraph), Accepted)
        for size in sizes:
            u = symbolic.ugraph_at(f.ugraph, size)
            assert isinstance(prove(u), Accepted) and u.num_kernels == f.ugraph.num_kernels
            xs = [x.double() for x in inputs_of(u.program)]
            want, got = (run_kernel_graph(g, xs, torch.float64)[0] for g in (u.program, u.kernels))
            assert float((want - got).abs().max()) <= 1e-9 * float(want.abs().max())


def test_a_result_serves_every_size_without_another_search(monkeypatch):
    found = mi.superoptimize(norm_linear(), backend="cpu")
    monkeypatch.setattr(find_outcome, "search_and_verify", None)
    for tokens in (1, 5, 16, 5):
        g = norm_linear(tokens=tokens)
        x, gamma, w = inputs_of(g)
        (y,) = found([x, gamma, w])
        want = (
            x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * gamma
        ) @ w.float()
        torch.testing.assert_close(y.float(), want, rtol=1e-2, atol=1e-2)
        here = found.at(tokens=tokens)
        assert here is found.at(tokens=tokens) and here.program.inputs[0].dims == (tokens, 256)
        assert here[0].schedules is not None and triton.generate(here[0]).source
    one = found.at(tokens=1)[0].schedules[0]
    assert not one.mma and one.tiles["m"] == 1  # one row needs no tensor cores


def test_sizes_that_cannot_be_are_refused():
    found = mi.superoptimize(norm_linear(), backend="cpu")
    x, gamma, w = inputs_of(norm_linear(tokens=17))
    with pytest.raises(
        errors.InputError, match=r"t0: dim tokens is 17; the graph was built for 1 to 16"
    ):
        found([x, gamma, w])
    with pytest.raises(errors.InputError, match="built for shape"):
        found([x[:4], gamma, w[:, :8].contiguous()])
    with pytest.raises(errors.GraphError, match=r"no dim 'token' \(did you mean tokens"):
        found.at(token=3)
    with pytest.raises(errors.GraphError, match="tokens is 17"):
        found.at(tokens=17)
    g = mi.new_kernel_graph()
    x, y = g.new_input((mi.Dim("n", max=8), 4)), g.new_input((mi.Dim("n", max=8), 4))
    g.add(x, y)
    with pytest.raises(errors.InputError, match="t1: dim n is 3, in an earlier input it is 2"):
        mi.superoptimize(g, backend="cpu")([torch.zeros(2, 4).half(), torch.zeros(3, 4).half()])


def test_dims_that_must_be_something_else_are_refused():
    g = mi.new_kernel_graph()
    x = g.new_input((mi.Dim("tokens", max=16), 16))
    g.matmul(x, x)
    with pytest.raises(
        errors.GraphError, match=r"tokens cannot have every size up to 16.*inner sizes differ"
    ):
        mi.superoptimize(g)
    g = mi.new_kernel_graph()
    g.new_input((mi.Dim("n", max=4), 4))
    g.exp(g.new_input((mi.Dim("n", max=8), 4)))
    with pytest.raises(errors.GraphError, match="maximum 8 here, 4 in an earlier input"):
        mi.superoptimize(g)
    g = mi.new_kernel_graph()
    g.rms_norm(g.new_input((4, mi.Dim("width", max=64))))
    result = mi.superoptimize(g, backend="cpu")
    assert not result[0].is_fused and "mean over dim width" in str(result.report)


def test_parts_follow_the_size():
    assert [symbolic.largest_num_splits(size, 8) for size in (1, 2, 7, 9, 64, 100)] == [
        1,
        2,
        7,
        5,
        8,
        8,
    ]
    split = next(
        f.ugraph
        for f in search(attention())[0]
        if any(a.split_axis for op in f.ugraph.block_ops for a in op.block.axes)
    )
    for keys in (1, 3, 100, 4096):
        block = symbolic.ugraph_at(split, {"keys": keys}).block_ops[0].block
        axis = next(a for a in block.axes if a.split_axis)
        assert (
            axis.size == keys
            and (block.axis(axis.split_axis).size - 1) * block.split_size(axis.name) < keys
        )


@pytest.mark.parametrize(
    "of",
    [
        lambda g, t: g.add(g.new_input((t, 8)), g.new_input((2, 8))),
        lambda g, t: g.add(g.new_input((t, 8)), g.new_input((mi.Dim("u", 2), 8))),
        lambda g, t: g.matmul(g.new_input((t, 4, 8)), g.new_input((2, 8, 4))),
        lambda g, t: g.exp(g.slice(g.new_input((t, 8)), 0, 0, 2)),
        lambda g, t: g.cache_append(
            g.new_input((t, 8)), g.new_input((2, 8)), g.new_input((1,), "int32")
        ),
    ],
)
def test_a_dim_that_cannot_be_one_is_refused_before_the_search(of):
    """A size of 1 broadcasts.

    So a dim of at most 2 can meet another 2 without an error of an op.
    """
    g = mi.new_kernel_graph()
    of(g, mi.Dim("t", 2))
    with pytest.raises(errors.GraphError, match="dim t cannot have every size up to 2"):
        g.superoptimize(backend="cpu")


def test_a_dim_may_be_called_inf():
    g = mi.new_kernel_graph()
    g.exp(g.new_input((mi.Dim("inf", 4), 8)))
    assert text.parse_graph(str(g)) == g
