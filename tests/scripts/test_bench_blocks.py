"""The benchmark of blocks, as far as a machine without a GPU can run it."""

import argparse
import json
from dataclasses import replace

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.gpus import H200
from mirage_hf.tune.ranking import rank_by_estimate
from scripts import bench_blocks, block_rows
from tests.helpers.small_blocks import SMALL


def test_a_row_is_cut_from_the_size_that_it_is_tuned_at(on_cpu):
    sizes = {"kv_heads": 2, "d": 16}
    row = replace(
        block_rows.LONG["attention_d64_8k:1"],
        sizes=tuple({**sizes, "keys": 96}.items()),
        tuned_at=tuple({"keys": 40}.items()),
    )
    args = argparse.Namespace(search_seconds=20.0, ugraphs=1, schedules=2, replays=1)
    for _ in range(2):  # the tuned kernels are kept
        record: dict = {}
        assert len(bench_blocks.find_ours(row, args, record)) == 1
        assert (
            "(4, 96, 16)" not in record["ours"]["ugraph"]
            and "(2, 96, 16)" in record["ours"]["ugraph"]
        )


@pytest.mark.parametrize("block", ["gated_delta", "mamba2"])
def test_a_step_of_a_recurrence_is_one_kernel_that_may_write_its_state_in_place(block):
    program = block_rows.ROWS[f"{block}:1"].program(**SMALL[block])
    state, new = program.inputs[0], program.outputs[0]
    assert (state.dims, state.dtype) == (new.dims, new.dtype) and state.dtype == torch.float32
    assert [t.dims for t in program.inputs].count(state.dims) == 1
    found = bench_blocks.search_and_verify(program, bench_blocks.SearchOptions(time_limit=60))
    first = bench_blocks.promising(found.candidates)[0].ugraph
    ranked = rank_by_estimate([first], H200, per_graph=12)
    best = next(c for c in ranked if not c.is_library)
    generated = triton.generate(best.ugraph, best.schedules)
    assert len(compiler.ahead_of_time(generated, 90)) == first.num_kernels == 1
    assert (0, 0) in generated.in_place


def test_large_results_of_all_calls_are_kept():
    kept = []
    call = bench_blocks.keeping(lambda inputs: [inputs[0] + 1], kept)
    results = [call([torch.zeros(2)]) for _ in range(3)]
    assert all(a is b for a, b in zip(results, kept, strict=True))
    large = [r.name for r in block_rows.ROWS.values() if bench_blocks.keeps_results(r.program())]
    assert large == [f"{block}:{n}" for block in ("gated_delta", "mamba2") for n in (1, 16, 64)]


@pytest.mark.parametrize("name", ["norm_linear:1", "mla_decode:1", "gated_delta:1"])
def test_a_block_is_benchmarked_to_the_end(on_cpu, name):
    row = replace(block_rows.ROWS[name], sizes=tuple(SMALL[name.split(":")[0]].items()))
    args = argparse.Namespace(
        search_seconds=20.0, ugraphs=2, schedules=2, replays=1, cap=60.0, rounds=3, compile=False
    )
    record = {"name": name} | bench_blocks.bench(row, args)
    contenders = record["contenders"]
    assert (
        "failed" in contenders["ours"]
    )  # a Triton kernel needs a GPU; the others are timed all the same
    assert contenders["eager"]["us"] == 1.0 and contenders["eager"]["error"] < 0.01
    assert (
        record["best_rival"] == "eager"
        and not record["reached"]
        and record["tune"]["candidates"]
        and record["ours"]["ugraph"]
    )
    json.dumps(record)
    assert "ours: failed" not in bench_blocks.line(record) and "missed" in bench_blocks.line(record)


def made_up(name: str) -> dict:
    """Return a row with invented numbers."""
    row = block_rows.ROWS[name]
    contenders = {
        "ours": {"us": 10.0, "whole": True},
        "eager": {"us": 20.0, "whole": True},
        "eager compiled": {"failed": "TimeoutError: x"},
        "core": {"us": 8.0, "whole": False},
        "liger": {"absent": "liger_kernel is not installed"},
    }
    floor = row.floor_us(row.program())
    return {
        "name": name,
        "block": row.block,
        "rows": row.rows,
        "floor_us": floor,
        "target_us": row.target_us,
        "contenders": contenders,
        "ours": {"schedules": ["k:128 m:16"]},
    } | bench_blocks.judged(contenders, floor, row.target_us)


def test_a_row_is_judged_by_whole_rivals_only():
    row = made_up("norm_linear:1")
    assert row["best_rival"] == "eager" and row["over_best_rival"] == 2.0 and row["reached"]
    line = bench_blocks.line(row)
    slow = row | {"name": "lora:1", "reached": False, "over_best_rival": 0.5}
    assert bench_blocks.summary([row, slow, {"name": "lora:16", "failed": "x"}]).splitlines() == [
        "1 of 2 targets reached",
        "a rival is faster: lora:1 (0.50 × eager)",
        "failed: lora:16",
    ]
    assert (
        "(core) 8.00" in line
        and "liger: liger_kernel is not installed" in line
        and "TimeoutError" in line
        and "reached" in line
    )
    missing = made_up("norm_linear:1") | {"refused": "no kernel"}
    del missing["contenders"]["ours"], missing["share_of_floor"], missing["over_best_rival"]
    missing |= bench_blocks.judged(missing["contenders"], 1.0, 2.0)
    assert not missing["reached"] and "no kernel of ours: no kernel" in bench_blocks.line(missing)


def test_attention_of_one_row_behind_norms_is_tried_with_keys_read_once():
    """Its estimates were once three times its time (66.7 µs measured on an H200).

    The tuner then tried no kernel that reads keys and values once, and took 80 µs.
    """
    program = bench_blocks.ROWS["qk_norm_attention:8"].program()
    found = bench_blocks.search_and_verify(program, bench_blocks.SearchOptions(time_limit=60))
    ranked = rank_by_estimate(
        [c.ugraph for c in bench_blocks.promising(found.candidates)[:4]], H200, per_graph=12
    )
    first = next(c for c in ranked if not c.is_library)
    assert {"k", "v"} <= {
        t.name for op in first.ugraph.block_ops[:1] for t in op.inputs
    } and 60 < first.estimate_us < 100
