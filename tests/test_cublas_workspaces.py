"""torch keeps a workspace of cuBLAS for each stream. Captures need one, and leave none behind."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mirage_hf.decode import graphs
from mirage_hf.tune import measure

pytestmark = pytest.mark.gpu

#: Bytes that may be allocated besides a workspace.
LITTLE = 1 << 20


@pytest.mark.parametrize("which", ["tuner", "decoding"])
def test_a_capture_needs_one_workspace(which: str) -> None:
    x = torch.randn(256, 256, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)

    def product() -> None:
        torch.mm(x, x, out=y)

    captures: dict[str, Callable[[], object]] = {
        "tuner": lambda: measure.time_run(lambda _: product(), [()]),
        "decoding": lambda: graphs.capture(product, x.device, None),
    }
    torch._C._cuda_clearCublasWorkspaces()
    without = torch.cuda.memory_allocated()
    product()
    workspace = torch.cuda.memory_allocated() - without
    assert workspace > 4 * LITTLE
    torch.cuda.reset_peak_memory_stats()
    captures[which]()
    assert torch.cuda.max_memory_allocated() <= without + workspace + LITTLE
    assert torch.cuda.memory_allocated() <= without + LITTLE


@pytest.mark.parametrize("which", ["tuner", "decoding"])
def test_a_graph_uses_no_workspace_of_another_graph(which: str) -> None:
    x = torch.randn(64, 1 << 16, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(1 << 16, 64, dtype=torch.bfloat16, device="cuda")
    y = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")

    def product(*_: object) -> None:
        torch.mm(x, w, out=y)

    def captured() -> Any:
        if which == "tuner":
            return measure.capture(product, [()], 1)  # its graph records its events
        return SimpleNamespace(graph=graphs.capture(product, x.device, None)[0])

    # torch has 32 streams, so the last capture runs on that of the first
    captures = [captured() for _ in range(33)]
    last = captures.pop()
    captures.clear()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    wanted = x @ w
    y.zero_()
    last.graph.replay()
    torch.testing.assert_close(y, wanted)
