"""The benchmark of background tuning, on a CPU with a tuner whose timings are made up."""

from __future__ import annotations

import json
import sys

import pytest

from mirage_hf.pipeline import background, resolver
from scripts import bench_background, benching
from tests.helpers import fake_tuner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tuners share memory on Linux")


def test_it_times_calls_before_beside_and_after_a_tuner(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benching, "DEVICE", "cpu")
    monkeypatch.setattr(resolver, "can_measure", lambda device, backend: True)
    monkeypatch.setattr(background, "START", fake_tuner.START)
    monkeypatch.setenv("FAKE_TUNER", "{}")
    monkeypatch.setenv("MIRAGE_HF_THREADS", "2")
    out = tmp_path / "out.json"
    options = "--model smoke --layers 1 --prompt 4 --tokens 2 --calls 3 --after 2 --pause 0.05"
    bench_background.main([*options.split(), "--json", str(out)])
    row = json.loads(out.read_text())
    assert row["status"].startswith("tuning in the background is done")
    assert 0 < row["beside_s"] <= row["longest_s"] and row["after_s"] > 0
    assert row["calls"] and "loss beside a tuner" in capsys.readouterr().out
