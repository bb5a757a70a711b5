"""Check that no size of a decoding block is slower than the library.

    python -m scripts.bench_sizes --out sizes.json --seconds 500
    python -m scripts.bench_sizes --out sizes.json --resume --seconds 500
    python -m scripts.bench_sizes --rows 1,8 --hidden 896,2560 --blocks rms_norm_linear

bfloat16, hidden sizes of real models, odd batch sizes. Kernels are looked up, or searched and tuned
quickly. Results are checked against float64. Ours and the library then take turns in CUDA graphs
over cold inputs. The ratio is library / ours: below 1, ours is slower. It is 1 if the library is
what runs. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch

from mirage_hf.gpus import H200
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.patterns.gated_mlp import GATED_MLP
from mirage_hf.patterns.linear_residual import LINEAR_RESIDUAL
from mirage_hf.patterns.rms_norm_linear import RMS_NORM_LINEAR
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline import outcome, resolver
from mirage_hf.tune import measure
from mirage_hf.verify.case_inputs import make_inputs
from mirage_hf.verify.numeric_cases import Case
from scripts import benching
from scripts.bench_reports import Budget, Report, add_report_options, run_all
from scripts.benching import captured, error_of, explained, need_gpu, searched_run, take_turns

DTYPE, EPS = torch.bfloat16, 1e-6

ROWS = (1, 2, 3, 5, 8, 16, 17, 32, 64)

#: MLP widths by hidden size, from Qwen2.5-0.5B, SmolLM2-360M, Gemma-3-1B, Qwen3-4B, Llama-3.2-3B
#: and Qwen2.5-7B.
MLP_WIDTHS = {896: 4864, 960: 2560, 1152: 6912, 2560: 9728, 3072: 8192, 3584: 18944}

BLOCKS = (RMS_NORM_LINEAR.name, GATED_MLP.name, LINEAR_RESIDUAL.name)


def block_of(name: str, hidden: int) -> PatternBlock:
    """Return a block at a hidden size."""
    if name == GATED_MLP.name:
        return GATED_MLP.block(
            k=hidden,
            n=MLP_WIDTHS[hidden],
            activation="silu",
            norm=False,
            bias=False,
            eps=EPS,
            dtype=DTYPE,
        )
    if name == LINEAR_RESIDUAL.name:
        return LINEAR_RESIDUAL.block(k=hidden, n=hidden, bias=False, dtype=DTYPE)
    return RMS_NORM_LINEAR.block(k=hidden, n=(hidden,), bias=False, eps=EPS, dtype=DTYPE)


def bench(name: str, rows: int, hidden: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one block at one size."""
    program = block_of(name, hidden).program(rows)
    r = resolver.resolve(program, device=benching.DEVICE, tune=args.tune, pattern=name)
    floor_us = 1e6 * sum(map(stored_bytes, (*program.inputs, *program.outputs))) / H200.bandwidth
    record = {
        "block": name,
        "rows": rows,
        "hidden": hidden,
        "floor_us": floor_us,
        "source": r.source,
        "tuned_us": r.time_us,
        "tuned_library_us": r.library_us,
        "reason": r.reason,
        "resolve_seconds": round(r.seconds, 1),
        "schedules": [str(s) for s in r.entry.schedules],
    }
    runs: dict[str, measure.Run] = {outcome.LIBRARY: partial(run_kernel_graph, program)}
    if (searched := searched_run(r)) is not None:
        runs[outcome.OURS] = searched
    inputs = make_inputs(program, Case("random"), 0, benching.DEVICE)
    exact = run_kernel_graph(program, inputs, torch.float64)
    sets = measure.cold_inputs(program, benching.DEVICE)
    results: dict[str, dict[str, Any]] = {}
    contenders = {}
    for who, run in runs.items():
        try:
            results[who] = {"error": error_of(run(inputs), exact)}
            contenders[who] = captured(run, sets)
        except Exception as e:  # a kernel that is wrong is a result too
            results[who] = {"failed": explained(e)}
            benching.sync()
    take_turns(contenders.values(), args.rounds)
    for who, c in contenders.items():
        results[who] |= c.result()
    runs_now = outcome.OURS if r.runs_kernel else outcome.LIBRARY
    return record | {"runs": runs_now, "contenders": results, "ratio": ratio(results, runs_now)}


def ratio(results: dict[str, dict[str, Any]], runs: str) -> float | None:
    """Return the library's time over ours, or None if one of them has no time."""
    if runs == outcome.LIBRARY:
        return 1.0
    times = [results.get(who, {}).get("us") for who in (outcome.LIBRARY, runs)]
    return round(times[0] / times[1], 3) if times[0] and times[1] else None


HEADER = f"{'block, batch, hidden':34}{'library':>9}{'searched':>9}{'floor':>8}{'ratio':>8}  runs"


def line(r: dict[str, Any]) -> str:
    """Return a row for the terminal."""

    def us(who: str) -> str:
        return (
            f"{r['contenders'][who]['us']:9.2f}"
            if "us" in r["contenders"].get(who, {})
            else f"{'–':>9}"
        )

    shown = f"{r['ratio']:8.2f}" if r["ratio"] is not None else f"{'–':>8}"
    failures = [
        f"{who} failed: {v['failed']}" for who, v in r["contenders"].items() if "failed" in v
    ]
    schedules = "; ".join(r["schedules"])
    return (
        f"{r['name']:34}{us(outcome.LIBRARY)}{us(outcome.OURS)}{r['floor_us']:8.2f}{shown}  "
        f"{r['runs']}, {r['source']}: {schedules}" + "".join(f"\n    {f}" for f in failures)
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Name the worst row, and those slower than the library or without a comparison."""
    timed = [r for r in rows if r.get("ratio") is not None]
    worst = min(timed, key=lambda r: r["ratio"], default=None)
    return {
        "rows": len(rows),
        "searched_runs": sum(r.get("runs") == outcome.OURS for r in rows),
        "slower": sorted(r["name"] for r in timed if r["ratio"] < 0.98),
        "untold": sorted(r["name"] for r in rows if r not in timed),
        "geometric_mean": round(math.exp(sum(math.log(r["ratio"]) for r in timed) / len(timed)), 3)
        if timed
        else None,
        "worst": {"name": worst["name"], "ratio": worst["ratio"]} if worst else None,
    }


def numbers(text: str) -> tuple[int, ...]:
    """Parse positive numbers with commas."""
    return tuple(int(n) for n in text.split(","))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks",
        type=lambda s: tuple(s.split(",")),
        default=BLOCKS,
        help=f"with commas; there are {', '.join(BLOCKS)}",
    )
    parser.add_argument("--rows", type=numbers, default=ROWS, help="batch sizes, with commas")
    parser.add_argument(
        "--hidden",
        type=numbers,
        default=tuple(MLP_WIDTHS),
        help=f"with commas; of {', '.join(map(str, MLP_WIDTHS))}",
    )
    parser.add_argument(
        "--tune", default="auto", choices=("auto", "full"), help="full measures more, and anew"
    )
    parser.add_argument("--rounds", type=int, default=9, help="alternating rounds")
    add_report_options(parser, "size")
    args = parser.parse_args()
    if unknown := {*args.blocks} - {*BLOCKS} or {*args.hidden} - {*MLP_WIDTHS}:
        parser.error(f"unknown: {', '.join(map(str, unknown))}; see --help for what there is")
    budget = Budget(args.seconds)
    need_gpu("bench_sizes")
    report = Report(args.out, vars(args), args.resume)
    jobs = {
        f"{name}, {rows}, {hidden}": partial(bench, name, rows, hidden, args)
        for rows in args.rows
        for name in args.blocks
        for hidden in args.hidden
    }
    print(HEADER, flush=True)
    with torch.no_grad():
        run_all(report, jobs, budget, line)
    report.data["summary"] = summary(report.rows)
    report.write()
    print(report.data["summary"], flush=True)


if __name__ == "__main__":
    main()
