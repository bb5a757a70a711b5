"""What the benchmarks share: machine and clocks, results kept as they come, a time budget, turns, and what counts as right."""
from __future__ import annotations

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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.kernels import Resolved
from mirage_hf.tune import measure
from mirage_hf.tune.cost import H200
from mirage_hf.zoo.machine import this_machine

BYTES_PER_SECOND = H200.bandwidth
"""At which an H200 reads memory, measured; every floor is bytes over this."""

DEVICE = "cuda"
"""Where everything runs; tests put a CPU here."""

PEERS = ("liger-kernel", "flashinfer-python")

TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.05}
"""RMS error over the RMS of the float64 result beyond which something is wrong and not merely rounded (the roundings of a dozen ops
stay below a fifth of it)."""

COMPILE = "max-autotune-no-cudagraphs"
"""torch.compile's mode: CUDA graphs are ours, alike for all."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def need_gpu(script: str) -> None:
    """Errors: SystemExit without a GPU."""
    if not torch.cuda.is_available():
        sys.exit(f"{script}: no GPU here; run it on the GPU whose times you want")


def machine() -> dict[str, Any]:
    """What was measured on: GPU, driver, versions of everything that runs, rivals' packages among them."""
    found: dict[str, Any] = {**this_machine(), "cores": len(os.sched_getaffinity(0))}
    for package in PEERS:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        found |= {"sms": p.multi_processor_count, "l2_bytes": p.L2_cache_size}
    return found


def gpu_state() -> dict[str, str]:
    """Clocks, temperature and power now; empty where nvidia-smi does not say."""
    fields = ("name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
    try:
        line = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], text=True, capture_output=True,
                              timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(fields, (v.strip() for v in line.split(",")), strict=False))


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)} if values else {}


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
    """Wait for the GPU, so that what failed on it is over."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def explained(e: Exception) -> str:
    return f"{type(e).__name__}: {e}"[:500]


# -- what counts as right -------------------------------------------------------------------------------------------------

def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """RMS error over the RMS of `exact`; infinite where something is not finite or has another shape."""
    if got.shape != exact.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    exact = exact.double()
    return float((got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def error_of(got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The worst relative error of some outputs. Errors: ValueError where it is beyond what rounding explains."""
    if len(got) != len(exact):
        raise ValueError(f"{len(got)} results where there should be {len(exact)}")
    worst = max(relative_error(a, b) for a, b in zip(got, exact, strict=True))
    if not worst <= TOLERANCE[got[0].dtype]:
        raise ValueError(f"wrong result: RMS error {worst:.3g} of the float64 result's RMS")
    return worst


# -- turns ----------------------------------------------------------------------------------------------------------------

@dataclass
class Contender:
    """Captured calls, and what each turn took, µs a call."""

    captured: measure.Captured
    samples: list[float] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        t = measure.timing(self.samples, self.captured.calls)
        return {"us": round(t.us, 3), "low": round(t.low, 3), "high": round(t.high, 3), "spread": round(t.spread, 4), "rounds": t.replays}


def captured(run: Callable[..., Any], sets: Sequence[list[torch.Tensor]]) -> Contender:
    """A contender that calls `run` on inputs that rotate through `sets`."""
    return Contender(measure.capture(run, sets))


def take_turns(contenders: Iterable[Contender], rounds: int, replays: int = 3) -> None:
    """Alternating rounds: a change of clocks meets all contenders alike."""
    everyone = tuple(contenders)
    for _ in range(rounds):
        for c in everyone:
            c.samples.append(statistics.median(c.captured.times(replays)))


def searched_run(r: Resolved) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None:
    """The searched kernel of a program, even where the library was measured faster; None where none was found."""
    if not r.ugraph.is_fused:
        return None
    return compiler.load(r.entry.kernel, hashlib.sha256(r.entry.kernel.encode()).hexdigest()).run  # type: ignore[no-any-return]


# -- results as they come -------------------------------------------------------------------------------------------------

SAME = ("gpu", "mirage_hf", "torch", "triton")
"""What must not change between the rows of one file."""


class Report:
    """Rows of results, written after each one, so that a run that is cut short still tells and can be resumed."""

    def __init__(self, path: Path | None, options: Mapping[str, Any], resume: bool = False):
        """Errors: SystemExit for a file to resume that is of another machine or no report."""
        self.path = path
        self.data: dict[str, Any] = {"machine": machine(), "options": {k: _plain(v) for k, v in options.items()}, "rows": []}
        if resume and path and path.exists():
            self.data["rows"] = self._rows_of(path)

    def _rows_of(self, path: Path) -> list[dict[str, Any]]:
        """The rows to keep: what failed is tried again."""
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            rows = [r for r in old["rows"] if "failed" not in r]
            other = [f"{k} {old['machine'].get(k)}, here {self.data['machine'].get(k)}" for k in SAME
                     if old["machine"].get(k) != self.data["machine"].get(k)]
        except (OSError, ValueError, KeyError, TypeError) as e:
            sys.exit(f"{path}: no report to resume ({explained(e)}); give another file, or leave --resume out")
        if other:
            sys.exit(f"{path}: was measured elsewhere ({'; '.join(other)}); give another file, or leave --resume out")
        return rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data["rows"]  # type: ignore[no-any-return]

    def get(self, name: str) -> dict[str, Any] | None:
        return next((r for r in self.rows if r["name"] == name), None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_name(self.path.name + ".partial")
            partial.write_text(json.dumps(self.data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            partial.replace(self.path)


def _plain(value: Any) -> Any:
    """An option as JSON holds it: of a path only the name, no infinity."""
    if isinstance(value, Path):
        return value.name
    return None if value == math.inf else list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Budget:
    """Seconds after which nothing new is started."""

    seconds: float = math.inf
    started: float = field(default_factory=time.perf_counter)

    @property
    def is_spent(self) -> bool:
        return time.perf_counter() - self.started >= self.seconds


def _row(name: str, job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a job gave, or why it failed: one row that fails must not lose those after it."""
    started = time.perf_counter()
    try:
        row = job()
    except Exception as e:
        row = {"failed": explained(e)}
    return {"name": name, **row, "seconds": round(time.perf_counter() - started, 1), "gpu": gpu_state()}


def _shown(row: dict[str, Any], show: Callable[[dict[str, Any]], str]) -> str:
    return f"{row['name']}: failed, {row['failed']}" if "failed" in row else show(row)


def run_all(report: Report, jobs: Mapping[str, Callable[[], dict[str, Any]]], budget: Budget,
            show: Callable[[dict[str, Any]], str]) -> list[str]:
    """Run the jobs that the report lacks, in order; each makes a row. Returns the names of those left out when time was up."""
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


# -- rows that are set up at the same time -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Beside:
    """How a process waits until all are set up, and then for its turn."""

    set_up: Sequence[Any]
    """An event of each row: it is set up, or ended."""
    turn: Any
    seconds: float


_beside: _Beside | None = None
_own: int | None = None


def _join(beside: _Beside) -> None:
    global _beside
    _beside = beside


def _row_beside(number: int, name: str, job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    global _own
    assert _beside is not None
    _own = number
    try:
        return _row(name, job)
    finally:
        _beside.set_up[number].set()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A part of a job in which no other row's job runs: those that were set up side by side take turns. Errors: TimeoutError."""
    if _beside is None or _own is None:
        yield
        return
    _beside.set_up[_own].set()
    if not all(event.wait(_beside.seconds) for event in _beside.set_up):
        raise TimeoutError(f"other rows were not set up within {_beside.seconds:.0f} s")
    with _beside.turn:
        yield


def run_side_by_side(report: Report, jobs: Mapping[str, Callable[[], dict[str, Any]]], seconds: float,
                     show: Callable[[dict[str, Any]], str]) -> None:
    """Run the jobs that the report lacks at the same time, each in a process of its own; their parts in `alone()` one after another, once
    every job has come so far or `seconds` are over."""
    missing = [name for name in jobs if report.get(name) is None]
    context = multiprocessing.get_context("spawn")  # a process that uses a GPU cannot be forked
    beside = _Beside([context.Event() for _ in missing], context.Lock(), seconds)
    with ProcessPoolExecutor(len(missing) or 1, context, _join, (beside,)) as pool:
        running = [pool.submit(_row_beside, n, name, jobs[name]) for n, name in enumerate(missing)]
        for done in as_completed(running):
            report.add(done.result())
            print(_shown(report.rows[-1], show), flush=True)
