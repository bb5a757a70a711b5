"""The search on weights that an index chooses: which kernels it finds, and what they read."""

from dataclasses import replace

import pytest
import torch

import mirage_hf as mi
from mirage_hf.errors import Rejected
from mirage_hf.graph.block import Role
from mirage_hf.search.cut import cut
from mirage_hf.search.engine import search
from mirage_hf.search.lowering import lower
from mirage_hf.search.map_restriction import MapRestriction
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.accept import accept
from tests.helpers import indexed_programs as programs
from tests.helpers.indexed_programs import GPT_OSS, QWEN, SEARCH, Mixture

MODELS = {"Qwen3-30B-A3B": QWEN, "gpt-oss-20b": GPT_OSS}


def best_of(g):
    found, report = search(g, SEARCH)
    assert found, report
    return found[0].ugraph


def roles_by_size(block, sizes) -> dict[str, Role]:
    """Return the roles of axes by their names in `sizes`. Axes of one size are told by order."""
    left = list(block.axes)
    roles = {}
    for name, size in sizes.items():
        axis = next((a for a in left if a.size == size), None)
        if axis is not None:
            left.remove(axis)
            roles[name] = axis.role
    assert not left, left
    return roles


def weights_of(block) -> dict:
    """Return the inputs whose elements an index chooses, by name."""
    return {i.name: i for i in block.inputs if i.taken is not None}


@pytest.mark.parametrize("tokens", [1, 2, 4, 16])
@pytest.mark.parametrize("model", MODELS)
def test_gate_up_and_activation_of_the_chosen_experts_are_one_kernel(model, tokens):
    m = replace(MODELS[model], tokens=tokens)
    ugraph = best_of(programs.gate_up(m))
    (op,) = ugraph.kernels.ops  # nothing copies a weight or sorts tokens
    chosen = weights_of(op.block)
    names = {"gate", "up"} | ({"gate_bias", "up_bias"} if m.biases else set())
    assert chosen.keys() == names
    assert len({i.taken.axes for i in chosen.values()}) == 1
    for name, i in chosen.items():
        assert i.taken.dim == 0 and i.taken.size == m.experts, name
        index = ugraph.program.inputs[i.taken.index]
        assert index.name == "e" and index.dtype is torch.int32
        # a block has one token and one expert, so the index is one number
        assert all(op.block.role(a) is Role.GRID for a in i.taken.axes if a)
    columns = next(o for o in op.block.outputs).axes[-1]
    assert op.block.role(columns) is Role.GRID and op.block.axis(columns).size == m.inner
    (summed,) = [a for a in op.block.axes if a.role is not Role.GRID]
    assert summed.size == m.width


@pytest.mark.parametrize("tokens", [1, 2, 4, 16])
@pytest.mark.parametrize("model", MODELS)
def test_down_weights_sum_and_residual_are_one_kernel(model, tokens):
    m = replace(MODELS[model], tokens=tokens)
    ugraph = best_of(programs.down(m))
    (op,) = ugraph.kernels.ops
    block = op.block
    assert weights_of(block).keys() == {"down"} | ({"down_bias"} if m.biases else set())
    token, expert = weights_of(block)["down"].taken.axes
    assert (token is None) == (tokens == 1)
    if token is not None:
        assert block.role(token) is Role.GRID
    assert block.role(expert) is not Role.GRID  # the sum over experts is inside of a block
    assert {"h", "weights", "residual"} <= {i.name.rstrip("_") for i in block.inputs}


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_norm_before_gate_and_up_is_in_their_kernel(model, tokens):
    ugraph = best_of(programs.gate_up(replace(MODELS[model], tokens=tokens, norm=True)))
    (op,) = ugraph.kernels.ops
    assert any(i.name == "gamma" for i in op.block.inputs)
    assert any(b.fn == "rsqrt" for b in op.block.ops())


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("shared", [768, 1536])
def test_the_down_projection_of_a_shared_expert_is_in_the_same_kernel(tokens, shared):
    ugraph = best_of(programs.down_and_shared(replace(QWEN, tokens=tokens), shared))
    (op,) = ugraph.kernels.ops
    assert weights_of(op.block).keys() == {"down"}
    assert any(i.name == "down_shared" for i in op.block.inputs)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_the_experts_of_a_layer_are_two_kernels(model, tokens):
    m = replace(MODELS[model], tokens=tokens)
    ugraph = best_of(programs.whole(m))
    first, second = ugraph.kernels.ops
    assert weights_of(first.block).keys() >= {"gate", "up"}
    assert weights_of(second.block).keys() >= {"down"}
    (h,) = first.outputs
    assert h.dtype is torch.bfloat16 and sorted(h.dims) == sorted(
        n for n in (tokens, m.chosen, m.inner) if n > 1
    )


@pytest.mark.parametrize("make", [programs.gate_up, programs.down, programs.whole])
@pytest.mark.parametrize("layout", ["apart", "packed", "interleaved"])
def test_kernels_are_proven(make, layout):
    m = Mixture(3, 2, 5, 24, 16, layout=layout, biases=layout == "interleaved")
    found, report = search(make(m), SEARCH)
    accepted = accept(found, keep=3)
    assert accepted.candidates and accepted.error_bound < 1e-9, report


def test_the_bytes_of_a_weight_are_those_of_what_is_chosen():
    few = lower(programs.gate_up(replace(QWEN, tokens=1)))
    many = lower(programs.gate_up(replace(QWEN, tokens=1000)))
    expert = 768 * 2048
    for lowered, elements in ((few, 8 * expert), (many, 128 * expert)):
        read = {i.num_elements for i in lowered.inputs if i.taken is not None}
        assert read == {elements}


def test_the_dims_of_a_weight_are_those_of_its_memory():
    """A restriction on maps names these dims."""
    g = programs.gate_up(Mixture(3, 2, 5, 24, 16))
    lowered = lower(g)
    read = next(i for i in lowered.inputs if i.taken is not None)
    (term,) = [t for t in lowered.terms if t.op == "input" and lowered.inputs[t.source] == read]
    sizes = [lowered.sizes[a] for a in term.index]
    assert sizes == [3, 2, 16, 24] == list(read.read_dims)
    assert [read.source_dim(at) for at in range(4)] == [0, 0, 1, 2]
    options = SearchOptions(threads=1, maps=MapRestriction.of(fmaps=[2, 3]))
    (op,) = search(g, options)[0][0].ugraph.kernels.ops
    assert {a.size for a in op.block.named(Role.LOOP)} == {24}


def test_takes_of_weights_that_lie_end_to_end_are_one_input():
    """A concat of takes by one index is a take from several sources."""
    g = mi.new_graph()
    x, e = g.new_input((2, 1, 1, 16), "float32"), g.new_input((2, 3), "int32")
    parts = [g.take(g.new_input((5, n, 16), "float32", constant=True), e) for n in (8, 24)]
    g.mark_output(g.matmul(x, g.permute(g.concat(parts, 2), (0, 1, 3, 2))))
    found, _ = search(g, SEARCH)
    block = found[0].ugraph.block_ops[0].block
    (w,) = weights_of(block).values()
    assert len(w.sources) == 2 and w.sizes == (8, 24)
    assert accept(found, keep=1).candidates


def test_what_computes_a_weight_is_moved_before_the_take():
    """So weights in codes are decoded after they are chosen."""
    g = mi.new_graph()
    x, e = g.new_input((2, 1, 1, 16), "float32"), g.new_input((2, 3), "int32")
    codes = g.new_input((5, 8, 16), "int8", constant=True, name="codes")
    scales = g.new_input((5, 8, 1), "float32", constant=True, name="scales")
    w = g.mul(g.cast(codes, "float32"), scales)
    g.mark_output(g.matmul(x, g.permute(g.take(w, e), (0, 1, 3, 2))))
    found, _ = search(g, SEARCH)
    (op,) = found[0].ugraph.kernels.ops
    assert weights_of(op.block).keys() == {"codes", "scales"}
    assert accept(found, keep=1).candidates


def test_an_index_that_is_computed_ends_a_kernel():
    g = mi.new_graph()
    x, e = g.new_input((5, 8), "float32"), g.new_input((2, 3), "int32")
    g.mark_output(g.exp(g.take(x, g.permute(e, (1, 0)))))
    lowered = lower(g)
    assert isinstance(lowered, Rejected) and "an index that is computed" in lowered.reason


def test_windows_keep_a_take_with_the_product_that_reads_it():
    units = cut(programs.whole(QWEN)).units
    takes = [[op.name for op in u.ops] for u in units if any(op.name == "take" for op in u.ops)]
    assert takes == [["take", "permute", "matmul"]] * 3


def test_a_kernel_of_the_program_that_takes_is_searched_like_its_ops():
    g = programs.gate_up(Mixture(2, 2, 4, 16, 8))
    kernels = search(g, SEARCH)[0][0].ugraph.kernels
    written_out, found = lower(g), lower(kernels)
    assert (
        not isinstance(found, Rejected) and found.outputs[0].index == written_out.outputs[0].index
    )
    assert len(found.terms) == len(written_out.terms)
    assert [i.taken for i in found.inputs] == [i.taken for i in written_out.inputs]
