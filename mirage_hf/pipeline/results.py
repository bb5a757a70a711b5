"""Results of searches that were already made: in this process's memory, and as checkpoints in the user's cache.

A key holds the program, every option that decides what is found, the package's version, and the text of the search itself, so
a change to any of them is a miss. What is read from disk is proven again before it is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mirage_hf.errors import MirageError, Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.pipeline import checkpoint
from mirage_hf.pipeline.checkpoint import CheckpointJournal, Kept
from mirage_hf.settings import settings
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.verdict import Accepted

MOST_IN_MEMORY, MOST_ON_DISK = 128, 1024
LOCK_SECONDS = 10.0
#: Files of the package whose text decides what is found and accepted.
_DECIDING = (
    "ops/*.py",
    "graph/*.py",
    "search/*.py",
    "verify/*.py",
    "pipeline/search_and_verify.py",
    "pipeline/windows.py",
)


@cache
def package_version() -> str:
    try:
        return metadata.version("mirage_hf")
    except metadata.PackageNotFoundError:
        return "unknown"


@cache
def search_version() -> str:
    """A digest of the compiled core and of the Python around it: another build is another search."""
    package = Path(__file__).resolve().parent.parent
    files = sorted(f for pattern in _DECIDING for f in package.glob(pattern))
    core = importlib.util.find_spec(
        "mirage_hf._core"
    )  # found, not imported: search/engine.py is its only door
    found = hashlib.sha256()
    for f in [*files, *([Path(core.origin)] if core and core.origin else [])]:
        found.update(f.name.encode() + b"\0" + f.read_bytes() + b"\0")
    return found.hexdigest()


def key_of(identity: str) -> str:
    """The key of a result: what it is for (checkpoint.identity), made by which version."""
    return json_format.digest(
        {"identity": identity, "package": package_version(), "search": search_version()}
    )


class Memory:
    """The results used last, at most `most`; safe among threads."""

    def __init__(self, most: int = MOST_IN_MEMORY):
        self._most, self._lock = most, threading.Lock()
        self._results: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """The result, or None."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def put(self, key: Hashable, result: Any) -> None:
        with self._lock:
            self._results[key] = result
            self._results.move_to_end(key)
            while len(self._results) > self._most:
                self._results.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._results.clear()


def folder() -> Path:
    """Where results are kept on disk."""
    return settings().cache_dir / "searches"


def load(key: str, graph: KernelGraph, seed: int) -> Kept | Rejected | None:
    """Return what is kept on disk for `key` and proven again, why it cannot be used, or None where there is nothing."""
    path = folder() / f"{key}.json"
    try:
        if not path.exists():
            return None
    except OSError as e:  # a folder on the way that may not be entered
        return Rejected(f"{path.parent} cannot be read ({e.strerror})")
    found = checkpoint.read(path, graph, key)
    if isinstance(found, CheckpointJournal):
        found = Rejected("holds a search that did not end")
    if isinstance(found, Rejected):
        return Rejected(f"{path}: {found.reason}")
    proven, bounds, notes = [], [], list(found.report.notes)
    for n, u in enumerate(found.ugraphs):
        try:
            verdict = prove(u, seed=seed)
        except MirageError as e:
            verdict = Rejected(str(e))
        if isinstance(verdict, Accepted):
            proven.append(u)
            bounds.append(verdict.bound)
        else:
            notes.append(
                f"{path}: µGraph {n} was left out, it was not proven again ({verdict.reason})"
            )
    if not proven:
        return Rejected("; ".join(notes) or f"{path}: holds no µGraph")
    return Kept(
        tuple(proven),
        replace(found.report, found=len(proven), error_bound=max(bounds), notes=tuple(notes)),
    )


def store(key: str, kept: Kept) -> Rejected | None:
    """Keep a result on disk, the oldest ones giving way. Returns why it could not be kept."""
    root = folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".lock", timeout=LOCK_SECONDS):
            for partial in root.glob("*.json.*"):  # of a process that was killed while it wrote
                partial.unlink(missing_ok=True)
            checkpoint.write(root / f"{key}.json", kept, key)
            files = sorted(root.glob("*.json"), key=os.path.getmtime)
            for f in files[:-MOST_ON_DISK]:
                f.unlink(missing_ok=True)
    except Timeout:
        return Rejected(
            f"{root} has been locked by another process for {LOCK_SECONDS:.0f} s; the result was not kept"
        )
    except (OSError, NotImplementedError) as e:  # the second from a file system without locks
        return Rejected(
            f"{root} cannot be written ({getattr(e, 'strerror', e)}); the result was not kept, set MIRAGE_HF_CACHE to a folder "
            "that can"
        )
    except (ValueError, TypeError) as e:
        return Rejected(f"the result cannot be written as JSON ({e}) and was not kept")
    return None
