"""What is searched whole, and what by windows. The search and its verification do no work twice."""

from __future__ import annotations

import pytest

import mirage_hf as mi
from mirage_hf.formats.gguf_blocks import LAYOUTS, Blocks
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.pipeline import search_and_verify
from mirage_hf.pipeline.windows import graph_key
from mirage_hf.search import engine, units
from mirage_hf.search.cut import cut
from mirage_hf.search.join import join
from mirage_hf.search.library_cost import VIEWS
from mirage_hf.search.lowering import lower
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.search_report import StopReason
from mirage_hf.verify.accept import Acceptance
from tests.helpers import programs
from tests.helpers.decoder_layers import decoder_layer


@pytest.fixture
def lowered(monkeypatch) -> list[KernelGraph]:
    """Return a list that gets the graphs that are lowered, in order."""
    graphs: list[KernelGraph] = []

    def recorded(graph: KernelGraph):
        graphs.append(graph)
        return lower(graph)

    for module in (search_and_verify, engine, units):
        monkeypatch.setattr(module, "lower", recorded)
    return graphs


@pytest.mark.parametrize("name", ["gated_mlp", "attention_decode"])
def test_a_program_is_lowered_once(lowered, name):
    result = mi.superoptimize(programs.build(mi, name), backend="cpu", cache=False)
    assert len(result) and len(lowered) == 1


def test_a_program_that_cannot_be_lowered_is_lowered_once_as_a_whole(lowered):
    g = mi.new_kernel_graph()
    x = g.new_input((4, 6))
    g.mark_output(g.exp(g.reshape(g.silu(x), (6, 4))))
    mi.superoptimize(g, backend="cpu", cache=False)
    assert sum(len(graph.ops) == len(g.ops) for graph in lowered) == 1


def test_no_part_of_a_larger_program_is_lowered_twice(lowered):
    """A unit is lowered to see whether a kernel may compute it.

    Each different window is lowered once to search it.
    """
    g = decoder_layer(mi, hidden=32, heads=4, kv=2, ffn=48, past=6)
    parts = cut(g)
    layouts = sum(op.name in (*VIEWS, "concat") for op in g.ops)
    of_units = len(lowered)
    assert 0 < of_units <= len(parts.units) + layouts
    graphs = {graph_key(w.graph): w.graph for w in parts.windows if w.graph is not None}
    joined = sum(join(graph) is not None for graph in graphs.values())
    lowered.clear()
    mi.superoptimize(g, backend="cpu", cache=False)
    assert len(lowered) == 1 + of_units + len(graphs) + joined


def gated_mlp_of_q4_k() -> KernelGraph:
    """Return gate, up and activation with weights in blocks of GGUF's Q4_K: 35 ops."""
    layout = next(layout for layout in LAYOUTS.values() if layout.name == "Q4_K")
    coding = layout.coding(Blocks(256, 512, layout.codes, layout.bytes), mi.bfloat16)
    g = mi.new_kernel_graph()
    x = g.new_input((1, 512), mi.bfloat16)
    gate, up = (g.matmul(x, coding.write(g)[1]) for _ in range(2))
    g.mark_output(g.mul(g.silu(gate), up))
    return g


def test_ops_that_decode_constants_do_not_split_a_program_into_windows():
    program = gated_mlp_of_q4_k()
    assert len(program.ops) > search_and_verify.MAX_WHOLE_OPS
    found = search_and_verify.search_and_verify(program, SearchOptions(time_limit=30))
    assert found.candidates[0].ugraph.num_kernels == 1


def test_a_program_of_many_ops_is_searched_by_windows_if_no_result_is_accepted(monkeypatch):
    def nothing(*args, **kwargs) -> Acceptance:
        return Acceptance((), (), None, 0.0)

    monkeypatch.setattr(search_and_verify, "accept", nothing)
    program = gated_mlp_of_q4_k()
    found = search_and_verify.search_and_verify(program, SearchOptions(time_limit=30))
    assert found.candidates and found.candidates[0].ugraph.num_kernels > 1
    assert found.report.reason.startswith("no result of the whole search was accepted")
    few = programs.build(mi, "gated_mlp")
    assert not search_and_verify.search_and_verify(few, SearchOptions(time_limit=30)).candidates


def test_no_windows_are_searched_after_an_interruption(monkeypatch):
    def nothing(*args, **kwargs) -> Acceptance:
        return Acceptance((), (), None, 0.0)

    monkeypatch.setattr(search_and_verify, "accept", nothing)
    monkeypatch.delattr(search_and_verify, "search_windows")
    options = SearchOptions(time_limit=30)
    found = search_and_verify.search_and_verify(gated_mlp_of_q4_k(), options, lambda *_: True)
    assert not found.candidates and found.report.stop is StopReason.INTERRUPTED
