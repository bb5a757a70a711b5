"""Generate every table and chart of README and docs from one file, docs/benchmarks/results.csv.

    python -m scripts.report                      rewrite the tables and the charts
    python -m scripts.report --check              fail if a table or a chart is not up to date
    python -m scripts.report add RAW.json [...]   add the rows of benchmark files

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
`scripts/report_tables.py` says which rows and columns it has. Charts need matplotlib (the `bench`
extra); `--check` does not.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "benchmarks"
RESULTS = FOLDER / "results.csv"
RAW = FOLDER / "raw"
DATED = re.compile(r"\d{4}-\d{2}-\d{2}-")
MARKED = re.compile(
    r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", flags=re.DOTALL
)


@dataclass(frozen=True)
class Result:
    """One measured number with everything that is needed to repeat it.

    Attributes:
        date: Day of the run, as YYYY-MM-DD.
        commit: The commit that was measured. If the file names none, the one that recorded the
            file.
        machine: GPU and driver, or the CPU.
        versions: Versions of torch, triton, transformers and CUDA.
        subject: Model or block.
        batch: Sequences of a model, or rows of a block.
        context: Tokens of the prompt. Empty for blocks.
        peer: What ran: "ours", a rival, or "floor" (the bytes that must be read at the GPU's
            bandwidth).
        metric: What was measured. Its unit is its suffix.
        value: The median.
        low: The lowest run.
        high: The highest run.
        source: The file in docs/benchmarks/raw.
    """

    date: str
    commit: str
    machine: str
    versions: str
    subject: str
    batch: int
    context: str
    peer: str
    metric: str
    value: float
    low: str
    high: str
    source: str


def read_results(path: Path = RESULTS) -> list[Result]:
    """Return all rows of the CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        Result(**(row | {"batch": int(row["batch"]), "value": float(row["value"])})) for row in rows
    ]


def write_results(results: Iterable[Result], path: Path = RESULTS) -> None:
    """Write the CSV file in a fixed order, so that a new run adds lines and moves none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Result)], lineterminator="\n")
    writer.writeheader()
    for result in sorted(
        results, key=lambda r: (r.date, r.source, r.subject, r.batch, int(r.context or 0))
    ):
        writer.writerow(asdict(result))
    path.write_text(text.getvalue(), encoding="utf-8")


# -- reading raw files ---------------------------------------------------------------------------


def results_of(raw: dict[str, Any], source: str, commit: str) -> list[Result]:
    """Return the rows of one benchmark file."""
    machine = raw["machine"]
    versions = ", ".join(
        f"{name} {machine[key]}"
        for name, key in (
            ("torch", "torch"),
            ("triton", "triton"),
            ("transformers", "transformers"),
            ("CUDA", "cuda"),
        )
        if machine.get(key, "none") != "none"
    )
    where = (
        f"{machine['gpu']}, driver {machine['driver']}"
        if machine["gpu"] != "none"
        else f"{machine.get('cores', '')} cores of {machine.get('cpu', 'a CPU')}"
    )
    measured = (source[:10], machine.get("commit", commit), where, versions)
    weights = raw.get("options", {}).get("weights", "int4")
    is_search = "blocks" in raw
    numbers = _numbers_of_search(raw) if is_search else _numbers_of_rows(raw["rows"], weights)
    return [
        Result(
            *measured,
            subject,
            batch,
            context,
            peer,
            metric,
            _rounded(value),
            *(str(_rounded(x)) if x is not None else "" for x in spread),
            source,
        )
        for subject, batch, context, peer, metric, value, spread in numbers
    ]


Spread = tuple[float | None, float | None]
Number = tuple[str, int, str, str, str, float, Spread]
NO_SPREAD: Spread = (None, None)


def _numbers_of_rows(rows: list[dict[str, Any]], weights: str) -> Iterator[Number]:
    """Yield the numbers of rows. Kernels of `bench_codes` have weights of the format `weights`."""
    for row in rows:
        if "peers" in row:
            yield from _numbers_of_model(row)
        elif "hidden" in row:
            yield from _numbers_of_block(row, f"{row['block']} {row['hidden']}")
        elif "block" in row:
            yield from _numbers_of_block(row, row["block"])
        elif "layers" in row:
            yield from _numbers_of_chain(row)
        elif "way" in row:
            yield from _numbers_of_first_use(row)
        elif "kinds" in row:
            yield from _numbers_of_kinds(row, row["kinds"], row["name"])
        elif "best" in row:
            block, _, rows_of_block = row["name"].partition(":")
            of_codes = f"{block} of {weights}"
            yield from _numbers_of_kinds(row, row["best"], of_codes, int(rows_of_block))


def _numbers_of_model(row: dict[str, Any]) -> Iterator[Number]:
    place = row["model"], row["batch"], str(row["prompt"])
    yield *place, "floor", "ms_per_token", row["floor_ms"], NO_SPREAD
    if "optimize_s" in row:
        yield *place, "ours", "optimize_s", row["optimize_s"], NO_SPREAD
    for peer, seen in row["peers"].items():
        for metric in ("ms_per_token", "step_ms", "first_token_ms"):
            if timing := seen.get(metric):
                yield *place, peer, metric, timing["median"], (timing["min"], timing["max"])
        for metric in ("setup_s", "peak_mib_over_weights"):
            if seen.get(metric) is not None and not seen.get("failed"):
                yield *place, peer, metric, seen[metric], NO_SPREAD
    if drafts := row.get("drafts"):
        taken = drafts.get("drafts: taken", 0) / drafts["drafts: steps of a row"]
        yield *place, "drafted", "tokens_per_step", 1 + taken, NO_SPREAD
    for metric in ("first_rms_ratio", "steps_rms_ratio"):
        if row.get("logits", {}).get(metric) is not None:
            yield *place, "ours", f"logits_{metric}", row["logits"][metric], NO_SPREAD


def _numbers_of_block(row: dict[str, Any], subject: str) -> Iterator[Number]:
    yield subject, row["rows"], "", "floor", "us", row["floor_us"], NO_SPREAD
    for peer, seen in row["contenders"].items():
        if seen.get("us") is not None:
            name = "ours" if peer == "searched kernel" else peer
            yield subject, row["rows"], "", name, "us", seen["us"], (seen["low"], seen["high"])


def _numbers_of_chain(row: dict[str, Any]) -> Iterator[Number]:
    subject = f"{row['model']}, linears only"
    yield subject, row["batch"], "", "floor", "ms", row["floor_ms"], NO_SPREAD
    for peer, seen in row["contenders"].items():
        if seen.get("ms") is not None:
            yield subject, row["batch"], "", peer, "ms", seen["ms"], (seen["low"], seen["high"])


def _numbers_of_first_use(row: dict[str, Any]) -> Iterator[Number]:
    place = row["model"], row.get("batch", 1), str(row["prompt"]), row["way"]
    seconds = ("optimize_s", "first_generate_s", "second_generate_s")
    for metric in (*seconds, "peak_mib_over_weights"):
        if row.get(metric) is not None:
            yield *place, metric, row[metric], NO_SPREAD
    timing = row["ms_per_token"]
    yield *place, "later_ms_per_token", timing["median"], (timing["min"], timing["max"])


def _numbers_of_kinds(
    row: dict[str, Any], kinds: dict[str, Any], subject: str, rows: int = 1
) -> Iterator[Number]:
    yield subject, rows, "", "floor", "us", row["floor_us"], NO_SPREAD
    for kind, seen in kinds.items():
        if kind != "library" and seen and seen.get("us") is not None:
            yield subject, rows, "", kind, "us", seen["us"], (seen["low"], seen["high"])
            if seen.get("chain_us") is not None:
                yield subject, rows, "", kind, "chain_us", seen["chain_us"], NO_SPREAD


def _numbers_of_search(raw: dict[str, Any]) -> Iterator[Number]:
    for block in raw["blocks"]:
        for metric in ("found_s", "verified_s", "done_s"):
            seen = sorted(run[metric] for run in block["runs"])
            middle = sum(seen[(len(seen) - 1) // 2 : len(seen) // 2 + 1])
            median = middle / (1 if len(seen) % 2 else 2)
            yield block["program"], 1, "", "ours", metric, median, (seen[0], seen[-1])


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def add(paths: list[Path], commit: str, results: list[Result]) -> list[Result]:
    """Copy benchmark files to the raw folder and return `results` with their rows.

    Raises:
        SystemExit: A file is not named by its date, or is no benchmark file.
    """
    for path in paths:
        if not DATED.match(path.name):
            sys.exit(f"{path}: rename it to YYYY-MM-DD-what.json, so that its row has a date")
        raw = json.loads(path.read_text(encoding="utf-8"))
        if "machine" not in raw:
            sys.exit(f"{path}: has no `machine`; give a file that a benchmark script wrote")
        if path.resolve().parent != RAW:
            shutil.copyfile(path, RAW / path.name)
        results = [r for r in results if r.source != path.name]
        results += results_of(raw, path.name, commit)
    return results


def head() -> str:
    """Return the commit that is checked out."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


# -- writing pages -------------------------------------------------------------------------------


def pages() -> list[Path]:
    """Return README and the pages of docs that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(text: str, results: list[Result]) -> str:
    """Return a page with every marked table written anew.

    Raises:
        SystemExit: The page names an unknown table.
    """
    from scripts.report_tables import TABLES

    def table(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TABLES:
            sys.exit(f"no table is called {name!r}; scripts/report_tables.py has {sorted(TABLES)}")
        return f"{found[1]}\n{TABLES[name](results)}\n\n{found[3]}"

    return MARKED.sub(table, text)


def stale(results: list[Result]) -> list[str]:
    """Return the files that are out of date: pages whose tables differ, charts of other numbers."""
    from scripts.report_charts import CHARTS, digest_in

    pages_behind = [
        str(page.relative_to(ROOT))
        for page in pages()
        if (text := page.read_text(encoding="utf-8")) != with_tables(text, results)
    ]
    charts_behind = [
        str(chart.path.relative_to(ROOT))
        for chart in CHARTS
        if digest_in(chart.path) != chart.digest(results)
    ]
    return pages_behind + charts_behind


def main() -> None:
    """Run the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if out of date")
    commands = parser.add_subparsers(dest="command")
    adding = commands.add_parser("add", help="add the rows of benchmark files")
    adding.add_argument("files", nargs="+", type=Path)
    adding.add_argument("--commit", default=None, help="the commit measured (default: HEAD)")
    args = parser.parse_args()
    results = read_results() if RESULTS.exists() else []
    if args.command == "add":
        write_results(add(args.files, args.commit or head(), results))
        return
    if args.check:
        if behind := stale(results):
            sys.exit(f"out of date: {', '.join(behind)}; run `make report`")
        return
    from scripts.report_charts import CHARTS

    for page in pages():
        page.write_text(with_tables(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    for chart in CHARTS:
        chart.draw(results)


if __name__ == "__main__":
    main()
