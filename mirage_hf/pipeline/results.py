"""Look up the results of earlier calls, and store new ones.

Every store is a kernel zoo: the user's cache, the packaged zoo, and those that the user names. An
entry is used only if its files have the digests that it names, its key is that of the program asked
for, and `trust` accepts its kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mirage_hf import errors
from mirage_hf.errors import CodegenError, Rejected
from mirage_hf.pipeline import trust, tuned_kernels, versions
from mirage_hf.pipeline.outcome import Outcome
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.reuse import search_to_keep
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates
from mirage_hf.search.search_journal import SearchJournal
from mirage_hf.tune.relatives import Tuned
from mirage_hf.zoo import known_search
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.known_search import KnownSearch
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

    def tuned(self, target: str) -> Sequence[Tuned]:
        """Return the kernels that were measured on a target and are faster than the library."""

    def known_search(self, request: Request) -> KnownSearch | None:
        """Return a search for other sizes of the request's program, or None."""

    def keep_search(self, outcome: Outcome) -> None:
        """Keep what was searched, for programs of other sizes."""


class NoResults:
    """Looks up nothing and keeps nothing."""

    def load(self, request: Request) -> Loaded:
        """Return None."""
        return None

    def store(self, outcome: Outcome) -> Rejected | None:
        """Do nothing."""
        return None

    def tuned(self, target: str) -> Sequence[Tuned]:
        """Return nothing."""
        return ()

    def known_search(self, request: Request) -> KnownSearch | None:
        """Return None."""
        return None

    def keep_search(self, outcome: Outcome) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class ZooResults:
    """Results in kernel zoos.

    Attributes:
        zoos: The stores, in the order in which they are asked.
        must_be_timed: True if an entry counts only if its kernel was measured.
        looks_up: False to make everything anew.
        device: The GPU that compiled kernels of entries are checked on. None: the request's.
    """

    zoos: ZooPath
    must_be_timed: bool = False
    looks_up: bool = True
    device: torch.device | None = None

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
            if not store.is_trusted and not store.writable:
                _log.warning("%s: an entry was not used: %s", source_of(store), loaded.reason)
        return Rejected("; ".join(reasons)) if reasons else None

    def holds(self, request: Request) -> bool:
        """Return whether a store has an entry for a request. It may turn out to be of no use."""
        if not self.looks_up:
            return False
        entries = (store.get(request.key) for store in self.zoos.stores)
        return any(
            not isinstance(entry, Rejected)
            and not trust.obstacle(entry, request.runs_generated, self.must_be_timed)
            for entry in entries
        )

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
            return trust.examined(entry.record, request, str(store.root / entry.folder))
        if reason := trust.obstacle(entry, request.runs_generated, self.must_be_timed):
            return Rejected(f"{store.root / entry.folder}: {reason}")
        accepted = trust.accepted_here(entry, store, self.device or request.device)
        if isinstance(accepted, Rejected):
            return accepted
        return StoredEntry(accepted, source_of(store))

    def store(self, outcome: Outcome) -> Rejected | None:
        """Keep an outcome in the first store that can be written."""
        if outcome.request.all_candidates and not _is_worth_keeping(outcome):
            return None
        try:
            return self.keep(outcome.best_entry)
        except CodegenError as e:
            return Rejected(f"no code can be generated for it: {e}")

    def tuned(self, target: str) -> Sequence[Tuned]:
        """Return the kernels of the packaged zoo and the user's cache, measured on a target.

        Only their schedules are taken, for µGraphs that this process proves.
        """
        own = [store for store in self.zoos.stores if store.is_trusted or store.writable]
        return [kernels for store in own for kernels in tuned_kernels.of_store(store, target)]

    def known_search(self, request: Request) -> KnownSearch | None:
        """Return a search of the packaged zoo or the user's cache, made for other sizes.

        Searches in the cache count if this version made them. Those that are packaged always count.
        """
        if not (self.looks_up and _is_for_one_kernel(request)):
            return None
        packaged = [store.root for store in self.zoos.stores if store.is_trusted]
        own = [store.root for store in self.zoos.stores if store.writable]
        return known_search.nearest(
            own, request.program, versions.search_version()
        ) or known_search.nearest(packaged, request.program)

    def keep_search(self, outcome: Outcome) -> None:
        """Keep what was searched, for programs of other sizes. If that fails, nothing is lost."""
        request = outcome.request
        store = next((store for store in self.zoos.stores if store.writable), None)
        search = search_to_keep(outcome)
        if store is None or search is None or not _is_for_one_kernel(request):
            return
        try:
            search.write(store.root)
        except OSError as e:
            _log.info("a search was not kept: %s", errors.described(e))

    def keep(self, entry: Entry) -> Rejected | None:
        """Keep an entry in the first store that can be written."""
        if entry.failed:
            return Rejected(
                "every candidate failed on this GPU, which may pass; the next call tries again"
            )
        folder = self.zoos.put(entry)
        if isinstance(folder, Rejected):
            return folder
        trust.remember(entry)
        return None


def _is_for_one_kernel(request: Request) -> bool:
    """Return whether a request is for one generated kernel, of which only the best is wanted."""
    return request.runs_generated and not request.all_candidates


def _is_worth_keeping(outcome: Outcome) -> bool:
    return SearchRecord(outcome.verified.ugraphs(), outcome.report).is_finished


def source_of(store: Store) -> str:
    """Return what reports call a store."""
    names = {user_store().root: CACHE, packaged_store().root: ZOO}
    return names.get(store.root, f"zoo {store.root.name}")
