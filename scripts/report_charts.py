"""Draw the charts of README and docs from docs/benchmarks/results.csv.

Every SVG file holds a digest of its numbers. So a test can tell an old chart without drawing it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.report import FOLDER, Result
from scripts.report_tables import BATCHES, CONTEXTS, MODELS, cell, pick

OURS, RIVAL, FLOOR = "#1b7837", "#8da0b8", "#d9a441"
Numbers = list[tuple[str, list[float]]]


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: File name without its suffix, in docs/benchmarks.
        numbers: Returns labelled series from the results.
        plot: Draws these series on a matplotlib figure.
    """

    name: str
    numbers: Callable[[Sequence[Result]], Numbers]
    plot: Callable[[Any, Numbers], None]

    @property
    def path(self) -> Path:
        """The file of the chart."""
        return FOLDER / f"{self.name}.svg"

    def digest(self, results: Sequence[Result]) -> str:
        """Return a digest of the numbers that the chart shows."""
        return hashlib.sha256(repr(self.numbers(results)).encode()).hexdigest()[:16]

    def draw(self, results: Sequence[Result]) -> None:
        """Write the chart, unless the file shows these numbers already."""
        if digest_in(self.path) == self.digest(results):
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.2), layout="constrained")
        self.plot(figure, self.numbers(results))
        figure.savefig(
            self.path, metadata={"Date": None, "Description": f"digest {self.digest(results)}"}
        )


def digest_in(path: Path) -> str:
    """Return the digest that a chart names, or nothing if there is no such file."""
    if not path.exists():
        return ""
    found = re.search(r"digest ([0-9a-f]{16})", path.read_text(encoding="utf-8"))
    return found[1] if found else ""


def _one_sequence(results: Sequence[Result]) -> Numbers:
    series: Numbers = []
    for subject, name in MODELS.items():
        found = cell(results, subject, 1, 128)
        floor = pick(results, subject, 1, 128, "floor", "ms_per_token")
        assert found is not None and floor is not None, f"{subject} at batch 1 has no result"
        series.append((name, [found.theirs.value, found.ours.value, floor.value]))
    return series


def _plot_one_sequence(figure: Any, series: Numbers) -> None:
    labels = ("HF static cache", "mirage_hf", "memory floor")
    for number, (name, values) in enumerate(series):
        axes = figure.add_subplot(1, len(series), number + 1)
        bars = axes.bar(labels, values, color=(RIVAL, OURS, FLOOR))
        axes.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=8)
        axes.set_title(name, fontsize=10)
        axes.tick_params(axis="x", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        if number == 0:
            axes.set_ylabel("ms per token")


def _speed_ups(results: Sequence[Result]) -> Numbers:
    series: Numbers = []
    for subject, name in MODELS.items():
        for context in CONTEXTS:
            cells = [cell(results, subject, batch, context) for batch in BATCHES]
            series.append((f"{name}, prompt {context:,}", [c.ratio if c else 0.0 for c in cells]))
    return series


def _plot_speed_ups(figure: Any, series: Numbers) -> None:
    for number, name in enumerate(MODELS.values()):
        axes = figure.add_subplot(1, len(MODELS), number + 1)
        for label, values in (s for s in series if s[0].startswith(name)):
            axes.plot([str(b) for b in BATCHES], values, marker="o", label=label.split(", ")[1])
        axes.axhline(1, color="#999999", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("batch")
        axes.spines[["top", "right"]].set_visible(False)
        if number == 0:
            axes.set_ylabel("times as fast as the best stock way")
            axes.legend(fontsize=7)


CHARTS = (
    Chart("one-sequence", _one_sequence, _plot_one_sequence),
    Chart("batches", _speed_ups, _plot_speed_ups),
)
