"""Kernel zoos on disk, and the order in which they are asked.

Writes are atomic, and several processes may write at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from mirage_hf import errors, files
from mirage_hf.errors import Rejected
from mirage_hf.settings import settings
from mirage_hf.zoo import hub
from mirage_hf.zoo.entry import ENTRY, MOST_BYTES, Entry
from mirage_hf.zoo.entry_reader import read_entry
from mirage_hf.zoo.key import ANY_TARGET, Key

_PARTIAL = ".partial-"
LOCK_SECONDS = 30.0

#: The most searches of `superoptimize()` that a store keeps. The oldest are dropped first. Their
#: entries are larger than kernels of `optimize()`, which are never dropped.
MOST_SEARCHES = 1024


@dataclass(frozen=True)
class NotStored(Rejected):
    """No entry is stored under the key. Every other `Rejected` is about an entry that is there."""


@dataclass(frozen=True)
class Store:
    """A folder of entries, <pattern>/<shape>-<dtype>-<key>/<target>/.

    Entries that fail a check are skipped with a reason and never run.

    Attributes:
        root: The folder.
        writable: True if new entries may go here.
        is_trusted: True for the packaged zoo only, which is part of the installed package. µGraphs
            of all other stores are proven on this machine before they run.
        links_inside: The folder that links of files may not lead out of. None: the root.
    """

    root: Path
    writable: bool = False
    is_trusted: bool = False
    links_inside: Path | None = None

    def get(self, key: Key) -> Entry | Rejected:
        """Return the entry for `key`, or why there is none."""
        return self.find(key.digest, key.target)

    def find(self, digest: str, target: str = "*") -> Entry | Rejected:
        """Return the entry whose key has `digest`, or why there is none.

        Args:
            digest: `Key.digest`.
            target: The key's target if it is known, which narrows the look-up.
        """
        try:
            folders = self._folders(f"*/*-{digest[:8]}/{target}")
        except OSError as e:  # a folder on the way that may not be entered
            return Rejected(f"{self.root} cannot be read ({e.strerror})")
        reasons = []
        for folder in folders:
            entry = read_entry(folder, self.links_inside)
            if isinstance(entry, Rejected) and folder.exists():
                # another process may have replaced it meanwhile
                entry = read_entry(folder, self.links_inside)
            if isinstance(entry, Rejected):
                reasons.append(entry.reason)
            elif entry.key.digest == digest:
                return entry
            else:
                reasons.append(f"{folder}: is for another program")
        return Rejected("; ".join(reasons)) if reasons else NotStored(f"not in {self.root}")

    def _folders(self, pattern: str) -> list[Path]:
        """Return the folders that match a pattern, or none if there is no root.

        Raises:
            OSError: The root may not be read. `glob` alone ignores that since Python 3.13.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root):
            pass
        return sorted(self.root.glob(pattern))

    def put(self, entry: Entry) -> Path | Rejected:
        """Write `entry` in place of an earlier one with its key.

        Returns:
            The folder of the entry, or why it could not be written.
        """
        if not self.writable:
            return Rejected(f"{self.root} is read-only")
        try:
            for name, text in entry.files.items():
                if len(text.encode("utf-8")) > MOST_BYTES[name]:
                    return Rejected(f"its {name} has more than {MOST_BYTES[name]:,} bytes")
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / ".lock", timeout=LOCK_SECONDS):
                folder = self._replace(entry)
                if entry.key.target == ANY_TARGET:
                    self._drop_oldest_searches()
                return folder
        except Timeout:
            return Rejected(
                f"{self.root} has been locked by another process for {LOCK_SECONDS:.0f} s; "
                "end it, or set MIRAGE_HF_CACHE"
            )
        except (OSError, NotImplementedError) as e:  # the second from a file system without locks
            return Rejected(
                f"{self.root} cannot be written ({getattr(e, 'strerror', e)}); "
                "set MIRAGE_HF_CACHE to a folder that can"
            )
        except (ValueError, TypeError) as e:
            return Rejected(f"the result cannot be written as JSON ({e})")

    def _replace(self, entry: Entry) -> Path:
        """Write the entry to a temporary folder, then rename it. The caller holds the lock.

        Readers see the old entry, none, or the new one.
        """
        for leftover in self.root.glob(f"{_PARTIAL}*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.root))
        new, old, folder = temporary / "new", temporary / "old", self.root / entry.folder
        new.mkdir()
        for name, text in entry.files.items():
            (new / name).write_text(text, encoding="utf-8", newline="")
        earlier = self.root.glob(f"*/*-{entry.key.digest[:8]}/{entry.key.target}")
        for number, earlier_folder in enumerate(list(earlier)):
            os.replace(earlier_folder, old.with_suffix(f".{number}"))
        if not folder.resolve().is_relative_to(self.root.resolve()):
            raise OSError(errno.EPERM, f"{folder} is a link that leads out of it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, folder)
        shutil.rmtree(temporary, ignore_errors=True)
        return folder

    def _drop_oldest_searches(self) -> None:
        folders = sorted(self.root.glob(f"*/*/{ANY_TARGET}"), key=os.path.getmtime)
        for folder in folders[:-MOST_SEARCHES]:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # other targets of the program are there
                folder.parent.rmdir()

    def entries(self) -> Iterator[Entry]:
        """Yield the entries that pass every check, in the order of their folders."""
        return (entry for _, entry in self.verify() if isinstance(entry, Entry))

    def folders_of(self, target: str) -> list[Path]:
        """Return the folders of the entries for a target; none if the root cannot be read."""
        with contextlib.suppress(OSError):
            return self._folders(f"[!.]*/*/{target}")
        return []

    def verify(self) -> Iterator[tuple[Path, Entry | Rejected]]:
        """Yield every folder that should hold an entry, with the entry or what is wrong with it."""
        try:
            folders = self._folders("[!.]*/*/*")
        except OSError as e:
            yield self.root, Rejected(f"{self.root} cannot be read ({e.strerror})")
            return
        for folder in folders:
            if folder.is_dir() and folder.name != "__pycache__":
                yield folder, read_entry(folder, self.links_inside)

    def misplaced(self) -> str:
        """Return why the root is not a zoo with entries; empty if it is one.

        The root may be a folder inside a zoo, a folder that holds a zoo, or neither.
        """
        inside = [
            *self.root.glob(ENTRY),
            *self.root.glob(f"*/{ENTRY}"),
            *self.root.glob(f"*/*/{ENTRY}"),
        ]
        if inside:
            levels = len(inside[0].relative_to(self.root).parts)
            zoo = self.root.resolve().parents[3 - levels]
            return f"{self.root} is a folder inside a zoo; name the zoo itself, {zoo}"
        if not any(self.root.glob(f"*/*/*/{ENTRY}")):
            below = next(self.root.glob(f"*/*/*/*/{ENTRY}"), None)
            if below is not None:
                return f"{self.root} holds a zoo; name the zoo itself, {below.parents[3]}"
            return (
                f"{self.root} holds no entry of a kernel zoo; name the folder above "
                "<pattern>/<shape>-<dtype>-<key>/<target>/entry.json"
            )
        return ""


@dataclass(frozen=True)
class ZooPath:
    """Stores that are asked in order. A new entry goes to the first store that can be written."""

    stores: tuple[Store, ...]

    def get(self, key: Key) -> Entry | Rejected:
        """Return the first entry found for `key`, or every store's reason."""
        return self.find(key.digest, key.target)

    def find(self, digest: str, target: str = "*") -> Entry | Rejected:
        """Return the first entry found whose key has `digest`, or every store's reason."""
        reasons = []
        for store in self.stores:
            entry = store.find(digest, target)
            if isinstance(entry, Entry):
                return entry
            reasons.append(entry.reason)
        return Rejected("; ".join(reasons) or "no zoo is in use")

    def put(self, entry: Entry) -> Path | Rejected:
        """Write `entry` to the first writable store.

        Returns:
            The folder of the entry, or why it was not stored.
        """
        for store in self.stores:
            if store.writable:
                return store.put(entry)
        return Rejected("no zoo in use can be written")


def zoo_path(zoo: str | Path | Sequence[str | Path] | None = None) -> ZooPath:
    """Return the stores in force: the user's cache, the packaged zoo, then the named ones.

    Args:
        zoo: Folders or Hub repos.

    Raises:
        ZooError: A named zoo is neither a folder nor a repo that can be fetched.
    """
    named = [zoo] if isinstance(zoo, (str, Path)) else list(zoo or [])
    return ZooPath((user_store(), packaged_store(), *(named_store(z) for z in named)))


def user_store() -> Store:
    """Return the cache in which this user's searched and tuned kernels are kept."""
    return Store(settings().cache_dir / "zoo", writable=True)


def packaged_store() -> Store:
    """Return the zoo that comes with the package."""
    return Store(files.packaged_zoo(), is_trusted=True)


#: A repo of the Hub, with a revision or without.
_REPO = re.compile(r"(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(@(?P<revision>[\w./-]{1,200}))?", re.ASCII)


def named_store(zoo: str | Path) -> Store:
    """Return the zoo in a folder, or in a Hub repo "user/name" or "user/name@revision".

    A name is a folder if it exists. "hf://user/name" is always a Hub repo, and a `Path` never is. A
    Hub repo is fetched into the Hub's cache.

    Raises:
        ZooError: `zoo` is neither, or cannot be fetched.
    """
    name = str(zoo)
    if not name.strip():
        raise errors.ZooError(
            'zoo is an empty name; give a folder ("." for the current one), or "user/name"'
        )
    try:
        folder = Path(zoo).expanduser()
        is_folder = folder.is_dir()
        is_in_folder = len(folder.parts) > 1 and Path(folder.parts[0]).is_dir()
    except (OSError, RuntimeError, ValueError) as e:  # too long, a home that is not known, a NUL
        raise errors.ZooError(
            f"zoo {name[:100]!r} is no folder that can be read ({errors.described(e)[:100]}); "
            'give a folder that exists, or "user/name"'
        ) from None
    if is_folder:
        return Store(folder)
    repo = _REPO.fullmatch(name.removeprefix("hf://"))
    if repo is None or isinstance(zoo, Path) or name.startswith((".", "/", "~")):
        raise errors.ZooError(
            f"zoo {name[:100]!r} is neither a folder nor a Hub repo; "
            'give a folder that exists, or "user/name"'
        )
    if is_in_folder and not name.startswith("hf://"):
        raise errors.ZooError(
            f"zoo {name!r}: the folder {folder.parts[0]} has no {folder.parts[1]}; "
            f"give a folder that exists, or hf://{name} for the Hub repo"
        )
    root = hub.fetched(repo["repo"], repo["revision"])
    return Store(root, links_inside=hub.links_inside(root))
