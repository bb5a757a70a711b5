"""What programs of other sizes have in common, and µGraphs that move between them."""

from __future__ import annotations

from typing import Any

import pytest

import mirage_hf as mi
from mirage_hf.errors import GraphError
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.accept import Candidate, examine
from mirage_hf.zoo.structure import Structure, for_other_sizes, structure_of


def norm_linear(rows: int = 1, k: int = 256, n: int = 96, eps: float = 1e-5) -> mi.KernelGraph:
    g = mi.new_kernel_graph()
    x, gamma = g.new_input((rows, k), "bfloat16"), g.new_input((1, k), "bfloat16", constant=True)
    w = g.new_input((k, n), "bfloat16", strides=(1, k), constant=True)
    g.mark_output(g.matmul(g.rms_norm(x, gamma, eps=eps), w))
    return g


def scaled(first: float, second: float) -> mi.KernelGraph:
    g = mi.new_kernel_graph()
    x = g.new_input((4, 64), "float32")
    g.mark_output(g.mul(g.exp(g.mul(x, first)), second))
    return g


def joined_heads(heads: int, d: int, n: int) -> mi.KernelGraph:
    """Build a product of heads whose results are joined by a reshape."""
    g = mi.new_kernel_graph()
    x = g.new_input((1, heads, d), "float32")
    w = g.new_input((heads * d, n), "float32")
    g.mark_output(g.matmul(g.reshape(x, (1, heads * d)), w))
    return g


def structure(graph: mi.KernelGraph) -> Structure:
    found = structure_of(graph)
    assert found is not None
    return found


def test_sizes_and_constants_are_left_out() -> None:
    one = structure(norm_linear())
    assert structure(norm_linear(k=512, n=160, eps=1e-6)).digest == one.digest
    assert one.sizes == (256, 256, 256, 96)
    assert one.doublings_to(structure(norm_linear(k=1024))) == 2.0
    assert one.doublings_to(structure(norm_linear())) == 0.0


@pytest.mark.parametrize(
    "other",
    [
        norm_linear(rows=2),  # a dim of 1 broadcasts
        scaled(0.3, 0.7),
        joined_heads(4, 8, 16),
    ],
)
def test_other_structures_differ(other: mi.KernelGraph) -> None:
    assert structure(norm_linear()).doublings_to(structure(other)) == float("inf")


def test_order_in_memory_is_part_of_the_structure() -> None:
    g = mi.new_kernel_graph()
    x, gamma = g.new_input((1, 256), "bfloat16"), g.new_input((1, 256), "bfloat16", constant=True)
    w = g.new_input((256, 96), "bfloat16", constant=True)
    g.mark_output(g.matmul(g.rms_norm(x, gamma, eps=1e-5), w))
    assert structure(g).digest != structure(norm_linear()).digest


def test_equal_constants_are_part_of_the_structure() -> None:
    assert structure(scaled(0.3, 0.3)).digest == structure(scaled(0.7, 0.7)).digest
    assert structure(scaled(0.3, 0.3)).digest != structure(scaled(0.3, 0.7)).digest
    assert structure(scaled(0.3, 1.0)).digest != structure(scaled(0.3, 0.7)).digest


def test_symbolic_dims_have_no_structure() -> None:
    g = mi.new_kernel_graph()
    x = g.new_input((mi.Dim("rows", max=8), 64), "float32")
    g.mark_output(g.exp(x))
    assert structure_of(g) is None


def searched(graph: mi.KernelGraph) -> list[UGraph]:
    return list(search_and_verify(graph, SearchOptions(time_limit=60)).ugraphs())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (norm_linear(), norm_linear(k=320, n=130, eps=3e-6)),
        (joined_heads(4, 8, 16), joined_heads(3, 16, 40)),
    ],
    ids=["norm", "reshape"],
)
def test_kernels_of_other_sizes_are_proven(old: Any, new: Any) -> None:
    ugraphs = searched(old)
    assert ugraphs
    for ugraph in ugraphs:
        moved = for_other_sizes(ugraph, new)
        assert moved.program is new
        assert isinstance(examine(moved), Candidate)


def test_a_constant_with_two_new_values_is_not_replaced_and_not_proven() -> None:
    # eps is one over the size of the mean in one program, and another number in the other
    old, new = norm_linear(eps=1 / 256), norm_linear(k=128, eps=1e-5)
    assert structure(old).digest == structure(new).digest
    for ugraph in searched(old):
        assert not isinstance(examine(for_other_sizes(ugraph, new)), Candidate)


def test_a_constant_that_is_not_replaced_is_not_proven() -> None:
    ugraph = searched(norm_linear(eps=1e-3))[0]
    program = norm_linear(k=320, eps=0.25)
    wrong = UGraph(program, for_other_sizes(ugraph, norm_linear(k=320, eps=1e-3)).kernels)
    assert not isinstance(examine(wrong), Candidate)
    assert isinstance(examine(for_other_sizes(ugraph, program)), Candidate)


def test_kernels_that_do_not_fit_are_refused() -> None:
    with pytest.raises((GraphError, ValueError)):
        for_other_sizes(searched(norm_linear())[0], joined_heads(4, 8, 16))
