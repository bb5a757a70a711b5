"""Share what all benchmarks need: machine, clocks, resumable results, time budget, turns."""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.gpus import H200
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.tune import measure
from mirage_hf.zoo.machine import this_machine

#: Bytes per second that an H200 reads, measured. Every floor is bytes over this.
BYTES_PER_SECOND = H200.bandwidth

#: The device on which everything runs. Tests set it to a CPU.
DEVICE = "cuda"

PEERS = ("liger-kernel", "flashinfer-python", "flash-linear-attention", "mamba-ssm")

#: The largest relative RMS error that counts as rounding. The roundings of a dozen ops stay below a
#: fifth of it.
TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.05, torch.float32: 1e-5}

#: Mode of torch.compile. CUDA graphs are captured here, alike for all.
COMPILE = "max-autotune-no-cudagraphs"


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def need_gpu(script: str) -> None:
    """Exit with a message if there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit(f"{script}: no GPU here; run it on the GPU whose times you want")


def machine() -> dict[str, Any]:
    """Return the GPU, the driver, the commit, and the versions of everything that runs."""
    found: dict[str, Any] = {**this_machine(), "cores": len(os.sched_getaffinity(0))}
    if commit := measured_commit():
        found["commit"] = commit
    for package in PEERS:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        found |= {"sms": p.multi_processor_count, "l2_bytes": p.L2_cache_size}
    return found


def measured_commit() -> str:
    """Return the commit that is checked out, with "+" if files differ; empty without git."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short=7", "HEAD"], text=True)
        changed = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.strip() + ("+" if changed.strip() else "")


def gpu_state() -> dict[str, str]:
    """Return clocks, temperature and power, or nothing if nvidia-smi does not answer."""
    fields = (
        "name",
        "driver_version",
        "clocks.sm",
        "clocks.mem",
        "temperature.gpu",
        "power.draw",
        "clocks_event_reasons.active",
    )
    try:
        line = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            text=True,
            capture_output=True,
            timeout=10,
            check=True,
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(fields, (v.strip() for v in line.split(",")), strict=False))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the lowest and the highest of some values."""
    return (
        {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "runs": len(values),
        }
        if values
        else {}
    )


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds`."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def sync() -> None:
    """Wait for the GPU, so that a failed call is over."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def explained(e: Exception) -> str:
    """Return an exception as one line."""
    return f"{type(e).__name__}: {e}"[:500]


# -- which results are right ----------------------------------------------------------------------


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the RMS error over the RMS of `exact`.

    Infinite if shapes differ or a value is not finite.
    """
    if got.shape != exact.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    exact = exact.double()
    return float((got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def error_of(got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the worst relative error of some outputs.

    Raises:
        ValueError: An error is larger than rounding explains.
    """
    if len(got) != len(exact):
        raise ValueError(f"{len(got)} results where there should be {len(exact)}")
    errors = [relative_error(a, b) for a, b in zip(got, exact, strict=True)]
    for y, error in zip(got, errors, strict=True):
        if not error <= TOLERANCE[y.dtype]:
            raise ValueError(f"wrong result: RMS error {error:.3g} of the float64 result's RMS")
    return max(errors)


# -- turns ----------------------------------------------------------------------------------------


@dataclass
class Contender:
    """One way to compute a block, captured, with the µs per call of each turn."""

    captured: measure.Captured
    samples: list[float] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        """Return the median and spread of all turns."""
        t = measure.timing(self.samples, self.captured.calls)
        return {
            "us": round(t.us, 3),
            "low": round(t.low, 3),
            "high": round(t.high, 3),
            "spread": round(t.spread, 4),
            "rounds": t.replays,
        }


def captured(run: Callable[..., Any], sets: Sequence[list[torch.Tensor]]) -> Contender:
    """Capture calls of `run` on inputs that rotate through `sets`."""
    return Contender(measure.capture(run, sets))


def take_turns(contenders: Iterable[Contender], rounds: int, replays: int = 3) -> None:
    """Time the contenders in alternating rounds, so that a change of clocks meets all of them."""
    everyone = tuple(contenders)
    for _ in range(rounds):
        for c in everyone:
            c.samples.append(statistics.median(c.captured.times(replays)))


def searched_run(r: Resolved) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None:
    """Return a function that runs the searched kernel, even if the library was measured faster.

    Return None if the search found no kernel.
    """
    if not r.ugraph.is_fused:
        return None
    digest = hashlib.sha256(r.entry.kernel.encode()).hexdigest()
    return compiler.load(r.entry.kernel, digest).run  # type: ignore[no-any-return]


# -- results as they come -------------------------------------------------------------------------

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
