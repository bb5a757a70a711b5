"""Random block graphs and searched programs as Triton, through the interpreter.

The text must give what the executor gives, and compile without a GPU.
"""

import pytest

from tests.helpers import triton_interpreter
from tests.helpers.thorough import count

pytest.importorskip("triton")
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.graph.ugraph import UGraph
from tests.helpers import random_block_graphs

COUNT, FOUND, SEED = count(300, 50), count(320, 12), 5000


def test_random_block_graphs_through_the_interpreter():
    result = triton_interpreter.run(
        f"from tests.helpers import random_block_graphs; random_block_graphs.main({COUNT}, {SEED})"
    )
    assert result["ran"] == COUNT and not result["wrong"], result["wrong"]
    enough = {
        "with_dots": 0.1,
        "with_eight": 0.03,
        "with_parts": 0.2,
        "with_shifts": 0.2,
        "with_splits": 0.1,
    }
    assert all(result[kind] >= share * COUNT for kind, share in enough.items()), result


def test_random_block_graphs_compile_ahead_of_time(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    for _, graph, schedule in random_block_graphs.random_cases(count(24, 12), SEED):
        (kernel,) = compiler.ahead_of_time(triton.generate(UGraph(graph, graph), [schedule]), 90)
        assert kernel.asm["cubin"]


def test_what_is_found_for_random_programs_through_the_interpreter():
    """On a GPU, tests/codegen/test_random_gpu.py runs 320 of them."""
    result = triton_interpreter.run(
        f"from tests.helpers import random_searched_kernels; random_searched_kernels.main({FOUND}, "
        "0)"
    )
    assert result["ran"] == FOUND and not result["wrong"], result["wrong"]
    assert result["with_splits"] >= FOUND / 6 and result["with_dots"] >= FOUND / 6
