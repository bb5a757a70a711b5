"""A search in one file that the user names: its finished steps, then its result.

Every write replaces the file at once or not at all. So a search that is killed goes on from its
last finished step. The file names its request and has a digest. µGraphs that are read are proven
again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mirage_hf import errors, files
from mirage_hf.codegen.generated_program import TRITON
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.pipeline.outcome import Outcome
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.results import Loaded, NoResults
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates
from mirage_hf.pipeline.trust import examined
from mirage_hf.search.search_report import StopReason
from mirage_hf.zoo.search_record import SearchRecord, record_from_dict

CHECKPOINT = "mirage_hf.checkpoint"
VERSION = 4

#: The most bytes of a file.
MOST_BYTES = 1 << 28


def identity(request: Request) -> str:
    """Return a digest of the request that a result belongs to.

    It covers the program with its names, and everything that decides which µGraphs are found and
    kept. The number of threads is left out.
    """
    content: dict[str, Any] = {
        "program": json_format.graph_to_dict(request.program),
        "options": repr(replace(request.options, threads=0)),
        "restriction": repr(request.restriction),
        "seed": request.seed,
        "version": VERSION,
    }
    if request.generators != (TRITON,):
        content["generators"] = list(request.generators)
    return json_format.digest(content)


class CheckpointJournal:
    """The finished steps of a search, in its checkpoint. A `SearchJournal`.

    Attributes:
        loaded: How many steps were taken from the file.
    """

    def __init__(self, path: Path, owner: str, steps: dict[str, Any]) -> None:
        self.path, self.owner, self.steps = path, owner, dict(steps)
        self.loaded = 0

    def load(self, key: str) -> Any | None:
        """Return the step that was saved under `key`, or None."""
        self.loaded += key in self.steps
        return self.steps.get(key)

    def save(self, key: str, step: Any) -> None:
        """Keep a finished step.

        Raises:
            OSError: The file cannot be written.
        """
        self.steps[key] = step
        _write(self.path, self.owner, None, self.steps)


@dataclass(frozen=True)
class CheckpointFile(NoResults):
    """The one file in which a search is kept. Takes the place of the user's cache.

    Attributes:
        path: The file. It may not exist yet.
        owner: The `identity` of the request that the file belongs to.
    """

    path: Path
    owner: str

    def load(self, request: Request) -> Loaded:
        """Return the candidates in the file, proven again, or the journal of an unfinished search.

        Raises:
            FormatError: The file is damaged, for something else, or holds no µGraph that is proven.
        """
        if not self.path.exists():
            return CheckpointJournal(self.path, self.owner, {})
        content = read(self.path, self.owner)
        if isinstance(content, CheckpointJournal):
            return content
        verified: VerifiedCandidates | Rejected = (
            examined(content, request, str(self.path))
            if isinstance(content, SearchRecord)
            else content
        )
        if isinstance(verified, Rejected):
            raise errors.FormatError(
                f"checkpoint {self.path}: {verified.reason}; name another file, "
                "or delete this one if it is not needed"
            )
        return verified

    def store(self, outcome: Outcome) -> Rejected | None:
        """Write the result in place of the steps. An interrupted search keeps its steps.

        Raises:
            OSError: The file cannot be written.
        """
        record = SearchRecord(outcome.verified.ugraphs(), outcome.report)
        if record.report.stop != StopReason.INTERRUPTED:
            _write(self.path, self.owner, record, {})
        return None


def _write(path: Path, owner: str, record: SearchRecord | None, steps: dict[str, Any]) -> None:
    content = json.loads(json.dumps([record.to_dict() if record else None, steps]))
    json_format.save_json(
        {
            "format": CHECKPOINT,
            "version": VERSION,
            "identity": owner,
            "digest": json_format.digest(content),
            "record": content[0],
            "steps": content[1],
        },
        path,
    )


def read(path: Path, owner: str) -> SearchRecord | CheckpointJournal | Rejected:
    """Return the result in a checkpoint, its steps if the search did not end, or what is wrong."""
    try:
        data = json.loads(files.read_bytes(path, MOST_BYTES))
        kind, version = data["format"], data["version"]
        if (kind, version) != (CHECKPOINT, VERSION):
            return Rejected(
                f"is {kind!r} version {version!r}, this version reads {CHECKPOINT!r} version "
                f"{VERSION}"
            )
        file_owner = data["identity"]
        if data["digest"] != json_format.digest([data["record"], data["steps"]]):
            return Rejected("is damaged, its content does not have the digest that it names")
        if file_owner != owner:
            return Rejected("belongs to another program, other options or another version")
        if data["record"] is None:
            if not isinstance(data["steps"], dict):
                raise TypeError("its steps are no object")
            return CheckpointJournal(path, owner, data["steps"])
        return record_from_dict(data["record"], str(path))
    except Exception as e:  # whatever edited data leads to
        return Rejected(f"is damaged or not a checkpoint ({errors.described(e)})")
