"""Time calls of `generate()` while kernels are tuned in the background.

    python -m scripts.bench_background --model qwen2.5-0.5b --seconds 120 --json background.json

It takes an empty cache, so that no kernel was measured before. Two runs make calls of equal length
one after another:

- `never`: `optimize(tune="never")`, where nothing tunes. The first calls, which capture, are left
  out.
- `background`: `optimize(tune="background")`, from the first call on. After the tuner has ended,
  `--after` more calls are made.

The loss is the median time of the calls that a tuner ran beside, over that of `never`, minus 1.
Only calls before the first replacement count, because later ones run better kernels. The longest
call shows what putting kernels in place takes. With `--pause`, calls have gaps. The model must have
no packaged kernels. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts import benching


def calls(call: Callable[[], Any], is_over: Callable[[], bool], pause: float) -> list[list[float]]:
    """Make calls until `is_over`. Return the begin and the length of each, in seconds."""
    began, times = time.perf_counter(), []
    while not is_over():
        start = time.perf_counter()
        call()
        times.append([start - began, time.perf_counter() - start])
        time.sleep(pause)
    return times


def after(count: int) -> Callable[[], bool]:
    """Return a function that is true from call number `count` on, counted from 0."""
    left = iter(range(count))
    return lambda: next(left, None) is None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run both, and return the times of all calls with the summary."""
    import mirage_hf as mi
    from scripts.configs import random_model

    model: Any = random_model(args.model, benching.DEVICE, layers=args.layers)
    ids = torch.randint(3, 100, (args.batch, args.prompt), device=benching.DEVICE)

    def call() -> None:
        model.generate(ids, max_new_tokens=args.tokens, do_sample=False)
        benching.sync()

    row: dict[str, Any] = {}
    started = time.perf_counter()
    mi.optimize(model, batch_sizes=(args.batch,), tune="never")
    row["never_optimize_s"] = time.perf_counter() - started
    for _ in range(3):
        call()
    made = calls(call, after(args.calls), args.pause)
    row["never_s"] = statistics.median(seconds for _, seconds in made)

    started = time.perf_counter()
    mi.optimize(model, batch_sizes=(args.batch,), tune="background")
    row["background_optimize_s"] = time.perf_counter() - started
    tuning = model.mirage.tuning
    if tuning is None:
        raise SystemExit(f"bench_background: {model.mirage.report.notes[-1]}")
    for _ in range(3):
        call()
    began, first_new = time.perf_counter(), [float("inf")]

    def is_over() -> bool:
        if tuning._replaced and first_new[0] == float("inf"):
            first_new[0] = time.perf_counter() - began
        return tuning.wait(0) or time.perf_counter() - began > args.seconds

    row["calls"] = calls(call, is_over, args.pause)
    row["status"] = tuning.status
    row["waited_s"] = tuning.turns._waited if tuning.turns else 0.0
    call()  # puts what is left in place
    later = calls(call, after(args.after), args.pause)
    beside = [seconds for begin, seconds in row["calls"] if begin + seconds < first_new[0]]
    row["beside_s"] = statistics.median(beside or [float("nan")])
    row["longest_s"] = max(seconds for _, seconds in row["calls"])
    row["after_s"] = statistics.median(seconds for _, seconds in later)
    row["loss"] = row["beside_s"] / row["never_s"] - 1
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-0.5b", help="a name of scripts/configs.py")
    parser.add_argument("--layers", type=int, help="the first layers only")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each call")
    parser.add_argument("--calls", type=int, default=20, help="calls of `never`")
    parser.add_argument("--after", type=int, default=20, help="calls after the tuner has ended")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between calls")
    parser.add_argument("--seconds", type=float, default=120.0, help="the most seconds of tuning")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args(argv)
    if benching.DEVICE == "cuda":
        benching.need_gpu("bench_background")
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("MIRAGE_HF_CACHE")
        os.environ["MIRAGE_HF_CACHE"] = cache
        try:
            row = measure(args)
        finally:
            os.environ.pop("MIRAGE_HF_CACHE")
            os.environ |= {} if before is None else {"MIRAGE_HF_CACHE": before}
    if args.json:
        args.json.write_text(json.dumps({"machine": benching.machine(), **row}, indent=1) + "\n")
    per_token = 1e3 / args.tokens
    for name in ("never", "beside", "after", "longest"):
        print(f"{name:<8} {row[f'{name}_s'] * per_token:8.3f} ms a token")
    print(f"loss beside a tuner {row['loss']:.1%}, calls waited {row['waited_s']:.2f} s for turns")
    print(row["status"])


if __name__ == "__main__":
    main()
