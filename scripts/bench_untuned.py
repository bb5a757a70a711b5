"""Compare kernels that nobody tuned with tuned ones, for sizes that no packaged kernel has.

    python -m scripts.bench_untuned --out untuned.json --seconds 500
    python -m scripts.bench_untuned --out untuned.json --resume --seconds 500
    python -m scripts.bench_untuned --out sample.json --sample 48

The four linears of decoder layers, bfloat16. Each block is resolved with `tune="never"`
and then with `tune="auto"`. Both kernels take turns in CUDA graphs over cold inputs. The ratio is
untuned / tuned: above 1, tuning gains. `candidates` has the time of each schedule that the tuner
measured. `fit_estimates` fits the cost model's correction to them. With `--sample`, nothing is
compared: random schedules are measured, so the fit knows those that the model would not try. Needs
an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.patterns.gated_mlp import GATED_MLP
from mirage_hf.patterns.linear_residual import LINEAR_RESIDUAL
from mirage_hf.patterns.rms_norm_linear import RMS_NORM_LINEAR
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline import resolver
from mirage_hf.pipeline.choose import promising
from mirage_hf.pipeline.resolver import kernel_request
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.tune import measure, multiply_adds, space
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.cost import estimate
from mirage_hf.tune.footprint import footprint
from mirage_hf.tune.tuner import tune
from mirage_hf.verify.accept import KEEP
from mirage_hf.verify.case_inputs import make_inputs
from mirage_hf.verify.numeric_cases import Case
from mirage_hf.zoo.key import target_of
from scripts import benching
from scripts.bench_reports import Budget, Report, add_report_options, run_all
from scripts.benching import Contender, captured, error_of, need_gpu, searched_run, take_turns

#: A sample is taken from the µGraphs of the best estimates, and from schedules whose estimates are
#: at most this many times the best.
GRAPHS, LIKELY = 6, 2.5

DTYPE, EPS = torch.bfloat16, 1e-6

#: Hidden size: outputs of q, k and v together, inputs of o, and width of the MLP. All but the first
#: are those of models, such as Gemma-2-2B and Qwen3-14B.
SIZES = {
    512: (768, 512, 1376),
    896: (1152, 896, 4864),
    1152: (1536, 1024, 6912),
    1536: (2048, 1536, 8960),
    2304: (4096, 2048, 9216),
    2560: (6144, 4096, 9728),
    3072: (5120, 3072, 8192),
    3584: (4608, 3584, 18944),
    5120: (7168, 5120, 17408),
    8192: (10240, 8192, 28672),
}


def _norm_and_linears(hidden: int) -> PatternBlock:
    n = (SIZES[hidden][0],)
    return RMS_NORM_LINEAR.block(k=hidden, n=n, bias=False, eps=EPS, dtype=DTYPE)


def _out(hidden: int) -> PatternBlock:
    return LINEAR_RESIDUAL.block(k=SIZES[hidden][1], n=hidden, bias=False, dtype=DTYPE)


def _gate_and_up(hidden: int) -> PatternBlock:
    return GATED_MLP.block(
        k=hidden,
        n=SIZES[hidden][2],
        activation="silu",
        norm=True,
        bias=False,
        eps=EPS,
        dtype=DTYPE,
    )


def _down(hidden: int) -> PatternBlock:
    return LINEAR_RESIDUAL.block(k=SIZES[hidden][2], n=hidden, bias=False, dtype=DTYPE)


#: The pattern and the block of each part of a layer.
BLOCKS: dict[str, tuple[str, Callable[[int], PatternBlock]]] = {
    "qkv": (RMS_NORM_LINEAR.name, _norm_and_linears),
    "o": (LINEAR_RESIDUAL.name, _out),
    "gate_up": (GATED_MLP.name, _gate_and_up),
    "down": (LINEAR_RESIDUAL.name, _down),
}


def bench(name: str, hidden: int, rows: int, rounds: int) -> dict[str, Any]:
    """Measure one block at one hidden size."""
    pattern, block = BLOCKS[name]
    program = block(hidden).program(rows)
    inputs = make_inputs(program, Case("random"), 0, benching.DEVICE)
    exact = run_kernel_graph(program, inputs, torch.float64)
    sets = measure.cold_inputs(program, benching.DEVICE)
    contenders: dict[str, Contender] = {}
    results: dict[str, Any] = {}
    for effort in ("never", "auto"):
        r = resolver.resolve(
            program,
            device=benching.DEVICE,
            tune=effort,
            pattern=pattern,
            next_may_launch_early=True,
        )
        run = searched_run(r)
        if run is None:
            raise ValueError(f"no kernel was found with tune={effort!r}: {r.reason}")
        results[effort] = {
            "error": error_of(run(inputs), exact),
            "source": r.source,
            "schedules": [str(s) for s in r.entry.schedules],
            "resolve_seconds": round(r.seconds, 1),
        }
        contenders[effort] = captured(run, sets)
        if r.outcome is not None:
            results["candidates"] = list(map(_candidate, r.outcome.measured))
    take_turns(contenders.values(), rounds)
    for effort, c in contenders.items():
        results[effort] |= c.result()
    floor = sum(map(stored_bytes, (*program.inputs, *program.outputs)))
    return {
        "block": name,
        "hidden": hidden,
        "rows": rows,
        "floor_us": 1e6 * floor / H200.bandwidth,
        "ratio": round(results["never"]["us"] / results["auto"]["us"], 3),
        **results,
    }


def sample(name: str, hidden: int, rows: int, count: int) -> dict[str, Any]:
    """Measure random schedules of one block, and those of the best estimates."""
    pattern, block = BLOCKS[name]
    program = block(hidden).program(rows)
    request = kernel_request(
        program,
        target=target_of(torch.device(benching.DEVICE)),
        pattern=pattern,
        next_may_launch_early=True,
        device=torch.device(benching.DEVICE),
    )
    verified = search_and_verify(program, request.options, keep=KEEP)
    ugraphs = [c.ugraph for c in promising(verified.candidates, True)[:GRAPHS]]
    each = max(1, count // len(ugraphs))
    generator = random.Random(f"{name} {hidden} {rows}")

    def chosen(op: KernelOp, gpu: Device) -> list[Schedule]:
        every = [s for s in space.schedules(op, gpu, limit=100_000) if not s.mma]
        costs = {s: estimate(plan_kernel(op, s), gpu) for s in every}
        plan = plan_kernel(op, every[0]) if every else None
        if plan is None or not multiply_adds.apply_to(plan, footprint(plan)):
            return every[:1]
        likely = [s for s in every if costs[s].us <= LIKELY * costs[every[0]].us]
        best = likely[: each // 3]
        rest = likely[len(best) :]
        return best + generator.sample(rest, min(len(rest), each - len(best)))

    tuned = tune(
        ugraphs,
        device=benching.DEVICE,
        per_graph=each,
        schedules=chosen,
        rounds=0,
        replays=5,
        next_may_launch_early=True,
        patience=0,
    )
    return {
        "block": name,
        "hidden": hidden,
        "rows": rows,
        "best_us": round(min(c.us for c in tuned.searched), 3),
        "candidates": list(map(_candidate, tuned.searched)),
    }


def _candidate(c: ScheduledCandidate) -> dict[str, Any]:
    """Return a measured candidate as plain data, without what schedules have by default."""
    schedules = [
        {k: v for k, v in s.to_dict().items() if v != default[k]}
        for s in c.schedules
        for default in (Schedule({}).to_dict(),)
    ]
    us = round(c.timing.us, 3) if c.timing else None
    return {"ugraph": digest(c.ugraph), "schedules": schedules, "us": us}


def digest(ugraph: UGraph) -> str:
    """Return a short digest of the kernels of a µGraph, whatever their schedules."""
    text = replace(ugraph, schedules=()).to_json()
    return hashlib.sha256(text.encode()).hexdigest()[:8]


HEADER = f"{'block, hidden':20}{'untuned':>9}{'tuned':>9}{'floor':>8}{'ratio':>8}  schedules"


def line(r: dict[str, Any]) -> str:
    """Return a row for the terminal."""
    if "ratio" not in r:
        return f"{r['name']:20}{r['best_us']:9.2f} the best of {len(r['candidates'])}"
    times = "".join(f"{r[tune]['us']:9.2f}" for tune in ("never", "auto"))
    schedules = " | ".join("; ".join(r[tune]["schedules"]) for tune in ("never", "auto"))
    return f"{r['name']:20}{times}{r['floor_us']:8.2f}{r['ratio']:8.2f}  {schedules}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median, the geometric mean and the worst of the ratios."""
    timed = [r for r in rows if r.get("ratio") is not None]
    if not timed:
        return {"rows": len(rows)}
    worst = max(timed, key=lambda r: r["ratio"])
    ratios = [r["ratio"] for r in timed]
    return {
        "rows": len(rows),
        "median": statistics.median(ratios),
        "geometric_mean": round(math.exp(statistics.fmean(map(math.log, ratios))), 3),
        "worst": {"name": worst["name"], "ratio": worst["ratio"]},
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks",
        type=lambda s: tuple(s.split(",")),
        default=tuple(BLOCKS),
        help=f"with commas; there are {', '.join(BLOCKS)}",
    )
    parser.add_argument(
        "--hidden",
        type=lambda s: tuple(map(int, s.split(","))),
        default=tuple(SIZES),
        help=f"with commas; of {', '.join(map(str, SIZES))}",
    )
    parser.add_argument("--rows", type=int, default=1, help="batch size")
    parser.add_argument(
        "--sample", type=int, default=0, help="measure this many schedules of each block instead"
    )
    parser.add_argument("--rounds", type=int, default=9, help="alternating rounds")
    add_report_options(parser, "size")
    args = parser.parse_args()
    if unknown := {*args.blocks} - {*BLOCKS} or {*args.hidden} - {*SIZES}:
        parser.error(f"unknown: {', '.join(map(str, unknown))}; see --help for what there is")
    budget = Budget(args.seconds)
    need_gpu("bench_untuned")
    report = Report(args.out, vars(args), args.resume)
    jobs = {
        f"{name}, {hidden}": partial(sample, name, hidden, args.rows, args.sample)
        if args.sample
        else partial(bench, name, hidden, args.rows, args.rounds)
        for hidden in args.hidden
        for name in args.blocks
    }
    print(HEADER, flush=True)
    with torch.no_grad():
        run_all(report, jobs, budget, line)
    report.data["summary"] = summary(report.rows)
    report.write()
    print(report.data["summary"], flush=True)


if __name__ == "__main__":
    main()
