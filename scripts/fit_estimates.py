"""Fit the correction of the cost model to times that `bench_untuned` measured.

    python -m scripts.fit_estimates docs/benchmarks/raw/*-schedules.json
    python -m scripts.fit_estimates docs/benchmarks/raw/*-schedules.json --write

The logarithm of (time / estimate) is fitted by a ridge regression on the features of
`mirage_hf/tune/correction.py`. Each size is also left out of a fit once. The *regret* of a program
is the time of its first choice over the time of its fastest candidate. `--write` replaces
`correction.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.gpus import Device, device_named
from mirage_hf.pipeline.resolver import kernel_request
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.tune import correction, cost
from mirage_hf.verify.accept import KEEP
from scripts.bench_untuned import BLOCKS, digest

#: The weight of the ridge's penalty, for features scaled to a deviation of 1.
RIDGE = 100.0


@dataclass(frozen=True)
class Measured:
    """A candidate that was measured, as the model sees it.

    Attributes:
        program: Block, hidden size and rows.
        us: The measured time.
        kernel_us: The estimate of its largest kernel without a correction.
        other_us: The estimate of its other kernels.
        features: The features of the largest kernel.
    """

    program: tuple[str, int, int]
    us: float
    kernel_us: float
    other_us: float
    features: dict[str, float]


def measured(rows: Iterable[dict[str, Any]], gpu: Device) -> Iterator[Measured]:
    """Yield the candidates of a report of `bench_untuned` whose largest kernel is corrected."""
    for row in rows:
        if "candidates" not in row:
            continue
        pattern, block = BLOCKS[row["block"]]
        program = block(row["hidden"]).program(row["rows"])
        request = kernel_request(
            program, target="sm_90", pattern=pattern, next_may_launch_early=True, tune="never"
        )
        found = search_and_verify(program, request.options, keep=KEEP).ugraphs()
        ops_of = {digest(u): place_kernels(u, next_may_launch_early=True) for u in found}
        key = (row["block"], row["hidden"], row["rows"])
        for c in row["candidates"]:
            ops = ops_of.get(c["ugraph"])
            if ops is not None and c["us"] is not None:
                schedules = [Schedule.from_dict(s) for s in c["schedules"]]
                if (m := _measured(key, ops, schedules, c["us"], gpu)) is not None:
                    yield m


def _measured(
    key: tuple[str, int, int],
    ops: Sequence[PlacedOp],
    schedules: Sequence[Schedule],
    us: float,
    gpu: Device,
) -> Measured | None:
    """Return a candidate, or None if its largest kernel has no correction."""
    plans = [plan_kernel(op, s) for op, s in zip(ops, schedules, strict=True)]
    costs = [cost.uncorrected(plan, gpu) for plan in plans]
    largest = max(range(len(costs)), key=lambda n: costs[n][0].bytes)
    found, known = costs[largest]
    if known is None:
        return None
    other = sum(c.us for n, (c, _) in enumerate(costs) if n != largest)
    return Measured(key, us, found.us, other, known)


def fit(points: Sequence[Measured]) -> tuple[dict[str, float], float]:
    """Return the weights and the constant. Each program counts the same."""
    names = list(points[0].features)
    x = np.array([[p.features[name] for name in names] for p in points], dtype=float)
    rest = np.array([max(p.us - p.other_us, 0.4 * p.us) for p in points])
    y = np.log2(rest / np.array([p.kernel_us for p in points]))
    counts: dict[object, int] = {}
    for p in points:
        counts[p.program] = counts.get(p.program, 0) + 1
    share = np.array([len(points) / len(counts) / counts[p.program] for p in points])
    mean = np.average(x, axis=0, weights=share)
    deviation = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=share))
    deviation[deviation == 0] = 1.0
    scaled = (x - mean) / deviation
    target = y - np.average(y, weights=share)
    normal = scaled.T @ (share[:, None] * scaled) + RIDGE * np.eye(len(names))
    slopes = np.linalg.solve(normal, scaled.T @ (share * target)) / deviation
    constant = float(np.average(y, weights=share) - slopes @ mean)
    return {name: round(float(w), 5) for name, w in zip(names, slopes, strict=True)}, constant


def estimated(p: Measured, weights: dict[str, float], constant: float) -> float:
    """Return the corrected estimate of a candidate."""
    return p.other_us + correction.corrected_by(p.kernel_us, p.features, weights, constant)


def regrets(points: Sequence[Measured], us: Sequence[float]) -> dict[tuple[str, int, int], float]:
    """Return the regret of each program for some estimates of its candidates."""
    programs: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for p, estimate in zip(points, us, strict=True):
        programs.setdefault(p.program, []).append((estimate, p.us))
    return {key: min(found)[1] / min(t for _, t in found) for key, found in programs.items()}


def summary(found: Iterable[float]) -> dict[str, float]:
    """Return the geometric mean, the median and the worst of some regrets."""
    found = list(found)
    return {
        "geometric_mean": round(math.exp(statistics.fmean(map(math.log, found))), 3),
        "median": round(statistics.median(found), 3),
        "worst": round(max(found), 3),
    }


def main() -> None:
    """Fit, print the regrets, and write the weights if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="JSON files of bench_untuned")
    parser.add_argument("--write", action="store_true", help="replace correction.json")
    args = parser.parse_args()
    points: list[Measured] = []
    gpus = set()
    for path in args.files:
        data = json.loads(path.read_text(encoding="utf-8"))
        gpus.add(data["machine"]["gpu"])
        points += measured(data["rows"], device_named(data["machine"]["gpu"], 90))
    left_out: list[float] = [0.0] * len(points)
    for hidden in {p.program[1] for p in points}:
        model = fit([p for p in points if p.program[1] != hidden])
        for n, p in enumerate(points):
            if p.program[1] == hidden:
                left_out[n] = estimated(p, *model)
    weights, constant = fit(points)
    of_all = [estimated(p, weights, constant) for p in points]
    without = [p.other_us + p.kernel_us for p in points]
    results = {}
    for what, us in (("uncorrected", without), ("left out", left_out), ("fitted", of_all)):
        found = regrets(points, us)
        results[what] = summary(found.values())
        worst = sorted(found.items(), key=lambda pair: -pair[1])[:5]
        print(f"{what:12}", results[what], {" ".join(map(str, k)): round(v, 2) for k, v in worst})
    if args.write:
        text = {
            "fitted_to": {
                "gpus": sorted(gpus),
                "files": [path.name for path in args.files],
                "programs": len({p.program for p in points}),
                "candidates": len(points),
            },
            "regret": results,
            "constant": round(constant, 5),
            "weights": weights,
        }
        correction.WEIGHTS.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
