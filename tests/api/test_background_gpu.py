"""optimize(tune="background") with the real tuner on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mirage_hf.api import optimize, restore
from tests.helpers.tiny_models import prompt, tiny, twin_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
SIZES = dict(
    hidden_size=256,
    intermediate_size=640,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=2,
    initializer_range=0.05,
)
GREEDY = dict(do_sample=False, max_new_tokens=24)


def test_kernels_are_measured_by_another_process_and_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    stock = tiny("llama", **SIZES).to("cuda")
    model = optimize(twin_of(stock), tune="background")
    tuning = model.mirage.tuning
    ids = prompt().cuda()
    expected = stock.generate(ids, **GREEDY)
    calls = 0
    while not tuning.wait(0.05):
        assert torch.equal(model.generate(ids, **GREEDY), expected)
        calls += 1
        assert calls < 5000, tuning.status
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    report = model.mirage.report
    assert "is done" in report.tuning and "not put in place" not in report.tuning, report
    assert all(row.time_us is not None for row in report.swapped), report
    assert report.decode is not None and report.decode["step: all by kernels"] == calls + 1
    digests = {row.digest for row in report.rows}
    restore(model)
    optimize(model)  # nothing is measured again
    assert {row.source for row in model.mirage.report.swapped} == {"cache"}
    assert {row.digest for row in model.mirage.report.rows} == digests
