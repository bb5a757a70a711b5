"""Kernel zoos on disk, and the order in which they are asked. Writes are atomic and safe among processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.settings import settings
from mirage_hf.zoo.entry import Entry, read_entry
from mirage_hf.zoo.key import Key

_PARTIAL = ".partial-"
LOCK_SECONDS = 30.0


@dataclass(frozen=True)
class Store:
    """A folder of entries: <pattern>/<shape>-<dtype>-<key>/<target>/. Entries that do not check are skipped, never run."""

    root: Path
    writable: bool = False

    def get(self, key: Key) -> Entry | Rejected:
        """Return the entry for `key`, or why there is none."""
        return self.find(key.digest, key.target)

    def find(self, digest: str, target: str = "*") -> Entry | Rejected:
        """Return the entry whose key has `digest`, or why there is none. `target`, where it is known, narrows the look-up."""
        reasons = []
        try:
            folders = self._folders(f"*/*-{digest[:8]}/{target}")
        except OSError as e:  # a folder on the way that may not be entered
            return Rejected(f"{self.root} cannot be read ({e.strerror})")
        for folder in folders:
            found = read_entry(folder)
            if isinstance(found, Rejected) and folder.exists():
                found = read_entry(folder)  # another process may have replaced it while it was read
            if isinstance(found, Entry) and found.key.digest == digest:
                return found
            reasons.append(
                found.reason if isinstance(found, Rejected) else f"{folder}: is for another program"
            )
        return Rejected("; ".join(reasons) or f"not in {self.root}")

    def _folders(self, pattern: str) -> list[Path]:
        """Those that fit, none where there is no root. Errors: OSError where the root may not be read, over which `glob` passes since
        Python 3.13."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root):
            pass
        return sorted(self.root.glob(pattern))

    def put(self, entry: Entry) -> Path | Rejected:
        """Write `entry` in place of an earlier one with its key. Returns its folder, or why it could not be written."""
        if not self.writable:
            return Rejected(f"{self.root} is read-only")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / ".lock", timeout=LOCK_SECONDS):
                return self._replace(entry)
        except Timeout:
            return Rejected(
                f"{self.root} has been locked by another process for {LOCK_SECONDS:.0f} s; end it, or set MIRAGE_HF_CACHE"
            )
        except (OSError, NotImplementedError) as e:  # the second from a file system without locks
            return Rejected(
                f"{self.root} cannot be written ({getattr(e, 'strerror', e)}); set MIRAGE_HF_CACHE to a folder that can"
            )

    def _replace(self, entry: Entry) -> Path:
        """Write aside, then rename: readers see the old entry, none, or the new one. Called with the lock held."""
        for leftover in self.root.glob(f"{_PARTIAL}*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.root))
        new, old, folder = aside / "new", aside / "old", self.root / entry.folder
        new.mkdir()
        for name, text in entry.files.items():
            (new / name).write_text(text, encoding="utf-8", newline="")
        for i, earlier in enumerate(
            self.root.glob(f"*/*-{entry.key.digest[:8]}/{entry.key.target}")
        ):
            os.replace(earlier, old.with_suffix(f".{i}"))
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, folder)
        shutil.rmtree(aside, ignore_errors=True)
        return folder

    def entries(self) -> Iterator[Entry]:
        """The entries that check, in the order of their folders."""
        return (found for _, found in self.verify() if isinstance(found, Entry))

    def verify(self) -> Iterator[tuple[Path, Entry | Rejected]]:
        """Every folder that holds or should hold an entry, with the entry or what is wrong with it."""
        try:
            folders = self._folders("[!.]*/*/*")
        except OSError as e:
            yield self.root, Rejected(f"{self.root} cannot be read ({e.strerror})")
            return
        for folder in folders:
            if folder.is_dir() and folder.name != "__pycache__":
                yield folder, read_entry(folder)


@dataclass(frozen=True)
class Chain:
    """Stores asked in order. What is new goes into the first that can be written."""

    stores: tuple[Store, ...]

    def get(self, key: Key) -> Entry | Rejected:
        """Return the first entry found for `key`, or every store's reason."""
        return self.find(key.digest, key.target)

    def find(self, digest: str, target: str = "*") -> Entry | Rejected:
        """Return the first entry found whose key has `digest`, or every store's reason."""
        reasons = []
        for store in self.stores:
            found = store.find(digest, target)
            if isinstance(found, Entry):
                return found
            reasons.append(found.reason)
        return Rejected("; ".join(reasons) or "no zoo is in use")

    def put(self, entry: Entry) -> Path | Rejected:
        """Write `entry` into the first writable store. Returns its folder, or why it was not kept."""
        for store in self.stores:
            if store.writable:
                return store.put(entry)
        return Rejected("no zoo in use can be written")


def chain(zoo: str | Path | Sequence[str | Path] | None = None) -> Chain:
    """Return the stores in force: the user's cache, the packaged zoo, then those that the user names (folders or Hub repos)."""
    named = [zoo] if isinstance(zoo, (str, Path)) else list(zoo or [])
    return Chain((user_store(), packaged_store(), *(named_store(z) for z in named)))


def user_store() -> Store:
    """The cache in which this user's searched and tuned kernels are kept."""
    return Store(settings().cache_dir / "zoo", writable=True)


def packaged_store() -> Store:
    """The zoo that comes with the package: inside it once installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "kernel_zoo"
    return Store(installed if installed.is_dir() else package.parent / "kernel_zoo")


def named_store(zoo: str | Path) -> Store:
    """Return the zoo in a folder, or in a Hub repo "user/name" or "user/name@revision", fetched into the Hub's cache.

    A zoo holds code that runs: name only those you trust. Errors: ZooError when it is neither or cannot be fetched.
    """
    folder = Path(zoo).expanduser()
    if folder.is_dir():
        return Store(folder)
    repo, _, revision = str(zoo).removeprefix("hf://").partition("@")
    if repo.count("/") != 1 or repo.startswith((".", "/", "~")):
        raise errors.ZooError(
            f'zoo {str(zoo)!r} is neither a folder nor a Hub repo; give a folder that exists, or "user/name"'
        )
    try:
        return Store(_fetched(repo, revision))
    except Exception as e:  # the Hub's client raises its own, the HTTP library's and OSError
        raise errors.ZooError(
            f"zoo {str(zoo)!r} could not be fetched from the Hub ({type(e).__name__}: {str(e).splitlines()[0][:200]}); "
            "check the name and the network, or give a local copy's folder"
        ) from e


@cache
def _fetched(repo: str, revision: str) -> Path:
    """A repo's zoo in the Hub's cache: the Hub is asked once in a process, not for every kernel."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo, revision=revision or None, allow_patterns=["*/*/*/*.json", "*/*/*/kernel.py"]
        )
    )
