"""One entry of the op table is an op everywhere: search, proof, generated code, models."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import mirage_hf as mi
from mirage_hf.match.matcher import match
from mirage_hf.ops import scalar, table
from mirage_hf.patterns import PATTERNS
from tests.helpers.tiny_models import tiny


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


@pytest.fixture(autouse=True)
def entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "OPS", dict(table.OPS))
    table._elementwise(
        "quick_gelu",
        "x · sigmoid(1.702 x)",
        lambda x: x / (1.0 + scalar.exp(-1.702 * x)),
        quick_gelu,
        activation=True,
    )


def program() -> mi.KernelGraph:
    g = mi.new_graph()
    x = g.new_input((2, 64), "float32", name="x")
    gate, up = (g.new_input((64, 48), "float32", name=name) for name in ("gate", "up"))
    g.mark_output(g.mul(g.quick_gelu(g.matmul(x, gate)), g.matmul(x, up)))
    return g


def test_kernels_are_found_and_right() -> None:
    best = program().superoptimize()[0]
    assert best.is_fused
    x, gate, up = torch.randn(2, 64), torch.randn(64, 48), torch.randn(64, 48)
    (y,) = best([x, gate, up])
    torch.testing.assert_close(y, quick_gelu(x @ gate) * (x @ up), rtol=1e-4, atol=1e-4)


def test_code_is_generated(tmp_path: Path) -> None:
    best = program().superoptimize()[0]
    text = best.generate_triton_program(tmp_path / "kernel.py").read_text(encoding="utf-8")
    defined = {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
    assert "quick_gelu" in defined, "the reference program calls it"
    assert "expf" in best.generate_cuda_program(tmp_path / "kernel.cu").read_text(encoding="utf-8")


def test_models_with_it_have_kernels() -> None:
    found = match(tiny("llama", hidden_act="quick_gelu"), list(PATTERNS))
    gated = next(p for p in found.modules[0].parts if p.role == "gated")
    assert dict(gated.block.sizes)["activation"] == "quick_gelu"


def test_an_entry_that_generated_files_could_not_call_is_rejected_at_once() -> None:
    with pytest.raises(mi.errors.GraphError, match="its oracle has no name"):
        table._elementwise("halved", "x / 2", lambda x: x / 2.0, lambda x: x / 2)
