"""Rows of results of benchmarks: written one by one, resumed, and set up side by side."""

import importlib
import json
import math
import multiprocessing
import os
import sys
import time
from functools import partial

import pytest

from scripts import bench_reports, benching


def test_results_are_written_as_they_come_and_resumed(tmp_path, capsys):
    path, ran = tmp_path / "new" / "r.json", []

    def job(name, fails=False):
        ran.append(name)
        if fails:
            raise RuntimeError("no luck")
        return {"us": 1.0}

    jobs = {"a": lambda: job("a"), "b": lambda: job("b", fails=True), "c": lambda: job("c")}
    report = bench_reports.Report(path, {"out": path, "rows": (1, 2), "seconds": math.inf})
    assert (
        bench_reports.run_all(report, {k: jobs[k] for k in "ab"}, bench_reports.Budget(), str) == []
    )
    written = json.loads(path.read_text())
    assert [r["name"] for r in written["rows"]] == ["a", "b"] and "no luck" in written["rows"][1][
        "failed"
    ]
    assert (
        written["options"] == {"out": "r.json", "rows": [1, 2], "seconds": None}
        and "torch" in written["machine"]
    )

    jobs["b"] = lambda: job("b")
    bench_reports.run_all(
        bench_reports.Report(path, {}, resume=True), jobs, bench_reports.Budget(), str
    )
    assert ran == ["a", "b", "b", "c"]  # failed rows are tried again
    assert sorted(r["name"] for r in json.loads(path.read_text())["rows"]) == ["a", "b", "c"]
    assert bench_reports.run_all(
        bench_reports.Report(path, {}), jobs, bench_reports.Budget(0.0), str
    ) == [
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
    with bench_reports.alone():
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
    with bench_reports.alone():
        os._exit(7)


@pytest.fixture
def forked(monkeypatch):
    """Fork processes instead of starting new ones, which import torch for seconds."""
    monkeypatch.setattr(
        bench_reports.multiprocessing,
        "get_context",
        lambda how, get=multiprocessing.get_context: get("fork"),
    )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_rows_are_set_up_side_by_side_and_measured_alone(forked, tmp_path, capsys):
    """This holds too if one fails before its turn, because the others would wait for it."""
    report = bench_reports.Report(tmp_path / "rows.json", {})
    report.rows.append({"name": "there"})
    jobs = {
        "there": None,
        "quick": partial(row_beside, 0.0),
        "slow": partial(row_beside, 1.0),
        "wrong": partial(row_beside, 0.5, True),
    }
    bench_reports.run_side_by_side(report, jobs, 60.0, lambda row: f"{row['name']} shown")
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
import sys
from scripts.bench_reports import alone

def job():
    with alone():
        return dict(parent=os.getppid(), own=os.getpid())
"""
    (tmp_path / "jobs_beside.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    report = bench_reports.Report(None, {})
    bench_reports.run_side_by_side(
        report, {"row": importlib.import_module("jobs_beside").job}, 120.0, lambda row: ""
    )
    assert report.get("row")["parent"] == os.getpid() != report.get("row")["own"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_row_whose_process_ends_takes_no_other_row_with_it(forked):
    """A process may end for lack of the host's memory, before its turn or in it."""
    report = bench_reports.Report(None, {})
    jobs = {how: partial(row_that_ends, how) for how in ("exits", "is killed", "in its turn")} | {
        "good": partial(row_beside, 0.5)
    }
    bench_reports.run_side_by_side(report, jobs, 120.0, lambda row: "")
    assert report.get("good")["at"] and {
        how: report.get(how)["failed"][-11:] for how in jobs if how != "good"
    } == {"exits": "exit code 1", "is killed": "exit code 9", "in its turn": "exit code 7"}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_row_that_is_not_set_up_in_time_fails_alone(forked):
    report = bench_reports.Report(None, {})
    jobs = {"late": partial(row_that_ends, "hangs"), "good": partial(row_beside, 0.0)}
    bench_reports.run_side_by_side(report, jobs, 3.0, lambda row: "")
    assert report.get("late")["failed"] == "was not set up within 3 s" and report.get("good")["at"]


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": [{}]}'])
def test_a_file_that_is_no_report_is_not_resumed(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="no report to resume"):
        bench_reports.Report(path, {}, resume=True)


def test_a_report_of_another_gpu_is_not_resumed(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(
        json.dumps({"machine": benching.machine() | {"gpu": "GPU of another"}, "rows": []})
    )
    with pytest.raises(SystemExit, match="GPU of another"):
        bench_reports.Report(path, {}, resume=True)
