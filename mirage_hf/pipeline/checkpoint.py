"""Checkpoints: a search in one file, with what it is for and a digest: the steps that are finished, then its result.

Every write replaces the file at once or not at all, so a search that is killed goes on from its last finished step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import SearchOptions
from mirage_hf.search.search_report import Counters, RejectedCandidate, SearchReport
from mirage_hf.tune.launch_restriction import LaunchRestriction

CHECKPOINT = "mirage_hf.checkpoint"
VERSION = 3


@dataclass(frozen=True)
class Kept:
    """The µGraphs that a search found and its report; loaded ones report stop "loaded" with the counters of their search."""

    ugraphs: tuple[UGraph, ...]
    report: SearchReport


def identity(
    graph: KernelGraph, options: SearchOptions, restriction: LaunchRestriction | None, seed: int
) -> str:
    """What a result is for: a program with its names and everything that decides what is found, threads left out."""
    return json_format.digest(
        {
            "program": json_format.graph_to_dict(graph),
            "options": repr(replace(options, threads=0)),
            "restriction": repr(restriction),
            "seed": seed,
            "version": VERSION,
        }
    )


def _write(
    path: str | Path,
    owner: str,
    ugraphs: Sequence[UGraph],
    report: SearchReport | None,
    steps: dict[str, Any],
) -> None:
    content = json.loads(
        json.dumps(
            [
                [json_format.ugraph_to_dict(u) for u in ugraphs],
                report.to_dict() if report else None,
                steps,
            ]
        )
    )
    json_format.save_json(
        {
            "format": CHECKPOINT,
            "version": VERSION,
            "identity": owner,
            "digest": json_format.digest(content),
            "ugraphs": content[0],
            "report": content[1],
            "steps": content[2],
        },
        path,
    )


def write(path: str | Path, kept: Kept, owner: str) -> None:
    """Write what a search found for `owner` (an identity). Errors: OSError."""
    _write(path, owner, kept.ugraphs, kept.report, {})


class CheckpointJournal:
    """The steps of a search that are finished, in its checkpoint: what `search(..., steps=…)` wants."""

    def __init__(self, path: str | Path, owner: str, steps: dict[str, Any]):
        self.path, self.owner, self.steps = path, owner, dict(steps)
        self.loaded = 0

    def load(self, key: str) -> Any | None:
        self.loaded += key in self.steps
        return self.steps.get(key)

    def save(self, key: str, step: Any) -> None:
        """Errors: OSError."""
        self.steps[key] = step
        _write(self.path, self.owner, (), None, self.steps)


def read(path: str | Path, graph: KernelGraph, owner: str) -> Kept | CheckpointJournal | Rejected:
    """Return what is kept for `owner` in a file, as µGraphs of `graph`; its steps if the search did not end; or what is wrong."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        kind, version = data["format"], data["version"]
        if (kind, version) != (CHECKPOINT, VERSION):
            return Rejected(
                f"is {kind!r} version {version!r}, this version reads {CHECKPOINT!r} version {VERSION}"
            )
        whose = data["identity"]
        if data["digest"] != json_format.digest([data["ugraphs"], data["report"], data["steps"]]):
            return Rejected("is damaged, its content does not have the digest that it names")
        if whose != owner:
            return Rejected("belongs to another program, other options or another version")
        if data["report"] is None:
            return CheckpointJournal(path, owner, data["steps"])
        kernels = [json_format.ugraph_from_dict(u, str(path)) for u in data["ugraphs"]]
        report = _report(data["report"], len(kernels), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return Rejected(f"is damaged or not a checkpoint ({type(e).__name__}: {e})")
    return Kept(tuple(UGraph(graph, u.kernels) for u in kernels), report)


def _report(data: dict[str, Any], found: int, path: str) -> SearchReport:
    """The report of a search that was kept; of the reason only where it was kept and why that search stopped."""
    kept: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }
    kept["counters"] = Counters(**data["counters"])
    kept["rejected"] = tuple(RejectedCandidate(**r) for r in data["rejected"])
    return replace(
        SearchReport(**kept),
        stop="loaded",
        reason=f"from {path}; that search stopped: {data['stop']}",
        found=found,
    )


def load(path: str | Path, graph: KernelGraph, owner: str) -> Kept | CheckpointJournal:
    """What is kept in a user's checkpoint, no steps where there is no file yet. Errors: FormatError for a file that is not it."""
    if not Path(path).exists():
        return CheckpointJournal(path, owner, {})
    found = read(path, graph, owner)
    if isinstance(found, Rejected):
        raise errors.FormatError(
            f"checkpoint {path}: {found.reason}; name another file, or delete this one if nobody needs it"
        )
    return found


def finished(ugraphs: Sequence[UGraph], report: SearchReport) -> bool:
    """Whether a result is worth keeping: something was found, and nobody interrupted the search."""
    return bool(ugraphs) and report.stop != "interrupted"
