"""What optimize() did, a row per block and number of rows, and what happened since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

SWAPPED, PLANNED, STOCK = "swapped", "planned", "stock"


@dataclass(frozen=True)
class ReportRow:
    """One block of a module. Times in µs, errors as the largest distance from a wider-dtype reference."""

    module: str
    pattern: str
    status: str
    part: str = ""
    rows: int | None = None
    kernel: str = ""
    source: str = ""
    reason: str = ""
    error: float | None = None
    stock_error: float | None = None
    time_us: float | None = None
    library_us: float | None = None
    error_bound: float | None = None
    digest: str | None = None
    calls: int = 0
    """Calls of the module that ran kernels; a captured step counts when it is captured."""
    fallbacks: Mapping[str, int] | None = None


@dataclass(frozen=True, repr=False)
class Report:
    """Rows, and lines about the whole model. `str()` is a table in which equal rows of many layers are one line."""

    model: str
    backend: str
    rows: tuple[ReportRow, ...]
    notes: tuple[str, ...] = ()
    decode: Mapping[str, int] | None = None
    pool_bytes: int | None = None
    """Device memory of generate's cache pool, kept between calls too; scratch of CUDA graphs is not counted."""

    @property
    def swapped(self) -> tuple[ReportRow, ...]:
        return tuple(r for r in self.rows if r.status == SWAPPED)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls of stock forwards so far, by reason, over all swapped modules."""
        per_module = {r.module: r.fallbacks or {} for r in self.rows}
        return dict(sum((Counter(f) for f in per_module.values()), Counter()))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON."""
        return {
            "model": self.model,
            "backend": self.backend,
            "rows": [asdict(r) for r in self.rows],
            "notes": list(self.notes),
            "fallbacks": self.fallbacks,
            "decode": dict(self.decode) if self.decode is not None else None,
            "pool_bytes": self.pool_bytes,
        }

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [f"mirage_hf: {self.model}, backend {self.backend}", *_table(_cells(self.rows))]
        if runs := {r.module: r.calls for r in self.rows if r.calls}:
            lines.append(
                f"calls of swapped modules so far: {sum(runs.values())} (replays of a captured step are not seen here)"
            )
        lines += [
            f"stock forwards so far: {reason}: {n}" for reason, n in sorted(self.fallbacks.items())
        ]
        lines += [
            f"generate so far: {what}: {n}" for what, n in sorted((self.decode or {}).items())
        ]
        if self.pool_bytes:
            lines.append(f"generate's cache pool: {self.pool_bytes / 2**20:.1f} MiB")
        return "\n".join([*lines, *self.notes])


COLUMNS = (
    "module",
    "pattern",
    "rows",
    "kernel",
    "status",
    "source",
    "µs (library)",
    "error (stock's)",
    "reason",
)


def _cells(rows: Sequence[ReportRow]) -> list[tuple[str, ...]]:
    cells: list[tuple[str, ...]] = []
    for r in rows:
        pattern = f"{r.pattern} ({r.part})" if r.part else r.pattern
        time = (
            ""
            if r.time_us is None
            else f"{r.time_us:.1f}" + ("" if r.library_us is None else f" ({r.library_us:.1f})")
        )
        error = "" if r.error is None else f"{r.error:.1e} ({r.stock_error:.1e})"
        cells.append(
            (
                r.module,
                pattern,
                "" if r.rows is None else str(r.rows),
                r.kernel,
                r.status,
                r.source,
                time,
                error,
                r.reason,
            )
        )
    return cells


def _table(cells: Iterable[tuple[str, ...]]) -> list[str]:
    merged: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in cells:  # rows alike except for the module's name and the error are one line
        merged.setdefault((*row[1:7], row[8], _pattern_of(row[0])), []).append(row)
    lines: list[tuple[str, ...]] = [COLUMNS]
    for group in merged.values():
        worst = max(group, key=lambda row: float(row[7].split()[0]) if row[7] else 0.0)[7]
        lines.append((_names([row[0] for row in group]), *group[0][1:7], worst, group[0][8]))
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    shown = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines[1:])]
    return ["  ".join(line[i].ljust(widths[i]) for i in shown).rstrip() for line in lines]


def _pattern_of(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _names(names: Sequence[str]) -> str:
    """model.layers.0 to model.layers.15 as model.layers.{0-15}."""
    if len(names) == 1:
        return names[0]
    split = [name.split(".") for name in names]
    varying = [i for i in range(len(split[0])) if len({s[i] for s in split}) > 1]
    if len(varying) != 1:
        return f"{names[0]} and {len(names) - 1} more"
    i = varying[0]
    numbers = sorted(int(s[i]) for s in split)
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run_list = [n for _, n in run]
        runs.append(str(run_list[0]) if len(run_list) == 1 else f"{run_list[0]}-{run_list[-1]}")
    return ".".join([*split[0][:i], "{" + ",".join(runs) + "}", *split[0][i + 1 :]])


def with_counts(row: ReportRow, calls: int, fallbacks: Mapping[str, int]) -> ReportRow:
    return replace(row, calls=calls, fallbacks=dict(fallbacks))
