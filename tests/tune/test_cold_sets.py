"""The sets of inputs over which measurements rotate."""

from dataclasses import replace

import pytest
import torch

import mirage_hf as mi
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.strided import blank, in_turns
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


def alone(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, in memory of its own."""
    return blank(x.shape, x.stride(), x.dtype, x.device).copy_(x)


def test_tensors_that_fill_each_others_gaps_share_memory() -> None:
    both = torch.arange(48).view(2, 3, 2, 4)
    first, second = in_turns([alone(both[:, :, 0]), alone(both[:, :, 1])])
    assert first.equal(both[:, :, 0]) and second.equal(both[:, :, 1])
    assert second.data_ptr() - first.data_ptr() == 4 * first.element_size()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3, 4), (20, 8, 1)), ((2, 3, 4), (12, 4, 1)), ((2, 3, 4), (48, 16, 1)), ((3,), (0,))],
)
def test_others_stay_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Rows of another expert would lie in the gaps, or there are none, or they are longer."""
    given = [blank(shape, strides, torch.int64, "cpu").fill_(n) for n in (1, 2)]
    found = in_turns(given)
    assert all(x is y for x, y in zip(given, found, strict=True))


def test_copies_of_a_set_share_memory_as_the_first_one_does() -> None:
    g = KernelGraph()
    tensors = [g.new_input((4, 8), "float32", (16, 1), constant=True) for _ in range(2)]
    g.mark_output(g.add(*tensors))
    first = random_inputs(g, "cpu")
    for inputs in cold_sets(g, first, 3):
        a, b = inputs
        assert b.data_ptr() - a.data_ptr() == 8 * 4
        assert a.equal(first[0]) and b.equal(first[1])
