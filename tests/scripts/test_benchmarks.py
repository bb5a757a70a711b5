"""The benchmark scripts, as far as a machine without a GPU can run them."""

import argparse
import copy
import importlib
import json
import math
import multiprocessing
import os
import sys
import time
import weakref
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
)

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.gpus import H200
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.pipeline import outcome, resolver
from mirage_hf.search.lowering import lower
from mirage_hf.tune import measure
from mirage_hf.tune.ranking import rank_by_estimate
from mirage_hf.verify.case_inputs import make_inputs
from mirage_hf.verify.numeric_cases import Case
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import key_of
from mirage_hf.zoo.store import Store
from scripts import (
    bench_blocks,
    bench_chain,
    bench_choices,
    bench_generate,
    bench_sizes,
    benching,
    block_rows,
    build_zoo,
    coded_models,
    configs,
    rivals,
)
from scripts.survey_configs import small_config
from tests.helpers import ugraphs

SMALL = {
    "int4_linear": {"k": 256, "n": 32},
    "norm_linear": dict(k=32, n=24),
    "norm_linear_6144": dict(k=32, n=40),
    "gated_mlp": dict(k=32, n=24),
    "lora": dict(k=32, n=24, r=4),
    "lora_256": dict(k=16, n=24, r=4),
    "gqa_decode": dict(keys=24, d=16),
    "gqa_paper": dict(q=5, keys=24, d=16),
    "qk_norm_attention": dict(keys=24, d=16),
    "mla_decode": dict(heads=2, keys=24, latent=16, nope=8, rope=4, value=8),
    "ntrans": dict(n=40),
    "gated_delta": dict(key_heads=16, key=8, value=16),
    "mamba2": dict(heads=4, head_dim=8, state=16),
}

TINY = configs.Sizes("llama", 32, 64, 2, 4, 2, 8, 48, 1e4, True, 1e-5, 64)


@pytest.mark.parametrize("row", block_rows.ROWS.values(), ids=lambda r: r.name)
def test_every_row_is_a_program_that_can_be_searched(row):
    program = row.program()
    assert not isinstance(lower(program), Rejected)
    assert 0 < row.floor_us(program) < row.target_us
    assert sum(r.whole for r in row.rivals) >= 1 and len({r.name for r in row.rivals}) == len(
        row.rivals
    )


def test_rows_that_read_weights_say_that_they_are_constant():
    counts = {"norm_linear": 1, "gated_mlp": 2, "lora": 3, "mla": 2}
    for row in block_rows.ROWS.values():
        weights = [t for t in row.program().inputs if t.strides and t.strides[-1] != 1]
        wanted = sum(count for name, count in counts.items() if row.block.startswith(name))
        assert all(t.constant for t in weights) and len(weights) == wanted


@pytest.mark.parametrize(
    "row",
    [r for r in block_rows.ROWS.values() if r.rows <= 2 or r.block == "lora_256"],
    ids=lambda r: r.name,
)
def test_rivals_compute_what_the_program_does(row):
    program = row.program(rows=min(row.rows, 2), **SMALL[row.block])
    drawn = make_inputs(program, Case("random"))
    inputs = [x.double() if x.is_floating_point() else x for x in drawn]
    exact = run_kernel_graph(program, inputs, torch.float64)
    for rival in row.rivals:
        if rival.needs:
            assert rival.absent == (f"{rival.needs} is not installed" if rival.absent else "")
            continue
        (entrant,) = bench_blocks.entrants_of(rival, compiled=False)
        got = entrant.run(entrant.prepare(inputs))
        if rival.whole:
            torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)
        assert all(torch.isfinite(y).all() for y in got)


def test_long_rows_ask_for_their_part_of_the_bandwidth_and_are_checked_batch_by_batch(monkeypatch):
    assert len(block_rows.LONG) == 18 and not block_rows.LONG.keys() & block_rows.ROWS.keys()
    assert all(
        row.target_us >= row.floor_us(row.program()) / block_rows.LONG_SHARE
        for row in block_rows.LONG.values()
    )
    row = replace(
        block_rows.LONG["attention_d128_8k:8"],
        rows=3,
        sizes=(("kv_heads", 2), ("keys", 24), ("d", 16)),
    )
    inputs = make_inputs(row.program(), Case("random"))
    (at_once,) = bench_blocks.in_float64(row, inputs)
    monkeypatch.setattr(bench_blocks, "AT_ONCE_BYTES", 0)
    torch.testing.assert_close(bench_blocks.in_float64(row, inputs)[0], at_once)


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


def test_a_rival_that_is_wrong_is_not_timed():
    exact = torch.randn(8, 8)
    assert benching.error_of([exact.half()], [exact]) < 1e-3
    for wrong in (exact.half() * 1.1, exact.half()[:4], torch.full((8, 8), torch.nan).half()):
        with pytest.raises(ValueError, match="wrong result"):
            benching.error_of([wrong], [exact])
    with pytest.raises(ValueError, match="2 results"):
        benching.error_of([exact.half()] * 2, [exact])


def test_a_float32_state_is_held_to_more_than_the_bfloat16_result_beside_it():
    exact = torch.randn(8, 8)
    result = exact.bfloat16()
    assert 1e-4 < benching.error_of([exact, result], [exact, exact]) < 0.01
    for wrong in ([exact * 1.001, result], [exact, result * 1.1]):
        with pytest.raises(ValueError, match="wrong result"):
            benching.error_of(wrong, [exact, exact])


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


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_chain_is_the_same_as_programs_and_as_torch(rows, separate):
    chain = bench_chain.Chain(TINY, rows, separate)
    model = chain.model(layers=2, device="cpu")
    assert model.weight_bytes == 2 * (2 * (32 * 64 + 32 * 32 + 3 * 32 * 64 + 64) + 32 + 48 * 32)
    layers = tuple(bench_chain.Layer(*(t.double() for t in w)) for w in model.layers)
    wide = bench_chain.Model(layers, model.norm.double(), model.head.double())
    h = torch.randn(rows, 32).double()
    exact = bench_chain.in_float64(chain.programs())
    torch.testing.assert_close(chain.logits(h, model, exact), chain.torch_logits(h, wide))
    calls = {
        name: resolver.resolve(p, device="cpu", tune="never").run
        for name, p in chain.programs().items()
    }
    got = chain.layer(h.to(bench_chain.DTYPE), model.layers[0], calls)
    assert (
        benching.error_of(
            [got], [chain.layer(h.to(bench_chain.DTYPE).double(), model.layers[0], exact)]
        )
        < 0.05
    )


def test_a_zoo_gets_no_result_whose_candidates_failed(monkeypatch, tmp_path):
    """If every candidate failed, the library path would stay in the zoo for good."""
    ugraph = ugraphs.rms_norm_linear()
    fused = Entry(
        key_of(ugraph.program, "sm_90"),
        "program",
        ugraph,
        "# text\n",
        (Schedule({"m": 1, "n": 16, "k": 64}),),
        (),
        0.0,
        {"candidates": 3},
    )
    failed = replace(
        fused,
        ugraph=library_ugraph(ugraph.program),
        schedules=(),
        search={"candidates": 3, "reason": "no code for sm_90"},
    )
    for made, kept in ((failed, 0), (replace(failed, search={"candidates": 0}), 1), (fused, 1)):
        zoo = Store(tmp_path / str(kept) / made.pattern / str(len(made.schedules)), writable=True)
        monkeypatch.setattr(build_zoo, "make_entries", lambda *_, made=made: [made])
        (said,) = build_zoo.build([], torch.device("cpu"), zoo, SimpleNamespace(tune="auto"))
        assert len(list(zoo.entries())) == kept
        assert (
            "not kept, every candidate failed here" in said and "no code for sm_90" in said
        ) == (kept == 0), said


@pytest.fixture
def on_cpu(monkeypatch):
    """Run contenders once on the CPU. They take 1 µs, 2 µs, … a call, and no GPU is used."""

    def captured(run, sets):
        run(sets[0])
        return benching.Contender(SimpleNamespace(calls=1))

    def captured_chain(run, steps, reads):
        return benching.Contender(
            SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), calls=steps)
        ), run()

    def take_turns(contenders, rounds):
        for us, c in enumerate(contenders, 1):
            c.samples += [float(us)] * rounds

    monkeypatch.setattr(benching, "DEVICE", "cpu")
    monkeypatch.setattr(
        measure, "cold_inputs", lambda program, device: [make_inputs(program, Case("random"))]
    )
    monkeypatch.setattr(bench_chain, "captured_chain", captured_chain)
    for script in (bench_blocks, bench_chain, bench_sizes):
        monkeypatch.setattr(script, "take_turns", take_turns)
        monkeypatch.setattr(script, "captured", captured, raising=False)


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


def test_a_chain_is_benchmarked_to_the_end(on_cpu, monkeypatch, capsys):
    monkeypatch.setitem(bench_chain.MODELS, "tiny", TINY)
    args = argparse.Namespace(
        batch=2,
        qkv="joined",
        layers=None,
        tune="never",
        searched=False,
        compile=False,
        cap=60.0,
        steps=2,
        rounds=3,
    )
    record = bench_chain.bench("tiny", args)
    ours, eager = record["contenders"]["ours"], record["contenders"]["eager"]
    assert (
        ours["ms"] == 1e-3
        and eager["ms"] == 2e-3
        and ours["share_of_bandwidth"] == pytest.approx(2 * eager["share_of_bandwidth"])
    )
    assert max(c[e] for c in (ours, eager) for e in ("layer_error", "logits_error")) < 0.05
    assert "eager" in bench_chain.table(record) and "gate_up" in capsys.readouterr().out
    json.dumps(record)


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


def test_results_are_written_as_they_come_and_resumed(tmp_path, capsys):
    path, ran = tmp_path / "new" / "r.json", []

    def job(name, fails=False):
        ran.append(name)
        if fails:
            raise RuntimeError("no luck")
        return {"us": 1.0}

    jobs = {"a": lambda: job("a"), "b": lambda: job("b", fails=True), "c": lambda: job("c")}
    report = benching.Report(path, {"out": path, "rows": (1, 2), "seconds": math.inf})
    assert benching.run_all(report, {k: jobs[k] for k in "ab"}, benching.Budget(), str) == []
    written = json.loads(path.read_text())
    assert [r["name"] for r in written["rows"]] == ["a", "b"] and "no luck" in written["rows"][1][
        "failed"
    ]
    assert (
        written["options"] == {"out": "r.json", "rows": [1, 2], "seconds": None}
        and "torch" in written["machine"]
    )

    jobs["b"] = lambda: job("b")
    benching.run_all(benching.Report(path, {}, resume=True), jobs, benching.Budget(), str)
    assert ran == ["a", "b", "b", "c"]  # failed rows are tried again
    assert sorted(r["name"] for r in json.loads(path.read_text())["rows"]) == ["a", "b", "c"]
    assert benching.run_all(benching.Report(path, {}), jobs, benching.Budget(0.0), str) == [
        "a",
        "b",
        "c",
    ]
    assert "left out: a, b, c" in capsys.readouterr().out


def row_beside(seconds, fails=False):
    begun = time.time()
    time.sleep(seconds)
    if fails:
        raise ValueError("no such weights")
    with benching.alone():
        at = time.time()
        time.sleep(0.2)
        return {"begun": begun, "at": at, "end": time.time()}


def row_that_ends(how):
    if how == "exits":
        sys.exit("no weights here")
    if how == "is killed":
        os._exit(9)
    if how == "hangs":
        time.sleep(600)
    with benching.alone():
        os._exit(7)


@pytest.fixture
def forked(monkeypatch):
    """Fork processes instead of starting new ones, which import torch for seconds."""
    monkeypatch.setattr(
        benching.multiprocessing,
        "get_context",
        lambda how, get=multiprocessing.get_context: get("fork"),
    )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_rows_are_set_up_side_by_side_and_measured_alone(forked, tmp_path, capsys):
    """This holds too if one fails before its turn, because the others would wait for it."""
    report = benching.Report(tmp_path / "rows.json", {})
    report.rows.append({"name": "there"})
    jobs = {
        "there": None,
        "quick": partial(row_beside, 0.0),
        "slow": partial(row_beside, 1.0),
        "wrong": partial(row_beside, 0.5, True),
    }
    benching.run_side_by_side(report, jobs, 60.0, lambda row: f"{row['name']} shown")
    assert {r["name"] for r in json.loads((tmp_path / "rows.json").read_text())["rows"]} == set(
        jobs
    )
    assert (
        "no such weights" in report.get("wrong")["failed"]
        and "slow shown" in capsys.readouterr().out
    )
    first, second = sorted((report.get(name) for name in ("quick", "slow")), key=lambda r: r["at"])
    assert report.get("slow")["begun"] + 0.9 < first["at"] < first["end"] <= second["at"]


def test_a_row_beside_others_is_one_of_a_new_process(tmp_path, monkeypatch):
    """A process that has used a GPU cannot be forked."""
    text = """
import os
from scripts.benching import alone

def job():
    with alone():
        return dict(parent=os.getppid(), own=os.getpid())
"""
    (tmp_path / "jobs_beside.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    report = benching.Report(None, {})
    benching.run_side_by_side(
        report, {"row": importlib.import_module("jobs_beside").job}, 120.0, lambda row: ""
    )
    assert report.get("row")["parent"] == os.getpid() != report.get("row")["own"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_row_whose_process_ends_takes_no_other_row_with_it(forked):
    """A process may end for lack of the host's memory, before its turn or in it."""
    report = benching.Report(None, {})
    jobs = {how: partial(row_that_ends, how) for how in ("exits", "is killed", "in its turn")} | {
        "good": partial(row_beside, 0.5)
    }
    benching.run_side_by_side(report, jobs, 120.0, lambda row: "")
    assert report.get("good")["at"] and {
        how: report.get(how)["failed"][-11:] for how in jobs if how != "good"
    } == {"exits": "exit code 1", "is killed": "exit code 9", "in its turn": "exit code 7"}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_row_that_is_not_set_up_in_time_fails_alone(forked):
    report = benching.Report(None, {})
    jobs = {"late": partial(row_that_ends, "hangs"), "good": partial(row_beside, 0.0)}
    benching.run_side_by_side(report, jobs, 3.0, lambda row: "")
    assert report.get("late")["failed"] == "was not set up within 3 s" and report.get("good")["at"]


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": [{}]}'])
def test_a_file_that_is_no_report_is_not_resumed(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="no report to resume"):
        benching.Report(path, {}, resume=True)


def test_a_report_of_another_gpu_is_not_resumed(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(
        json.dumps({"machine": benching.machine() | {"gpu": "GPU of another"}, "rows": []})
    )
    with pytest.raises(SystemExit, match="GPU of another"):
        benching.Report(path, {}, resume=True)


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


def test_a_matrix_of_generate_is_measured_and_resumed(tmp_path, monkeypatch, capsys):
    path, ran = tmp_path / "m.json", []

    def bench(model, batch, prompt, args):
        ran.append((batch, prompt))
        if ran == [(1, 8), (2, 8)]:
            raise RuntimeError("out of luck")
        one = {"median": 1.0 * batch, "min": 1.0, "max": 2.0, "runs": 3}
        ours = asdict(bench_generate.Measured(ms_per_token=one, first_token_ms=one, step_ms=one))
        return {
            "model": model,
            "batch": batch,
            "prompt": prompt,
            "new": args.new,
            "floor_ms": 0.5,
            "peers": {
                "ours": ours,
                "compile": asdict(bench_generate.Measured(step_ms=one)),
                "static": asdict(bench_generate.Measured(failed="no")),
            },
        }

    monkeypatch.setattr(bench_generate, "bench", bench)
    for more, measured in (([], 1), (["--resume"], 2)):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "x",
                "--model",
                "smoke",
                "--batch",
                "1,2",
                "--prompt",
                "8",
                "--device",
                "cpu",
                "--json",
                str(path),
                *more,
            ],
        )
        bench_generate.main()
        assert len([r for r in json.loads(path.read_text())["rows"] if "peers" in r]) == measured
    assert ran == [(1, 8), (2, 8), (2, 8)] and "(step)" in capsys.readouterr().out


def test_rows_of_other_numbers_of_tokens_are_not_resumed(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    row = {"name": "smoke, batch 1, prompt 8", "new": 128, "layers": 2}
    path.write_text(json.dumps({"machine": benching.machine(), "rows": [row]}))
    for more in (["--new", "8"], ["--layers", "1"]):
        monkeypatch.setattr(
            sys,
            "argv",
            ["x", "--model", "smoke", "--device", "cpu", "--json", str(path), "--resume", *more],
        )
        with pytest.raises(SystemExit, match="of other --new or --layers: smoke, batch 1"):
            bench_generate.main()


def generate_options(**changes):
    """Return options of bench_generate for a CPU."""
    options = dict(
        device="cpu",
        layers=1,
        lora=0,
        images=0,
        weights="",
        times_only=False,
        new=3,
        peers=("eager", "static"),
        apart=False,
        cap=60,
        rounds=1,
        strict=True,
        side_by_side=False,
        long_calls=False,
        padded=False,
        draft="",
        draft_tokens=4,
        accept=None,
        adapt=False,
    )
    return argparse.Namespace(**(options | changes))


@pytest.mark.parametrize(
    "draft, accept, adapt",
    [
        ("lookup", None, False),
        ("smoke", None, False),
        ("smoke", 0.7, True),
        pytest.param("smoke", 0.7, False, marks=pytest.mark.thorough),
        pytest.param("lookup", 0.7, False, marks=pytest.mark.thorough),
        pytest.param("lookup", 0.7, True, marks=pytest.mark.thorough),
    ],
)
def test_drafts_are_timed_beside_stocks(draft, accept, adapt):
    peers = ("drafted", "assisted")
    drafting = {"draft": draft, "draft_tokens": 3, "accept": accept, "new": 40, "adapt": adapt}
    args = generate_options(**drafting, peers=peers, tune="never", times_only=True, cap=200)
    row = bench_generate.bench("smoke", 1, 4, args)
    assert all(row["peers"][peer]["ms_per_token"] for peer in peers), row["peers"]
    drafts = row["drafts"]
    if accept is None and draft == "smoke":  # the model drafts for itself
        assert drafts["drafts: taken"] >= 0.9 * (drafts["drafts: drafted"] - 3)
    if accept is not None:
        assert 0 < drafts["drafts: taken"] < drafts["drafts: drafted"]
        assert "tokens a step" in bench_generate.table(row)
    if not adapt:
        assert drafts["drafts: tokens of a step: 4"] > 0
        assert "drafts: tokens of a step: 1" not in drafts


def test_attention_by_name_that_torch_runs_is_no_peer():
    """Otherwise HF's static cache would be timed under our name.

    That happens on a CPU, and beyond the lengths of compiled graphs.
    """
    args = generate_options(peers=("attention",), strict=False)
    row = bench_generate.bench("smoke", 1, 4, args)
    assert (
        "no kernel of ours ran" in row["peers"]["attention"]["failed"]
        and "attention_report" not in row
    )


def test_attention_by_name_is_reported_row_by_row(monkeypatch):
    from mirage_hf.attention_interface import AttentionReport, KernelRow

    first = KernelRow("a", "cache", 1.0, 2.0, 256, 3, 4, True)
    before = AttentionReport((first,), {"many": 5}, {"x": "none"})
    now = AttentionReport(
        (first, replace(first, title="b", calls=7)),
        {"many": 6, "dropout": 1},
        {"x": "none", "y": "none"},
    )
    monkeypatch.setattr(bench_generate, "attention_report", lambda: now)
    told = bench_generate.attention_since(before)
    assert [(k.title, k.calls, k.calls_compiled) for k in told.kernels] == [("b", 7, 4)]
    assert told.by_torch == {"many": 1, "dropout": 1} and list(told.without) == ["y"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "script",
    [bench_blocks, bench_chain, bench_choices, bench_generate, bench_sizes],
    ids=lambda s: s.__name__,
)
def test_without_a_gpu_a_script_says_so(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script.__name__])
    with pytest.raises(SystemExit, match="no GPU here"):
        script.main()


@pytest.mark.parametrize(
    "options, says",
    [
        (["--batch", "0"], "argument --batch: '0': give numbers of 1 and more, as 1 or 1,8"),
        (["--prompt", "8,x"], "argument --prompt: '8,x'"),
        (["--images", "1"], "--images: smoke takes no images here"),
        (["--model", "gemma-3-4b", "--images", "1", "--padded"], "images are not padded"),
        (
            ["--model", "gemma-3-4b", "--images", "2", "--prompt", "2"],
            "2 images need 3 or more tokens of text",
        ),
    ],
    ids=str,
)
def test_bench_generate_says_what_is_wrong_with_its_options(
    options, says, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["bench_generate", "--model", "smoke", "--device", "cpu", *options]
    )
    with pytest.raises(SystemExit) as stopped:
        bench_generate.main()
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_rivals_that_are_not_installed_say_so():
    assert (
        rivals.Rival("x", torch.neg, needs="no_such_package").absent
        == "no_such_package is not installed"
    )
    assert rivals.Rival("x", torch.neg).absent == ""


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


@pytest.mark.parametrize("rank", [0, 4])
def test_a_zoo_has_the_blocks_of_adapters_too(rank):
    pytest.importorskip("peft")
    layer, head = build_zoo.blocks_of("smoke", "bfloat16", torch.device("cpu"), rank)
    sizes = [dict(block.sizes) for block in layer]
    assert [block.pattern.name for block in head] == ["rms_norm_linear"] and "lora" not in dict(
        head[0].sizes
    )
    assert sum(block.pattern.name == "lora_down" for block in layer) == (4 if rank else 0)
    assert sum(s.get("lora") is not None for s in sizes) == (4 if rank else 0)


@pytest.mark.parametrize("apart, long_calls", [(False, False), (True, False), (False, True)])
def test_peers_of_bench_generate_that_are_measured_apart_leave_nothing_behind(
    apart, long_calls, monkeypatch
):
    set_up, there, rounds, calls = bench_generate.set_up, [], [], []

    def watched(peer, model, *more):
        rounds.append([ref() is not None for ref in there])
        call, found = set_up(peer, model, *more)

        def counted(**options):
            calls.append((peer, *options))
            return call(**options)

        there.append(weakref.ref(call))
        return counted, found

    monkeypatch.setattr(bench_generate, "set_up", watched)
    args = generate_options(apart=apart, long_calls=long_calls)
    row = bench_generate.bench("smoke", 1, 4, args)
    assert (
        rounds == [[], [not apart]]
        and row.get("apart", False) == apart
        and row.get("long_calls", False) == long_calls
    )
    assert all(row["peers"][peer]["ms_per_token"]["runs"] == 1 for peer in args.peers)
    assert [call for call in calls if call[0] == "eager"] == [("eager",)] * (
        1 if long_calls else 2
    ) + [("eager", "streamer")]


def test_a_step_reads_no_more_of_a_sliding_layer_than_its_window():
    config = configs.config_of("gemma-3-1b", layers=6)
    assert (
        config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
        and config.num_attention_heads == 4
    )
    bases = [config.rope_parameters[kind]["rope_theta"] for kind in config.layer_types[-2:]]
    read = bench_generate.cache_bytes(
        SimpleNamespace(config=config, dtype=torch.bfloat16), [100, 2000]
    )
    assert bases == [1e4, 1e6] and read == 2 * (5 * (100 + 512) + 2100) * 256 * 2


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("falcon-h1-1.5b", 1_554_859_392),
        ("gemma-3-4b", 4_300_079_472),
        ("gpt2-xl", 1_557_611_200),
        ("lfm2-1.2b", 1_170_340_608),
        ("opt-1.3b", 1_315_758_080),
        ("qwen3-vl-2b", 2_127_532_032),
        ("whisper-large-v3", 1_543_490_560),
    ],
)
def test_models_have_as_many_weights_as_the_published_ones(name, published):
    model = configs.random_model(name, "meta")
    assert sum(p.numel() for p in model.parameters()) == published


def test_a_model_that_is_cut_down_keeps_layers_of_each_kind_and_little_of_its_vision():
    config = configs.config_of("qwen3.5-4b", layers=2)
    assert config.text_config.layer_types == ["linear_attention", "full_attention"]
    assert config.text_config.num_hidden_layers == config.vision_config.depth == 2
    assert configs.config_of("lfm2-1.2b", layers=2).layer_types == ["conv", "full_attention"]
    assert configs.config_of("lfm2-1.2b", layers=4).layer_types[2:] == ["full_attention", "conv"]
    assert configs.config_of("gemma-3-4b", layers=2).vision_config.num_hidden_layers == 2
    vision = configs.config_of("qwen3-vl-2b", layers=2).vision_config
    assert vision.depth == 2 and vision.deepstack_visual_indexes == [1]


def test_a_step_reads_no_weights_of_images():
    for name in ("gemma-3-4b", "qwen3-vl-2b", "qwen3.5-4b"):
        model = configs.random_model(name, "meta", layers=1)
        of_images = ("vision_tower", "visual", "multi_modal_projector")
        read = sum(
            p.nbytes
            for key, p in model.named_parameters()
            if not any(part in key for part in of_images)
        )
        assert configs.floor_bytes(model) == read


def test_a_step_reads_the_experts_that_are_chosen():
    model = configs.random_model("qwen3-30b-a3b", "meta", layers=1)
    names = dict(model.named_parameters())
    experts = sum(p.nbytes for name, p in names.items() if ".experts." in name)
    others = sum(p.nbytes for name, p in names.items() if ".experts." not in name)
    others -= model.get_input_embeddings().weight.nbytes
    assert configs.floor_bytes(model) == others + experts * 8 // 128
    # of 16 tokens, some choose the same experts
    assert others + experts * 0.6 < configs.floor_bytes(model, 16) < others + experts * 0.7


def test_padded_prompts_of_bench_generate():
    args = generate_options(peers=("eager", "static", "compile"), strict=False, padded=True)
    row = bench_generate.bench("smoke", 3, 12, args)
    assert (
        row["model"] == "smoke, 1 layer, padded"
        and row["peers"]["compile"]["failed"]
        and not row["peers"]["static"]["failed"]
    )
    model = bench_generate.weights_of("smoke", torch.device("cpu"), 1)
    mask = bench_generate.mask_of(bench_generate.random_ids(model, 3, 12, seed=0, padded=True))
    assert mask.sum(-1).tolist() == [12, 10, 8] and bool((mask == mask.cummax(-1).values).all())
    assert (
        row["cache_bytes"]
        == 2
        * (12 + 10 + 8 + 3 * (3 // 2))
        * model.config.num_key_value_heads
        * model.config.head_dim
        * 2
    )
    # A float32 model stands for ours. Its distance from float32 is that of its steps after
    # padding from a whole forward.
    wide = copy.deepcopy(model).float()
    ids = bench_generate.random_ids(wide, 3, 12, seed=0, padded=True)
    far = bench_generate.closeness(model, wide, ids, 4)
    assert far["steps_ours_max"] < 1e-4 and far["first_ours_max"] < 1e-4


@pytest.fixture(params=["gemma3", "qwen3_vl", "qwen3_5"])
def model_of_images(request, monkeypatch):
    """Return a small random model that takes images, and images 8 patches wide."""
    config = small_config(request.param)
    for each in (config, config.text_config):
        each.bos_token_id = each.eos_token_id = each.pad_token_id = None
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    monkeypatch.setattr(bench_generate, "IMAGE_WIDTH", 8 * config.vision_config.patch_size)
    return model


@pytest.mark.parametrize("images, batch", [(1, 1), (2, 3)])
def test_prompts_have_images_between_parts_of_their_text(model_of_images, images, batch):
    model, args = model_of_images, generate_options(images=images)
    prompts = bench_generate.prompts_of(model, batch, 6, args)
    token = model.config.image_token_id
    is_image = prompts.inputs["input_ids"] == token
    assert prompts.ids.shape == (batch, 6) and not bool((prompts.ids == token).any())
    assert torch.equal(prompts.inputs["input_ids"][~is_image].view(batch, 6), prompts.ids)
    # an image begins where a text token is before an image token
    begins = (is_image[:, 1:] & ~is_image[:, :-1]).sum(-1)
    assert begins.tolist() == [images] * batch
    assert prompts.lengths == [6 + int(is_image[0].sum())] * batch
    marks = prompts.inputs.get("mm_token_type_ids", prompts.inputs.get("token_type_ids"))
    assert torch.equal(marks, is_image.long())
    pixels = prompts.inputs["pixel_values"]
    assert len(pixels) == 1 or not torch.equal(pixels[0], pixels[-1])
    if "image_grid_thw" in prompts.inputs:
        assert prompts.inputs["image_grid_thw"].tolist() == [[1, 8, 8]] * (batch * images)
        assert len(pixels) == batch * images * 64
    else:
        assert len(pixels) == batch * images


def test_images_of_bench_generate(model_of_images, monkeypatch):
    model, args = model_of_images, generate_options(images=1)
    monkeypatch.setattr(bench_generate, "weights_of", lambda *_: model)
    row = bench_generate.bench("x", 2, 6, args)
    assert row["model"] == "x, 1 layer + 1 image" and row["images"] == 1 and row["image_tokens"] > 1
    assert all(peer["ms_per_token"]["runs"] == 1 for peer in row["peers"].values())
    prompts = bench_generate.prompts_of(model, 2, 6, args)
    read = [n + args.new // 2 for n in prompts.lengths]
    assert row["cache_bytes"] == bench_generate.cache_bytes(model, read)
    call, _ = bench_generate.set_up("eager", model, model, prompts, args)
    model.mirage = SimpleNamespace(report="no kernels")
    told = bench_generate.beyond_times({"eager": call, "ours": call}, model, model, prompts, args)
    assert told == {"report": ["no kernels"], "same_tokens_as_eager": args.new}


@pytest.mark.parametrize("times_only", [False, True])
def test_times_only_compares_no_logits(times_only):
    model = bench_generate.weights_of("smoke", torch.device("cpu"), 1)
    args = generate_options(times_only=times_only)
    prompts = bench_generate.prompts_of(model, 1, 6, args)
    call, _ = bench_generate.set_up("eager", model, model, prompts, args)
    fast = bench_generate.twin(model)
    fast.mirage = SimpleNamespace(report="no kernels")
    told = bench_generate.beyond_times({"eager": call, "ours": call}, model, fast, prompts, args)
    assert told["same_tokens_as_eager"] == args.new and ("logits" in told) == (not times_only)


def test_states_of_stock_and_float32_are_fed_from_step_to_step():
    """Mamba takes its cache by another name than other models. Without it, steps have no state."""
    model = AutoModelForCausalLM.from_config(small_config("mamba2")).eval().bfloat16()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    wide = copy.deepcopy(model).float()
    ids = bench_generate.random_ids(model, 2, 6, seed=0)
    far = bench_generate.closeness(model, wide, ids, 6)
    assert far["steps_ours_max"] < 1e-4


def test_adapters_of_bench_generate_are_peft_s_and_leave_the_bare_model_as_it_is():
    pytest.importorskip("peft")
    sizes = dict(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    bare = LlamaForCausalLM(LlamaConfig(**sizes)).eval().bfloat16()
    model = bench_generate.with_adapters(bench_generate.twin(bare), 4)
    adapted = [m for m in model.modules() if hasattr(m, "lora_A")]
    assert len(adapted) == 2 * 7 and not any(hasattr(m, "lora_A") for m in bare.modules())
    assert {p.dtype for m in adapted for p in m.lora_B.parameters()} == {torch.float32}
    assert (
        model.lm_head.weight is bare.lm_head.weight
        and adapted[0].base_layer.weight is bare.model.layers[0].self_attn.q_proj.weight
    )
    ids = torch.arange(5)[None]
    assert not torch.allclose(model(ids).logits, bare(ids).logits)
    named = partial(bench_generate.titled, "m")
    plain = {"lora": 0, "images": 0, "weights": "", "padded": False, "layers": None, "draft": ""}
    drafts = {"draft": "lookup", "draft_tokens": 3, "accept": 0.8}
    for options, name in (
        ({"lora": 4, "padded": True}, "m + LoRA 4, padded"),
        (drafts, "m + 3 drafts by lookup, 80% right"),
        ({"layers": 6}, "m, 6 layers"),
        ({"images": 1}, "m + 1 image"),
        ({"images": 2}, "m + 2 images"),
        ({"weights": "int4"}, "m, int4"),
    ):
        assert named(argparse.Namespace(**{**plain, **options})) == name


def test_the_weights_of_a_product_of_torch_are_counted():
    """They are the peer's own, so they are no memory beyond its weights."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert coded_models.product_bytes(model) == 0
    product = coded_models.Int4Product.__new__(coded_models.Int4Product)
    torch.nn.Module.__init__(product)
    product.register_buffer("codes", torch.zeros(16, dtype=torch.int32))
    product.register_buffer("scales", torch.zeros(4, dtype=torch.bfloat16))
    model.append(product)
    assert coded_models.product_bytes(model) == 64 + 8
