"""Programs and files with extreme numbers end in an answer or in an error that says what to do."""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from dataclasses import replace

import pytest

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.graph import json_format
from mirage_hf.pipeline.outcome import LIBRARY, library_wins
from tests.helpers.hostile_entries import STRANGE, leaves
from tests.helpers.thorough import count
from tests.helpers.ugraphs import rms_norm_linear
from tests.zoo.test_zoo import entry


@pytest.fixture
def usual_recursion_limit():
    """Set Python's own limit, because libraries of other tests raise it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion_limit")
@pytest.mark.parametrize("ops", [300, 400])
def test_many_ops_in_a_row_are_searched(ops):
    g = mi.new_kernel_graph()
    x = g.new_input((4, 64), mi.float32)
    for n in range(ops):
        x = g.silu(x) if n % 2 else g.add(x, 1.0)
    g.mark_output(x)
    result = mi.superoptimize(g, cache=False, backend="cpu", time_limit=20)
    assert len(result) and "too deeply" in str(result.report)


@pytest.mark.parametrize("eps", [1 << 64, 1 << 63, 1 << 900])
def test_huge_integers_are_no_attributes(eps):
    g = mi.new_kernel_graph()
    with pytest.raises(errors.GraphError, match=r"eps is an integer of .* bits.*give a float"):
        g.rms_norm(g.new_input((4, 64), mi.float32), eps=eps)


@pytest.mark.parametrize("dims", [(1, 1 << 62), (1 << 31, 1 << 31), (1 << 62, 1 << 62)])
def test_tensors_that_no_memory_holds_are_errors(dims):
    with pytest.raises(errors.GraphError, match=r"2\^63"):
        mi.new_kernel_graph().new_input(dims, mi.float16)


def test_results_that_no_memory_holds_are_errors():
    g = mi.new_kernel_graph()
    x, y = (g.new_input(dims, mi.float16) for dims in ((1 << 32, 8), (8, 1 << 32)))
    with pytest.raises(errors.GraphError, match=r"2\^63 bytes"):
        g.matmul(x, y)


def test_dims_of_31_bits_are_searched():
    g = mi.new_kernel_graph()
    g.mark_output(g.silu(g.rms_norm(g.new_input((1 << 31, 64), mi.float16))))
    result = mi.superoptimize(g, cache=False, backend="cpu", time_limit=20)
    assert result[0].is_fused


def test_a_time_limit_holds_for_a_thousand_outputs():
    g = mi.new_kernel_graph()
    x = g.new_input((4, 64), mi.float32)
    for n in range(1000):
        g.mark_output(g.mul(x, n + 2.0))
    started = time.monotonic()
    result = mi.superoptimize(g, cache=False, backend="cpu", time_limit=1)
    assert result.report.stop == "time" and len(result)
    assert time.monotonic() - started < 15  # 3 s on a machine that does nothing else


def test_an_entry_with_a_library_timing_only_is_no_reason_for_the_library():
    made = entry()
    (library,) = (t for t in made.timings if t.name == "library")
    assert library.name == LIBRARY
    assert library_wins(replace(made, timings=(library,))) == ""


def test_edited_files_are_format_errors():
    data = json.loads(rms_norm_linear().to_json())
    for number in range(count(3000, 400)):
        rng = random.Random(number)
        edited = copy.deepcopy(data)
        place = edited
        *path, last = rng.choice(leaves(edited))
        for key in path:
            place = place[key]
        place[last] = rng.choice(STRANGE)
        try:
            json_format.ugraph_from_dict(edited, "file")
        except errors.FormatError as e:
            assert "file" in str(e)


@pytest.mark.parametrize("joined", ["q", "", 3, [], {}])
def test_a_joined_axis_that_is_none_is_a_format_error(joined):
    data = json.loads(rms_norm_linear().to_json())
    (block,) = (n["block"] for n in data["kernels"]["nodes"] if n["op"] == "customized")
    block["inputs"][0] |= {"joined": joined, "sources": [0, 1], "sizes": [32, 32]}
    with pytest.raises(errors.FormatError):
        json_format.ugraph_from_dict(data)
    block["inputs"][0] |= {"sources": [0], "sizes": []}
    with pytest.raises(errors.FormatError):
        json_format.ugraph_from_dict(data)
