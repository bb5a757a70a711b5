"""Find tuned kernels in stores. Their schedules may serve kernels that were never measured.

The packaged zoo has an index of the shapes of its kernels, so only entries whose schedules are
wanted are read. Of other stores every entry is read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path

from mirage_hf.codegen.placement import place_kernels
from mirage_hf.errors import Rejected
from mirage_hf.pipeline.outcome import library_wins
from mirage_hf.tune.relatives import Shape, Tuned, TunedKernels
from mirage_hf.tune.schedule_cost import estimated_us
from mirage_hf.zoo.entry import ENTRY
from mirage_hf.zoo.entry_reader import read_entry
from mirage_hf.zoo.store import Store

#: The index of the packaged zoo, for each target and each folder of an entry the shapes of its ops.
#: `scripts/index_zoo.py` writes it.
INDEX = "tuned.json"


@dataclass(frozen=True)
class StoredKernels:
    """Tuned kernels of an entry, which is read when they are wanted."""

    folder: Path
    shapes: tuple[Shape, ...]

    def read(self) -> TunedKernels | None:
        """Return the kernels, or None if the entry cannot be used or has other shapes."""
        kernels = _read(self.folder)
        return kernels if kernels is not None and kernels.shapes == self.shapes else None


def of_store(store: Store, target: str) -> Sequence[Tuned]:
    """Return the kernels of a store that were measured on a target as faster than the library."""
    if store.is_trusted:
        # Without an index, or with a damaged one, all entries are read.
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            file = store.root / INDEX
            return _indexed(file, file.stat().st_mtime_ns).get(target, ())
    found = map(_read, store.folders_of(target))
    return [kernels for kernels in found if kernels is not None]


def index_of(root: Path) -> dict[str, dict[str, list[list[object]]]]:
    """Return the index of a zoo, as `INDEX` holds it."""
    index: dict[str, dict[str, list[list[object]]]] = {}
    for folder in sorted(file.parent for file in root.glob(f"[!.]*/*/*/{ENTRY}")):
        kernels = _read(folder)
        if kernels is not None:
            shapes = [list(astuple(shape)) for shape in kernels.shapes]
            index.setdefault(folder.name, {})[folder.relative_to(root).as_posix()] = shapes
    return index


@lru_cache(maxsize=4)
def _indexed(file: Path, written: int) -> dict[str, tuple[StoredKernels, ...]]:
    """Return what an index holds, by target.

    Args:
        file: The index.
        written: When it was written, so that one that was replaced is read anew.
    """
    return {
        target: tuple(
            StoredKernels(
                file.parent / folder,
                tuple(Shape(structure, tuple(sizes), vectors) for structure, sizes, vectors in ops),
            )
            for folder, ops in folders.items()
        )
        for target, folders in json.loads(file.read_text(encoding="utf-8")).items()
    }


def _read(folder: Path) -> TunedKernels | None:
    """Return the kernels of an entry, or None if it cannot be used or was never measured."""
    try:
        return _read_version(folder, (folder / ENTRY).stat().st_mtime_ns)
    except OSError:  # another process may replace it
        return None


@lru_cache(maxsize=4096)
def _read_version(folder: Path, written: int) -> TunedKernels | None:
    """Return the kernels of an entry, as `_read`.

    Args:
        folder: The folder of the entry.
        written: When the entry was written, so that one that was replaced is read anew.
    """
    entry = read_entry(folder, whole=False)
    if isinstance(entry, Rejected) or not entry.timings or not entry.schedules:
        return None
    if library_wins(entry) or any(s.cuda for s in entry.schedules):
        return None
    try:
        ops = place_kernels(entry.ugraph, entry.key.next_may_launch_early)
        for op, schedule in zip(ops, entry.schedules, strict=True):
            estimated_us(op, schedule)
    except Exception:  # whatever an edited schedule leads to
        return None
    return TunedKernels(ops, entry.schedules)
