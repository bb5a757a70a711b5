"""Times blocks beside torch eager and torch.compile (max-autotune): one process, CUDA graphs, cold weights, alternating.

    python scripts/bench_blocks.py --out docs/results/blocks.json
    python scripts/bench_blocks.py --blocks norm_linear,lora --schedules 12 --no-compile

Ours is found by search, verified, and tuned over the schedule space; the JSON holds the time of every schedule tried.
Weights are stored (N, K) as nn.Linear stores them, for all contenders alike. Needs an NVIDIA GPU.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import mirage_hf as mi
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.search.engine import SearchOptions
from mirage_hf.tune import measure, tuner
from mirage_hf.tune.cost import H200, tensor_bytes
from mirage_hf.verify.accept import search_and_verify
from mirage_hf.zoo.machine import this_machine

HALF = torch.float16


def weight(g: KernelGraph, k: int, n: int, name: str):
    return g.new_input((k, n), HALF, strides=(1, k), name=name)


def norm_linear(rows: int, k: int = 4096, n: int = 4096) -> KernelGraph:
    g = mi.new_kernel_graph()
    x, gamma = g.new_input((rows, k), HALF, name="x"), g.new_input((1, k), HALF, name="gamma")
    g.mark_output(g.matmul(g.rms_norm(x, gamma), weight(g, k, n, "w")))
    return g


def gated_mlp(rows: int, k: int = 4096, n: int = 4096) -> KernelGraph:
    g = mi.new_kernel_graph()
    x = g.new_input((rows, k), HALF, name="x")
    gate, up = (g.matmul(x, weight(g, k, n, name)) for name in ("gate", "up"))
    g.mark_output(g.mul(g.silu(gate), up))
    return g


def lora(rows: int, k: int = 4096, n: int = 4096, r: int = 16) -> KernelGraph:
    g = mi.new_kernel_graph()
    x = g.new_input((rows, k), HALF, name="x")
    base = g.matmul(x, weight(g, k, n, "w"))
    g.mark_output(g.add(base, g.matmul(g.matmul(x, weight(g, k, r, "a")), weight(g, r, n, "b"))))
    return g


def ntrans(rows: int, n: int = 4096) -> KernelGraph:
    g = mi.new_kernel_graph()
    x, y, a = (g.new_input((rows, n), HALF, name=name) for name in "xya")

    def norm(z):
        return g.div(z, g.sqrt(g.reduction(g.square(z), 1)))
    g.mark_output(norm(g.add(x, g.mul(a, g.sub(norm(y), x)))))
    return g


BLOCKS: dict[str, tuple[Callable[..., KernelGraph], tuple[int, ...], dict[str, int]]] = {
    "norm_linear": (norm_linear, (1, 16), {}),
    "norm_linear_6144": (norm_linear, (2, 16, 32), {"n": 6144}),
    "gated_mlp": (gated_mlp, (1, 8, 16), {}),
    "lora": (lora, (1, 16), {}),
    "lora_256": (lora, (16,), {"k": 256}),
    "ntrans": (ntrans, (1, 8, 16), {}),
}
"""By name: builder, rows, sizes."""

FIRST = ("norm_linear:1", "norm_linear:16", "gated_mlp:1", "gated_mlp:16", "lora:1")


@dataclass
class Contender:
    name: str
    graph: torch.cuda.CUDAGraph
    calls: int
    samples: list[float]


def bench(name: str, program: KernelGraph, args: argparse.Namespace) -> dict:
    started = time.perf_counter()
    searched = search_and_verify(program, SearchOptions(time_limit=20))
    found = searched.ugraphs()[:args.ugraphs]
    search = {"seconds": time.perf_counter() - started, "stop": searched.report.stop, "candidates": len(searched.candidates)}
    record: dict = {"block": name, "floor_us": floor_us(program), "search": search}
    if not found:
        return record | {"refused": searched.report.reason or "; ".join(r.reason for r in searched.report.refused)}
    started = time.perf_counter()
    tuned = tuner.tune(found, per_graph=args.schedules, replays=args.replays)
    record["tune"] = {"seconds": time.perf_counter() - started} | tuned.to_dict()
    for n, candidate in enumerate(tuned.candidates):
        record["tune"]["candidates"][n]["ugraph"] = next((k for k, u in enumerate(found) if u is candidate.ugraph), None)
    sets = measure.cold_inputs(program, "cuda")
    runs: dict[str, measure.Run] = {}
    if tuned.best_searched:
        record["ours"] = {"schedules": [str(s) for s in tuned.best_searched.schedules], "ugraph": str(tuned.best_searched.ugraph)}
        runs["ours"] = tuner.run_of(triton.generate(tuned.best_searched.ugraph, tuned.best_searched.schedules))
    stock = triton.generate(tuned.library.ugraph)
    runs["eager"] = compiler.load(stock.source, stock.digest).program
    if args.compile:
        torch._dynamo.reset()
        runs["compiled"] = torch.compile(runs["eager"], mode="max-autotune-no-cudagraphs")
    contenders = []
    for who, run in runs.items():
        try:
            contenders.append(Contender(who, *measure.capture(run, sets), []))
        except Exception as e:  # one contender that cannot run must not lose the others' numbers
            record.setdefault("failed", {})[who] = f"{type(e).__name__}: {e}"[:500]
            torch.cuda.synchronize()
    for _ in range(args.rounds):
        for c in contenders:
            c.samples.append(measure.time_graph(c.graph, c.calls, replays=3).us)
    for c in contenders:
        t = measure.timing(c.samples, c.calls)
        record[f"{c.name}_us"], record[f"{c.name}_spread"] = round(t.us, 3), round(t.spread, 4)
    return record


def floor_us(program: KernelGraph) -> float:
    return 1e6 * sum(map(tensor_bytes, (*program.inputs, *program.outputs))) / H200.bandwidth


def machine() -> dict:
    p = torch.cuda.get_device_properties(0)
    return this_machine() | {"sms": p.multi_processor_count, "l2_bytes": p.L2_cache_size}


def clock() -> int | None:
    try:
        return torch.cuda.clock_rate()
    except Exception:  # needs pynvml
        return None


def row(r: dict) -> str:
    cells = [f"{r[f'{who}_us']:8.2f}" if f"{who}_us" in r else f"{'–':>8}" for who in ("ours", "eager", "compiled")]
    note = r.get("refused") or "; ".join(f"{k} failed: {v}" for k, v in r.get("failed", {}).items())
    schedule = ", ".join(r.get("ours", {}).get("schedules", ()))
    return f"{r['block']:22}{''.join(cells)}{r['floor_us']:8.2f}  {schedule} {note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default=",".join(FIRST), help=f"name or name:rows, with commas, or all; names: {', '.join(BLOCKS)}")
    parser.add_argument("--schedules", type=int, default=40, help="schedules of each µGraph that are timed")
    parser.add_argument("--ugraphs", type=int, default=2, help="µGraphs of each block that are tuned")
    parser.add_argument("--replays", type=int, default=9, help="replays for each schedule while tuning")
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds of the final comparison")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    parser.add_argument("--out", type=Path, help="write a JSON file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_blocks: no GPU here; run it on the GPU whose times you want")
    everything = [f"{n}:{rows}" for n, (_, all_rows, _) in BLOCKS.items() for rows in all_rows]
    wanted = everything if args.blocks == "all" else args.blocks.split(",")
    jobs = []
    for item in wanted:
        name, _, rows = item.partition(":")
        if name not in BLOCKS:
            parser.error(f"unknown block {name!r}; there are {', '.join(BLOCKS)}")
        jobs += [(name, int(r)) for r in ([rows] if rows else BLOCKS[name][1])]
    report = {"machine": machine(), "weights": "(N, K)", "blocks": []}
    print(f"{'block:rows, µs':22}{'ours':>8}{'eager':>8}{'compiled':>8}{'floor':>8}", flush=True)
    for name, rows in jobs:
        build, _, sizes = BLOCKS[name]
        started = time.perf_counter()
        with torch.no_grad():
            result = bench(f"{name}:{rows}", build(rows, **sizes), args)
        result["seconds"], result["clock_mhz"] = round(time.perf_counter() - started, 1), clock()
        report["blocks"].append(result)
        print(row(result), flush=True)
        if args.out:  # after each block, so that a run that is cut short still tells
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
