"""The benchmark of sizes, as far as a machine without a GPU can run it."""

import argparse
import json

from mirage_hf.errors import Rejected
from mirage_hf.pipeline import outcome
from mirage_hf.search.lowering import lower
from scripts import bench_sizes


def test_a_size_is_benchmarked_to_the_end(on_cpu, monkeypatch):
    monkeypatch.setitem(bench_sizes.MLP_WIDTHS, 32, 64)
    for name in bench_sizes.BLOCKS:
        record = {"name": name} | bench_sizes.bench(
            name, 3, 32, argparse.Namespace(tune="never", rounds=3)
        )
        assert record["contenders"][outcome.LIBRARY]["us"] == 1.0 and name in bench_sizes.line(
            record
        )
        json.dumps(record)


def test_sizes_are_programs_and_their_summary_names_the_worst():
    for hidden in bench_sizes.MLP_WIDTHS:
        for name in bench_sizes.BLOCKS:
            assert not isinstance(lower(bench_sizes.block_of(name, hidden).program(3)), Rejected)
    results = {outcome.LIBRARY: {"us": 6.0}, outcome.OURS: {"us": 8.0}}
    assert (
        bench_sizes.ratio(results, outcome.OURS) == 0.75
        and bench_sizes.ratio(results, outcome.LIBRARY) == 1.0
    )
    assert bench_sizes.ratio({outcome.LIBRARY: {"us": 6.0}}, outcome.OURS) is None
    told = bench_sizes.summary(
        [
            {"name": "a", "ratio": 0.75, "runs": outcome.OURS},
            {"name": "b", "ratio": 1.0},
            {"name": "c", "failed": "x"},
        ]
    )
    assert (
        told["worst"] == {"name": "a", "ratio": 0.75}
        and told["slower"] == ["a"]
        and told["untold"] == ["c"]
    )
