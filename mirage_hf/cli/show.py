"""Print to the console: headings, plain text, a search in progress, its result, times."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mirage_hf import errors
from mirage_hf.pipeline import progress_bar

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
errors_console = Console(stderr=True, highlight=False, soft_wrap=True)


def heading(text: str) -> None:
    """Print a heading."""
    console.print(f"\n[bold]{text}[/bold]")


def plain(text: object) -> None:
    """Print text as it is: no markup, no wrapping, and nothing that controls the terminal."""
    console.print(errors.printable(str(text), lines=True), markup=False)


def cell(value: object) -> Text:
    """Return a cell of a table, without markup and without what controls the terminal."""
    return Text(errors.printable(str(value)))


@contextmanager
def searching(what: str) -> Iterator[Callable[..., None]]:
    """Show a line while work goes on.

    Yields:
        A `progress` function, to be called with a stage and its detail (see pipeline/windows.py).
    """
    if not console.is_terminal:
        plain(f"{what} …")
    with progress_bar.bar(what, console) as note:
        yield note


def search_table() -> Table:
    """Return an empty table for the results of searches. `search_row` fills it."""
    table = Table(box=None, pad_edge=False)
    for name, side in (
        ("program", "left"),
        ("kernels", "right"),
        ("ops", "right"),
        ("examined", "right"),
        ("rejected", "right"),
        ("search", "right"),
        ("proof", "right"),
        ("wrong at most", "right"),
        ("stopped", "left"),
    ):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    return table


def search_row(table: Table, name: str, program: Any, found: Sequence[Any], report: Any) -> None:
    """Add the result of a search to the table."""
    c = report.counters
    bound = "-" if report.error_bound is None else f"{report.error_bound:.0e}"
    examined = sum(getattr(c, name, 0) for name in ("examined", "kernels"))
    counts = (
        found[0].num_kernels if found else "-",
        len(program.ops),
        examined,
        len(report.rejected),
    )
    table.add_row(
        name,
        *map(str, counts),
        f"{getattr(c, 'seconds', 0.0):.3f} s",
        f"{report.proof_seconds:.3f} s",
        bound,
        report.stop,
    )


def median_ms(
    call: Callable[[], Any], runs: int, device: torch.device
) -> tuple[float, list[float]]:
    """Return the median and all times of `runs` calls in ms."""
    times = []
    for _ in range(runs):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times), times
