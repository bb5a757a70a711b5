"""Remember which entries of zoos this machine has proven, in a file outside of all zoos.

To prove an entry again takes milliseconds to two seconds. So it is done once on a machine. The
record is sound for these reasons:

- A line names an entry by a digest of its key, µGraph and schedules, of the code that proves, of
  torch, and of the GPU and Triton that the kernel was checked with. Whatever changes, the entry is
  proven again.
- The file lies in the user's state folder, not in the cache. So copying a
  foreign zoo or cache adds no lines to it.
- The file counts only if the user owns it and only the user may write it. Who can write it anyway
  can also write the user's Python files.

A line that was cut or mixed with another one has a wrong checksum and does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
from pathlib import Path

from mirage_hf import files
from mirage_hf.settings import settings

#: The most bytes of the file, for some 40,000 entries. A longer file is started anew.
_MOST_BYTES = 1 << 22

#: Characters of a line's checksum.
_CHECKSUM = 16

_log = logging.getLogger("mirage_hf")
_lock = threading.Lock()

#: The lines that were read last: the file's path, size and time, and the bounds by digest.
_read: tuple[tuple[Path, int, int] | None, dict[str, float]] = (None, {})


def bound_of(digest: str) -> float | None:
    """Return the error bound of an entry's proof if this machine has proven it, else None."""
    with _lock:
        return _bounds().get(digest)


def add(digest: str, bound: float) -> None:
    """Remember that this machine has proven an entry. Without a folder to write, do nothing."""
    path = _path()
    with _lock:
        if digest in _bounds():
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if path.exists() and (not _is_private(path) or path.stat().st_size > _MOST_BYTES):
                path.unlink()
            # One short write at the end of a file is not mixed with that of another process.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            handle = os.open(path, flags, 0o600)
            try:
                os.write(handle, _line(digest, bound).encode("ascii"))
            finally:
                os.close(handle)
        except OSError as e:
            _log.info("%s cannot be written (%s): entries are proven in each process", path, e)


def _path() -> Path:
    return settings().state_dir / "proven"


def _line(digest: str, bound: float) -> str:
    text = f"{digest} {float(bound)!r}"
    return f"{text} {_checksum(text)}\n"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:_CHECKSUM]


def _bounds() -> dict[str, float]:
    """Return the bounds of all valid lines. The caller holds the lock."""
    global _read
    path = _path()
    try:
        found = path.lstat()
        if not _is_private(path):
            return {}
        state = (path, found.st_size, found.st_mtime_ns)
        if _read[0] != state:
            text = files.read_bytes(path, _MOST_BYTES + (1 << 16)).decode("ascii", "replace")
            _read = state, dict(filter(None, map(_parsed, text.splitlines())))
    except OSError:
        return {}
    return _read[1]


def _parsed(line: str) -> tuple[str, float] | None:
    """Return the digest and the bound of a line, or None if the line is damaged."""
    text, _, checksum = line.rpartition(" ")
    if not text.isascii() or checksum != _checksum(text):
        return None
    with contextlib.suppress(ValueError):
        digest, bound = text.split(" ")
        return digest, float(bound)
    return None


def _is_private(path: Path) -> bool:
    """Return whether the user owns a file and its folder, and only the user may write them."""
    if not hasattr(os, "geteuid"):  # on Windows, folders of users are private
        return True
    for each, is_kind in ((path, stat.S_ISREG), (path.parent, stat.S_ISDIR)):
        found = each.lstat()
        is_own = found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if not is_kind(found.st_mode) or not is_own:
            return False
    return True
