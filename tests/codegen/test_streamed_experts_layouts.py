"""Kernels that stream the codes of chosen experts of random layouts give the results of float64."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.streams import layout
from mirage_hf.codegen.streams.helpers import HELPERS
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.errors import CodegenError
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from tests.helpers.cuda_on_cpu import CXX, run_kernel
from tests.helpers.streamed_experts import SMALL_FLOAT, Experts, random_experts

needs_compiler = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")

#: Random layouts are compiled so many at a time.
AT_ONCE = 12
SEEDS = range(2 * AT_ONCE)
MORE_STARTS = (pytest.param(n * AT_ONCE, marks=pytest.mark.thorough) for n in (2, 3, 4))


def check(experts: list[Experts], folder: Path) -> None:
    """Compare the results of kernels, in some orders of threads, with those of float64."""
    kernels = [e.kernel(f"kernel_{n}") for n, e in enumerate(experts)]
    source = "\n".join(k.source for k in kernels)
    for n, (e, kernel) in enumerate(zip(experts, kernels, strict=True)):
        for order in (0, 1, 2 + n, 100 + n):
            got = e.run(kernel, f"kernel_{n}", order, folder, source)
            assert not isinstance(got, str), f"{e}: {got}"
            assert e.error(got) <= 1, f"{e}, order {order}"


@needs_compiler
@pytest.mark.parametrize("first", [0, AT_ONCE, *MORE_STARTS])
def test_random_experts_give_the_results_of_float64(first, tmp_path):
    check([random_experts(seed) for seed in range(first, first + AT_ONCE)], tmp_path)


def test_random_experts_have_layouts_of_each_kind():
    found = [random_experts(seed) for seed in SEEDS]
    layouts = [e.layout for e in found]
    codes = Counter(e.codes for e in found)
    assert len(codes) == 6 and codes[SMALL_FLOAT] >= 6
    assert {e.group for e in found} == {32, 64, 128}
    assert {bool(e.square) for e in found} == {True, False}
    assert {e.warps for e in found} == {1, 2, 4, 8}
    assert {layout.rows for layout in layouts} == {8, 16}
    assert {e.index_dtype for e in found} == {"int32", "int64"}
    assert {1, 9} <= {e.experts for e in found} and {1, 5} <= {e.chosen for e in found}
    assert {e.index_axes for e in found} == {("b",), ("s",), ("b", "s")}
    missing = [sum(not 0 <= i < e.experts for i in e.index) for e in found]
    assert any(0 < m < len(e.index) for m, e in zip(missing, found, strict=True))
    assert any(m == len(e.index) for m, e in zip(missing, found, strict=True))
    assert any(max(Counter(e.index).values()) > 1 for e in found)
    for has in ("has_gate", "has_bias", "has_weights", "walks_groups", "scales_first", "gap"):
        assert {bool(getattr(e, has)) for e in found} == {True, False}, has
    assert {layout.teams for layout in layouts} == {1, 2}
    assert {layout.has_whole_tiles for layout in layouts} == {True, False}
    lie = {(e.is_apart, e.is_swapped) for e, y in zip(found, layouts, strict=True) if y.is_in_turns}
    assert len(lie) >= 3
    assert max(layout.chunks for layout in layouts) >= 3


#: Experts that are chosen: those of six that are there, others, and such as repeat.
ROUTINGS = [(5, 0, 3), (3, 3, 3), (-1, 4, 6), (6, -(2**31), 7), (2**32, 2**63 - 1, -(2**63))]

#: A kernel of each kind, of six experts.
KINDS = {
    "rows": Experts(experts=6, chosen=3, has_gate=True, has_bias=True, in_turns=True),
    "pieces": Experts(
        experts=6, chosen=0, pieces=3, has_bias=True, has_weights=True, walks_groups=False
    ),
    "teams": Experts(experts=6, chosen=3, columns=320, tile=16, warps=8, blocks=2),
    "float8": Experts(
        "float8_e4m3fn", "float32", 6, chosen=0, pieces=3, square=16, has_weights=True
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("first_bytes", [1, 48 << 10])
def test_any_experts_may_be_chosen(name, first_bytes, tmp_path, monkeypatch):
    """One chunk is under way until the ring is full, or all are."""
    monkeypatch.setattr(layout, "_FIRST_BYTES", first_bytes)
    kernel = KINDS[name].kernel()
    for index, order in itertools.product(ROUTINGS, (0, 1, 7)):
        e = replace(KINDS[name], index=index)
        got = e.run(kernel, "kernel", order, tmp_path)
        assert not isinstance(got, str) and e.error(got) <= 1, (index, order)


@needs_compiler
def test_rows_of_one_product_may_have_gaps_that_the_other_fills(tmp_path):
    """Gate and up lie in turns, but experts of one are twice as far apart: no copy brings both."""
    e = Experts(columns=320, experts=3, index=(2, 1), has_gate=True, in_turns=True, tile=16)
    g, names = KernelGraph(), [t.name for t in e.graph.inputs]
    experts, *others = e.graph.inputs[names.index("codes1")].strides
    wide = (2 * experts, *others)
    tensors = [
        g.new_input(
            t.dims,
            t.dtype,
            wide if t.name == "codes1" else t.strides,
            name=t.name,
            constant=t.constant,
        )
        for t in e.graph.inputs
    ]
    g.mark_output(*g.customized(tensors, e.graph.ops[0].block))
    kernel = write_stream_kernel(place_kernels(UGraph(g, g))[0], e.schedule, "kernel")
    found = dict(zip(names, e.inputs, strict=True))
    words = 2 * experts * 3 // 8  # eight codes each
    storage = torch.zeros(words, dtype=torch.int32)
    for name, start, step in (("codes0", 0, experts), ("codes1", 320, 2 * experts)):
        old = found[name]
        strides = (step // 8, *old.stride()[1:])
        found[name] = storage[start // 8 :].as_strided(old.shape, strides).copy_(old)
    index, *read = found.values()
    got = torch.full(e.exact.shape, torch.nan)
    sizes = kernel.grid, kernel.threads, kernel.shared
    assert not run_kernel(kernel.source, "kernel", *sizes, [*read, index, got], 0, tmp_path)
    assert e.error(got) <= 1


@pytest.mark.parametrize("codes", [SMALL_FLOAT, "uint4", "int8", "float8_e4m3fn"])
def test_kernels_with_powers_of_two_come_with_what_they_call(codes):
    for group in 32, 64:
        kernel = Experts(codes, "float8_e8m0fnu", group=group).kernel()
        called = {*re.findall(r"\w*power_of_two\w*(?=\()", kernel.source)}
        assert len(called) == 1
        assert f"float {called.pop()}(" in HELPERS + kernel.helpers


@needs_compiler
@pytest.mark.parametrize("codes", ["int4", "uint4", "uint8"])
def test_codes_without_scales_of_missing_experts_count_as_0(codes, tmp_path):
    """The value of a missing input is 0. Code 0 may stand for another number: no kernel then."""
    e = Experts(codes, "", index=(2, 9))
    if codes != "int4":
        with pytest.raises(CodegenError, match="an index and no scale, and code 0 is not 0"):
            e.kernel()
        return
    got = e.run(e.kernel(), "kernel", 0, tmp_path)
    assert not isinstance(got, str) and e.error(got) <= 1
