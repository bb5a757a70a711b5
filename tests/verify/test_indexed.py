"""Proofs about indices: what is drawn for them, and that no wrong choice of elements is proven."""

from collections import Counter

import numpy as np
import pytest
import torch

import mirage_hf as mi
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.verify import field_proof, numeric
from mirage_hf.verify.case_inputs import make_inputs
from mirage_hf.verify.degrees import Degrees
from mirage_hf.verify.field import FieldAlgebra
from mirage_hf.verify.numeric_cases import Case
from mirage_hf.verify.random_bounds import draw_all, draw_index
from mirage_hf.verify.verdict import Accepted
from tests.helpers import indexed_programs as programs
from tests.helpers import mutants, reference_executor
from tests.helpers.indexed_programs import SEARCH, Mixture
from tests.helpers.thorough import count

#: As many tokens as chosen experts, and as many experts as columns and as rows, so that a wrong
#: index or dim still fits.
SQUARE = Mixture(3, 3, 6, 6, 6)

#: How many mutants of each program are tried.
COUNT = count(100_000, 60)


def two_indices():
    """Return a product whose weight one index chooses, and whose bias another one chooses."""
    g = mi.new_graph()
    x, e = g.new_input((3, 1, 1, 6), "float32"), g.new_input((3, 3), "int32")
    other = g.new_input((3, 3), "int32")
    w = g.new_input((6, 6, 6), "float32", constant=True)
    b = g.new_input((6, 6), "float32", constant=True)
    y = g.matmul(x, g.permute(g.take(w, e), (0, 1, 3, 2)))
    g.mark_output(g.add(y, g.reshape(g.take(b, other), (3, 3, 1, 6))))
    return g


PROGRAMS = {
    "gate and up": lambda: programs.gate_up(SQUARE),
    "down": lambda: programs.down(SQUARE),
    "experts": lambda: programs.whole(SQUARE),
    "two indices": two_indices,
    "rows": lambda: programs.rows_of_table(6, 6, 6),
    "columns": lambda: programs.columns(6, 6, 6),
}


def inputs_of(g, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t.dims, generator=generator, dtype=torch.float64)
        if t.dtype.is_floating_point
        else torch.randint(0, 6, t.dims, generator=generator)
        for t in g.inputs
    ]


class Judge:
    """Tell whether a mutant computes the same, by an executor that shares no code with proofs."""

    def __init__(self, g):
        self.inputs = [inputs_of(g, seed) for seed in range(3)]
        self.want = [reference_executor.run(g, x) for x in self.inputs]

    def differs(self, ugraph: UGraph) -> bool:
        return any(
            mutants.distance(ugraph, x, want) > mutants.DIFFERS
            for x, want in zip(self.inputs, self.want, strict=True)
        )


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_wrong_choice_is_proven(name):
    g = PROGRAMS[name]()
    judge, kinds = Judge(g), Counter()
    rng = np.random.default_rng(0)
    for ranked in search(g, SEARCH)[0][: count(8, 2)]:
        assert not judge.differs(ranked.ugraph)
        assert isinstance(field_proof.prove(ranked.ugraph), Accepted)
        found = list(mutants.mutants(ranked.ugraph))
        # all wrong indices, and some of the others
        of_index = [m for m in found if "index" in m.kind]
        others = [m for m in found if "index" not in m.kind]
        some = rng.permutation(len(others))[:COUNT]
        for m in (*of_index, *(others[n] for n in some)):
            if judge.differs(m.ugraph):
                kinds[m.kind] += 1
                verdict = field_proof.prove(m.ugraph)
                assert not isinstance(verdict, Accepted), (m.kind, m.where, m.ugraph.kernels)
    wanted = {"index chooses along another dim"}
    wanted |= set() if name in ("rows", "columns") else {"transposed index"}
    wanted |= {"another index"} if name == "two indices" else set()
    assert kinds.keys() >= wanted, kinds


def test_indices_are_drawn_in_several_ways():
    rng = np.random.default_rng(0)
    drawn = [draw_index(rng, 8, (2, 4), kind) for kind in range(8)]
    assert all(x.shape == (2, 4) and x.min() >= 0 and x.max() < 8 for x in drawn)
    assert [len(np.unique(x)) for x in (drawn[1], drawn[5])] == [8, 8]
    assert [len(np.unique(x)) for x in (drawn[3], drawn[7])] == [1, 1]
    assert all(len(np.unique(drawn[k])) > 1 for k in (0, 2, 4, 6))
    assert draw_index(rng, 1, (3,), 1).tolist() == [0, 0, 0]


def test_an_index_of_several_takes_is_in_range_of_all():
    g = mi.new_graph()
    e = g.new_input((50,), "int32")
    for size in (9, 4, 7):
        g.take(g.new_input((size, 2), "float32"), e)
    for first in range(4):
        rng = np.random.default_rng(first)
        (drawn,) = draw_all(g, lambda n: (50,), lambda b: 0, rng, first).values()
        assert drawn.max() <= 3


def test_proofs_with_an_index_try_several_draws():
    ugraph = search(programs.gate_up(SQUARE), SEARCH)[0][0].ugraph
    verdict = field_proof.prove(ugraph, trials=1)
    assert isinstance(verdict, Accepted) and verdict.detail == "8 trials"


@pytest.mark.parametrize("index", [[0, 2, 2], [[1, 0], [2, 1]], [3, -1, 0]])
@pytest.mark.parametrize("dim", [0, 1])
def test_fields_take_what_torch_takes(index, dim):
    algebra, at = FieldAlgebra(0, copies=2), np.array(index)
    x = algebra.random((3, 3, 2))
    y = algebra.take(x, at, dim)
    zero = (at < 0) | (at >= 3)
    for ours, whole in ((y.p, x.p), (y.q, x.q)):
        want = whole.take(at.clip(0, 2), dim)
        mask = zero.reshape(*[1] * dim, *zero.shape, *[1] * (want.ndim - dim - zero.ndim))
        assert (ours == np.where(mask, 0, want)).all()
    degrees = Degrees()
    assert degrees.take(degrees.variable((3, 3, 2)), at, dim).shape == y.p.shape


def test_numeric_cases_choose_random_elements():
    g = programs.gate_up(Mixture(8, 4, 16, 8, 4))
    inputs = make_inputs(g, Case("random"))
    assert inputs[1].dtype is torch.int32 and 5 < len(inputs[1].unique()) <= 16
    ugraph = search(g, SEARCH)[0][0].ugraph
    assert isinstance(numeric.judge_by_torch(ugraph, numeric.NumericChecks(), False), Accepted)
    assert all(y.isfinite().all() for y in run_kernel_graph(g, inputs))
