"""Keep the finished steps of a search as plain data, so that a stopped search can go on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mirage_hf import errors
from mirage_hf.graph import json_format
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.search_report import Counters, StopReason


class SearchJournal(Protocol):
    """Keeps the finished steps of searches under keys. A step is plain data that JSON can hold."""

    def load(self, key: str) -> Any | None:
        """Return the step saved under `key`, or None."""

    def save(self, key: str, step: Any) -> None:
        """Keep a finished step under `key`."""


@dataclass(frozen=True)
class RankedUGraph:
    """A µGraph that the search returned for the whole program, not proven yet.

    Attributes:
        ugraph: The program and its kernels.
        cost_us: The cost model's estimate in µs, by which results are ranked.
        width: The width at which the search first found it.
    """

    ugraph: UGraph
    cost_us: float
    width: int


@dataclass(frozen=True)
class SearchStep:
    """One width, searched with one assignment of forced roles.

    Attributes:
        stop: Why this step ended.
        counters: Counts of this step alone.
        ranked: The µGraphs it returned, cheapest first.
    """

    stop: StopReason
    counters: Counters
    ranked: tuple[RankedUGraph, ...]


def step_to_dict(step: SearchStep) -> dict[str, Any]:
    """Return a step as plain data for a journal."""
    found = [
        {
            "kernels": json_format.graph_to_dict(ranked.ugraph.kernels),
            "cost_us": ranked.cost_us,
            "width": ranked.width,
        }
        for ranked in step.ranked
    ]
    return {"stop": str(step.stop), "counters": asdict(step.counters), "found": found}


def step_from_dict(data: dict[str, Any], graph: KernelGraph) -> SearchStep:
    """Return the step that `step_to_dict` wrote. Its µGraphs are not proven to compute `graph`.

    Raises:
        FormatError: The data has another form.
    """
    try:
        return _read_step(data, graph)
    except Exception as e:  # whatever edited data leads to
        raise errors.FormatError(
            f"checkpoint: a finished step is damaged ({errors.described(e)}); delete the file"
        ) from e


def _read_step(data: dict[str, Any], graph: KernelGraph) -> SearchStep:
    ranked = tuple(
        RankedUGraph(
            UGraph(graph, json_format.graph_from_dict(entry["kernels"], "checkpoint")),
            float(entry["cost_us"]),
            int(entry["width"]),
        )
        for entry in data["found"]
    )
    counters = Counters(**{name: n + 0 for name, n in data["counters"].items()})
    return SearchStep(StopReason(data["stop"]), counters, ranked)
