"""cuBLAS keeps a workspace for each stream: captures need one at a time, and leave none behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mirage_hf.decode import graphs
from mirage_hf.tune import measure

pytestmark = pytest.mark.gpu

#: Bytes that a graph may hold besides a workspace.
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
def test_a_graph_outlives_the_workspaces_of_others(which: str) -> None:
    x = torch.randn(256, 256, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)

    def product(*_: object) -> None:
        torch.mm(x, x, out=y)

    if which == "tuner":
        captured = measure.capture(product, [()], 1)  # its graph records its events
        graph = captured.graph
    else:
        graph, _ = graphs.capture(product, x.device, None)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    wanted = x @ x
    y.zero_()
    graph.replay()
    torch.testing.assert_close(y, wanted)
