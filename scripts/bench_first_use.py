"""Time the first use of models: `optimize()` and the first `generate()` of a fresh process.

    python -m scripts.bench_first_use --rows smollm2-360m:auto,smollm2-360m:static --json first.json

A row is a model and a way to run it: `auto`, `never`, `full` or `background` for `optimize()` with
that `tune`, or `eager` or `static` for stock. Each row runs in a process of its own, with empty
caches of mirage_hf, Triton, CUDA and torch.compile. Weights are random. `start_s` has the imports
of torch, transformers and mirage_hf. `weights_s` has the making of weights, in whose place a user
loads some. Until a row's first `generate()` ends, a second thread looks 100 times a second at what
the main thread does. That gives the seconds of each folder of the package. The second call may
capture graphs. Five more calls give the milliseconds a token. With `--weights`, linears hold codes
of a format (coded_models.py).

`peak_mib_over_weights` is the most memory of the GPU that is allocated beyond the weights, until
the second call ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import mirage_hf
from scripts import benching
from scripts.coded_models import LINEAR_FORMATS, with_codes
from scripts.configs import random_model

#: Ways to run a model with `optimize()`: values of its `tune`.
OURS = ("auto", "never", "full", "background")

#: Ways to run it without.
STOCK = ("eager", "static")

#: Seconds between two looks at the main thread.
PERIOD = 0.01

#: Environment variables that name a folder of caches.
CACHES = ("MIRAGE_HF_CACHE", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR")


#: Folders of the package that only call others.
CALLERS = ("api", "pipeline", "swap")


def part_of(frame: FrameType | None) -> str:
    """Return which folder of the package a stack entered first, such as "search", or "outside"."""
    entered = []
    while frame is not None:
        package, *names = frame.f_globals.get("__name__", "").split(".")
        if package == "mirage_hf":
            entered.append(names[0] if names else package)
        frame = frame.f_back
    entered.reverse()
    return next((n for n in entered if n not in CALLERS), entered[-1] if entered else "outside")


class Parts:
    """Counts what the main thread does until it is stopped."""

    def __init__(self) -> None:
        """Begin."""
        self._seen: Counter[str] = Counter()
        self._is_over = threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(PERIOD):
            self._seen[part_of(sys._current_frames().get(self._main or 0))] += 1

    def seconds(self, whole: float) -> dict[str, float]:
        """Stop, and share `whole` seconds among the parts, the longest first."""
        self._is_over.set()
        self._thread.join()
        looks = sum(self._seen.values()) or 1
        return {part: whole * n / looks for part, n in self._seen.most_common()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Use a model for the first time in this process, and return what took how long."""
    name, way = args.one.split(":")
    cut = f", {args.layers} layer{'s' * (args.layers > 1)}" if args.layers else ""
    coded = f", {args.weights}" if args.weights else ""
    row: dict[str, Any] = {"model": f"{name}{cut}{coded}", "way": way}
    row |= {"prompt": args.prompt, "batch": args.batch}
    row["start_s"] = time.time() - args.began
    begin = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal begin
        benching.sync()
        row[name] = time.perf_counter() - begin
        begin = time.perf_counter()

    model: Any = random_model(name, benching.DEVICE, layers=args.layers)
    if args.weights:
        with_codes(model, args.weights)
    ids = torch.randint(3, 100, (args.batch, args.prompt), device=benching.DEVICE)
    given: dict[str, Any] = {"max_new_tokens": args.tokens, "do_sample": False}
    if way == "static":
        given["cache_implementation"] = "static"
    peak = peak_of_allocations()
    mark("weights_s")
    parts = Parts()
    if way in OURS:
        mirage_hf.optimize(model, batch_sizes=(args.batch,), tune=way)
        mark("optimize_s")
    model.generate(ids, **given)
    mark("first_generate_s")
    row["parts_s"] = parts.seconds(row.get("optimize_s", 0.0) + row["first_generate_s"])
    model.generate(ids, **given)  # captures
    mark("second_generate_s")
    row["peak_mib_over_weights"] = peak()
    times = []
    for _ in range(args.calls):
        model.generate(ids, **given)
        mark("call_s")
        times.append(row.pop("call_s") * 1e3 / args.tokens)
    return row | {"ms_per_token": benching.spread(times)}


def peak_of_allocations() -> Callable[[], float | None]:
    """Return a function that gives the peak of allocated MiB since now, less what is allocated now.

    It gives None on a CPU.
    """
    if benching.DEVICE == "cpu":
        return lambda: None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return lambda: (torch.cuda.max_memory_allocated() - before) / 2**20


def in_fresh_process(row: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a row in a process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {variable: str(Path(folder, variable)) for variable in CACHES}
        command = [sys.executable, "-m", "scripts.bench_first_use", "--one", row]
        command += ["--began", str(time.time())]
        for option in ("layers", "weights", "batch", "prompt", "tokens", "calls"):
            if (value := getattr(args, option)) is not None:
                command += [f"--{option}", str(value)]
        done = subprocess.run(
            [*command, "--device", benching.DEVICE],
            env={**os.environ, **caches},
            stdout=subprocess.PIPE,
            text=True,
            timeout=args.cap,
        )
        if done.returncode:
            raise SystemExit(f"bench_first_use: {row} failed")
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def shown(row: dict[str, Any]) -> str:
    """Return a line for a terminal."""
    optimizing = f"optimize() {row['optimize_s']:6.2f} s, " if "optimize_s" in row else ""
    longest = ", ".join(f"{k} {v:.1f}" for k, v in list(row["parts_s"].items())[:6])
    first, token = row["first_generate_s"], row["ms_per_token"]["median"]
    mib = row["peak_mib_over_weights"]
    peak = "" if mib is None else f"{mib:.0f} MiB at the peak, "
    return f"{optimizing}first call {first:6.2f} s, {peak}{token:.3f} ms a token ({longest})"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default="smollm2-360m:auto", help="MODEL:WAY, several with commas"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)  # for the process of one row
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help="the first layers only")
    parser.add_argument("--weights", choices=LINEAR_FORMATS, help="linears in codes")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each call")
    parser.add_argument("--calls", type=int, default=5, help="calls after the first two")
    parser.add_argument("--cap", type=float, default=300.0, help="the most seconds of a row")
    parser.add_argument("--device", default=benching.DEVICE)
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args(argv)
    benching.DEVICE = args.device
    if args.one:
        print(json.dumps(measure(args)))
        return
    rows = args.rows.split(",")
    for row in rows:
        if row.count(":") != 1 or row.split(":")[1] not in (*OURS, *STOCK):
            parser.error(f"{row!r}: give MODEL:WAY, where WAY is one of {', '.join(OURS + STOCK)}")
    if args.device == "cuda":
        benching.need_gpu("bench_first_use")
    report: dict[str, Any] = {"machine": benching.machine(), "rows": []}
    for row in rows:
        found = in_fresh_process(row, args)
        report["rows"].append({"name": row, **found})
        print(f"{row:<28} {shown(found)}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
