"""Random programs: all results of the search are proven and right in float64.

Results do not depend on how the work is cut. They stay the same as text and JSON.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st

import mirage_hf as mi
from mirage_hf.graph import json_format, text
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import mutants

SIZES = (1, 2, 3, 5)
SEARCH = SearchOptions(time_limit=0.7, threads=1, max_candidates=6)
SLOW = settings(
    max_examples=70,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)

UNARY = ("exp", "silu", "square", "neg", "sigmoid", "tanh", "relu", "gelu_tanh")
BINARY = ("add", "sub", "mul", "div", "max")


@st.composite
def programs(draw, most: int = 8):
    """Return a program of 2 to `most` ops of the table over matrices and batches of them."""
    g = KernelGraph()
    a, b, c, d = (draw(st.sampled_from(SIZES)) for _ in range(4))
    shapes = [(a, b), (b, c), (a, 1), (1, b), (a, b), (d, a, b), (b, a)]
    tensors: list[DTensor] = [g.new_input(draw(st.sampled_from(shapes)), mi.float32)]

    def any_tensor() -> DTensor:
        return draw(st.sampled_from(tensors))

    def fitting(dims) -> DTensor:
        old = [t for t in tensors if t.dims == tuple(dims)]
        if old and draw(st.booleans()):
            return draw(st.sampled_from(old))
        strides = (1, dims[0]) if len(dims) == 2 and draw(st.booleans()) else None
        return g.new_input(dims, mi.float32, strides)

    for _ in range(draw(st.integers(2, most))):
        kind = draw(
            st.sampled_from(
                (
                    "unary",
                    "binary",
                    "binary",
                    "number",
                    "matmul",
                    "matmul",
                    "reduce",
                    "norm",
                    "softmax",
                    "permute",
                    "concat",
                )
            )
        )
        x = any_tensor()
        rank = len(x.dims)
        if kind == "unary":
            y = getattr(g, draw(st.sampled_from(UNARY)))(x)
        elif kind == "number":
            y = getattr(g, draw(st.sampled_from(("add", "mul", "sub", "div"))))(
                x, draw(st.sampled_from((0.5, 2.0, -1.0, 1.0, 0.3)))
            )
        elif kind == "binary":
            dims = tuple(n if draw(st.booleans()) else 1 for n in x.dims)
            other = fitting(draw(st.sampled_from((x.dims, dims, dims[1:] or x.dims))))
            pair = (x, other) if draw(st.booleans()) else (other, x)
            y = getattr(g, draw(st.sampled_from(BINARY)))(*pair)
        elif kind == "matmul":
            y = g.matmul(x, fitting((x.dims[-1], draw(st.sampled_from((a, b, c))))))
        elif kind == "reduce":
            y = g.reduction(
                x, draw(st.integers(0, rank - 1)), draw(st.sampled_from(("sum", "mean", "max")))
            )
        elif kind == "norm":
            y = g.rms_norm(x, fitting((1, x.dims[-1])) if draw(st.booleans()) else None)
        elif kind == "softmax":
            y = g.softmax(x, draw(st.integers(0, rank - 1)))
        elif kind == "permute":
            y = g.permute(x, (*range(rank - 2), rank - 1, rank - 2))
        else:
            parts = [
                g.new_input((n, b), mi.float32)
                for n in draw(st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=3))
            ]
            joined = g.permute(g.concat(parts, 0), (1, 0))
            y = g.matmul(x, joined) if x.dims[-1] == b else joined
        tensors.append(y)
    return g


outcomes: Counter[str] = Counter()


@SLOW
@given(programs())
def test_whatever_is_found_is_right(g):
    note(str(g))
    inputs = mutants.float64_inputs(g)
    want = mutants.reference(g, inputs)
    found, report = search(g, SEARCH)
    outcomes["found" if found else report.reason] += 1
    assert found or report.reason
    sane = all(bool(y.isfinite().all()) and float(y.abs().max()) < 1e12 for y in want)
    for f in found[:3]:
        verdict = prove(f.ugraph, trials=1, target=1.0)
        zero = not isinstance(verdict, Accepted) and "divides by zero" in verdict.reason
        assert isinstance(verdict, Accepted) or zero, verdict
        if sane:
            assert (
                max(mutants.distance(f.ugraph, inputs, want, pieces) for pieces in (1, 2, 3)) < 1e-6
            )
        again = json_format.ugraph_from_dict(json_format.ugraph_to_dict(f.ugraph), "test")
        assert again == f.ugraph and again.kernels == text.parse_graph(str(f.ugraph.kernels))


def test_most_random_programs_become_one_kernel():
    if not sum(outcomes.values()):
        pytest.skip("needs the programs of the test above")
    assert outcomes["found"] > 0.5 * sum(outcomes.values()), outcomes


@settings(SLOW, max_examples=25)
@given(programs(most=4), st.randoms(use_true_random=False))
def test_mutants_of_random_programs_are_refused(g, random):
    found, _ = search(g, SEARCH)
    assume(found)
    inputs = mutants.float64_inputs(g)
    want = mutants.reference(g, inputs)
    assume(all(bool(y.isfinite().all()) and 1e-6 < float(y.abs().max()) < 1e6 for y in want))
    made = list(mutants.mutants(found[0].ugraph))
    random.shuffle(made)
    for m in made[:12]:
        if mutants.distance(m.ugraph, inputs, want) > 1e-7:
            assert not isinstance(prove(m.ugraph, trials=1, target=1.0), Accepted), (
                m.kind,
                m.where,
                str(m.ugraph),
            )
