"""Checkpoints: one finished search in one file, with what it was for and a digest. Written at once or not at all."""
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
from mirage_hf.search.report import Counters, Refusal, SearchReport
from mirage_hf.tune.restrict import Restriction

CHECKPOINT = "mirage_hf.checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Kept:
    """The µGraphs that a search found and its report; loaded ones report stop "loaded" with the counters of their search."""

    ugraphs: tuple[UGraph, ...]
    report: SearchReport


def identity(graph: KernelGraph, options: SearchOptions, restriction: Restriction | None, seed: int) -> str:
    """What a result is for: a program with its names and everything that decides what is found, threads left out."""
    return json_format.digest({"program": json_format.graph_to_dict(graph), "options": repr(replace(options, threads=0)),
                               "restriction": repr(restriction), "seed": seed, "version": VERSION})


def write(path: str | Path, kept: Kept, owner: str) -> None:
    """Write what a search found for `owner` (an identity). Errors: OSError."""
    content = json.loads(json.dumps([[json_format.ugraph_to_dict(u) for u in kept.ugraphs], kept.report.to_dict()]))
    json_format.save_json({"format": CHECKPOINT, "version": VERSION, "identity": owner, "digest": json_format.digest(content),
                           "ugraphs": content[0], "report": content[1]}, path)


def read(path: str | Path, graph: KernelGraph, owner: str) -> Kept | Rejected:
    """Return what is kept for `owner` in a file, as µGraphs of `graph`, or what is wrong with the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        kind, version, whose = data["format"], data["version"], data["identity"]
        if (kind, version) != (CHECKPOINT, VERSION):
            return Rejected(f"is {kind!r} version {version!r}, this version reads {CHECKPOINT!r} version {VERSION}")
        if data["digest"] != json_format.digest([data["ugraphs"], data["report"]]):
            return Rejected("is damaged, its content does not have the digest that it names")
        if whose != owner:
            return Rejected("belongs to another program, other options or another version")
        kernels = [json_format.ugraph_from_dict(u, str(path)) for u in data["ugraphs"]]
        report = _report(data["report"], len(kernels), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return Rejected(f"is damaged or not a checkpoint ({type(e).__name__}: {e})")
    return Kept(tuple(UGraph(graph, u.kernels) for u in kernels), report)


def _report(data: dict[str, Any], found: int, path: str) -> SearchReport:
    """The report of a search that was kept; of the reason only where it was kept and why that search stopped."""
    kept: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    kept["counters"] = Counters(**data["counters"])
    kept["refused"] = tuple(Refusal(**r) for r in data["refused"])
    return replace(SearchReport(**kept), stop="loaded", reason=f"from {path}; that search stopped: {data['stop']}", found=found)


def load(path: str | Path, graph: KernelGraph, owner: str) -> Kept | None:
    """What is kept in a user's checkpoint, None where there is no file yet. Errors: FormatError for a file that is not it."""
    if not Path(path).exists():
        return None
    found = read(path, graph, owner)
    if isinstance(found, Rejected):
        raise errors.FormatError(f"checkpoint {path}: {found.reason}; delete it, or name another file")
    return found


def finished(ugraphs: Sequence[UGraph], report: SearchReport) -> bool:
    """Whether a result is worth keeping: something was found, and nobody interrupted the search."""
    return bool(ugraphs) and report.stop != "interrupted"
