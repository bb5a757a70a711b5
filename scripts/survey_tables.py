"""Tables of what `survey_models` found: types by class, and a grid for the docs.

The classes are:

- whole steps: all steps ran by kernels, or as traced steps whose products run by kernels.
- some: something was replaced, but steps ran the model's own forward or stock's generate.
- nothing: nothing was replaced.
- unbuilt: there is no small config, or stock's generate fails.
- error: optimize() or generate raised an error, or the type took too long.
- WRONG TOKENS: a text differs from stock's, or logits differ by more than rounding. Texts that go
  on from a cache count too.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

#: The classes of types, in the order of the table.
CLASSES = ("whole steps", "some", "nothing", "unbuilt", "error", "WRONG TOKENS")

#: The most that logits in float32 may differ by, as a share of stock's largest.
MOST_DIFFERENCE = 1e-5


def rows_of(files: Iterable[Path]) -> list[Row]:
    """Return the last row of each type, sorted."""
    rows: dict[str, Row] = {}
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            rows[row["type"]] = row
    return [rows[name] for name in sorted(rows)]


def class_of(row: Row) -> str:
    """Return the class of a type."""
    if "unbuilt" in row:
        return "unbuilt"
    if "error" in row:
        return "error"
    if _what_differs(row):
        return "WRONG TOKENS"
    if not row["optimized"]:
        return "nothing"
    counts = _text_counts(row)
    whole = "step: all by kernels" in counts or "step: traced" in counts
    return "whole steps" if whole and not any(c.startswith("stock:") for c in counts) else "some"


def _what_differs(row: Row) -> str:
    """Return which results differ from stock's, "" if none does."""
    checks = {
        "": row["equal"],
        "with drafts ": {n: call["equal"] for n, call in row.get("drafts", {}).items()},
        "by logits ": {n: d <= MOST_DIFFERENCE for n, d in row.get("logits", {}).items()},
        "after stock's cache ": row.get("handed_in", {}),
        "after restore ": row["restored"],
        "after restore with the returned cache ": row.get("handed_out", {}),
    }
    wrong = {
        how: [name for name, equal in calls.items() if not equal] for how, calls in checks.items()
    }
    return "; ".join(f"{how}in {', '.join(names)}" for how, names in wrong.items() if names)


def _text_counts(row: Row) -> list[str]:
    """Return how the calls without an image ran, as the keys of `Report.decode`."""
    return [key for name, keys in row["decode"].items() if name != "image" for key in keys]


def table(rows: Iterable[Row]) -> str:
    """Return the number and the names of the types of each class, with reasons for failures."""
    by_class: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_class[class_of(row)].append(row)
    lines = []
    for name in CLASSES:
        members = by_class[name]
        lines.append(f"{name}: {len(members)}")
        if name in ("unbuilt", "error", "WRONG TOKENS"):
            lines += [f"  {row['type']}: {reason_of(row)}" for row in members]
        elif members:
            lines.append("  " + " ".join(row["type"] for row in members))
    compared = [row for name in CLASSES[:3] for row in by_class[name]]
    return "\n".join([*lines, *_comparisons(compared), *_drafts_table(by_class["whole steps"])])


def _comparisons(rows: Sequence[Row]) -> list[str]:
    """Return how far the logits of some rows are from stock's, and how many texts went on."""
    differences = [d for row in rows for d in row.get("logits", {}).values()]
    if not differences:
        return []
    handed = [
        sum(len(row[key]) for row in rows if key in row) for key in ("handed_in", "handed_out")
    ]
    return [
        f"logits: {len(differences)} calls, at most {max(differences):.1e} of stock's largest",
        f"caches: {handed[0]} handed in, {handed[1]} handed out",
    ]


def _drafts_table(rows: Iterable[Row]) -> list[str]:
    """Return how many types with whole steps verify drafts, and why the others do not."""
    why_not: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        calls = [call["decode"] for call in row.get("drafts", {}).values()]
        if calls:
            why_not[_why_no_drafts(row, calls)].append(row["type"])
    lines = [f"drafts: {len(why_not.pop('', []))}"] if why_not else []
    return lines + [f"  {why}: {' '.join(types)}" for why, types in sorted(why_not.items())]


def _why_no_drafts(row: Row, calls: Sequence[Mapping[str, int]]) -> str:
    """Return why some call of a type verified no drafts, "" if all did."""
    if all(counts.get("drafts: taken") for counts in calls):
        return ""
    noted = re.search(r"run stock if they draft: (.*?)(?:; calls with|$)", " ".join(row["notes"]))
    counted = [c.removeprefix("stock: ") for counts in calls for c in counts if "stock" in c]
    errors = [call["error"] for call in row["drafts"].values() if "error" in call]
    return noted[1] if noted else (counted + errors + ["none was taken"])[0]


def share_of(row: Row) -> str:
    """Return the share of the bytes of weights that kernels read in a step, if the report says."""
    if "step: all by kernels" in _text_counts(row):
        return "all"
    found = re.search(r"searched kernels read (\d+%)", " ".join(row["notes"]))
    return found[1] if found and "step: traced" in _text_counts(row) else ""


#: Where notes and warnings say why, the most important first.
_REASONS = (
    r"steps of generate cannot be traced: (.*?)(?:\)?$|; )",
    r"steps of generate run the model's own forward[^:]*: (.*)$",
    r"runs as before \((.*)\)$",
)


def reason_of(row: Row) -> str:
    """Return why a type is not in a better class, in the words of the report."""
    kind = class_of(row)
    if kind in ("unbuilt", "error"):
        return str(row[kind])
    if kind == "WRONG TOKENS":
        return _what_differs(row)
    if kind == "whole steps":
        return ""
    for start in ("stock: ", "step: "):
        for count in _text_counts(row):
            if count.startswith(start):
                return re.sub(r"^[A-Z]\w+ (?=[a-z])", "it ", count.removeprefix(start))
    said = "; ".join([*row.get("notes", ()), *row["warned"]])
    for pattern in _REASONS:
        if found := re.search(pattern, said, flags=re.DOTALL):
            return " ".join(found[1].split())
    return said


def grid(rows: Iterable[Row]) -> str:
    """Return a markdown table of what runs by kernels. Types with equal cells share a row."""
    cells: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        if (kind := class_of(row)) in CLASSES[:3]:
            share = "" if kind == "nothing" else share_of(row)
            cells[kind, share, reason_of(row)].append(row["type"])

    def order(cell: tuple[str, str, str]) -> tuple[Any, ...]:
        kind, share, reason = cell
        percent = 101 if share == "all" else int(share.rstrip("%") or 0)
        return CLASSES.index(kind), -percent, reason

    lines = [
        "| type | steps of generate | bytes read by kernels | reason |",
        "|---|---|---|---|",
    ]
    for cell in sorted(cells, key=order):
        kind, share, reason = cell
        names = ", ".join(f"`{name}`" for name in cells[cell])
        lines.append(f"| {names} | {kind} | {share} | {reason.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)
