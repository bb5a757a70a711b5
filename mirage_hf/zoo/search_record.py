"""All µGraphs that one search accepted and its report, for zoo entries and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf import errors
from mirage_hf.graph import json_format
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.search_report import Counters, RejectedCandidate, SearchReport, StopReason

#: The most µGraphs of a record. A search keeps some dozens.
MOST_UGRAPHS = 1024


@dataclass(frozen=True)
class SearchRecord:
    """The µGraphs that a search accepted, best first, and its report.

    The report of a loaded record says "loaded" as its stop, and keeps the counters of the search.
    """

    ugraphs: tuple[UGraph, ...]
    report: SearchReport

    @property
    def is_finished(self) -> bool:
        """True if the search found µGraphs and was not interrupted, so it is worth storing."""
        return bool(self.ugraphs) and self.report.stop != StopReason.INTERRUPTED

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values for JSON."""
        return {
            "ugraphs": [json_format.ugraph_to_dict(u) for u in self.ugraphs],
            "report": self.report.to_dict(),
        }

    def for_program(self, program: KernelGraph) -> SearchRecord:
        """Return the record with `program`, an equal graph, in place of the one it was made for."""
        return replace(self, ugraphs=tuple(UGraph(program, u.kernels) for u in self.ugraphs))


def record_from_dict(data: dict[str, Any], where: str) -> SearchRecord:
    """Return the record that `SearchRecord.to_dict` wrote.

    Args:
        data: The parsed JSON.
        where: The file that it was read from, for messages and the report.

    Raises:
        FormatError: The µGraphs do not parse.
        KeyError, TypeError, ValueError, AttributeError: The data has another form.
    """
    if len(data["ugraphs"]) > MOST_UGRAPHS:
        raise ValueError(f"{len(data['ugraphs'])} µGraphs; a search keeps {MOST_UGRAPHS} at most")
    ugraphs = tuple(json_format.ugraph_from_dict(u, where) for u in data["ugraphs"])
    return SearchRecord(ugraphs, _loaded_report(data["report"], len(ugraphs), where))


def _loaded_report(data: dict[str, Any], found: int, where: str) -> SearchReport:
    counters = Counters(**{name: _number(name, n) for name, n in data["counters"].items()})
    bound = data["error_bound"]
    return SearchReport(
        counters,
        StopReason.LOADED,
        reason=f"from {where}; that search stopped: {_words('stop', data['stop'])}",
        found=found,
        rejected=tuple(
            RejectedCandidate(_number("candidate", r["candidate"]), _words("reason", r["reason"]))
            for r in data["rejected"]
        ),
        error_bound=None if bound is None else _number("error_bound", bound),
        proof_seconds=_number("proof_seconds", data["proof_seconds"]),
        notes=tuple(_words("a note", note) for note in data["notes"]),
        first_accepted_seconds=_number("first_accepted_seconds", data["first_accepted_seconds"]),
    )


def _number(name: str, value: Any) -> Any:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, it must be a finite number")
    return value


def _words(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, it must be a text")
    return errors.printable(value, lines=True)
