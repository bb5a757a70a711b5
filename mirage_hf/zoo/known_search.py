"""Keep what a search found, so that programs of other sizes need no search.

A file holds a program and the kernels of its best candidates, in `searches/` of a zoo. Nothing in
it is trusted: for each new program, the kernels are proven and checked as if they were just found.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mirage_hf import errors, files
from mirage_hf.graph import json_format
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.zoo.structure import Structure, for_other_sizes, structure_of

FOLDER = "searches"

FORMAT, VERSION = "mirage_hf.known_search", 1

#: A search serves programs whose sizes are all within this many doublings of its own. Which
#: candidates are worth measuring depends on sizes, most on the number of rows.
FARTHEST = 2.0

#: The most candidates of a search that are kept.
MOST_KERNELS = 8

#: The most bytes of a file. Eight candidates for attention have 100 KB.
_MOST_BYTES = 1 << 22

#: The most searches of one structure that are read.
_MOST_READ = 32

_log = logging.getLogger("mirage_hf")


@dataclass(frozen=True)
class KnownSearch:
    """The candidates that a search found for a program, best first.

    Attributes:
        program: The program.
        kernels: The kernels of each candidate.
        version: The version of the search, see `pipeline.versions.search_version`.
    """

    program: KernelGraph
    kernels: tuple[KernelGraph, ...]
    version: str

    def ugraphs(self, program: KernelGraph) -> dict[int, UGraph]:
        """Return the candidates that fit a program of the same structure, by their places.

        They are not proven.
        """
        found = {}
        for number, kernels in enumerate(self.kernels):
            with contextlib.suppress(errors.GraphError):
                found[number] = for_other_sizes(UGraph(self.program, kernels), program)
        return found

    def write(self, zoo: Path) -> Path:
        """Write this search into a zoo, and return the path of its file.

        Raises:
            OSError: It cannot be written.
        """
        path = zoo / FOLDER / _file_name(self.program)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "format": FORMAT,
            "version": VERSION,
            "search": self.version,
            "program": json_format.graph_to_dict(self.program),
            "kernels": [json_format.graph_to_dict(k) for k in self.kernels],
        }
        json_format.save_json(data, path)
        return path


def nearest(zoos: Sequence[Path], program: KernelGraph, version: str = "") -> KnownSearch | None:
    """Return the search whose sizes are nearest to those of a program, or None if all are far.

    Args:
        zoos: The roots of zoos.
        program: The program.
        version: The version of the search that counts. Empty: any.
    """
    structure = structure_of(program)
    if structure is None:
        return None
    found: list[tuple[float, KnownSearch]] = []
    for zoo in zoos:
        for path in sorted((zoo / FOLDER).glob(f"{_prefix(structure)}-*.json"))[:_MOST_READ]:
            search = read(path)
            if search is None or version not in ("", search.version):
                continue
            theirs = structure_of(search.program)
            if theirs is not None and structure.doublings_to(theirs) <= FARTHEST:
                found.append((structure.doublings_to(theirs), search))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _file_name(program: KernelGraph) -> str:
    structure = structure_of(program)
    assert structure is not None, "a program with symbolic dims has no structure"
    return f"{_prefix(structure)}-{json_format.digest(list(structure.sizes))[:8]}.json"


def _prefix(structure: Structure) -> str:
    return structure.digest[:16]


def read(path: Path) -> KnownSearch | None:
    """Return the search of a file, or None if the file is damaged or of another version."""
    try:
        data = json.loads(files.read_bytes(path, _MOST_BYTES, path.parents[1]))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            return None
        program, *kernels = (
            json_format.graph_from_dict(graph, str(path))
            for graph in (data["program"], *data["kernels"][:MOST_KERNELS])
        )
        return KnownSearch(program, tuple(kernels), str(data["search"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, errors.MirageError) as e:
        _log.info("%s cannot be used: %s", path, errors.described(e))
        return None
