"""Measure the search on a CPU: times, memory, counters and results, program by program.

    python -m scripts.bench_search --out build/search
    python -m scripts.bench_search --programs lora_paper,llama_layer --repeat 1

Each run is the command line in a fresh process:

    mirage-hf search PROGRAM.json --json OUT --no-cache --backend cpu

Programs are those of tests/helpers/programs.py at full size, and some more. `--out` names the
folder for search.json (every run) and README.md (tables).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

from tests.helpers import decoder_layers, programs

# mirage_hf and torch are imported in a process of their own, because Linux counts this process's
# peak of memory as that of its children.

ROOT = Path(__file__).resolve().parent.parent


def weight(g, k, n, name):
    """Add a weight as nn.Linear stores it."""
    return g.new_input((k, n), "float16", strides=(1, k), name=name)


def two_loras(mi, rows=1, k=4096, n=4096, r=16):
    """Build RMSNorm, a linear, and two adapters."""
    g = mi.new_kernel_graph()
    x, gamma = (
        g.new_input((rows, k), "float16", name="x"),
        g.new_input((1, k), "float16", name="gamma"),
    )
    h = g.rms_norm(x, gamma)
    y = g.matmul(h, weight(g, k, n, "w"))
    for m in (1, 2):
        y = g.add(y, g.matmul(g.matmul(h, weight(g, k, r, f"a{m}")), weight(g, r, n, f"b{m}")))
    g.mark_output(y)
    return g


def softmax(mi, rows=1, n=128256):
    """Build a softmax."""
    g = mi.new_kernel_graph()
    g.mark_output(g.softmax(g.new_input((rows, n), "float16", name="x")))
    return g


def layer_norm_linear(mi, rows=16, k=4096, n=4096):
    """Build LayerNorm and a linear."""
    g = mi.new_kernel_graph()
    x = g.new_input((rows, k), "float16", name="x")
    gamma, beta = (g.new_input((1, k), "float16", name=name) for name in ("gamma", "beta"))
    y = g.matmul(g.layer_norm(x, gamma, beta), weight(g, k, n, "w"))
    g.mark_output(g.add(y, g.new_input((1, n), "float16", name="bias")))
    return g


def linear_residual_stats(mi, rows=16, k=4096, n=4096):
    """Build a linear, its residual, and the statistics of the next norm."""
    g = mi.new_kernel_graph()
    x, r = g.new_input((rows, k), "float16", name="x"), g.new_input((rows, n), "float16", name="r")
    y = g.add(r, g.matmul(x, weight(g, k, n, "w")))
    g.mark_output(y, g.reduction(g.square(y), 1, "mean"))
    return g


def mlp(mi, rows=1, hidden=2048, ffn=8192):
    """Build a whole gated MLP with norm and residual."""
    g = mi.new_kernel_graph()
    x, gamma = (
        g.new_input((rows, hidden), "float16", name="x"),
        g.new_input((1, hidden), "float16", name="gamma"),
    )
    h = g.rms_norm(x, gamma)
    m = g.mul(
        g.silu(g.matmul(h, weight(g, hidden, ffn, "gate"))),
        g.matmul(h, weight(g, hidden, ffn, "up")),
    )
    g.mark_output(g.add(x, g.matmul(m, weight(g, ffn, hidden, "down"))))
    return g


Program = tuple[Callable[..., Any], dict[str, Any], int | None]
#: Programs by name: builder, sizes, and the most kernels that a result may have (None: any number).
PROGRAMS: dict[str, Program] = {
    **programs.PROGRAMS,
    "norm_two_loras": (two_loras, {}, None),
    "softmax": (softmax, {}, None),
    "layer_norm_linear": (layer_norm_linear, {}, None),
    "linear_residual_stats": (linear_residual_stats, {}, None),
    "mlp": (mlp, {}, None),
    "attention_16_heads": (programs.attention, dict(heads=16), None),
    "llama_layer": (decoder_layers.decoder_layer, dict(past=1023), None),
}

#: A run is killed this many seconds after the search's limit. Nothing else limits proofs and
#: imports.
SLACK = 600.0


# -- in the process that has the package ----------------------------------------------------------


def prepare(folder: Path, names: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    """Write the programs' files. Return what all runs have in common."""
    import mirage_hf as mi
    from mirage_hf import _core
    from mirage_hf.graph.ugraph import library_ugraph
    from mirage_hf.search import counter_labels
    from mirage_hf.search.search_options import SearchOptions
    from mirage_hf.search.search_report import Counters
    from mirage_hf.zoo.machine import this_machine

    about = {}
    for name in names:
        builder, sizes, most = PROGRAMS[name]
        graph = builder(mi, **sizes)
        graph.to_json(folder / f"{name}.json")
        about[name] = {
            "ops": len(graph.ops),
            "library_kernels": library_ugraph(graph).num_kernels,
            "kernels_wanted": most,
            "inputs": [list(map(int, t.dims)) for t in graph.inputs],
        }
    options, core = SearchOptions(**given), _core.Limits()
    limits = {
        f.name: getattr(options, f.name)
        for f in fields(options)
        if f.name not in ("threads", "roles", "maps", "gpu")
    }
    limits |= {name: getattr(core, name) for name in ("max_values", "max_expansions")}
    limits |= {"tile": _core.largest_tile}
    compilers = re.findall(rb"(?:GCC: \(|clang version )[ -~]*", Path(_core.__file__).read_bytes())
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    machine = this_machine() | {
        "compiler of the core": " and ".join(sorted({c.decode() for c in compilers})) or "unknown",
        "cpu": cpu[1] if cpu else "unknown",
        "cores": len(os.sched_getaffinity(0)),
    }
    groups = {
        f.name: counter_labels.LABELS.get(f.name, ("other", f.name.replace("_", " ")))
        for f in fields(Counters)
    }
    return {
        "machine": machine,
        "limits": limits,
        "programs": about,
        "counters": {
            name: label
            for name, (group, label) in groups.items()
            if group != "found" and name not in NOT_COUNTED
        },
    }


NOT_COUNTED = ("width", "seconds", "first_seconds")


def results(written: Path) -> dict[str, Any]:
    """Return the results that a run wrote, without the µGraphs."""
    from mirage_hf.graph import json_format

    data = json.loads(written.read_text(encoding="utf-8"))
    found = [json_format.ugraph_from_dict(u, "results") for u in data["results"]]
    kernels = [u.num_kernels for u in found if u.is_fused]
    report = data["report"]
    rejected = Counter(r["reason"] for r in report.pop("rejected"))
    return {
        **report,
        "refused": sum(rejected.values()),
        "refused_why": dict(rejected.most_common()),
        "kernels": kernels,
        "kernels_best": found[0].num_kernels,
        "kernels_least": min(kernels, default=None),
        "best_is_library": not found[0].is_fused,
    }


# -- runs -----------------------------------------------------------------------------------------


class Reader(threading.Thread):
    """A thread that reads a pipe to its end. `at` is the time of the first line with `mark`."""

    def __init__(self, pipe: IO[str], mark: str):
        """Start reading."""
        super().__init__(daemon=True)
        self.pipe, self.mark, self.at, self.lines = pipe, mark, -1.0, [""]
        self.start()

    def run(self) -> None:
        """Read all lines."""
        for line in self.pipe:
            if self.at < 0 and self.mark in line:
                self.at = time.perf_counter()
            self.lines.append(line.strip())


def run_once(folder: Path, name: str, command: Sequence[str], limit: float) -> dict[str, Any]:
    """Run the command in a folder. Return its seconds and its peak memory in MiB."""
    started = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "mirage_hf.cli.main", *command],
        cwd=folder,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout and child.stderr
    out, err = Reader(child.stdout, "\n"), Reader(child.stderr, f"{name}.json: searching")
    killer = threading.Timer(limit, os.kill, (child.pid, signal.SIGKILL))
    killer.daemon = True
    killer.start()
    _, status, usage = os.wait4(child.pid, 0)
    ended = time.perf_counter()
    killer.cancel()
    child.returncode = os.waitstatus_to_exitcode(status)
    out.join()
    err.join()
    measured = {"command_s": ended - started, "peak_mib": usage.ru_maxrss / 1024}
    if child.returncode or out.at < 0 or err.at < 0:
        return measured | {
            "failed": f"exit code {child.returncode}: {err.lines[-1]}".replace(f"{folder}/", "")[
                :500
            ]
        }
    return measured | {"start_s": err.at - started, "done_s": out.at - err.at}


def measure(
    package: ProcessPoolExecutor, folder: Path, name: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Run every program."""
    runs = []
    for _ in range(args.repeat):
        written = folder / "out.json"
        written.unlink(missing_ok=True)
        run = run_once(
            folder, name, command(f"{name}.json", written.name, args), args.time_limit + SLACK
        )
        if "failed" not in run:
            run |= package.submit(results, written).result()
            run |= {
                "found_s": run["counters"]["first_seconds"],
                "verified_s": run["first_accepted_seconds"],
            }
        runs.append(run)
    return {"program": name, "runs": runs}


def command(program: str, out: str, args: argparse.Namespace) -> list[str]:
    """Return the command of a run."""
    return [
        "search",
        program,
        "--time-limit",
        f"{args.time_limit:g}",
        "--json",
        out,
        "--no-cache",
        "--backend",
        "cpu",
        "--threads",
        str(args.threads),
    ]


# -- tables ---------------------------------------------------------------------------------------

TIMES = {
    "found_s": "seconds until the first µGraph, or in windows the first one of a part",
    "verified_s": "seconds until the first µGraph of the whole program is proven and checked",
    "done_s": "seconds until all candidates are judged, or time is up, and results have schedules",
    "start_s": "seconds before that: starting Python, importing, reading the program",
    "command_s": "seconds of the whole command",
    "peak_mib": "peak resident memory in MiB, Python and torch included",
}
RESULTS = {
    "stop": "why the search stopped",
    "ops": "ops of the program",
    "library": "kernels of the library path: one call for each op that is not a view",
    "best": "kernels of the best result by the cost model's estimate",
    "least": "kernels of the result that has the fewest",
    "asked": "most kernels that tests/helpers/programs.py allows; – allows any number",
    "estimate_us": "estimate of the cheapest kernels in µs on an H200; – if searched in windows",
    "kept": "candidates that were proven and whose rounding was accepted",
    "refused": "candidates that were found and rejected",
    "error_bound": "largest chance that a wrong candidate was accepted",
}


def span(values: Iterable[float | None], digits: int = 0) -> str:
    """Return the median of some runs, with the lowest and highest if they differ."""
    known = sorted(v for v in values if v is not None and v >= 0)
    if not known:
        return "–"
    texts = [f"{v:,.{digits}f}" for v in (statistics.median(known), known[0], known[-1])]
    return texts[0] if texts[1] == texts[2] else f"{texts[0]} ({texts[1]}–{texts[2]})"


def same(values: Iterable[Any]) -> str:
    """Return the value of all runs, or each different value."""
    return " / ".join(dict.fromkeys("–" if v is None else str(v) for v in values))


def good(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that did not fail."""
    return [r for r in block["runs"] if "failed" not in r]


def windowed(run: dict[str, Any]) -> bool:
    """Return whether the program was searched in windows; its counters are then sums."""
    return any(note.startswith("windows:") for note in run["notes"])


def times(block: dict[str, Any]) -> list[str]:
    """Return the columns of times."""
    return [span((r[name] for r in good(block)), 0 if name == "peak_mib" else 3) for name in TIMES]


def counts(block: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Return the columns of counters."""
    return [span(r["counters"][name] for r in good(block)) for name in names]


def outcome(block: dict[str, Any], about: dict[str, Any]) -> list[str]:
    """Return the columns of results."""
    runs = good(block)
    if not runs:
        return [f"failed: {block['runs'][0]['failed']}"] + ["–"] * (len(RESULTS) - 1)
    estimates = (None if windowed(r) else r["counters"]["best_us"] for r in runs)
    stops = same(
        r["stop"] + (f" at {r['counters']['width']}" if r["stop"] == "exhausted" else "")
        for r in runs
    )
    best = same(f"{r['kernels_best']}{' (library)' if r['best_is_library'] else ''}" for r in runs)
    return [
        stops,
        str(about["ops"]),
        str(about["library_kernels"]),
        best,
        same(r["kernels_least"] for r in runs),
        same([about["kernels_wanted"]]),
        span(estimates, 1),
        span(r["found"] for r in runs),
        span(r["refused"] for r in runs),
        same("–" if r["error_bound"] is None else f"{r['error_bound']:.1e}" for r in runs),
    ]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns are text."""
    ruler = ["---"] * left + ["--:"] * (len(columns) - left)
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in (columns, ruler, *rows)
    )


def meanings(columns: dict[str, str]) -> str:
    """Return the meaning of each counter."""
    return "\n".join(f"- `{name}`: {what}" for name, what in columns.items())


def readme(report: dict[str, Any]) -> str:
    """Return everything as Markdown."""
    blocks, about, counters = report["blocks"], report["programs"], report["counters"]
    rejections = [
        f"- {b['program']}: {n} × {reason}"
        for b in blocks
        for r in good(b)[:1]
        for reason, n in r["refused_why"].items()
    ]
    failed = [
        f"- {b['program']}: {r['failed']}" for b in blocks for r in b["runs"] if "failed" in r
    ]
    machine = "\n".join(f"- {name}: {value}" for name, value in report["machine"].items())
    runs = f"{report['repeat']} run{'s' if report['repeat'] != 1 else ''} of each program"
    results = ([b["program"], *outcome(b, about[b["program"]])] for b in blocks)
    limits = ([f"`{name}`", f"{value:,}"] for name, value in report["limits"].items())
    return f"""# The search on a CPU

Written by `scripts/bench_search.py`; every run is in `search.json`. To make it again:

    {report["made_by"]}

A run is one fresh process: `{report["command"]}`.
{runs[0].upper() + runs[1:]}: numbers are medians, with the lowest and highest run in brackets.

{machine}

## Times and memory

{table(["program", *TIMES], ([b["program"], *times(b)] for b in blocks))}

{meanings(TIMES)}

## What was found

{table(["program", *RESULTS], results, 2)}

{meanings(RESULTS)}

Rejected candidates of the first run:

{chr(10).join(rejections) or "none"}

Failed runs:

{chr(10).join(failed) or "none"}

## What was searched

Counters are sums over all widths, and over all windows of a program.

{table(["program", *counters], ([b["program"], *counts(b, counters)] for b in blocks))}

{meanings(counters)}

## Limits of the search

{table(["limit", "value"], limits)}

`SearchOptions` describes every limit.
"""


def line(block: dict[str, Any], about: dict[str, Any]) -> str:
    """Return a program for the terminal."""
    cells = dict(zip(TIMES, times(block), strict=True)) | dict(
        zip(RESULTS, outcome(block, about), strict=True)
    )
    shown = (
        "found_s",
        "verified_s",
        "done_s",
        "command_s",
        "peak_mib",
        "library",
        "best",
        "least",
        "stop",
    )
    return f"{block['program']:24}" + "  ".join(
        f"{name.removesuffix('_s')} {cells[name]}" for name in shown
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--programs", default="all", help=f"names with commas, or all: {', '.join(PROGRAMS)}"
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs of each program")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each search")
    parser.add_argument("--threads", type=int, default=2, help="threads of each search")
    parser.add_argument("--out", type=Path, help="write search.json and README.md into this folder")
    args = parser.parse_args()
    names = list(PROGRAMS) if args.programs == "all" else args.programs.split(",")
    if unknown := [n for n in names if n not in PROGRAMS]:
        parser.error(f"unknown program {unknown[0]!r}; there are {', '.join(PROGRAMS)}")
    if args.repeat < 1:
        parser.error("--repeat must be 1 or more")
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as package,
    ):
        folder = Path(temporary)
        common = package.submit(prepare, folder, names, {"time_limit": args.time_limit}).result()
        given = [
            args.out.name if args.out and args.out.is_absolute() and a == str(args.out) else a
            for a in sys.argv[1:]
        ]
        report = {
            "command": shlex.join(["mirage-hf", *command("PROGRAM.json", "OUT.json", args)]),
            "repeat": args.repeat,
            "made_by": shlex.join(["python", "-m", "scripts.bench_search", *given]),
            **common,
            "blocks": [],
        }
        for name in names:
            block = measure(package, folder, name, args)
            report["blocks"].append(block)
            print(line(block, common["programs"][name]), flush=True)
            if args.out:  # after each program, so that an interrupted run has results
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "search.json").write_text(
                    json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
                )
                (args.out / "README.md").write_text(readme(report), encoding="utf-8")
    return int(any("failed" in r for b in report["blocks"] for r in b["runs"]))


if __name__ == "__main__":
    raise SystemExit(main())
