"""`mirage_hf::run` with Triton kernels in graphs of inductor, also replayed as CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.pipeline import torch_op
from mirage_hf.tune import space

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found() -> Any:
    g = mi.new_graph()
    x, gamma = (
        g.new_input((4, 256), "float16", name="x"),
        g.new_input((1, 256), "float16", name="gamma"),
    )
    g.mark_output(
        g.matmul(
            g.rms_norm(x, gamma, 1e-6),
            g.new_input((256, 512), "float16", strides=(1, 256), name="w"),
        )
    )
    return mi.superoptimize(g, time_limit=20)


def sharing(found: list[Any]) -> list[Any]:
    """Return µGraphs whose loops two blocks can share, with schedules that use counters."""
    chosen = [
        (
            u,
            [
                next((s for s in space.schedules(op) if s.cooperating_blocks == 2), None)
                for op in place_kernels(u)
            ],
        )
        for u in found
    ]
    return [replace(u, schedules=tuple(schedules)) for u, schedules in chosen if all(schedules)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_inductor_runs_the_kernel(found: Any, mode: str, split: bool) -> None:
    """Inductor allows nothing to stay in the memory of its graph."""
    torch.compiler.reset()
    fused = [u for u in found if u.num_kernels == 1 and u.is_fused]
    fused = (sharing(fused) if split else fused)[0]
    run = torch.compile(
        lambda x, gamma, w: fused([x * 2, gamma, w.t()])[0] + 1, mode=mode, fullgraph=True
    )
    x, gamma, w = (
        torch.randn(*dims, device="cuda", dtype=torch.float16)
        for dims in ((4, 256), (1, 256), (512, 256))
    )
    for _ in range(4):
        x = x + 1
        torch.testing.assert_close(run(x, gamma, w).clone(), fused([x * 2, gamma, w.t()])[0] + 1)


def test_inputs_at_odd_addresses_are_taken_as_they_are(found: Any) -> None:
    fused = next(u for u in found if u.is_fused)
    torch_op.register("odd", fused, fused, "cuda")
    storage = torch.randn(4 * 256 + 1, device="cuda", dtype=torch.float16)
    x, gamma = storage[1:].view(4, 256), torch.ones(1, 256, device="cuda", dtype=torch.float16)
    w = torch.randn(512, 256, device="cuda", dtype=torch.float16).t()
    assert torch.equal(torch_op.run([x, gamma, w], "odd")[0], fused([x.clone(), gamma, w])[0])
    with pytest.raises(errors.InputError, match="this kernel runs on cuda"):
        torch_op.run([x.cpu(), gamma.cpu(), w.cpu()], "odd")
