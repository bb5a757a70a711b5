"""What all benchmarks need: the machine and its clocks, checks of results, and timed turns."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
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

PEERS = (
    "liger-kernel",
    "flashinfer-python",
    "flash-linear-attention",
    "mamba-ssm",
    "triton-kernels",
)

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
