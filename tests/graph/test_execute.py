"""The executor: block graphs cut into any number of pieces equal their programs.

Layout ops equal those of transformers.
"""

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.execute_block import run_block_graph
from tests.helpers import ugraphs


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("name", ugraphs.ALL)
def test_block_graphs_equal_their_programs(name, pieces):
    u = ugraphs.ALL[name]()
    inputs = [x.double() for x in ugraphs.random_inputs(u.program)]
    values = dict(zip((t.index for t in u.kernels.inputs), inputs, strict=True))
    for op in u.kernels.ops:
        args = [values[t.index] for t in op.inputs]
        if op.block is None:
            made = [args[0].reshape(op.outputs[0].dims)]
        else:
            made = run_block_graph(op.block, args, TorchAlgebra(torch.float64), pieces)
        values.update(zip((t.index for t in op.outputs), made, strict=True))
    want = run_kernel_graph(u.program, inputs, torch.float64)
    for t, y in zip(u.kernels.outputs, want, strict=True):
        torch.testing.assert_close(values[t.index], y, rtol=1e-11, atol=1e-13)


def test_pieces_may_be_given_by_axis():
    u = ugraphs.gated_mlp()
    inputs = [x.double() for x in ugraphs.random_inputs(u.program)]
    block = u.block_ops[0].block
    one, many = (
        run_block_graph(block, inputs, TorchAlgebra(torch.float64), p)[0]
        for p in (1, {"m": 4, "n": 5, "k": 32})
    )
    torch.testing.assert_close(one, many, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ugraphs.ALL)
def test_block_graphs_round_like_their_kernels(name):
    u = ugraphs.ALL[name]()
    inputs = ugraphs.random_inputs(u.program)
    for got, want in zip(
        run_kernel_graph(u.kernels, inputs),
        run_kernel_graph(u.program, inputs, torch.float64),
        strict=True,
    ):
        assert got.dtype == torch.float16
        torch.testing.assert_close(
            got.double(), want, rtol=2e-3, atol=2e-3 * float(want.abs().max())
        )


def test_max_accumulator_survives_large_scores():
    u = ugraphs.attention(dtype="float32")
    q, k, v = ugraphs.random_inputs(u.program)
    (got,) = run_kernel_graph(u.kernels, [q * 100, k * 100, v])
    torch.testing.assert_close(got, torch.softmax(q * 100 @ (k * 100).mT / 8**0.5, -1) @ v)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_equals_transformers(interleaved):
    if interleaved:
        from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb
    else:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 1, 5, 16)
    angles = torch.randn(2, 5, 8)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    cos, sin = angles.cos(), angles.sin()
    want = apply_rotary_pos_emb(q, k, cos, sin)
    for x, y in zip((q, k), want, strict=True):
        g = mi.new_graph()
        tx = g.new_input(x.shape, "float32")
        tc, ts = (g.new_input((2, 1, 5, 16), "float32") for _ in range(2))
        g.rope(tx, tc, ts, interleaved=interleaved)
        torch.testing.assert_close(
            run_kernel_graph(g, [x, cos[:, None], sin[:, None]])[0], y, rtol=0, atol=1e-6
        )


def test_partial_rope_leaves_the_tail():
    g = mi.new_graph()
    x, c, s = (g.new_input(d, "float32") for d in ((3, 8), (3, 4), (3, 4)))
    g.rope(x, c, s)
    values = torch.randn(3, 8)
    (got,) = run_kernel_graph(g, [values, torch.zeros(3, 4), torch.ones(3, 4)])
    torch.testing.assert_close(got, torch.cat((-values[:, 2:4], values[:, :2], values[:, 4:]), -1))


@pytest.mark.parametrize(
    "cache, new, position",
    [((2, 3, 9, 4), (2, 3, 2, 4), (2,)), ((2, 9, 4), (2, 1, 4), (1,)), ((9, 4), (2, 4), (1,))],
)
def test_cache_append_writes_in_place_and_touches_nothing_else(cache, new, position):
    g = mi.new_graph()
    g.cache_append(g.new_input(cache), g.new_input(new), g.new_input(position, "int32"))
    c, n = torch.randn(cache).half(), torch.randn(new).half()
    at = torch.arange(position[0], dtype=torch.int32) * 3 + 1
    want = c.clone().reshape(-1, *cache[-2:])
    for row, values in enumerate(n.reshape(-1, *new[-2:])):
        start = int(at[row * len(at) // len(want)])
        want[row, start : start + new[-2]] = values
    (got,) = run_kernel_graph(g, [c, n, at])
    assert got.data_ptr() == c.data_ptr() and torch.equal(got, want.reshape(cache))
    with pytest.raises(
        errors.InputError, match=r"cache_append: slots \d+ to 9 are outside a cache of 9 slots"
    ):
        run_kernel_graph(g, [c, n, torch.full(position, 9 - new[-2] + 1, dtype=torch.int32)])


def test_numbers_keep_the_dtype_and_their_precision():
    g = mi.new_graph()
    x = g.new_input((3,), "float16")
    g.mark_output(g.mul(x, 1 / 3), g.div(1.0, x))
    got = run_kernel_graph(g, [torch.tensor([1.0, 2.0, 3.0]).half()])
    assert [t.dtype for t in got] == [torch.float16] * 2
    torch.testing.assert_close(got[0], torch.tensor([1 / 3, 2 / 3, 1.0]).half())


def test_a_graph_that_grows_between_runs_keeps_what_it_reads_and_returns():
    g = mi.new_graph()
    x = g.new_input((3,), "float32")
    y = g.exp(x)
    assert g.last_uses == ((x.index,),)  # the result is an output
    numbers = torch.tensor([0.5, 1.0, 2.0])
    run_kernel_graph(g, [numbers])
    z = g.mul(y, x)
    assert g.last_uses == ((), (x.index, y.index))
    assert torch.equal(run_kernel_graph(g, [numbers])[0], numbers.exp() * numbers)
    g.mark_output(y, z)
    assert g.last_uses == ((), (x.index,))
    got = run_kernel_graph(g, [numbers])
    assert torch.equal(got[0], numbers.exp()) and torch.equal(got[1], numbers.exp() * numbers)
