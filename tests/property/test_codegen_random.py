"""Random block graphs: Triton text through the interpreter = the block graph's executor, and it compiles with no GPU."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
pytest.importorskip("triton")
import random_blocks

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.graph.ugraph import UGraph

COUNT, SEED = 80, 5000


def test_random_block_graphs_through_the_interpreter(tmp_path):
    environment = os.environ | {"MIRAGE_HF_CACHE": str(tmp_path), "TRITON_INTERPRET": "1"}
    command = [sys.executable, random_blocks.__file__, str(COUNT), str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["ran"] == COUNT and not result["wrong"], result["wrong"]
    assert result["with_dots"] >= 8 and result["with_parts"] >= 16 and result["with_shifts"] >= 16 and result["with_splits"] >= 8


def test_random_block_graphs_compile_ahead_of_time(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    for _, graph, schedule in random_blocks.random_cases(24, SEED):
        kernel, = compiler.ahead_of_time(triton.generate(UGraph(graph, graph), [schedule]), 90)
        assert kernel.asm["cubin"]


def test_what_is_found_for_random_programs_through_the_interpreter(tmp_path):
    """On the GPU 320 of them (tests/gpu/test_random_gpu.py)."""
    environment = os.environ | {"MIRAGE_HF_CACHE": str(tmp_path), "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(Path(random_blocks.__file__).with_name("random_searched.py")), "24", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["ran"] == 24 and not result["wrong"], result["wrong"]
    assert result["with_splits"] >= 4 and result["with_dots"] >= 4
