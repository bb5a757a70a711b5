"""Read files of others with limits, and write files atomically.

Only a regular file of a limited size is read as data. A FIFO or a device would block or never end.
A written file is replaced at once or not at all. Devices and FIFOs are written to, as a shell does.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import stat
from pathlib import Path

_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)

#: Folders whose files stand for streams and devices.
_STREAMS = (Path("/dev"), Path("/proc"))


def packaged_zoo() -> Path:
    """Return the folder of the zoo that comes with the package.

    It is inside the package once installed, and next to it in a checkout.
    """
    package = Path(__file__).resolve().parent
    installed = package / "kernel_zoo"
    return installed if installed.is_dir() else package.parent / "kernel_zoo"


def read_bytes(path: Path, most: int, inside: Path | None = None) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        most: The most bytes that it may have.
        inside: The folder that the file must lie in after all links are followed. None: anywhere.

    Raises:
        OSError: The file is of another kind, too large, outside of the folder, or cannot be read.
    """
    if inside is not None and not _is_inside(path, inside):
        raise OSError(errno.EPERM, f"it is a link that leads out of {inside}", str(path))
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening some devices changes them
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | _NO_WAIT)
    with os.fdopen(handle, "rb") as f:
        if not stat.S_ISREG(os.fstat(handle).st_mode):  # it was replaced meanwhile
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = f.read(most + 1)  # the size that a file claims may be wrong
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path lies in a folder after all links are followed."""
    if path.is_relative_to(folder) and ".." not in path.parts:
        below = itertools.takewhile(lambda p: p != folder, (path, *path.parents))
        if not any(p.is_symlink() for p in below):  # then there is nothing to follow
            return True
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except RuntimeError:  # Python up to 3.12 raises it for links that lead in a circle
        return False


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, atomically: other processes see all of it or the old file.

    A link stays, and the file that it leads to is replaced. A second name of the old file (a hard
    link) keeps the old content. Devices and FIFOs are written to.

    Raises:
        OSError: The file cannot be written.
    """
    content = text.encode("utf-8")
    try:
        found = os.stat(path)
    except FileNotFoundError:
        _replace(path, Path(os.path.realpath(path)), content, None)
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, name a file", str(path))
    if stat.S_ISBLK(found.st_mode):
        raise OSError(errno.EINVAL, "it is a disk, name a file", str(path))
    if not stat.S_ISREG(found.st_mode) or _is_stream(path):
        _write_into(path, content)
        return
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    _replace(path, Path(os.path.realpath(path)), content, stat.S_IMODE(found.st_mode))


def _is_stream(path: Path) -> bool:
    """Return whether a file stands for a stream, as /dev/stdout does."""
    folder = path.absolute().parent.resolve()
    in_memory = folder.is_relative_to("/dev/shm")  # ordinary files
    return not in_memory and any(folder.is_relative_to(streams) for streams in _STREAMS)


def _write_into(path: Path, content: bytes) -> None:
    """Write into a device or FIFO. A FIFO that no process reads is an error and blocks nobody."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | _NO_WAIT)
    if _NO_WAIT:
        os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as f:
        f.write(content)


def _replace(path: Path, target: Path, content: bytes, mode: int | None) -> None:
    """Write a new file beside `target`, and rename it to `target`.

    Args:
        path: The path that the user named, for errors.
        target: The file that it leads to.
        content: What the file will hold.
        mode: The permissions of the file. None: those of a new file.
    """
    partial = target.with_name(f".partial-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(partial, flags, 0o666)
    except OSError as e:  # it names the temporary file, which the user does not know
        raise type(e)(e.errno, e.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(content)
        if mode is not None:
            os.chmod(partial, mode)
        os.replace(partial, target)
    except OSError as e:
        os.unlink(partial)
        raise type(e)(e.errno, e.strerror, str(path)) from None
    except BaseException:
        os.unlink(partial)
        raise
