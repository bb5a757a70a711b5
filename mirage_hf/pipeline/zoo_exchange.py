"""Verify the entries of a zoo on this machine, and merge zoos.

Only entries that pass every check are merged. Their files are written anew from what was read, so
no file of somebody else is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import torch

from mirage_hf.errors import Rejected
from mirage_hf.pipeline import trust
from mirage_hf.pipeline.outcome import CHAINED, LIBRARY, OURS
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import target_of
from mirage_hf.zoo.store import Store


def verified(store: Store) -> Iterator[tuple[Path, Entry | Rejected]]:
    """Yield every folder of a zoo with its entry, or why the entry must not run here.

    Texts are compared, µGraphs are proven, and kernels for the GPU of this machine are compiled
    and checked.
    """
    for folder, entry in store.verify():
        yield folder, entry if isinstance(entry, Rejected) else verified_entry(entry, folder, store)


def verified_entry(entry: Entry, folder: Path, store: Store) -> Entry | Rejected:
    """Return an entry that was read from a folder, or why it must not run here."""
    if folder != store.root / entry.folder:
        return Rejected(f"{folder}: lies in another folder than {entry.folder}, so it is not found")
    if reason := trust.text_differs(entry):
        return Rejected(f"{folder}: {reason}")
    device = torch.device("cuda") if torch.cuda.is_available() else None
    if device is not None and entry.key.target != target_of(device):
        device = None
    return trust.accepted_here(entry, store, device)


class Merged(str, Enum):
    """What became of an entry when its zoo was merged into another."""

    ADDED = "added"
    #: It took the place of one that was not measured, or slower.
    REPLACED = "replaced"
    #: The other zoo has one that is as fast or faster.
    KEPT = "kept"
    REJECTED = "rejected"


def merge(
    source: Store, destination: Store, target: str | None = None, rival: Store | None = None
) -> Iterator[tuple[Path, Merged, str]]:
    """Merge a zoo into another. Of two entries with one key, keep the better measured.

    Args:
        source: The zoo to read. Its entries are verified first.
        destination: The zoo to write.
        target: Take entries for this target only. None: for all.
        rival: A third zoo. An entry is left out if this zoo has one that is as fast or faster.

    Yields:
        Each entry's folder, what became of it, and the reason if it was rejected.
    """
    for folder, entry in verified(source):
        if target is not None and folder.name != target:
            continue
        if isinstance(entry, Rejected):
            yield folder, Merged.REJECTED, entry.reason
            continue
        present = destination.get(entry.key)
        rivals = [present, *([rival.get(entry.key)] if rival else [])]
        if any(isinstance(r, Entry) and not is_better(entry, r) for r in rivals):
            yield folder, Merged.KEPT, ""
            continue
        written = destination.put(entry)
        if isinstance(written, Rejected):
            yield folder, Merged.REJECTED, written.reason
        else:
            yield folder, Merged.REPLACED if isinstance(present, Entry) else Merged.ADDED, ""


def is_better(new: Entry, present: Entry) -> bool:
    """Return whether a new entry is better measured than one with the same key.

    Times of one kind of GPU are compared in µs. Otherwise each is compared with the library path
    that was measured beside it.
    """
    times, present_times = ({t.name: t.median_us for t in e.timings} for e in (new, present))
    if not new.ugraph.is_fused or OURS not in times:
        return False
    if not present.ugraph.is_fused or OURS not in present_times:
        return True
    names = (OURS + CHAINED, LIBRARY + CHAINED)
    is_chained = all(name in t for name in names for t in (times, present_times))
    ours, library = names if is_chained else (OURS, LIBRARY)
    if new.machine.get("gpu") == present.machine.get("gpu"):
        return times[ours] < present_times[ours]
    if library not in times or library not in present_times:
        return False
    return times[ours] / times[library] < present_times[ours] / present_times[library]
