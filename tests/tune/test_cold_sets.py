"""The sets of inputs over which measurements rotate."""

from dataclasses import replace

import pytest
import torch

import mirage_hf as mi
from mirage_hf.tune import measure
from mirage_hf.tune.cold_sets import cold_sets, read_bytes
from mirage_hf.tune.measure import random_inputs
from tests.helpers import indexed_programs as programs
from tests.helpers.indexed_programs import Mixture

SMALL = Mixture(1, 2, 8, 32, 16)


def named(g, inputs) -> dict[str, torch.Tensor]:
    return {t.name: x for t, x in zip(g.inputs, inputs, strict=True)}


def test_sets_of_other_programs_are_copies():
    g = mi.new_graph()
    g.mark_output(g.matmul(g.new_input((2, 8)), g.new_input((8, 4), constant=True)))
    inputs = random_inputs(g, "cpu")
    assert read_bytes(g, inputs) == sum(x.nbytes for x in inputs)
    sets = cold_sets(g, inputs, 3)
    assert sets[0][1] is inputs[1] and all(torch.equal(s[1], inputs[1]) for s in sets)
    assert len({x.data_ptr() for s in sets for x in s}) == 6


def test_sets_choose_different_elements_of_shared_weights():
    g = programs.gate_up(SMALL)
    inputs = random_inputs(g, "cpu")
    expert = 2 * 16 * 32 * 4
    assert read_bytes(g, inputs) == 2 * expert + 32 * 4 + 2 * 4
    sets = [named(g, s) for s in cold_sets(g, inputs, 6)]
    chosen = [tuple(s["e"].flatten().tolist()) for s in sets]
    assert {n for pair in chosen[:4] for n in pair} == set(range(8))
    assert chosen[4:] == chosen[:2]
    assert sets[0]["e"].dtype is sets[1]["e"].dtype is torch.int32
    first = [s["gate"].data_ptr() for s in sets]
    assert len(set(first[:4])) == 1 and len(set(first[4:])) == 1 and first[0] != first[4]
    assert len({s["x"].data_ptr() for s in sets}) == 6


def test_weights_of_which_all_elements_are_chosen_are_copied():
    g = programs.gate_up(replace(SMALL, tokens=4))
    inputs = random_inputs(g, "cpu")
    assert read_bytes(g, inputs) == sum(x.nbytes for x in inputs)
    sets = [named(g, s) for s in cold_sets(g, inputs, 3)]
    assert len({s["gate"].data_ptr() for s in sets}) == 3


def test_codes_behind_a_take_are_shared_too():
    g = programs.coded(1, 1, 16, 128, 32)
    inputs = random_inputs(g, "cpu")
    sets = [named(g, s) for s in cold_sets(g, inputs, 2)]
    for name in ("codes", "scales"):
        assert sets[0][name] is sets[1][name]
    assert sets[0]["x"] is not sets[1]["x"]


def test_a_weight_that_is_also_read_whole_is_copied():
    g = mi.new_graph()
    w = g.new_input((8, 4, 4), "float32", constant=True)
    e = g.new_input((2,), "int32")
    g.mark_output(g.take(w, e), g.exp(w))
    inputs = random_inputs(g, "cpu")
    assert read_bytes(g, inputs) == sum(x.nbytes for x in inputs)
    assert cold_sets(g, inputs, 2)[1][0] is not inputs[0]


@pytest.mark.gpu
def test_a_chain_keeps_no_index():
    g = programs.gate_up(replace(programs.QWEN))
    sets = measure.cold_inputs(g, "cuda")
    chain = measure.Chain(g, sets)
    assert len({tuple(s[1].flatten().tolist()) for s in chain._sets}) > 1
