"""Look up the results of earlier calls, and store new ones.

Every store is a kernel zoo: the user's cache, the packaged zoo, and those that the user names. An
entry is used only if it passes these checks:

- Its files have the digests that it names, and its key is that of the program asked for.
- The text of its kernel equals what is generated here from its µGraph, so edited text never runs.
- Its µGraph is proven again and its numbers are checked again, unless the store is trusted. All
  µGraphs of a search are proven again, wherever they come from.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from mirage_hf.codegen.placement import place_kernels
from mirage_hf.errors import CodegenError, MirageError, Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import versions
from mirage_hf.pipeline.outcome import Outcome, library_wins
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates
from mirage_hf.search.search_journal import SearchJournal
from mirage_hf.tune.relatives import TunedKernels
from mirage_hf.verify.accept import Candidate, examine
from mirage_hf.verify.numeric import NumericCheck
from mirage_hf.zoo.entry import ENTRY, Entry
from mirage_hf.zoo.entry_reader import read_entry
from mirage_hf.zoo.search_record import SearchRecord
from mirage_hf.zoo.store import NotStored, Store, ZooPath, packaged_store, user_store

SEARCHED, CACHE, ZOO = "searched", "cache", "packaged zoo"

_log = logging.getLogger("mirage_hf")


@dataclass(frozen=True)
class StoredEntry:
    """An entry that passed its checks, and the name of its store."""

    entry: Entry
    source: str


#: The result of a look-up: a finished kernel, all candidates of a search, or the steps of an
#: unfinished search. `Rejected` says why a stored result cannot be used. None: nothing is stored.
Loaded = StoredEntry | VerifiedCandidates | SearchJournal | Rejected | None


class Results(Protocol):
    """Where results of earlier calls are looked up and new ones are stored."""

    def load(self, request: Request) -> Loaded:
        """Return the stored result for the request, if it passes its checks."""

    def store(self, outcome: Outcome) -> Rejected | None:
        """Store an outcome. Return why it could not be stored, or None."""

    def tuned(self, target: str) -> Sequence[TunedKernels]:
        """Return the kernels that were measured on a target and are faster than the library."""


class NoResults:
    """Looks up nothing and keeps nothing."""

    def load(self, request: Request) -> Loaded:
        """Return None."""
        return None

    def store(self, outcome: Outcome) -> Rejected | None:
        """Do nothing."""
        return None

    def tuned(self, target: str) -> Sequence[TunedKernels]:
        """Return nothing."""
        return ()


@dataclass(frozen=True)
class ZooResults:
    """Results in kernel zoos.

    Attributes:
        zoos: The stores, in the order in which they are asked.
        must_be_timed: True if an entry counts only if its kernel was measured.
        looks_up: False to make everything anew.
    """

    zoos: ZooPath
    must_be_timed: bool = False
    looks_up: bool = True

    def load(self, request: Request) -> Loaded:
        """Return the first entry that may be used, as its kernel or as its candidates."""
        if not self.looks_up:
            return None
        reasons = []
        for store in self.zoos.stores:
            loaded = self._load_from(store, request)
            if not isinstance(loaded, Rejected):
                return loaded
            if isinstance(loaded, NotStored):
                continue
            reasons.append(loaded.reason)
            if not store.is_trusted:
                _log.warning("%s: an entry was not used: %s", source_of(store), loaded.reason)
        return Rejected("; ".join(reasons)) if reasons else None

    def _load_from(
        self, store: Store, request: Request
    ) -> StoredEntry | VerifiedCandidates | Rejected:
        entry = store.get(request.key)
        return entry if isinstance(entry, Rejected) else self._checked(entry, store, request)

    def _checked(
        self, entry: Entry, store: Store, request: Request
    ) -> StoredEntry | VerifiedCandidates | Rejected:
        if request.all_candidates:
            if entry.record is None:
                return Rejected(f"{store.root / entry.folder}: holds no µGraphs of a search")
            return examined(entry.record, request, str(store.root / entry.folder))
        if reason := obstacle(entry, request.runs_generated, self.must_be_timed):
            return Rejected(reason)
        if not store.is_trusted:
            proven = proven_again(entry)
            if isinstance(proven, Rejected):
                return Rejected(f"{store.root / entry.folder}: {proven.reason}")
            entry = proven
        return StoredEntry(entry, source_of(store))

    def store(self, outcome: Outcome) -> Rejected | None:
        """Keep an outcome in the first store that can be written."""
        if outcome.request.all_candidates and not _is_worth_keeping(outcome):
            return None
        try:
            return self.keep(outcome.best_entry)
        except CodegenError as e:
            return Rejected(f"no code can be generated for it: {e}")

    def tuned(self, target: str) -> Sequence[TunedKernels]:
        """Return the kernels of trusted stores that were measured on a target."""
        found = []
        for store in self.zoos.stores:
            for folder in store.folders_of(target) if store.is_trusted else ():
                with contextlib.suppress(OSError):  # another process may replace it
                    found.append(_tuned_in(folder, (folder / ENTRY).stat().st_mtime_ns))
        return [t for t in found if t is not None]

    def keep(self, entry: Entry) -> Rejected | None:
        """Keep an entry in the first store that can be written."""
        if entry.failed:
            return Rejected(
                "every candidate failed on this GPU, which may pass; the next call tries again"
            )
        folder = self.zoos.put(entry)
        return folder if isinstance(folder, Rejected) else None


@lru_cache(maxsize=4096)
def _tuned_in(folder: Path, written: int) -> TunedKernels | None:
    """Return the kernels of an entry, or None if it cannot be used or was never measured.

    Args:
        folder: The folder of the entry.
        written: When the entry was written, so that one that was replaced is read anew.
    """
    entry = read_entry(folder)
    if isinstance(entry, Rejected) or not entry.timings or not entry.schedules:
        return None
    if library_wins(entry):
        return None
    return TunedKernels(
        place_kernels(entry.ugraph, entry.key.next_may_launch_early), entry.schedules
    )


def _is_worth_keeping(outcome: Outcome) -> bool:
    return SearchRecord(outcome.verified.ugraphs(), outcome.report).is_finished


def source_of(store: Store) -> str:
    """Return what reports call a store."""
    names = {user_store().root: CACHE, packaged_store().root: ZOO}
    return names.get(store.root, f"zoo {store.root.name}")


def obstacle(entry: Entry, runs_generated: bool, must_be_timed: bool) -> str:
    """Return why an entry's kernel does not serve; empty if it does.

    Args:
        entry: The entry.
        runs_generated: True if its text would run, as on a GPU.
        must_be_timed: True if it counts only if it was measured.
    """
    if not entry.ugraph.is_fused:
        same_search = entry.search.get("version") == versions.search_version()
        return "" if same_search else "another version of the search found nothing"
    if not runs_generated:
        return ""
    if must_be_timed and not entry.timings:
        return "it was never measured"
    return text_differs(entry)


def text_differs(entry: Entry) -> str:
    """Return why an entry's text must not run; empty if the same text is generated here.

    The texts differ if the entry was edited, if another version of this package made it, or if its
    kernel is not safe with the installed Triton.
    """
    try:
        source = entry.generate().source
    except CodegenError as e:
        return f"no kernel can be generated from its µGraph here ({e})"
    if source != entry.kernel:
        return (
            "its kernel.py is not what is generated here from its µGraph; "
            "it was edited, or is of another version"
        )
    return ""


# -- proving again ------------------------------------------------------------------------------

_proven: dict[str, Entry | Rejected] = {}
_proven_lock = threading.Lock()


def proven_again(entry: Entry) -> Entry | Rejected:
    """Prove an entry's µGraph again and check its numbers; remember the verdict in this process.

    Returns:
        The entry with the bound of the new proof, or why it must not run.
    """
    if not entry.ugraph.is_fused:
        return entry  # the program itself runs
    ugraph = json_format.ugraph_to_dict(entry.ugraph)
    schedules = [s.to_dict() for s in entry.schedules]
    digest = json_format.digest([ugraph, schedules])
    with _proven_lock:
        if digest not in _proven:
            _proven[digest] = _prove_entry(entry)
        verdict = _proven[digest]
    if isinstance(verdict, Rejected):
        return verdict
    return replace(entry, error_bound=verdict.error_bound)


def _prove_entry(entry: Entry) -> Entry | Rejected:
    candidate = _examined(entry.ugraph, 0, {})
    if isinstance(candidate, Rejected):
        return Rejected(f"its µGraph was not proven again ({candidate.reason})")
    for schedule in entry.schedules:
        verdict = candidate.tensor_cores if schedule.mma else candidate.scalar
        if isinstance(verdict, Rejected):
            return Rejected(f"its schedule rounds worse than torch ({verdict.reason})")
    return replace(entry, error_bound=candidate.error_bound)


def examined(record: SearchRecord, request: Request, where: str) -> VerifiedCandidates | Rejected:
    """Prove the µGraphs of a record again and check their numbers.

    A µGraph that is not proven is left out with a note.

    Args:
        record: What was loaded.
        request: What it is for.
        where: The file, for messages.

    Returns:
        The candidates with the report of their search, or why none is left.
    """
    candidates: list[Candidate] = []
    notes = list(record.report.notes)
    checks: dict[object, NumericCheck] = {}
    for number, ugraph in enumerate(record.for_program(request.program).ugraphs):
        candidate = _examined(ugraph, request.seed, checks)
        if isinstance(candidate, Candidate):
            candidates.append(candidate)
        else:
            notes.append(
                f"{where}: µGraph {number} was left out, it was not proven again "
                f"({candidate.reason})"
            )
    if record.ugraphs and not candidates:
        return Rejected("; ".join(notes))
    report = replace(
        record.report,
        found=len(candidates),
        error_bound=max((c.error_bound for c in candidates), default=None),
        notes=tuple(notes),
    )
    return VerifiedCandidates(tuple(candidates), report)


def _examined(
    ugraph: UGraph, seed: int, checks: dict[object, NumericCheck]
) -> Candidate | Rejected:
    try:
        return examine(ugraph, seed=seed, checks=checks)
    except MirageError as e:
        return Rejected(str(e))
