"""Time blocks beside torch eager, torch.compile, library calls and kernels of other projects.

    python -m scripts.bench_blocks --out blocks.json
    python -m scripts.bench_blocks --blocks norm_linear,lora:1 --schedules 12 --no-compile
    python -m scripts.bench_blocks --out blocks.json --resume --seconds 500
    python -m scripts.bench_blocks --blocks long --no-compile --out long.json

A *rival* computes a block without mirage_hf. An *entrant* is a rival or ours before it is captured,
and a *contender* is one that was captured.

Every contender is a CUDA graph over cold rotating inputs. It is checked against float64 before it
is timed, and takes turns with the others. Ours is the best µGraph that the search found, verified
and tuned. The JSON file holds the time of everything tuned. All weights are stored (N, K), as
nn.Linear stores them. A contender in brackets computes only the memory-bound core, so ours is not
compared with it.
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
from mirage_hf.graph.coded import stored_bytes
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.pipeline.choose import permitted, promising
from mirage_hf.pipeline.resize import cut_to
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import measure, tuner
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.measure import Run
from mirage_hf.verify.case_inputs import make_inputs
from mirage_hf.verify.numeric_cases import Case
from scripts import benching
from scripts.bench_reports import Budget, Report, add_report_options, run_all
from scripts.benching import (
    COMPILE,
    Contender,
    captured,
    error_of,
    explained,
    need_gpu,
    take_turns,
    within,
)
from scripts.block_rows import LONG, ROWS, Row
from scripts.rivals import Rival

OURS, COMPILED = "ours", " compiled"

#: Inputs of more bytes are checked batch by batch.
AT_ONCE_BYTES = 4 << 30

#: Results of more bytes are kept, so that every captured call writes to memory of its own, as steps
#: of layers write their states. If all calls wrote to one place, the L2 would take most writes.
KEPT_BYTES = 1 << 20


@dataclass(frozen=True)
class Entrant:
    """A contender before it is captured.

    Attributes:
        name: The name in tables.
        run: Computes the block.
        prepare: Makes its arguments from the program's inputs, once.
        whole: Whether it computes the whole block.
    """

    name: str
    run: Run
    prepare: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = list
    whole: bool = True


def find_ours(row: Row, args: argparse.Namespace, record: dict[str, Any]) -> list[Entrant]:
    """Search and tune, and note the result in `record`.

    Return nothing if every candidate was rejected.
    """
    program = row.program(**dict(row.tuned_at))
    if str(program) not in _tuned:
        _tuned[str(program)] = tune(program, args)
    best, found = _tuned[str(program)]
    record |= found
    if best is None:
        return []
    ugraph, schedules = (
        (best.ugraph, best.schedules)
        if not row.tuned_at
        else cut_to(best.ugraph, best.schedules, row.program())
    )
    record["ours"] = {
        "schedules": [str(s) for s in schedules],
        "ugraph": str(ugraph),
        "kernels": ugraph.num_kernels,
    }
    return [Entrant(OURS, measure.run_of(triton.generate(ugraph, schedules)))]


#: Results of tuning; rows that are refitted from one size share one.
_tuned: dict[str, tuple[ScheduledCandidate | None, dict[str, Any]]] = {}


def tune(
    program: KernelGraph, args: argparse.Namespace
) -> tuple[ScheduledCandidate | None, dict[str, Any]]:
    """Return the fastest searched candidate, or None, and what to record."""
    record: dict[str, Any] = {}
    started = time.perf_counter()
    searched = search_and_verify(program, SearchOptions(time_limit=args.search_seconds))
    candidates = promising(searched.candidates)[: args.ugraphs]
    record["search"] = {
        "seconds": time.perf_counter() - started,
        "stop": searched.report.stop,
        "candidates": len(searched.candidates),
    }
    if not candidates:
        record["refused"] = (
            searched.report.reason
            or "; ".join(r.reason for r in searched.report.rejected)
            or searched.report.stop
        )
        return None, record
    found = [c.ugraph for c in candidates]
    started = time.perf_counter()
    tuned = tuner.tune(
        found,
        device=benching.DEVICE,
        per_graph=args.schedules,
        replays=args.replays,
        schedules=permitted(candidates),
    )
    record["tune"] = tuned.to_dict() | {
        "seconds": time.perf_counter() - started,
        "ugraphs": [str(u) for u in found],
    }
    for candidate, written in zip(tuned.candidates, record["tune"]["candidates"], strict=True):
        written["ugraph"] = next((k for k, u in enumerate(found) if u is candidate.ugraph), None)
    if tuned.best_searched is None:
        record["refused"] = next((c.reason for c in tuned.candidates if c.reason), "no candidate")
    return tuned.best_searched, record


def entrants_of(rival: Rival, compiled: bool) -> list[Entrant]:
    """Return a rival, and the same compiled if wanted."""

    def call(
        run: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
        arguments: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        found = run(*arguments)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    found = [Entrant(rival.name, partial(call, rival.run), rival.arguments, rival.whole)]
    if compiled and rival.compiled:
        fast = torch.compile(rival.run, mode=COMPILE, dynamic=False)
        found.append(
            Entrant(rival.name + COMPILED, partial(call, fast), rival.arguments, rival.whole)
        )
    return found


def in_float64(row: Row, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the program's results in float64, batch by batch if they would not fit at once."""
    if row.rows == 1 or sum(x.nbytes for x in inputs) < AT_ONCE_BYTES:
        return run_kernel_graph(row.program(), inputs, torch.float64)
    one = row.program(rows=1)
    found = []
    for n in range(row.rows):
        part = [
            x if x.shape == t.dims else x.narrow(0, n * t.dims[0], t.dims[0])
            for x, t in zip(inputs, one.inputs, strict=True)
        ]
        found.append(run_kernel_graph(one, part, torch.float64))
    return [torch.cat(y) for y in zip(*found, strict=True)]


def keeps_results(program: KernelGraph) -> bool:
    """Return whether the results of all captured calls are kept."""
    return sum(map(stored_bytes, program.outputs)) > KEPT_BYTES


def keeping(run: Run, kept: list[list[torch.Tensor]]) -> Run:
    """Return a function that also puts its results into `kept`."""

    def call(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        kept.append(run(inputs))
        return kept[-1]

    return call


def checked_error(entrant: Entrant, row: Row) -> float:
    """Return an entrant's error against float64.

    The reference is the program, or for a part of a block the entrant itself in float64.

    Raises:
        ValueError: The result is wrong.
    """
    inputs = make_inputs(row.program(), Case("random"), 0, benching.DEVICE)
    exact = (
        in_float64(row, inputs)
        if entrant.whole
        else entrant.run(entrant.prepare([x.double() for x in inputs]))
    )
    return error_of(entrant.run(entrant.prepare(inputs)), exact)


def bench(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one row."""
    torch._dynamo.reset()
    program = row.program()
    moved = sum(map(stored_bytes, (*program.inputs, *program.outputs)))
    record: dict[str, Any] = {
        "block": row.block,
        "rows": row.rows,
        "bytes": moved,
        "floor_us": row.floor_us(program),
        "target_us": row.target_us,
    }
    results: dict[str, dict[str, Any]] = {
        r.name: {"absent": r.absent} for r in row.rivals if r.absent
    }
    entrants = find_ours(row, args, record)
    entrants += [e for r in row.rivals if not r.absent for e in entrants_of(r, args.compile)]
    sets = measure.cold_inputs(program, benching.DEVICE)
    kept: list[list[torch.Tensor]] = []
    contenders: dict[str, Contender] = {}
    for e in entrants:
        try:
            with within(args.cap):
                results[e.name] = {"whole": e.whole, "error": checked_error(e, row)}
                run = keeping(e.run, kept) if keeps_results(program) else e.run
                contenders[e.name] = captured(run, [e.prepare(s) for s in sets])
        except Exception as error:  # the other contenders' numbers must not be lost
            results[e.name] = {"failed": explained(error)}
            benching.sync()
    take_turns(contenders.values(), args.rounds)
    for name, c in contenders.items():
        results[name] |= c.result()
        results[name]["gb_s"] = round(moved / results[name]["us"] / 1e3, 1)
    return record | {"contenders": results} | judged(results, record["floor_us"], row.target_us)


def judged(
    contenders: dict[str, dict[str, Any]], floor_us: float, target_us: float
) -> dict[str, Any]:
    """Compare ours with the floor, the target, and the best rival that computes the whole block."""
    ours = contenders.get(OURS, {}).get("us")
    others = {
        name: c["us"]
        for name, c in contenders.items()
        if name != OURS and c.get("whole") and "us" in c
    }
    best = min(others, key=others.__getitem__, default=None)
    found: dict[str, Any] = {"best_rival": best} if best else {}
    if ours is None:
        return found | {"reached": False}
    faster = {"over_best_rival": round(others[best] / ours, 3)} if best else {}
    return (
        found | faster | {"share_of_floor": round(floor_us / ours, 3), "reached": ours <= target_us}
    )


HEADER = (
    f"{'block:rows, µs':22}{'ours':>9}{'eager':>9}{'compiled':>9}{'floor':>8}{'of floor':>9}"
    f"{'target':>8}{'':>9}"
    f"{'× best rival':>14}"
)


def line(r: dict[str, Any]) -> str:
    """Return a row for the terminal."""
    c = r["contenders"]

    def us(name: str) -> str:
        return f"{c[name]['us']:9.2f}" if "us" in c.get(name, {}) else f"{'–':>9}"

    share = f"{r['share_of_floor']:9.0%}" if "share_of_floor" in r else f"{'–':>9}"
    over = f"{r['over_best_rival']:7.2f} {r['best_rival']}" if "over_best_rival" in r else ""
    lines = [
        f"{r['name']:22}{us(OURS)}{us('eager')}{us('eager' + COMPILED)}{r['floor_us']:8.2f}{share}"
        f"{r['target_us']:8.1f}"
        f"{'  reached' if r['reached'] else '   missed'}{over}"
    ]
    rest = {
        name: v
        for name, v in c.items()
        if name not in (OURS, "eager", "eager" + COMPILED) and "us" in v
    }
    if rest:
        lines.append(
            "    "
            + ", ".join(
                f"{name if v['whole'] else f'({name})'} {v['us']:.2f}" for name, v in rest.items()
            )
        )
    lines += [
        f"    {name}: {v.get('failed') or v.get('absent')}"
        for name, v in c.items()
        if "us" not in v
    ]
    lines += (
        [f"    no kernel of ours: {r['refused']}"]
        if "refused" in r
        else [f"    ours: {'; '.join(r['ours']['schedules'])}"]
    )
    return "\n".join(lines)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Say how many targets were reached, and where a rival is faster."""
    measured = [r for r in rows if "contenders" in r]
    slower = [
        f"{r['name']} ({r['over_best_rival']:.2f} × {r['best_rival']})"
        for r in measured
        if r.get("over_best_rival", 1.0) < 1.0
    ]
    failed = [r["name"] for r in rows if "failed" in r]
    lines = [
        f"{sum(r['reached'] for r in measured)} of {len(measured)} targets reached",
        f"a rival is faster: {', '.join(slower) or 'nowhere'}",
    ]
    return "\n".join(lines + [f"failed: {', '.join(failed)}"] * bool(failed))


def chosen(text: str, parser: argparse.ArgumentParser) -> list[Row]:
    """Return the rows that a list of names, or name:rows, stands for."""
    found = []
    for item in text.split(","):
        sets = (("all", ROWS), ("long", LONG))
        rows = [
            r for name, known in sets for r in known.values() if item in (name, r.block, r.name)
        ]
        if not rows:
            parser.error(f"unknown block {item!r}; there are {', '.join((*ROWS, *LONG))}")
        found += rows
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks",
        default="all",
        help="name or name:rows, with commas, all, or long (attention over long caches); "
        f"there are {', '.join((*ROWS, *LONG))}",
    )
    parser.add_argument(
        "--search-seconds",
        type=float,
        default=60.0,
        help="seconds that the search of one block may take",
    )
    parser.add_argument(
        "--schedules", type=int, default=32, help="schedules of each µGraph that are timed"
    )
    parser.add_argument(
        "--ugraphs", type=int, default=4, help="µGraphs of each block that are tuned"
    )
    parser.add_argument(
        "--replays", type=int, default=9, help="replays for each schedule while tuning"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="alternating rounds of the final comparison"
    )
    parser.add_argument(
        "--cap",
        type=float,
        default=120.0,
        help="seconds that checking and capturing one contender may take",
    )
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave torch.compile out"
    )
    add_report_options(parser, "block")
    args = parser.parse_args()
    budget = Budget(args.seconds)
    rows = chosen(args.blocks, parser)
    need_gpu("bench_blocks")
    report = Report(args.out, vars(args), args.resume)
    print(HEADER, flush=True)
    with torch.no_grad():
        run_all(report, {row.name: partial(bench, row, args) for row in rows}, budget, line)
    print(summary(report.rows), flush=True)


if __name__ == "__main__":
    main()
