"""Time kinds of kernels for linears whose weights are codes: the blocks of a decoder layer.

    python -m scripts.bench_codes --out codes.json
    python -m scripts.bench_codes --weights int8 --schedules 8 --seconds 110 --out int8.json
    python -m scripts.bench_codes --weights fp8 --out fp8.json
    python -m scripts.bench_codes --weights gptq --blocks gate_up
    python -m scripts.bench_codes --weights nf4 --rows 1,16 --out nf4.json
    python -m scripts.bench_codes --blocks gate_up,down --rows 1,4,16 --out codes.json
    python -m scripts.bench_codes --schedules 12 --climb 2 --seconds 500 --out codes.json
    python -m scripts.bench_codes --hidden 2048 --keys 512 --width 8192

The blocks are RMSNorm before q, k and v, the output linear with its residual, RMSNorm before gate
and up, and the down linear with its residual.

Codes share a scale: those of int8 in each row, and those of fp8 (e4m3) in square blocks of 128.
Others share it in groups of columns: 64 of nf4 and hqq, 32 of mxfp4, and 128 of most. Names that
end in "-zeros" stand for weights with zero points. int4-shifts and int4-tiles are torchao's int4 in
rows and in tiles. q8_0, q4_k and q6_k are blocks of GGUF, which have scales of their own.

The search runs once for each block. Then the schedules of each kind that have the best estimates
are measured as the tuner does. They are compiled in parallel, timed over cold weights in a CUDA
graph, and checked against float64. The fastest are also timed in a chain of dependent kernels. The
kinds are those of KINDS. Times are µs per call. The floor is what reading all tensors once takes.
A kernel that fails is listed with its reason.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import mirage_hf as mi
from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.formats import awq, gguf, gptq, hqq, torchao_int4
from mirage_hf.formats.bitsandbytes import TABLES, coding_of
from mirage_hf.formats.coding import Coding, write_joined
from mirage_hf.formats.stored import Split
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.dtypes import E2M1
from mirage_hf.pipeline.choose import permitted, promising
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import tuner
from mirage_hf.tune.candidates import MEASURED, TOO_SLOW
from mirage_hf.tune.schedule_cost import estimated_us
from mirage_hf.tune.space import REPEAT
from mirage_hf.tune.stream_schedules import SHARERS
from scripts import benching
from scripts.bench_reports import Budget, Report, add_report_options, run_all
from scripts.bench_sizes import numbers
from scripts.benching import need_gpu

DTYPE, EPS = torch.bfloat16, 1e-6

#: The kinds of kernels: products as multiply-adds. Products on tensor cores whose codes are copied
#: through shared memory. Words held in registers one step ahead, or held for all steps of a trip,
#: for tensor cores if the codes have 4 bits, for multiply-adds if they have 8. CUDA kernels whose
#: codes stream through a ring in shared memory.
KINDS = MULTIPLY_ADDS, STAGED, ONE_AHEAD, TRIPS, STREAMS, *SHARED = (
    "multiply-adds",
    "staged",
    "one step ahead",
    "trips",
    "streams",
    *(f"streams, clusters of {n}" for n in SHARERS if n > 1),
)


#: Candidates of the search that are kept for each kind of arithmetic. More than usual, because the
#: search's estimates put those for tensor cores late.
KEEP = 12


# -- programs -------------------------------------------------------------------------------------


def int4_weight(g: KernelGraph, k: int, n: int, group: int, name: str) -> DTensor:
    """Add a weight (k, n) of int4 codes: (code − 8) · scale in groups of rows."""
    codes = g.new_input((n, k // group, group), "uint4", name=name, constant=True)
    scales = g.new_input((n, k // group, 1), DTYPE, name=f"{name}_scales", constant=True)
    weight = g.mul(g.sub(g.cast(codes, DTYPE), 8.0), scales)
    return g.permute(g.reshape(weight, (n, k)), (1, 0))


def _int8(k: int, n: int) -> Coding:
    """Return a weight of int8 codes with a scale for each row."""
    split = Split(n, k)
    return Coding(n, k, DTYPE, split.codes(torch.int8), split.per_row(DTYPE))


def _fp8(k: int, n: int) -> Coding:
    """Return a weight of float8 codes with a float32 scale for each square block."""
    split = Split(n, k, FP8_BLOCK, FP8_BLOCK)
    return Coding(n, k, DTYPE, split.codes(torch.float8_e4m3fn), split.per_block(torch.float32))


def _nf4(k: int, n: int) -> Coding:
    """Return a weight of bitsandbytes: NF4 in blocks of 64 columns, with a float32 scale each."""
    return coding_of(n, k, 64, DTYPE, TABLES["nf4"])


def _gptq(k: int, n: int, zero: int | None = 8) -> Coding:
    """Return a weight of GPTQ in groups of 128 columns. `zero`: the zero point if all are equal."""
    return gptq.coding_of(n, k, 128, torch.uint4, torch.float16, DTYPE, zero)


def _int4_zeros(k: int, n: int) -> Coding:
    """Return a weight of compressed-tensors in groups of 128 columns, with zero points."""
    split = Split(n, k, 8, 128)
    zeros = split.packed_along_rows(torch.uint4, 8)
    return Coding(n, k, DTYPE, split.codes(torch.uint4), split.per_row(DTYPE), zeros)


def _awq(k: int, n: int, zero: int | None = None) -> Coding:
    """Return a weight of AWQ in groups of 128 columns. `zero`: the zero point if all are equal."""
    return awq.coding_of(n, k, 128, torch.float16, DTYPE, zero)


def _tiles(k: int, n: int) -> Coding:
    """Return a weight of torchao in tiles, with groups of 128 columns."""
    return torchao_int4.coding_of_tiles(n, k, k, 128, DTYPE)


def _shifts(k: int, n: int) -> Coding:
    """Return a weight of torchao in rows of groups of 128 columns, each with a shift."""
    return torchao_int4.coding_of_rows(n, k, 128, DTYPE, shifts=True)


def _gguf(k: int, n: int, kind: int) -> Coding:
    """Return a weight in blocks of GGUF of a type."""
    return gguf.coding_of(kind, n, k, DTYPE)


def _hqq(k: int, n: int) -> Coding:
    """Return a weight of HQQ with 4 bits, in groups of 64 columns."""
    return hqq.coding_of(n, k, 64, 4, DTYPE)


def _mxfp4(k: int, n: int) -> Coding:
    """Return a weight of 4-bit floats in groups of 32 columns, with a power of two each."""
    split = Split(n, k, group=32)
    codes, scales = split.codes(torch.uint4), split.per_row(torch.float8_e8m0fnu)
    return Coding(n, k, DTYPE, codes, scales, table=E2M1)


#: How weights are stored other than in int4.
CODINGS: Mapping[str, Callable[[int, int], Coding]] = {
    "int8": _int8,
    "fp8": _fp8,
    "nf4": _nf4,
    "gptq": _gptq,
    "gptq-zeros": partial(_gptq, zero=None),
    "int4-zeros": _int4_zeros,
    "awq": partial(_awq, zero=8),
    "awq-zeros": _awq,
    "int4-tiles": _tiles,
    "int4-shifts": _shifts,
    "hqq": _hqq,
    "q8_0": partial(_gguf, kind=8),
    "q4_k": partial(_gguf, kind=12),
    "q6_k": partial(_gguf, kind=14),
    "mxfp4": _mxfp4,
}

#: Rows and columns of a block of fp8 codes that share a scale.
FP8_BLOCK = 128


def coded_weight(
    g: KernelGraph, k: int, widths: Sequence[int], args: argparse.Namespace, name: str = "w"
) -> DTensor:
    """Add weights of codes side by side, each (k, width)."""
    if args.weights in CODINGS:
        codings = [CODINGS[args.weights](k, n) for n in widths]
        if len(codings) > 1 and not codings[0].joins(codings[0]):
            raise SystemExit(
                f"bench_codes: linears in {args.weights} do not join, so models run q, k and v "
                "apart; name other blocks, such as --blocks gate_up,down,output"
            )
        return write_joined(codings, g)[1]
    weights = [int4_weight(g, k, n, args.group, f"{name}{i}") for i, n in enumerate(widths)]
    return weights[0] if len(weights) == 1 else g.concat(weights, 1)


def _normed(g: KernelGraph, rows: int, k: int) -> DTensor:
    x = g.new_input((rows, k), DTYPE, name="x")
    return g.rms_norm(x, g.new_input((1, k), DTYPE, name="gamma", constant=True), EPS)


def joined(rows: int, args: argparse.Namespace) -> KernelGraph:
    """Build RMSNorm and linears side by side: q, k and v."""
    g = mi.new_graph()
    x = _normed(g, rows, args.hidden)
    weights = coded_weight(g, args.hidden, (args.hidden, args.keys, args.keys), args)
    g.mark_output(g.matmul(x, weights))
    return g


def gated(rows: int, args: argparse.Namespace) -> KernelGraph:
    """Build RMSNorm, and the product of an activated gate and another linear."""
    g = mi.new_graph()
    x = _normed(g, rows, args.hidden)
    gate, up = (
        g.matmul(x, coded_weight(g, args.hidden, (args.width,), args, name))
        for name in ("gate", "up")
    )
    g.mark_output(g.mul(g.silu(gate), up))
    return g


def added(rows: int, k: int, args: argparse.Namespace) -> KernelGraph:
    """Build a linear whose result is added to the residual."""
    g = mi.new_graph()
    x = g.new_input((rows, k), DTYPE, name="x")
    residual = g.new_input((rows, args.hidden), DTYPE, name="residual")
    g.mark_output(g.add(g.matmul(x, coded_weight(g, k, (args.hidden,), args)), residual))
    return g


#: The blocks, the one that reads most first.
BLOCKS: Mapping[str, Callable[[int, argparse.Namespace], KernelGraph]] = {
    "gate_up": gated,
    "down": lambda rows, args: added(rows, args.width, args),
    "qkv": joined,
    "output": lambda rows, args: added(rows, args.hidden, args),
}


# -- schedules ------------------------------------------------------------------------------------


def kind_of(op: KernelOp, schedule: Schedule) -> str:
    """Return the kind of a kernel."""
    if schedule.persistent_blocks:
        count = schedule.cooperating_blocks
        return STREAMS if count == 1 else f"{STREAMS}, clusters of {count}"
    if schedule.steps_per_trip > 1:
        return TRIPS
    if plan_kernel(op, schedule).pipelining.holds_words_ahead:
        return ONE_AHEAD
    return STAGED if schedule.mma else MULTIPLY_ADDS


def best_of_each_kind(
    ugraphs: Sequence[UGraph],
    schedules: Callable[[KernelOp, Device], Sequence[Schedule]],
    most: int,
    kinds: Collection[str] = KINDS,
) -> dict[PlacedOp, list[Schedule]]:
    """Return the best schedules by estimate for the kernel of each µGraph.

    Schedules of a kind have many different tiles, as in the tuner: each further one with the same
    tiles counts as slower.

    Args:
        ugraphs: µGraphs of one program. Those with several kernels are left out.
        schedules: The schedules of a kernel.
        most: The most schedules of each kind, of all µGraphs together. Trips get twice as many.
        kinds: The kinds that are wanted.
    """
    found: dict[str, list[tuple[float, PlacedOp, Schedule]]] = {kind: [] for kind in KINDS}
    for ugraph in ugraphs:
        ops = place_kernels(ugraph)
        if len(ops) == 1:
            for s in schedules(ops[0], H200):
                kind = kind_of(ops[0], s)
                if kind in kinds:
                    found[kind].append((estimated_us(ops[0], s), ops[0], s))
    chosen: dict[PlacedOp, list[Schedule]] = {}
    for kind, candidates in found.items():
        count = 2 * most if kind == TRIPS else most
        seen: Counter[Mapping[str, int]] = Counter()
        ranked: list[tuple[float, PlacedOp, Schedule]] = []
        for us, op, s in sorted(candidates, key=lambda c: c[0]):
            ranked.append((us * (1 + REPEAT * seen[s.tiles]), op, s))
            seen[s.tiles] += 1
        for _, op, s in sorted(ranked, key=lambda c: c[0])[:count]:
            chosen.setdefault(op, []).append(s)
    return chosen


# -- measuring ------------------------------------------------------------------------------------


def bench(program: KernelGraph, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one block with one number of rows."""
    started = time.perf_counter()
    options = SearchOptions(time_limit=args.search_seconds)
    usable = promising(search_and_verify(program, options, keep=KEEP).candidates, streams=True)
    ugraphs = [c.ugraph for c in usable if c.ugraph.num_kernels == 1]
    kinds = (STREAMS, *SHARED) if args.streams else KINDS
    chosen = best_of_each_kind(ugraphs, permitted(usable, streams=True), args.schedules, kinds)
    searched = time.perf_counter()
    ours = [u for u in ugraphs if any(op in chosen for op in place_kernels(u))]
    result = tuner.tune(
        ours,
        device=benching.DEVICE,
        per_graph=max(map(len, chosen.values())),
        replays=args.replays,
        schedules=lambda op, device: chosen.get(op, []) if isinstance(op, PlacedOp) else [],
        rounds=args.climb,
        patience=0,
    )
    floor_us = 1e6 * sum(map(stored_bytes, (*program.inputs, *program.outputs))) / H200.bandwidth
    candidates = []
    for c in result.candidates:
        kind = "library" if c.is_library else kind_of(c.placed()[0], c.schedules[0])
        text = " | ".join(map(str, c.schedules))
        candidates.append({"kind": kind, "text": text, **c.to_dict()})
    return {
        "floor_us": floor_us,
        "search_seconds": round(searched - started, 1),
        "tune_seconds": round(time.perf_counter() - searched, 1),
        "candidates": candidates,
        "best": {kind: best(candidates, kind) for kind in (*KINDS, "library")},
    }


def best(candidates: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    """Return the fastest right kernel of a kind, or the first by estimate if none was measured."""
    right = [c for c in candidates if c["kind"] == kind and c["status"] not in FAILED]
    return min(right, key=lambda c: c.get("us", c["estimate_us"]), default=None)


#: The status of candidates that count as no result: their numbers are wrong or were not checked.
FAILED = ("rejected", TOO_SLOW)

HEADER = f"{'block:rows':12}{'µs':>8}{'chain':>8}{'floor/µs':>10}{'estimate':>10}  kind, schedule"


def line(r: dict[str, Any]) -> str:
    """Return the rows of one block for the terminal: every kernel, then the best of each kind."""
    lines = [f"{r['name']}: the floor is {r['floor_us']:.2f} µs"]
    lines += [_row(r, c, "") for c in r["candidates"]]
    lines += [_row(r, c, f"best {kind}: ") for kind, c in r["best"].items() if c is not None]
    return "\n".join(lines)


def _row(r: Mapping[str, Any], c: Mapping[str, Any], prefix: str) -> str:
    us, chain = (f"{c[key]:8.2f}" if key in c else f"{'–':>8}" for key in ("us", "chain_us"))
    share = f"{r['floor_us'] / c['us']:10.2f}" if "us" in c else f"{'–':>10}"
    status = "" if c["status"] == MEASURED else f" ({c['status']} {c['reason']})"
    kind = prefix or f"{c['kind']}, "
    return f"{r['name']:12}{us}{chain}{share}{c['estimate_us']:10.2f}  {kind}{c['text']}{status}"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", default="all", help=f"names with commas: {', '.join(BLOCKS)}")
    parser.add_argument("--rows", type=numbers, default=(1,), help="with commas")
    parser.add_argument("--weights", choices=("int4", *CODINGS), default="int4")
    parser.add_argument("--hidden", type=int, default=4096, help="by default as in Llama-3.1-8B")
    parser.add_argument("--keys", type=int, default=1024, help="columns of k and of v")
    parser.add_argument("--width", type=int, default=14336, help="columns of gate and of up")
    parser.add_argument("--group", type=int, default=128, help="int4 columns that share a scale")
    parser.add_argument("--search-seconds", type=float, default=20.0)
    parser.add_argument(
        "--schedules", type=int, default=6, help="of each kind; trips get twice as many"
    )
    parser.add_argument("--streams", action="store_true", help="only kernels that stream codes")
    parser.add_argument(
        "--climb", type=int, default=0, help="rounds of schedules next to the fastest"
    )
    parser.add_argument("--replays", type=int, default=7, help="replays for each schedule")
    add_report_options(parser, "block")
    args = parser.parse_args()
    names = list(BLOCKS) if args.blocks == "all" else args.blocks.split(",")
    if unknown := {*names} - {*BLOCKS}:
        parser.error(f"unknown blocks: {', '.join(unknown)}; there are {', '.join(BLOCKS)}")
    budget = Budget(args.seconds)
    need_gpu("bench_codes")
    report = Report(args.out, vars(args), args.resume)
    print(HEADER, flush=True)
    jobs = {
        f"{name}:{rows}": partial(bench, BLOCKS[name](rows, args), args)
        for rows in args.rows
        for name in names
    }
    with torch.no_grad():
        run_all(report, jobs, budget, line)


if __name__ == "__main__":
    main()
