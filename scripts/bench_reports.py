"""Rows of results: written one by one, resumed, within a time budget, and set up side by side."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from scripts.benching import explained, gpu_state, machine

#: Facts that must be equal for all rows of one file.
SAME = ("gpu", "mirage_hf", "torch", "triton")


class Report:
    """Rows of results, written after each one, so an interrupted run can resume."""

    def __init__(self, path: Path | None, options: Mapping[str, Any], resume: bool = False):
        """Start a report, with the rows of an earlier one if `resume`.

        Raises:
            SystemExit: The file to resume is no report, or was measured on another machine.
        """
        self.path = path
        self.data: dict[str, Any] = {
            "machine": machine(),
            "options": {k: _plain(v) for k, v in options.items()},
            "rows": [],
        }
        if resume and path and path.exists():
            self.data["rows"] = self._rows_of(path)

    def _rows_of(self, path: Path) -> list[dict[str, Any]]:
        """Return the rows to keep. Failed rows are measured again."""
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            rows = [r for r in old["rows"] if "failed" not in r]
            other = [
                f"{k} {old['machine'].get(k)}, here {self.data['machine'].get(k)}"
                for k in SAME
                if old["machine"].get(k) != self.data["machine"].get(k)
            ]
        except (OSError, ValueError, KeyError, TypeError) as e:
            sys.exit(
                f"{path}: no report to resume ({explained(e)}); give another file, or leave "
                "--resume out"
            )
        if other:
            sys.exit(
                f"{path}: was measured elsewhere ({'; '.join(other)}); give another file, or leave "
                "--resume out"
            )
        return rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows so far."""
        return self.data["rows"]  # type: ignore[no-any-return]

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the row of this name, or None."""
        return next((r for r in self.rows if r["name"] == name), None)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row and write the file."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Write the file at once or not at all."""
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_name(self.path.name + ".partial")
            partial.write_text(
                json.dumps(self.data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            partial.replace(self.path)


def _plain(value: Any) -> Any:
    """Return an option as JSON holds it: a path as its name, infinity as null."""
    if isinstance(value, Path):
        return value.name
    return None if value == math.inf else list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Budget:
    """Seconds after which no new row is started."""

    seconds: float = math.inf
    started: float = field(default_factory=time.perf_counter)

    @property
    def is_spent(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() - self.started >= self.seconds


def add_report_options(parser: argparse.ArgumentParser, row: str) -> None:
    """Add the options that limit the time and name the report. `row` is what a row measures."""
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help=f"start no {row} after so many seconds"
    )
    parser.add_argument("--out", type=Path, help=f"write a JSON file, after each {row}")
    parser.add_argument(
        "--resume", action="store_true", help=f"keep the {row}s that the JSON file has"
    )


def _row(name: str, job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a job and return its row.

    A job that fails gives a row with the reason, so later rows still run.
    """
    started = time.perf_counter()
    try:
        row = job()
    except Exception as e:
        row = {"failed": explained(e)}
    return {
        "name": name,
        **row,
        "seconds": round(time.perf_counter() - started, 1),
        "gpu": gpu_state(),
    }


def _shown(row: dict[str, Any], show: Callable[[dict[str, Any]], str]) -> str:
    return f"{row['name']}: failed, {row['failed']}" if "failed" in row else show(row)


def run_all(
    report: Report,
    jobs: Mapping[str, Callable[[], dict[str, Any]]],
    budget: Budget,
    show: Callable[[dict[str, Any]], str],
) -> list[str]:
    """Run the jobs that the report lacks, in order.

    Returns:
        The names of the jobs that were left out because time was up.
    """
    left = []
    for name, job in jobs.items():
        if (before := report.get(name)) is not None:
            print(show(before), flush=True)
            continue
        if budget.is_spent:
            left.append(name)
            continue
        row = _row(name, job)
        report.add(row)
        print(_shown(row, show), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if left:
        print(f"out of time, left out: {', '.join(left)}; run again with --resume", flush=True)
    return left


# -- rows that are set up at the same time --------------------------------------------------------

#: The connection to the process that gives turns, in a process that runs one of several rows.
_turn: Connection | None = None


def _row_beside(turn: Connection, name: str, job: Callable[[], dict[str, Any]]) -> None:
    """Run one job in a process of its own and send its row back."""
    global _turn
    _turn = turn
    row = _row(name, job)
    turn.send(row)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other row's job runs. Jobs that were set up side by side take turns here.

    Raises:
        EOFError: The process that gives turns has ended.
    """
    global _turn
    turn, _turn = _turn, None  # one turn is enough for all later times of this row
    if turn is not None:
        turn.send(None)
        turn.recv()
    yield


def run_side_by_side(
    report: Report,
    jobs: Mapping[str, Callable[[], dict[str, Any]]],
    seconds: float,
    show: Callable[[dict[str, Any]], str],
) -> None:
    """Set up all jobs at once, each in a process of its own, and time them one after another.

    A job that is not set up within `seconds` is killed and fails. So does one whose process ends.
    """
    context = multiprocessing.get_context("spawn")  # a process that uses a GPU cannot be forked
    processes: dict[Connection, tuple[str, BaseProcess]] = {}

    def answer(of: Connection) -> dict[str, Any] | None:
        """Return a row, or None from a job that waits for its turn."""
        name, process = processes[of]
        try:
            return of.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            process.join()
            return {"name": name, "failed": f"its process ended with exit code {process.exitcode}"}

    def add(row: dict[str, Any]) -> None:
        report.add(row)
        print(_shown(row, show), flush=True)

    try:
        for name in [name for name in jobs if report.get(name) is None]:
            ours, theirs = context.Pipe()
            process = context.Process(target=_row_beside, args=(theirs, name, jobs[name]))
            process.start()
            theirs.close()  # so that its end is seen here
            processes[ours] = name, process
        waiting = set(processes)
        set_up: list[Connection] = []
        until = time.monotonic() + min(seconds, threading.TIMEOUT_MAX)
        while waiting and (ready := wait(list(waiting), max(0.0, until - time.monotonic()))):
            for of in ready:
                assert isinstance(of, Connection)
                waiting.discard(of)
                if (row := answer(of)) is None:
                    set_up.append(of)
                else:
                    add(row)
        for late in waiting:
            name, process = processes[late]
            process.kill()
            process.join()
            add({"name": name, "failed": f"was not set up within {seconds:.0f} s"})
        for of in set_up:
            with contextlib.suppress(OSError):  # it has ended, which is the answer
                of.send(None)
            row = answer(of)
            assert row is not None
            add(row)
    finally:
        for of, (_, process) in processes.items():
            of.close()
            process.join(5.0)
            process.kill()
