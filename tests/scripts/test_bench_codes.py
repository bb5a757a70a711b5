"""The benchmark of weights in codes, as far as a machine without a GPU can run it."""

import argparse
import json

import pytest

from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.search.lowering import lower
from mirage_hf.tune import stream_schedules
from scripts import bench_codes, benching


def options(**changes) -> argparse.Namespace:
    sizes = dict(hidden=256, keys=128, width=512, group=64, weights="int4")
    limits = dict(search_seconds=20.0, schedules=2, climb=0, replays=3, streams=False)
    return argparse.Namespace(**sizes | limits | changes)


@pytest.mark.parametrize("name", bench_codes.BLOCKS)
@pytest.mark.parametrize("weights", ["int4", *bench_codes.CODINGS])
def test_blocks_are_programs(name, weights):
    if (name, weights) == ("qkv", "hqq"):
        with pytest.raises(SystemExit, match="run q, k and v apart"):
            bench_codes.BLOCKS[name](1, options(weights=weights))
        return
    for rows in (1, 16):
        program = bench_codes.BLOCKS[name](rows, options(weights=weights))
        assert not isinstance(lower(program), Rejected)


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_block_is_benchmarked_to_the_end(monkeypatch, weights):
    """Without a GPU, the cost model ranks what the tuner would measure."""
    monkeypatch.setattr(benching, "DEVICE", "cpu")
    monkeypatch.setattr(stream_schedules, "can_stream", lambda: True)
    chosen = options(weights=weights)
    program = bench_codes.BLOCKS["output"](1, chosen)
    record = {"name": "output:1"} | bench_codes.bench(program, chosen)
    kinds = [c["kind"] for c in record["candidates"]]
    if weights == "int4":
        assert {*kinds} == {*bench_codes.KINDS, "library"}
    assert kinds.count(bench_codes.TRIPS) <= 4 and kinds.count(bench_codes.STAGED) <= 2
    trips = record["best"][bench_codes.TRIPS]
    assert trips["schedules"][0]["steps_per_trip"] > 1
    shown = bench_codes.line(record)
    assert trips["text"] in shown and "best trips: " in shown
    json.dumps(record)


def test_wrong_and_unchecked_kernels_are_not_the_best():
    candidates = [
        {"kind": "trips", "status": "rejected", "us": 1.0, "estimate_us": 1.0},
        {"kind": "trips", "status": "too slow", "us": 2.0, "estimate_us": 1.0},
        {"kind": "trips", "status": "measured", "us": 4.0, "estimate_us": 1.0},
        {"kind": "trips", "status": "measured", "us": 3.0, "estimate_us": 2.0},
    ]
    assert bench_codes.best(candidates, "trips") is candidates[3]
    assert bench_codes.best(candidates, "staged") is None


def test_kinds_tell_how_many_blocks_share_columns():
    """A climb may reach clusters of other sizes than those that are tried first."""
    for count, kind in (1, "streams"), (2, "streams, clusters of 2"), (4, "streams, clusters of 4"):
        schedule = Schedule({}, cuda=True, persistent_blocks=8, cooperating_blocks=count)
        assert bench_codes.kind_of(None, schedule) == kind
    assert {"streams", "streams, clusters of 2"} < {*bench_codes.KINDS}
