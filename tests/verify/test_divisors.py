"""Kernels divide by nothing that may be 0 unless their program does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf.errors import Rejected
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.table import OPS
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.accept import examine
from mirage_hf.verify.divisors import Sign, new_divisor, sign_of
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import ugraphs

DIMS = (4, 8)


def graph(build: Any) -> KernelGraph:
    """Return a program of two inputs x and y."""
    written = mi.new_kernel_graph()
    x, y = (written.new_input(DIMS, mi.float32, name=name) for name in "xy")
    written.mark_output(build(written, x, y))
    return written


def fused(program: KernelGraph, build: Any) -> UGraph:
    """Return the program with a kernel that `build` writes."""
    kernels = mi.new_kernel_graph()
    tensors = [kernels.new_input(DIMS, mi.float32) for _ in program.inputs]
    block = mi.new_block_graph(grid_dim=(4,))
    tiles = [block.new_input(t, imap={"x": 0}) for t in tensors]
    block.new_output(build(block, *tiles), omap={"x": 0})
    kernels.mark_output(kernels.customized(tensors, block)[0])
    return UGraph(program, kernels)


def half_sum(g: Any, x: Any, y: Any) -> Any:
    return g.mul(g.add(x, y), 0.5)


def half_sum_by_a_quotient(g: Any, x: Any, y: Any) -> Any:
    return g.mul(g.div(g.add(x, y), x), g.mul(x, 0.5))


def test_a_kernel_that_divides_by_an_input_is_proven_but_not_accepted() -> None:
    ugraph = fused(graph(half_sum), half_sum_by_a_quotient)
    assert isinstance(prove(ugraph), Accepted)
    verdict = examine(ugraph)
    assert isinstance(verdict, Rejected)
    assert verdict.reason.startswith("it divides by ")
    assert verdict.reason.endswith(", which may be 0, and the program does not")
    assert isinstance(mi.verify(ugraph.program, ugraph.kernels), Rejected)


def test_a_kernel_may_divide_if_its_program_does() -> None:
    program = graph(lambda g, x, y: g.div(x, y))
    assert new_divisor(fused(program, lambda g, x, y: g.div(x, y))) is None
    by_roots = graph(lambda g, x, y: g.div(x, g.sqrt(y)))
    assert new_divisor(fused(by_roots, lambda g, x, y: g.div(x, g.sqrt(y)))) is None


def dividing_by(divisor: Any, program: Any = half_sum) -> UGraph:
    return fused(graph(program), lambda g, x, y: g.div(half_sum(g, x, y), divisor(g, x)))


@pytest.mark.parametrize(
    "positive",
    [
        lambda g, x: g.exp(x),
        lambda g, x: g.add(g.square(x), 1e-6),
        lambda g, x: g.max(g.sub(x, 3.0), 1.0),
        lambda g, x: g.reduction(g.sigmoid(x), 1),
        lambda g, x: g.clamp(x, min=1.0),
        lambda g, x: -2.0,
    ],
)
def test_what_is_positive_may_divide(positive: Any) -> None:
    assert new_divisor(dividing_by(positive)) is None


@pytest.mark.parametrize(
    "never_negative",
    [
        lambda g, x: g.square(x),
        lambda g, x: g.mul(x, x),
        lambda g, x: g.relu(x),
        lambda g, x: g.reduction(g.square(x), 1),
    ],
)
def test_what_may_be_0_may_divide_if_such_a_value_divides_in_the_program(
    never_negative: Any,
) -> None:
    assert isinstance(new_divisor(dividing_by(never_negative)), Rejected)

    def program(g: Any, x: Any, y: Any) -> Any:
        return g.div(y, g.reduction(g.relu(x), 1))

    assert new_divisor(dividing_by(never_negative, program)) is None
    signed = dividing_by(lambda g, x: g.tanh(x), program)
    assert isinstance(new_divisor(signed), Rejected)


@pytest.mark.parametrize(
    "signed",
    [
        lambda g, x: g.sub(g.exp(x), 1.0),
        lambda g, x: g.mul(x, g.exp(x)),
        lambda g, x: g.reduction(x, 1),
        lambda g, x: g.neg(g.square(x)),
        lambda g, x: g.max(x, -1.0),
        lambda g, x: g.tanh(x),
    ],
)
def test_what_may_be_negative_may_not_divide(signed: Any) -> None:
    assert isinstance(new_divisor(dividing_by(signed)), Rejected)


def test_signs_of_partial_results_reach_the_next_kernel() -> None:
    kernels = mi.new_kernel_graph()
    x = kernels.new_input(DIMS, mi.float32)
    block = mi.new_block_graph(grid_dim=(4,))
    block.new_output(block.exp(block.new_input(x, imap={"x": 0})), omap={"x": 0})
    (powers,) = kernels.customized([x], block)
    kernels.mark_output(kernels.div(x, kernels.reduction(powers, 1)))
    program = mi.new_kernel_graph()
    z = program.new_input(DIMS, mi.float32)
    program.mark_output(program.mul(z, 2.0))
    assert new_divisor(UGraph(program, kernels)) is None


#: Attributes that an op needs.
ATTRS: dict[str, Any] = {
    "lookup": {"values": (-1.0, 2.0)},
    "bits": {"count": 4},
    "cast": {"dtype": "float32"},
    "clamp": {"min": -1.0, "max": 2.0},
}


@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if op.kind == "elementwise"))
def test_signs_of_results_are_as_the_ops_compute_them(name: str) -> None:
    """What is known of the sign of a result holds for random operands with the given signs."""
    op = OPS[name]
    draw = torch.Generator().manual_seed(0)
    for signs in itertools.product(Sign, repeat=op.arity[0]):
        names = [f"x{n}" for n in range(len(signs))]
        attrs = ATTRS.get(name, {})
        found = sign_of(name, names, dict(zip(names, signs, strict=True)), attrs)
        if found is Sign.UNKNOWN:
            continue
        drawn = [2 * torch.randn(1000, generator=draw) for _ in signs]
        of_sign = {
            Sign.UNKNOWN: lambda x: x,
            Sign.NOT_NEGATIVE: torch.relu,
            Sign.POSITIVE: lambda x: x.abs() + 1e-3,
        }
        operands = [of_sign[sign](x) for x, sign in zip(drawn, signs, strict=True)]
        if name == "bits":  # of bytes, from one of their bits on
            operands = [50 * drawn[0].abs(), torch.full((1000,), 2.0)]
        result = op.oracle(*operands, **attrs)
        result = result[result.isfinite()]
        is_positive = found is Sign.POSITIVE and name != "sqrt"  # a root of 0 counts as positive
        assert bool((result > 0 if is_positive else result >= 0).all()), signs


def test_a_product_of_a_matrix_with_itself_may_be_negative() -> None:
    assert sign_of("matmul", ["a", "a"], {}, {}) is Sign.UNKNOWN
    assert sign_of("matmul", ["a", "b"], dict.fromkeys("ab", Sign.POSITIVE), {}) >= 1


@pytest.mark.parametrize(
    "ugraph", [ugraphs.rms_norm_linear(), ugraphs.attention(), ugraphs.softmax_rows()]
)
def test_norms_and_softmax_are_accepted(ugraph: UGraph) -> None:
    assert new_divisor(ugraph) is None


def test_latent_attention_is_found_without_new_divisors() -> None:
    """Scores are the scaled sum of two products. A quotient of them gives the scale as well."""
    g = mi.new_kernel_graph()
    q = g.new_input((1, 16, 1, 128), mi.bfloat16)
    rope = g.new_input((1, 16, 1, 64), mi.bfloat16)
    latents = g.new_input((1, 1, 256, 512), mi.bfloat16)
    keys = g.new_input((1, 1, 256, 64), mi.bfloat16)
    first, last = (g.new_input((1, 1, 1, 1), torch.int32) for _ in range(2))
    w_k, w_v = (g.new_input((1, 16, 512, 128), mi.bfloat16, constant=True) for _ in range(2))
    scores = g.add(
        g.matmul(q, g.permute(g.matmul(latents, w_k), (0, 1, 3, 2))),
        g.matmul(rope, g.permute(keys, (0, 1, 3, 2))),
    )
    weights = g.softmax(g.mul(scores, 0.2), 3, first, last)
    g.mark_output(g.matmul(weights, g.matmul(latents, w_v)))
    found = search_and_verify(g, SearchOptions(time_limit=30))
    assert any(r.reason.startswith("it divides by ") for r in found.report.rejected)
    assert found.candidates
    assert all(new_divisor(u) is None for u in found.ugraphs())
