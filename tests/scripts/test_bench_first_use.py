"""The benchmark of first uses, on a CPU."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import mirage_hf
from mirage_hf.graph import strided
from scripts import bench_first_use, benching, report, report_tables


def test_each_row_has_a_fresh_process_with_empty_caches(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benching, "DEVICE", "cpu")
    out = tmp_path / "2026-11-26-first.json"
    options = "--rows smoke:never,smoke:eager --layers 1 --prompt 4 --tokens 2 --calls 2"
    bench_first_use.main([*options.split(), "--device", "cpu", "--json", str(out)])
    raw = json.loads(out.read_text())
    ours, stock = raw["rows"]
    assert ours["optimize_s"] > 0 and "optimize_s" not in stock
    # with a cache, nothing would be searched or verified
    assert {"search", "verify"} & ours["parts_s"].keys()
    assert stock["parts_s"].keys() <= {"outside"}  # a call of a few ms may not be looked at
    whole = ours["optimize_s"] + ours["first_generate_s"]
    assert sum(ours["parts_s"].values()) == pytest.approx(whole)
    assert all(row["start_s"] > 0 and row["ms_per_token"]["runs"] == 2 for row in raw["rows"])
    assert capsys.readouterr().out.count("ms a token") == 2

    results = report.results_of(raw, out.name, "abc1234")
    table = report_tables.first_uses(results)
    assert '| smoke, 1 layer | `optimize(tune="never")` |' in table
    assert "| smoke, 1 layer | eager | – |" in table


def test_linears_may_hold_codes_and_batches_many_sequences(monkeypatch, tmp_path):
    monkeypatch.setattr(benching, "DEVICE", "cpu")
    out = tmp_path / "2026-11-26-first.json"
    options = "--rows smoke:never --weights fp8 --batch 2 --prompt 4 --tokens 2 --calls 1"
    bench_first_use.main([*options.split(), "--device", "cpu", "--json", str(out)])
    raw = json.loads(out.read_text())
    (row,) = raw["rows"]
    assert "peak_mib_over_weights" in row and row["peak_mib_over_weights"] is None
    results = report.results_of(raw, out.name, "abc1234")
    assert {(r.subject, r.batch) for r in results} == {("smoke, fp8", 2)}
    assert "| smoke, fp8, 2 sequences |" in report_tables.first_uses(results)


def test_a_model_in_codes_is_optimized_for_its_batch(monkeypatch):
    done = []
    model = SimpleNamespace(generate=lambda ids, **_: done.append(tuple(ids.shape)))
    monkeypatch.setattr(benching, "DEVICE", "cpu")
    monkeypatch.setattr(bench_first_use, "random_model", lambda *_, **__: model)
    monkeypatch.setattr(bench_first_use, "with_codes", lambda _, kind: done.append(kind))
    monkeypatch.setattr(mirage_hf, "optimize", lambda _, **options: done.append(options))
    monkeypatch.setattr(bench_first_use, "peak_of_allocations", lambda: lambda: 7.0)
    args = dict(one="smoke:never", began=0.0, layers=2, weights="nf4", batch=3, prompt=4)
    row = bench_first_use.measure(SimpleNamespace(**args, tokens=2, calls=1))
    assert done == ["nf4", {"batch_sizes": (3,), "tune": "never"}, *[(3, 4)] * 3]
    assert row["model"] == "smoke, 2 layers, nf4" and row["peak_mib_over_weights"] == 7.0


@pytest.mark.parametrize("rows", ["smoke", "smoke:fast", "smoke:auto:never"])
def test_a_row_names_a_model_and_a_way(rows, capsys):
    with pytest.raises(SystemExit):
        bench_first_use.main(["--rows", rows])
    assert "give MODEL:WAY" in capsys.readouterr().err


def test_time_counts_for_the_folder_that_a_stack_entered_first():
    frames = []

    class Spy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            frames.append(sys._getframe())
            return super().__torch_function__(function, types, args, kwargs or {})

    strided.copied(torch.ones(2).as_subclass(Spy))
    assert bench_first_use.part_of(frames[0]) == "graph"
    assert bench_first_use.part_of(sys._getframe()) == "outside"
    assert bench_first_use.part_of(None) == "outside"
