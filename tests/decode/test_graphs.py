"""What a capture changes: numbers that a model's code puts on the GPU are written by kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mirage_hf.decode.graphs import NumbersFilledIn


@pytest.mark.parametrize("number", [0.0, -3.5, 7, True, float("-inf")])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16}, {"device": "cpu"}])
def test_a_number_is_filled_in(number: Any, options: dict[str, Any]) -> None:
    wanted = torch.tensor(number, **options)
    with NumbersFilledIn():
        found = torch.tensor(number, **options)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_the_host_is_not_read_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **k: called.append(a) or full(*a, **k))
    with NumbersFilledIn():
        torch.tensor(2.0)
        torch.tensor([1.0, 2.0])
        torch.tensor(2.0, requires_grad=True)
    assert called == [((), 2.0)]


@pytest.mark.gpu
def test_a_graph_captures_masks_that_are_added() -> None:
    from mirage_hf.decode.graphs import capture

    mask = torch.zeros(2, 3, dtype=torch.bool, device="cuda")
    out = torch.empty(2, 3, device="cuda")

    def run() -> None:
        zero = torch.tensor(0.0, device=mask.device)
        out.copy_(torch.where(mask, zero, float("-inf")))

    graph, _ = capture(run, mask.device, None)
    mask[:, 1] = True
    graph.replay()
    assert torch.equal(out == 0, mask)
