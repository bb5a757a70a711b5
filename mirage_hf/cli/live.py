"""Show a search in progress on stderr: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mirage_hf.cli import show
from mirage_hf.errors import Rejected
from mirage_hf.search import counter_labels
from mirage_hf.verify.verdict import Accepted

#: Seconds between plain lines.
EVERY = 5.0


class SearchView:
    """The state of a search in progress.

    Call it as `superoptimize` calls `progress`. `lines` is what a terminal shows.
    """

    def __init__(self, what: str, limit: float | None = None, console: Console | None = None):
        self.what, self.limit, self.console = what, limit, console or show.errors_console
        self.stage, self.tuned, self.last_rejection = "starting", "", ""
        self.counters: Any = None
        self.verdicts: Counter[str] = Counter()
        self._started = time.monotonic()
        self._printed = self._started
        if not self.console.is_terminal:
            self.console.print(
                f"{what}: searching" + (f", {limit:g} s at most" if limit else ""), markup=False
            )

    def __call__(self, stage: str, detail: Any = None) -> None:
        """Note the stage that was reached, and its detail."""
        self.stage = stage
        match detail:
            case Accepted():
                self.verdicts["verified"] += 1
            case Rejected(reason=reason):
                self.verdicts["rejected"] += 1
                self.last_rejection = reason
            case (int() as done, int() as total, str() as name):
                self.tuned = f"{done} of {total}, {name}"
            case _ if is_dataclass(detail) and not isinstance(detail, type) and fields(detail):
                self.counters = detail
        if not self.console.is_terminal:
            self._plain()

    @property
    def elapsed(self) -> str:
        """Seconds since the start, and the limit."""
        limit = f" of {self.limit:g} s" if self.limit else " s"
        return f"{time.monotonic() - self._started:.1f}{limit}"

    def lines(self) -> list[tuple[str, str]]:
        """Return pairs of a label and a number."""
        found = (
            [(label, number) for _, label, number in counter_labels.rows(self.counters)]
            if self.counters is not None
            else []
        )
        found += [
            (f"candidates {what}", str(n))
            for what, n in sorted(self.verdicts.items(), reverse=True)
        ]
        if self.last_rejection:
            found.append(
                (
                    "last rejection",
                    self.last_rejection
                    if len(self.last_rejection) <= 90
                    else self.last_rejection[:89] + "…",
                )
            )
        return found + ([("tuning", self.tuned)] if self.tuned else [])

    def __rich__(self) -> Group:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
        lines = self.lines()
        table.add_column(
            style="dim", no_wrap=True, min_width=max((len(label) for label, _ in lines), default=0)
        )
        table.add_column(no_wrap=True, overflow="ellipsis")
        for label, number in lines:
            table.add_row(Text(label), Text(number))
        return Group(Text.assemble((self.what, "bold"), f": {self.stage}, {self.elapsed}"), table)

    def _plain(self) -> None:
        now = time.monotonic()
        if now - self._printed >= EVERY:
            self._printed = now
            numbers = "; ".join(f"{label} {number}" for label, number in self.lines())
            self.console.print(
                f"{self.what}: {self.stage}, {self.elapsed}: {numbers}", markup=False
            )


@contextmanager
def searching(what: str, limit: float | None) -> Iterator[SearchView]:
    """Show a search while it runs. Nothing of it stays on a terminal."""
    view = SearchView(what, limit)
    if not view.console.is_terminal:
        yield view
        return
    with Live(view, console=view.console, refresh_per_second=8, transient=True):
        yield view
