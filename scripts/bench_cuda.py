"""Time tuned Triton kernels beside CUDA kernels, without and with clusters, in one run.

    python -m scripts.bench_cuda --out cuda.json
    python -m scripts.bench_cuda --blocks norm_linear_2048_512,attention_64_4096 --seconds 300
    python -m scripts.bench_cuda --only cuda,cluster --out cuda.json

For each block the search runs once, with clusters. Then three kinds of kernels are tuned: Triton,
CUDA without clusters, and CUDA whose blocks form clusters. The fastest of each is checked against
float64. They take turns in CUDA graphs over cold weights, and are timed in a chain of dependent
kernels. Times are µs per call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mirage_hf.codegen import triton
from mirage_hf.gpus import H200
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.pipeline.choose import permitted, promising, promising_in_cuda
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import measure, tuner
from mirage_hf.tune.ranking import CUDA, TRITON
from mirage_hf.verify.accept import Candidate
from mirage_hf.verify.case_inputs import make_inputs
from mirage_hf.verify.numeric_cases import Case
from scripts import benching
from scripts.bench_reports import Budget, Report, add_report_options, run_all
from scripts.benching import captured, error_of, explained, need_gpu, take_turns
from scripts.block_rows import gated_mlp, gqa_decode, norm_linear

#: The kinds of kernels that are compared.
KINDS = ("triton", "cuda", "cluster")


@dataclass(frozen=True)
class Block:
    """A program to time.

    Attributes:
        name: Its name in tables.
        build: Builds it.
    """

    name: str
    build: Callable[[], KernelGraph]


def _blocks() -> dict[str, Block]:
    """Return all blocks: one row of 16-bit numbers."""
    found = [
        Block(f"norm_linear_{k}_{n}", partial(norm_linear, 1, k, n))
        for k, n in (
            (2048, 512),
            (2048, 1024),
            (2048, 2048),
            (2048, 3072),
            (2048, 8192),
            (960, 1600),
            (4096, 512),
            (4096, 4096),
            (4096, 6144),
        )
    ]
    found += [
        Block(f"gated_mlp_{k}_{n}", partial(gated_mlp, 1, k, n))
        for k, n in ((960, 2560), (2048, 8192), (4096, 4096))
    ]
    found += [
        Block(
            f"attention_{kv_heads}x{group}_{d}_{keys}",
            partial(gqa_decode, 1, kv_heads, group, keys, d, torch.bfloat16),
        )
        for kv_heads, group, d, keys in (
            (8, 4, 64, 256),
            (8, 4, 64, 4096),
            (5, 3, 64, 256),
            (8, 4, 128, 256),
            (8, 4, 128, 4096),
        )
    ]
    return {block.name: block for block in found}


BLOCKS = _blocks()


def tuned(
    kind: str, candidates: Sequence[Candidate], program: KernelGraph, args: argparse.Namespace
) -> tuple[measure.Run | None, dict[str, Any]]:
    """Return the fastest kernels of one kind, or None, and what to record."""
    started = time.perf_counter()
    clustered = [c for c in candidates if c.ugraph.is_clustered]
    plain = [c for c in candidates if not c.ugraph.is_clustered]
    if kind == "triton":
        chosen = promising(plain)[: args.ugraphs]
    else:
        chosen = promising_in_cuda(clustered if kind == "cluster" else plain)[: args.ugraphs]
    if not chosen:
        return None, {"absent": "the search found no such kernel"}
    result = tuner.tune(
        [c.ugraph for c in chosen],
        device=benching.DEVICE,
        per_graph=args.schedules,
        replays=args.replays,
        schedules=permitted(chosen),
        resplit=kind == "triton",
        generators=(TRITON,) if kind == "triton" else (CUDA,),
    )
    tried = [c.to_dict() for c in result.candidates if not c.is_library]
    record: dict[str, Any] = {
        "tune_seconds": round(time.perf_counter() - started, 1),
        "tried": len(tried),
        "refused": sorted({c["reason"] for c in tried if c["reason"]})[:8],
        "candidates": tried,
    }
    best = result.best_searched
    if best is None or best.timing is None:
        return None, record | {"absent": "no candidate ran"}
    record |= {
        "kernels": best.ugraph.num_kernels,
        "ugraph": str(best.ugraph),
        "schedules": [str(s) for s in best.schedules],
        "tuned_us": round(best.timing.us, 3),
    }
    return measure.run_of(best.generate()), record


def bench(block: Block, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one block."""
    program = block.build()
    options = SearchOptions(time_limit=args.search_seconds, clusters=True)
    candidates = search_and_verify(program, options).candidates
    inputs = make_inputs(program, Case("random"), 0, benching.DEVICE)
    exact = run_kernel_graph(program, inputs, torch.float64)
    sets = measure.cold_inputs(program, benching.DEVICE)
    chain = measure.Chain(program, sets)
    moved = sum(map(stored_bytes, (*program.inputs, *program.outputs)))
    runs: dict[str, measure.Run] = {
        "library": measure.run_of(triton.generate(library_ugraph(program)))
    }
    results: dict[str, dict[str, Any]] = {"library": {}}
    for kind in args.only:
        run, results[kind] = tuned(kind, candidates, program, args)
        if run is not None:
            runs[kind] = run
    contenders = {}
    for name, run in runs.items():
        try:
            results[name]["error"] = error_of(run(inputs), exact)
            contenders[name] = captured(run, sets)
            timing = chain.time(run, args.replays)
            if timing is not None:
                results[name] |= {"chain_us": round(timing.us, 3)}
        except Exception as e:  # the other kinds' numbers must not be lost
            results[name]["failed"] = explained(e)
            benching.sync()
    take_turns(contenders.values(), args.rounds)
    for name, contender in contenders.items():
        results[name] |= contender.result()
    return {
        "bytes": moved,
        "floor_us": 1e6 * moved / H200.bandwidth,
        "kinds": results,
    }


HEADER = (
    f"{'block, µs':28}{'floor':>8}"
    + "".join(f"{k:>9}{'chain':>8}" for k in KINDS)
    + (f"{'library':>9}")
)


def line(r: dict[str, Any]) -> str:
    """Return a row for the terminal."""

    def us(kind: str, key: str, width: int) -> str:
        value = r["kinds"].get(kind, {}).get(key)
        return f"{'–' if value is None else format(value, '.2f'):>{width}}"

    columns = "".join(us(k, "us", 9) + us(k, "chain_us", 8) for k in KINDS)
    lines = [f"{r['name']:28}{r['floor_us']:8.2f}{columns}{us('library', 'us', 9)}"]
    for kind in KINDS:
        found = r["kinds"].get(kind, {})
        for key in ("failed", "absent"):
            if key in found:
                lines.append(f"    {kind}: {found[key]}; {'; '.join(found.get('refused', []))}")
        if "schedules" in found:
            lines.append(f"    {kind}: {' | '.join(found['schedules'])}")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", default="all", help=f"names with commas: {', '.join(BLOCKS)}")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of kernels, with commas")
    parser.add_argument("--search-seconds", type=float, default=30.0)
    parser.add_argument("--schedules", type=int, default=16, help="schedules of each µGraph")
    parser.add_argument("--ugraphs", type=int, default=3, help="µGraphs of each kind")
    parser.add_argument("--replays", type=int, default=7, help="replays for each schedule")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the final comparison")
    add_report_options(parser, "block")
    args = parser.parse_args()
    names = list(BLOCKS) if args.blocks == "all" else args.blocks.split(",")
    unknown = [n for n in names if n not in BLOCKS]
    args.only = tuple(args.only.split(","))
    if unknown or not set(args.only) <= set(KINDS):
        parser.error(f"unknown {', '.join(unknown) or args.only}; there are {', '.join(BLOCKS)}")
    budget = Budget(args.seconds)
    need_gpu("bench_cuda")
    report = Report(args.out, vars(args), args.resume)
    print(HEADER, flush=True)
    with torch.no_grad():
        run_all(report, {n: partial(bench, BLOCKS[n], args) for n in names}, budget, line)


if __name__ == "__main__":
    main()
