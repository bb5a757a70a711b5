"""Random DAGs of realistic shapes, for which nobody wrote rules.

They come back fused, and every result is right.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import mirage_hf as mi
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted
from tests.helpers import mutants, reduced_ugraphs
from tests.helpers.thorough import count

DAGS = count(200, 20)
FUSED = 0.8
SEARCH = SearchOptions(time_limit=0.6, threads=1, max_candidates=6, max_cuts=2, max_kernels=3)
TOLERANCE = 1e-6

ROWS = (1, 2, 4, 8, 16)
COLUMNS = (64, 128, 192, 256, 320, 384, 512)
UNARY = ("silu", "gelu", "sigmoid", "tanh", "relu", "exp", "square", "neg")


def dag(rng: random.Random) -> KernelGraph:
    """Return a DAG of 3 to 10 ops with one or more outputs.

    It has rows × columns, matrices, norms, softmax, scalar work, residuals and reductions.
    """
    g = KernelGraph()
    rows, columns = rng.choice(ROWS), rng.sample(COLUMNS, rng.randint(1, 3))
    tensors: list[DTensor] = [g.new_input((rows, rng.choice(columns)))]
    most = rng.randint(3, 10)

    def shared(x: DTensor) -> DTensor:
        """Return another tensor like x: an existing one, or a new input."""
        old = [t for t in tensors if t.dims == x.dims and t is not x]
        return rng.choice(old) if old and rng.random() < 0.5 else g.new_input(x.dims)

    while sum(op.name != "permute" for op in g.ops) < most:
        x = (
            tensors[-1] if rng.random() < 0.7 else rng.choice(tensors)
        )  # mostly continue with the last result, as models do
        n = x.dims[1]
        kind = rng.choice(
            (
                "matmul",
                "matmul",
                "linear",
                "unary",
                "unary",
                "residual",
                "gate",
                "number",
                "vector",
                "norm",
                "softmax",
                "reduce",
            )
        )
        if kind == "matmul":
            y = g.matmul(x, g.new_input((n, rng.choice(columns))))
        elif kind == "linear":
            y = g.matmul(x, g.permute(g.new_input((rng.choice(columns), n)), (1, 0)))
        elif kind == "unary":
            y = getattr(g, rng.choice(UNARY))(x)
        elif kind == "residual":
            y = getattr(g, rng.choice(("add", "sub")))(x, shared(x))
        elif kind == "gate":
            y = g.mul(x, shared(x))
        elif kind == "number":
            y = getattr(g, rng.choice(("add", "mul")))(x, rng.choice((0.5, 2.0, -1.0, 0.125)))
        elif kind == "vector":
            y = getattr(g, rng.choice(("add", "mul")))(x, g.new_input((1, n)))
        elif kind == "norm":
            weight = g.new_input((1, n)) if rng.random() < 0.5 else None
            y = g.layer_norm(x, weight) if rng.random() < 0.3 else g.rms_norm(x, weight)
        elif kind == "softmax":
            y = g.softmax(x)
        else:
            y = getattr(g, rng.choice(("sub", "mul")))(
                x, g.reduction(x, 1, rng.choice(("sum", "mean", "max")))
            )
        tensors.append(y)
    used = {x.index for op in g.ops for x in op.inputs if isinstance(x, DTensor)}
    made = [op.outputs[0] for op in g.ops if op.name != "permute"]
    outputs = [t for t in made if t.index not in used]
    inner = [t for t in made if t.index in used]
    if inner and rng.random() < 0.25:  # an output that the rest of the program reads too
        outputs.append(rng.choice(inner))
    g.mark_output(*outputs)
    return g


def provable(ugraph: UGraph) -> bool:
    """Return whether `prove` can prove a µGraph.

    This can go when it proves all of them (several kernels, running maxima).
    """
    return ugraph.num_kernels == 1 and all(
        a.shift is None for op in ugraph.block_ops for s in op.block.stages for a in s.accumulators
    )


def check(g: KernelGraph, seed: int) -> Counter[str]:
    """Search, and check every result."""
    found, report = search(g, SEARCH)
    small = reduced_ugraphs.sizes(g)
    program = reduced_ugraphs.program(g, small)
    inputs = [x / 2 for x in mutants.float64_inputs(program, seed)]
    want = mutants.reference(program, inputs)
    counts = Counter({"programs": 1, "returned": len(found), report.stop: 1})

    def right(f: UGraph, pieces: int) -> bool:
        if (
            reduced_ugraphs.distance(
                reduced_ugraphs.run(reduced_ugraphs.ugraph(f, small), inputs, pieces), want
            )
            < TOLERANCE
        ):
            return True
        # the sum of a constant along an axis is a multiple of its length. Such a µGraph is right
        # only at its own sizes.
        counts["right at whole sizes only"] += 1
        whole = [x / 2 for x in mutants.float64_inputs(g, seed)]
        exact = mutants.reference(g, whole)
        if any(float(y.abs().max()) < 1e-9 for y in exact):
            return True  # the sum of x − mean(x) is zero except for rounding
        return (
            reduced_ugraphs.distance(reduced_ugraphs.run(f.kernels, whole, pieces), exact)
            < TOLERANCE
        )

    sane = all(bool(y.isfinite().all()) and 1e-9 < float(y.abs().max()) < 1e9 for y in want)
    counts["without numbers"] = len(found) * (not sane)
    for rank, f in enumerate(found):
        for pieces in (2, 1, 3) if rank == 0 else (2,):
            assert not sane or right(f.ugraph, pieces), (pieces, str(f.ugraph))
        if provable(f.ugraph):
            verdict = prove(f.ugraph, trials=1, target=1.0)
            counts["proven" if isinstance(verdict, Accepted) else "refused"] += 1
            assert (
                isinstance(verdict, Accepted)
                or "divides by zero" in verdict.reason
                or counts["right at whole sizes only"]
            ), (verdict, str(f.ugraph))
    counts["fused"] = bool(found) and found[0].ugraph.num_kernels < library_ugraph(g).num_kernels
    return counts


def test_random_dags_come_back_in_fewer_kernels_and_all_are_right():
    counts: Counter[str] = Counter()

    @settings(
        max_examples=DAGS,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=(Phase.explicit, Phase.generate),
    )
    @given(
        st.randoms(use_true_random=True)
    )  # hypothesis draws the seed: programs drawn piece by piece resemble each other
    def one(rng):
        g = dag(rng)
        note(str(g))
        counts.update(check(g, counts["programs"]))

    one()
    assert counts["programs"] >= DAGS and counts["returned"] > 2 * counts["programs"], counts
    assert (
        counts["without numbers"] + counts["right at whole sizes only"] < 0.05 * counts["returned"]
    ), counts
    assert counts["fused"] >= FUSED * counts["programs"], counts


def test_reduced_programs_are_the_programs_with_composites_written_out():
    """If no size is reduced, the reduced program is the program itself."""
    g = KernelGraph()
    x, w, gamma = (
        g.new_input((4, 8), mi.float32),
        g.new_input((8, 6), mi.float32),
        g.new_input((1, 8), mi.float32),
    )
    g.mark_output(
        g.softmax(g.matmul(g.layer_norm(g.rms_norm(x, gamma), gamma), w)), g.reduction(x, 1, "mean")
    )
    inputs = mutants.float64_inputs(g)
    same = {d: d for t in g.inputs for d in t.dims}
    assert (
        reduced_ugraphs.distance(
            mutants.reference(reduced_ugraphs.program(g, same), inputs),
            mutants.reference(g, inputs),
        )
        < 1e-12
    )
