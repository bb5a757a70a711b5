"""The search on weights in codes: where scales and zero points go, and what the proof refuses."""

import math

import pytest
import torch

from mirage_hf.errors import Rejected
from mirage_hf.graph.block import BlockGraph, Role
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.search.engine import search
from mirage_hf.search.lowering import lower
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.accept import accept, verify
from mirage_hf.verify.verdict import Accepted
from tests.helpers import coded_mutants
from tests.helpers.coded_programs import CASES, fp8_linear, int4_joined, int4_linear
from tests.helpers.streamed_graphs import coded_linear

SEARCH = SearchOptions(threads=1)


def blocks_of(g: KernelGraph) -> list:
    found, report = search(g, SEARCH)
    assert found, report
    return [r.ugraph.block_ops[0].block for r in found if r.ugraph.num_kernels == 1]


@pytest.mark.parametrize("name", CASES)
def test_every_format_gives_proven_kernels(name):
    found, report = search(CASES[name](), SEARCH)
    assert found, report
    accepted = accept(found, keep=2)
    assert accepted.candidates and accepted.error_bound < 1e-9


def test_scales_are_pulled_out_of_the_sum_within_a_group():
    def pulls_out_scales(block) -> bool:
        """Return whether sums over codes of a group are multiplied by the group's scale."""
        loop = next((a.name for a in block.named(Role.LOOP) if a.size == 4), None)
        ops = {op.out: op for op in block.ops()}
        return loop is not None and any(
            op.fn == "mul" and "scales" in op.args and any(ops[a].over for a in op.args if a in ops)
            for op in ops.values()
        )

    assert any(map(pulls_out_scales, blocks_of(int4_linear(4, 64, 512, 128))))


@pytest.mark.parametrize("name", coded_mutants.PROGRAMS)
def test_kernels_store_no_codes(name):
    """A value that later kernels multiply with codes has the dtype of x, or float32."""
    found, report = search(coded_mutants.PROGRAMS[name]().graph, SEARCH)
    assert any(r.ugraph.num_kernels > 1 for r in found), report
    stored = [t.dtype for r in found for op in r.ugraph.kernels.ops for t in op.outputs]
    assert {*stored} <= {torch.float16, torch.float32}


def test_a_norm_fuses_with_a_linear_of_codes():
    assert any(len(b.inputs) == 4 for b in blocks_of(int4_linear(1, 64, 256, 64, norm=True)))


def test_linears_side_by_side_are_one_kernel_that_reads_joined_codes():
    blocks = blocks_of(int4_joined(1, (32, 16, 16), 256, 128))
    joined = [[i.sizes for i in b.inputs if len(i.sources) > 1] for b in blocks]
    assert [(32, 16, 16)] * 2 in joined


def test_weights_that_are_decoded_in_different_ways_are_not_joined():
    g = new_kernel_graph()
    x = g.new_input((1, 16), name="x")
    weights = []
    for zero in (8.0, 7.0):
        codes = g.cast(g.new_input((8, 16), "uint4"), "float16")
        weights.append(g.permute(g.sub(codes, zero), (1, 0)))
    g.mark_output(g.matmul(x, g.concat(weights, 1)))
    assert "concat of computed tensors" in lower(g).reason


def test_a_kernel_of_blocks_stores_rows_of_the_program():
    found, _ = search(fp8_linear(2, 256, 256), SEARCH)
    best = found[0].ugraph.kernels
    assert [op.name for op in best.ops] == ["reshape", "customized", "reshape"]
    assert best.outputs[0].dims == (2, 256)


def linear(zero: float, order: tuple[int, ...] = (0, 1, 2)) -> KernelGraph:
    """Return a linear of codes (8, 2, 8) whose scales are read in some order of groups."""
    g = new_kernel_graph()
    x = g.new_input((3, 16), name="x")
    codes = g.cast(g.new_input((8, 2, 8), "uint4", name="codes"), "float16")
    scales = g.new_input((8, 2, 1), name="scales")
    if order != (0, 1, 2):
        swapped = [g.slice(scales, 1, n, n + 1) for n in (1, 0)]
        scales = g.concat(swapped, 1)
    w = g.mul(g.sub(codes, zero), scales)
    g.mark_output(g.matmul(x, g.permute(g.reshape(w, (8, 16)), (1, 0))))
    return g


@pytest.mark.parametrize("wrong", [linear(7.0), linear(0.0), linear(8.0, (0, 2, 1))])
def test_a_wrong_zero_point_or_group_is_refused(wrong):
    found, _ = search(linear(8.0), SEARCH)
    right = found[0].ugraph.kernels
    assert isinstance(verify(linear(8.0), right), Accepted)
    assert isinstance(verify(wrong, right), Rejected)


def test_a_dim_that_is_split_in_two_ways_ends_a_kernel():
    g = new_kernel_graph()
    x = g.cast(g.new_input((4, 24), "int8"), "float16")
    a = g.reshape(g.reduction(g.reshape(x, (4, 4, 6)), 2), (4, 4))
    b = g.reshape(g.reduction(g.reshape(x, (4, 6, 4)), 1), (4, 4))
    g.mark_output(g.add(a, b))
    assert "split in two ways" in lower(g).reason


def inner_linear(*inner: int, norm: bool = False) -> KernelGraph:
    """Return a linear of int8 codes whose groups of columns have several axes, in another order.

    Args:
        *inner: The sizes of these axes, in the order of the codes. x has them the other way round.
        norm: Whether x is normalized.
    """
    rows, groups, width = 16, 3, 3 * math.prod(inner)
    g = new_kernel_graph()
    x = g.new_input((1, width), "bfloat16", name="x")
    if norm:
        x = g.rms_norm(x, g.new_input((1, width), "bfloat16", name="gamma"), 1e-6)
    codes = g.cast(g.new_input((rows, groups, *inner), "int8", name="codes"), "bfloat16")
    scales = g.new_input((rows, groups, *(1,) * len(inner)), "bfloat16", name="scales")
    w = g.permute(g.mul(codes, scales), (0, 1, *range(1 + len(inner), 1, -1)))
    g.mark_output(g.matmul(x, g.permute(g.reshape(w, (rows, width)), (1, 0))))
    return g


def with_one_loop(g: KernelGraph) -> list[BlockGraph]:
    """Return the blocks of one kernel and one loop that the search finds."""
    return [b for b in blocks_of(g) if sum(s.loop is not None for s in b.stages) == 1]


def scales_sums(block: BlockGraph) -> bool:
    """Return whether scales multiply sums within the groups that a loop walks."""
    body = next(stage.body for stage in block.stages if stage.loop is not None)
    sums = {op.out for op in body if op.over is not None}
    return any(op.fn == "mul" and "scales" in op.args and sums & {*op.args} for op in body)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("inner", [(4, 2, 4), (2, 4, 2, 2)])
def test_scales_are_pulled_out_of_sums_over_any_number_of_axes(
    inner: tuple[int, ...], norm: bool
) -> None:
    one, two, many = (with_one_loop(inner_linear(*a, norm=norm)) for a in ((32,), (4, 8), inner))
    pulled, of_two, of_one = (sum(map(scales_sums, blocks)) for blocks in (many, two, one))
    assert pulled == of_two == of_one > 0
    assert len(many) == len(two) >= len(one)


@pytest.mark.parametrize("group", [64, 128, 256])
def test_a_norm_before_a_linear_of_tiles_ends_after_the_loop(group: int) -> None:
    outer = 768 // max(group, 128)  # tiles or groups, whichever are longer

    def ends_after_the_loop(block: BlockGraph) -> bool:
        """Return whether one loop over columns adds up squares and products."""
        loop, after = block.stages
        ends = {op.fn for op in after.body}
        assert loop.loop is not None
        walks_columns = block.axis(loop.loop).size == outer
        return walks_columns and len(loop.accumulators) == 2 and "rsqrt" in ends

    blocks = with_one_loop(coded_linear("tiles", 16, 768, group, norm=True))
    assert any(ends_after_the_loop(b) for b in blocks if len(b.stages) == 2)
