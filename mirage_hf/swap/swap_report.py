"""The report of optimize(): a row for each block and number of rows, and the calls since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from mirage_hf.errors import Rejected
from mirage_hf.pipeline.resolver import Resolved

#: The status of a row: its kernels run, would run (in a dry run), or the stock module runs.
SWAPPED, PLANNED, STOCK = "swapped", "planned", "stock"
#: The pattern of programs that were recorded, and what counts call a traced step.
TRACED = "traced"
#: What a row has of its kernel under the same name.
_EVIDENCE = ("source", "time_us", "library_us", "error_bound", "digest")


@dataclass(frozen=True)
class ReportRow:
    """One block of a module, at one number of rows."""

    #: The module's name in the model.
    module: str
    #: The name of the block's pattern.
    pattern: str
    #: SWAPPED, PLANNED or STOCK.
    status: str
    #: The children whose weights the block reads.
    part: str = ""
    #: The number of sequences. None for a rejected module.
    rows: int | None = None
    #: The new tokens of each sequence. Steps that verify drafts have several.
    tokens: int = 1
    #: What runs the block, such as "1 kernel" or "library".
    kernel: str = ""
    #: Where the kernel comes from: a zoo, the cache or a search.
    source: str = ""
    #: Why the block is stock, or a remark about its kernel.
    reason: str = ""
    #: The largest distance from a reference in a wider dtype, and that of the stock module.
    error: float | None = None
    stock_error: float | None = None
    #: The time of the kernel and of the library path in µs.
    time_us: float | None = None
    library_us: float | None = None
    #: A bound on the probability that the proof accepted a wrong µGraph.
    error_bound: float | None = None
    #: The digest of the kernel.
    digest: str | None = None
    #: How many calls of the module ran kernels. A captured step counts when it is captured.
    calls: int = 0
    #: How many calls ran the stock forward, by reason.
    fallbacks: Mapping[str, int] | None = None


@dataclass(frozen=True, repr=False)
class Report:
    """What optimize() did with a model. `str()` is a table.

    Example:
        >>> report = optimize(model, dry_run=True)
        >>> print(report)
    """

    #: The class of the model.
    model: str
    #: "triton" or "cpu".
    backend: str
    rows: tuple[ReportRow, ...]
    #: Lines about the whole model.
    notes: tuple[str, ...] = ()
    #: How far tuning in the background has got, and why it ended early if it did.
    tuning: str = ""
    #: How steps, prefills and selections of generate ran so far, by what ran them.
    decode: Mapping[str, int] | None = None
    #: The device memory of generate's cache pool in bytes, also that kept between calls. The
    #: scratch memory of CUDA graphs is not counted.
    pool_bytes: int | None = None

    @property
    def swapped(self) -> tuple[ReportRow, ...]:
        """The rows whose kernels run."""
        return tuple(row for row in self.rows if row.status == SWAPPED)

    @property
    def fallbacks(self) -> dict[str, int]:
        """How many calls of all swapped modules ran the stock forward, by reason."""
        by_module = {row.module: row.fallbacks or {} for row in self.rows}
        return dict(sum((Counter(f) for f in by_module.values()), Counter()))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {
            "model": self.model,
            "backend": self.backend,
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
            "tuning": self.tuning,
            "fallbacks": self.fallbacks,
            "decode": dict(self.decode) if self.decode is not None else None,
            "pool_bytes": self.pool_bytes,
        }

    def __repr__(self) -> str:
        """Return the table."""
        return str(self)

    def __str__(self) -> str:
        """Return the table, in which equal rows of many layers are one line, and the counts."""
        lines = [f"mirage_hf: {self.model}, backend {self.backend}", *_table(self.rows)]
        calls = {row.module: row.calls for row in self.rows}
        if total := sum(calls.values()):
            lines.append(
                f"swapped modules: {_counted(total, 'call')} by kernels "
                "(replays of a captured step are not counted)"
            )
        for reason, count in sorted(self.fallbacks.items()):
            lines.append(f"swapped modules: {_counted(count, 'stock forward')} ({reason})")
        for what, count in sorted((self.decode or {}).items()):
            lines.append(f"generate: {_generate_count(what, count)}")
        if self.pool_bytes:
            lines.append(f"generate's cache pool: {self.pool_bytes / 2**20:.1f} MiB")
        if self.tuning:
            lines.append(self.tuning)
        return "\n".join([*lines, *self.notes])


# -- what ran since optimize() ---------------------------------------------------------------------

#: How the report says a count of `generate`. Each entry has the key or its start, the noun, and the
#: rest of the sentence. {} stands for the rest of the key, which is the reason.
_GENERATE_COUNTS = (
    ("captured", "call", "with captured steps"),
    ("called: ", "call", "with steps that are not captured ({})"),
    ("stock: ", "call", "by stock's method ({})"),
    ("step: all by kernels", "call", "with all steps by kernels"),
    ("step: traced", "call", "with traced steps, their products by kernels"),
    ("step: ", "call", "with steps by the model's own forward ({})"),
    ("drafts: steps of a row", "step", "of a row with drafts"),
    ("drafts: drafted", "token", "drafted"),
    ("drafts: taken", "token", "taken of the drafts"),
    ("drafts: tokens of a step: ", "step", "in calls with drafts (tokens a row: {})"),
    ("selection: on the device", "call", "with tokens chosen on the device"),
    ("selection: by the host: ", "call", "with tokens chosen by the host ({})"),
    ("prefill: captured, by kernels", "prompt", "by captured kernels"),
    ("prefill: captured", "prompt", "by the model's captured forward"),
    ("prefill: called, by kernels", "prompt", "by kernels that are not captured"),
    ("prefill: called: ", "prompt", "by the model's own forward ({})"),
    ("prefill: not by kernels: ", "prompt", "without kernels ({})"),
)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _generate_count(what: str, count: int) -> str:
    """Return a count of `Report.decode` in words."""
    for start, noun, sentence in _GENERATE_COUNTS:
        if what == start or (start.endswith(": ") and what.startswith(start)):
            return f"{_counted(count, noun)} {sentence.format(what.removeprefix(start))}"
    return f"{what}: {count}"


# -- the table -------------------------------------------------------------------------------------


def _table(rows: Iterable[ReportRow]) -> list[str]:
    merged: dict[tuple[str, ...], list[ReportRow]] = {}
    for row in rows:
        merged.setdefault(_merge_key(row), []).append(row)
    lines = [tuple(_COLUMNS), *(_cells(group) for group in merged.values())]
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    padded = []
    for column in columns:
        width = max(map(len, column))
        padded.append([cell.ljust(width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


def _cells(group: Sequence[ReportRow]) -> tuple[str, ...]:
    """Return the line of rows that differ only in their module's name and their error."""
    return tuple(cell(group) for cell in _COLUMNS.values())


def _merge_key(row: ReportRow) -> tuple[str, ...]:
    """Return the cells that are equal in rows of one line: not the layer's number and error."""
    numberless = ".".join("*" if part.isdigit() else part for part in row.module.split("."))
    return _cells([replace(row, module=numberless, error=None)])


def _pattern(group: Sequence[ReportRow]) -> str:
    row = group[0]
    return f"{row.pattern} ({row.part})" if row.part else row.pattern


def _time(group: Sequence[ReportRow]) -> str:
    row = group[0]
    if row.time_us is None:
        return ""
    library = "" if row.library_us is None else f" ({row.library_us:.1f})"
    return f"{row.time_us:.1f}{library}"


def _largest_error(group: Sequence[ReportRow]) -> str:
    checked = [row for row in group if row.error is not None]
    if not checked:
        return ""
    worst = max(checked, key=lambda row: row.error or 0.0)
    return f"{worst.error:.1e} ({worst.stock_error:.1e})"


def _common_name(names: Sequence[str]) -> str:
    """Return model.layers.0 to model.layers.15 as model.layers.{0-15}."""
    if len(names) == 1:
        return names[0]
    split = [name.split(".") for name in names]
    varying = [i for i, parts in enumerate(zip(*split, strict=True)) if len(set(parts)) > 1]
    if len(varying) != 1:
        return f"{names[0]} and {len(names) - 1} more"
    at = varying[0]
    numbers = sorted(int(parts[at]) for parts in split)
    ranges = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        single = len(members) == 1
        ranges.append(str(members[0]) if single else f"{members[0]}-{members[-1]}")
    before, after = split[0][:at], split[0][at + 1 :]
    return ".".join([*before, "{" + ",".join(ranges) + "}", *after])


def _rows_cell(row: ReportRow) -> str:
    """Return how many sequences a row is for, and how many tokens of each if there are several."""
    if row.rows is None:
        return ""
    return str(row.rows) if row.tokens == 1 else f"{row.rows} x {row.tokens}"


#: The columns of the table by title, each with the cell of a group of rows. The rows of a group
#: differ only in their module's name and their error.
_COLUMNS: Mapping[str, Callable[[Sequence[ReportRow]], str]] = {
    "module": lambda group: _common_name([row.module for row in group]),
    "pattern": _pattern,
    "rows": lambda group: _rows_cell(group[0]),
    "kernel": lambda group: group[0].kernel,
    "status": lambda group: group[0].status,
    "source": lambda group: group[0].source,
    "µs (library)": _time,
    "error (stock's)": _largest_error,
    "reason": lambda group: group[0].reason,
}


def resolved_row(row: ReportRow, resolved: Resolved | Rejected | str) -> ReportRow:
    """Return a row with what is known of its kernel, or the reason why it has none."""
    if isinstance(resolved, Rejected):
        return replace(row, reason=resolved.reason)
    if isinstance(resolved, str):
        return replace(row, reason=resolved)
    row = replace(row, **{name: getattr(resolved, name) for name in _EVIDENCE})
    if not resolved.runs_kernel:
        return replace(row, kernel="library", reason=resolved.why_library)
    count = resolved.ugraph.num_kernels
    kernel = f"{count} kernel{'s' if count > 1 else ''}"
    return replace(row, status=SWAPPED, reason=resolved.reason, kernel=kernel)
